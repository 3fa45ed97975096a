"""The layers of a checkpoint: found from the names alone, seen under names of their own."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.files import (
    DSA_NAMES,
    KDA_NAMES,
    Stored,
    layer_tensors,
    numbered,
    write_checkpoint,
    write_shard,
)

from kda_stream import (
    Checkpoint,
    CheckpointError,
    ConfigError,
    KdaTensorSource,
    LayerIndex,
    NotFoundError,
    open_checkpoint,
)
from kda_stream.checkpoint.layer import find_layers
from kda_stream.errors import ErrorCode as Code

GLM = "model.language_model.layers."
PREFIXES = {
    "GLM-5.3-Flash": GLM,
    "Kimi-Linear": "model.layers.",
    "Kimi-K3": "language_model.model.layers.",
    "none before layers": "layers.",
    "an invented one": "acme.v2.text-decoder.layers.",
    "one with layers in it": "outer.layers.inner.layers.",
    "one with a number in it": "stage.0.layers.",
    "one that is not Latin": "\u6a21\u578b.layers.",
}
GLOBALS = ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")


def named(names: Iterable[str]) -> dict[str, bytes]:
    return {name: name.encode() for name in names}


@contextmanager
def opened(
    folder: Path, names: Iterable[str], config: Mapping[str, object] | None = None
) -> Iterator[Checkpoint]:
    """A checkpoint of one shard that holds those names, each with itself as its bytes."""
    write_shard(folder / "model.safetensors", named(names))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    with open_checkpoint(folder) as checkpoint:
        yield checkpoint


def full(prefix: str, numbers: Iterable[int], names: Iterable[str] = KDA_NAMES) -> list[str]:
    names = tuple(names)
    return [f"{prefix}{number}.{name}" for number in numbers for name in names]


# The prefix --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_the_prefix_is_found_from_the_names(prefix: str, tmp_path: Path) -> None:
    names = [*GLOBALS, *full(prefix, [0, 1, 2]), *full(prefix, [3], DSA_NAMES)]
    with opened(tmp_path, names) as checkpoint:
        assert checkpoint.layer_prefix == prefix
        assert checkpoint.layers() == (0, 1, 2, 3)
        assert set(checkpoint.layer(1).names()) == set(KDA_NAMES)
        assert set(checkpoint.layer(3).names()) == set(DSA_NAMES)


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_the_layers_of_a_vision_tower_are_not_the_decoders(prefix: str, tmp_path: Path) -> None:
    towers = [
        *full(
            "model.visual.encoder.layers.", range(27), ("self_attn.q_proj.weight", "mlp.fc1.bias")
        ),
        *full("vision_tower.blocks.", range(8), ("attn.qkv.weight",)),
        *full("audio_tower.layers.", range(40), ("self_attn.k_proj.weight", "fc1.weight")),
    ]
    for names in ([*towers, *full(prefix, [0, 1])], [*full(prefix, [0, 1]), *towers]):
        with opened(tmp_path, names) as checkpoint:
            assert checkpoint.layer_prefix == prefix
            assert checkpoint.layers() == (0, 1)
            assert set(checkpoint.layer(0).names()) == set(KDA_NAMES)


def test_a_decoder_of_dsa_layers_alone_is_found_beside_a_vision_tower(tmp_path: Path) -> None:
    tower = full("model.visual.layers.", range(5), ("self_attn.q_proj.weight",))
    with opened(tmp_path, [*tower, *full(GLM, [0, 1], DSA_NAMES)]) as checkpoint:
        assert checkpoint.layer_prefix == GLM
        assert checkpoint.layers() == (0, 1)


def test_a_decoder_of_neither_kind_is_found(tmp_path: Path) -> None:
    names = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.up_proj.weight")
    with opened(tmp_path, full("model.layers.", [0, 1], names)) as checkpoint:
        assert checkpoint.layer_prefix == "model.layers."
        assert checkpoint.layers() == (0, 1)


def test_a_kda_layer_with_one_tensor_less_still_shows_the_decoder(tmp_path: Path) -> None:
    tower = full("model.visual.layers.", range(5), ("self_attn.q_proj.weight",))
    with opened(tmp_path, [*tower, *full(GLM, [0], KDA_NAMES[:-1])]) as checkpoint:
        assert checkpoint.layer_prefix == GLM
        assert set(checkpoint.layer(0).names()) == set(KDA_NAMES[:-1])


@pytest.mark.parametrize("names", [KDA_NAMES, DSA_NAMES], ids=["KDA", "DSA"])
def test_two_decoders_are_refused_and_both_are_named(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    both = [*full("model.layers.", [0], names), *full("draft.model.layers.", [0], names)]
    with opened(tmp_path, both) as checkpoint:
        for ask in (
            checkpoint.layers,
            lambda: checkpoint.layer(0),
            lambda: checkpoint.layer_prefix,
        ):
            with pytest.raises(CheckpointError) as caught:
                ask()
            assert caught.value.code is Code.LAYERS_TWO_PREFIXES
            line = str(caught.value)
            assert "draft.model.layers." in line
            assert "model.layers." in line.replace("draft.model.layers.", "")
            assert str(tmp_path) in line
        assert len(checkpoint) == len(both)  # the tensors are at hand all the same


@pytest.mark.parametrize(
    "names",
    [
        (),
        GLOBALS,
        ("self_attn.q_proj.weight", "layers.weight", "model.layers.self_attn.A_log"),
        ("model.layers.", "model.layers.0", "model.layers.0."),
    ],
    ids=["no tensors", "globals alone", "no number", "no name"],
)
def test_names_without_layers_are_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    with opened(tmp_path, names) as checkpoint:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.layers()
        assert caught.value.code is Code.LAYERS_NONE
        assert str(tmp_path) in str(caught.value)
        with pytest.raises(CheckpointError):
            checkpoint.layer(0)


# Which layers ------------------------------------------------------------------------------------


def test_layers_come_in_numeric_order(tmp_path: Path) -> None:
    shuffled = [10, 2, 100, 0, 11, 1, 20, 9]
    with opened(tmp_path, full(GLM, shuffled)) as checkpoint:
        assert checkpoint.layers() == (0, 1, 2, 9, 10, 11, 20, 100)
        assert all(type(index) is LayerIndex for index in checkpoint.layers())


def test_layer_1_holds_nothing_of_layers_10_to_19_and_100(tmp_path: Path) -> None:
    names = [f"{GLM}{number}.self_attn.of_{number}" for number in (100, 10, 1, 0, 11, 19, 21)]
    names += full(GLM, [5])
    with opened(tmp_path, names) as checkpoint:
        for number in (0, 1, 10, 11, 19, 21, 100):
            assert checkpoint.layer(number).names() == [f"self_attn.of_{number}"]
            tensor = checkpoint.layer(number).get(f"self_attn.of_{number}")
            assert tensor is not None
            assert tensor.data == f"{GLM}{number}.self_attn.of_{number}".encode()
            assert checkpoint.layer(number).get("self_attn.of_5") is None


@pytest.mark.parametrize(
    "number",
    [
        *("00", "01", "-1", "+1", "1e0", "0x1", " 1", "1 ", "1_0", "", "a"),
        *("\u0661", "\uff11", "\u00b2", "\u2460", "\u0967", "\u4e00", "1\u0661", "1\uff11"),
    ],
    ids=ascii,
)
def test_what_is_no_plain_number_is_no_layer(number: str, tmp_path: Path) -> None:
    odd = f"{GLM}{number}.self_attn.A_log"
    with opened(tmp_path, [*full(GLM, [0]), odd]) as checkpoint:
        assert odd in checkpoint
        assert checkpoint.layers() == (0,)
        assert set(checkpoint.layer(0).names()) == set(KDA_NAMES)


def test_a_number_of_5000_digits_is_no_reason_to_fail(tmp_path: Path) -> None:
    odd = f"{GLM}{'9' * 5000}.self_attn.A_log"
    with opened(tmp_path, [*full(GLM, [0]), odd]) as checkpoint:
        assert checkpoint.layers()[0] == 0
        assert set(checkpoint.layer(0).names()) == set(KDA_NAMES)


@pytest.mark.parametrize("names", [KDA_NAMES, DSA_NAMES], ids=["KDA", "DSA"])
def test_a_word_that_ends_in_layers_is_not_layers(names: tuple[str, ...], tmp_path: Path) -> None:
    others = [*full("model.mtp_layers.", [0, 7], names), *full("model.layers_old.", [8], names)]
    with opened(tmp_path, [*others, *full("model.layers.", [0, 1], names)]) as checkpoint:
        assert checkpoint.layer_prefix == "model.layers."
        assert checkpoint.layers() == (0, 1)


def test_layers_inside_a_layer_are_part_of_it(tmp_path: Path) -> None:
    inner = ("adapter.layers.0.weight", "adapter.layers.7.self_attn.q_proj.weight", "layers.3.bias")
    with opened(tmp_path, full(GLM, [0, 1], (*KDA_NAMES, *inner))) as checkpoint:
        assert checkpoint.layer_prefix == GLM
        assert checkpoint.layers() == (0, 1)
        assert set(checkpoint.layer(1).names()) == {*KDA_NAMES, *inner}


@pytest.mark.parametrize("number", [-1, 2, 10, 46, 2**63, 10**30])
def test_a_layer_that_is_not_there_is_not_found(number: int, tmp_path: Path) -> None:
    with opened(tmp_path, full(GLM, [0, 1])) as checkpoint:
        with pytest.raises(NotFoundError) as caught:
            checkpoint.layer(number)
        assert isinstance(caught.value, KeyError)
        assert caught.value.code is Code.LAYER_UNKNOWN
        assert str(number) in str(caught.value)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.intp, LayerIndex])
def test_a_layer_is_found_under_any_integer(kind: type, tmp_path: Path) -> None:
    with opened(tmp_path, full(GLM, [0, 1])) as checkpoint:
        source = checkpoint.layer(kind(1))
        assert type(source.index) is LayerIndex
        assert source.index == 1
        assert source.get("self_attn.A_log") is not None
        with pytest.raises(NotFoundError):
            checkpoint.layer(kind(7))


@pytest.mark.parametrize("wrong", ["0", "a\nb", None, 0.5, (0,)], ids=repr)
def test_what_is_no_integer_is_no_layer(wrong: object, tmp_path: Path) -> None:
    with opened(tmp_path, full(GLM, [0, 1])) as checkpoint:
        with pytest.raises((TypeError, NotFoundError)) as caught:
            checkpoint.layer(wrong)  # type: ignore[arg-type]
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("equal", [True, 1.0, np.float64(1)], ids=repr)
def test_what_only_equals_a_layers_number_is_that_layer_or_refused(
    equal: object, tmp_path: Path
) -> None:
    with opened(tmp_path, full(GLM, [0, 1])) as checkpoint:
        try:
            source = checkpoint.layer(equal)  # type: ignore[arg-type]
        except (TypeError, NotFoundError):
            return
        assert source.names() == list(KDA_NAMES)
        assert source.prefix == f"{GLM}1."


# The MTP layer -----------------------------------------------------------------------------------

WITH_MTP = [*full(GLM, [0, 1, 2]), *full(GLM, [3], DSA_NAMES), *full(GLM, [4, 5], DSA_NAMES)]


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 4},
        {"text_config": {"num_hidden_layers": 4}},
        {"text_config": {"num_hidden_layers": 4}, "vision_config": {"num_hidden_layers": 2}},
    ],
    ids=["flat", "in text_config", "beside a vision_config"],
)
def test_layers_behind_the_decoders_own_are_mtp_layers(
    config: dict[str, object], tmp_path: Path
) -> None:
    with opened(tmp_path, WITH_MTP, config) as checkpoint:
        assert checkpoint.layers() == (0, 1, 2, 3, 4, 5)
        assert [index.is_mtp for index in checkpoint.layers()] == [False] * 4 + [True] * 2
        assert not checkpoint.layer(3).index.is_mtp
        assert checkpoint.layer(4).index.is_mtp
        assert checkpoint.layer(np.int64(5)).index.is_mtp


def test_without_a_config_no_layer_is_marked(tmp_path: Path) -> None:
    with opened(tmp_path, WITH_MTP) as checkpoint:
        assert not any(index.is_mtp for index in checkpoint.layers())


def test_the_config_of_a_vision_tower_marks_no_layer(tmp_path: Path) -> None:
    with opened(tmp_path, WITH_MTP, {"vision_config": {"num_hidden_layers": 2}}) as checkpoint:
        assert not any(index.is_mtp for index in checkpoint.layers())


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"\xff"]
    + [b'{"num_hidden_layers":%s}' % n for n in (b'"4"', b"true", b"-1", b"4.5", b"1e999", b"[]")],
)
def test_a_config_that_cannot_be_read_is_not_passed_over(text: bytes, tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", named(WITH_MTP))
    (tmp_path / "config.json").write_bytes(text)
    with open_checkpoint(tmp_path) as checkpoint:
        with pytest.raises(ConfigError) as caught:
            checkpoint.layers()
        assert str(tmp_path / "config.json") in str(caught.value)


def test_a_layers_number_keeps_its_mark_in_a_pickle() -> None:
    for is_mtp in (False, True):
        index = pickle.loads(pickle.dumps(LayerIndex(45, is_mtp=is_mtp)))
        assert (type(index), index, index.is_mtp) == (LayerIndex, 45, is_mtp)


# A layer as a source -----------------------------------------------------------------------------


def test_a_layer_may_lie_in_several_shards(tmp_path: Path) -> None:
    """Layer 1 as in GLM-5.3-Flash: five of its tensors are in the next shard."""
    one, two, three = numbered(3)
    moved = (
        "o_proj.weight",
        "q_conv1d.weight",
        "q_proj.weight",
        "v_conv1d.weight",
        "v_proj.weight",
    )
    first = {n: d for n, d in layer_tensors(GLM, 1).items() if not n.endswith(moved)}
    second = {n: d for n, d in layer_tensors(GLM, 1).items() if n.endswith(moved)}
    assert (len(first), len(second)) == (10, 5)
    shards = {one: layer_tensors(GLM, 2), two: first, three: {**second, **layer_tensors(GLM, 0)}}
    with open_checkpoint(write_checkpoint(tmp_path / "folder", shards)) as checkpoint:
        source = checkpoint.layer(1)
        assert sorted(source.names()) == sorted(KDA_NAMES)
        held = {}
        for name in KDA_NAMES:
            tensor = source.get(name)
            assert tensor is not None
            assert tensor.data == f"{GLM}1.{name}".encode()
            assert tensor.place is not None
            held[name] = Path(tensor.place.file.path).name
        assert {held[f"self_attn.{name}"] for name in moved} == {three}
        assert list(held.values()).count(two) == 10


def test_a_layer_is_a_tensor_source(tmp_path: Path) -> None:
    others = ("hc_attn_fn", "input_layernorm.weight", "mlp.experts.0.up_proj.weight")
    with opened(tmp_path, [*GLOBALS, *full(GLM, [0, 1], (*KDA_NAMES, *others))]) as checkpoint:
        source: KdaTensorSource = checkpoint.layer(1)
        names = source.names()
        assert type(names) is list
        assert len(names) == len(set(names))
        assert set(names) == {*KDA_NAMES, *others}
        for name in names:
            tensor = source.get(name)
            assert tensor is not None
            assert tensor.data == f"{GLM}1.{name}".encode()


@pytest.mark.parametrize(
    "absent",
    [
        *("", "self_attn", "self_attn.", "A_log", "self_attn.A_log ", "self_attn.a_log"),
        *("lm_head.weight", GLM + "1.self_attn.A_log", "0.self_attn.A_log", ".self_attn.A_log"),
    ],
)
def test_a_layer_has_none_for_what_it_does_not_hold(absent: str, tmp_path: Path) -> None:
    with opened(tmp_path, [*GLOBALS, *full(GLM, [0, 1])]) as checkpoint:
        source = checkpoint.layer(1)
        assert source.get(absent) is None
        assert source.info(absent) is None
        assert absent not in source.names()


def test_a_layer_tells_dtype_and_shape_without_the_bytes(tmp_path: Path) -> None:
    name = f"{GLM}0.self_attn.q_conv1d.weight"
    write_shard(
        tmp_path / "model.safetensors",
        {"x": b"1", name: Stored("BF16", (4, 1, 2), bytes(range(16))), f"{GLM}0.hc": b"2"},
    )
    with open_checkpoint(tmp_path) as checkpoint:
        source = checkpoint.layer(0)
        info, tensor = (
            source.info("self_attn.q_conv1d.weight"),
            source.get("self_attn.q_conv1d.weight"),
        )
        assert info is not None
        assert tensor is not None
        assert (info.dtype, info.shape, info.nbytes) == ("BF16", (4, 1, 2), 16)
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("BF16", (4, 1, 2), 16)
        assert (info.begin, info.end) == (1, 17)
        assert tensor.data == bytes(range(16))
        assert tensor.data.readonly


def test_a_layer_says_where_it_stands(tmp_path: Path) -> None:
    with opened(tmp_path, full(GLM, [0, 1]), {"num_hidden_layers": 1}) as checkpoint:
        source = checkpoint.layer(1)
        assert (source.index, source.index.is_mtp) == (1, True)
        assert source.prefix == f"{GLM}1."
        assert "1" in repr(source)


# Layers that the config counts -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (4, "2 missing: 1, 3"),
        (15, f"13 missing: 1, {', '.join(map(str, range(3, 14)))} and 1 more"),
    ],
    ids=["two", "more than are shown"],
)
def test_layers_that_the_config_counts_and_no_name_shows_are_told(
    count: int, told: str, tmp_path: Path
) -> None:
    with (
        opened(tmp_path, full(GLM, [0, 2]), {"num_hidden_layers": count}) as checkpoint,
        pytest.raises(CheckpointError) as caught,
    ):
        checkpoint.require_every_layer()
    assert caught.value.code is Code.LAYERS_MISSING
    assert caught.value.path == str(tmp_path)
    assert caught.value.got == told


@pytest.mark.parametrize(
    "config",
    [None, {"hidden_size": 8}, {"num_hidden_layers": 2}, {"num_hidden_layers": 1}],
    ids=["no config", "no count", "as many", "an MTP layer behind them"],
)
def test_where_no_counted_layer_is_missing_nothing_is_told(
    config: Mapping[str, object] | None, tmp_path: Path
) -> None:
    with opened(tmp_path, full(GLM, [0, 1]), config) as checkpoint:
        checkpoint.require_every_layer()


# Names that nobody wrote by hand -----------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    prefix=st.sampled_from(sorted(PREFIXES.values())),
    numbers=st.lists(st.integers(0, 300), min_size=1, max_size=12, unique=True),
    rests=st.lists(
        st.text(st.sampled_from("layers.01\n"), min_size=1, max_size=12), max_size=6, unique=True
    ),
    order=st.randoms(use_true_random=False),
)
def test_each_name_belongs_to_the_layer_whose_number_it_has(
    prefix: str, numbers: list[int], rests: list[str], order: object
) -> None:
    expected = {n: {f"{prefix}{n}.{name}" for name in (*KDA_NAMES, *rests)} for n in numbers}
    names = sorted(set().union(*expected.values()))
    order.shuffle(names)  # type: ignore[attr-defined]
    found = find_layers([*names, *GLOBALS])
    assert found.prefix == prefix
    assert list(found.by_number) == sorted(numbers)
    assert {n: set(full_names) for n, full_names in found.by_number.items()} == expected
