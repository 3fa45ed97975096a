"""The C by itself: warnings, symbols, and its self-tests, under the sanitizers too."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = sorted(path.name for path in CSRC.glob("*.c"))
HEADERS = sorted(path.name for path in CSRC.glob("*.h"))
LIBRARY = [name for name in SOURCES if name.startswith("kda_")]  # the rest are tests
SELFTESTS = ["kda_selftest", "kda_selftest_header"]
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wpedantic", "-Werror"]
DECLARED = re.compile(r"^[a-z]\w* \**(\w+)\(", re.MULTILINE)
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


def test_the_external_symbols_are_those_of_the_headers_and_begin_with_kda(
    csrc: Path, compiler: str, run: Run, tmp_path: Path
) -> None:
    names: list[str] = []
    for source in LIBRARY:
        built = tmp_path / "built.o"
        run(compiler, "-std=c11", "-c", csrc / source, "-o", built)
        listed = run("nm", "-g", "-P", built).stdout
        defined = [line.split()[0] for line in listed.splitlines() if line.split()[1] != "U"]
        names += [name.removeprefix("_") for name in defined]  # macOS puts a `_` before each
    declared = [
        name
        for header in HEADERS
        if header.startswith("kda_")
        for name in DECLARED.findall((csrc / header).read_text())
    ]
    assert sorted(names) == sorted(declared)
    assert [name for name in names if not name.startswith("kda_")] == []
    assert {"kda_spans_check", "kda_spans_copy", "kda_header_split"} <= set(names)


def test_cmake_compiles_every_source(csrc: Path) -> None:
    said = (csrc / "CMakeLists.txt").read_text()
    assert [name for name in SOURCES if not re.search(rf"\s{name}[\s)]", said)] == []


@pytest.fixture(scope="module")
def build_selftests(
    csrc: Path, compiler: str, run: Run, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Builds the self-tests as CMakeLists.txt says, once for each value of KDA_SANITIZE."""
    assert compiler

    @functools.cache
    def build(sanitize: str) -> Path:
        folder = tmp_path_factory.mktemp("selftests")
        chosen = ["-DKDA_EXTENSION=OFF", "-DKDA_SELFTEST=ON", "-DKDA_WERROR=ON"]
        chosen.append(f"-DKDA_SANITIZE={sanitize}")
        run("cmake", "-S", csrc, "-B", folder, "-G", "Ninja", *chosen)
        run("cmake", "--build", folder)
        return folder

    return build


@pytest.mark.parametrize("selftest", SELFTESTS)
@pytest.mark.parametrize("sanitize", ["OFF", "ON"])
def test_a_self_test_passes(
    sanitize: str, selftest: str, build_selftests: Callable[[str], Path], run: Run
) -> None:
    said = run(build_selftests(sanitize) / selftest).stdout
    passed = PASSED.fullmatch(said)
    assert passed, said
    assert int(passed[1]) > 100_000
    assert "the linker" not in said or sys.platform != "linux"  # it knows --wrap there


@pytest.mark.parametrize("selftest", SELFTESTS)
def test_the_sanitizers_are_really_in_a_sanitized_self_test(
    selftest: str, build_selftests: Callable[[str], Path], run: Run
) -> None:
    symbols = run("nm", build_selftests("ON") / selftest).stdout
    assert "__asan_init" in symbols
    assert "__ubsan_handle" in symbols
