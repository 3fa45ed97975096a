"""Ways in which a shard changes under its reader."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final


def cut(path: Path) -> None:
    """Keep the first half."""
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    """Rename another file of the same header, size and time over it; its payload is zeros."""
    status = path.stat()
    new = path.with_suffix(".new")
    with path.open("rb") as old, new.open("wb") as file:
        length = old.read(8)
        file.write(length + old.read(int.from_bytes(length, "little")))
        file.truncate(status.st_size)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(new, path)


def rewrite(path: Path) -> None:
    """Write other bytes over some of the second half, in place, and set the time back."""
    status = path.stat()
    descriptor = os.open(path, os.O_RDWR)
    try:
        for at in range(status.st_size // 2, status.st_size, 1 << 20):
            os.pwrite(descriptor, b"\x5a" * min(4096, status.st_size - at), at)
        os.pwrite(descriptor, b"\x5a", status.st_size - 1)
    finally:
        os.close(descriptor)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES: Final[Mapping[str, Callable[[Path], None]]] = {
    "cut short": cut,
    "replaced by rename": replace,
    "rewritten in place": rewrite,
}
