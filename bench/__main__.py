"""`python -m bench`: the library, its peers and what the machine can do, in one run.

Without an option it measures everything that can be had here, and renews bench/results and the
README's figures. With --only, --conditions, --layers or --quick, which leave something out, it
writes to build/bench instead. A peer that is not installed is skipped and named.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import conditions, cost, data, readme, report, rows
from .comparisons import ALL
from .cost import Plan
from .readme import RESULTS
from .session import BenchError, Session, machine

DATA_FOLDER = Path("build/bench-data")
PART_FOLDER = Path("build/bench")
LAYERS, ROUNDS = 12, 5
QUICK_LAYERS, QUICK_ROUNDS, QUICK_CONDITIONS = 4, 1, "warm,cold"


def main() -> int:
    parser = arguments()
    options = parser.parse_args()
    out = out_folder(options)
    if options.redraw or options.readme:
        return _redraw(out, readme_too=options.readme or out.resolve() == RESULTS)
    try:
        plan = _plan(options)
    except ValueError as error:
        parser.error(str(error))
    if problem := _missing(plan, options.data):
        print(f"error: {problem}", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    options.data.mkdir(parents=True, exist_ok=True)
    empty = {"format": report.FORMAT, "quick": options.quick, "machine": machine(options.data)}
    kept = _kept(plan, out, empty) if options.go_on else {}
    print(cost.told(plan.without(kept), options.data), flush=True)
    try:
        results = _measure(plan, options.data, out, empty, kept)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if out.resolve() == RESULTS:
        readme.write(results)
    print(f"\n{(out / 'results.md').read_text(encoding='utf-8')}")
    failed = [
        text for one in results["comparisons"] for text in rows.failures(one, where_limited=False)
    ]
    return 1 if failed else 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, help="gets results.json, results.md and two .svg [bench/results]")
    add("--data", type=Path, default=DATA_FOLDER, help="on a disk; is kept [%(default)s]")
    add("--layers", type=int, help=f"KDA layers of 275 MB each [{LAYERS}]")
    add("--rounds", type=int, help=f"timed ones, after one that checks [{ROUNDS}]")
    add("--conditions", help="of warm,cold,cgroup [all of them]")
    add(
        "--only",
        action="append",
        metavar="TEXT",
        help='comparisons and sides, "loads: kda_stream", that hold it; may be given again',
    )
    add("--quick", action="store_true", help="small data, one round, warm and cold: does it work?")
    add(
        "--go-on", action="store_true", help="keep what results.json in --out has whole of this run"
    )
    add("--redraw", action="store_true", help="from the results.json in --out, measuring nothing")
    add("--readme", action="store_true", help="as --redraw, and the README's figures in any case")
    return parser


def out_folder(options: argparse.Namespace) -> Path:
    """Where the results go: what the README shows is renewed by a whole run alone."""
    is_part = bool(options.only or options.conditions or options.layers or options.quick)
    folder: Path = options.out or (PART_FOLDER if is_part else RESULTS)
    return folder


def _plan(options: argparse.Namespace) -> Plan:
    """What the options ask for; raises ValueError when that is nothing, or is not there."""
    if options.quick:
        geometry = data.small(options.layers or QUICK_LAYERS)
    else:
        geometry = data.full(options.layers or LAYERS)
    every = QUICK_CONDITIONS if options.quick else ",".join(conditions.BY_OPTION)
    names = (options.conditions or every).split(",")
    if unknown := [name for name in names if name not in conditions.BY_OPTION]:
        raise ValueError(f"unknown conditions: {', '.join(unknown)}")
    chosen = []
    for comparison in ALL:
        sides = tuple(
            side
            for side in comparison.sides
            if any(text in f"{comparison.name}: {side.name}" for text in options.only or [""])
        )
        under = tuple(
            condition
            for name in names
            if name in comparison.conditions
            for condition in conditions.BY_OPTION[name]
        )
        if sides and under and (comparison.quick or not options.quick):
            chosen.append((comparison, sides, under))
    if not chosen:
        raise ValueError("nothing is left of --only and --conditions")
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    return Plan(tuple(chosen), rounds, geometry)


def _missing(plan: Plan, data_folder: Path) -> str:
    """What stands against the run, so that no file is written in vain; empty if nothing does."""
    from kda_stream import NotBuiltError
    from kda_stream.staging.native import extension

    try:
        extension()
    except NotBuiltError as error:
        return str(error)
    needed, free = cost.missing_bytes(plan, data_folder), cost.free_bytes(data_folder)
    if needed > free:
        return (
            f"{data_folder} has room for {free / 1e9:.1f} GB, and {needed / 1e9:.1f} GB are needed"
        )
    return ""


def _measure(
    plan: Plan,
    data_folder: Path,
    out: Path,
    empty: dict[str, Any],
    kept: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """The results: what is `kept`, and all else that is in the plan, measured now."""
    results: dict[str, Any] = {**empty, "comparisons": []}
    for comparison, sides, under in plan.rows:
        before = results["comparisons"]
        if comparison.name in kept:
            print(f"\n{comparison.title}: kept", flush=True)
            results = {**results, "comparisons": [*before, kept[comparison.name]]}
            continue
        place = comparison.make(data_folder, plan.geometry)
        with tempfile.TemporaryDirectory() as scratch:
            session = Session(comparison, place, Path(scratch))
            for measured in session.measure_all(list(sides), list(under), plan.rounds):
                results = {**results, "comparisons": [*before, measured]}
                report.write(results, out)
    return results


def _kept(plan: Plan, out: Path, empty: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The comparisons that a run of the same kind has measured whole on this machine, by name."""
    try:
        before = report.load(out)
    except (OSError, ValueError):
        return {}
    now = {**empty["machine"], "date": before["machine"]["date"]}
    if before["machine"] != now or before["quick"] != empty["quick"]:
        return {}
    found = {one["name"]: one for one in before["comparisons"]}
    kept = {}
    for comparison, sides, under in plan.rows:
        one = found.get(comparison.name)
        if one is None or one["rounds"] != plan.rounds:
            continue
        conditions_done = [condition["name"] for condition in one["conditions"]]
        sides_done = {*one["skipped"], *(entry["name"] for entry in one["entries"])}
        if conditions_done == [condition.name for condition in under] and sides_done.issuperset(
            side.name for side in sides
        ):
            kept[comparison.name] = one
    return kept


def _redraw(out: Path, *, readme_too: bool) -> int:
    """All that is made of results.json, made again."""
    try:
        results = report.load(out)
        report.write(results, out)
        if readme_too:
            readme.write(results)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
