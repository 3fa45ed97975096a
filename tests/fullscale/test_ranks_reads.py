"""What a rank reads of a full-size layer that is not in the page cache, by the kernel's count."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.large_layers import shard_path, write_large_layers
from support.page_cache import cool, has_a_page_cache

RunPython = Callable[..., Any]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/io"),
]

STREAM = """
import json, sys
from kda_stream import KdaConfig, KdaTpPlan, open_checkpoint, stream_kda_layers

def bytes_read():
    lines = (line.split(": ") for line in open("/proc/self/io"))
    return next(int(count) for key, count in lines if key == "read_bytes")

folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with open_checkpoint(folder) as checkpoint:
    plan = KdaTpPlan(KdaConfig.from_json(checkpoint.config_path), rank, size)
    with stream_kda_layers(checkpoint, plan=plan, layers=[0], lock="off") as stream:
        before = bytes_read()
        [path] = [layer.report.read.path for layer in stream]
        nbytes, o_proj = stream.report.bytes, plan.config.qkv_dim * plan.config.hidden * 2
        print(json.dumps([path, bytes_read() - before, nbytes, o_proj]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    if not has_a_page_cache(made):
        pytest.skip("the file system does not say what is in the page cache")
    write_large_layers(made, 1)
    content = shard_path(made, 0).read_bytes()  # without the holes, which no disk is asked for
    shard_path(made, 0).write_bytes(content)
    return made


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("rank", ["first", "last"])
def test_a_rank_reads_its_own_bytes_and_o_proj_whole(
    folder: Path, run_python: RunPython, size: int, rank: str
) -> None:
    """Within 5 %; `o_proj`, whose columns lie apart by less than a read costs, once a host.

    What was read ahead with the header is not read again: a tenth of the smallest part.
    """
    cool(shard_path(folder, 0))
    number = 0 if rank == "first" else size - 1
    path, read, nbytes, o_proj = run_python(STREAM, folder, number, size)
    if path != "direct":
        pytest.skip(f"the layer was read by the way {path!r} here")
    own = nbytes - o_proj
    assert 0.9 * own <= read - size * o_proj <= 1.05 * own
