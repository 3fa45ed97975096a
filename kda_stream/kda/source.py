"""`RawTensor`, and `KdaTensorSource`: all that a binder asks of whoever holds a layer's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from typing import TYPE_CHECKING, Protocol

from ..errors import ErrorCode, SpanError, shown

if TYPE_CHECKING:
    from typing_extensions import Buffer


class PayloadFile(Protocol):
    """A file that holds payload, as a `Place` needs it; `checkpoint.shard.Shard` is one."""

    @property
    def path(self) -> str:
        """Where the file is, for errors and reports."""

    def view(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) of the file, mapped: read-only and without a copy."""

    def unmap(self, begin: int, end: int) -> None:
        """Take the mapped pages around [begin, end) out of the process, when they are in it."""

    def open(self, *, direct: bool = False) -> FileIO:
        """The unchanged file, open for reading (`direct`: O_DIRECT), which the caller closes."""

    def check_unchanged(self) -> None:
        """Raise `PayloadError` when the file at `path` is no longer the one that was opened."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes lie: [begin, end) of a file, counted from the file's start."""

    file: PayloadFile
    begin: int
    end: int


class RawTensor:
    """One tensor exactly as it is stored.

    `dtype` is the stored code ("BF16", "F8_E4M3", ...), `shape` a tuple of ints, `nbytes` the size
    in bytes, and `data` a read-only `memoryview` of the bytes. `place` says which file they lie in;
    it is None for a tensor that was made from memory. Reading `data` of a tensor with a place maps
    its file; until then nothing of the payload is touched. That view is lent: it ends when the
    checkpoint is closed.

    Example: `RawTensor("F32", (2,), bytes(8))`.
    """

    __slots__ = ("_held", "dtype", "nbytes", "shape")

    def __init__(self, dtype: str, shape: Sequence[int], data: Buffer | Place) -> None:
        """`data` is anything with a C-contiguous buffer, or a `Place`; else raises `SpanError`."""
        self.dtype = dtype
        self.shape = tuple(shape)
        if isinstance(data, Place):
            self._held: memoryview | Place = data
            self.nbytes = data.end - data.begin
            return
        try:
            self._held = memoryview(data).toreadonly().cast("B")
        except (TypeError, ValueError) as error:
            raise SpanError(
                ErrorCode.SOURCE_BUFFER,
                "a tensor's data is no plain buffer",
                expected="bytes, or anything with a C-contiguous buffer",
                got=f"{type(data).__name__} ({error})",
                hint="hand in a contiguous copy, viewed as bytes",
            ) from None
        self.nbytes = self._held.nbytes

    @property
    def place(self) -> Place | None:
        """The file and range that hold the bytes; None for a tensor made from memory."""
        return self._held if isinstance(self._held, Place) else None

    @property
    def data(self) -> memoryview:
        """The tensor's bytes, read-only; mapped on first use when they lie in a file."""
        held = self._held
        return held.file.view(held.begin, held.end) if isinstance(held, Place) else held

    def __repr__(self) -> str:
        dtype = shown(repr(self.dtype))
        return f"RawTensor({dtype}, {shown(self.shape)}, {self.nbytes} bytes)"


class KdaTensorSource(Protocol):
    """One decoder layer's tensors under layer-relative names such as `self_attn.A_log`."""

    def get(self, name: str) -> RawTensor | None:
        """The tensor `name`, or None when the layer has none of that name."""

    def names(self) -> list[str]:
        """Every layer-relative name of the layer, attention or not, each once."""
