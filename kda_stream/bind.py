"""One layer: its source, the geometry and memory in; `KdaWeights` and a `KdaBindReport` out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

from .arrays import as_dlpack, as_numpy, as_torch
from .dtypes import DTYPE_BITS, KdaDtype
from .errors import ArgumentError, ErrorCode, SlotError
from .kda.check import CheckedBlock, FamilyChoice, check_kda_block, require_source
from .kda.config import KdaConfig
from .kda.families import GLM5_NEXT
from .kda.family import FIELDS
from .kda.padding import bytes_not_zero, padding_error
from .kda.source import KdaTensorSource, PayloadFile, RawTensor
from .layout import Field, Layout, fields_of, lay_out, require_alignment, slot_bytes_for
from .limits import SLOT_ALIGNMENT_BYTES
from .staging.arena import Lease, PinnedArena, Slot
from .staging.locking import LockReport
from .staging.reading import (
    ReadChoice,
    ReadPath,
    ReadReport,
    Residency,
    Wanted,
    bring_in,
    require_read_choice,
)
from .staging.spans import Span

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

_DLPACK_CPU: Final = 1


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """One tensor of a bound layer: its `dtype` and `shape`, and its bytes in `data`.

    `numpy()`, `torch()` and DLPack give them without a copy, each a new object that keeps the
    memory in use. A numpy array is read-only. torch has no read-only tensors, nor does DLPack ask
    for them: what is written there goes to the slot, until it is filled again; with `copy=False` to
    copy-on-write pages of the tensor's own, and over a source that is no file to its memory. A file
    is never written.

    What was made so must not be used after the slot was given back: it would see the next layer's
    bytes. In debug mode (`python -X dev`) giving back raises `InUseError` while it is there.
    """

    name: str
    dtype: KdaDtype
    shape: tuple[int, ...]
    _view: Callable[[], memoryview] = field(repr=False, compare=False)
    _writable_view: Callable[[], memoryview] = field(repr=False, compare=False)

    @property
    def data(self) -> memoryview:
        """The bytes as stored: a read-only view, lent out of the slot that the layer lies in.

        Using it, or asking for it, raises ValueError once the slot was given back. What was made of
        it before cannot be ended and must not be used after that: a slice, a numpy array, a torch
        tensor. With `copy=False` the view is of the mapped file, lent by the checkpoint; touching
        it after the file was cut short kills the process.
        """
        return self._view()

    def numpy(self) -> ndarray[Any, Any]:
        """A read-only array of this shape; F32 is float32, BF16 is ml_dtypes' bfloat16.

        Raises `NotInstalledError` where that is missing, `ClosedError` after the slot was given
        back.
        """
        return as_numpy(self.dtype.value, self.shape, self._view(), name=self.name)

    def torch(self) -> Tensor:
        """A torch tensor on the CPU, of this shape, in torch.float32 or torch.bfloat16.

        Raises `ClosedError` after the slot was given back, `NotInstalledError` without torch. With
        `copy=False` also `PayloadError` when the file has changed or the map is refused, and
        `ArgumentError` where the tensor lies at an odd address.
        """
        return as_torch(self.dtype.value, self.shape, self._writable_view(), name=self.name)

    def __dlpack__(self, **options: Any) -> Any:
        """A capsule for `from_dlpack` of any library; by numpy, or for BF16 by torch."""
        view = self._writable_view()
        return as_dlpack(self.dtype.value, self.shape, view, options, name=self.name)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU."""
        return (_DLPACK_CPU, 0)


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """The weights of one KDA layer, byte for byte as stored.

    With Q = heads * head_dim, X = hidden, D = head_dim, H = heads, K = conv_kernel: `q_proj`,
    `k_proj`, `v_proj` BF16 [Q, X]; `conv` BF16 [3Q, K], q, k and v joined in that order; `f_a`,
    `g_a` BF16 [D, X]; `f_b`, `g_b` BF16 [Q, D]; `b_proj` BF16 [H, X]; `a_log` F32 [H]; `dt_bias`
    F32 [Q]; `o_norm` BF16 [D]; `o_proj` BF16 [X, Q]. So they are for GLM5_NEXT; other families
    have some in another dtype, and `f` or `g` [Q, X] in the place of `f_a`, `f_b` or `g_a`, `g_b`.
    What a family lacks is None. The memory is lent: see `release`.
    """

    q_proj: BoundTensor
    k_proj: BoundTensor
    v_proj: BoundTensor
    conv: BoundTensor
    f_a: BoundTensor | None
    f_b: BoundTensor | None
    f: BoundTensor | None
    g_a: BoundTensor | None
    g_b: BoundTensor | None
    g: BoundTensor | None
    b_proj: BoundTensor
    a_log: BoundTensor
    dt_bias: BoundTensor
    o_norm: BoundTensor
    o_proj: BoundTensor
    lease: Lease = field(repr=False, compare=False)

    def items(self) -> Iterator[tuple[str, BoundTensor]]:
        """(field name, tensor) of each tensor that the family has."""
        for name in FIELDS:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def release(self) -> None:
        """Give the slot back; every `data` ends. Again: no effect. See `Lease.release`."""
        self.lease.release()


