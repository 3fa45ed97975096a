"""Layers and small checkpoints of every family that stores KDA layers, at any geometry.

Written out by hand: what stands here is what the library's tables are compared with. Of four
decoder layers the fourth is attention of another kind. Odd layers lie in two shards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from kda_stream import KdaConfig, RawTensor

from .checkpoints import (
    DTYPE_BYTES,
    FIELD_LEAVES,
    GLM_PREFIX,
    UNEVEN,
    Geometry,
    Stored,
    dsa_block,
    is_kda,
    payload,
    save_shard,
    write_index,
)
from .checkpoints import config_json as glm_config_json

CONV_LEAVES: Final = FIELD_LEAVES["conv"]
PROJECTIONS: Final = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
LOW_RANK_DECAY: Final = ("f_a_proj.weight", "f_b_proj.weight")
LOW_RANK_GATE: Final = ("g_a_proj.weight", "g_b_proj.weight")
FULL_RANK_DECAY: Final = ("f_proj.weight",)
FULL_RANK_GATE: Final = ("g_proj.weight",)

# In the order of `KdaWeights`; of two ways to store a field a family has one.
_FIELDS: Final = (
    *(("q_proj", PROJECTIONS[:1]), ("k_proj", PROJECTIONS[1:2]), ("v_proj", PROJECTIONS[2:])),
    ("conv", CONV_LEAVES),
    *(("f_a", LOW_RANK_DECAY[:1]), ("f_b", LOW_RANK_DECAY[1:]), ("f", FULL_RANK_DECAY)),
    *(("g_a", LOW_RANK_GATE[:1]), ("g_b", LOW_RANK_GATE[1:]), ("g", FULL_RANK_GATE)),
    ("b_proj", ("b_proj.weight",)),
    *(("a_log", ("A_log",)), ("dt_bias", ("dt_bias",)), ("o_norm", ("o_norm.weight",))),
    *(("o_proj", ("o_proj.weight",)), ("o_proj", ("dense.weight",))),
)
ALL_FIELDS: Final = tuple(dict.fromkeys(name for name, _ in _FIELDS))


def _shapes(g: Geometry) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf that has the same one in all families."""
    x, h, d, k, q = g.hidden, g.heads, g.head_dim, g.conv_kernel, g.qkv_dim
    return {
        **dict.fromkeys((*PROJECTIONS, "f_proj.weight", "g_proj.weight"), (q, x)),
        **dict.fromkeys(CONV_LEAVES, (q, 1, k)),
        **dict.fromkeys(("f_a_proj.weight", "g_a_proj.weight"), (d, x)),
        **dict.fromkeys(("f_b_proj.weight", "g_b_proj.weight"), (q, d)),
        "b_proj.weight": (h, x),
        "dt_bias": (q,),
        "o_norm.weight": (d,),
        **dict.fromkeys(("o_proj.weight", "dense.weight"), (x, q)),
    }


@cache
def _payload(name: str, nbytes: int) -> bytes:
    return payload(name, nbytes)


def _flat(g: Geometry) -> tuple[int, ...]:
    return (g.heads,)


def _four_dims(g: Geometry) -> tuple[int, ...]:
    return (1, 1, g.heads, 1)


def _padded(g: Geometry) -> tuple[int, ...]:
    return (math.ceil(g.heads / 128) * 128,)


