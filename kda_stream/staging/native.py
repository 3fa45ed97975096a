"""The only face of the compiled extension: its functions, and its statuses as errors.

The extension holds the copy routine of `csrc/` and the C library's calls for maps and locks. It is
imported when it is first needed, so that `import kda_stream` costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

from ..errors import ErrorCode, KdaStreamError, NotBuiltError, PayloadError, SpanError
from ..limits import PAUSE_NANOSECONDS


class SpanKind(IntEnum):
    """Where a span's bytes are; the numbers are those of `enum kda_kind`."""

    MEMORY = 0
    MAPPED = 1
    FILE = 2


@dataclass(frozen=True, slots=True)
class NativeSpan:
    """One checked copy as the C routine takes it; sizes and offsets are in bytes.

    `data` holds the source of a MEMORY or MAPPED span, `descriptor` and `file_offset` that of a
    FILE span. `rows` rows of `row_bytes`, `row_stride` apart in the source, land densely at
    `destination`. `tensor` and `path` are for errors.
    """

    kind: SpanKind
    data: memoryview | None
    descriptor: int
    file_offset: int
    source_bytes: int
    rows: int
    row_bytes: int
    row_stride: int
    destination: int
    tensor: str
    path: str | None


@cache
def extension() -> tuple[Any, Any]:
    """The extension's (ffi, lib); raises `NotBuiltError` when it was not compiled."""
    try:
        from .. import _native
    except ImportError as error:
        raise NotBuiltError(
            ErrorCode.NOT_BUILT,
            "the compiled part kda_stream._native cannot be imported",
            path=os.path.dirname(os.path.dirname(__file__)),
            got=str(error),
            hint="install the package (pip install .) and start Python outside its source tree, "
            "or install it in place (pip install -e .); both need a C compiler",
        ) from error
    return _native.ffi, _native.lib


# Copies ------------------------------------------------------------------------------------------


def copy_spans(
    spans: Sequence[NativeSpan], destination: memoryview, between: Callable[[], None] | None
) -> None:
    """Check every span, then copy them all into `destination`.

    The GIL is released. One call into C does it all, unless it takes longer than
    `PAUSE_NANOSECONDS`: then it comes back, signals are answered, `between` is called, and it goes
    on where it was. What either raises ends the copy. Raises `SpanError` when a span does not fit
    (nothing is written), `PayloadError` when a source cannot be read.
    """
    ffi, lib = extension()
    cursor = ffi.new("kda_cursor *")
    # Left to the collector, a pointer into a memoryview crashes Python before 3.12.4 (gh-77894):
    # an error's traceback keeps this frame, so the pointers end with it.
    with ExitStack() as held:

        def pointer(buffer: memoryview | bytes, *, writable: bool = False) -> Any:
            array = ffi.from_buffer("unsigned char[]", buffer, require_writable=writable)
            return held.enter_context(array)

        target = pointer(destination, writable=True)
        table = ffi.new("kda_span[]", len(spans))
        for row, span in zip(table, spans, strict=True):
            source = pointer(b"" if span.data is None else span.data)
            try:
                _set_row(row, span, source)
            except OverflowError as error:
                raise _refused(span, str(error), destination.nbytes) from None
        while True:
            status = lib.kda_spans_copy(
                table, len(spans), target, destination.nbytes, PAUSE_NANOSECONDS, cursor
            )
            if status == lib.KDA_OK:
                return
            if status != lib.KDA_PAUSED:
                raise _copy_error(status, cursor, spans, destination.nbytes)
            if between is not None:
                between()


def _set_row(row: Any, span: NativeSpan, source: Any) -> None:
    row.kind = span.kind
    row.fd = span.descriptor
    row.source = source
    row.file_offset = span.file_offset
    row.source_bytes = span.source_bytes
    row.rows = span.rows
    row.row_bytes = span.row_bytes
    row.row_stride = span.row_stride
    row.destination = span.destination


def _copy_error(
    status: int, cursor: Any, spans: Sequence[NativeSpan], destination_bytes: int
) -> KdaStreamError:
    _, lib = extension()
    span = spans[cursor.span] if cursor.span < len(spans) else None
    tensor = None if span is None else span.tensor
    path = None if span is None else span.path
    reason = os.strerror(cursor.error) if cursor.error else None
    if status == lib.KDA_SOURCE_FAULT:
        return PayloadError(
            ErrorCode.PAYLOAD_FAULT,
            "a page of the mapped shard cannot be read",
            path=path,
            tensor=tensor,
            got=reason,
            hint="the shard was cut short after it was opened, or its disk failed: "
            "fetch it again and open the checkpoint anew",
        )
    if status == lib.KDA_FILE_END:
        return PayloadError(
            ErrorCode.PAYLOAD_END,
            "the shard ends before the tensor does",
            path=path,
            tensor=tensor,
            hint="it was cut short after it was opened: "
            "fetch it again and open the checkpoint anew",
        )
    if status == lib.KDA_READ_FAILED:
        return PayloadError(
            ErrorCode.PAYLOAD_READ,
            "the shard cannot be read",
            path=path,
            tensor=tensor,
            got=reason,
            hint="check the disk or the network file system",
        )
    if status == lib.KDA_NO_POPULATE:
        return PayloadError(
            ErrorCode.POPULATE_UNSUPPORTED,
            "mapped pages cannot be checked before they are copied here",
            path=path,
            tensor=tensor,
            expected="Linux 5.14 or newer",
            hint='pass via="read"',
        )
    faults = {
        lib.KDA_SIZE_OVERFLOW: "its size overflows",
        lib.KDA_STRIDE_SHORT: "its rows overlap",
        lib.KDA_SOURCE_SHORT: "its rows reach past its source",
        lib.KDA_DESTINATION_SHORT: "its rows reach past the destination",
        lib.KDA_DESTINATION_OVERLAP: "it lands on the span before it",
        lib.KDA_SOURCE_OVERLAP: "its source lies in the destination",
    }
    return _refused(span, faults.get(status, "it is malformed"), destination_bytes)


def _refused(span: NativeSpan | None, why: str, destination_bytes: int) -> SpanError:
    return SpanError(
        ErrorCode.SPAN_REFUSED,
        f"a span was refused and nothing was written: {why}",
        path=None if span is None else span.path,
        tensor=None if span is None else span.tensor,
        expected=f"a span within its source and within {destination_bytes} bytes of destination",
        got=None if span is None else _span_text(span),
        hint="the plan that was handed in is wrong",
    )


def _span_text(span: NativeSpan) -> str:
    return (
        f"{span.rows} rows of {span.row_bytes} bytes, {span.row_stride} apart, out of "
        f"{span.source_bytes} bytes, to offset {span.destination}"
    )
