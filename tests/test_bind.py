"""`bind_kda_weights`: exactly the fifteen tensors of a KDA block, or every reason why not."""

from __future__ import annotations

import errno
import gc
import inspect
import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import (
    FIELD_LEAVES,
    MEDIUM,
    UNEVEN,
    Geometry,
    Stored,
    Written,
    having,
    kda_block,
    payload,
    save_raw_shard,
    without,
    write_checkpoint,
)
from support.refused_calls import Refused, where_refused

from kda_stream import (
    KDA_TENSORS,
    ArgumentError,
    BindError,
    BindProblem,
    Checkpoint,
    ClosedError,
    ErrorCode,
    KdaConfig,
    KdaStreamError,
    KdaWeights,
    PayloadError,
    PinnedArena,
    ProblemKind,
    RawTensor,
    SlotError,
    bind_kda_weights,
    check_kda_weights,
    kda_slot_bytes,
    open_checkpoint,
    stream_kda_layers,
)
from kda_stream.staging.arena import SlotState

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
each_read = pytest.mark.parametrize("read", ["mapped", "positional", "direct", "auto"])
RunPython = Callable[..., Any]

# At hidden 24, 3 heads of 5, kernel 3.
SHAPES = {
    "q_proj": (15, 24),
    "k_proj": (15, 24),
    "v_proj": (15, 24),
    "conv": (45, 3),
    "f_a": (5, 24),
    "f_b": (15, 5),
    "g_a": (5, 24),
    "g_b": (15, 5),
    "b_proj": (3, 24),
    "a_log": (3,),
    "dt_bias": (15,),
    "o_norm": (5,),
    "o_proj": (24, 15),
}
LAYER_BYTES = 4156
LEAVES = list(kda_block(UNEVEN))
OTHER_NAMES = ["input_layernorm.weight", "mlp.gate_proj.weight", "hc_attn_fn", "self_attention.x"]


class DictSource:
    """A layer held in a dict; remembers what it was asked for."""

    def __init__(self, tensors: dict[str, RawTensor]) -> None:
        self.tensors = tensors
        self.asked: list[str] = []

    def get(self, name: str) -> RawTensor | None:
        self.asked.append(name)
        return self.tensors.get(name)

    def names(self) -> list[str]:
        return list(self.tensors)

    def change(self, leaf: str, **fields: Any) -> None:
        """Replace what is stored of an attention tensor; its bytes follow its dtype and shape."""
        before = kda_block(UNEVEN)[leaf]
        stored = replace(before, **fields)
        self.tensors[f"self_attn.{leaf}"] = RawTensor(
            stored.dtype, stored.shape, bytes(stored.nbytes) if stored.data is None else stored.data
        )


def expected_bytes() -> dict[str, bytes]:
    block = kda_block(UNEVEN)
    return {
        field: b"".join(payload(leaf, block[leaf].nbytes) for leaf in leaves)
        for field, leaves in FIELD_LEAVES.items()
    }


@pytest.fixture
def source() -> DictSource:
    """A good layer in memory, with four names beside its attention."""
    tensors = {
        f"self_attn.{leaf}": RawTensor(t.dtype, t.shape, payload(leaf, t.nbytes))
        for leaf, t in kda_block(UNEVEN).items()
    }
    tensors |= {name: RawTensor("U8", (1,), b"x") for name in OTHER_NAMES}
    return DictSource(tensors)


def refused(config: KdaConfig, source: Any) -> tuple[BindProblem, ...]:
    """The problems that a bind reports, which are those of a check from metadata alone."""
    with PinnedArena(kda_slot_bytes(config), lock="off") as arena:
        arena.claim().memory()[:] = b"\xa5" * arena.slots[0].nbytes
        arena.slots[0].abandon()
        with pytest.raises(BindError) as caught:
            bind_kda_weights(config, 7, source, into=arena)
        assert caught.value.code is ErrorCode.BIND_REFUSED
        assert arena.slots[0].state is SlotState.FREE
        assert set(arena.claim().memory()) == {0xA5}, "the slot was written"
        arena.slots[0].abandon()
    with pytest.raises(BindError) as checked:
        check_kda_weights(config, 7, source)
    assert checked.value.problems == caught.value.problems
    text = str(caught.value)
    assert "\n" not in text
    assert "7" in text
    for problem in caught.value.problems:
        assert problem.layer_idx == 7
        assert problem.tensor in text
    return caught.value.problems


def only(problems: tuple[BindProblem, ...]) -> BindProblem:
    assert len(problems) == 1, problems
    return problems[0]


def bytes_of(weights: KdaWeights) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in weights.items()}


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


# --- a layer that is as it should be --------------------------------------------------------------


def test_every_byte_is_bound_as_it_was_stored(config: KdaConfig, source: DictSource) -> None:
    weights, _ = bind_kda_weights(config, 3, source)
    assert bytes_of(weights) == expected_bytes()


@each_read
def test_every_byte_of_every_layer_of_a_checkpoint_is_bound_as_it_was_stored(
    config: KdaConfig, checkpoint: Checkpoint, written: Written, read: Any
) -> None:
    for layer in written.kda_layers:
        weights, report = bind_kda_weights(config, layer, checkpoint.layer(layer), read=read)
        assert bytes_of(weights) == written.expected(layer)
        assert report.layer_idx == layer
        weights.release()


def test_shapes_and_dtypes_are_those_of_the_table(config: KdaConfig, source: DictSource) -> None:
    weights, _ = bind_kda_weights(config, 3, source)
    assert {name: tensor.shape for name, tensor in weights.items()} == SHAPES
    dtypes = {name: tensor.dtype for name, tensor in weights.items()}
    assert dtypes == {n: "F32" if n in ("a_log", "dt_bias") else "BF16" for n in SHAPES}
    assert weights.conv.shape == (config.conv_dim, config.conv_kernel)


def test_the_conv_tensors_are_joined_in_q_k_v_order(config: KdaConfig, source: DictSource) -> None:
    for fill, part in zip(b"qkv", "qkv", strict=True):
        source.change(f"{part}_conv1d.weight", data=bytes([fill]) * 90)
    weights, _ = bind_kda_weights(config, 0, source)
    assert bytes(weights.conv.data) == b"q" * 90 + b"k" * 90 + b"v" * 90


def test_data_are_bytes_that_cannot_be_written(config: KdaConfig, source: DictSource) -> None:
    weights, _ = bind_kda_weights(config, 0, source)
    for name, tensor in weights.items():
        assert tensor.data.readonly, name
        assert (tensor.data.format, tensor.data.ndim, tensor.data.itemsize) == ("B", 1, 1)
        assert tensor.data.contiguous


def test_data_can_be_seen_as_an_array_without_a_copy(config: KdaConfig, source: DictSource) -> None:
    weights, _ = bind_kda_weights(config, 0, source)
    a_log = np.frombuffer(weights.a_log.data, dtype="<f4").reshape(weights.a_log.shape)
    assert a_log.tobytes() == payload("A_log", 12)
    assert not a_log.flags.writeable


