"""`kda-stream inspect`: what it tells, and that it fits a screen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from cli.running import EditConfig, Rewrite, Run
from support.checkpoints import UNEVEN
from support.families import FAMILIES, Family, write_family

import kda_stream
from kda_stream import open_checkpoint
from kda_stream.checkpoint.header import TensorInfo
from kda_stream.testing import (
    DSA,
    FIELD_TENSORS,
    KDA,
    Layout,
    StoredTensor,
    write_checkpoint,
    write_shard,
)

each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def test_inspect_tells_the_facts_of_the_checkpoint(run: Run, small: Path) -> None:
    ran = run("inspect", small)
    assert ran.status == 0
    assert ran.stderr == ""
    for fact in (
        str(small),
        "3 shards, 355 tensors, 771,484 bytes (771.484 kB)",
        "prefix    model.language_model.layers.N.",
        "hidden 64, 4 heads of 16, conv kernel 4",
        "9: 6 KDA, 2 DSA, 1 MTP",
        "KKKDKKKDM",
        "K KDA   D DSA   M MTP",
        "6 layers of 43,312 bytes, 259,872 in all (259.872 kB), in 3 of 3 shards",
        "layer 2 in shards 1 + 2, layer 5 in shards 2 + 3",
        "  family    GLM5_NEXT (6 layers): GLM-5.3-Flash as published, and its NVFP4 build\n",
        "  shards    layer:shard 0:1 1:1 2:1+2 4:2 5:2+3 6:3\n",
        "  dtypes    BF16                 592,672 bytes in 155 tensors, 334,432 in 77 not KDA\n",
        "            F8_E4M3              175,104 bytes in 75 tensors, none KDA\n",
        "            F32                    3,708 bytes in 125 tensors, 2,076 in 113 not KDA\n",
    ):
        assert fact in ran.stdout


def test_inspect_as_json_tells_each_layer_and_dtype(run: Run, small: Path) -> None:
    found = run("inspect", small, "--json").json
    layout = Layout()
    tensors = layout.tensors()
    total = sum(tensor.nbytes for tensor in tensors)
    assert found["schema_version"] == 1
    assert (found["command"], found["exit_status"], found["problems"]) == ("inspect", 0, [])
    assert found["prefix"] == layout.prefix
    assert found["geometry"] == {"hidden": 64, "heads": 4, "head_dim": 16, "conv_kernel": 4}
    assert found["layers"] == {"KDA": 6, "DSA": 2, "UNKNOWN": 0, "MTP": 1}
    assert (found["tensors"], found["tensor_bytes"]) == (len(tensors), total)
    assert found["file_bytes"] == sum(file.stat().st_size for file in small.glob("*.safetensors"))
    assert [layer["index"] for layer in found["layer_details"]] == list(range(9))
    assert [layer["index"] for layer in found["layer_details"] if layer["is_mtp"]] == [8]
    assert found["layer_details"][2]["kda_shards"] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
    ]
    assert found["kda_bytes"] == sum(layer["kda_bytes"] for layer in found["layer_details"])
    assert sum(sums["bytes"] for sums in found["dtypes"].values()) == total
    assert found["dtypes"]["F32"]["tensors"] == sum(t.dtype == "F32" for t in tensors)
    assert [shard["tensors"] for shard in found["shards"]] == [
        len(held) for held in layout.files().values()
    ]


def test_a_checkpoint_with_as_many_layers_and_shards_as_glm_fits_one_screen(
    run: Run, tmp_path: Path
) -> None:
    kinds = ((KDA, KDA, KDA, DSA) * 12)[:45]
    write_checkpoint(tmp_path / "glm", Layout(kinds=kinds, shards=62))
    lines = run("inspect", tmp_path / "glm").stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert "KKKD" * 11 + "KM" in "\n".join(lines)


def test_93_layers_fit_one_screen_and_the_rulers_count_on(run: Run, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "k3", Layout(kinds=((KDA, KDA, KDA, DSA) * 24)[:93], mtp=0))
    lines = run("inspect", tmp_path / "k3").stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    strips = [line.strip() for line in lines if re.fullmatch("[KD]+", line.strip())]
    assert strips == ["KKKD" * 20, "KKKD" * 3 + "K"]
    assert any(line.split() == ["80", "90"] for line in lines)


@each_family
def test_a_layer_s_family_and_where_it_lies_are_told_of_any_family(
    run: Run, tmp_path: Path, family: Family
) -> None:
    """Layers 1 and 5 lie in two shards each; the numbers of layers take two digits."""
    written = write_family(tmp_path / "written", family, UNEVEN, layers=14)
    table = getattr(kda_stream, family.name)
    ran = run("inspect", written.folder)
    assert ran.status == 0
    assert f"  prefix    {written.prefix}N.\n" in ran.stdout
    assert "geometry  hidden 24, 3 heads of 5, conv kernel 3\n" in ran.stdout
    other = "D" if family.name.startswith("GLM") else "?"
    strip = f"KKK{other}" * 3 + "KK"
    assert f"            0         10\n            {strip}\n" in ran.stdout
    text = " ".join(ran.stdout.split())
    assert f" family {family.name} (11 layers): {table.about} shards " in text
    assert f" {MANY_PLACES} " in text
    for layer, shards in ((1, "1 + 2"), (5, "1 + 3"), (9, "2 + 3"), (13, "1 + 2")):
        assert f"layer {layer} in shards {shards}" in text


MANY_PLACES = "layer:shard 0:2 1:1+2 2:3 4:1 5:1+3 6:2 8:3 9:2+3 10:1 12:2 13:1+2 spanning"


@each_family
def test_a_family_as_json_has_each_layer_s_shards_and_what_else_there_is(
    run: Run, tmp_path: Path, family: Family
) -> None:
    written = write_family(tmp_path / "written", family, UNEVEN, layers=8)
    found = run("inspect", written.folder, "--json").json
    with open_checkpoint(written.folder) as checkpoint:
        infos = {name: checkpoint.info(name) for name in checkpoint}
        places = {name: checkpoint.shard_of(name).file_name for name in checkpoint}
    kda = {
        name for n in written.kda_layers for name in family.tensors(UNEVEN, f"{written.prefix}{n}.")
    }
    for layer in found["layer_details"]:
        is_kda = layer["index"] in written.kda_layers
        own = {n for n in kda if n.startswith(f"{written.prefix}{layer['index']}.")}
        assert bool(own) is is_kda
        assert layer["family"] == (family.name if is_kda else None)
        assert layer["kda_bytes"] == sum(infos[name].nbytes for name in own)
        assert layer["kda_shards"] == sorted({places[name] for name in own})
    assert found["dtypes"] == sums(infos.values())
    assert found["other_dtypes"] == sums(info for name, info in infos.items() if name not in kda)


def sums(infos: Iterable[TensorInfo]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for info in infos:
        one = found.setdefault(info.dtype, {"tensors": 0, "bytes": 0})
        one["tensors"] += 1
        one["bytes"] += info.nbytes
    return found


def test_of_layers_of_two_families_it_is_told_which_are_of_which(run: Run, tmp_path: Path) -> None:
    glm, f32_conv = FAMILIES["GLM5_NEXT"], FAMILIES["GLM5_NEXT_F32_CONV"]
    written = write_family(tmp_path / "two", (glm, f32_conv, f32_conv), UNEVEN, layers=12)
    ran = run("inspect", written.folder)
    assert "KKKDKKKDKKKD" in ran.stdout
    assert "  family    GLM5_NEXT (layers 0, 4, 8): GLM-5.3-Flash as published" in ran.stdout
    assert "\n            GLM5_NEXT_F32_CONV (layers 1-2, 5-6, 9-10): builds of " in ran.stdout
    assert "9 layers of 4,156 to 4,426 bytes, 39,024 in all" in ran.stdout
    found = run("inspect", written.folder, "--json").json
    families = {layer["index"]: layer["family"] for layer in found["layer_details"]}
    assert families == dict.fromkeys((3, 7, 11)) | {
        n: family.name for n, family in written.families.items()
    }


def test_a_kda_layer_that_is_exactly_of_no_family_is_told_so(run: Run, rewritten: Rewrite) -> None:
    cast = f"{Layout().prefix}4.self_attn.A_log"
    path = rewritten(lambda t: t._replace(dtype="F16") if t.name == cast else t)
    ran = run("inspect", path)
    assert "  family    GLM5_NEXT (layers 0-2, 5-6): " in ran.stdout
    assert "            none (layer 4): what is wrong: `kda-stream verify`\n" in ran.stdout
    assert run("inspect", path, "--json").json["layer_details"][4]["family"] is None


def test_a_kda_block_behind_the_decoder_s_layers_is_an_mtp_layer_and_counts_as_other(
    run: Run, edit_config: EditConfig
) -> None:
    """Of the layers that are left, 0-2, 4 and 5 are KDA; 6 is a KDA block too."""
    path = edit_config(lambda config: config.update(num_hidden_layers=6))
    ran = run("inspect", path)
    assert "KKKDKKMMM" in ran.stdout
    assert " layer:shard 0:1 1:1 2:1+2 4:2 5:2+3\n" in ran.stdout
    found = run("inspect", path, "--json").json
    layer = found["layer_details"][6]
    assert (layer["kind"], layer["is_mtp"], layer["family"]) == ("KDA", True, "GLM5_NEXT")
    assert found["kda_bytes"] == 5 * layer["kda_bytes"]
    for dtype, tensors in (("BF16", 5 * 13), ("F32", 5 * 2)):
        all_of_it, other = found["dtypes"][dtype], found["other_dtypes"][dtype]
        assert all_of_it["tensors"] - other["tensors"] == tensors


def test_layers_that_lie_in_one_shard_each_span_none(run: Run, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", Layout(shards=1))
    stdout = run("inspect", tmp_path / "one").stdout
    assert "  spanning  no KDA layer lies in more than one shard\n" in stdout
    assert "  shards    layer:shard 0:1 1:1 2:1 4:1 5:1 6:1\n" in stdout


def test_a_dtype_that_kda_layers_alone_have_is_told_so(run: Run, tmp_path: Path) -> None:
    written = write_family(tmp_path / "k3", FAMILIES["KIMI_K3"], UNEVEN, layers=4)
    stdout = run("inspect", written.folder).stdout
    assert re.search(r" F32 +3,396 bytes in 18 tensors, all KDA$", stdout, re.MULTILINE)


def test_without_a_config_it_says_what_is_not_known(run: Run, copied: Path) -> None:
    (copied / "config.json").unlink()
    ran = run("inspect", copied)
    assert ran.status == 0
    assert "geometry  not known" in ran.stdout
    assert "KKKDKKKDD" in ran.stdout  # without the config the MTP layer looks like any DSA layer
    assert "not known: MTP layers, geometry" in ran.stdout
    found = run("inspect", copied, "--json").json
    assert found["geometry"] is None
    assert found["layers"]["MTP"] == 0


def test_a_config_that_is_no_json_leaves_the_files_to_be_told(run: Run, copied: Path) -> None:
    (copied / "config.json").write_text("{")
    ran = run("inspect", copied)
    assert ran.status == 0
    assert "3 shards, 355 tensors" in ran.stdout
    assert "not valid" in ran.stdout


def test_a_long_path_in_a_note_stays_in_one_piece(run: Run, copied: Path) -> None:
    (copied / "config.json").unlink()
    path = copied.rename(copied.with_name("a" * 120))
    assert f" {path}:" in run("inspect", path).stdout


def test_a_kda_layer_that_lost_a_tensor_is_marked_unknown_and_noted(
    run: Run, rewritten: Rewrite
) -> None:
    path = rewritten(lambda t: None if t.name.endswith("layers.1.self_attn.A_log") else t)
    ran = run("inspect", path)
    assert ran.status == 0
    assert "K?KDKKKDM" in ran.stdout
    assert "1 unknown layer with some of a KDA layer's tensors: 1;" in ran.stdout


def test_a_layer_number_beyond_all_others_does_not_stretch_the_strip(
    run: Run, rewritten: Rewrite
) -> None:
    path = rewritten(lambda t: t._replace(name=t.name.replace("layers.8.", f"layers.{10**30}.")))
    ran = run("inspect", path)
    assert ran.status == 0
    assert len(ran.stdout.splitlines()) <= 24
    assert f"and 1 layer up to {10**30}" in ran.stdout


def test_a_file_without_decoder_layers_is_told_by_its_dtypes(run: Run, rewritten: Rewrite) -> None:
    path = rewritten(lambda t: t if t.name == "lm_head.weight" else None, Layout(shards=1))
    ran = run("inspect", path / "model-00001-of-00001.safetensors")
    assert ran.status == 0
    assert "prefix    not known" in ran.stdout
    assert re.search(r"dtypes +BF16 +32,768 bytes in 1 tensor$", ran.stdout, re.MULTILINE)


def test_of_many_dtypes_those_with_most_bytes_are_shown(run: Run, tmp_path: Path) -> None:
    sizes = {"U8": 900, "I8": 800, "BOOL": 700, "F8_E5M2": 600, "F8_E4M3": 500, "F8_E8M0": 400}
    header, end = {}, 0
    for dtype, size in {**sizes, "I64": 8, "F64": 0}.items():
        shape = [size // (8 if dtype in ("I64", "F64") else 1)]
        header[dtype] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path = tmp_path / "many.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    stdout = run("inspect", path).stdout
    assert re.findall(r"(\w+) +\d+ bytes in 1 tensor$", stdout, re.MULTILINE) == list(sizes)
    assert re.search(r"^ +and 2 more$", stdout, re.MULTILINE)


def test_what_the_index_leaves_out_is_noted(run: Run, copied: Path) -> None:
    (copied / "consolidated.safetensors").write_bytes(b"")
    ran = run("inspect", copied)
    assert ran.status == 0
    assert "note      1 safetensors files are not named by the index" in ran.stdout
    assert "consolidated.safetensors" in ran.stdout


def test_a_config_of_another_geometry_is_told_as_it_stands(
    run: Run, edit_config: EditConfig
) -> None:
    path = edit_config(lambda config: config.update(hidden_size=4096))
    assert "hidden 4096, 4 heads of 16" in run("inspect", path).stdout


def test_of_more_kda_layers_than_a_screen_has_the_first_are_placed(
    run: Run, tmp_path: Path
) -> None:
    leaves = [leaf for leaves in FIELD_TENSORS.values() for leaf in leaves]
    names = [f"model.layers.{n}.self_attn.{leaf}" for n in range(500) for leaf in leaves]
    write_shard(tmp_path / "model.safetensors", [StoredTensor(n, "U8", (1,)) for n in names])
    ran = run("inspect", tmp_path / "model.safetensors")
    assert ran.status == 0
    assert "500 KDA" in ran.stdout
    assert " 319:1 and 180 more\n" in ran.stdout.replace("\n            ", " ")
    assert len(ran.stdout.splitlines()) < 60
