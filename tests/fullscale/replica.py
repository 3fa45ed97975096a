"""Writes the full-scale GLM-5.3-Flash checkpoint as sparse files: `replica.py OUT [--layers 0,1]`.

Names, dtypes, shapes and the placement of the KDA tensors are the published ones; see
`glm53_flash_fp8.json` for what is known and what is not. 62 shards, 76,108 tensors, 328 GB long and
about 30 MB on disk: the payload is a hole, except for the KDA tensors. Of these, `--layers` are
written whole; every other one has its first and its last 4 KiB. A written byte at offset o of a
tensor is `tensor_bytes(name, o, 1)`, so a reader can be checked without a second copy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FACTS: dict[str, Any] = json.loads(Path(__file__).with_name("glm53_flash_fp8.json").read_text())
PREFIX = FACTS["layer_prefix"]
BITS = {"BF16": 16, "F32": 32, "F8_E4M3": 8}
BLOCK_BYTES = 1 << 20
EDGE_BYTES = 4096
ROUTED_EXPERTS = 288
VISION_TENSORS = 347

# Two KDA layers lie in two shards; these leaves are in the second one.
LATE_LEAVES = {
    1: ("o_proj.", "q_conv1d.", "q_proj.", "v_conv1d.", "v_proj."),
    9: ("q_proj.", "v_conv1d.", "v_proj."),
}

Row = tuple[str, str, list[int]]


def tensor_bytes(name: str, start: int, length: int) -> bytes:
    """`length` bytes of the tensor `name` from byte `start`."""
    out = bytearray()
    block = start // BLOCK_BYTES
    while len(out) < start % BLOCK_BYTES + length:
        key = hashlib.blake2b(f"{name}#{block}".encode(), digest_size=32).digest()
        out += hashlib.shake_128(key).digest(BLOCK_BYTES)
        block += 1
    return bytes(out[start % BLOCK_BYTES : start % BLOCK_BYTES + length])


def nbytes(row: Row) -> int:
    return math.prod(row[2]) * BITS[row[1]] // 8


def layer_rows(layer: int) -> Iterator[Row]:
    kda, mtp = layer in FACTS["kda_layers_0based"], layer == FACTS["mtp_layer"]
    groups = [("", "norms_every_layer"), ("", "kda_self_attn" if kda else "dsa_self_attn")]
    if not mtp:
        groups.append(("", "hyper_connection_layers_0_44"))
    if layer in FACTS["dense_mlp_layers"]:
        groups.append(("", "dense_mlp"))
    else:
        groups.append(("", "moe_router"))
        groups += [(f"mlp.experts.{e}.", "moe_routed_expert") for e in range(ROUTED_EXPERTS)]
        groups.append(("mlp.shared_experts.", "moe_shared"))
    if mtp:
        groups.append(("", "mtp_layer_extra"))
    for inner, group in groups:
        for tensor in FACTS[group]:
            name = PREFIX.format(i=layer) + inner + tensor["name"]
            yield name, tensor["dtype"], tensor["shape"]


def vision_rows() -> Iterator[Row]:
    """Stand-ins of the right total size: the names of the vision tensors are not published."""
    elements = FACTS["bytes"]["vision"] // 2
    each = elements // VISION_TENSORS
    for n in range(VISION_TENSORS):
        size = each if n < VISION_TENSORS - 1 else elements - each * (VISION_TENSORS - 1)
        yield f"model.visual.stand_in.{n}.weight", "BF16", [size]


def kda_layer(name: str) -> int | None:
    """The KDA layer whose attention holds the tensor, or None for any other tensor."""
    head, _, _ = name.partition(".self_attn.")
    layer = head.rpartition(".")[2]
    known = head != name and layer in FACTS["kda_attn_shards"]
    return int(layer) if known else None


def placed() -> dict[str, list[Row]]:
    """Shard file -> its tensors: KDA tensors where they are known to be, the rest in order."""
    room = {s["file"]: s["bytes"] - s["header_bytes"] - 8 for s in FACTS["shards"]}
    held: dict[str, list[Row]] = {file: [] for file in room}

    def put(file: str, row: Row) -> None:
        held[file].append(row)
        room[file] -= nbytes(row)

    rest = []
    for layer in range(FACTS["mtp_layer"] + 1):
        for row in layer_rows(layer):
            number = kda_layer(row[0])
            if number is None:
                rest.append(row)
                continue
            files = FACTS["kda_attn_shards"][str(number)]
            leaf = row[0].partition(".self_attn.")[2]
            put(files[-1] if leaf.startswith(LATE_LEAVES.get(number, ())) else files[0], row)
    files = list(room)
    for row in vision_rows():
        put(files[-1], row)
    at = 0
    for row in [(t["name"], t["dtype"], t["shape"]) for t in FACTS["globals"]] + rest:
        while room[files[at]] < nbytes(row) and at < len(files) - 1:
            at += 1
        put(files[at], row)
    return held


def write_shard(path: Path, rows: list[Row], layers: set[int]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for row in sorted(rows, key=lambda r: (-BITS[r[1]], r[0])):
        begin, end = end, end + nbytes(row)
        header[row[0]] = {"dtype": row[1], "shape": row[2], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        for row in rows:
            layer = kda_layer(row[0])
            if layer is None:
                continue
            begin = 8 + len(text) + header[row[0]]["data_offsets"][0]
            for start, stop in written_ranges(nbytes(row), whole=layer in layers):
                file.seek(begin + start)
                file.write(tensor_bytes(row[0], start, stop - start))


def written_ranges(size: int, *, whole: bool) -> list[tuple[int, int]]:
    """Which bytes of a KDA tensor of `size` bytes are written."""
    if whole or size <= 2 * EDGE_BYTES:
        return [(at, min(at + BLOCK_BYTES, size)) for at in range(0, size, BLOCK_BYTES)]
    return [(0, EDGE_BYTES), (size - EDGE_BYTES, size)]


def config() -> dict[str, Any]:
    kda = FACTS["kda_layers_0based"]
    kinds = ["linear_attention" if i in kda else "deepseek_sparse_attention" for i in range(45)]
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": {
            "model_type": "glm5_next_text",
            "hidden_size": 4096,
            "num_hidden_layers": 45,
            "num_nextn_predict_layers": 1,
            "layer_types": kinds,
            "linear_attn_config": {
                "kda_layers": kda,
                "full_attn_layers": FACTS["dsa_layers_0based"],
                "num_heads": 64,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
            },
        },
    }


def write_replica(out: Path, layers: set[int]) -> None:
    """Write the checkpoint into the folder `out`, the KDA tensors of `layers` whole."""
    out.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for file, rows in placed().items():
        write_shard(out / file, rows, layers)
        weight_map.update(dict.fromkeys((row[0] for row in rows), file))
    total = {"total_size": FACTS["bytes"]["data_total"]}
    index = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (out / "config.json").write_text(json.dumps(config(), indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", default="", help="KDA layers to write whole: 0,1,9")
    options = parser.parse_args()
    write_replica(options.out, {int(n) for n in options.layers.split(",") if n})
