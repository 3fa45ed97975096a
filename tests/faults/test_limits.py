"""Memory that may not be locked or had, files that may not be opened: what is told and left."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from faults.running import FORKING, READS, RunFault, linux_only
from support.checkpoints import MEDIUM, Stored, kda_block, save_shard, write_index

pytestmark = [linux_only, pytest.mark.mlock]

# --- locked memory --------------------------------------------------------------------------------

LOCKING = """
from kda_stream import (KdaConfig, KdaStreamError, PinnedArena, bind_kda_weights, kda_slot_bytes,
                        open_checkpoint, stream_kda_layers)
from support.limited import limit_locking
from support.small_layers import is_right, write_small_layers
folder, limit_bytes, lock = Path("checkpoint"), int(sys.argv[1]), sys.argv[2]
written = write_small_layers(folder)
config = KdaConfig.from_json(folder / "config.json")

def streamed(lock):
    with open_checkpoint(folder) as checkpoint:
        with stream_kda_layers(checkpoint, lock=lock, residency="drop") as stream:
            right = [is_right(layer.weights, written, layer.index) for layer in stream]
            return right, stream.report.lock

def bound():
    with open_checkpoint(folder) as checkpoint:
        weights, report = bind_kda_weights(config, 1, checkpoint.layer(1), residency="drop")
        right = is_right(weights, written, 1)
        weights.release()
        return right, report.lock

assert streamed("prefer")[0] == [True, True]
limit_locking(limit_bytes)
before = Before(Path("."), cold(folder, open_checkpoint))
"""


@pytest.mark.parametrize("limit_bytes", [0, 65536])
def test_where_memory_may_not_be_locked_require_refuses_with_the_remedy_and_leaves_nothing(
    run_fault: RunFault, limit_bytes: int
) -> None:
    script = """
try:
    outcome = streamed(lock)
except KdaStreamError as error:
    outcome = told(error)
left = before.left()
print(json.dumps([outcome, left, streamed("off")[0], before.left()]))
"""
    outcome, left, unlocked, left_then = run_fault(LOCKING + script, limit_bytes, "require")
    assert (outcome["class"], outcome["code"]) == ("MemoryRefusedError", "lock-refused")
    assert "MemoryError" in outcome["is a"]
    assert f"a limit of {limit_bytes} bytes" in outcome["got"]
    assert "ulimit -l" in outcome["hint"]
    assert left == {}
    assert unlocked == [True, True]
    assert left_then == {}


@pytest.mark.parametrize("way", ["streamed(lock)", "bound()"])
@pytest.mark.parametrize("limit_bytes", [0, 65536])
def test_where_memory_may_not_be_locked_prefer_goes_on_and_says_so(
    run_fault: RunFault, limit_bytes: int, way: str
) -> None:
    script = f"""
right, lock = {way}
print(json.dumps([right, lock.locked, lock.locked_bytes, lock.limit_bytes, lock.refusal,
                  before.left()]))
"""
    right, locked, locked_bytes, limit, refusal, left = run_fault(
        LOCKING + script, limit_bytes, "prefer"
    )
    assert right in ([True, True], True)
    assert (locked, locked_bytes, limit) == (False, 0, limit_bytes)
    assert "ulimit -l" in refusal
    assert left == {}


# --- address space --------------------------------------------------------------------------------

MIB = 1024**2
ROOM: dict[str, int] = {
    "hardly any": 0,
    "for some Python": 6 * MIB,
    "for a third of the slot": 90 * MIB,
    "for hardly more than the slot": 266 * MIB,
    "for the slot and a thread": 300 * MIB,
    "for the slot, a thread and a map": 640 * MIB,
    "enough": 2048 * MIB,
}

# Streams a full-size layer, in so much more address space than the process has when it starts.
IN_LITTLE_ROOM = """
when, room, read = sys.argv[1], int(sys.argv[2]), sys.argv[3]
from support.large_layers import is_right, write_large_layers
from support.limited import lift_address_space, limit_address_space
folder = Path("large")
shards = write_large_layers(folder, 1)
phase = "import"

def load():
    global open_checkpoint, stream_kda_layers, KdaStreamError
    from kda_stream import KdaStreamError, open_checkpoint, stream_kda_layers

def streamed():
    global phase
    phase = "use"
    with open_checkpoint(folder) as checkpoint:
        with stream_kda_layers(checkpoint, slots=1, read=read, residency="drop") as stream:
            right = [is_right(layer.weights, 0) for layer in stream]
    return {"right": right, "reads": stream.report.reads, "notes": stream.report.notes}

def outcome():
    try:
        if when == "before the import":
            load()
        return streamed()
    except BaseException as error:
        told_later.append(error)

if when == "after the import":
    load()
    streamed()
    before = Before(Path("."), cold(folder, open_checkpoint))
told_later = []
limit_address_space(room)
found = outcome()
lift_address_space()
if told_later:
    found = told(told_later.pop())
