"""What a checkpoint's layers are, as `inspect` and `verify` tell it. Metadata only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.layer import LayerIndex, LayerSource
from ..errors import BindError
from ..kda.check import identify_family
from ..kda.classify import AttnBlockKind, classify_attn_block, is_broken_kda_block
from ..kda.config import KdaConfig
from ..kda.families import FAMILIES

MTP: Final = "MTP"
LABELS: Final = (*(kind.value for kind in AttnBlockKind), MTP)
MARKS: Final = {
    AttnBlockKind.KDA.value: "K",
    AttnBlockKind.DSA.value: "D",
    MTP: "M",
    AttnBlockKind.UNKNOWN.value: "?",
}
"""The letter that stands for each label in a strip of layers."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One layer: its kind, and for a KDA layer its KDA tensors, their bytes and their shard files.

    `kda_tensors` are full names. `family` is the name of the one that it is exactly a block of, at
    the geometry that it has; None for any other. `is_broken_kda`: an UNKNOWN one with names that
    only a KDA layer has.
    """

    index: LayerIndex
    kind: AttnBlockKind
    family: str | None
    is_broken_kda: bool
    kda_tensors: tuple[str, ...]
    kda_bytes: int
    kda_shards: tuple[str, ...]

    @property
    def label(self) -> str:
        """The kind; "MTP" for an MTP layer, whatever its attention."""
        return MTP if self.index.is_mtp else self.kind.value

    @property
    def is_kda(self) -> bool:
        """Whether it is a KDA layer of the decoder."""
        return self.label == AttnBlockKind.KDA

    @property
    def is_kda_block(self) -> bool:
        """Whether its attention is, or ought to be, a KDA block, wherever the layer stands."""
        return self.kind is AttnBlockKind.KDA or self.is_broken_kda

    def json(self) -> dict[str, Any]:
        """The layer as --json shows it."""
        return {
            "index": int(self.index),
            "kind": self.kind.value,
            "family": self.family,
            "is_mtp": self.index.is_mtp,
            "is_broken_kda": self.is_broken_kda,
            "kda_bytes": self.kda_bytes,
            "kda_shards": list(self.kda_shards),
        }


def survey_layers(checkpoint: Checkpoint) -> tuple[LayerFacts, ...]:
    """Every layer in numeric order; raises what `Checkpoint.layers` does."""
    return tuple(_facts(checkpoint, index) for index in checkpoint.layers())


def _facts(checkpoint: Checkpoint, index: LayerIndex) -> LayerFacts:
    source = checkpoint.layer(index)
    names = source.names()
    kind = classify_attn_block(names, FAMILIES)
    if kind is not AttnBlockKind.KDA:
        return LayerFacts(index, kind, None, is_broken_kda_block(names), (), 0, ())
    full = kda_tensors(source)
    return LayerFacts(
        index,
        kind,
        _family_name(source),
        False,
        full,
        sum(checkpoint.info(name).nbytes for name in full),
        tuple(sorted({checkpoint.shard_of(name).file_name for name in full})),
    )


def kda_tensors(source: LayerSource) -> tuple[str, ...]:
    """The full names of the layer's tensors that a KDA block of some family has."""
    known = {name for family in FAMILIES for name in family.names}
    return tuple(source.prefix + name for name in source.names() if name in known)


def _family_name(source: LayerSource) -> str | None:
    try:
        return identify_family(source).name
    except BindError:
        return None


def count_kinds(layers: Iterable[LayerFacts]) -> dict[str, int]:
    """Label -> number of layers, for every label."""
    counts = Counter(layer.label for layer in layers)
    return {label: counts[label] for label in LABELS}


def kinds_text(counts: dict[str, int]) -> str:
    """`34 KDA, 11 DSA, 1 MTP`: KDA always, the others where there are any."""
    return ", ".join(
        f"{counts[label]} {'unknown' if label == AttnBlockKind.UNKNOWN else label}"
        for label in (AttnBlockKind.KDA.value, AttnBlockKind.DSA.value, MTP, AttnBlockKind.UNKNOWN)
        if counts[label] or label == AttnBlockKind.KDA
    )


def geometry_text(config: KdaConfig) -> str:
    """A geometry in words."""
    return (
        f"hidden {config.hidden}, {config.heads} heads of {config.head_dim}, "
        f"conv kernel {config.conv_kernel}"
    )


def geometry_json(config: KdaConfig | None) -> dict[str, int] | None:
    """A geometry as --json shows it."""
    if config is None:
        return None
    return {
        "hidden": config.hidden,
        "heads": config.heads,
        "head_dim": config.head_dim,
        "conv_kernel": config.conv_kernel,
    }
