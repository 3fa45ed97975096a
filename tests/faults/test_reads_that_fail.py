"""Reads that fail, are interrupted or bring too little: an error, or the right bytes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from faults.running import READS, RunFault, linux_only
from support.file_systems import fuse
from support.small_layers import write_small_layers

pytestmark = [linux_only, pytest.mark.mlock]
each_read = pytest.mark.parametrize("read", READS)
each_verify = pytest.mark.parametrize("verify", ["all", "needed"])

# A layer that lies in two shards, cold, bound into one slot while reads of the shards fail.
FAILING = """
import errno
from kda_stream import (KdaConfig, KdaStreamError, PinnedArena, bind_kda_weights, kda_slot_bytes,
                        open_checkpoint, stream_kda_layers)
from support.failing_reads import FailingReads
from support.small_layers import is_right, spoil, write_small_layers

folder = Path("checkpoint")
written = write_small_layers(folder)
config = KdaConfig.from_json(folder / "config.json")
reads = FailingReads(folder)

def outcome_of(step):
    # What came of it, and how many reads failed meanwhile.
    try:
        outcome = step()
    except KdaStreamError as error:
        outcome = told(error)
    failed = reads.failed
    reads.none()
    return outcome, failed

def outcomes_of_each(step, plan, after=lambda: None):
    # What comes of it when the first read fails, when the second does, until there are no more.
    outcomes = []
    while True:
        plan(first=len(outcomes) + 1)
        outcome, failed = outcome_of(step)
        if not failed:
            assert len(outcomes) >= 4, "the test looks at the wrong reads"
            return outcomes
        outcomes.append(outcome)
        after()
"""
BINDING = (
    FAILING
    + """
read = sys.argv[1]

def bound(checkpoint, into):
    spoil(into)
    weights, _ = bind_kda_weights(config, 1, checkpoint.layer(1), into=into, read=read,
                                  residency="drop")
    right = is_right(weights, written, 1)
    weights.release()
    return "right" if right else "wrong"

def cold_bound():
    cold(folder)
    return bound(checkpoint, slot)

def lies_in(tensor, file):
    return written.weight_map[f"{written.prefix}1.{tensor}"] == file

with open_checkpoint(folder) as checkpoint, PinnedArena(kda_slot_bytes(config)) as arena:
    assert bound(checkpoint, arena) == "right"
before = Before(Path("."), cold(folder))
checkpoint, arena = open_checkpoint(folder), PinnedArena(kda_slot_bytes(config))
slot = arena.slots[0]
assert cold_bound() == "right"
cold(folder)
opened = Before(Path("."), written.folder.glob("*.safetensors"))
"""
)
LEFT = """
checkpoint.close()
arena.close()
print(json.dumps({**found, "left": before.left()}))
"""


@each_read
def test_an_eio_at_any_read_of_a_layer_is_an_error_that_says_where_and_frees_the_slot(
    run_fault: RunFault, failing_reads: Path, read: str
) -> None:
    """A map's pages come with EFAULT: that is how the kernel tells of a page that failed."""
    script = """
number = errno.EFAULT if read == "mapped" else errno.EIO
states, left, again = [], [], []

def after():
    states.append(slot.state.value)
    left.append(opened.left())
    again.append(bound(checkpoint, slot))

outcomes = outcomes_of_each(cold_bound, lambda first: reads.error(number, first=first), after)
for outcome in outcomes:
    outcome["of the file"] = lies_in(outcome["tensor"], outcome["file"])
found = {"outcomes": outcomes, "states": states, "again": again, "left each time": left}
"""
    found = run_fault(BINDING + script + LEFT, read, preload=failing_reads)
    code, reason = "payload-read", os.strerror(errno.EIO)
    if read == "mapped":
        code, reason = "payload-fault", os.strerror(errno.EFAULT)
    for outcome in found["outcomes"]:
        assert (outcome["class"], outcome["code"]) == ("PayloadError", code)
        assert "OSError" in outcome["is a"]
        assert outcome["got"] == reason
        assert outcome["of the file"]
        assert outcome["file"] in outcome["text"]
        assert outcome["tensor"] in outcome["text"]
        assert outcome["hint"]
    assert set(found["states"]) == {"free"}
    assert set(found["again"]) == {"right"}
    assert all(left == {} for left in found["left each time"])
    assert found["left"] == {}
    assert {outcome["file"] for outcome in found["outcomes"]} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


