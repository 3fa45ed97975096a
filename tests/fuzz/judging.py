"""What the Python targets find: something that was accepted, or said, against another reader."""

from __future__ import annotations


class AcceptedLieError(Exception):
    """The library took an input for what it is not."""


def need(holds: bool, what: str, *seen: object) -> None:
    """Raise where the promise `what` does not hold, with what was seen of it."""
    if not holds:
        raise AcceptedLieError(f"{what}: {seen!r}")
