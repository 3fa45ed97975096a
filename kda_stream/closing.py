"""Giving back: what a `with` does at its end, and how neither Ctrl-C nor a fork comes between."""

from __future__ import annotations

import os
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Final, Protocol
from weakref import ref

from .errors import InUseError, KdaStreamError
from .limits import ATTEMPTS_MAX


class Closing(ABC):
    """Something that a `with` closes at its end."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except InUseError:
            if error is None:  # else the error on its way says more, and its frames hold the arrays
                raise


def finish_first(step: Callable[[], None]) -> None:
    """Run `step` to its end; what a signal handler raises in between is raised after that.

    `step` is run anew then, so what it has done already must have no effect the second time. An
    error of the library is the step's own, and ends it; but for an interrupt that came before.
    """
    interrupt: BaseException | None = None
    try:
        for _ in range(ATTEMPTS_MAX):
            try:
                step()
            except KdaStreamError as error:
                raise interrupt or error from None
            except BaseException as error:
                interrupt = error
            else:
                break
        if interrupt is not None:
            raise interrupt
    finally:
        del interrupt  # else its traceback would keep this frame, and both what the step gave back


class BackgroundThread:
    """A thread that never keeps the interpreter from ending.

    Begun in one step: threading.Thread.start waits under a lock, and Ctrl-C there would leave the
    lock locked and the new thread waiting for it for ever. Whether it is over it says itself; or it
    is told by an object that it alone holds, since where memory is short a thread can end before
    its first line.
    """

    def __init__(self) -> None:
        self._sign: ref[_Sign] | None = None
        self._began = False
        self._ended = False

    def start(self, work: Callable[[], None]) -> None:
        """Have it run `work`; raises RuntimeError when the system gives no thread."""
        sign = _Sign()
        self._sign = ref(sign)
        start_new_thread(self._run, (work, sign))
        self._began = True

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or was never begun."""
        return not self._began or self._ended or self._sign is None or self._sign() is None

    def _run(self, work: Callable[[], None], _: _Sign) -> None:
        self._began = True
        try:
            work()
        finally:
            self._ended = True


class _Sign:
    """What lives as long as its thread."""


class HoldsLocks(Protocol):
    """Something with locks that a thread may hold at the moment of a fork."""

    def renew_locks(self) -> None:
        """Make new locks: the thread that held the old ones is not in this process."""


# Those that live, by id: what a fork calls knows no other place.
_HOLDERS: Final[dict[int, ref[HoldsLocks]]] = {}


def renew_locks_after_fork(holder: HoldsLocks) -> None:
    """Have `holder` renew its locks in every child that is forked from now on."""
    # No line of Python in the callback: a KeyboardInterrupt would be lost in it.
    _HOLDERS[id(holder)] = ref(holder, partial(_HOLDERS.pop, id(holder)))


def _renew_all() -> None:
    for living in list(_HOLDERS.values()):
        holder = living()
        if holder is not None:
            holder.renew_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
