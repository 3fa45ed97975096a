"""A GPU driver's book of registered memory, kept as strictly as a real one's would break.

What is mapped and locked it knows of Linux alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

INVALID, OUT_OF_MEMORY, ALREADY, NOT_REGISTERED, NOT_SUPPORTED = 1, 2, 712, 713, 801
Answer = int | BaseException | None


@dataclass
class FakeDriver:
    """Registers what it is told to, and writes down in `wrong` what a real one would not forgive.

    `answers` and `unanswers` are what it answers to the first calls, then it does its work: a
    number, or an exception that is raised, before or (with `does_it_first`) after the work.
    """

    answers: Iterable[Answer] = ()
    unanswers: Iterable[Answer] = ()
    does_it_first: bool = False
    standing: dict[int, int] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    locked: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._answers, self._unanswers = iter(self.answers), iter(self.unanswers)
        self._lock = threading.Lock()

    def register(self, address: int, nbytes: int) -> int:
        with self._lock:
            self.calls.append(("register", address))
            self.ranges.append((address, address + nbytes))
            self.locked.append(locked_bytes())
            if not is_mapped(address, address + nbytes):
                self.wrong.append("registered what is not mapped")
            return self._answered(next(self._answers, None), lambda: self._add(address, nbytes))

    def unregister(self, address: int) -> int:
        with self._lock:
            self.calls.append(("unregister", address))
            self.locked.append(locked_bytes())
            nbytes = self.standing.get(address, 1)
            if not is_mapped(address, address + nbytes):
                self.wrong.append("unregistered what was unmapped before")
            return self._answered(next(self._unanswers, None), lambda: self._remove(address))

    def _answered(self, answer: Answer, work: Callable[[], int]) -> int:
        if isinstance(answer, int):
            return answer
        if isinstance(answer, BaseException):
            if self.does_it_first:
                work()
            raise answer
        return work()

    def _add(self, address: int, nbytes: int) -> int:
        for begin, length in self.standing.items():
            if begin < address + nbytes and address < begin + length:
                self.wrong.append("registered twice")
                return ALREADY
        self.standing[address] = nbytes
        return 0

    def _remove(self, address: int) -> int:
        return NOT_REGISTERED if self.standing.pop(address, None) is None else 0

    @property
    def names(self) -> list[str]:
        """What was called, in order."""
        return [name for name, _ in self.calls]

    def assert_clean(self) -> None:
        """Nothing is registered any more, and nothing was done that a driver does not forgive."""
        assert self.wrong == []
        assert self.standing == {}


def is_mapped(begin: int, end: int) -> bool:
    """Whether every page of [begin, end) is mapped in this process."""
    if sys.platform != "linux":
        return True
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        first, last = (int(text, 16) for text in line.split()[0].split("-"))
        if first <= begin < last:
            begin = min(last, end)
    return begin >= end


def locked_bytes() -> int:
    """What this process has locked of its memory."""
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmLck"))
