"""Results into rows: pure functions of what results.json holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

MIB = 1024**2
Comparison = dict[str, Any]  # one of results.json
Run = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """A median, and the least and the most of the rounds that it is of."""

    median: float
    each: tuple[float, ...]

    @property
    def least(self) -> float:
        return min(self.each)

    @property
    def most(self) -> float:
        return max(self.each)


@dataclass(frozen=True)
class Row:
    """An entry under a condition. Figures are medians over the timed rounds, None where unknown.

    `faster` has how many times as fast it was as each reference, turn by turn. `memory_mib` is the
    most that it had (RssAnon) over what it had when it began.
    """

    name: str
    kind: str
    outcome: str
    seconds: Spread | None = None
    faster: dict[str, Spread] = field(default_factory=dict)
    gb_per_second: float | None = None
    cpu_seconds: float | None = None
    memory_mib: float | None = None


@dataclass(frozen=True)
class LoadRow:
    """A load under a condition. Figures are medians over the timed rounds, None where unknown.

    `gb_per_second` is over all of the time, from before the memory is made and the files opened;
    `after_memory` leaves the making of the memory out.
    """

    name: str
    kind: str
    reads: str
    outcome: str
    gb_per_second: Spread | None = None
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


@dataclass(frozen=True)
class RankRow:
    """What a rank read, in MiB: its part, the whole `o_proj`, all that it read.

    `besides` is what it read besides `o_proj`, of its part besides `o_proj`.
    """

    name: str
    kind: str
    outcome: str
    seconds: Spread | None = None
    part_mib: float | None = None
    o_proj_mib: float | None = None
    read_mib: float | None = None
    besides: Spread | None = None
    did: str = ""


def spread(values: Iterable[float]) -> Spread:
    each = tuple(values)
    return Spread(statistics.median(each), each)


def condition_names(comparison: Comparison) -> list[str]:
    """Those that were not skipped."""
    named = [condition["name"] for condition in comparison["conditions"]]
    return [name for name in named if name not in comparison["skipped"]]


def time_rows(comparison: Comparison, condition: str) -> list[Row]:
    """The condition's rows, in the order of the entries."""
    found = _runs_by_entry(comparison, condition)
    return [_row(entry, found, comparison) for entry in comparison["entries"] if _ran(entry, found)]


def load_rows(comparison: Comparison, condition: str) -> list[LoadRow]:
    """The condition's rows, the fastest first, those without a figure last."""
    found = _runs_by_entry(comparison, condition)
    entries = [entry for entry in comparison["entries"] if _ran(entry, found)]
    rows = [_load_row(entry, found[entry["name"]]) for entry in entries]
    peer, ceiling = (_most(rows, kind) for kind in ("peer", "ceiling"))
    compared = [
        replace(row, of_best_peer=_ratio(row, peer), of_ceiling=_ratio(row, ceiling))
        for row in rows
    ]
    return sorted(compared, key=lambda row: -gb_per_second(row))


def rank_rows(comparison: Comparison, condition: str) -> list[RankRow]:
    """The condition's rows, in the order of the entries."""
    found = _runs_by_entry(comparison, condition)
    entries = [entry for entry in comparison["entries"] if _ran(entry, found)]
    return [_rank_row(entry, found[entry["name"]]) for entry in entries]


def gb_per_second(row: LoadRow) -> float:
    """The median, 0 without one."""
    return row.gb_per_second.median if row.gb_per_second else 0.0


def best(rows: list[LoadRow], kind: str) -> LoadRow | None:
    """The fastest of a kind; None when none of it has a figure."""
    chosen = [row for row in rows if row.kind == kind and row.gb_per_second]
    return max(chosen, key=gb_per_second, default=None)


def fastest_of(row: Row, references: Iterable[str]) -> str:
    """The reference that the row is the least ahead of; empty when it was held against none."""
    compared = [name for name in references if name in row.faster]
    return min(compared, key=lambda name: row.faster[name].median, default="")


def package(row: LoadRow) -> str:
    """What a row belongs to: the ways of one package share the first word of their names."""
    return row.name.split()[0]


def failures(comparison: Comparison, *, where_limited: bool = True) -> list[str]:
    """Which runs failed otherwise than by being killed, and why."""
    limited = {row["name"] for row in comparison["conditions"] if row["memory_bytes_max"]}
    return [
        f"{comparison['name']}, {run['entry']}, {run['condition']}: {run['why']}"
        for run in comparison["runs"]
        if run["outcome"] in ("failed", "timed out")
        and (where_limited or run["condition"] not in limited)
    ]


def _runs_by_entry(comparison: Comparison, condition: str) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in comparison["runs"]:
        if run["condition"] == condition:
            found.setdefault(run["entry"], []).append(run)
    return found


def _ran(entry: dict[str, Any], found: dict[str, list[Run]]) -> bool:
    return entry["name"] in found


def _outcome(runs: list[Run]) -> str:
    """The first that is not "done"; "not timed" where there was the round of checks alone."""
    for run in runs:
        if run["outcome"] != "done":
            return str(run["outcome"])
    return "done" if _timed(runs) else "not timed"


