"""Directives that make reference pages out of the sources, so that these cannot go stale.

Each gives Markdown, which is then read like the page's own.
"""

from __future__ import annotations

import inspect
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from docstrings import as_rst
from documented import code_text, documented
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import kda_stream
from kda_stream import errors, limits
from kda_stream.cli import main
from kda_stream.kda.family import KdaFamily
from kda_stream.kda.tensors import Dim, Padded, TensorSpec
from kda_stream.testing import Broken

PACKAGE: Final = Path(kda_stream.__file__).parent
SCHEMA: Final = PACKAGE / "cli" / "output.schema.json"
HELP_COLUMNS: Final = 88


class Generated(SphinxDirective):
    """A directive whose content is the Markdown that `lines` gives."""

    has_content = False

    def run(self) -> list[nodes.Node]:
        """Read what `lines` gives as a part of the page."""
        text = "\n".join(self.lines())
        found: list[nodes.Node] = self.parse_text_to_nodes(text, allow_section_headings=True)
        return found

    def lines(self) -> Iterator[str]:
        """Markdown."""
        raise NotImplementedError


# --- limits, data ---------------------------------------------------------------------------------


class Limits(Generated):
    """Every limit, with its value and its reason."""

    def lines(self) -> Iterator[str]:
        """An entry for each."""
        for limit in documented(PACKAGE / "limits.py"):
            value = getattr(limits, limit.name)
            yield from _object(
                "data", "kda_stream.limits", limit.name, limit.text, in_units(limit.name, value)
            )


def in_units(name: str, value: object) -> str:
    """A limit's value in the unit that its name tells."""
    if isinstance(value, tuple):
        return ", ".join(in_units(name, one) for one in value)
    if "NANOSECONDS" in name:
        return f"{value:,} ns"
    if "SECONDS" in name:
        return f"{value} s"
    if name == "INTEGER_MAX":
        return "2^64 - 1"
    if "BYTES" not in name or not isinstance(value, int):
        return f"{value:,}"
    for unit, scale in (("MiB", 1024**2), ("KiB", 1024)):
        if value >= scale and value % scale == 0:
            return f"{value:,} bytes ({value // scale} {unit})"
    return f"{value:,} bytes"


