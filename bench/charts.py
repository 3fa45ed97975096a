"""Which rows the two plots show: `short` for the README, `long` with every row."""

from __future__ import annotations

from typing import Any

from . import rows
from .plot import Bar, Panel, svg
from .rows import Comparison, LoadRow, Spread

SHORT_CONDITIONS = ("warm", "cold")


def short(results: dict[str, Any]) -> str:
    """The best of each other package, warm and cold, and the ratios of the other comparisons."""
    panels: list[Panel] = []
    for comparison in results["comparisons"]:
        if comparison["name"] == "loads":
            panels += [
                Panel(f"{_loads_title(comparison)}, {name}: GB/s", best_bars(comparison, name))
                for name in rows.condition_names(comparison)
                if name in SHORT_CONDITIONS
            ]
    ratios = [bar for row in results["comparisons"] for bar in ratio_bars(row)]
    told = "How many times as fast as the safetensors package"
    panels.append(Panel(told, tuple(ratios), mark=1.0))
    return svg([panel for panel in panels if panel.bars])


def long(results: dict[str, Any]) -> str:
    """Every row of every comparison that has seconds or GB/s."""
    panels: list[Panel] = []
    for comparison in results["comparisons"]:
        for name in rows.condition_names(comparison):
            if comparison["name"] == "loads":
                title = f"{_loads_title(comparison)}, {name}: GB/s"
                found = rows.load_rows(comparison, name)
                panels.append(Panel(title, tuple(_load_bar(row, row.name) for row in found)))
            else:
                title = f"{comparison['title']}, {name}: seconds, less is better"
                bars = tuple(
                    Bar(row.name, row.kind, row.seconds, row.outcome)
                    for row in rows.time_rows(comparison, name)
                )
                panels.append(Panel(title, bars))
    return svg([panel for panel in panels if panel.bars])


def best_bars(comparison: Comparison, condition: str) -> tuple[Bar, ...]:
    """The fastest way of each other package, the library as it comes, and the fastest ceiling."""
    best: dict[str, LoadRow] = {}
    for row in rows.load_rows(comparison, condition):  # the fastest first
        if row.kind != "memory" and (row.kind != "own" or row.name == comparison["own"]):
            best.setdefault("ceiling" if row.kind == "ceiling" else rows.package(row), row)
    return tuple(
        _load_bar(row, "the machine, by a C program" if row.kind == "ceiling" else row.name)
        for row in best.values()
    )


def ratio_bars(comparison: Comparison) -> tuple[Bar, ...]:
    """The library's side against the fastest of the references that are another package's."""
    peers = {entry["name"] for entry in comparison["entries"] if entry["kind"] == "peer"}
    references = [name for name in comparison["references"] if name in peers]
    bars: list[Bar] = []
    for condition in rows.condition_names(comparison):
        for row in rows.time_rows(comparison, condition):
            fastest = rows.fastest_of(row, references)
            if row.name == comparison["own"] and fastest:
                than = f", against {fastest}" if len(references) > 1 else ""
                name = f"{comparison['title']}, {condition}{than}"
                bars.append(Bar(name, "own", row.faster[fastest], row.outcome))
    return tuple(bars)


def _loads_title(comparison: Comparison) -> str:
    holds = comparison["data"]
    return f"{holds['layers']} KDA layers, {holds['kda_bytes'] / 1e9:.2f} GB, into memory"


def _load_bar(row: LoadRow, name: str) -> Bar:
    figure: Spread | None = row.gb_per_second
    return Bar(name, row.kind, figure, row.outcome)
