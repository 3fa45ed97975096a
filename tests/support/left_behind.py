"""What a process holds of the things that a load may leave behind, before and after it. Linux.

`PROLOGUE` is put before a script that runs in a process of its own, which counts itself.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from support.page_cache import cached_pages, cool

TESTS: Final = Path(__file__).resolve().parents[1]
PROLOGUE: Final = f"""
import gc, json, os, random, resource, signal, sys, threading, time
from pathlib import Path
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else numpy has threads, which go when a process forks
sys.path.insert(0, {str(TESTS)!r})
from support.left_behind import Before, cold, told
"""

ANONYMOUS_BYTES_SPARED: Final = 32 * 1024**2
"""What Python and the C library may keep of memory that was used; a full-size slot has 263 MiB."""

SETTLE_SECONDS: Final = 3.0
"""How long a thread may take to be gone, or a page that is being read to be dropped."""

_SIGNALS_OF_PROGRAMS: Final = (1 << 31) - 1  # those behind them are the C library's own


def status_of(name: str) -> str:
    """A field of /proc/self/status, such as "VmLck"."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    raise KeyError(name)


def bytes_of(name: str) -> int:
    """A field of /proc/self/status that the kernel counts in kB, in bytes."""
    return int(status_of(name).split()[0]) * 1024


def cold(folder: Path, then_open: Callable[[Path], Any] | None = None) -> list[Path]:
    """Put every page of the folder's shards away; the shards.

    With `then_open` their headers are read again: what is opened and closed once more finds the
    page cache as it leaves it.
    """
    shards = sorted(folder.glob("*.safetensors"))
    cool(*shards)
    if then_open is not None:
        then_open(folder).close()
    return shards


class Before:
    """What this process holds now, to be compared with what it holds later.

    Counted are its open descriptors, its maps of the files in `folder`, its locked and its
    anonymous memory, its threads, the signals that it has handlers for, and the cached pages of
    `files`.
    """

    def __init__(self, folder: Path, files: Iterable[Path] = ()) -> None:
        self._folder = f"{folder.resolve()}/"
        self._files = tuple(files)
        self._held = self._settled()
        self._anonymous_bytes = bytes_of("RssAnon")

    def left(self) -> dict[str, Any]:
        """What is there and was not, or was there and is not; empty when all is as it was."""
        end = time.monotonic() + SETTLE_SECONDS
        while (different := self._different()) and time.monotonic() < end:
            time.sleep(0.01)
        return different

    def _settled(self) -> dict[str, Any]:
        """What is held when a thread that has ended, or a page that was on its way, is past."""
        end = time.monotonic() + SETTLE_SECONDS
        held = self._hold()
        while time.monotonic() < end:
            time.sleep(0.02)
            before, held = held, self._hold()
            if before == held:
                break
        return held

    def _hold(self) -> dict[str, Any]:
        return {
            "descriptors": _descriptors(),
            "maps": self._maps(),
            "locked": bytes_of("VmLck"),
            "threads": len(os.listdir("/proc/self/task")),
            "handlers": int(status_of("SigCgt"), 16) & _SIGNALS_OF_PROGRAMS,
            "cached": {path: cached_pages(path) for path in self._files},
        }

    def _different(self) -> dict[str, Any]:
        now = self._hold()
        different: dict[str, Any] = {
            kind: [_shown(before), _shown(now[kind])]
            for kind, before in self._held.items()
            if now[kind] != before
        }
        grown = bytes_of("RssAnon") - self._anonymous_bytes
        if grown > ANONYMOUS_BYTES_SPARED:
            different["anonymous"] = grown
        return different

    def _maps(self) -> Counter[str]:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        return Counter(line[line.index(self._folder) :] for line in lines if self._folder in line)


def told(error: BaseException) -> dict[str, Any]:
    """What an error of the library tells, so that JSON can carry it."""
    bases = [kind.__name__ for kind in type(error).__mro__]
    path = getattr(error, "path", None)
    return {
        "class": bases[0],
        "is a": bases,
        "code": getattr(getattr(error, "code", None), "value", None),
        "file": path and os.path.basename(path),
        "tensor": getattr(error, "tensor", None),
        "got": getattr(error, "got", None),
        "hint": getattr(error, "hint", None),
        "text": str(error),
    }


def _descriptors() -> dict[str, tuple[int, int]]:
    """Each descriptor, and which file it is of."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(number))
        except OSError:  # it was the listing's own
            continue
        found[number] = (status.st_dev, status.st_ino)
    return found


def _shown(held: Any) -> Any:
    if isinstance(held, dict) and any(isinstance(pages, set) for pages in held.values()):
        return {path.name: len(pages) for path, pages in held.items()}
    return held