def test_an_alignment_of_what_is_not_copied_is_refused(
    config: KdaConfig, source: DictSource
) -> None:
    with pytest.raises(ArgumentError, match="what is not copied lies where it is"):
        bind_kda_weights(config, 0, source, copy=False, alignment=256)


@pytest.mark.parametrize(
    "geometry",
    [(24, 3, 5, 3), (8, 1, 1, 1), (64, 4, 16, 4), (1, 1, 1, 1), (7, 5, 3, 2)],
    ids=repr,
)
@pytest.mark.parametrize("alignment", [1, 16, 256, 4096])
def test_tensors_start_at_multiples_of_the_alignment_and_share_no_byte(
    tmp_path: Path, geometry: tuple[int, int, int, int], alignment: int
) -> None:
    config = KdaConfig(*geometry)
    written = write_checkpoint(tmp_path, geometry=Geometry(*geometry), layers=1)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        PinnedArena(kda_slot_bytes(config), lock="off") as arena,
    ):
        begin = address(arena.slots[0].claim().memory())
        arena.slots[0].abandon()
        weights, report = bind_kda_weights(
            config, 0, checkpoint.layer(0), into=arena, alignment=alignment
        )
        assert bytes_of(weights) == written.expected(0)
        places = sorted((address(t.data) - begin, t.data.nbytes) for _, t in weights.items())
        ends = [0] + [at + size for at, size in places]
        assert all(at % alignment == 0 for at, _ in places)
        assert all(at - end in range(alignment) for (at, _), end in zip(places, ends, strict=False))
        assert report.read.alignment_bytes is not None
        assert report.read.alignment_bytes >= alignment


def test_a_slot_for_a_glm_5_3_flash_layer_is_a_tenth_of_a_percent_more_than_the_layer() -> None:
    assert kda_slot_bytes(KdaConfig(4096, 64, 128, 4)) == 275_739_136
    assert 275_739_136 / 275_481_088 < 1.001


def test_the_report_counts_what_was_seen(config: KdaConfig, source: DictSource) -> None:
    _, report = bind_kda_weights(config, 3, source)
    assert report.layer_idx == 3
    assert (report.bound, report.self_attn_seen) == (15, 15)
    assert report.non_attn_seen == len(OTHER_NAMES)
    assert report.unknown_self_attn == ()
    assert report.bytes == LAYER_BYTES == sum(t.nbytes for t in kda_block(UNEVEN).values())
    assert report.shards == ()
    assert report.read.path == "memory"
    assert report.lock is not None
    assert pickle.loads(pickle.dumps(report)) == report


def test_the_report_names_the_shards_that_a_layer_spans(
    config: KdaConfig, checkpoint: Checkpoint, written: Written
) -> None:
    expected = {str(written.shard_of(1, leaf)) for leaf in LEAVES}
    assert len(expected) == 2
    _, report = bind_kda_weights(config, 1, checkpoint.layer(1))
    assert len(report.shards) == 2
    assert set(report.shards) == expected


def test_names_outside_self_attn_are_counted_and_never_asked_for(
    config: KdaConfig, source: DictSource
) -> None:
    _, report = bind_kda_weights(config, 0, source)
    assert report.non_attn_seen == 4
    assert set(source.asked) == {f"self_attn.{leaf}" for leaf in LEAVES}


def test_a_check_says_what_a_bind_would_from_metadata_alone(
    config: KdaConfig, checkpoint: Checkpoint
) -> None:
    source = checkpoint.layer(1)
    report = check_kda_weights(config, 1, source)
    _, bound = bind_kda_weights(config, 1, source)
    assert (report.read.path, report.lock) == ("none", None)
    assert replace(bound, read=report.read, lock=None) == report


@linux_only
def test_a_check_maps_no_file(run_python: RunPython, written: Written) -> None:
    script = """
        import json, sys
        from kda_stream import KdaConfig, check_kda_weights, open_checkpoint
        with open_checkpoint(sys.argv[1]) as checkpoint:
            check_kda_weights(KdaConfig(24, 3, 5, 3), 0, checkpoint.layer(0))
            print(json.dumps(sys.argv[1] in open("/proc/self/maps").read()))
    """
    assert run_python(script, written.folder) is False


# --- tensors that are missing, unknown or given twice ---------------------------------------------


@pytest.mark.parametrize("leaf", LEAVES)
def test_each_missing_tensor_is_named(config: KdaConfig, source: DictSource, leaf: str) -> None:
    del source.tensors[f"self_attn.{leaf}"]
    problem = only(refused(config, source))
    stored = kda_block(UNEVEN)[leaf]
    assert problem.kind is ProblemKind.MISSING
    assert problem.tensor == f"self_attn.{leaf}"
    assert (problem.expected_dtype, problem.expected_shape) == (stored.dtype, stored.shape)
    assert (problem.shard, problem.stored_dtype, problem.stored_shape) == (None, None, None)


@pytest.mark.parametrize(
    "leaf",
    [
        "q_proj.bias",
        "q_proj.weight_scale_inv",
        "q_proj.scales",
        "A_log.weight",
        "a_log",
        "conv1d.weight",
        "forget_gate.A_log",
        "g_proj.weight",
        "indexer.wk.weight",
        "",
        " ",
    ],
)
def test_an_unknown_attention_tensor_is_refused(
    config: KdaConfig, source: DictSource, leaf: str
) -> None:
    source.tensors[f"self_attn.{leaf}"] = RawTensor("BF16", (1,), b"xx")
    problem = only(refused(config, source))
    assert (problem.kind, problem.tensor) == (ProblemKind.UNKNOWN, f"self_attn.{leaf}")


@pytest.mark.parametrize("name", ["self_attn", "self_attn_q.weight", "mlp.self_attn.A_log", "x"])
def test_a_name_that_only_resembles_attention_is_counted_as_other(
    config: KdaConfig, source: DictSource, name: str
) -> None:
    source.tensors[name] = RawTensor("BF16", (1,), b"xx")
    _, report = bind_kda_weights(config, 0, source)
    assert report.non_attn_seen == len(OTHER_NAMES) + 1
    assert name not in source.asked


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_name_that_a_source_gives_twice_is_refused(
    config: KdaConfig, source: DictSource, leaf: str
) -> None:
    class Twice(DictSource):
        def names(self) -> list[str]:
            return [*super().names(), f"self_attn.{leaf}"]

    problem = only(refused(config, Twice(source.tensors)))
    assert (problem.kind, problem.tensor) == (ProblemKind.REPEATED, f"self_attn.{leaf}")


def test_a_tensor_that_is_listed_and_not_given_is_missing(
    config: KdaConfig, source: DictSource
) -> None:
    class Lost(DictSource):
        def get(self, name: str) -> RawTensor | None:
            return None if name == "self_attn.dt_bias" else super().get(name)

    problem = only(refused(config, Lost(source.tensors)))
    assert (problem.kind, problem.tensor) == (ProblemKind.MISSING, "self_attn.dt_bias")


