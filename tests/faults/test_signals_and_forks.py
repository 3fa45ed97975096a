"""Ctrl-C at any moment of a stream, and forks while it runs."""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.running import FORKING, RunFault, command_of, linux_only

pytestmark = [linux_only, pytest.mark.mlock]

# --- Ctrl-C ---------------------------------------------------------------------------------------

# Streams full-size layers until it is interrupted; then counts, and streams one more.
INTERRUPTED = """
from kda_stream import open_checkpoint, stream_kda_layers
from support.large_layers import is_right, write_large_layers
folder, turns = Path("large"), int(sys.argv[1])
write_large_layers(folder, 3)
READS = ["mapped", "positional", "direct", "auto"]

def say(what):
    print(json.dumps(what), flush=True)

def one_more(layer):
    with stream_kda_layers(checkpoint, layers=[layer], slots=1, read="direct") as stream:
        return [is_right(layer.weights, layer.index) for layer in stream] == [True]

with open_checkpoint(folder) as checkpoint:
    pass
before = Before(Path("."))
checkpoint = open_checkpoint(folder)
for read in READS:
    with stream_kda_layers(checkpoint, read=read, residency="keep") as stream:
        for layer in stream:
            assert is_right(layer.weights, layer.index)
    del stream, layer
opened = Before(Path("."))
for turn in range(turns):
    read, slots = READS[turn % 4], 1 + turn // 4 % 2
    caught = other = None
    try:
        say("go")
        while True:
            with stream_kda_layers(checkpoint, slots=slots, read=read, residency="keep") as stream:
                for layer in stream:
                    layer.weights.o_proj.data[-1]
    except KeyboardInterrupt:
        caught = time.monotonic()
    except BaseException as error:
        other = repr(error)
    stream = layer = None
    say({"caught": caught, "other": other, "left": opened.left(), "right": one_more(turn % 3)})
checkpoint.close()
say(before.left())
"""


