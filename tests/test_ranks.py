"""Ranks: each binds and streams its own part, from memory and from files, read in every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Geometry
from support.families import FAMILIES, GLM5_NEXT, KIMI_K3, Family, kda_config, write_family

import kda_stream
from kda_stream import (
    ArgumentError,
    BindError,
    ErrorCode,
    KdaFamily,
    KdaShardedSource,
    KdaTpPlan,
    KdaWeights,
    PayloadValueError,
    PinnedArena,
    bind_kda_weights,
    kda_slot_bytes,
    open_checkpoint,
    stream_kda_layers,
)

GEOMETRY = Geometry(hidden=34, heads=12, head_dim=6, conv_kernel=4)
CONFIG = kda_config(GEOMETRY)
SIZES = (1, 2, 3, 12)

each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
each_size = pytest.mark.parametrize("size", SIZES)
each_read = pytest.mark.parametrize("read", ["mapped", "positional", "direct", "auto"])


def table(family: Family) -> KdaFamily:
    found: KdaFamily = getattr(kda_stream, family.name)
    return found


def plans(family: Family, size: int) -> list[KdaTpPlan]:
    return [KdaTpPlan(CONFIG, rank, size, family=table(family)) for rank in range(size)]


def joined(parts: list[dict[str, bytes]], field: str) -> bytes:
    """The whole layer's bytes of a field out of those that the ranks have bound."""
    if field in ("f_a", "g_a", "o_norm"):
        return parts[0][field]
    if field == "o_proj":
        width = len(parts[0][field]) // GEOMETRY.hidden
        lines = range(0, len(parts[0][field]), width)
        return b"".join(part[field][at : at + width] for at in lines for part in parts)
    if field == "conv":  # each of q, k and v is cut, then joined
        third = len(parts[0][field]) // 3
        return b"".join(
            part[field][n * third : (n + 1) * third] for n in range(3) for part in parts
        )
    return b"".join(part[field] for part in parts)


def bytes_of(weights: KdaWeights) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in weights.items()}


def require_whole(parts: list[dict[str, bytes]], expected: dict[str, bytes]) -> None:
    assert {name: joined(parts, name) for name in parts[0]} == expected


# --- binds ----------------------------------------------------------------------------------------


