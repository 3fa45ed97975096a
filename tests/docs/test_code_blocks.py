"""Every `python` and `sh` block of the pages and of the README, run; what they print, compared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import fake_cuda
from support.pages import ROOT, RUN, SHOWN, Runner, blocks_of, pages

INSTALLS = "it installs; .ci/run does it in a fresh environment"
DOCKER = (
    "docker run --ulimit memlock=-1:-1 --memory 4g IMAGE "
    "kda-stream stream /models/GLM-5.3-Flash --lock require"
)
# Blocks that are not run here, by page and first line, each with the reason.
NOT_RUN = {
    ("README.md", "pip install . && kda-stream demo"): INSTALLS,
    ("README.md", "pip install -e '.[test]' && python -m pytest"): INSTALLS,
    ("docs/tutorial.md", "python3 -m venv ~/kda && . ~/kda/bin/activate"): INSTALLS,
    ("docs/how-to/locked_memory.md", "ulimit -l unlimited"): "it needs the right to raise a limit",
    ("docs/how-to/locked_memory.md", DOCKER): "it needs a container engine",
}
NEEDS_TORCH = re.compile(r"\b(torch|torchrun|vllm|sglang|transformers)\b")
PAGES = list(pages())


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def is_left_out(page: Path, first_line: str) -> bool:
    return (name_of(page), first_line) in NOT_RUN


def runs(page: Path) -> bool:
    blocks = [block for block in blocks_of(page) if block.language in RUN]
    return any(not is_left_out(page, block.first_line) for block in blocks)


def parameters() -> Iterator[Any]:
    for page in filter(runs, PAGES):
        text = "".join(block.text for block in blocks_of(page) if block.language in RUN)
        marks = [pytest.mark.interop] if NEEDS_TORCH.search(text) else []
        marks += [pytest.mark.slow] if "torchrun" in text else []
        yield pytest.param(page, marks=marks, id=name_of(page))


@pytest.mark.parametrize("page", list(parameters()))
def test_the_code_of_a_page_runs_and_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if request.node.get_closest_marker("interop"):
        pytest.importorskip("torch", reason="needs the interop extra")
        driver = fake_cuda.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert Runner(page, tmp_path, lambda first_line: is_left_out(page, first_line)).run() > 0
    if request.node.get_closest_marker("interop"):
        driver.assert_clean()


# --- what is not run ------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_runs_is_output_or_is_listed(page: Path) -> None:
    """Any other language, or a misspelt one, would not be run and nobody would know."""
    known = (*RUN, *SHOWN, "text")
    others = [block for block in blocks_of(page) if block.language not in known]
    assert [b.first_line for b in others if not is_left_out(page, b.first_line)] == []
    opened = re.findall(r"^ *```+ *([^`\s].*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    directives = re.compile(r"\{(?:eval-rst|toctree|kda-[a-z-]+)\}.*")
    assert len(blocks_of(page)) == sum(1 for line in opened if not directives.fullmatch(line))


@pytest.mark.parametrize(("page", "first_line"), list(NOT_RUN))
def test_a_block_that_is_listed_is_still_there_and_the_page_says_so(
    page: str, first_line: str
) -> None:
    blocks = [block for block in blocks_of(ROOT / page) if block.first_line == first_line]
    assert blocks, "take it off the list"
    if page != "README.md":
        text = (ROOT / page).read_text(encoding="utf-8")
        around = text[: text.index(blocks[0].text)].rsplit("\n\n", 2)[-2:]
        assert "Not run here" in "".join(around)


def test_the_readme_s_first_blocks_are_those_that_the_ci_script_runs() -> None:
    blocks = [block for block in blocks_of(ROOT / "README.md") if block.language == "sh"]
    listed = [line for page, line in NOT_RUN if page == "README.md"]
    assert [block.first_line for block in blocks][: len(listed)] == listed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_of_the_repository_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"\b((?:tests|bench|examples|csrc|kda_stream)/[\w./-]+\.\w+)\b", text)
    assert [name for name in named if not (ROOT / name).is_file()] == []
