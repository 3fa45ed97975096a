"""Tensors of 2, 4 and 8 GiB: sizes and offsets that do not fit 31 or 32 bits, on every path."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kda_stream import CopyPlan, FileRange, Span
from kda_stream.staging.pages import map_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sparse files and shared maps"),
]

GIB = 1024**3
MIB = 1024**2
PAGE = mmap.PAGESIZE
HEAD_BYTES = 777
"""What stands before the tensor in its file, so that nothing lies at a page's border."""


def marks(nbytes: int) -> dict[int, bytes]:
    """Bytes to be found at offsets of the tensor: at its ends, and around each border."""
    borders = [0, *(n * GIB for n in (1, 2, 4, 6, 8) if n * GIB <= nbytes), nbytes]
    borders.append(0x7FFF_F000)  # where Linux ends a single read
    found = {}
    for border in borders:
        for offset in (border - 3 * PAGE - 5, border - 8, border + 1, border + 2 * PAGE + 3):
            if 0 <= offset <= nbytes - 8:
                found[offset] = (offset ^ 0x5A5A_0000_1111).to_bytes(8, "big")
    found[nbytes - 8] = b"the end!"
    return found


@pytest.fixture(scope="module", params=[2, 4, 8], ids="{} GiB".format)
def tensor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """(path, size) of a sparse file with one tensor behind `HEAD_BYTES`, and 13 bytes more."""
    nbytes = request.param * GIB + 7 * PAGE + 13
    path = tmp_path_factory.mktemp("large") / "file"
    with path.open("wb") as file:
        file.truncate(HEAD_BYTES + nbytes + 13)
        for offset, mark in marks(nbytes).items():
            os.pwrite(file.fileno(), mark, HEAD_BYTES + offset)
        os.fsync(file.fileno())
    yield path, nbytes
    path.unlink()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
MAP_FIXED = 0x10


class Repeated:
    """Writable address space for `nbytes` bytes over a few MiB of memory.

    Windows that hold a mark have memory of their own; all others are the same one, written over and
    over.
    """

    WINDOW_BYTES = 2 * MIB

    def __init__(self, nbytes: int) -> None:
        self._whole = HEAD_BYTES + nbytes
        size, windows = self.WINDOW_BYTES, -(-self._whole // self.WINDOW_BYTES)
        marked = {(HEAD_BYTES + at + n) // size for at in marks(nbytes) for n in (0, 7)}
        places = {window: n for n, window in enumerate(sorted(marked), start=1)}
        memory = os.memfd_create("repeated")
        os.truncate(memory, (1 + len(places)) * size)
        protection, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
        self._bytes = windows * size
        self._start = _libc.mmap(None, self._bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        for window in range(windows):
            at, place = self._start + window * size, places.get(window, 0) * size
            found = _libc.mmap(at, size, protection, shared | MAP_FIXED, memory, place)
            assert found == at, os.strerror(ctypes.get_errno())
        os.close(memory)
        array = (ctypes.c_ubyte * nbytes).from_address(self._start + HEAD_BYTES)
        self.view = memoryview(array).cast("B")

    def __enter__(self) -> Repeated:
        return self

    def __exit__(self, *_: object) -> None:
        self.view.release()
        _libc.munmap(self._start, self._bytes)


def spans_of(path: Path, kind: str, parts: list[tuple[int, int]]) -> tuple[list[Span], Any]:
    """A span for each (offset in the tensor, bytes), one after the other in the destination."""
    flags = os.O_RDONLY | (os.O_DIRECT if kind == "direct" else 0)
    descriptor = os.open(path, flags)
    mapping = map_file(descriptor, path.stat().st_size, str(path)) if kind == "mapped" else None
    view = mapping.lend(0, mapping.nbytes).view(0, mapping.nbytes) if mapping else None
    spans, at = [], 0
    for offset, nbytes in parts:
        begin = HEAD_BYTES + offset
        source: Any = FileRange(descriptor, begin, nbytes, 4096 if kind == "direct" else 0)
        if view is not None:
            source = view[begin : begin + nbytes]
        spans.append(Span(source, 1, nbytes, nbytes, at, kind == "mapped", tensor="t"))
        at += nbytes
    return spans, (descriptor, view)


# In this order: what was read is in the page cache, and a map of it is quickly copied.
each_kind = pytest.mark.parametrize("kind", ["positional", "mapped", "direct"])


@each_kind
def test_the_bytes_around_every_border_are_the_right_ones(tensor: Any, kind: str) -> None:
    """Ranges that begin before a border and end behind it; offsets past 2^31 and 2^32."""
    path, nbytes = tensor
    at = sorted({offset // MIB for offset in marks(nbytes)})
    parts = [(n * MIB, min(MIB + 9, nbytes - n * MIB)) for n in at]
    parts = [(offset, size - size % 7) for offset, size in parts if size > 7]
    spans, kept = spans_of(path, kind, parts)
    out = bytearray(b"\xa5" * sum(size for _, size in parts))
    CopyPlan(tuple(spans)).run(memoryview(out), threads=2)
    seen = 0
    for span, (offset, size) in zip(spans, parts, strict=True):
        got = bytes(out[span.destination : span.destination + size])
        expected = bytearray(size)
        for mark, text in marks(nbytes).items():
            for n, byte in enumerate(text):
                if offset <= mark + n < offset + size:
                    expected[mark + n - offset] = byte
                    seen += 1
        assert got == expected, offset
    assert seen >= 8 * len(marks(nbytes)) - 64
    os.close(kept[0])


@each_kind
def test_one_span_of_the_whole_tensor_is_copied_to_its_last_byte(tensor: Any, kind: str) -> None:
    """Into address space of that size: a window of memory that is mapped there again and again."""
    path, nbytes = tensor
    if kind != "direct" and nbytes // GIB == 4:
        pytest.skip("those of 2 and 8 GiB say as much, and this much page cache takes its time")
    spans, kept = spans_of(path, kind, [(0, nbytes)])
    with Repeated(nbytes) as memory:
        CopyPlan(tuple(spans)).run(memory.view, threads=2)
        for offset, text in marks(nbytes).items():
            assert bytes(memory.view[offset : offset + len(text)]) == text, offset
    os.close(kept[0])


@pytest.mark.parametrize("kind", ["positional", "mapped"])
def test_rows_that_lie_gibibytes_apart_are_gathered(tensor: Any, kind: str) -> None:
    path, nbytes = tensor
    stride = nbytes // 2 - 4096
    spans, kept = spans_of(path, kind, [(0, nbytes)])
    span = spans[0]
    rows = Span(span.source, 3, 4096, stride, 0, span.mapped)
    out = bytearray(3 * 4096)
    CopyPlan((rows,)).run(memoryview(out))
    with path.open("rb") as file:
        expected = b"".join(
            os.pread(file.fileno(), 4096, HEAD_BYTES + n * stride) for n in range(3)
        )
    assert out == expected
    os.close(kept[0])
