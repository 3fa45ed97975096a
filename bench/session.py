"""Runs a comparison: every side in turn, round by round, under every condition."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from . import conditions, measure, page_cache
from .conditions import Condition, SkippedError
from .data import Place
from .sides import Comparison, Side, UnavailableError

CHECK_ROUND = 0  # what is delivered is compared and memory is sampled; not timed


class BenchError(Exception):
    """A side delivered what is not stored, or not what the other sides delivered."""


class Session:
    """One comparison over its data set; `measure_all` yields its results as plain data for JSON.

    `scratch` is for programs and for what children write.
    """

    def __init__(self, comparison: Comparison, place: Place, scratch: Path) -> None:
        self.comparison = comparison
        self.place = place
        self.scratch = scratch
        self.skipped: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []
        self._delivered: dict[str, str] = {}

    def measure_all(
        self, sides: list[Side], chosen: list[Condition], rounds: int
    ) -> Iterator[dict[str, Any]]:
        """The results so far, after each condition."""
        print(f"\n{self.comparison.title}", flush=True)
        versions = {side.name: self._prepared(side) for side in sides}
        ready = [side for side in sides if versions[side.name] is not None]
        described = [side.described(versions[side.name] or {}) for side in ready]
        done: list[dict[str, Any]] = []
        for condition in chosen:
            print(f"\n{self.comparison.name}, {condition.name}", flush=True)
            try:
                self._measure_condition(condition, ready, rounds)
            except SkippedError as error:
                self._skip(condition.name, str(error))
            done.append(asdict(condition))
            yield {
                "name": self.comparison.name,
                "title": self.comparison.title,
                "told": self.comparison.told,
                "own": self.comparison.own,
                "references": list(self.comparison.references),
                "data": self.place.holds,
                "rounds": rounds,
                "conditions": list(done),
                "entries": described,
                "skipped": dict(self.skipped),
                "runs": list(self.runs),
            }

    def _measure_condition(self, condition: Condition, ready: list[Side], rounds: int) -> None:
        sides = [side for side in ready if side.only in (None, condition.cached)]
        gone: set[str] = set()  # killed or failed once: not tried again
        for number in range(CHECK_ROUND, rounds + 1):
            for side in in_turn(sides, number):
                if side.name in gone or (number == CHECK_ROUND and side.command is not None):
                    continue
                run = self._run(condition, side, number)
                self.runs.append(run)
                print(_line(run), flush=True)
                if run["outcome"] != "done":
                    gone.add(side.name)

    def _run(self, condition: Condition, side: Side, number: int) -> dict[str, Any]:
        files = side.files(self.place.folder)
        resident_before = conditions.bring_about(condition, files)
        result = self.scratch / "result.json"
        result.unlink(missing_ok=True)
        if side.command is not None:
            command = side.command(self.place.folder, self.scratch)
        else:
            options = ["--cached"] if condition.cached else []
            options += ["--check"] if number == CHECK_ROUND else []
            command = self._child(side, result, *options)
        sampled = number == CHECK_ROUND
        with conditions.memory_cgroup(condition) as cgroup:
            finished = measure.run(command, cgroup=cgroup, sampled=sampled)
        run: dict[str, Any] = {"entry": side.name, "condition": condition.name, "round": number}
        run["outcome"] = finished.outcome
        if finished.outcome == "done":
            text = finished.output if side.command is not None else result.read_text()
            run |= json.loads(text)
        else:
            run["why"] = (finished.output.strip() or f"status {finished.status}").splitlines()[-1]
        self.require_right(run)
        if sampled:
            run["anonymous_bytes_peak"] = finished.anonymous_bytes_peak
            run["file_bytes_peak"] = finished.file_bytes_peak
        run["cache_bytes_left"] = page_cache.resident_bytes(files) - resident_before
        return run

    def require_right(self, run: dict[str, Any]) -> None:
        """Raise `BenchError` unless a run delivered what those before it did."""
        where = f"{self.comparison.name}, {run['entry']}, {run['condition']}"
        for bad in run.keys() & {"wrong", "unavailable"}:
            raise BenchError(f"{where}: {run[bad]}")
        delivered = run.pop("delivered", None)
        if delivered is not None:
            self._delivered[where] = delivered
            if len(set(self._delivered.values())) > 1:
                told = "; ".join(f"{name}: {text}" for name, text in self._delivered.items())
                raise BenchError(f"the sides delivered different things: {told}")

    def _prepared(self, side: Side) -> dict[str, str] | None:
        """The versions of its packages, once its own files are written; None: it cannot run."""
        if side.command is not None:
            try:
                side.command(self.place.folder, self.scratch)
            except UnavailableError as error:
                self._skip(side.name, str(error))
                return None
            return {}
        result = self.scratch / "result.json"
        result.unlink(missing_ok=True)
        command = self._child(side, result, "--prepare")
        finished = measure.run(command, cgroup=None, sampled=False)
        answer = json.loads(result.read_text()) if result.exists() else {}
        if "versions" not in answer:
            lines = finished.output.strip().splitlines() or [f"status {finished.status}"]
            self._skip(side.name, answer.get("unavailable", lines[-1]))
            return None
        versions: dict[str, str] = answer["versions"]
        return versions

    def _child(self, side: Side, result: Path, *options: str) -> list[str]:
        folder = str(self.place.folder.resolve())
        arguments = [self.comparison.name, side.name, folder, str(result.resolve()), *options]
        return [sys.executable, "-W", "ignore", "-m", "bench.child", *arguments]

    def _skip(self, what: str, why: str) -> None:
        self.skipped[what] = why
        print(f"skipped: {what}: {why}", flush=True)


def in_turn(sides: list[Side], number: int) -> list[Side]:
    """The sides in the order of a round: shuffled, and every second time the other way round.

    What a process leaves behind, such as memory that it has just freed, is felt by the next one: no
    side should always follow the same other. The orders are the same in every run of the bench.
    """
    order = Random(number // 2).sample(sides, len(sides))
    return order[::-1] if number % 2 else order


def _line(run: dict[str, Any]) -> str:
    name = f"  {run['round']}  {run['entry']:44}"
    if run["outcome"] != "done":
        return f"{name} {run['outcome']}: {run['why'][:120]}"
    if run["round"] == CHECK_ROUND:
        return f"{name} right"
    return f"{name} {run['seconds']:8.3f} s"


def machine(data_folder: Path) -> dict[str, Any]:
    """What the figures hold for; no name of the machine."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "processors": os.cpu_count(),
        "memory_bytes": pages,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "file_system": _file_system(data_folder.resolve()),
        "date": datetime.date.today().isoformat(),
    }


def _file_system(folder: Path) -> str:
    """The type of the file system that the data lies on."""
    try:
        rows = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    mounts = {Path(row[1]): row[2] for row in rows}
    return next((mounts[path] for path in (folder, *folder.parents) if path in mounts), "unknown")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
