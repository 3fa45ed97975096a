"""`kda-stream verify`: what passes, what it finds, and that it finds all of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from cli.running import INDEX, SHARDS, EditConfig, Rewrite, Run
from support.checkpoints import GLM, UNEVEN
from support.checkpoints import write_checkpoint as write_sparse
from support.families import FAMILIES, write_family
from support.terminals import without_modules

from kda_stream.testing import DSA, Layout, StoredTensor, write_checkpoint


def test_a_sound_checkpoint_has_no_problem(run: Run, small: Path) -> None:
    ran = run("verify", small)
    assert ran.status == 0
    assert ran.stderr == ""
    assert ran.stdout.splitlines()[-1] == "3 shards, 6 KDA, 2 DSA, 1 MTP, no problem"
    assert "6 of 6 KDA layers hold exactly the 15 tensors" in ran.stdout


def test_a_sound_checkpoint_as_json(run: Run, small: Path) -> None:
    assert run("verify", small, "--json").json == {
        "schema_version": 1,
        "command": "verify",
        "exit_status": 0,
        "problems": [],
        "path": str(small),
        "sound": True,
        "shards": 3,
        "tensors": 355,
        "tensor_bytes": 771_484,
        "layers": {"KDA": 6, "DSA": 2, "UNKNOWN": 0, "MTP": 1},
        "geometry": {"hidden": 64, "heads": 4, "head_dim": 16, "conv_kernel": 4},
        "kda_layers_bound": 6,
        "families": {"GLM5_NEXT": 6},
        "payload": None,
        "notes": [],
    }


def test_100_gigabytes_of_payload_are_not_read(run: Run, tmp_path: Path) -> None:
    written = write_sparse(tmp_path / "sparse", geometry=GLM, layers=400, shards=40, sparse=True)
    length = sum(file.stat().st_size for file in written.folder.glob("*.safetensors"))
    assert length > 100e9
    ran = run("verify", written.folder, seconds=15)  # reading takes longer than this anywhere
    assert ran.status == 0
    assert "300 of 300 KDA layers hold exactly the 15 tensors" in ran.stdout


def test_notes_are_no_findings(run: Run, copied: Path) -> None:
    (copied / "extra.safetensors").write_bytes(b"")
    ran = run("verify", copied)
    assert ran.status == 0
    assert "extra.safetensors" in ran.stdout
    assert ran.stdout.splitlines()[-1].endswith("no problem")


def test_a_shard_that_is_cut_short_is_told_with_both_sizes(run: Run, copied: Path) -> None:
    shard = copied / SHARDS[1]
    size = shard.stat().st_size
    os.truncate(shard, size - 100)
    ran = run("verify", copied)
    assert ran.status == 1
    assert ran.errors == [
        f"error: {shard}: the file is cut short: expected {size} bytes, got {size - 100} bytes"
    ]
    assert len(ran.hints) == 1
    assert ran.stdout.splitlines()[-1] == "cannot be loaded, 1 problem"


def test_several_bad_shards_give_an_error_each_with_its_own_hint(run: Run, copied: Path) -> None:
    (copied / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    os.truncate(copied / SHARDS[1], 1000)
    (copied / SHARDS[2]).write_bytes(b"")
    ran = run("verify", copied)
    assert ran.status == 1
    assert [SHARDS[n] in line for n, line in enumerate(ran.errors)] == [True] * 3
    assert "Git LFS pointer" in ran.errors[0]
    assert "git lfs pull" in ran.hints[0]
    assert len(ran.hints) == 3
    assert "3 problems" in ran.stdout


def test_bad_shards_that_share_a_hint_are_told_it_once(run: Run, copied: Path) -> None:
    for shard in SHARDS:
        (copied / shard).write_bytes(b"")
    ran = run("verify", copied)
    assert (len(ran.errors), len(ran.hints)) == (3, 1)
    assert ran.stderr.splitlines()[-1] == ran.hints[0]


def test_missing_shards_are_named(run: Run, copied: Path) -> None:
    (copied / SHARDS[0]).unlink()
    (copied / SHARDS[2]).unlink()
    ran = run("verify", copied)
    assert ran.status == 1
    assert f"2 of 3 missing: {SHARDS[0]}, {SHARDS[2]}" in ran.errors[0]


def test_a_tensor_that_its_shard_lacks_is_a_finding(run: Run, copied: Path) -> None:
    index = json.loads((copied / INDEX).read_text())
    index["weight_map"]["model.language_model.layers.0.self_attn.extra"] = SHARDS[0]
    (copied / INDEX).write_text(json.dumps(index))
    ran = run("verify", copied)
    assert ran.status == 1
    assert "layers.0.self_attn.extra" in ran.errors[0]


def test_every_tensor_of_every_layer_with_an_f32_conv_is_listed(
    run: Run, rewritten: Rewrite
) -> None:
    path = rewritten(lambda t: t._replace(dtype="F32") if "conv1d" in t.name else t)
    ran = run("verify", path)
    assert ran.status == 1
    assert len(ran.errors) == 6 * 3
    for layer in Layout().kda_layers:
        for part in "qkv":
            name = f"model.language_model.layers.{layer}.self_attn.{part}_conv1d.weight"
            line = next(line for line in ran.errors if name in line)
            assert "wrong dtype" in line
            assert "expected BF16 [64, 1, 4], got F32 [64, 1, 4]" in line
    assert len(ran.hints) == 1
    assert ran.stdout.splitlines()[-1] == "3 shards, 6 KDA, 2 DSA, 1 MTP, 18 problems"


def test_the_option_that_a_hint_tells_of_is_the_one_that_passes(
    run: Run, rewritten: Rewrite
) -> None:
    path = rewritten(lambda t: t._replace(dtype="F32") if "conv1d" in t.name else t)
    (hint,) = run("verify", path).hints
    option = hint.partition("pass ")[2].split()
    assert option == ["--family", "GLM5_NEXT_F32_CONV"]
    assert run("verify", path, *option).status == 0
    refused = run("stream", path)
    assert (refused.status, run("stream", path, *option).status) == (1, 0)
    assert " ".join(option) in refused.stderr


def test_a_problem_as_json_says_which_file_tensor_and_what(run: Run, rewritten: Rewrite) -> None:
    name = "model.language_model.layers.4.self_attn.dt_bias"
    path = rewritten(lambda t: t._replace(shape=(63,)) if t.name == name else t)
    ran = run("verify", path, "--json")
    assert ran.status == 1
    assert ran.stderr == ""
    (problem,) = ran.json["problems"]
    assert problem["code"] == "bind-refused"
    assert problem["path"].endswith(".safetensors")
    assert problem["tensor"] == name
    assert (problem["expected"], problem["got"]) == ("F32 [64]", "F32 [63]")
    assert ran.json["sound"] is False
    assert ran.json["kda_layers_bound"] == 5


def test_a_kda_layer_that_lost_a_tensor_is_a_problem_not_an_unknown_layer(
    run: Run, rewritten: Rewrite
) -> None:
    name = "model.language_model.layers.1.self_attn.A_log"
    ran = run("verify", rewritten(lambda t: None if t.name == name else t))
    assert ran.status == 1
    assert ran.errors == [
        line for line in ran.errors if name in line and "missing" in line and "F32 [4]" in line
    ]
    assert len(ran.errors) == 1
    assert "5 of 6 KDA layers" in ran.stdout
    assert "of neither kind" not in ran.stdout


def test_an_attention_tensor_that_no_kda_block_has_is_a_problem(
    run: Run, rewritten: Rewrite
) -> None:
    def rename(tensor: StoredTensor) -> StoredTensor:
        new = tensor.name.replace("layers.0.mlp.gate_proj.weight_scale", "layers.0.self_attn.bias")
        return tensor._replace(name=new)

    ran = run("verify", rewritten(rename))
    assert ran.status == 1
    assert len(ran.errors) == 1
    assert "layers.0.self_attn.bias_inv: it is no tensor of a KDA block" in ran.errors[0]


def test_layers_of_neither_kind_are_noted(run: Run, rewritten: Rewrite) -> None:
    path = rewritten(
        lambda t: t._replace(name=t.name.replace("layers.3.self_attn.indexer.", "layers.3.other."))
    )
    ran = run("verify", path)
    assert ran.status == 0
    assert "1 layer of neither kind, not checked: 3" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "3 shards, 6 KDA, 1 DSA, 1 MTP, 1 unknown, no problem"


def test_layers_that_the_config_counts_and_the_files_lack_are_a_problem(
    run: Run, rewritten: Rewrite
) -> None:
    path = rewritten(lambda t: None if ".layers.5." in t.name or ".layers.2." in t.name else t)
    ran = run("verify", path)
    assert ran.status == 1
    assert len(ran.errors) == 1
    assert ran.errors[0].endswith("as num_hidden_layers says, got 2 missing: 2, 5")


def test_a_config_that_counts_a_quintillion_layers_is_answered_at_once(
    run: Run, edit_config: EditConfig
) -> None:
    path = edit_config(lambda config: config.update(num_hidden_layers=10**18))
    ran = run("verify", path, seconds=10)
    assert ran.status == 1
    assert "999999999999999991 missing: 9, 10, 11" in ran.errors[0]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", 0, "positive integer"),
        ("hidden_size", 65, "wrong shape"),
        ("num_hidden_layers", "8", "positive integer"),
        ("linear_head_dim", 17, "contradicts itself on head_dim"),
        ("linear_attn_config", {}, "does not give the heads"),
    ],
)
def test_a_config_that_does_not_fit_is_a_problem(
    run: Run, edit_config: EditConfig, key: str, value: object, words: str
) -> None:
    ran = run("verify", edit_config(lambda config: config.update({key: value})))
    assert ran.status == 1
    assert words in ran.stderr


def test_a_missing_config_is_a_problem_and_the_layers_are_counted_all_the_same(
    run: Run, copied: Path
) -> None:
    (copied / "config.json").unlink()
    ran = run("verify", copied)
    assert ran.status == 1
    assert "there is no config.json" in ran.errors[0]
    assert ran.stdout.splitlines()[-1] == "3 shards, 6 KDA, 3 DSA, 1 problem"


def test_a_config_without_a_layer_count_is_noted(run: Run, edit_config: EditConfig) -> None:
    ran = run("verify", edit_config(lambda config: config.pop("num_hidden_layers")))
    assert ran.status == 0
    assert "the config has no num_hidden_layers" in ran.stdout


def test_a_checkpoint_without_kda_layers_is_a_problem(run: Run, tmp_path: Path) -> None:
    ran = run("verify", write_checkpoint(tmp_path / "dsa", Layout(kinds=(DSA,) * 4)))
    assert ran.status == 1
    assert "no layer of the checkpoint is a KDA layer" in ran.errors[0]


def test_a_named_pipe_under_a_shards_name_is_a_finding_and_does_not_block(
    run: Run, copied: Path
) -> None:
    (copied / SHARDS[0]).unlink()
    os.mkfifo(copied / SHARDS[0])
    ran = run("verify", copied, seconds=10)
    assert ran.status == 1
    assert "a named pipe" in ran.errors[0]


def test_one_shard_and_an_index_are_checkpoints_too(run: Run, small: Path, tmp_path: Path) -> None:
    assert run("verify", small / INDEX).status == 0
    write_checkpoint(tmp_path / "one", Layout(shards=1))
    (tmp_path / "one" / INDEX).unlink()
    assert run("verify", tmp_path / "one").status == 0
    assert run("verify", tmp_path / "one" / "model-00001-of-00001.safetensors").status == 0


def test_a_path_that_is_not_there_cannot_be_read(run: Run, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", Path("nowhere"), tmp_path / "nowhere.safetensors"):
        ran = run("verify", path)
        assert ran.status == 3
        assert len(ran.errors) == 1
        assert ran.stdout == ""


def test_a_directory_without_shards_is_a_finding(run: Run, small: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(small / "config.json", tmp_path / "bare")
    ran = run("verify", tmp_path / "bare")
    assert ran.status == 1
    assert "no safetensors file" in ran.errors[0]


def test_layers_of_another_family_than_the_one_asked_for_are_called_by_its_name(
    run: Run, tmp_path: Path
) -> None:
    written = write_family(tmp_path / "k3", (FAMILIES["KIMI_K3"],), UNEVEN, layers=4)
    ran = run("verify", written.folder)
    assert ran.status == 1
    said = " ".join(ran.stdout.split())
    assert "KDA layers hold exactly the 15 tensors of GLM5_NEXT, each" in said
    assert "the layers are those of KIMI_K3: pass --family KIMI_K3, or auto" in said
    assert run("verify", written.folder, "--family", "KIMI_K3").status == 0


def test_a_library_that_does_not_load_says_nothing_of_the_files(
    run: Run, small: Path, tmp_path: Path
) -> None:
    ran = run("verify", small, env=without_modules(tmp_path / "without", "kda_stream._native"))
    assert (ran.status, ran.stdout) == (3, "")
    assert "the compiled part of the library" in ran.errors[0]


def test_a_config_that_does_not_fit_is_not_said_to_be_of_another_family(
    run: Run, edit_config: EditConfig
) -> None:
    path = edit_config(lambda config: config.update(hidden_size=65))
    ran = run("verify", path)
    assert ran.status == 1
    assert "--family" not in ran.stdout


def test_without_a_config_it_is_noted_what_is_not_known(run: Run, copied: Path) -> None:
    (copied / "config.json").unlink()
    notes = run("verify", copied, "--json").json["notes"]
    told = "it is not known whether layers are missing, and which are MTP layers"
    assert notes == [f"there is no config: {told}"]


def test_layers_that_cannot_be_told_are_not_counted_as_none(run: Run, copied: Path) -> None:
    (copied / "config.json").write_text("")
    ran = run("verify", copied)
    assert (ran.status, ran.stdout.splitlines()[-1]) == (1, "3 shards, layers not known, 1 problem")
