"""kda_stream itself, in every way that it can read."""

from __future__ import annotations

import inspect
import time
from functools import partial
from typing import Any

from ..landing import Landing
from .runner import KDA_ONLY, Job, Run, Runner, UnavailableError


def load(settings: dict[str, Any]) -> Run:
    import kda_stream

    # The package loads its names lazily: those used here are not loaded in the timed part.
    open_checkpoint, stream_kda_layers = kda_stream.open_checkpoint, kda_stream.stream_kda_layers
    unknown = settings.keys() - inspect.signature(stream_kda_layers).parameters.keys()
    if unknown:
        raise UnavailableError(f"this kda_stream has no {', '.join(sorted(unknown))}=")

    def run(job: Job, landing: Landing) -> None:
        with open_checkpoint(job.data.checkpoint) as checkpoint:
            stream = stream_kda_layers(checkpoint, lock="prefer", **settings)
            entered = time.perf_counter()
            with stream:
                seconds = time.perf_counter() - entered
                lock = stream.report.lock
                landing.memory_ready(locked=lock.locked, nbytes=lock.wanted_bytes, seconds=seconds)
                for layer in stream:
                    pieces = [tensor.data for _, tensor in layer.weights.items()]
                    landing.layer_done(layer.index, pieces)
                    del pieces
                reads = getattr(stream.report, "reads", {})
                landing.did = ", ".join(f"{way} {layers}" for way, layers in reads.items())

    return run


def _runner(suffix: str, **settings: Any) -> Runner:
    told = ", ".join(f"{name}={value}" for name, value in settings.items())
    name = f"kda_stream {suffix}".strip()
    return Runner(name, partial(load, settings), ("kda_stream",), KDA_ONLY, told)


# One slot is the task's one buffer. With two, the next layer is staged while the consumer works;
# this consumer does nothing, so the second slot costs its memory and gains nothing.
RUNNERS = (
    _runner("", slots=1),
    _runner("2 slots", slots=2),
    _runner("mapped keep", slots=1, read="mapped", residency="keep"),
    _runner("mapped drop", slots=1, read="mapped", residency="drop"),
    _runner("positional keep", slots=1, read="positional", residency="keep"),
    _runner("positional drop", slots=1, read="positional", residency="drop"),
    _runner("direct keep", slots=1, read="direct", residency="keep"),
    _runner("direct drop", slots=1, read="direct", residency="drop"),
)
