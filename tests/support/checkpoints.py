"""Small checkpoints in the layout of GLM-5.3-Flash, written with the safetensors package.

Of four decoder layers three are KDA and the fourth is DSA; one MTP layer, shaped like a DSA layer,
stands behind them. Some KDA layers lie in two shards, and the order of the layers is not the order
of the shards. Every byte can be told from its tensor's name, so a reader needs no second copy.
Nothing here uses kda_stream.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors

GLM_PREFIX: Final = "model.language_model.layers."
INDEX_NAME: Final = "model.safetensors.index.json"
DTYPE_BYTES: Final = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
BLOCK_BYTES: Final = 1 << 16

# The names that the package's writer takes for the codes that stand in a header.
_WRITER_DTYPES: Final = {
    "BF16": "bfloat16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "U8": "uint8",
}

# The weights of a bound layer, and the stored tensors that make each of them.
FIELD_LEAVES: Final[Mapping[str, tuple[str, ...]]] = {
    "q_proj": ("q_proj.weight",),
    "k_proj": ("k_proj.weight",),
    "v_proj": ("v_proj.weight",),
    "conv": ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"),
    "f_a": ("f_a_proj.weight",),
    "f_b": ("f_b_proj.weight",),
    "g_a": ("g_a_proj.weight",),
    "g_b": ("g_b_proj.weight",),
    "b_proj": ("b_proj.weight",),
    "a_log": ("A_log",),
    "dt_bias": ("dt_bias",),
    "o_norm": ("o_norm.weight",),
    "o_proj": ("o_proj.weight",),
}


def payload(name: str, nbytes: int, begin: int = 0) -> bytes:
    """`nbytes` bytes of the tensor `name` from byte `begin`: a keyed, seekable stream."""
    out = bytearray()
    block, skipped = divmod(begin, BLOCK_BYTES)
    while len(out) < skipped + nbytes:
        key = hashlib.blake2b(f"{name}#{block}".encode(), digest_size=32).digest()
        out += hashlib.shake_128(key).digest(BLOCK_BYTES)
        block += 1
    return bytes(out[skipped : skipped + nbytes])


@dataclass(frozen=True)
class Stored:
    """One tensor as it is written; with no `data`, its bytes are those of its name."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def bytes_of(self, name: str) -> bytes:
        return payload(name, self.nbytes) if self.data is None else self.data


@dataclass(frozen=True)
class Geometry:
    """The extents of a KDA block."""

    hidden: int
    heads: int
    head_dim: int
    conv_kernel: int

    @property
    def qkv_dim(self) -> int:
        return self.heads * self.head_dim


GLM: Final = Geometry(hidden=4096, heads=64, head_dim=128, conv_kernel=4)

UNEVEN: Final = Geometry(hidden=24, heads=3, head_dim=5, conv_kernel=3)
"""Every extent differs from every other, and no tensor's size is a multiple of 256 bytes."""

MEDIUM: Final = Geometry(hidden=256, heads=4, head_dim=32, conv_kernel=4)
"""About 300 kB a layer: each projection spans several pages."""


def kda_block(geometry: Geometry) -> dict[str, Stored]:
    """The fifteen tensors under `self_attn.`, by the name behind it."""
    x, h, d, k = geometry.hidden, geometry.heads, geometry.head_dim, geometry.conv_kernel
    q = h * d
    return {
        "q_proj.weight": Stored("BF16", (q, x)),
        "k_proj.weight": Stored("BF16", (q, x)),
        "v_proj.weight": Stored("BF16", (q, x)),
        "q_conv1d.weight": Stored("BF16", (q, 1, k)),
        "k_conv1d.weight": Stored("BF16", (q, 1, k)),
        "v_conv1d.weight": Stored("BF16", (q, 1, k)),
        "f_a_proj.weight": Stored("BF16", (d, x)),
        "f_b_proj.weight": Stored("BF16", (q, d)),
        "g_a_proj.weight": Stored("BF16", (d, x)),
        "g_b_proj.weight": Stored("BF16", (q, d)),
        "b_proj.weight": Stored("BF16", (h, x)),
        "A_log": Stored("F32", (h,)),
        "dt_bias": Stored("F32", (q,)),
        "o_norm.weight": Stored("BF16", (d,)),
        "o_proj.weight": Stored("BF16", (x, q)),
    }


