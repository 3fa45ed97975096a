"""Results into rows, and rows into a Markdown table; `write` makes that and the plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import plot

MIB = 1024**2


@dataclass(frozen=True)
class Row:
    """An entry under a condition. Figures are medians over the timed rounds, None where unknown.

    `gb_per_second` is over all of the time, from before the memory is made and the files opened;
    `after_memory` leaves the making of the memory out. `each` has one figure a round.
    """

    name: str
    kind: str
    reads: str
    outcome: str
    each: tuple[float, ...] = ()
    gb_per_second: float | None = None
    after_memory: float | None = None
    of_best_peer: float | None = None
    of_ceiling: float | None = None
    cpu_seconds: float | None = None
    first_layer_seconds: float | None = None
    import_seconds: float | None = None
    memory_mib: float | None = None
    anonymous_mib: float | None = None
    anonymous_over_memory_mib: float | None = None
    file_mib: float | None = None
    cache_mib_left: float | None = None
    locked: bool | None = None


def write(results: dict[str, Any], folder: Path) -> None:
    """results.md and results.svg into `folder`."""
    panels = [
        plot.Panel(
            condition["name"],
            tuple(
                plot.Bar(row.name, row.kind, row.gb_per_second, row.each, row.outcome)
                for row in rows_of(results, condition["name"])
            ),
        )
        for condition in results["conditions"]
    ]
    panels = [panel for panel in panels if panel.bars]
    title = f"{results['layers']} KDA layers, {results['payload_bytes'] / 1e9:.2f} GB, into memory"
    (folder / "results.md").write_text(markdown(results))
    (folder / "results.svg").write_text(plot.svg(title, panels))


def rows_of(results: dict[str, Any], condition: str) -> list[Row]:
    """The condition's rows, the fastest first, those without a figure last."""
    runs = [run for run in results["runs"] if run["condition"] == condition]
    rows = []
    for entry in results["entries"]:
        own = [run for run in runs if run["entry"] == entry["name"]]
        if own:
            rows.append(_row(entry, own))
    best_peer = max((row.gb_per_second or 0 for row in rows if row.kind == "peer"), default=0)
    ceiling = max((row.gb_per_second or 0 for row in rows if row.kind == "ceiling"), default=0)
    ratios = [
        Row(
            **{
                **vars(row),
                "of_best_peer": _ratio(row.gb_per_second, best_peer),
                "of_ceiling": _ratio(row.gb_per_second, ceiling),
            }
        )
        for row in rows
    ]
    return sorted(ratios, key=lambda row: -(row.gb_per_second or 0))


def unexpected_failures(results: dict[str, Any]) -> list[str]:
    """What failed where memory was not limited."""
    limited = {row["name"] for row in results["conditions"] if row["memory_bytes_max"]}
    return _failures([run for run in results["runs"] if run["condition"] not in limited])


def _failures(runs: list[dict[str, Any]]) -> list[str]:
    """Which failed otherwise than by being killed, and why."""
    return [
        f"{run['entry']}, {run['condition']}: {run['why']}"
        for run in runs
        if run["outcome"] in ("failed", "timed out")
    ]


def _row(entry: dict[str, Any], runs: list[dict[str, Any]]) -> Row:
    did = {run["did"] for run in runs if run.get("did")}
    reads = f"{entry['reads']}: {' or '.join(sorted(did))}" if did else entry["reads"]
    named = (entry["name"], entry["kind"], reads)
    bad = [run for run in runs if run["outcome"] != "done"]
    if bad:
        return Row(*named, bad[0]["outcome"])
    timed = [run for run in runs if run["round"] > 0]
    checked = [run for run in runs if run["round"] == 0]
    if not timed:
        return Row(*named, "not timed")
    is_case = entry["kind"] in ("ceiling", "memory")
    # ceiling.c tells the time after the memory was made, a runner the time with it.
    each = [_gb_per_second(run, run["memory_seconds"] if is_case else 0) for run in timed]
    after = [_gb_per_second(run, 0 if is_case else -run["memory_seconds"]) for run in timed]

    def median(name: str, among: list[dict[str, Any]], unit: float = 1) -> float | None:
        values = [run[name] / unit for run in among if name in run]
        return statistics.median(values) if values else None

    memory_mib = median("buffer_bytes", timed, MIB)
    anonymous_mib = median("anonymous_bytes_peak", checked, MIB)
    over_mib = None
    if memory_mib is not None and anonymous_mib is not None:
        over_mib = anonymous_mib - memory_mib
    return Row(
        *named,
        "done",
        each=tuple(each),
        gb_per_second=statistics.median(each),
        after_memory=statistics.median(after),
        cpu_seconds=median("cpu_seconds", timed),
        first_layer_seconds=median("first_layer_seconds", timed),
        import_seconds=median("import_seconds", timed),
        memory_mib=memory_mib,
        anonymous_mib=anonymous_mib,
        anonymous_over_memory_mib=over_mib,
        file_mib=median("file_bytes_peak", checked, MIB),
        cache_mib_left=median("cache_bytes_left", timed, MIB),
        locked=timed[0].get("locked"),
    )


