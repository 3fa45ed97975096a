"""The fifteen tensors of a KDA block, and the names that mark a DSA block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ..dtypes import DTYPE_BITS, KdaDtype
from .config import KdaConfig

ATTENTION_PREFIX: Final = "self_attn."


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor of a KDA block must be.

    `name` is layer-relative; each of `dims` is a number or the name of a `KdaConfig` attribute.
    """

    name: str
    dtype: KdaDtype
    dims: tuple[int | str, ...]

    def expected_shape(self, config: KdaConfig) -> tuple[int, ...]:
        """The shape that the tensor must be stored in at this geometry."""
        return tuple(dim if isinstance(dim, int) else getattr(config, dim) for dim in self.dims)

    def expected_bytes(self, config: KdaConfig) -> int:
        """The bytes that the tensor must have at this geometry."""
        return math.prod(self.expected_shape(config)) * DTYPE_BITS[self.dtype] // 8


def _spec(leaf: str, dtype: KdaDtype, *dims: int | str) -> TensorSpec:
    return TensorSpec(ATTENTION_PREFIX + leaf, dtype, dims)


KDA_TENSORS: Final = (
    _spec("q_proj.weight", KdaDtype.BF16, "qkv_dim", "hidden"),
    _spec("k_proj.weight", KdaDtype.BF16, "qkv_dim", "hidden"),
    _spec("v_proj.weight", KdaDtype.BF16, "qkv_dim", "hidden"),
    _spec("q_conv1d.weight", KdaDtype.BF16, "qkv_dim", 1, "conv_kernel"),
    _spec("k_conv1d.weight", KdaDtype.BF16, "qkv_dim", 1, "conv_kernel"),
    _spec("v_conv1d.weight", KdaDtype.BF16, "qkv_dim", 1, "conv_kernel"),
    _spec("f_a_proj.weight", KdaDtype.BF16, "head_dim", "hidden"),
    _spec("f_b_proj.weight", KdaDtype.BF16, "qkv_dim", "head_dim"),
    _spec("g_a_proj.weight", KdaDtype.BF16, "head_dim", "hidden"),
    _spec("g_b_proj.weight", KdaDtype.BF16, "qkv_dim", "head_dim"),
    _spec("b_proj.weight", KdaDtype.BF16, "heads", "hidden"),
    _spec("A_log", KdaDtype.F32, "heads"),
    _spec("dt_bias", KdaDtype.F32, "qkv_dim"),
    _spec("o_norm.weight", KdaDtype.BF16, "head_dim"),
    _spec("o_proj.weight", KdaDtype.BF16, "hidden", "qkv_dim"),
)
"""The tensors of a KDA block as GLM-5.3-Flash stores them: exactly these names, dtypes, shapes."""

DSA_MARKERS: Final = (
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.indexer.wk.weight",
)
"""The names that make a block a DSA (DeepSeek sparse attention) block when all are present."""

KDA_SIGNS: Final = tuple(
    spec.name
    for spec in KDA_TENSORS
    if not spec.name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"))
)
"""The names of `KDA_TENSORS` that no other kind of attention uses."""
