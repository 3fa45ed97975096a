"""Runs a command as a process of its own, maybe in a cgroup, and watches its memory."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.002
RUN_SECONDS_MAX = 600
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Finished:
    """How a process ended. `output` is the end of what it printed, for when it went wrong."""

    status: int
    output: str
    anonymous_bytes_peak: int
    file_bytes_peak: int
    timed_out: bool

    @property
    def outcome(self) -> str:
        if self.timed_out:
            return "timed out"
        if self.status in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return "killed"
        return "failed" if self.status else "done"


def run(command: list[str], *, cgroup: Path | None, sampled: bool) -> Finished:
    """Run the command in `cgroup`, sampling its memory when asked to.

    Sampling takes some per cent of a processor, so that a sampled run is not one for the clock.
    """
    if cgroup is not None:
        enter = 'echo $$ > "$0" && exec "$@"'
        command = ["sh", "-c", enter, str(cgroup / "cgroup.procs"), *command]
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed
        )
        peaks = {"RssAnon": 0, "RssFile": 0}
        too_late = threading.Event()

        def give_up() -> None:
            too_late.set()
            process.kill()

        timer = threading.Timer(RUN_SECONDS_MAX, give_up)
        timer.start()
        try:
            while sampled and process.poll() is None:
                for name, now in resident_bytes(process.pid).items():
                    peaks[name] = max(peaks[name], now)
                time.sleep(SAMPLE_SECONDS)
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()  # no effect on one that has ended
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    return Finished(status, output[-2000:], peaks["RssAnon"], peaks["RssFile"], too_late.is_set())


def resident_bytes(process: int) -> dict[str, int]:
    """RssAnon and RssFile of a process now; zeros when it has gone."""
    found = {"RssAnon": 0, "RssFile": 0}
    try:
        descriptor = os.open(f"/proc/{process}/status", os.O_RDONLY)
    except OSError:
        return found
    try:
        text = os.read(descriptor, 65536).decode(errors="replace")
    except OSError:
        return found
    finally:
        os.close(descriptor)
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int(value.split()[0]) * 1024
    return found