def dsa_block(geometry: Geometry) -> dict[str, Stored]:
    """The eighteen tensors of a DSA block under `self_attn.`, by the name behind it."""
    x, rank = geometry.hidden, 8
    return {
        "q_a_proj.weight": Stored("F8_E4M3", (rank, x)),
        "q_a_proj.weight_scale_inv": Stored("F32", (1, 1)),
        "q_a_layernorm.weight": Stored("BF16", (rank,)),
        "q_b_proj.weight": Stored("F8_E4M3", (2 * x, rank)),
        "q_b_proj.weight_scale_inv": Stored("F32", (1, 1)),
        "kv_a_proj_with_mqa.weight": Stored("F8_E4M3", (rank, x)),
        "kv_a_proj_with_mqa.weight_scale_inv": Stored("F32", (1, 1)),
        "kv_a_layernorm.weight": Stored("BF16", (rank,)),
        "kv_b_proj.weight": Stored("BF16", (2 * x, rank)),
        "o_proj.weight": Stored("F8_E4M3", (x, 2 * x)),
        "o_proj.weight_scale_inv": Stored("F32", (1, 1)),
        "indexer.wq_b.weight": Stored("BF16", (x, rank)),
        "indexer.wk.weight": Stored("BF16", (4, x)),
        "indexer.k_norm.weight": Stored("BF16", (4,)),
        "indexer.k_norm.bias": Stored("BF16", (4,)),
        "indexer.weights_proj.weight": Stored("BF16", (2, x)),
        "indexer.index_kpool_compress_gate": Stored("BF16", (4, x)),
        "indexer.index_kpool_compress_ape": Stored("BF16", (2, 4)),
    }


def other_tensors(geometry: Geometry, *, hyper_connections: bool) -> dict[str, Stored]:
    """What a layer holds beside its attention, by layer-relative name."""
    x = geometry.hidden
    rows = {
        "input_layernorm.weight": Stored("BF16", (x,)),
        "post_attention_layernorm.weight": Stored("BF16", (x,)),
        "mlp.gate_proj.weight": Stored("F8_E4M3", (2 * x, x)),
        "mlp.gate_proj.weight_scale_inv": Stored("F32", (1, 1)),
        "mlp.down_proj.weight": Stored("F8_E4M3", (x, 2 * x)),
        "mlp.down_proj.weight_scale_inv": Stored("F32", (1, 1)),
    }
    if hyper_connections:
        for part in ("attn", "ffn"):
            rows[f"hc_{part}_fn"] = Stored("BF16", (6, 4 * x))
            rows[f"hc_{part}_base"] = Stored("F32", (6,))
            rows[f"hc_{part}_scale"] = Stored("F32", (3,))
    return rows


def is_kda(layer: int) -> bool:
    """Whether a decoder layer of that number is a KDA layer; each fourth one is not."""
    return layer % 4 != 3


def all_tensors(geometry: Geometry, layers: int, prefix: str, *, mtp: bool) -> dict[str, Stored]:
    """Every tensor of a checkpoint, by full name."""
    x = geometry.hidden
    top = prefix.removesuffix("layers.")
    tensors = {
        f"{top}embed_tokens.weight": Stored("BF16", (10, x)),
        f"{top}norm.weight": Stored("BF16", (x,)),
        "lm_head.weight": Stored("BF16", (10, x)),
        "model.visual.patch_embed.weight": Stored("BF16", (x, 3)),
    }
    for layer in range(layers + mtp):
        block = kda_block(geometry) if layer < layers and is_kda(layer) else dsa_block(geometry)
        rows = {f"self_attn.{leaf}": stored for leaf, stored in block.items()}
        rows |= other_tensors(geometry, hyper_connections=layer < layers)
        if layer == layers:
            rows["eh_proj.weight"] = Stored("BF16", (x, 2 * x))
            rows["enorm.weight"] = Stored("BF16", (x,))
        tensors |= {f"{prefix}{layer}.{name}": stored for name, stored in rows.items()}
    return tensors


def config_json(geometry: Geometry, layers: int, *, mtp: bool) -> dict[str, Any]:
    """The config.json of such a checkpoint, as the official file spells it."""
    numbers = range(layers)
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": {
            "model_type": "glm5_next_text",
            "hidden_size": geometry.hidden,
            "num_hidden_layers": layers,
            "num_nextn_predict_layers": int(mtp),
            "layer_types": [
                "linear_attention" if is_kda(n) else "deepseek_sparse_attention" for n in numbers
            ],
            "linear_attn_config": {
                "kda_layers": [n for n in numbers if is_kda(n)],
                "full_attn_layers": [n for n in numbers if not is_kda(n)],
                "num_heads": geometry.heads,
                "head_dim": geometry.head_dim,
                "short_conv_kernel_size": geometry.conv_kernel,
                "gate_lower_bound": -5.0,
            },
        },
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }


# As in layer 1 of the real checkpoint: these lie in the shard behind that of the others.
_LATE_LEAVES: Final = ("o_proj.", "q_conv1d.", "q_proj.", "v_conv1d.", "v_proj.")


def shard_number(name: str, prefix: str, shards: int) -> int:
    """Which shard a tensor is put in: odd layers lie in two, and 5n+1 mixes their order."""
    if not name.startswith(prefix):
        return 0
    layer, _, relative = name.removeprefix(prefix).partition(".")
    late = int(layer) % 2 == 1 and relative.removeprefix("self_attn.").startswith(_LATE_LEAVES)
    return (5 * int(layer) + 1 + late) % shards


