"""What one rank of several reads of the KDA layers, by the kernel's count, against its share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from .. import data
from ..sides import Comparison, Request, Side, Timed, clocked

TOLD = """\
One rank alone streams its part of every KDA layer (`KdaTpPlan`), and counts what the kernel read
for it (`read_bytes` of /proc/self/io). `o_proj`, whose rows alternate between the ranks, is read
whole through the page cache, which the ranks of a host share; "besides `o_proj`" is all the rest
that it read, by the rank's share of the rest."""
SIZES = (2, 4, 8)


def load(rank: int, size: int, request: Request) -> Timed:
    from kda_stream import KdaConfig, KdaTpPlan, open_checkpoint, stream_kda_layers
    from kda_stream.staging.native import extension

    extension()
    config = KdaConfig.from_json(request.checkpoint / "config.json")

    def timed() -> dict[str, Any]:
        figures: dict[str, Any] = {}

        def job() -> None:
            before = _bytes_read()
            with open_checkpoint(request.checkpoint) as checkpoint:
                plan = KdaTpPlan(config, rank, size)
                with stream_kda_layers(checkpoint, plan=plan, slots=1) as stream:
                    for layer in stream:
                        part = layer.weights.o_proj.data.nbytes
                        figures["o_proj_share_bytes"] = figures.get("o_proj_share_bytes", 0) + part
                    figures["share_bytes"] = stream.report.bytes
                    figures["did"] = ", ".join(stream.report.reads)
            figures["read_bytes"] = _bytes_read() - before

        seconds = clocked(job)
        return seconds | figures | {"o_proj_bytes": size * figures["o_proj_share_bytes"]}

    return timed


def _bytes_read() -> int:
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return next(int(count) for key, count in lines if key == "read_bytes")


SIDES = tuple(
    Side(
        f"rank {rank} of {size}",
        "own",
        load=partial(load, rank, size),
        packages=("kda_stream",),
        reads="its part of the KDA tensors",
        settings=f"KdaTpPlan(config, {rank}, {size}), slots=1",
    )
    for size in SIZES
    for rank in (0, size - 1)
)
COMPARISON = Comparison(
    name="ranks",
    title="What ranks read",
    told=TOLD,
    sides=SIDES,
    references=(),
    own=SIDES[0].name,
    conditions=("cold",),
    make=data.place,
)
