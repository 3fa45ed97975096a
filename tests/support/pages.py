"""The code blocks of a Markdown page, run in the order in which a reader comes to them.

`python` and `sh` blocks run, those in HTML comments too (`<!--- invisible-code-block: python`). A
`text` block is what the block before it prints, where `...` stands for anything. Other languages
are shown only.
"""

from __future__ import annotations

import doctest
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

ROOT: Final = Path(__file__).resolve().parents[2]
RUN: Final = ("python", "sh")
SHOWN: Final = ("none",)
FENCE: Final = re.compile(r"^ *```(\w+)$\n(.*?)\n *```$", re.MULTILINE | re.DOTALL)
SECONDS_MAX: Final = 120
ENGINES: Final = f'env PYTHONPATH="{ROOT}/tests" "{sys.executable}" -m support.engine_commands'
COMMANDS: Final = {
    "python": f'"{sys.executable}"',
    "kda-stream": f'"{sys.executable}" -m kda_stream.cli',
    "torchrun": f'"{sys.executable}" -m torch.distributed.run',
    "vllm": f"{ENGINES} vllm",
    "sglang": f"{ENGINES} sglang",
}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, and its text."""

    language: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.strip().splitlines()[0].strip()


def blocks_of(page: Path) -> list[Block]:
    """Every fenced block of a page that names a language, directives left out."""
    return [Block(*found) for found in FENCE.findall(page.read_text(encoding="utf-8"))]


@dataclass
class Runner:
    """Runs the blocks of one page in the folder `cwd`, but for those that `is_left_out` names."""

    page: Path
    cwd: Path
    is_left_out: Callable[[str], bool]
    ran: int = 0
    printed: str | None = None
    _python: PythonEvaluator = field(default_factory=PythonEvaluator)

    def run(self) -> int:
        """Run them all; how many."""
        make_commands(self.cwd / "bin")
        parsers = [
            CodeBlockParser("python", self._guarded(self._run_python)),
            CodeBlockParser("sh", self._guarded(self._run_shell)),
            CodeBlockParser("text", self._compare),
        ]
        for example in Sybil(parsers).parse(self.page).examples():
            example.evaluate()
        return self.ran

    def _guarded(self, run: Callable[[Example], str]) -> Callable[[Example], None]:
        def guarded(example: Example) -> None:
            if self.is_left_out(example.parsed.strip().splitlines()[0].strip()):
                self.printed = None
                return
            self.ran += 1
            self.printed = run(example)

        return guarded

    def _run_python(self, example: Example) -> str:
        printed = io.StringIO()
        with redirect_stdout(printed):
            self._python(example)
        return printed.getvalue()

    def _run_shell(self, example: Example) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", example.parsed],
            cwd=self.cwd,
            env=environment(self.cwd),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_MAX,
        )
        where = f"{example.path}:{example.line}"
        assert done.returncode == 0, f"{where}: exit {done.returncode}\n{done.stdout}"
        return done.stdout

    def _compare(self, example: Example) -> None:
        where = f"{example.path}:{example.line}"
        assert self.printed is not None, f"{where}: output of which block?"
        expected, got = without_space_at_ends(example.parsed), without_space_at_ends(self.printed)
        is_same = doctest.OutputChecker().check_output(expected, got, doctest.ELLIPSIS)
        assert is_same, f"{where}: expected\n{expected}\ngot\n{got}"
        self.printed = None


def without_space_at_ends(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"


def make_commands(folder: Path) -> None:
    """The commands that pages use, each for this interpreter."""
    folder.mkdir()
    for name, line in COMMANDS.items():
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        command.chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    """This process's, less what changes Python, with the commands first and a home of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    path = f"{folder / 'bin'}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "HOME": str(folder)}


def pages() -> Iterator[Path]:
    """Every page whose blocks must run."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))
