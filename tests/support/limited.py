"""Limits that a process sets on itself, before or after it has imported the library. Linux."""

from __future__ import annotations

import ctypes
import os
import resource

from support.left_behind import bytes_of

CAP_IPC_LOCK = 14


def limit_locking(limit_bytes: int) -> None:
    """Leave this process no right to lock more than that, root or not."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << CAP_IPC_LOCK)
    assert libc.capset(header, sets) == 0
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, limit_bytes))


def limit_address_space(more_bytes: int) -> None:
    """Let the address space grow by so much from now on, and no more."""
    limit = bytes_of("VmSize") + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def lift_address_space() -> None:
    """Take that limit away."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def limit_descriptors(limit: int) -> None:
    """Allow so many open descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def take_descriptors(*, free: int) -> list[int]:
    """Open some until only `free` are left of those that may be open; these."""
    opened = []
    try:
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for _ in range(free):
            os.close(opened.pop())
    return opened
