"""`kda-stream verify` on the numbers of the layers, and on what the config says of their kinds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.running import SHARDS, EditConfig, Ran, Rewrite, Run
from support.checkpoints import UNEVEN
from support.families import FAMILIES, Family, write_family

from kda_stream.testing import DSA, KDA, Layout, StoredTensor, write_checkpoint

LAYOUT = Layout()  # layers 0-2 and 4-6 are KDA, 3 and 7 DSA, and 8 is the MTP layer
BY_NAMES = "expected KDA layers 0-2, 4-6, by their names"

Change = Callable[[dict[str, Any]], Any]
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def verdict(ran: Ran) -> str:
    return ran.stdout.splitlines()[-1]


def renumbered(before: int, after: int) -> Callable[[StoredTensor], StoredTensor]:
    """Give the tensors of a layer to another one."""

    def change(tensor: StoredTensor) -> StoredTensor:
        name = tensor.name.replace(f".layers.{before}.", f".layers.{after}.")
        return tensor._replace(name=name)

    return change


def edited(folder: Path, change: Change) -> Path:
    """Change the `text_config` of a checkpoint in place."""
    config = json.loads((folder / "config.json").read_text())
    change(config["text_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_four_layers(config: dict[str, Any]) -> None:
    """Make it the config of a shorter model."""
    config.update(num_hidden_layers=4)
    config["linear_attn_config"].update(kda_layers=[0, 1, 2], full_attn_layers=[3])


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.update(num_nextn_predict_layers=1),
        lambda config: config.update(num_nextn_predict_layers=2),
        lambda config: config.update(num_mtp_layers=config.pop("num_nextn_predict_layers")),
        lambda config: config.pop("num_nextn_predict_layers"),
    ],
    ids=["counted", "more are counted than there are", "under another key", "not counted"],
)
def test_an_mtp_layer_is_told_as_one_and_is_not_stray(
    run: Run, edit_config: EditConfig, change: Change
) -> None:
    ran = run("verify", edit_config(change))
    assert ran.stderr == ""
    assert verdict(ran) == "3 shards, 6 KDA, 2 DSA, 1 MTP, no problem"


def test_a_checkpoint_without_the_mtp_layers_that_the_config_counts_is_whole(
    run: Run, rewritten: Rewrite
) -> None:
    """They are left out of copies that serve without them."""
    path = rewritten(lambda t: None if ".layers.8." in t.name else t)
    assert verdict(run("verify", path)) == "3 shards, 6 KDA, 2 DSA, no problem"


def test_a_layer_behind_all_that_the_config_counts_is_stray(run: Run, tmp_path: Path) -> None:
    """Of layers 8 and 9 the first is the MTP layer."""
    path = write_checkpoint(tmp_path / "two", Layout(mtp=2))
    ran = run("verify", edited(path, lambda config: config.update(num_nextn_predict_layers=1)))
    assert ran.status == 1
    (error,) = ran.errors
    assert error.startswith(f"error: {path}: layers lie behind all that the config counts: ")
    assert error.endswith(
        "expected 8 decoder layers and 1 MTP layer right behind, got layers 9 besides"
    )
    assert run("verify", write_checkpoint(tmp_path / "both", Layout(mtp=2))).status == 0


def test_kda_layers_of_a_longer_model_are_stray_and_not_taken_for_mtp_layers(
    run: Run, tmp_path: Path
) -> None:
    kinds = (KDA, KDA, KDA, DSA, KDA, KDA, KDA)
    path = write_checkpoint(tmp_path / "longer", Layout(kinds=kinds, mtp=0))
    ran = run("verify", edited(path, of_four_layers))
    assert ran.status == 1
    (error,) = ran.errors
    assert error.endswith(
        "expected 4 decoder layers and 0 MTP layers right behind, got layers 4-6 besides"
    )


@pytest.mark.parametrize("lost", [None, "A_log"], ids=["whole", "broken"])
def test_where_no_mtp_layers_are_counted_a_kda_layer_is_none(
    run: Run, rewritten: Rewrite, lost: str | None
) -> None:
    """Of the layers behind the fourth, layer 4 may be an MTP layer; what follows a stray is one."""
    layout = Layout(kinds=(KDA, KDA, KDA, DSA, DSA, KDA, DSA), mtp=0)
    path = rewritten(lambda t: None if t.name.endswith(f"layers.5.self_attn.{lost}") else t, layout)
    edited(path, of_four_layers)
    ran = run("verify", edited(path, lambda config: config.pop("num_nextn_predict_layers")))
    assert ran.status == 1
    (error,) = ran.errors
    assert error.endswith(
        "expected 4 decoder layers and MTP layers, no KDA layers, right behind, "
        "got layers 5-6 besides"
    )


@pytest.mark.parametrize("counted", [2, None], ids=["two are counted", "they are not counted"])
def test_a_layer_behind_a_gap_is_no_mtp_layer(
    run: Run, rewritten: Rewrite, counted: int | None
) -> None:
    path = rewritten(renumbered(8, 9))
    edited(path, lambda config: config.update(num_nextn_predict_layers=counted))
    ran = run("verify", path)
    assert ran.status == 1
    (error,) = ran.errors
    assert error.endswith("right behind, got layers 9 besides")


def test_without_a_count_a_gap_between_layers_is_told(run: Run, rewritten: Rewrite) -> None:
    """Be it that the config has none, or that there is no config; at the end nothing is known."""
    path = rewritten(lambda t: None if ".layers.4." in t.name or ".layers.8." in t.name else t)
    edited(path, lambda config: config.pop("num_hidden_layers"))
    gap = f"error: {path}: the numbers of the layers have a gap: expected every number up to 7, "
    gap += "got 1 missing, 4 the first of them"
    ran = run("verify", path)
    assert (ran.status, ran.errors) == (1, [gap])
    (path / "config.json").unlink()
    ran = run("verify", path)
    assert (ran.status, ran.errors[0], len(ran.errors)) == (1, gap, 2)
    assert "there is no config.json" in ran.errors[1]


def test_a_single_shard_of_many_is_told_to_have_a_gap(
    run: Run, small: Path, tmp_path: Path
) -> None:
    shutil.copy(small / SHARDS[2], tmp_path)
    ran = run("verify", tmp_path / SHARDS[2])
    assert "every number up to 8, got 5 missing, 0 the first of them" in ran.errors[0]


def moved(layer: int) -> Callable[[StoredTensor], StoredTensor]:
    """Give a layer another prefix than all others have."""
    before, after = f"{LAYOUT.prefix}{layer}.", f"draft.layers.{layer}."
    return lambda tensor: tensor._replace(name=tensor.name.replace(before, after))


def test_kda_layers_under_two_prefixes_are_refused_and_both_are_named(
    run: Run, rewritten: Rewrite
) -> None:
    ran = run("verify", rewritten(moved(4)))
    assert ran.status == 1
    (error,) = ran.errors
    assert "the names show more than one decoder: expected one prefix, got " in error
    assert f"{LAYOUT.prefix}N. (8 layers)" in error
    assert "draft.layers.N. (1 layer)" in error


def test_other_layers_under_a_second_prefix_are_not_the_decoder_s(
    run: Run, rewritten: Rewrite
) -> None:
    (error,) = run("verify", rewritten(moved(7))).errors
    assert error.endswith("expected 8 layers, as num_hidden_layers says, got 1 missing: 7")


# --- kinds ----------------------------------------------------------------------------------------


def lists(**changed: list[int]) -> Change:
    """Put these in the place of lists of `linear_attn_config`."""
    return lambda config: config["linear_attn_config"].update(changed)


def types(*linear: int) -> Change:
    kinds = ["linear_attention" if n in linear else "full_attention" for n in range(8)]
    return lambda config: config.update(layer_types=kinds)


@pytest.mark.parametrize(
    ("change", "place", "claimed"),
    [
        (types(0, 1, 2, 3, 4, 5), "layer_types", "0-5"),
        (types(), "layer_types", "none"),
        (lists(kda_layers=[0, 1, 2, 4, 5]), "kda_layers", "0-2, 4-5"),
        (lists(kda_layers=[1, 2, 3, 5, 6]), "kda_layers", "0-2, 4-5"),
        (lists(kda_layers=[2, 3, 4, 6, 7, 8]), "kda_layers", "1-3, 5-7"),
        (lists(kda_layers=[0, 1, 2, 4, 5, 6, 9]), "kda_layers", "0-2, 4-6, 9"),
        (lists(full_attn_layers=[7]), "full_attn_layers", "0-6"),
        (lists(full_attn_layers=[8]), "full_attn_layers", "0-6"),
        (lists(full_attn_layers=[4, 6]), "full_attn_layers", "0-2, 4, 6-7"),
        (lambda config: config.update(layer_group_size=3), "layer_group_size", "0-1, 3-4, 6-7"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_has_other_kda_layers_is_told_with_both_lists(
    run: Run, edit_config: EditConfig, change: Change, place: str, claimed: str
) -> None:
    path = edit_config(change)
    ran = run("verify", path)
    assert ran.status == 1
    (error,) = ran.errors
    where, _, told = error.partition(
        f": {place} has other KDA layers than the tensors' names show: "
    )
    assert where == f"error: {path / 'config.json'}"
    assert told == f"{BY_NAMES}, got KDA layers {claimed}, by the config"
    assert "6 of 6 KDA layers hold exactly" in ran.stdout


@pytest.mark.parametrize(
    "change",
    [
        lists(kda_layers=[1, 2, 3, 5, 6, 7], full_attn_layers=[4, 8]),
        lists(kda_layers=[6, 5, 4, 2, 1, 0]),
        lists(full_attn_layers=[3, 7, 8]),
        types(0, 1, 2, 4, 5, 6),
        lambda config: config.update(layer_group_size=4),
    ],
    ids=[
        "from 1",
        "in another order",
        "with the MTP layer",
        "other names of kinds",
        "a group size",
    ],
)
def test_a_config_that_says_the_same_in_another_way_is_no_finding(
    run: Run, edit_config: EditConfig, change: Change
) -> None:
    ran = run("verify", edit_config(change))
    assert (ran.status, ran.stderr) == (0, "")


@each_family
def test_the_lists_of_a_sound_checkpoint_of_any_family_agree_with_its_names(
    run: Run, tmp_path: Path, family: Family
) -> None:
    """Kimi's count from 1, GLM's from 0, and Ling has a group size alone."""
    written = write_family(tmp_path / "sound", family, UNEVEN, layers=8)
    ran = run("verify", written.folder, "--family", "auto")
    assert (ran.status, ran.stderr) == (0, "")


def test_every_place_that_differs_is_told_beside_a_layer_that_is_refused(
    run: Run, rewritten: Rewrite
) -> None:
    """Layer 0 lost its A_log, and is a KDA layer all the same."""
    path = rewritten(lambda t: None if t.name.endswith("layers.0.self_attn.A_log") else t)
    edited(path, types(1, 2, 4, 5, 6))
    edited(path, lists(kda_layers=[0, 1, 2], full_attn_layers=[3, 4, 5, 6, 7]))
    ran = run("verify", path, "--json")
    assert ran.status == 1
    assert [
        (problem["code"], (problem["what"] or "").partition(" ")[0], problem["got"])
        for problem in ran.json["problems"]
    ] == [
        ("config-layers", "layer_types", "KDA layers 1-2, 4-6, by the config"),
        ("config-layers", "kda_layers", "KDA layers 0-2, by the config"),
        ("config-layers", "full_attn_layers", "KDA layers 0-2, by the config"),
        ("bind-refused", "it", None),
    ]
    assert {problem["expected"] for problem in ran.json["problems"][:3]} == {
        "KDA layers 0-2, 4-6, by their names"
    }


# --- what the config says is quantised ------------------------------------------------------------

LEFT_ALONE: dict[str, dict[str, Any]] = {
    "ignore": {"ignore": ["re:.*self_attn.*", "model.language_model.layers.0.self_attn.q_proj"]},
    "modules_to_not_convert": {"modules_to_not_convert": ["self_attn", "lm_head"]},
}
QUANTISED: dict[str, dict[str, Any]] = {
    "ignore": {"ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"]}}},
    "modules_to_not_convert": {"modules_to_not_convert": []},
}


def with_quantization(folder: Path, more: dict[str, Any]) -> Path:
    """As a published file has it, at the top and in `text_config`."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= more
    config["text_config"]["quantization_config"] = config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("said", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_a_quantised_projection_is_refused_though_the_config_says_that_it_was_left_alone(
    run: Run, rewritten: Rewrite, said: dict[str, Any]
) -> None:
    q_proj = f"{LAYOUT.prefix}0.self_attn.q_proj.weight"

    def quantised(tensor: StoredTensor) -> StoredTensor:
        if tensor.name == q_proj:
            return tensor._replace(dtype="F8_E4M3")
        name = tensor.name.replace(
            "layers.0.mlp.gate_proj.weight_s", "layers.0.self_attn.q_proj.weight_s"
        )
        return tensor._replace(name=name)

    ran = run("verify", with_quantization(rewritten(quantised), said), "--family", "auto")
    assert ran.status == 1
    assert len(ran.errors) == 2
    assert f"{q_proj}: it has the wrong dtype" in ran.errors[0]
    assert f"{q_proj}_scale_inv: it is no tensor of a KDA block" in ran.errors[1]
    assert "weight_scale_inv beside a projection" in ran.hints[0]


@pytest.mark.parametrize("said", QUANTISED.values(), ids=QUANTISED)
def test_a_sound_layer_passes_though_the_config_says_that_it_was_quantised(
    run: Run, copied: Path, said: dict[str, Any]
) -> None:
    ran = run("verify", with_quantization(copied, said))
    assert (ran.status, ran.stderr) == (0, "")
