"""An HTML page as a reader of its text sees it: elements, tables, figures, the JSON inside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

Attributes = dict[str, str | None]


@dataclass
class Element:
    """An element: its tag, attributes, children, and where it stands."""

    tag: str
    attributes: Attributes
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Every element below with that tag and these attributes, in the page's order."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                wanted = {name.rstrip("_").replace("_", "-"): v for name, v in attributes.items()}
                if child.tag == tag and wanted.items() <= child.attributes.items():
                    found.append(child)
                found += child.all(tag, **attributes)
        return found

    def one(self, tag: str, **attributes: str) -> Element:
        (found,) = self.all(tag, **attributes)
        return found


VOID = {"meta", "link", "img", "br", "input", "base"}


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("#root", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


@dataclass
class Page:
    """A page that was read from its file."""

    source: str
    root: Element

    @property
    def facts(self) -> dict[str, Any]:
        """The JSON that is in the page."""
        found: dict[str, Any] = json.loads(self.root.one("script", id="facts").text)
        return found

    @property
    def figures(self) -> dict[str, str | None]:
        """The exact value of each figure of the head, by the name of its fact."""
        return {
            str(e.attributes["data-fact"]): e.attributes["value"] for e in self.root.all("data")
        }

    def rows(self, name: str) -> list[list[str]]:
        """The rows of a table, numbers without their commas."""
        body = self.root.one("div", id=name).one("tbody")
        return [
            [
                cell.text.replace(",", "")
                if cell.attributes.get("class") == "number"
                else cell.text
                for cell in row.all("td")
            ]
            for row in body.all("tr")
        ]

    def require_self_contained(self) -> None:
        """Nothing in it names anything outside, and its own script alone may run."""
        assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", self.source, re.IGNORECASE)
        for element in self.root.all("script"):
            assert set(element.attributes) <= {"id", "type"}
        data, script = self.root.all("script")
        assert data.attributes["type"] == "application/json"
        digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
        policy = self.root.one("meta", http_equiv="Content-Security-Policy").attributes["content"]
        assert policy is not None
        assert dict(part.split(maxsplit=1) for part in policy.split("; ")) == {
            "default-src": "'none'",
            "style-src": "'unsafe-inline'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "script-src": f"'sha256-{digest}'",
        }


def read_page(path: Path) -> Page:
    """The page in a file, whose elements must be closed in order."""
    source = path.read_text(encoding="utf-8")
    builder = _Builder()
    builder.feed(source)
    builder.close()
    assert builder.open == [builder.root]
    return Page(source, builder.root)
