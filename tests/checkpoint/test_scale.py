"""What a large checkpoint costs to open: memory for its tensors, and pages of its shards."""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.page_cache import cached_pages

from kda_stream import open_checkpoint

RunPython = Callable[..., Any]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and asks mincore")

PAGE = mmap.PAGESIZE
MIB = 1024**2
TENSORS = 497_220  # as many as Kimi-K3 has
SHARDS = 60
MATRICES = ("gate_proj", "up_proj", "down_proj")
KINDS = (("F8_E4M3", [2048, 7168]), ("F32", [16, 56]), ("BF16", [7168, 512]))
BYTES = (2048 * 7168, 4 * 16 * 56, 2 * 7168 * 512)


def expert_name(number: int) -> str:
    layer, rest = divmod(number, 8192)
    expert, matrix = divmod(rest, len(MATRICES))
    return f"language_model.model.layers.{layer}.mlp.experts.{expert}.{MATRICES[matrix]}.weight"


def write_sparse_checkpoint(folder: Path, shards: int, tensors: int) -> Path:
    """Write `tensors` tensors in `shards` shards whose payload takes no room."""
    places = []
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        entries, end = [], 0
        for number in range(shard * tensors // shards, (shard + 1) * tensors // shards):
            (dtype, shape), begin = KINDS[number % len(KINDS)], end
            end += BYTES[number % len(KINDS)]
            name, dims = expert_name(number), ",".join(map(str, shape))
            entries.append(
                f'"{name}":{{"dtype":"{dtype}","shape":[{dims}],"data_offsets":[{begin},{end}]}}'
            )
            places.append(f'    "{name}": "{file}"')
        text = ("{" + ",".join(entries) + "}").encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(folder / file, 8 + len(text) + end)
    members = ",\n".join(places)
    index = folder / "model.safetensors.index.json"
    index.write_text(f'{{\n  "metadata": {{}},\n  "weight_map": {{\n{members}\n  }}\n}}\n')
    return folder


MEASURE = """
import json, sys
from kda_stream import open_checkpoint
import kda_stream.checkpoint.checkpoint
from kda_stream.staging.native import extension

def status(key):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(key))

extension()
before = status("VmRSS")
with open_checkpoint(sys.argv[1], verify=sys.argv[2]) as checkpoint:
    checkpoint.layers()
    growth = {"tensors": len(checkpoint), "peak": status("VmHWM") - before}
    growth["open"] = status("VmRSS") - before
print(json.dumps(growth))
"""


def test_half_a_million_tensors_open_in_half_a_kibibyte_each(
    tmp_path: Path, run_python: RunPython
) -> None:
    folder = write_sparse_checkpoint(tmp_path, SHARDS, TENSORS)
    for verify, peak_max, open_max in (("all", 512, 448), ("needed", 512, 256)):
        growth = run_python(MEASURE, folder, verify)
        assert growth["tensors"] == TENSORS
        assert 0 < growth["open"] / TENSORS < open_max, (verify, growth)
        assert growth["open"] <= growth["peak"] < peak_max * TENSORS, (verify, growth)


# The page cache ----------------------------------------------------------------------------------


def write_and_forget(path: Path, tensors: int) -> int:
    """Write a shard with 2 MiB of payload, put it on the disk and out of memory; the header's end.

    Returns how many bytes come before its payload.
    """
    entries, each = {}, 2 * MIB // tensors
    for number in range(tensors):
        offsets = [number * each, (number + 1) * each]
        entries[expert_name(number)] = {"dtype": "U8", "shape": [each], "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + os.urandom(tensors * each))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return 8 + len(text)


@pytest.mark.parametrize("verify", ["all", "needed"])
def test_opening_leaves_the_headers_in_the_page_cache_and_nothing_else(
    verify: Any, tmp_path: Path
) -> None:
    """Less than 0.1 MiB a shard, as long as its header is no longer than that itself."""
    counts = {f"model-{n + 1:05}-of-00004.safetensors": 500 >> n for n in range(4)}
    begins = {file: write_and_forget(tmp_path / file, count) for file, count in counts.items()}
    places = {expert_name(n): file for file, count in counts.items() for n in range(count)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    if any(cached_pages(tmp_path / file) for file in counts):
        pytest.skip("the file system keeps its pages in memory")
    with open_checkpoint(tmp_path, verify=verify) as checkpoint:
        shards = [checkpoint.shards[file] for file in counts]
        for shard, (file, begin) in zip(shards, begins.items(), strict=True):
            assert shard.header.payload_begin == begin
            pages = cached_pages(tmp_path / file)
            assert pages == set(range(-(-begin // PAGE)))
            assert len(pages) * PAGE < 0.1 * MIB