def test_a_tensor_that_is_given_and_not_listed_is_missing(
    config: KdaConfig, source: DictSource
) -> None:
    class Hidden(DictSource):
        def names(self) -> list[str]:
            return [name for name in super().names() if name != "self_attn.dt_bias"]

    problem = only(refused(config, Hidden(source.tensors)))
    assert (problem.kind, problem.tensor) == (ProblemKind.MISSING, "self_attn.dt_bias")


@pytest.mark.parametrize("layer", [3, 8], ids=["DSA", "MTP"])
def test_a_dsa_layer_is_refused(config: KdaConfig, checkpoint: Checkpoint, layer: int) -> None:
    problems = refused_of(checkpoint, config, layer)
    kinds = [problem.kind for problem in problems]
    assert kinds.count(ProblemKind.MISSING) == 14  # both kinds have an o_proj.weight
    assert kinds.count(ProblemKind.UNKNOWN) == 17
    assert kinds.count(ProblemKind.DTYPE) == 1


def refused_of(checkpoint: Checkpoint, config: KdaConfig, layer: int) -> tuple[Any, ...]:
    with pytest.raises(BindError) as caught:
        bind_kda_weights(config, layer, checkpoint.layer(layer))
    return caught.value.problems


def test_a_layer_with_no_names_lacks_all_fifteen(config: KdaConfig) -> None:
    problems = refused(config, DictSource({}))
    assert {p.tensor for p in problems} == {spec.name for spec in KDA_TENSORS}
    assert {p.kind for p in problems} == {ProblemKind.MISSING}


# --- tensors of another dtype, shape or size ------------------------------------------------------


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [
        (leaf, dtype)
        for leaf, stored in kda_block(UNEVEN).items()
        for dtype in ("BF16", "F32", "F8_E4M3", "U8")
        if dtype != stored.dtype
    ],
)
def test_each_dtype_but_the_right_one_is_refused(
    config: KdaConfig, source: DictSource, leaf: str, dtype: str
) -> None:
    right = kda_block(UNEVEN)[leaf]
    source.change(leaf, dtype=dtype)
    problem = only(refused(config, source))
    assert problem.kind is ProblemKind.DTYPE
    assert problem.tensor == f"self_attn.{leaf}"
    assert (problem.stored_dtype, problem.expected_dtype) == (dtype, right.dtype)
    assert problem.stored_shape == problem.expected_shape == right.shape


@pytest.mark.parametrize("dtype", ["F16", "I16", "U16", "bfloat16", "bf16", "", "BF16 "])
def test_another_dtype_of_the_same_size_is_refused(
    config: KdaConfig, source: DictSource, dtype: str
) -> None:
    right = kda_block(UNEVEN)["q_proj.weight"]
    source.tensors["self_attn.q_proj.weight"] = RawTensor(dtype, right.shape, bytes(right.nbytes))
    problem = only(refused(config, source))
    assert (problem.kind, problem.stored_dtype) == (ProblemKind.DTYPE, dtype)


WRONG_SHAPES = {
    "o_proj transposed, the size right": ("o_proj.weight", (15, 24)),
    "q_proj transposed, the size right": ("q_proj.weight", (24, 15)),
    "q_proj flat": ("q_proj.weight", (360,)),
    "q_proj with a singleton": ("q_proj.weight", (1, 15, 24)),
    "q_proj by one row short": ("q_proj.weight", (14, 24)),
    "q, k and v in one": ("q_proj.weight", (45, 24)),
    "conv as [Q,K,1]": ("q_conv1d.weight", (15, 3, 1)),
    "conv as [1,Q,K]": ("k_conv1d.weight", (1, 15, 3)),
    "conv as [Q,K]": ("v_conv1d.weight", (15, 3)),
    "conv of three in one": ("v_conv1d.weight", (45, 1, 3)),
    "conv of a longer kernel": ("q_conv1d.weight", (15, 1, 4)),
    "A_log as [1,1,H,1]": ("A_log", (1, 1, 3, 1)),
    "A_log as long as head_dim": ("A_log", (5,)),
    "A_log as long as qkv_dim": ("A_log", (15,)),
    "A_log as a scalar": ("A_log", ()),
    "dt_bias as [H,D]": ("dt_bias", (3, 5)),
    "dt_bias per head": ("dt_bias", (3,)),
    "dt_bias by one short": ("dt_bias", (14,)),
    "dt_bias by one long": ("dt_bias", (16,)),
    "o_norm per channel": ("o_norm.weight", (15,)),
    "o_norm as [1,D]": ("o_norm.weight", (1, 5)),
    "f_a transposed": ("f_a_proj.weight", (24, 5)),
    "g_b transposed": ("g_b_proj.weight", (5, 15)),
    "b_proj per channel": ("b_proj.weight", (15, 24)),
    "nothing in it": ("b_proj.weight", (0, 24)),
}


@pytest.mark.parametrize(("leaf", "shape"), WRONG_SHAPES.values(), ids=WRONG_SHAPES)
def test_another_shape_is_refused(
    config: KdaConfig, source: DictSource, leaf: str, shape: tuple[int, ...]
) -> None:
    right = kda_block(UNEVEN)[leaf]
    source.change(leaf, shape=shape)
    problem = only(refused(config, source))
    assert problem.kind is ProblemKind.SHAPE
    assert problem.tensor == f"self_attn.{leaf}"
    assert (problem.stored_shape, problem.expected_shape) == (shape, right.shape)
    assert problem.stored_dtype == problem.expected_dtype == right.dtype


@pytest.mark.parametrize("change", [-1, 1, 2], ids=["a byte short", "a byte long", "an element"])
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_byte_count_that_does_not_fit_the_shape_is_refused(
    config: KdaConfig, source: DictSource, leaf: str, change: int
) -> None:
    right = kda_block(UNEVEN)[leaf].nbytes
    source.change(leaf, data=bytes(right + change))
    problem = only(refused(config, source))
    assert problem.kind is ProblemKind.BYTES
    assert problem.tensor == f"self_attn.{leaf}"
    assert (problem.stored_bytes, problem.expected_bytes) == (right + change, right)


def test_no_bytes_at_all_are_refused(config: KdaConfig, source: DictSource) -> None:
    source.change("o_norm.weight", data=b"")
    problem = only(refused(config, source))
    assert (problem.kind, problem.stored_bytes) == (ProblemKind.BYTES, 0)


def test_an_f32_conv_is_a_matter_of_dtype_and_not_of_bytes(
    config: KdaConfig, source: DictSource
) -> None:
    source.change("q_conv1d.weight", dtype="F32")
    problem = only(refused(config, source))
    assert problem.kind is ProblemKind.DTYPE


