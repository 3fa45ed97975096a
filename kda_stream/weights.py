"""Every tensor of a checkpoint, through the same slots: by the thousand, in bounded memory."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn

from .bind import fill_slot
from .checkpoint.checkpoint import Checkpoint, require_checkpoint
from .closing import Closing, finish_first
from .errors import ArgumentError, ErrorCode, StreamError
from .kda.source import RawTensor, files_of
from .limits import COLLECT_SECONDS, KEPT_SECONDS, LAYOUT_BYTES, WEIGHTS_SLOT_BYTES
from .packing import LARGES, ORDERS, Batch, Large, Order, Part, batches
from .require import require_choice, require_items
from .stager import Stager, Stopwatch, no_thread
from .staging.arena import (
    Lease,
    PinnedArena,
    Slot,
    SlotState,
    require_arena_arguments,
)
from .staging.locking import LockPolicy, LockReport
from .staging.reading import (
    ReadChoice,
    ReadPath,
    ReadReport,
    Residency,
    require_read_choice,
)
from .staging.registration import HostRegistrar, require_registrar


class TensorPiece(RawTensor):
    """Some rows of a tensor that is larger than a slot: `row` is the first one's number, from 0.

    Rows are along the first axis. `shape`, `data` and `nbytes` are the piece's, `whole_shape` is
    the tensor's. Lent as every tensor of its stream.
    """

    __slots__ = ("row", "whole_shape")

    def __init__(self, part: Part, data: memoryview) -> None:
        super().__init__(part.tensor.dtype, part.tensor.shape, data)
        self.whole_shape = part.whole_shape
        self.row = part.row or 0


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What has been handed out so far.

    `tensors` (each piece counts) and `bytes` of them; `seconds` since the first was asked for;
    `slots` of `slot_bytes`; `reads` counts the fills of slots by the way they were brought in, and
    `notes` tell what could not be had of it (see `ReadReport`); `lock` tells of the slots' memory,
    None before the first.
    """

    tensors: int
    bytes: int
    seconds: float
    slots: int
    slot_bytes: int
    reads: Mapping[str, int]
    notes: tuple[str, ...]
    lock: LockReport | None


@dataclass(frozen=True, slots=True)
class _Filled:
    batch: Batch
    lease: Lease
    read: ReadReport


_WeightStager = Stager[Batch, _Filled]


class _Filling:
    """What the thread does with a batch. It does not know the stream, which may be dropped."""

    def __init__(self, lock: LockPolicy, register: HostRegistrar | None) -> None:
        self._lock: LockPolicy = lock
        self._register = register
        self._own: list[PinnedArena] = []  # of tensors that have one of their own

    def __call__(self, batch: Batch, stager: _WeightStager) -> _Filled | None:
        if batch.is_large:
            return self._fill_own(batch, stager)
        slot = stager.free_slot()
        self._leave_own(which_are_used=False)
        return None if slot is None else _fill(batch, slot.claim(), stager.choice)

    def _fill_own(self, batch: Batch, stager: _WeightStager) -> _Filled | None:
        self._leave_own(which_are_used=False)
        if len(self._own) > 1 and not stager.wait_until(partial(_is_free, self._own[0])):
            return None
        self._leave_own(which_are_used=False)
        arena = PinnedArena(batch.nbytes, lock=self._lock, register=self._register)
        try:
            filled = _fill(batch, arena.claim(), stager.choice)
        except BaseException:
            arena.leave()
            raise
        self._own.append(arena)
        return filled

    def leave(self) -> None:
        """Let the arenas go that were made here; what is lent of them stays."""
        self._leave_own(which_are_used=True)

    def _leave_own(self, *, which_are_used: bool) -> None:
        for arena in list(self._own):
            if which_are_used or _is_free(arena):
                arena.leave()
                self._own.remove(arena)


def _is_free(arena: PinnedArena) -> bool:
    """Whether nothing points into its one slot any more."""
    return arena.slots[0].state is SlotState.FREE


def _fill(batch: Batch, slot: Slot, choice: ReadChoice) -> _Filled:
    """Bring a batch into a claimed slot, which is free again when that fails."""
    files = files_of(part.tensor for part in batch.parts)
    try:
        read = fill_slot(slot, files, batch.wanted, (), choice)
        return _Filled(batch, slot.lend(), read)
    except BaseException:
        slot.abandon()
        raise


