"""One runner in a process of its own: `python -m bench.child RUNNER FOLDER RESULT [options]`.

Writes what it measured as JSON to the file RESULT; a process that is killed writes none.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from . import data
from .landing import Landing, WrongBytesError
from .runners import BY_NAME, Job, Runner, UnavailableError


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runner", choices=BY_NAME)
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--check", action="store_true", help="compare every layer's bytes")
    parser.add_argument("--cached", action="store_true", help="the files are in the page cache")
    parser.add_argument("--prepare", action="store_true", help="only write the peer's own files")
    options = parser.parse_args()
    runner = BY_NAME[options.runner]
    try:
        result = measure(runner, options)
    except WrongBytesError as error:
        result = {"wrong": str(error)}
    options.result.write_text(json.dumps(result) + "\n")
    # Some peers take long to tear down, or crash in it: the result is there, and that is the end.
    os._exit(0)


def measure(runner: Runner, options: argparse.Namespace) -> dict[str, Any]:
    import_began = time.perf_counter()
    try:
        run = runner.load()
    except (UnavailableError, ImportError) as error:
        return {"unavailable": str(error)}
    import_seconds = time.perf_counter() - import_began
    described = data.load(options.folder)
    if options.prepare:
        runner.prepare(described)
        return {"versions": _versions(runner)}
    job = Job(described, cached=options.cached)
    rss_before = _resident_bytes()
    cpu_before = _cpu_seconds()
    modules_before = sys.modules.keys() | set()
    landing = Landing(described, check=options.check)
    run(job, landing)
    seconds = time.perf_counter() - landing.began
    cpu_seconds = _cpu_seconds() - cpu_before
    landing.require_every_layer()
    return {
        "seconds": max(landing.done_seconds.values()),
        "seconds_with_closing": seconds,
        "memory_seconds": landing.memory_seconds,
        "first_layer_seconds": min(landing.done_seconds.values()),
        "import_seconds": import_seconds,
        "cpu_seconds": cpu_seconds,
        "payload_bytes": described.nbytes,
        "buffer_bytes": landing.buffer_bytes,
        "locked": landing.locked,
        "did": landing.did,
        "modules_imported_late": len(sys.modules.keys() - modules_before),
        "anonymous_bytes_before": rss_before["RssAnon"],
        "file_bytes_before": rss_before["RssFile"],
        "versions": _versions(runner),
    }


def _versions(runner: Runner) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in runner.packages}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident_bytes() -> dict[str, int]:
    from .measure import resident_bytes

    return resident_bytes(os.getpid())


if __name__ == "__main__":
    main()
