"""Which tensors of a checkpoint share a slot, and where they lie in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from .checkpoint.checkpoint import Checkpoint
from .dtypes import DTYPE_BITS
from .errors import ErrorCode, StreamError
from .kda.source import Place, RawTensor
from .limits import GAP_BYTES_MAX, LAYOUT_BYTES, SLOT_ALIGNMENT_BYTES
from .staging.reading import Wanted

Order = Literal["file", "layer"]
ORDERS: Final = ("file", "layer")
Large = Literal["own", "pieces"]
LARGES: Final = ("own", "pieces")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor, or rows of one, and where its bytes begin in the slot.

    `row` is the first row of a piece; None for a whole tensor. `whole_shape` is the tensor's.
    """

    name: str
    tensor: RawTensor
    begin: int
    whole_shape: tuple[int, ...]
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What goes through a slot together; `nbytes` is what it takes of it, with all that is between.

    With `is_large` it is one tensor that gets memory of its own.
    """

    parts: tuple[Part, ...]
    wanted: tuple[Wanted, ...]
    nbytes: int
    is_large: bool = False


def batches(
    checkpoint: Checkpoint, names: Iterable[str], order: Order, large: Large, slot_bytes: int
) -> Iterator[Batch]:
    """The named tensors in that order, packed into slots of `slot_bytes` and a page.

    Raises `StreamError` when a tensor that is to come in pieces has rows larger than a slot.
    """
    packer = _Packer(slot_bytes)
    for name in _ordered(checkpoint, names, order):
        tensor = checkpoint.tensor(name)
        if tensor.nbytes <= slot_bytes:
            yield from packer.take(Part(name, tensor, 0, tensor.shape))
            continue
        yield from packer.emptied()
        if large == "own":
            alone = _Packer(tensor.nbytes)
            yield from alone.take(Part(name, tensor, 0, tensor.shape))
            yield from (replace(batch, is_large=True) for batch in alone.emptied())
        else:
            for piece in _pieces(name, tensor, slot_bytes, checkpoint.path):
                yield from packer.take(piece)
    yield from packer.emptied()


def _ordered(checkpoint: Checkpoint, names: Iterable[str], order: Order) -> Iterator[str]:
    """The names by shard and offset; with "layer", so within what is outside all, and each layer.

    A shard's header is looked at when its first tensor comes.
    """
    for group in _groups(checkpoint, names, order):
        by_file: dict[str, list[str]] = {}
        for name in group:
            by_file.setdefault(checkpoint.file_of(name), []).append(name)
        for file in sorted(by_file, key=_natural):
            header = checkpoint.shards[file].header
            yield from sorted(by_file[file], key=lambda name: header.info(name).begin)


def _groups(checkpoint: Checkpoint, names: Iterable[str], order: Order) -> list[list[str]]:
    if order == "file":
        return [list(names)]
    layer_of: dict[str, int] = {}
    for index in checkpoint.layers():
        source = checkpoint.layer(index)
        layer_of.update({f"{source.prefix}{name}": int(index) for name in source.names()})
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(layer_of.get(name, -1), []).append(name)
    return [groups[number] for number in sorted(groups)]


def _natural(file: str) -> list[tuple[int, str]]:
    """A key that sorts shard 10 behind shard 9."""
    return [
        (int(part or 0), "") if at % 2 else (0, part)
        for at, part in enumerate(re.split(r"(\d+)", file))
    ]


def _pieces(name: str, tensor: RawTensor, slot_bytes: int, path: str) -> Iterator[Part]:
    rows = tensor.shape[0] if tensor.shape else 1
    row_bytes = -(-tensor.nbytes // rows)
    if DTYPE_BITS[tensor.dtype] % 8:
        raise StreamError(
            ErrorCode.STREAM_ROW_TOO_LARGE,
            "a tensor is larger than a slot, and its rows do not fill bytes",
            path=path,
            tensor=name,
            expected=f"at most {slot_bytes} bytes, or a dtype of whole bytes",
            got=repr(tensor),
            hint="pass large='own'",
        )
    if row_bytes > slot_bytes:
        raise StreamError(
            ErrorCode.STREAM_ROW_TOO_LARGE,
            "a tensor's rows do not fit a slot, and it is to come in pieces",
            path=path,
            tensor=name,
            expected=f"rows of at most {slot_bytes} bytes",
            got=f"rows of {row_bytes} bytes in {tensor!r}",
            hint=f"pass slot_bytes={row_bytes} or more, or large='own'",
        )
    step = slot_bytes // row_bytes
    for row in range(0, rows, step):
        piece = tensor.part(0, row, min(row + step, rows))
        yield Part(name, piece, 0, tensor.shape, row)


def _is_near(run: Wanted, place: Place) -> bool:
    return run.file is place.file and 0 <= place.begin - run.end <= GAP_BYTES_MAX


class _Packer:
    """A batch in the making, in a slot of `slot_bytes` and a page.

    What adjoins in its file, or nearly so, is one range, as far into a page as in its file; a
    tensor whose offset in the file is no multiple of its element's size is put apart.
    """

    def __init__(self, slot_bytes: int) -> None:
        self._room = slot_bytes + LAYOUT_BYTES
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._at = 0
        self._parts: list[Part] = []
        self._wanted: list[Wanted] = []
        self._run: Wanted | None = None  # the last of them, when it can be made longer
        self._starts: list[tuple[int, str]] = []

    def take(self, part: Part) -> Iterator[Batch]:
        """Put a tensor into the slot; one that is full before comes out."""
        if not self._put(part):
            yield from self.emptied()
            self._put(part)

    def emptied(self) -> Iterator[Batch]:
        """What is in the slot, if anything is."""
        self._end_run()
        if self._parts:
            yield Batch(tuple(self._parts), tuple(self._wanted), self._at)
        self._begin_anew()

    def _put(self, part: Part) -> bool:
        place, nbytes = part.tensor.place, part.tensor.nbytes
        if place is None or not nbytes:
            self._parts.append(replace(part, begin=0))
            return True
        is_aligned = place.begin % max(DTYPE_BITS[part.tensor.dtype] // 8, 1) == 0
        run = self._run if is_aligned else None
        if run is not None and not _is_near(run, place):
            run = None
        if run is not None:
            begin = run.destination + place.begin - run.begin
        elif is_aligned:
            begin = self._at + (place.begin - self._at) % LAYOUT_BYTES
        else:
            begin = -(-self._at // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        if begin + nbytes > self._room:
            return False
        if run is not None:
            self._run = replace(run, end=place.end)
        else:
            self._end_run()
            self._run = Wanted(place.file, place.begin, place.end, begin, ())
            self._starts = []
        self._starts.append((begin - self._run.destination, part.name))
        if not is_aligned:
            self._end_run()
        self._at = begin + nbytes
        self._parts.append(replace(part, begin=begin))
        return True

    def _end_run(self) -> None:
        if self._run is not None:
            self._wanted.append(replace(self._run, starts=tuple(self._starts)))
            self._run = None
