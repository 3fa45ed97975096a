"""What is looked at over and over while a stream runs: memory, and the page cache of its shards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from ...checkpoint.shard import Shard
from ...closing import BackgroundThread, Closing, finish_first
from ...errors import KdaStreamError
from ...limits import ENDING_SECONDS
from ...stager import no_thread
from ...staging.residency import MemoryUse, cached_bytes, memory_use

INTERVAL_SECONDS: Final = 0.1
_CACHE_SHARE: Final = 0.005
"""The part of a processor that may go into asking for the page cache: where much is cached, or the
kernel has no cachestat, it is slow to tell, and is asked less often."""
_SAMPLES_MAX: Final = 1024
"""When there are more, every other one is let go and the next come at twice the distance."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen `seconds` after the start.

    `cached_bytes` of the shards were in the page cache; None where nobody asked this time, or the
    system does not tell.
    """

    seconds: float
    memory: MemoryUse
    cached_bytes: int | None


class Sampler(Closing):
    """Takes a sample, and more of them in a thread of its own while a `with` lasts.

    `samples` are to be read after that; `spent_seconds` of processor time went into those of the
    thread. `cache_refusal` says why the page cache is not known, or no longer.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.samples: list[Sample] = []
        self.spent_seconds = 0.0
        self.cache_refusal: str | None = None
        self._shards = shards
        self._began_seconds = time.monotonic()
        self._interval_seconds = INTERVAL_SECONDS
        self._cache_due_seconds = 0.0
        self._thread = BackgroundThread()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._stopping = False

    @property
    def seconds(self) -> float:
        """How long it is since the start."""
        return time.monotonic() - self._began_seconds

    def __enter__(self) -> Sampler:
        """Take the first sample, and begin; raises `StreamError` where there can be no thread."""
        self._sample(0.0)
        self._began_seconds = time.monotonic()
        try:
            self._thread.start(self._run)
        except RuntimeError as error:
            raise no_thread(str(error)) from None
        return self

    def close(self) -> None:
        """End the thread and wait for it. Again: no effect."""
        finish_first(self._close)

    def _close(self) -> None:
        self._stopping = True
        self._bell.put(None)
        while not self._thread.is_over:
            time.sleep(ENDING_SECONDS)

    def take_last(self) -> None:
        """Take one sample more, in the caller's thread, after the `with`."""
        self._stopping = False
        self._cache_due_seconds = 0.0
        self._sample(self.seconds)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._bell.get(timeout=self._interval_seconds)
            except Empty:
                self._sample(self.seconds)
        self.spent_seconds = time.thread_time()

    def _sample(self, seconds: float) -> None:
        memory = memory_use()
        self.samples.append(Sample(seconds, memory, self._cached_bytes(seconds)))
        if len(self.samples) > _SAMPLES_MAX:
            del self.samples[1::2]
            self._interval_seconds *= 2

    def _cached_bytes(self, seconds: float) -> int | None:
        """What of the shards is cached, unless it is too soon to ask or the system does not say."""
        if self.cache_refusal is not None or seconds < self._cache_due_seconds:
            return None
        total, spent_before = 0, time.thread_time()
        try:
            for shard in self._shards:
                if self._stopping:  # Ctrl-C is not to wait for a kernel that maps all to count
                    return None
                with shard.open() as file:
                    cached = cached_bytes(file.fileno(), 0, shard.identity.file_bytes)
                if cached is None:
                    self.cache_refusal = "the system does not tell what of these files is in it"
                    return None
                total += cached
        except (KdaStreamError, OSError) as error:
            self.cache_refusal = str(error)
            return None
        cost_seconds = time.thread_time() - spent_before
        self._cache_due_seconds = seconds + cost_seconds / _CACHE_SHARE
        return total
