"""What the tests of faults share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.running import RunFault, command_of, ended
from support.failing_reads import build_failing_reads


@pytest.fixture
def run_fault(tmp_path: Path) -> Iterator[RunFault]:
    """Run a script in a process of its own; returns what it printed last, read as JSON.

    A script that fails, dies of a signal or takes longer than `seconds` fails the test. `preload`
    is a library that is loaded before all others. The files that it wrote go with the test.
    """

    def run(
        script: str,
        *arguments: object,
        seconds: float = 60,
        preload: Path | None = None,
        flags: tuple[str, ...] = ("-W", "error"),
    ) -> Any:
        environment = {} if preload is None else {"LD_PRELOAD": str(preload)}
        command = command_of(script, *arguments, flags=flags)
        done = ended(command, tmp_path, seconds=seconds, environment=environment)
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    yield run
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(scope="session")
def failing_reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes reads fail, compiled; to be preloaded."""
    return build_failing_reads(tmp_path_factory.mktemp("failing-reads"))
