"""A shard is cut short, replaced or rewritten under its reader: an error, and nothing is left."""

from __future__ import annotations

from typing import Any

import pytest
from faults.running import READS, RunFault, linux_only
from support.changing_files import CHANGES

pytestmark = [linux_only, pytest.mark.mlock]
each_change = pytest.mark.parametrize("change", CHANGES)
each_read = pytest.mark.parametrize("read", READS)

# The second of two layers, cold, into a slot. Its q_proj's shard changes, by and by.
ONE_LAYER = """
from kda_stream import limits
assert limits.PAUSE_NANOSECONDS > 0
limits.PAUSE_NANOSECONDS = 0  # the copy comes back after each piece, and `between` has its turn
from kda_stream import (KdaConfig, KdaStreamError, PinnedArena, bind_kda_weights, kda_slot_bytes,
                        open_checkpoint)
from support.changing_files import CHANGES
from support.page_cache import cool
from support.small_layers import is_right, spoil, write_small_layers

read = sys.argv[2]
folder, whole = Path("changing"), Path("whole")
written = write_small_layers(folder)
write_small_layers(whole)
config = KdaConfig.from_json(folder / "config.json")
shard = written.shard_of(1, "q_proj.weight")
of_shard = [leaf for leaf in ("q_proj.weight", "v_proj.weight", "o_proj.weight",
            "q_conv1d.weight", "v_conv1d.weight") if written.shard_of(1, leaf) == shard]
assert len(of_shard) == 5
turns = 0

def bound(checkpoint, slot, between=None):
    spoil(slot)
    weights, report = bind_kda_weights(config, 1, checkpoint.layer(1), into=slot, read=read,
                                       residency="drop", between=between)
    right = is_right(weights, written, 1)
    weights.release()
    return "right" if right else "wrong"

def change():
    CHANGES[sys.argv[1]](shard)
    cool(Path(f"/proc/self/fd/{first}"), *folder.glob("*.safetensors"))  # none of its own is left

def changed_bind(between):
    try:
        return bound(checkpoint, slot, between)
    except KdaStreamError as error:
        return told(error)

with open_checkpoint(whole) as checkpoint, PinnedArena(kda_slot_bytes(config)) as arena:
    assert bound(checkpoint, arena) == "right"
first = os.open(shard, os.O_RDONLY)  # so that its pages can be counted when it is replaced
before = Before(Path("."), [*cold(folder), Path(f"/proc/self/fd/{first}")])
checkpoint, arena = open_checkpoint(folder), PinnedArena(kda_slot_bytes(config))
slot = arena.slots[0]
mapped = bound(checkpoint, slot)
cold(folder)
"""
REPORT = """
found["state"] = slot.state.value
with open_checkpoint(whole) as other:
    found["again"] = bound(other, slot)
checkpoint.close()
arena.close()
print(json.dumps({**found, "mapped": mapped, "left": before.left()}))
"""


def assert_refused(found: dict[str, Any], read: str, code: set[str]) -> None:
    outcome = found["outcome"]
    assert outcome["class"] == "PayloadError", outcome
    assert "OSError" in outcome["is a"]
    assert outcome["code"] in code
    assert outcome["file"].endswith(".safetensors")
    assert outcome["file"] in outcome["text"]
    assert "open the checkpoint a" in outcome["hint"]
    assert found["mapped"] == "right", "the test looks at the wrong thing"
    assert found["state"] == "free"
    assert found["again"] == "right"
    assert found["left"] == {}, read


@each_read
@each_change
def test_a_shard_that_changes_between_open_and_bind_is_refused_and_nothing_is_left(
    run_fault: RunFault, change: str, read: str
) -> None:
    script = """
change()
found = {"outcome": changed_bind(None)}
"""
    found = run_fault(ONE_LAYER + script + REPORT, change, read)
    assert_refused(found, read, {"file-changed"})


@each_read
@each_change
def test_a_shard_that_changes_in_the_middle_of_a_layer_is_refused_and_nothing_is_left(
    run_fault: RunFault, change: str, read: str
) -> None:
    script = """
def between():
    global turns
    turns += 1
    if turns == 2:
        change()

outcome = changed_bind(between)
found = {"outcome": outcome, "turns": turns,
         "of the shard": outcome["tensor"] and outcome["tensor"].partition("self_attn.")[2]
                         in of_shard}
"""
    found = run_fault(ONE_LAYER + script + REPORT, change, read)
    cut = {"payload-fault"} if read == "mapped" else {"payload-end"}
    assert_refused(found, read, cut if change == "cut short" else {"file-changed"})
    assert found["turns"] >= 2, "the change came too late"
    if change == "cut short":
        assert found["of the shard"]
        assert found["outcome"]["tensor"] in found["outcome"]["text"]
    else:
        assert found["turns"] > 2, "the change came at the end"


# One full-size layer, again and again; each time its shard changes at another moment.
AT_ANY_MOMENT = """
from kda_stream import KdaStreamError, open_checkpoint, stream_kda_layers
from support.changing_files import CHANGES
from support.large_layers import is_right, write_large_layers, write_large_shard

change, read, rounds = CHANGES[sys.argv[1]], sys.argv[2], int(sys.argv[3])
folder = Path("large")
[shard] = write_large_layers(folder, 1)
took = []

def one_round(delay):
    write_large_shard(folder, 0)
    time.sleep(0.01)  # the coarsest clock of a file system moves on
    changed = []

    def change_it():
        time.sleep(delay)
        changed.append(time.monotonic())
        change(shard)

    with open_checkpoint(folder) as checkpoint:
        changer = threading.Thread(target=change_it)
        if delay is not None:
            changer.start()
        begin = time.monotonic()
        try:
            with stream_kda_layers(checkpoint, slots=1, read=read, residency="drop") as stream:
                for layer in stream:
                    end = time.monotonic()
                    outcome = "right" if is_right(layer.weights, 0) else "wrong"
        except KdaStreamError as error:
            end = time.monotonic()
            outcome = [told(error)[key] for key in ("class", "code", "file")]
        if delay is None:
            took.append(end - begin)
            return outcome
        changer.join()
        return outcome, begin < changed[0] < end

assert [one_round(None) for _ in range(3)] == ["right"] * 3
before = Before(Path("."))
outcomes = [one_round(random.uniform(0, 0.9) * min(took)) for n in range(rounds)]
print(json.dumps([outcomes, before.left()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("read", ["mapped", "positional", "direct"])
@each_change
def test_a_shard_that_changes_at_any_moment_of_a_full_size_layer_gives_an_error_or_the_right_bytes(
    run_fault: RunFault, change: str, read: str
) -> None:
    outcomes, left = run_fault(AT_ANY_MOMENT, change, read, 6)
    codes = {"file-changed"}
    if change == "cut short":
        codes |= {"payload-fault", "payload-end"}
    for outcome, _ in outcomes:
        assert outcome != "wrong"
        if outcome != "right":
            kind, code, file = outcome
            assert (kind, file) == ("PayloadError", "model-00000.safetensors")
            assert code in codes
    within = [outcome for outcome, is_within in outcomes if is_within]
    assert len(within) >= 2, "the changes came at the wrong moments"
    assert any(outcome != "right" for outcome in within)
    assert left == {}
