"""Figures in the README come from bench/results/results.json, and from nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
readme = pytest.importorskip("bench.readme", reason="bench/ is not here")
report = pytest.importorskip("bench.report")


@pytest.fixture
def text() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_block_of_figures_is_exactly_what_the_results_give(text: str) -> None:
    """`python -m bench --readme` writes it."""
    assert readme.split(text)[1] == readme.block(report.load(readme.RESULTS))


def test_no_measured_figure_stands_outside_of_the_block(text: str) -> None:
    assert readme.measured_outside(text) == []


def test_the_page_and_the_plots_are_exactly_what_the_results_give() -> None:
    """`python -m bench --redraw` writes them."""
    for name, content in report.files(report.load(readme.RESULTS)).items():
        assert (readme.RESULTS / name).read_text(encoding="utf-8") == content, name


def test_the_readme_shows_the_plot_and_links_to_the_page(text: str) -> None:
    block = readme.split(text)[1]
    assert "(bench/results/results.svg)" in block
    assert "(bench/results/results.md)" in block


def test_the_results_are_of_a_whole_run_at_full_size() -> None:
    results = report.load(readme.RESULTS)
    assert not results["quick"]
    assert results["comparisons"][0]["name"] == "loads"
