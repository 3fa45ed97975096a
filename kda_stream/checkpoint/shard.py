"""One shard: its identity, its checked header, and a map of it that is made when first needed."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from dataclasses import dataclass
from io import FileIO
from typing import Any, Final

from ..closing import renew_locks_after_fork
from ..errors import ClosedError, ErrorCode, HeaderError, PathError, PayloadError
from ..files import open_regular_file, read_range, refuse_path
from ..foreign import LENGTH_BYTES, foreign_kind
from ..kda.source import Place, RawTensor
from ..limits import FAULT_AROUND_BYTES, HEADER_BYTES_MAX, SNIFF_BYTES
from ..staging.pages import LentMemory, Mapping, is_alive, map_file, map_range
from .header import Header, header_length, parse_header

# Only a file that fails one of these can be something else: the length field of a shard may by
# chance begin like a gzip file.
_FIRST_CHECKS: Final = frozenset(
    {
        ErrorCode.HEADER_FILE_TOO_SHORT,
        ErrorCode.HEADER_LENGTH_OVER_FILE,
        ErrorCode.HEADER_LENGTH_OVER_CAP,
        ErrorCode.HEADER_NOT_UTF8,
        ErrorCode.HEADER_START,
    }
)


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells one state of a file from another: device, inode, size and two times.

    A writer may set the time of the last change of the bytes back, as `cp -p` and `rsync -t` do;
    that of the last change of anything about the file, nobody can.
    """

    device: int
    inode: int
    file_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """The identity that `status` shows."""
        return cls(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )


class Shard:
    """One open shard. Holds no descriptor between calls, and one map from the first `view` on.

    Safe to use from several threads. A `kda.source.PayloadFile`.
    """

    def __init__(self, path: str, identity: FileIdentity, header: Header) -> None:
        self._path = path
        self.renew_locks()
        renew_locks_after_fork(self)
        self._mapping: Mapping | None = None
        self._lent: LentMemory | None = None
        self._own_pages: list[weakref.ref[Any]] = []
        self._closed = False
        self.identity = identity
        self.header = header

    def renew_locks(self) -> None:
        """Make new locks, as in a forked child."""
        self._lock = threading.RLock()  # a destructor may come in between, and close

    @property
    def path(self) -> str:
        """The path that the shard was opened under."""
        return self._path

    @property
    def file_name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self._path)

    def tensor(self, name: str) -> RawTensor:
        """The tensor `name`; raises KeyError when the shard does not hold it."""
        info = self.header.info(name)
        begin = self.header.payload_begin
        return RawTensor(info.dtype, info.shape, Place(self, begin + info.begin, begin + info.end))

    def view(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) of the file, read-only, without a copy; maps the file at first.

        The view is lent until `close()`. Touching a page that cannot be read kills the process:
        copy through a `CopyPlan`, which checks the pages first. Raises `ClosedError` after
        `close()`, `PayloadError` when the file has changed or the map is refused.
        """
        with self._lock:
            self._require_open()
            if self._lent is None:
                with self.open() as file:
                    mapping = map_file(file.fileno(), self.identity.file_bytes, self._path)
                self._lent, self._mapping = mapping.lend(0, mapping.nbytes), mapping
                if self._is_closed():  # by a destructor, in between
                    self.close()
                    self._require_open()
            return self._lent.view(begin, end)

    def _is_closed(self) -> bool:
        return self._closed

    def _require_open(self) -> None:
        if self._is_closed():
            raise ClosedError(
                ErrorCode.CHECKPOINT_CLOSED,
                "the checkpoint is closed",
                path=self._path,
                hint="use its tensors before close(), or copy them",
            )

    def copy_on_write(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) in pages of their own, that go with the view and what it made.

        They are the file's until they are written to; what is written never reaches the file. Needs
        as much commit charge as is written. `close` tells whether any are left. Raises as `view`
        does, and as there touching a page that cannot be read kills the process.
        """
        with self._lock, self.open() as file:
            if begin == end:
                return memoryview(bytearray())
            mapping = map_range(file.fileno(), begin, end, self._path)
            before = mapping.nbytes - (end - begin)
            lent = mapping.lend(before, mapping.nbytes, writable=True)
            self._own_pages = [*filter(is_alive, self._own_pages), lent.buffer_alive]
            return lent.view(0, end - begin)

    def unmap(self, begin: int, end: int) -> None:
        """Take the mapped pages around [begin, end) out of the process; they stay cached."""
        with self._lock:
            if self._mapping is not None:
                self._mapping.drop(begin - FAULT_AROUND_BYTES, end + FAULT_AROUND_BYTES)

    def open(self, *, direct: bool = False) -> FileIO:
        """The unchanged file, open for reading (`direct`: with O_DIRECT); the caller closes it.

        Raises `PayloadError` when the file has changed or is gone, or has no direct reads;
        `ClosedError` after `close()`.
        """
        self._require_open()
        try:
            file = open_regular_file(self._path, direct=direct)
        except PathError as error:
            if direct and error.got == os.strerror(errno.EINVAL):
                raise PayloadError(
                    ErrorCode.DIRECT_REFUSED,
                    "the file system has no direct reads",
                    path=self._path,
                    got=error.got,
                    hint='pass read="auto"',
                ) from None
            if error.code is ErrorCode.PATH_NOT_READABLE:
                raise self._not_opened(error.got) from None
            raise self._gone(error.what) from None
        try:
            self._require_identity(os.fstat(file.fileno()))
        except PayloadError:
            file.close()
            raise
        return file

    def check_unchanged(self) -> None:
        """Raise `PayloadError` when the file was replaced, rewritten or cut since it was opened."""
        try:
            status = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._gone(error.strerror) from None
        except OSError as error:
            raise self._not_opened(error.strerror) from None
        self._require_identity(status)

    def close(self) -> bool:
        """Unmap the file; every view of it ends. Again: no effect.

        Whether it is unmapped: not before the last array that was made of a view is gone, or the
        last `copy_on_write`.
        """
        with self._lock:
            self._closed = True
            mapping, self._mapping = self._mapping, None
            if self._lent is not None:
                self._lent.end()
            is_gone = mapping is None or mapping.close()
            return is_gone and not any(map(is_alive, self._own_pages))

    def _gone(self, what: str | None) -> PayloadError:
        return PayloadError(
            ErrorCode.FILE_CHANGED,
            "the shard can no longer be opened, and could when its header was checked",
            path=self._path,
            got=what,
            hint="it was moved or deleted: open the checkpoint again",
        )

    def _not_opened(self, reason: str | None) -> PayloadError:
        return PayloadError(
            ErrorCode.PAYLOAD_OPEN,
            "the shard cannot be opened now, and could when its header was checked",
            path=self._path,
            got=reason,
            hint="check its permissions, and the limit on open files (ulimit -n)",
        )

    def _require_identity(self, status: os.stat_result) -> None:
        now = FileIdentity.of(status)
        if now != self.identity:
            raise PayloadError(
                ErrorCode.FILE_CHANGED,
                "the shard has changed since its header was checked",
                path=self._path,
                expected=_shown_identity(self.identity),
                got=_shown_identity(now),
                hint="it was replaced, rewritten or cut, or its owner, mode or links were changed: "
                "open the checkpoint again",
            )


