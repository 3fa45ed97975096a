"""The package as a whole: what its import costs, what it offers, which room may know which."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import pytest

import kda_stream
from kda_stream import errors
from kda_stream.errors import ErrorCode, KdaStreamError

RunPython = Callable[..., Any]
PACKAGE = Path(kda_stream.__file__).parent
IMPORT_MICROSECONDS_MAX = 10_000

# Imports run upwards in this table only: a room may import itself and what stands above its line,
# never what stands beside it. A module in no room here fails the tests.
ORDER = (
    ("limits",),
    ("errors",),
    ("jsontext", "dtypes", "files", "foreign", "closing"),
    ("arrays", "manifest"),
    ("kda", "staging"),
    ("checkpoint",),
    ("layout", "selection"),
    ("bind",),
    ("stager",),
    ("packing",),
    ("stream", "weights"),
    ("values",),
    ("payload",),
    ("interop",),
    ("testing",),
    ("cli",),
    ("__main__",),
)
MAY_IMPORT = {
    room: {room, "__version__"}.union(*ORDER[:line])
    for line, rooms in enumerate(ORDER)
    for room in rooms
}
MAY_IMPORT["staging"].add("_native")


# --- imports --------------------------------------------------------------------------------------


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name below the package, path) of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def imported(name: str, path: Path) -> set[str]:
    """Dotted names below the package that a module imports, wherever in it that is written."""
    package = f"kda_stream.{name}" if name else "kda_stream"
    if path.name != "__init__.py":
        package = package.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = resolve_name("." * node.level + (node.module or ""), package)
            if whole == "kda_stream":
                found |= {f"kda_stream.{alias.name}" for alias in node.names}
            else:
                found.add(whole)
    return {n.removeprefix("kda_stream.") for n in found if n.startswith("kda_stream.")}


def test_imports_run_upwards_only() -> None:
    wrong = [
        f"{name} -> {other}"
        for name, path in modules()
        if name  # the package itself offers all of it
        for other in imported(name, path)
        if other.split(".")[0] not in MAY_IMPORT[name.split(".")[0]]
    ]
    assert wrong == []


def test_every_room_of_the_table_is_there() -> None:
    assert {name.split(".")[0] for name, _ in modules()} - {""} == set(MAY_IMPORT)


def test_kda_and_staging_do_not_know_each_other() -> None:
    """Said again without the table, as it is the edge that is tempting."""
    for name, path in modules():
        rooms = {other.split(".")[0] for other in imported(name, path)}
        if name.split(".")[0] == "kda":
            assert not rooms & {"staging", "checkpoint", "bind", "_native"}, name
        if name.split(".")[0] == "staging":
            assert not rooms & {"kda", "checkpoint", "bind"}, name


def test_the_scan_of_imports_sees_each_way_of_writing_one(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from ..errors import ErrorCode\n"
        "from . import tensors\n"
        "from .source import RawTensor\n"
        "import kda_stream.limits\n"
        "from kda_stream.staging import arena\n"
        "import os\n"
        "def f():\n    from ..checkpoint.shard import Shard\n"
    )
    assert imported("kda.module", path) == {
        "errors",
        "kda",
        "kda.source",
        "limits",
        "staging",
        "checkpoint.shard",
    }


def test_only_arrays_interop_and_the_command_know_a_framework() -> None:
    for name, path in modules():
        if name.split(".")[0] in ("arrays", "interop", "testing", "cli"):
            continue
        typing_only: set[int] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                typing_only |= {id(inner) for inner in ast.walk(node)}
            if id(node) in typing_only:
                continue
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found = {n.split(".")[0] for n in names}
            assert not found & {"torch", "transformers", "jax", "numpy", "ml_dtypes"}, name


# --- the cost of the import -----------------------------------------------------------------------


@pytest.mark.parametrize("module", ["numpy", "cffi", "_cffi_backend", "torch", "safetensors"])
def test_importing_the_package_does_not_load(run_python: RunPython, module: str) -> None:
    script = "import json, sys, kda_stream; print(json.dumps(sys.argv[1] in sys.modules))"
    assert run_python(script, module) is False


def test_importing_the_package_loads_none_of_its_rooms(run_python: RunPython) -> None:
    script = """
        import json, sys
        import kda_stream
        print(json.dumps([name for name in sys.modules if name.startswith("kda_stream.")]))
    """
    assert run_python(script) == []


def test_importing_the_package_takes_less_than_ten_milliseconds(tmp_path: Path) -> None:
    """The best of some runs: the others measure the machine."""
    times = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", "import kda_stream"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        (line,) = [x for x in done.stderr.splitlines() if x.split("|")[-1].strip() == "kda_stream"]
        times.append(int(line.split("|")[1]))
    assert min(times) < IMPORT_MICROSECONDS_MAX


# --- the public names -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", kda_stream.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(kda_stream, name) is not None
    assert name in dir(kda_stream)


def test_the_names_of_the_design_are_public() -> None:
    assert {
        "AttnBlockKind",
        "BindError",
        "CopyPlan",
        "DSA_MARKERS",
        "KDA_TENSORS",
        "KdaBindReport",
        "KdaConfig",
        "KdaDtype",
        "KdaStreamError",
        "KdaTensorSource",
        "KdaWeights",
        "LayerSource",
        "PinnedArena",
        "RawTensor",
        "Span",
        "TensorSpec",
        "bind_kda_weights",
        "classify_attn_block",
        "open_checkpoint",
        "stream_kda_layers",
    } <= set(kda_stream.__all__)


def test_public_names_are_listed_once_and_known_to_type_checkers() -> None:
    assert len(kda_stream.__all__) == len(set(kda_stream.__all__))
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
    ]
    declared = {
        (alias.name, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert {name for name, _ in declared} == set(kda_stream.__all__)
    for name, module in declared:
        home = import_module(f"kda_stream.{module}")
        assert getattr(home, name) is getattr(kda_stream, name), name


def test_a_family_is_public_by_its_name_as_soon_as_it_is_in_the_table(
    run_python: RunPython,
) -> None:
    script = """
        import dataclasses, json
        import kda_stream
        from kda_stream.kda import families
        mine = dataclasses.replace(families.GLM5_NEXT, name="MINE_2")
        families.FAMILIES += (mine,)
        others = [hasattr(kda_stream, name) for name in ("MINE_3", "mine_2", "BLOCKS")]
        print(json.dumps([kda_stream.MINE_2 is mine, *others]))
    """
    assert run_python(script) == [True, False, False, False]


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kda_stream.no_such_name


def test_every_error_class_is_public() -> None:
    assert {kind.__name__ for kind in error_classes()} <= set(kda_stream.__all__)


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


# --- errors ---------------------------------------------------------------------------------------


def error_classes() -> list[type[KdaStreamError]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, KdaStreamError)
    ]


@pytest.mark.parametrize("kind", error_classes())
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_every_error_pickles_with_all_that_it_says(
    kind: type[KdaStreamError], protocol: int
) -> None:
    error = kind(
        ErrorCode.ARGUMENT,
        "what is wrong",
        path="/a/b",
        tensor="self_attn.A_log",
        expected=(1, 2),
        got="x",
        hint="do this",
    )
    for attribute in ("problems", "missing"):
        if hasattr(kind, attribute):
            setattr(error, attribute, ("one", "two"))
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert again.args == error.args
    assert again.code is ErrorCode.ARGUMENT


@pytest.mark.parametrize("kind", error_classes())
def test_every_error_says_it_all_in_one_line(kind: type[KdaStreamError]) -> None:
    error = kind(
        ErrorCode.ARGUMENT, "w", path="/a\nb", tensor="t\n\x1b[2J", expected="e\n", hint="h"
    )
    text = str(error)
    assert "\n" not in text
    assert "\x1b" not in text
    assert text.endswith("(h)")


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("PathError", OSError),
        ("HeaderError", ValueError),
        ("ShardIndexError", ValueError),
        ("ShardsMissingError", FileNotFoundError),
        ("CheckpointError", ValueError),
        ("NotFoundError", KeyError),
        ("ConfigError", ValueError),
        ("BindError", ValueError),
        ("SpanError", ValueError),
        ("PayloadError", OSError),
        ("MemoryRefusedError", MemoryError),
        ("SlotError", RuntimeError),
        ("StreamError", RuntimeError),
        ("ClosedError", ValueError),
        ("InUseError", BufferError),
        ("ArgumentError", ValueError),
        ("NotBuiltError", ImportError),
    ],
)
def test_every_error_is_also_the_builtin_that_a_caller_would_catch(
    name: str, builtin: type[BaseException]
) -> None:
    kind = getattr(kda_stream, name)
    assert issubclass(kind, builtin)
    assert issubclass(kind, KdaStreamError)


@pytest.mark.parametrize("kind", error_classes()[1:])
def test_no_error_is_an_exception_and_nothing_more(kind: type[KdaStreamError]) -> None:
    builtins = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    assert builtins[0] is not Exception, "which builtin one would a caller catch?"


# What the library raises beside its errors, by module: what it hears of itself and turns into one
# of them, what protocols of Python ask for, and names that stand for an error that was caught.
RAISED_BESIDE_ERRORS = {
    "": {"AttributeError"},
    "checkpoint.header_text": {"_MetadataError"},
    "checkpoint.shards": {"KeyError", "problems[0]", "whole"},
    "cli.arguments": {"argparse.ArgumentTypeError"},
    "cli.diff": {"problem"},
    "cli.interrupts": {"KeyboardInterrupt"},
    "cli.stream": {"ArgumentTypeError"},
    "closing": {"interrupt", "interrupt or error"},
    "files": {"OSError"},
    "jsontext": {"DuplicateKeyError", "LookupError", "ValueError"},
    "payload": {"workers.failure"},
    "staging.registration": {"failure"},
    "staging.residency": {"OSError"},
    "stager": {"StopIteration if failure is None else failure"},
    "weights": {"StopIteration"},
}


def raised(tree: ast.AST) -> Iterator[str]:
    """What stands behind each `raise`: of a call, what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            yield ast.unparse(called)


