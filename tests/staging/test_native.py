"""What the extension's Python face must not do: crash."""

from __future__ import annotations

import subprocess
import sys

FAILING_COPIES_IN_CYCLES = """
import gc
from kda_stream import CopyPlan, Span, SpanError

def fail():
    source, destination = memoryview(bytes(100)), memoryview(bytearray(50))
    try:
        CopyPlan((Span(source, 1, 100, 100, 0),)).run(destination)
    except SpanError as error:
        cycle = [error]
        cycle.append(cycle)

for turn in range(500):
    fail()
    if turn % 7 == 0:
        gc.collect()
print("alive")
"""


def test_collecting_the_traceback_of_a_failed_copy_does_not_crash() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING_COPIES_IN_CYCLES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


INTERRUPTED_COPIES_IN_CYCLES = """
import gc, random, signal, time
from kda_stream import CopyPlan, Span

def interrupt(_, frame):
    while frame is not None:
        if frame.f_code is copy_interrupted.__code__:  # else nobody would catch it
            raise KeyboardInterrupt
        frame = frame.f_back
signal.signal(signal.SIGALRM, interrupt)

def copy():
    source, destination = memoryview(bytes(64)), memoryview(bytearray(64 * 40))
    CopyPlan(tuple(Span(source, 1, 64, 64, 64 * n) for n in range(40))).run(destination)

begin = time.perf_counter()
for _ in range(200):
    copy()
took = (time.perf_counter() - begin) / 200
moments = random.Random(7)

def copy_interrupted():
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + moments.random() * took)
        copy()
    except KeyboardInterrupt as error:
        cycle = [error]
        cycle.append(cycle)

for turn in range(30_000):
    try:
        copy_interrupted()
    except KeyboardInterrupt:
        pass
    if turn % 20 == 0:
        gc.collect()
signal.setitimer(signal.ITIMER_REAL, 0)
print("alive")
"""


def test_collecting_the_traceback_of_a_copy_that_ctrl_c_ended_does_not_crash() -> None:
    """Wherever it came: a pointer into a memoryview must never have a name in a traceback."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_COPIES_IN_CYCLES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
