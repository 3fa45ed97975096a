"""Read-ahead: while the consumer works on a layer the next ones come, as many as there are slots.

On a disk that a control group makes slow and steady, so that the disk's time is what is measured.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support.checkpoints import MEDIUM, Geometry, Stored, kda_block, save_raw_shard, write_index
from support.groups import run_in, slow_disk_group
from support.page_cache import cached_pages, cool, has_a_page_cache, pages_of

from kda_stream import KdaConfig, open_checkpoint, stream_kda_layers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's page cache and groups")

MIB = 1024**2


def write_layers(folder: Path, geometry: Geometry, layers: int) -> list[Path]:
    """A checkpoint of KDA layers, one to a shard."""
    folder.mkdir(exist_ok=True)
    weight_map, rows = {}, {}
    shards = [folder / f"model-{n:05}.safetensors" for n in range(layers)]
    for layer, shard in enumerate(shards):
        block = {f"model.layers.{layer}.self_attn.{x}": t for x, t in kda_block(geometry).items()}
        block |= {f"model.layers.{layer}.mlp": Stored("U8", (5000,))}
        save_raw_shard(shard, block)
        weight_map.update(dict.fromkeys(block, shard.name))
        rows.update(block)
    write_index(folder, rows, weight_map)
    return shards


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_as_many_layers_are_read_ahead_as_there_are_slots_left_and_no_more(
    tmp_path: Path, slots: int
) -> None:
    if not has_a_page_cache(tmp_path):
        pytest.skip("files here do not leave the page cache")
    shards = write_layers(tmp_path / "c", MEDIUM, 8)
    config = KdaConfig(256, 4, 32, 4)
    with open_checkpoint(tmp_path / "c") as checkpoint:
        cool(*shards)

        payload = [pages_of(16384, shard.stat().st_size - 5000) for shard in shards]
        seen: list[set[int]] = [set() for _ in shards]

        def read() -> list[bool]:
            """Which layers were read; the system may take pages away again."""
            for pages, shard in zip(seen, shards, strict=True):
                pages |= cached_pages(shard)
            return [pages <= found for pages, found in zip(payload, seen, strict=True)]

        with stream_kda_layers(
            checkpoint, slots=slots, config=config, read="positional", residency="keep"
        ) as stream:
            for step, _ in enumerate(stream):
                expected = [n < step + slots for n in range(8)]
                end = time.monotonic() + 5
                while read() != expected and time.monotonic() < end:
                    time.sleep(0.01)
                time.sleep(0.05)
                assert read() == expected, f"at step {step}"


# --- how long it takes ----------------------------------------------------------------------------

LAYERS = 12
GEOMETRY = Geometry(1024, 8, 64, 4)
DISK_BYTES_PER_SECOND = 40 * MIB
TIMED = """
    import json, mmap, os, sys, time
    from kda_stream import KdaConfig, open_checkpoint, stream_kda_layers
    folder, read = sys.argv[1:3]
    shares = json.loads(sys.argv[3])
    config = KdaConfig(1024, 8, 64, 4)
    checkpoint = open_checkpoint(folder)
    def disk_alone():
        buffer = mmap.mmap(-1, 4 << 20)
        begin = time.monotonic()
        for name in sorted(os.listdir(folder)):
            if name.endswith(".safetensors"):
                path = os.path.join(folder, name)
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
                at = 0
                while at < os.fstat(descriptor).st_size:
                    at += os.preadv(descriptor, [buffer], at)
                os.close(descriptor)
        return time.monotonic() - begin
    def run(seconds, slots=2):
        for name in os.listdir(folder):
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        time.sleep(0.3)
        waited = []
        begin = time.monotonic()
        with stream_kda_layers(
            checkpoint, slots=slots, lock="off", config=config, read=read, residency="drop"
        ) as stream:
            before = time.monotonic()
            for layer in stream:
                waited.append(time.monotonic() - before)
                time.sleep(seconds)
                before = time.monotonic()
        return time.monotonic() - begin, waited[0]
    alone = disk_alone()
    found = []
    for share in shares:
        each = alone * share / len(checkpoint.layers())
        found.append([each, *run(each)])
    print(json.dumps([alone, found]))
"""


@pytest.mark.mlock  # what a sanitizer does takes time
@pytest.mark.slow
def test_a_stream_takes_the_disk_s_time_or_the_consumer_s_and_not_both(tmp_path: Path) -> None:
    """A consumer that takes nothing, half, once and twice the disk's time for a layer.

    What cannot be hidden is allowed for: the first layer's reading or the last one's use.
    """
    shards = write_layers(tmp_path / "c", GEOMETRY, LAYERS)
    cool(*shards)
    nbytes = sum(shard.stat().st_size for shard in shards)
    missing = [0, 0.5, 1, 2]
    ratios: list[dict[float, float]] = []
    with slow_disk_group(shards[0], DISK_BYTES_PER_SECOND) as group:
        for _ in range(8):  # the machine may be busy with something else
            script = (sys.executable, "-c", textwrap.dedent(TIMED))
            done = run_in(group, *script, str(tmp_path / "c"), "direct", json.dumps(missing))
            assert done.returncode == 0, done.stderr
            alone, found = json.loads(done.stdout)
            if alone < 0.7 * nbytes / DISK_BYTES_PER_SECOND:
                pytest.skip("the disk is not slowed down: its group does not count these reads")
            ratios.append({})
            for share, (each, took, first) in zip(missing, found, strict=True):
                ratios[-1][share] = took / max(alone + each, first + LAYERS * each)
            missing = [share for share, ratio in ratios[-1].items() if ratio > 1.05]
            if not missing:
                break
    assert not missing, ratios
