"""`kda_stream.testing`: what it writes is what it says, and is like the published checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors

from kda_stream import (
    ArgumentError,
    BindError,
    ErrorCode,
    KdaConfig,
    PathError,
    bind_kda_weights,
    open_checkpoint,
)
from kda_stream.testing import (
    DSA,
    FIELD_TENSORS,
    KDA,
    Layout,
    StoredTensor,
    bound_payload,
    payload,
    write_checkpoint,
    write_shard,
)

FACTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "fullscale" / "glm53_flash_fp8.json").read_text()
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("layout"))


def test_the_safetensors_package_reads_every_tensor_with_its_payload(written: Path) -> None:
    deserialize: Any = safetensors.deserialize  # the package has no types for it
    found = {}
    for file in written.glob("*.safetensors"):
        for name, tensor in deserialize(file.read_bytes()):
            assert tensor["data"] == payload(name, 0, len(tensor["data"]))
            found[name] = (tensor["dtype"], tuple(tensor["shape"]))
    assert found == {t.name: (t.dtype, t.shape) for t in Layout().tensors()}


def test_the_index_places_every_tensor_and_counts_the_bytes(written: Path) -> None:
    index = json.loads((written / "model.safetensors.index.json").read_text())
    files = Layout().files()
    assert index["weight_map"] == {t.name: file for file, held in files.items() for t in held}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in Layout().tensors())


def test_the_config_gives_the_geometry_and_the_layers(written: Path) -> None:
    assert KdaConfig.from_json(written / "config.json") == Layout().config
    with open_checkpoint(written) as checkpoint:
        assert checkpoint.layers() == tuple(range(9))
        assert [int(index) for index in checkpoint.layers() if index.is_mtp] == [8]


def test_two_kda_layers_lie_in_two_shards_and_one_is_cut_between_its_conv_tensors() -> None:
    placed = {t.name: file for file, held in Layout().files().items() for t in held}
    spanning = {
        layer
        for layer in Layout().kda_layers
        if len({f for name, f in placed.items() if f".{layer}.self_attn." in name}) == 2
    }
    assert spanning == {2, 5}
    conv = "model.language_model.layers.2.self_attn.{}_conv1d.weight"
    assert placed[conv.format("k")] != placed[conv.format("q")] == placed[conv.format("v")]


@pytest.mark.parametrize(
    ("layer", "groups"),
    [
        (0, ["kda_self_attn", "norms_every_layer", "hyper_connection_layers_0_44", "dense_mlp"]),
        (3, ["dsa_self_attn", "norms_every_layer", "hyper_connection_layers_0_44", "moe_router"]),
        (8, ["dsa_self_attn", "norms_every_layer", "mtp_layer_extra", "moe_router"]),
    ],
)
def test_a_layer_has_the_names_dtypes_and_ranks_of_the_published_one(
    layer: int, groups: list[str]
) -> None:
    rows = [row for group in groups for row in FACTS[group]]
    published = {row["name"]: (row["dtype"], len(row["shape"])) for row in rows}
    if "moe_router" in groups:
        for prefix in ("mlp.shared_experts.", "mlp.experts.0.", "mlp.experts.1."):
            published |= {
                prefix + row["name"]: (row["dtype"], len(row["shape"]))
                for row in FACTS["moe_routed_expert"]
            }
    prefix = f"{Layout().prefix}{layer}."
    written = {
        t.name.removeprefix(prefix): (t.dtype, len(t.shape))
        for t in Layout().tensors()
        if t.name.startswith(prefix)
    }
    assert written == published


def test_at_the_published_geometry_a_kda_layer_has_the_published_shapes() -> None:
    layout = Layout(config=KdaConfig(hidden=4096, heads=64, head_dim=128, conv_kernel=4))
    prefix = f"{layout.prefix}0."
    shapes = {t.name: t.shape for t in layout.tensors() if t.name.startswith(prefix)}
    for row in FACTS["kda_self_attn"] + FACTS["hyper_connection_layers_0_44"]:
        assert shapes[prefix + row["name"]] == tuple(row["shape"])


def test_payload_is_read_from_anywhere() -> None:
    border = 1024**2
    whole = payload("a", 0, 2 * border + 100)
    assert len(whole) == 2 * border + 100
    for start, length in ((0, 0), (0, 1), (5, 300), (border - 3, 7), (border, 9), (7, border + 50)):
        assert payload("a", start, length) == whole[start : start + length]
    assert payload("a", 2 * border, 100) == whole[2 * border :]


def test_payload_differs_from_name_to_name_and_from_block_to_block() -> None:
    border = 1024**2
    assert payload("a", 0, 32) != payload("b", 0, 32)
    assert payload("a", 0, 32) != payload("a", border, 32)


def test_bound_payload_is_what_a_bind_gives(written: Path) -> None:
    with open_checkpoint(written) as checkpoint:
        for layer in Layout().kda_layers:
            weights, _ = bind_kda_weights(Layout().config, layer, checkpoint.layer(layer))
            assert {name: bytes(t.data) for name, t in weights.items()} == bound_payload(
                Layout(), layer
            )
            weights.release()
    assert sum(map(len, FIELD_TENSORS.values())) == 15


def test_another_layout_is_written_as_asked(tmp_path: Path) -> None:
    layout = Layout(
        prefix="model.layers.",
        config=KdaConfig(hidden=24, heads=3, head_dim=5, conv_kernel=3),
        kinds=(DSA, KDA),
        mtp=0,
        shards=1,
    )
    with open_checkpoint(write_checkpoint(tmp_path / "made" / "here", layout)) as checkpoint:
        assert checkpoint.layer_prefix == "model.layers."
        assert len(checkpoint.shards) == 1
        assert checkpoint.layers() == (0, 1)
        weights, _ = bind_kda_weights(layout.config, 1, checkpoint.layer(1))
        assert bytes(weights.conv.data) == bound_payload(layout, 1)["conv"]
        weights.release()


def test_kda_tensors_are_written_in_the_dtypes_that_are_asked_for(tmp_path: Path) -> None:
    conv = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
    layout = Layout(dtypes={**dict.fromkeys(conv, "F32"), "A_log": "BF16"})
    with open_checkpoint(write_checkpoint(tmp_path, layout)) as checkpoint:
        with pytest.raises(BindError) as refused:
            bind_kda_weights(layout.config, 0, checkpoint.layer(0))
        stored = {problem.tensor: problem.stored_dtype for problem in refused.value.problems}
        assert stored == {
            "self_attn.A_log": "BF16",
            **{f"self_attn.{leaf}": "F32" for leaf in conv},
        }


@pytest.mark.parametrize(
    "dtypes", [{"q_conv1d": "F32"}, {"self_attn.A_log": "F32"}, {"A_log": "F4"}, {"A_log": "f32"}]
)
def test_a_dtype_that_cannot_be_written_is_refused_at_once(dtypes: dict[str, str]) -> None:
    with pytest.raises(ArgumentError):
        Layout(dtypes=dtypes)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_payload_holds_neither_nan_nor_infinity(dtype: str) -> None:
    data = payload("a", 0, 2**21)
    bits = numpy.frombuffer(data, "<u2" if dtype == "BF16" else "<u4")
    exponent = 0x7F80 if dtype == "BF16" else 0x7F80_0000
    assert not ((bits & exponent) == exponent).any()
    assert len(set(data[::2])) == 256


def test_the_default_checkpoint_is_small_and_its_layout_cannot_be_changed(written: Path) -> None:
    assert sum(file.stat().st_size for file in written.iterdir()) < 2_000_000
    with pytest.raises(dataclasses.FrozenInstanceError):
        Layout().shards = 5  # type: ignore[misc]


def test_a_shard_that_cannot_be_written_is_an_error_of_its_path(tmp_path: Path) -> None:
    path = tmp_path / "none" / "model.safetensors"
    with pytest.raises(PathError, match="it cannot be written") as caught:
        write_shard(path, ())
    assert (caught.value.code, caught.value.path) == (ErrorCode.PATH_NOT_WRITABLE, str(path))


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ([StoredTensor("a", "F99", (1,))], "a: it cannot be written to a shard: expected one of"),
        ([StoredTensor("a", ["F32"], (1,))], r"got \['F32'\]"),  # type: ignore[arg-type]
        ([StoredTensor("a", "F32", (-1,))], r"got \(-1,\)"),
        ([StoredTensor("a", "F32", (2**70,))], "expected a tuple of extents"),
        ([StoredTensor("a", "F32", (1.5,))], r"got \(1.5,\)"),  # type: ignore[arg-type]
        ([StoredTensor("a", "F32", [1])], r"got \[1\]"),  # type: ignore[arg-type]
        ([StoredTensor("\udc80", "U8", (1,))], "expected a name that can stand in a file"),
        ([StoredTensor("__metadata__", "U8", (1,))], "expected a name that can stand in a file"),
        ([StoredTensor(5, "U8", (1,))], "5: it cannot be written"),  # type: ignore[arg-type]
        ([StoredTensor("a", "U8", (1,))] * 2, "expected each name once, got 'a'"),
        ([("a", "U8")], "expected a StoredTensor"),
        (5, "tensors is one int"),
    ],
)
def test_a_shard_that_the_format_does_not_have_is_refused_before_a_file_is_there(
    tmp_path: Path, tensors: Any, told: str
) -> None:
    with pytest.raises(ArgumentError, match=told):
        write_shard(tmp_path / "model.safetensors", tensors)
    assert list(tmp_path.iterdir()) == []


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("theirs")
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "pipe"):
        with pytest.raises(PathError, match="it is no regular file"):
            write_shard(tmp_path / name, [StoredTensor("a", "U8", (1,))])
    assert (tmp_path / "there").read_text() == "theirs"
    write_shard(tmp_path / "there", iter([StoredTensor("a", "U8", (1,))]))  # type: ignore[arg-type]
    with open_checkpoint(tmp_path / "there") as checkpoint:
        assert list(checkpoint) == ["a"]
