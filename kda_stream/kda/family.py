"""`KdaFamily`: one way in which published checkpoints store a KDA block, as an exact table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn

from ..errors import ArgumentError, ErrorCode
from .config import KdaConfig
from .tensors import TensorSpec

CONV_FIELD: Final = "conv"
A_LOG_FIELD: Final = "a_log"
FIELDS: Final = (
    *("q_proj", "k_proj", "v_proj", CONV_FIELD, "f_a", "f_b", "f", "g_a", "g_b", "g"),
    *("b_proj", A_LOG_FIELD, "dt_bias", "o_norm", "o_proj"),
)
"""The fields that `KdaWeights` has, of all families."""

_SHORT: Final = {
    **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), CONV_FIELD),
    "f_a_proj": "f_a",
    "f_b_proj": "f_b",
    "f_proj": "f",
    "g_a_proj": "g_a",
    "g_b_proj": "g_b",
    "g_proj": "g",
    "A_log": A_LOG_FIELD,
    "dense": "o_proj",
}
_OPTIONAL: Final = ("f_a", "f_b", "f", "g_a", "g_b", "g")
# Attention of other kinds has tensors of these names too.
_SHARED: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "dense")


@dataclass(frozen=True, slots=True)
class KdaFamily:
    """A family of checkpoints: exactly these tensors, and what their bytes do not tell.

    `name` is what the constant is called, `about` the models; `block` what the layer-relative names
    of the block begin with. `prefixes` are what was seen before a layer's number in the models'
    files: they are told in the reference, and `write_replica` names tensors by the first; layers
    are found under any prefix. `tensors` is the table. `decay_is_bounded`: whether the model
    computes its decay with a lower bound. `index_base` is 0 or 1: what the config's lists of layers
    count from. `unverified` says which of these are not verified of a published file, and from
    where they are. Raises `ArgumentError` for a table that is that of no KDA block.
    """

    name: str
    about: str
    tensors: tuple[TensorSpec, ...]
    prefixes: tuple[str, ...]
    decay_is_bounded: bool
    index_base: int
    block: str = "self_attn."
    unverified: tuple[str, ...] = ()
    fields: Mapping[str, tuple[TensorSpec, ...]] = field(init=False, repr=False, compare=False)
    names: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.index_base not in (0, 1):
            self._refuse(self.name, "an index_base of 0 or 1")
        prefixes: object = self.prefixes
        if not isinstance(prefixes, tuple) or not all(p.endswith(".") for p in self.prefixes):
            self._refuse(self.name, 'prefixes such as ("model.layers.",), the last dot too')
        found: dict[str, list[TensorSpec]] = {name: [] for name in FIELDS}
        for spec in self.tensors:
            name = field_name(self.leaf(spec))
            if name not in found or (found[name] and name != CONV_FIELD):
                self._refuse(
                    spec.name, "a field of KdaWeights for each tensor, conv alone for three"
                )
            found[name].append(spec)
        fields = {name: tuple(specs) for name, specs in found.items() if specs}
        lost = [name for name in FIELDS if name not in fields and name not in _OPTIONAL]
        if lost or len(found[CONV_FIELD]) != 3:
            self._refuse(self.name, f"a tensor for each of {', '.join(lost or [CONV_FIELD])}")
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "names", frozenset(spec.name for spec in self.tensors))

    def _refuse(self, tensor: str, expected: str) -> NoReturn:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "the table is that of no KDA block",
            tensor=tensor,
            expected=expected,
            hint=f"KdaWeights has {', '.join(FIELDS)}",
        )

    def __str__(self) -> str:
        return self.name

    def leaf(self, spec: TensorSpec) -> str:
        """The tensor's name within the block."""
        return spec.name.removeprefix(self.block)

    @property
    def lacking(self) -> tuple[str, ...]:
        """The fields of `KdaWeights` that are None for this family."""
        return tuple(name for name in FIELDS if name not in self.fields)

    @property
    def has_low_rank_gate(self) -> bool:
        """Whether the output gate is the product of `g_a` and `g_b`, else the one matrix `g`."""
        return "g_a" in self.fields

    @property
    def has_low_rank_decay(self) -> bool:
        """Whether the decay's projection is the product of `f_a` and `f_b`, else `f`."""
        return "f_a" in self.fields

    @property
    def signs(self) -> tuple[str, ...]:
        """The names that no other kind of attention uses."""
        shared = tuple(f"{self.block}{leaf}." for leaf in _SHARED)
        return tuple(spec.name for spec in self.tensors if not spec.name.startswith(shared))

    def handed_out_shape(self, name: str, config: KdaConfig) -> tuple[int, ...]:
        """The shape of a field of `KdaWeights`: `a_log` [heads], `conv` [conv_dim, conv_kernel].

        All others as they are stored. No byte is moved for it.
        """
        if name == CONV_FIELD:
            return (config.conv_dim, config.conv_kernel)
        if name == A_LOG_FIELD:
            return (config.heads,)
        return self.fields[name][0].expected_shape(config)


def field_name(leaf: str) -> str:
    """The field of `KdaWeights` that a tensor of that name within its block goes to."""
    bare = leaf.removesuffix(".weight")
    return _SHORT.get(bare, bare)
