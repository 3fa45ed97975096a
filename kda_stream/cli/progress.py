"""How far a long command has come, on one line of stderr."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Final

_INTERVAL_SECONDS: Final = 0.1
_QUIET_SECONDS: Final = 30.0
_COLUMNS_DEFAULT: Final = 80


class Progress:
    """Rewrites one line on a terminal; elsewhere writes one now and then, and the last at the end.

    A context manager. Holds to what every terminal has: a carriage return and spaces.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._on_terminal = self._stream is not None and self._stream.isatty()
        self._text = ""
        self._drawn_columns = 0
        self._drawn_seconds = 0.0 if self._on_terminal else time.monotonic()

    def show(self, text: str) -> None:
        """Take note of how far it is, and tell it when it is time to."""
        self._text = text
        now = time.monotonic()
        if self._on_terminal and now - self._drawn_seconds >= _INTERVAL_SECONDS:
            self._drawn_seconds = now
            self._draw()
        if not self._on_terminal and now - self._drawn_seconds >= _QUIET_SECONDS:
            self._drawn_seconds = now
            print(text, file=self._stream, flush=True)

    def _draw(self) -> None:
        text = self._text[: _terminal_columns() - 1]
        print("\r" + text.ljust(self._drawn_columns), end="", file=self._stream, flush=True)
        self._drawn_columns = len(text)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stream is None or not self._text:
            return
        if self._on_terminal:
            self._draw()
            print(file=self._stream, flush=True)
        else:
            print(self._text, file=self._stream, flush=True)


def _terminal_columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS_DEFAULT
    except OSError:
        return _COLUMNS_DEFAULT
