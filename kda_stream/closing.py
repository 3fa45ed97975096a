"""Giving back: what a `with` does at its end, and how Ctrl-C cannot come between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType

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
