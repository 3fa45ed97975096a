"""The README's block of figures: what results.json gives, between two markers, and nothing else."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import report, rows
from .rows import Comparison, LoadRow, Row

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
LINE_CHARS = 110
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"

# What a speed, a time, a ratio or a measured memory looks like. Sizes of files are told in GB and
# those of slots and blocks in MiB: these are chosen, not measured, and may stand anywhere. MB and
# kB are for memory that was measured.
MEASURED = re.compile(
    r"""\d[\d.,]*\s*(?:[kMG]i?B/s|seconds?\b|s\b|ms\b|milliseconds?\b|µs\b|minutes?\b|[kM]B\b
        |%|percent\b|per\ cent\b|times\ (?:as|the)\b)""",
    re.VERBOSE,
)


def write(results: dict[str, Any], path: Path = README) -> None:
    """Renew the block in the README, whose markers must be there; raises ValueError."""
    text = path.read_text(encoding="utf-8")
    before, _, after = split(text)
    path.write_text(f"{before}{block(results)}{after}", encoding="utf-8")


def split(text: str) -> tuple[str, str, str]:
    """What is before the block, the block with its markers, and what is behind it."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the README must have {BEGIN} and {END} once")
    before, _, rest = text.partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, f"{BEGIN}{inside}{END}", after


def measured_outside(text: str) -> list[str]:
    """Figures that look measured and stand outside of the block."""
    before, _, after = split(text)
    return [found.group() for part in (before, after) for found in MEASURED.finditer(part)]


def block(results: dict[str, Any]) -> str:
    """The block with its markers."""
    by_name = {row["name"]: row for row in results["comparisons"]}
    parts = [BEGIN]
    if "loads" in by_name:
        parts += [*_loads(by_name["loads"]), ""]
    parts += [
        "![kda_stream, and the best way of each other package](bench/results/results.svg)",
        "",
    ]
    told = [tell(by_name[name]) for name, tell in SENTENCES.items() if name in by_name]
    if any(told):
        parts += [line for text in told if text for line in _wrapped(f"- {text}", indent="  ")]
        parts.append("")
    parts += _wrapped(
        f"Measured by `python -m bench`: {report.machine_line(results)} Every row, with the least "
        "and the most: [bench/results/results.md](bench/results/results.md)."
    )
    return "\n".join([*parts, END])


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, LINE_CHARS, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _loads(comparison: Comparison) -> list[str]:
    holds = comparison["data"]
    names = rows.condition_names(comparison)
    found = [rows.load_rows(comparison, name) for name in names]
    told = (
        f"GB/s, {holds['layers']} KDA layers ({holds['kda_bytes'] / 1e9:.1f} GB) into one reused "
        f"buffer: medians of {comparison['rounds']} rounds, with the least and the most. Cold: "
        "nothing is in the page cache; cgroup: cold, and with so much memory."
    )
    lines = [
        *_wrapped(told),
        "",
        "| | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    choices: dict[str, Callable[[list[LoadRow]], LoadRow | None]] = {
        "kda_stream, `slots=1`": lambda of: _named(of, comparison["own"]),
        "the best other loader": lambda of: rows.best(of, "peer"),
        "a C program that does nothing else": lambda of: rows.best(of, "ceiling"),
    }
    for name, choose in choices.items():
        is_other = name == "the best other loader"
        cells = [_load_cell(choose(of), is_named=is_other) for of in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _named(found: list[LoadRow], name: str) -> LoadRow | None:
    return next((row for row in found if row.name == name), None)


def _load_cell(row: LoadRow | None, *, is_named: bool) -> str:
    if row is None:
        return "none ended" if is_named else ""
    if row.gb_per_second is None:
        return row.outcome
    spread = report.least_most(row.gb_per_second, ".2f")
    named = f" {row.name}" if is_named else ""
    return f"{row.gb_per_second.median:.2f}{named} ({spread})"


# Sentences ----------------------------------------------------------------------------------------


def _own_rows(comparison: Comparison, name: str) -> dict[str, Row]:
    """Condition -> the row of that name, where it has figures."""
    return {
        condition: row
        for condition in rows.condition_names(comparison)
        for row in rows.time_rows(comparison, condition)
        if row.name == name and row.seconds
    }


def _faster(comparison: Comparison, name: str, *references: str) -> str:
    """Such as "1.52 times as fast warm, 1.20 times cold", by the fastest of the references."""
    found = [
        (condition, row.faster[fastest].median)
        for condition, row in _own_rows(comparison, name).items()
        if (fastest := rows.fastest_of(row, references))
    ]
    told = [f"{ratio:.2f} times {condition}" for condition, ratio in found]
    return ", ".join(told).replace(" times ", " times as fast ", 1)


def _opening(comparison: Comparison) -> str:
    [reference] = comparison["references"]
    holds = comparison["data"]
    for row in _own_rows(comparison, comparison["own"]).values():
        if reference in row.faster and row.seconds:
            memory = "" if row.memory_mib is None else f" and {row.memory_mib:.0f} MiB of memory"
            return (
                f"Opening {holds['tensors']:,} tensors in {holds['shards']} shards, every header "
                f"checked: {row.faster[reference].median:.2f} times as fast as the safetensors "
                f"package reads the same metadata, in {row.seconds.median:.2f} s{memory}."
            )
    return ""


def _first_layer(comparison: Comparison) -> str:
    [reference] = comparison["references"]
    own = _faster(comparison, comparison["own"], reference)
    needed = _faster(comparison, "kda_stream needed", reference)
    if not own:
        return ""
    also = f'; with `verify="needed"` {needed}' if needed else ""
    return f"The first layer, beside the safetensors package: {own}{also}."


def _weights(comparison: Comparison) -> str:
    loops = {
        "the faster loop over `safe_open` that keeps its tensors": "kept",
        "the faster one that copies each and lets it go": "lent",
    }
    told = [
        f"{text}, beside {named}"
        for named, ending in loops.items()
        if (
            text := _faster(
                comparison,
                comparison["own"],
                *(name for name in comparison["references"] if name.endswith(ending)),
            )
        )
    ]
    return f"Every tensor, by `iter_torch_weights`: {'; '.join(told)}." if told else ""


def _payload(comparison: Comparison) -> str:
    [reference] = comparison["references"]
    own = _faster(comparison, comparison["own"], reference)
    values = _faster(comparison, "check_payload", reference)
    if not own or not values:
        return ""
    return (
        f"All bytes, beside nothing but sha256 in as many threads: `check_payload` {values}, "
        f"and with `digests=True` {own}."
    )


def _ranks(comparison: Comparison) -> str:
    found = [
        row
        for condition in rows.condition_names(comparison)
        for row in rows.rank_rows(comparison, condition)
        if row.besides and row.did == "direct"
    ]
    if not found:
        return ""
    off = max(abs(value - 1) for row in found if row.besides for value in row.besides.each)
    sizes = sorted({int(row.name.rpartition(" ")[2]) for row in found})
    told = (
        ", ".join(map(str, sizes[:-1])) + f" and {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    )
    return (
        f"Of {told} ranks the first and the last each read their own bytes to within "
        f"{off * 100:.1f} percent, and `o_proj` whole."
    )


SENTENCES: dict[str, Callable[[Comparison], str]] = {
    "opening": _opening,
    "opening many": _opening,
    "first layer": _first_layer,
    "weights": _weights,
    "payload": _payload,
    "ranks": _ranks,
}
