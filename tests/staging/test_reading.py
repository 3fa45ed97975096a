"""`bring_in`: every way to read brings the same bytes, one is chosen by what it finds, and why."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import MEDIUM, write_checkpoint
from support.file_systems import disk_of_blocks, fuse, mounted
from support.page_cache import PAGE_BYTES, cached_pages, cool, has_a_page_cache, warm
from support.plain_files import PlainFile, noise

from kda_stream import (
    ErrorCode,
    KdaConfig,
    PayloadError,
    PinnedArena,
    bind_kda_weights,
    kda_slot_bytes,
    open_checkpoint,
)
from kda_stream.staging.pages import map_anonymous
from kda_stream.staging.reading import ReadChoice, ReadReport, Wanted, bring_in, foresee
from kda_stream.staging.residency import cached_bytes
from kda_stream.staging.spans import Span

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the paths are Linux's")
pytestmark = linux_only
each_path = pytest.mark.parametrize("path", ["mapped", "positional", "direct", "auto"])
each_named_path = pytest.mark.parametrize("path", ["mapped", "positional", "direct"])
RunPython = Callable[..., Any]

UNTOUCHED = b"\xa5"
KIB = 1024
MIB = 1024**2

# (begin, end, destination) of ranges of one file, in ascending order of destination.
Ranges = list[tuple[int, int, int]]


def brought_in(
    source: Path, ranges: Ranges, nbytes: int, path: Any, **choice: Any
) -> tuple[bytes, ReadReport]:
    """What `nbytes` bytes of memory hold after the ranges were brought in; it begins at a page."""
    file = PlainFile(source)
    wanted = [Wanted(file, begin, end, at, ((0, "t"),)) for begin, end, at in ranges]
    memory = map_anonymous(nbytes)
    lent = memory.lend(0, nbytes, writable=True)
    destination = lent.view(0, nbytes)
    destination[:] = UNTOUCHED * nbytes
    try:
        report = bring_in(wanted, (), destination, ReadChoice(path, **choice))
        return bytes(destination), report
    finally:
        file.close()
        destination.release()
        lent.end()
        memory.close()


def sliced(content: bytes, ranges: Ranges, nbytes: int) -> bytes:
    """What the memory must hold then."""
    out = bytearray(UNTOUCHED * nbytes)
    for begin, end, at in ranges:
        out[at : at + end - begin] = content[begin:end]
    return bytes(out)


# --- heads and tails ------------------------------------------------------------------------------


@each_path
@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 4095, 4096, 4097, 65537, 1048579, 3000001])
def test_a_whole_file_of_any_size_and_its_last_byte_come_in(
    tmp_path: Path, path: str, nbytes: int
) -> None:
    content = noise(nbytes)
    source = tmp_path / "file"
    source.write_bytes(content)
    for begin, at in ((0, 0), (0, 7), (nbytes - 1, (nbytes - 1) % PAGE_BYTES), (nbytes - 1, 0)):
        ranges = [(begin, nbytes, at)]
        size = at + nbytes - begin + 3
        got, _ = brought_in(source, ranges, size, path)
        assert got == sliced(content, ranges, size)


@each_path
@pytest.mark.parametrize(
    ("shift", "end"),
    [(0, "anywhere"), (0, "the file's end"), (1, "anywhere"), (512, "the file's end")],
)
def test_ranges_from_every_offset_into_a_page_come_in_to_the_byte(
    tmp_path: Path, path: str, shift: int, end: str
) -> None:
    """Without a shift, memory and file agree modulo the page, and blocks can land in place."""
    content = noise(20 * KIB + 331)
    source = tmp_path / "file"
    source.write_bytes(content)
    ranges, at = [], 0
    for offset in range(4098):
        length = 1 + (offset * 37) % 9000 if end == "anywhere" else len(content) - offset
        at += (offset + shift - at) % PAGE_BYTES + (PAGE_BYTES if offset % 3 == 0 else 0)
        ranges.append((offset, offset + length, at))
        at += length
    kept = ranges if end == "anywhere" else ranges[::7]
    nbytes = kept[-1][2] + kept[-1][1] - kept[-1][0] + 5
    got, _ = brought_in(source, kept, nbytes, path)
    assert got == sliced(content, kept, nbytes)


CONTENT = noise(300 * KIB + 77)


@st.composite
def laid_out(draw: st.DrawFn) -> Ranges:
    ranges, at = [], 0
    for _ in range(draw(st.integers(1, 6))):
        begin = draw(st.integers(0, len(CONTENT)))
        end = begin + draw(st.integers(0, min(len(CONTENT) - begin, 70_000)))
        at += draw(st.sampled_from([0, 1, 255, 4096])) + draw(st.booleans()) * (
            (begin - at) % PAGE_BYTES
        )
        ranges.append((begin, end, at))
        at += end - begin
    return ranges


@each_path
@given(ranges=laid_out())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_list_of_ranges_does_what_slices_do(tmp_path: Path, path: str, ranges: Ranges) -> None:
    source = tmp_path / "file"
    if not source.exists():
        source.write_bytes(CONTENT)
    nbytes = max(at + end - begin for begin, end, at in ranges) + 9
    got, _ = brought_in(source, ranges, nbytes, path)
    assert got == sliced(CONTENT, ranges, nbytes)


@each_path
@pytest.mark.parametrize("agree", [True, False], ids=["in place", "by way of scratch memory"])
def test_many_mebibytes_come_in_whole(tmp_path: Path, path: str, agree: bool) -> None:
    """More than a piece for each of several threads, so that pieces must meet exactly."""
    content = noise(37 * MIB + 4321)
    source = tmp_path / "file"
    source.write_bytes(content)
    ranges = [(4099, len(content), 3 if agree else 4)]
    nbytes = len(content) - 4096 + 4
    got, _ = brought_in(source, ranges, nbytes, path)
    assert got == sliced(content, ranges, nbytes)


@each_path
def test_ranges_of_several_files_and_of_memory_come_in_together(tmp_path: Path, path: Any) -> None:
    files, contents = [], []
    for n in range(3):
        contents.append(noise(50_000 + n, f"file {n}"))
        source = tmp_path / str(n)
        source.write_bytes(contents[-1])
        files.append(PlainFile(source))
    out = bytearray(UNTOUCHED * 60_000)
    wanted = [Wanted(files[n], 4095, 9000 + n, 10_000 * n + 4095, ((0, "t"),)) for n in (2, 0, 1)]
    held = Span(memoryview(b"m" * 100), 1, 100, 100, 30_000)
    report = bring_in(wanted, [held], memoryview(out), ReadChoice(path))
    expected = bytearray(UNTOUCHED * 60_000)
    for n in range(3):
        expected[10_000 * n + 4095 : 10_000 * n + 9000 + n] = contents[n][4095 : 9000 + n]
    expected[30_000:30_100] = b"m" * 100
    assert out == expected
    assert report.path == path or path == "auto"


@each_path
def test_blocks_of_4_kib_are_met_exactly(tmp_path: Path, path: str) -> None:
    """Most disks take 512 bytes; this one refuses a direct read of less than a page."""
    content = noise(64 * KIB + 513)
    with disk_of_blocks(tmp_path / "disk", 4096, 32 * MIB) as folder:
        source = folder / "file"
        source.write_bytes(content)
        cool(source)
        ranges, at = [], 0
        for offset in range(0, 4098, 59):
            at += (offset - at) % 512 if offset % 2 else 0
            ranges.append((offset, len(content) - offset, at))
            at += len(content) - 2 * offset
        got, report = brought_in(source, ranges, at + 1, path)
        assert got == sliced(content, ranges, at + 1)
        assert report.path == path or (path, report.path) == ("auto", "direct")


# --- which way, and why ---------------------------------------------------------------------------


def foreseen(source: Path, begin: int, end: int, **choice: Any) -> ReadReport:
    """What is foreseen of "auto" for the bytes [begin, end) of the file."""
    file = PlainFile(source)
    try:
        return foresee([Wanted(file, begin, end, 0, ((0, "t"),))], ReadChoice(**choice))
    finally:
        file.close()


def chosen(tmp_path: Path, cached_pages_of_100: int, **choice: Any) -> ReadReport:
    """What "auto" says of 100 pages of which so many are in the page cache, and says beforehand."""
    if not has_a_page_cache(tmp_path):
        pytest.skip("files here do not leave the page cache")
    source = tmp_path / "file"
    source.write_bytes(noise(100 * PAGE_BYTES))
    cool(source)
    warm(source, 0, cached_pages_of_100 * PAGE_BYTES)
    before = foreseen(source, 0, 100 * PAGE_BYTES, **choice)
    assert len(cached_pages(source)) == cached_pages_of_100, "looking ahead has read"
    got, report = brought_in(source, [(0, 100 * PAGE_BYTES, 0)], 100 * PAGE_BYTES, "auto", **choice)
    assert before == report
    assert got == noise(100 * PAGE_BYTES)
    if report.cached_before_bytes is not None:
        assert report.cached_before_bytes == cached_pages_of_100 * PAGE_BYTES
        assert f"{cached_pages_of_100} %" in report.reason
    return report


@pytest.mark.parametrize(
    ("cached", "path"), [(0, "direct"), (49, "direct"), (50, "mapped"), (100, "mapped")]
)
def test_auto_maps_what_is_in_the_page_cache_by_half_and_reads_the_rest_past_it(
    tmp_path: Path, cached: int, path: str
) -> None:
    assert chosen(tmp_path, cached, residency="drop").path == path
    assert chosen(tmp_path, cached).path == path


@pytest.mark.parametrize(
    ("cached", "path"), [(0, "positional"), (49, "positional"), (100, "mapped")]
)
def test_auto_does_not_read_past_the_page_cache_what_is_to_be_kept_in_it(
    tmp_path: Path, cached: int, path: str
) -> None:
    report = chosen(tmp_path, cached, residency="keep")
    assert (report.path, report.residency) == (path, "keep")
    assert len(cached_pages(tmp_path / "file")) == 100


@each_named_path
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_path_asked_for_by_name_is_taken_whatever_is_in_the_page_cache(
    tmp_path: Path, path: str, is_cached: bool
) -> None:
    source = tmp_path / "file"
    source.write_bytes(CONTENT)
    cool(source)
    if is_cached:
        warm(source)
    _, report = brought_in(source, [(0, len(CONTENT), 0)], len(CONTENT), path)
    assert (report.path, report.reason, report.notes) == (path, "it was asked for", ())


@each_named_path
def test_what_was_cached_is_counted_to_the_byte(tmp_path: Path, path: str) -> None:
    if not has_a_page_cache(tmp_path):
        pytest.skip("files here do not leave the page cache")
    source = tmp_path / "file"
    source.write_bytes(noise(40 * PAGE_BYTES + 100))
    cool(source)
    warm(source, 10 * PAGE_BYTES, 20 * PAGE_BYTES)
    warm(source, 40 * PAGE_BYTES)
    with source.open("rb") as file:
        if cached_bytes(file.fileno(), 0, 1) is None:
            pytest.skip("the system does not say what is cached")
    ranges = [
        (15 * PAGE_BYTES + 1, 30 * PAGE_BYTES, 0),
        (40 * PAGE_BYTES - 7, 40 * PAGE_BYTES + 90, 20 * PAGE_BYTES),
    ]
    _, report = brought_in(source, ranges, 21 * PAGE_BYTES, path)
    assert report.cached_before_bytes == 5 * PAGE_BYTES - 1 + 90


def test_memory_alone_is_no_read() -> None:
    out = bytearray(3)
    report = bring_in((), [Span(memoryview(b"abc"), 1, 3, 3, 0)], memoryview(out), ReadChoice())
    assert out == b"abc"
    assert (report.path, report.residency, report.cached_before_bytes) == ("memory", None, None)


def test_where_there_are_no_direct_reads_auto_reads_otherwise_and_notes_it(tmp_path: Path) -> None:
    """On ramfs nothing but a hole is ever absent from the page cache."""
    config = KdaConfig(256, 4, 32, 4)
    with mounted("ramfs", tmp_path / "ram") as folder:
        write_checkpoint(folder, geometry=MEDIUM, layers=1, mtp=False, shards=1, sparse=True)
        with open_checkpoint(folder) as checkpoint:
            source = checkpoint.layer(0)
            with PinnedArena(kda_slot_bytes(config), lock="off") as arena:
                slot = arena.claim()
                slot.memory()[:] = UNTOUCHED * slot.nbytes
                slot.abandon()
                weights, report = bind_kda_weights(config, 0, source, into=arena)
                assert {byte for _, tensor in weights.items() for byte in tensor.data} == {0}
            assert report.read.path == "positional"
            assert ["direct" in note for note in report.read.notes] == [True]
            with pytest.raises(PayloadError) as caught:
                bind_kda_weights(config, 0, source, read="direct")
        assert caught.value.code is ErrorCode.DIRECT_REFUSED
        assert Path(caught.value.path or "").parent == folder


def test_a_file_of_a_program_s_own_file_system_is_never_mapped_by_auto(tmp_path: Path) -> None:
    behind = tmp_path / "behind"
    behind.mkdir()
    (behind / "file").write_bytes(CONTENT)
    with fuse(tmp_path / "fuse", behind) as folder:
        source = folder / "file"
        for residency in ("auto", "keep", "drop", "drop"):
            _, report = brought_in(
                source, [(1, len(CONTENT), 0)], len(CONTENT), "auto", residency=residency
            )
            assert report.path == "positional"
            assert "FUSE" in report.reason
        assert "FUSE" in foreseen(source, 1, len(CONTENT)).reason


@each_named_path
def test_every_path_reads_a_program_s_own_file_system_when_asked_to(
    tmp_path: Path, path: str
) -> None:
    behind = tmp_path / "behind"
    behind.mkdir()
    (behind / "file").write_bytes(CONTENT)
    with fuse(tmp_path / "fuse", behind) as folder:
        ranges = [(1, 70_000, 0), (70_001, len(CONTENT), 70_001)]
        got, report = brought_in(folder / "file", ranges, len(CONTENT), path)
        assert got == sliced(CONTENT, ranges, len(CONTENT))
        assert report.path == path


# --- sources that fail ----------------------------------------------------------------------------


@each_path
def test_a_disk_that_fails_is_an_error_with_the_path(tmp_path: Path, path: str) -> None:
    behind = tmp_path / "behind"
    behind.mkdir()
    (behind / "file").write_bytes(CONTENT)
    with fuse(tmp_path / "fuse", behind, fails_from=200 * KIB) as folder:
        for _ in range(2):
            with pytest.raises(PayloadError) as caught:
                brought_in(folder / "file", [(5, len(CONTENT), 5)], len(CONTENT), path)
            assert caught.value.path == str(folder / "file")
            assert caught.value.tensor == "t"


@each_path
@pytest.mark.parametrize("keep", [0, 1, 100_000])
def test_a_file_that_is_too_short_is_an_error_with_its_path(
    tmp_path: Path, path: Any, keep: int
) -> None:
    source = tmp_path / "file"
    source.write_bytes(CONTENT)
    file = PlainFile(source)
    file.view(0, 1)
    os.truncate(source, keep)
    names = ["a", "b", "c"]
    starts = tuple((at, name) for at, name in zip((0, 90_000, 200_000), names, strict=True))
    wanted = [Wanted(file, 0, len(CONTENT), 0, starts)]
    with pytest.raises(PayloadError) as caught:
        bring_in(wanted, (), memoryview(mmap.mmap(-1, len(CONTENT))), ReadChoice(path))
    assert caught.value.path == str(source)
    assert caught.value.tensor in names


@each_path
def test_descriptors_are_closed_when_a_copy_ends_and_when_it_fails(
    tmp_path: Path, path: str
) -> None:
    source = tmp_path / "file"
    source.write_bytes(CONTENT)
    before = sorted(os.listdir("/proc/self/fd"))
    brought_in(source, [(0, 1000, 0)], 1000, path)
    assert sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(PayloadError):
        brought_in(source, [(0, 2 * len(CONTENT), 0)], 2 * len(CONTENT), "positional")
    assert sorted(os.listdir("/proc/self/fd")) == before


# --- limits on address space ----------------------------------------------------------------------

LITTLE_ADDRESS_SPACE = """
    import json, os, resource, sys
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from support.plain_files import PlainFile
    from kda_stream.staging.pages import map_anonymous, map_file
    from kda_stream.staging.reading import ReadChoice, Wanted, bring_in
    from kda_stream import PayloadError
    path, cached = sys.argv[2], sys.argv[3] == "cached"

    class File(PlainFile):
        def view(self, begin, end):
            if self._map is None:
                with self.open() as file:
                    size = os.fstat(file.fileno()).st_size
                    self._map = map_file(file.fileno(), size, self.path).lend(0, size)
            return self._map.view(begin, end)

    nbytes = 1 << 20
    begin = 5 << 30
    if cached:
        with open(path, "rb") as file:
            file.seek(begin)
            file.read(nbytes)
    memory = map_anonymous(nbytes)
    out = memory.lend(0, nbytes, writable=True).view(0, nbytes)
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
    found = {}
    for read in ("auto", "positional", "direct", "mapped"):
        out[:] = bytes(nbytes)
        try:
            report = bring_in(
                [Wanted(File(path), begin, begin + nbytes, 0, ((0, "t"),))], (), out,
                ReadChoice(read, "drop" if not cached else "keep"),
            )
        except PayloadError as error:
            found[read] = [error.code.value]
        else:
            right = bytes(out[5000:5003]) == b"abc" and out[-1] == 122
            found[read] = [report.path, right, list(report.notes)]
    print(json.dumps(found))