@pytest.mark.slow
def test_ctrl_c_at_200_moments_of_full_size_streams_is_answered_at_once_and_leaves_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    turns, delays = 200, []
    with subprocess.Popen(
        command_of(INTERRUPTED, turns),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        try:
            for turn in range(turns):
                line = child.stdout.readline()
                assert line == '"go"\n', f"{line}{child.communicate(timeout=10)[1]}"
                time.sleep(random.uniform(0, 0.12))
                sent = time.monotonic()
                child.send_signal(signal.SIGINT)
                found = json.loads(child.stdout.readline())
                assert found["other"] is None, turn
                assert found["left"] == {}, turn
                assert found["right"], turn
                delays.append(found["caught"] - sent)
            assert json.loads(child.stdout.readline()) == {}
        finally:
            child.kill()
    for path in (tmp_path / "large").iterdir():
        path.unlink()
    tenths = statistics.quantiles(delays, n=10)
    record_property("seconds to KeyboardInterrupt, tenths", [round(t, 4) for t in tenths])
    record_property("seconds to KeyboardInterrupt, most", round(max(delays), 4))
    assert statistics.median(delays) < 0.1
    assert max(delays) < 1, "a machine that is busy may be late, but not by that"


def test_reads_that_are_interrupted_without_end_are_ended_by_ctrl_c(
    run_fault: RunFault, failing_reads: Path
) -> None:
    script = """
import errno
from kda_stream import KdaConfig, bind_kda_weights, open_checkpoint, stream_kda_layers
from support.failing_reads import FailingReads
from support.small_layers import is_right, write_small_layers
folder = Path("checkpoint")
written = write_small_layers(folder)
config = KdaConfig.from_json(folder / "config.json")
reads = FailingReads(folder)

def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)

def streamed():
    with stream_kda_layers(checkpoint, read="positional") as stream:
        return [is_right(layer.weights, written, layer.index) for layer in stream]

def bound():
    weights, _ = bind_kda_weights(config, 1, checkpoint.layer(1), read="positional")
    right = is_right(weights, written, 1)
    weights.release()
    return right

checkpoint = open_checkpoint(folder)
right = [streamed(), bound()]
before, took = Before(Path(".")), []
for step in (streamed, bound):
    reads.error(errno.EINTR, first=1, times=sys.maxsize)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    begin = time.monotonic()
    try:
        step()
    except KeyboardInterrupt:
        took.append(time.monotonic() - begin - 0.1)
    reads.none()
print(json.dumps([right, took, before.left(), streamed(), bound()]))
"""
    right, took, left, streamed, bound = run_fault(script, preload=failing_reads)
    assert right == [[True, True], True]
    assert len(took) == 2
    assert max(took) < 1, "a tenth is promised; the machine may be busy"
    assert left == {}
    assert [streamed, bound] == right


# --- forks ----------------------------------------------------------------------------------------

WAITING = """
import traceback

def exit_code_of(child, seconds=20):
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hung"
        time.sleep(0.002)

def in_a_child(steps):
    # 0, or the number of the first step that did not answer True
    child = os.fork()
    if child:
        return child
    code = 100
    try:
        code = next((n for n, step in enumerate(steps, start=1) if step() is not True), 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("read", ["mapped", "positional", "direct"])
def test_a_fork_in_the_middle_of_a_full_size_stream_harms_neither_process(
    run_fault: RunFault, read: str
) -> None:
    script = """
from kda_stream import (InUseError, KdaConfig, StreamError, bind_kda_weights, open_checkpoint,
                        stream_kda_layers)
from support.large_layers import is_right, write_large_layers
from support.left_behind import bytes_of
folder, read = Path("large"), sys.argv[1]
write_large_layers(folder, 2)
config = KdaConfig.from_json(folder / "config.json")

def next_is_refused():
    try:
        next(stream)
    except StreamError as error:
        return bool(error.hint)

def closing_returns():
    stream.close()
    return True

def the_checkpoint_works():
    weights, _ = bind_kda_weights(config, 1, checkpoint.layer(1), read=read)
    right = is_right(weights, 1)
    weights.release()
    return right

def another_stream_works():
    with open_checkpoint(folder) as other:
        with stream_kda_layers(other, layers=[0], slots=1, read=read) as stream:
            return [is_right(layer.weights, 0) for layer in stream] == [True]

def the_checkpoint_closes():
    try:
        checkpoint.close()
    except InUseError:  # the copy of the thread that is not here will point into it for ever
        return read == "mapped"
    return str(folder.resolve()) not in Path("/proc/self/maps").read_text()

def nothing_is_locked():
    return bytes_of("VmLck") == 0

STEPS = [next_is_refused, closing_returns, the_checkpoint_works, another_stream_works,
         the_checkpoint_closes, nothing_is_locked]
with open_checkpoint(folder) as checkpoint:
    with stream_kda_layers(checkpoint, slots=1, read=read, residency="keep") as stream:
        begin = time.monotonic()
        for layer in stream:
            pass
        took = time.monotonic() - begin
    del stream, layer
before = Before(Path("."))
codes, right = [], []
with open_checkpoint(folder) as checkpoint:
    for _ in range(4):
        with stream_kda_layers(checkpoint, slots=1, read=read, residency="keep") as stream:
            time.sleep(random.uniform(0, took))
            child = in_a_child(STEPS)
            for layer in stream:
                right.append(is_right(layer.weights, layer.index))
            codes.append(exit_code_of(child))
        del stream, layer
print(json.dumps([codes, right, before.left()]))
"""
    codes, right, left = run_fault(WAITING + script, read, flags=FORKING)
    assert codes == [0] * 4, "each the step that failed in the child"
    assert right == [True] * 8
    assert left == {}


def test_a_checkpoint_can_be_used_in_a_child_that_was_forked_while_a_stream_checked_a_shard(
    run_fault: RunFault, failing_reads: Path
) -> None:
    """A lock that the stream's thread holds at that moment is held in the child for ever."""
    script = """
from kda_stream import (KdaConfig, KdaStreamError, bind_kda_weights, open_checkpoint,
                        stream_kda_layers)
from support.failing_reads import FailingReads
from support.small_layers import is_right, write_small_layers
folder = Path("checkpoint")
written = write_small_layers(folder)
config = KdaConfig.from_json(folder / "config.json")
reads = FailingReads(folder)

def checks_a_shard():
    try:
        weights, _ = bind_kda_weights(config, 1, checkpoint.layer(1))
    except KdaStreamError:
        return True
    return is_right(weights, written, 1)

def the_checkpoint_closes():
    checkpoint.close()
    return True

with open_checkpoint(folder) as checkpoint:
    checks_a_shard()
before = Before(Path("."))
codes = []
for steps in ([checks_a_shard, the_checkpoint_closes], [the_checkpoint_closes]):
    with open_checkpoint(folder, verify="needed") as checkpoint:
        with stream_kda_layers(checkpoint) as stream:
            reads.slow(500, first=1)
            while not reads.failed:
                time.sleep(0.001)
            child = in_a_child(steps)
            right = [is_right(layer.weights, written, layer.index) for layer in stream]
            codes.append(exit_code_of(child, 3))
print(json.dumps([codes, right, before.left()]))
"""
    codes, right, left = run_fault(WAITING + script, preload=failing_reads, flags=FORKING)
    assert right == [True, True]
    assert left == {}
    assert codes == [0, 0]


def test_a_program_that_is_started_while_a_stream_runs_inherits_none_of_its_files(
    run_fault: RunFault,
) -> None:
    script = """
import subprocess
from kda_stream import open_checkpoint, stream_kda_layers
from support.large_layers import write_large_layers
folder = Path("large")
write_large_layers(folder, 2)
LIST = "import os; [print(os.path.realpath(n.path)) for n in os.scandir('/proc/self/fd')]"

def of_the_folder():
    return [path for path in map(os.path.realpath, Path("/proc/self/fd").iterdir())
            if path.startswith(str(folder.resolve()))]

held = 0
with open_checkpoint(folder) as checkpoint:
    with stream_kda_layers(checkpoint, slots=1, read="mapped") as stream:
        while not (held := len(of_the_folder())):
            time.sleep(0.001)
        done = subprocess.run([sys.executable, "-c", LIST], close_fds=False, capture_output=True,
                              text=True)
print(json.dumps([held, str(folder.resolve()) in done.stdout]))
"""
    held, inherited = run_fault(script, flags=FORKING)
    assert held > 0, "the test looks at the wrong moment"
    assert not inherited
