"""The C that takes headers apart, by itself: warnings, symbols, and its self-test."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = ("kda_header.c", "selftest_header.c")
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wpedantic", "-Werror"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]


def run(*command: str | Path) -> str:
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert ended.returncode == 0, f"{command}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_a_source_compiles_without_a_warning(
    source: str, level: str, compiler: str, tmp_path: Path
) -> None:
    is_gcc = "__clang__" not in run(compiler, "-dM", "-E", "-x", "c", os.devnull)
    analyzer = ["-fanalyzer"] if is_gcc else []
    output = ["-o", tmp_path / "out.o"]
    run(compiler, "-std=c11", level, *WARNINGS, *analyzer, "-c", CSRC / source, *output)


def test_every_external_symbol_is_in_the_header(compiler: str, tmp_path: Path) -> None:
    built = tmp_path / "kda_header.o"
    run(compiler, "-std=c11", "-c", CSRC / "kda_header.c", "-o", built)
    listed = run("nm", "-g", "-P", built).splitlines()
    defined = {line.split()[0].removeprefix("_") for line in listed if line.split()[1] != "U"}
    assert defined == {"kda_header_split", "kda_weight_map_split"}


@pytest.mark.parametrize("options", [["-O2"], SANITIZERS], ids=["fast", "sanitized"])
def test_the_self_test_passes(options: list[str], compiler: str, tmp_path: Path) -> None:
    selftest = tmp_path / "selftest"
    sources = [CSRC / source for source in SOURCES]
    run(compiler, "-std=c11", *options, *sources, "-o", selftest)
    passed = re.fullmatch(r"(\d+) checks passed\n", run(selftest))
    assert passed is not None
    assert int(passed[1]) > 300
