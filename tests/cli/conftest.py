"""The real command in a process of its own, and small checkpoints for it to read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cli.running import COMMAND, ENVIRONMENT, INDEX, EditConfig, Ran, Rewrite, Run

from kda_stream.testing import Layout, StoredTensor, write_checkpoint, write_shard


def prepared(script: str | None) -> list[str]:
    """What to put before a command so that `script` runs first, in the process it then becomes."""
    if script is None:
        return []
    return [sys.executable, "-c", f"{script}\nimport os, sys\nos.execv(sys.argv[1], sys.argv[1:])"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `kda-stream` with these arguments; whatever happens, no traceback and no escapes.

    `before` is Python that runs first in the command's process, for limits and descriptors.
    """

    def run_command(
        *arguments: object,
        env: Mapping[str, str] | None = None,
        before: str | None = None,
        seconds: float = 30,
    ) -> Ran:
        done = subprocess.run(
            [*prepared(before), *COMMAND, *map(str, arguments)],
            cwd=tmp_path,
            env={**ENVIRONMENT, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
        )
        ran = Ran(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert "Traceback" not in ran.stderr, ran.stderr
        assert "\x1b" not in ran.stdout + ran.stderr
        return ran

    return run_command


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `Layout()`; not to be changed."""
    return write_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture
def copied(small: Path, tmp_path: Path) -> Path:
    """A copy of `small` to break."""
    return Path(shutil.copytree(small, tmp_path / "copied"))


@pytest.fixture
def rewritten(tmp_path: Path) -> Rewrite:
    """Write a checkpoint whose tensors have gone through `change`, index included."""

    def write(
        change: Callable[[StoredTensor], StoredTensor | None], layout: Layout | None = None
    ) -> Path:
        layout = layout or Layout()
        path = write_checkpoint(tmp_path / "rewritten", layout)
        weight_map = {}
        for file, tensors in layout.files().items():
            changed = tuple(new for tensor in tensors if (new := change(tensor)) is not None)
            write_shard(path / file, changed)
            weight_map.update({tensor.name: file for tensor in changed})
        (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        return path

    return write


@pytest.fixture
def edit_config(copied: Path) -> EditConfig:
    """Change the `text_config` of a copy of `small`; the copy's path is returned."""

    def edit(change: Callable[[dict[str, Any]], Any]) -> Path:
        config = json.loads((copied / "config.json").read_text())
        change(config["text_config"])
        (copied / "config.json").write_text(json.dumps(config))
        return copied

    return edit