@dataclass(frozen=True, slots=True)
class KdaBindReport:
    """What a bind saw and did.

    `family` is the name of the layer's `KdaFamily`, and `lacking` are the fields of `KdaWeights`
    that it does not have. `bound` tensors of the layer are in the weights, out of `self_attn_seen`
    attention names; `non_attn_seen` other names were counted and not touched. `unknown_self_attn`
    is empty, as any such name is refused. `bytes` of weights; `shards` they lie in, in the order of
    first use; `read` is how they were brought in. `lock` tells of the slot's memory, None without
    one.
    """

    layer_idx: int
    family: str
    lacking: tuple[str, ...]
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
    family: FamilyChoice = GLM5_NEXT,
    into: PinnedArena | Slot | None = None,
    copy: bool = True,
    read: ReadPath = "auto",
    residency: Residency = "auto",
    alignment: int | None = None,
    between: Callable[[], None] | None = None,
) -> tuple[KdaWeights, KdaBindReport]:
    """Bind one KDA layer: exactly the tensors of its family, or a refusal that says why.

    `family` is the table that the layer must be, by default `KDA_TENSORS` under `self_attn.`; with
    "auto" it is the one that the layer is exactly a block of (see `identify_family`).

    Every name, dtype, shape and byte count is checked before a byte of payload is touched. The
    bytes are copied unchanged into a slot of `into`, the three conv tensors joined in q, k, v
    order; with no `into`, an arena of the exact size is made, locked where the system lets it, and
    lives as long as the weights. `copy=False` leaves in the source's memory all that is not joined
    or padded; for a checkpoint that is the mapped file: touching a page that cannot be read kills
    the process.

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
    report says what that comes to. With `copy=False` there is no `alignment`, and `read` and
    `residency` are for the little that is copied.
    `between` is called now and then during the copy; what it raises ends it.

    Returns the weights, lent until they are released (see `KdaWeights.release`), and the report.
    Raises `BindError` with every problem of the layer; `SlotError` when the slot is not free or too
    small; `PayloadError` when the payload cannot be brought in or its shard has changed;
    `PayloadValueError` when padding is not zeros. After any of them the slot is free again.

    Example: `weights, report = bind_kda_weights(config, 0, checkpoint.layer(0))`.
    """
    require_read_choice(read, residency)
    require_source(source)
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
            hint="make the arena with PinnedArena(kda_slot_bytes(config, family))",
        )
    require_alignment(alignment)
    if not copy and alignment is not None:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "what is not copied lies where it is",
            expected="no alignment beside copy=False",
            got=f"alignment={alignment}",
            hint="leave one of the two out",
        )
    block = check_kda_block(config, layer_idx, source, family)
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
    fields = fields_of(config, block.family, block.tensors)
    layout = lay_out(fields, block.tensors, alignment)
    lease, read = _fill_slot(into, slot_bytes_for(fields), fields, layout, block, choice)
    tensors = {field.name: _bound(field, lease, layout) for field in fields}
    return _weights(tensors, lease), _report(block, read, lease.slot.report)


def _weights(tensors: Mapping[str, BoundTensor], lease: Lease) -> KdaWeights:
    found: dict[str, Any] = {name: tensors.get(name) for name in FIELDS}
    return KdaWeights(**found, lease=lease)


def _bound(field: Field, lease: Lease, layout: Layout) -> BoundTensor:
    begin = layout.begins[field.name]
    view = partial(lease.view, begin, begin + field.counted_bytes)
    return BoundTensor(field.name, field.dtype, field.shape, view, view)


