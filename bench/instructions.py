"""Counts the instructions of fixed jobs of the C routine: `python -m bench.instructions [--write]`.

Counts say what a clock on a busy machine cannot: whether a change made the routine do more. They
are compared with instructions.json, and the exit status is 1 when one is off by more than the
tolerance; `--write` renews that file. Needs valgrind and cc; without them it says so and exits 0.

What memcpy takes depends on the processor: valgrind counts each byte of `rep movsb`, and knows no
AVX-512. So glibc is told to use SSE2, which every x86-64 has. Compilers and versions of glibc are
left: hence the tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent / "csrc"
EXPECTED = HERE / "instructions.json"
JOBS = ("conv-join", "conv-join-x34", "check-layer", "column-slice")
TOLERANCE = 0.10
GLIBC_TUNABLES = "glibc.cpu.hwcaps=-ERMS,-FSRM,-AVX2,-AVX_Fast_Unaligned_Load"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew instructions.json")
    options = parser.parse_args()
    for tool in ("valgrind", "cc"):
        if shutil.which(tool) is None:
            print(f"skipped: there is no {tool}")
            return 0
    with tempfile.TemporaryDirectory() as folder:
        program = compile_driver(Path(folder))
        counts = {job: count(program, job, Path(folder)) for job in JOBS}
    if options.write:
        EXPECTED.write_text(json.dumps(counts, indent=2) + "\n")
    expected = json.loads(EXPECTED.read_text())
    return compare(counts, expected)


def compile_driver(folder: Path) -> Path:
    """The driver with the routine's sources, as CMakeLists.txt lists and compiles them."""
    listed = re.search(
        r"add_library\(kda_copy OBJECT ([^)]*)\)", (CSRC / "CMakeLists.txt").read_text()
    )
    if listed is None:
        raise SystemExit("csrc/CMakeLists.txt lists no sources of kda_copy")
    sources = [str(CSRC / name) for name in listed[1].split()]
    program = folder / "instructions"
    flags = [
        "-std=c11",
        "-O2",
        "-DNDEBUG",
        "-g",
        "-D_FILE_OFFSET_BITS=64",
        "-pthread",
        "-Wl,-z,now",
    ]
    driver = str(HERE / "instructions.c")
    subprocess.run(
        ["cc", *flags, "-I", str(CSRC), driver, *sources, "-o", str(program)], check=True
    )
    return program


def count(program: Path, job: str, folder: Path) -> int:
    """The instructions of the job, all that it calls included."""
    out = folder / f"{job}.callgrind"
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
    command += ["--collect-atstart=no", "--toggle-collect=counted_job", str(program), job]
    environment = os.environ | {"GLIBC_TUNABLES": GLIBC_TUNABLES}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{job} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    totals = re.search(r"^(?:totals|summary): (\d+)", out.read_text(), re.MULTILINE)
    if totals is None or int(totals[1]) == 0:
        raise SystemExit(f"callgrind counted nothing of {job}")
    return int(totals[1])


def compare(counts: dict[str, int], expected: dict[str, int]) -> int:
    """Print the table; 1 when a count is off by more than the tolerance, or is not expected."""
    off = 0
    print(f"{'job':16}{'instructions':>14}{'expected':>14}{'change':>10}")
    for job, counted in counts.items():
        before = expected.get(job)
        change = None if before is None else counted / before - 1
        is_off = change is None or abs(change) > TOLERANCE
        off += is_off
        told = "none" if change is None else f"{change:+.1%}"
        mark = f"  more than {TOLERANCE:.0%}" if is_off else ""
        print(f"{job:16}{counted:14,}{before or 0:14,}{told:>10}{mark}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
