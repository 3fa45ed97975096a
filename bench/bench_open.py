"""Opening at full scale, against the safetensors package: `python bench/bench_open.py`.

Both read the same shards, turn by turn in one process, with warm files: safetensors opens each
shard and asks every slice for its dtype and shape; kda_stream opens the checkpoint, which checks
every header and the index. Once with the 62 shards and 76,108 tensors of GLM-5.3-Flash, and once
with 200 shards of 500 tensors. The figure that counts is the median of the turns' ratios, which a
busy machine moves least; the exit status is 1 when one is over 1. `python -m bench` measures the
same with a process for each turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from kda_stream import open_checkpoint

RATIO_MAX = 1.0
REPLICA = Path(__file__).parent.parent / "tests" / "fullscale" / "replica.py"


def write_glm53(directory: Path) -> int:
    """Write the replica of GLM-5.3-Flash; how many tensors it has."""
    subprocess.run([sys.executable, str(REPLICA), str(directory)], check=True)
    return 76_108


def write_many_shards(directory: Path, shards: int = 200, tensors: int = 500) -> int:
    """Write shards of so many tensors each; how many they are in all."""
    nbytes = 2 * 2048 * 512
    places = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header = {}
        for tensor in range(tensors):
            name = f"model.layers.{shard}.mlp.experts.{tensor}.down_proj.weight"
            begin = tensor * nbytes
            offsets = [begin, begin + nbytes]
            header[name] = {"dtype": "BF16", "shape": [2048, 512], "data_offsets": offsets}
            places[name] = file
        text = json.dumps(header, separators=(",", ":")).encode()
        (directory / file).write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(directory / file, 8 + len(text) + tensors * nbytes)
    index = {"metadata": {"total_size": shards * tensors * nbytes}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return shards * tensors


def opened_by_safetensors(directory: Path) -> tuple[int, Any]:
    """How many tensors, and every shard, opened; each dtype and shape has been asked for."""
    tensors = 0
    shards = []
    for path in sorted(directory.glob("*.safetensors")):
        shard = safe_open(path, "np")
        for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
            piece = shard.get_slice(name)
            piece.get_dtype()
            piece.get_shape()
            tensors += 1
        shards.append(shard)
    return tensors, shards


def opened_by_kda_stream(directory: Path) -> tuple[int, Any]:
    """How many tensors, and the checkpoint, opened."""
    checkpoint = open_checkpoint(directory)
    return len(checkpoint), checkpoint


def close(opened: Any) -> None:
    """Close what one of the two has opened."""
    if isinstance(opened, list):
        opened.clear()
    else:
        opened.close()


def described(opened: Any) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor of what one of the two has opened."""
    if not isinstance(opened, list):
        for name in opened:
            info = opened.info(name)
            yield name, info.dtype, tuple(info.shape)
        return
    for shard in opened:
        for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
            piece = shard.get_slice(name)
            yield name, piece.get_dtype(), tuple(piece.get_shape())


def seconds(run: Callable[[Path], tuple[int, Any]], directory: Path, tensors: int) -> float:
    began = time.perf_counter()
    seen, opened = run(directory)
    close(opened)
    taken = time.perf_counter() - began
    if seen != tensors:
        raise SystemExit(f"{run.__name__} saw another number of tensors")
    return taken


def median_ratio(write: Callable[[Path], int], rounds: int) -> float:
    times: dict[str, list[float]] = {"safetensors": [], "kda_stream": []}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        tensors = write(directory)
        for turn in range(rounds + 1):
            for name, run in (
                ("safetensors", opened_by_safetensors),
                ("kda_stream", opened_by_kda_stream),
            ):
                taken = seconds(run, directory, tensors)
                if turn:  # the first turn warms the files and the imports
                    times[name].append(taken)
    print(f"{tensors} tensors")
    for name, taken_list in times.items():
        low, middle = min(taken_list), statistics.median(taken_list)
        print(f"  {name:12} median {middle:.3f} s, least {low:.3f} s of {rounds}")
    turns = zip(times["kda_stream"], times["safetensors"], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in turns)
    print(f"  ratio {ratio:.2f} (at most {RATIO_MAX})")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    ratios = [median_ratio(write, rounds) for write in (write_glm53, write_many_shards)]
    return 0 if max(ratios) <= RATIO_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
