"""Opening files so that whatever stands under the name is told apart and never blocks."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from io import FileIO
from tempfile import mkstemp
from typing import Final, NoReturn

from .errors import ErrorCode, PathError, PathMissingError
from .limits import READ_PIECE_BYTES

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def open_regular_file(path: str, *, direct: bool = False) -> FileIO:
    """The regular file `path`, open for reading; the caller closes it. `direct`: with O_DIRECT.

    A file object made in one step: where Ctrl-C comes right behind the opening, it is closed all
    the same. Raises `PathError` when the path is absent, is a link to nothing, is no regular file,
    or may not be read; a named pipe is not waited for.
    """
    try:
        _require_regular(path, os.stat(path))
        file = FileIO(path, opener=_open_direct if direct else None)
    except PathError:
        raise
    except (OSError, ValueError) as error:
        refuse_path(path, error)
    try:
        _require_regular(path, os.fstat(file.fileno()))
    except PathError:
        file.close()
        raise
    return file


def _open_direct(path: str, flags: int) -> int:
    if not hasattr(os, "O_DIRECT"):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.open(path, flags | os.O_DIRECT)


def _require_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise PathError(
            ErrorCode.PATH_NOT_REGULAR,
            "it is not a regular file",
            path=path,
            expected="a regular file",
            got=next((word for test, word in _KINDS if test(status.st_mode)), "something else"),
            hint="check what stands under this name",
        )


def refuse_path(path: str, error: OSError | ValueError) -> NoReturn:
    """Raise the `PathError` for a path that the system would not open or list."""
    if os.path.islink(path) and isinstance(error, FileNotFoundError):
        raise PathMissingError(
            ErrorCode.PATH_DANGLING_LINK,
            "it is a link to nothing",
            path=path,
            expected="a link to a file",
            got=f"a link to {os.readlink(path)}",
            hint="the download cache was cleaned or is incomplete: fetch the checkpoint again",
        ) from None
    if isinstance(error, FileNotFoundError):
        raise PathMissingError(
            ErrorCode.PATH_MISSING,
            "there is no such file or directory",
            path=path,
            hint="check the path",
        ) from None
    reason = error.strerror if isinstance(error, OSError) else str(error)
    hint = "check the path and its permissions"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "raise the limit on open files (ulimit -n), or close some"
    elif isinstance(error, OSError) and error.errno == errno.ELOOP:
        hint = "the link points to itself: fetch the file again"
    raise PathError(
        ErrorCode.PATH_NOT_READABLE, "it cannot be read", path=path, got=reason, hint=hint
    ) from None


def read_range(file: FileIO, begin: int, end: int) -> bytes:
    """The bytes [begin, end) of the file; fewer when it ends before."""
    pieces = []
    while begin < end:
        piece = os.pread(file.fileno(), min(end - begin, READ_PIECE_BYTES), begin)
        if not piece:
            break
        pieces.append(piece)
        begin += len(piece)
    return b"".join(pieces)


def read_small_file(path: str | os.PathLike[str], bytes_max: int) -> bytes:
    """The whole of the regular file `path`; raises `PathError` when it is over `bytes_max`."""
    name = os.fsdecode(path)
    with open_regular_file(name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > bytes_max:
            raise PathError(
                ErrorCode.FILE_TOO_LARGE,
                "the file is too large to be what its name says",
                path=name,
                expected=f"at most {bytes_max} bytes",
                got=f"{size} bytes",
                hint="check what stands under this name",
            )
        try:
            return read_range(file, 0, size)
        except OSError as error:
            refuse_path(name, error)


class NewFile:
    """A file that is there whole or not at all, and never in the place of another one.

    Made in the folder of `path` without a name; `finish` gives it its own. In a `with` it is
    discarded at the end, unless it was finished. Where the file system has no files without a name
    it has another one until then, which a kill leaves behind. Raises `PathError`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        folder, name = os.path.split(path)
        if not name or os.path.lexists(path):
            refuse_writing(path, os.strerror(errno.EEXIST if name else errno.EINVAL), _NAME_A_NEW)
        if len(os.fsencode(name)) > _NAME_BYTES_MAX:
            refuse_writing(path, os.strerror(errno.ENAMETOOLONG))
        try:
            self._descriptor, self._unfinished = _new_file(folder or os.curdir)
        except OSError as error:
            refuse_writing(path, error.strerror)

    def finish(self, data: bytes) -> None:
        """Write it, and have it appear under its name."""
        try:
            with open(self._descriptor, "wb", closefd=False) as file:
                file.write(data)
            os.fchmod(self._descriptor, 0o666 & ~umask())
            os.fsync(self._descriptor)
            at = self._unfinished or _descriptor_path(self._descriptor)
            os.link(at, self.path, src_dir_fd=self._descriptor, follow_symlinks=True)
        except OSError as error:
            refuse_writing(self.path, error.strerror)

    def discard(self) -> None:
        """Close it; what is not finished is gone. Again: no effect."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            if self._unfinished is not None:
                with suppress(OSError):
                    os.unlink(self._unfinished)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def _new_file(folder: str) -> tuple[int, str | None]:
    """An empty file in the folder: its descriptor, and its name where it has one."""
    with suppress(OSError, AttributeError):
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        if os.path.exists(_descriptor_path(descriptor)):
            return descriptor, None
        os.close(descriptor)
    return mkstemp(dir=folder, prefix=".unfinished-")


def _descriptor_path(descriptor: int) -> str:
    """What a file without a name is linked from; source: open(2), O_TMPFILE."""
    return f"/proc/self/fd/{descriptor}"


_NAME_BYTES_MAX: Final = 255  # of every file system in use


def umask() -> int:
    """The permissions that files of the process are made without."""
    mask = os.umask(0o077)  # there is no other way to ask
    os.umask(mask)
    return mask


_NAME_A_NEW: Final = "name a file that is not there yet, or take that one away first"
_NAME_ANOTHER: Final = "name a file in a folder that is there, with room, and that you may write to"


def refuse_writing(path: str, reason: str | None, hint: str = _NAME_ANOTHER) -> NoReturn:
    """Raise the `PathError` for a file that cannot be written."""
    raise PathError(
        ErrorCode.PATH_NOT_WRITABLE,
        "it cannot be written",
        path=path,
        got=reason,
        hint=hint,
    ) from None