"""


@pytest.mark.mlock
@pytest.mark.parametrize("cached", ["cached", "cold"])
def test_a_file_larger_than_the_address_space_is_read_and_a_note_says_why_not_mapped(
    run_python: RunPython, tmp_path: Path, cached: str
) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.seek((5 << 30) + 5000)
        file.write(b"abc")
        file.seek((5 << 30) + MIB - 1)
        file.write(b"z" * (2 << 20))
    cool(path)
    found = run_python(LITTLE_ADDRESS_SPACE, Path(__file__).parents[1], path, cached)
    way, right, notes = found["auto"]
    assert right, found
    if cached == "cached":
        assert way == "positional"
        assert len(notes) == 1
        assert "mapped" in notes[0]
    assert found["positional"] == ["positional", True, []]
    assert found["direct"] == ["direct", True, []]
    assert found["mapped"] == ["map-refused"]


# --- signals --------------------------------------------------------------------------------------

# The file is cut and made longer again, over and over, by another process. What is cut before a
# page is asked for and what is cut right behind that are both met.
CUT_ALL_THE_TIME = """
    import json, mmap, os, signal, sys, threading, time
    from kda_stream import CopyPlan, FileRange, PayloadError, Span
    path, kind, blocked, threads = sys.argv[1], sys.argv[2], sys.argv[3] == "blocked", 2
    nbytes = 8 << 20
    with open(path, "wb") as file:
        file.truncate(nbytes)
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if kind == "direct" else 0))
    view = memoryview(mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_READ))
    cutter = os.fork()
    if not cutter:
        end = time.monotonic() + 20
        with open(path, "r+b") as file:
            while time.monotonic() < end:
                for keep in (0, 4096, 5 << 20):
                    os.ftruncate(file.fileno(), keep)
                    os.ftruncate(file.fileno(), nbytes)
                    time.sleep(0.0002)
        os._exit(0)
    source = FileRange(descriptor, 0, nbytes, 512 if kind == "direct" else 0)
    if kind == "mapped":
        source = view
    span = Span(source, 1, nbytes, nbytes, 0, kind == "mapped", tensor="t", path=path)
    pages = mmap.mmap(-1, nbytes)
    whole = failed = 0

    def copy():
        global whole, failed
        if blocked:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        end = time.monotonic() + 1.5
        while time.monotonic() < end or not (whole and failed):
            try:
                CopyPlan((span,)).run(memoryview(pages), threads=threads)
            except PayloadError as error:
                assert (error.tensor, error.path) == ("t", path)
                failed += 1
            else:
                whole += 1

    try:
        copying = threading.Thread(target=copy)
        copying.start()
        copying.join(15)
    finally:
        os.kill(cutter, signal.SIGKILL)
    print(json.dumps([whole > 0, failed > 0]))
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("kind", "mask"),
    [("mapped", "open"), ("mapped", "blocked"), ("positional", "open"), ("direct", "open")],
)
def test_a_file_that_is_cut_over_and_over_while_it_is_copied_kills_nothing(
    run_python: RunPython, tmp_path: Path, kind: str, mask: str
) -> None:
    """Threads of a server often have every signal blocked; "blocked" is such a thread."""
    assert run_python(CUT_ALL_THE_TIME, tmp_path / "file", kind, mask) == [True, True]


