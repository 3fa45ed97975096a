"""The conditions under which everything is run: files cached, files on the disk, little memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import page_cache

MIB = 1024**2
CGROUP_V1 = Path("/sys/fs/cgroup/memory")
CGROUP_V2 = Path("/sys/fs/cgroup")
PAUSES_SECONDS = (0.0, 0.5, 5.0)  # a page that another process has mapped or locked stays a while
RESIDENT_SHARE = 0.01  # of the files: so much more or less than all, or than nothing, is accepted


class SkippedError(Exception):
    """A condition cannot be had here, and why."""


@dataclass(frozen=True)
class Condition:
    """`cached`: the files are in the page cache; `memory_bytes_max` of the cgroup, None without."""

    name: str
    told: str
    cached: bool
    memory_bytes_max: int | None = None


_COLD = "Before each run posix_fadvise(DONTNEED) on every file (fsync at creation)"

# Pages that are cached already are charged to whoever read them first: a cgroup starts cold, else
# its limit would not be felt.
BY_OPTION: dict[str, tuple[Condition, ...]] = {
    "warm": (Condition("warm", "Every file read before each run that needs it", cached=True),),
    "cold": (Condition("cold", _COLD, cached=False),),
    "cgroup": (
        Condition("cgroup 600 MiB", f"In a memory cgroup. {_COLD}", False, 600 * MIB),
        Condition("cgroup 320 MiB", f"In a memory cgroup. {_COLD}", False, 320 * MIB),
    ),
}


def bring_about(condition: Condition, files: tuple[Path, ...]) -> int:
    """Make the page cache what the condition says; the bytes that are resident then."""
    size = sum(path.stat().st_size for path in files)
    wanted = size if condition.cached else 0
    change = page_cache.warm if condition.cached else page_cache.drop
    resident = page_cache.resident_bytes(files)
    for pause_seconds in PAUSES_SECONDS:
        if resident == wanted:
            break
        change(files)
        time.sleep(pause_seconds)
        resident = page_cache.resident_bytes(files)
    if abs(resident - wanted) > RESIDENT_SHARE * size:
        raise SkippedError(f"{resident} of {size} bytes are in the page cache, not {wanted}")
    return resident


@contextmanager
def memory_cgroup(condition: Condition) -> Iterator[Path | None]:
    """A memory cgroup for one run, removed after it; None for a condition without one."""
    limit = condition.memory_bytes_max
    if limit is None:
        yield None
        return
    is_v1 = (CGROUP_V1 / "memory.limit_in_bytes").exists()
    parent = CGROUP_V1 if is_v1 else CGROUP_V2
    cgroup = parent / f"kda-bench-{os.getpid()}"
    try:
        if not is_v1:
            (parent / "cgroup.subtree_control").write_text("+memory")
        cgroup.mkdir()
    except OSError as error:
        raise SkippedError(f"no memory cgroup can be made: {error}") from None
    try:
        try:
            (cgroup / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit))
        except OSError as error:
            raise SkippedError(f"no memory cgroup can be made: {error}") from None
        yield cgroup
    finally:
        cgroup.rmdir()