def open_shard(path: str, *, header_bytes_max: int = HEADER_BYTES_MAX) -> Shard:
    """Open the shard `path` and check its header; no descriptor is left open.

    Raises `PathError` when it cannot be read, `HeaderError` when its header breaks the format.
    """
    with open_regular_file(path) as file:
        identity = FileIdentity.of(os.fstat(file.fileno()))
        size = identity.file_bytes
        start = b""
        try:
            if hasattr(os, "posix_fadvise"):  # else read-ahead drags payload into memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            start = read_range(file, 0, SNIFF_BYTES)
            length = header_length(start, size, path=path, header_bytes_max=header_bytes_max)
            text = read_range(file, LENGTH_BYTES, LENGTH_BYTES + length)
            header = parse_header(text, size, path=path)
        except HeaderError as error:
            raise _named_if_foreign(error, start) from None
        except OSError as error:
            refuse_path(path, error)
    return Shard(path, identity, header)


def _named_if_foreign(error: HeaderError, start: bytes) -> HeaderError:
    """`error`, or one that says what the file is when its first bytes betray another kind."""
    foreign = foreign_kind(start) if error.code in _FIRST_CHECKS else None
    if foreign is None:
        return error
    kind, hint = foreign
    what = f"not a safetensors file: it looks like {kind}"
    return HeaderError(ErrorCode.HEADER_FOREIGN_FILE, what, path=error.path, hint=hint)


def _shown_identity(identity: FileIdentity) -> str:
    return (
        f"inode {identity.inode} with {identity.file_bytes} bytes, "
        f"changed {_shown_time(identity.mtime_ns)}, touched {_shown_time(identity.ctime_ns)}"
    )


def _shown_time(nanoseconds: int) -> str:
    return f"{nanoseconds // 10**9}.{nanoseconds % 10**9:09d}"