SOME_FAIL: dict[str, dict[str, int]] = {
    "the first": {"first": 1, "times": 1},
    "each other": {"first": 1, "times": 1, "every": 2},
    "three of four": {"first": 1, "times": 3, "every": 4},
}


@each_read
@pytest.mark.parametrize("which", SOME_FAIL)
def test_reads_that_signals_interrupt_are_done_again_and_bring_the_right_bytes(
    run_fault: RunFault, failing_reads: Path, which: str, read: str
) -> None:
    script = """
reads.error(errno.EINTR, **json.loads(sys.argv[2]))
found = {"outcome": outcome_of(cold_bound)}
"""
    plan = json.dumps(SOME_FAIL[which])
    found = run_fault(BINDING + script + LEFT, read, plan, preload=failing_reads)
    outcome, failed = found["outcome"]
    assert failed >= 1
    assert (outcome, found["left"]) == ("right", {})


SHORT: list[tuple[str, int, dict[str, int]]] = [
    ("positional", 1, {"first": 2, "times": 1}),
    ("positional", 4097, {"first": 1, "times": 1, "every": 2}),
    ("positional", 65_521, {"first": 1, "times": 1, "every": 1}),
    ("direct", 512, {"first": 1, "times": 1, "every": 3}),
    ("direct", 4096, {"first": 1, "times": 1, "every": 2}),
    ("direct", 65_536, {"first": 1, "times": 1, "every": 1}),
    ("auto", 65_536, {"first": 2, "times": 1, "every": 2}),
]


@pytest.mark.parametrize(("read", "bytes_max", "which"), SHORT)
def test_reads_that_bring_less_than_was_asked_for_are_gone_on_with(
    run_fault: RunFault, failing_reads: Path, read: str, bytes_max: int, which: dict[str, int]
) -> None:
    """Past the page cache a read ends within a file only between sectors, and so it does here."""
    script = """
reads.short(int(sys.argv[2]), **json.loads(sys.argv[3]))
found = {"outcome": outcome_of(cold_bound)}
"""
    plan = json.dumps(which)
    found = run_fault(BINDING + script + LEFT, read, bytes_max, plan, preload=failing_reads)
    outcome, failed = found["outcome"]
    assert failed >= 1
    assert (outcome, found["left"]) == ("right", {})


@pytest.mark.parametrize("read", ["positional", "direct"])
@pytest.mark.parametrize("fault", ["EAGAIN", "the end"])
def test_reads_that_bring_nothing_are_an_error_and_never_wrong_bytes(
    run_fault: RunFault, failing_reads: Path, fault: str, read: str
) -> None:
    script = """
plan = {"EAGAIN": lambda first: reads.error(errno.EAGAIN, first=first),
        "the end": lambda first: reads.short(0, first=first)}[sys.argv[2]]
again = []

def after():
    again.append([slot.state.value, bound(checkpoint, slot)])

found = {"outcomes": outcomes_of_each(cold_bound, plan, after), "again": again}
"""
    found = run_fault(BINDING + script + LEFT, read, fault, preload=failing_reads)
    code = "payload-read" if fault == "EAGAIN" else "payload-end"
    assert {(told["class"], told["code"]) for told in found["outcomes"]} == {("PayloadError", code)}
    assert all(told["file"] and told["tensor"] and told["hint"] for told in found["outcomes"])
    assert all(again == ["free", "right"] for again in found["again"])
    assert found["left"] == {}


@each_read
def test_an_eio_in_the_middle_of_a_stream_comes_out_behind_the_layers_before_it(
    run_fault: RunFault, failing_reads: Path, read: str
) -> None:
    script = """
read = sys.argv[1]

def stream(layers):
    seen = []
    try:
        with stream_kda_layers(checkpoint, layers=layers, slots=2, read=read,
                               residency="drop") as layers:
            for layer in layers:
                seen.append([layer.index, is_right(layer.weights, written, layer.index)])
    except KdaStreamError as error:
        return seen, told(error)
    return seen, None

with open_checkpoint(folder) as checkpoint:
    assert stream([0])[0] == [[0, True]]
before = Before(Path("."), cold(folder))
with open_checkpoint(folder) as checkpoint:
    reads.none()
    stream([0])
    in_first = reads.seen
    cold(folder)
    reads.error(errno.EFAULT if read == "mapped" else errno.EIO, first=in_first + 2)
    seen, error = stream([0, 1, 0])
    reads.none()
    again, none = stream([0, 1])
print(json.dumps({"seen": seen, "error": error, "again": again, "none": none,
                  "left": before.left()}))
"""
    found = run_fault(FAILING + script, read, preload=failing_reads)
    assert found["seen"] in ([[0, True]], []), "an error may come before the layers that are ready"
    assert found["error"]["class"] == "PayloadError"
    assert found["error"]["code"] == ("payload-fault" if read == "mapped" else "payload-read")
    assert found["error"]["file"] in found["error"]["text"]
    assert found["error"]["tensor"] in found["error"]["text"]
    assert (found["again"], found["none"]) == ([[0, True], [1, True]], None)
    assert found["left"] == {}


