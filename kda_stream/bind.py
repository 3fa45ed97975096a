"""One layer: its source, the geometry and memory in; `KdaWeights` and a `KdaBindReport` out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Literal

from .dtypes import KdaDtype
from .errors import ArgumentError, BindError, ErrorCode, PayloadError, SlotError, shown
from .kda.config import KdaConfig
from .kda.source import KdaTensorSource, PayloadFile, RawTensor
from .kda.tensors import ATTENTION_PREFIX, KDA_TENSORS, TensorSpec
from .limits import SLOT_ALIGNMENT_BYTES
from .staging.arena import Lease, LockReport, PinnedArena, Slot
from .staging.native import can_populate
from .staging.spans import CopyPlan, FileRange, Span

Via = Literal["auto", "map", "read"]
VIAS: Final = ("auto", "map", "read")

CONV_FIELD: Final = "conv"
CONV_LEAVES: Final = ("q_conv1d", "k_conv1d", "v_conv1d")


class ProblemKind(str, Enum):
    """In what way a tensor of a layer is not what a KDA block must have; judged in this order."""

    UNKNOWN = "unknown"
    REPEATED = "repeated"
    MISSING = "missing"
    DTYPE = "dtype"
    SHAPE = "shape"
    BYTES = "bytes"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class BindProblem:
    """One deviation of a layer from `KDA_TENSORS`; a field that does not apply is None.

    `tensor` is layer-relative, `shard` the path of the file that holds it.
    """

    tensor: str
    kind: ProblemKind
    shard: str | None = None
    stored_dtype: str | None = None
    stored_shape: tuple[int, ...] | None = None
    stored_bytes: int | None = None
    expected_dtype: str | None = None
    expected_shape: tuple[int, ...] | None = None
    expected_bytes: int | None = None

    def __str__(self) -> str:
        where = "" if self.shard is None else f" in {shown(os.path.basename(self.shard))}"
        name = shown(self.tensor)
        stored = f"{shown(self.stored_dtype or '')} {list(self.stored_shape or ())}"
        expected = f"{self.expected_dtype} {list(self.expected_shape or ())}"
        match self.kind:
            case ProblemKind.UNKNOWN:
                return f"{name} is no tensor of a KDA block: stored {stored}{where}"
            case ProblemKind.REPEATED:
                return f"{name} is listed twice"
            case ProblemKind.MISSING:
                return f"{name} is missing: expected {expected}"
            case ProblemKind.BYTES:
                return (
                    f"{name} has the wrong byte count: expected {self.expected_bytes}, "
                    f"got {self.stored_bytes}{where}"
                )
            case _:
                return f"{name} has the wrong {self.kind}: expected {expected}, got {stored}{where}"


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """One tensor of a bound layer: `dtype`, `shape`, and `data`, its bytes as stored, read-only.

    `data` is a memoryview lent out of a slot, or of the mapped file with `copy=False`; it ends
    when the slot or the checkpoint is given back.
    """

    dtype: KdaDtype
    shape: tuple[int, ...]
    data: memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """The weights of one KDA layer, byte for byte as stored.

    With Q = heads * head_dim, X = hidden, D = head_dim, H = heads, K = conv_kernel: `q_proj`,
    `k_proj`, `v_proj` BF16 [Q, X]; `conv` BF16 [3Q, K], q, k and v joined in that order; `f_a`,
    `g_a` BF16 [D, X]; `f_b`, `g_b` BF16 [Q, D]; `b_proj` BF16 [H, X]; `a_log` F32 [H]; `dt_bias`
    F32 [Q]; `o_norm` BF16 [D]; `o_proj` BF16 [X, Q]. The memory is lent: see `release`.
    """

    q_proj: BoundTensor
    k_proj: BoundTensor
    v_proj: BoundTensor
    conv: BoundTensor
    f_a: BoundTensor
    f_b: BoundTensor
    g_a: BoundTensor
    g_b: BoundTensor
    b_proj: BoundTensor
    a_log: BoundTensor
    dt_bias: BoundTensor
    o_norm: BoundTensor
    o_proj: BoundTensor
    lease: Lease = field(repr=False, compare=False)

    def items(self) -> Iterator[tuple[str, BoundTensor]]:
        """(field name, tensor) of each of the thirteen tensors."""
        for name in FIELDS:
            yield name, getattr(self, name)

    def release(self) -> None:
        """Give the slot back; every `data` ends. Again: no effect. See `Lease.release`."""
        self.lease.release()


@dataclass(frozen=True, slots=True)
class KdaBindReport:
    """What a bind saw and did.

    `bound` tensors of the layer are in the weights, out of `self_attn_seen` attention names;
    `non_attn_seen` other names were counted and not touched. `unknown_self_attn` is empty, as any
    such name is refused. `bytes` of weights; `shards` they lie in, in the order of first use; `via`
    is how they were brought in: "map" (copied from mapped pages), "read" (positional reads),
    "memory" (copied from the source's own memory), "view" (left in the map; conv alone copied), or
    "none" (judged from metadata alone). `lock` tells of the slot's memory, None without one.
    """

    layer_idx: int
    bound: int
    self_attn_seen: int
    non_attn_seen: int
    unknown_self_attn: tuple[str, ...]
    bytes: int
    shards: tuple[str, ...]
    via: str
    lock: LockReport | None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a field lies in a slot, as what, and the specs that are joined to make it."""

    begin: int
    end: int
    dtype: KdaDtype
    shape: tuple[int, ...]
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class _Judged:
    """A layer that passed every check, with the source's tensors by spec name."""

    tensors: Mapping[str, RawTensor]
    report: KdaBindReport


def _field_of(spec: TensorSpec) -> str:
    leaf = spec.name.removeprefix(ATTENTION_PREFIX).removesuffix(".weight")
    if leaf in CONV_LEAVES:
        return CONV_FIELD
    short = {"f_a_proj": "f_a", "f_b_proj": "f_b", "g_a_proj": "g_a", "g_b_proj": "g_b"}
    return short.get(leaf, leaf.lower())


FIELDS: Final = tuple(dict.fromkeys(_field_of(spec) for spec in KDA_TENSORS))


def kda_slot_bytes(config: KdaConfig) -> int:
    """The bytes of a slot that holds one layer: each tensor at a 256-byte border, q, k, v joined.

    275,481,088 at the geometry of GLM-5.3-Flash.
    """
    return max(place.end for place in _slot_places(config).values())


def bind_kda_weights(
    config: KdaConfig,
    layer_idx: int,
    source: KdaTensorSource,
    *,
    into: PinnedArena | Slot | None = None,
    copy: bool = True,
    via: Via = "auto",
    between: Callable[[], None] | None = None,
) -> tuple[KdaWeights, KdaBindReport]:
    """Bind one KDA layer: exactly `KDA_TENSORS` under `self_attn.`, or a refusal that says why.

    Every name, dtype, shape and byte count is checked before a byte of payload is touched. The
    bytes are copied unchanged into a slot of `into`, the three conv tensors joined in q, k, v
    order; with no `into`, an arena of the exact size is made, locked where the system lets it, and
    lives as long as the weights. `copy=False` leaves all but conv in the source's memory.

    `via` is how payload is brought in: "map" copies from mapped pages, each window asked for first;
    "read" uses positional reads; "auto" is "map" where the kernel can ask for pages and the file
    can be mapped, else "read". `between` is called now and then during the copy; what it raises
    ends it.

    Returns the weights, lent until they are released (see `KdaWeights.release`), and the report.
    Raises `BindError` with every problem of the layer; `SlotError` when the slot is not free or too
    small; `PayloadError` when the payload cannot be brought in or its shard has changed. After any
    of them the slot is free again.

    Example: `weights, report = bind_kda_weights(config, 0, checkpoint.layer(0))`.
    """
    if via not in VIAS:
        raise ArgumentError(
            ErrorCode.ARGUMENT, "via is unknown", expected=" or ".join(VIAS), got=via
        )
    judged = _judge(config, layer_idx, source)
    for file in _files(judged.tensors):
        file.check_unchanged()
    if not copy:
        return _bind_views(config, judged, into, between)
    slot = _claimed(into, kda_slot_bytes(config))
    try:
        used = _fill(_slot_places(config), judged.tensors, slot, via, between)
    except BaseException:
        slot.abandon()
        if into is None:
            slot.arena.close()
        raise
    lease = slot.lend()
    tensors = {
        name: BoundTensor(place.dtype, place.shape, lease.view(place.begin, place.end))
        for name, place in _slot_places(config).items()
    }
    return KdaWeights(**tensors, lease=lease), replace(
        judged.report, via=used, lock=slot.arena.report
    )


def check_kda_weights(config: KdaConfig, layer_idx: int, source: KdaTensorSource) -> KdaBindReport:
    """Every check of `bind_kda_weights` from metadata alone: no payload is touched, none is mapped.

    Returns the report that the bind would give, with `via` "none"; raises `BindError`.
    """
    return _judge(config, layer_idx, source).report


# Judging -----------------------------------------------------------------------------------------


def _judge(config: KdaConfig, layer_idx: int, source: KdaTensorSource) -> _Judged:
    names = source.names()
    attention = [name for name in names if name.startswith(ATTENTION_PREFIX)]
    specs = {spec.name: spec for spec in KDA_TENSORS}
    seen = set(attention)
    tensors = {name: source.get(name) for name in specs if name in seen}
    problems = [
        problem
        for spec in KDA_TENSORS
        if (problem := _problem(spec, config, tensors.get(spec.name))) is not None
    ]
    unknown = tuple(sorted(seen.difference(specs)))
    problems += [_stored(name, ProblemKind.UNKNOWN, source.get(name)) for name in unknown]
    repeated = sorted(name for name in seen if attention.count(name) > 1)
    problems += [BindProblem(name, ProblemKind.REPEATED) for name in repeated]
    if problems:
        raise _refusal(layer_idx, problems)
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    report = KdaBindReport(
        layer_idx=layer_idx,
        bound=len(found),
        self_attn_seen=len(attention),
        non_attn_seen=len(names) - len(attention),
        unknown_self_attn=unknown,
        bytes=sum(tensor.nbytes for tensor in found.values()),
        shards=tuple(file.path for file in _files(found)),
        via="none",
        lock=None,
    )
    return _Judged(found, report)


def _problem(spec: TensorSpec, config: KdaConfig, tensor: RawTensor | None) -> BindProblem | None:
    """The first way in which `tensor` is not what `spec` asks: dtype, then shape, then bytes."""
    shape, nbytes = spec.expected_shape(config), spec.expected_bytes(config)
    if tensor is None:
        kind = ProblemKind.MISSING
    elif tensor.dtype != spec.dtype.value:
        kind = ProblemKind.DTYPE
    elif tuple(tensor.shape) != shape:
        kind = ProblemKind.SHAPE
    elif tensor.nbytes != nbytes:
        kind = ProblemKind.BYTES
    else:
        return None
    return replace(
        _stored(spec.name, kind, tensor),
        expected_dtype=spec.dtype.value,
        expected_shape=shape,
        expected_bytes=nbytes,
    )


def _stored(name: str, kind: ProblemKind, tensor: RawTensor | None) -> BindProblem:
    """A problem with what is stored under `name`, and nothing yet of what was expected."""
    if tensor is None:
        return BindProblem(name, kind)
    return BindProblem(
        name,
        kind,
        shard=None if tensor.place is None else tensor.place.file.path,
        stored_dtype=tensor.dtype,
        stored_shape=tuple(tensor.shape),
        stored_bytes=tensor.nbytes,
    )


def _refusal(layer_idx: int, problems: list[BindProblem]) -> BindError:
    shards = dict.fromkeys(problem.shard for problem in problems if problem.shard is not None)
    error = BindError(
        ErrorCode.BIND_REFUSED,
        f"layer {layer_idx} is not exactly a KDA block: {len(problems)} problems: "
        + "; ".join(map(str, problems)),
        path=next(iter(shards), None),
        tensor=problems[0].tensor if len(problems) == 1 else None,
        hint="bytes are never changed to fit: load a checkpoint that stores the layer as expected, "
        "or the config.json that belongs to this one",
    )
    error.problems = tuple(problems)
    return error


# Placing and moving ------------------------------------------------------------------------------


def _slot_places(config: KdaConfig) -> dict[str, _Place]:
    """Field name -> its place in a slot, in the order of `KDA_TENSORS`."""
    places: dict[str, _Place] = {}
    at = 0
    for name in FIELDS:
        specs = tuple(spec for spec in KDA_TENSORS if _field_of(spec) == name)
        begin = -(-at // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        at = begin + sum(spec.expected_bytes(config) for spec in specs)
        shape = specs[0].expected_shape(config)
        if name == CONV_FIELD:
            shape = (config.conv_dim, config.conv_kernel)
        places[name] = _Place(begin, at, specs[0].dtype, shape, specs)
    return places


def _claimed(into: PinnedArena | Slot | None, nbytes: int) -> Slot:
    if into is None:
        into = PinnedArena(nbytes)
    slot = into.claim()
    if slot.nbytes < nbytes:
        slot.abandon()
        raise SlotError(
            ErrorCode.SLOT_TOO_SMALL,
            "the slot is too small for the layer",
            expected=f"{nbytes} bytes",
            got=f"{slot.nbytes} bytes",
            hint="make the arena with kda_slot_bytes(config)",
        )
    return slot


def _fill(
    places: Mapping[str, _Place],
    tensors: Mapping[str, RawTensor],
    slot: Slot,
    via: Via,
    between: Callable[[], None] | None,
) -> str:
    """Copy every tensor to its place in the slot; how the payload was brought in."""
    files = _files(tensors)
    used = _way(files, via)
    with ExitStack() as opened:
        descriptors: dict[str, int] = {}
        for file in files if used == "read" else ():
            descriptors[file.path] = descriptor = file.open()
            opened.callback(os.close, descriptor)
        spans = []
        for place in places.values():
            at = place.begin
            for spec in place.specs:
                tensor = tensors[spec.name]
                spans.append(_span(spec.name, tensor, at, descriptors))
                at += tensor.nbytes
        try:
            CopyPlan(tuple(spans)).run(slot.memory(), between=between)
        finally:
            if used == "map":
                _drop_mapped_pages(tensors)
    for file in files:
        file.check_unchanged()
    return used


def _drop_mapped_pages(tensors: Mapping[str, RawTensor]) -> None:
    """Let go of the copied layer's mapped pages, so that they do not pile up layer by layer."""
    for tensor in tensors.values():
        if tensor.place is not None:
            tensor.place.file.drop(tensor.place.begin, tensor.place.end)


def _way(files: list[PayloadFile], via: Via) -> str:
    if not files:
        return "memory"
    if via != "auto":
        return via
    if not can_populate():
        return "read"
    try:
        for file in files:
            file.view(0, 0)
    except PayloadError as error:
        if error.code is not ErrorCode.MAP_REFUSED:
            raise
        return "read"
    return "map"


def _span(name: str, tensor: RawTensor, destination: int, descriptors: Mapping[str, int]) -> Span:
    nbytes, place = tensor.nbytes, tensor.place
    path = None if place is None else place.file.path
    if place is not None and place.file.path in descriptors:
        source = FileRange(descriptors[place.file.path], place.begin, nbytes)
        return Span(source, 1, nbytes, nbytes, destination, tensor=name, path=path)
    mapped = place is not None
    return Span(tensor.data, 1, nbytes, nbytes, destination, mapped, tensor=name, path=path)


def _bind_views(
    config: KdaConfig,
    judged: _Judged,
    into: PinnedArena | Slot | None,
    between: Callable[[], None] | None,
) -> tuple[KdaWeights, KdaBindReport]:
    """Conv joined in a slot of its own; every other tensor a view of the source's memory."""
    places = _slot_places(config)
    conv = places[CONV_FIELD]
    own = _Place(0, conv.end - conv.begin, conv.dtype, conv.shape, conv.specs)
    slot = _claimed(into, own.end)
    try:
        tensors = {
            name: BoundTensor(place.dtype, place.shape, judged.tensors[place.specs[0].name].data)
            for name, place in places.items()
            if name != CONV_FIELD
        }
        _fill({CONV_FIELD: own}, judged.tensors, slot, "auto", between)
    except BaseException:
        slot.abandon()
        if into is None:
            slot.arena.close()
        raise
    lease = slot.lend()
    tensors[CONV_FIELD] = BoundTensor(own.dtype, own.shape, lease.view(0, own.end))
    weights = KdaWeights(**tensors, lease=lease)
    return weights, replace(judged.report, via="view", lock=slot.arena.report)


def _files(tensors: Mapping[str, RawTensor]) -> list[PayloadFile]:
    """The files that hold the tensors, each once."""
    files = {}
    for tensor in tensors.values():
        if tensor.place is not None:
            files[tensor.place.file.path] = tensor.place.file
    return list(files.values())
