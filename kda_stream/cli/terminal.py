"""What a terminal is, and what is done on one alone: colour, and a line that is drawn again.

The only place that knows rich, which is imported where there is a terminal. Colour is put around
pieces of a line that is whole already: without its escapes, a line is the one that is printed
elsewhere.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedWriter, FileIO, RawIOBase, TextIOWrapper
from typing import Final, TextIO, cast

_NO_TERMINALS: Final = ("", "dumb", "unknown")
"""What TERM says where lines cannot be drawn again, nor coloured."""

_COLUMNS_DEFAULT: Final = 80

Paint = Callable[[str, str], str]
"""Paints a text in a style, such as "bold red"."""


def is_terminal(output: TextIO | None) -> bool:
    """Whether lines can be drawn again there."""
    if output is None or os.environ.get("TERM", "") in _NO_TERMINALS:
        return False
    return output.isatty()


def columns_of(output: TextIO) -> int:
    """How wide the terminal is now."""
    with suppress(OSError):
        return os.get_terminal_size(output.fileno()).columns or _COLUMNS_DEFAULT
    return _COLUMNS_DEFAULT


def printing_all(output: TextIO) -> TextIO:
    """The stream, or one in its place, that prints any text, all of it or with an OSError.

    Without a buffer (python -u) a stream forgets what the system takes no more of, as into a pipe
    that does not block or onto a full disk.
    """
    if not isinstance(output, TextIOWrapper):
        return output
    if isinstance(cast(object, output.buffer), RawIOBase):
        file = FileIO(output.fileno(), "w", closefd=False)
        output = TextIOWrapper(BufferedWriter(file), output.encoding)
    output.reconfigure(errors="backslashreplace")
    return output


def discard(output: TextIO | None) -> None:
    """Let what is left in its buffer go nowhere, so that the interpreter's end is no error."""
    if output is None:
        return
    with suppress(OSError):  # a container without /dev/null, or no descriptor left
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output.fileno())
        os.close(nowhere)


# Lines -------------------------------------------------------------------------------------------


def print_plain(text: str) -> None:
    """Print to stdout what is for a program; raises OSError as do the others here."""
    print(text, flush=True)


def print_facts(lines: Sequence[str]) -> None:
    """Print the lines of a result."""
    paint = _paint_of(sys.stdout)
    if paint is not None:
        lines = [_painted_facts(line, paint) for line in lines]
    print("\n".join(lines), flush=True)


def print_verdict(line: str, *, is_good: bool) -> None:
    """Print the last line of a result."""
    paint = _paint_of(sys.stdout)
    print(line if paint is None else paint(line, "green" if is_good else "bold red"), flush=True)


def print_error(line: str) -> None:
    """Print a line to stderr, if there is one."""
    if sys.stderr is None:
        return
    paint = _paint_of(sys.stderr)
    if paint is not None:
        line = _ERROR_LABEL.sub(lambda found: paint(found[0], _ERROR_STYLES[found[0]]), line)
    print(line, file=sys.stderr, flush=True)


# Colour ------------------------------------------------------------------------------------------

_ERROR_STYLES: Final = {"error:": "bold red", "hint:": "bold cyan"}
_ERROR_LABEL: Final = re.compile("^(?:error:|hint:)")

# as the strip of `inspect` is written
_STRIP: Final = re.compile(r" {12}[KDM?.]+")
_RULER: Final = re.compile(r" {12}[0-9 ]*[0-9]")
_LEGEND: Final = re.compile(r" {12}(?:[KDM?.] (?:KDA|DSA|MTP|unknown|no such layer)(?: {3}|$))+")
_MARK_STYLES: Final = {
    "K": "bold green",
    "D": "blue",
    "M": "magenta",
    "?": "bold yellow",
    ".": "dim",
}


def _painted_facts(line: str, paint: Paint) -> str:
    if not line.startswith("  "):
        return paint(line, "bold") if line else line
    if _RULER.fullmatch(line):
        return paint(line, "dim")
    if _STRIP.fullmatch(line):
        return _painted_runs(line, r"([KDM?.])\1*", paint)
    if _LEGEND.fullmatch(line):
        return _painted_runs(line, r"(?<= )([KDM?.])(?= )", paint)
    label = line[2:12].rstrip()
    if label.startswith(" ") or not line[11:12].isspace():
        return line
    style = "yellow" if label == "note" else "cyan"
    return f"  {paint(label, style)}{line[2 + len(label) :]}"


