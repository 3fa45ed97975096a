"""Which layers of a checkpoint are loaded, of which geometry, each judged before it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .checkpoint.checkpoint import Checkpoint
from .checkpoint.layer import LayerIndex
from .errors import BindError, CheckpointError, ConfigError, ErrorCode
from .kda.check import CheckedBlock, FamilyChoice, check_kda_block, joint_refusal
from .kda.classify import is_kda_block
from .kda.config import KdaConfig
from .kda.families import FAMILIES
from .kda.source import KdaTensorSource
from .kda.tensor_parallel import KdaShardedSource, KdaTpPlan
from .require import require_items


def source_of(checkpoint: Checkpoint, index: LayerIndex, plan: KdaTpPlan | None) -> KdaTensorSource:
    """The layer, or with a plan the part of it that is its rank's."""
    source = checkpoint.layer(index)
    return source if plan is None else KdaShardedSource(source, plan)


def checked_in_turn(
    config: KdaConfig,
    checkpoint: Checkpoint,
    layers: Iterable[LayerIndex],
    family: FamilyChoice,
    plan: KdaTpPlan | None,
) -> Iterator[CheckedBlock]:
    """Each layer's block, checked when it is asked for."""
    for index in layers:
        yield check_kda_block(config, index, source_of(checkpoint, index, plan), family)


def all_checked(
    config: KdaConfig,
    checkpoint: Checkpoint,
    layers: Sequence[LayerIndex],
    family: FamilyChoice,
    plan: KdaTpPlan | None,
) -> list[CheckedBlock]:
    """Every layer's block; raises one `BindError` with every problem of every layer."""
    blocks: list[CheckedBlock] = []
    refusals: list[BindError] = []
    for index in layers:
        try:
            source = source_of(checkpoint, index, plan)
            blocks.append(check_kda_block(config, index, source, family))
        except BindError as error:
            refusals.append(error)
    if refusals:
        raise joint_refusal(refusals, len(layers), checkpoint.path)
    return blocks


def kda_layers(checkpoint: Checkpoint, family: FamilyChoice = "auto") -> tuple[LayerIndex, ...]:
    """The layers of the decoder that have KDA tensors, in numeric order, MTP layers left out.

    Those of every known family, and of `family`, which may be the caller's own.
    A layer that has lost some of its KDA tensors is among them, so that it is refused rather than
    skipped. Raises `CheckpointError` when there is none.
    """
    families = FAMILIES if family == "auto" or family in FAMILIES else (*FAMILIES, family)
    chosen = tuple(
        index
        for index in checkpoint.layers()
        if not index.is_mtp and is_kda_block(checkpoint.layer(index).names(), families)
    )
    if not chosen:
        raise CheckpointError(
            ErrorCode.LAYERS_NONE,
            "no layer of the checkpoint is a KDA layer",
            path=checkpoint.path,
            expected="layers with self_attn.A_log and the other names of KDA_TENSORS",
            hint="`kda-stream inspect` shows what the layers are",
        )
    return chosen


def config_of(checkpoint: Checkpoint) -> KdaConfig:
    """The geometry from the config.json beside the shards; raises `ConfigError` without one."""
    if checkpoint.config_path is None:
        raise ConfigError(
            ErrorCode.CONFIG_MISSING,
            "there is no config.json beside the shards",
            path=checkpoint.directory,
            hint="fetch it, or pass config=KdaConfig(...)",
        )
    return KdaConfig.from_json(checkpoint.config_path)


def indices_of(checkpoint: Checkpoint, layers: Iterable[int]) -> tuple[LayerIndex, ...]:
    """The layers of these numbers; raises `NotFoundError` for one that the checkpoint lacks."""
    numbers = require_items("layers", layers, "layer numbers", "0")
    return tuple(checkpoint.layer(index).index for index in numbers)
