"""The self-tests run all of the library's C: every line, every branch, every condition (MC/DC)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kda_stream.staging.native import extension

Run = Callable[..., "subprocess.CompletedProcess[str]"]

CLANG_OLDEST = 19  # before, MC/DC is missing or stops at six conditions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the system's answers are told on Linux"),
]


def expect_all_run(compiler: str | Path, csrc: Path, run: Run, folder: Path) -> None:
    _, lib = extension()
    if not lib.kda_can_populate():
        pytest.skip("the kernel cannot fault in a mapped file (Linux 5.14)")
    ended = run(sys.executable, csrc / "measure_coverage.py", compiler, folder, may_fail=True)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    sources = sorted(path.name for path in csrc.glob("kda_*.c"))
    assert re.findall(r"^(kda_\w+\.c): ", ended.stdout, re.MULTILINE) == sources


def test_the_self_tests_run_every_line_and_branch_as_gcov_counts(
    csrc: Path, compiler: str, is_gcc: bool, run: Run, tmp_path: Path
) -> None:
    gcc = compiler if is_gcc else shutil.which("gcc")
    if gcc is None:
        pytest.skip("there is no GCC on this machine")
    expect_all_run(gcc, csrc, run, tmp_path)


@pytest.fixture
def clang(run: Run, tmp_path: Path) -> Path:
    """A clang that counts MC/DC, with its libraries and with llvm-cov beside it."""
    names = ["clang", *(f"clang-{release}" for release in range(CLANG_OLDEST, CLANG_OLDEST + 12))]
    for found in filter(None, map(shutil.which, names)):
        tools = Path(found).resolve().parent
        version = re.search(r"clang version (\d+)", run(found, "--version").stdout)
        if version is None or int(version[1]) < CLANG_OLDEST or not (tools / "llvm-cov").exists():
            continue
        empty = tmp_path / "empty.c"
        empty.write_text("int main(void) { return 0; }\n")
        build = [found, "-fprofile-instr-generate", empty, "-o", tmp_path / "empty"]
        if run(*build, may_fail=True).returncode == 0:
            return Path(found)
    pytest.skip(f"no clang {CLANG_OLDEST} or newer with its llvm-cov and its profiling library")


def test_the_self_tests_take_every_branch_and_let_every_condition_decide(
    csrc: Path, clang: Path, run: Run, tmp_path: Path
) -> None:
    expect_all_run(clang, csrc, run, tmp_path / "build")
