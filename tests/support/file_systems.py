"""File systems that are mounted for one test; each skips the test where it may not be. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def mounted(kind: str, folder: Path, *, source: str = "none", options: str = "") -> Iterator[Path]:
    """A file system of that kind at `folder`, which is made."""
    if sys.platform != "linux":
        pytest.skip("mounts by Linux's mount")
    folder.mkdir(exist_ok=True)
    arguments = (source.encode(), os.fsencode(folder), kind.encode(), 0, options.encode())
    if _libc.mount(*arguments) != 0:
        pytest.skip(f"{kind} cannot be mounted: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        _libc.umount2(os.fsencode(folder), 2)  # MNT_DETACH


@contextlib.contextmanager
def disk_of_blocks(folder: Path, block_bytes: int, nbytes: int) -> Iterator[Path]:
    """An ext4 file system on a disk with blocks of that size, which is a file beside `folder`."""
    image = folder.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(nbytes)
    if shutil.which("losetup") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no losetup or no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "4096", str(image)], check=True)
    command = ["losetup", "--find", "--show", "-b", str(block_bytes), str(image)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    device = done.stdout.strip()
    try:
        with mounted("ext4", folder, source=device) as at:
            yield at
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
        image.unlink()


@contextlib.contextmanager
def fuse(folder: Path, behind: Path, *, fails_from: int | None = None) -> Iterator[Path]:
    """The files of the folder `behind` once more, read-only, over FUSE, served by another process.

    Reads that reach past byte `fails_from` of a file fail with EIO.
    """
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"there is no FUSE: {error}")
    options = f"fd={device},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
    script = Path(__file__).with_name("fuse_server.py")
    end = sys.maxsize if fails_from is None else fails_from
    command = [sys.executable, "-S", str(script), str(device), str(behind), str(end)]
    with contextlib.ExitStack() as opened:
        try:
            at = opened.enter_context(mounted("fuse", folder, source="test", options=options))
            server = opened.enter_context(subprocess.Popen(command, pass_fds=[device]))
        finally:
            os.close(device)
        opened.callback(server.kill)  # which ends every request: nobody can hang in one
        yield at
