"""`python -m bench --out FOLDER`: kda_stream, its peers and the machine's ceilings, in one run."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from . import conditions, data, report
from .runners import ALL
from .session import BenchError, Session

DATA_FOLDER = Path("build/bench-data")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="gets results.json, .md and .svg")
    parser.add_argument("--data", type=Path, default=DATA_FOLDER, help="on a disk; is kept")
    parser.add_argument("--layers", type=int, default=12, help="KDA layers of 275 MB each")
    parser.add_argument("--rounds", type=int, default=5, help="timed ones, after one that checks")
    parser.add_argument("--conditions", default="warm,cold,cgroup")
    parser.add_argument("--only", action="append", metavar="TEXT", help="names that hold it alone")
    parser.add_argument("--redraw", action="store_true", help="from the results.json in --out")
    options = parser.parse_args()
    results = options.out / "results.json"
    if options.redraw:
        report.write(json.loads(results.read_text()), options.out)
        return 0
    names = options.conditions.split(",")
    if unknown := [name for name in names if name not in conditions.BY_OPTION]:
        parser.error(f"unknown conditions: {', '.join(unknown)}")
    wanted = options.only or [""]
    runners = [runner for runner in ALL if any(text in runner.name for text in wanted)]
    ceilings = any(text in "ceiling" for text in wanted)
    if not runners and not ceilings:
        parser.error("no name holds any of the texts of --only")
    chosen = [condition for name in names for condition in conditions.BY_OPTION[name]]
    options.out.mkdir(parents=True, exist_ok=True)
    described = data.make(options.data, options.layers)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(described, Path(folder))
        try:
            for measured in session.measure_all(runners, chosen, options.rounds, ceilings=ceilings):
                results.write_text(json.dumps(measured, indent=1) + "\n")
                report.write(measured, options.out)
        except BenchError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    measured = json.loads(results.read_text())
    print(f"\n{(options.out / 'results.md').read_text()}")
    return 1 if report.unexpected_failures(measured) else 0


if __name__ == "__main__":
    sys.exit(main())
