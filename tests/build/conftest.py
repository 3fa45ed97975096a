"""What the build tests share: the sources, the compiler, and one build of the distributions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def csrc() -> Path:
    """The C sources."""
    return ROOT / "csrc"


@pytest.fixture(scope="session")
def run() -> Run:
    """Runs a command, one of this environment's first; shows what it says if it may not fail."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])

    def run_command(
        *command: str | Path,
        may_fail: bool = False,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            check=False,
            cwd=cwd,
            env={**os.environ, "PATH": path, **(env or {})},
            text=True,
        )
        said = f"{ended.stdout}\n{ended.stderr}"
        assert ended.returncode == 0 or may_fail, f"{command}: {ended.returncode}\n{said}"
        return ended

    return run_command


@pytest.fixture(scope="session")
def compiler() -> str:
    """The C compiler, as the build would find it."""
    found = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if found is None:
        pytest.skip("there is no C compiler on this machine")
    return found


@pytest.fixture(scope="session")
def is_gcc(compiler: str, run: Run) -> bool:
    """Whether the compiler is GCC, which alone has -fanalyzer."""
    return "__clang__" not in run(compiler, "-dM", "-E", "-x", "c", os.devnull).stdout


@pytest.fixture(scope="session")
def distributions(compiler: str, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, what it unpacks to, and the wheel that was built from it."""
    assert compiler
    folder = tmp_path_factory.mktemp("distributions")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def unpacked(distributions: Path) -> Path:
    """The tree that the sdist unpacks to: a clean clone, as it were."""
    [tree] = (path for path in distributions.iterdir() if path.is_dir())
    return tree


@pytest.fixture(scope="session")
def wheel(distributions: Path) -> Path:
    """The wheel."""
    [found] = distributions.glob("*.whl")
    return found


@pytest.fixture
def install(run: Run, tmp_path: Path) -> Callable[..., Path]:
    """Makes a virtual environment, has pip install something there, and gives its Python."""

    def install_in_new_environment(*what: str | Path) -> Path:
        venv.create(tmp_path / "venv", with_pip=False)
        python = tmp_path / "venv" / "bin" / "python"
        run(sys.executable, "-m", "pip", "--python", python, "install", *what)
        return python

    return install_in_new_environment
