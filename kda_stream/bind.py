"""One layer: its source, the geometry and memory in; `KdaWeights` and a `KdaBindReport` out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Final, Literal

from .dtypes import KdaDtype
from .errors import ArgumentError, ErrorCode, SlotError
from .kda.check import CheckedBlock, check_kda_block
from .kda.config import KdaConfig
from .kda.source import KdaTensorSource, RawTensor
from .kda.tensors import ATTENTION_PREFIX, KDA_TENSORS, TensorSpec
from .limits import SLOT_ALIGNMENT_BYTES
from .staging.arena import Lease, LockReport, PinnedArena, Slot
from .staging.spans import CopyPlan, FileRange, Span

Via = Literal["auto", "map", "read"]
VIAS: Final = ("auto", "map", "read")

CONV_FIELD: Final = "conv"
CONV_LEAVES: Final = ("q_conv1d", "k_conv1d", "v_conv1d")


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """One tensor of a bound layer: its `dtype` and `shape`, and its bytes in `data`."""

    dtype: KdaDtype
    shape: tuple[int, ...]
    _view: Callable[[], memoryview] = field(repr=False, compare=False)

    @property
    def data(self) -> memoryview:
        """The bytes as stored: a read-only view, lent out of the slot that the layer lies in.

        Using it, or asking for it, raises ValueError once the slot was given back. What was made of
        it before cannot be ended and must not be used after that: a slice, a numpy array, a torch
        tensor. With `copy=False` the view is of the mapped file, lent by the checkpoint; touching
        it after the file was cut short kills the process.
        """
        return self._view()


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
    lives as long as the weights. `copy=False` leaves all but conv in the source's memory, which for
    a checkpoint is the mapped file: touching a page that cannot be read kills the process.

    `via` is how payload is brought in. "read" uses positional reads: a shard that is cut short
    meanwhile is an error, always. "map" copies from mapped pages, each window asked for before it
    is copied: a shard that was cut short is an error too, but one that is cut while a copy runs
    may kill the process. It needs Linux 5.14. "auto" is "read".
    `between` is called now and then during the copy; what it raises ends it.

    Returns the weights, lent until they are released (see `KdaWeights.release`), and the report.
    Raises `BindError` with every problem of the layer; `SlotError` when the slot is not free or too
    small; `PayloadError` when the payload cannot be brought in or its shard has changed. After any
    of them the slot is free again.

    Example: `weights, report = bind_kda_weights(config, 0, checkpoint.layer(0))`.
    """
    require_via(via)
    if getattr(source, "index", layer_idx) != layer_idx:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "layer_idx is not the number of the layer in source",
            expected=layer_idx,
            got=source,
            hint="pass checkpoint.layer(layer_idx)",
        )
    if not isinstance(into, (PinnedArena, Slot, NoneType)):
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "into is no slot memory",
            expected="a PinnedArena, one of its slots, or None",
            got=type(into).__name__,
            hint="make the arena with PinnedArena(kda_slot_bytes(config))",
        )
    block = check_kda_block(config, layer_idx, source)
    for file in block.files:
        file.check_unchanged()
    if not copy:
        return _bind_views(config, block, into, via, between)
    places = _slot_places(config)
    with _claimed(into, kda_slot_bytes(config)) as slot:
        used = _fill(places, block, slot, via, between)
        lease = slot.lend(closes_arena=into is None)
    tensors = {
        name: BoundTensor(place.dtype, place.shape, partial(lease.view, place.begin, place.end))
        for name, place in places.items()
    }
    return KdaWeights(**tensors, lease=lease), _report(block, used, slot.report)


def require_via(via: str) -> None:
    """Raise `ArgumentError` when `via` names no way to bring payload in."""
    if via not in VIAS:
        raise ArgumentError(
            ErrorCode.ARGUMENT, "via is unknown", expected=" or ".join(VIAS), got=repr(via)
        )


def check_kda_weights(config: KdaConfig, layer_idx: int, source: KdaTensorSource) -> KdaBindReport:
    """Every check of `bind_kda_weights` from metadata alone: no payload is touched, none is mapped.

    Returns the report that the bind would give, with `via` "none"; raises `BindError`.
    """
    return _report(check_kda_block(config, layer_idx, source))


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


