"""Figures out of results: medians, ratios, and what stands in place of a figure."""

from __future__ import annotations

from typing import Any

import pytest

from bench import rows

Results = dict[str, Any]


def comparison(results: Results, name: str) -> dict[str, Any]:
    found: dict[str, Any]
    [found] = [row for row in results["comparisons"] if row["name"] == name]
    return found


def loads(results: Results, condition: str) -> dict[str, rows.LoadRow]:
    return {row.name: row for row in rows.load_rows(comparison(results, "loads"), condition)}


def times(results: Results, name: str, condition: str) -> dict[str, rows.Row]:
    return {row.name: row for row in rows.time_rows(comparison(results, name), condition)}


def test_a_load_is_the_median_of_its_timed_rounds(results: Results) -> None:
    figure = loads(results, "warm")["kda_stream"].gb_per_second
    assert figure is not None
    assert (figure.median, figure.least, figure.most) == (8.0, 4.0, 10.0)


def test_loads_come_the_fastest_first_and_those_without_a_figure_last(results: Results) -> None:
    assert list(loads(results, "warm")) == [
        "ceiling: copy",
        "kda_stream mapped keep",
        "ceiling: map",
        "kda_stream",
        "alpha fast",
        "alpha slow",
        "beta",
    ]
    assert next(iter(loads(results, "cgroup 320 MiB"))) == "kda_stream"


def test_a_ceiling_has_the_making_of_its_memory_in_it_and_a_loader_can_be_told_without(
    results: Results,
) -> None:
    found = loads(results, "warm")
    ceiling, loader = found["ceiling: map"], found["alpha fast"]
    assert ceiling.gb_per_second is not None
    assert ceiling.gb_per_second.median == pytest.approx(10.0)
    assert ceiling.after_memory == pytest.approx(2 / 0.15)
    assert loader.after_memory == pytest.approx(10.0)


def test_a_load_is_compared_with_the_best_peer_and_the_best_ceiling_that_reads_files(
    results: Results,
) -> None:
    row = loads(results, "warm")["kda_stream"]
    assert row.of_best_peer == pytest.approx(2.0)
    assert row.of_ceiling == pytest.approx(0.8)  # not of "ceiling: copy", which reads none


def test_a_load_that_was_killed_has_no_figure_and_is_nobodys_measure(results: Results) -> None:
    found = loads(results, "cgroup 320 MiB")
    assert found["beta"].outcome == "killed"
    assert found["beta"].gb_per_second is None
    assert found["kda_stream"].of_best_peer is None
    assert rows.best(list(found.values()), "peer") is None


def test_an_entry_with_the_round_of_checks_alone_is_not_timed(results: Results) -> None:
    opening = comparison(results, "opening")
    opening["runs"] = [run for run in opening["runs"] if run["round"] == 0]
    assert {row.outcome for row in rows.time_rows(opening, "warm")} == {"not timed"}


def test_a_ratio_is_the_median_of_the_rounds_own_ratios(results: Results) -> None:
    """0.2 s against 0.4 s, then 0.5 s against 0.5 s: not the ratio of the two medians."""
    ratio = times(results, "opening", "warm")["kda_stream"].faster["safetensors"]
    assert ratio.each == (2.0, 1.0)
    assert ratio.median == 1.5


def test_a_round_that_the_reference_lacks_is_left_out_of_the_ratio(results: Results) -> None:
    opening = comparison(results, "opening")
    opening["runs"] = [
        run for run in opening["runs"] if (run["entry"], run["round"]) != ("safetensors", 2)
    ]
    [row] = [row for row in rows.time_rows(opening, "warm") if row.name == "kda_stream"]
    assert row.faster["safetensors"].each == (2.0,)


def test_there_is_no_ratio_to_a_reference_that_did_not_run(results: Results) -> None:
    opening = comparison(results, "opening")
    opening["runs"] = [run for run in opening["runs"] if run["entry"] == "kda_stream"]
    [row] = rows.time_rows(opening, "warm")
    assert row.faster == {}


def test_the_fastest_reference_is_the_one_that_a_row_is_the_least_ahead_of(
    results: Results,
) -> None:
    row = times(results, "weights", "cold")["iter_torch_weights"]
    assert rows.fastest_of(row, ["safe_open, kept", "safe_open, lent"]) == "safe_open, lent"
    assert rows.fastest_of(row, ["safe_open, kept", "none"]) == "safe_open, kept"
    assert rows.fastest_of(row, ["none"]) == ""


def test_memory_is_what_the_side_tells_or_else_the_peak_over_the_beginning(
    results: Results,
) -> None:
    assert times(results, "opening", "warm")["kda_stream"].memory_mib == 40
    assert times(results, "payload", "warm")["check_payload"].memory_mib == 20


def test_a_rank_is_measured_by_its_share_besides_o_proj(results: Results) -> None:
    """The round of checks, in which five times as much was read, does not count."""
    [row, *_] = rows.rank_rows(comparison(results, "ranks"), "cold")
    assert row.besides is not None
    assert row.besides.each == pytest.approx((1.02, 1.02))
    assert (row.part_mib, row.o_proj_mib) == (128, 64)


def test_a_condition_that_was_skipped_is_not_among_the_names(results: Results) -> None:
    found = comparison(results, "loads")
    found["skipped"]["cold"] = "no disk"
    assert rows.condition_names(found) == ["warm", "cgroup 320 MiB"]


def test_failures_are_told_but_for_kills_and_may_leave_small_memory_out(results: Results) -> None:
    found = comparison(results, "loads")
    assert rows.failures(found) == []
    failed = {"entry": "beta", "round": 1, "outcome": "failed", "why": "broken"}
    found["runs"] += [failed | {"condition": name} for name in ("warm", "cgroup 320 MiB")]
    assert rows.failures(found) == [
        "loads, beta, warm: broken",
        "loads, beta, cgroup 320 MiB: broken",
    ]
    assert rows.failures(found, where_limited=False) == ["loads, beta, warm: broken"]