FOREIGN = """
    import faulthandler, mmap, os, signal, sys
    from kda_stream import CopyPlan, Span
    steps, fault = sys.argv[1].split(", "), sys.argv[2]
    with open("good", "wb") as file:
        file.write(b"a" * 65536)
    view = memoryview(mmap.mmap(os.open("good", os.O_RDONLY), 0, access=mmap.ACCESS_READ))
    span = Span(view, 1, len(view), len(view), 0, mapped="without" not in sys.argv[3])
    for step in steps:
        if step == "copy":
            CopyPlan((span,)).run(memoryview(bytearray(len(view))))
        elif step == "faulthandler on":
            faulthandler.enable()
        elif step == "faulthandler off":
            faulthandler.disable()
        elif step == "python handler":
            signal.signal(signal.SIGBUS, lambda *_: print("handled"))
        elif step == "default":
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
        elif step == "ignore":
            signal.signal(signal.SIGBUS, signal.SIG_IGN)
    if fault == "sent":
        os.kill(os.getpid(), signal.SIGBUS)
    else:
        with open("cut", "wb") as file:
            file.write(b"b" * 8192)
        cut = mmap.mmap(os.open("cut", os.O_RDONLY), 0, access=mmap.ACCESS_READ)
        os.truncate("cut", 0)
        cut[0]
    print("went on")
"""
STEPS = [
    "copy",
    "copy, copy",
    "faulthandler on, copy",
    "copy, faulthandler on",
    "copy, faulthandler on, copy",
    "faulthandler on, copy, faulthandler on, copy",
    "faulthandler on, copy, faulthandler off",
    "faulthandler on, copy, faulthandler off, copy",
    "copy, faulthandler on, copy, faulthandler off",
    "copy, faulthandler on, copy, faulthandler off, copy",
    "python handler, copy",
    "copy, python handler",
    "copy, python handler, copy",
    "copy, python handler, copy, default",
    "copy, python handler, copy, default, copy",
    "ignore, copy",
    "copy, ignore, copy",
    "copy, ignore, copy, default, copy",
]


@pytest.mark.mlock  # a sanitizer has a handler of its own
@pytest.mark.parametrize("fault", ["sent", "met"])
@pytest.mark.parametrize("steps", STEPS)
def test_a_bus_error_that_is_none_of_ours_does_what_it_did_before(
    tmp_path: Path, steps: str, fault: str
) -> None:
    """The same steps without a mapped copy say what that is."""
    if fault == "met" and "python handler" in steps and "default" not in steps:
        pytest.skip("Python's handler returns to the fault, for ever")

    def outcome(guard: str) -> tuple[int, str, int]:
        command = [sys.executable, "-c", textwrap.dedent(FOREIGN), steps, fault, guard]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=10, check=False
        )
        return done.returncode, done.stdout, done.stderr.count("Fatal Python error: Bus error")

    expected = outcome("without a guard")
    assert expected[0] in (0, -signal.SIGBUS), "the test looks at the wrong thing"
    assert outcome("with a guard") == expected
