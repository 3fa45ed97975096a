"""Writers of shards, indexes and checkpoints, right ones and wrong ones.

They share no code with the library and none with the safetensors package: a test that compares the
two needs files that neither of them made.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

INDEX_NAME = "model.safetensors.index.json"

KDA_NAMES = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.q_conv1d.weight",
    "self_attn.k_conv1d.weight",
    "self_attn.v_conv1d.weight",
    "self_attn.f_a_proj.weight",
    "self_attn.f_b_proj.weight",
    "self_attn.g_a_proj.weight",
    "self_attn.g_b_proj.weight",
    "self_attn.b_proj.weight",
    "self_attn.A_log",
    "self_attn.dt_bias",
    "self_attn.o_norm.weight",
    "self_attn.o_proj.weight",
)
"""The fifteen attention tensors of a KDA layer."""

DSA_NAMES = (
    "self_attn.q_a_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.indexer.wk.weight",
    "self_attn.o_proj.weight",
)
"""Some of the attention tensors of a DSA layer, the two that mark it among them."""


class Stored(NamedTuple):
    """One tensor as a file is to hold it."""

    dtype: str
    shape: Sequence[int]
    data: bytes


def u8(data: bytes) -> Stored:
    """Bytes as a tensor of bytes."""
    return Stored("U8", [len(data)], data)


def shard_bytes(header: object, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """A shard: `header` as bytes, as text or as an object, under its own length or another one."""
    if not isinstance(header, (bytes, str)):
        header = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    text = header if isinstance(header, bytes) else header.encode("utf-8")
    length = len(text) if length is None else length
    return length.to_bytes(8, "little") + text + payload


def shard_of(
    tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None, *, pad_to: int = 8
) -> bytes:
    """A good shard with the payload in the order of `tensors`."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(tensor.data)],
        }
        at += len(tensor.data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % pad_to)
    return shard_bytes(text, b"".join(tensor.data for tensor in tensors.values()))


def write_shard(path: Path, tensors: Mapping[str, Stored | bytes]) -> Path:
    """Write a good shard; a tensor that is given as bytes is a tensor of bytes."""
    path.write_bytes(
        shard_of({n: u8(t) if isinstance(t, bytes) else t for n, t in tensors.items()})
    )
    return path


def write_index(directory: Path, weight_map: Mapping[str, object], **members: object) -> Path:
    """Write an index over `weight_map`; `members` are put beside it."""
    path = directory / INDEX_NAME
    path.write_text(json.dumps({"weight_map": weight_map, **members}), encoding="utf-8")
    return path


def write_checkpoint(
    directory: Path,
    shards: Mapping[str, Mapping[str, Stored | bytes]],
    config: Mapping[str, object] | None = None,
) -> Path:
    """Write shards by file name, an index that lists all they hold, and perhaps a config."""
    directory.mkdir(parents=True, exist_ok=True)
    for file_name, tensors in shards.items():
        write_shard(directory / file_name, tensors)
    write_index(directory, {name: file for file, tensors in shards.items() for name in tensors})
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def numbered(count: int) -> list[str]:
    """The file names of a checkpoint of `count` shards."""
    return [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]


def layer_tensors(prefix: str, number: int, names: Iterable[str] = KDA_NAMES) -> dict[str, bytes]:
    """The tensors of one layer under their full names; each holds its own name."""
    full_names = [f"{prefix}{number}.{name}" for name in names]
    return {name: name.encode("utf-8") for name in full_names}


def mapped_regions(path: Path) -> list[tuple[int, int, str]]:
    """(begin, end, permissions) of each map that this process has of `path`; Linux only."""
    status = path.stat()
    regions = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, permissions, _, _, inode, *_ = line.split()
        if int(inode) == status.st_ino and line.rstrip().endswith(path.name):
            begin, end = (int(part, 16) for part in span.split("-"))
            regions.append((begin, end, permissions))
    return regions


def write_sparse_shard(path: Path, names: Iterable[str], nbytes: int) -> Path:
    """Write a shard with a payload of zeros that takes no room: `nbytes` a tensor."""
    header, at = {}, 0
    for name in names:
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [at, at + nbytes]}
        at += nbytes
    data = shard_bytes(header)
    path.write_bytes(data)
    os.truncate(path, len(data) + at)
    return path


def descriptors_under(folder: Path) -> list[str]:
    """What this process holds open of the folder; Linux only."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry))
    return [target for target in found if target.startswith(f"{folder}/")]
