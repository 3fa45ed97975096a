"""A script of a fault, in a process of its own that counts what it holds."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.left_behind import PROLOGUE

RunFault = Callable[..., Any]

# Python warns of any fork beside threads from 3.12 on; where forks are meant, that is no error.
FORKING = ("-W", "error", "-W", "ignore::DeprecationWarning")

READS = ("mapped", "positional", "direct", "auto")

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc")


def command_of(
    script: str, *arguments: object, flags: tuple[str, ...] = ("-W", "error")
) -> list[str]:
    """The command of a process that runs the script; SIGINT raises in it wherever it starts."""
    sigint = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    whole = sigint + PROLOGUE + textwrap.dedent(script)
    return [sys.executable, *flags, "-c", whole, *map(str, arguments)]


def ended(
    command: list[str], folder: Path, *, seconds: float, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder to its end."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
