"""What becomes of a load when its process forks, a handler raises, the collector comes between."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from conftest import RunPython
from support.checkpoints import Written

from kda_stream import (
    KdaConfig,
    PayloadError,
    RawTensor,
    bind_kda_weights,
    open_checkpoint,
    stream_kda_layers,
)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc")

HELD = """
import gc, json, os, signal, sys, threading, time
from kda_stream import (KdaConfig, StreamError, bind_kda_weights, open_checkpoint,
                        stream_kda_layers)

folder = sys.argv[1]

def tasks():
    return len(os.listdir("/proc/self/task"))

def ended(most):
    # The kernel takes a moment to end a thread.
    for _ in range(600):
        if tasks() <= most:
            return True
        time.sleep(0.005)
    return False

def locked():
    line = next(x for x in open("/proc/self/status") if x.startswith("VmLck"))
    return int(line.split()[1]) * 1024
"""


@linux_only
def test_a_stream_in_a_forked_child_ends_and_refuses_to_go_on(
    run_python: RunPython, written: Written
) -> None:
    script = (
        HELD
        + """
with open_checkpoint(folder) as checkpoint, stream_kda_layers(checkpoint) as stream:
    next(stream)
    child = os.fork()
    if child == 0:
        try:
            next(stream)
        except StreamError:
            stream.close()
            os._exit(7)
        os._exit(1)
    deadline = time.monotonic() + 20
    while (answer := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if answer == (0, 0):
        os.kill(child, signal.SIGKILL)
    print(json.dumps(os.waitstatus_to_exitcode(answer[1]) if answer[0] else "hangs"))
"""
    )
    assert run_python(script, written.folder) == 7


@linux_only
@pytest.mark.mlock
@pytest.mark.parametrize("raised", ["SystemExit", "TimeoutError"])
def test_whatever_a_signal_handler_raises_leaves_no_thread_and_no_locked_memory(
    run_python: RunPython, written: Written, raised: str
) -> None:
    script = (
        HELD
        + """
raised = {"SystemExit": SystemExit, "TimeoutError": TimeoutError}[sys.argv[2]]
def handler(*_):
    raise raised()
signal.signal(signal.SIGALRM, handler)
caught = left = 0
with open_checkpoint(folder) as checkpoint:
    before, threads = locked(), tasks()
    for turn in range(100):
        stream = stream_kda_layers(checkpoint)
        try:
            with stream:
                next(stream)
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (turn + 1))
            time.sleep(0.005)
        except raised:
            caught += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        left += locked() != before or not ended(threads)
        stream.close()
print(json.dumps([caught, left, locked() - before]))
"""
    )
    caught, left, locked = run_python(script, written.folder, raised)
    assert caught > 10
    assert left < 5, "only where the signal came before the first line of __exit__"
    assert locked == 0


@linux_only
@pytest.mark.mlock
def test_weights_that_are_dropped_or_released_keep_no_memory_even_without_the_collector(
    run_python: RunPython, written: Written
) -> None:
    script = (
        HELD
        + """
gc.collect()
gc.disable()
config = KdaConfig.from_json(folder + "/config.json")
with open_checkpoint(folder) as checkpoint:
    before = locked()
    weights, _ = bind_kda_weights(config, 0, checkpoint.layer(0))
    bound = locked() - before
    del weights
    dropped = locked() - before
    weights, _ = bind_kda_weights(config, 0, checkpoint.layer(0))
    weights.release()
    released = locked() - before
print(json.dumps([bound > 0, dropped, released]))
"""
    )
    assert run_python(script, written.folder) == [True, 0, 0]


@linux_only
@pytest.mark.mlock
def test_a_stream_that_is_dropped_without_close_keeps_no_thread_and_no_memory(
    run_python: RunPython, written: Written
) -> None:
    script = (
        HELD
        + """
with open_checkpoint(folder) as checkpoint:
    before, threads = locked(), tasks()
    stream = stream_kda_layers(checkpoint, slots=1)
    stream.__enter__()
    layer = next(stream)
    entered = locked() - before
    del stream, layer
    print(json.dumps([entered > 0, ended(threads), locked() - before]))
