"""The dtype codes of the safetensors format and their widths; the two that a KDA block may hold."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import Final

DTYPE_BITS: Final = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)
"""Bits of one element for each dtype code; source: the `Dtype` enum of safetensors 0.8."""


class KdaDtype(str, Enum):
    """The dtypes that a KDA block's tensors have in GLM-5.3-Flash; the values are format codes."""

    BF16 = "BF16"
    F32 = "F32"

    def __str__(self) -> str:
        return self.value
