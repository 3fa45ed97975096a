"""Which kind of attention block a layer has, from its tensor names alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

from .tensors import DSA_MARKERS, KDA_SIGNS, KDA_TENSORS


class AttnBlockKind(str, Enum):
    """The kind of a layer's attention block."""

    KDA = "KDA"
    DSA = "DSA"
    UNKNOWN = "UNKNOWN"

    def __str__(self) -> str:
        return self.value


def classify_attn_block(names: Iterable[str]) -> AttnBlockKind:
    """The kind of the block with these layer-relative names.

    DSA when every name of `DSA_MARKERS` is present; else KDA when every name of `KDA_TENSORS` is;
    else UNKNOWN. Further names do not matter here: `bind_kda_weights` refuses them.
    """
    present = set(names)
    if present.issuperset(DSA_MARKERS):
        return AttnBlockKind.DSA
    if present.issuperset(spec.name for spec in KDA_TENSORS):
        return AttnBlockKind.KDA
    return AttnBlockKind.UNKNOWN


def is_broken_kda_block(names: Collection[str]) -> bool:
    """Whether an UNKNOWN block has names that only a KDA block has: a KDA layer with tensors lost.

    Such a layer must be refused, not skipped: its weights would stay whatever memory held.
    """
    kind = classify_attn_block(names)
    return kind is AttnBlockKind.UNKNOWN and not set(names).isdisjoint(KDA_SIGNS)
