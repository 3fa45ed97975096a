"""A read-only FUSE file system over one flat folder: `fuse_server.py DEVICE FOLDER FAILS_FROM`."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import sys
from pathlib import Path


class _Served:
    """The kernel's requests and their answers; the numbers are those of linux/fuse.h."""

    def __init__(self, device: int, behind: Path, fails_from: int) -> None:
        self._device = device
        self._behind = behind
        self._fails_from = fails_from
        self._names = {1: ""}
        self._answers = {
            1: self._lookup,
            3: lambda node, _: struct.pack("<QII", 60, 0, 0) + self._attributes(node),
            14: lambda _, __: struct.pack("<QII", 0, 2, 0),  # 2: the page cache stays
            15: self._read,
            17: lambda _, __: bytes(80),
            18: lambda _, __: b"",
            25: lambda _, __: b"",
            26: self._initialise,
            27: lambda _, __: bytes(16),
            28: self._list,
            29: lambda _, __: b"",
        }

    def run(self) -> None:
        """Answer until the file system is gone."""
        while True:
            try:
                request = os.read(self._device, 1 << 20)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return
            _, code, unique, node = struct.unpack_from("<IIQQ", request)
            if code in (2, 36, 42):  # these want no answer
                continue
            try:
                if code not in self._answers:
                    raise OSError(errno.ENOSYS, "not here")
                body, error_number = self._answers[code](node, request[40:]), 0
            except OSError as error:
                body, error_number = b"", error.errno or errno.EIO
            with contextlib.suppress(OSError):  # the asker may be gone
                os.write(
                    self._device, struct.pack("<IiQ", 16 + len(body), -error_number, unique) + body
                )

    def _initialise(self, _: int, body: bytes) -> bytes:
        _, _, ahead, _ = struct.unpack_from("<IIII", body)
        sizes = struct.pack("<IIIIHHIIHH", 7, 31, ahead, 0, 12, 9, 1 << 17, 1, 32, 0)
        return sizes.ljust(64, b"\0")

    def _lookup(self, _: int, body: bytes) -> bytes:
        name = os.fsdecode(body.rstrip(b"\0"))
        status = (self._behind / name).stat()
        self._names[status.st_ino] = name
        return struct.pack("<QQQQII", status.st_ino, 0, 60, 60, 0, 0) + self._attributes(
            status.st_ino
        )

    def _attributes(self, node: int) -> bytes:
        status = (self._behind / self._names[node]).stat()
        kind = stat.S_IFDIR | 0o755 if node == 1 else stat.S_IFREG | 0o444
        seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
        return struct.pack(
            "<QQQQQQIIIIIIIIII",
            *(node, status.st_size, status.st_blocks, *[seconds] * 3, *[nanoseconds] * 3),
            *(kind, 1, os.geteuid(), os.getegid(), 0, 4096, 0),
        )

    def _read(self, node: int, body: bytes) -> bytes:
        _, offset, nbytes = struct.unpack_from("<QQI", body)
        if offset + nbytes > self._fails_from:
            raise OSError(errno.EIO, "the disk fails")
        with (self._behind / self._names[node]).open("rb") as file:
            file.seek(offset)
            return file.read(nbytes)

    def _list(self, _: int, body: bytes) -> bytes:
        _, offset, _ = struct.unpack_from("<QQI", body)
        entries = b""
        for at, path in enumerate(sorted(self._behind.iterdir()), start=1):
            name = os.fsencode(path.name)
            entry = (
                struct.pack("<QQII", path.stat().st_ino, at, len(name), stat.S_IFREG >> 12) + name
            )
            if at > offset:
                entries += entry.ljust(-(-len(entry) // 8) * 8, b"\0")
        return entries


if __name__ == "__main__":
    _Served(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])).run()
