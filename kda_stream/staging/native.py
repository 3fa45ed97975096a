"""The only face of the compiled extension: its statuses as errors, its memory as views.

The extension holds the copy routine of `csrc/` and the C library's calls for maps and locks. It is
imported when it is first needed, so that `import kda_stream` costs nothing.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, partial
from typing import Any, Final

from ..errors import (
    ClosedError,
    ErrorCode,
    KdaStreamError,
    MemoryRefusedError,
    NotBuiltError,
    PayloadError,
    SpanError,
)
from ..limits import PAUSE_NANOSECONDS

PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")


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
            row.kind = span.kind
            row.fd = span.descriptor
            row.source = pointer(b"" if span.data is None else span.data)
            row.file_offset = span.file_offset
            row.source_bytes = span.source_bytes
            row.rows = span.rows
            row.row_bytes = span.row_bytes
            row.row_stride = span.row_stride
            row.destination = span.destination
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
    return SpanError(
        ErrorCode.SPAN_REFUSED,
        "a span was refused and nothing was written: " + faults.get(status, "it is malformed"),
        path=path,
        tensor=tensor,
        expected=f"a span within its source and within {destination_bytes} bytes of destination",
        got=None if span is None else _span_text(span),
        hint="the plan that was handed in is wrong",
    )


def _span_text(span: NativeSpan) -> str:
    return (
        f"{span.rows} rows of {span.row_bytes} bytes, {span.row_stride} apart, out of "
        f"{span.source_bytes} bytes, to offset {span.destination}"
    )


# Maps --------------------------------------------------------------------------------------------


class Mapping:
    """Pages of this process, and every view of them that was lent. Safe to use from threads.

    The pages go when `close` was called and nothing points into them any more.
    """

    def __init__(self, pointer: Any, nbytes: int, *, writable: bool) -> None:
        """Own the map of `nbytes` bytes at `pointer`."""
        ffi, lib = extension()
        self.nbytes = nbytes
        owner = ffi.gc(ffi.cast("unsigned char *", pointer), partial(_unmap, lib, nbytes))
        self._owner_alive = weakref.ref(owner)
        self._pointer: Any = owner
        memory = memoryview(ffi.buffer(owner, nbytes))
        self._memory: memoryview | None = memory if writable else memory.toreadonly()
        self._lent: dict[int, weakref.ref[memoryview]] = {}
        self._lock = threading.Lock()

    def view(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end), lent until `close`; raises `ClosedError` after it."""
        with self._lock:
            if self._memory is None:
                raise ClosedError(ErrorCode.CHECKPOINT_CLOSED, "the memory was given back")
            view = self._memory[begin:end]
            key = id(view)
            self._lent[key] = weakref.ref(view, lambda _: self._lent.pop(key, None))
            return view

    def lock(self) -> int:
        """Lock the pages into memory; 0, or the errno of the refusal."""
        ffi, lib = extension()
        return 0 if lib.mlock(self._pointer, self.nbytes) == 0 else int(ffi.errno)

    def unlock(self) -> None:
        """Let the pages be swapped again."""
        extension()[1].munlock(self._pointer, self.nbytes)

    def drop(self, begin: int, end: int) -> None:
        """Take the pages of [begin, end) out of the process; of a file's map, they stay cached.

        The next touch brings them back. For a map of a file only: elsewhere the bytes would go.
        """
        lib = extension()[1]
        first = begin // PAGE_BYTES * PAGE_BYTES
        with self._lock:
            if self._pointer is not None:
                lib.madvise(self._pointer + first, end - first, lib.MADV_DONTNEED)

    def close(self) -> bool:
        """End every lent view and let the pages go; calling it again changes nothing.

        Whether they are gone: False when an array made from a view, or a copy that is running,
        still points into them; then they go with the last of these.
        """
        with self._lock:
            for lent in list(self._lent.values()):
                view = lent()
                if view is not None:
                    release_view(view)
            if self._memory is not None:
                self._memory.release()
            self._memory = self._pointer = None
        return self._owner_alive() is None


def release_view(view: memoryview) -> bool:
    """End `view`, so that using it raises ValueError; False when an array still points into it."""
    try:
        view.release()
    except BufferError:
        return False
    return True


def _unmap(lib: Any, nbytes: int, pointer: Any) -> None:
    lib.munmap(pointer, nbytes)


def map_file(descriptor: int, file_bytes: int, path: str) -> Mapping:
    """Map a file, read-only and shared, so that it needs no commit charge and no descriptor.

    Raises `PayloadError` when the system refuses, as under a limit on address space.
    """
    ffi, lib = extension()
    pointer = lib.mmap(ffi.NULL, file_bytes, lib.PROT_READ, lib.MAP_SHARED, descriptor, 0)
    if pointer == lib.MAP_FAILED:
        raise PayloadError(
            ErrorCode.MAP_REFUSED,
            "the shard cannot be mapped",
            path=path,
            got=os.strerror(ffi.errno),
            hint='raise the limit on address space (ulimit -v), or pass via="read"',
        )
    return Mapping(pointer, file_bytes, writable=False)


def map_anonymous(nbytes: int) -> Mapping:
    """Fresh zeroed pages, private and writable, at least `nbytes` of them and at most a page more.

    Raises `MemoryRefusedError` when the system refuses.
    """
    ffi, lib = extension()
    rounded = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    flags = lib.MAP_PRIVATE | lib.MAP_ANONYMOUS
    pointer = lib.mmap(ffi.NULL, rounded, lib.PROT_READ | lib.PROT_WRITE, flags, -1, 0)
    if pointer == lib.MAP_FAILED:
        raise MemoryRefusedError(
            ErrorCode.MEMORY_REFUSED,
            "the system refuses the memory for the slots",
            expected=f"{rounded} bytes",
            got=os.strerror(ffi.errno),
            hint="use fewer slots, or raise the limit on memory",
        )
    return Mapping(pointer, rounded, writable=True)


def lock_refusal(number: int) -> str:
    """Why mlock refused, in words, for the errno `number`."""
    reasons = {
        errno.ENOMEM: "more than the limit on locked memory",
        errno.EPERM: "locking memory is not permitted",
        errno.EAGAIN: "the kernel could not lock all of it",
    }
    return reasons.get(number, os.strerror(number))