"""
    )
    assert run_python(script, written.folder) == [True, True, 0]


@linux_only
@pytest.mark.mlock
def test_a_stream_that_is_dropped_after_its_thread_failed_keeps_no_memory_until_the_collector(
    run_python: RunPython, written: Written, tmp_path: Path
) -> None:
    for path in written.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    script = (
        HELD
        + """
gc.collect()
gc.disable()
with open_checkpoint(folder) as checkpoint:
    before = locked()
    for path in os.listdir(folder):
        if path.endswith(".safetensors"):
            os.utime(os.path.join(folder, path))
    stream = stream_kda_layers(checkpoint, slots=1)
    stream.__enter__()
    time.sleep(0.2)
    entered = locked() - before
    del stream
    print(json.dumps([entered > 0, ended(1), locked() - before]))
"""
    )
    assert run_python(script, tmp_path) == [True, True, 0]


def test_a_held_layer_that_is_dropped_gives_its_slot_back(written: Written) -> None:
    with (
        open_checkpoint(written.folder) as checkpoint,
        stream_kda_layers(checkpoint, slots=1) as stream,
    ):
        assert [stream.__next__().hold().index for _ in stream.layers] == list(stream.layers)


def test_a_consumer_whose_error_makes_a_cycle_is_not_taken_for_a_collector(
    written: Written,
) -> None:
    def upload(layer: object) -> None:
        kept = None
        try:
            raise OSError(repr(layer))
        except OSError as error:
            kept = error  # the error, its traceback, this frame: a cycle around the layer
        assert kept is not None

    with open_checkpoint(written.folder) as checkpoint, stream_kda_layers(checkpoint) as stream:
        seen = []
        for layer in stream:
            upload(layer)
            seen.append(layer.index)
    assert tuple(seen) == stream.layers


def test_tensors_of_two_states_of_one_file_are_not_bound_together(
    written: Written, tmp_path: Path
) -> None:
    for path in written.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = KdaConfig.from_json(tmp_path / "config.json")
    with open_checkpoint(tmp_path) as before:
        old = before.layer(0)
        for path in tmp_path.glob("*.safetensors"):
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
        with open_checkpoint(tmp_path) as after:
            new = after.layer(0)

            class Mixed:
                def names(self) -> list[str]:
                    return new.names()

                def get(self, name: str) -> RawTensor | None:
                    return (old if name == "self_attn.q_proj.weight" else new).get(name)

            with pytest.raises(PayloadError):
                bind_kda_weights(config, 0, Mixed())


@linux_only
def test_an_absolute_path_opens_where_the_working_directory_is_gone(
    run_python: RunPython, written: Written
) -> None:
    script = (
        HELD
        + """
import tempfile
os.chdir(tempfile.mkdtemp())
os.rmdir(os.getcwd())
with open_checkpoint(folder) as checkpoint:
    print(json.dumps(len(checkpoint) > 0))
"""
    )
    assert run_python(script, os.fspath(written.folder)) is True


@linux_only
def test_giving_back_from_within_a_view_does_not_wait_for_itself(
    run_python: RunPython, written: Written
) -> None:
    """As a destructor does that the collector runs while a view is being made."""
    script = (
        HELD
        + """
config = KdaConfig.from_json(folder + "/config.json")
with open_checkpoint(folder) as checkpoint:
    weights, _ = bind_kda_weights(config, 0, checkpoint.layer(0))
    class Destroyed:
        def __init__(self):
            self.me = self
        def __del__(self):
            weights.release()
    gc.set_threshold(1)
    Destroyed()
    try:
        for _ in range(200):
            weights.q_proj.data
        ended = False
    except ValueError:
        ended = True
print(json.dumps(ended))
"""
    )
    assert run_python(script, written.folder) is True


@linux_only
def test_a_shape_of_millions_of_ones_takes_no_more_memory_than_its_header_is_worth(
    run_python: RunPython, tmp_path: Path
) -> None:
    header = b'{"a":{"dtype":"U8","shape":[' + b"1," * 2_000_000 + b'1],"data_offsets":[0,1]}}'
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    script = """
import json, resource, sys
from kda_stream import open_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open_checkpoint(sys.argv[1]) as checkpoint:
    dims = len(checkpoint.info("a").shape)
print(json.dumps([dims, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024]))
"""
    dims, taken_bytes = run_python(script, path)
    assert dims == 2_000_001
    assert taken_bytes < 40 * len(header)
