"""What a runner is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..data import DataSet
from ..landing import Landing
from ..sides import UnavailableError


@dataclass(frozen=True)
class Job:
    """What is asked of a runner in one process.

    `cached` says that the files are in the page cache, for peers with a setting for that.
    """

    data: DataSet
    cached: bool


Run = Callable[[Job, Landing], None]


def shards(data: DataSet) -> tuple[Path, ...]:
    return data.shards


def nothing(_data: DataSet) -> None:
    """No preparation."""


@dataclass(frozen=True)
class Runner:
    """One way to load.

    load      imports all that it needs, so that no import is timed, and gives the timed function.
              Raises ImportError or `UnavailableError` where it cannot run.
    packages  whose versions are told in the table.
    reads     what of the files it goes through.
    settings  how it was set up, in a few words; why is said beside it.
    files     what it reads, for the page cache's sake.
    prepare   run once, not timed: writes files of the peer's own format.
    """

    name: str
    load: Callable[[], Run]
    packages: tuple[str, ...]
    reads: str
    settings: str
    files: Callable[[DataSet], tuple[Path, ...]] = shards
    prepare: Callable[[DataSet], None] = nothing


KDA_ONLY = "KDA tensors"
WHOLE = "whole shards"
WHOLE_LAZILY = "KDA pages of whole maps"
OWN_FORMAT = "KDA tensors, own format"

__all__ = [
    "KDA_ONLY",
    "OWN_FORMAT",
    "WHOLE",
    "WHOLE_LAZILY",
    "Job",
    "Run",
    "Runner",
    "UnavailableError",
]
