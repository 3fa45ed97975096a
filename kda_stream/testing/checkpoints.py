"""Small checkpoints in the layout of GLM-5.3-Flash, for tests and for trying things out.

`write_checkpoint` writes one with the safetensors package. What it writes is known without reading
it back: byte `offset` of a tensor's data is `payload(name, offset, 1)`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import safetensors

from ..checkpoint.header_text import METADATA_KEY
from ..dtypes import DTYPE_BITS
from ..errors import ArgumentError, ErrorCode, in_words
from ..files import refuse_writing, umask
from ..kda.classify import AttnBlockKind
from ..kda.config import KdaConfig
from ..kda.tensors import ATTENTION_PREFIX, KDA_TENSORS
from ..limits import INTEGER_MAX
from ..require import require_items, require_path

KDA, DSA, UNKNOWN = AttnBlockKind.KDA, AttnBlockKind.DSA, AttnBlockKind.UNKNOWN

GEOMETRY: Final = KdaConfig(hidden=64, heads=4, head_dim=16, conv_kernel=4)
"""The geometry that a checkpoint gets unless it is told another."""

FIELD_TENSORS: Final = {
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
"""Each field of `KdaWeights`: the stored tensors, under `self_attn.`, whose bytes it joins."""

INDEX_NAME: Final = "model.safetensors.index.json"
CONFIG_NAME: Final = "config.json"

_BLOCK_BYTES: Final = 1024**2
_FINITE: Final = bytes(byte & 0b1011_1111 for byte in range(256))  # a bit of each exponent
_FP8_BLOCK: Final = 128  # rows and columns of a weight that share one scale
_SERIALIZER_DTYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "F32": "float32",
    "I64": "int64",
    "F64": "float64",
}


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint: its full name, format dtype code and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of its data in bytes."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Layout:
    """What a small checkpoint holds.

    `kinds` are its decoder layers (an UNKNOWN one gets no attention tensors), followed by `mtp`
    DSA-shaped MTP layers; the first `dense` layers have a dense MLP, the others `experts` experts
    of width `mlp`. `dtypes` are those KDA tensors that are stored otherwise than by the contract,
    such as `{"q_conv1d.weight": "F32"}`. The tensors are dealt to `shards` files of about equal
    size.
    """

    prefix: str = "model.language_model.layers."
    config: KdaConfig = GEOMETRY
    kinds: tuple[AttnBlockKind, ...] = (KDA, KDA, KDA, DSA) * 2
    mtp: int = 1
    dense: int = 3
    experts: int = 2
    mlp: int = 32
    vocabulary: int = 256
    shards: int = 3
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        leaves = [spec.name.removeprefix(ATTENTION_PREFIX) for spec in KDA_TENSORS]
        for leaf, dtype in self.dtypes.items():
            if leaf not in leaves or dtype not in _SERIALIZER_DTYPES:
                raise ArgumentError(
                    ErrorCode.ARGUMENT,
                    "dtypes has what no KDA tensor can be written as",
                    tensor=leaf,
                    expected=f"one of {', '.join(leaves)}: one of {', '.join(_SERIALIZER_DTYPES)}",
                    got=f"{leaf}: {dtype}",
                    hint='such as dtypes={"q_conv1d.weight": "F32"}',
                )

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """The numbers of the KDA layers."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind is KDA)

    def tensors(self) -> tuple[StoredTensor, ...]:
        """Every tensor, in the order of the published checkpoint: names sorted as text."""
        rows = list(_model_rows(self))
        for number in range(len(self.kinds) + self.mtp):
            prefix = f"{self.prefix}{number}."
            rows += [row._replace(name=prefix + row.name) for row in _layer_rows(self, number)]
        return tuple(sorted(rows))

    def files(self) -> dict[str, tuple[StoredTensor, ...]]:
        """Shard file -> its tensors. A layer lies in two shards where a file's end cuts it."""
        tensors = self.tensors()
        total = sum(tensor.nbytes for tensor in tensors)
        files: dict[str, list[StoredTensor]] = {
            f"model-{number + 1:05}-of-{self.shards:05}.safetensors": []
            for number in range(self.shards)
        }
        names, before = list(files), 0
        for tensor in tensors:
            files[names[before * self.shards // total]].append(tensor)
            before += tensor.nbytes
        return {name: tuple(held) for name, held in files.items()}

    def config_json(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        names = {KDA: "linear_attention", DSA: "deepseek_sparse_attention"}
        return {
            "architectures": ["Glm5NextForConditionalGeneration"],
            "model_type": "glm5_next",
            "text_config": {
                "model_type": "glm5_next_text",
                "hidden_size": self.config.hidden,
                "num_hidden_layers": len(self.kinds),
                "num_nextn_predict_layers": self.mtp,
                "first_k_dense_replace": self.dense,
                "n_routed_experts": self.experts,
                "layer_types": [names.get(kind, "unknown") for kind in self.kinds],
                "linear_attn_config": {
                    "kda_layers": list(self.kda_layers),
                    "full_attn_layers": [i for i, kind in enumerate(self.kinds) if kind is DSA],
                    "num_heads": self.config.heads,
                    "head_dim": self.config.head_dim,
                    "short_conv_kernel_size": self.config.conv_kernel,
                    "gate_lower_bound": -5.0,
                },
            },
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK],
            },
        }


def payload(name: str, start: int, length: int) -> bytes:
    """Bytes [start, start + length) of what `write_checkpoint` stores as the tensor `name`.

    An endless stream for each name, read from anywhere; only the hash of the name goes into it. As
    BF16 or F32 it holds neither NaN nor infinity.
    """
    end = start + length
    first = start // _BLOCK_BYTES * _BLOCK_BYTES
    blocks = (
        _block(name, begin, min(end - begin, _BLOCK_BYTES))
        for begin in range(first, end, _BLOCK_BYTES)
    )
    return b"".join(blocks)[start - first :]


def _block(name: str, begin: int, length: int) -> bytes:
    key = hashlib.blake2b(f"{name}#{begin // _BLOCK_BYTES}".encode(), digest_size=32).digest()
    block = bytearray(hashlib.shake_128(key).digest(length))
    block[1::2] = block[1::2].translate(_FINITE)
    return bytes(block)


def bound_payload(layout: Layout, layer: int) -> dict[str, bytes]:
    """Field of `KdaWeights` -> the bytes that a bind of that KDA layer must give."""
    prefix = f"{layout.prefix}{layer}.{ATTENTION_PREFIX}"
    sizes = {
        spec.name.removeprefix(ATTENTION_PREFIX): spec.expected_bytes(layout.config)
        for spec in KDA_TENSORS
    }
    return {
        name: b"".join(payload(prefix + leaf, 0, sizes[leaf]) for leaf in leaves)
        for name, leaves in FIELD_TENSORS.items()
    }


def write_checkpoint(directory: str | os.PathLike[str], layout: Layout | None = None) -> Path:
    """Write a checkpoint of that layout (by default `Layout()`): shards, index and config.json.

    Makes the directory where it is not there yet, and returns its path.
    """
    layout = Layout() if layout is None else layout
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    files = layout.files()
    for file, tensors in files.items():
        write_shard(folder / file, tensors)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in layout.tensors())},
        "weight_map": {tensor.name: file for file, held in files.items() for tensor in held},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    (folder / CONFIG_NAME).write_text(json.dumps(layout.config_json(), indent=2) + "\n")
    return folder


