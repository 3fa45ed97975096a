"""The skeleton of a page, and the parts that both pages are made of."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from ... import __version__
from ...files import NewFile
from ...limits import LINE_CHARS_MAX
from ..output import path_row
from .markup import Markup, element, escaped, joined, json_block

_LONG_CHARS: Final = 60  # a text that is broken into lines rather than making its table wider
_LONG_WORDS_CHARS: Final = 25  # the same of a text that can be broken between words
_LINE_END: Final = Markup("\n")
ROWS_MAX: Final = 1000
"""How many layers or shards a page shows of each: no model has more, and a hostile file could."""


def maybe_file(path: str | None) -> AbstractContextManager[NewFile | None]:
    """The new file for a page, opened before the work for it begins; None where none is asked for.

    Raises `PathError` where it cannot be made, or something has that name.
    """
    return nullcontext() if path is None else NewFile(path)


def file_row(label: str, path: str | None) -> list[str]:
    """The row of the command's text that names the page's file; none without one."""
    return [] if path is None else [path_row(label, path)]


def page(title: str, lead: str, parts: Iterable[Markup], facts: dict[str, Any]) -> bytes:
    """A whole page in UTF-8: `parts` under a title and a sentence, with `facts` as JSON in it.

    It may load nothing, and run no script but its own.
    """
    script = _file("page.js")
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{_digest(script)}'"
    )
    text = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="kda_stream {escaped(__version__)}">
<title>{escaped(title)}</title>
<style>
{_file("page.css")}</style>
</head>
<body>
<main>
<header>
{element("h1", title)}
{element("p", lead, class_="lead")}
</header>
{joined(parts, _LINE_END)}
</main>
<footer>
{element("p", f"kda_stream {__version__}. The facts are in this file as JSON too, in #facts.")}
</footer>
{json_block("facts", _without_long_texts(facts))}
<script>{script}</script>
</body>
</html>
"""
    return text.encode()


@cache
def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _without_long_texts(value: Any) -> Any:
    """JSON whose strings are cut where they are longer than any line that is printed."""
    if isinstance(value, str):
        return value if len(value) <= LINE_CHARS_MAX else value[:LINE_CHARS_MAX] + "..."
    if isinstance(value, dict):
        return {name: _without_long_texts(part) for name, part in value.items()}
    return [_without_long_texts(part) for part in value] if isinstance(value, list) else value


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def section(heading: str, *parts: str) -> Markup:
    """A part of the page under a heading."""
    return element("section", element("h2", heading), *parts)


def about(text: str) -> Markup:
    """A sentence that explains what is seen."""
    return element("p", text, class_="about")


def notes(lines: Sequence[str]) -> list[Markup]:
    """A section of notes; none where there are none."""
    items = joined(element("li", line) for line in lines)
    return [section("Notes", element("ul", items, class_="notes"))] if lines else []


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure of a page's head: `name` is its key in --json, `value` what stands there."""

    label: str
    name: str
    value: int | float | str | None
    text: str
    more: str = ""


def fact_list(facts: Iterable[Fact]) -> Markup:
    """The figures side by side."""
    return element("dl", *map(_fact, facts), class_="facts")


def _fact(fact: Fact) -> Markup:
    value = element("data", fact.text, value=json.dumps(fact.value), data_fact=fact.name)
    more = element("small", fact.more) if fact.more else ""
    return element("div", element("dt", fact.label), element("dd", value, more))


@dataclass(frozen=True, slots=True)
class Number:
    """A cell with a number: shown as `text`, sorted by `value`."""

    value: float
    text: str


def count(value: int) -> Number:
    """A cell with a whole number."""
    return Number(value, f"{value:,}")


Cell = str | Number


def table(
    name: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]], sorted_by: int | None = 0
) -> Markup:
    """A table that sorts by each column where scripts run.

    The rows come in the order of the column `sorted_by`: numbers from the largest down but in the
    first column, and texts from the first up.
    """
    told = rows[:ROWS_MAX]
    numbers = [bool(told) and isinstance(told[0][at], Number) for at in range(len(heads))]
    head = element(
        "tr",
        *(
            element(
                "th",
                text,
                scope="col",
                class_="number" if numbers[at] else None,
                aria_sort=_order(at, numbers[at]) if at == sorted_by else None,
            )
            for at, text in enumerate(heads)
        ),
    )
    body = joined((element("tr", *map(_cell, row)) for row in told), _LINE_END)
    made = element("table", element("thead", head), element("tbody", body), class_="sortable")
    scrolled = element(
        "div", made, class_="scroll", id=name, tabindex=0, role="region", aria_label=name
    )
    return joined([scrolled, more_than_shown(len(rows))])


def _order(column: int, is_number: bool) -> str:
    return "descending" if is_number and column else "ascending"


def _cell(cell: Cell) -> Markup:
    if isinstance(cell, Number):
        return element("td", cell.text, class_="number", data_value=repr(cell.value))
    is_long = len(cell) > (_LONG_WORDS_CHARS if " " in cell else _LONG_CHARS)
    return element("td", cell, class_="long" if is_long else None)


def more_than_shown(items: int) -> Markup:
    """What is left out of a list of that many items."""
    return Markup() if items <= ROWS_MAX else about(f"and {items - ROWS_MAX:,} more, not shown")


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """A list of (class of the sign, what it stands for)."""
    return element("ul", *(_legend_entry(*entry) for entry in entries), class_="legend")


def _legend_entry(sign: str, meaning: str) -> Markup:
    drawn = element(
        "svg",
        element("line", x1=0, x2="100%", y1="50%", y2="50%", class_=f"line {sign}")
        if sign.startswith("line-")
        else element("rect", width="100%", height="100%", class_=sign),
        class_="sign",
        aria_hidden="true",
    )
    return element("li", drawn, meaning)


def share(part: int, whole: int) -> str:
    """A part of a whole in percent."""
    return f"{100 * part / whole:.1f} %" if whole else "0 %"