def makers_of_errors() -> set[str]:
    """The functions and methods of the library that are said to return one of its errors."""
    known = {kind.__name__ for kind in error_classes()}
    return {
        node.name
        for _, path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ast.unparse(node.returns) in known
    }


def test_the_library_raises_its_own_errors_and_few_others() -> None:
    known = {kind.__name__ for kind in error_classes()} | makers_of_errors()
    beside: dict[str, set[str]] = {}
    for name, path in modules():
        others = {
            what
            for what in raised(ast.parse(path.read_text(encoding="utf-8")))
            if what.removeprefix("self.") not in known
        }
        if others and not name.startswith("testing"):  # that one is for tests
            beside[name] = others
    assert beside == RAISED_BESIDE_ERRORS


def test_the_scan_of_raises_sees_each_way_of_writing_one() -> None:
    text = """if a:
    raise PathError(ErrorCode.PATH_MISSING, "what") from None
elif b:
    raise ValueError
elif c:
    raise self._gone("what")
else:
    raise"""
    assert list(raised(ast.parse(text))) == ["PathError", "ValueError", "self._gone"]


def test_codes_are_stable_words() -> None:
    values = [code.value for code in ErrorCode]
    assert len(values) == len(set(values))
    for code in ErrorCode:
        assert code.value == code.name.lower().replace("_", "-")