def write_shard(path: str | os.PathLike[str], tensors: Sequence[StoredTensor]) -> None:
    """Write one safetensors file that holds `tensors`, each filled with its `payload`.

    A file that is there is replaced, and what else has that name is not, nor a link. Raises
    `PathError` when it cannot be written, and `ArgumentError`, before it writes, for a name, dtype
    or shape that the format does not have and for a name that comes twice.
    """
    file = require_path(path)
    tensors = require_items("tensors", tensors, "StoredTensor", "StoredTensor(...)")
    _require_storable(tensors)
    if os.path.lexists(file) and (os.path.islink(file) or not os.path.isfile(file)):
        refuse_writing(file, "it is no regular file")
    data = {tensor.name: payload(tensor.name, 0, tensor.nbytes) for tensor in tensors}
    specs: dict[str, Any] = {
        tensor.name: _serializable(tensor, data[tensor.name]) for tensor in tensors
    }
    try:
        safetensors.serialize_file(specs, file, {"format": "pt"})
    except safetensors.SafetensorError as error:
        refuse_writing(file, str(error))
    os.chmod(file, 0o666 & ~umask())  # the package leaves them to their owner alone


def _require_storable(tensors: Sequence[Any]) -> None:
    """Raise `ArgumentError` for tensors that cannot stand in one file."""
    names: set[object] = set()
    for tensor in tensors:
        if not isinstance(tensor, tuple) or len(tensor) != len(StoredTensor._fields):
            _refuse_tensor(tensor, "a StoredTensor", tensor)
        name, dtype, shape = tensor
        if not isinstance(name, str) or name == METADATA_KEY or not _is_encodable(name):
            _refuse_tensor(name, "a name that can stand in a file", name)
        if name in names:
            _refuse_tensor(name, "each name once", name)
        names.add(name)
        if dtype not in tuple(_SERIALIZER_DTYPES):
            _refuse_tensor(name, f"one of {', '.join(_SERIALIZER_DTYPES)}", dtype)
        if not isinstance(shape, tuple) or not all(
            type(dim) is int and 0 <= dim <= INTEGER_MAX for dim in shape
        ):
            _refuse_tensor(name, "a tuple of extents, each an int of 64 bits", shape)


