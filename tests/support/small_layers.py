"""Layers of 4.4 MB, of which each byte is told from its tensor's name.

The second one lies in two shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from support.checkpoints import Geometry, Written, write_checkpoint

GEOMETRY: Final = Geometry(hidden=1024, heads=8, head_dim=64, conv_kernel=4)


def write_small_layers(
    folder: Path, *, layers: int = 2, shards: int = 2, geometry: Geometry = GEOMETRY
) -> Written:
    return write_checkpoint(folder, geometry=geometry, layers=layers, mtp=False, shards=shards)


def spoil(into: Any) -> None:
    """Fill a free slot, which may still hold a layer's bytes, so that one not written is seen."""
    slot = into.claim()
    slot.memory()[:] = b"\xa5" * slot.nbytes
    slot.abandon()


def is_right(weights: Any, written: Written, layer: int) -> bool:
    """Whether bound weights are, byte for byte, what was written for the layer."""
    return {name: bytes(tensor.data) for name, tensor in weights.items()} == written.expected(layer)
