"""The fifteen tensors of a KDA block, and the names that mark a DSA block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NoReturn

from ..dtypes import DTYPE_BITS, KdaDtype
from ..errors import ArgumentError, ErrorCode, in_words
from .config import KdaConfig

ATTENTION_PREFIX: Final = "self_attn."
_OF_HEADS: Final = ("heads", "qkv_dim")
_EXTENTS: Final = ("hidden", "heads", "head_dim", "conv_kernel", "qkv_dim", "conv_dim")
"""The attributes of `KdaConfig` that a dimension may be."""


@dataclass(frozen=True, slots=True)
class Padded:
    """A dimension that is stored longer than it counts: `dim` rounded up to a multiple.

    What is behind the `dim` values that count must be zeros.
    """

    dim: str
    multiple: int


Dim = int | str | Padded


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor of a KDA block must be.

    `name` is layer-relative; each of `dims` is a number, the name of a `KdaConfig` attribute, or a
    `Padded` one. `dtype` is the one it must have; where that is not verified of published files,
    `also` names others that are accepted, and `unverified` says what is not known, and from where
    the rest is. Raises `ArgumentError` for dims and dtypes of another kind.
    """

    name: str
    dtype: KdaDtype
    dims: tuple[Dim, ...]
    also: tuple[KdaDtype, ...] = ()
    unverified: str = ""

    def __post_init__(self) -> None:
        dims: object = self.dims
        dtypes: object = self.also
        if not isinstance(dtypes, tuple) or not all(map(_is_dtype, (self.dtype, *dtypes))):
            self._refuse("a KdaDtype, and others in a tuple", (self.dtype, dtypes))
        if not isinstance(dims, tuple) or not all(map(_is_dim, dims)):
            self._refuse(f"a tuple of counts, Padded, or {', '.join(_EXTENTS)}", dims)

    def _refuse(self, expected: str, got: object) -> NoReturn:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "no tensor is described so",
            tensor=in_words(self.name),
            expected=expected,
            got=in_words(got, repr),
            hint="write it as the entries of KDA_TENSORS are",
        )

    @property
    def dtypes(self) -> tuple[KdaDtype, ...]:
        """Every dtype that is accepted, the expected one first."""
        return (self.dtype, *self.also)

    def expected_shape(self, config: KdaConfig) -> tuple[int, ...]:
        """The shape that the tensor must be stored in at this geometry."""
        return tuple(extent(dim, config) for dim in self.dims)

    def expected_bytes(self, config: KdaConfig, dtype: KdaDtype | None = None) -> int:
        """The bytes that the tensor must have at this geometry, in `dtype` or the expected one."""
        bits = DTYPE_BITS[(dtype or self.dtype).value]
        return math.prod(self.expected_shape(config)) * bits // 8

    def most_bytes(self, config: KdaConfig) -> int:
        """The most bytes that the tensor can have at this geometry."""
        return max(self.expected_bytes(config, dtype) for dtype in self.dtypes)

    @property
    def heads_axis(self) -> int | None:
        """The axis along which the heads lie, one after the other; None where there is none."""
        axes = (axis for axis, dim in enumerate(self.dims) if counted_dim(dim) in _OF_HEADS)
        return next(axes, None)

    def tail(self, config: KdaConfig) -> int:
        """How many of its values are padding, at the end."""
        stored = math.prod(self.expected_shape(config))
        counted = (extent(counted_dim(dim), config) for dim in self.dims)
        return stored - math.prod(counted)


def _is_dtype(dtype: object) -> bool:
    return isinstance(dtype, KdaDtype)


def _is_dim(dim: object) -> bool:
    if isinstance(dim, Padded):
        return dim.dim in _EXTENTS and _is_count(dim.multiple)
    return _is_count(dim) or dim in _EXTENTS


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def counted_dim(dim: Dim) -> int | str:
    """The dimension without its padding."""
    return dim.dim if isinstance(dim, Padded) else dim


def extent(dim: Dim, config: KdaConfig) -> int:
    """How long the dimension is at this geometry, padding included."""
    if isinstance(dim, Padded):
        return -(-extent(dim.dim, config) // dim.multiple) * dim.multiple
    return dim if isinstance(dim, int) else int(getattr(config, dim))


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
