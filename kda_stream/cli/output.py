"""What every subcommand hands back, and the one place that prints it.

Facts go to stdout, as lines for people or, with --json, as one object. What is wrong goes to stderr
as `error:` and `hint:` lines or, with --json, into the object's `problems`.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import groupby, islice
from typing import Any, Final

from ..errors import KdaStreamError, PathError, shown
from ..limits import LINE_CHARS_MAX, SHOWN_ITEMS_MAX
from .hints import hint_of
from .interrupts import INTERRUPTED
from .terminal import print_error, print_facts, print_plain, print_verdict

SCHEMA_VERSION: Final = 1
_COLUMNS: Final = 100
_LABEL_COLUMNS: Final = 12


class Exit(IntEnum):
    """What the exit status says."""

    DONE = 0
    FINDING = 1
    USAGE = 2
    CANNOT_READ = 3
    INTERRUPTED = INTERRUPTED
    PIPE_CLOSED = 141


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a subcommand: `facts` for --json, `lines` for people, `problems` for both.

    `verdict` is a last line for people, after the problems. `is_script`: the lines are for a
    program, and are left as they are on a terminal too.
    """

    exit: Exit
    facts: dict[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()
    problems: Sequence[KdaStreamError] = ()
    verdict: str | None = None
    is_script: bool = False

    def without_file(self, error: PathError, **facts: None) -> Result:
        """The same, and that its file could not be written at last: what was found is told."""
        return replace(
            self,
            exit=self.exit or Exit.CANNOT_READ,
            facts={**self.facts, **facts},
            problems=(*self.problems, error),
        )


def print_result(command: str | None, result: Result, *, as_json: bool, quiet: bool) -> None:
    """Print a result; raises OSError when stdout or stderr takes no more.

    With `quiet` only what is wrong, but a script, and with `as_json` all of it, all the same.
    """
    if as_json:
        print_plain(json.dumps(json_object(command, result), indent=2))
        return
    if result.is_script:
        print_plain("\n".join(result.lines))
    elif result.lines and not quiet:
        print_facts(result.lines)
    for line in error_lines(result.problems):
        print_error(line)
    if result.verdict is not None and not quiet:
        print_verdict(result.verdict, is_good=result.exit == Exit.DONE)


def json_object(command: str | None, result: Result) -> dict[str, Any]:
    """The object that --json prints.

    Always `schema_version`, `command` (null when none was recognised), `exit_status` and `problems`
    (code, what, path, tensor, expected, got, hint of each); then the facts of the subcommand, which
    are missing when it could not begin.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "exit_status": int(result.exit),
        "problems": [_problem_object(problem) for problem in result.problems],
        **result.facts,
    }


def _problem_object(error: KdaStreamError) -> dict[str, str | None]:
    return {
        "code": error.code.value,
        "what": error.what,
        "path": error.path,
        "tensor": error.tensor,
        "expected": error.expected,
        "got": error.got,
        "hint": hint_of(error),
    }


def error_lines(problems: Sequence[KdaStreamError]) -> list[str]:
    """An `error:` line for each, and a `hint:` line after the last of those that share it."""
    lines: list[str] = []
    for hint, group in groupby(problems, key=hint_of):
        lines += (f"error: {problem.finding}" for problem in group)
        if hint is not None:
            lines.append(f"hint: {hint}")
    return lines


# Text --------------------------------------------------------------------------------------------


def path_line(path: str | os.PathLike[str]) -> str:
    """A path on a line of its own."""
    return shown(os.fspath(path), LINE_CHARS_MAX)


def path_row(label: str, path: str) -> str:
    """A path beside its label, on one line however long it is, so that it can be copied."""
    return f"  {label:{_LABEL_COLUMNS - 2}}{path_line(path)}"


def row(label: str, text: str) -> list[str]:
    """`text` beside its label, wrapped to 100 columns."""
    return textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=f"  {label:{_LABEL_COLUMNS - 2}}",
        subsequent_indent=" " * _LABEL_COLUMNS,
        break_long_words=False,
        break_on_hyphens=False,
    )


def note_rows(notes: Iterable[str]) -> list[str]:
    """A row for each note."""
    return [line for note in notes for line in row("note", note)]


def plural(count: int, noun: str) -> str:
    """The count with its noun: `1 shard`, `76,108 tensors`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def size(nbytes: float) -> str:
    """A byte count with three digits after the point, in decimal units: `9.366 GB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3f} {unit}"
    return f"{nbytes:.0f} bytes"


def exact_size(nbytes: int) -> str:
    """A byte count, and again in units: `9,366,356,992 bytes (9.366 GB)`."""
    return f"{nbytes:,} bytes ({size(nbytes)})" if nbytes >= 1000 else f"{nbytes} bytes"


def some(
    items: Iterable[object], count: int, most: int = SHOWN_ITEMS_MAX, between: str = ", "
) -> str:
    """The first of `count` items and how many more there are; only those shown are drawn."""
    text = between.join(str(item) for item in islice(items, min(count, most)))
    return f"{text} and {count - most:,} more" if count > most else text
