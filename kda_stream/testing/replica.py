"""Checkpoints at full scale that take next to no room: every header is whole, the payload a hole.

With them a reader meets the published offsets and sizes. All of the payload is known without
reading it back: the first and the last `EDGE_BYTES` of a KDA tensor's values are those of its
`payload`, and all else reads as zeros, the padding behind the values too.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..dtypes import DTYPE_BITS
from ..kda.config import KdaConfig
from ..kda.families import KIMI_K3
from ..kda.family import KdaFamily
from .checkpoints import CONFIG_NAME, INDEX_NAME, StoredTensor, payload

EDGE_BYTES: Final = 64
"""How much of a KDA tensor's values is written at either end."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Replica:
    """What a sparse checkpoint holds.

    Of `layers` decoder layers those in `kda_layers` have a KDA block of the `family`; each other
    one has the tensors of `other`, which have layer-relative names. Names sorted as text, about as
    many tensors lie in each of `shards` files.
    """

    family: KdaFamily
    config: KdaConfig
    layers: int
    kda_layers: tuple[int, ...]
    other: tuple[StoredTensor, ...]
    shards: int

    @property
    def prefix(self) -> str:
        """What stands before a layer's number."""
        return self.family.prefixes[0]

    def tensors(self) -> tuple[StoredTensor, ...]:
        """Every tensor under its full name, in the order of the files."""
        norm = StoredTensor("input_layernorm.weight", "BF16", (self.config.hidden,))
        kda = tuple(
            StoredTensor(spec.name, spec.dtype.value, spec.expected_shape(self.config))
            for spec in self.family.tensors
        )
        return tuple(
            sorted(
                row._replace(name=f"{self.prefix}{number}.{row.name}")
                for number in range(self.layers)
                for row in (norm, *(kda if number in self.kda_layers else self.other))
            )
        )

    def written(self) -> dict[str, Ranges]:
        """The full name of each KDA tensor: the ranges of its bytes that are written."""
        ranges = {}
        for spec in self.family.tensors:
            padding = spec.tail(self.config) * DTYPE_BITS[spec.dtype.value] // 8
            end = spec.expected_bytes(self.config) - padding
            ranges[spec.name] = ((0, min(EDGE_BYTES, end)), (max(end - EDGE_BYTES, 0), end))
        return {
            f"{self.prefix}{n}.{name}": ranges[name] for n in self.kda_layers for name in ranges
        }

    def config_json(self) -> dict[str, Any]:
        """The checkpoint's config.json; its lists of layers count as those of the family do."""
        base = self.family.index_base
        return {
            "text_config": {
                "hidden_size": self.config.hidden,
                "num_hidden_layers": self.layers,
                "linear_attn_config": {
                    "kda_layers": [number + base for number in self.kda_layers],
                    "full_attn_layers": [
                        number + base
                        for number in range(self.layers)
                        if number not in self.kda_layers
                    ],
                    "num_heads": self.config.heads,
                    "head_dim": self.config.head_dim,
                    "short_conv_kernel_size": self.config.conv_kernel,
                },
            }
        }


KIMI_K3_REPLICA: Final = Replica(
    family=KIMI_K3,
    config=KdaConfig(hidden=7168, heads=96, head_dim=128, conv_kernel=4),
    layers=93,
    kda_layers=tuple(number for number in range(92) if number % 4 != 3),
    # A few of an MLA layer's tensors, at stand-ins for their shapes. It has a g_proj of its own.
    other=tuple(
        StoredTensor(f"self_attn.{leaf}.weight", "BF16", (128, 7168))
        for leaf in ("q_proj", "g_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    ),
    shards=96,
)
"""The 69 KDA layers of Kimi-K3 among its 93: 61 GB long, about 5 MB on the disk."""


def write_replica(directory: str | os.PathLike[str], replica: Replica = KIMI_K3_REPLICA) -> Path:
    """Write the sparse checkpoint: shards, index and config.json.

    Makes the directory where it is not there yet, and returns its path.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors, written = replica.tensors(), replica.written()
    weight_map = {}
    for number in range(replica.shards):
        file = f"model-{number + 1:05}-of-{replica.shards:05}.safetensors"
        begin, end = (len(tensors) * n // replica.shards for n in (number, number + 1))
        _write_sparse_shard(folder / file, tensors[begin:end], written)
        weight_map.update(dict.fromkeys((tensor.name for tensor in tensors[begin:end]), file))
    total = {"total_size": sum(tensor.nbytes for tensor in tensors)}
    index = {"metadata": total, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    (folder / CONFIG_NAME).write_text(json.dumps(replica.config_json(), indent=2) + "\n")
    return folder


def _write_sparse_shard(
    path: Path, tensors: Sequence[StoredTensor], written: Mapping[str, Ranges]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for tensor in tensors:
        begins[tensor.name], end = end, end + tensor.nbytes
        offsets = (begins[tensor.name], end)
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        for name, begin in begins.items():
            for start, stop in written.get(name, ()):
                file.seek(8 + len(text) + begin + start)
                file.write(payload(name, start, stop - start))
