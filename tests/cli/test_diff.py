"""`kda-stream diff`: the KDA layers of two checkpoints, tensor by tensor."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli.running import Rewrite, Run
from support.checkpoints import UNEVEN
from support.families import FAMILIES, write_family

from kda_stream import KIMI_K3, KdaConfig, PayloadError, open_checkpoint
from kda_stream.cli.diff import diff_paths
from kda_stream.testing import KDA, Layout, Replica, write_checkpoint, write_replica

CONFIG = KdaConfig(hidden=24, heads=3, head_dim=70, conv_kernel=4)


def flip_a_bit(folder: Path, name: str) -> None:
    with open_checkpoint(folder) as checkpoint:
        shard = checkpoint.shard_of(name)
        path, at = Path(shard.path), shard.header.payload_begin + checkpoint.info(name).begin
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_is_no_different_from_itself_and_from_a_copy(
    run: Run, small: Path, copied: Path
) -> None:
    for options in ([], ["--payload"]):
        ran = run("diff", small, copied, *options, "--json")
        assert (ran.status, ran.json["same"], ran.json["tensors"]) == (0, True, 90)
        assert ran.json["layers_a"] == ran.json["layers_b"] == list(Layout().kda_layers)
    assert run("diff", small, copied).stdout.splitlines()[-1] == "no difference"


def test_a_bit_that_differs_is_found_with_payload_alone(
    run: Run, small: Path, copied: Path
) -> None:
    name = "model.language_model.layers.4.self_attn.o_proj.weight"
    flip_a_bit(copied, name)
    assert run("diff", small, copied).status == 0
    ran = run("diff", small, copied, "--payload", "--json")
    assert ran.status == 1
    (problem,) = ran.json["problems"]
    assert (problem["code"], problem["tensor"]) == ("diff", name)
    assert problem["expected"] != problem["got"]


def test_tensors_of_one_side_and_other_dtypes_are_each_told(
    run: Run, small: Path, rewritten: Rewrite
) -> None:
    lost = "model.language_model.layers.0.self_attn.dt_bias"
    cast = "model.language_model.layers.1.self_attn.A_log"
    other = rewritten(
        lambda t: None if t.name == lost else t._replace(dtype="BF16") if t.name == cast else t
    )
    ran = run("diff", small, other, "--json")
    assert [problem["tensor"] for problem in ran.json["problems"]] == [lost, cast]


def test_two_families_differ_in_the_tensors_that_they_store_otherwise(
    run: Run, tmp_path: Path
) -> None:
    """Bytes of a tensor in two dtypes are not compared: that it was cast is the difference."""
    glm, f32_conv, k3 = (FAMILIES[n] for n in ("GLM5_NEXT", "GLM5_NEXT_F32_CONV", "KIMI_K3"))
    a, b, c = (
        write_family(tmp_path / family.name, family, UNEVEN, layers=12)
        for family in (glm, f32_conv, k3)
    )
    layers = [0, 1, 2, 4, 5, 6, 8, 9, 10]
    for options in ([], ["--payload"]):
        ran = run("diff", a.folder, b.folder, *options, "--json")
        assert (ran.status, ran.json["tensors"]) == (1, 9 * 15)
        assert [
            (problem["tensor"], problem["expected"], problem["got"])
            for problem in ran.json["problems"]
        ] == [
            (f"{glm.prefix}{n}.self_attn.{part}_conv1d.weight", "BF16 [15, 1, 3]", "F32 [15, 1, 3]")
            for n in layers
            for part in "kqv"
        ]
    ran = run("diff", a.folder, c.folder)
    assert ran.stdout.splitlines()[-1] == f"{9 * (3 + 5)} differences"
    prefix = f"error: {c.folder}: {glm.prefix}10.self_attn."
    lost = "B has no such tensor in its KDA layers"
    assert [line for line in ran.errors if line.startswith(prefix)] == [
        f"{prefix}g_a_proj.weight: {lost}",
        f"{prefix}g_b_proj.weight: {lost}",
    ]
    more = f"error: {a.folder}: {k3.prefix}10.self_attn.g_proj.weight: "
    assert f"{more}A has no such tensor in its KDA layers" in ran.errors
    assert sum("expected F32 [3], got F32 [128]" in line for line in ran.errors) == 9


def test_layers_are_the_same_under_another_prefix_and_in_other_shards(
    run: Run, tmp_path: Path
) -> None:
    k3 = FAMILIES["KIMI_K3"]
    a = write_replica(tmp_path / "a", Replica(KIMI_K3, CONFIG, 12, (0, 2, 11), (), shards=5))
    b = write_replica(tmp_path / "b", Replica(KIMI_K3, CONFIG, 12, (0, 2, 11), (), shards=2))
    assert run("diff", a, b, "--payload").stdout.splitlines()[-1] == "no difference"
    one, other = (
        write_family(tmp_path / name, k3, UNEVEN, prefix=prefix).folder
        for name, prefix in (("one", "model.layers."), ("other", k3.prefix))
    )
    assert run("diff", one, other).stdout.splitlines()[-1] == "no difference"


def test_a_layer_that_is_kda_in_one_alone_is_told_by_all_of_its_tensors(
    run: Run, tmp_path: Path
) -> None:
    a, b = (
        write_replica(tmp_path / name, Replica(KIMI_K3, CONFIG, 12, layers, (), shards=2))
        for name, layers in (("a", (0, 2)), ("b", (2, 10)))
    )
    ran = run("diff", a, b, "--payload", "--json")
    assert (ran.json["layers_a"], ran.json["layers_b"]) == ([0, 2], [2, 10])
    assert (ran.json["tensors"], len(ran.json["problems"])) == (14, 28)
    assert {problem["what"] for problem in ran.json["problems"]} == {
        f"{side} has no such tensor in its KDA layers" for side in "AB"
    }
    c = write_replica(tmp_path / "c", Replica(KIMI_K3, CONFIG, 12, (5,), (), shards=2))
    ran = run("diff", a, c, "--payload", "--json")
    assert (ran.status, ran.json["tensors"], len(ran.json["problems"])) == (1, 0, 42)


def test_what_lies_behind_the_decoder_s_own_layers_is_not_compared(
    run: Run, tmp_path: Path
) -> None:
    a, b = (write_checkpoint(tmp_path / name, Layout(kinds=(KDA,) * 2, mtp=0)) for name in "ab")
    for folder in (a, b):
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
    flip_a_bit(b, f"{Layout().prefix}1.self_attn.dt_bias")
    ran = run("diff", a, b, "--payload", "--json")
    assert (ran.status, ran.json["layers_a"], ran.json["tensors"]) == (0, [0], 15)


def test_a_file_that_changes_while_it_is_compared_is_an_error_and_no_difference(
    small: Path, copied: Path
) -> None:
    def cut(_: str) -> None:
        for path in copied.glob("*.safetensors"):
            os.truncate(path, path.stat().st_size - 1)

    with pytest.raises(PayloadError) as caught:
        diff_paths(str(small), str(copied), payload=True, watch=cut)
    assert Path(caught.value.path or "").parent == copied


def test_what_cannot_be_read_is_refused(run: Run, small: Path, tmp_path: Path) -> None:
    assert run("diff", small, tmp_path / "gone", "--json").status == 3
    assert run("diff", small, "--json").status == 2
