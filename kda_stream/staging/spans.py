"""`Span` and `CopyPlan`: which bytes go where, built here, checked and run in C."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ClosedError, ErrorCode
from ..limits import PAUSE_NANOSECONDS
from .native import copy_error, extension, span_error


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
    tensor: str | None = None
    path: str | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that the span writes."""
        return self.rows * self.row_bytes

    def __str__(self) -> str:
        return (
            f"{self.rows} rows of {self.row_bytes} bytes, {self.row_stride} apart, out of "
            f"{self.source.nbytes} bytes, to offset {self.destination}"
        )


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

        The GIL is released. One call into C does it all, unless it takes longer than
        `PAUSE_NANOSECONDS`: then it comes back, signals are answered, `between` is called, and it
        goes on where it was; what either raises ends the copy. Raises `SpanError` before anything
        is written, or `PayloadError` when a source fails on the way.
        """
        ffi, lib = extension()
        cursor = ffi.new("kda_cursor *")
        table = ffi.new("kda_span[]", len(self.spans))
        kept: list[memoryview] = []  # so that no memory goes under the copy
        try:
            target = _pointer(destination, kept, writable=True)
            for row, span in zip(table, self.spans, strict=True):
                _fill_row(row, span, kept)
            status = lib.KDA_PAUSED
            while status == lib.KDA_PAUSED:
                status = lib.kda_spans_copy(
                    table, len(table), target, destination.nbytes, PAUSE_NANOSECONDS, cursor
                )
                if status == lib.KDA_PAUSED and between is not None:
                    between()
        finally:
            kept.clear()
        if status != lib.KDA_OK:
            at = self.spans[cursor.span]
            raise copy_error(status, cursor.error, tensor=at.tensor, path=at.path, span=str(at))


def _fill_row(row: Any, span: Span, kept: list[memoryview]) -> None:
    """Set a `kda_span` to `span`; raises `SpanError` for what it cannot hold."""
    lib = extension()[1]
    source = span.source
    try:
        if isinstance(source, FileRange):
            row.kind, row.fd, row.file_offset = lib.KDA_FILE, source.descriptor, source.offset
        else:
            row.kind = lib.KDA_MAPPED if span.mapped else lib.KDA_MEMORY
            row.source = _pointer(source, kept)
        row.source_bytes = source.nbytes
        row.rows = span.rows
        row.row_bytes = span.row_bytes
        row.row_stride = span.row_stride
        row.destination = span.destination
    except (OverflowError, TypeError, BufferError) as error:
        raise span_error(str(error), span.tensor, span.path, str(span)) from None
    except ValueError as error:  # the source's memory was given back meanwhile
        raise ClosedError(
            ErrorCode.MEMORY_GIVEN_BACK,
            "the source was closed before it was copied",
            path=span.path,
            tensor=span.tensor,
            got=str(error),
            hint="close the checkpoint after the load",
        ) from None


def _pointer(buffer: memoryview, kept: list[memoryview], *, writable: bool = False) -> Any:
    """A bare pointer to the bytes of `buffer`, which a slice of it in `kept` keeps alive.

    cffi's own pointer into a buffer lives for one expression and gets no name. A traceback would
    keep it, and where the collector meets it there with its memoryview, Python before 3.12.4
    crashes (gh-77894); Ctrl-C can make a traceback of any line.
    """
    ffi, _ = extension()
    kept.append(memoryview(buffer)[:])
    return ffi.cast(
        "unsigned char *",
        ffi.cast(
            "uintptr_t", ffi.from_buffer("unsigned char[]", kept[-1], require_writable=writable)
        ),
    )