def _timed(runs: list[Run]) -> list[Run]:
    return [run for run in runs if run["round"] > 0 and run["outcome"] == "done"]


def _median(name: str, runs: list[Run], unit: float = 1) -> float | None:
    values = [run[name] / unit for run in runs if name in run]
    return statistics.median(values) if values else None


def _row(entry: dict[str, Any], found: dict[str, list[Run]], comparison: Comparison) -> Row:
    runs = found[entry["name"]]
    if (outcome := _outcome(runs)) != "done":
        return Row(entry["name"], entry["kind"], outcome)
    timed = _timed(runs)
    seconds = spread(run["seconds"] for run in timed)
    payload_bytes = _median("payload_bytes", timed, 1e9)
    return Row(
        entry["name"],
        entry["kind"],
        "done",
        seconds=seconds,
        faster={
            reference: ratio
            for reference in comparison["references"]
            if (ratio := _faster(timed, found.get(reference, [])))
        },
        gb_per_second=None if payload_bytes is None else payload_bytes / seconds.median,
        cpu_seconds=_median("cpu_seconds", timed),
        memory_mib=_memory_mib(runs),
    )


def _faster(timed: list[Run], reference: list[Run]) -> Spread | None:
    """The reference's seconds by these, round by round."""
    theirs = {run["round"]: run["seconds"] for run in _timed(reference)}
    ratios = [theirs[run["round"]] / run["seconds"] for run in timed if run["round"] in theirs]
    return spread(ratios) if ratios else None


def _memory_mib(runs: list[Run]) -> float | None:
    """As the side says itself in the timed rounds; or the peak of the round that was sampled."""
    told = _median("memory_bytes", _timed(runs), MIB)
    if told is not None:
        return told
    grown = [
        (run["anonymous_bytes_peak"] - run["anonymous_bytes_before"]) / MIB
        for run in runs
        if "anonymous_bytes_peak" in run and "anonymous_bytes_before" in run
    ]
    return statistics.median(grown) if grown else None


def _load_row(entry: dict[str, Any], runs: list[Run]) -> LoadRow:
    did = {run["did"] for run in runs if run.get("did")}
    reads = f"{entry['reads']}: {' or '.join(sorted(did))}" if did else entry["reads"]
    named = (entry["name"], entry["kind"], reads)
    if (outcome := _outcome(runs)) != "done":
        return LoadRow(*named, outcome)
    timed = _timed(runs)
    checked = [run for run in runs if run["round"] == 0]
    is_program = entry["kind"] in ("ceiling", "memory")
    # ceiling.c tells the time after the memory was made, a loader the time with it.
    each = [_gb_per_second(run, run["memory_seconds"] if is_program else 0) for run in timed]
    after = [_gb_per_second(run, 0 if is_program else -run["memory_seconds"]) for run in timed]
    memory_mib = _median("buffer_bytes", timed, MIB)
    anonymous_mib = _median("anonymous_bytes_peak", checked, MIB)
    over_mib = None
    if memory_mib is not None and anonymous_mib is not None:
        over_mib = anonymous_mib - memory_mib
    return LoadRow(
        *named,
        "done",
        gb_per_second=spread(each),
        after_memory=statistics.median(after),
        cpu_seconds=_median("cpu_seconds", timed),
        first_layer_seconds=_median("first_layer_seconds", timed),
        import_seconds=_median("import_seconds", timed),
        memory_mib=memory_mib,
        anonymous_mib=anonymous_mib,
        anonymous_over_memory_mib=over_mib,
        file_mib=_median("file_bytes_peak", checked, MIB),
        cache_mib_left=_median("cache_bytes_left", timed, MIB),
        locked=timed[0].get("locked"),
    )


def _gb_per_second(run: Run, more_seconds: float) -> float:
    return float(run["payload_bytes"] / (run["seconds"] + more_seconds) / 1e9)


def _most(rows: list[LoadRow], kind: str) -> float:
    row = best(rows, kind)
    return 0.0 if row is None else gb_per_second(row)


def _ratio(row: LoadRow, of: float) -> float | None:
    return gb_per_second(row) / of if of and row.gb_per_second else None


def _rank_row(entry: dict[str, Any], runs: list[Run]) -> RankRow:
    if (outcome := _outcome(runs)) != "done":
        return RankRow(entry["name"], entry["kind"], outcome)
    timed = _timed(runs)
    return RankRow(
        entry["name"],
        entry["kind"],
        "done",
        seconds=spread(run["seconds"] for run in timed),
        part_mib=_median("share_bytes", timed, MIB),
        o_proj_mib=_median("o_proj_bytes", timed, MIB),
        read_mib=_median("read_bytes", timed, MIB),
        besides=spread(
            (run["read_bytes"] - run["o_proj_bytes"])
            / (run["share_bytes"] - run["o_proj_share_bytes"])
            for run in timed
        ),
        did=", ".join(sorted({run["did"] for run in timed})),
    )
