"""The README's block of figures: how it is written, and what counts as a figure outside of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import readme

Results = dict[str, Any]


def lines_of(results: Results) -> str:
    """The block with its lines joined, so that breaks do not matter."""
    return " ".join(readme.block(results).split())


def test_the_table_has_the_library_the_best_other_by_name_and_the_machine(
    results: Results,
) -> None:
    block = readme.block(results)
    assert "| | warm | cold | cgroup 320 MiB |" in block
    assert "| kda_stream, `slots=1` | 8.00 (4.00-10.00) | 2.00" in block
    assert "| 4.00 alpha fast (4.00-4.00) | 1.25 beta (1.25-1.25) | none ended |" in block
    assert "| a C program that does nothing else | 10.00 (10.00-10.00) | 2.50" in block


@pytest.mark.parametrize(
    "sentence",
    [
        "Opening 76,108 tensors in 62 shards, every header checked: 1.50 times as fast as the",
        "package reads the same metadata, in 0.35 s and 40 MiB of memory.",
        "The first layer, beside the safetensors package: 2.00 times as fast warm, 1.00 times cold",
        'with `verify="needed"` 4.00 times as fast warm, 2.00 times cold.',
        "3.00 times as fast warm, 2.50 times cold, beside the faster loop over `safe_open` that",
        "0.50 times as fast warm, 1.50 times cold, beside the faster one that copies each and lets",
        "`check_payload` 2.00 times as fast warm, and with `digests=True` 0.80 times as fast warm.",
        "Of 2 and 4 ranks the first and the last each read their own bytes to within 2.0 percent",
        "2 processors (Example), 8 GiB, Linux 6.1, Python 3.11.7",
        "![kda_stream, and the best way of each other package](bench/results/results.svg)",
    ],
)
def test_the_block_says(results: Results, sentence: str) -> None:
    assert sentence in lines_of(results)


def test_a_comparison_that_did_not_run_is_not_spoken_of(results: Results) -> None:
    results["comparisons"] = results["comparisons"][:1]
    assert "beside" not in readme.block(results)


def test_a_reference_that_did_not_run_leaves_no_sentence(results: Results) -> None:
    for comparison in results["comparisons"]:
        peers = {entry["name"] for entry in comparison["entries"] if entry["kind"] != "own"}
        comparison["runs"] = [run for run in comparison["runs"] if run["entry"] not in peers]
    assert "times as fast" not in readme.block(results)
    assert "| the best other loader | none ended |" in readme.block(results)


def test_the_block_is_renewed_between_its_markers_alone(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    readme.write(results, path)
    assert path.read_text() == f"before\n{readme.block(results)}\nafter\n"
    readme.write(results, path)
    assert path.read_text() == f"before\n{readme.block(results)}\nafter\n"


@pytest.mark.parametrize("text", ["none\n", readme.BEGIN, (readme.BEGIN + readme.END) * 2])
def test_a_readme_without_the_two_markers_once_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="once"):
        readme.split(text)


MEASURED = ("19.2 GB/s", "0.3 s", "3 seconds", "12 ms", "1.6 times as fast", "4 percent", "35 MB")
CHOSEN = ("328 GB", "525 MiB", "4 KiB", "62 shards", "76,108 tensors", "three slots of 64 MiB")


@pytest.mark.parametrize("figure", MEASURED)
def test_a_measured_figure_outside_of_the_block_is_found(figure: str) -> None:
    text = f"It took {figure}, and\n{readme.BEGIN}\n{figure}\n{readme.END}\nmore."
    assert len(readme.measured_outside(text)) == 1


@pytest.mark.parametrize("figure", CHOSEN)
def test_sizes_of_files_and_slots_and_counts_are_facts(figure: str) -> None:
    assert readme.measured_outside(f"Of {figure}.\n{readme.BEGIN}\n{readme.END}\n") == []