def _is_encodable(name: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _refuse_tensor(name: object, expected: str, got: object) -> NoReturn:
    raise ArgumentError(
        ErrorCode.ARGUMENT,
        "it cannot be written to a shard",
        tensor=in_words(name),
        expected=expected,
        got=in_words(got, repr),
        hint="such as StoredTensor('lm_head.weight', 'BF16', (4, 2))",
    )


def _serializable(tensor: StoredTensor, data: bytes) -> object:
    """What the safetensors package takes for one tensor; `data` must outlive it."""
    dtype, shape = _SERIALIZER_DTYPES[tensor.dtype], list(tensor.shape)
    if not hasattr(safetensors, "TensorSpec"):  # before 0.8
        return {"dtype": dtype, "shape": shape, "data": data}
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    return safetensors.TensorSpec(dtype=dtype, shape=shape, data_ptr=address, data_len=len(data))


# The rows of the published checkpoint, at the layout's geometry ----------------------------------


def _model_rows(layout: Layout) -> Iterator[StoredTensor]:
    hidden, root = layout.config.hidden, layout.prefix.removesuffix("layers.")
    yield StoredTensor("lm_head.weight", "BF16", (layout.vocabulary, hidden))
    yield StoredTensor(f"{root}embed_tokens.weight", "BF16", (layout.vocabulary, hidden))
    yield StoredTensor(f"{root}norm.weight", "BF16", (hidden,))


def _layer_rows(layout: Layout, number: int) -> Iterator[StoredTensor]:
    """The tensors of one layer under layer-relative names."""
    hidden = layout.config.hidden
    is_mtp = number >= len(layout.kinds)
    yield StoredTensor("input_layernorm.weight", "BF16", (hidden,))
    yield StoredTensor("post_attention_layernorm.weight", "BF16", (hidden,))
    if is_mtp:
        yield StoredTensor("eh_proj.weight", "BF16", (hidden, 2 * hidden))
        for leaf in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
            yield StoredTensor(leaf, "BF16", (hidden,))
    else:
        for place in ("attn", "ffn"):
            yield StoredTensor(f"hc_{place}_fn", "BF16", (24, 4 * hidden))
            yield StoredTensor(f"hc_{place}_base", "F32", (24,))
            yield StoredTensor(f"hc_{place}_scale", "F32", (3,))
    kind = DSA if is_mtp else layout.kinds[number]
    if kind is KDA:
        for spec in KDA_TENSORS:
            leaf = spec.name.removeprefix(ATTENTION_PREFIX)
            dtype = layout.dtypes.get(leaf, spec.dtype.value)
            yield StoredTensor(spec.name, dtype, spec.expected_shape(layout.config))
    elif kind is DSA:
        yield from _dsa_rows(layout.config)
    if number < layout.dense:
        yield from _mlp_rows("mlp.", layout.mlp, hidden)
    else:
        yield from _moe_rows(layout)


def _dsa_rows(config: KdaConfig) -> Iterator[StoredTensor]:
    hidden, width, dim = config.hidden, config.qkv_dim, config.head_dim
    rank = hidden // 2
    yield from _fp8_rows("self_attn.q_a_proj", rank, hidden)
    yield StoredTensor("self_attn.q_a_layernorm.weight", "BF16", (rank,))
    yield from _fp8_rows("self_attn.q_b_proj", 2 * width, rank)
    yield from _fp8_rows("self_attn.kv_a_proj_with_mqa", dim, hidden)
    yield StoredTensor("self_attn.kv_a_layernorm.weight", "BF16", (dim,))
    yield StoredTensor("self_attn.kv_b_proj.weight", "BF16", (4 * width, dim))
    yield from _fp8_rows("self_attn.o_proj", hidden, 2 * width)
    for leaf, shape in (
        ("wq_b.weight", (width, rank)),
        ("wk.weight", (dim, hidden)),
        ("k_norm.weight", (dim,)),
        ("k_norm.bias", (dim,)),
        ("weights_proj.weight", (config.heads, hidden)),
        ("index_kpool_compress_gate", (dim, hidden)),
        ("index_kpool_compress_ape", (4, dim)),
    ):
        yield StoredTensor(f"self_attn.indexer.{leaf}", "BF16", shape)


def _moe_rows(layout: Layout) -> Iterator[StoredTensor]:
    hidden = layout.config.hidden
    yield StoredTensor("mlp.gate.weight", "BF16", (layout.experts, hidden))
    yield StoredTensor("mlp.gate.e_score_correction_bias", "F32", (layout.experts,))
    yield from _mlp_rows("mlp.shared_experts.", layout.mlp, hidden)
    for expert in range(layout.experts):
        yield from _mlp_rows(f"mlp.experts.{expert}.", layout.mlp, hidden)


def _mlp_rows(prefix: str, width: int, hidden: int) -> Iterator[StoredTensor]:
    yield from _fp8_rows(f"{prefix}gate_proj", width, hidden)
    yield from _fp8_rows(f"{prefix}up_proj", width, hidden)
    yield from _fp8_rows(f"{prefix}down_proj", hidden, width)


def _fp8_rows(name: str, rows: int, columns: int) -> Iterator[StoredTensor]:
    """A weight in block FP8, and its scales."""
    yield StoredTensor(f"{name}.weight", "F8_E4M3", (rows, columns))
    scales = (-(-rows // _FP8_BLOCK), -(-columns // _FP8_BLOCK))
    yield StoredTensor(f"{name}.weight_scale_inv", "F32", scales)
