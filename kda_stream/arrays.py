"""Memory as numpy arrays, torch tensors and DLPack, without a copy.

numpy, ml_dtypes and torch are imported when they are first asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from .dtypes import DTYPE_BITS
from .errors import ArgumentError, ErrorCode, NotInstalledError

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

_NUMPY: Final = MappingProxyType(
    {
        "BOOL": "bool",
        **{
            f"{kind}{bits}": f"{kind.lower()}{bits // 8}"
            for kind in "UI"
            for bits in (8, 16, 32, 64)
        },
        "F16": "f2",
        "F32": "f4",
        "F64": "f8",
        "C64": "c8",
    }
)
_ML_DTYPES: Final = MappingProxyType(
    {
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }
)
_TORCH: Final = MappingProxyType(
    {
        "BOOL": "bool",
        **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
        **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
        "F16": "float16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
        **_ML_DTYPES,
        "F4": "float4_e2m1fn_x2",
    }
)
_TWO_IN_A_BYTE: Final = "F4"


def as_numpy(
    dtype: str, shape: Sequence[int], memory: memoryview, *, name: str | None = None
) -> numpy.ndarray[Any, Any]:
    """The bytes as a read-only numpy array that keeps the memory in use.

    BF16 and the F8 dtypes are those of ml_dtypes; raises `NotInstalledError` where that is missing.
    Raises `ArgumentError` for dtypes narrower than a byte, and for a byte count that is not the
    shape's. `name` is for errors.
    """
    import numpy as np

    _require_bytes(dtype, shape, memory, name)
    flat = np.frombuffer(memory.toreadonly(), np.uint8) if memory.nbytes else _nothing()
    return flat.view(_numpy_dtype(dtype, name)).reshape(tuple(shape))


def as_torch(
    dtype: str, shape: Sequence[int], memory: memoryview, *, name: str | None = None
) -> Tensor:
    """The bytes as a torch tensor that keeps the memory in use.

    torch has no read-only tensors: what is written into this one is written to the memory, also
    where that is a read-only view. F4 has two values in each of torch's elements, so that the last
    extent is half of that in `shape`. Raises `NotInstalledError` without torch, `ArgumentError` for
    dtypes that it does not have, for a byte count that is not the shape's, and for an address that
    no element can lie at. `name` is for errors.
    """
    torch = _torch(dtype, "as a torch tensor", name)
    _require_bytes(dtype, shape, memory, name)
    found = getattr(torch, _TORCH.get(dtype, ""), None)
    extents = _halved(shape) if dtype == _TWO_IN_A_BYTE else tuple(shape)
    if found is None or extents is None:
        raise _not_held(dtype, f"torch {torch.__version__}", name)
    if not memory.nbytes:
        empty: Tensor = torch.empty(extents, dtype=found)
        return empty
    flat: Tensor = torch.from_numpy(_writable(memory))
    _require_aligned(flat.data_ptr(), max(DTYPE_BITS[dtype] // 8, 1), name)
    return flat.view(found).view(extents)


def as_dlpack(
    dtype: str, shape: Sequence[int], memory: memoryview, options: dict[str, Any], *, name: str
) -> Any:
    """A DLPack capsule over the bytes, with the options of `__dlpack__`; writable as `as_torch`.

    Made by numpy for the dtypes that it has, else by torch. Raises as these do.
    """
    if dtype not in _NUMPY:
        _torch(dtype, "by DLPack", name)
        return as_torch(dtype, shape, memory, name=name).__dlpack__(**options)
    _require_bytes(dtype, shape, memory, name)
    flat = _writable(memory) if memory.nbytes else _nothing()
    _require_aligned(flat.ctypes.data, DTYPE_BITS[dtype] // 8, name)
    return flat.view(_numpy_dtype(dtype, name)).reshape(tuple(shape)).__dlpack__(**options)


class _Held:
    """Memory as numpy's array interface; it keeps the array that it was taken from."""

    def __init__(self, array: numpy.ndarray[Any, Any]) -> None:
        self._array = array
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": array.shape,
            "data": (address, False),
        }


def _writable(memory: memoryview) -> numpy.ndarray[Any, Any]:
    """The bytes as a writable array over memory that is lent read-only, which it keeps in use."""
    import numpy as np

    return np.asarray(_Held(np.frombuffer(memory, np.uint8)))


def _nothing() -> numpy.ndarray[Any, Any]:
    import numpy as np

    return np.frombuffer(b"", np.uint8)


def _torch(dtype: str, how: str, name: str | None) -> Any:
    try:
        import torch
    except ImportError as error:
        raise _not_installed(f"{dtype} {how} needs torch", error, "torch", name) from None
    return torch


def _numpy_dtype(dtype: str, name: str | None) -> numpy.dtype[Any]:
    import numpy as np

    if dtype in _NUMPY:
        return np.dtype(_NUMPY[dtype])
    if dtype not in _ML_DTYPES:
        raise _not_held(dtype, "numpy", name)
    try:
        import ml_dtypes
    except ImportError as error:
        what = f"{dtype} as a numpy array needs ml_dtypes"
        raise _not_installed(what, error, "ml_dtypes", name) from None
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[dtype]))
    return found


def _halved(shape: Sequence[int]) -> tuple[int, ...] | None:
    """The shape in elements of two values; None when the last extent is odd, or there is none."""
    return (*shape[:-1], shape[-1] // 2) if shape and shape[-1] % 2 == 0 else None


def _require_bytes(dtype: str, shape: Sequence[int], memory: memoryview, name: str | None) -> None:
    bits = DTYPE_BITS.get(dtype, 0)
    if bits < 8 and dtype != _TWO_IN_A_BYTE:
        raise _not_held(dtype, "an array", name)
    if 8 * memory.nbytes != math.prod(shape) * bits:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "the memory is not of the shape's size",
            tensor=name,
            expected=f"{math.prod(shape) * bits // 8} bytes",
            got=f"{memory.nbytes} bytes",
            hint="hand in the tensor's own data",
        )


def _require_aligned(address: int, width: int, name: str | None) -> None:
    if address % width:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "the tensor lies at an address where no element may begin",
            tensor=name,
            expected=f"a multiple of {width}",
            got=hex(address),
            hint="its file has it at such an offset: bind it with copy=True",
        )


def _not_held(dtype: str, where: str, name: str | None) -> ArgumentError:
    return ArgumentError(
        ErrorCode.ARGUMENT,
        f"there is no {dtype} in {where}",
        tensor=name,
        got=dtype,
        hint="view its bytes: data",
    )


def _not_installed(
    what: str, error: ImportError, package: str, name: str | None
) -> NotInstalledError:
    return NotInstalledError(
        ErrorCode.NOT_INSTALLED,
        what,
        tensor=name,
        got=str(error),
        hint=f"pip install {package}; or view its bytes: data",
    )
