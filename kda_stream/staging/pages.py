"""Pages of the process: a file's map or anonymous memory, and who still points into them."""

from __future__ import annotations

import errno
import os
import sys
import threading
import weakref
from functools import partial
from typing import Any, Final

from ..errors import ArgumentError, ClosedError, ErrorCode, MemoryRefusedError, PayloadError
from ..limits import LOCK_PIECE_BYTES
from .native import extension

PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")


class LentMemory:
    """Some bytes of a `Mapping` in somebody's hands: views that end together. Safe in threads.

    It keeps the pages alive, and so does everything that was made of its views.
    """

    def __init__(self, buffer: Any, begin: int, end: int, *, writable: bool) -> None:
        """Lend the bytes [begin, end) of `buffer`, which nobody else may hold."""
        memory = memoryview(buffer)[begin:end]
        self._memory: memoryview | None = memory if writable else memory.toreadonly()
        self._buffer_alive = weakref.ref(buffer)
        self._views: dict[int, weakref.ref[memoryview]] = {}
        self._lock = threading.Lock()

    def view(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) of these, until `end`.

        Raises `ClosedError` after it, and `ArgumentError` for a range that is not within them.
        """
        with self._lock:
            if self._memory is None:
                raise ClosedError(
                    ErrorCode.MEMORY_GIVEN_BACK,
                    "the memory was given back",
                    hint="use it before, or copy what is needed longer",
                )
            if not 0 <= begin <= end <= len(self._memory):
                raise ArgumentError(
                    ErrorCode.ARGUMENT,
                    "the range is not within the memory",
                    expected=f"0 <= begin <= end <= {len(self._memory)}",
                    got=f"[{begin}, {end})",
                )
            view = self._memory[begin:end]
            key = id(view)
            # The callback has no line of Python, in which a KeyboardInterrupt would be lost.
            self._views[key] = weakref.ref(view, partial(self._views.pop, key))
            return view

    def end(self) -> bool:
        """End every view, so that using one raises ValueError; again: no effect.

        Whether nothing points into the memory any more: False while an array that was made of a
        view lives, or a copy is running.
        """
        with self._lock:
            for alive in list(self._views.values()):
                view = alive()
                if view is not None:
                    _release(view)
            if self._memory is not None:
                self._memory.release()
                self._memory = None
            view = None
        return self._buffer_alive() is None


def _release(view: memoryview) -> None:
    try:
        view.release()
    except BufferError:  # something was made of it; whoever ends the memory is told
        return


class Mapping:
    """Pages of this process, which go when nobody points into them any more."""

    def __init__(self, pointer: Any, nbytes: int) -> None:
        """Own the map of `nbytes` bytes at `pointer`."""
        ffi, lib = extension()
        self.nbytes = nbytes
        unmap = partial(lib.kda_unmap, nbytes)
        self._owner: Any = ffi.gc(ffi.cast("unsigned char *", pointer), unmap)
        self._alive = weakref.ref(self._owner)

    def lend(self, begin: int, end: int, *, writable: bool = False) -> LentMemory:
        """The bytes [begin, end), to be given back with `LentMemory.end`."""
        buffer = extension()[0].buffer(self._owner, self.nbytes)
        return LentMemory(buffer, begin, end, writable=writable)

    def close(self) -> bool:
        """Let the pages go; again: no effect.

        Whether they are gone: not before everything lent of them has ended.
        """
        self._owner = None
        return self._alive() is None

    def lock(self) -> int:
        """Lock the pages into memory, all or none; 0, or the errno of the refusal.

        Signals are answered between pieces: to lock a slot means to make all of its pages.
        """
        ffi, lib = extension()
        for begin in range(0, self.nbytes, LOCK_PIECE_BYTES):
            length = min(LOCK_PIECE_BYTES, self.nbytes - begin)
            if lib.mlock(self._owner + begin, length) != 0:
                refusal = int(ffi.errno)
                self.unlock()
                return refusal
        return 0

    def unlock(self) -> None:
        """Let the pages be swapped again."""
        extension()[1].munlock(self._owner, self.nbytes)

    def drop(self, begin: int, end: int) -> None:
        """Take the pages of [begin, end) out of the process; of a file's map, they stay cached.

        The next touch brings them back. For a map of a file only: elsewhere the bytes would go.
        """
        lib = extension()[1]
        first = begin // PAGE_BYTES * PAGE_BYTES
        lib.madvise(self._owner + first, end - first, lib.MADV_DONTNEED)


def map_file(descriptor: int, file_bytes: int, path: str) -> Mapping:
    """Map a file, read-only and shared, so that it needs no commit charge and no descriptor.

    Raises `PayloadError` when the system refuses, as under a limit on address space.
    """
    ffi, lib = extension()
    pointer = lib.mmap(ffi.NULL, file_bytes, lib.PROT_READ, lib.MAP_SHARED, descriptor, 0)
    if pointer == lib.MAP_FAILED:
        raise PayloadError(
            ErrorCode.MAP_REFUSED,
            "the shard cannot be mapped",
            path=path,
            got=os.strerror(ffi.errno),
            hint='raise the limit on address space (ulimit -v), or pass via="read"',
        )
    return Mapping(pointer, file_bytes)


def map_anonymous(nbytes: int) -> Mapping:
    """Fresh zeroed pages, private and writable: `nbytes`, rounded up to a whole page.

    Raises `MemoryRefusedError` when the system refuses.
    """
    ffi, lib = extension()
    rounded = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    flags = lib.MAP_PRIVATE | lib.MAP_ANONYMOUS
    pointer, refusal = lib.MAP_FAILED, "more than an address can reach"
    if rounded <= sys.maxsize:
        pointer = lib.mmap(ffi.NULL, rounded, lib.PROT_READ | lib.PROT_WRITE, flags, -1, 0)
        refusal = os.strerror(ffi.errno)
    if pointer == lib.MAP_FAILED:
        raise MemoryRefusedError(
            ErrorCode.MEMORY_REFUSED,
            "the system refuses the memory for the slots",
            expected=f"{rounded} bytes",
            got=refusal,
            hint="use fewer slots, or raise the limit on memory",
        )
    return Mapping(pointer, rounded)


def lock_refusal(number: int) -> str:
    """Why mlock refused, in words, for the errno `number`."""
    reasons = {
        errno.ENOMEM: "more than the limit on locked memory",
        errno.EPERM: "locking memory is not permitted",
        errno.EAGAIN: "the kernel could not lock all of it",
    }
    return reasons.get(number, os.strerror(number))
