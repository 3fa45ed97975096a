"""Ctrl-C: how it ends the command, whatever the command is doing, in one line."""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import FrameType
    from typing import TextIO

INTERRUPTED: Final = 130
_AGAIN_SECONDS: Final = 0.01
_IMPORTING: Final = "<frozen importlib"


def begin() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt wherever that is certain to be raised on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, _interrupt)
        sys.unraisablehook = _tell_unraisable


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Within an import ask again soon: what is raised there may come out as another error."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            _ask_again()
            return
        frame = frame.f_back
    # One is enough: another, while the first one ends the command, would be a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)
    raise KeyboardInterrupt


def _tell_unraisable(unraisable: UnraisableHookArgs) -> None:
    """Python goes on where nothing can be raised, as in a destructor: ask again soon."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _ask_again()
    else:
        sys.__unraisablehook__(unraisable)


def _ask_again() -> None:
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)


def ignore() -> None:
    """From here on Ctrl-C does nothing: the command is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


def end_process() -> NoReturn:
    """End an interrupted process. What it held was given back on the way here.

    At once, so that nothing more comes on stdout, whatever its buffer holds; and because after an
    interrupt within `exec`, as in the making of a dataclass, Python would end by the signal.
    """
    ignore()
    os._exit(tell())


def takes_a_line(output: TextIO) -> bool:
    """Whether a line can be written there without waiting for who reads it."""
    poll = select.poll()
    try:
        poll.register(output.fileno(), select.POLLOUT)
    except (OSError, ValueError):  # it is in memory
        return True
    return bool(poll.poll(0))


def tell() -> int:
    """Say that the command was interrupted, unless nobody reads it; the exit status."""
    with suppress(OSError):
        if sys.stderr is not None and takes_a_line(sys.stderr):
            over_key = "\r" if sys.stderr.isatty() else ""  # the terminal has drawn ^C
            print(f"{over_key}interrupted", file=sys.stderr, flush=True)
    return INTERRUPTED
