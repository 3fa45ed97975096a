"""Opening at full scale, against the safetensors package: `python bench/bench_open.py`.

Both read the same 62 shards and 76,108 tensors, turn by turn in one process, with warm files:
safetensors opens each shard and asks every slice for its dtype and shape; kda_stream opens the
checkpoint, which checks every header and the index. The figure that counts is the ratio of the
medians; the exit status is 1 when it is over 2.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open

from kda_stream import open_checkpoint

RATIO_MAX = 2.0
REPLICA = Path(__file__).parent.parent / "tests" / "fullscale" / "replica.py"


def open_with_safetensors(directory: Path) -> int:
    tensors = 0
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "np") as shard:
            for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                piece = shard.get_slice(name)
                piece.get_dtype()
                piece.get_shape()
                tensors += 1
    return tensors


def open_with_kda_stream(directory: Path) -> int:
    with open_checkpoint(directory) as checkpoint:
        return len(checkpoint)


def seconds(run: Callable[[Path], int], directory: Path) -> float:
    began = time.perf_counter()
    if run(directory) != 76_108:
        raise SystemExit(f"{run.__name__} saw another number of tensors")
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        subprocess.run([sys.executable, str(REPLICA), folder], check=True)
        times: dict[str, list[float]] = {"safetensors": [], "kda_stream": []}
        for turn in range(rounds + 1):
            for name, run in (
                ("safetensors", open_with_safetensors),
                ("kda_stream", open_with_kda_stream),
            ):
                taken = seconds(run, directory)
                if turn:  # the first turn warms the files and the imports
                    times[name].append(taken)
    for name, taken_list in times.items():
        low, middle = min(taken_list), statistics.median(taken_list)
        print(f"{name:12} median {middle:.3f} s, least {low:.3f} s of {rounds}")
    ratio = statistics.median(times["kda_stream"]) / statistics.median(times["safetensors"])
    print(f"ratio {ratio:.2f} (at most {RATIO_MAX})")
    return 0 if ratio <= RATIO_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
