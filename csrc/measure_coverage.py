"""Measures how much of the library's C its self-tests run: `measure_coverage.py COMPILER FOLDER`.

Builds both self-tests in FOLDER with KDA_COVERAGE, warnings being errors, runs them, and prints for
each source how much of it was run. With GCC these are lines and branches, as gcov counts them; with
clang (19 or newer) regions, branches and conditions that decide alone (MC/DC), as llvm-cov does.
What was missed is named, and then the exit status is 1. What only other systems or processors have
is left out by the preprocessor, and not counted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

CSRC = Path(__file__).resolve().parent
SELFTESTS = ("kda_selftest", "kda_selftest_header")
OPTIONS = (
    "-DKDA_EXTENSION=OFF",
    "-DKDA_SELFTEST=ON",
    "-DKDA_COVERAGE=ON",
    "-DKDA_WERROR=ON",
)


class Coverage(NamedTuple):
    """What was run of one source."""

    source: str
    counts: dict[str, tuple[int, int]]  # of lines, branches, ...: run, and all
    missed: list[tuple[int, str]]  # line, and what of it

    def __str__(self) -> str:
        said = [f"{run} of {all_} {what}" for what, (run, all_) in self.counts.items()]
        return f"{self.source}: {', '.join(said)}"

    def is_complete(self) -> bool:
        return not self.missed and all(run == all_ for run, all_ in self.counts.values())


def run(*command: str | Path, **environment: str) -> str:
    """What a command prints; ends this one when it fails."""
    ended = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        env={**os.environ, **environment},
        text=True,
    )
    if ended.returncode != 0:
        raise SystemExit(f"{command}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout


def is_library_source(path: str) -> bool:
    name = Path(path).name
    return name.startswith("kda_") and name.endswith(".c")


def found_by_gcov(compiler: Path, folder: Path) -> list[Coverage]:
    """Lines and branches. A branch is one way out of one condition."""
    named_alike = compiler.resolve().name.replace("gcc", "gcov")  # of the same release
    gcov = shutil.which(named_alike) or "gcov"
    options = ("--json-format", "--branch-probabilities", "--stdout")
    found = []
    for notes in sorted(folder.rglob("kda_copy.dir/*.gcno")):
        [said] = [json.loads(line) for line in run(gcov, *options, notes).splitlines() if line]
        [of] = [file for file in said["files"] if is_library_source(file["file"])]
        found.append(coverage_of_lines(Path(of["file"]).name, of["lines"]))
    return found


def coverage_of_lines(source: str, lines: list[dict[str, Any]]) -> Coverage:
    runs: dict[int, int] = defaultdict(int)
    branches = []
    missed = []
    for line in lines:
        number = line["line_number"]
        runs[number] += line["count"]
        for index, branch in enumerate(line["branches"], 1):
            branches.append(branch["count"])
            if line["count"] != 0 and branch["count"] == 0:
                missed.append((number, f"branch {index} of {len(line['branches'])} is not taken"))
    missed += [(number, "is not run") for number, count in runs.items() if count == 0]
    counts = {
        "lines": (sum(count != 0 for count in runs.values()), len(runs)),
        "branches": (sum(count != 0 for count in branches), len(branches)),
    }
    return Coverage(source, counts, missed)


def found_by_llvm_cov(compiler: Path, folder: Path) -> list[Coverage]:
    """Regions, branches and MC/DC: each condition alone has decided, both ways."""
    tools = compiler.resolve().parent
    merged = folder / "all.profdata"
    run(tools / "llvm-profdata", "merge", "-o", merged, *folder.glob("*.profraw"))
    binaries: list[str | Path] = [folder / SELFTESTS[0], "-object", folder / SELFTESTS[1]]
    exported = json.loads(run(tools / "llvm-cov", "export", "-instr-profile", merged, *binaries))
    files = exported["data"][0]["files"]
    return [coverage_of_regions(of) for of in files if is_library_source(of["filename"])]


def coverage_of_regions(of: dict[str, Any]) -> Coverage:
    """Places are a line and a column; how they stand in a record is llvm-cov's."""
    missed = []
    for line, column, count, has_count, is_entry, _is_gap in of["segments"]:
        if has_count and is_entry and count == 0:
            missed.append((line, f"what begins at column {column} is not run"))
    for line, column, _end_line, _end_column, times_true, times_false, *_ in of["branches"]:
        for times, outcome in ((times_true, "true"), (times_false, "false")):
            if times == 0:
                missed.append((line, f"the condition at column {column} is never {outcome}"))
    for line, column, *_, conditions in of["mcdc_records"]:
        for index, decides in enumerate(conditions, 1):
            if not decides:
                what = f"condition {index} of the decision at column {column} decides nothing alone"
                missed.append((line, what))
    counts = {}
    for key, name in (("regions", "regions"), ("branches", "branches"), ("mcdc", "conditions")):
        counts[name] = (of["summary"][key]["covered"], of["summary"][key]["count"])
    return Coverage(Path(of["filename"]).name, counts, missed)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: measure_coverage.py COMPILER FOLDER")
    which = shutil.which(sys.argv[1])
    if which is None:
        raise SystemExit(f"{sys.argv[1]}: there is no such compiler")
    compiler, folder = Path(which), Path(sys.argv[2])
    is_clang = "__clang__" in run(compiler, "-dM", "-E", "-x", "c", os.devnull)
    run("cmake", "-S", CSRC, "-B", folder, "-G", "Ninja", *OPTIONS, CC=str(compiler))
    run("cmake", "--build", folder)
    for stale in (*folder.rglob("*.gcda"), *folder.glob("*.profraw")):
        stale.unlink()
    for selftest in SELFTESTS:
        said = run(folder / selftest, LLVM_PROFILE_FILE=str(folder / "%m.profraw"))
        sys.stdout.write(f"{selftest}: {said}")
    found = (found_by_llvm_cov if is_clang else found_by_gcov)(compiler, folder)
    for coverage in found:
        sys.stdout.write(f"{coverage}\n")
    for coverage in found:
        text = (CSRC / coverage.source).read_text().splitlines()
        for line, what in sorted(coverage.missed):
            sys.stdout.write(f"{coverage.source}:{line}: {what}: {text[line - 1].strip()}\n")
    if not found or not all(coverage.is_complete() for coverage in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