def test_dtype_is_judged_before_shape_and_shape_before_bytes(
    config: KdaConfig, source: DictSource
) -> None:
    source.change("q_conv1d.weight", dtype="F32", shape=(15, 3, 1), data=b"xyz")
    source.change("k_conv1d.weight", shape=(15, 3, 1), data=b"xyz")
    source.change("v_conv1d.weight", data=b"xyz")
    kinds = {problem.tensor[10]: problem.kind for problem in refused(config, source)}
    assert kinds == {"q": ProblemKind.DTYPE, "k": ProblemKind.SHAPE, "v": ProblemKind.BYTES}


def test_every_problem_of_a_layer_is_listed(config: KdaConfig, source: DictSource) -> None:
    del source.tensors["self_attn.A_log"]
    source.change("dt_bias", dtype="BF16")
    source.change("o_proj.weight", shape=(15, 24))
    source.change("o_norm.weight", data=b"")
    source.tensors["self_attn.q_proj.bias"] = RawTensor("BF16", (1,), b"xx")
    assert {problem.tensor: problem.kind for problem in refused(config, source)} == {
        "self_attn.A_log": ProblemKind.MISSING,
        "self_attn.dt_bias": ProblemKind.DTYPE,
        "self_attn.o_proj.weight": ProblemKind.SHAPE,
        "self_attn.o_norm.weight": ProblemKind.BYTES,
        "self_attn.q_proj.bias": ProblemKind.UNKNOWN,
    }


def test_another_geometry_lists_every_tensor_that_it_changes(source: DictSource) -> None:
    problems = refused(KdaConfig(hidden=25, heads=3, head_dim=5, conv_kernel=3), source)
    assert len(problems) == 7  # q, k, v, f_a, g_a, b and o_proj have the width of the model
    assert {problem.kind for problem in problems} == {ProblemKind.SHAPE}


def test_a_refusal_of_stored_tensors_says_all_that_is_needed_to_act(
    tmp_path: Path, config: KdaConfig
) -> None:
    q_conv = "model.layers.1.self_attn.q_conv1d.weight"
    a_log = "model.layers.1.self_attn.A_log"
    written = write_checkpoint(
        tmp_path,
        prefix="model.layers.",
        change=having({q_conv: Stored("F32", (15, 1, 3)), a_log: Stored("F32", (1, 1, 3, 1))}),
    )
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(BindError) as caught:
        bind_kda_weights(config, 1, checkpoint.layer(1))
    by_tensor = {problem.tensor: problem for problem in caught.value.problems}
    conv, log = by_tensor["self_attn.q_conv1d.weight"], by_tensor["self_attn.A_log"]
    assert (conv.stored_dtype, conv.expected_dtype) == ("F32", "BF16")
    assert conv.stored_shape == conv.expected_shape == (15, 1, 3)
    assert (log.stored_shape, log.expected_shape) == ((1, 1, 3, 1), (3,))
    assert conv.shard == str(written.shard_of(1, "q_conv1d.weight"))
    assert log.shard == str(written.shard_of(1, "A_log"))
    assert conv.shard != log.shard
    text = str(caught.value)
    for part in (conv.tensor, "F32", "BF16", "[15, 1, 3]", log.tensor, "[1, 1, 3, 1]", "[3]"):
        assert part in text
    for shard in (conv.shard, log.shard):
        assert Path(shard).name in text


def test_a_refusal_with_thirty_problems_keeps_them_all(
    config: KdaConfig, source: DictSource
) -> None:
    for n in range(30):
        source.tensors[f"self_attn.extra.{n}"] = RawTensor("BF16", (1,), b"xx")
    with pytest.raises(BindError) as caught:
        bind_kda_weights(config, 0, source)
    assert len(caught.value.problems) == 30


def test_a_refusal_tells_forty_problems_and_counts_the_rest(
    config: KdaConfig, source: DictSource
) -> None:
    for n in range(50):
        source.tensors[f"self_attn.extra.{n:02}"] = RawTensor("BF16", (1,), b"xx")
    with pytest.raises(BindError) as caught:
        bind_kda_weights(config, 0, source)
    told = caught.value.what.split("; ")
    assert told[39].startswith("self_attn.extra.39")
    assert told[40:] == ["and 10 more"]
    assert len(caught.value.problems) == 50


def test_the_refusals_of_several_layers_tell_a_fault_that_they_share_once(
    tmp_path: Path, config: KdaConfig
) -> None:
    wrong = {f"model.layers.{n}.self_attn.A_log": Stored("BF16", (3,)) for n in (0, 2)}
    wrong["model.layers.2.self_attn.q_proj.bias"] = Stored("BF16", (15,))
    write_checkpoint(tmp_path, prefix="model.layers.", change=having(wrong))
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(BindError) as caught:
        stream_kda_layers(checkpoint, config=config)
    error = caught.value
    assert (error.code, error.path) == (ErrorCode.BIND_REFUSED, str(tmp_path))
    assert error.what == (
        "2 of 6 layers are refused: "
        "self_attn.A_log has the wrong dtype: expected F32 [3], got BF16 [3] in layers 0, 2; "
        "self_attn.q_proj.bias is no tensor of a KDA block: stored BF16 [15] in layer 2"
    )
    assert [(p.layer_idx, p.tensor.removeprefix("self_attn.")) for p in error.problems] == [
        (0, "A_log"),
        (2, "A_log"),
        (2, "q_proj.bias"),
    ]


def test_the_refusal_of_one_layer_of_several_is_told_as_itself(
    tmp_path: Path, config: KdaConfig
) -> None:
    wrong = {"model.layers.2.self_attn.A_log": Stored("BF16", (3,))}
    written = write_checkpoint(tmp_path, prefix="model.layers.", change=having(wrong))
    with open_checkpoint(tmp_path) as checkpoint:
        with pytest.raises(BindError) as streamed:
            stream_kda_layers(checkpoint, config=config)
        with pytest.raises(BindError) as bound:
            bind_kda_weights(config, 2, checkpoint.layer(2))
    assert str(streamed.value) == str(bound.value)
    assert streamed.value.path == str(written.shard_of(2, "A_log"))


def test_a_refusal_pickles_with_its_problems(config: KdaConfig, source: DictSource) -> None:
    del source.tensors["self_attn.A_log"]
    with pytest.raises(BindError) as caught:
        bind_kda_weights(config, 0, source)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.problems == caught.value.problems
    assert str(again) == str(caught.value)


# --- where the bytes go ---------------------------------------------------------------------------


def test_into_an_arena_takes_a_free_slot(config: KdaConfig, source: DictSource) -> None:
    with PinnedArena(kda_slot_bytes(config), slots=2, lock="off") as arena:
        first, _ = bind_kda_weights(config, 0, source, into=arena)
        second, _ = bind_kda_weights(config, 1, source, into=arena)
        assert bytes_of(first) == bytes_of(second) == expected_bytes()
        assert [slot.state for slot in arena.slots] == [SlotState.LENT] * 2
        first.release()
        assert sorted(slot.state.value for slot in arena.slots) == ["free", "lent"]


