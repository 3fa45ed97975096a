"""`RawTensor`, and `KdaTensorSource`: all that a binder asks of whoever holds a layer's tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import TYPE_CHECKING, Protocol

from ..dtypes import DTYPE_BITS
from ..errors import ArgumentError, ErrorCode, SpanError, shown

if TYPE_CHECKING:
    from typing_extensions import Buffer


class PayloadFile(Protocol):
    """A file that holds payload, as a `Place` needs it; `checkpoint.shard.Shard` is one."""

    @property
    def path(self) -> str:
        """Where the file is, for errors and reports."""
        ...

    def view(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) of the file, mapped: read-only and without a copy."""
        ...

    def copy_on_write(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) in pages of their own, writable; what is written stays there."""
        ...

    def unmap(self, begin: int, end: int) -> None:
        """Take the mapped pages around [begin, end) out of the process, when they are in it."""
        ...

    def open(self, *, direct: bool = False) -> FileIO:
        """The unchanged file, open for reading (`direct`: O_DIRECT), which the caller closes."""
        ...

    def check_unchanged(self) -> None:
        """Raise `PayloadError` when the file at `path` is no longer the one that was opened."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes lie: [begin, end) of a file, counted from the file's start."""

    file: PayloadFile
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that lie apart: `count` of `nbytes` bytes each, `stride` from one start to the next."""

    count: int
    nbytes: int
    stride: int


class RawTensor:
    """One tensor exactly as it is stored, or a part of one.

    `dtype` is the stored code ("BF16", "F8_E4M3", ...), `shape` a tuple of ints, `nbytes` the size
    in bytes, and `data` a read-only `memoryview` of the bytes. `place` says which file they lie in;
    it is None for a tensor that was made from memory. Reading `data` of a tensor with a place maps
    its file; until then nothing of the payload is touched. That view is lent: it ends when the
    checkpoint is closed. Of a part along an inner axis the bytes are `rows` that lie apart, from
    the place's or the memory's start on; `rows` is None for all others.

    Unlike a `BoundTensor` it has a `dtype` that is a str, and no `numpy()`, `torch()` or DLPack: it
    may be of any dtype of the format. `iter_torch_weights` gives torch tensors.

    Example: `RawTensor("F32", (2,), bytes(8))`.
    """

    __slots__ = ("_held", "dtype", "nbytes", "rows", "shape")

    def __init__(
        self,
        dtype: str,
        shape: Sequence[int],
        data: Buffer | Place,
        *,
        rows: Rows | None = None,
    ) -> None:
        """`data` is anything with a C-contiguous buffer, or a `Place`; else raises `SpanError`."""
        self.dtype = dtype
        self.shape = tuple(shape)
        self.rows = rows
        self._held = data if isinstance(data, Place) else _plain(data)
        if rows is not None:
            self.nbytes = rows.count * rows.nbytes
        elif isinstance(self._held, Place):
            self.nbytes = self._held.end - self._held.begin
        else:
            self.nbytes = self._held.nbytes

    @property
    def place(self) -> Place | None:
        """The file and range that hold the bytes; None for a tensor made from memory."""
        return self._held if isinstance(self._held, Place) else None

    @property
    def extent(self) -> memoryview:
        """The memory from the first byte on, with what lies between `rows`; else as `data`."""
        held = self._held
        return held.file.view(held.begin, held.end) if isinstance(held, Place) else held

    @property
    def data(self) -> memoryview:
        """The tensor's bytes, read-only; mapped on first use when they lie in a file.

        Of `rows` that lie apart it is a copy, made at each use.
        """
        if self.rows is None:
            return self.extent
        extent, rows = self.extent, self.rows
        starts = range(0, rows.count * rows.stride, rows.stride)
        return memoryview(b"".join(extent[at : at + rows.nbytes] for at in starts))

    def part(self, axis: int, begin: int, end: int) -> RawTensor:
        """The indices [begin, end) of one axis; no byte is read or moved.

        For a whole tensor of a dtype that fills bytes. Raises `ArgumentError` for a range that is
        not within the shape.
        """
        bits = DTYPE_BITS.get(self.dtype, 0)
        if (
            self.rows is not None
            or bits < 8
            or bits % 8
            or not 0 <= axis < len(self.shape)
            or not 0 <= begin < end <= self.shape[axis]
        ):
            raise ArgumentError(
                ErrorCode.ARGUMENT,
                "the tensor has no such part",
                expected="an axis of a whole tensor of whole bytes, and a range within it",
                got=f"[{begin}, {end}) of axis {axis} of {self!r}",
                hint="cut a tensor once, within its shape",
            )
        unit = math.prod(self.shape[axis + 1 :]) * bits // 8
        count, stride = math.prod(self.shape[:axis]), self.shape[axis] * unit
        row = (end - begin) * unit
        first = begin * unit
        last = first + (count - 1) * stride + row if count else first
        rows = None if count <= 1 or row == stride else Rows(count, row, stride)
        held = self._held
        if isinstance(held, Place):
            data: Place | memoryview = Place(held.file, held.begin + first, held.begin + last)
        else:
            data = held[first:last]
        shape = (*self.shape[:axis], end - begin, *self.shape[axis + 1 :])
        return RawTensor(self.dtype, shape, data, rows=rows)

    def __repr__(self) -> str:
        dtype = shown(repr(self.dtype))
        return f"RawTensor({dtype}, {shown(self.shape)}, {self.nbytes} bytes)"


def files_of(tensors: Iterable[RawTensor]) -> tuple[PayloadFile, ...]:
    """The files that hold the tensors, each once, in the order of first use."""
    places = [tensor.place for tensor in tensors]
    return tuple({id(place.file): place.file for place in places if place is not None}.values())


def _plain(data: Buffer) -> memoryview:
    """The bytes of a C-contiguous buffer; raises `SpanError` for anything else."""
    try:
        return memoryview(data).toreadonly().cast("B")
    except (TypeError, ValueError) as error:
        raise SpanError(
            ErrorCode.SOURCE_BUFFER,
            "a tensor's data is no plain buffer",
            expected="bytes, or anything with a C-contiguous buffer",
            got=f"{type(data).__name__} ({error})",
            hint="hand in a contiguous copy, viewed as bytes",
        ) from None


class KdaTensorSource(Protocol):
    """One decoder layer's tensors under layer-relative names such as `self_attn.A_log`.

    What `get` gives is lent for as long as the source's owner says; a bind with `copy=True` needs
    it until it returns. With an attribute `index` a bind compares that with its `layer_idx`.
    """

    def get(self, name: str) -> RawTensor | None:
        """The tensor `name`, or None when the layer has none of that name."""
        ...

    def names(self) -> list[str]:
        """Every layer-relative name of the layer, attention or not, each once."""
        ...
