"""How soon the first KDA layer of a checkpoint is there: `bench_first_layer.py CHECKPOINT`.

From the path alone to the layer's fifteen tensors in one buffer, conv joined: kda_stream with every
header checked, kda_stream with those that are needed, and the safetensors package, which opens the
shards that the index names for the layer and no others. Each run is a process of its own, in turn;
imports are left out. Cold: every file of the folder is dropped from the page cache before.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

ROUNDS = 7

OURS = """
from kda_stream import open_checkpoint, stream_kda_layers
from kda_stream.staging.native import extension
import kda_stream.stream
extension()
begin = time.perf_counter()
with open_checkpoint(folder, verify={verify!r}) as checkpoint:
    with stream_kda_layers(checkpoint, slots=1) as stream:
        layer = next(stream)
        seconds = time.perf_counter() - begin
        assert layer.report.bytes > 0
"""
SAFETENSORS = """
from safetensors import safe_open
import torch
begin = time.perf_counter()
weight_map = json.load(open(os.path.join(folder, "model.safetensors.index.json")))["weight_map"]
marked = [name for name in weight_map if name.endswith(".self_attn.A_log")]
first = min(marked, key=lambda name: int(name.split("layers.")[1].split(".")[0]))
prefix = first.removesuffix("A_log")
names = [name for name in weight_map if name.startswith(prefix)]
files = {}
for name in names:
    if weight_map[name] not in files:
        path = os.path.join(folder, weight_map[name])
        files[weight_map[name]] = safe_open(path, framework="pt")
tensors = {name: files[weight_map[name]].get_tensor(name) for name in names}
nbytes = sum(tensor.nbytes for tensor in tensors.values())
buffer = torch.empty(nbytes, dtype=torch.uint8)
at = 0
leaves = sorted(names, key=lambda name: ("_conv1d" in name, "qkv".find(name[len(prefix)])))
for name in leaves:
    tensor = tensors[name].contiguous().view(torch.uint8).reshape(-1)
    buffer[at:at + tensor.nbytes].copy_(tensor)
    at += tensor.nbytes
seconds = time.perf_counter() - begin
"""
CASES = {
    "kda_stream, every header checked": OURS.format(verify="all"),
    'kda_stream, verify="needed"': OURS.format(verify="needed"),
    "safetensors, torch": SAFETENSORS,
}


def seconds_of(script: str, folder: Path, *, cold: bool) -> float:
    """What one process took; the files are dropped from the page cache, or read, before."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    text = f"import json, os, sys, time\nfolder = sys.argv[1]\n{script}\nprint(seconds)\n"
    command = [sys.executable, "-c", text, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    for cold in (False, True):
        taken: dict[str, list[float]] = {name: [] for name in CASES}
        for turn in range(ROUNDS + 1):
            for name, script in CASES.items():
                seconds = seconds_of(script, folder, cold=cold)
                if turn:  # the first warms up
                    taken[name].append(seconds)
        peer = statistics.median(taken["safetensors, torch"])
        print("cold" if cold else "warm")
        for name, all_seconds in taken.items():
            median = statistics.median(all_seconds)
            print(f"  {name:<34} {median:7.3f} s  {median / peer:5.2f} of safetensors' time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
