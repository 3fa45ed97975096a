"""What the values of a KDA tensor must be: finite, not zeros alone, and zeros where they pad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from .dtypes import KdaDtype
from .errors import ErrorCode, PayloadValueError
from .kda.padding import bytes_not_zero, padding_error
from .staging.native import extension

WIDTHS: Final[Mapping[str, int]] = {KdaDtype.BF16.value: 2, KdaDtype.F32.value: 4}
"""Bytes a value, of each dtype code whose values can be looked at."""


class KdaValues:
    """The values of one tensor, looked at as its bytes come by.

    `dtype` is one of `WIDTHS`, `nbytes` the size of the tensor; the last `padding` of its values
    are padding.
    """

    def __init__(self, dtype: str, nbytes: int, padding: int) -> None:
        self._ffi, self._lib = extension()
        self._width = WIDTHS[dtype]
        self._padding = padding
        self._counted_bytes = nbytes - padding * self._width
        self._taken_bytes = 0
        self._padding_not_zero = 0
        self._seen = self._ffi.new("kda_seen *")

    def take(self, memory: memoryview) -> None:
        """Look at the next bytes, whole values."""
        counted = memory[: max(self._counted_bytes - self._taken_bytes, 0)]
        self._lib.kda_values_look(
            self._ffi.from_buffer(counted), counted.nbytes, self._width, self._seen
        )
        self._padding_not_zero += bytes_not_zero(memory[counted.nbytes :])
        self._taken_bytes += memory.nbytes

    def problems(self, tensor: str, path: str) -> Iterator[PayloadValueError]:
        """What is wrong with them, once all bytes have come by."""
        values = self._counted_bytes // self._width
        if self._seen.not_finite:
            yield _error(
                ErrorCode.PAYLOAD_NOT_FINITE,
                "the tensor holds NaN or infinity",
                tensor,
                path,
                expected="finite weights",
                got=f"{self._seen.not_finite} such values among {values}",
            )
        elif not self._seen.not_zero:
            yield _error(
                ErrorCode.PAYLOAD_ZEROS,
                "the tensor holds only zeros",
                tensor,
                path,
                expected="weights that are not all zero",
                got=f"{values} such values among {values}",
            )
        if self._padding_not_zero:
            yield padding_error(
                tensor,
                path,
                padding=self._padding,
                values=values,
                not_zero=self._padding_not_zero,
            )


def _error(
    code: ErrorCode, what: str, tensor: str, path: str, *, expected: str, got: str
) -> PayloadValueError:
    return PayloadValueError(
        code,
        what,
        path=path,
        tensor=tensor,
        expected=expected,
        got=got,
        hint="no model computes with it: the checkpoint was saved too early or is damaged",
    )
