"""How far a long command has come, on stderr: the one place that puts that in words."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final, TextIO

from ..closing import finish_first
from .interrupts import takes_a_line
from .output import plural, size
from .terminal import Line, discard, is_terminal

_DRAW_SECONDS: Final = 0.1
_TELL_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Figures:
    """How far it is: bytes of all there are, in the seconds since it began, and layers where known.

    `layers` and `layers_total` are None for what does not go layer by layer.
    """

    bytes: int
    bytes_total: int
    seconds: float
    layers: int | None = None
    layers_total: int | None = None

    @property
    def fraction(self) -> float:
        """How much of it is done, from 0 to 1."""
        return min(self.bytes / self.bytes_total, 1.0) if self.bytes_total else 1.0

    def facts(self) -> list[str]:
        """Each fact in words, what matters most first."""
        rate = self.bytes / self.seconds if self.seconds > 0 else 0.0
        facts = [f"{size(self.bytes)} of {size(self.bytes_total)}", f"{rate / 1e9:.3f} GB/s"]
        if self.layers is not None and self.layers_total is not None:
            facts.insert(0, f"{self.layers:,} of {plural(self.layers_total, 'layer')}")
        if rate:
            facts.append(f"{_time_text((self.bytes_total - self.bytes) / rate)} left")
        return facts

    def texts(self) -> list[str]:
        """All facts on one line, then fewer and fewer of them, and last how much of it is done."""
        facts = self.facts()
        shorter = [", ".join(facts[:count]) for count in range(len(facts), 0, -1)]
        return [*shorter, f"{100 * self.fraction:.0f} %"]


def _time_text(seconds: float) -> str:
    seconds = max(seconds, 0.0)
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60:,} h {minutes % 60} min"


class Progress:
    """Draws one line of a terminal again and again; elsewhere writes one every five seconds.

    A context manager; no thread. The terminal's line is ended when the body is left, whatever ends
    it. Where nobody reads it, now or any more, it says nothing, and the command goes on.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._output: TextIO | None = None if quiet else sys.stderr
        self._line: Line | None = None
        if self._output is not None and is_terminal(self._output):
            self._line = Line(self._output)
        self._figures: Figures | None = None
        self._drawn: Figures | None = None
        self._told_seconds = time.monotonic() - (0.0 if self._line is None else _DRAW_SECONDS)

    def show(self, figures: Figures) -> None:
        """Take note of how far it is, and tell it when it is time to."""
        self._figures = figures
        now = time.monotonic()
        if now - self._told_seconds >= (_TELL_SECONDS if self._line is None else _DRAW_SECONDS):
            self._told_seconds = now
            self._tell(figures)

    def _tell(self, figures: Figures) -> None:
        if self._output is None or not takes_a_line(self._output):
            return
        try:
            if self._line is None:
                print(", ".join(figures.facts()), file=self._output, flush=True)
            else:
                self._line.draw(figures.texts(), figures.fraction)
                self._drawn = figures
        except OSError:
            self._let_go()

    def _end(self) -> None:
        """Draw the last state, where there is a line for it, and end the line."""
        if self._line is None or self._output is None or self._figures is None:
            return
        if not takes_a_line(self._output):
            return
        if self._drawn is not self._figures:
            self._tell(self._figures)
        try:
            self._line.end()
        except OSError:
            self._let_go()

    def _let_go(self) -> None:
        discard(self._output)
        self._output = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        finish_first(self._end)
