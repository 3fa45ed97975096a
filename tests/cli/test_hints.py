"""Hints: what a user of the command can do, in the words of the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli.running import SHARDS, Run

from kda_stream.cli.failures import known
from kda_stream.cli.hints import hint_of
from kda_stream.errors import ErrorCode, MemoryRefusedError, PathError

LOCKED_LITTLE = """
import ctypes, resource
ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_IPC_LOCK
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
"""
PYTHON = re.compile(r"\w\(\)|\b(?:read|lock|config|alignment)=|\bNone\b")
"""What is Python and no option: a call, a keyword's value."""


def hint(run: Run, *arguments: object, before: str | None = None) -> str:
    """The one hint of a command that fails, which is the same with --json."""
    ran = run(*arguments, before=before)
    assert ran.status != 0
    (found,) = ran.hints
    told = run(*arguments, "--json", before=before).json["problems"]
    assert {f"hint: {problem['hint']}" for problem in told} == {found}
    assert not PYTHON.search(found), found
    return found.removeprefix("hint: ")


def test_a_layer_that_is_not_there(run: Run, small: Path) -> None:
    assert hint(run, "stream", small, "--layers", "99") == "`kda-stream inspect` lists the layers"


def test_memory_that_must_be_locked_and_is_not(run: Run, small: Path) -> None:
    found = hint(run, "stream", small, "--lock", "require", before=LOCKED_LITTLE)
    assert found.endswith("or pass --lock prefer")


def test_an_alignment_that_is_none(run: Run, small: Path) -> None:
    found = hint(run, "stream", small, "--alignment", "3")
    assert found.startswith("leave it out: each tensor lies as far into a page as in its file")


def test_a_config_that_is_missing(run: Run, copied: Path) -> None:
    (copied / "config.json").unlink()
    assert hint(run, "stream", copied).startswith("fetch it")


def test_layers_that_are_missing(run: Run, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 12
    (copied / "config.json").write_text(json.dumps(config))
    assert "--layers" in hint(run, "stream", copied)


def test_a_header_that_is_longer_than_the_cap(run: Run, copied: Path) -> None:
    with open(copied / SHARDS[0], "r+b") as shard:
        shard.write((200_000_000).to_bytes(8, "little"))
        shard.truncate(300_000_000)
    (found,) = run("inspect", copied).hints
    assert found.startswith("hint: the command takes no longer one")
    assert found.endswith("open it in Python, with header_bytes_max=")


def test_a_layer_that_is_no_kda_layer(run: Run, small: Path) -> None:
    found = hint(run, "stream", small, "--layers", "3")
    assert found == "leave the layer out: only KDA layers are bound"


@pytest.mark.parametrize(
    ("library_s", "command_s"),
    [
        ('pass read="auto"', "pass --read auto"),
        ('raise it, or pass read="positional"', "raise it, or pass --read positional"),
        ("this is KIMI_K3: pass family=KIMI_K3", "this is KIMI_K3: pass --family KIMI_K3"),
        ("check the path", "check the path"),
        (None, None),
    ],
)
def test_arguments_are_told_as_options(library_s: str | None, command_s: str | None) -> None:
    assert hint_of(PathError(ErrorCode.PATH_MISSING, "it", hint=library_s)) == command_s


def test_memory_that_runs_out_has_a_hint_for_every_command() -> None:
    assert "kda-stream env" in (hint_of(known(MemoryError())) or "")
    assert isinstance(known(MemoryError()), MemoryRefusedError)
