"""Pages of the process: a file's map or anonymous memory, and who still points into them."""

from __future__ import annotations

import errno
import os
import sys
import threading
import weakref
from functools import partial
from typing import Any, Final

from ..closing import renew_locks_after_fork
from ..errors import (
    ArgumentError,
    ClosedError,
    ErrorCode,
    MemoryRefusedError,
    PayloadError,
    in_words,
)
from ..limits import HUGE_PAGE_BYTES
from .native import extension

PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")

# View object -> the anonymous pages under it, for as long as the object lives, released or not:
# torch.frombuffer keeps the object and no buffer of it, and would read pages that are gone. A
# file's map is not kept so: closing it promises that it goes.
_PAGES_UNDER: Final[dict[int, tuple[weakref.ref[memoryview], Any]]] = {}


class LentMemory:
    """Some bytes of a `Mapping` in somebody's hands: views that end together. Safe in threads.

    It keeps the pages alive, and so does everything that was made of its views.
    """

    def __init__(
        self, pages: Any, nbytes: int, begin: int, end: int, *, writable: bool, kept: bool
    ) -> None:
        """Lend the bytes [begin, end) of the `nbytes` bytes that the pointer `pages` owns.

        `kept` keeps the pages for as long as any object made by `view` lives.
        """
        buffer = extension()[0].buffer(pages, nbytes)
        self._pages = pages
        self._kept = kept
        self._nbytes = end - begin
        memory = memoryview(buffer)[begin:end]
        self._memory: memoryview | None = memory if writable else memory.toreadonly()
        self.buffer_alive = weakref.ref(buffer)
        self._views: list[weakref.ref[memoryview]] = []
        self.renew_locks()
        renew_locks_after_fork(self)

    def renew_locks(self) -> None:
        """Make new locks, as in a forked child."""
        self._lock = threading.RLock()  # a destructor may come in between, and give back

    def view(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) of these, until `end`.

        Raises `ClosedError` after it, and `ArgumentError` for a range that is not within them.
        """
        with self._lock:
            memory = self._memory
            if memory is None:
                raise _given_back()
            if not 0 <= begin <= end <= self._nbytes:
                raise ArgumentError(
                    ErrorCode.ARGUMENT,
                    "the range is not within the memory",
                    expected=f"0 <= begin <= end <= {self._nbytes}",
                    got=f"[{begin}, {end})",
                    hint="count from the start of the memory",
                )
            try:
                view = memory[begin:end]
            except ValueError:  # as below
                raise _given_back() from None
            # No line of Python in the callback: a KeyboardInterrupt would be lost in it.
            alive = weakref.ref(view, partial(_PAGES_UNDER.pop, id(view)) if self._kept else None)
            if self._kept:
                _PAGES_UNDER[id(view)] = (alive, self._pages)
            self._views = [*filter(is_alive, self._views), alive]
            if self._memory is None:  # ended meanwhile, by a destructor or a signal handler
                _release(view)
                raise _given_back()
            return view

    def abandon(self) -> bool:
        """Lend no more, but end no view; whether nothing points into the memory any more."""
        with self._lock:
            memory, self._memory, self._pages = self._memory, None, None
            _release(memory)
        return not self.in_use

    def end(self) -> bool:
        """End every view, so that using one raises ValueError; again: no effect.

        Whether nothing points into the memory any more: False while an array that was made of a
        view lives, or a copy is running.
        """
        with self._lock:
            memory, self._memory, self._pages = self._memory, None, None
            for alive in self._views:
                _release(alive())
            _release(memory)
        return not self.in_use

    @property
    def in_use(self) -> bool:
        """Whether anything holds a buffer of these bytes; until `end`, this object does."""
        return self.buffer_alive() is not None


def _given_back() -> ClosedError:
    return ClosedError(
        ErrorCode.MEMORY_GIVEN_BACK,
        "the memory was released",
        hint="use it before, or copy what is needed longer",
    )


def is_alive(thing: weakref.ref[Any]) -> bool:
    """Whether what it refers to is still there."""
    return thing() is not None


def _release(view: memoryview | None) -> None:
    try:
        if view is not None:
            view.release()
    except BufferError:  # something was made of it; whoever ends the memory is told
        return


class Mapping:
    """Pages of this process, which go when nobody points into them any more."""

    def __init__(self, pointer: Any, nbytes: int, *, kept: bool) -> None:
        """Own the map of `nbytes` bytes at `pointer`; for `kept` see `LentMemory`."""
        ffi, lib = extension()
        self.nbytes = nbytes
        self._kept = kept
        unmap = partial(lib.kda_unmap, nbytes)
        self._owner: Any = ffi.gc(ffi.cast("unsigned char *", pointer), unmap)
        self._buffers: list[weakref.ref[Any]] = []  # no more: what nobody has is not lent

    def lend(self, begin: int, end: int, *, writable: bool = False) -> LentMemory:
        """The bytes [begin, end), to be given back with `LentMemory.end`."""
        lent = LentMemory(self._owner, self.nbytes, begin, end, writable=writable, kept=self._kept)
        self._buffers = [*filter(is_alive, self._buffers), lent.buffer_alive]
        return lent

    def close(self) -> bool:
        """Let the pages go; again: no effect.

        Whether nothing uses them any more. They go with the last thing that does.
        """
        self._owner = None
        return not any(map(is_alive, self._buffers))

    def lock(self) -> int:
        """Lock the pages into memory as each is made, all or none; 0, or the errno of the refusal.

        All of them count against the limit at once. They are made by what is first copied there: by
        the threads that copy, several at a time and beside the disk's work.
        """
        ffi, lib = extension()
        return 0 if lib.kda_lock_on_fault(self._owner, self.nbytes) == 0 else int(ffi.errno)

    def unlock(self) -> None:
        """Let the pages be swapped again."""
        extension()[1].munlock(self._owner, self.nbytes)

    def prefer_huge_pages(self) -> None:
        """Ask the kernel for huge pages where none are made yet.

        A disk writes a direct read into few huge pages 2.7 times as fast as into a thousand small
        ones, as was measured on a virtual disk; copies gain what a thousand faults cost. Without
        effect where the kernel has none.
        """
        lib = extension()[1]
        lib.madvise(self._owner, self.nbytes, lib.KDA_MADV_HUGEPAGE)

    def collapse(self, begin: int, end: int) -> None:
        """Put the small pages of [begin, end) together to huge ones (Linux 6.1)."""
        lib = extension()[1]
        first = begin // PAGE_BYTES * PAGE_BYTES
        lib.madvise(self._owner + first, end - first, lib.KDA_MADV_COLLAPSE)

    def drop(self, begin: int, end: int) -> None:
        """Take the pages of [begin, end), as far as these reach, out of the process.

        Of a file's map they stay in the page cache, and the next touch brings them back. For a map
        of a file only: elsewhere the bytes would go.
        """
        lib = extension()[1]
        first = max(begin, 0) // PAGE_BYTES * PAGE_BYTES
        lib.madvise(self._owner + first, min(end, self.nbytes) - first, lib.MADV_DONTNEED)

    @property
    def pointer(self) -> Any:
        """The first byte, for C; as long as the object is not closed."""
        return self._owner


def map_file(descriptor: int, file_bytes: int, path: str) -> Mapping:
    """Map a file, read-only and shared, so that it needs no commit charge and no descriptor.

    Raises `PayloadError` when the system refuses, as under a limit on address space.
    """
    lib = extension()[1]
    return _map(descriptor, 0, file_bytes, lib.PROT_READ, lib.MAP_SHARED, path)


def map_range(descriptor: int, begin: int, end: int, path: str) -> Mapping:
    """Map [begin, end) of a file copy-on-write, from the border of begin's page on.

    Raises as `map_file`.
    """
    lib = extension()[1]
    first = begin // PAGE_BYTES * PAGE_BYTES
    protection = lib.PROT_READ | lib.PROT_WRITE
    return _map(descriptor, first, end - first, protection, lib.MAP_PRIVATE, path)


def _map(
    descriptor: int, offset: int, nbytes: int, protection: int, flags: int, path: str
) -> Mapping:
    ffi, lib = extension()
    pointer = lib.mmap(ffi.NULL, nbytes, protection, flags, descriptor, offset)
    if pointer == lib.MAP_FAILED:
        raise PayloadError(
            ErrorCode.MAP_REFUSED,
            "the shard cannot be mapped",
            path=path,
            got=os.strerror(ffi.errno),
            hint='raise the limit on address space (ulimit -v), or pass read="positional"',
        )
    return Mapping(pointer, nbytes, kept=False)


def map_anonymous(nbytes: int) -> Mapping:
    """Fresh zeroed pages, private and writable: `nbytes`, rounded up to a whole page.

    From a huge page on they begin at the border of one, see `Mapping.prefer_huge_pages`. Raises
    `MemoryRefusedError` when the system refuses.
    """
    ffi, lib = extension()
    rounded = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    border = HUGE_PAGE_BYTES if rounded >= HUGE_PAGE_BYTES else 0
    flags = lib.MAP_PRIVATE | lib.MAP_ANONYMOUS
    pointer, refusal = lib.MAP_FAILED, "more than an address can reach"
    if rounded + border <= sys.maxsize:
        protection = lib.PROT_READ | lib.PROT_WRITE
        pointer = lib.mmap(ffi.NULL, rounded + border, protection, flags, -1, 0)
        refusal = os.strerror(ffi.errno)
    if pointer == lib.MAP_FAILED:
        raise MemoryRefusedError(
            ErrorCode.MEMORY_REFUSED,
            "the system refuses the memory",
            expected=f"{in_words(rounded)} bytes",
            got=refusal,
            hint="use fewer slots, or raise the limit on memory",
        )
    if border:
        pointer = ffi.cast("unsigned char *", pointer)
        before = -int(ffi.cast("uintptr_t", pointer)) % border
        if before:
            lib.munmap(pointer, before)
        if border - before:
            lib.munmap(pointer + before + rounded, border - before)
        pointer += before
    return Mapping(pointer, rounded, kept=True)


def lock_refusal(number: int) -> str:
    """Why mlock refused, in words, for the errno `number`."""
    reasons = {
        errno.ENOMEM: "more than the limit on locked memory",
        errno.EPERM: "locking memory is not permitted",
        errno.EAGAIN: "the kernel could not lock all of it",
    }
    return reasons.get(number, os.strerror(number))