# --- while a checkpoint is opened -----------------------------------------------------------------

OPENING = (
    FAILING
    + """
verify = sys.argv[1]

def opened():
    with open_checkpoint(folder, verify=verify) as checkpoint:
        checkpoint.config
        return len(list(checkpoint.shards.values()))

assert opened() == 2
before = Before(Path("."))
"""
)


@each_verify
def test_an_eio_at_any_read_of_an_opening_is_an_error_that_names_the_file(
    run_fault: RunFault, failing_reads: Path, verify: str
) -> None:
    script = """
outcomes = outcomes_of_each(opened, lambda first: reads.error(errno.EIO, first=first))
print(json.dumps({"outcomes": outcomes, "again": opened(), "left": before.left()}))
"""
    found = run_fault(OPENING + script, verify, preload=failing_reads)
    assert {told["code"] for told in found["outcomes"]} == {"path-not-readable"}
    assert all("OSError" in told["is a"] for told in found["outcomes"])
    assert all(told["got"] == os.strerror(errno.EIO) for told in found["outcomes"])
    assert all(told["hint"] for told in found["outcomes"])
    assert {told["file"] for told in found["outcomes"]} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
    }
    assert found["again"] == 2
    assert found["left"] == {}


@each_verify
@pytest.mark.parametrize("fault", ["interrupted", "short"])
def test_an_opening_goes_on_after_reads_that_are_interrupted_or_short(
    run_fault: RunFault, failing_reads: Path, fault: str, verify: str
) -> None:
    script = """
if sys.argv[2] == "short":
    reads.short(13, first=1, every=1)
else:
    reads.error(errno.EINTR, first=1, every=2)
outcome, failed = outcome_of(opened)
with open_checkpoint(folder) as checkpoint, PinnedArena(kda_slot_bytes(config)) as arena:
    weights, _ = bind_kda_weights(config, 1, checkpoint.layer(1), into=arena)
    right = is_right(weights, written, 1)
    weights.release()
print(json.dumps([outcome, failed > 4, right, before.left()]))
"""
    found = run_fault(OPENING + script, verify, fault, preload=failing_reads)
    assert found == [2, True, True, {}]


# --- a disk that really fails ---------------------------------------------------------------------


@each_read
def test_a_disk_that_fails_in_the_middle_of_a_layer_is_an_error_and_nothing_is_left(
    run_fault: RunFault, tmp_path: Path, read: str
) -> None:
    write_small_layers(tmp_path / "behind")
    script = """
from kda_stream import (KdaConfig, KdaStreamError, PinnedArena, bind_kda_weights, kda_slot_bytes,
                        open_checkpoint)
folder, read = Path("fuse"), sys.argv[1]
config = KdaConfig.from_json(folder / "config.json")
outcomes, states = [], []

def fail(checkpoint, slot):
    try:
        bind_kda_weights(config, 1, checkpoint.layer(1), into=slot, read=read, residency="drop")
    except KdaStreamError as error:
        outcomes.append(told(error))
    states.append(slot.state.value)

with open_checkpoint(folder) as checkpoint, PinnedArena(kda_slot_bytes(config)) as arena:
    fail(checkpoint, arena.slots[0])
before = Before(folder)
with open_checkpoint(folder) as checkpoint, PinnedArena(kda_slot_bytes(config)) as arena:
    for _ in range(5):
        fail(checkpoint, arena.slots[0])
print(json.dumps({"outcomes": outcomes, "states": states, "left": before.left()}))
"""
    with fuse(tmp_path / "fuse", tmp_path / "behind", fails_from=1 << 20):
        found = run_fault(script, read)
    outcomes: list[dict[str, Any]] = found["outcomes"]
    assert len(outcomes) == 6
    code = "payload-fault" if read == "mapped" else "payload-read"
    assert {(told["class"], told["code"]) for told in outcomes} == {("PayloadError", code)}
    assert all(told["file"] in told["text"] and told["tensor"] for told in outcomes)
    assert set(found["states"]) == {"free"}
    assert found["left"] == {}
