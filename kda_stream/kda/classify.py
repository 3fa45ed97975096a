"""Which kind of attention block a layer has, from its tensor names alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Final

from .families import FAMILIES, GLM5_NEXT
from .family import KdaFamily
from .tensors import DSA_MARKERS

_DEFAULT: Final = (GLM5_NEXT,)


class AttnBlockKind(str, Enum):
    """The kind of a layer's attention block."""

    KDA = "KDA"
    DSA = "DSA"
    UNKNOWN = "UNKNOWN"

    def __str__(self) -> str:
        return self.value


def classify_attn_block(
    names: Iterable[str], families: Iterable[KdaFamily] = _DEFAULT
) -> AttnBlockKind:
    """The kind of the block with these layer-relative names.

    DSA when every name of `DSA_MARKERS` is present; else KDA when every name of one of the
    `families` is, by default those of `KDA_TENSORS`; else UNKNOWN. Further names do not matter
    here, nor do dtypes: a block that has every name of one family and some of another is KDA, so
    that it is not passed over, and `bind_kda_weights` refuses it.
    """
    present = set(names)
    if present.issuperset(DSA_MARKERS):
        return AttnBlockKind.DSA
    if any(present.issuperset(family.names) for family in families):
        return AttnBlockKind.KDA
    return AttnBlockKind.UNKNOWN


def is_broken_kda_block(names: Collection[str], families: Collection[KdaFamily] = FAMILIES) -> bool:
    """Whether a block of none of the `families` has names that only a KDA block has.

    That is a KDA layer which lost tensors, or is stored in a way that is not known. It must be
    refused, not skipped: its weights would stay whatever memory held.
    """
    if classify_attn_block(names, families) is not AttnBlockKind.UNKNOWN:
        return False
    present = set(names)
    return any(not present.isdisjoint(family.signs) for family in families)


def is_kda_block(names: Collection[str], families: Collection[KdaFamily] = FAMILIES) -> bool:
    """Whether the block is, or ought to be, a KDA block of one of the `families`."""
    is_whole = classify_attn_block(names, families) is AttnBlockKind.KDA
    return is_whole or is_broken_kda_block(names, families)
