"""The ring of slots under a reader that is late, as a GPU that copies by itself is.

The "device" is a thread that takes layers in order, waits, reads, and only then gives them back. A
slot that were filled anew before would give it a wrong checksum.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import RunPython
from support.checkpoints import Written
from support.fake_driver import FakeDriver

from kda_stream import (
    Checkpoint,
    KdaLayer,
    KdaLayerStream,
    StreamError,
    open_checkpoint,
    stream_kda_layers,
)

LAYERS = [0, 1, 2, 4, 5, 6] * 2
ANSWERED_SECONDS = 0.2  # a tenth is promised; the machine that runs this may be busy
Delay = Callable[[], float]

each_number_of_slots = pytest.mark.parametrize("slots", [1, 2, 3])


class Device:
    """Copies what it is given, in order and late, and gives it back."""

    def __init__(self, delay: Delay) -> None:
        self.read: list[tuple[int, int]] = []
        self.waits_most = 0
        self._delay = delay
        self._given: queue.Queue[KdaLayer | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def copy(self, layer: KdaLayer) -> None:
        """Have it copy the layer, some time."""
        self._given.put(layer)
        self.waits_most = max(self.waits_most, self._given.qsize())

    def end(self) -> None:
        """Wait until it has copied all."""
        self._given.put(None)
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while (layer := self._given.get()) is not None:
            halves = []
            for half in (0, 1):  # a copy that is under way is late too
                time.sleep(self._delay() / 2)
                halves.append(b"".join(halves_of(layer, half)))
            self.read.append((layer.index, zlib.crc32(b"".join(halves))))
            layer.release()


def halves_of(layer: KdaLayer, half: int) -> Iterator[bytes]:
    for _, tensor in layer.weights.items():
        middle = tensor.data.nbytes // 2
        yield bytes(tensor.data[middle:] if half else tensor.data[:middle])


def checksum(written: Written, layer: int) -> int:
    parts = list(written.expected(layer).values())
    first = [part[: len(part) // 2] for part in parts]
    return zlib.crc32(b"".join(first + [part[len(part) // 2 :] for part in parts]))


@contextmanager
def device_that_takes(delay: Delay) -> Iterator[Device]:
    device = Device(delay)
    yield device
    device.end()


def randomly(seconds_max: float) -> Delay:
    return lambda: random.random() * seconds_max


DELAYS: dict[str, Delay] = {
    "at once": lambda: 0.0,
    "a little": lambda: 0.001,
    "far behind": lambda: 0.01,
    "now so, now so": randomly(0.006),
}


@each_number_of_slots
@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
@pytest.mark.parametrize("read", ["mapped", "direct"])
def test_a_late_device_reads_every_layer_right(
    checkpoint: Checkpoint, written: Written, slots: int, delay: Delay, read: Any
) -> None:
    driver = FakeDriver()
    with stream_kda_layers(
        checkpoint, layers=LAYERS, slots=slots, read=read, register=driver
    ) as stream:
        with device_that_takes(delay) as device:
            for layer in stream:
                device.copy(layer.hold())
        assert device.read == [(n, checksum(written, n)) for n in LAYERS]
        assert device.waits_most <= slots
    driver.assert_clean()


@each_number_of_slots
def test_a_device_that_is_faster_than_the_disk_reads_every_layer_right(
    checkpoint: Checkpoint, written: Written, slots: int
) -> None:
    with (
        stream_kda_layers(checkpoint, layers=LAYERS, slots=slots) as stream,
        device_that_takes(lambda: 0.0) as device,
    ):
        for layer in stream:
            device.copy(layer.hold())
            time.sleep(0.002)  # as if staging took that long
    assert device.read == [(n, checksum(written, n)) for n in LAYERS]


@each_number_of_slots
def test_layers_that_wait_for_a_device_are_never_more_than_the_slots(
    checkpoint: Checkpoint, slots: int
) -> None:
    held: queue.Queue[KdaLayer] = queue.Queue()
    with stream_kda_layers(checkpoint, layers=LAYERS, slots=slots) as stream:
        for _ in range(slots):
            held.put(next(stream).hold())
        release = threading.Timer(0.15, lambda: held.get().release())
        release.start()
        began = time.monotonic()
        next(stream)
        assert time.monotonic() - began > 0.1, "it came before a slot was free"
        release.join()


def test_two_devices_share_a_stream(checkpoint: Checkpoint, written: Written) -> None:
    """One copies the layers at even places, the other the rest; both give back out of order."""
    with (
        stream_kda_layers(checkpoint, layers=LAYERS, slots=3) as stream,
        device_that_takes(lambda: 0.012) as slow,
        device_that_takes(lambda: 0.001) as fast,
    ):
        for place, layer in enumerate(stream):
            (fast if place % 2 else slow).copy(layer.hold())
    for device, layers in ((slow, LAYERS[::2]), (fast, LAYERS[1::2])):
        assert device.read == [(n, checksum(written, n)) for n in layers]


# --- a consumer that does not hold ----------------------------------------------------------------


@each_number_of_slots
def test_data_that_were_not_held_have_ended_when_a_late_device_reads_them(
    checkpoint: Checkpoint, slots: int
) -> None:
    with stream_kda_layers(checkpoint, layers=LAYERS, slots=slots) as stream:
        before = None
        for layer in stream:
            if before is not None:
                with pytest.raises(ValueError, match="released"):
                    bytes(before)
            before = layer.weights.q_proj.data


@each_number_of_slots
def test_arrays_that_were_not_held_are_an_error_in_debug_mode_before_a_byte_of_them_changes(
    run_python: RunPython, written: Written, slots: int
) -> None:
    script = """
        import json, queue, sys, threading, time
        import numpy
        from kda_stream import InUseError, open_checkpoint, stream_kda_layers
        waiting, sums = queue.Queue(), []
        def device():
            while (item := waiting.get()) is not None:
                array, right = item
                time.sleep(0.1)  # staging would have been over it since long
                sums.append(array.tobytes() == right)
                del array, item
        reader = threading.Thread(target=device)
        reader.start()
        steps = 0
        with open_checkpoint(sys.argv[1]) as checkpoint:
            try:
                with stream_kda_layers(checkpoint, slots=int(sys.argv[2])) as stream:
                    for layer in stream:
                        steps += 1
                        array = numpy.frombuffer(layer.weights.q_proj.data, numpy.uint8)
                        waiting.put((array, array.tobytes()))
                        del array
            except InUseError as error:
                found = error.code.value
            waiting.put(None)
            reader.join()
        print(json.dumps([steps, found, sums]))
    """
    found = run_python(script, written.folder, slots, flags=("-X", "dev"))
    assert found == [1, "memory-in-use", [True]]


# --- a reader that dies ---------------------------------------------------------------------------


def dead_reader(given: queue.Queue[KdaLayer], slots: int) -> threading.Thread:
    """It takes so many layers, and ends without giving one back."""

    def read() -> None:
        kept.extend(given.get() for _ in range(slots))

    kept: list[KdaLayer] = []
    thread = threading.Thread(target=read, daemon=True)
    thread.kept = kept  # type: ignore[attr-defined]
    thread.start()
    return thread


@each_number_of_slots
def test_a_stream_whose_reader_died_waits_until_another_thread_closes_it(
    written: Written, slots: int
) -> None:
    given: queue.Queue[KdaLayer] = queue.Queue()
    driver = FakeDriver()
    with open_checkpoint(written.folder) as checkpoint:
        stream = stream_kda_layers(checkpoint, slots=slots, register=driver)
        reader = dead_reader(given, slots)
        handed: list[int] = []

        def hand_out_all(stream: KdaLayerStream) -> None:
            for layer in stream:
                given.put(layer.hold())
                handed.append(layer.index)
            next(stream)  # where the loop saw no more than the end

        closer = threading.Timer(0.3, stream.close)
        with stream:
            closer.start()
            began = time.monotonic()
            with pytest.raises(StreamError, match="closed"):
                hand_out_all(stream)
            waited = time.monotonic() - began
        closer.join()
        assert handed == LAYERS[:slots], "no slot was taken from the dead"
        assert 0.2 < waited < 0.3 + 5 * ANSWERED_SECONDS
        reader.join(timeout=10)
        assert not reader.is_alive()
    driver.assert_clean()


@each_number_of_slots
def test_a_stream_whose_reader_died_goes_on_when_its_layers_are_dropped(
    checkpoint: Checkpoint, slots: int
) -> None:
    given: queue.Queue[KdaLayer] = queue.Queue()
    with stream_kda_layers(checkpoint, layers=LAYERS, slots=slots) as stream:
        reader = dead_reader(given, slots)
        for _ in range(slots):
            given.put(next(stream).hold())
        reader.join(timeout=10)
        del reader
        assert sum(1 for _ in stream) == len(LAYERS) - slots


@each_number_of_slots
def test_ctrl_c_ends_a_stream_whose_reader_died(
    interrupt_python: RunPython, written: Written, slots: int
) -> None:
    script = """
        import json, os, sys, threading, time
        from kda_stream import open_checkpoint, stream_kda_layers
        handed, caught = [], None
        def device(layer):
            handed.append(layer)
            raise SystemExit  # with the layer still held
        with open_checkpoint(sys.argv[1]) as checkpoint:
            try:
                with stream_kda_layers(checkpoint, slots=int(sys.argv[2])) as stream:
                    for layer in stream:
                        reader = threading.Thread(target=device, args=(layer.hold(),))
                        reader.start()
                        reader.join()
                        if len(handed) == int(sys.argv[2]):
                            print("ready", flush=True)
            except KeyboardInterrupt:
                caught = time.monotonic()
        tasks = len(os.listdir("/proc/self/task"))
        print(json.dumps({"caught": caught, "handed": len(handed), "held": handed[0].held}))
    """
    found = interrupt_python(script, written.folder, slots)
    assert found["caught"] is not None
    assert (found["handed"], found["held"]) == (slots, False)
    assert found["delay"] < 5 * ANSWERED_SECONDS
