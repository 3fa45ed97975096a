"""`Span` and `CopyPlan`: which bytes go where, built here, checked and run in C."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .native import NativeSpan, SpanKind, copy_spans


@dataclass(frozen=True, slots=True)
class FileRange:
    """`nbytes` bytes from `offset` of an open file."""

    descriptor: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """`rows` rows of `row_bytes` bytes, `row_stride` apart in `source`, to offset `destination`.

    `source` is memory, or a range of an open file; `mapped` says that the memory is a file's map,
    whose pages have to be asked for before they are touched. The rows land densely. `tensor` and
    `path` are for errors. Checked when its plan runs, not before.
    """

    source: memoryview | FileRange
    rows: int
    row_bytes: int
    row_stride: int
    destination: int
    mapped: bool = False
    tensor: str = ""
    path: str | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that the span writes."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Spans in ascending order of destination, which is shared by all of them."""

    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that the plan writes."""
        return sum(span.nbytes for span in self.spans)

    def run(self, destination: memoryview, *, between: Callable[[], None] | None = None) -> None:
        """Check every span against its source and `destination`, then copy them all.

        The GIL is released meanwhile. Now and then (every 50 ms) signals are answered and
        `between` is called; what it raises ends the copy. Raises `SpanError` before anything is
        written, or `PayloadError` when a source fails on the way.
        """
        copy_spans(list(_native_spans(self.spans)), destination, between)


def _native_spans(spans: Iterable[Span]) -> Iterable[NativeSpan]:
    for span in spans:
        source = span.source
        common = (
            span.rows,
            span.row_bytes,
            span.row_stride,
            span.destination,
            span.tensor,
            span.path,
        )
        if isinstance(source, FileRange):
            yield NativeSpan(
                SpanKind.FILE, None, source.descriptor, source.offset, source.nbytes, *common
            )
        else:
            kind = SpanKind.MAPPED if span.mapped else SpanKind.MEMORY
            yield NativeSpan(kind, source, -1, 0, source.nbytes, *common)