if when == "before the import":
    found["phase"] = phase
    print(json.dumps(found))
else:
    left = before.left()
    print(json.dumps({**found, "left": left, "again": streamed()["right"]}))
"""


def assert_told_or_right(found: dict[str, Any]) -> None:
    if "right" in found:
        assert found["right"] == [True]
        return
    assert "KdaStreamError" in found["is a"], found
    assert {"MemoryError", "ImportError", "OSError", "RuntimeError"}.intersection(found["is a"])
    assert found["hint"]


@pytest.mark.slow
@pytest.mark.parametrize("read", ["mapped", "direct"])
@pytest.mark.parametrize("room", ROOM.values(), ids=ROOM)
def test_in_too_little_address_space_a_stream_works_or_says_what_is_wanting(
    run_fault: RunFault, room: int, read: str
) -> None:
    found = run_fault(IN_LITTLE_ROOM, "after the import", room, read)
    if room == 0 and "KdaStreamError" not in found["is a"]:
        assert "MemoryError" in found["is a"], "where Python itself has no memory left"
    else:
        assert_told_or_right(found)
    enough = "for the slot, a thread and a map" if read == "mapped" else "for the slot and a thread"
    assert "right" in found or room < ROOM[enough]
    assert "right" not in found or room > ROOM["for a third of the slot"]
    assert found["left"] == {}
    assert found["again"] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOM.values(), ids=ROOM)
def test_what_cannot_be_loaded_for_want_of_address_space_is_an_error_and_no_crash(
    run_fault: RunFault, room: int
) -> None:
    """Where Python cannot import it, that is Python's error; behind the import it is ours."""
    found = run_fault(IN_LITTLE_ROOM, "before the import", room, "auto")
    if "right" not in found and found["phase"] == "import":
        assert {"MemoryError", "ImportError", "OSError"}.intersection(found["is a"])
        assert room <= ROOM["for some Python"]
    else:
        assert_told_or_right(found)
    assert "right" in found or room < ROOM["for the slot and a thread"]
    assert "right" not in found or room > ROOM["for a third of the slot"]


# In so little more, step by step, that not all of the things that a stream needs can be had.
STEP_BY_STEP = """
from kda_stream import KdaStreamError, open_checkpoint, stream_kda_layers
from support.checkpoints import write_checkpoint
from support.limited import limit_address_space
folder = Path("checkpoint")
write_checkpoint(folder, layers=1, mtp=False, shards=1)
OUTCOMES = ["hung", "right", "told", "Python's own MemoryError", "other"]
step_bytes = int(sys.argv[1])

def streamed():
    with open_checkpoint(folder) as checkpoint:
        with stream_kda_layers(checkpoint, slots=1, lock="off", read="positional") as stream:
            return [layer.index for layer in stream] == [0]

def in_a_child(room):
    child = os.fork()
    if child == 0:
        code = 4
        try:
            limit_address_space(room)
            code = 1 if streamed() else 4
        except KdaStreamError:
            code = 2
        except MemoryError:
            code = 3
        finally:
            os._exit(code)
    end = time.monotonic() + 5
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return OUTCOMES[code] if 0 <= code < len(OUTCOMES) else f"signal {-code}"
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hung"
        time.sleep(0.001)

assert streamed()
before = Before(Path("."))
first, last = 0, 32 << 20  # a thread's stack has 8 MiB
assert in_a_child(last) == "right"
while last - first > step_bytes:  # where it begins to work
    middle = (first + last) // 2
    first, last = (first, middle) if in_a_child(middle) == "right" else (middle, last)
rooms = [last + n * step_bytes for n in range(-24, 8)]
outcomes = []
for room in rooms:
    outcomes.append(in_a_child(room))
    if outcomes[-1] == "hung":
        break
print(json.dumps([outcomes, before.left()]))
"""


@pytest.mark.slow
def test_where_address_space_just_does_not_suffice_a_stream_neither_hangs_nor_crashes(
    run_fault: RunFault,
) -> None:
    outcomes, left = run_fault(STEP_BY_STEP, 4096, seconds=120, flags=FORKING)
    assert set(outcomes) <= {"right", "told", "Python's own MemoryError"}
    assert {"right", "told"} <= set(outcomes), "the test looks at the wrong sizes"
    assert left == {}


# --- open files -----------------------------------------------------------------------------------

