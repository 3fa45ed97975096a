"""How soon the first KDA layer of a checkpoint is there, from its path alone."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from functools import partial
from typing import Any

from .. import data
from ..sides import Comparison, Request, Side, Timed, clocked

TOLD = """\
From the path alone to the first KDA layer's fifteen tensors in one buffer, conv joined. kda_stream
checks every header (`verify="all"`), or those that are needed; the safetensors package opens the
shards that the index names for the layer and no others."""
THEIRS = "safetensors torch"


def load_own(verify: Any, request: Request) -> Timed:
    import kda_stream
    from kda_stream.staging.native import extension

    open_checkpoint, stream_kda_layers = kda_stream.open_checkpoint, kda_stream.stream_kda_layers
    extension()

    def timed() -> dict[str, Any]:
        layers: list[Any] = []
        with ExitStack() as opened:

            def first_layer() -> None:
                checkpoint = opened.enter_context(
                    open_checkpoint(request.checkpoint, verify=verify)
                )
                stream = opened.enter_context(stream_kda_layers(checkpoint, slots=1))
                layers.append(next(stream))

            figures = clocked(first_layer)
            if request.checked:
                digest = hashlib.sha256()
                for _, tensor in layers[0].weights.items():
                    digest.update(tensor.data)
                figures["delivered"] = digest.hexdigest()
        return figures

    return timed


def load_safetensors(request: Request) -> Timed:
    import torch
    from safetensors import safe_open

    from kda_stream.testing import FIELD_TENSORS

    leaves = [leaf for field in FIELD_TENSORS.values() for leaf in field]  # the buffer's order

    def first_layer() -> Any:
        text = (request.checkpoint / "model.safetensors.index.json").read_bytes()
        weight_map = json.loads(text)["weight_map"]
        marked = [name for name in weight_map if name.endswith(".self_attn.A_log")]
        first = min(marked, key=lambda name: int(name.split("layers.")[1].split(".")[0]))
        names = [first.removesuffix("A_log") + leaf for leaf in leaves]
        files: dict[str, Any] = {
            file: safe_open(request.checkpoint / file, "pt")
            for file in {weight_map[name] for name in names}
        }
        tensors = [files[weight_map[name]].get_tensor(name) for name in names]
        buffer = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
        at = 0
        for tensor in tensors:
            buffer[at : at + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
            at += tensor.nbytes
        return buffer

    def timed() -> dict[str, Any]:
        buffers: list[Any] = []
        figures = clocked(lambda: buffers.append(first_layer()))
        if request.checked:
            figures["delivered"] = hashlib.sha256(buffers[0].numpy()).hexdigest()
        return figures

    return timed


COMPARISON = Comparison(
    name="first layer",
    title="The first layer",
    told=TOLD,
    sides=(
        Side(
            "kda_stream",
            "own",
            load=partial(load_own, "all"),
            packages=("kda_stream",),
            reads="every header, one layer",
            settings='open_checkpoint(verify="all"), slots=1',
        ),
        Side(
            "kda_stream needed",
            "own",
            load=partial(load_own, "needed"),
            packages=("kda_stream",),
            reads="the layer's headers, one layer",
            settings='open_checkpoint(verify="needed"), slots=1',
        ),
        Side(
            THEIRS,
            "peer",
            load=load_safetensors,
            packages=("safetensors", "torch"),
            reads="the layer's headers, one layer",
            settings="safe_open, get_tensor, copy_",
        ),
    ),
    references=(THEIRS,),
    own="kda_stream",
    conditions=("warm", "cold"),
    make=data.place,
)
