"""`PinnedArena`: page-locked memory of exactly the size asked for, lent out slot by slot."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial

from ..closing import Closing, finish_first, renew_locks_after_fork
from ..errors import (
    ArgumentError,
    ClosedError,
    ErrorCode,
    InUseError,
    SlotError,
)
from ..limits import BELL_SECONDS, SLOTS_MAX
from ..require import require_choice
from .locking import LOCK_POLICIES, LockPolicy, lock_pages
from .pages import PAGE_BYTES, LentMemory, map_anonymous
from .registration import HostRegistrar, Registration, register_refused, require_registrar
from .room import are_huge_pages_at_hand


class SlotState(Enum):
    """What a slot is doing: nothing, being written, or lent to a consumer."""

    FREE = "free"
    FILLING = "being filled"
    LENT = "lent"


class _Memory:
    """What an arena shares with its slots; they do not refer to the arena, so no cycle keeps it."""

    _registration: Registration | None = None

    def __init__(
        self, nbytes: int, policy: str, register: HostRegistrar | None, *, debug: bool
    ) -> None:
        self.renew_locks()
        renew_locks_after_fork(self)
        self.debug = debug
        self.closed = False
        self._locked = False
        self.mapping = map_anonymous(nbytes)
        try:
            self.report = lock_pages(self.mapping, policy)
            self._locked = self.report.locked
            # What a driver registers is made by that, and stays as it is.
            if register is not None or are_huge_pages_at_hand(nbytes):
                self.mapping.prefer_huge_pages()
            if register is not None:
                self._register(register, policy)
        except BaseException:
            self.close()
            raise

    def _register(self, registrar: HostRegistrar, policy: str) -> None:
        self._registration = Registration(registrar, self.mapping)
        refusal = self._registration.begin()
        if refusal is None:
            self.report = replace(self.report, registered=True)
        elif policy == "require":
            raise register_refused(self.mapping.nbytes, refusal)
        else:
            self.report = replace(self.report, registration_refusal="; ".join(refusal))

    def renew_locks(self) -> None:
        """Make new locks, as in a forked child."""
        # Entered by its own `with`, never by the condition's: that one is written in Python, and
        # Ctrl-C in it would leave the lock locked.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)

    def require_open(self) -> None:
        if self.closed:
            raise ClosedError(ErrorCode.ARENA_CLOSED, "the arena is closed", hint="make a new one")

    def close(self) -> bool:
        """Unregister and unlock the pages, let them go; whether nothing points into them any more.

        What is raised, as when the driver does not unregister them, is raised after that.
        """
        self.closed = True
        with self.lock:
            self.changed.notify_all()
        try:
            if self._registration is not None:
                self._registration.end()
        finally:
            if self._locked:
                self.mapping.unlock()
                self._locked = False
            gone = self.mapping.close()
        return gone


class _RegisteredMemory(_Memory):
    """Memory that a driver knows; apart, since Ctrl-C in a destructor is lost."""

    def __del__(self) -> None:
        if self._registration is not None:  # dropped without close()
            self._registration.end()


class Slot:
    """One slot of an arena: `nbytes` bytes from a page border on; `number` counts from 0.

    `claim` makes a free slot one that is being filled, `lend` a lent one, `Lease.release` a free
    one again; `abandon` frees a claimed one. A slot that is lent is never written. `report` tells
    whether its memory is page-locked.
    """

    def __init__(self, memory: _Memory, number: int, begin: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.report = memory.report
        self._shared = memory
        self._begin = begin
        self._filling: LentMemory | None = None
        self._claimant: object = None
        self._was_lent = False
        self._is_prepared = False
        self._writers: list[LentMemory] = []  # ended, with arrays left that can still write
        self._lent: LentMemory | None = None
        self._lease: weakref.ref[Lease] | None = None

    @property
    def state(self) -> SlotState:
        """What the slot is doing."""
        with self._shared.lock:
            if self._filling is not None:
                return SlotState.FILLING
            if self._lent is None:
                return SlotState.FREE
            dropped = self._lease is None or self._lease() is None
            if dropped and self._lent.abandon():  # a lease that nobody has any more is given back
                self._lent = None
                return SlotState.FREE
            return SlotState.LENT

    def claim(self, *, claimant: object = None) -> Slot:
        """Take the slot for writing; raises `SlotError` when it is not free.

        A `claimant` can give it back by `abandon_claim`, if Ctrl-C kept it from hearing of it.
        """
        with self._shared.lock:
            self._shared.require_open()
            if self.state is not SlotState.FREE:
                raise self._not(SlotState.FREE, "release the weights that lie in it first")
            self._claimant = claimant
            self._filling = self._memory(writable=True)
        return self

    def memory(self) -> memoryview:
        """The slot's bytes, writable until it is lent; raises `SlotError` if it is not claimed."""
        with self._shared.lock:
            if self._filling is None:
                raise self._not(SlotState.FILLING, "claim it first")
            return self._filling.view(0, self.nbytes)

    def lend(self, *, closes_arena: bool = False) -> Lease:
        """Hand the filled slot to a consumer; it is not written until the lease is given back.

        The writable memory ends. With `closes_arena` the lease takes the arena with it. Raises
        `SlotError` when the slot is not claimed, `InUseError` when an array that was made of the
        writable memory is still there.
        """
        with self._shared.lock:
            if self._filling is None:
                raise self._not(SlotState.FILLING, "claim and fill it first")
            writers = [*self._writers, self._filling]
            if not all(writer.end() for writer in writers):
                raise InUseError(
                    ErrorCode.MEMORY_IN_USE,
                    f"an array can still write into slot {self.number}",
                    expected="none when the slot is lent",
                    hint="drop what was made of the slot's memory first",
                )
            self._was_lent = True
            self._lent = self._memory(writable=False)
            lease = Lease(self, self._lent, self._shared, closes_arena=closes_arena)
            self._lease = weakref.ref(lease)
            self._filling = None
            self._writers = []
            return lease

    def abandon(self) -> None:
        """Free a claimed slot unlent, as after a load that failed; no effect on any other."""
        with self._shared.lock:
            if self._filling is not None:
                self._filling.end()
                writers = [*self._writers, self._filling]
                self._writers = [writer for writer in writers if writer.in_use]
                self._filling = None
                self._shared.changed.notify_all()

    def abandon_claim(self, claimant: object) -> None:
        """Free the slot if it is claimed by `claimant`; whatever signals come, it is done."""
        finish_first(partial(self._abandon_claim, claimant))

    def _abandon_claim(self, claimant: object) -> None:
        with self._shared.lock:
            if self._claimant is claimant:
                self.abandon()

    def prepare_for_direct_reads(self) -> None:
        """Have the slot's memory be in huge pages where the kernel gives them, see `Mapping`.

        Small pages that an earlier fill has made are put together; not those that a driver has.
        """
        if self._is_prepared or self.report.registered:
            return
        self._is_prepared = True
        self._shared.mapping.prefer_huge_pages()
        if self._was_lent:
            self._shared.mapping.collapse(self._begin, self._begin + self.nbytes)

    def _memory(self, *, writable: bool) -> LentMemory:
        end = self._begin + self.nbytes
        return self._shared.mapping.lend(self._begin, end, writable=writable)

    def _revoke(self) -> None:
        """End what is lent, because the arena is closed."""
        lease = None if self._lease is None else self._lease()
        if lease is not None:
            lease._revoke()
        if self._lent is not None:
            self._lent.end()
            self._lent = None

    def _not(self, state: SlotState, hint: str) -> SlotError:
        return SlotError(
            ErrorCode.SLOT_NOT_FREE if state is SlotState.FREE else ErrorCode.SLOT_NOT_CLAIMED,
            f"slot {self.number} cannot be taken for this",
            expected=f"a slot that is {state.value}",
            got=f"a slot that is {self.state.value}",
            hint=hint,
        )