def _painted_runs(line: str, marks: str, paint: Paint) -> str:
    return re.sub(marks, lambda found: paint(found[0], _MARK_STYLES[found[1]]), line)


def _paint_of(output: TextIO | None) -> Paint | None:
    """How text is painted there; None where it is not."""
    if not is_terminal(output) or os.environ.get("NO_COLOR"):
        return None
    try:
        from rich.color import ColorSystem
        from rich.style import Style
    except ImportError:
        return None

    def paint(text: str, style: str) -> str:
        return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)

    return paint


# A line that is drawn again ----------------------------------------------------------------------


class Line:
    """The last line of a terminal, in the place of what was drawn there before.

    Holds to what every terminal has: a carriage return and spaces; and never to its last columns,
    so that the `^C` of a keyboard does not break it. Raises OSError where nobody reads it.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._bar = _bar_for(output)
        self._drawn_columns = 0
        self._shape = (0, 0)  # of the terminal its columns, and which of the texts fits in them
        self._text_columns = 0

    def draw(self, texts: Sequence[str], fraction: float) -> None:
        """Draw the first of these texts that fits, behind a bar where there is room for one.

        The next ones are drawn in the same shape, so that nothing moves but what changes.
        """
        columns = max(columns_of(self._output) - _SPARE_COLUMNS, 0)
        first = self._shape[1] if self._shape[0] == columns else 0
        last = len(texts) - 1
        number = next((n for n in range(first, last) if len(texts[n]) <= columns), last)
        text = texts[number][:columns]
        is_same = self._shape == (columns, number)
        self._shape = (columns, number)
        self._text_columns = max(len(text), self._text_columns if is_same else 0)
        bar_columns = min(columns - self._text_columns - 1, _BAR_COLUMNS_MAX)
        bar, drawn_columns = "", len(text)
        if bar_columns >= _BAR_COLUMNS_MIN:
            bar, drawn_columns = self._bar(fraction, bar_columns) + " ", bar_columns + 1 + len(text)
        padding = " " * (min(self._drawn_columns, columns) - drawn_columns)
        print(f"\r{bar}{text}{padding}", end="", file=self._output, flush=True)
        self._drawn_columns = drawn_columns

    def end(self) -> None:
        """Leave what is drawn, so that other text begins on the next line."""
        if self._drawn_columns:
            print(file=self._output, flush=True)
            self._drawn_columns = 0


_SPARE_COLUMNS: Final = 3
_BAR_COLUMNS_MIN: Final = 5
_BAR_COLUMNS_MAX: Final = 30


def _bar_for(output: TextIO) -> Callable[[float, int], str]:
    """Makes a bar of a fraction, so many columns wide: rich's, else one of number signs.

    In brackets where no colour shows how far it has yet to come.
    """
    is_coloured = _paint_of(output) is not None
    try:
        from rich.color import ColorSystem
        from rich.console import Console
        from rich.progress_bar import ProgressBar
    except ImportError:
        return lambda fraction, columns: _in_brackets("#" * int((columns - 2) * fraction), columns)
    console = Console(
        file=output,
        color_system="standard" if is_coloured else None,
        no_color=not is_coloured,
        force_terminal=True,
        legacy_windows=False,
        _environ={},
    )

    def bar(fraction: float, columns: int) -> str:
        drawn = ProgressBar(
            total=1.0,
            completed=fraction,
            width=columns if is_coloured else columns - 2,
            style="bright_black",
            complete_style="cyan",
            finished_style="green",
        )
        segments = console.render(drawn, console.options.update(width=columns))
        if not is_coloured:
            return _in_brackets("".join(segment.text for segment in segments), columns)
        return "".join(
            segment.text
            if segment.style is None
            else segment.style.render(segment.text, color_system=ColorSystem.STANDARD)
            for segment in segments
        )

    return bar


def _in_brackets(bar: str, columns: int) -> str:
    return f"[{bar.ljust(columns - 2)}]"
