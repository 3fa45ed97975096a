"""The site, built as it is published: no warning, every public name, the command as it is now."""

from __future__ import annotations

import ast
import html
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from support.extensions import DOCS

import kda_stream
import kda_stream.interop
from kda_stream import ErrorCode, limits
from kda_stream.cli import main

for needed in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(needed, reason="needs the docs extra")

pytestmark = pytest.mark.slow

# What a class has for its neighbours in the package.
INNER = {"kda_stream.Checkpoint.add_reader", "kda_stream.Checkpoint.renew_locks"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def documented(site: Path) -> set[str]:
    """Every name that the site has an entry for, from the list that it publishes for others."""
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}


def text_of(page: Path) -> str:
    inside = page.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
    return html.unescape(re.sub(r"<[^>]+>", "", inside))


def test_every_public_name_has_an_entry(documented: set[str]) -> None:
    names = {f"kda_stream.{name}" for name in kda_stream.__all__}
    names |= {f"kda_stream.testing.{name}" for name in import_module("kda_stream.testing").__all__}
    assert names - documented == set()


def test_every_name_of_the_modules_for_frameworks_has_an_entry(documented: set[str]) -> None:
    lost = [
        f"{module}.{name}"
        for module, name in public_names_of_interop()
        if {f"kda_stream.{name}", f"{module}.{name}"}.isdisjoint(documented)
    ]
    assert lost == []


def public_names_of_interop() -> Iterator[tuple[str, str]]:
    """(module, name) of what is defined at the top of each of its modules."""
    for found in pkgutil.iter_modules(kda_stream.interop.__path__):
        module = import_module(f"kda_stream.interop.{found.name}")
        for node in ast.parse(inspect.getsource(module)).body:
            name = getattr(node, "name", None) or getattr(getattr(node, "target", None), "id", "_")
            if not name.startswith("_"):
                yield module.__name__, name


def test_every_method_and_property_of_a_public_class_has_an_entry(documented: set[str]) -> None:
    members = {
        f"kda_stream.{name}.{member}"
        for name in kda_stream.__all__
        if inspect.isclass(kind := getattr(kda_stream, name))
        for member, value in vars(kind).items()
        if not member.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, (property, classmethod)))
        and not issubclass(kind, kda_stream.KdaStreamError)
    }
    assert members - documented - INNER == set()
    assert members >= INNER, "take it off the list"


def test_every_error_code_and_every_limit_has_an_entry(documented: set[str]) -> None:
    names = {f"kda_stream.ErrorCode.{code.name}" for code in ErrorCode}
    names |= {f"kda_stream.limits.{name}" for name in vars(limits) if name.isupper()}
    assert names - documented == set()


def test_the_page_of_the_command_has_what_each_command_prints_for_help(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "88")
    page = text_of(site / "reference" / "command.html")
    main(["--help"])
    whole = capsys.readouterr().out
    commands = re.findall(r"^    ([a-z]+)(?: |$)", whole.partition("COMMAND\n")[2], re.MULTILINE)
    assert {"inspect", "verify", "stream", "diff", "demo"} <= set(commands)
    for command in ([], *([name] for name in commands)):
        main([*command, "--help"])
        assert capsys.readouterr().out.strip() in page


def test_no_markup_is_left_over_in_the_text(site: Path) -> None:
    left = {
        page.name: found
        for page in site.rglob("*.html")
        if (found := re.findall(r":py:\w+:|\{py:\w+\}|``", text_of(page)))
    }
    assert left == {}


def test_every_page_can_be_reached(site: Path) -> None:
    index = (site / "index.html").read_text(encoding="utf-8")
    pages = [page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")]
    chosen = [page for page in pages if page.parts[0] != "decisions" or page.stem == "index"]
    assert [str(page) for page in chosen if f'"{page}"' not in index and page.stem != "index"] == []


# --- the JSON schema ------------------------------------------------------------------------------

SCHEMA = {
    "properties": {"command": {"enum": ["verify", None], "description": "which one"}},
    "$defs": {
        "verify": {
            "description": "Facts of verify.",
            "properties": {
                "bytes": {"type": ["integer", "null"], "description": "how\n many | bytes"},
                "shards": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"file": {"type": "string"}}},
                },
                "problems": {"type": "array", "items": {"$ref": "#/$defs/problem"}},
                "counts": {
                    "type": "object",
                    "additionalProperties": {
                        "type": "object",
                        "properties": {"n": {"const": 1}},
                    },
                },
            },
        },
        "problem": {"properties": {"code": {"type": "string"}}},
    },
}


def test_a_schema_becomes_a_table_for_each_of_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    reference = import_module("kda_reference")
    schema = tmp_path / "kda_stream" / "output.schema.json"
    schema.parent.mkdir()
    schema.write_text(json.dumps(SCHEMA))
    monkeypatch.setattr(reference, "SCHEMA", schema)
    monkeypatch.setattr(reference, "PACKAGE", schema.parent)
    lines = list(reference.JsonOutput.lines(None))
    assert "## verify" in lines
    assert "Facts of verify." in lines
    assert [line for line in lines if line.startswith("| `")] == [
        '| `command` | `"verify"` or `null` | which one |',
        "| `bytes` | integer or null | how many \\| bytes |",
        "| `shards` | array of object |  |",
        "| `shards[].file` | string |  |",
        "| `problems` | array of [problem](#problem) |  |",
        "| `counts` | object |  |",
        "| `counts.*` | object |  |",
        "| `counts.*.n` | `1` |  |",
        "| `code` | string |  |",
    ]
