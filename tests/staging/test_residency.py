"""What is in the page cache of a file, what the file lies on, how direct I/O on it is aligned."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kda_stream import ArgumentError
from kda_stream.staging import residency
from kda_stream.staging.native import extension
from kda_stream.staging.residency import (
    FileSystem,
    cached_bytes,
    cached_ranges,
    count_by_cachestat,
    direct_alignment,
    file_system_of,
    ranges_by_cachestat,
    ranges_by_mincore,
    sampled_cached_bytes,
)

PAGE = mmap.PAGESIZE
FILE_PAGES = 300
TAIL_BYTES = 100  # of the file's last page
FILE_BYTES = (FILE_PAGES - 1) * PAGE + TAIL_BYTES
RunPython = Callable[..., Any]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the page cache of Linux")


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[int]:
    """A descriptor of a file on a disk, of which nothing is cached, and nothing read ahead."""
    path = tmp_path / "cold"
    path.write_bytes(random.Random(5).randbytes(FILE_BYTES))
    descriptor = os.open(path, os.O_RDWR)
    name = file_system_of(descriptor).name
    if name in ("tmpfs", "ramfs"):
        os.close(descriptor)
        pytest.skip(f"the temporary folder is on {name}, whose pages cannot be dropped")
    make_cold(descriptor)
    yield descriptor
    os.close(descriptor)


def make_cold(descriptor: int) -> None:
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def read_pages(descriptor: int, *pages: int) -> None:
    for page in pages:
        assert os.pread(descriptor, 1, page * PAGE)


def needs_cachestat(descriptor: int) -> None:
    if count_by_cachestat(descriptor, 0, FILE_BYTES) is None:
        pytest.skip("this kernel has no cachestat (Linux 6.5), or denies it")


# --- the cache ------------------------------------------------------------------------------------


def test_of_a_cold_file_exactly_the_pages_that_were_read_are_cached(cold: int) -> None:
    assert cached_bytes(cold, 0, FILE_BYTES) == 0
    assert cached_ranges(cold, 0, FILE_BYTES) == []
    read_pages(cold, 3, 4, 5, 100)
    assert cached_bytes(cold, 0, FILE_BYTES) == 4 * PAGE
    assert cached_ranges(cold, 0, FILE_BYTES) == [
        (3 * PAGE, 6 * PAGE),
        (100 * PAGE, 101 * PAGE),
    ]


def test_of_a_file_that_was_read_whole_all_is_cached_up_to_its_end(cold: int) -> None:
    assert len(os.pread(cold, FILE_BYTES, 0)) == FILE_BYTES
    assert cached_bytes(cold, 0, FILE_BYTES) == FILE_BYTES
    assert cached_bytes(cold, 0, 10 * FILE_BYTES) == FILE_BYTES
    assert cached_ranges(cold, 0, 10 * FILE_BYTES) == [(0, FILE_BYTES)]


def test_of_the_pages_at_both_ends_of_a_range_only_its_own_bytes_count(cold: int) -> None:
    read_pages(cold, 2, 3, 4)
    begin, end = 2 * PAGE + 10, 4 * PAGE + 7
    assert cached_bytes(cold, begin, end) == end - begin
    assert cached_ranges(cold, begin, end) == [(begin, end)]
    assert cached_bytes(cold, 1 * PAGE + 10, end) == end - 2 * PAGE
    assert cached_ranges(cold, 1 * PAGE + 10, end) == [(2 * PAGE, end)]
    assert cached_bytes(cold, begin, 5 * PAGE + 7) == 5 * PAGE - begin
    assert cached_bytes(cold, 3 * PAGE + 5, 3 * PAGE + 9) == 4
    assert cached_bytes(cold, 5 * PAGE + 5, 5 * PAGE + 9) == 0


def test_the_last_page_counts_with_the_bytes_that_the_file_has_of_it(cold: int) -> None:
    read_pages(cold, FILE_PAGES - 1)
    assert cached_bytes(cold, 0, FILE_PAGES * PAGE) == TAIL_BYTES
    assert cached_ranges(cold, 0, FILE_PAGES * PAGE) == [(FILE_BYTES - TAIL_BYTES, FILE_BYTES)]


@pytest.mark.parametrize("begin", [0, 1, PAGE, FILE_BYTES, FILE_BYTES + 1, 2**70])
def test_of_no_bytes_none_are_cached(cold: int, begin: int) -> None:
    read_pages(cold, *range(FILE_PAGES))
    assert cached_bytes(cold, begin, begin) == 0
    assert cached_ranges(cold, begin, begin) == []


def test_both_questions_get_the_same_answer_for_any_pages_and_any_range(cold: int) -> None:
    needs_cachestat(cold)
    chance = random.Random(11)
    for share in (0.0, 0.02, 0.5, 0.98, 1.0):
        make_cold(cold)
        read = [page for page in range(FILE_PAGES) if chance.random() < share]
        read_pages(cold, *read)
        for _ in range(40):
            begin, end = sorted(chance.randrange(FILE_BYTES + 1) for _ in range(2))
            ranges = ranges_by_cachestat(cold, begin, end)
            assert ranges == ranges_by_mincore(cold, begin, end) == expected(read, begin, end)
            total = sum(after - first for first, after in ranges)
            assert count_by_cachestat(cold, begin, end) == total


def expected(read: list[int], begin: int, end: int) -> list[tuple[int, int]]:
    """The cached ranges by their definition, a page at a time."""
    ranges: list[tuple[int, int]] = []
    for page in read:
        first, after = max(page * PAGE, begin), min((page + 1) * PAGE, end)
        if first >= after:
            continue
        if ranges and ranges[-1][1] == first:
            first = ranges.pop()[0]
        ranges.append((first, after))
    return ranges


@pytest.mark.parametrize("piece_pages", [1, 2, 7])
def test_a_file_is_mapped_in_pieces_and_the_answer_is_the_same(
    cold: int, piece_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_PIECE_BYTES", piece_pages * PAGE)
    read = [0, 1, 2, 6, 7, 8, 13, 14, 15, 16, FILE_PAGES - 1]
    read_pages(cold, *read)
    for begin in (0, 1, PAGE, 6 * PAGE + 1):
        assert ranges_by_mincore(cold, begin, FILE_BYTES) == expected(read, begin, FILE_BYTES)


def test_without_cachestat_mincore_answers(cold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read_pages(cold, 1, 2, 9)
    asked = []

    def no_cachestat(*arguments: int) -> None:
        asked.append(arguments)

    monkeypatch.setattr(residency, "count_by_cachestat", no_cachestat)
    assert cached_bytes(cold, 0, FILE_BYTES) == 3 * PAGE
    assert cached_ranges(cold, 0, FILE_BYTES) == [(PAGE, 3 * PAGE), (9 * PAGE, 10 * PAGE)]
    assert len(asked) == 2


def test_where_a_map_is_not_allowed_cachestat_tells_the_ranges(
    cold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_cachestat(cold)
    read_pages(cold, 1, 2, 9)
    stand_in(monkeypatch, 0x6969)  # NFS
    assert cached_bytes(cold, 0, FILE_BYTES) == 3 * PAGE
    assert cached_ranges(cold, 0, FILE_BYTES) == [(PAGE, 3 * PAGE), (9 * PAGE, 10 * PAGE)]
    assert cached_ranges(cold, PAGE, 3 * PAGE) == [(PAGE, 3 * PAGE)]


def test_all_or_nothing_is_told_without_a_map(cold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_cachestat(cold)

    def no_map(*_: int) -> None:
        pytest.fail("it was mapped")

    monkeypatch.setattr(residency, "ranges_by_mincore", no_map)
    assert cached_ranges(cold, 0, FILE_BYTES) == []
    read_pages(cold, *range(FILE_PAGES))
    assert cached_ranges(cold, 0, FILE_BYTES) == [(0, FILE_BYTES)]


def test_asking_reads_nothing_and_leaves_no_map(cold: int) -> None:
    def maps() -> int:
        return sum("/cold" in line for line in Path("/proc/self/maps").read_text().split("\n"))

    assert ranges_by_mincore(cold, 0, FILE_BYTES) == []
    assert ranges_by_mincore(cold, 0, FILE_BYTES) == []
    assert cached_bytes(cold, 0, FILE_BYTES) == 0
    assert maps() == 0


def test_a_file_in_memory_is_cached_where_it_was_written() -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("/dev/shm is not writable")
    path = shared / f"kda-stream-test-{os.getpid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        path.unlink()
        if file_system_of(descriptor).name != "tmpfs":
            pytest.skip("/dev/shm is no tmpfs")
        os.ftruncate(descriptor, 20 * PAGE)
        os.pwrite(descriptor, b"x" * 2 * PAGE, 4 * PAGE)
        assert cached_bytes(descriptor, 0, 20 * PAGE) == 2 * PAGE
        assert cached_ranges(descriptor, 0, 20 * PAGE) == [(4 * PAGE, 6 * PAGE)]
        assert ranges_by_mincore(descriptor, 0, 20 * PAGE) == [(4 * PAGE, 6 * PAGE)]
    finally:
        os.close(descriptor)


def test_what_is_no_regular_file_has_no_answer(tmp_path: Path) -> None:
    ends = os.pipe()
    folder = os.open(tmp_path, os.O_RDONLY)
    zero = os.open("/dev/zero", os.O_RDONLY)
    for descriptor in (*ends, folder, zero):
        assert cached_bytes(descriptor, 0, 100) is None
        assert cached_ranges(descriptor, 0, 100) is None
        os.close(descriptor)


def test_a_closed_descriptor_is_an_error_of_the_system(cold: int) -> None:
    closed = os.dup(cold)
    os.close(closed)
    questions: list[Callable[[], object]] = [
        lambda: cached_bytes(closed, 0, 1),
        lambda: cached_ranges(closed, 0, 1),
        lambda: file_system_of(closed),
        lambda: direct_alignment(closed),
    ]
    for ask in questions:
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)) as raised:
            ask()
        assert raised.value.errno == errno.EBADF


@pytest.mark.parametrize(("begin", "end"), [(-1, 5), (5, 4), (-2, -1)])
def test_a_range_that_is_none_is_refused(cold: int, begin: int, end: int) -> None:
    with pytest.raises(ArgumentError, match="0 <= begin <= end"):
        cached_bytes(cold, begin, end)
    with pytest.raises(ArgumentError, match="0 <= begin <= end"):
        cached_ranges(cold, begin, end)


def test_a_map_that_is_refused_gives_no_answer(tmp_path: Path) -> None:
    """A descriptor that may write alone cannot be mapped for reading."""
    descriptor = os.open(tmp_path / "written", os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"x" * PAGE)
    assert ranges_by_mincore(descriptor, 0, PAGE) is None
    os.close(descriptor)


UNPRIVILEGED = """
import json, os, sys
from kda_stream.staging import native, residency
native.extension()  # which may lie where nobody else may look
descriptor = os.open(sys.argv[1], os.O_RDONLY)
if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
print(json.dumps([
    residency.cached_bytes(descriptor, 0, 100 * os.sysconf("SC_PAGESIZE")),
    residency.ranges_by_mincore(descriptor, 0, 100 * os.sysconf("SC_PAGESIZE")),
]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file that is not its own")
def test_of_a_file_of_somebody_else_mincore_is_not_believed(
    cold: int, run_python: RunPython
) -> None:
    """It says that every page is there; cachestat says the truth, or since 2025 nothing."""
    read_pages(cold, 7)
    os.fchmod(cold, 0o644)
    total, ranges = run_python(UNPRIVILEGED, f"/proc/{os.getpid()}/fd/{cold}")
    assert total in (None, PAGE)
    assert ranges is None
    os.fchmod(cold, 0o666)  # who may write may know
    total, ranges = run_python(UNPRIVILEGED, f"/proc/{os.getpid()}/fd/{cold}")
    assert total == PAGE
    assert ranges == [[7 * PAGE, 8 * PAGE]]


def in_mount_namespace(script: str, *arguments: Path) -> Any:
    """What a script prints, as JSON; what it mounts goes when it ends."""
    try:
        subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespace can be made here: {error}")
    command = ["unshare", "-m", sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


OVERLAY = """
import json, os, subprocess, sys
from kda_stream.staging import residency
folder = sys.argv[1]
options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
made = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, f"{folder}/merged"],
                      capture_output=True, text=True)
if made.returncode != 0:
    print(json.dumps(["refused", made.stderr]))
    sys.exit()
descriptor = os.open(f"{folder}/merged/file", os.O_RDONLY)
page = os.sysconf("SC_PAGESIZE")
os.fsync(descriptor)
os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
os.pread(descriptor, 1, 5 * page)
print(json.dumps([
    residency.file_system_of(descriptor).name,
    residency.count_by_cachestat(descriptor, 0, 20 * page),
    residency.cached_bytes(descriptor, 0, 20 * page),
    residency.cached_ranges(descriptor, 0, 20 * page),
]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_on_overlayfs_the_cache_of_the_file_underneath_is_seen(cold: int, tmp_path: Path) -> None:
    """The file of a container's image: its own cache is empty, and cachestat would say so."""
    assert cold
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    (tmp_path / "lower/file").write_bytes(bytes(20 * PAGE))
    os.sync()
    found = in_mount_namespace(OVERLAY, tmp_path)
    if found[0] == "refused":
        pytest.skip(f"overlayfs cannot be mounted here: {found[1]}")
    assert found == ["overlayfs", None, PAGE, [[5 * PAGE, 6 * PAGE]]]


# --- the file system ------------------------------------------------------------------------------


def coreutils_type(path: str) -> int:
    done = subprocess.run(["stat", "-f", "-c", "%t", path], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"`stat -f` does not work here: {done.stderr}")
    return int(done.stdout, 16)


@pytest.mark.parametrize("path", ["/proc/self/status", "/sys/kernel/mm", "/dev/shm", "/", "."])
def test_the_type_of_a_file_system_is_what_the_system_says(path: str) -> None:
    if not os.path.exists(path):
        pytest.skip(f"there is no {path}")
    descriptor = os.open(path, os.O_RDONLY)
    assert file_system_of(descriptor).type_number == coreutils_type(path)
    os.close(descriptor)


def test_a_file_system_in_no_table_is_local_and_named_by_its_number() -> None:
    with open("/proc/self/status", "rb") as status:
        found = file_system_of(status.fileno())
    assert found == FileSystem(0x9FA0, "0x9fa0", is_remote=False)


class StandInLibrary:
    """The extension, but its file system is of another type or cannot be told; busy vectors."""

    def __init__(self, number: int, refusal: int = 0) -> None:
        self.number, self.refusal = number, refusal

    def kda_file_system_type(self, _: int, type_: Any) -> int:
        type_[0] = self.number
        return self.refusal

    def kda_cached_pages(self, _: Any, nbytes: int, vector: Any) -> int:
        for page in range(nbytes // PAGE):
            vector[page] = 0xFF if page == 1 else 0xFE
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(extension()[1], name)


def stand_in(monkeypatch: pytest.MonkeyPatch, number: int, refusal: int = 0) -> None:
    pair = (extension()[0], StandInLibrary(number, refusal))
    monkeypatch.setattr(residency, "extension", lambda: pair)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (0x6969, "NFS"),
        (0xFF534D42, "CIFS"),
        (0xFE534D42, "SMB2"),
        (0x517B, "SMB"),
        (0x65735546, "FUSE"),
        (0x01021997, "9p"),
        (0x00C36400, "Ceph"),
        (0x5346414F, "AFS"),
        (0x6B414653, "AFS"),
        (0x73757245, "Coda"),
        (0x0BD00BD0, "Lustre"),
        (0x47504653, "GPFS"),
        (0x19830326, "BeeGFS"),
        (0x7461636F, "OCFS2"),
        (0x01161970, "GFS2"),
        (0x786F4256, "vboxsf"),
    ],
)
def test_a_network_or_fuse_file_system_is_remote_and_never_mapped(
    cold: int, number: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, number)
    assert file_system_of(cold) == FileSystem(number, name, is_remote=True)
    assert ranges_by_mincore(cold, 0, FILE_BYTES) is None


@pytest.mark.parametrize("number", [0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630])
def test_a_file_system_on_a_disk_or_in_memory_is_local(
    cold: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, number)
    found = file_system_of(cold)
    assert not found.is_remote
    assert not found.name.startswith("0x")


def test_of_what_mincore_says_of_a_page_only_the_lowest_bit_counts(
    cold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, 0xEF53)
    assert ranges_by_mincore(cold, 0, 4 * PAGE) == [(PAGE, 2 * PAGE)]


def test_where_the_type_cannot_be_told_the_file_counts_as_local(
    cold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, 0, errno.ENOTSUP)
    assert file_system_of(cold) == FileSystem(0, "unknown", is_remote=False)


# --- direct I/O -----------------------------------------------------------------------------------


def test_direct_io_aligned_as_told_works_and_otherwise_does_not(cold: int) -> None:
    alignment = direct_alignment(cold)
    if alignment is None or not alignment.offset_bytes:
        pytest.skip("the file system does not say how, or has no direct I/O")
    unit = max(alignment.offset_bytes, alignment.memory_bytes)
    direct = os.open(f"/proc/self/fd/{cold}", os.O_RDONLY | os.O_DIRECT)
    memory = memoryview(mmap.mmap(-1, 2 * PAGE))
    assert os.preadv(direct, [memory[:unit]], alignment.offset_bytes) == unit
    with pytest.raises(OSError, match="Invalid argument"):
        os.preadv(direct, [memory[:unit]], alignment.offset_bytes // 2)
    os.close(direct)


def test_where_the_file_system_cannot_say_there_is_no_alignment() -> None:
    with open("/proc/self/status", "rb") as status:
        assert direct_alignment(status.fileno()) is None
    ends = os.pipe()
    assert direct_alignment(ends[0]) is None
    for end in ends:
        os.close(end)


JOURNALED = """
import dataclasses, json, os, subprocess, sys
from kda_stream.staging import residency
image, folder = sys.argv[1:]
for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop,data=journal", image, folder]):
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(json.dumps(["refused", f"{error} {getattr(error, 'stderr', '')}"]))
        sys.exit()
descriptor = os.open(f"{folder}/file", os.O_RDWR | os.O_CREAT)
alignment = residency.direct_alignment(descriptor)
print(json.dumps(["made", alignment and dataclasses.astuple(alignment)]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_where_data_is_journaled_a_file_has_no_direct_io(cold: int, tmp_path: Path) -> None:
    if direct_alignment(cold) is None:
        pytest.skip("needs Linux 6.1")
    (tmp_path / "image").write_bytes(b"")
    os.truncate(tmp_path / "image", 32 * 1024**2)
    (tmp_path / "mounted").mkdir()
    found = in_mount_namespace(JOURNALED, tmp_path / "image", tmp_path / "mounted")
    if found[0] == "refused":
        pytest.skip(f"no ext4 can be made here: {found[1]}")
    assert found == ["made", [0, 0]]


# --- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, 0.25, 1])
def test_samples_tell_about_how_much_is_cached_and_bring_in_little(
    tmp_path: Path, share: float
) -> None:
    size = 64 * 1024**2
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    with open(path, "rb") as file:
        descriptor = file.fileno()
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(descriptor, int(size * share), 0)
        before = cached_bytes(descriptor, 0, size)
        told = sampled_cached_bytes(descriptor, 0, size)
        told_again = sampled_cached_bytes(descriptor, 0, size)
        after = cached_bytes(descriptor, 0, size)
    if told is None or told_again is None:
        pytest.skip("the system has no reads that do not wait")
    assert before is not None
    assert after is not None
    assert max(abs(told - before), abs(told_again - before)) <= size // 16
    assert after - before <= 2 * 64 * 65536
