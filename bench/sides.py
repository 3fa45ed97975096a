"""What is compared: a comparison, its sides, and the job that a side does in a process."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .data import Geometry, Place

Figures = dict[str, Any]
Timed = Callable[[], Figures]


class UnavailableError(Exception):
    """A side cannot run here, and why."""


class WrongBytesError(Exception):
    """A side delivered something else than is stored."""


@dataclass(frozen=True)
class Request:
    """What is asked of a side in one process.

    `folder` holds the data set; `cached` says that its files are in the page cache, for peers with
    a setting for that; `checked` asks for `delivered` too, at the cost of time.
    """

    folder: Path
    cached: bool = False
    checked: bool = False

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"


def shards_in(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted((folder / "checkpoint").glob("*.safetensors")))


def files_in(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted((folder / "checkpoint").iterdir()))


def nothing(_folder: Path) -> None:
    """No preparation."""


@dataclass(frozen=True)
class Side:
    """One way to do what a comparison asks.

    kind      "own", "peer", "ceiling" (what the machine does at best) or "memory" (reads no file).
    load      imports and makes all that is not timed, and gives the timed function, whose figures
              have `seconds`; with `checked` also `delivered`, a text that all sides must agree on.
              Raises ImportError or `UnavailableError` where it cannot run.
    command   instead of `load`: builds a program in the scratch folder, and gives its command; it
              prints its figures, and delivers nothing that could be checked.
    packages  whose versions are told.
    files     what it reads, for the page cache's sake.
    prepare   run once, not timed: writes files of a format of its own.
    only      of the conditions with this `cached`; None for all.
    """

    name: str
    kind: str
    load: Callable[[Request], Timed] | None = None
    command: Callable[[Path, Path], list[str]] | None = None
    packages: tuple[str, ...] = ()
    reads: str = ""
    settings: str = ""
    files: Callable[[Path], tuple[Path, ...]] = files_in
    prepare: Callable[[Path], None] = nothing
    only: bool | None = None

    def described(self, versions: dict[str, str]) -> dict[str, Any]:
        told = (self.name, self.kind, self.reads, self.settings, versions)
        return dict(zip(("name", "kind", "reads", "settings", "versions"), told, strict=True))


@dataclass(frozen=True)
class Comparison:
    """Sides that do the same, turn by turn.

    told        what is asked of each side, and what its figures mean.
    references  names of the sides that the others' seconds are divided by.
    own         the name of the library's side that the README and the plot show.
    conditions  options of `--conditions` that it is measured under.
    make        writes the data set under a folder, or finds it there.
    quick       whether it has any meaning with small data.
    """

    name: str
    title: str
    told: str
    sides: tuple[Side, ...]
    references: tuple[str, ...]
    own: str
    conditions: tuple[str, ...]
    make: Callable[[Path, Geometry], Place]
    quick: bool = True


def clocked(job: Callable[[], None]) -> Figures:
    """The seconds that the job takes, and those of the processors."""
    cpu_before, began = cpu_seconds(), time.perf_counter()
    job()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "cpu_seconds": cpu_seconds() - cpu_before}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def threads() -> int:
    """As many as the library takes: one a processor that the process may use, at most four."""
    return min(len(os.sched_getaffinity(0)), 4)
