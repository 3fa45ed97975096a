"""A short run of every fuzz target: on its seeds, then for some time. `python tests/fuzz/run.py`.

Builds the C targets in a temporary folder. Exits with 1 when a target failed, and else with 2 when
one could not be run because something is missing; what can be run is run all the same.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import base64
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
SEEDS = HERE / "seeds"

C_TARGETS: Mapping[str, tuple[str, ...]] = {
    "kda_fuzz_header": ("-max_len=512", f"-dict={HERE / 'header.dict'}"),
    "kda_fuzz_spans": ("-max_len=512",),
    "kda_fuzz_spans_large": ("-max_len=512",),
}
PYTHON_TARGETS: Mapping[str, tuple[str, ...]] = {
    "fuzz_header": ("-max_len=1024",),
    "fuzz_index": ("-max_len=1024",),
}
CLANGS = ("clang", *(f"clang-{version}" for version in range(22, 13, -1)))
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
    "ASAN_OPTIONS": "detect_leaks=0",  # nothing is allocated, and containers may forbid the search
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class MissingError(Exception):
    """Something that a target needs is not on this machine."""


def said_by(*command: str | Path) -> str:
    """What a command says; raises CalledProcessError when it fails."""
    return subprocess.run(
        [str(part) for part in command],
        env=ENVIRONMENT,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ).stdout


def found_clang(folder: Path) -> str:
    """A clang that can build fuzz targets: CC, or one of the usual names."""
    source = folder / "nothing.c"
    source.write_text(
        "int LLVMFuzzerTestOneInput(const void *d, unsigned long n);\n"
        "int LLVMFuzzerTestOneInput(const void *d, unsigned long n)\n"
        "{ return d == 0 && n != 0; }\n"
    )
    asked = (os.environ["CC"],) if "clang" in os.environ.get("CC", "") else CLANGS
    for name in asked:
        try:
            said_by(name, "-fsanitize=fuzzer,address,undefined", source, "-o", folder / "nothing")
        except (OSError, subprocess.CalledProcessError):
            continue
        return name
    raise MissingError(
        "clang with libFuzzer (Debian, Ubuntu: apt install clang libclang-rt-dev, "
        "or clang-19 libclang-rt-19-dev; elsewhere set CC)"
    )


def built(folder: Path) -> Path:
    """The folder with the C targets."""
    clang = found_clang(folder)
    if shutil.which("cmake", path=ENVIRONMENT["PATH"]) is None:
        raise MissingError("cmake (pip install cmake ninja)")
    ENVIRONMENT["CC"] = clang
    has_ninja = shutil.which("ninja", path=ENVIRONMENT["PATH"]) is not None
    options = ["-DKDA_EXTENSION=OFF", "-DKDA_FUZZ=ON", "-DKDA_SANITIZE=ON", "-DKDA_WERROR=ON"]
    generator = ["-G", "Ninja"] if has_ninja else []
    said_by("cmake", *generator, "-S", CSRC, "-B", folder / "build", *options)
    said_by("cmake", "--build", folder / "build")
    print("C targets built by", said_by(clang, "--version").splitlines()[0])
    return folder / "build"


def under_atheris(name: str) -> list[str]:
    if importlib.util.find_spec("atheris") is None:
        raise MissingError("atheris (pip install atheris; it has wheels for Linux and Python 3.11)")
    return [sys.executable, str(HERE / "under_atheris.py"), name]


def run(name: str, command: list[str], folder: Path, seconds: int) -> bool:
    """Whether a target holds on its seeds and on what is made of them."""
    corpus = folder / f"corpus_{name}"
    corpus.mkdir()
    limits = [f"-max_total_time={seconds}", "-timeout=10", f"-artifact_prefix={folder}/{name}-"]
    done = subprocess.run(
        [*command, *limits, str(corpus), str(SEEDS / name)],
        env=ENVIRONMENT,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    counts = re.findall(r"^#(\d+)\s+DONE\s+cov: (\d+)", done.stderr, re.MULTILINE)
    if done.returncode == 0 and counts:
        executions, counters = counts[-1]
        print(f"{name}: {executions} executions, {counters} counters reached, no failure")
        return True
    print(f"{name}: FAILED, exit status {done.returncode}\n{done.stdout}{done.stderr[-6000:]}")
    for input_file in folder.glob(f"{name}-*"):
        print(f"{name}: base64 of {input_file.name}:")
        print(base64.b64encode(input_file.read_bytes()).decode())
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description="A short run of every fuzz target.")
    parser.add_argument("--seconds", type=int, default=20, help="for each target (20)")
    seconds = parser.parse_args().seconds
    sys.stdout.reconfigure(line_buffering=True)
    missing: dict[str, None] = {}
    held = []
    with tempfile.TemporaryDirectory(prefix="kda_fuzz_") as made:
        folder = Path(made)
        try:
            programs = built(folder)
            for name, options in C_TARGETS.items():
                held.append(run(name, [str(programs / name), *options], folder, seconds))
        except MissingError as error:
            missing[str(error)] = None
        except subprocess.CalledProcessError as error:
            print(f"the C targets cannot be built:\n{error.stdout}")
            held.append(False)
        for name, options in PYTHON_TARGETS.items():
            try:
                command = under_atheris(name)
            except MissingError as error:
                missing[str(error)] = None
            else:
                held.append(run(name, [*command, *options], folder, seconds))
    for what in missing:
        print(f"missing: {what}", file=sys.stderr)
    return 1 if not all(held) else 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
