"""SECURITY.md: every abuse has a number, an answer, and tests that are really there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ABUSE = re.compile(r"^(\d+)\. \*\*(.+?)(?=^\d+\. \*\*|^##|^What nobody)", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ABUSES = [(int(found[1]), found[2]) for found in ABUSE.finditer(TEXT)]


def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_abuses_are_numbered_from_one_on() -> None:
    assert [number for number, _ in ABUSES] == list(range(1, len(ABUSES) + 1))
    assert len(ABUSES) >= 25


@pytest.mark.parametrize(("number", "text"), ABUSES)
def test_an_abuse_has_an_answer_and_tests_that_are_there(number: int, text: str) -> None:
    named = TEST.findall(text)
    assert named, number
    assert [name for file, name in named if name not in names_in(file)] == []
    answer = TEST.sub("", text).partition("**")[2]
    assert len(answer.split()) >= 3, number


def test_every_file_that_the_page_names_is_there() -> None:
    files = re.findall(r"`(tests/[\w/.]+\.(?:py|md))[`:]", TEXT)
    assert [file for file in files if not (ROOT / file).is_file()] == []