class Lease:
    """A filled slot in a consumer's hands, with the read-only views made of it.

    A lease that is dropped, and of whose views nothing is left, is given back by that.
    """

    def __init__(
        self, slot: Slot, memory: LentMemory, shared: _Memory, *, closes_arena: bool
    ) -> None:
        self.slot = slot
        self._memory = memory
        self._shared = shared
        self._closes_arena = closes_arena
        self._released = False
        self._held = False

    def view(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) of the slot, read-only, until the lease is released.

        Raises `ClosedError` after that, `ArgumentError` for a range outside the slot.
        """
        return self._memory.view(begin, end)

    @property
    def released(self) -> bool:
        """Whether the slot was given back."""
        return self._released

    @property
    def held(self) -> bool:
        """Whether `hold` was called and the slot not given back since."""
        return self._held and not self._released

    def hold(self) -> bool:
        """Keep the slot from `release_unless_held`; False when it was given back before."""
        with self._shared.lock:
            self._held = not self._released
            return self._held

    def release_unless_held(self) -> bool:
        """Give the slot back unless it is held; whether this call did."""
        with self._shared.lock:
            if self._held or self._released:
                return False
            self.release()
            return True

    def release(self) -> None:
        """Give the slot back: its views end, and it may be filled again. Again: no effect.

        What was made from a view (a slice, an array) cannot be ended and would see the next layer's
        bytes: do not use it any more. In debug mode (`python -X dev`, or `PinnedArena(debug=True)`)
        it makes this raise `InUseError`, and the slot stays lent until it is gone.
        """
        with self._shared.lock:
            if self._released:
                return
            if not self._memory.end() and self._shared.debug:
                raise InUseError(
                    ErrorCode.MEMORY_IN_USE,
                    f"an array or a slice still points into slot {self.slot.number}",
                    expected="none when the slot is given back",
                    hint="copy what is needed longer, or hold the layer until it is not",
                )
            self._revoke()
            self._shared.changed.notify_all()
            if self._closes_arena:
                self._shared.close()

    def _revoke(self) -> None:
        self._released = True
        self._memory.end()
        self.slot._lent = None


class PinnedArena(Closing):
    """Anonymous memory for `slots` slots of `slot_bytes` bytes, page-locked, at page borders.

    A slot's pages are made when it is first filled: huge ones where the kernel has them at hand,
    and for direct reads where it can make them.

    `lock` is "require" (raise `MemoryRefusedError` when locking is refused), "prefer" (go on
    unlocked; `report.refusal` says why) or "off". The size is exact but for rounding each slot up
    to a page. The arena owns the memory; leases and their views are lent out of it. Safe to use
    from several threads. A context manager.

    `register` has a GPU driver know the memory, so that copies to the GPU run by themselves: all of
    it at once, until the arena is closed or dropped; a forked child leaves that to its parent.
    Refused, it is as with locking: "require" raises, the others go on, and
    `report.registration_refusal` says why. Registering makes and locks every page by itself: with
    `lock="off"` it is the only lock.

    `debug` makes `Lease.release` raise while an array points into its slot; it is on under
    `python -X dev`.

    Example: `with PinnedArena(kda_slot_bytes(config), slots=2) as arena: print(arena.report)`.
    """

    def __init__(
        self,
        slot_bytes: int,
        *,
        slots: int = 1,
        lock: LockPolicy = "prefer",
        register: HostRegistrar | None = None,
        debug: bool | None = None,
    ) -> None:
        require_arena_arguments(slot_bytes, slots, lock)
        require_registrar(register)
        stride = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        debug = sys.flags.dev_mode if debug is None else debug
        kind = _Memory if register is None else _RegisteredMemory
        self._memory = kind(stride * slots, lock, register, debug=debug)
        self._gone = False
        self.report = self._memory.report
        self.slots = tuple(Slot(self._memory, n, n * stride, slot_bytes) for n in range(slots))

    @property
    def debug(self) -> bool:
        """Whether giving a slot back raises while something points into it."""
        return self._memory.debug

    @property
    def nbytes(self) -> int:
        """The arena's size in bytes, rounding included."""
        return self._memory.mapping.nbytes

    def claim(self, *, claimant: object = None) -> Slot:
        """Take a free slot for writing, as `Slot.claim`; raises `SlotError` when none is free."""
        with self._memory.lock:
            self._memory.require_open()
            slot = self._free_slot()
            if slot is None:
                raise SlotError(
                    ErrorCode.SLOT_NOT_FREE,
                    "no slot is free",
                    expected=f"a free slot among {len(self.slots)}",
                    got=", ".join(slot.state.value for slot in self.slots),
                    hint="release weights that are no longer needed, or make more slots",
                )
            return slot.claim(claimant=claimant)

    def abandon_claim(self, claimant: object) -> None:
        """Free every slot that is claimed by `claimant`; whatever signals come, it is done."""
        for slot in self.slots:
            slot.abandon_claim(claimant)

    def wait_for_slot(self, stopped: Callable[[], bool]) -> Slot | None:
        """A free slot, once there is one; None as soon as `stopped()`, asked after each `wake`."""
        with self._memory.lock:
            while not stopped():
                self._memory.require_open()
                slot = self._free_slot()
                if slot is not None:
                    return slot
                self._memory.changed.wait(BELL_SECONDS)  # a lease that is dropped wakes nobody
            return None

    def wake(self) -> None:
        """Let every `wait_for_slot` look at its `stopped` again."""
        with self._memory.lock:
            self._memory.changed.notify_all()

    def close(self) -> None:
        """Unregister, unlock and give back the memory; every view of it ends. Again: no effect.

        Raises `SlotError` while a slot is being filled, and `InUseError` when arrays still point
        into the memory: it is unlocked all the same, and goes when they do. `MemoryRefusedError`
        when the driver does not unregister it: it is given back all the same.
        """
        finish_first(self._close)

    def _close(self) -> None:
        with self._memory.lock:
            if self._gone:
                return
            if any(slot.state is SlotState.FILLING for slot in self.slots):
                raise SlotError(
                    ErrorCode.SLOT_NOT_FREE,
                    "the arena cannot be closed while a slot is being filled",
                    hint="wait for the load, or close the stream that fills it",
                )
            for slot in self.slots:
                slot._revoke()
            gone = self._memory.close()
            self._gone = True
            if not gone:
                raise InUseError(
                    ErrorCode.MEMORY_IN_USE,
                    "an array or a slice of the weights still points into the slots",
                    expected="none when they are given back",
                    hint="del it before, as at the end of the loop's body, or copy it",
                )

    def leave(self) -> None:
        """Unlock the memory and lend no more of it; what is lent stays, and the pages go with it.

        Again: no effect.
        """
        finish_first(self._leave)

    def _leave(self) -> None:
        with self._memory.lock:
            if not self._gone:
                self._memory.close()
                self._gone = True

    def _free_slot(self) -> Slot | None:
        return next((slot for slot in self.slots if slot.state is SlotState.FREE), None)

    def __enter__(self) -> PinnedArena:
        return self

    def __repr__(self) -> str:
        locked = "locked" if self.report.locked else "not locked"
        return f"PinnedArena({len(self.slots)} slots of {self.slots[0].nbytes} bytes, {locked})"


def require_arena_arguments(slot_bytes: int, slots: int, lock: str) -> None:
    """Raise `ArgumentError` when no arena can be made of these."""
    if type(slot_bytes) is not int or slot_bytes < 1:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "slot_bytes is too small",
            expected="at least 1",
            got=slot_bytes,
            hint="pass kda_slot_bytes(config)",
        )
    if type(slots) is not int or not 1 <= slots <= SLOTS_MAX:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "slots is out of range",
            expected=f"1 to {SLOTS_MAX}",
            got=slots,
            hint="two keep a stream busy; one more for each layer that is held",
        )
    hint = '"prefer" locks where the system lets it, and reports whether it did'
    require_choice("lock", lock, LOCK_POLICIES, hint)
