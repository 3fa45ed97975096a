"""Commands on pseudo-terminals, what a terminal shows of their output, and spies inside them.

Nothing here uses kda_stream, nor a library that draws.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

import pytest

# What would tell a command how to draw, beside what a test gives it.
_DRAWING: Final = re.compile(
    r"PYTHON|TERM$|COLORTERM|NO_COLOR|FORCE_COLOR|CLICOLOR|COLUMNS|LINES|TTY_|PY_COLORS|RICH"
)
ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[^\[\]])")
SGR: Final = re.compile(r"\x1b\[[\d;:]*m")

# A process that was started in the background ignores SIGINT, and its children would too.
_LAUNCH: Final = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
if os.isatty(0):
    import fcntl, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def launched(command: Iterable[object]) -> list[str]:
    """The command, by way of a process that takes SIGINT and the terminal that it is given."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, *map(str, command)]


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's environment on a plain colour terminal; a change to None takes one out."""
    plain: dict[str, str | None] = {k: v for k, v in os.environ.items() if not _DRAWING.match(k)}
    plain |= {"TERM": "xterm-256color", **(changes or {})}
    return {name: value for name, value in plain.items() if value is not None}


def without_escapes(text: str) -> str:
    """The text as a reader who knows no colour would have it."""
    return ESCAPE.sub("", text)


# What a terminal shows ---------------------------------------------------------------------------


