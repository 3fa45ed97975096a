"""Which way payload is read, and what becomes of it in the page cache: decided by what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ..errors import ErrorCode, PayloadError
from .residency import cached_bytes, file_system_of, sampled_cached_bytes
from .room import memory_room

Ranges = Sequence[tuple[int, int, int]]
"""(descriptor, begin, end) of bytes of open files, none of them twice."""

_ANOTHER_WAY_HELPS: Final = frozenset(
    {
        ErrorCode.MAP_REFUSED,
        ErrorCode.POPULATE_UNSUPPORTED,
        ErrorCode.GUARD_REFUSED,
        ErrorCode.DIRECT_REFUSED,
        ErrorCode.PAYLOAD_OPEN,
    }
)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to read, and why it is gone."""

    path: Literal["mapped", "positional", "direct"]
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The ways that are to be tried, in this order; what got into the page cache is kept or not.

    `cached_bytes` of what is wanted were there; None where the system does not say.
    """

    ways: tuple[Way, ...]
    residency: Literal["keep", "drop"]
    cached_bytes: int | None

    def first_way(self, attempt: Callable[[str], None]) -> tuple[Way, list[str]]:
        """The first way that `attempt` can go, and notes on those before it.

        Raises what it raises for the last one, and what no other way would help with.
        """
        *others, last = self.ways
        notes: list[str] = []
        for way in others:
            try:
                attempt(way.path)
            except PayloadError as error:
                if error.code not in _ANOTHER_WAY_HELPS:
                    raise
                reason = error.what if error.got is None else f"{error.what}: {error.got}"
                notes.append(f"not {way.path}: {reason}")
            else:
                return way, notes
        attempt(last.path)
        return last, notes


def decide(
    path: Literal["auto", "mapped", "positional", "direct"],
    residency: Literal["auto", "keep", "drop"],
    whole_bytes: int,
    ranges: Ranges,
) -> Decision:
    """How these ranges are to be read, where `path` and `residency` are what was asked for.

    `whole_bytes` is what all loads of this kind bring in together.
    """
    nbytes = sum(end - begin for _, begin, end in ranges)
    cached = _cached_bytes(ranges)
    if path == "auto":
        descriptors = dict.fromkeys(descriptor for descriptor, _, _ in ranges)
        ways = tuple(_ways(residency, nbytes, descriptors, cached))
    else:
        ways = (Way(path, "it was asked for"),)
    return Decision(ways, _residency(residency, whole_bytes, cached == nbytes), cached)


def _ways(residency: str, nbytes: int, descriptors: Iterable[int], cached: int | None) -> list[Way]:
    remote = next(filter(None, map(_remote_name, descriptors)), None)
    if remote is not None:
        return [Way("positional", f"a file on {remote} is never mapped")]
    if cached is None:
        reason = "the system does not say what is in the page cache"
        direct = [Way("direct", reason)] if residency == "drop" else []
        return [*direct, Way("positional", reason)]
    reason = f"{100 * cached // max(nbytes, 1)} % of it was in the page cache"
    positional = Way("positional", reason)
    if 2 * cached >= nbytes:
        return [Way("mapped", reason), positional]
    if residency == "keep":
        return [positional]  # mapping what the disk has yet to bring is slower
    return [Way("direct", reason), positional]


def _remote_name(descriptor: int) -> str | None:
    try:
        system = file_system_of(descriptor)
    except OSError:  # forbidden to ask, in a container
        return None
    return system.name if system.is_remote else None


def _cached_bytes(ranges: Ranges) -> int | None:
    """How many bytes of the ranges (descriptor, begin, end) are in the page cache."""
    cached = 0
    for descriptor, begin, end in ranges:
        counted = cached_bytes(descriptor, begin, end)
        if counted is None:
            counted = sampled_cached_bytes(descriptor, begin, end)
        if counted is None:
            return None
        cached += counted
    return cached


def _residency(asked: str, whole_bytes: int, all_cached: bool) -> Literal["keep", "drop"]:
    """What is to happen to pages that get into the page cache; "auto" keeps what is no burden."""
    if asked != "auto":
        return "keep" if asked == "keep" else "drop"
    if all_cached:
        return "keep"  # nothing will get there
    available = memory_room().available_bytes
    return "keep" if available is None or available >= 2 * whole_bytes else "drop"
