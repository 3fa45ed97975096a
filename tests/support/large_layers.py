"""KDA layers of GLM-5.3-Flash's full size that take little room on the disk.

A layer has 275 MB: zeros, but for marks that say where they stand, one in each MiB of a tensor and
one at its end.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from support.checkpoints import (
    FIELD_LEAVES,
    GLM,
    Stored,
    config_json,
    kda_block,
    save_raw_shard,
    write_index,
)

PREFIX: Final = "model.layers."
LAYER_BYTES: Final = 275_481_088
MARK_BYTES: Final = 64
MARK_EVERY_BYTES: Final = 1 << 20


def write_large_layers(folder: Path, layers: int) -> list[Path]:
    """Write so many layers, each in a shard of its own, with index and config; the shards."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for layer in range(layers) for name in _tensors(layer)]
    rows = {name: stored for layer in range(layers) for name, stored in _tensors(layer).items()}
    weight_map = {name: shard_path(folder, int(name.split(".")[2])).name for name in names}
    write_index(folder, rows, weight_map)
    (folder / "config.json").write_text(json.dumps(config_json(GLM, layers, mtp=False)))
    return [write_large_shard(folder, layer) for layer in range(layers)]


def shard_path(folder: Path, layer: int) -> Path:
    return folder / f"model-{layer:05}.safetensors"


def write_large_shard(folder: Path, layer: int) -> Path:
    """Write the shard of one layer, as a new file under its name."""
    tensors = _tensors(layer)
    path = shard_path(folder, layer)
    path.unlink(missing_ok=True)
    begins = save_raw_shard(path, tensors, sparse=True)
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for name, begin in begins.items():
            for at in _places(tensors[name].nbytes):
                os.pwrite(descriptor, _mark(name, at), begin + at)
    finally:
        os.close(descriptor)
    return path


def is_right(weights: Any, layer: int) -> bool:
    """Whether bound weights are, byte for byte, what was written for the layer."""
    return all(
        _is_right(memoryview(tensor.data), [_name(layer, leaf) for leaf in FIELD_LEAVES[field]])
        for field, tensor in weights.items()
    )


def _is_right(data: memoryview, names: list[str]) -> bool:
    nbytes = len(data) // len(names)
    for n, name in enumerate(names):
        part = np.frombuffer(data, np.uint8)[n * nbytes : (n + 1) * nbytes]
        places = _places(nbytes)
        for at, following in zip(places, [*places[1:], nbytes], strict=True):
            if part[at : at + MARK_BYTES].tobytes() != _mark(name, at):
                return False
            if part[at + MARK_BYTES : following].view(np.uint64).any():
                return False
    return len(names) * nbytes == len(data)


def _places(nbytes: int) -> list[int]:
    """Where the marks of a tensor stand."""
    last = nbytes - MARK_BYTES
    return [*range(0, last, MARK_EVERY_BYTES), last]


def _tensors(layer: int) -> Mapping[str, Stored]:
    return {_name(layer, leaf): stored for leaf, stored in kda_block(GLM).items()}


def _name(layer: int, leaf: str) -> str:
    return f"{PREFIX}{layer}.self_attn.{leaf}"


def _mark(name: str, at: int) -> bytes:
    return hashlib.blake2b(f"{name} at {at}".encode(), digest_size=MARK_BYTES).digest()
