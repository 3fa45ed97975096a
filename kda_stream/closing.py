"""Giving back: what a `with` does at its end, and how Ctrl-C cannot come between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType

from .errors import InUseError


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
    """Run `step` to its end; a KeyboardInterrupt that cuts it short is raised after that.

    `step` is run anew then, so what it has done already must have no effect the second time.
    """
    interrupt = None
    while True:
        try:
            step()
        except KeyboardInterrupt as error:
            interrupt = error
        else:
            break
    if interrupt is not None:
        raise interrupt