def save_shard(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write one shard with the safetensors package."""
    arrays = {n: np.frombuffer(t.bytes_of(n), dtype=np.uint8) for n, t in tensors.items()}
    rows: dict[str, Any] = {}
    for name, stored in tensors.items():
        dtype, shape, array = _WRITER_DTYPES[stored.dtype], list(stored.shape), arrays[name]
        if hasattr(safetensors, "TensorSpec"):
            rows[name] = safetensors.TensorSpec(
                dtype=dtype, shape=shape, data_ptr=array.ctypes.data, data_len=array.nbytes
            )
        else:  # before 0.8
            rows[name] = {"dtype": dtype, "shape": shape, "data": array.tobytes()}
    safetensors.serialize_file(rows, str(path), {"format": "pt"})


def save_raw_shard(
    path: Path, tensors: Mapping[str, Stored], *, start: int = 0, sparse: bool = False
) -> dict[str, int]:
    """Write one shard by hand, tensors in the order given; returns where each one begins.

    The payload begins at a multiple of 8, plus `start`. A `sparse` shard is all zeros and takes no
    room on the disk.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, stored in tensors.items():
        begin, end = end, end + stored.nbytes
        header[name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + start)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if sparse:
            file.truncate(8 + len(text) + end)
        else:
            file.writelines(stored.bytes_of(name) for name, stored in tensors.items())
    return {name: 8 + len(text) + header[name]["data_offsets"][0] for name in tensors}


@dataclass(frozen=True)
class Written:
    """A checkpoint on the disk, and what was written into it."""

    folder: Path
    geometry: Geometry
    prefix: str
    layers: int
    tensors: Mapping[str, Stored] = field(repr=False)
    weight_map: Mapping[str, str] = field(repr=False)

    @property
    def kda_layers(self) -> list[int]:
        return [n for n in range(self.layers) if is_kda(n)]

    def full_name(self, layer: int, leaf: str) -> str:
        return f"{self.prefix}{layer}.self_attn.{leaf}"

    def shard_of(self, layer: int, leaf: str) -> Path:
        """The file that holds the attention tensor `leaf` of a layer."""
        return self.folder / self.weight_map[self.full_name(layer, leaf)]

    def stored_bytes(self, layer: int, leaf: str) -> bytes:
        name = self.full_name(layer, leaf)
        return self.tensors[name].bytes_of(name)

    def expected(self, layer: int) -> dict[str, bytes]:
        """The bytes of each weight of a bound layer, the three conv tensors joined."""
        return {
            name: b"".join(self.stored_bytes(layer, leaf) for leaf in leaves)
            for name, leaves in FIELD_LEAVES.items()
        }


def write_checkpoint(
    folder: Path,
    *,
    geometry: Geometry = UNEVEN,
    layers: int = 8,
    prefix: str = GLM_PREFIX,
    shards: int = 3,
    mtp: bool = True,
    config: bool = True,
    sparse: bool = False,
    change: Callable[[dict[str, Stored]], None] | None = None,
) -> Written:
    """Write a checkpoint into `folder`, which is made; `change` edits its tensors before that.

    Shards come from the safetensors package, but `sparse` ones, which hold zeros alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = all_tensors(geometry, layers, prefix, mtp=mtp)
    if change is not None:
        change(tensors)
    files = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    weight_map = {name: files[shard_number(name, prefix, shards)] for name in tensors}
    for file in files:
        held = {name: t for name, t in tensors.items() if weight_map[name] == file}
        if sparse:
            save_raw_shard(folder / file, held, sparse=True)
        else:
            save_shard(folder / file, held)
    write_index(folder, tensors, weight_map)
    if config:
        text = json.dumps(config_json(geometry, layers, mtp=mtp))
        (folder / "config.json").write_text(text)
    return Written(folder, geometry, prefix, layers, tensors, weight_map)


def write_index(folder: Path, tensors: Mapping[str, Stored], weight_map: Mapping[str, str]) -> None:
    """Write the index of a checkpoint, names in text order as the real one has them."""
    total = sum(stored.nbytes for stored in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: weight_map[name] for name in sorted(weight_map)},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index))


def without(*names: str) -> Callable[[dict[str, Stored]], None]:
    """A `change` that leaves out the tensors of these full names."""

    def change(tensors: dict[str, Stored]) -> None:
        for name in names:
            del tensors[name]

    return change


def having(rows: Mapping[str, Stored] | Iterable[tuple[str, Stored]]) -> Callable[..., None]:
    """A `change` that adds or replaces tensors, by full name."""
    added = dict(rows)

    def change(tensors: dict[str, Stored]) -> None:
        tensors.update(added)

    return change
