"""A `kda-stream` command that has ended, and the types of the fixtures that make one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import jsonschema

ENVIRONMENT: Final = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
COMMAND: Final = (sys.executable, "-m", "kda_stream.cli")
INDEX: Final = "model.safetensors.index.json"
SHARDS: Final = tuple(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))


def schema() -> dict[str, Any]:
    """The schema of what --json prints."""
    text = (files("kda_stream.cli") / "output.schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@cache
def strict_validator() -> jsonschema.Draft202012Validator:
    """Holds an object against the schema, and lets nothing pass that is not described there."""
    strict = {**_closed(schema()), "unevaluatedProperties": False}
    return jsonschema.Draft202012Validator(strict)


def _closed(node: Any) -> Any:
    """A schema whose objects take no other properties.

    But for the facts of a command: they lie beside what all commands have, and where they are the
    value of a property of `demo`, that one closes them.
    """
    if isinstance(node, list):
        return [_closed(part) for part in node]
    if not isinstance(node, dict):
        return node
    closed = {key: _closed(part) for key, part in node.items()}
    for part in closed.get("properties", {}).values():
        if "$ref" in part or "properties" in part:
            part["unevaluatedProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(closed.get(key), dict):
            closed[key]["unevaluatedProperties"] = False
    return closed


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """What it printed, which must be one JSON object and nothing else, as the schema says."""
        found: dict[str, Any] = json.loads(self.stdout)
        strict_validator().validate(found)
        assert found["exit_status"] == self.status
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
