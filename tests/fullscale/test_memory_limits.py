"""34 layers of GLM-5.3-Flash in a control group that has hardly more memory than the slots."""

from __future__ import annotations

import json
import struct
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import (
    GLM,
    config_json,
    kda_block,
    save_raw_shard,
    write_checkpoint,
    write_index,
)
from support.groups import memory_group, run_in

from kda_stream import KdaConfig, kda_slot_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mlock,
    pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's"),
]
RunPython = Callable[..., Any]
MIB = 1024**2
SLOT_BYTES = kda_slot_bytes(KdaConfig(4096, 64, 128, 4))

# Streams every layer and looks on meanwhile: what is resident at any moment, file pages included,
# and the most that was ever, as the kernel counts it. At the end, what is left of it.
STREAM = """
    import json, os, sys, threading, time
    from kda_stream import open_checkpoint, stream_kda_layers
    folder, slots, lock, read, residency, count = sys.argv[1:]

    def kib(name):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(name + ":"))

    def held():
        maps = open("/proc/self/maps").read()
        names = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
        return {
            "maps": maps.count(folder),
            "descriptors": sum(os.path.realpath(name).startswith(folder) for name in names),
            "threads": len(os.listdir("/proc/self/task")),
            "locked": kib("VmLck"),
        }

    most, ended = [0], threading.Event()

    def look():
        while not ended.wait(0.005):
            most[0] = max(most[0], kib("RssAnon") + kib("RssFile") + kib("RssShmem"))

    before = held()
    base = kib("VmRSS")
    looking = threading.Thread(target=look)
    looking.start()
    checkpoint = open_checkpoint(folder)
    indices, reads = [], {}
    layers = list(range(int(count)))
    with stream_kda_layers(
        checkpoint, layers=layers, slots=int(slots), lock=lock, read=read, residency=residency
    ) as stream:
        for layer in stream:
            indices.append(layer.index)
            layer.weights.o_proj.data[-1]
        report = stream.report
    checkpoint.close()
    ended.set()
    looking.join()
    end = time.monotonic() + 2  # a thread is gone a moment after it was joined
    while held() != before and time.monotonic() < end:
        time.sleep(0.01)
    print(json.dumps({
        "layers": len(indices), "in order": indices == layers, "bytes": report.bytes,
        "locked": report.lock.locked, "reads": report.reads, "notes": report.notes,
        "base": base * 1024, "sampled": most[0] * 1024, "peak": kib("VmHWM") * 1024,
        "before": before, "after": held(),
    }))
"""


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """34 KDA layers of 275 MB, 9.4 GB of zeros that take no room on the disk."""
    folder = tmp_path_factory.mktemp("full-size").resolve()
    write_kda_layers(folder, 34)
    yield folder
    for shard in folder.glob("*.safetensors"):
        shard.unlink()


def write_kda_layers(folder: Path, layers: int) -> None:
    weight_map, rows = {}, {}
    for layer in range(layers):
        name = f"model-{layer:05}.safetensors"
        block = {f"model.layers.{layer}.self_attn.{leaf}": t for leaf, t in kda_block(GLM).items()}
        save_raw_shard(folder / name, block, sparse=True)
        weight_map.update(dict.fromkeys(block, name))
        rows.update(block)
    write_index(folder, rows, weight_map)
    config = config_json(GLM, layers, mtp=False)
    (folder / "config.json").write_text(json.dumps(config))


def streamed(
    folder: Path,
    limit_bytes: int | None,
    slots: int,
    lock: str,
    read: str,
    residency: str,
    *,
    layers: int = 34,
) -> dict[str, Any]:
    """Stream in a process of its own, in a group of that much memory; what it saw."""
    script = (sys.executable, "-c", textwrap.dedent(STREAM))
    arguments = (str(folder), str(slots), lock, read, residency, str(layers))
    with memory_group(limit_bytes or 1 << 40) as group:
        done = run_in(group, *script, *arguments, seconds=120)
        assert done.returncode == 0, (
            f"exit {done.returncode}, {group.killed()} killed\n{done.stderr}"
        )
        assert group.killed() == 0
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["layers"] == layers
    assert found["in order"]
    assert found["bytes"] == layers * 275_481_088
    assert found["after"] == found["before"], "something is left behind"
    return found


@pytest.mark.parametrize(
    ("read", "lock"),
    [("auto", "prefer"), ("auto", "off"), ("positional", "prefer"), ("direct", "prefer")],
)
@pytest.mark.parametrize(("limit_mib", "slots"), [(600, 2), (320, 1)])
def test_every_layer_streams_in_little_more_memory_than_the_slots(
    full_size: Path, limit_mib: int, slots: int, lock: str, read: str
) -> None:
    found = streamed(full_size, limit_mib * MIB, slots, lock, read, "auto")
    assert found["peak"] <= limit_mib * MIB
    assert found["locked"] == (lock == "prefer")
    if read != "auto":
        assert found["reads"] == {read: 34}


@pytest.mark.parametrize(("limit_mib", "slots"), [(600, 2), (320, 1)])
def test_mapped_layers_stream_in_little_more_memory_than_the_slots(
    full_size: Path, limit_mib: int, slots: int
) -> None:
    """Some of the layers: where nothing can stay in the page cache a map is slow."""
    found = streamed(full_size, limit_mib * MIB, slots, "prefer", "mapped", "auto", layers=8)
    assert found["peak"] <= limit_mib * MIB
    assert found["reads"] == {"mapped": 8}


@pytest.mark.parametrize("residency", ["keep", "drop"])
@pytest.mark.parametrize("read", ["mapped", "positional", "direct"])
def test_what_is_resident_stays_within_the_slots_and_64_mib(
    full_size: Path, read: str, residency: str
) -> None:
    found = streamed(full_size, None, 2, "prefer", read, residency, layers=8)
    assert found["sampled"] > 2 * SLOT_BYTES, "the test looks at the wrong thing"
    assert found["sampled"] <= 2 * SLOT_BYTES + 64 * MIB
    assert found["peak"] <= 2 * SLOT_BYTES + 64 * MIB


@pytest.mark.parametrize("cached", [True, False])
def test_with_less_address_space_than_a_shard_auto_streams_and_says_why_it_did_not_map(
    tmp_path: Path, run_python: RunPython, cached: bool
) -> None:
    write_checkpoint(tmp_path / "c", layers=3, mtp=False, shards=1)
    (shard,) = (tmp_path / "c").glob("*.safetensors")
    text = shard.read_bytes()
    (length,) = struct.unpack("<Q", text[:8])
    header = json.loads(text[8 : 8 + length])
    end = max(row["data_offsets"][1] for name, row in header.items() if name != "__metadata__")
    header["padding"] = {"dtype": "U8", "shape": [6 << 30], "data_offsets": [end, end + (6 << 30)]}
    new = json.dumps(header).encode()
    with shard.open("wb") as file:
        file.write(struct.pack("<Q", len(new)) + new + text[8 + length :])
        file.truncate(8 + len(new) + end + (6 << 30))
    index = tmp_path / "c" / "model.safetensors.index.json"
    weights = json.loads(index.read_text())
    weights["weight_map"]["padding"] = shard.name
    index.write_text(json.dumps(weights))
    script = """
        import json, os, resource, sys
        from kda_stream import open_checkpoint, stream_kda_layers
        folder, cached = sys.argv[1], sys.argv[2] == "True"
        limit = 2 << 30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with open_checkpoint(folder) as checkpoint:
            if not cached:
                for name in os.listdir(folder):
                    descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
                    os.fsync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            with stream_kda_layers(checkpoint, residency="keep") as stream:
                indices = [layer.index for layer in stream]
                report = stream.report
        print(json.dumps([indices, report.reads, report.notes]))
    """
    indices, reads, notes = run_python(script, tmp_path / "c", cached)
    assert indices == [0, 1, 2]
    assert reads == {"positional": 3}
    assert len(notes) == 1
    assert "mapped" in notes[0]
