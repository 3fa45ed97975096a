"""The C functions of `kda_system.h` by themselves: arguments, and what the kernel may answer."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kda_stream.staging.native import extension

PAGE = mmap.PAGESIZE
RunPython = Callable[..., Any]
ffi, lib = extension()

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the answers of Linux")


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[int]:
    """A descriptor of a file of three pages, all of them cached."""
    path = tmp_path / "cached"
    path.write_bytes(b"x" * 3 * PAGE)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_a_null_pointer_is_refused_by_each_function(cached: int) -> None:
    number = ffi.new("uint64_t *")
    memory = ffi.new("unsigned char[]", 16)
    page = lib.mmap(ffi.NULL, PAGE, lib.PROT_READ, lib.MAP_SHARED, cached, 0)
    assert lib.kda_cached_bytes(cached, 0, PAGE, ffi.NULL) == errno.EINVAL
    assert lib.kda_cached_bytes(cached, 0, 0, ffi.NULL) == errno.EINVAL
    assert lib.kda_cached_pages(ffi.NULL, PAGE, memory) == errno.EINVAL
    assert lib.kda_cached_pages(page, PAGE, ffi.NULL) == errno.EINVAL
    lib.kda_unmap(PAGE, page)
    assert lib.kda_file_system_type(cached, ffi.NULL) == errno.EINVAL
    assert lib.kda_direct_alignment(cached, ffi.NULL, number) == errno.EINVAL
    assert lib.kda_direct_alignment(cached, number, ffi.NULL) == errno.EINVAL


@pytest.mark.parametrize(
    ("offset", "length"),
    [(2**63, 1), (2**63 - 1, 1), (0, 2**63), (2**64 - 1, 2**64 - 1), (1, 2**64 - 1), (2**63, 0)],
)
def test_a_range_that_no_file_can_have_is_refused(cached: int, offset: int, length: int) -> None:
    counted = ffi.new("uint64_t *", 7)
    assert lib.kda_cached_bytes(cached, offset, length, counted) == errno.EINVAL
    assert counted[0] == 0


def test_the_longest_range_is_counted(cached: int) -> None:
    counted = ffi.new("uint64_t *")
    if lib.kda_cached_bytes(cached, 0, 2**63 - 1, counted) != 0:
        pytest.skip("this kernel has no cachestat (Linux 6.5), or denies it")
    assert counted[0] == 3 * PAGE
    assert lib.kda_cached_bytes(cached, 2**63 - 1, 0, counted) == 0
    assert counted[0] == 0


def test_a_number_that_is_no_descriptor_is_told_and_leaves_nothing(cached: int) -> None:
    closed = os.dup(cached)
    os.close(closed)
    one, other = ffi.new("uint64_t *", 7), ffi.new("uint64_t *", 7)
    for descriptor in (closed, -1):
        assert lib.kda_cached_bytes(descriptor, 5, 0, one) == 0  # none, whatever is asked
        one[0] = 7
        assert lib.kda_cached_bytes(descriptor, 0, PAGE, one) == errno.EBADF
        assert one[0] == 0
        one[0] = 7
        assert lib.kda_file_system_type(descriptor, one) == errno.EBADF
        assert one[0] == 0
        one[0] = other[0] = 7
        assert lib.kda_direct_alignment(descriptor, one, other) == errno.EBADF
        assert (one[0], other[0]) == (0, 0)


def test_mincore_tells_each_page_and_refuses_what_is_no_map(cached: int) -> None:
    pointer = lib.mmap(ffi.NULL, 3 * PAGE, lib.PROT_READ, lib.MAP_SHARED, cached, 0)
    assert pointer != lib.MAP_FAILED
    start = ffi.cast("unsigned char *", pointer)
    vector = ffi.new("unsigned char[]", [9] * 4)
    assert lib.kda_cached_pages(start, 2 * PAGE + 1, vector) == 0
    assert [value & 1 for value in vector] == [1, 1, 1, 1]
    assert vector[3] == 9  # not written
    assert lib.kda_cached_pages(start + 1, PAGE, vector) == errno.EINVAL
    lib.kda_unmap(3 * PAGE, pointer)
    assert lib.kda_cached_pages(start, PAGE, vector) == errno.ENOMEM


DENIED = """
import ctypes, errno, json, os, struct, sys
from kda_stream.staging import residency
from kda_stream.staging.native import extension

path, call, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
descriptor = os.open(path, os.O_RDONLY)
ffi, lib = extension()
one, other = ffi.new("uint64_t *", 7), ffi.new("uint64_t *", 7)

# Load the call's number; unless it is this one, skip a line; answer with the errno; or allow.
lines = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x00050000 | number),
         (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
program = Program(len(lines), ctypes.addressof(code))
if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, ctypes.byref(program), 0, 0) != 0:
    print(json.dumps(None))
    sys.exit()
print(json.dumps({
    "cachestat": [lib.kda_cached_bytes(descriptor, 0, 10, one), one[0]],
    "statx": [lib.kda_direct_alignment(descriptor, one, other), one[0], other[0]],
    "bytes": residency.cached_bytes(descriptor, 0, 10),
    "ranges": residency.cached_ranges(descriptor, 0, 10),
    "has_alignment": residency.direct_alignment(descriptor) is not None,
}))
"""

CACHESTAT = 451
STATX = {"x86_64": 332, "aarch64": 291}.get(platform.machine(), 0)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP])
def test_where_cachestat_is_denied_the_errno_is_told_and_mincore_answers(
    cached: int, run_python: RunPython, tmp_path: Path, number: int
) -> None:
    assert cached
    found = run_python(DENIED, tmp_path / "cached", CACHESTAT, number)
    if found is None:
        pytest.skip("system calls cannot be denied here")
    assert found["cachestat"] == [number, 0]
    assert found["bytes"] == 10
    assert found["ranges"] == [[0, 10]]


@pytest.mark.skipif(not STATX, reason="the number of statx is not known for this machine")
def test_where_statx_is_missing_there_is_no_alignment(
    cached: int, run_python: RunPython, tmp_path: Path
) -> None:
    assert cached
    found = run_python(DENIED, tmp_path / "cached", STATX, errno.ENOSYS)
    if found is None:
        pytest.skip("system calls cannot be denied here")
    assert found["statx"] == [errno.ENOSYS, 0, 0]
    assert found["has_alignment"] is False
