"""Which pages of a file are in the page cache, and how to put them there or away. Linux.

Asks mincore through the C library, in a process that owns the files; shares nothing with the
library's own ways of asking.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import Final

PAGE_BYTES: Final = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def cached_pages(path: Path) -> set[int]:
    """The numbers of the file's pages that are in the page cache."""
    nbytes = path.stat().st_size
    flags = ctypes.create_string_buffer(-(-nbytes // PAGE_BYTES))
    with path.open("rb") as file:
        start = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        assert start != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        try:
            assert _libc.mincore(start, nbytes, flags) == 0, os.strerror(ctypes.get_errno())
        finally:
            _libc.munmap(start, nbytes)
    return {page for page, flag in enumerate(flags.raw) if flag & 1}


def cool(*paths: Path) -> None:
    """Put every page of the files away; what was written goes to the disk first."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(path: Path, begin: int = 0, end: int | None = None) -> None:
    """Bring the pages of [begin, end) in, and no others: nothing is read ahead."""
    nbytes = path.stat().st_size
    end = nbytes if end is None else end
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for at in range(begin, end, 1 << 20):
            os.pread(descriptor, min(1 << 20, end - at), at)
    finally:
        os.close(descriptor)


def pages_of(begin: int, end: int) -> set[int]:
    """The numbers of the pages that hold the bytes [begin, end) of a file."""
    return set(range(begin // PAGE_BYTES, -(-end // PAGE_BYTES)))


def has_a_page_cache(folder: Path) -> bool:
    """Whether a file in the folder can leave the page cache and come again; not so on tmpfs."""
    if sys.platform != "linux":
        return False
    path = folder / "page-cache-probe"
    path.write_bytes(bytes(16 * PAGE_BYTES))
    try:
        cool(path)
        cold = cached_pages(path)
        warm(path)
        return not cold and len(cached_pages(path)) == 16
    finally:
        path.unlink()
