"""A `kda-stream` command that has ended, and the types of the fixtures that make one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ENVIRONMENT: Final = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
COMMAND: Final = (sys.executable, "-m", "kda_stream.cli")
INDEX: Final = "model.safetensors.index.json"
SHARDS: Final = tuple(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """What it printed, which must be one JSON object and nothing else."""
        found: dict[str, Any] = json.loads(self.stdout)
        return found

    @property
    def errors(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]

    @property
    def hints(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("hint: ")]


Run = Callable[..., Ran]
Rewrite = Callable[..., Path]
EditConfig = Callable[[Callable[[dict[str, Any]], Any]], Path]
