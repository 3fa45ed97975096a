"""What the payload holds: all of it read once, its digests, and the values of KDA tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from queue import Empty, SimpleQueue

from .checkpoint.checkpoint import Checkpoint
from .checkpoint.layer import LayerIndex, LayerSource, names_by_layer
from .checkpoint.shard import Shard
from .closing import BackgroundThread, finish_first
from .errors import (
    BindError,
    ClosedError,
    ErrorCode,
    KdaStreamError,
    PayloadDigestError,
    PayloadError,
)
from .kda.check import identify_block
from .kda.classify import is_kda_block
from .kda.families import FAMILIES
from .limits import BELL_SECONDS, CHECK_PIECE_BYTES, ENDING_SECONDS, LAYOUT_BYTES
from .manifest import SHA256_HEX, ManifestEntry
from .require import require_items
from .staging.arena import PinnedArena, Slot
from .staging.reading import ReadChoice, Wanted, bring_in, copy_threads
from .staging.spans import CopyStop
from .values import WIDTHS, KdaValues

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PayloadReport:
    """What a pass over all payload has found.

    `bytes` were read in `seconds`. `files_named_by_digest` is how many shards lie under a name that
    is their sha256, as in a hub's cache, and were checked against it; `kda_tensors` how many KDA
    tensors were searched for NaN, infinity, nothing but zeros, and padding that is not zeros.
    `tensors` has each tensor with its digest, where these were asked for; those of a shard that
    could not be read are missing.
    `problems` are `PayloadError`, `PayloadDigestError` and `PayloadValueError`, in the order of the
    shards.
    """

    bytes: int
    seconds: float
    files_named_by_digest: int
    kda_tensors: int
    tensors: Mapping[str, ManifestEntry] = field(repr=False)
    problems: tuple[KdaStreamError, ...]


def check_payload(
    checkpoint: Checkpoint,
    *,
    digests: bool = False,
    names: Collection[str] | None = None,
    progress: Progress | None = None,
) -> PayloadReport:
    """Read every byte of a checkpoint once, and check what can be known of it.

    A shard under a name that is a sha256 (a link into a hub's cache leads to one) must have that
    digest. A KDA tensor must hold no NaN, no infinity, and something else than zeros, but zeros
    alone where the family that its layer is exactly of pads it; it is looked at as it is stored,
    BF16 or F32, and left out in any other dtype. With `digests` the sha256 of each tensor's bytes
    is in the report. With `names` only these tensors are read, and no file is compared with its
    name.

    Several shards are read at once, one a core and at most four, each through 16 MiB of memory. The
    page cache is left as it was; the page of each header, which opening brings in, stays.
    `progress` is called now and then with the bytes that were read so far and all there are, in the
    caller's thread.

    What is wrong with the payload is in the report's `problems`, and the pass goes on. Raises
    `ClosedError` when the checkpoint is closed, `MemoryRefusedError`, under `verify="needed"` what
    checking a shard raises, and what `progress` does.
    """
    began_seconds = time.monotonic()
    wanted = None
    if names is not None:
        wanted = frozenset(require_items("names", names, "tensor names", '"lm_head.weight"'))
    if wanted is None:
        shards = list(checkpoint.shards.values())
        total = sum(shard.identity.file_bytes for shard in shards)
    else:
        held = dict.fromkeys(checkpoint.shard_of(name).file_name for name in sorted(wanted))
        shards = [checkpoint.shards[file] for file in held]
        total = sum(checkpoint.info(name).nbytes for name in wanted)
    threads = max(1, min(copy_threads(), len(shards)))
    slot_bytes = CHECK_PIECE_BYTES + LAYOUT_BYTES
    done = 0
    with PinnedArena(slot_bytes, slots=threads, lock="off") as arena:
        ignored = frozenset(checkpoint.report.unlisted)
        work = _Work(wanted, _kda_tensors(checkpoint, wanted), ignored, digests, arena)
        workers = _Workers(work, shards, threads)
        try:
            workers.begin()
            while not workers.are_done:
                done += workers.bytes_read()
                if progress is not None:
                    progress(done, total)
        finally:
            finish_first(workers.end)
    if workers.failure is not None:
        raise workers.failure
    found = [workers.found[number] for number in range(len(shards))]
    return PayloadReport(
        bytes=done,
        seconds=time.monotonic() - began_seconds,
        files_named_by_digest=sum(one.is_named_by_digest for one in found),
        kda_tensors=sum(one.kda_tensors for one in found),
        tensors={name: entry for one in found for name, entry in one.tensors.items()},
        problems=tuple(problem for one in found for problem in one.problems),
    )


def _kda_tensors(checkpoint: Checkpoint, wanted: frozenset[str] | None) -> dict[str, int]:
    """How many values are padding, of each tensor that is, or ought to be, of a KDA block.

    By full names, of any decoder; layers without a wanted tensor are left out.
    """
    specs = sorted({name for family in FAMILIES for name in family.names})
    found: dict[str, int] = {}
    for before, layers in names_by_layer(checkpoint).items():
        for number, full_names in layers.items():
            source = LayerSource(checkpoint, LayerIndex(number), f"{before}{number}.", full_names)
            names = frozenset(source.names())
            is_wanted = wanted is None or not wanted.isdisjoint(full_names)
            if is_wanted and is_kda_block(names):
                paddings = _paddings(source)
                found.update(
                    (source.prefix + name, paddings.get(name, 0)) for name in specs if name in names
                )
    return found


def _paddings(source: LayerSource) -> dict[str, int]:
    """How many values are padding, of each tensor, in the family that the layer is exactly of."""
    try:
        family, config = identify_block(source)
    except BindError:
        return {}
    return {spec.name: spec.tail(config) for spec in family.tensors}


# The threads -------------------------------------------------------------------------------------


class _Workers:
    """What passes between the caller and the threads that read shards.

    No lock is in it that Ctrl-C could leave locked: plain attributes, and queues. Where the system
    gives no thread, the caller reads the shards itself.
    """

    def __init__(self, work: _Work, shards: Sequence[Shard], threads: int) -> None:
        self.found: dict[int, _Found] = {}
        self.failure: BaseException | None = None
        self._work = work
        self._shards = shards
        self._threads = [BackgroundThread() for _ in range(threads)]
        self._todo: SimpleQueue[int] = SimpleQueue()
        for number in range(len(shards)):
            self._todo.put(number)

    # the caller's side

    def begin(self) -> None:
        """Begin the threads, as many of them as the system gives."""
        for thread in self._threads:
            try:
                thread.start(self._run)
            except RuntimeError:
                break

    @property
    def are_done(self) -> bool:
        """Whether every shard was read, or one could not be for another reason than its own."""
        is_over = self.failure is not None or len(self.found) == len(self._shards)
        return is_over and self._work.read.empty()

    def bytes_read(self) -> int:
        """Wait until something was read, at most `BELL_SECONDS`; how many bytes that is."""
        if all(thread.is_over for thread in self._threads):
            self._read_next()
        try:
            return self._work.read.get(timeout=BELL_SECONDS)
        except Empty:
            return 0

    def end(self) -> None:
        """Have the threads end, and wait for them; one that has not begun will do nothing."""
        self._work.stop.set()
        while not all(thread.is_over for thread in self._threads):
            time.sleep(ENDING_SECONDS)

    # the threads' side

    def _run(self) -> None:
        while self._read_next():
            pass

    def _read_next(self) -> bool:
        """Read one shard; False when there is none left, or the pass is over."""
        if self._work.stop.is_set:
            return False
        try:
            number = self._todo.get_nowait()
        except Empty:
            return False
        try:
            self.found[number] = _check_shard(self._work, self._shards[number])
        except BaseException as error:  # handed to the caller, who raises it
            if not self._work.stop.is_set:
                self.failure = error
            self._work.stop.set()
        self._work.read.put(0)
        return True


# One shard ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Work:
    """What all shards of a pass share."""

    wanted: frozenset[str] | None
    kda_tensors: Mapping[str, int]
    ignored: frozenset[tuple[str | None, str]]
    digests: bool
    arena: PinnedArena
    read: SimpleQueue[int] = field(default_factory=SimpleQueue)
    stop: CopyStop = field(default_factory=CopyStop)

    def ignores(self, name: str | None, shard: Shard) -> bool:
        """Whether the index places the tensor of that name elsewhere."""
        return (name, shard.file_name) in self.ignored


@dataclass(slots=True)
class _Found:
    """What one shard holds."""

    is_named_by_digest: bool = False
    kda_tensors: int = 0
    tensors: dict[str, ManifestEntry] = field(default_factory=dict)
    problems: list[KdaStreamError] = field(default_factory=list)


def _check_shard(work: _Work, shard: Shard) -> _Found:
    """What the shard holds; of one that cannot be read to its end, only that."""
    found = _Found()
    claimant = object()
    slot = work.arena.claim(claimant=claimant)
    try:
        _read_shard(work, shard, slot, found)
    except PayloadError as error:
        found = _Found(problems=[error])
    finally:
        work.arena.abandon_claim(claimant)
    return found


def _read_shard(work: _Work, shard: Shard, slot: Slot, found: _Found) -> None:
    """Bring the file in, piece after piece, and hand each piece to whoever looks at it."""
    expected = os.path.basename(os.path.realpath(shard.path))
    is_whole = work.wanted is None
    of_file = sha256() if is_whole and SHA256_HEX.fullmatch(expected) else None
    choice = ReadChoice(residency="drop", stop=work.stop)
    memory = slot.memory()
    tensor: _Tensor | None = None
    for parts in _pieces(shard, work):
        begin, end = parts[0].begin, parts[-1].end
        at = begin % LAYOUT_BYTES
        starts = tuple((part.begin - begin, part.name or "") for part in parts)
        wanted = [Wanted(shard, begin, end, at, starts)] if begin < end else []
        bring_in(wanted, [], memory, choice, before_direct=slot.prepare_for_direct_reads)
        if of_file is not None:
            of_file.update(memory[at : at + end - begin])
        for part in parts:
            if part.name is None:
                continue
            if tensor is None:
                tensor = _Tensor(work, shard, part.name)
            tensor.take(memory[at + part.begin - begin : at + part.end - begin])
            if part.is_last:
                tensor.finish(found)
                tensor = None
        work.read.put(end - begin)
        if work.stop.is_set:
            raise ClosedError(
                ErrorCode.STREAM_STOPPED,
                "the pass over the payload was stopped",
                path=shard.path,
                hint="it ended by an error or an interrupt: begin it again",
            )
    shard.check_unchanged()
    if of_file is not None:
        found.is_named_by_digest = True
        if of_file.hexdigest() != expected:
            found.problems.insert(0, _wrong_file(shard, expected, of_file.hexdigest()))


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes [begin, end) of a file: of a tensor, or of the header, which has no name."""

    name: str | None
    begin: int
    end: int
    is_last: bool


def _pieces(shard: Shard, work: _Work) -> Iterator[list[_Part]]:
    """All that is wanted of a file in pieces of at most `CHECK_PIECE_BYTES`, cut between tensors.

    One that is longer is cut at multiples of that from its start, and so between two values.
    """
    piece: list[_Part] = []
    for part in _parts(shard, work):
        is_full = piece and part.end - piece[0].begin > CHECK_PIECE_BYTES
        if is_full or (piece and piece[-1].end != part.begin):
            yield piece
            piece = []
        piece.append(part)
    if piece:
        yield piece


def _parts(shard: Shard, work: _Work) -> Iterator[_Part]:
    header = shard.header
    rows = sorted((header.begins[n], header.ends[n], name) for name, n in header.numbers.items())
    start = header.payload_begin
    spans: list[tuple[int, int, str | None]] = [(0, start, None)]
    spans += ((start + begin, start + end, name) for begin, end, name in rows)
    for begin, end, name in spans:
        if work.wanted is not None and (name not in work.wanted or work.ignores(name, shard)):
            continue
        while end - begin > CHECK_PIECE_BYTES:
            yield _Part(name, begin, begin + CHECK_PIECE_BYTES, False)
            begin += CHECK_PIECE_BYTES
        yield _Part(name, begin, end, True)


def _wrong_file(shard: Shard, expected: str, got: str) -> PayloadDigestError:
    return PayloadDigestError(
        ErrorCode.PAYLOAD_DIGEST,
        "the file's bytes are not those that its name gives the sha256 of",
        path=shard.path,
        expected=f"sha256 {expected}",
        got=f"sha256 {got}",
        hint="the file in the cache is damaged or was changed: delete it and fetch it again",
    )


# One tensor --------------------------------------------------------------------------------------


class _Tensor:
    """One tensor of a shard, as its bytes come by."""

    def __init__(self, work: _Work, shard: Shard, name: str) -> None:
        self._info = shard.header.info(name)
        self._path = shard.path
        self._name = name
        is_ignored = work.ignores(name, shard)
        self._digest = sha256() if work.digests and not is_ignored else None
        self._values: KdaValues | None = None
        padding = None if is_ignored else work.kda_tensors.get(name)
        if padding is not None and self._info.nbytes > 0 and self._info.dtype in WIDTHS:
            self._values = KdaValues(self._info.dtype, self._info.nbytes, padding)

    def take(self, memory: memoryview) -> None:
        """Look at the next bytes of it."""
        if self._digest is not None:
            self._digest.update(memory)
        if self._values is not None:
            self._values.take(memory)

    def finish(self, found: _Found) -> None:
        """Note what was seen, when all bytes have come by."""
        if self._digest is not None:
            info = self._info
            entry = ManifestEntry(info.dtype, info.shape, self._digest.hexdigest())
            found.tensors[self._name] = entry
        if self._values is not None:
            found.kda_tensors += 1
            found.problems += self._values.problems(self._name, self._path)
