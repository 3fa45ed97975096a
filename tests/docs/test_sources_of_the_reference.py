"""What the reference is made of: docstrings under error codes and limits, and examples that run."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support import fake_cuda
from support.extensions import extension_module

import kda_stream
import kda_stream.interop
import kda_stream.testing
from kda_stream import ErrorCode, KdaConfig, errors, limits, open_checkpoint, stream_kda_layers
from kda_stream.testing import Layout, write_checkpoint

documented = extension_module("documented")
as_rst = extension_module("docstrings").as_rst

PACKAGE = Path(kda_stream.__file__).parent
CODES = {one.name: one for one in documented.documented(PACKAGE / "error_codes.py", "ErrorCode")}
LIMITS = {one.name: one for one in documented.documented(PACKAGE / "limits.py")}
CLASSES = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.KdaStreamError)
}


# --- error codes and limits -----------------------------------------------------------------------


def test_each_error_code_is_read_from_the_source() -> None:
    assert list(CODES) == [code.name for code in ErrorCode]


@pytest.mark.parametrize("name", CODES)
def test_an_error_code_says_what_it_means_where_it_is_from_and_what_to_do(name: str) -> None:
    said = documented.code_text(CODES[name].text)
    assert said.meaning.endswith(".")
    assert min(len(part.split()) for part in (said.meaning, said.likely, said.remedy)) > 1
    assert set(said.classes) <= CLASSES
    assert CODES[name].section


def test_each_error_code_names_the_classes_that_it_is_raised_as() -> None:
    raised = raised_as()
    said = {name: set(documented.code_text(one.text).classes) for name, one in CODES.items()}
    assert said == {name: raised.get(name, set()) for name in said}


def raised_as() -> dict[str, set[str]]:
    """The class of error that is made of each code, wherever in the package that is written."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    makers = {
        node.name: ast.unparse(node.returns)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ast.unparse(node.returns) in CLASSES
    }
    found: dict[str, set[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            for name, code in made_of_codes(node):
                kind = makers.get(name, name)
                if kind in CLASSES:
                    found.setdefault(code, set()).add(kind)
    return found


def made_of_codes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(what is called, code) for a call whose first argument is a code, or one of two."""
    if isinstance(node, ast.Call) and node.args:
        codes = re.findall(r"ErrorCode\.([A-Z0-9_]+)", ast.unparse(node.args[0]))
        yield from ((ast.unparse(node.func).rpartition(".")[2], code) for code in codes)
    if isinstance(node, ast.Tuple) and len(node.elts) == 3:  # the statuses of the C routine
        first = re.fullmatch(r"ErrorCode\.([A-Z0-9_]+)", ast.unparse(node.elts[0]))
        if first is not None and isinstance(node.elts[1], ast.Constant):
            yield "PayloadError", first[1]


def test_each_limit_says_what_it_is_for() -> None:
    public = [name for name in vars(limits) if name.isupper()]
    assert list(LIMITS) == public
    assert [name for name in LIMITS if len(LIMITS[name].text.split()) < 4] == []


def test_a_docstring_without_one_of_its_parts_is_told_of() -> None:
    with pytest.raises(ValueError, match="not of the form"):
        documented.code_text("Nothing is there. Likely: a typo. `PathError`.")


# --- docstrings -----------------------------------------------------------------------------------


PLAIN = """One of `RawTensor`s, with `a_b` and `KdaConfig.hidden`.
- the first
  goes on
- the second

Example:
    x = 1

    y = 2
Behind."""
AS_RST = r"""One of :py:obj:`~kda_stream.RawTensor`\ s, with ``a_b`` and \
:py:obj:`KdaConfig.hidden <kda_stream.KdaConfig.hidden>`.

- the first
  goes on
- the second

Example:

.. code-block:: python

   x = 1

   y = 2

Behind."""


def test_a_docstring_becomes_what_sphinx_reads() -> None:
    lines = [line.rstrip() for line in as_rst(PLAIN.splitlines())]
    assert lines == AS_RST.replace("\\\n", "").splitlines()


def public_modules() -> Iterator[Any]:
    yield kda_stream.testing
    for found in pkgutil.iter_modules(kda_stream.interop.__path__):
        yield import_module(f"kda_stream.interop.{found.name}")


def public_things() -> dict[str, Any]:
    """Everything public that can have a docstring of its own, by its full name."""
    things = {f"kda_stream.{name}": getattr(kda_stream, name) for name in kda_stream.__all__}
    for module in public_modules():
        for name, thing in vars(module).items():
            if not name.startswith("_") and getattr(thing, "__module__", "") == module.__name__:
                things[f"{module.__name__}.{name}"] = thing
    for name in kda_stream.testing.__all__:
        things[f"kda_stream.testing.{name}"] = getattr(kda_stream.testing, name)
    return {name: thing for name, thing in things.items() if callable(thing)}


THINGS = public_things()
INLINE = re.compile(r"^Example: `(.+)`\.$", re.MULTILINE)
INDENTED = re.compile(r"^Example::?\n+((?:(?: {4}.*)?\n)+)", re.MULTILINE)


def examples() -> dict[str, str]:
    found = {}
    for name, thing in THINGS.items():
        text = (inspect.getdoc(thing) or "") + "\n"
        for example in (*INLINE.findall(text), *INDENTED.findall(text)):
            found[name] = textwrap.dedent(example)
    return found


EXAMPLES = examples()


def test_no_example_is_overlooked() -> None:
    told = {name for name, thing in THINGS.items() if "Example:" in (inspect.getdoc(thing) or "")}
    assert told == set(EXAMPLES)
    assert len(EXAMPLES) > 12


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_docstring_runs_and_what_it_claims_is_true(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = ast.parse(EXAMPLES[name])
    if re.search("Cuda|torch|published_source", EXAMPLES[name]):
        pytest.importorskip("torch", reason="needs the interop extra")
        fake_cuda.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    layout = Layout(config=KdaConfig(hidden=64, heads=8, head_dim=16, conv_kernel=4))
    folder = write_checkpoint("GLM-5.3-Flash", layout)
    with ExitStack() as opened:
        names = {**THINGS_BY_NAME, **surroundings(folder, layout, opened)}
        match code.body:
            case [ast.Expr(ast.Compare())]:
                assert eval(EXAMPLES[name], names)
            case _:
                exec(compile(code, name, "exec"), names)


THINGS_BY_NAME = {name.rpartition(".")[2]: thing for name, thing in THINGS.items()}


def surroundings(folder: Path, layout: Layout, opened: ExitStack) -> dict[str, Any]:
    """What the examples take for granted."""
    checkpoint = opened.enter_context(open_checkpoint(folder))
    tensors = {name: checkpoint.tensor(name) for name in checkpoint}
    return {
        **{name: getattr(kda_stream, name) for name in kda_stream.__all__},
        "checkpoint": checkpoint,
        "config": layout.config,
        "path": folder / "config.json",
        "nbytes": 4096,
        "tmp_path": folder.parent / "broken",
        "upload": lambda *_: None,
        "load_engine": open_checkpoint,
        "pytest": pytest,
        "model_tensors": tensors,
        "model": Model(),
        "stream": stream_kda_layers(checkpoint),
    }


class Model:
    def load_weights(self, weights: Any) -> None:
        assert sum(1 for _ in weights)

    def state_dict(self) -> dict[str, Any]:
        """A layer as the transformers library keeps it."""
        import torch

        prefix = "model.language_model.layers.0.self_attn."
        sizes = {"q_proj": (128, 64), "k_proj": (128, 64), "v_proj": (128, 64), "b_proj": (8, 64)}
        sizes |= {"g_a_proj": (16, 64), "g_b_proj": (128, 16), "o_proj": (64, 128)}
        gate = {"f_a_proj": (16, 64), "f_b_proj": (128, 16)}
        found = {f"{name}.weight": torch.zeros(size).bfloat16() for name, size in sizes.items()}
        found |= {
            f"forget_gate.{name}.weight": torch.zeros(size).bfloat16()
            for name, size in gate.items()
        }
        found["o_norm.weight"] = torch.zeros(16).bfloat16()
        found["conv1d.weight"] = torch.zeros(3 * 128, 1, 4)
        found["forget_gate.A_log"], found["forget_gate.dt_bias"] = torch.zeros(8), torch.zeros(128)
        return {prefix + name: tensor for name, tensor in found.items()}
