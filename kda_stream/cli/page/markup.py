"""HTML and SVG, put together so that no text of a file can become markup."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable

from ...errors import shown
from ...limits import LINE_CHARS_MAX

Attribute = str | int | float | None


class Markup(str):
    """Text that is markup already; every other string is escaped when it is put into one."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: Attribute) -> Markup:
    """An element with its children, each markup or text, and its attributes; None leaves one out.

    An underscore in an attribute's name stands for a hyphen, one at its end for nothing: `class_`,
    `data_value`.
    """
    return Markup(f"<{tag}{_attributes(attributes)}>{joined(children)}</{tag}>")


def joined(parts: Iterable[str], separator: str = "") -> Markup:
    """The parts one after the other, each markup or text."""
    return Markup(escaped(separator).join(map(escaped, parts)))


def escaped(text: str) -> Markup:
    """The text as markup: as `shown` prints it, with what HTML would read as markup escaped."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(shown(text, LINE_CHARS_MAX)))


def _attributes(attributes: dict[str, Attribute]) -> str:
    return "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escaped(_text(value))}"'
        for name, value in attributes.items()
        if value is not None
    )


def _text(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return value if isinstance(value, str) else str(value)


def json_block(name: str, value: object) -> Markup:
    """A block of JSON that scripts find under the id `name`, and that no string in it can end."""
    text = json.dumps(value)
    for character in "<>&":  # all else that HTML could read otherwise is ASCII by json.dumps
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{name}">{text}</script>')
