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
