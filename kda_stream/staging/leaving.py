"""What a read leaves in the page cache, where it is to leave nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..limits import DROP_SECONDS, READ_AHEAD_BYTES
from .pages import PAGE_BYTES
from .residency import cached_bytes, cached_ranges, sampled_cached_bytes


@contextmanager
def cache_as_it_was(ranges: Sequence[tuple[int, int, int]]) -> Iterator[None]:
    """Pages of the ranges (descriptor, begin, end) that the body brings in leave the page cache.

    No others: what was there before stays, and what was read ahead behind a range leaves too. Of a
    file of others, of which the kernel does not say what was there, a range leaves as a whole,
    unless samples say that some of it was there.
    """
    gaps = [
        (descriptor, first, after)
        for descriptor, begin, end in ranges
        for first, after in _not_cached(descriptor, begin, end)
    ]
    try:
        yield
    finally:
        for seconds in DROP_SECONDS:
            time.sleep(seconds)  # a page that is still being read ahead cannot leave
            gaps = [gap for gap in gaps if _drop(*gap)]
            if not gaps:
                break


def _not_cached(descriptor: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges around [begin, end), at page borders, that are not in the page cache now."""
    at = max(begin - READ_AHEAD_BYTES, 0) // PAGE_BYTES * PAGE_BYTES
    after = -(-end // PAGE_BYTES) * PAGE_BYTES + READ_AHEAD_BYTES
    after = min(after, os.fstat(descriptor).st_size)
    at = min(at, after)  # the file may have been cut
    cached = cached_ranges(descriptor, at, after)
    if cached is None:
        if not sampled_cached_bytes(descriptor, begin, end):
            yield begin, end
        return
    for first, behind in cached:
        if at < first:
            yield at, first
        at = behind
    if at < after:
        yield at, after


def _drop(descriptor: int, begin: int, end: int) -> bool:
    """Have the kernel drop a range from the page cache; whether it has to be tried again."""
    try:
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
    except (AttributeError, OSError):  # not here, or forbidden
        return False
    return bool(cached_bytes(descriptor, begin, end))