@each_family
@each_size
@pytest.mark.parametrize("copy", [True, False], ids=["copied", "viewed"])
def test_ranks_bound_from_memory_are_the_whole(family: Family, size: int, copy: bool) -> None:
    parts = []
    for plan in plans(family, size):
        source = KdaShardedSource(family.source(GEOMETRY), plan)
        weights, _ = bind_kda_weights(plan.config, 0, source, family=plan.family, copy=copy)
        parts.append(bytes_of(weights))
        assert weights.o_proj.shape == (34, 72 // size)
        assert weights.conv.shape == (3 * 72 // size, 4)
        assert weights.a_log.shape == (12 // size,)
        weights.release()
    require_whole(parts, family.expected(GEOMETRY))


@each_family
@each_read
def test_ranks_bound_from_files_are_the_whole(tmp_path: Path, family: Family, read: Any) -> None:
    written = write_family(tmp_path, family, GEOMETRY)
    with open_checkpoint(tmp_path) as checkpoint:
        for layer in written.kda_layers:
            parts = []
            for plan in plans(family, 3):
                source = KdaShardedSource(checkpoint.layer(layer), plan)
                weights, report = bind_kda_weights(
                    plan.config, layer, source, family=plan.family, read=read
                )
                parts.append(bytes_of(weights))
                assert report.layer_idx == layer
                weights.release()
            require_whole(parts, written.expected(layer))


@pytest.mark.parametrize("alignment", [None, 1, 256, 4096])
def test_a_rank_s_tensors_are_laid_and_aligned_as_asked(
    tmp_path: Path, alignment: int | None
) -> None:
    written = write_family(tmp_path, GLM5_NEXT, GEOMETRY)
    plan = plans(GLM5_NEXT, 2)[1]
    with open_checkpoint(tmp_path) as checkpoint:
        source = KdaShardedSource(checkpoint.layer(0), plan)
        with PinnedArena(kda_slot_bytes(plan.config, plan.family)) as arena:
            weights, report = bind_kda_weights(
                plan.config, 0, source, family=plan.family, into=arena, alignment=alignment
            )
            assert (report.read.alignment_bytes or 0) >= (alignment or 1)
            first, _ = bind_kda_weights(
                plan.config, 0, KdaShardedSource(checkpoint.layer(0), plans(GLM5_NEXT, 2)[0])
            )
            require_whole([bytes_of(first), bytes_of(weights)], written.expected(0))
            weights.release()


def test_views_of_files_copy_only_what_does_not_lie_in_one_piece(tmp_path: Path) -> None:
    write_family(tmp_path, GLM5_NEXT, GEOMETRY)
    plan = plans(GLM5_NEXT, 2)[1]
    with open_checkpoint(tmp_path) as checkpoint:
        source = KdaShardedSource(checkpoint.layer(0), plan)
        weights, report = bind_kda_weights(plan.config, 0, source, copy=False)
        assert report.read.reason.startswith("all but conv and o_proj is left where it is")
        weights.release()


def test_the_last_rank_checks_that_padding_is_zeros() -> None:
    source = KIMI_K3.source(GEOMETRY)
    whole = bytearray(source.tensors["self_attn.A_log"].data)
    whole[-1] = 1
    source.tensors["self_attn.A_log"] = kda_stream.RawTensor("F32", (128,), whole)
    *others, last = plans(KIMI_K3, 3)
    for plan in others:
        bind_kda_weights(plan.config, 0, KdaShardedSource(source, plan), family=plan.family)
    with pytest.raises(PayloadValueError, match="padding") as caught:
        bind_kda_weights(last.config, 0, KdaShardedSource(source, last), family=last.family)
    assert caught.value.code is ErrorCode.PAYLOAD_PADDING


def test_a_rank_s_part_bound_as_the_whole_is_refused() -> None:
    plan = plans(GLM5_NEXT, 2)[0]
    with pytest.raises(BindError, match="wrong shape"):
        bind_kda_weights(CONFIG, 0, KdaShardedSource(GLM5_NEXT.source(GEOMETRY), plan))


# --- streams --------------------------------------------------------------------------------------


@each_family
@each_size
def test_ranks_that_stream_have_the_whole_of_every_layer(
    tmp_path: Path, family: Family, size: int
) -> None:
    written = write_family(tmp_path, family, GEOMETRY, layers=9)
    found: dict[int, list[dict[str, bytes]]] = {layer: [] for layer in written.kda_layers}
    with open_checkpoint(tmp_path) as checkpoint:
        for plan in plans(family, size):
            with stream_kda_layers(checkpoint, plan=plan) as stream:
                for layer in stream:
                    found[layer.index].append(bytes_of(layer.weights))
                assert stream.report.slot_bytes <= kda_slot_bytes(plan.config, plan.family)
    for number, parts in found.items():
        require_whole(parts, written.expected(number))


def test_a_plan_is_followed_where_shards_are_checked_when_needed(tmp_path: Path) -> None:
    written = write_family(tmp_path, GLM5_NEXT, GEOMETRY)
    parts = []
    with open_checkpoint(tmp_path, verify="needed") as checkpoint:
        for plan in plans(GLM5_NEXT, 2):
            with stream_kda_layers(checkpoint, layers=[2], plan=plan) as stream:
                parts += [bytes_of(layer.weights) for layer in stream]
    require_whole(parts, written.expected(2))


def test_direct_reads_say_what_was_not_read_so(tmp_path: Path) -> None:
    write_family(tmp_path, GLM5_NEXT, GEOMETRY)
    with open_checkpoint(tmp_path) as checkpoint:
        for size, notes in ((1, 0), (2, 1)):
            plan = plans(GLM5_NEXT, size)[0]
            with stream_kda_layers(checkpoint, plan=plan, read="direct", lock="off") as stream:
                for layer in stream:
                    assert layer.report.read.path == "direct"
                assert len(stream.report.notes) == notes
                assert all("rows that lie apart" in note for note in stream.report.notes)


def test_what_the_plan_decides_is_not_given_again(tmp_path: Path) -> None:
    write_family(tmp_path, GLM5_NEXT, GEOMETRY)
    plan = plans(GLM5_NEXT, 2)[0]
    with open_checkpoint(tmp_path) as checkpoint:
        for wrong in (
            {"config": CONFIG},
            {"family": "auto"},
            {"family": kda_stream.KIMI_K3},
            {"plan": CONFIG},
        ):
            with pytest.raises(ArgumentError, match="KdaTpPlan"):
                stream_kda_layers(checkpoint, **{"plan": plan, **wrong})  # type: ignore[arg-type]


def test_a_plan_of_another_geometry_is_refused_before_any_payload(tmp_path: Path) -> None:
    write_family(tmp_path, GLM5_NEXT, GEOMETRY)
    other = KdaTpPlan(kda_config(Geometry(34, 24, 6, 4)), 0, 2)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(BindError, match="wrong shape"):
        stream_kda_layers(checkpoint, plan=other)


def test_bytes_of_the_ranks_add_up(tmp_path: Path) -> None:
    """Everything once, but what is whole on every rank."""
    written = write_family(tmp_path, GLM5_NEXT, GEOMETRY)
    whole = written.expected(0)
    shared = sum(len(whole[name]) for name in ("f_a", "g_a", "o_norm"))
    with open_checkpoint(tmp_path) as checkpoint:
        nbytes = 0
        for plan in plans(GLM5_NEXT, 3):
            with stream_kda_layers(checkpoint, layers=[0], plan=plan) as stream:
                nbytes += sum(layer.report.bytes for layer in stream)
    assert nbytes == sum(map(len, whole.values())) + 2 * shared
