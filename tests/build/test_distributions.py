"""The sdist, the wheel and the editable install, each made as a user makes it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Install = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.slow

# Joins three spans, a mapped one and a file among them, and prints where the extension lies.
USE_THE_EXTENSION = """
import mmap, os, tempfile
from kda_stream import _native
ffi, lib = _native.ffi, _native.lib

with tempfile.TemporaryFile() as file:
    file.write(b"mapped..file")
    file.flush()
    address = lib.mmap(ffi.NULL, 12, lib.PROT_READ, lib.MAP_SHARED, file.fileno(), 0)
    assert address != lib.MAP_FAILED
    memory = ffi.new("unsigned char[]", b"memory")
    out = ffi.new("unsigned char[]", 16)
    spans = ffi.new("kda_span[3]", [
        dict(kind=lib.KDA_MEMORY, source=memory, source_bytes=6, rows=1, row_bytes=6),
        dict(kind=lib.KDA_MAPPED, source=ffi.cast("unsigned char *", address), source_bytes=12,
             rows=1, row_bytes=6, destination=6),
        dict(kind=lib.KDA_FILE, fd=file.fileno(), file_offset=8, source_bytes=4, rows=1,
             row_bytes=4, destination=12),
    ])
    if not lib.kda_can_populate():
        spans[1].kind = lib.KDA_MEMORY
    cursor = ffi.new("kda_cursor *")
    means = ffi.new("kda_means *", dict(nanoseconds_max=10**9, threads=2))
    status = lib.kda_spans_copy(spans, 3, out, 16, means, cursor)
    assert status == lib.KDA_OK, status
    assert bytes(out) == b"memorymappedfile", bytes(out)
    assert lib.munmap(address, 12) == 0
    spans[2].destination = 10
    status = lib.kda_spans_copy(spans, 3, out, 16, means, cursor)
    assert status == lib.KDA_DESTINATION_OVERLAP, status
    assert cursor.span == 2
print(_native.__file__)
"""


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_sdist_holds_what_a_build_and_its_tests_need(unpacked: Path) -> None:
    wanted = [
        "LICENSE",
        "README.md",
        "csrc/CMakeLists.txt",
        "csrc/build_native.py",
        *(f"csrc/{path.name}" for path in (ROOT / "csrc").glob("*.[ch]")),
        "kda_stream/__init__.py",
        "kda_stream/py.typed",
        "pyproject.toml",
        "tests/build/test_distributions.py",
    ]
    assert [name for name in wanted if not (unpacked / name).is_file()] == []


def test_the_sdist_holds_nothing_that_was_built(unpacked: Path) -> None:
    built = {".so", ".o", ".pyc", ".whl", ".gcda"}
    assert [path for path in unpacked.rglob("*") if path.suffix in built] == []


def test_the_wheel_is_one_for_every_python_from_3_10_on(wheel: Path) -> None:
    name, version, python, abi, _platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("kda_stream", "0.1.0", "cp310", "abi3")


def test_the_wheel_holds_the_extension_and_its_types(wheel: Path) -> None:
    assert {"kda_stream/_native.abi3.so", "kda_stream/py.typed"} <= names_in(wheel)


def test_the_wheel_holds_the_package_and_no_source_or_test(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names_in(wheel)}
    assert tops == {"kda_stream", "kda_stream-0.1.0.dist-info"}
    suffixes = {Path(name).suffix for name in names_in(wheel) if name.startswith("kda_stream/")}
    assert suffixes <= {".css", ".js", ".json", ".py", ".so", ".typed"}


def test_the_wheel_holds_the_schema_of_what_the_command_prints(wheel: Path) -> None:
    assert "kda_stream/cli/output.schema.json" in names_in(wheel)


def test_the_wheel_holds_the_licence(wheel: Path) -> None:
    assert "kda_stream-0.1.0.dist-info/licenses/LICENSE" in names_in(wheel)


def test_the_extension_in_the_wheel_copies(wheel: Path, install: Install, run: Run) -> None:
    python = install(wheel)
    where = run(python, "-c", USE_THE_EXTENSION, cwd=python.parent).stdout.strip()
    assert where.endswith("/site-packages/kda_stream/_native.abi3.so")


def test_an_editable_install_uses_the_tree_and_the_compiled_extension(
    unpacked: Path, install: Install, run: Run
) -> None:
    python = install("-e", unpacked)
    run(python, "-c", USE_THE_EXTENSION, cwd=unpacked)
    ask = "import kda_stream; print(kda_stream.__file__)"
    where = run(python, "-c", ask, cwd=python.parent).stdout.strip()
    assert Path(where) == unpacked / "kda_stream" / "__init__.py"


def test_the_extension_copies_under_the_sanitizers(
    unpacked: Path, compiler: str, is_gcc: bool, install: Install, run: Run
) -> None:
    if not is_gcc:
        pytest.skip("the sanitizers' libraries are looked up as GCC names them")
    libraries = [
        run(compiler, f"-print-file-name={name}").stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps some memory to its end
        "LD_PRELOAD": " ".join(libraries),
    }
    python = install("--config-settings=cmake.define.KDA_SANITIZE=ON", unpacked)
    used = run(python, "-c", USE_THE_EXTENSION, cwd=python.parent, env=environment).stdout.strip()
    assert "__asan_init" in run("nm", "-D", used).stdout


def test_an_install_without_a_c_compiler_says_what_to_install(
    unpacked: Path, run: Run, tmp_path: Path
) -> None:
    nothing = {"CC": "", "CXX": "", "PATH": str(tmp_path)}
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path]
    ended = run(*pip, unpacked, may_fail=True, env=nothing)
    said = " ".join((ended.stdout + ended.stderr).split())
    assert ended.returncode != 0
    assert "kda_stream needs a C compiler to build, and none was found. Install one" in said


def test_a_compiler_that_cannot_be_run_is_named(csrc: Path, run: Run, tmp_path: Path) -> None:
    configure = ["cmake", "-S", csrc, "-B", tmp_path, "-G", "Ninja"]
    ended = run(*configure, may_fail=True, env={"CC": "/nowhere/cc"})
    said = " ".join(ended.stderr.split())
    assert ended.returncode != 0
    assert "CC names one that cannot be run: '/nowhere/cc'. Install one" in said