class Data(Generated):
    """A public value that is no class and no function: its docstring in the source."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        """An entry for it."""
        module, _, name = self.arguments[0].rpartition(".")
        text = next(_texts_of(module, name), "")
        yield from _object("data", module, name, text)


def _texts_of(module: str, name: str) -> Iterator[str]:
    """The docstring of a value, from the module of the package where it is made."""
    for path in sorted(PACKAGE.rglob("*.py")):
        home = ".".join(("kda_stream", *path.relative_to(PACKAGE).with_suffix("").parts))
        for one in documented(path):
            if one.name != name or not one.text:
                continue
            if getattr(import_module(home), name) is getattr(import_module(module), name):
                yield one.text


def _object(
    kind: str, module: str, name: str, text: str, value: str | None = None
) -> Iterator[str]:
    yield from (f"```{{py:{kind}}} {name}", f":module: {module}")
    if value is not None:
        yield f":value: {value}"
    yield from ("", text, "```", "")


# --- families -------------------------------------------------------------------------------------


class Families(Generated):
    """Each family: its table."""

    def lines(self) -> Iterator[str]:
        """A section for each."""
        for family in kda_stream.FAMILIES:
            yield from (f"### {family.name}", "", f"{family.about}.", "")
            yield from _object("data", "kda_stream", family.name, _facts(family))
            yield from _table(("name", "dtype", "shape", "not verified"), map(_row, family.tensors))
            for fact in family.unverified:
                yield f"- Not verified: {fact}"
            yield ""


def _facts(family: KdaFamily) -> str:
    bounded = "has a lower bound" if family.decay_is_bounded else "has none"
    lacking = ", ".join(f"`{name}`" for name in family.lacking)
    prefixes = " or ".join(f"`{prefix}N.`" for prefix in family.prefixes)
    return (
        f"{len(family.tensors)} tensors under {prefixes}; the model's decay {bounded}; the "
        f"config's lists of layers count from {family.index_base}; "
        f"`KdaWeights` has None for {lacking}."
    )


def _row(spec: TensorSpec) -> tuple[str, ...]:
    dtypes = " or ".join(str(dtype) for dtype in spec.dtypes)
    shape = ", ".join(map(_dim, spec.dims))
    return f"`{spec.name}`", dtypes, f"[{shape}]", spec.unverified


def _dim(dim: Dim) -> str:
    if isinstance(dim, Padded):
        return f"{dim.dim}, padded to a multiple of {dim.multiple}"
    return str(dim)


# --- errors ---------------------------------------------------------------------------------------


class ErrorClasses(Generated):
    """Every class of error, with the builtin that it also is."""

    def lines(self) -> Iterator[str]:
        """An entry for each."""
        for name, kind in vars(errors).items():
            if not isinstance(kind, type) or not issubclass(kind, errors.KdaStreamError):
                continue
            builtin = next(b for b in kind.__mro__ if b.__module__ == "builtins").__name__
            bases = [base.__name__ for base in kind.__bases__ if base.__module__ != "builtins"]
            yield f"```{{eval-rst}}\n.. py:exception:: kda_stream.{name}"
            yield f"   :canonical: kda_stream.errors.{name}\n"
            for line in as_rst((inspect.getdoc(kind) or "").splitlines()):
                yield f"   {line}" if line else ""
            also = ", ".join(f":py:exc:`~kda_stream.{base}`" for base in bases)
            yield f"\n   Is also {also + ', and ' if also else ''}the builtin ``{builtin}``."
            yield "```\n"


class ErrorCodes(Generated):
    """Every error code, by what is broken."""

    def lines(self) -> Iterator[str]:
        """A section for each part of the source, an entry for each code."""
        section = ""
        for code in documented(PACKAGE / "error_codes.py", "ErrorCode"):
            if code.section != section:
                section = code.section
                yield from (f"### {section[0].upper()}{section[1:]}", "")
            said = code_text(code.text)
            classes = " or ".join(f"{{py:exc}}`~kda_stream.{name}`" for name in said.classes)
            yield from _object(
                "attribute",
                "kda_stream",
                f"ErrorCode.{code.name}",
                f"{said.meaning}\n\n- Likely: {said.likely}\n- Do: {said.remedy}\n"
                f"- Raised as: {classes}",
                f'"{kda_stream.ErrorCode[code.name].value}"',
            )


class BrokenKinds(Generated):
    """Every way of being broken, with the code that it gives."""

    def lines(self) -> Iterator[str]:
        """A table."""
        broken = (
            (f"`{b.name}`", f"{{py:attr}}`{b.code.value} <kda_stream.ErrorCode.{b.code.name}>`")
            for b in Broken
        )
        yield from _table(("`Broken.`", "refused with"), broken)


# --- the command ----------------------------------------------------------------------------------


class Commands(Generated):
    """What each command prints for --help."""

    def lines(self) -> Iterator[str]:
        """A section for each."""
        yield from _fence(help_of())
        for command in command_names():
            yield from (f"## kda-stream {command}", "")
            yield from _fence(help_of(command))


def command_names() -> list[str]:
    """The commands, as the help of the whole lists them."""
    listed = help_of().partition("COMMAND\n")[2].partition("\n\n")[0]
    return re.findall(r"^    ([a-z]+)(?: |$)", listed, re.MULTILINE)


def help_of(*command: str) -> str:
    """What `kda-stream COMMAND --help` prints to a file."""
    printed = io.StringIO()
    with redirect_stdout(printed), patch.dict("os.environ", {"COLUMNS": str(HELP_COLUMNS)}):
        main([*command, "--help"])
    return printed.getvalue()


def _fence(text: str) -> Iterator[str]:
    yield from ("```text", text.rstrip("\n"), "```", "")


# --- JSON -----------------------------------------------------------------------------------------


class JsonOutput(Generated):
    """What --json prints, by the schema that is in the package."""

    def lines(self) -> Iterator[str]:
        """A table for each part of the schema."""
        if not SCHEMA.is_file():
            yield "The schema is not a part of this version."
            return
        schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
        file = SCHEMA.relative_to(PACKAGE.parent)
        yield from (
            f"The schema (JSON Schema, draft 2020-12) is a file of the package, `{file}`.",
            "",
        )
        yield from ("## Every command", "", *_property_table(schema))
        for name, part in schema.get("$defs", {}).items():
            yield from (f"## {name}", "", part.get("description", ""), "")
            yield from _property_table(part)


def _property_table(part: Mapping[str, Any]) -> Iterator[str]:
    rows = list(properties_of(part))
    if rows:
        yield from _table(("property", "type", ""), rows)


def properties_of(part: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, type, description) of each property, and of those within it; `*` is any name."""
    members = dict(part.get("properties", {}))
    if isinstance(part.get("additionalProperties"), dict):
        members["*"] = part["additionalProperties"]
    for name, value in members.items():
        path = f"{before}{name}"
        yield f"`{path}`", type_of(value), described(value)
        yield from properties_of(value, f"{path}.")
        if isinstance(value.get("items"), dict):
            yield from properties_of(value["items"], f"{path}[].")
    for sub in (*part.get("anyOf", ()), *part.get("oneOf", ())):
        yield from properties_of(sub, before)


def described(value: Mapping[str, Any]) -> str:
    """A property's description, on one line that a table can hold."""
    return " ".join(str(value.get("description", "")).split()).replace("|", "\\|")


def type_of(value: Mapping[str, Any]) -> str:
    """The type of a property, in a few words."""
    if "$ref" in value:
        name = str(value["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "enum" in value:
        return " or ".join(f"`{json.dumps(one)}`" for one in value["enum"])
    for key in ("anyOf", "oneOf"):
        if key in value:
            return " or ".join(dict.fromkeys(type_of(one) for one in value[key]))
    kinds = value.get("type", "any")
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    if isinstance(value.get("items"), dict) and "array" in names:
        names[names.index("array")] = f"array of {type_of(value['items'])}"
    return " or ".join(names)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("kda-limits", Limits)
    app.add_directive("kda-data", Data)
    app.add_directive("kda-families", Families)
    app.add_directive("kda-error-classes", ErrorClasses)
    app.add_directive("kda-error-codes", ErrorCodes)
    app.add_directive("kda-broken", BrokenKinds)
    app.add_directive("kda-commands", Commands)
    app.add_directive("kda-json-output", JsonOutput)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