# 200 shards with a tensor each, and a limit of 64 open files: a layer lies in fifteen shards.
MANY_SHARDS = """
from kda_stream import (KdaConfig, KdaStreamError, PinnedArena, bind_kda_weights, kda_slot_bytes,
                        open_checkpoint, stream_kda_layers)
from support.checkpoints import FIELD_LEAVES, payload
from support.limited import limit_descriptors, take_descriptors
folder, read = Path("many"), sys.argv[1]
config = KdaConfig(256, 4, 32, 4)

def is_right(weights, layer):
    return all(
        bytes(tensor.data) == b"".join(
            payload(f"model.layers.{layer}.self_attn.{leaf}", tensor.data.nbytes // len(leaves))
            for leaf in leaves
        )
        for name, tensor in weights.items() for leaves in [FIELD_LEAVES[name]]
    )

def bound(checkpoint, layer):
    weights, report = bind_kda_weights(config, layer, checkpoint.layer(layer), into=slot,
                                       read=read, residency="drop")
    right = is_right(weights, layer)
    weights.release()
    return right, report.read.path, report.read.notes

arena = PinnedArena(kda_slot_bytes(config))
slot = arena.slots[0]
with open_checkpoint(folder) as checkpoint:  # what is imported late opens files
    assert len(bind_kda_weights(config, 0, checkpoint.layer(0), into=slot)[1].shards) == 15
before = Before(Path("."), cold(folder, open_checkpoint))
limit_descriptors(64)
"""


@pytest.fixture
def many_shards(tmp_path: Path) -> None:
    """13 layers, each of whose fifteen tensors lies in a shard of its own; 200 shards."""
    folder = tmp_path / "many"
    folder.mkdir()
    tensors = {
        f"model.layers.{layer}.self_attn.{leaf}": stored
        for layer in range(13)
        for leaf, stored in kda_block(MEDIUM).items()
    }
    tensors |= {f"padding.{n}": Stored("U8", (8,)) for n in range(200 - len(tensors))}
    files = {name: f"model-{n:05}-of-00200.safetensors" for n, name in enumerate(tensors)}
    for name, file in files.items():
        save_shard(folder / file, {name: tensors[name]})
    write_index(folder, tensors, files)


@pytest.mark.usefixtures("many_shards")
@pytest.mark.parametrize("read", READS)
def test_200_shards_are_streamed_and_bound_with_64_open_files(
    run_fault: RunFault, read: str
) -> None:
    script = """
with open_checkpoint(folder) as checkpoint:
    seen = [bound(checkpoint, layer)[0] for layer in range(13)]
    with stream_kda_layers(checkpoint, config=config, layers=range(13), read=read,
                           residency="drop") as stream:
        streamed = [is_right(layer.weights, layer.index) for layer in stream]
print(json.dumps([seen, streamed, before.left()]))
"""
    assert run_fault(MANY_SHARDS + script, read) == [[True] * 13, [True] * 13, {}]


@pytest.mark.usefixtures("many_shards")
@pytest.mark.parametrize("read", READS)
def test_too_few_open_files_for_a_layer_are_told_with_the_remedy_and_leave_nothing(
    run_fault: RunFault, read: str
) -> None:
    script = """
with open_checkpoint(folder) as checkpoint:
    opened = take_descriptors(free=10)
    try:
        outcome = bound(checkpoint, 1)
    except KdaStreamError as error:
        outcome = told(error)
    state = slot.state.value
    for descriptor in opened:
        os.close(descriptor)
    again = bound(checkpoint, 1)[0]
print(json.dumps([outcome, state, again, before.left()]))
"""
    outcome, state, again, left = run_fault(MANY_SHARDS + script, read)
    assert (outcome["class"], outcome["code"]) == ("PayloadError", "payload-open")
    assert outcome["got"] == os.strerror(errno.EMFILE)
    assert outcome["file"].endswith("-of-00200.safetensors")
    assert "ulimit -n" in outcome["hint"]
    assert (state, again, left) == ("free", True, {})


@pytest.mark.usefixtures("many_shards")
def test_with_open_files_for_a_layer_but_not_twice_auto_reads_it_otherwise_and_says_so(
    run_fault: RunFault,
) -> None:
    """A direct read opens each file a second time."""
    script = """
with open_checkpoint(folder) as checkpoint:
    opened = take_descriptors(free=20)
    found = bound(checkpoint, 1)
    for descriptor in opened:
        os.close(descriptor)
print(json.dumps([*found, before.left()]))
"""
    right, path, notes, left = run_fault(MANY_SHARDS + script, "auto")
    assert (right, path) == (True, "positional")
    assert notes[0].startswith("not direct:")
    assert notes[0].endswith(f": {os.strerror(errno.EMFILE)}")
    assert left == {}


@pytest.mark.usefixtures("many_shards")
@pytest.mark.parametrize("verify", ["all", "needed"])
def test_no_open_file_left_for_a_checkpoint_is_told_with_the_remedy(
    run_fault: RunFault, verify: str
) -> None:
    script = """
opened = take_descriptors(free=0)
try:
    open_checkpoint(folder, verify=sys.argv[1])
except KdaStreamError as error:
    outcome = told(error)
for descriptor in opened:
    os.close(descriptor)
print(json.dumps([outcome, before.left()]))
"""
    outcome, left = run_fault(MANY_SHARDS + script, verify)
    assert outcome["class"] == "PathError"
    assert outcome["got"] == os.strerror(errno.EMFILE)
    assert left == {}
    assert "ulimit -n" in outcome["hint"]