@dataclass(frozen=True)
class Family:
    """How the published files of one family store a KDA block.

    `dtypes` by leaf, and in `also` the other one of those that have one more which is accepted.
    """

    name: str
    dtypes: Mapping[str, str]
    prefix: str
    config: Callable[[Geometry, int], dict[str, Any]]
    block: str = "self_attn."
    a_log_shape: Callable[[Geometry], tuple[int, ...]] = _flat
    also: Mapping[str, str] = field(default_factory=dict)
    other_leaves: tuple[str, ...] = ("q_proj.weight", "kv_b_proj.weight", "o_proj.weight")

    @property
    def leaves(self) -> tuple[str, ...]:
        return tuple(self.dtypes)

    @property
    def fields(self) -> dict[str, tuple[str, ...]]:
        """Each field that the family has, and the leaves whose bytes are joined in it."""
        return {name: leaves for name, leaves in _FIELDS if leaves[0] in self.dtypes}

    @property
    def lacking(self) -> tuple[str, ...]:
        return tuple(name for name in ALL_FIELDS if name not in self.fields)

    def stored_as(self, dtypes: Mapping[str, str]) -> Family:
        """The family with some leaves stored in another dtype."""
        return replace(self, dtypes={**self.dtypes, **dtypes})

    def takes(self, rows: Mapping[str, Stored]) -> bool:
        """Whether each of these leaves is one of its tensors, at `UNEVEN`, as it accepts it."""
        own = self.rows(UNEVEN)
        return all(
            leaf in own
            and row.shape == own[leaf].shape
            and row.dtype in (own[leaf].dtype, self.also.get(leaf))
            for leaf, row in rows.items()
        )

    def rows(self, geometry: Geometry) -> dict[str, Stored]:
        """The dtype and shape of each tensor of a block, by leaf."""
        shapes = {**_shapes(geometry), "A_log": self.a_log_shape(geometry)}
        return {leaf: Stored(dtype, shapes[leaf]) for leaf, dtype in self.dtypes.items()}

    def tensors(self, geometry: Geometry, before: str = "") -> dict[str, Stored]:
        """The tensors of a block under their names, with the text `before` each of them.

        Their bytes are those of the names; what pads A_log is zeros.
        """
        named = {}
        for leaf, row in self.rows(geometry).items():
            name = f"{before}{self.block}{leaf}"
            counts = geometry.heads * DTYPE_BYTES[row.dtype] if leaf == "A_log" else row.nbytes
            data = _payload(name, counts) + bytes(row.nbytes - counts)
            named[name] = replace(row, data=data)
        return named

    def expected(self, geometry: Geometry, before: str = "") -> dict[str, bytes]:
        """The bytes of each field of a bound layer."""
        named = self.tensors(geometry, before)
        found = {
            name: b"".join(
                named[full].bytes_of(full)
                for full in [f"{before}{self.block}{leaf}" for leaf in leaves]
            )
            for name, leaves in self.fields.items()
        }
        found["a_log"] = found["a_log"][: geometry.heads * DTYPE_BYTES[self.dtypes["A_log"]]]
        return found

    def handed_out(self, geometry: Geometry) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each field of a bound layer."""
        rows = self.rows(geometry)
        found = {n: (rows[ls[0]].dtype, rows[ls[0]].shape) for n, ls in self.fields.items()}
        found["a_log"] = (self.dtypes["A_log"], (geometry.heads,))
        conv = (3 * geometry.qkv_dim, geometry.conv_kernel)
        found["conv"] = (self.dtypes["q_conv1d.weight"], conv)
        return found

    def source(self, geometry: Geometry) -> MemorySource:
        """A layer in memory, with two names beside its attention."""
        source = MemorySource()
        for name, stored in self.tensors(geometry).items():
            source.put(name, stored)
        source.put("input_layernorm.weight", Stored("BF16", (geometry.hidden,)))
        source.put("mlp.gate_proj.weight", Stored("BF16", (2, geometry.hidden)))
        return source


class MemorySource:
    """A layer held in memory; remembers which tensors it was asked for."""

    def __init__(self) -> None:
        self.tensors: dict[str, RawTensor] = {}
        self.asked: set[str] = set()

    def get(self, name: str) -> RawTensor | None:
        self.asked.add(name)
        return self.tensors.get(name)

    def names(self) -> list[str]:
        return list(self.tensors)

    def put(self, name: str, stored: Stored) -> None:
        self.tensors[name] = RawTensor(stored.dtype, stored.shape, stored.bytes_of(name))

    def put_as(self, name: str, dtype: str, nbytes: int) -> None:
        """Store the tensor `name`, in the shape that it has, with that dtype and size."""
        self.tensors[name] = RawTensor(dtype, self.tensors[name].shape, bytes(nbytes))

    def rename(self, before: str, after: str) -> None:
        self.tensors[after] = self.tensors.pop(before)

    def drop(self, *names: str) -> None:
        for name in names:
            del self.tensors[name]


def _bf16(*leaves: str) -> dict[str, str]:
    return dict.fromkeys(leaves, "BF16")


def _f32(*leaves: str) -> dict[str, str]:
    return dict.fromkeys(leaves, "F32")


def kda_config(geometry: Geometry) -> KdaConfig:
    return KdaConfig(geometry.hidden, geometry.heads, geometry.head_dim, geometry.conv_kernel)


def _linear_attention(g: Geometry, layers: int) -> dict[str, Any]:
    """`linear_attn_config` as the published files of Kimi have it, which count layers from 1."""
    return {
        "kda_layers": [n + 1 for n in range(layers) if is_kda(n)],
        "full_attn_layers": [n + 1 for n in range(layers) if not is_kda(n)],
        "num_heads": g.heads,
        "head_dim": g.head_dim,
        "short_conv_kernel_size": g.conv_kernel,
    }


def _glm_config(g: Geometry, layers: int) -> dict[str, Any]:
    return glm_config_json(g, layers, mtp=False)


def _kimi_linear_config(g: Geometry, layers: int) -> dict[str, Any]:
    return {
        "model_type": "kimi_linear",
        "hidden_size": g.hidden,
        "num_hidden_layers": layers,
        "linear_attn_config": _linear_attention(g, layers),
    }


def _kimi_k3_config(g: Geometry, layers: int) -> dict[str, Any]:
    further = {"gate_lower_bound": -5.0, "use_full_rank_gate": True}
    return {
        "model_type": "kimi_k3",
        "text_config": {
            "hidden_size": g.hidden,
            "num_hidden_layers": layers,
            "linear_attn_config": _linear_attention(g, layers) | further,
        },
    }


def _ling_config(g: Geometry, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": g.hidden,
        "num_hidden_layers": layers,
        "layer_group_size": 4,
        "num_attention_heads": g.heads,
        "head_dim": g.head_dim,
        "short_conv_kernel_size": g.conv_kernel,
    }


_GLM_DTYPES: Final = {
    **_bf16(*PROJECTIONS, *CONV_LEAVES, *LOW_RANK_DECAY, *LOW_RANK_GATE, "b_proj.weight"),
    **_f32("A_log", "dt_bias"),
    **_bf16("o_norm.weight", "o_proj.weight"),
}
GLM5_NEXT: Final = Family(
    name="GLM5_NEXT",
    dtypes=_GLM_DTYPES,
    prefix=GLM_PREFIX,
    config=_glm_config,
)
GLM5_NEXT_F32_CONV: Final = replace(
    GLM5_NEXT, name="GLM5_NEXT_F32_CONV", dtypes={**_GLM_DTYPES, **_f32(*CONV_LEAVES)}
)
KIMI_LINEAR: Final = Family(
    name="KIMI_LINEAR",
    dtypes=_GLM_DTYPES,
    prefix="model.layers.",
    config=_kimi_linear_config,
    a_log_shape=_four_dims,
    also={"A_log": "BF16", "dt_bias": "BF16", "o_norm.weight": "F32"},
    other_leaves=("q_proj.weight", "kv_a_proj_with_mqa.weight", "kv_b_proj.weight"),
)
KIMI_K3: Final = Family(
    name="KIMI_K3",
    dtypes={
        **_bf16(*PROJECTIONS),
        **_f32(*CONV_LEAVES),
        **_bf16(*LOW_RANK_DECAY, *FULL_RANK_GATE, "b_proj.weight"),
        **_f32("A_log", "dt_bias", "o_norm.weight"),
        **_bf16("o_proj.weight"),
    },
    prefix="language_model.model.layers.",
    config=_kimi_k3_config,
    a_log_shape=_padded,
    also={"b_proj.weight": "F32"},
    other_leaves=("q_proj.weight", "g_proj.weight", "kv_a_proj_with_mqa.weight", "o_proj.weight"),
)
_LING_DTYPES: Final = {
    **_bf16(*PROJECTIONS, *CONV_LEAVES, *FULL_RANK_DECAY, *FULL_RANK_GATE, "b_proj.weight"),
    **_f32("A_log", "dt_bias"),
    **_bf16("o_norm.weight", "o_proj.weight"),
}
_OTHER_DTYPE: Final = {"BF16": "F32", "F32": "BF16"}
LING_3: Final = Family(
    name="LING_3",
    dtypes=_LING_DTYPES,
    prefix="model.layers.",
    config=_ling_config,
    block="attention.",
    also={leaf: _OTHER_DTYPE[dtype] for leaf, dtype in _LING_DTYPES.items()},
    other_leaves=("kv_a_proj_with_mqa.weight", "kv_b_proj.weight", "g_proj.weight", "dense.weight"),
)
_DENSE_DTYPES: Final = {
    "dense.weight" if leaf == "o_proj.weight" else leaf: dtype
    for leaf, dtype in _LING_DTYPES.items()
}
LING_3_DENSE: Final = replace(
    LING_3,
    name="LING_3_DENSE",
    dtypes=_DENSE_DTYPES,
    also={leaf: _OTHER_DTYPE[dtype] for leaf, dtype in _DENSE_DTYPES.items()},
)

FAMILIES: Final = {
    family.name: family
    for family in (
        GLM5_NEXT,
        GLM5_NEXT_F32_CONV,
        KIMI_LINEAR,
        KIMI_K3,
        LING_3,
        LING_3_DENSE,
    )
}


@dataclass(frozen=True)
class WrittenFamily:
    """A checkpoint on the disk, of one family or with layers of several."""

    folder: Path
    geometry: Geometry
    prefix: str
    families: Mapping[int, Family]

    @property
    def kda_layers(self) -> list[int]:
        return list(self.families)

    def expected(self, layer: int) -> dict[str, bytes]:
        """The bytes of each field of the bound layer."""
        return self.families[layer].expected(self.geometry, f"{self.prefix}{layer}.")


# Those of an odd layer lie in the shard behind that of its others.
_LATE_LEAVES: Final = ("q_conv1d.weight", "v_conv1d.weight", "f_a_proj.weight", "A_log", "o_norm.")


def write_family(
    folder: Path,
    families: Family | Iterable[Family],
    geometry: Geometry,
    *,
    layers: int = 5,
    shards: int = 3,
    prefix: str | None = None,
    change: Callable[[dict[str, Stored]], None] | None = None,
) -> WrittenFamily:
    """Write a checkpoint with `layers` layers; its KDA layers are of the `families` in turn.

    `prefix` and config.json are those of the first. `change` edits its tensors before.
    """
    turn = [families] if isinstance(families, Family) else list(families)
    prefix = turn[0].prefix if prefix is None else prefix
    numbers = [n for n in range(layers) if is_kda(n)]
    chosen = {n: turn[at % len(turn)] for at, n in enumerate(numbers)}
    x = geometry.hidden
    tensors = {"lm_head.weight": Stored("BF16", (10, x))}
    for n in range(layers):
        before = f"{prefix}{n}."
        tensors[f"{before}input_layernorm.weight"] = Stored("BF16", (x,))
        if n in chosen:
            tensors |= chosen[n].tensors(geometry, before)
        elif turn[0].name.startswith("GLM"):
            rows = dsa_block(geometry)
            tensors |= {f"{before}self_attn.{leaf}": row for leaf, row in rows.items()}
        else:
            leaves = turn[0].other_leaves
            tensors |= {f"{before}{turn[0].block}{leaf}": Stored("BF16", (2, x)) for leaf in leaves}
        tensors[f"{before}mlp.gate_proj.weight"] = Stored("BF16", (3, x))
    if change is not None:
        change(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    files = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    places = {name: files[_shard_number(name, prefix) % shards] for name in tensors}
    for file in files:
        save_shard(folder / file, {n: t for n, t in tensors.items() if places[n] == file})
    write_index(folder, tensors, places)
    (folder / "config.json").write_text(json.dumps(turn[0].config(geometry, layers)))
    return WrittenFamily(folder, geometry, prefix, chosen)


def _shard_number(name: str, prefix: str) -> int:
    if not name.startswith(prefix):
        return 0
    layer, _, relative = name.removeprefix(prefix).partition(".")
    late = int(layer) % 2 == 1 and relative.partition(".")[2].startswith(_LATE_LEAVES)
    return 2 * int(layer) + 1 + late