class WeightStream(Closing):
    """The tensors of a checkpoint, one after the other; made by `iter_weights`.

    An iterator of (name, `RawTensor`), and a context manager. It begins at the first step, and ends
    its thread at the last, on an error, on `close`, and when it is dropped. The checkpoint stays
    open.

    A tensor is lent: its slot is filled again when the stream has moved on to what lies in another
    one, and nothing points into it any more: no `data`, no array and no torch tensor made of it. So
    what is kept stays right, also after the end; but while every slot is kept the stream waits, and
    raises `StreamError` after `KEPT_SECONDS`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        batches: Iterator[Batch],
        slots: int,
        slot_bytes: int,
        lock: LockPolicy,
        register: HostRegistrar | None,
        choice: ReadChoice,
    ) -> None:
        self._checkpoint = checkpoint
        self._batches = batches
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._lock: LockPolicy = lock
        self._register = register
        self._choice = choice
        self._stager: _WeightStager | None = None
        self._filling: _Filling | None = None
        self._process = os.getpid()
        self._turn = threading.Lock()
        self._lease: Lease | None = None
        self._parts: Iterator[Part] = iter(())
        self._is_over = False  # all was given
        self._is_closed = False
        self._kept_since: float | None = None
        self._collected_at = 0.0
        self._tensors = 0
        self._bytes = 0
        self._reads: Counter[str] = Counter()
        self._notes: dict[str, None] = {}

    def __enter__(self) -> WeightStream:
        return self

    def __iter__(self) -> WeightStream:
        return self

    def __next__(self) -> tuple[str, RawTensor]:
        if not self._turn.acquire(blocking=False):
            self._refuse_misuse(
                "another thread is at its next step",
                "take the tensors in one thread, and hand them to the others",
            )
        try:
            return self._step()
        finally:
            self._turn.release()

    def _step(self) -> tuple[str, RawTensor]:
        stager = self._running()
        part = next(self._parts, None)
        if part is None:
            try:
                part = self._next_batch(stager)
            except BaseException as error:
                self._is_over = isinstance(error, StopIteration)
                self.close()
                raise
        elif stager.is_waiting:
            stager.arena.wake()  # what the last step gave may be gone by now, and rings no bell
        lease, tensor = self._lease, part.tensor
        if lease is None:  # closed by another thread meanwhile
            self._refuse_misuse("the stream is closed", "make another one")
        self._tensors += 1
        self._bytes += tensor.nbytes
        data = lease.view(part.begin, part.begin + tensor.nbytes)
        if part.row is None:
            return part.name, RawTensor(tensor.dtype, tensor.shape, data)
        return part.name, TensorPiece(part, data)

    @property
    def report(self) -> WeightsReport:
        """What was handed out so far."""
        stager = self._stager
        return WeightsReport(
            tensors=self._tensors,
            bytes=self._bytes,
            seconds=stager.watch.seconds if stager else 0.0,
            slots=self._slots,
            slot_bytes=self._slot_bytes,
            reads=dict(self._reads),
            notes=tuple(self._notes),
            lock=stager.arena.report if stager else None,
        )

    def close(self) -> None:
        """End the thread and hand out no more; what was handed out stays right. Again: no effect.

        Takes at most the time of one piece of a copy (50 ms and a read).
        """
        finish_first(self._close)

    def _close(self) -> None:
        self._is_closed = True
        self._batches = iter(())
        self._parts = iter(())
        self._lease = None
        if self._stager is not None and os.getpid() == self._process:  # fork took no thread along
            self._stager.stop()
            self._stager.staged.clear()
            self._stager.arena.leave()
            if self._filling is not None:
                self._filling.leave()

    def _running(self) -> _WeightStager:
        if self._is_over:
            raise StopIteration
        if self._is_closed:
            self._refuse_misuse("the stream is closed", "make another one for what it did not give")
        if os.getpid() != self._process:
            self._refuse_misuse(
                "the stream belongs to the process before the fork", "make another one in this one"
            )
        stager = self._stager
        if stager is None:
            watch = Stopwatch()
            # With a page more than what is packed, so that all can lie as in its file.
            slot_bytes, register = self._slot_bytes + LAYOUT_BYTES, self._register
            arena = PinnedArena(slot_bytes, slots=self._slots, lock=self._lock, register=register)
            self._filling = _Filling(self._lock, register)
            stager = self._stager = Stager(self._batches, self._filling, arena, self._choice, watch)
            self._checkpoint.add_reader(stager)
            try:
                stager.start(self)
            except RuntimeError as error:
                self.close()
                raise no_thread(str(error)) from None
        return stager

    def _next_batch(self, stager: _WeightStager) -> Part:
        """Move on to what is staged next, whose first tensor it gives; raises StopIteration."""
        self._lease = None
        self._kept_since = None
        filled = stager.next_staged(partial(self._look_for_kept, stager))
        self._lease = filled.lease
        self._parts = iter(filled.batch.parts)
        self._reads[filled.read.path] += 1
        self._notes.update(dict.fromkeys(filled.read.notes))
        return next(self._parts)

    def _look_for_kept(self, stager: _WeightStager) -> None:
        """Raise `StreamError` when nothing is staged since the consumer keeps every slot."""
        stager.arena.wake()
        if not stager.is_waiting or stager.staged:
            self._kept_since = None
            return
        now = time.monotonic()
        if self._kept_since is None:
            self._kept_since = self._collected_at = now
        elif now - self._kept_since > KEPT_SECONDS:
            self._refuse_misuse(
                f"tensors are being kept, and all {self._slots} slots with them or two large ones",
                "copy what is needed longer, or drop it sooner; more slots keep more of the small",
            )
        elif now - self._collected_at > COLLECT_SECONDS:
            gc.collect()  # what is in a cycle, as of an error and its traceback, is not kept
            self._collected_at = time.monotonic()

    def _refuse_misuse(self, what: str, hint: str) -> NoReturn:
        raise StreamError(ErrorCode.STREAM_MISUSE, what, path=self._checkpoint.path, hint=hint)


def iter_weights(
    checkpoint: Checkpoint,
    *,
    names: Iterable[str] | None = None,
    order: Order = "file",
    large: Large = "own",
    slots: int = 3,
    slot_bytes: int = WEIGHTS_SLOT_BYTES,
    lock: LockPolicy = "prefer",
    read: ReadPath = "auto",
    residency: Residency = "auto",
    register: HostRegistrar | None = None,
) -> WeightStream:
    """Every tensor of the checkpoint, or the named ones, through `slots` slots of `slot_bytes`.

    Tensors come by shard and offset (`order="file"`, the fast way), or those outside of all layers
    first, and then layer by layer (`"layer"`). What lies side by side in a shard is read together.
    A tensor larger than a slot gets page-locked memory of its own, of its size (`large="own"`; two
    at once, since the next one is staged meanwhile); or it comes as several `TensorPiece`s of whole
    rows (`"pieces"`). So memory is bounded by the slots, and with "own" the two largest. `read` and
    `residency` are as for `bind_kda_weights`, `lock` and `register` as for `PinnedArena`: copies to
    a GPU must be over before a tensor is dropped, and before the stream ends.

    Raises `NotFoundError` for a name that the checkpoint lacks, `ArgumentError`, and with "layer"
    what `Checkpoint.layers` raises; while it is used `PayloadError`, `MemoryRefusedError`, and
    `StreamError` when the consumer keeps all slots (see `WeightStream`), or a row is larger than
    one; of a checkpoint opened with `verify="needed"` also what opening raises.

    Example:
        for name, tensor in iter_weights(checkpoint):
            upload(name, tensor.dtype, tensor.shape, tensor.data)
    """
    _require_options(checkpoint, order, large)
    require_weight_slots(slot_bytes, slots, lock)
    require_read_choice(read, residency)
    require_registrar(register)
    chosen = list(checkpoint) if names is None else _named(checkpoint, names)
    if order == "layer":
        checkpoint.layers()
    choice = ReadChoice(read, residency, _whole_bytes(checkpoint, chosen))
    packed = batches(checkpoint, chosen, order, large, slot_bytes)
    return WeightStream(checkpoint, packed, slots, slot_bytes, lock, register, choice)


def _named(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    given = require_items("names", names, "tensor names", '"lm_head.weight"')
    for name in given:
        checkpoint.file_of(name)
    return list(dict.fromkeys(given))


def _whole_bytes(checkpoint: Checkpoint, names: list[str]) -> int:
    """How much will be brought in, or at most, where headers are not looked at yet."""
    if checkpoint.is_checked:
        return sum(checkpoint.info(name).nbytes for name in names)
    files = {checkpoint.file_of(name) for name in names}
    return sum(_file_bytes(os.path.join(checkpoint.directory, file)) for file in files)


def _file_bytes(path: str) -> int:
    """The file's size; 0 for one that is gone, which is told when its turn comes."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


_SLOTS_MIN: Final = 2


def _require_options(checkpoint: object, order: str, large: str) -> None:
    require_checkpoint(checkpoint)
    for name, given, known in (("order", order, ORDERS), ("large", large, LARGES)):
        require_choice(name, given, known, f"leave it out: {known[0]!r} is what most want")


def require_weight_slots(slot_bytes: int, slots: int, lock: str) -> None:
    """Raise `ArgumentError` when no weights can go through such slots."""
    if type(slots) is int and slots < _SLOTS_MIN:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "one slot is not enough",
            expected=f"at least {_SLOTS_MIN}",
            got=slots,
            hint="a loop's variable keeps the slot before while the next tensor is asked for",
        )
    require_arena_arguments(slot_bytes, slots, lock)
