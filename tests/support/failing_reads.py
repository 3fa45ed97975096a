"""Reads that fail or wait: a C library, compiled for the tests and preloaded into processes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def build_failing_reads(folder: Path) -> Path:
    """The library for LD_PRELOAD; skips the test where there is no compiler for it."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux's LD_PRELOAD and a C compiler")
    library = folder / "failing_reads.so"
    source = Path(__file__).with_suffix(".c")
    flags = ["-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(library), str(source), "-ldl"], check=True)
    return library


class FailingReads:
    """Which reads of files under a folder fail or wait, in a process that has the library."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(None)
        self._library.failing_reads_begin.restype = None
        self._library.failing_reads_begin.argtypes = (
            *(ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_long),
            *(ctypes.c_long, ctypes.c_long, ctypes.c_long),
        )
        self._library.failing_reads_seen.restype = ctypes.c_long
        self._library.failing_reads_failed.restype = ctypes.c_long
        self._under = os.fsencode(f"{folder.resolve()}/")

    def none(self) -> None:
        """From now on no read fails; they are counted anew."""
        self._begin(first=1, times=0)

    def error(self, number: int, *, first: int, times: int = 1, every: int = 0) -> None:
        """Reads fail with that errno: `times` from the `first` on, again after `every` reads."""
        self._begin(error=number, first=first, times=times, every=every)

    def short(self, bytes_max: int, *, first: int, times: int = 1, every: int = 0) -> None:
        """Reads bring at most `bytes_max` bytes: `times` from the `first` on, as for `error`."""
        self._begin(bytes_max=bytes_max, first=first, times=times, every=every)

    def slow(self, pause_ms: int, *, first: int, times: int = 1, every: int = 0) -> None:
        """Reads take so long: `times` from the `first` on, as for `error`."""
        self._begin(pause_ms=pause_ms, first=first, times=times, every=every)

    @property
    def seen(self) -> int:
        """How many reads there were since."""
        return int(self._library.failing_reads_seen())

    @property
    def failed(self) -> int:
        """How many of them failed, or were cut short."""
        return int(self._library.failing_reads_failed())

    def _begin(
        self,
        *,
        first: int,
        times: int,
        every: int = 0,
        error: int = 0,
        bytes_max: int = sys.maxsize,
        pause_ms: int = 0,
    ) -> None:
        begin = self._library.failing_reads_begin
        begin(self._under, error, bytes_max, pause_ms, first, times, every)
