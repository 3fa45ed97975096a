"""The examples, run as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import Geometry
from support.families import GLM5_NEXT, KIMI_K3, write_family

pytest.importorskip("torch", reason="needs the interop extra")

pytestmark = pytest.mark.interop

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GEOMETRY = Geometry(hidden=16, heads=4, head_dim=8, conv_kernel=4)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "serve.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("family", [GLM5_NEXT, KIMI_K3], ids=lambda family: family.name)
def test_a_checkpoint_is_served(tmp_path: Path, family: object) -> None:
    written = write_family(tmp_path, family, GEOMETRY, layers=6)  # type: ignore[arg-type]
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    layers = len(written.kda_layers)
    assert f"{layers} KDA layers by" in done.stdout
    assert f"layer 0 is {written.families[0].name}" in done.stdout


def test_a_path_that_is_no_checkpoint_is_told_of(tmp_path: Path) -> None:
    done = run(tmp_path / "none")
    assert done.returncode == 2
    assert done.stderr.startswith("path-missing: ")
