"""What is looked at over and over while a stream runs: memory, and the page cache of its shards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
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
_CACHE_SHARE: Final = 0.007
"""The part of a processor that may go into asking for the page cache: where much is cached, or the
kernel has no cachestat, it is slow to tell, and is asked less often."""
_SAMPLES_MAX: Final = 1024
"""When there are more, every other one is let go, and memory is looked at half as often."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The process's memory `seconds` after the start."""

    seconds: float
    memory: MemoryUse


@dataclass(frozen=True, slots=True)
class CacheSample:
    """`cached_bytes` of the shards were in the page cache `seconds` after the start."""

    seconds: float
    cached_bytes: int


class Sampler(Closing):
    """Samples once, and again in a thread of its own while a `with` lasts.

    All shards are asked for at the start and by `take_last`, in between those of `touch`: in others
    nothing happens. `memory` and `cache` are to be read after the `with`; `spent_seconds` of
    processor time went into what the thread did. `cache_refusal` says why the page cache is not
    known, or no longer.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        self.memory: list[MemorySample] = []
        self.cache: list[CacheSample] = []
        self.spent_seconds = 0.0
        self.cache_refusal: str | None = None
        self._shards = {shard.path: shard for shard in shards}
        self._cached = dict.fromkeys(self._shards, 0)
        self._touched = deque(self._shards)
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

    def touch(self, paths: Iterable[str]) -> None:
        """Have the shards of these paths asked for again."""
        self._touched.extend(paths)

    def take_last(self) -> None:
        """Sample once more, in the caller's thread, after the `with`."""
        self._stopping = False
        self._cache_due_seconds = 0.0
        self.touch(self._shards)
        self._sample(self.seconds)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._bell.get(timeout=self._interval_seconds)
            except Empty:
                self._sample(self.seconds)
        self.spent_seconds = time.thread_time()

    def _sample(self, seconds: float) -> None:
        self.memory.append(MemorySample(seconds, memory_use()))
        if len(self.memory) > _SAMPLES_MAX:
            del self.memory[1::2]
            self._interval_seconds *= 2
        if self._touched and self.cache_refusal is None and seconds >= self._cache_due_seconds:
            self._sample_cache(seconds)

    def _sample_cache(self, seconds: float) -> None:
        spent_before = time.thread_time()
        touched = {self._touched.popleft() for _ in range(len(self._touched))}
        try:
            for path in touched:
                if self._stopping:  # Ctrl-C is not to wait for a kernel that maps all to count
                    return
                cached = _cached_bytes(self._shards[path])
                if cached is None:
                    self.cache_refusal = "the system does not tell what of these files is in it"
                    return
                self._cached[path] = cached
        except (KdaStreamError, OSError) as error:
            self.cache_refusal = str(error)
            return
        self.cache.append(CacheSample(seconds, sum(self._cached.values())))
        if len(self.cache) > _SAMPLES_MAX:
            del self.cache[1::2]
        cost_seconds = time.thread_time() - spent_before
        self._cache_due_seconds = seconds + cost_seconds / _CACHE_SHARE


def _cached_bytes(shard: Shard) -> int | None:
    with shard.open() as file:
        return cached_bytes(file.fileno(), 0, shard.identity.file_bytes)
