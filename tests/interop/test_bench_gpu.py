"""`bench/bench_gpu.py` as far as it runs without a GPU: its steps, its checksums, its sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the interop extra")

import torch
from support.checkpoints import Written

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not (ROOT / "bench" / "bench_gpu.py").exists(), reason="bench/ is not here"
)


def ran(*arguments: object, script: str | None = None) -> subprocess.CompletedProcess[str]:
    """The bench, or a script beside it, in a process in which warnings are errors."""
    what = ["bench/bench_gpu.py"] if script is None else ["-c", script]
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", *what, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    done = ran()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "bench_gpu.py needs a GPU and torch with CUDA, and finds none here.\n"


@pytest.mark.parametrize("slots", [1, 3])
def test_its_steps_run_on_the_cpu_and_find_every_checksum_right(
    written: Written, slots: int
) -> None:
    done = ran(written.folder, "--device", "cpu", "--rounds", 2, "--slots", slots)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        f"6 layers, 24,936 bytes, {slots} slots, to cpu",
        "registered: not asked for",
        "checksums: those of every layer are right on the device",
    ]
    names = ["staging alone", "copying alone", "both, overlapped", "bus: plain pinned copy"]
    for name, line in zip(names, lines[3:], strict=True):
        assert re.fullmatch(rf" +{name} +\d+\.\d{{3}} GB/s +\d+\.\d% of the bus", line)


SCRIPT = """
import sys
from bench import bench_gpu
bench_gpu.SUMMED_BYTES = 1000  # several pieces a layer
whole = bench_gpu.Target.copy
def copy(self, *sources):
    if len(sources) > 1 and self.buffer.numel() in seen:
        sources = CHANGED
    seen.append(self.buffer.numel())
    return whole(self, *sources)
seen = []
bench_gpu.Target.copy = copy
sys.argv = ["bench_gpu.py", *sys.argv[1:]]
sys.exit(bench_gpu.main())
"""


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ("sources", 0),
        ("[sources[1], sources[0], *sources[2:]]", 1),
        ("[sources[0] ^ (bench_gpu.torch.arange(len(sources[0])) == 7), *sources[1:]]", 1),
    ],
    ids=["as they are", "two tensors swapped", "one bit turned"],
)
def test_its_checksums_tell_bytes_that_are_wrong(written: Written, changed: str, code: int) -> None:
    script = SCRIPT.replace("CHANGED", changed)
    done = ran(written.folder, "--device", "cpu", "--rounds", 1, script=script)
    assert (done.returncode, done.stderr) == (code, "")
    assert ("checksums differ: layers" in done.stdout) is bool(code)