class Screen:
    """A terminal of so many columns and endless rows, told what is written to it and when.

    Knows what progress bars use: carriage return, moves, erasing, colours, the cursor. `wraps`
    counts the lines that ran over the right edge, `states` has (row, text) of each row as it was
    before it was drawn anew or left, and `draws` (seconds, row) of each time that one was begun.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows: list[list[str]] = [[]]
        self.wraps = 0
        self.states: list[tuple[int, str]] = []
        self.draws: list[tuple[float, int]] = []
        self.cursor_is_hidden = False
        self._row = 0
        self._column = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._rest = ""

    @property
    def lines(self) -> list[str]:
        """The rows as they stand, without blanks at their ends, and without empty last rows."""
        found = ["".join(row).rstrip() for row in self.rows]
        while found and not found[-1]:
            found.pop()
        return found

    def feed(self, data: bytes, seconds: float = 0.0) -> None:
        """Show what was written at that time."""
        text = self._rest + self._decoder.decode(data)
        self._rest = ""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                match = ESCAPE.match(text, at)
                if match is None:  # the rest of it comes with the next piece
                    self._rest = text[at:]
                    return
                self._obey(match.group())
                at = match.end()
            else:
                self._put(text[at], seconds)
                at += 1

    def _put(self, character: str, seconds: float) -> None:
        if character == "\r":
            self._leave()
            self._column = 0
        elif character == "\n":
            self._leave()
            self._go(self._row + 1)
        elif character == "\b":
            self._column = max(self._column - 1, 0)
        elif character.isprintable():
            if self._column == self.columns:
                self.wraps += 1
                self._leave()
                self._go(self._row + 1)
                self._column = 0
            if self._column == 0:
                self.draws.append((seconds, self._row))
            row = self.rows[self._row]
            row += " " * (self._column + 1 - len(row))
            row[self._column] = character
            self._column += 1
        else:
            assert character == "\a", f"a control character: {character!r}"

    def _leave(self) -> None:
        text = "".join(self.rows[self._row]).rstrip()
        if text and (not self.states or self.states[-1] != (self._row, text)):
            self.states.append((self._row, text))

    def _go(self, row: int) -> None:
        self._row = max(row, 0)
        while len(self.rows) <= self._row:
            self.rows.append([])

    def _obey(self, escape: str) -> None:
        if not escape.startswith("\x1b["):
            return
        what, given = escape[-1], escape[2:-1]
        number = int(given) if given.isdigit() else 0
        row = self.rows[self._row]
        if what == "K":
            if number == 0:
                del row[self._column :]
            elif number == 1:
                row[: self._column] = " " * self._column
            else:
                row.clear()
        elif what == "J":
            del row[self._column :]
            del self.rows[self._row + 1 :]
        elif what in "AB":
            self._leave()
            self._go(self._row + (number or 1) * (1 if what == "B" else -1))
        elif what in "CD":
            steps = (number or 1) * (1 if what == "C" else -1)
            self._column = min(max(self._column + steps, 0), self.columns - 1)
        elif what == "G":
            self._leave()
            self._column = max(number - 1, 0)
        elif given in ("?25", "?25 "):
            self.cursor_is_hidden = what == "l"


# A command on it ---------------------------------------------------------------------------------


class OnTerminal:
    """A command whose streams `on` (1: stdout, 2: stderr) are a terminal; the others are pipes.

    It leads a session whose terminal this is, so that keys pressed (`press`) reach it as signals.
    A context manager, which kills what still runs.
    """

    def __init__(
        self,
        command: Sequence[object],
        *,
        on: Sequence[int] = (1, 2),
        columns: int = 80,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.screen = Screen(columns)
        self.written = b""
        self.piped = {1: b"", 2: b""}
        self.began_seconds = time.monotonic()
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        modes = termios.tcgetattr(slave)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        self.process = subprocess.Popen(
            launched(command),
            stdin=slave,
            stdout=slave if 1 in on else subprocess.PIPE,
            stderr=slave if 2 in on else subprocess.PIPE,
            env=environment(env),
            cwd=cwd,
            start_new_session=True,
        )
        os.close(slave)
        self._open = {self._master: 0}
        for number, pipe in ((1, self.process.stdout), (2, self.process.stderr)):
            if pipe is not None:
                self._open[pipe.fileno()] = number

    def read(self, until: Callable[[], bool] | None = None, seconds: float = 30) -> None:
        """Take in what it writes, to its end or until something is so."""
        end = time.monotonic() + seconds
        while self._open and not (until is not None and until()):
            assert time.monotonic() < end, f"it goes on: {self.text[-500:]!r}"
            for ready in select.select(list(self._open), [], [], 0.05)[0]:
                self._read_from(ready)

    def _read_from(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, 1 << 16)
        except OSError:  # how Linux says that the other side of a terminal was closed
            data = b""
        number = self._open[descriptor]
        if not data:
            del self._open[descriptor]
        elif number:
            self.piped[number] += data
        else:
            self.written += data
            self.screen.feed(data, time.monotonic())

    def finish(self, seconds: float = 30) -> int:
        """Take in all of it and wait for its end; the exit status."""
        self.read(seconds=seconds)
        return self.process.wait(timeout=seconds)

    @property
    def text(self) -> str:
        """What was written to the terminal, escapes and all, with the line ends of files."""
        return self.written.decode().replace("\r\n", "\n")

    @property
    def stdout(self) -> str:
        return self.piped[1].decode()

    @property
    def stderr(self) -> str:
        return self.piped[2].decode()

    def press(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._master, keys)

    def signal(self, number: int) -> None:
        """Send a signal to the command alone."""
        self.process.send_signal(number)

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        os.close(self._master)


# Inside the command ------------------------------------------------------------------------------


def spying(folder: Path, script: str) -> dict[str, str]:
    """What to add to the environment of a Python so that it runs the script before all else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(script)
    return {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


_KEEPING_OUT: Final = """
import sys
class _KeepOut:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in NAMES:
            raise ImportError(f"{name} was taken away", name=name)
sys.meta_path.insert(0, _KeepOut)
"""


def without_modules(folder: Path, *names: str) -> dict[str, str]:
    """What to add to the environment of a Python so that it cannot import these modules."""
    return spying(folder, f"NAMES = {names!r}\n{_KEEPING_OUT}")


def shards_are_open(pid: int) -> bool:
    """Whether the process has a shard open; Linux."""
    if sys.platform != "linux":
        pytest.skip("asks /proc which files a process has open")
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    found = False
    for link in links:
        with contextlib.suppress(OSError):
            found |= os.readlink(link).endswith(".safetensors")
    return found
