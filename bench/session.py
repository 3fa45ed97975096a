"""One run of the bench: every entry in turn, round by round, under every condition."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import ceiling, conditions, measure, page_cache
from .conditions import Condition, SkippedError
from .data import DataSet
from .runners import Runner

FORMAT = 1
CHECK_ROUND = 0  # bytes are compared and memory is sampled; not timed


class BenchError(Exception):
    """A runner delivered wrong bytes."""


@dataclass(frozen=True)
class Entry:
    """Something that is measured: a runner or a case of the ceiling."""

    name: str
    kind: str  # "own", "peer", "ceiling" or "memory" (a ceiling that reads no file)
    reads: str
    settings: str
    versions: dict[str, str]
    runner: Runner | None = None
    case: ceiling.Case | None = None

    def described(self) -> dict[str, Any]:
        told = (self.name, self.kind, self.reads, self.settings, self.versions)
        return dict(zip(("name", "kind", "reads", "settings", "versions"), told, strict=True))


class Session:
    """Holds what all runs share; `measure_all` yields the results as plain data for JSON."""

    def __init__(self, data: DataSet, folder: Path) -> None:
        self.data = data
        self.folder = folder  # for programs and for what children write
        self.skipped: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []

    def measure_all(
        self, runners: list[Runner], chosen: list[Condition], rounds: int, *, ceilings: bool
    ) -> Iterator[dict[str, Any]]:
        """The results so far, after each condition."""
        entries = [entry for entry in map(self._runner_entry, runners) if entry is not None]
        program = self._compiled() if ceilings else None
        shown: dict[str, Entry] = {}
        done: list[dict[str, Any]] = []
        for condition in chosen:
            cases = ceiling.WARM if condition.cached else ceiling.COLD
            all_entries = entries + ([_case_entry(case) for case in cases] if program else [])
            shown |= {entry.name: entry for entry in all_entries}
            try:
                self._measure_condition(condition, all_entries, rounds, program)
            except SkippedError as error:
                self._skip(condition.name, str(error))
            done.append(asdict(condition))
            yield {
                "format": FORMAT,
                "machine": machine(),
                "payload_bytes": self.data.nbytes,
                "layers": len(self.data.layers),
                "rounds": rounds,
                "conditions": done,
                "entries": [entry.described() for entry in shown.values()],
                "skipped": self.skipped,
                "runs": self.runs,
            }

    def _measure_condition(
        self, condition: Condition, entries: list[Entry], rounds: int, program: Path | None
    ) -> None:
        print(f"\n{condition.name}", flush=True)
        gone: set[str] = set()  # killed or failed once: not tried again
        for number in range(CHECK_ROUND, rounds + 1):
            first = number * len(entries) // (rounds + 1)  # the order is rotated
            for entry in entries[first:] + entries[:first]:
                if entry.name in gone or (number == CHECK_ROUND and entry.case is not None):
                    continue
                run = self._run(condition, entry, number, program)
                self.runs.append(run)
                print(_line(run), flush=True)
                if run["outcome"] != "done":
                    gone.add(entry.name)

    def _run(
        self, condition: Condition, entry: Entry, number: int, program: Path | None
    ) -> dict[str, Any]:
        files = self.data.shards if entry.runner is None else entry.runner.files(self.data)
        resident_before = conditions.bring_about(condition, files)
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        if entry.case is not None and program is not None:
            command = entry.case.command(program, self.folder / "ranges")
        else:
            options = ["--cached"] if condition.cached else []
            options += ["--check"] if number == CHECK_ROUND else []
            command = self._child(entry.name, result, *options)
        with conditions.memory_cgroup(condition) as cgroup:
            sampled = number == CHECK_ROUND
            finished = measure.run(command, cgroup=cgroup, sampled=sampled)
        run: dict[str, Any] = {"entry": entry.name, "condition": condition.name, "round": number}
        run["outcome"] = finished.outcome
        if finished.outcome == "done":
            run |= json.loads(finished.output if entry.case is not None else result.read_text())
        else:
            run["why"] = (finished.output.strip() or f"status {finished.status}").splitlines()[-1]
        for bad in run.keys() & {"wrong", "unavailable"}:
            raise BenchError(f"{entry.name}, {condition.name}: {run[bad]}")
        if sampled:
            run["anonymous_bytes_peak"] = finished.anonymous_bytes_peak
            run["file_bytes_peak"] = finished.file_bytes_peak
        run["cache_bytes_left"] = page_cache.resident_bytes(files) - resident_before
        return run

    def _runner_entry(self, runner: Runner) -> Entry | None:
        """The runner's entry, once its own files are written; None where it cannot run."""
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        finished = measure.run(
            self._child(runner.name, result, "--prepare"), cgroup=None, sampled=False
        )
        answer = json.loads(result.read_text()) if result.exists() else {}
        if "versions" not in answer:
            lines = finished.output.strip().splitlines() or [f"status {finished.status}"]
            self._skip(runner.name, answer.get("unavailable", lines[-1]))
            return None
        kind = "own" if runner.packages == ("kda_stream",) else "peer"
        versions = answer["versions"]
        return Entry(runner.name, kind, runner.reads, runner.settings, versions, runner=runner)

    def _compiled(self) -> Path | None:
        ceiling.write_ranges(self.data, self.folder)
        try:
            return ceiling.compile_program(self.folder)
        except FileNotFoundError:
            self._skip("ceilings", "there is no cc")
        except subprocess.CalledProcessError as error:
            self._skip("ceilings", f"cc failed: {error.stderr.strip()[-200:]}")
        return None

    def _child(self, runner: str, result: Path, *options: str) -> list[str]:
        arguments = [runner, str(self.data.folder.resolve()), str(result.resolve()), *options]
        return [sys.executable, "-W", "ignore", "-m", "bench.child", *arguments]

    def _skip(self, what: str, why: str) -> None:
        self.skipped[what] = why
        print(f"skipped: {what}: {why}", flush=True)


def _case_entry(case: ceiling.Case) -> Entry:
    kind = "ceiling" if case.reads_files else "memory"
    reads = "KDA tensors, not placed" if case.reads_files else "nothing"
    return Entry(case.name, kind, reads, f"{case.stores} stores", {}, case=case)


def _line(run: dict[str, Any]) -> str:
    name = f"  {run['round']}  {run['entry']:44}"
    if run["outcome"] != "done":
        return f"{name} {run['outcome']}: {run['why'][:120]}"
    if run["round"] == CHECK_ROUND:
        return f"{name} bytes are right"
    return f"{name} {run['payload_bytes'] / run['seconds'] / 1e9:6.2f} GB/s"


def machine() -> dict[str, Any]:
    """What the figures hold for; no name of the machine."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "processors": os.cpu_count(),
        "memory_bytes": pages,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
