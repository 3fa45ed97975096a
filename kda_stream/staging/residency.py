"""What a load may leave behind: memory of the process, and pages of its files in the page cache.

How much memory is left for more of either is in `room.py`.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ..errors import ArgumentError, ErrorCode
from .native import extension

_PIECE_BYTES: Final = 64 * 1024**2
"""How much of a file is mapped at once to ask for its pages: their vector takes 16 KiB."""

SAMPLES: Final = 64
"""How many pages are asked for, spread over a range, where the kernel counts none."""

_BIT_0: Final = bytes(value & 1 for value in range(256))
"""What mincore says of a page is in the lowest bit; the others mean nothing."""

_REMOTE: Final = {
    # linux/magic.h
    0x0000517B: "SMB",
    0x0000564C: "NCP",
    0x00006969: "NFS",
    0x00C36400: "Ceph",
    0x01021997: "9p",
    0x5346414F: "AFS",
    0x65735546: "FUSE",  # virtiofs too, and each file system of a program's own
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x7461636F: "OCFS2",
    0xFE534D42: "SMB2",
    0xFF534D42: "CIFS",
    # linux/gfs2_ondisk.h
    0x01161970: "GFS2",
    # Linux, fs/orangefs/protocol.h
    0x20030528: "OrangeFS",
    # Linux, fs/vboxsf/super.c
    0x786F4256: "vboxsf",
    # Lustre, lustre_user.h
    0x0BD00BD0: "Lustre",
    # BeeGFS, FhgfsOpsSuper.h
    0x19830326: "BeeGFS",
    # GNU coreutils, src/stat.c: those that it marks as remote and that come from elsewhere
    0x013111A8: "Ibrix",
    0x47504653: "GPFS",
    0x61636673: "ACFS",
    0x7C7C6673: "prl_fs",
    0xA501FCF5: "VxFS",
    0xAAD7AAEA: "PanFS",
    0xBACBACBC: "vmhgfs",
    0xBEEFDEAD: "StorNext",
}
_LOCAL: Final = {
    # linux/magic.h
    0x0000EF53: "ext4",  # ext2 and ext3 have the same number
    0x01021994: "tmpfs",
    0x58465342: "XFS",
    0x794C7630: "overlayfs",
    0x858458F6: "ramfs",
    0x9123683E: "btrfs",
    0xF2F52010: "F2FS",
    # GNU coreutils, src/stat.c
    0x2FC12FC1: "ZFS",
}


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The process's memory in bytes; a field is None where the system does not count it.

    `anonymous_bytes`, `file_bytes` and `locked_bytes` are resident now; `peak_bytes` is the most
    that was ever resident, file pages included.
    """

    anonymous_bytes: int | None
    file_bytes: int | None
    locked_bytes: int | None
    peak_bytes: int | None


def memory_use() -> MemoryUse:
    """This process's memory now; source: /proc/self/status, fields in kB. All None off Linux."""
    fields = {}
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                name, _, value = line.partition(":")
                if value.endswith(" kB\n"):
                    fields[name] = int(value[:-4]) * 1024
    except OSError:
        pass
    names = ("RssAnon", "RssFile", "VmLck", "VmHWM")
    return MemoryUse(*(fields.get(name) for name in names))


def lock_limit_bytes() -> int | None:
    """The soft limit on locked memory (`ulimit -l`) in bytes; None when there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


# --- the file and its file system -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What a file lies on: `type_number` is f_type of fstatfs, `name` the name or that in hex.

    Where `is_remote`, touching a map ends in a signal when the connection is lost: never map one.
    """

    type_number: int
    name: str
    is_remote: bool