def check_kda_weights(
    config: KdaConfig,
    layer_idx: int,
    source: KdaTensorSource,
    *,
    family: FamilyChoice = GLM5_NEXT,
) -> KdaBindReport:
    """Every check of `bind_kda_weights` from metadata alone: no payload is touched, none is mapped.

    So that padding is zeros is not among them. Returns the report that the bind would give, with
    `read.path` "none"; raises `BindError`.
    """
    nothing = ReadReport("none", "judged from metadata alone")
    return _report(check_kda_block(config, layer_idx, source, family), nothing, None)


# Placing and moving ------------------------------------------------------------------------------


def _fill_slot(
    into: PinnedArena | Slot | None,
    nbytes: int,
    fields: Sequence[Field],
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
                hint="make the arena with kda_slot_bytes(config, family)",
            )
        read = _fill(layout, block, slot, choice)
        for field in fields:
            _require_zero_tail(field, layout, block, slot)
        return slot.lend(closes_arena=into is None), read
    except BaseException:
        memory.abandon_claim(claimant)
        if into is None and isinstance(memory, PinnedArena):
            memory.close()
        raise


def _fill(layout: Layout, block: CheckedBlock, slot: Slot, choice: ReadChoice) -> ReadReport:
    """Copy every tensor to its place in the slot; how the payload was brought in."""
    read = fill_slot(slot, block.files, layout.wanted, layout.from_memory, choice)
    return replace(read, alignment_bytes=layout.alignment_bytes)


def fill_slot(
    slot: Slot,
    files: Sequence[PayloadFile],
    wanted: Sequence[Wanted],
    from_memory: Sequence[Span],
    choice: ReadChoice,
) -> ReadReport:
    """Bring all that is wanted into a claimed slot; `files` must be unchanged before and after."""
    for file in files:
        file.check_unchanged()
    read = bring_in(
        wanted,
        from_memory,
        slot.memory(),
        choice,
        before_direct=slot.prepare_for_direct_reads,
    )
    for file in files:
        file.check_unchanged()
    return read


def _require_zero_tail(field: Field, layout: Layout, block: CheckedBlock, slot: Slot) -> None:
    """Raise `PayloadValueError` when what is stored behind the values that count is not zeros."""
    begin = layout.begins[field.name]
    tail = slice(begin + field.counted_bytes, begin + field.nbytes)
    not_zero = bytes_not_zero(slot.memory()[tail])  # no view of it may outlive an error
    if not_zero:
        name, width = field.specs[-1].name, DTYPE_BITS[field.dtype.value] // 8
        place = block.tensors[name].place
        raise padding_error(
            name,
            None if place is None else place.file.path,
            padding=(tail.stop - tail.start) // width,
            values=field.counted_bytes // width,
            not_zero=not_zero,
        )


def _bind_views(
    config: KdaConfig, block: CheckedBlock, into: PinnedArena | Slot | None, choice: ReadChoice
) -> tuple[KdaWeights, KdaBindReport]:
    """What is made here goes into a slot; every other tensor is a view of the source's memory."""
    fields = fields_of(config, block.family, block.tensors)
    made = [field for field in fields if field.is_made_here]
    layout = lay_out(made, block.tensors, SLOT_ALIGNMENT_BYTES)
    tensors = {
        field.name: _viewed(field, block.tensors[field.specs[0].name])
        for field in fields
        if not field.is_made_here
    }
    lease, read = _fill_slot(into, layout.end, made, layout, block, choice)
    tensors.update({field.name: _bound(field, lease, layout) for field in made})
    names = " and ".join(field.name for field in made)
    reason = f"all but {names} is left where it is; {names}: {read.path}"
    view = ReadReport("view", reason, read.residency, notes=read.notes)
    return _weights(tensors, lease), _report(block, view, lease.slot.report)


def _viewed(field: Field, tensor: RawTensor) -> BoundTensor:
    view = partial(_data, tensor)
    place = tensor.place
    own = view if place is None else partial(place.file.copy_on_write, place.begin, place.end)
    return BoundTensor(field.name, field.dtype, field.shape, view, own)


def _data(tensor: RawTensor) -> memoryview:
    return tensor.data


def _report(block: CheckedBlock, read: ReadReport, lock: LockReport | None) -> KdaBindReport:
    return KdaBindReport(
        layer_idx=block.layer_idx,
        family=block.family.name,
        lacking=block.family.lacking,
        bound=len(block.tensors),
        self_attn_seen=block.self_attn_seen,
        non_attn_seen=block.non_attn_seen,
        unknown_self_attn=(),
        bytes=block.nbytes,
        shards=tuple(file.path for file in block.files),
        read=read,
        lock=lock,
    )
