"""What results.json holds, as a page: results.md, and the two plots beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import charts, rows
from .rows import Comparison, LoadRow, RankRow, Row, Spread

FORMAT = 2
Results = dict[str, Any]

HEAD = """\
# Benchmarks

{machine}

`python -m bench` has written this page, out of [results.json](results.json). Each run is a process
of its own, in which everything is imported before the clock starts. Rounds go through all sides of
a comparison in turn, each in an order of its own. Figures are medians over {rounds}, with the least
and the most beside them, and ratios are taken round by round. A round before them, which is not
timed, compares what was delivered and samples memory.

![kda_stream, and the best way of each other package](results.svg)

[Every row as a plot](results-all.svg)
"""
QUICK = """\
**A quick run, on small data: it shows that the bench works, and no more.** What has a meaning at
full size alone is left out."""


def load(folder: Path) -> Results:
    """The results in `folder`; raises ValueError for those of another format."""
    results: Results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    if results["format"] != FORMAT:
        raise ValueError(f"results.json is of format {results['format']}, not {FORMAT}")
    return results


def files(results: Results) -> dict[str, str]:
    """Name -> text of everything that is made of results.json."""
    return {
        "results.md": markdown(results),
        "results.svg": charts.short(results),
        "results-all.svg": charts.long(results),
    }


def write(results: Results, folder: Path) -> None:
    """results.json and all that is made of it, into `folder`."""
    text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
    (folder / "results.json").write_text(text, encoding="utf-8")
    for name, content in files(results).items():
        (folder / name).write_text(content, encoding="utf-8")


def machine_line(results: Results) -> str:
    machine = results["machine"]
    told = [
        f"{machine['processors']} processors ({machine['processor']})",
        f"{machine['memory_bytes'] / 2**30:.0f} GiB",
        machine["system"],
        f"Python {machine['python']}",
    ]
    if "file_system" in machine:
        told.append(f"the files on {machine['file_system']}")
    if "date" in machine:
        told.append(machine["date"])
    return ", ".join(told) + "."


def rounds_told(results: Results) -> str:
    counts = sorted({comparison["rounds"] for comparison in results["comparisons"]})
    told = " or ".join(str(count) for count in counts)
    return f"{told} round{'' if counts == [1] else 's'}"


def holds_told(holds: dict[str, int]) -> str:
    """Such as "12 layers, 3.31 GB of KDA tensors, 4.36 GB of files"."""
    told = {
        "shards": "{:,} shards",
        "tensors": "{:,} tensors",
        "layers": "{:,} layers",
        "kda_bytes": "{:,} bytes of KDA tensors",
        "file_bytes": "{:,} bytes of files",
    }
    return ", ".join(text.format(holds[name]) for name, text in told.items() if name in holds)


def markdown(results: Results) -> str:
    lines = [HEAD.format(machine=machine_line(results), rounds=rounds_told(results))]
    if results["quick"]:
        lines += [QUICK, ""]
    for comparison in results["comparisons"]:
        lines += _section(comparison)
    lines += _failed(results)
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(comparison: Comparison) -> list[str]:
    holds = holds_told(comparison["data"])
    lines = [f"## {comparison['title']}", "", f"{holds}.", "", comparison["told"], ""]
    table = TABLES.get(comparison["name"], _time_table)
    for condition in comparison["conditions"]:
        lines += [
            f"### {comparison['title']}: {condition['name']}",
            "",
            f"{condition['told']}.",
            "",
        ]
        if condition["name"] in comparison["skipped"]:
            lines += [f"Skipped: {comparison['skipped'][condition['name']]}.", ""]
        else:
            lines += [*table(comparison, condition["name"]), ""]
    return lines + _set_up(comparison) + _not_run(comparison)


def _set_up(comparison: Comparison) -> list[str]:
    lines = [
        "How each was set up:",
        "",
        "| | reads | versions | settings |",
        "|---|---|---|---|",
    ]
    for entry in comparison["entries"]:
        versions = ", ".join(f"{name} {told}" for name, told in entry["versions"].items())
        lines.append(f"| {entry['name']} | {entry['reads']} | {versions} | {entry['settings']} |")
    return [*lines, ""]


def _not_run(comparison: Comparison) -> list[str]:
    """Grouped by the reason, since a package that is missing stands behind several names."""
    conditions = {condition["name"] for condition in comparison["conditions"]}
    by_reason: dict[str, list[str]] = {}
    for name, why in comparison["skipped"].items():
        if name not in conditions:
            by_reason.setdefault(why, []).append(name)
    lines = [f"- {', '.join(names)}: {why}" for why, names in by_reason.items()]
    return ["Not run:", "", *lines, ""] if lines else []


def _failed(results: Results) -> list[str]:
    lines = [text for row in results["comparisons"] for text in rows.failures(row)]
    return ["## Failed", "", *(f"- {text}" for text in lines)] if lines else []


# Tables -------------------------------------------------------------------------------------------

Column = tuple[str, Callable[[Any], str]]


def _number(form: str, value: Callable[[Any], float | None]) -> Callable[[Any], str]:
    def cell(row: Any) -> str:
        figure = value(row)
        return "" if figure is None else f"{figure:{form}}"

    return cell


def least_most(spread: Spread | None, form: str) -> str:
    return "" if spread is None else f"{spread.least:{form}}-{spread.most:{form}}"


def _with_range(spread: Spread | None, form: str) -> str:
    """Such as "1.52 (1.40-1.61)"."""
    return "" if spread is None else f"{spread.median:{form}} ({least_most(spread, form)})"


def _medians(form: str, value: Callable[[Any], Spread | None]) -> Callable[[Any], str]:
    return _number(form, lambda row: None if (found := value(row)) is None else found.median)


def _memory_cell(row: LoadRow) -> str:
    if row.memory_mib is None:
        return ""
    return f"{row.memory_mib:.0f}{'*' if row.locked is False else ''}"


LOAD_COLUMNS: tuple[Column, ...] = (
    ("reads", lambda row: row.reads),
    ("GB/s", _medians(".2f", lambda row: row.gb_per_second)),
    ("least-most", lambda row: least_most(row.gb_per_second, ".2f")),
    ("GB/s after memory", _number(".2f", lambda row: row.after_memory)),
    ("of best peer", _number(".2f", lambda row: row.of_best_peer)),
    ("of ceiling", _number(".2f", lambda row: row.of_ceiling)),
    ("CPU s", _number(".2f", lambda row: row.cpu_seconds)),
    ("first layer s", _number(".3f", lambda row: row.first_layer_seconds)),
    ("import s", _number(".2f", lambda row: row.import_seconds)),
    ("memory MiB", _memory_cell),
    ("anon peak MiB", _number(".0f", lambda row: row.anonymous_mib)),
    ("over memory", _number(".0f", lambda row: row.anonymous_over_memory_mib)),
    ("file peak MiB", _number(".0f", lambda row: row.file_mib)),
    ("cache left MiB", _number("+.0f", lambda row: row.cache_mib_left)),
)

RANK_COLUMNS: tuple[Column, ...] = (
    ("seconds", _medians(".3f", lambda row: row.seconds)),
    ("read", lambda row: row.did),
    ("its part MiB", _number(".0f", lambda row: row.part_mib)),
    ("`o_proj` whole MiB", _number(".0f", lambda row: row.o_proj_mib)),
    ("read MiB", _number(".0f", lambda row: row.read_mib)),
    ("besides `o_proj`", lambda row: _with_range(row.besides, ".3f")),
)


def _time_columns(references: list[str]) -> tuple[Column, ...]:
    return (
        ("seconds", _medians(".3f", lambda row: row.seconds)),
        ("least-most", lambda row: least_most(row.seconds, ".3f")),
        *(
            (
                f"times as fast as {name}",
                lambda row, name=name: _with_range(row.faster.get(name), ".2f"),
            )
            for name in references
        ),
        ("GB/s", _number(".2f", lambda row: row.gb_per_second)),
        ("CPU s", _number(".2f", lambda row: row.cpu_seconds)),
        ("memory MiB", _number(".0f", lambda row: row.memory_mib)),
    )


def _time_table(comparison: Comparison, condition: str) -> list[str]:
    return _table(rows.time_rows(comparison, condition), _time_columns(comparison["references"]))


def _load_table(comparison: Comparison, condition: str) -> list[str]:
    return _table(rows.load_rows(comparison, condition), LOAD_COLUMNS)


def _rank_table(comparison: Comparison, condition: str) -> list[str]:
    return _table(rows.rank_rows(comparison, condition), RANK_COLUMNS)


TABLES: dict[str, Callable[[Comparison, str], list[str]]] = {
    "loads": _load_table,
    "ranks": _rank_table,
}


def _table(found: list[Any], columns: tuple[Column, ...]) -> list[str]:
    """Columns without a figure in any row are left out; what did not end says so in the first."""
    kept = [column for column in columns if any(column[1](row) for row in found)]
    heads = [head for head, _ in kept] or ["outcome"]
    aligned = ["---" if head in ("reads", "read") else "---:" for head in heads]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "|".join(aligned) + "|"]
    for row in found:
        name = f"**{row.name}**" if row.kind == "own" else row.name
        cells = [cell(row) for _, cell in kept] or [""]
        if row.outcome != "done":
            figure = next((at for at, head in enumerate(heads) if head != "reads"), 0)
            cells[figure] = row.outcome
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


__all__ = ["FORMAT", "RankRow", "Row", "files", "load", "markdown", "write"]
