"""The C routine by itself: warnings, symbols, and its self-test under the sanitizers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = sorted(path.name for path in CSRC.glob("*.c"))
HEADERS = sorted(path.name for path in CSRC.glob("*.h"))
LIBRARY = [name for name in SOURCES if name.startswith("kda_")]  # the rest are tests
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wpedantic", "-Werror"]
PASSED = re.compile(r"(?:left out: .*\n)*(\d+) checks passed\n")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_a_source_compiles_without_a_warning(
    source: str, level: str, csrc: Path, compiler: str, is_gcc: bool, run: Run, tmp_path: Path
) -> None:
    analyzer = ["-fanalyzer"] if is_gcc else []
    output = ["-o", tmp_path / "out.o"]
    run(compiler, "-std=c11", level, *WARNINGS, *analyzer, "-c", csrc / source, *output)


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_stands_alone_in_c_and_declares_nothing_twice(
    header: str, csrc: Path, compiler: str, run: Run, tmp_path: Path
) -> None:
    source = tmp_path / "twice.c"
    source.write_text(f'#include "{header}"\n#include "{header}"\nextern int nothing;\n')
    run(compiler, "-std=c11", *WARNINGS, "-I", csrc, "-c", source, "-o", tmp_path / "twice.o")


def test_every_external_symbol_begins_with_kda(
    csrc: Path, compiler: str, run: Run, tmp_path: Path
) -> None:
    names: set[str] = set()
    for source in LIBRARY:
        built = tmp_path / "built.o"
        run(compiler, "-std=c11", "-c", csrc / source, "-o", built)
        listed = run("nm", "-g", "-P", built).stdout
        defined = [line.split()[0] for line in listed.splitlines() if line.split()[1] != "U"]
        found = {name.removeprefix("_") for name in defined}  # macOS puts a `_` before each
        assert found, source
        assert not found & names, source
        names |= found
    assert [name for name in sorted(names) if not name.startswith("kda_")] == []
    assert {"kda_spans_check", "kda_spans_copy", "kda_can_populate"} <= names


def test_cmake_compiles_every_source(csrc: Path) -> None:
    said = (csrc / "CMakeLists.txt").read_text()
    assert [name for name in SOURCES if not re.search(rf"\s{name}[\s)]", said)] == []


def build_selftest(csrc: Path, folder: Path, run: Run, *options: str) -> Path:
    """Builds the self-test as CMakeLists.txt says."""
    chosen = ["-DKDA_EXTENSION=OFF", "-DKDA_SELFTEST=ON", "-DKDA_WERROR=ON", *options]
    run("cmake", "-S", csrc, "-B", folder, "-G", "Ninja", *chosen)
    run("cmake", "--build", folder)
    return folder / "kda_selftest"


@pytest.mark.parametrize("sanitize", ["OFF", "ON"])
def test_the_self_test_passes(
    sanitize: str, csrc: Path, compiler: str, run: Run, tmp_path: Path
) -> None:
    assert compiler
    selftest = build_selftest(csrc, tmp_path, run, f"-DKDA_SANITIZE={sanitize}")
    said = run(selftest).stdout
    passed = PASSED.fullmatch(said)
    assert passed, said
    assert int(passed[1]) > 100_000


def test_the_sanitizers_are_really_in_the_sanitized_self_test(
    csrc: Path, compiler: str, run: Run, tmp_path: Path
) -> None:
    assert compiler
    selftest = build_selftest(csrc, tmp_path, run, "-DKDA_SANITIZE=ON")
    symbols = run("nm", selftest).stdout
    assert "__asan_init" in symbols
    assert "__ubsan_handle" in symbols