def test_into_an_arena_without_a_free_slot_is_refused(
    config: KdaConfig, source: DictSource
) -> None:
    with PinnedArena(kda_slot_bytes(config), lock="off") as arena:
        weights, _ = bind_kda_weights(config, 0, source, into=arena)
        with pytest.raises(SlotError) as caught:
            bind_kda_weights(config, 1, source, into=arena)
        assert caught.value.code is ErrorCode.SLOT_NOT_FREE
        assert bytes_of(weights) == expected_bytes()


def test_into_a_slot_takes_that_slot(config: KdaConfig, source: DictSource) -> None:
    with PinnedArena(kda_slot_bytes(config), slots=3, lock="off") as arena:
        begins = [address(slot.claim().memory()) for slot in arena.slots]
        for slot in arena.slots:
            slot.abandon()
        weights, report = bind_kda_weights(config, 0, source, into=arena.slots[1])
        assert min(address(tensor.data) for _, tensor in weights.items()) == begins[1]
        assert [slot.state.value for slot in arena.slots] == ["free", "lent", "free"]
        assert report.lock == arena.report


def test_a_larger_slot_will_do(config: KdaConfig, source: DictSource) -> None:
    with PinnedArena(3 * kda_slot_bytes(config), lock="off") as arena:
        weights, _ = bind_kda_weights(config, 0, source, into=arena)
        assert bytes_of(weights) == expected_bytes()


def test_a_slot_that_is_too_small_is_refused_and_stays_free(
    config: KdaConfig, source: DictSource
) -> None:
    with PinnedArena(kda_slot_bytes(config) - 1, lock="off") as arena:
        arena.claim().memory()[:] = b"\xa5" * arena.slots[0].nbytes
        arena.slots[0].abandon()
        for into in (arena, arena.slots[0]):
            with pytest.raises(SlotError) as caught:
                bind_kda_weights(config, 0, source, into=into)
            assert caught.value.code is ErrorCode.SLOT_TOO_SMALL
            assert str(kda_slot_bytes(config)) in str(caught.value)
            assert arena.slots[0].state is SlotState.FREE
        assert set(arena.claim().memory()) == {0xA5}
        arena.slots[0].abandon()


def test_a_lent_slot_is_refused_and_keeps_its_bytes(config: KdaConfig, source: DictSource) -> None:
    other = DictSource(dict(source.tensors))
    for leaf in LEAVES:
        other.change(leaf)  # all zeros
    with PinnedArena(kda_slot_bytes(config), lock="off") as arena:
        weights, _ = bind_kda_weights(config, 0, source, into=arena.slots[0])
        with pytest.raises(SlotError) as caught:
            bind_kda_weights(config, 1, other, into=arena.slots[0])
        assert caught.value.code is ErrorCode.SLOT_NOT_FREE
        assert bytes_of(weights) == expected_bytes()
        weights.release()
        again, _ = bind_kda_weights(config, 1, other, into=arena.slots[0])
        assert set(bytes(again.q_proj.data)) == {0}


def test_a_slot_that_somebody_fills_is_refused_and_stays_theirs(
    config: KdaConfig, source: DictSource
) -> None:
    with PinnedArena(kda_slot_bytes(config), lock="off") as arena:
        slot = arena.slots[0].claim()
        with pytest.raises(SlotError):
            bind_kda_weights(config, 0, source, into=slot)
        assert slot.state is SlotState.FILLING
        slot.abandon()


def test_a_closed_arena_is_refused(config: KdaConfig, source: DictSource) -> None:
    arena = PinnedArena(kda_slot_bytes(config), lock="off")
    arena.close()
    for into in (arena, arena.slots[0]):
        with pytest.raises(ClosedError):
            bind_kda_weights(config, 0, source, into=into)


class NotRaw:
    """A source that hands out bare bytes."""

    def names(self) -> list[str]:
        return ["self_attn.A_log"]

    def get(self, name: str) -> bytes:
        return bytes(len(name))


@pytest.mark.parametrize("wrong", [{"self_attn.A_log": b""}, NotRaw(), None], ids=type)
def test_what_is_no_source_is_refused_with_a_sentence(config: KdaConfig, wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="source"):
        bind_kda_weights(config, 0, wrong)


def test_a_layer_under_another_number_is_refused(config: KdaConfig, written: Written) -> None:
    with (
        open_checkpoint(written.folder) as checkpoint,
        pytest.raises(ArgumentError, match="layer_idx"),
    ):
        bind_kda_weights(config, 1, checkpoint.layer(0))


@pytest.mark.parametrize("into", [bytearray(10_000), np.zeros(10_000, np.uint8), 3], ids=type)
def test_memory_that_is_no_slot_is_refused(
    config: KdaConfig, source: DictSource, into: Any
) -> None:
    with pytest.raises((ArgumentError, TypeError)):
        bind_kda_weights(config, 0, source, into=into)


@pytest.mark.mlock
@linux_only
def test_without_into_the_memory_is_locked_where_it_may_be_and_goes_with_the_weights(
    run_python: RunPython, written: Written
) -> None:
    script = """
        import gc, json, sys
        from kda_stream import KdaConfig, bind_kda_weights, kda_slot_bytes, open_checkpoint
        def locked():
            line = next(x for x in open("/proc/self/status") if x.startswith("VmLck"))
            return int(line.split()[1]) * 1024
        config = KdaConfig(24, 3, 5, 3)
        with open_checkpoint(sys.argv[1]) as checkpoint:
            before = locked()
            weights, report = bind_kda_weights(config, 0, checkpoint.layer(0))
            held = locked() - before
            weights.release()
            del weights
            gc.collect()
            after_release = locked() - before
            weights, _ = bind_kda_weights(config, 0, checkpoint.layer(0))
            del weights
            gc.collect()
        print(json.dumps([held, report.lock.locked, report.lock.wanted_bytes,
                          after_release, locked() - before, kda_slot_bytes(config)]))
    """
    held, is_locked, wanted, after_release, after_all, slot_bytes = run_python(
        script, written.folder
    )
    assert slot_bytes <= wanted < slot_bytes + os.sysconf("SC_PAGESIZE")
    assert held == (wanted if is_locked else 0)
    assert (after_release, after_all) == (0, 0)


def test_data_is_good_for_as_long_as_it_is_held_although_the_weights_are_gone(
    config: KdaConfig, source: DictSource
) -> None:
    data = bind_kda_weights(config, 0, source)[0].q_proj.data
    gc.collect()
    others = [bind_kda_weights(config, 0, source) for _ in range(4)]
    assert bytes(data) == expected_bytes()["q_proj"]
    del others


def test_releasing_the_weights_frees_the_slot_and_ends_their_data(
    config: KdaConfig, source: DictSource
) -> None:
    with PinnedArena(kda_slot_bytes(config), lock="off") as arena:
        weights, _ = bind_kda_weights(config, 0, source, into=arena)
        weights.release()
        weights.release()
        assert arena.slots[0].state is SlotState.FREE
        for _, tensor in weights.items():
            with pytest.raises(ValueError, match="released"):
                bytes(tensor.data)


