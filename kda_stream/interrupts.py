"""Ctrl-C at the wrong moment: what gives resources back is finished first."""

from __future__ import annotations

from collections.abc import Callable


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
