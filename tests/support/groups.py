"""Control groups that limit a process's memory, or its disk; made for one test and removed. Linux.

Both versions are known: version 1 as /sys/fs/cgroup/memory and /sys/fs/cgroup/blkio, version 2 as
/sys/fs/cgroup itself or as /sys/fs/cgroup/unified.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")
MIB = 1024**2


@dataclass(frozen=True)
class Group:
    """A control group; a process that is in it may be started with `command`."""

    folder: Path

    def command(self, *arguments: str) -> list[str]:
        """Arguments for a process that enters the group and then becomes `arguments`."""
        enter = f'echo $$ > "{self.folder}/cgroup.procs" && exec "$@"'
        return ["/bin/sh", "-c", enter, "sh", *arguments]

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def killed(self) -> int:
        """How many processes the kernel has killed in the group for want of memory."""
        name = "memory.events" if (self.folder / "memory.events").exists() else "memory.oom_control"
        rows = dict(line.split() for line in self.read(name).splitlines())
        return int(rows["oom_kill"])


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Group]:
    """A group of that much memory, without swap; skips the test where none can be made."""
    limit, swap = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    with _group("memory", "memory") as group:
        if not (group.folder / limit).exists():
            limit, swap = "memory.max", "memory.swap.max"
        try:
            (group.folder / limit).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no limit on memory can be set: {error}")
        with contextlib.suppress(OSError):  # not every kernel counts swap
            swapped = limit_bytes if "memsw" in swap else 0
            (group.folder / swap).write_text(str(swapped))
        yield group


@contextlib.contextmanager
def slow_disk_group(path: Path, bytes_per_second: int) -> Iterator[Group]:
    """A group whose reads from the disk under `path` take their time; skips where none can be."""
    disk = _disk_of(path)
    with _group("blkio", "io") as group:
        v1 = group.folder / "blkio.throttle.read_bps_device"
        try:
            if v1.exists():
                v1.write_text(f"{disk} {bytes_per_second}")
            else:
                (group.folder / "io.max").write_text(f"{disk} rbps={bytes_per_second}")
        except OSError as error:
            pytest.skip(f"the disk {disk} cannot be slowed down: {error}")
        yield group


def _disk_of(path: Path) -> str:
    """The device number of the whole disk that a file lies on."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    entry = Path("/sys/dev/block") / number
    if not entry.exists():
        pytest.skip(f"the file lies on no disk (device {number})")
    if (entry / "partition").exists():
        return (entry.resolve().parent / "dev").read_text().strip()
    return number


@contextlib.contextmanager
def _group(v1: str, v2: str) -> Iterator[Group]:
    if sys.platform != "linux":
        pytest.skip("there are no control groups here")
    folder = _parent(v1, v2) / f"kda-stream-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        yield Group(folder)
    finally:
        for _ in range(100):  # a process that ended leaves its group a little later
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def _parent(v1: str, v2: str) -> Path:
    if (ROOT / v1 / "cgroup.procs").exists():
        return ROOT / v1
    for root in (ROOT, ROOT / "unified"):
        controllers = root / "cgroup.subtree_control"
        if not controllers.exists():
            continue
        if v2 not in controllers.read_text().split():
            with contextlib.suppress(OSError):
                controllers.write_text(f"+{v2}")
        if v2 in controllers.read_text().split():
            return root
    pytest.skip(f"there is no control group for {v2} here")


def run_in(group: Group, *arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a process in the group to its end."""
    return subprocess.run(
        group.command(*arguments), capture_output=True, text=True, timeout=seconds, check=False
    )
