"""Eight threads on one checkpoint, and a thousand checkpoints one after the other."""

from __future__ import annotations

import pytest
from faults.running import RunFault, linux_only

pytestmark = [linux_only, pytest.mark.mlock]

# Eight threads, which take turns a thousand times as often as they do by default.
EIGHT = """
from kda_stream import (ClosedError, InUseError, KdaConfig, PinnedArena, bind_kda_weights,
                        kda_slot_bytes, open_checkpoint)
from support.checkpoints import MEDIUM
from support.small_layers import is_right, write_small_layers
folder, verify = Path("checkpoint"), sys.argv[1]
written = write_small_layers(folder, layers=7, shards=4, geometry=MEDIUM)
config = KdaConfig.from_json(folder / "config.json")
LAYERS = [0, 1, 2, 4, 5, 6]
READS = ["mapped", "positional", "direct", "auto"]
sys.setswitchinterval(sys.getswitchinterval() / 1000)

def bound(checkpoint, layer, slot, read):
    weights, _ = bind_kda_weights(config, layer, checkpoint.layer(layer), into=slot, read=read,
                                  residency="drop")
    right = is_right(weights, written, layer)
    weights.release()
    return right

with open_checkpoint(folder) as checkpoint, PinnedArena(kda_slot_bytes(config)) as arena:
    for read in READS:
        assert bound(checkpoint, 1, arena, read)
before = Before(Path("."))
outcomes = []
arena = PinnedArena(kda_slot_bytes(config), slots=8)

def in_eight_threads(work):
    start = threading.Barrier(9)
    threads = [threading.Thread(target=work, args=(n, start)) for n in range(8)]
    for thread in threads:
        thread.start()
    start.wait()
    return threads
"""


@pytest.mark.parametrize("verify", ["all", "needed"])
def test_eight_threads_bind_every_layer_of_one_checkpoint_each_into_its_slot(
    run_fault: RunFault, verify: str
) -> None:
    script = """
for turn in range(6):
    checkpoint = open_checkpoint(folder, verify=verify)
    left = list(range(8))
    lock = threading.Lock()

    def work(number, start):
        layers = LAYERS[number % 6:] + LAYERS[:number % 6]
        start.wait()
        try:
            for n, layer in enumerate(layers):
                read = READS[(turn + number + n) % 4]
                outcomes.append(bound(checkpoint, layer, arena.slots[number], read))
        except BaseException as error:
            outcomes.append(repr(error))
        with lock:
            left.remove(number)
            if not left:
                checkpoint.close()

    for thread in in_eight_threads(work):
        thread.join()
    assert not left
del thread, work
states = {slot.state.value for slot in arena.slots}
arena.close()
print(json.dumps([outcomes.count(True), [x for x in outcomes if x is not True], sorted(states),
                  before.left()]))
"""
    assert run_fault(EIGHT + script, verify) == [6 * 8 * 6, [], ["free"], {}]


@pytest.mark.parametrize("verify", ["all", "needed"])
def test_closing_while_eight_threads_bind_gives_right_bytes_or_a_closed_error(
    run_fault: RunFault, verify: str
) -> None:
    script = """
others, closings, errors = [], [], []
for turn in range(40):
    checkpoint = open_checkpoint(folder, verify=verify)

    def work(number, start):
        start.wait()
        try:
            for n in range(1000):
                layer, read = LAYERS[(number + n) % 6], READS[(turn + number + n) % 4]
                outcomes.append(bound(checkpoint, layer, arena.slots[number], read))
        except ClosedError as error:
            errors.append(told(error))
        except BaseException as error:
            others.append(repr(error))

    threads = in_eight_threads(work)
    time.sleep(random.uniform(0, 0.03))
    try:
        checkpoint.close()
    except InUseError:  # a copy was running out of the map
        closings.append("in use")
    for thread in threads:
        thread.join()
    checkpoint.close()
del thread, threads, work
states = {slot.state.value for slot in arena.slots}
arena.close()
print(json.dumps({
    "wrong": outcomes.count(False), "right": outcomes.count(True), "others": others,
    "closed": len(errors), "codes": sorted({error["code"] for error in errors}),
    "hints": all(error["hint"] for error in errors), "states": sorted(states),
    "left": before.left(),
}))
"""
    found = run_fault(EIGHT + script, verify)
    assert found["others"] == []
    assert found["wrong"] == 0
    assert found["right"] > 40, "the checkpoints were closed too soon"
    assert found["closed"] == 40 * 8
    assert set(found["codes"]) <= {"checkpoint-closed", "memory-given-back"}
    assert found["hints"]
    assert found["states"] == ["free"]
    assert found["left"] == {}


MIB = 1024**2


def test_a_thousand_checkpoints_opened_bound_and_closed_let_nothing_grow(
    run_fault: RunFault,
) -> None:
    script = """
from kda_stream import (KdaConfig, PinnedArena, bind_kda_weights, kda_slot_bytes, open_checkpoint,
                        stream_kda_layers)
from support.checkpoints import UNEVEN
from support.left_behind import bytes_of
from support.small_layers import is_right, write_small_layers
folder = Path("checkpoint")
written = write_small_layers(folder, layers=3, shards=2, geometry=UNEVEN)
config = KdaConfig.from_json(folder / "config.json")
READS = ["mapped", "positional", "direct", "auto"]
arena = PinnedArena(kda_slot_bytes(config))
wrong = []

def cycle(n):
    read, layer = READS[n % 4], n % 3
    with open_checkpoint(folder, verify=("all", "needed")[n // 4 % 2]) as checkpoint:
        into = arena if n % 5 else None
        weights, _ = bind_kda_weights(config, layer, checkpoint.layer(layer), into=into, read=read)
        if not is_right(weights, written, layer):
            wrong.append(n)
        weights.release()
        if n % 10 == 0:
            with stream_kda_layers(checkpoint, slots=1, read=read) as stream:
                wrong.extend(n for layer in stream
                             if not is_right(layer.weights, written, layer.index))

def counted():
    gc.collect()
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    return {"maps": maps, "resident": bytes_of("VmRSS"), "space": bytes_of("VmSize")}

for n in range(200):
    cycle(n)
before, first = Before(Path(".")), counted()
for n in range(200, 1000):
    cycle(n)
left, last = before.left(), counted()
print(json.dumps([wrong, left, {name: last[name] - first[name] for name in first}]))
"""
    wrong, left, grown = run_fault(script)
    assert wrong == []
    assert left == {}
    assert grown["maps"] <= 2, "the C library's own may join or part"
    assert grown["resident"] <= 2 * MIB
    assert grown["space"] <= 2 * MIB
