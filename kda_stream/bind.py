"""One layer: its source, the geometry and memory in; `KdaWeights` and a `KdaBindReport` out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import NoneType

from .dtypes import KdaDtype
from .errors import ArgumentError, ErrorCode, SlotError
from .kda.check import CheckedBlock, check_kda_block
from .kda.config import KdaConfig
from .kda.source import KdaTensorSource, RawTensor
from .layout import (
    CONV_FIELD,
    FIELDS,
    Layout,
    fields_of,
    lay_out,
    require_alignment,
    slot_bytes_for,
)
from .limits import SLOT_ALIGNMENT_BYTES
from .staging.arena import Lease, LockReport, PinnedArena, Slot
from .staging.reading import (
    ReadChoice,
    ReadPath,
    ReadReport,
    Residency,
    bring_in,
    require_read_choice,
)


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
    such name is refused. `bytes` of weights; `shards` they lie in, in the order of first use;
    `read` is how they were brought in. `lock` tells of the slot's memory, None without one.
    """

    layer_idx: int
    bound: int
    self_attn_seen: int
    non_attn_seen: int
    unknown_self_attn: tuple[str, ...]
    bytes: int
    shards: tuple[str, ...]
    read: ReadReport
    lock: LockReport | None


def bind_kda_weights(
    config: KdaConfig,
    layer_idx: int,
    source: KdaTensorSource,
    *,
    into: PinnedArena | Slot | None = None,
    copy: bool = True,
    read: ReadPath = "auto",
    residency: Residency = "auto",
    alignment: int | None = None,
    between: Callable[[], None] | None = None,
) -> tuple[KdaWeights, KdaBindReport]:
    """Bind one KDA layer: exactly `KDA_TENSORS` under `self_attn.`, or a refusal that says why.

    Every name, dtype, shape and byte count is checked before a byte of payload is touched. The
    bytes are copied unchanged into a slot of `into`, the three conv tensors joined in q, k, v
    order; with no `into`, an arena of the exact size is made, locked where the system lets it, and
    lives as long as the weights. `copy=False` leaves all but conv in the source's memory, which for
    a checkpoint is the mapped file: touching a page that cannot be read kills the process.

    `read` is how payload is brought in; the report says which way it was, and why.
    - "mapped": copied out of the mapped file, window by window. The fastest way for what is in the
      page cache. While such a copy runs there is a handler of SIGBUS for the process, which makes
      an error of a shard that is cut meanwhile and hands on every other SIGBUS. Linux 5.14.
    - "positional": read through the page cache; no map, no handler.
    - "direct": read past the page cache (O_DIRECT), several reads in flight. The fastest way for
      what is not in it.
    - "auto": "mapped" when at least half of the layer is in the page cache, else "direct"; where
      one of them cannot be had, the file lies on a network file system, or the rest is to be kept
      in the page cache, "positional".

    `residency` is what is left in the page cache: "keep" what got there (so that "auto" does not
    read past it), "drop" what was not there before, or "auto": dropped where less than twice the
    load's size is left of the memory, by the machine's and the control groups' count.
    `alignment` is a power of two, up to 4096, that each tensor's address is a multiple of. With
    None a tensor lies as far into a page as in its file, so that it is read in place, and the
    report says what that comes to.
    `between` is called now and then during the copy; what it raises ends it.

    Returns the weights, lent until they are released (see `KdaWeights.release`), and the report.
    Raises `BindError` with every problem of the layer; `SlotError` when the slot is not free or too
    small; `PayloadError` when the payload cannot be brought in or its shard has changed. After any
    of them the slot is free again.

    Example: `weights, report = bind_kda_weights(config, 0, checkpoint.layer(0))`.
    """
    require_read_choice(read, residency)
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
    require_alignment(alignment)
    block = check_kda_block(config, layer_idx, source)
    choice = ReadChoice(read, residency, block.nbytes, between=between)
    if not copy:
        return _bind_views(config, block, into, choice)
    return bind_checked(config, block, into, choice, alignment)


