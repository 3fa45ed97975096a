"""One side in a process of its own: `python -m bench.child COMPARISON SIDE FOLDER RESULT`.

Writes what it measured as JSON to the file RESULT; a process that is killed writes none.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

from .comparisons import BY_NAME
from .measure import resident_bytes
from .sides import Request, Side, UnavailableError, WrongBytesError


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("comparison", choices=BY_NAME)
    parser.add_argument("side")
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--check", action="store_true", help="tell what was delivered")
    parser.add_argument("--cached", action="store_true", help="the files are in the page cache")
    parser.add_argument("--prepare", action="store_true", help="only write the side's own files")
    options = parser.parse_args()
    [side] = [row for row in BY_NAME[options.comparison].sides if row.name == options.side]
    try:
        result = measure(side, options)
    except WrongBytesError as error:
        result = {"wrong": str(error)}
    options.result.write_text(json.dumps(result) + "\n")
    # Some peers take long to tear down, or crash in it: the result is there, and that is the end.
    os._exit(0)


def measure(side: Side, options: argparse.Namespace) -> dict[str, Any]:
    if side.load is None:
        raise SystemExit(f"{side.name} is a program of its own")
    request = Request(options.folder, cached=options.cached, checked=options.check)
    try:
        timed = side.load(request)
    except (UnavailableError, ImportError) as error:
        return {"unavailable": str(error)}
    versions = {name: importlib.metadata.version(name) for name in side.packages}
    if options.prepare:
        side.prepare(options.folder)
        return {"versions": versions}
    before = resident_bytes(os.getpid())
    modules_before = len(sys.modules)
    return timed() | {
        "modules_imported_late": len(sys.modules) - modules_before,
        "anonymous_bytes_before": before["RssAnon"],
        "file_bytes_before": before["RssFile"],
    }


if __name__ == "__main__":
    main()
