"""What CONTRIBUTING.md and docs/decisions tell the next people is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DECISIONS = ROOT / "docs" / "decisions"
PAGES = sorted(DECISIONS.glob("[0-9]*.md"))
PARTS = ["Context", "Decision", "What lost", "What follows", "When to think again"]


def test_each_path_that_contributing_names_is_there() -> None:
    named = re.findall(r"\b(?:bench|csrc|docs|kda_stream|tests)/[\w./-]*\w", CONTRIBUTING)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_each_extra_that_contributing_installs_is_there() -> None:
    named = {
        name for extras in re.findall(r"'\.\[(.+?)\]'", CONTRIBUTING) for name in extras.split(",")
    }
    table = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("dependencies]\n")[2]
    extras = re.findall(r"^(\w+) = \[", table.partition("\n[")[0], re.MULTILINE)
    assert "dev" in named
    assert named <= set(extras)


def test_the_index_lists_every_decision_in_order() -> None:
    listed = re.findall(r"^\d{4}-[\w-]+$", (DECISIONS / "index.md").read_text(), re.MULTILINE)
    assert listed == [page.stem for page in PAGES]
    assert [int(name[:4]) for name in listed] == list(range(1, len(listed) + 1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_decision_tells_what_lost_and_when_to_think_again(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {int(page.stem[:4])}. ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == PARTS
    lost = text.partition("## What lost")[2].partition("## ")[0]
    assert len(re.findall(r"^- \*\*", lost, re.MULTILINE)) >= 3
    assert len(text.splitlines()) <= 40
