"""What memory the process holds and may lock, as the kernel counts it."""

from __future__ import annotations

import resource
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The process's memory in bytes; a field is None where the system does not count it.

    `anonymous_bytes`, `file_bytes` and `locked_bytes` are resident now; `peak_bytes` is the most
    that was ever resident, file pages included.
    """

    anonymous_bytes: int | None
    file_bytes: int | None
    locked_bytes: int | None
    peak_bytes: int | None


def memory_use() -> MemoryUse:
    """This process's memory now; source: /proc/self/status, fields in kB. All None off Linux."""
    fields = {}
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                name, _, value = line.partition(":")
                if value.endswith(" kB\n"):
                    fields[name] = int(value[:-4]) * 1024
    except OSError:
        pass
    names = ("RssAnon", "RssFile", "VmLck", "VmHWM")
    return MemoryUse(*(fields.get(name) for name in names))


def lock_limit_bytes() -> int | None:
    """The soft limit on locked memory (`ulimit -l`) in bytes; None when there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit
