"""The ways to bring payload in: which one is taken, and why."""

from __future__ import annotations

import os
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
    LAYOUT_BYTES,
    READS_IN_FLIGHT,
)
from ..require import require_choice
from .choosing import Decision, decide
from .leaving import cache_as_it_was
from .residency import direct_alignment
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
    "direct" (read past it), "memory" (copied from the source's own), "view" (left where it is, in
    the map or in the caller's memory) or "none"; `reason` says why. `residency` is "keep" or
    "drop", None where no file was read.
    `cached_before_bytes` of the payload were in the page cache, from samples where the kernel does
    not count (files of others); None where it does not say at all.
    `alignment_bytes` is the power of two that every tensor's address is a multiple of, at most
    4096; None for "view" and "none", and for what `iter_weights` reads. `notes` tell what was
    asked for and could not be had.
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
    with ExitStack() as open_files:
        opened = _Opened(wanted, open_files)
        decision = opened.decide(choice)
        dropped = opened.ranges() if decision.residency == "drop" else []

        def copy(path: str) -> None:
            if path == "direct" and before_direct is not None:
                before_direct()
            threads = READS_IN_FLIGHT if path == "direct" else copy_threads()
            with cache_as_it_was(dropped), opened.spans(path) as spans:
                _run([*spans, *from_memory], destination, threads, choice)

        return opened.report(decision, copy)


def foresee(wanted: Sequence[Wanted], choice: ReadChoice) -> ReadReport:
    """What `bring_in` would report of this now, decided by the same code; no payload is read.

    Each way is tried as far as that goes without reading: the files are opened, mapped, and asked
    for their alignment. That a kernel cannot check mapped pages shows only when it copies them.
    Raises as `bring_in`.
    """
    with ExitStack() as open_files:
        opened = _Opened(wanted, open_files)

        def prepare(path: str) -> None:
            with opened.spans(path):
                pass

        return opened.report(opened.decide(choice), prepare)


# --- one way --------------------------------------------------------------------------------------


class _Opened:
    """The files that payload is wanted of, open for reading for as long as `open_files` is."""

    def __init__(self, wanted: Sequence[Wanted], open_files: ExitStack) -> None:
        self._wanted = wanted
        self._files = {id(part.file): part.file for part in wanted}
        self._descriptors = {
            key: open_files.enter_context(file.open()).fileno() for key, file in self._files.items()
        }

    def decide(self, choice: ReadChoice) -> Decision:
        """Which ways are to be tried, by what is in the page cache now."""
        return decide(
            choice.path, choice.residency, choice.whole_bytes, _without_repeats(self.ranges())
        )

    def report(self, decision: Decision, attempt: Callable[[str], None]) -> ReadReport:
        """Go the first way that can be gone, by `attempt`, and say which it was."""
        way, notes = decision.first_way(attempt)
        if way.path == "direct" and any(part.rows > 1 for part in self._wanted):
            notes.append("not direct: rows that lie apart, which the ranks of a host share")
        return ReadReport(
            way.path, way.reason, decision.residency, decision.cached_bytes, notes=tuple(notes)
        )

    def ranges(self) -> list[tuple[int, int, int]]:
        """(descriptor, begin, end) of all that is wanted."""
        return [(self._descriptors[id(part.file)], part.begin, part.end) for part in self._wanted]

    @contextmanager
    def spans(self, path: str) -> Iterator[list[Span]]:
        """What is wanted as spans to be copied that way; maps and direct descriptors end behind it.

        Rows that lie apart share their blocks with those of other ranks: through the page cache a
        host reads them once, and direct reads would have each rank read them all.
        """
        with ExitStack() as opened:
            blocks = dict.fromkeys(self._descriptors, 0)
            past_cache: Mapping[int, int] = self._descriptors
            if path == "direct":
                blocks = {
                    key: _block_bytes(self._files[key], descriptor)
                    for key, descriptor in self._descriptors.items()
                }
                past_cache = {
                    key: opened.enter_context(file.open(direct=True)).fileno()
                    for key, file in self._files.items()
                }
            spans = [
                _span(part, path == "mapped", past_cache[id(part.file)], blocks[id(part.file)])
                if part.rows == 1
                else _span(part, path == "mapped", self._descriptors[id(part.file)], 0)
                for part in self._wanted
            ]
            try:
                yield spans
            finally:
                if path == "mapped":
                    for part in self._wanted:
                        part.file.unmap(part.begin, part.end)


def _without_repeats(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The ranges (descriptor, begin, end), where what is in two of them counts once."""
    found: list[tuple[int, int, int]] = []
    for descriptor, begin, end in sorted(ranges):
        if found and found[-1][0] == descriptor:
            begin = max(begin, found[-1][2])
        if begin < end:
            found.append((descriptor, begin, end))
    return found


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
    return min(usable_processors(), COPY_THREADS_MAX)


def usable_processors() -> int:
    """How many processors the process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not here, or forbidden to ask
        return os.cpu_count() or 1
