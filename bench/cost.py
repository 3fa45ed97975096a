"""How much room and time a run will take, told before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from .conditions import Condition
from .data import Geometry
from .sides import Comparison, Side

OWN_FORMATS = ("torch.load", "tensorizer")  # write a copy of the KDA tensors each
SPARSE_BYTES = 200_000_000  # of the sparse files that are opened: headers and directories
START_SECONDS = 1.2  # of a process that imports torch, as most do
SECONDS_A_GB = 0.45  # of files, for a run and for bringing the page cache about before it
WRITE_SECONDS_A_GB = 20.0


@dataclass(frozen=True)
class Plan:
    """What a run measures: each comparison with its sides and its conditions."""

    rows: tuple[tuple[Comparison, tuple[Side, ...], tuple[Condition, ...]], ...]
    rounds: int
    geometry: Geometry

    def without(self, names: Collection[str]) -> Plan:
        """The plan without the comparisons of these names."""
        return replace(self, rows=tuple(row for row in self.rows if row[0].name not in names))

    @property
    def runs(self) -> int:
        """How many processes are measured, or only checked."""
        return sum(
            self.rounds + (side.load is not None)
            for _, sides, conditions in self.rows
            for condition in conditions
            for side in sides
            if side.only in (None, condition.cached)
        )

    @property
    def starts(self) -> int:
        """How many processes with a Python there are, those that prepare a side among them."""
        return sum(
            1 + len(conditions) * (self.rounds + 1)
            for _, sides, conditions in self.rows
            for side in sides
            if side.load is not None
        )


def file_bytes(plan: Plan) -> int:
    """What the data sets will hold, when all is written."""
    names = {side.name for _, sides, _ in plan.rows for side in sides}
    copies = len(names.intersection(OWN_FORMATS))
    return plan.geometry.file_bytes + copies * plan.geometry.kda_bytes + SPARSE_BYTES


def missing_bytes(plan: Plan, root: Path) -> int:
    """What is still to be written under `root`."""
    folder = root / plan.geometry.folder_name
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return max(0, file_bytes(plan) - there)


def free_bytes(root: Path) -> int:
    """What is free on the disk of `root`, which need not be there yet."""
    existing = next(path for path in (root, *root.parents) if path.exists())
    return shutil.disk_usage(existing).free


def seconds(plan: Plan, root: Path) -> float:
    """A guess that was right to a third on one machine."""
    read_seconds = plan.runs * SECONDS_A_GB * plan.geometry.file_bytes / 1e9
    write_seconds = WRITE_SECONDS_A_GB * missing_bytes(plan, root) / 1e9
    return plan.starts * START_SECONDS + read_seconds + write_seconds


def told(plan: Plan, root: Path) -> str:
    minutes = max(1, round(seconds(plan, root) / 60))
    return (
        f"{plan.runs} runs, about {minutes} min; writes {missing_bytes(plan, root) / 1e9:.1f} GB "
        f"to {root}, where {free_bytes(root) / 1e9:.1f} GB are free"
    )
