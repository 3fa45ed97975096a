"""Ctrl-C: how it ends the command, whatever the command is doing, in one line."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from .terminal import discard

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

STATUS: Final = 130
_AGAIN_SECONDS: Final = 0.01


def begin() -> None:
    """From here on no Ctrl-C is lost, as it would be in a destructor or the like."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        sys.unraisablehook = _raise_again


def _raise_again(unraisable: UnraisableHookArgs) -> None:
    """Python tells what comes up where nothing can be raised, and goes on: ask again soon."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(unraisable)


def end(*, was_interrupted: bool) -> None:
    """From here on Ctrl-C does nothing: the command is over.

    Where it was interrupted, nothing more comes on stdout, whatever its buffer holds.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    if was_interrupted:
        discard(sys.stdout)


def tell() -> int:
    """Say that the command was interrupted; the exit status."""
    with suppress(OSError):
        if sys.stderr is not None:
            print("interrupted", file=sys.stderr, flush=True)
    return STATUS
