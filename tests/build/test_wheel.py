"""The wheel as users get it: the stable ABI alone, and at work where nothing can be compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
COMPILERS = ("c++", "cc", "clang", "cmake", "gcc", "ld", "make", "ninja")

Run = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.slow
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="as wheels are made for Linux")


def files_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """What pyproject.toml says of wheels: how cibuildwheel builds and tests them."""
    toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    read: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return read["tool"]["cibuildwheel"]


@pytest.fixture(scope="module")
def extension(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled part, out of the wheel."""
    folder = tmp_path_factory.mktemp("extension")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("kda_stream/_native.abi3.so", folder))


def test_the_extension_uses_the_stable_abi_of_python_3_10_alone(wheel: Path, run: Run) -> None:
    pytest.importorskip("abi3audit")
    run(sys.executable, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.10", wheel)


@on_linux
def test_the_extension_shows_other_libraries_nothing_but_its_entry(
    extension: Path, compiler: str, run: Run
) -> None:
    assert compiler  # nm comes with it
    listed = run("nm", "-D", "--defined-only", "-P", extension).stdout
    assert [line.split()[0] for line in listed.splitlines()] == ["PyInit__native"]


@on_linux
def test_a_wheel_made_fit_for_other_systems_brings_no_library_along(
    wheel: Path, run: Run, tmp_path: Path
) -> None:
    pytest.importorskip("auditwheel")
    if shutil.which("patchelf", path=PROGRAMS) is None:
        pytest.skip("there is no patchelf")
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path, wheel)
    [repaired] = tmp_path.glob("*.whl")
    assert "-cp310-abi3-manylinux_2_" in repaired.name or "-musllinux_1_" in repaired.name
    assert files_in(repaired) == files_in(wheel)


@pytest.mark.parametrize(
    ("platform", "arch", "kinds"),
    [
        ("linux", "x86_64", ["manylinux", "musllinux"]),
        ("linux", "aarch64", ["manylinux", "musllinux"]),
        ("macos", "x86_64", ["macosx"]),
        ("macos", "arm64", ["macosx"]),
    ],
)
def test_cibuildwheel_builds_with_the_oldest_python_first_and_tests_with_a_late_one(
    platform: str, arch: str, kinds: list[str], run: Run
) -> None:
    pytest.importorskip("cibuildwheel")
    asked = ("--print-build-identifiers", "--platform", platform, "--archs", arch)
    identifiers = run(sys.executable, "-m", "cibuildwheel", *asked, cwd=ROOT).stdout.split()
    pythons = ("cp310", "cp314")
    assert identifiers == [f"{python}-{kind}_{arch}" for kind in kinds for python in pythons]


def test_the_wheel_installs_and_passes_its_tests_where_there_is_no_compiler(
    wheel: Path, settings: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    """With the tests, the packages and the commands that pyproject.toml gives to cibuildwheel."""
    venv.create(tmp_path / "venv", with_pip=False)
    programs = tmp_path / "venv" / "bin"
    bare = {"CC": "", "CXX": "", "PATH": str(programs)}
    assert [name for name in COMPILERS if shutil.which(name, path=bare["PATH"])] == []
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install")
    run(*pip, "--only-binary", ":all:", wheel, *settings["test-requires"], env=bare)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for source in map(ROOT.joinpath, settings["test-sources"]):
        if source.is_dir():
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, elsewhere / source.name, ignore=leave)
        else:
            shutil.copy(source, elsewhere)
    ask = "import kda_stream; print(kda_stream.__file__)"
    where = run("python", "-c", ask, cwd=elsewhere, env=bare).stdout.strip()
    assert where.startswith(f"{tmp_path / 'venv'}{os.sep}")
    for command in settings["test-command"]:
        run("/bin/sh", "-c", command, cwd=elsewhere, env=bare)
