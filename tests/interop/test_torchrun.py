"""`torchrun examples/tp_load.py`: ranks hold the whole together, or end together and say why."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.checkpoints import Geometry, Stored
from support.families import FAMILIES, KIMI_K3, Family, write_family

pytest.importorskip("torch", reason="needs the interop extra")

pytestmark = [pytest.mark.interop, pytest.mark.slow]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tp_load.py"
GEOMETRY = Geometry(hidden=16, heads=4, head_dim=8, conv_kernel=4)
SECONDS_MAX = 60  # far less than the 120 that gloo waits for a rank


def torchrun(script: Path, *arguments: object, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)


@pytest.mark.parametrize("name", ["GLM5_NEXT", "KIMI_K3", "LING_3"])
def test_the_ranks_hold_the_whole_of_every_layer(tmp_path: Path, name: str) -> None:
    family: Family = FAMILIES[name]
    written = write_family(tmp_path, family, GEOMETRY, layers=6)
    done = torchrun(EXAMPLE, tmp_path)
    assert done.returncode == 0, done.stderr
    layers = len(written.kda_layers)
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert [line.partition(":")[0] for line in said] == ["rank 0 of 2", "rank 1 of 2"]
    assert all(f": {layers} layers, " in line for line in said)


def test_a_rank_that_fails_ends_the_others_with_its_reason(tmp_path: Path) -> None:
    """Padding that is not zeros is seen by the last rank alone."""

    def spoil(tensors: dict[str, Stored]) -> None:
        name = next(name for name in tensors if name.endswith("2.self_attn.A_log"))
        data = bytearray(tensors[name].bytes_of(name))
        data[-1] = 1
        tensors[name] = Stored(tensors[name].dtype, tensors[name].shape, data=bytes(data))

    write_family(tmp_path, KIMI_K3, GEOMETRY, layers=6, change=spoil)
    done = torchrun(EXAMPLE, tmp_path)
    assert done.returncode != 0
    reason = "rank 0 ends, as rank 1 failed: "
    line = next(line for line in done.stderr.splitlines() if reason in line)
    assert "the padding behind the values that count is not zeros" in line


def test_ranks_that_cannot_share_the_heads_all_end_with_the_reason(tmp_path: Path) -> None:
    write_family(tmp_path, KIMI_K3, GEOMETRY, layers=3)
    done = torchrun(EXAMPLE, tmp_path, ranks=3)
    assert done.returncode != 0
    assert "a divisor of 4 heads: 1, 2, 4" in done.stderr


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    write_family(tmp_path / "checkpoint", KIMI_K3, GEOMETRY, layers=3)
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, runpy, signal
            import kda_stream
            if os.environ["RANK"] == "1":
                def die(*_, **__):
                    os.kill(os.getpid(), signal.SIGKILL)
                kda_stream.identify_family = die
            runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
            """
        )
    )
    done = torchrun(script, tmp_path / "checkpoint")
    assert done.returncode != 0
    assert "exitcode  : -9" in done.stderr or "Signal 9" in done.stderr