def file_system_of(descriptor: int) -> FileSystem:
    """The file system that an open file is on; one that is in no table here counts as local.

    Off Linux nothing is known: type 0, "unknown", local. Raises OSError for a bad descriptor.
    """
    ffi, lib = extension()
    found = ffi.new("uint64_t *")
    refusal = lib.kda_file_system_type(descriptor, found)
    if refusal == errno.ENOTSUP:
        return FileSystem(0, "unknown", is_remote=False)
    if refusal:
        raise OSError(refusal, os.strerror(refusal))
    number = int(found[0])
    name = _REMOTE.get(number) or _LOCAL.get(number) or hex(number)
    return FileSystem(number, name, is_remote=number in _REMOTE)


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """How direct I/O (O_DIRECT) must be aligned, in bytes; both 0 when this file has none.

    `memory_bytes` is for the address of the memory, `offset_bytes` for the offset in the file and
    for the length.
    """

    memory_bytes: int
    offset_bytes: int


def direct_alignment(descriptor: int) -> DirectAlignment | None:
    """How direct I/O on an open file must be aligned; source: statx, Linux 6.1.

    None when the kernel or the file system cannot say, or a filter of system calls forbids to ask.
    Raises OSError for a bad descriptor.
    """
    ffi, lib = extension()
    memory, offset = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    refusal = lib.kda_direct_alignment(descriptor, memory, offset)
    if refusal == errno.EBADF:
        raise OSError(refusal, os.strerror(refusal))
    if refusal:
        return None
    return DirectAlignment(int(memory[0]), int(offset[0]))


# --- the page cache -------------------------------------------------------------------------------


def cached_bytes(descriptor: int, begin: int, end: int) -> int | None:
    """How many of a file's bytes [begin, end) are in the page cache now; past its end there are 0.

    None when the system cannot say, as for what is no regular file, or for a file that this user
    neither owns nor may write to. Raises `ArgumentError` for a bad range, and OSError for a bad
    descriptor. Asks cachestat (Linux 6.5), else mincore.
    """
    clipped = _within_the_file(descriptor, begin, end)
    if clipped is None:
        return None
    counted = count_by_cachestat(descriptor, *clipped)
    if counted is not None:
        return counted
    ranges = ranges_by_mincore(descriptor, *clipped)
    return None if ranges is None else sum(after - first for first, after in ranges)


def sampled_cached_bytes(descriptor: int, begin: int, end: int) -> int | None:
    """About how many of a file's bytes [begin, end) are cached, from `SAMPLES` reads of a byte.

    For files of others, of which the kernel tells nothing else. The pages that are asked for and
    are not there begin to be read, no others. None when the range is empty, or the system has no
    such reads (RWF_NOWAIT, Linux 4.14).
    """
    clipped = _within_the_file(descriptor, begin, end)
    if clipped is None or not hasattr(os, "RWF_NOWAIT") or clipped[0] == clipped[1]:
        return None
    begin, end = clipped
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is to be read ahead
    try:
        phase = int.from_bytes(os.urandom(4), "little")  # else these pages would speak for all
        step = -(-(end - begin) // SAMPLES)
        places = [min(begin + phase % step + n * step, end - 1) for n in range(SAMPLES)]
        hits = sum(_is_cached(descriptor, at) for at in places)
    except OSError:
        return None
    finally:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_NORMAL)
    return (end - begin) * hits // SAMPLES


def _is_cached(descriptor: int, at: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def cached_ranges(descriptor: int, begin: int, end: int) -> list[tuple[int, int]] | None:
    """Which of a file's bytes [begin, end) are in the page cache now: ascending (begin, end).

    They start and end where pages do, or the range or the file does. None and raised as for
    `cached_bytes`. Where all or nothing is cached, one call of cachestat says so; of the rest
    mincore tells the pages, and where it may not, many calls of cachestat.
    """
    clipped = _within_the_file(descriptor, begin, end)
    if clipped is None:
        return None
    counted = count_by_cachestat(descriptor, *clipped)
    if counted == 0:
        return []
    if counted == clipped[1] - clipped[0]:
        return [clipped]
    ranges = ranges_by_mincore(descriptor, *clipped)
    return ranges_by_cachestat(descriptor, *clipped) if ranges is None else ranges


def _within_the_file(descriptor: int, begin: int, end: int) -> tuple[int, int] | None:
    """The part of [begin, end) that the file has; None when it is no regular file."""
    if not 0 <= begin <= end:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "the range is not one of a file",
            expected="0 <= begin <= end",
            got=f"[{begin}, {end})",
            hint="count from the start of the file",
        )
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return None
    return min(begin, status.st_size), min(end, status.st_size)


