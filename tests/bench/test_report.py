"""The page and the plots that are made of results.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import charts, report

Results = dict[str, Any]
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def table_row(page: str, heading: str, name: str) -> list[str]:
    """The cells of a table's row, behind its name."""
    section = (
        page.partition(f"### {heading}\n")[2].partition("\n### ")[0].partition("\nHow each")[0]
    )
    [line] = [line for line in section.splitlines() if re.match(rf"\| \**{name}\** \|", line)]
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


def test_the_page_has_a_section_for_each_comparison_and_the_machine(results: Results) -> None:
    page = report.markdown(results)
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert headings == [row["title"] for row in results["comparisons"]]
    assert "2 processors (Example), 8 GiB, Linux 6.1, Python 3.11.7" in page


def test_a_row_of_loads_tells_median_least_most_and_ratios(results: Results) -> None:
    cells = table_row(report.markdown(results), "Whole loads: warm", "kda_stream")
    assert cells[:6] == ["KDA tensors: mapped 8", "8.00", "4.00-10.00", "8.00", "2.00", "0.80"]


def test_memory_that_was_not_locked_has_a_star(results: Results) -> None:
    for run in results["comparisons"][0]["runs"]:
        if run["entry"] == "beta":
            run["locked"] = False
    page = report.markdown(results)
    assert "256*" in table_row(page, "Whole loads: warm", "beta")
    assert "256" in table_row(page, "Whole loads: warm", "alpha fast")


def test_what_was_killed_says_so_in_place_of_its_figure(results: Results) -> None:
    cells = table_row(report.markdown(results), "Whole loads: cgroup 320 MiB", "beta")
    assert cells[1] == "killed"
    assert set(cells[2:]) == {""}


def test_a_row_of_times_tells_each_ratio_with_least_and_most(results: Results) -> None:
    cells = table_row(report.markdown(results), "Opening: warm", "kda_stream")
    assert cells == ["0.350", "0.200-0.500", "1.50 (1.00-2.00)", "0.35", "40"]


def test_a_row_of_ranks_tells_bytes_by_the_share(results: Results) -> None:
    cells = table_row(report.markdown(results), "What ranks read: cold", "rank 0 of 4")
    assert cells == ["0.500", "direct", "64", "64", "113", "1.020 (1.020-1.020)"]


def test_peers_that_are_missing_are_told_together_by_the_reason(results: Results) -> None:
    assert "- gamma, gamma lazy: No module named 'gamma'\n" in report.markdown(results)


def test_a_condition_that_cannot_be_had_is_told_in_its_place(results: Results) -> None:
    results["comparisons"][0]["skipped"]["cold"] = "the page cache stays"
    page = report.markdown(results)
    assert "Every file dropped before.\n\nSkipped: the page cache stays.\n" in page


def test_failures_are_listed_at_the_end(results: Results) -> None:
    run = {"entry": "beta", "condition": "warm", "round": 1, "outcome": "failed", "why": "broken"}
    results["comparisons"][0]["runs"].append(run)
    assert report.markdown(results).endswith("## Failed\n\n- loads, beta, warm: broken\n")


def test_a_quick_run_says_that_its_figures_mean_nothing(results: Results) -> None:
    assert "A quick run" not in report.markdown(results)
    assert "A quick run" in report.markdown(results | {"quick": True})


def test_all_is_written_beside_results_json_and_read_back(results: Results, tmp_path: Path) -> None:
    report.write(results, tmp_path)
    assert report.load(tmp_path) == results
    for name, content in report.files(results).items():
        assert (tmp_path / name).read_text(encoding="utf-8") == content


def test_results_of_another_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(ValueError, match="of format 1, not 2"):
        report.load(tmp_path)


# --- plots ----------------------------------------------------------------------------------------


def test_the_short_plot_has_the_library_as_it_comes_and_the_best_of_each_other(
    results: Results,
) -> None:
    found = texts(charts.short(results))
    for name in ("kda_stream", "alpha fast", "beta", "the machine, by a C program"):
        assert found.count(name) == (3 if name == "kda_stream" else 2), name  # and the legend
    assert not {"kda_stream mapped keep", "alpha slow", "ceiling: copy"} & set(found)


def test_the_short_plot_has_the_ratios_to_other_packages(results: Results) -> None:
    found = texts(charts.short(results))
    for name in (
        "Opening, warm",
        "The first layer, cold",
        "Every tensor, warm, against safe_open, lent",
    ):
        assert name in found
    assert not [text for text in found if "Checking all bytes" in text]  # sha256 is no package


def test_the_long_plot_has_every_row(results: Results) -> None:
    found = texts(charts.long(results))
    for comparison in results["comparisons"]:
        for entry in comparison["entries"]:
            assert entry["name"] in found
    assert found.count("killed") == 2


@pytest.mark.parametrize("draw", [charts.short, charts.long])
def test_a_plot_is_well_formed_and_readable_on_light_and_dark_pages(
    results: Results, draw: Any
) -> None:
    results["comparisons"][0]["entries"][3]["name"] = "<alpha> & fast"
    for run in results["comparisons"][0]["runs"]:
        run["entry"] = run["entry"].replace("alpha fast", "<alpha> & fast")
    svg = draw(results)
    assert "<alpha> & fast" in texts(svg)
    assert "prefers-color-scheme: dark" in svg
    root = ElementTree.fromstring(svg)
    [ground] = [row for row in root.iter(f"{SVG}rect") if row.get("class") == "ground"]
    assert (ground.get("width"), ground.get("height")) == (root.get("width"), root.get("height"))
    assert not [row for row in root.iter() if row.get("fill")]  # colours are the style's alone


@pytest.mark.parametrize("draw", [charts.short, charts.long])
def test_a_bar_is_as_long_as_its_figure(results: Results, draw: Any) -> None:
    root = ElementTree.fromstring(draw(results))
    bars = [row for row in root.iter(f"{SVG}rect") if row.get("y") and row.get("height") == "15"]
    told = [row for row in root.iter(f"{SVG}text") if row.get("font-size") == "12"]
    figures = [row.text for row in told if re.fullmatch(r"\d+\.\d\d", row.text or "")]
    lengths = [float(bar.get("width", "0")) for bar in bars]
    assert len(lengths) == len(figures)
    first = [float(figure or "") for figure in figures[:2]]  # of one panel, and one scale
    assert lengths[0] / lengths[1] == pytest.approx(first[0] / first[1], rel=0.01)
    assert max(lengths) <= 900


def test_without_anything_that_was_measured_the_plots_are_empty_but_whole() -> None:
    results = {"comparisons": [], "quick": False}
    for draw in (charts.short, charts.long):
        assert ElementTree.fromstring(draw(results)).tag == f"{SVG}svg"
