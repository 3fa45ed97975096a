"""`CopyPlan`: every span is checked before the first byte is written, then all are copied."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kda_stream import CopyPlan, ErrorCode, FileRange, PayloadError, Span, SpanError

GUARD = 0xA5
ANSWERED_SECONDS = 0.2  # a tenth is promised; the machine that runs this may be busy
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")

Source = memoryview | FileRange
MakeSource = Callable[[bytes], Source]


def pattern(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


def guarded(nbytes: int) -> bytearray:
    return bytearray([GUARD]) * nbytes


def span(source: Source, nbytes: int, destination: int = 0, **more: Any) -> Span:
    """A span of one row."""
    return Span(source, 1, nbytes, nbytes, destination, **more)


class Sources:
    """Sources of one kind over given bytes: the heap, a map of a file, or the file itself."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        self._files: list[int] = []
        self._maps: list[mmap.mmap] = []

    @property
    def mapped(self) -> bool:
        return self.kind == "mapped"

    def make(self, data: bytes) -> Source:
        if self.kind == "memory":
            return memoryview(data)
        path = self._folder / f"{len(self._files)}.bin"
        path.write_bytes(b"x" * 3 + data)  # so that a file's bytes start at an odd offset
        descriptor = os.open(path, os.O_RDONLY)
        self._files.append(descriptor)
        if self.kind == "file":
            return FileRange(descriptor, 3, len(data))
        self._maps.append(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        return memoryview(self._maps[-1])[3:]

    def close(self) -> None:
        for descriptor in self._files:
            os.close(descriptor)


@pytest.fixture(params=["memory", "mapped", "file"])
def sources(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sources]:
    made = Sources(request.param, tmp_path)
    yield made
    made.close()


def unread_pages(nbytes: int) -> mmap.mmap:
    """Read-only pages that cost no memory but a page fault each: a copy that takes its time."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


def slow_plan(gibibytes: int) -> CopyPlan:
    """A plan that takes some tenths of a second a GiB, and writes 2 MiB for each."""
    nbytes = gibibytes << 30
    return CopyPlan((Span(memoryview(unread_pages(nbytes)), nbytes // 4096, 8, 4096, 0),))


# --- what is copied -------------------------------------------------------------------------------


def test_one_row_is_copied_whole(sources: Sources) -> None:
    data = pattern(10_001)
    out = guarded(10_003)
    CopyPlan((span(sources.make(data), 10_001, 1, mapped=sources.mapped),)).run(memoryview(out))
    assert bytes(out) == bytes([GUARD]) + data + bytes([GUARD])


def test_strided_rows_are_gathered_densely(sources: Sources) -> None:
    data = pattern(64 * 96)
    columns = np.frombuffer(data, dtype=np.uint8).reshape(64, 96)
    out = guarded(64 * 40)
    rows = Span(sources.make(data), 64, 40, 96, 0, mapped=sources.mapped)
    CopyPlan((rows,)).run(memoryview(out))
    assert bytes(out) == columns[:, :40].tobytes()


def test_the_last_row_needs_no_stride_behind_it(sources: Sources) -> None:
    data = pattern(2 * 96 + 40)
    out = guarded(3 * 40)
    CopyPlan((Span(sources.make(data), 3, 40, 96, 0, mapped=sources.mapped),)).run(memoryview(out))
    assert bytes(out) == data[:40] + data[96:136] + data[192:232]


def test_three_adjacent_spans_join(sources: Sources) -> None:
    parts = [pattern(n) for n in (301, 302, 303)]
    spans, at = [], 0
    for part in parts:
        spans.append(span(sources.make(part), len(part), at, mapped=sources.mapped))
        at += len(part)
    out = guarded(at)
    CopyPlan(tuple(spans)).run(memoryview(out))
    assert bytes(out) == b"".join(parts)


def test_gaps_between_spans_are_left_as_they_are(sources: Sources) -> None:
    first, second = pattern(10), pattern(11)
    plan = CopyPlan(
        (
            span(sources.make(first), 10, 5, mapped=sources.mapped),
            span(sources.make(second), 11, 100, mapped=sources.mapped),
        )
    )
    assert plan.nbytes == 21
    out = guarded(128)
    plan.run(memoryview(out))
    assert out[5:15] == first
    assert out[100:111] == second
    assert set(out[:5] + out[15:100] + out[111:]) == {GUARD}


def test_copies_over_several_mebibytes_are_whole(sources: Sources) -> None:
    data = pattern((5 << 20) + 7)
    out = guarded(len(data))
    CopyPlan((span(sources.make(data), len(data), mapped=sources.mapped),)).run(memoryview(out))
    assert out == data


def test_rows_longer_than_a_mebibyte_are_gathered(sources: Sources) -> None:
    row, stride = (1 << 20) + 5, (1 << 20) + 4099
    data = pattern(2 * stride + row)
    out = guarded(3 * row)
    rows = Span(sources.make(data), 3, row, stride, 0, mapped=sources.mapped)
    CopyPlan((rows,)).run(memoryview(out))
    assert out == b"".join(data[n * stride : n * stride + row] for n in range(3))


def test_a_plan_without_spans_writes_nothing() -> None:
    out = guarded(4)
    CopyPlan(()).run(memoryview(out))
    assert out == guarded(4)


@pytest.mark.parametrize(("rows", "row_bytes"), [(0, 4), (3, 0), (0, 0)])
def test_empty_spans_write_nothing(sources: Sources, rows: int, row_bytes: int) -> None:
    out = guarded(4)
    empty = Span(sources.make(pattern(16)), rows, row_bytes, 4, 2, mapped=sources.mapped)
    CopyPlan((empty,)).run(memoryview(out))
    assert out == guarded(4)


@st.composite
def laid_out(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """(rows, row_bytes, stride, gap before it) of some spans."""
    some = draw(st.integers(1, 5))
    spans = []
    for _ in range(some):
        row_bytes = draw(st.integers(0, 70))
        stride = row_bytes + draw(st.integers(0, 70))
        spans.append((draw(st.integers(0, 9)), row_bytes, stride, draw(st.integers(0, 9))))
    return spans


@given(rows=laid_out())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_list_of_spans_does_what_slices_do(
    sources: Sources, rows: list[tuple[int, int, int, int]]
) -> None:
    spans, at = [], 0
    expected = guarded(4096 * 2)
    for count, row_bytes, stride, gap in rows:
        data = pattern(max(1, (count - 1) * stride + row_bytes))
        at += gap
        source = sources.make(data)
        spans.append(Span(source, count, row_bytes, stride, at, mapped=sources.mapped))
        for row in range(count):
            expected[at : at + row_bytes] = data[row * stride : row * stride + row_bytes]
            at += row_bytes
    out = guarded(len(expected))
    CopyPlan(tuple(spans)).run(memoryview(out))
    assert out == expected


# --- what is refused ------------------------------------------------------------------------------

# (rows, row_bytes, row_stride, destination) over 100 source bytes and 100 destination bytes
REFUSED = {
    "the source is one byte short": (1, 101, 101, 0),
    "the last row reaches past the source": (3, 20, 41, 0),
    "the destination is one byte short": (1, 20, 20, 81),
    "the rows reach past the destination": (10, 10, 10, 1),
    "the destination lies behind the end": (1, 1, 1, 200),
    "an empty span lies behind the end": (0, 1, 1, 101),
    "the stride is shorter than the row": (2, 20, 19, 0),
    "the stride is zero": (2, 20, 0, 0),
    "rows times bytes wrap to zero": (2**32, 2**32, 2**32, 0),
    "rows times stride wrap to zero": (2**32, 1, 2**32, 0),
    "a row of 2^63 bytes": (1, 2**63, 2**63, 0),
    "2^63 rows": (2**63, 1, 1, 0),
    "a stride of 2^63": (3, 1, 2**63, 0),
    "a destination of 2^63": (1, 1, 1, 2**63),
    "a destination that wraps": (1, 2, 2, 2**64 - 1),
    "a row of 2^64 bytes": (1, 2**64, 2**64, 0),
    "2^64 + 1 rows": (2**64 + 1, 1, 1, 0),
    "a destination of 2^64": (1, 1, 1, 2**64),
    "a negative row": (1, -1, 1, 0),
    "negative rows": (-1, 1, 1, 0),
    "a negative stride": (2, 1, -1, 0),
    "a negative destination": (1, 1, 1, -1),
}


@pytest.mark.parametrize("rows", REFUSED.values(), ids=REFUSED)
def test_a_span_that_does_not_fit_is_refused_and_nothing_is_written(
    sources: Sources, rows: tuple[int, int, int, int]
) -> None:
    out = guarded(100)
    bad = Span(
        sources.make(pattern(100)), *rows, mapped=sources.mapped, tensor="the.bad.one", path="/a/b"
    )
    with pytest.raises(SpanError) as caught:
        CopyPlan((bad,)).run(memoryview(out))
    assert caught.value.code is ErrorCode.SPAN_REFUSED
    assert caught.value.tensor == "the.bad.one"
    assert caught.value.path == "/a/b"
    assert isinstance(caught.value, ValueError)
    assert out == guarded(100)


def test_a_bad_last_span_keeps_the_good_ones_before_it_from_being_copied(sources: Sources) -> None:
    good = sources.make(pattern(100))
    bad = Span(good, 1, 50, 50, 60, mapped=sources.mapped, tensor="last")
    out = guarded(100)
    first = span(good, 50, 0, mapped=sources.mapped, tensor="first")
    with pytest.raises(SpanError) as caught:
        CopyPlan((first, bad)).run(memoryview(out))
    assert caught.value.tensor == "last"
    assert out == guarded(100)


@pytest.mark.parametrize("second", [0, 9, 5], ids=["the same place", "one byte", "half"])
def test_spans_that_overlap_are_refused(sources: Sources, second: int) -> None:
    data = sources.make(pattern(10))
    out = guarded(100)
    spans = tuple(span(data, 10, at, mapped=sources.mapped) for at in (0, second))
    with pytest.raises(SpanError):
        CopyPlan(spans).run(memoryview(out))
    assert out == guarded(100)


def test_spans_out_of_order_are_refused(sources: Sources) -> None:
    data = sources.make(pattern(10))
    out = guarded(100)
    spans = tuple(span(data, 10, at, mapped=sources.mapped) for at in (50, 0))
    with pytest.raises(SpanError):
        CopyPlan(spans).run(memoryview(out))
    assert out == guarded(100)


def test_a_source_inside_the_destination_is_refused() -> None:
    out = guarded(100)
    with pytest.raises(SpanError):
        CopyPlan((span(memoryview(out)[50:80], 30, 40),)).run(memoryview(out))
    assert out == guarded(100)


def test_a_destination_that_is_read_only_is_refused() -> None:
    held = bytes(8)
    with pytest.raises((SpanError, TypeError, BufferError)):
        CopyPlan((span(memoryview(pattern(8)), 8),)).run(memoryview(held))
    assert held == bytes(8)


def test_a_destination_with_gaps_is_refused() -> None:
    out = guarded(16)
    with pytest.raises((SpanError, TypeError, BufferError)):
        CopyPlan((span(memoryview(pattern(8)), 8),)).run(memoryview(out)[::2])
    assert out == guarded(16)


def test_a_source_with_gaps_is_refused() -> None:
    out = guarded(8)
    with pytest.raises((SpanError, TypeError, BufferError)):
        CopyPlan((span(memoryview(pattern(16))[::2], 8),)).run(memoryview(out))
    assert out == guarded(8)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(2**63 - 4, 8), (2**63, 8), (2**64 - 1, 8), (2**64, 8), (-1, 8)]
)
def test_a_file_range_past_what_a_file_can_be_is_refused(offset: int, nbytes: int) -> None:
    out = guarded(8)
    with (
        open(os.devnull, "rb") as file,
        pytest.raises(SpanError),
    ):
        CopyPlan((span(FileRange(file.fileno(), offset, nbytes), 8),)).run(memoryview(out))
    assert out == guarded(8)


# --- sources that fail ----------------------------------------------------------------------------


def test_a_file_that_ends_early_is_an_error_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "short.bin"
    path.write_bytes(pattern(100))
    out = guarded(200)
    with path.open("rb") as file:
        source = FileRange(file.fileno(), 0, 200)
        plan = CopyPlan((span(source, 200, tensor="t", path=str(path)),))
        with pytest.raises(PayloadError) as caught:
            plan.run(memoryview(out))
    assert caught.value.code is ErrorCode.PAYLOAD_END
    assert (caught.value.path, caught.value.tensor) == (str(path), "t")


def test_a_descriptor_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "write-only.bin"
    out = guarded(8)
    with path.open("wb") as file, pytest.raises(PayloadError) as caught:
        CopyPlan((span(FileRange(file.fileno(), 0, 8), 8),)).run(memoryview(out))
    assert caught.value.code is ErrorCode.PAYLOAD_READ
    assert isinstance(caught.value, OSError)


def test_an_error_that_is_kept_does_not_break_the_garbage_collector(
    run_python: Callable[..., Any],
) -> None:
    script = """
        import gc, os, tempfile
        from kda_stream import CopyPlan, FileRange, KdaStreamError, Span
        def refuse(span):
            try:
                CopyPlan((span,)).run(memoryview(bytearray(200)))
            except KdaStreamError as error:
                kept = error  # a cycle: this frame, the error, its traceback, this frame
        refuse(Span(memoryview(bytes(100)), 1, 101, 101, 0))
        with tempfile.TemporaryFile() as file:
            refuse(Span(FileRange(file.fileno(), 0, 100), 1, 100, 100, 0))
        gc.collect()
        print("true")
    """
    assert run_python(script, flags=("-W", "error"))


MAP_CUT_SHORT = """
    import json, mmap, os, sys
    from kda_stream import CopyPlan, PayloadError, Span
    path, keep, rows, row_bytes, stride = sys.argv[1], *map(int, sys.argv[2:])
    with open(path, "wb") as file:
        file.write(bytes(range(256)) * 4096)
    with open(path, "rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    os.truncate(path, keep)
    out = bytearray(rows * row_bytes)
    try:
        CopyPlan((Span(view, rows, row_bytes, stride, 0, mapped=True, path=path, tensor="t"),)).run(
            memoryview(out)
        )
    except PayloadError as error:
        print(json.dumps([error.code.value, error.path, error.tensor]))
    else:
        print("null")
"""


@linux_only
@pytest.mark.parametrize(
    ("keep", "rows", "row_bytes", "stride"),
    [
        (0, 1, 1 << 20, 1 << 20),
        (4096, 1, 1 << 20, 1 << 20),
        ((1 << 20) - 4096, 1, 1 << 20, 1 << 20),
        ((1 << 20) - 4096, 256, 16, 4096),
        ((1 << 20) - 4096, 255, 16, 4116),
    ],
    ids=["to nothing", "to a page", "by a page", "by a page of rows", "by the last row"],
)
def test_a_map_that_was_cut_short_is_an_error_and_no_signal(
    run_python: Callable[..., Any],
    tmp_path: Path,
    keep: int,
    rows: int,
    row_bytes: int,
    stride: int,
) -> None:
    path = tmp_path / "cut.bin"
    found = run_python(MAP_CUT_SHORT, path, keep, rows, row_bytes, stride)
    assert found == ["payload-fault", str(path), "t"]


@linux_only
def test_the_part_of_a_map_that_is_left_can_be_copied(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    assert run_python(MAP_CUT_SHORT, tmp_path / "cut.bin", 8192, 1, 8192, 8192) is None


@linux_only
@pytest.mark.parametrize("kind", ["mapped", "file"])
def test_a_file_that_is_cut_short_in_the_middle_of_a_copy_is_an_error(
    run_python: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    script = """
        import json, mmap, os, sys
        from kda_stream import CopyPlan, FileRange, PayloadError, Span
        path, kind = sys.argv[1:]
        with open(path, "wb") as file:
            file.write(b"a" * (1 << 20))
        descriptor = os.open(path, os.O_RDONLY)
        view = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        pages = mmap.mmap(-1, 2 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                          prot=mmap.PROT_READ)
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        slow = Span(memoryview(pages), len(pages) // 4096, 1, 4096, 0)
        source = view if kind == "mapped" else FileRange(descriptor, 0, 1 << 20)
        last = Span(source, 1, 1 << 20, 1 << 20, slow.nbytes, mapped=kind == "mapped")
        out = memoryview(bytearray(slow.nbytes + last.nbytes))
        cuts = []
        def between():
            if not cuts:
                os.truncate(path, 4096)
            cuts.append(1)
        try:
            CopyPlan((slow, last)).run(out, between=between)
        except PayloadError as error:
            print(json.dumps([len(cuts) > 0, error.code.value]))
    """
    found = run_python(script, tmp_path / "cut.bin", kind)
    assert found == [True, "payload-fault" if kind == "mapped" else "payload-end"]


# --- other threads, pauses, Ctrl-C ----------------------------------------------------------------


@linux_only
@pytest.mark.parametrize("kind", ["memory", "mapped", "file"])
def test_other_threads_run_while_a_copy_does(kind: str, tmp_path: Path) -> None:
    """A thread that counts gets about as much of a processor as the copy, not what is left over."""
    out = memoryview(bytearray(8 << 20))
    if kind == "file":
        (tmp_path / "rows.bin").write_bytes(bytes(16 << 20))
        descriptor = os.open(tmp_path / "rows.bin", os.O_RDONLY)
        plan = CopyPlan((Span(FileRange(descriptor, 0, 16 << 20), 1 << 19, 1, 32, 0),))
    else:
        pages = memoryview(unread_pages(2 << 30))
        plan = CopyPlan((Span(pages, len(pages) // 4096, 8, 4096, 0, mapped=kind == "mapped"),))
    copying, stop = threading.Event(), threading.Event()
    counted: list[float] = []

    def count() -> None:
        copying.wait()
        begin = time.thread_time()
        while not stop.is_set():
            pass
        counted.append(time.thread_time() - begin)

    counter = threading.Thread(target=count)
    counter.start()
    begin = time.thread_time()
    copying.set()
    plan.run(out)
    copied = time.thread_time() - begin
    stop.set()
    counter.join()
    if kind == "file":
        os.close(descriptor)
    assert copied > 0.05, "too short to tell"
    assert counted[0] > 0.4 * copied


def test_two_copies_at_once_do_not_mix() -> None:
    parts = [pattern((8 << 20) + n) for n in range(4)]
    outs = [guarded(len(part)) for part in parts]
    plans = [CopyPlan((span(memoryview(part), len(part)),)) for part in parts]
    threads = [
        threading.Thread(target=plan.run, args=(memoryview(out),))
        for plan, out in zip(plans, outs, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bytes(out) == part for out, part in zip(outs, parts, strict=True)] == [True] * 4


@linux_only
def test_a_long_copy_comes_back_often() -> None:
    times: list[float] = []
    plan = slow_plan(gibibytes=2)
    begin = time.monotonic()
    plan.run(memoryview(bytearray(plan.nbytes)), between=lambda: times.append(time.monotonic()))
    took = time.monotonic() - begin
    assert len(times) >= took / 0.2


@linux_only
def test_what_the_hook_raises_ends_the_copy() -> None:
    calls: list[None] = []

    def between() -> None:
        calls.append(None)
        raise KeyError("enough")

    plan = slow_plan(gibibytes=2)
    with pytest.raises(KeyError, match="enough"):
        plan.run(memoryview(bytearray(plan.nbytes)), between=between)
    assert len(calls) == 1


INTERRUPTED = """
    import json, mmap, os, sys, tempfile, time
    from kda_stream import CopyPlan, FileRange, Span
    kind = sys.argv[1]
    if kind == "file":
        file = tempfile.TemporaryFile()
        file.truncate(256 << 20)
        span = Span(FileRange(file.fileno(), 0, 256 << 20), 16 << 20, 1, 16, 0)
    else:
        pages = mmap.mmap(-1, 16 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                          prot=mmap.PROT_READ)
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        span = Span(memoryview(pages), (16 << 30) // 4096, 8, 4096, 0, mapped=kind == "mapped")
    out = memoryview(bytearray(span.nbytes))
    try:
        print("copying", flush=True)
        CopyPlan((span,)).run(out)
        print(json.dumps({"finished": True, "caught": time.monotonic()}))
    except KeyboardInterrupt:
        print(json.dumps({"finished": False, "caught": time.monotonic()}))
"""


@linux_only
@pytest.mark.parametrize("kind", ["memory", "mapped", "file"])
def test_ctrl_c_ends_a_copy_within_a_tenth_of_a_second(
    interrupt_python: Callable[..., Any], kind: str
) -> None:
    delays = []
    for _ in range(3):  # a busy machine may be late once
        found = interrupt_python(INTERRUPTED, kind)
        assert not found["finished"]
        delays.append(found["delay"])
        if delays[-1] < ANSWERED_SECONDS:
            break
    assert min(delays) < ANSWERED_SECONDS
