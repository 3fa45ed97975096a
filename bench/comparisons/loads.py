"""Whole loads: every KDA layer into one buffer, by each loader and by the machine itself."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from .. import ceiling, data
from ..landing import Landing
from ..runners import ALL, Job, Runner
from ..sides import Comparison, Request, Side, Timed, cpu_seconds

TOLD = """\
The fifteen tensors of each KDA layer into one reused buffer of a layer's size, with conv joined in
q, k, v order. All read the same files, but for those with a format of their own.

- GB/s: payload of the KDA layers by the seconds from before the buffer is made and the files are
  opened to the last byte of the last layer; imports are left out. "After memory" leaves the making
  of the buffer out too, as far as it is done beforehand. A ceiling's GB/s has the making of its
  buffer in it as well.
- of best peer, of ceiling: by the fastest other package's, and by the fastest ceiling's that reads
  the files. A ceiling is a C program that brings the bytes into memory and does nothing else.
- memory: the buffer or the slots; * where it could not be page-locked. The peaks are of RssAnon and
  RssFile, nothing subtracted; "over memory" is the first less the buffer.
- cache left: bytes of the files that are in the page cache after the run, less before.
- killed: by the kernel, for want of memory."""


def runner_side(runner: Runner) -> Side:
    return Side(
        runner.name,
        "own" if runner.packages == ("kda_stream",) else "peer",
        load=partial(_load, runner),
        packages=runner.packages,
        reads=runner.reads,
        settings=runner.settings,
        files=lambda folder: runner.files(data.load(folder)),
        prepare=lambda folder: runner.prepare(data.load(folder)),
    )


def _load(runner: Runner, request: Request) -> Timed:
    import_began = time.perf_counter()
    run = runner.load()
    import_seconds = time.perf_counter() - import_began
    described = data.load(request.folder)
    job = Job(described, cached=request.cached)

    def timed() -> dict[str, object]:
        cpu_before = cpu_seconds()
        landing = Landing(described, check=request.checked)
        run(job, landing)
        seconds = time.perf_counter() - landing.began
        used_seconds = cpu_seconds() - cpu_before
        landing.require_every_layer()
        return {
            "seconds": max(landing.done_seconds.values()),
            "seconds_with_closing": seconds,
            "memory_seconds": landing.memory_seconds,
            "first_layer_seconds": min(landing.done_seconds.values()),
            "import_seconds": import_seconds,
            "cpu_seconds": used_seconds,
            "payload_bytes": described.nbytes,
            "buffer_bytes": landing.buffer_bytes,
            "locked": landing.locked,
            "did": landing.did,
        }

    return timed


def ceiling_side(case: ceiling.Case) -> Side:
    def command(folder: Path, scratch: Path) -> list[str]:
        return case.command(ceiling.program_in(scratch), ceiling.ranges_in(scratch, folder))

    return Side(
        case.name,
        "ceiling" if case.reads_files else "memory",
        command=command,
        reads="KDA tensors, not placed" if case.reads_files else "nothing",
        settings=f"{case.stores} stores",
        only={"copy": True, "direct": False}.get(case.method),
    )


COMPARISON = Comparison(
    name="loads",
    title="Whole loads",
    told=TOLD,
    sides=(*map(runner_side, ALL), *map(ceiling_side, ceiling.ALL)),
    references=(),
    own="kda_stream",
    conditions=("warm", "cold", "cgroup"),
    make=data.place,
)