def test_releasing_old_weights_does_not_free_the_slot_of_new_ones(
    config: KdaConfig, source: DictSource
) -> None:
    with PinnedArena(kda_slot_bytes(config), lock="off") as arena:
        old, _ = bind_kda_weights(config, 0, source, into=arena)
        old.release()
        new, _ = bind_kda_weights(config, 1, source, into=arena)
        old.release()
        assert arena.slots[0].state is SlotState.LENT
        assert bytes_of(new) == expected_bytes()


def test_threads_may_bind_into_one_arena(config: KdaConfig, written: Written) -> None:
    wrong: list[int] = []
    with (
        open_checkpoint(written.folder) as checkpoint,
        PinnedArena(kda_slot_bytes(config), slots=4, lock="off") as arena,
    ):

        def work(layer: int) -> None:
            for _ in range(20):
                weights, _ = bind_kda_weights(config, layer, checkpoint.layer(layer), into=arena)
                if bytes_of(weights) != written.expected(layer):
                    wrong.append(layer)
                weights.release()

        threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1, 2, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert wrong == []
        assert {slot.state for slot in arena.slots} == {SlotState.FREE}


# --- without a copy -------------------------------------------------------------------------------


def maps_of(folder: Path) -> list[tuple[int, int]]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            begin, end = line.split()[0].split("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


@linux_only
def test_without_a_copy_all_but_conv_lie_in_the_mapped_file(
    config: KdaConfig, checkpoint: Checkpoint, written: Written
) -> None:
    weights, report = bind_kda_weights(config, 1, checkpoint.layer(1), copy=False)
    assert bytes_of(weights) == written.expected(1)
    maps = maps_of(written.folder)
    in_map = {
        name: any(begin <= address(tensor.data) < end for begin, end in maps)
        for name, tensor in weights.items()
    }
    assert in_map == {name: name != "conv" for name in SHAPES}
    assert report.read.path == "view"
    assert report.bytes == LAYER_BYTES
    assert all(tensor.data.readonly for _, tensor in weights.items())


def test_without_a_copy_a_source_in_memory_is_left_where_it_is(
    config: KdaConfig, source: DictSource
) -> None:
    weights, report = bind_kda_weights(config, 0, source, copy=False)
    assert bytes_of(weights) == expected_bytes()
    for name, (leaf, *_) in FIELD_LEAVES.items():
        held = source.tensors[f"self_attn.{leaf}"].data
        same = address(getattr(weights, name).data) == address(held)
        assert same == (name != "conv")
    assert report.read.path == "view"


def test_without_a_copy_conv_goes_into_a_slot_where_one_is_given(
    config: KdaConfig, source: DictSource
) -> None:
    with PinnedArena(kda_slot_bytes(config), lock="off") as arena:
        begin = address(arena.slots[0].claim().memory())
        arena.slots[0].abandon()
        weights, _ = bind_kda_weights(config, 0, source, into=arena, copy=False)
        assert arena.slots[0].state is SlotState.LENT
        assert begin <= address(weights.conv.data) < begin + arena.slots[0].nbytes
        weights.release()
        assert arena.slots[0].state is SlotState.FREE


def test_without_a_copy_every_check_is_made_all_the_same(
    config: KdaConfig, source: DictSource
) -> None:
    source.change("o_proj.weight", shape=(15, 24))
    with pytest.raises(BindError):
        bind_kda_weights(config, 0, source, copy=False)


def test_views_end_when_the_checkpoint_is_closed(config: KdaConfig, written: Written) -> None:
    with open_checkpoint(written.folder) as checkpoint:
        weights, _ = bind_kda_weights(config, 0, checkpoint.layer(0), copy=False)
        data = weights.q_proj.data
    with pytest.raises(ValueError, match="released"):
        bytes(data)
    with pytest.raises(ClosedError):
        bytes(weights.q_proj.data)
    assert bytes(weights.conv.data) == written.expected(0)["conv"]


def test_copies_stay_when_the_checkpoint_is_closed(config: KdaConfig, written: Written) -> None:
    with open_checkpoint(written.folder) as checkpoint:
        weights, _ = bind_kda_weights(config, 0, checkpoint.layer(0))
    assert bytes_of(weights) == written.expected(0)


# --- how the bytes are brought in -----------------------------------------------------------------


def test_the_report_says_which_way_was_taken(config: KdaConfig, checkpoint: Checkpoint) -> None:
    taken = {
        read: bind_kda_weights(config, 0, checkpoint.layer(0), read=read)[1].read.path
        for read in ("mapped", "positional", "direct", "auto")
    }
    assert taken == {
        "mapped": "mapped",
        "positional": "positional",
        "direct": "direct",
        "auto": "mapped",  # it was read just before
    }


@linux_only
def test_reading_maps_no_file(run_python: RunPython, written: Written) -> None:
    script = """
        import json, sys
        from kda_stream import KdaConfig, bind_kda_weights, open_checkpoint
        with open_checkpoint(sys.argv[1]) as checkpoint:
            bind_kda_weights(KdaConfig(24, 3, 5, 3), 1, checkpoint.layer(1), read="positional")
            print(json.dumps(sys.argv[1] in open("/proc/self/maps").read()))
    """
    assert run_python(script, written.folder) is False


@linux_only
@each_read
def test_where_it_is_forbidden_to_ask_for_the_file_system_every_way_is_open(
    config: KdaConfig, checkpoint: Checkpoint, written: Written, read: Any
) -> None:
    """As a container's filter of system calls may have it."""
    weights, report = where_refused(
        lambda: bind_kda_weights(config, 0, checkpoint.layer(0), read=read),
        Refused("fstatfs", errno.EPERM),
    )
    assert bytes_of(weights) == written.expected(0)
    assert read in ("auto", report.read.path)
    weights.release()


@pytest.mark.parametrize("read", ["", "map", None, "MAPPED", "read"])
def test_an_unknown_way_is_refused(config: KdaConfig, source: DictSource, read: Any) -> None:
    with pytest.raises(ArgumentError, match=r"mapped.*positional.*direct"):
        bind_kda_weights(config, 0, source, read=read)


@each_read
@pytest.mark.parametrize("start", [0, 1, 2, 3, 5, 7])
def test_payload_at_any_offset_is_bound(
    tmp_path: Path, config: KdaConfig, read: Any, start: int
) -> None:
    """A header need not be padded, and a byte tensor may lie before a BF16 one."""
    tensors: dict[str, Stored] = {}
    for n, (leaf, stored) in enumerate(kda_block(UNEVEN).items()):
        tensors[f"model.layers.0.self_attn.{leaf}"] = stored
        tensors[f"model.layers.0.mlp.{n}"] = Stored("U8", (n % 3,))
    path = tmp_path / "model.safetensors"
    begins = save_raw_shard(path, tensors, start=start)
    odd = [name for name, at in begins.items() if ".self_attn." in name and at % 2]
    assert odd, "nothing lies at an odd offset"
    with open_checkpoint(path) as checkpoint:
        for copy in (True, False):
            weights, _ = bind_kda_weights(config, 0, checkpoint.layer(0), copy=copy, read=read)
            for name, leaves in FIELD_LEAVES.items():
                full = [f"model.layers.0.self_attn.{leaf}" for leaf in leaves]
                expected = b"".join(tensors[n].bytes_of(n) for n in full)
                assert bytes(getattr(weights, name).data) == expected, name


@each_read
def test_tensors_of_several_pages_are_bound(written_medium: Written, read: Any) -> None:
    config = KdaConfig(hidden=256, heads=4, head_dim=32, conv_kernel=4)
    with open_checkpoint(written_medium.folder) as checkpoint:
        for layer in (0, 1):
            weights, _ = bind_kda_weights(config, layer, checkpoint.layer(layer), read=read)
            assert bytes_of(weights) == written_medium.expected(layer)


@linux_only
@each_read
def test_a_bind_leaves_no_descriptor_open(
    config: KdaConfig, checkpoint: Checkpoint, read: Any
) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    weights, _ = bind_kda_weights(config, 1, checkpoint.layer(1), read=read)
    assert sorted(os.listdir("/proc/self/fd")) == before
    weights.release()


# --- shards that change under the checkpoint ------------------------------------------------------

# Run in a process of its own: what is tested is that it is not killed by a signal. Each way of
# reading, before and after the shard was first mapped, gets its own copy of the checkpoint.
CHANGED = """
    import itertools, json, os, shutil, sys
    from kda_stream import (KdaConfig, KdaStreamError, PinnedArena, bind_kda_weights,
                            kda_slot_bytes, open_checkpoint)
    original, shard_name, change = sys.argv[1:]
    config = KdaConfig(256, 4, 32, 4)
    arena = PinnedArena(kda_slot_bytes(config), lock="off")
    slot = arena.slots[0]

    def make_change(shard):
        status = os.stat(shard)
        text = open(shard, "rb").read()
        if change == "cut to nothing":
            os.truncate(shard, 0)
        elif change == "cut to a page":
            os.truncate(shard, 4096)
        elif change == "cut by a byte":
            os.truncate(shard, status.st_size - 1)
        elif change == "made longer":
            os.truncate(shard, status.st_size + 1)
        elif change == "replaced":
            open(shard + ".new", "wb").write(text)
            os.utime(shard + ".new", ns=(status.st_atime_ns, status.st_mtime_ns))
            os.replace(shard + ".new", shard)
        elif change == "rewritten":
            with open(shard, "r+b") as file:
                file.seek(-100, os.SEEK_END)
                file.write(b"z" * 100)
        elif change == "rewritten, its time set back":
            with open(shard, "r+b") as file:
                file.seek(-100, os.SEEK_END)
                file.write(b"z" * 100)
            os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
        elif change == "touched":
            os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        elif change == "removed":
            os.remove(shard)
        elif change == "made a directory":
            os.remove(shard)
            os.mkdir(shard)

    def bound(source, **how):
        slot.claim().memory()[:] = bytes([0xA5]) * slot.nbytes
        slot.abandon()
        try:
            bind_kda_weights(config, 0, source, into=arena, **how)
        except KdaStreamError as error:
            found = [type(error).__name__, error.path == shard, "\\n" in str(error)]
        else:
            found = ["bound"]
        found += [slot.state.value, set(slot.claim().memory()) == {0xA5}]
        slot.abandon()
        return found

    found = {}
    for read, before in itertools.product(
        ("mapped", "positional", "direct", "auto"), (True, False)
    ):
        folder = os.path.abspath(f"{read} {before}")
        shutil.copytree(original, folder)
        shard = os.path.join(folder, shard_name)
        with open_checkpoint(folder) as checkpoint:
            source = checkpoint.layer(0)
            if before:
                bind_kda_weights(config, 0, source, into=arena, read=read)[0].release()
            make_change(shard)
            found[folder] = bound(source, read=read)
            found[folder + " view"] = bound(source, read=read, copy=False)
    print(json.dumps(found))
"""
CHANGES = [
    "cut to nothing",
    "cut to a page",
    "cut by a byte",
    "made longer",
    "replaced",
    "rewritten",
    "rewritten, its time set back",
    "touched",
    "removed",
    "made a directory",
]


@linux_only
@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_changed_since_it_was_opened_is_refused(
    run_python: RunPython, tmp_path: Path, change: str
) -> None:
    written = write_checkpoint(tmp_path / "c", geometry=MEDIUM, layers=1, mtp=False, shards=2)
    shard = written.shard_of(0, "q_proj.weight")
    found = run_python(CHANGED, written.folder, shard.name, change)
    assert len(found) == 16
    errors = {"PayloadError", "PathError"} if change == "removed" else {"PayloadError"}
    for how, (error, names_shard, has_newline, state, unwritten) in found.items():
        assert error in errors, how
        assert names_shard, how
        assert not has_newline, how
        assert (state, unwritten) == ("free", True), how


def test_a_change_to_a_shard_of_other_layers_does_not_matter(
    tmp_path: Path, config: KdaConfig
) -> None:
    written = write_checkpoint(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        shard = written.shard_of(2, "A_log")
        assert shard != written.shard_of(0, "A_log")
        os.truncate(shard, 0)
        weights, _ = bind_kda_weights(config, 0, checkpoint.layer(0))
        assert bytes_of(weights) == written.expected(0)


# Here the change comes after the copy began. With no time to copy in, the C routine comes back
# after each piece, so that even a small layer gives the hook its turn.
NO_TIME = """
    import json, os, shutil, sys
    from kda_stream import limits
    assert limits.PAUSE_NANOSECONDS > 0
    limits.PAUSE_NANOSECONDS = 0
    from kda_stream import (KdaConfig, KdaStreamError, PinnedArena, bind_kda_weights,
                            kda_slot_bytes, open_checkpoint)
"""
CHANGED_MIDWAY = """
    original, shard_name, change = sys.argv[1:]
    config = KdaConfig(256, 4, 32, 4)
    arena = PinnedArena(kda_slot_bytes(config), lock="off")
    found = {}
    for read in ("mapped", "positional", "direct", "auto"):
        shutil.copytree(original, read)
        shard = os.path.join(read, shard_name)
        turns = []

        def between():
            if len(turns) == 2:
                size = os.stat(shard).st_size
                if change == "cut to nothing":
                    os.truncate(shard, 0)
                elif change == "cut by a byte":
                    os.truncate(shard, size - 1)
                elif change == "rewritten":
                    with open(shard, "r+b") as file:
                        file.seek(size // 2)
                        file.write(b"z" * (size - size // 2))
            turns.append(1)

        with open_checkpoint(read) as checkpoint:
            source = checkpoint.layer(0)
            try:
                bind_kda_weights(config, 0, source, into=arena, read=read, between=between)
            except KdaStreamError as error:
                found[read] = [type(error).__name__]
            else:
                found[read] = ["bound"]
            found[read] += [len(turns) > 2, arena.slots[0].state.value]
    print(json.dumps(found))
"""


@linux_only
@pytest.mark.parametrize("change", ["cut to nothing", "cut by a byte", "rewritten"])
def test_a_shard_that_changes_in_the_middle_of_the_copy_is_refused(
    run_python: RunPython, tmp_path: Path, change: str
) -> None:
    written = write_checkpoint(tmp_path / "c", geometry=MEDIUM, layers=1, mtp=False, shards=2)
    shard = written.shard_of(0, "q_proj.weight")
    found = run_python(NO_TIME + CHANGED_MIDWAY, written.folder, shard.name, change)
    assert found == {
        read: ["PayloadError", True, "free"] for read in ("mapped", "positional", "direct", "auto")
    }


def test_what_the_hook_raises_ends_the_bind_and_frees_the_slot(
    run_python: RunPython, written: Written
) -> None:
    script = (
        NO_TIME
        + """
    config = KdaConfig(24, 3, 5, 3)
    arena = PinnedArena(kda_slot_bytes(config), lock="off")
    turns = []

    def between():
        turns.append(1)
        raise KeyError("enough")

    with open_checkpoint(sys.argv[1]) as checkpoint:
        try:
            bind_kda_weights(config, 0, checkpoint.layer(0), into=arena, between=between)
        except KeyError as error:
            state = arena.slots[0].state.value
            bind_kda_weights(config, 0, checkpoint.layer(0), into=arena)
            print(json.dumps([error.args, len(turns), state]))
    """
    )
    assert run_python(script, written.folder) == [["enough"], 1, "free"]


@linux_only
@each_read
def test_a_failed_bind_that_is_remembered_keeps_no_memory_and_no_map(
    tmp_path: Path, config: KdaConfig, read: Any
) -> None:
    """The traceback of a kept error holds the frames of the bind, and all that they hold."""
    written = write_checkpoint(tmp_path)
    kept: list[BaseException] = []
    with open_checkpoint(tmp_path) as checkpoint:
        bind_kda_weights(config, 0, checkpoint.layer(0), read=read)[0].release()
        os.truncate(written.shard_of(0, "A_log"), 0)
        with PinnedArena(kda_slot_bytes(config), lock="off") as arena:
            try:
                bind_kda_weights(config, 0, checkpoint.layer(0), into=arena, read=read)
            except PayloadError as error:
                kept.append(error)
    assert len(kept) == 1
    assert maps_of(tmp_path) == []


@pytest.mark.mlock
@linux_only
def test_a_bind_into_no_slot_that_fails_at_once_keeps_no_memory_locked(
    tmp_path: Path, config: KdaConfig
) -> None:
    """Although the error is kept, and with it the frames that made the memory."""

    def locked() -> str:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(line for line in lines if line.startswith("VmLck"))

    written = write_checkpoint(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        os.truncate(written.shard_of(0, "A_log"), 0)
        before = locked()
        with pytest.raises(PayloadError) as kept:
            bind_kda_weights(config, 0, checkpoint.layer(0))
        assert locked() == before
    assert kept.traceback


@pytest.mark.mlock
@linux_only
def test_a_failed_bind_into_no_slot_keeps_no_memory_locked(
    run_python: RunPython, written: Written
) -> None:
    script = (
        NO_TIME
        + """
    def locked():
        return next(x for x in open("/proc/self/status") if x.startswith("VmLck"))

    def between():
        during.append(locked())
        raise KeyError("enough")

    before, during = locked(), []
    with open_checkpoint(sys.argv[1]) as checkpoint:
        try:
            bind_kda_weights(KdaConfig(24, 3, 5, 3), 0, checkpoint.layer(0), between=between)
        except KeyError as error:
            kept = error
    print(json.dumps([before, *during, locked()]))
    """
    )
    before, during, after = run_python(script, written.folder)
    assert during != before, "it may not lock memory at all"
    assert after == before


def test_a_source_whose_checkpoint_was_closed_says_so(config: KdaConfig, written: Written) -> None:
    with open_checkpoint(written.folder) as checkpoint:
        source = checkpoint.layer(0)
    for copy in (True, False):
        with pytest.raises(ClosedError):
            bind_kda_weights(config, 0, source, copy=copy)


def test_a_layer_that_lost_a_tensor_is_refused_by_its_full_story(
    tmp_path: Path, config: KdaConfig
) -> None:
    write_checkpoint(
        tmp_path,
        prefix="model.layers.",
        change=without("model.layers.1.self_attn.dt_bias"),
    )
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(KdaStreamError) as caught:
        bind_kda_weights(config, 1, checkpoint.layer(1))
    assert "self_attn.dt_bias" in str(caught.value)
    assert "layer 1" in str(caught.value)


# --- interrupts and limits ------------------------------------------------------------------------


def interrupted_at(events: int, step: Callable[[], None]) -> bool:
    """Run `step`, and raise KeyboardInterrupt at the given event of the code that binds."""
    seen = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal seen
        code = frame.f_code
        name = os.path.basename(code.co_filename)
        if name not in ("arena.py", "pages.py", "bind.py") or code.co_flags & inspect.CO_GENERATOR:
            return None  # what is raised where a generator is closed is lost
        if event in ("line", "return"):
            seen += 1
            if seen == events:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_ctrl_c_at_any_line_of_a_bind_leaves_the_slot_free(
    config: KdaConfig, checkpoint: Checkpoint
) -> None:
    source = checkpoint.layer(0)
    with PinnedArena(kda_slot_bytes(config), lock="off") as arena:

        def bind() -> None:
            bind_kda_weights(config, 0, source, into=arena, read="positional")

        bind()
        events = 1
        while interrupted_at(events, bind):
            assert arena.slots[0].state is SlotState.FREE, f"after event {events}"
            events += 1
    assert events > 100


@linux_only
def test_too_many_open_files_are_told_as_what_they_are(
    run_python: RunPython, written: Written
) -> None:
    script = """
        import json, os, resource, sys
        from kda_stream import KdaConfig, KdaStreamError, bind_kda_weights, open_checkpoint
        config = KdaConfig(24, 3, 5, 3)
        with open_checkpoint(sys.argv[1]) as checkpoint:
            source = checkpoint.layer(1)
            bind_kda_weights(config, 1, source)[0].release()  # what is imported late opens files
            used = len(os.listdir("/proc/self/fd")) - 1
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
            try:
                bind_kda_weights(config, 1, source)
            except KdaStreamError as error:
                print(json.dumps([error.code.value, error.got]))
    """
    assert run_python(script, written.folder) == ["payload-open", os.strerror(errno.EMFILE)]
