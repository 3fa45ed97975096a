"""What the build tests share: the source tree, the compiler, and one build of the distributions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Distributions:
    """An sdist, the tree that it unpacks to, and the wheel that was built from it."""

    sdist: Path
    tree: Path
    wheel: Path


@pytest.fixture(scope="session")
def csrc() -> Path:
    """The C sources."""
    return ROOT / "csrc"


@pytest.fixture(scope="session")
def run() -> Run:
    """Runs a command and keeps what it says; `check=True` shows that when it fails."""

    def run_command(
        *command: str | Path, check: bool = True, **options: object
    ) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(  # type: ignore[call-overload]
            [str(part) for part in command], capture_output=True, text=True, check=False, **options
        )
        said = f"{ended.stdout}\n{ended.stderr}"
        assert ended.returncode == 0 or not check, f"{command} gave {ended.returncode}:\n{said}"
        return ended  # type: ignore[no-any-return]

    return run_command


@pytest.fixture(scope="session")
def compiler() -> str:
    """The C compiler, as the build would find it."""
    found = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if found is None:
        pytest.skip("no C compiler on this machine")
    return found


@pytest.fixture(scope="session")
def is_gcc(compiler: str, run: Run) -> bool:
    """Whether the compiler is GCC, which alone has -fanalyzer."""
    macros = run(compiler, "-dM", "-E", "-x", "c", os.devnull).stdout
    return "__GNUC__" in macros and "__clang__" not in macros


@pytest.fixture(scope="session")
def distributions(compiler: str, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """`python -m build`: the sdist from the tree, the wheel from the sdist, each in isolation."""
    assert compiler
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    [sdist] = out.glob("*.tar.gz")
    [wheel] = out.glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    return Distributions(sdist, out / sdist.name.removesuffix(".tar.gz"), wheel)
