"""What becomes of an error: an error of the library, and an exit status."""

from __future__ import annotations

from typing import Final

from ..errors import (
    ArgumentError,
    BindError,
    CheckpointError,
    ConfigError,
    ErrorCode,
    KdaStreamError,
    MemoryRefusedError,
    NotFoundError,
    PathError,
)
from .output import Exit

_LAYER_FINDINGS: Final = (
    ErrorCode.LAYERS_NONE,
    ErrorCode.LAYERS_TWO_PREFIXES,
    ErrorCode.LAYERS_MISSING,
)


def known(error: KdaStreamError | OSError | MemoryError) -> KdaStreamError:
    """The error as one of the library's own."""
    if isinstance(error, KdaStreamError):
        return error
    if isinstance(error, OSError):
        what = error.strerror or str(error)
        hint = "check the path, its permissions and the room on its disk"
        return PathError(ErrorCode.PATH_NOT_READABLE, what, path=error.filename, hint=hint)
    hint = "raise the limit on memory"
    return MemoryRefusedError(ErrorCode.MEMORY_REFUSED, "out of memory", hint=hint)


def exit_of(error: KdaStreamError) -> Exit:
    """The exit status of a command that the error has ended."""
    if isinstance(error, (ArgumentError, NotFoundError)):
        return Exit.USAGE
    if isinstance(error, (BindError, ConfigError)) or error.code in _LAYER_FINDINGS:
        return Exit.FINDING
    return Exit.CANNOT_READ


def parts(error: KdaStreamError) -> tuple[KdaStreamError, ...]:
    """The errors that `error` stands for: its `problems` where it has many, else itself alone."""
    return (isinstance(error, CheckpointError) and error.problems) or (error,)
