"""Each rank streams its part of a checkpoint's KDA layers; then the ranks compare the whole.

    torchrun --nproc-per-node 2 examples/tp_load.py CHECKPOINT

Over gloo, on the CPU: where this example takes checksums, an engine copies to its device. A rank
that fails tells the others why, and all of them end with that reason; one that is killed is noticed
by torchrun, which ends the others.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from kda_stream import (
    Checkpoint,
    KdaConfig,
    KdaStreamError,
    KdaTpPlan,
    KdaWeights,
    bind_kda_weights,
    identify_family,
    open_checkpoint,
    stream_kda_layers,
)

WHOLE_ON_EVERY_RANK = ("f_a", "g_a", "o_norm")
Checksums = dict[str, list[str]]
T = TypeVar("T")


def main() -> None:
    """Run by torchrun, once on every rank."""
    parser = argparse.ArgumentParser(description="Stream a checkpoint's KDA layers in parallel.")
    parser.add_argument("checkpoint")
    path = parser.parse_args().checkpoint
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        load(path)
    finally:
        dist.destroy_process_group()


def load(path: str) -> None:
    """Stream this rank's part of each layer, in step with the other ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with ExitStack() as opened:
        checkpoint = together(lambda: opened.enter_context(open_checkpoint(path)))
        plan = together(lambda: plan_for(checkpoint, rank, size))
        stream = together(lambda: opened.enter_context(stream_kda_layers(checkpoint, plan=plan)))
        while (layer := together(lambda: next(stream, None))) is not None:
            found = joined(checksums(layer.weights, plan.config))
            is_my_turn = stream.report.layers % size == rank  # to read the layer whole
            read_whole = partial(compare, checkpoint, plan, found, layer.index)
            agree(together(read_whole if is_my_turn else lambda: None))
        report = stream.report
    said = [""] * size
    dist.all_gather_object(said, f"{report.layers} layers, {report.bytes} bytes")
    if rank == 0:
        for other, line in enumerate(said):
            print(f"rank {other} of {size}: {line}")


def plan_for(checkpoint: Checkpoint, rank: int, size: int) -> KdaTpPlan:
    """The rank's plan, for the family that the checkpoint's layers are of."""
    if checkpoint.config_path is None:
        raise SystemExit(f"{checkpoint.path} has no config.json")
    config = KdaConfig.from_json(checkpoint.config_path)
    first = stream_kda_layers(checkpoint, family="auto").layers[0]
    return KdaTpPlan(config, rank, size, identify_family(checkpoint.layer(first), config))


def together(step: Callable[[], T]) -> T:
    """Run a step on every rank; when it fails on one, all of them end with its reason."""
    try:
        result = step()
    except KdaStreamError as error:
        agree(str(error))
        raise
    agree(None)
    return result


def agree(failure: str | None) -> None:
    """Tell the other ranks that all is well here, or why not; ends where it is not everywhere."""
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for rank, reason in enumerate(failures):
        if reason is not None:
            raise SystemExit(f"rank {dist.get_rank()} ends, as rank {rank} failed: {reason}")


def checksums(weights: KdaWeights, config: KdaConfig) -> Checksums:
    """The checksums of each head's part of each tensor, or of what is whole on every rank."""
    heads = config.heads
    found = {}
    for name, bound in weights.items():
        tensor = bound.torch()
        if name in WHOLE_ON_EVERY_RANK:
            parts = tensor.unsqueeze(0)
        elif name == "o_proj":  # columns
            parts = tensor.view(config.hidden, heads, -1).transpose(0, 1)
        elif name == "conv":  # q, k and v, each with its heads
            parts = tensor.view(3, heads, -1).transpose(0, 1)
        else:
            parts = tensor.view(heads, -1)
        found[name] = [checksum(part) for part in parts]
    return found


def checksum(tensor: torch.Tensor) -> str:
    """The sha256 of the tensor's bytes."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def joined(mine: Checksums) -> Checksums:
    """The checksums of the whole layer, out of those of all ranks."""
    every: list[Checksums] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {
        name: sorted({one for theirs in every for one in theirs[name]})  # one, if they are the same
        if name in WHOLE_ON_EVERY_RANK
        else [one for theirs in every for one in theirs[name]]
        for name in mine
    }


def compare(checkpoint: Checkpoint, plan: KdaTpPlan, found: Checksums, index: int) -> str | None:
    """What differs between the ranks' layer and the same one read whole; None when nothing does."""
    config, family = plan.model_config, plan.model_family
    weights, _ = bind_kda_weights(config, index, checkpoint.layer(index), family=family)
    whole = checksums(weights, config)
    weights.release()
    wrong = [name for name in whole if whole[name] != found[name]]
    return f"layer {index} differs in {wrong}" if wrong else None


if __name__ == "__main__":
    main()
