"""Whether the layers' numbers and kinds are those that the config counts and lists."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

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
    kinds = {int(layer.index): layer.is_kda_block for layer in layers}
    if config is None or count is None:
        yield from _gap(checkpoint, kinds)
        return
    yield from _strays(checkpoint, kinds, count, mtp_layer_count(config))
    decoder = {number: is_kda for number, is_kda in kinds.items() if number < count}
    yield from layer_disagreements(config, count, decoder, path)


def _strays(
    checkpoint: Checkpoint, kinds: Mapping[int, bool], decoder: int, mtp: int | None
) -> Iterator[CheckpointError]:
    """MTP layers stand right behind the decoder's own, as many as the config counts.

    Where it counts none, those that are no KDA blocks: none was seen whose MTP layer is one.
    """
    if mtp is None:
        end = next(number for number in itertools.count(decoder) if kinds.get(number, True))
        behind = "MTP layers, no KDA layers,"
    else:
        end = next(n for n in itertools.count(decoder) if n not in kinds or n == decoder + mtp)
        behind = plural(mtp, "MTP layer")
    stray = [number for number in kinds if number >= end]
    if stray:
        yield CheckpointError(
            ErrorCode.LAYERS_STRAY,
            "layers lie behind all that the config counts",
            path=checkpoint.path,
            expected=f"{plural(decoder, 'decoder layer')} and {behind} right behind",
            got=f"layers {short_list(stray)} besides",
            hint="they are of another checkpoint, or the config.json is: they are not loaded",
        )


def _gap(checkpoint: Checkpoint, numbers: Collection[int]) -> Iterator[CheckpointError]:
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
