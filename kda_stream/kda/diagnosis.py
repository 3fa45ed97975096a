"""What a refused layer looks like: the ways of storing a KDA block that are known and not taken."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from ..errors import shown
from .family import KdaFamily
from .source import RawTensor

Tensors = Mapping[str, RawTensor | None]


def what_it_looks_like(
    tensors: Tensors, fitting: Collection[KdaFamily], wrong_dtypes: Collection[str]
) -> str | None:
    """What the block is when it is a known thing, and what to do; None when it is not.

    `fitting` are the families, other than the one asked for, that it is exactly a block of;
    `wrong_dtypes` the names of tensors whose dtype the family asked for does not take.
    """
    for family in fitting:
        return f"{_said_of_conv(tensors)}this is {family}, {family.about}: pass family={family}"
    for looks, text in _KNOWN:
        if looks(tensors):
            return text
    wrong = {name: tensor for name, tensor in tensors.items() if name in wrong_dtypes}
    return _CAST if _has_a_log_in_bf16(wrong) else None


def prefix_left_on(names: Collection[str], signs: Sequence[str]) -> str | None:
    """Where names end as those of a KDA block do: what stands before, and how to take it off."""
    ends = tuple(f".{sign}" for sign in signs)
    name = next((name for name in names if name.endswith(ends)), None)
    if name is None:
        return None
    before = max(name.removesuffix(sign) for sign in signs if name.endswith(f".{sign}"))
    return (
        f"the names are not those within a layer: {shown(before)} stands before them, which "
        "MappingSource(tensors, prefix=...) takes off"
    )


def _said_of_conv(tensors: Tensors) -> str:
    dtypes = {t.dtype for name, t in tensors.items() if t is not None and _is_conv(name)}
    return "three conv tensors are F32: " if dtypes == {"F32"} else ""


def _is_conv(name: str) -> bool:
    return name.endswith(("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"))


def _has(*ends: str) -> Callable[[Tensors], bool]:
    """Whether there are tensors with each of these ends."""
    return lambda tensors: all(any(name.endswith(end) for name in tensors) for end in ends)


def _is_from_older_transformers(tensors: Tensors) -> bool:
    return any(".forget_gate." in name for name in tensors) or _has(".conv1d.weight")(tensors)


def _is_mlx(tensors: Tensors) -> bool:
    transposed = [
        tensor.shape[1] > 1 and tensor.shape[2] == 1
        for name, tensor in tensors.items()
        if tensor is not None and _is_conv(name) and len(tensor.shape) == 3
    ]
    return _has(".scales")(tensors) or (bool(transposed) and all(transposed))


def _is_packed(tensors: Tensors) -> bool:
    ends = (".weight_packed", ".qweight")
    projections = [t for name, t in tensors.items() if t and name.endswith("q_proj.weight")]
    return any(name.endswith(ends) for name in tensors) or any(
        tensor.dtype in ("U8", "I8", "I32", "F4") for tensor in projections
    )


def _has_scales(tensors: Tensors) -> bool:
    return any(name.endswith((".weight_scale", ".weight_scale_inv")) for name in tensors)


def _has_mixed_gates(tensors: Tensors) -> bool:
    leaves = {name.rpartition("_proj")[0].rpartition(".")[2] for name in tensors}
    return any(
        rank in leaves and not leaves.isdisjoint({f"{rank}_a", f"{rank}_b"}) for rank in "fg"
    )


def _has_a_log_in_bf16(tensors: Tensors) -> bool:
    return any(t.dtype == "BF16" for name, t in tensors.items() if t and name.endswith(".A_log"))


_KNOWN: Final[tuple[tuple[Callable[[Tensors], bool], str], ...]] = (
    (
        _is_from_older_transformers,
        (
            "it looks like a save by an older release of the transformers library, which joins "
            "conv1d and keeps the decay in forget_gate: save the model again with a current one; "
            "of a model in memory, take kda_stream.interop.transformers.published_source"
        ),
    ),
    (
        _is_mlx,
        (
            "it looks like an MLX build, which stores conv as [Q, K, 1] and adds scales and "
            "biases: load the checkpoint that it was made of"
        ),
    ),
    (
        _is_packed,
        (
            "it looks like packed quantised attention (weight_packed, or integers for weights), "
            "which no family here holds: load a build that leaves the KDA layers as they are"
        ),
    ),
    (
        _has_scales,
        (
            "it looks like quantised attention (weight_scale or weight_scale_inv beside a "
            "projection), which no family here holds: load a build that leaves the KDA layers as "
            "they are"
        ),
    ),
    (
        _has_mixed_gates,
        (
            "it mixes two families: half of a low-rank gate beside a full-rank one; two "
            "checkpoints were written into one"
        ),
    ),
)
_CAST: Final = (
    "A_log is BF16: the checkpoint was cast to one dtype, and what was cut off is lost; load the "
    "one that it was made of"
)
