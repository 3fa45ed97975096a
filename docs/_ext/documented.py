"""What the sources say of their own names: values with a docstring under them. Imports nothing.

The reference pages and the tests read `limits.py`, `error_codes.py` and others by this.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Final

_SECTION: Final = re.compile(r"\s*# (.+)")
_CODE: Final = re.compile(r"(.*?) Likely: (.*?) Do: (.*?) ((?:`\w+`(?: or )?)+)\.")


@dataclass(frozen=True)
class Documented:
    """A name, its docstring on one line, and the last comment on a line of its own before it."""

    name: str
    text: str
    section: str


def documented(path: Path, of_class: str | None = None) -> Iterator[Documented]:
    """Each value of a module, or of a class in it, in the order of the source."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    body: list[ast.stmt] = ast.parse(source).body
    if of_class is not None:
        body = next(n.body for n in body if isinstance(n, ast.ClassDef) and n.name == of_class)
    for node, behind in zip(body, [*body[1:], None], strict=True):
        targets = node.targets if isinstance(node, ast.Assign) else []
        target = node.target if isinstance(node, ast.AnnAssign) else next(iter(targets), None)
        if isinstance(target, ast.Name):
            above = (_SECTION.fullmatch(line) for line in reversed(lines[: node.lineno - 1]))
            section = next((found[1] for found in above if found), "")
            yield Documented(target.id, _docstring(behind), section)


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(cleandoc(str(node.value.value)).split())
    return ""


@dataclass(frozen=True)
class CodeText:
    """What an error code's docstring says, and the classes that it is raised as."""

    meaning: str
    likely: str
    remedy: str
    classes: tuple[str, ...]


def code_text(text: str) -> CodeText:
    """The parts of an error code's docstring; raises ValueError where one is missing."""
    found = _CODE.fullmatch(text)
    if found is None:
        raise ValueError(f"not of the form 'Meaning. Likely: ... Do: ... `Class`.': {text!r}")
    return CodeText(found[1], found[2], found[3], tuple(re.findall(r"`(\w+)`", found[4])))
