"""Consumers that raise, break, forget to release or release twice: nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
from faults.running import RunFault, linux_only

pytestmark = [linux_only, pytest.mark.mlock]
each_read = pytest.mark.parametrize("read", ["mapped", "direct"])

STREAMING = """
import numpy
from kda_stream import (InUseError, KdaConfig, KdaStreamError, PinnedArena, SlotError,
                        bind_kda_weights, kda_slot_bytes, open_checkpoint, stream_kda_layers)
from support.checkpoints import MEDIUM
from support.small_layers import is_right, write_small_layers
folder, read = Path("checkpoint"), sys.argv[1]
written = write_small_layers(folder, layers=7, shards=3, geometry=MEDIUM)
config = KdaConfig.from_json(folder / "config.json")
LAYERS = [0, 1, 2, 4, 5, 6]
seen, kept = [], []

def see(layer):
    seen.append([layer.index, is_right(layer.weights, written, layer.index)])

def streaming(slots=2, layers=LAYERS):
    return stream_kda_layers(checkpoint, slots=slots, layers=layers, lock="prefer", read=read,
                             residency="drop")

def every_layer():
    seen.clear()
    with streaming() as stream:
        for layer in stream:
            see(layer)
    return list(seen)

with open_checkpoint(folder) as checkpoint:
    every_layer()
before = Before(Path("."), cold(folder, open_checkpoint))
checkpoint = open_checkpoint(folder)
assert every_layer() == [[n, True] for n in LAYERS]
seen.clear()
opened = Before(Path("."), folder.glob("*.safetensors"))
raised = None
try:
    CONSUME
except BaseException as error:
    raised = type(error).__name__
found = {"seen": list(seen), "raised": raised, "left while open": opened.left(),
         "again": every_layer()}
checkpoint.close()
print(json.dumps({**found, "left": before.left()}))
"""

CONSUMERS: dict[str, tuple[str, str | None, int]] = {
    "raises": (
        """
    with streaming() as stream:
        for layer in stream:
            see(layer)
            if layer.index == 2:
                raise LookupError(layer.index)
""",
        "LookupError",
        3,
    ),
    "raises while it holds every slot": (
        """
    with streaming() as stream:
        for layer in stream:
            see(layer.hold())
            kept.append(layer)
            if layer.index == 1:
                raise LookupError(layer.index)
""",
        "LookupError",
        2,
    ),
    "raises in a thread of its own": (
        """
    with streaming() as stream:
        for layer in stream:
            layer.hold()
            def use(layer=layer):
                see(layer)
                layer.release()
                raise LookupError(layer.index)
            threading.excepthook = lambda *_: None
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
            del use, thread
""",
        None,
        6,
    ),
    "breaks": (
        """
    with streaming() as stream:
        for layer in stream:
            see(layer)
            if layer.index == 1:
                break
""",
        None,
        2,
    ),
    "breaks out of a generator": (
        """
    def layers():
        with streaming() as stream:
            yield from stream
    for layer in layers():
        see(layer)
        break
""",
        None,
        1,
    ),
    "returns at once": (
        """
    with streaming() as stream:
        pass
""",
        None,
        0,
    ),
    "forgets to release what it holds": (
        """
    with streaming(slots=6) as stream:
        for layer in stream:
            see(layer.hold())
            kept.append(layer)
""",
        None,
        6,
    ),
    "forgets what it holds, without a name": (
        """
    with streaming(slots=2) as stream:
        for layer in stream:
            see(layer.hold())
""",
        None,
        6,
    ),
    "forgets to leave the stream": (
        """
    stream = streaming()
    stream.__enter__()
    see(next(stream))
    del stream
""",
        None,
        1,
    ),
    "keeps data behind the stream": (
        """
    with streaming() as stream:
        for layer in stream:
            see(layer)
            kept.append(layer.weights.q_proj.data)
    ended = []
    for data in kept:
        try:
            bytes(data)
        except ValueError:
            ended.append(True)
    assert len(ended) == 6
