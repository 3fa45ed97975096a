"""What of a file is in the page cache, and how to get it in and out. Linux."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_CACHESTAT = 451  # the number of the system call, the same on every architecture; Linux 6.5
_CHUNK_BYTES = 8 * 1024**2

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def resident_bytes(paths: Iterable[Path]) -> int:
    """The bytes of the files that are in the page cache."""
    total = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            pages = _by_cachestat(descriptor)
            if pages is None:
                pages = _by_mincore(descriptor, size)
            total += min(pages * mmap.PAGESIZE, size)
        finally:
            os.close(descriptor)
    return total


def warm(paths: Iterable[Path]) -> None:
    """Read the files once, so that all of them is in the page cache."""
    chunk = bytearray(_CHUNK_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(chunk):
                pass


def drop(paths: Iterable[Path]) -> None:
    """Drop the files' clean pages; they were flushed when they were written."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _by_cachestat(descriptor: int) -> int | None:
    whole, counts = _Range(0, 0), _Counts()
    failed = _libc.syscall(
        _CACHESTAT, descriptor, ctypes.byref(whole), ctypes.byref(counts), ctypes.c_uint(0)
    )
    return None if failed else int(counts.cached)


def _by_mincore(descriptor: int, size: int) -> int:
    pages = -(-size // mmap.PAGESIZE)
    if not pages:
        return 0
    flags = (ctypes.c_ubyte * pages)()
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    where = ctypes.c_void_p(address)
    try:
        if _libc.mincore(where, ctypes.c_size_t(size), flags):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        _libc.munmap(where, ctypes.c_size_t(size))
    return sum(flag & 1 for flag in flags)
