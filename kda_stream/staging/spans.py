"""`Span` and `CopyPlan`: which bytes go where, built here, checked and run in C."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ..errors import ClosedError, ErrorCode
from ..limits import BOUNCE_BYTES, PAUSE_NANOSECONDS
from .native import copy_error, extension, span_error
from .pages import Mapping, map_anonymous

_NO_LIMIT: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class FileRange:
    """`nbytes` bytes from `offset` of an open file, both in bytes; the caller closes `descriptor`.

    With `block_bytes` the file was opened with O_DIRECT: it is read in whole blocks of that size, a
    power of two from 512 to 65,536, past the page cache.
    """

    descriptor: int
    offset: int
    nbytes: int
    block_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """`rows` rows of `row_bytes` bytes, `row_stride` apart in `source`, to offset `destination`.

    `source` is memory, or a range of an open file; `mapped` says that the memory is a file's map,
    whose pages have to be asked for before they are touched, and leave the process after that. The
    rows land densely. `tensor` and `path` are for errors; where several tensors lie in the span one
    after the other, `starts` has (bytes before it, name) of each. Checked when its plan runs, not
    before.
    """

    source: memoryview | FileRange
    rows: int
    row_bytes: int
    row_stride: int
    destination: int
    mapped: bool = False
    tensor: str | None = None
    path: str | None = None
    starts: tuple[tuple[int, str], ...] = ()

    def tensor_at(self, done: int) -> str | None:
        """The name of the tensor that the byte `done` of the span belongs to."""
        at = bisect_right(self.starts, done, key=lambda start: start[0])
        return self.starts[at - 1][1] if at else self.tensor

    @property
    def nbytes(self) -> int:
        """The bytes that the span writes."""
        return self.rows * self.row_bytes

    def __str__(self) -> str:
        return (
            f"{self.rows} rows of {self.row_bytes} bytes, {self.row_stride} apart, out of "
            f"{self.source.nbytes} bytes, to offset {self.destination}"
        )


class CopyStop:
    """A flag that ends a running copy, from any thread."""

    def __init__(self) -> None:
        self.pointer = extension()[0].new("int *")

    def set(self) -> None:
        """Have the copies that watch it begin no further piece."""
        self.pointer[0] = 1

    @property
    def is_set(self) -> bool:
        """Whether `set` was called."""
        return bool(self.pointer[0])


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Spans in ascending order of destination, which is shared by all of them."""

    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that the plan writes."""
        return sum(span.nbytes for span in self.spans)

    def run(
        self,
        destination: memoryview,
        *,
        threads: int = 1,
        between: Callable[[], None] | None = None,
        stop: CopyStop | None = None,
    ) -> None:
        """Check every span against its source and `destination`, then copy them all.

        `destination` is writable, contiguous memory of the caller's; sources and destination are
        held until the copy ends.
        The GIL is released, and `threads` threads copy, which end with it. One call into C does it
        all, but that in the main thread, or with `between`, it comes back every
        `PAUSE_NANOSECONDS`: signals are answered, `between` is called, and it goes on where it was;
        what either raises ends the copy. So does `stop`, with a `ClosedError`. Raises `SpanError`
        before anything is written, or `PayloadError` when a source fails on the way.
        """
        ffi, lib = extension()
        cursor = ffi.new("kda_cursor *")
        table = ffi.new("kda_span[]", len(self.spans))
        means = ffi.new("kda_means *")
        means.threads = threads
        pauses = between is not None or threading.current_thread() is threading.main_thread()
        means.nanoseconds_max = PAUSE_NANOSECONDS if pauses else _NO_LIMIT
        kept: list[memoryview] = []  # so that no memory goes under the copy
        bounce: Mapping | None = None
        try:
            target = _pointer(destination, kept, writable=True)
            for row, span in zip(table, self.spans, strict=True):
                _fill_row(row, span, kept)
            block_bytes = max((_block_bytes(span) for span in self.spans), default=0)
            if block_bytes:
                each = self._bounce_bytes(block_bytes, int(ffi.cast("uintptr_t", target)))
                bounce = map_anonymous(each * threads)
                bounce.prefer_huge_pages()
                means.block_bytes, means.bounce_bytes = block_bytes, bounce.nbytes
                means.bounce = bounce.pointer
            if stop is not None:
                means.stop = stop.pointer
            status = lib.KDA_PAUSED
            while status == lib.KDA_PAUSED:
                status = lib.kda_spans_copy(
                    table, len(table), target, destination.nbytes, means, cursor
                )
                if status == lib.KDA_PAUSED:
                    if stop is not None and stop.is_set:
                        raise ClosedError(
                            ErrorCode.STREAM_STOPPED,
                            "the copy was stopped",
                            hint="its CopyStop was set: make a new one to copy again",
                        )
                    if between is not None:
                        between()
        finally:
            kept.clear()
            if bounce is not None:
                bounce.close()
        if status != lib.KDA_OK:
            at = self.spans[cursor.span]
            name = at.tensor_at(cursor.done)
            raise copy_error(
                status,
                cursor.error,
                tensor=name,
                path=at.path,
                span=str(at),
                direct=_block_bytes(at) > 0,
            )

    def _bounce_bytes(self, block_bytes: int, target: int) -> int:
        """What a thread needs: a block for the ends of spans, more for spans that do not land."""
        longest = max(
            (
                span.nbytes
                for span in self.spans
                if isinstance(span.source, FileRange)
                and (target + span.destination - span.source.offset) % block_bytes
            ),
            default=0,
        )
        return min(-(-longest // block_bytes) * block_bytes + block_bytes, BOUNCE_BYTES)


def _block_bytes(span: Span) -> int:
    return span.source.block_bytes if isinstance(span.source, FileRange) else 0


def _fill_row(row: Any, span: Span, kept: list[memoryview]) -> None:
    """Set a `kda_span` to `span`; raises `SpanError` for what it cannot hold."""
    lib = extension()[1]
    source = span.source
    try:
        if isinstance(source, FileRange):
            row.kind = lib.KDA_DIRECT if source.block_bytes else lib.KDA_FILE
            row.fd, row.file_offset = source.descriptor, source.offset
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
