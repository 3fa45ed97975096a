"""A model with KDA blocks under the names that models of the transformers library give them.

Without that library, whose import takes seconds; its own models are in `transformers_models.py`.
"""

from __future__ import annotations

import torch
from torch import nn

from kda_stream import BoundTensor, KdaWeights, open_checkpoint, stream_kda_layers

IN_THE_GATE = ("a_log", "dt_bias", "f_a", "f_b")
LEAVES = {
    "a_log": "A_log",
    "dt_bias": "dt_bias",
    "conv": "conv1d.weight",
    "o_norm": "o_norm.weight",
    **{field: f"{field}.weight" for field in ("q_proj", "k_proj", "v_proj", "b_proj", "o_proj")},
    **{field: f"{field}_proj.weight" for field in ("f_a", "f_b", "g_a", "g_b")},
}
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def model_for(path: str) -> nn.Module:
    """A model of the checkpoint's layers, in whose KDA blocks every parameter is zeros."""
    with open_checkpoint(path) as checkpoint:
        layers = nn.ModuleList(nn.Module() for _ in checkpoint.layers())
        with stream_kda_layers(checkpoint) as stream:
            for layer in stream:
                layers[layer.index].add_module("self_attn", block_for(layer.weights))
    model = nn.Module()
    model.add_module("layers", layers)
    return model


def block_for(weights: KdaWeights) -> nn.Module:
    block, gate = nn.Module(), nn.Module()
    block.add_module("forget_gate", gate)
    for field, tensor in weights.items():
        owner = gate if field in IN_THE_GATE else block
        *folder, leaf = LEAVES[field].split(".")
        for name in folder:
            inner = nn.Module()
            owner.add_module(name, inner)
            owner = inner
        owner.register_parameter(leaf, nn.Parameter(zeros_for(field, tensor), requires_grad=False))
    return block


def zeros_for(field: str, tensor: BoundTensor) -> torch.Tensor:
    if field == "conv":  # kept in F32, with an axis of 1
        return torch.zeros(tensor.shape[0], 1, tensor.shape[1])
    return torch.zeros(tensor.shape, dtype=DTYPES[tensor.dtype.value])