def bind_checked(
    config: KdaConfig,
    block: CheckedBlock,
    into: PinnedArena | Slot | None,
    choice: ReadChoice,
    alignment: int | None,
) -> tuple[KdaWeights, KdaBindReport]:
    """`bind_kda_weights` for a block that `check_kda_block` has let pass."""
    fields = fields_of(config)
    layout = lay_out(fields, block.tensors, alignment)
    lease, read = _fill_slot(into, slot_bytes_for(fields), layout, block, choice)
    tensors = {
        field.name: BoundTensor(
            field.dtype, field.shape, partial(lease.view, begin, begin + field.nbytes)
        )
        for field in fields
        for begin in [layout.begins[field.name]]
    }
    return KdaWeights(**tensors, lease=lease), _report(block, read, lease.slot.report)


def check_kda_weights(config: KdaConfig, layer_idx: int, source: KdaTensorSource) -> KdaBindReport:
    """Every check of `bind_kda_weights` from metadata alone: no payload is touched, none is mapped.

    Returns the report that the bind would give, with `read.path` "none"; raises `BindError`.
    """
    nothing = ReadReport("none", "judged from metadata alone")
    return _report(check_kda_block(config, layer_idx, source), nothing, None)


# Placing and moving ------------------------------------------------------------------------------


def _fill_slot(
    into: PinnedArena | Slot | None,
    nbytes: int,
    layout: Layout,
    block: CheckedBlock,
    choice: ReadChoice,
) -> tuple[Lease, ReadReport]:
    """Fill a slot, of an arena of its own without `into`, and lend it; given back on any error."""
    memory = PinnedArena(nbytes) if into is None else into
    claimant = object()  # Ctrl-C may come when the slot is claimed and not known here yet
    try:
        slot = memory.claim(claimant=claimant)
        if slot.nbytes < nbytes:
            raise SlotError(
                ErrorCode.SLOT_TOO_SMALL,
                "the slot is too small for the layer",
                expected=f"{nbytes} bytes",
                got=f"{slot.nbytes} bytes",
                hint="make the arena with kda_slot_bytes(config)",
            )
        read = _fill(layout, block, slot, choice)
        return slot.lend(closes_arena=into is None), read
    except BaseException:
        memory.abandon_claim(claimant)
        if into is None and isinstance(memory, PinnedArena):
            memory.close()
        raise


def _fill(layout: Layout, block: CheckedBlock, slot: Slot, choice: ReadChoice) -> ReadReport:
    """Copy every tensor to its place in the slot; how the payload was brought in."""
    for file in block.files:
        file.check_unchanged()
    read = bring_in(
        layout.wanted,
        layout.from_memory,
        slot.memory(),
        choice,
        before_direct=slot.prepare_for_direct_reads,
    )
    for file in block.files:
        file.check_unchanged()
    return replace(read, alignment_bytes=layout.alignment_bytes)


def _bind_views(
    config: KdaConfig, block: CheckedBlock, into: PinnedArena | Slot | None, choice: ReadChoice
) -> tuple[KdaWeights, KdaBindReport]:
    """Conv joined in a slot of its own; every other tensor a view of the source's memory."""
    fields = {field.name: field for field in fields_of(config)}
    conv = fields.pop(CONV_FIELD)
    layout = lay_out([conv], block.tensors, SLOT_ALIGNMENT_BYTES)
    tensors = {
        name: BoundTensor(
            field.dtype, field.shape, partial(_data, block.tensors[field.specs[0].name])
        )
        for name, field in fields.items()
    }
    lease, read = _fill_slot(into, layout.end, layout, block, choice)
    tensors[CONV_FIELD] = BoundTensor(conv.dtype, conv.shape, partial(lease.view, 0, layout.end))
    view = ReadReport("view", f"all but conv is left where it is; conv: {read.path}")
    return KdaWeights(**tensors, lease=lease), _report(block, view, lease.slot.report)


def _data(tensor: RawTensor) -> memoryview:
    return tensor.data


def _report(block: CheckedBlock, read: ReadReport, lock: LockReport | None) -> KdaBindReport:
    return KdaBindReport(
        layer_idx=block.layer_idx,
        bound=len(block.tensors),
        self_attn_seen=block.self_attn_seen,
        non_attn_seen=block.non_attn_seen,
        unknown_self_attn=(),
        bytes=block.nbytes,
        shards=tuple(file.path for file in block.files),
        read=read,
        lock=lock,
    )
