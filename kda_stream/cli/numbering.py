"""Whether the layers' numbers and kinds are those that the config counts and lists."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ..checkpoint.checkpoint import Checkpoint
from ..errors import CheckpointError, ErrorCode, KdaStreamError
from ..kda.claims import layer_disagreements, mtp_layer_count, short_list
from ..kda.config import hidden_layer_count
from .output import plural
from .survey import LayerFacts


def numbering_problems(
    checkpoint: Checkpoint, layers: Sequence[LayerFacts]
) -> Iterator[KdaStreamError]:
    """An error for missing layers, stray ones, a gap, and each list of the config that differs."""
    config, path = checkpoint.config, checkpoint.config_path
    count = None if config is None else hidden_layer_count(config, path)
    try:
        checkpoint.require_every_layer()
    except CheckpointError as error:
        yield error
    numbers = {int(layer.index) for layer in layers}
    if config is None or count is None:
        yield from _gap(checkpoint, numbers)
        return
    yield from _strays(checkpoint, numbers, count, mtp_layer_count(config))
    kinds = {int(x.index): x.is_kda or x.is_broken_kda for x in layers if x.index < count}
    yield from layer_disagreements(config, count, kinds, path)


def _strays(
    checkpoint: Checkpoint, numbers: set[int], decoder: int, mtp: int | None
) -> Iterator[CheckpointError]:
    """MTP layers stand right behind the decoder's own, as many as the config counts, if it does."""
    end = next(number for number in itertools.count(decoder) if number not in numbers)
    if mtp is not None:
        end = min(end, decoder + mtp)
    stray = [number for number in numbers if number >= end]
    if stray:
        behind = "MTP layers" if mtp is None else plural(mtp, "MTP layer")
        yield CheckpointError(
            ErrorCode.LAYERS_STRAY,
            "layers lie behind all that the config counts",
            path=checkpoint.path,
            expected=f"{plural(decoder, 'decoder layer')} and {behind} right behind",
            got=f"layers {short_list(stray)} besides",
            hint="they are of another checkpoint, or the config.json is: they are not loaded",
        )


def _gap(checkpoint: Checkpoint, numbers: set[int]) -> Iterator[CheckpointError]:
    """With no count to compare with, only what is missing between two layers can be told."""
    last = max(numbers)
    if last + 1 > len(numbers):
        first = next(number for number in range(last) if number not in numbers)
        yield CheckpointError(
            ErrorCode.LAYERS_GAP,
            "the numbers of the layers have a gap",
            path=checkpoint.path,
            expected=f"every number up to {last}",
            got=f"{last + 1 - len(numbers)} missing, {first} the first of them",
            hint="the download is incomplete, or a layer of another checkpoint lies in the files",
        )