@contextmanager
def _claimed(into: PinnedArena | Slot | None, nbytes: int) -> Iterator[Slot]:
    """A slot to fill, of an arena of its own without `into`; given back if the body fails."""
    memory = PinnedArena(nbytes) if into is None else into
    slot = memory.claim()
    try:
        if slot.nbytes < nbytes:
            raise SlotError(
                ErrorCode.SLOT_TOO_SMALL,
                "the slot is too small for the layer",
                expected=f"{nbytes} bytes",
                got=f"{slot.nbytes} bytes",
                hint="make the arena with kda_slot_bytes(config)",
            )
        yield slot
    except BaseException:
        slot.abandon()
        if into is None and isinstance(memory, PinnedArena):
            memory.close()
        raise


def _fill(
    places: Mapping[str, _Place],
    block: CheckedBlock,
    slot: Slot,
    via: Via,
    between: Callable[[], None] | None,
) -> str:
    """Copy every tensor to its place in the slot; how the payload was brought in."""
    files = block.files
    used = "memory" if not files else "read" if via == "auto" else via
    with ExitStack() as opened:
        descriptors: dict[int, int] = {}
        for file in files if used == "read" else ():
            descriptors[id(file)] = opened.enter_context(file.open()).fileno()
        spans = []
        for place in places.values():
            at = place.begin
            for spec in place.specs:
                tensor = block.tensors[spec.name]
                spans.append(_span(spec.name, tensor, at, descriptors))
                at += tensor.nbytes
        try:
            CopyPlan(tuple(spans)).run(slot.memory(), between=between)
        finally:
            if used == "map":
                _drop_mapped_pages(block)
    for file in files:
        file.check_unchanged()
    return used


def _drop_mapped_pages(block: CheckedBlock) -> None:
    """Let go of the copied layer's mapped pages, so that they do not pile up layer by layer."""
    for tensor in block.tensors.values():
        if tensor.place is not None:
            tensor.place.file.drop(tensor.place.begin, tensor.place.end)


def _span(name: str, tensor: RawTensor, destination: int, descriptors: Mapping[int, int]) -> Span:
    nbytes, place = tensor.nbytes, tensor.place
    path = None if place is None else place.file.path
    if place is not None and id(place.file) in descriptors:
        source = FileRange(descriptors[id(place.file)], place.begin, nbytes)
        return Span(source, 1, nbytes, nbytes, destination, tensor=name, path=path)
    mapped = place is not None
    return Span(tensor.data, 1, nbytes, nbytes, destination, mapped, tensor=name, path=path)


def _bind_views(
    config: KdaConfig,
    block: CheckedBlock,
    into: PinnedArena | Slot | None,
    via: Via,
    between: Callable[[], None] | None,
) -> tuple[KdaWeights, KdaBindReport]:
    """Conv joined in a slot of its own; every other tensor a view of the source's memory."""
    places = _slot_places(config)
    conv = places[CONV_FIELD]
    own = _Place(0, conv.end - conv.begin, conv.dtype, conv.shape, conv.specs)
    tensors = {
        name: BoundTensor(
            place.dtype, place.shape, partial(_data, block.tensors[place.specs[0].name])
        )
        for name, place in places.items()
        if name != CONV_FIELD
    }
    with _claimed(into, own.end) as slot:
        _fill({CONV_FIELD: own}, block, slot, via, between)
        lease = slot.lend(closes_arena=into is None)
    tensors[CONV_FIELD] = BoundTensor(own.dtype, own.shape, partial(lease.view, 0, own.end))
    weights = KdaWeights(**tensors, lease=lease)
    return weights, _report(block, "view", slot.report)


def _data(tensor: RawTensor) -> memoryview:
    return tensor.data


def _report(
    block: CheckedBlock, via: str = "none", lock: LockReport | None = None
) -> KdaBindReport:
    return KdaBindReport(
        layer_idx=block.layer_idx,
        bound=len(block.tensors),
        self_attn_seen=block.self_attn_seen,
        non_attn_seen=block.non_attn_seen,
        unknown_self_attn=(),
        bytes=block.nbytes,
        shards=tuple(file.path for file in block.files),
        via=via,
        lock=lock,
    )
