"""The ways to bring payload in: which one is taken, why, and what it leaves in the page cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from typing import Final, Literal, Protocol

from ..errors import ErrorCode, PayloadError
from ..limits import (
    COPY_THREADS_MAX,
    DIRECT_BLOCK_BYTES_MAX,
    DIRECT_BLOCK_BYTES_MIN,
    DROP_SECONDS,
    LAYOUT_BYTES,
    READ_AHEAD_BYTES,
    READS_IN_FLIGHT,
)
from ..require import require_choice
from .pages import PAGE_BYTES
from .residency import (
    cached_bytes,
    cached_ranges,
    direct_alignment,
    file_system_of,
    sampled_cached_bytes,
)
from .room import memory_room
from .spans import CopyPlan, CopyStop, FileRange, Span

ReadPath = Literal["auto", "mapped", "positional", "direct"]
READ_PATHS: Final = ("auto", "mapped", "positional", "direct")
Residency = Literal["auto", "keep", "drop"]
RESIDENCIES: Final = ("auto", "keep", "drop")


class ReadableFile(Protocol):
    """What is asked of a file that payload is read from."""

    @property
    def path(self) -> str:
        """Where the file is, for errors."""
        ...

    def open(self, *, direct: bool = False) -> FileIO:
        """The unchanged file, open for reading (`direct`: with O_DIRECT); the caller closes it."""
        ...

    def view(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) of the file, mapped."""
        ...

    def unmap(self, begin: int, end: int) -> None:
        """Take the mapped pages around [begin, end) out of the process."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """Bytes of a file, and where they go: [begin, end) of `file` to the offset `destination`.

    `starts` has (bytes before it, name) of each tensor in it, for errors. With several `rows`, only
    these go there, densely: `row_bytes` bytes each, `row_stride` apart, the first at `begin`.
    """

    file: ReadableFile
    begin: int
    end: int
    destination: int
    starts: tuple[tuple[int, str], ...]
    rows: int = 1
    row_bytes: int = 0
    row_stride: int = 0


@dataclass(frozen=True, slots=True)
class ReadChoice:
    """What the caller asks for, and what belongs to it.

    `path` and `residency` as for `bind_kda_weights`. `whole_bytes` is what all loads of this kind
    will bring in together, so that "auto" can tell whether keeping it in the page cache fits.
    """

    path: ReadPath = "auto"
    residency: Residency = "auto"
    whole_bytes: int = 0
    between: Callable[[], None] | None = field(default=None, compare=False)
    stop: CopyStop | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ReadReport:
    """How the payload of a layer was brought in.

    `path` is "mapped" (copied out of the mapped file), "positional" (read through the page cache),
    "direct" (read past it), "memory" (the source's own), "view" (left in the map) or "none";
    `reason` says why. `residency` is "keep" or "drop", None where no file was read.
    `cached_before_bytes` of the payload were in the page cache, from samples where the kernel does
    not count (files of others); None where it does not say at all.
    `alignment_bytes` is the power of two that every tensor's address is a multiple of, at most
    4096. `notes` tell what was asked for and could not be had.
    """

    path: str
    reason: str
    residency: str | None = None
    cached_before_bytes: int | None = None
    alignment_bytes: int | None = None
    notes: tuple[str, ...] = ()


def require_read_choice(path: str, residency: str) -> None:
    """Raise `ArgumentError` when there is no such read path or residency."""
    hint = '"auto" chooses by what is in the page cache and how much memory is left'
    require_choice("read", path, READ_PATHS, hint)
    require_choice("residency", residency, RESIDENCIES, hint)


def bring_in(
    wanted: Sequence[Wanted],
    from_memory: Sequence[Span],
    destination: memoryview,
    choice: ReadChoice,
    *,
    before_direct: Callable[[], None] | None = None,
) -> ReadReport:
    """Copy all that is wanted, in ascending order of destination, and say how it was done.

    `before_direct` is called before direct reads, to prepare the destination.

    Raises `PayloadError` when a file has changed or fails, or when the path that was asked for by
    name cannot be taken; "auto" takes another then, and notes it.
    """
    if not wanted:
        _run(from_memory, destination, 1, choice)
        return ReadReport("memory", "the source holds its tensors in memory")
    with ExitStack() as opened:
        files = {id(part.file): part.file for part in wanted}
        descriptors = {
            key: opened.enter_context(file.open()).fileno() for key, file in files.items()
        }
        ranges = _without_repeats(wanted)
        nbytes = sum(end - begin for _, begin, end in ranges)
        cached = _cached_bytes([(descriptors[key], begin, end) for key, begin, end in ranges])
        residency = _residency(choice, cached == nbytes)
        ways = _ways(choice, nbytes, descriptors, cached)
        notes: list[str] = []
        way = ways[0]
        for way in ways:
            try:
                if way.path == "direct" and before_direct is not None:
                    before_direct()
                with _cache_as_it_was(wanted, descriptors, residency):
                    _bring_in_by(
                        way.path, wanted, from_memory, destination, files, descriptors, choice
                    )
            except PayloadError as error:
                if way is ways[-1] or error.code not in _ANOTHER_WAY_HELPS:
                    raise
                notes.append(f"not {way.path}: {error.what}")
            else:
                break
    if way.path == "direct" and any(part.rows > 1 for part in wanted):
        notes.append("not direct: rows that lie apart, which the ranks of a host share")
    return ReadReport(way.path, way.reason, residency, cached, notes=tuple(notes))


# --- which way ------------------------------------------------------------------------------------

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
class _Way:
    path: Literal["mapped", "positional", "direct"]
    reason: str


def _ways(
    choice: ReadChoice, nbytes: int, descriptors: Mapping[int, int], cached: int | None
) -> list[_Way]:
    """What is to be tried, in this order."""
    if choice.path != "auto":
        return [_Way(choice.path, "it was asked for")]
    remote = next(filter(None, map(_remote_name, descriptors.values())), None)
    if remote is not None:
        return [_Way("positional", f"a file on {remote} is never mapped")]
    if cached is None:
        reason = "the system does not say what is in the page cache"
        direct = [_Way("direct", reason)] if choice.residency == "drop" else []
        return [*direct, _Way("positional", reason)]
    reason = f"{100 * cached // max(nbytes, 1)} % of it was in the page cache"
    positional = _Way("positional", reason)
    if 2 * cached >= nbytes:
        return [_Way("mapped", reason), positional]
    if choice.residency == "keep":
        return [positional]  # mapping what the disk has yet to bring is slower
    return [_Way("direct", reason), positional]


def _remote_name(descriptor: int) -> str | None:
    try:
        system = file_system_of(descriptor)
    except OSError:  # forbidden to ask, in a container
        return None
    return system.name if system.is_remote else None


def _without_repeats(wanted: Sequence[Wanted]) -> list[tuple[int, int, int]]:
    """(file's id, begin, end) of what is wanted, where what is wanted twice counts once."""
    ranges: list[tuple[int, int, int]] = []
    for key, begin, end in sorted((id(part.file), part.begin, part.end) for part in wanted):
        if ranges and ranges[-1][0] == key:
            begin = max(begin, ranges[-1][2])
        if begin < end:
            ranges.append((key, begin, end))
    return ranges


def _cached_bytes(ranges: Sequence[tuple[int, int, int]]) -> int | None:
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


def _residency(choice: ReadChoice, all_cached: bool) -> Literal["keep", "drop"]:
    """What is to happen to pages that get into the page cache; "auto" keeps what is no burden."""
    if choice.residency != "auto":
        return choice.residency
    if all_cached:
        return "keep"  # nothing will get there
    available = memory_room().available_bytes
    return "keep" if available is None or available >= 2 * choice.whole_bytes else "drop"


# --- one way --------------------------------------------------------------------------------------


def _bring_in_by(
    path: str,
    wanted: Sequence[Wanted],
    from_memory: Sequence[Span],
    destination: memoryview,
    files: Mapping[int, ReadableFile],
    descriptors: Mapping[int, int],
    choice: ReadChoice,
) -> None:
    with ExitStack() as opened:
        blocks = dict.fromkeys(descriptors, 0)
        past_cache = descriptors
        if path == "direct":
            blocks = {key: _block_bytes(files[key], fd) for key, fd in descriptors.items()}
            past_cache = {
                key: opened.enter_context(file.open(direct=True)).fileno()
                for key, file in files.items()
            }
        # Rows that lie apart share their blocks with those of other ranks: through the page cache a
        # host reads them once, and direct reads would have each rank read them all.
        spans = [
            _span(part, path == "mapped", past_cache[id(part.file)], blocks[id(part.file)])
            if part.rows == 1
            else _span(part, path == "mapped", descriptors[id(part.file)], 0)
            for part in wanted
        ]
        threads = READS_IN_FLIGHT if path == "direct" else copy_threads()
        try:
            _run([*spans, *from_memory], destination, threads, choice)
        finally:
            if path == "mapped":
                for part in wanted:
                    part.file.unmap(part.begin, part.end)


def _run(spans: Sequence[Span], destination: memoryview, threads: int, choice: ReadChoice) -> None:
    in_order = sorted(spans, key=lambda span: span.destination)
    CopyPlan(tuple(in_order)).run(
        destination, threads=threads, between=choice.between, stop=choice.stop
    )


def _span(part: Wanted, mapped: bool, descriptor: int, block_bytes: int) -> Span:
    nbytes = part.end - part.begin
    source: memoryview | FileRange = FileRange(descriptor, part.begin, nbytes, block_bytes)
    if mapped:
        source = part.file.view(part.begin, part.end)
    return Span(
        source,
        part.rows,
        part.row_bytes or nbytes,
        part.row_stride or nbytes,
        part.destination,
        mapped,
        tensor=part.starts[0][1],
        path=part.file.path,
        starts=part.starts,
    )


def _block_bytes(file: ReadableFile, descriptor: int) -> int:
    """What direct reads of the file are aligned to; raises `PayloadError` where there are none."""
    alignment = direct_alignment(descriptor)
    if alignment is None:
        return LAYOUT_BYTES  # the kernel does not say: a page is enough for every disk
    block_bytes = max(alignment.memory_bytes, alignment.offset_bytes, DIRECT_BLOCK_BYTES_MIN)
    if not alignment.offset_bytes or block_bytes > DIRECT_BLOCK_BYTES_MAX:
        raise PayloadError(
            ErrorCode.DIRECT_REFUSED,
            "the file system has no direct reads",
            path=file.path,
            got=f"blocks of {alignment.offset_bytes} bytes",
            hint='pass read="auto"',
        )
    return block_bytes


def copy_threads() -> int:
    """How many threads copy out of the page cache: as many as the process has cores, at most 4."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not here, or forbidden to ask
        cores = os.cpu_count() or 1
    return min(cores, COPY_THREADS_MAX)


# --- what is left behind --------------------------------------------------------------------------


@contextmanager
def _cache_as_it_was(
    wanted: Sequence[Wanted], descriptors: Mapping[int, int], residency: str
) -> Iterator[None]:
    """With "drop": pages that the body brings into the page cache leave it again, no others.

    What was read ahead behind a range leaves too. Of a file of others, of which the kernel does not
    say what was there, a range leaves as a whole, unless samples say that some of it was there.
    """
    gaps = [
        (descriptors[id(part.file)], begin, end)
        for part in (wanted if residency == "drop" else ())
        for begin, end in _not_cached(descriptors[id(part.file)], part.begin, part.end)
    ]
    try:
        yield
    finally:
        for seconds in DROP_SECONDS:
            time.sleep(seconds)  # a page that is still being read ahead cannot leave
            gaps = [gap for gap in gaps if _drop(*gap)]
            if not gaps:
                break


def _not_cached(descriptor: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges around [begin, end), at page borders, that are not in the page cache now."""
    at = max(begin - READ_AHEAD_BYTES, 0) // PAGE_BYTES * PAGE_BYTES
    after = -(-end // PAGE_BYTES) * PAGE_BYTES + READ_AHEAD_BYTES
    after = min(after, os.fstat(descriptor).st_size)
    at = min(at, after)  # the file may have been cut
    cached = cached_ranges(descriptor, at, after)
    if cached is None:
        if not sampled_cached_bytes(descriptor, begin, end):
            yield begin, end
        return
    for first, behind in cached:
        if at < first:
            yield at, first
        at = behind
    if at < after:
        yield at, after


def _drop(descriptor: int, begin: int, end: int) -> bool:
    """Have the kernel drop a range from the page cache; whether it has to be tried again."""
    try:
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
    except (AttributeError, OSError):  # not here, or forbidden
        return False
    return bool(cached_bytes(descriptor, begin, end))
