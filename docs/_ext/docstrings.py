"""The package's docstrings as reStructuredText: they are written in a plainer way than it asks for.

There a name or code stands between single backticks, a list follows its paragraph without a blank
line, and `Example:` is followed by indented code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

import kda_stream

_CODE: Final = re.compile(r"(?<![`:])`([^`]+)`(\w?)", re.DOTALL)
_ITEM: Final = re.compile(r"\s*- ")
_PUBLIC: Final = frozenset(kda_stream.__all__)


def as_rst(lines: Iterable[str]) -> list[str]:
    """The lines of a docstring, with what reStructuredText needs put in."""
    found: list[str] = []
    for is_code, block in _blocks(lines):
        if is_code:
            found += ["", ".. code-block:: python", "", *(f"   {line}" for line in block), ""]
        else:
            text = _CODE.sub(_marked, "\n".join(_with_room_for_lists(block)))
            found += text.split("\n")
    return found


def _blocks(lines: Iterable[str]) -> Iterator[tuple[bool, list[str]]]:
    """The lines in order, cut where the code of an example begins and ends."""
    block: list[str] = []
    is_code = False
    for line in lines:
        if is_code and line and not line.startswith("    "):
            yield True, block
            block, is_code = [], False
        if not is_code and block and block[-1].rstrip(":") == "Example" and line.startswith("    "):
            block[-1] = "Example:"
            yield False, block
            block, is_code = [], True
        block.append(line[4:] if is_code else line)
    yield is_code, block


def _with_room_for_lists(lines: list[str]) -> Iterator[str]:
    before = ""
    for line in lines:
        begins = bool(_ITEM.match(line)) and bool(before) and not _ITEM.match(before)
        if begins and not before.startswith("  "):
            yield ""
        yield line
        before = line


def _marked(found: re.Match[str]) -> str:
    code, letter = " ".join(found[1].split()), found[2]
    name, _, member = code.partition(".")
    marked = f"``{code}``"
    if name in _PUBLIC and code.replace(".", "").isidentifier():
        marked = (
            f":py:obj:`{code} <kda_stream.{code}>`" if member else f":py:obj:`~kda_stream.{code}`"
        )
    return f"{marked}\\ {letter}" if letter else marked