""",
        None,
        6,
    ),
    "releases twice": (
        """
    with streaming() as stream:
        for layer in stream:
            see(layer)
            layer.release()
            layer.release()
            layer.weights.release()
        layer.release()
    layer.release()
""",
        None,
        6,
    ),
    "releases twice what it holds, in two threads": (
        """
    with streaming() as stream:
        for layer in stream:
            see(layer.hold())
            threads = [threading.Thread(target=layer.release) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    del threads, thread
""",
        None,
        6,
    ),
    "releases a layer again when its slot is lent to another": (
        """
    with streaming(slots=1) as stream:
        first = next(stream).hold()
        see(first)
        first.release()
        second = next(stream).hold()
        first.release()
        time.sleep(0.2)  # enough to fill a slot that were free now
        see(second)
        assert second.held
        second.release()
        second.release()
        for layer in stream:
            first.release()
            see(layer)
""",
        None,
        6,
    ),
}


@each_read
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_whatever_a_consumer_does_the_next_stream_works_and_nothing_is_left(
    run_fault: RunFault, consumer: str, read: str
) -> None:
    code, raised, layers = CONSUMERS[consumer]
    body = code.strip("\n").removeprefix("    ")
    found = run_fault(STREAMING.replace("CONSUME", body), read)
    indices = [0, 1, 2, 4, 5, 6]
    assert found["seen"] == [[n, True] for n in indices[:layers]]
    assert found["raised"] == raised
    assert found["left while open"] == {}
    assert found["again"] == [[n, True] for n in indices]
    assert found["left"] == {}


def test_an_array_kept_behind_the_stream_is_an_error_and_its_memory_goes_with_it(
    run_fault: RunFault,
) -> None:
    body = """
    try:
        with streaming() as stream:
            for layer in stream:
                see(layer)
                kept.append(numpy.frombuffer(layer.weights.q_proj.data, numpy.uint8))
    except InUseError as error:
        assert len(kept) == 6
        del error
        kept.clear()
        raise
"""
    found = run_fault(STREAMING.replace("CONSUME", body.strip("\n").removeprefix("    ")), "direct")
    assert found["raised"] == "InUseError"
    assert found["seen"] == [[n, True] for n in (0, 1, 2, 4, 5, 6)]
    assert found["left while open"] == {}
    assert found["again"] == [[n, True] for n in (0, 1, 2, 4, 5, 6)]
    assert found["left"] == {}


@each_read
def test_weights_that_are_forgotten_dropped_or_released_twice_keep_no_slot(
    run_fault: RunFault, read: str
) -> None:
    body = """
    with PinnedArena(kda_slot_bytes(config), lock="prefer") as arena:
        def bound(layer, into=arena):
            weights, _ = bind_kda_weights(config, layer, checkpoint.layer(layer), into=into,
                                          read=read, residency="drop")
            seen.append([layer, is_right(weights, written, layer)])
            return weights
        forgotten = bound(0)
        try:
            bound(1)
        except SlotError as error:
            kept.append([type(error).__name__, error.code.value, bool(error.hint)])
        assert is_right(forgotten, written, 0)
        del forgotten  # dropped
        first = bound(1)
        first.release()
        first.release()
        second = bound(2)
        first.release()
        try:
            bound(1)
        except SlotError as error:
            kept.append([type(error).__name__, error.code.value, bool(error.hint)])
        assert is_right(second, written, 2)
        second.release()
        of_its_own = bound(4, into=None)
        of_its_own.release()
        of_its_own.release()
        forgotten = bound(5)
        of_its_own = bound(6, into=None)
        del of_its_own
    assert kept == [["SlotError", "slot-not-free", True]] * 2
"""
    script = STREAMING.replace("CONSUME", body.strip("\n").removeprefix("    "))
    found: dict[str, Any] = run_fault(script, read)
    assert found["raised"] is None
    assert found["seen"] == [[n, True] for n in (0, 1, 2, 4, 5, 6)]
    assert found["left while open"] == {}
    assert found["again"] == [[n, True] for n in (0, 1, 2, 4, 5, 6)]
    assert found["left"] == {}