def _gb_per_second(run: dict[str, Any], more_seconds: float) -> float:
    return float(run["payload_bytes"] / (run["seconds"] + more_seconds) / 1e9)


def _ratio(value: float | None, of: float) -> float | None:
    return None if value is None or not of else value / of


# Markdown -----------------------------------------------------------------------------------------

_COLUMNS: tuple[tuple[str, Callable[[Row], float | None], str], ...] = (
    ("GB/s", lambda row: row.gb_per_second, ".2f"),
    ("least-most", lambda _row: None, ""),
    ("GB/s after memory", lambda row: row.after_memory, ".2f"),
    ("of best peer", lambda row: row.of_best_peer, ".2f"),
    ("of ceiling", lambda row: row.of_ceiling, ".2f"),
    ("CPU s", lambda row: row.cpu_seconds, ".2f"),
    ("first layer s", lambda row: row.first_layer_seconds, ".3f"),
    ("import s", lambda row: row.import_seconds, ".2f"),
    ("memory MiB", lambda row: row.memory_mib, ".0f"),
    ("anon peak MiB", lambda row: row.anonymous_mib, ".0f"),
    ("over memory", lambda row: row.anonymous_over_memory_mib, ".0f"),
    ("file peak MiB", lambda row: row.file_mib, ".0f"),
    ("cache left MiB", lambda row: row.cache_mib_left, "+.0f"),
)

_LEGEND = """\
The task: the fifteen tensors of each KDA layer into one reused buffer of a layer's size, with conv
joined in q, k, v order. Each run is a process of its own; rounds go through all entries in turn,
and the order is rotated. Medians over {rounds} rounds; bytes are compared and memory is sampled in
a round before them, which is not timed. All read the same files, but for those with a format of
their own.

- GB/s: payload of the KDA layers by the seconds from before the buffer is made and the files are
  opened to the last byte of the last layer; imports are left out. "After memory" leaves the making
  of the buffer out too, as far as it is done beforehand. A ceiling's GB/s has the making of its
  buffer in it as well.
- of best peer, of ceiling: by the fastest other package's, and by the fastest ceiling's that reads
  the files.
- memory: the buffer or the slots; * where it could not be page-locked. The peaks are of RssAnon and
  RssFile, nothing subtracted; "over memory" is the first less the buffer.
- cache left: bytes of the files that are in the page cache after the run, less before.
- killed: by the kernel, for want of memory.
"""


def markdown(results: dict[str, Any]) -> str:
    machine = results["machine"]
    where = (
        f"{machine['processors']} processors ({machine['processor']}), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}, "
        f"Python {machine['python']}."
    )
    lines = [
        f"# {results['layers']} KDA layers, {results['payload_bytes']:,} bytes",
        "",
        where,
        "",
        _LEGEND.format(rounds=results["rounds"]),
    ]
    for condition in results["conditions"]:
        lines += [f"## {condition['name']}", "", f"{condition['told']}.", ""]
        if condition["name"] in results["skipped"]:
            lines += [f"Skipped: {results['skipped'][condition['name']]}.", ""]
        else:
            lines += [*_table(rows_of(results, condition["name"])), ""]
    lines += [
        "## How each was set up",
        "",
        "| | reads | versions | settings |",
        "|---|---|---|---|",
    ]
    for entry in results["entries"]:
        if entry["kind"] in ("own", "peer"):
            versions = ", ".join(f"{name} {told}" for name, told in entry["versions"].items())
            lines.append(
                f"| {entry['name']} | {entry['reads']} | {versions} | {entry['settings']} |"
            )
    names = {condition["name"] for condition in results["conditions"]}
    missing = {name: why for name, why in results["skipped"].items() if name not in names}
    if missing:
        lines += ["", "Not run:", "", *(f"- {name}: {why}" for name, why in missing.items())]
    failed = _failures(results["runs"])
    if failed:
        lines += ["", "Failed:", "", *(f"- {text}" for text in failed)]
    return "\n".join(lines) + "\n"


def _table(rows: list[Row]) -> list[str]:
    heads = [head for head, _, _ in _COLUMNS]
    lines = ["| | reads | " + " | ".join(heads) + " |", "|---|---|" + "---:|" * len(heads)]
    for row in rows:
        name = f"**{row.name}**" if row.kind == "own" else row.name
        cells = [_cell(row, head, value, form) for head, value, form in _COLUMNS]
        lines.append(f"| {name} | {row.reads} | " + " | ".join(cells) + " |")
    return lines


def _cell(row: Row, head: str, value: Callable[[Row], float | None], form: str) -> str:
    if row.outcome != "done":
        return row.outcome if head == "GB/s" else ""
    if head == "least-most":
        return f"{min(row.each):.2f}-{max(row.each):.2f}"
    figure = value(row)
    if figure is None:
        return ""
    star = "*" if head == "memory MiB" and row.locked is False else ""
    return f"{figure:{form}}{star}"
