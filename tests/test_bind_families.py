"""Layers of every family, bound: from memory and files, each byte as stored, or refused."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from support.checkpoints import DTYPE_BYTES, MEDIUM, UNEVEN, Geometry, Stored
from support.families import (
    ALL_FIELDS,
    CONV_LEAVES,
    FAMILIES,
    GLM5_NEXT,
    KIMI_K3,
    KIMI_LINEAR,
    LING_3,
    LING_3_DENSE,
    Family,
    WrittenFamily,
    kda_config,
    write_family,
)

import kda_stream
from kda_stream import (
    ArgumentError,
    BindError,
    ErrorCode,
    KdaConfig,
    KdaFamily,
    KdaWeights,
    PayloadValueError,
    PinnedArena,
    ProblemKind,
    RawTensor,
    bind_kda_weights,
    check_kda_weights,
    kda_slot_bytes,
    open_checkpoint,
    stream_kda_layers,
)
from kda_stream.staging.arena import SlotState

CONFIG = kda_config(UNEVEN)
GEOMETRIES = [
    UNEVEN,
    *(Geometry(1, 1, 1, 1), Geometry(7, 2, 3, 1), Geometry(24, 3, 128, 2)),
    *(Geometry(8, 128, 2, 2), Geometry(8, 129, 2, 4)),
]
# Codes of the format, and their bits: all are tried on every tensor.
DTYPES = {"BF16": 16, "F32": 32, "F16": 16, "F8_E4M3": 8, "I32": 32}

each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
each_read = pytest.mark.parametrize("read", ["mapped", "positional", "direct", "auto"])
named_or_auto = pytest.mark.parametrize("auto", [False, True], ids=["named", "auto"])


def table(family: Family) -> KdaFamily:
    found: KdaFamily = getattr(kda_stream, family.name)
    return found


def choice(family: Family, *, auto: bool) -> KdaFamily | Literal["auto"]:
    return "auto" if auto else table(family)


def bytes_of(weights: KdaWeights) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in weights.items()}


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


@pytest.fixture(scope="session")
def written_families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WrittenFamily]:
    """A checkpoint of each family in three shards; not to be changed."""
    folder = tmp_path_factory.mktemp("families")
    return {name: write_family(folder / name, f, UNEVEN) for name, f in FAMILIES.items()}


@pytest.fixture
def arena() -> Iterator[PinnedArena]:
    """One slot, large enough for a layer of any family."""
    with PinnedArena(kda_slot_bytes(CONFIG, "auto"), lock="off") as made:
        yield made


# --- layers that are as they should be ------------------------------------------------------------


@each_family
@named_or_auto
@pytest.mark.parametrize("copy", [True, False], ids=["copy", "views"])
def test_every_byte_of_a_layer_in_memory_is_bound_as_it_was_stored(
    family: Family, auto: bool, copy: bool
) -> None:
    for geometry in GEOMETRIES:
        config, source = kda_config(geometry), family.source(geometry)
        weights, _ = bind_kda_weights(
            config, 0, source, family=choice(family, auto=auto), copy=copy
        )
        assert bytes_of(weights) == family.expected(geometry)
        found = {name: (tensor.dtype.value, tensor.shape) for name, tensor in weights.items()}
        assert found == family.handed_out(geometry)
        assert all(tensor.data.readonly for _, tensor in weights.items())
        weights.release()


@each_family
@each_read
@pytest.mark.parametrize("alignment", [None, 1, 256, 4096])
def test_every_byte_of_a_checkpoint_is_bound_as_it_was_stored(
    family: Family,
    read: Any,
    alignment: int | None,
    written_families: dict[str, WrittenFamily],
    arena: PinnedArena,
) -> None:
    written = written_families[family.name]
    with open_checkpoint(written.folder) as checkpoint:
        for layer in written.kda_layers:
            weights, report = bind_kda_weights(
                CONFIG,
                layer,
                checkpoint.layer(layer),
                family=table(family),
                into=arena,
                read=read,
                alignment=alignment,
            )
            assert bytes_of(weights) == written.expected(layer)
            found = {name: (tensor.dtype.value, tensor.shape) for name, tensor in weights.items()}
            assert found == family.handed_out(UNEVEN)
            assert len(report.shards) == (2 if layer % 2 else 1)
            for name, tensor in weights.items():
                width = DTYPE_BYTES[tensor.dtype.value]
                assert address(tensor.data) % (alignment or width) == 0, name
            weights.release()


@each_family
@each_read
@pytest.mark.parametrize("into", ["arena", "none"])
def test_every_byte_of_a_checkpoint_is_seen_without_a_copy(
    family: Family,
    read: Any,
    into: str,
    written_families: dict[str, WrittenFamily],
    arena: PinnedArena,
) -> None:
    written = written_families[family.name]
    with open_checkpoint(written.folder) as checkpoint:
        for layer in written.kda_layers:
            source = checkpoint.layer(layer)
            weights, report = bind_kda_weights(
                CONFIG,
                layer,
                source,
                family="auto",
                into=arena if into == "arena" else None,
                read=read,
                copy=False,
            )
            assert bytes_of(weights) == written.expected(layer)
            assert report.family == family.name
            q_proj = source.get(f"{family.block}q_proj.weight")
            assert q_proj is not None
            assert address(weights.q_proj.data) == address(q_proj.data)
            weights.release()


@each_family
def test_the_exact_arena_holds_any_layer_of_the_family_in_each_dtype(family: Family) -> None:
    """Also where a wider dtype takes more than the room that is left between the tensors."""
    largest = {leaf: "F32" for leaf, dtype in family.also.items() if dtype == "F32"}
    for geometry, dtypes in itertools.product((UNEVEN, MEDIUM), ({}, largest, family.also)):
        config, stored = kda_config(geometry), family.stored_as(dtypes)
        nbytes = kda_slot_bytes(config, table(family))
        assert nbytes <= kda_slot_bytes(config, "auto")
        with PinnedArena(nbytes, lock="off") as exact:
            weights, report = bind_kda_weights(
                config, 0, stored.source(geometry), family=table(family), into=exact, alignment=4096
            )
            assert bytes_of(weights) == stored.expected(geometry)
            assert report.bytes == sum(t.nbytes for t in stored.rows(geometry).values())
            weights.release()


@each_family
def test_what_a_family_lacks_is_none_and_the_report_says_which(family: Family) -> None:
    weights, report = bind_kda_weights(CONFIG, 5, family.source(UNEVEN), family=table(family))
    assert report.family == family.name
    assert report.lacking == family.lacking
    assert report.bound == len(family.leaves) == report.self_attn_seen
    assert report.non_attn_seen == 2
    assert report.unknown_self_attn == ()
    assert {n for n in ALL_FIELDS if getattr(weights, n) is None} == set(family.lacking)
    assert [name for name, _ in weights.items()] == list(family.fields)
    weights.release()
    checked = check_kda_weights(CONFIG, 5, family.source(UNEVEN), family="auto")
    assert replace(checked, read=report.read, lock=report.lock) == report


def test_glm_is_what_is_bound_unless_another_is_named() -> None:
    for family in FAMILIES.values():
        if family is GLM5_NEXT:
            weights, report = bind_kda_weights(CONFIG, 0, family.source(UNEVEN))
            assert report.family == "GLM5_NEXT"
            weights.release()
        else:
            with pytest.raises(BindError):
                bind_kda_weights(CONFIG, 0, family.source(UNEVEN))


@pytest.mark.parametrize("wrong", ["GLM5_NEXT", "AUTO", "", None, 5, object()], ids=repr)
def test_what_is_no_family_is_refused(wrong: Any) -> None:
    source = GLM5_NEXT.source(UNEVEN)
    with pytest.raises(ArgumentError) as caught:
        bind_kda_weights(CONFIG, 0, source, family=wrong)
    assert "family" in str(caught.value)
    with pytest.raises(ArgumentError):
        check_kda_weights(CONFIG, 0, source, family=wrong)
    with pytest.raises(ArgumentError):
        kda_slot_bytes(CONFIG, wrong)


# --- dtypes ---------------------------------------------------------------------------------------


@each_family
@named_or_auto
def test_a_tensor_is_bound_in_each_accepted_dtype_and_refused_in_any_other(
    family: Family, auto: bool, arena: PinnedArena
) -> None:
    """Conv apart: of it all three have one dtype. With "auto" another family may be told by it."""
    rows = family.rows(UNEVEN)
    apart_from_conv = [leaf for leaf in family.leaves if leaf not in CONV_LEAVES]
    for leaf, dtype in itertools.product(apart_from_conv, DTYPES):
        accepted = {family.dtypes[leaf], family.also.get(leaf)}
        asked = choice(family, auto=auto)
        if dtype in accepted:
            stored = family.stored_as({leaf: dtype})
            weights, report = bind_kda_weights(
                CONFIG, 0, stored.source(UNEVEN), family=asked, into=arena
            )
            assert bytes_of(weights) == stored.expected(UNEVEN)
            found = {name: (t.dtype.value, t.shape) for name, t in weights.items()}
            assert found == stored.handed_out(UNEVEN)
            assert report.family == family.name
            weights.release()
            continue
        source = family.source(UNEVEN)
        count = rows[leaf].nbytes // DTYPE_BYTES[rows[leaf].dtype]
        source.put_as(family.block + leaf, dtype, count * DTYPES[dtype] // 8)
        attention = {n: t for n, t in source.tensors.items() if n.startswith(family.block)}
        if auto and any(is_exactly(attention, other) for other in FAMILIES.values()):
            continue
        with pytest.raises(BindError) as caught:
            bind_kda_weights(CONFIG, 0, source, family=asked, into=arena)
        assert [(p.tensor, p.kind) for p in caught.value.problems] == [
            (family.block + leaf, ProblemKind.DTYPE)
        ]
        assert caught.value.problems[0].stored_dtype == dtype
        assert arena.slots[0].state is SlotState.FREE


@each_family
@pytest.mark.parametrize("first", ["BF16", "F32", "F16"])
def test_conv_is_bound_when_all_three_have_one_accepted_dtype(
    family: Family, first: str, arena: PinnedArena
) -> None:
    accepted = {family.dtypes[CONV_LEAVES[0]], family.also.get(CONV_LEAVES[0])}
    for others in itertools.product(("BF16", "F32", "F16"), repeat=2):
        dtypes = dict(zip(CONV_LEAVES, (first, *others), strict=True))
        source = family.source(UNEVEN)
        for leaf, dtype in dtypes.items():
            source.put_as(family.block + leaf, dtype, 45 * DTYPES[dtype] // 8)
        wrong = {
            family.block + leaf
            for leaf, dtype in dtypes.items()
            if dtype not in accepted or (first in accepted and dtype != first)
        }
        if not wrong:
            weights, _ = bind_kda_weights(CONFIG, 0, source, family=table(family), into=arena)
            assert weights.conv.dtype == first
            assert len(weights.conv.data) == 3 * 45 * DTYPES[first] // 8
            weights.release()
            continue
        with pytest.raises(BindError) as caught:
            bind_kda_weights(CONFIG, 0, source, family=table(family), into=arena)
        assert {problem.tensor for problem in caught.value.problems} == wrong
        assert {problem.kind for problem in caught.value.problems} == {ProblemKind.DTYPE}
        assert arena.slots[0].state is SlotState.FREE


def test_of_conv_in_two_dtypes_the_refusal_names_the_one_that_is_expected() -> None:
    source = LING_3.source(UNEVEN)
    source.put("attention.v_conv1d.weight", Stored("F32", (15, 1, 3)))
    with pytest.raises(BindError) as caught:
        bind_kda_weights(CONFIG, 0, source, family="auto")
    (problem,) = caught.value.problems
    assert (problem.expected_dtype, problem.stored_dtype) == ("BF16", "F32")
    assert "attention.v_conv1d.weight has the wrong dtype" in str(caught.value)


@each_family
@named_or_auto
def test_a_tensor_that_is_missing_too_long_or_of_another_shape_is_refused(
    family: Family, auto: bool
) -> None:
    for leaf, row in family.rows(UNEVEN).items():
        name, asked = family.block + leaf, choice(family, auto=auto)
        last = row.shape[-1]
        changes: dict[ProblemKind, RawTensor | None] = {
            ProblemKind.MISSING: None,
            ProblemKind.SHAPE: RawTensor(row.dtype, (*row.shape[:-1], last + 1), b""),
            ProblemKind.BYTES: RawTensor(row.dtype, row.shape, bytes(row.nbytes + 1)),
        }
        for kind, tensor in changes.items():
            source = family.source(UNEVEN)
            source.drop(name)
            if tensor is not None:
                source.tensors[name] = tensor
            with pytest.raises(BindError) as caught:
                check_kda_weights(CONFIG, 0, source, family=asked)
            if (family.name, leaf) not in AS_NEAR:
                assert [(p.tensor, p.kind) for p in caught.value.problems] == [(name, kind)]


# Without this tensor, or with it in another shape, a layer is as near to another family.
AS_NEAR = {
    *(("KIMI_LINEAR", "A_log"), ("LING_3", "o_proj.weight"), ("LING_3_DENSE", "dense.weight"))
}


# --- A_log ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [True, False], ids=["copy", "views"])
def test_each_byte_behind_the_values_of_a_log_must_be_zero(copy: bool, arena: PinnedArena) -> None:
    """Also a bit that leaves the value zero: it is then -0.0, which is no exact zero."""
    source = KIMI_K3.source(UNEVEN)
    weights, _ = bind_kda_weights(
        CONFIG, 0, source, family=kda_stream.KIMI_K3, into=arena, copy=copy
    )
    assert bytes_of(weights) == KIMI_K3.expected(UNEVEN)
    weights.release()
    counted = bytes(source.tensors["self_attn.A_log"].data)[:12]
    for at in range(125 * 4):
        tail = bytearray(125 * 4)
        tail[at] = 0x80 if at % 4 == 3 else 1 << at % 8
        source.tensors["self_attn.A_log"] = RawTensor("F32", (128,), counted + tail)
        with pytest.raises(PayloadValueError) as caught:
            bind_kda_weights(CONFIG, 0, source, family=kda_stream.KIMI_K3, into=arena, copy=copy)
        assert arena.slots[0].state is SlotState.FREE
        assert caught.value.code is ErrorCode.PAYLOAD_PADDING
        assert caught.value.tensor == "self_attn.A_log"
        assert caught.value.path is None
        assert "125 zeros behind 3 values" in str(caught.value)
        assert "\n" not in str(caught.value)


@each_read
@pytest.mark.parametrize("copy", [True, False], ids=["copy", "views"])
@pytest.mark.parametrize("own_memory", [True, False], ids=["own memory", "slot"])
def test_each_byte_behind_a_log_in_a_file_must_be_zero(
    tmp_path: Path, read: Any, copy: bool, own_memory: bool
) -> None:
    geometry = Geometry(hidden=3, heads=125, head_dim=1, conv_kernel=2)  # three values of padding
    config = kda_config(geometry)
    written = write_family(tmp_path, KIMI_K3, geometry, layers=1, shards=1)
    (shard,) = tmp_path.glob("*.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        a_log = checkpoint.layer(0).get("self_attn.A_log")
        assert a_log is not None
        assert a_log.place is not None
        end = a_log.place.end
    with (
        PinnedArena(kda_slot_bytes(config, "auto"), lock="off") as arena,
        shard.open("r+b") as file,
    ):
        into = None if own_memory else arena

        def bind() -> dict[str, bytes]:
            with open_checkpoint(tmp_path) as checkpoint:
                weights, _ = bind_kda_weights(
                    config, 0, checkpoint.layer(0), family="auto", into=into, copy=copy, read=read
                )
                found = bytes_of(weights)
                weights.release()
                return found

        for at in range(end - 12, end):
            os.pwrite(file.fileno(), b"\x80", at)
            with pytest.raises(PayloadValueError) as caught:
                bind()
            assert caught.value.path == str(shard)
            assert caught.value.tensor == "self_attn.A_log"
            assert arena.slots[0].state is SlotState.FREE
            os.pwrite(file.fileno(), b"\0", at)
        assert bind() == written.expected(0)
        os.pwrite(file.fileno(), b"\x80", end - 13)  # of the last value that counts
        changed = bind()
        assert changed.pop("a_log") != written.expected(0)["a_log"]
        assert changed.items() <= written.expected(0).items()


@pytest.mark.parametrize("heads", [1, 3, 96, 127, 128, 129, 256])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_log_is_read_by_head_and_never_by_its_stored_length(family: Family, heads: int) -> None:
    """At a head_dim of 128, which is also how long Kimi-K3 stores it."""
    geometry = Geometry(hidden=2, heads=heads, head_dim=128, conv_kernel=1)
    weights, _ = bind_kda_weights(
        kda_config(geometry), 0, family.source(geometry), family=table(family)
    )
    assert weights.a_log.shape == (heads,)
    assert len(weights.a_log.data) == heads * 4
    assert bytes(weights.a_log.data) == family.expected(geometry)["a_log"]
    weights.release()


@each_family
@pytest.mark.parametrize(
    "shape", [(3,), (128,), (1, 1, 3, 1), (1, 3), (3, 1), (1, 3, 1, 1), (256,), (384,), ()]
)
def test_a_log_in_any_other_shape_than_the_family_s_is_refused(
    family: Family, shape: tuple[int, ...]
) -> None:
    geometry = Geometry(hidden=2, heads=3, head_dim=128, conv_kernel=1)
    source = family.source(geometry)
    source.put(f"{family.block}A_log", Stored("F32", shape, bytes(4 * int(np.prod(shape)))))
    config = kda_config(geometry)
    if shape == family.a_log_shape(geometry):
        bind_kda_weights(config, 0, source, family=table(family))[0].release()
        return
    with pytest.raises(BindError) as caught:
        bind_kda_weights(config, 0, source, family=table(family))
    (problem,) = caught.value.problems
    assert (problem.tensor, problem.kind) == (f"{family.block}A_log", ProblemKind.SHAPE)
    assert problem.expected_shape == family.a_log_shape(geometry)


@pytest.mark.parametrize("heads", [95, 97])
def test_the_config_of_another_count_of_heads_does_not_cut_a_log(heads: int) -> None:
    """Of 96 values, padded to 128, no 95 are handed out, nor 97."""
    geometry = Geometry(hidden=2, heads=96, head_dim=1, conv_kernel=1)
    with pytest.raises(BindError):
        bind_kda_weights(
            KdaConfig(2, heads, 1, 1), 0, KIMI_K3.source(geometry), family=kda_stream.KIMI_K3
        )


# --- mixed families -------------------------------------------------------------------------------


def is_exactly(tensors: Mapping[str, Stored | RawTensor], family: Family) -> bool:
    """Whether a layer with that attention is exactly of the family."""
    rows = {n.removeprefix(family.block): Stored(t.dtype, t.shape) for n, t in tensors.items()}
    return rows.keys() == family.dtypes.keys() and family.takes(rows)


def subsets(leaves: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [s for n in range(len(leaves) + 1) for s in itertools.combinations(leaves, n)]


GATES = subsets(("g_a_proj.weight", "g_b_proj.weight", "g_proj.weight"))
DECAYS = subsets(("f_a_proj.weight", "f_b_proj.weight", "f_proj.weight"))


@each_family
def test_a_block_with_the_gate_and_decay_of_two_families_is_of_none(family: Family) -> None:
    """Every pairing of whole, half, doubled and missing gates with such decays."""
    rows = GLM5_NEXT.tensors(UNEVEN) | KIMI_K3.tensors(UNEVEN) | LING_3.tensors(UNEVEN)
    shapes = {name.partition(".")[2]: tensor for name, tensor in rows.items()}
    both = ("f_", "g_")
    accepted = []
    for gate, decay in itertools.product(GATES, DECAYS):
        source = family.source(UNEVEN)
        source.drop(*(family.block + leaf for leaf in family.leaves if leaf.startswith(both)))
        for leaf in (*gate, *decay):
            source.put(family.block + leaf, Stored("BF16", shapes[leaf].shape))
        for asked in (table(family), "auto"):
            with suppress(BindError):
                check_kda_weights(CONFIG, 0, source, family=asked)
                accepted.append({*gate, *decay})
    own = {leaf for leaf in family.leaves if leaf.startswith(both)}
    assert accepted == [own, own]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pair
        for pair in itertools.permutations(FAMILIES.values(), 2)
        if pair[0].block == pair[1].block
    ],
    ids=lambda family: family.name,
)
def test_a_block_with_a_tensor_of_another_family_is_of_the_one_it_is_exactly_or_of_none(
    one: Family, other: Family
) -> None:
    for name, stored in other.tensors(UNEVEN).items():
        mixed = one.tensors(UNEVEN) | {name: stored}
        fitting = [family for family in FAMILIES.values() if is_exactly(mixed, family)]
        assert len(fitting) <= 1
        source = one.source(UNEVEN)
        source.put(name, stored)
        for family in FAMILIES.values():
            if family in fitting:
                for asked in (table(family), "auto"):
                    report = check_kda_weights(CONFIG, 0, source, family=asked)
                    assert report.family == family.name
            else:
                with pytest.raises(BindError):
                    check_kda_weights(CONFIG, 0, source, family=table(family))
        if not fitting:
            with pytest.raises(BindError):
                check_kda_weights(CONFIG, 0, source, family="auto")


def test_auto_refuses_two_blocks_in_one_layer_and_a_named_family_counts_the_other_s_names() -> None:
    source = GLM5_NEXT.source(UNEVEN)
    source.tensors |= LING_3.source(UNEVEN).tensors
    with pytest.raises(BindError):
        bind_kda_weights(CONFIG, 0, source, family="auto")
    for family in (GLM5_NEXT, LING_3):
        weights, report = bind_kda_weights(CONFIG, 0, source, family=table(family))
        assert bytes_of(weights) == family.expected(UNEVEN)
        assert report.non_attn_seen == 2 + 28 - report.bound
        weights.release()


@pytest.mark.parametrize("family", [LING_3, LING_3_DENSE], ids=lambda family: family.name)
def test_o_proj_and_dense_at_once_are_refused(family: Family) -> None:
    source = family.source(UNEVEN)
    for leaf in ("o_proj.weight", "dense.weight"):
        source.put(f"attention.{leaf}", Stored("BF16", (24, 15)))
    for asked in (table(family), "auto"):
        with pytest.raises(BindError) as caught:
            check_kda_weights(CONFIG, 0, source, family=asked)
        assert [problem.kind for problem in caught.value.problems] == [ProblemKind.UNKNOWN]


# --- streams --------------------------------------------------------------------------------------


@each_family
@named_or_auto
@pytest.mark.parametrize("read", ["auto", "mapped", "direct"])
def test_every_layer_of_a_checkpoint_is_streamed_with_its_bytes(
    family: Family, auto: bool, read: Any, written_families: dict[str, WrittenFamily]
) -> None:
    written = written_families[family.name]
    found = {}
    with (
        open_checkpoint(written.folder) as checkpoint,
        stream_kda_layers(
            checkpoint, family=choice(family, auto=auto), lock="off", read=read
        ) as stream,
    ):
        for layer in stream:
            assert layer.report.family == family.name
            assert layer.report.lacking == family.lacking
            found[layer.index] = bytes_of(layer.weights)
    assert found == {layer: written.expected(layer) for layer in (0, 1, 2, 4)}


@pytest.mark.parametrize("prefix", ["model.layers.", "language_model.model.layers."])
def test_kimi_k3_is_streamed_under_either_prefix(tmp_path: Path, prefix: str) -> None:
    written = write_family(tmp_path, KIMI_K3, UNEVEN, layers=3, prefix=prefix)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        stream_kda_layers(checkpoint, family=kda_stream.KIMI_K3, lock="off") as stream,
    ):
        for layer in stream:
            assert bytes_of(layer.weights) == written.expected(layer.index)


def test_auto_streams_layers_of_all_families_each_as_what_it_is(tmp_path: Path) -> None:
    kda_layers = len(FAMILIES) + 1
    layers = kda_layers // 3 * 4 + kda_layers % 3
    written = write_family(tmp_path, FAMILIES.values(), UNEVEN, layers=layers)
    assert len(written.kda_layers) == kda_layers
    with (
        open_checkpoint(tmp_path) as checkpoint,
        stream_kda_layers(checkpoint, family="auto", lock="off") as stream,
    ):
        families = []
        for layer in stream:
            families.append(layer.report.family)
            assert bytes_of(layer.weights) == written.expected(layer.index)
    assert families == [*FAMILIES, "GLM5_NEXT"]


@each_family
def test_a_stream_of_one_family_refuses_every_layer_of_another(
    family: Family, tmp_path: Path
) -> None:
    """Before a byte of payload is read, and no layer is left out."""
    written = write_family(tmp_path, FAMILIES.values(), UNEVEN, layers=8)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(BindError) as caught:
        stream_kda_layers(checkpoint, family=table(family), lock="off")
    refused = {problem.layer_idx for problem in caught.value.problems}
    assert refused == {n for n, one in written.families.items() if one is not family}


@each_family
def test_a_layer_that_lost_a_tensor_of_its_own_is_refused_and_not_left_out(
    family: Family, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Stored]) -> None:
        del tensors[f"{family.prefix}2.{family.block}q_proj.weight"]

    write_family(tmp_path, family, UNEVEN, change=change)
    with open_checkpoint(tmp_path) as checkpoint:
        for auto in (False, True):
            with pytest.raises(BindError) as caught:
                stream_kda_layers(checkpoint, family=choice(family, auto=auto), lock="off")
            assert {problem.layer_idx for problem in caught.value.problems} == {2}


def test_a_stream_refuses_a_padding_that_is_not_zeros_and_gives_its_memory_back(
    tmp_path: Path,
) -> None:
    name = f"{KIMI_K3.prefix}1.self_attn.A_log"

    def change(tensors: dict[str, Stored]) -> None:
        data = tensors[name].data
        assert data is not None
        tensors[name] = replace(tensors[name], data=data[:-1] + b"\x80")

    written = write_family(tmp_path, KIMI_K3, UNEVEN, change=change)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        stream_kda_layers(checkpoint, family="auto", lock="off") as stream,
    ):
        assert bytes_of(next(stream).weights) == written.expected(0)
        with pytest.raises(PayloadValueError) as caught:
            next(stream)
        assert caught.value.code is ErrorCode.PAYLOAD_PADDING
        stream.close()


def test_kimi_linear_in_bf16_is_streamed_as_it_is_stored(tmp_path: Path) -> None:
    """Where a dtype is not verified, each that is accepted comes through unchanged."""
    stored = KIMI_LINEAR.stored_as(KIMI_LINEAR.also)
    written = write_family(tmp_path, stored, UNEVEN, layers=2)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        stream_kda_layers(checkpoint, family="auto", lock="off") as stream,
    ):
        for layer in stream:
            assert layer.weights.a_log.dtype == "BF16"
            assert layer.weights.a_log.shape == (3,)
            assert bytes_of(layer.weights) == written.expected(layer.index)
