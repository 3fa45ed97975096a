"""The families of checkpoints that hold KDA layers. Another one is another table above `FAMILIES`.

What is marked `unverified` was not read from a published file; where it is from stands beside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..dtypes import KdaDtype
from .family import KdaFamily
from .tensors import KDA_TENSORS, Padded, TensorSpec

_BF16, _F32 = KdaDtype.BF16, KdaDtype.F32
_CONV: Final = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")

GLM5_NEXT: Final = KdaFamily(
    name="GLM5_NEXT",
    about="GLM-5.3-Flash as published, and its NVFP4 build",
    tensors=KDA_TENSORS,
    prefixes=("model.language_model.layers.",),
    decay_is_bounded=True,
    index_base=0,
)

GLM5_NEXT_F32_CONV: Final = replace(
    GLM5_NEXT,
    name="GLM5_NEXT_F32_CONV",
    about="builds of GLM-5.3-Flash with conv in F32, and what the transformers library saves",
    tensors=tuple(
        replace(spec, dtype=_F32) if spec.name.endswith(_CONV) else spec for spec in KDA_TENSORS
    ),
)

_NO_HEADER: Final = "no header of a published file was seen"

KIMI_LINEAR: Final = KdaFamily(
    name="KIMI_LINEAR",
    about="Kimi-Linear-48B-A3B, Base and Instruct",
    tensors=tuple(
        replace(spec, dims=(1, 1, "heads", 1), also=(_BF16,), unverified=f"dtype: {_NO_HEADER}")
        if spec.name.endswith("A_log")
        else replace(spec, also=(_BF16,), unverified=f"dtype: {_NO_HEADER}")
        if spec.name.endswith("dt_bias")
        else replace(spec, also=(_F32,), unverified=f"dtype: {_NO_HEADER}")
        if spec.name.endswith("o_norm.weight")
        else replace(spec, unverified="dtype: BF16 by what engines say of the published files")
        if spec.name.endswith(_CONV)
        else spec
        for spec in KDA_TENSORS
    ),
    prefixes=("model.layers.",),
    decay_is_bounded=False,
    index_base=1,
    unverified=("names and shapes: from the config and from what engines read, " + _NO_HEADER,),
)


def _k3(leaf: str, dtype: KdaDtype, *dims: int | str | Padded, **rest: object) -> TensorSpec:
    return TensorSpec(f"self_attn.{leaf}", dtype, dims, **rest)  # type: ignore[arg-type]


_NATIVE_F32: Final = "dtype and rank: by what engines say of the published files"
_SYMMETRY: Final = "by symmetry with q_proj"

KIMI_K3: Final = KdaFamily(
    name="KIMI_K3",
    about="Kimi-K3, and its dequantised export",
    tensors=(
        _k3("q_proj.weight", _BF16, "qkv_dim", "hidden"),
        _k3("k_proj.weight", _BF16, "qkv_dim", "hidden", unverified=_SYMMETRY),
        _k3("v_proj.weight", _BF16, "qkv_dim", "hidden", unverified=_SYMMETRY),
        *(_k3(leaf, _F32, "qkv_dim", 1, "conv_kernel", unverified=_NATIVE_F32) for leaf in _CONV),
        _k3("f_a_proj.weight", _BF16, "head_dim", "hidden"),
        _k3("f_b_proj.weight", _BF16, "qkv_dim", "head_dim"),
        _k3("g_proj.weight", _BF16, "qkv_dim", "hidden"),
        _k3("b_proj.weight", _BF16, "heads", "hidden", also=(_F32,), unverified="dtype"),
        _k3("A_log", _F32, Padded("heads", 128), unverified="the padding of other counts"),
        _k3("dt_bias", _F32, "qkv_dim"),
        _k3("o_norm.weight", _F32, "head_dim"),
        _k3("o_proj.weight", _BF16, "hidden", "qkv_dim"),
    ),
    prefixes=("language_model.model.layers.", "model.layers."),
    decay_is_bounded=True,
    index_base=1,
)


_SAID: Final = "dtype: not verified, names and shapes: by what engines read of Ling-3.0-tiny"


def _ling(leaf: str, dtype: KdaDtype, *dims: int | str) -> TensorSpec:
    other = _F32 if dtype is _BF16 else _BF16
    return TensorSpec(f"attention.{leaf}", dtype, dims, (other,), _SAID)


LING_3: Final = KdaFamily(
    name="LING_3",
    about="Ling-3.0, tiny and flash, as published",
    tensors=(
        _ling("q_proj.weight", _BF16, "qkv_dim", "hidden"),
        _ling("k_proj.weight", _BF16, "qkv_dim", "hidden"),
        _ling("v_proj.weight", _BF16, "qkv_dim", "hidden"),
        *(_ling(leaf, _BF16, "qkv_dim", 1, "conv_kernel") for leaf in _CONV),
        _ling("f_proj.weight", _BF16, "qkv_dim", "hidden"),
        _ling("g_proj.weight", _BF16, "qkv_dim", "hidden"),
        _ling("b_proj.weight", _BF16, "heads", "hidden"),
        _ling("A_log", _F32, "heads"),
        _ling("dt_bias", _F32, "qkv_dim"),
        _ling("o_norm.weight", _BF16, "head_dim"),
        _ling("o_proj.weight", _BF16, "hidden", "qkv_dim"),
    ),
    prefixes=("model.layers.",),
    decay_is_bounded=True,
    index_base=0,
    block="attention.",
    unverified=(_NO_HEADER, "decay, index base and prefix: by the transformers library"),
)

LING_3_DENSE: Final = replace(
    LING_3,
    name="LING_3_DENSE",
    about="Ling-3.0 as the transformers library saves it, which calls o_proj dense",
    tensors=tuple(
        replace(spec, name="attention.dense.weight", unverified="dtype: not verified")
        if spec.name == "attention.o_proj.weight"
        else spec
        for spec in LING_3.tensors
    ),
)

FAMILIES: Final = (
    GLM5_NEXT,
    GLM5_NEXT_F32_CONV,
    KIMI_LINEAR,
    KIMI_K3,
    LING_3,
    LING_3_DENSE,
)
"""Every family that is known, the default one first."""

BLOCKS: Final = tuple(dict.fromkeys(family.block for family in FAMILIES))
"""What the names of a KDA block begin with, in any family."""

KDA_SIGNS: Final = tuple(sorted({sign for family in FAMILIES for sign in family.signs}))
"""The names of KDA blocks that no other kind of attention uses, in any family."""
