"""A model as an engine sees one: parameters by the checkpoint's names, filled by `load_weights`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Every tensor of the checkpoint, as the safetensors package loads it."""
    stored: dict[str, Any] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        stored.update(load_file(shard))
    return stored


class EngineModel(torch.nn.Module):
    """Parameters of the dtypes and shapes of `tensors`, full of something else."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__()
        self.by_name = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            parameter = torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
            self.register_parameter(f"p{number}", parameter)
            self.by_name[name] = (f"p{number}", parameter)
        self.handed: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            self.handed.append(name)
            own_name, parameter = self.by_name[name]
            parameter.data.copy_(tensor)
            loaded.add(own_name)
        return loaded

    def assert_holds(self, tensors: Mapping[str, Any]) -> None:
        for name, tensor in tensors.items():
            _, parameter = self.by_name[name]
            assert parameter.dtype is tensor.dtype, name
            assert parameter.shape == tensor.shape, name
            held, stored = (t.reshape(-1).view(torch.uint8) for t in (parameter.data, tensor))
            assert torch.equal(held, stored), name
