"""A checkpoint twenty times as large as its process's control group: streamed, and not killed."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.running import command_of, linux_only
from support.groups import MIB, Group, memory_group, run_in
from support.large_layers import LAYER_BYTES, write_large_layers
from support.left_behind import cold
from support.page_cache import cached_pages, has_a_page_cache

pytestmark = [linux_only, pytest.mark.mlock, pytest.mark.slow]

LIMIT_BYTES = 384 * MIB
LAYERS = 30

STREAM = """
from kda_stream import open_checkpoint, stream_kda_layers
from support.large_layers import is_right
from support.left_behind import bytes_of
folder, read, layers = Path(sys.argv[1]), sys.argv[2], list(range(int(sys.argv[3])))
with open_checkpoint(folder) as checkpoint:
    pass
before = Before(folder)
wrong, seen = [], []
with open_checkpoint(folder) as checkpoint:
    with stream_kda_layers(checkpoint, layers=layers, slots=1, read=read,
                           residency="drop") as stream:
        for layer in stream:
            seen.append(layer.index)
            if not is_right(layer.weights, layer.index):
                wrong.append(layer.index)
        report = stream.report
del stream, layer
print(json.dumps({"seen": seen, "wrong": wrong, "bytes": report.bytes, "reads": report.reads,
                  "locked": report.lock.locked, "refusal": report.lock.refusal,
                  "peak": bytes_of("VmHWM"), "left": before.left()}))
"""
LOAD_EVERYTHING = """
import sys
from pathlib import Path
everything = [path.read_bytes() for path in sorted(Path(sys.argv[1]).glob("*.safetensors"))]
print(len(everything))
"""


@pytest.fixture(scope="module")
def twenty_times(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """30 layers of 275 MB, which take no room on the disk."""
    folder = tmp_path_factory.mktemp("twenty-times")
    if not has_a_page_cache(folder):
        pytest.skip("files here do not leave the page cache")
    write_large_layers(folder, LAYERS)
    yield folder
    for path in folder.iterdir():
        path.unlink()


def streamed_in(group: Group, folder: Path, read: str, layers: int) -> dict[str, Any]:
    done = run_in(group, *command_of(STREAM, folder, read, layers), seconds=120)
    assert done.returncode == 0, f"exit {done.returncode}, {group.killed()} killed\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def most_bytes_in(group: Group) -> int | None:
    """The most memory that the group had, page cache included; None where it is not counted."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group.folder / name).exists():
            return int(group.read(name))
    return None


def assert_streamed_in(group: Group, folder: Path, read: str, layers: int) -> None:
    """Stream so many layers in the group, from a cold page cache, within its memory."""
    shards = cold(folder)
    found = streamed_in(group, folder, read, layers)
    most_bytes = most_bytes_in(group)
    assert group.killed() == 0
    assert found["seen"] == list(range(layers))
    assert found["wrong"] == []
    assert found["bytes"] == layers * LAYER_BYTES
    assert found["reads"] == {"direct" if read == "auto" else read: layers}
    assert found["locked"] or "ulimit -l" in found["refusal"]
    assert LAYER_BYTES < found["peak"] <= LIMIT_BYTES
    assert most_bytes is None or LAYER_BYTES < most_bytes <= LIMIT_BYTES
    assert found["left"] == {}
    headers = sum(len(cached_pages(shard)) for shard in shards)
    assert headers <= len(shards), "a page each, unless the group wanted it back"


def test_a_checkpoint_of_twenty_times_the_memory_is_streamed_where_loading_all_of_it_is_killed(
    twenty_times: Path,
) -> None:
    assert LAYERS * LAYER_BYTES > 20 * LIMIT_BYTES
    with memory_group(LIMIT_BYTES) as group:
        assert_streamed_in(group, twenty_times, "auto", LAYERS)
        everything = run_in(group, sys.executable, "-c", LOAD_EVERYTHING, str(twenty_times))
        assert (everything.returncode, everything.stdout) == (-signal.SIGKILL, "")
        assert group.killed() == 1


@pytest.mark.parametrize(("read", "layers"), [("positional", LAYERS), ("mapped", 4)])
def test_that_checkpoint_is_streamed_through_the_page_cache_too(
    twenty_times: Path, read: str, layers: int
) -> None:
    """Mapped layers are few: where nothing can stay in the page cache a map is slow."""
    with memory_group(LIMIT_BYTES) as group:
        assert_streamed_in(group, twenty_times, read, layers)
