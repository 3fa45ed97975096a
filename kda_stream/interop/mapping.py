"""`MappingSource`: tensors that somebody holds already, as a source for the binder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from ..errors import ArgumentError, ErrorCode, listed
from ..kda.source import RawTensor
from ..require import require_kind

_CODES: Final = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


class MappingSource:
    """Tensors by name, as one layer's `KdaTensorSource`: numpy's, torch's, or `RawTensor`s.

    `tensors` may hold more than the layer, such as a whole state_dict: `prefix` is what stands
    before the layer-relative names, and names without it are left out. Nothing is copied and the
    memory stays the caller's; what is written to it later is seen. BF16 of numpy is ml_dtypes'.
    Raises `ArgumentError` when no name begins with `prefix`, and for what is no mapping of names.

    `get` raises `ArgumentError` for what is no plain memory of this machine: tensors on another
    device, without data, sparse, quantised, or not contiguous in C order.

    Example:
        source = MappingSource(model_tensors, prefix="model.language_model.layers.0.")
        weights, report = bind_kda_weights(config, 0, source, copy=False)
    """

    def __init__(self, tensors: Mapping[str, Any], *, prefix: str = "") -> None:
        require_kind("tensors", tensors, Mapping, "a mapping of names to tensors", "pass a dict")
        require_kind("prefix", prefix, str, "a text", "pass all that stands before self_attn.")
        for name in tensors:
            require_kind("a name of tensors", name, str, "a text", "name each as the layer does")
        self._tensors = {
            name[len(prefix) :]: tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        if tensors and not self._tensors:
            raise ArgumentError(
                ErrorCode.ARGUMENT,
                "no tensor's name begins with the prefix",
                expected=f"names such as {prefix}self_attn.A_log",
                got=listed(list(tensors)),
                hint="pass all that stands before self_attn., the last dot too",
            )

    def names(self) -> list[str]:
        """Every layer-relative name."""
        return list(self._tensors)

    def get(self, name: str) -> RawTensor | None:
        """The tensor `name` over the caller's memory, or None when there is none."""
        tensor = self._tensors.get(name)
        return None if tensor is None else raw_tensor(tensor, name)

    def __repr__(self) -> str:
        return f"MappingSource({len(self._tensors)} tensors)"


def raw_tensor(tensor: Any, name: str) -> RawTensor:
    """A numpy array or torch tensor as a `RawTensor` over its memory; raises as `MappingSource`."""
    if isinstance(tensor, RawTensor):
        return tensor
    code = _CODES.get(str(getattr(tensor, "dtype", None)).removeprefix("torch."))
    if code is None:
        got = f"{type(tensor).__name__} of dtype {getattr(tensor, 'dtype', None)}"
        raise _refused(name, "an array or tensor of a dtype of the format", got, "convert it")
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(tensor, torch.Tensor)
    flat = _torch_bytes(tensor, name) if is_torch else _numpy_bytes(tensor, name)
    return RawTensor(code, tuple(tensor.shape), flat)


def _torch_bytes(tensor: Any, name: str) -> Any:
    import torch

    if tensor.layout is not torch.strided:
        raise _refused(name, "a dense tensor", str(tensor.layout), "to_dense()")
    if tensor.device.type != "cpu":
        raise _refused(name, "a tensor on the CPU", f"one on {tensor.device}", "cpu()")
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if tensor.numel() and end > held:
        raise _refused(name, f"a storage of {end} bytes", f"one of {held}: it was freed", "")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise _refused(name, "contiguous", f"strides {tensor.stride()}", "contiguous()")
    try:
        return tensor.detach().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError) as error:  # a subclass without memory of its own
        raise _refused(name, "a plain tensor", f"{type(tensor).__name__} ({error})", "") from None


def _numpy_bytes(tensor: Any, name: str) -> Any:
    import numpy as np

    array = np.asarray(tensor)
    if not array.flags.c_contiguous:
        raise _refused(name, "C-contiguous", f"strides {array.strides}", "ascontiguousarray()")
    return array.reshape(-1).view(np.uint8)


def _refused(name: str, expected: str, got: str, step: str) -> ArgumentError:
    return ArgumentError(
        ErrorCode.ARGUMENT,
        "the tensor is no plain memory of this machine",
        tensor=name,
        expected=expected,
        got=got,
        hint=f"pass what its {step} gives" if step.endswith(")") else "copy it into a plain tensor",
    )