def count_by_cachestat(descriptor: int, begin: int, end: int) -> int | None:
    """How many bytes of [begin, end) are cached; None when cachestat has no answer."""
    ffi, lib = extension()
    counted = ffi.new("uint64_t *")
    refusal = lib.kda_cached_bytes(descriptor, begin, end - begin, counted)
    return None if refusal else int(counted[0])


def ranges_by_cachestat(descriptor: int, begin: int, end: int) -> list[tuple[int, int]] | None:
    """The cached parts of [begin, end), by halving what is cached in part; None as for a count."""
    found: list[tuple[int, int]] = []
    todo = [(begin, end)]
    while todo:
        first, after = todo.pop()
        counted = count_by_cachestat(descriptor, first, after)
        if counted is None:
            return None
        next_page = (first // mmap.PAGESIZE + 1) * mmap.PAGESIZE
        middle = max(next_page, (first + after) // 2 // mmap.PAGESIZE * mmap.PAGESIZE)
        if 0 < counted < after - first and middle < after:
            todo += [(middle, after), (first, middle)]
        elif counted:
            found.append((first, after))
    return _joined(found)


def ranges_by_mincore(descriptor: int, begin: int, end: int) -> list[tuple[int, int]] | None:
    """The cached parts of [begin, end), by mapping them and asking mincore; no page is touched.

    None when that has no honest answer. Of a file that the user neither owns nor may write to,
    Linux says that every page is there (mm/mincore.c, since 5.2); a remote file is not mapped.
    """
    status = os.fstat(descriptor)
    try:
        is_local = not file_system_of(descriptor).is_remote
    except OSError:  # forbidden to ask, in a container
        is_local = False
    if not is_local or not _is_owned_or_writable(descriptor, status):
        return None
    found: list[tuple[int, int]] = []
    start = begin // mmap.PAGESIZE * mmap.PAGESIZE
    for piece in range(start, end, _PIECE_BYTES):
        pages = _pages_in_memory(descriptor, piece, min(_PIECE_BYTES, end - piece))
        if pages is None:
            return None
        for first, after in _runs(pages):
            first, after = piece + first * mmap.PAGESIZE, piece + after * mmap.PAGESIZE
            found.append((max(first, begin), min(after, end)))
    return _joined(found)


def _is_owned_or_writable(descriptor: int, status: os.stat_result) -> bool:
    effective = os.access in os.supports_effective_ids
    return status.st_uid == os.geteuid() or os.access(
        f"/proc/self/fd/{descriptor}", os.W_OK, effective_ids=effective
    )


def _pages_in_memory(descriptor: int, begin: int, length: int) -> bytes | None:
    """For each page of a file from a page's start on: 1 when it is in memory, else 0."""
    ffi, lib = extension()
    pointer: Any = lib.mmap(ffi.NULL, length, lib.PROT_READ, lib.MAP_SHARED, descriptor, begin)
    if pointer == lib.MAP_FAILED:
        return None
    map_ = ffi.gc(ffi.cast("unsigned char *", pointer), partial(lib.kda_unmap, length))
    vector = ffi.new("unsigned char[]", -(-length // mmap.PAGESIZE))
    refusal = lib.kda_cached_pages(map_, length, vector)
    ffi.release(map_)
    return None if refusal else bytes(ffi.buffer(vector)).translate(_BIT_0)


def _runs(pages: bytes) -> Iterator[tuple[int, int]]:
    """Where ones stand in a string of zeros and ones: (begin, end) of each run of them."""
    begin = pages.find(1)
    while begin >= 0:
        end = pages.find(0, begin)
        end = len(pages) if end < 0 else end
        yield begin, end
        begin = pages.find(1, end)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges, with those that touch made one."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined
