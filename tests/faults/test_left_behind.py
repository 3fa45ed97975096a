"""What the other tests count: each thing that a load may leave behind is seen when it is kept."""

from __future__ import annotations

import pytest
from faults.running import RunFault, linux_only

pytestmark = [linux_only, pytest.mark.mlock]

KEPT = """
import ctypes, mmap
from support import left_behind
left_behind.SETTLE_SECONDS = 0.1
folder = Path("kept")
folder.mkdir()
shard = folder / "a.safetensors"
shard.write_bytes(bytes(65536))
def locked(memory):
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mlock(ctypes.c_void_p(start), len(memory)) == 0
    return memory

before = Before(folder, cold(folder))
kept = KEEP
print(json.dumps(sorted(before.left())))
"""
THINGS = {
    "nothing": ("None", []),
    "a descriptor": ("os.open(shard, os.O_RDONLY)", ["descriptors"]),
    "a map": (
        "[file := shard.open('rb'), mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)]",
        [
            "descriptors",
            "maps",
        ],
    ),
    "locked memory": ("locked(mmap.mmap(-1, 65536))", ["locked"]),
    "memory": ("b'x' * (64 << 20)", ["anonymous"]),
    "a thread": (
        "threading.Thread(target=time.sleep, args=(1,), daemon=True).start()",
        ["threads"],
    ),
    "a handler": ("signal.signal(signal.SIGBUS, lambda *_: None)", ["handlers"]),
    "a page": ("shard.read_bytes() and None", ["cached"]),
}


@pytest.mark.parametrize("thing", THINGS)
def test_what_is_kept_is_counted_and_nothing_else(run_fault: RunFault, thing: str) -> None:
    keep, seen = THINGS[thing]
    assert run_fault(KEPT.replace("KEEP", keep)) == seen
