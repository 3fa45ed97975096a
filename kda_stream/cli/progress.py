"""How far a long command has come, on one line of stderr."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Final, TextIO

_INTERVAL_SECONDS: Final = 0.1
_QUIET_SECONDS: Final = 30.0
_COLUMNS_DEFAULT: Final = 80


class Progress:
    """Rewrites one line on a terminal; elsewhere writes one now and then, and the last at the end.

    A context manager. Holds to what every terminal has: a carriage return and spaces. Where nobody
    reads it any more it says nothing, and the command goes on.
    """

    def __init__(self) -> None:
        self._stream: TextIO | None = sys.stderr
        self._on_terminal = self._stream is not None and self._stream.isatty()
        self._text = ""
        self._drawn_columns = 0
        self._told_seconds = 0.0 if self._on_terminal else time.monotonic()

    def show(self, text: str) -> None:
        """Take note of how far it is, and tell it when it is time to."""
        self._text = text
        now = time.monotonic()
        quiet_seconds = _INTERVAL_SECONDS if self._on_terminal else _QUIET_SECONDS
        if now - self._told_seconds >= quiet_seconds:
            self._told_seconds = now
            self._tell(end="" if self._on_terminal else "\n")

    def _tell(self, *, end: str) -> None:
        if self._stream is None:
            return
        text = self._text
        if self._on_terminal:
            text = text[: _terminal_columns() - 1]
            text, self._drawn_columns = "\r" + text.ljust(self._drawn_columns), len(text)
        try:
            print(text, end=end, file=self._stream, flush=True)
        except OSError:
            self._stream = None
            _discard(sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._text:
            self._tell(end="\n")


def _discard(stream: TextIO) -> None:
    """Let what is left in its buffer go nowhere, so that the interpreter's end is no error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _terminal_columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS_DEFAULT
    except OSError:
        return _COLUMNS_DEFAULT
