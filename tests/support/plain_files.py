"""A file without a header, for what is below checkpoints; and what goes on while it is read."""

from __future__ import annotations

import hashlib
import mmap
from io import FileIO
from pathlib import Path

from kda_stream.files import open_regular_file


def noise(nbytes: int, key: str = "noise") -> bytes:
    """Bytes of which no two stretches are alike."""
    return hashlib.shake_128(key.encode()).digest(nbytes)


class PlainFile:
    """A file on the disk as a `ReadableFile`; mapped once, when first viewed."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._map: mmap.mmap | None = None
        self._views: list[memoryview] = []

    def open(self, *, direct: bool = False) -> FileIO:
        return open_regular_file(self.path, direct=direct)

    def view(self, begin: int, end: int) -> memoryview:
        if self._map is None:
            with self.open() as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        whole = memoryview(self._map)
        self._views += [whole[begin:end], whole]
        return self._views[-2]

    def unmap(self, begin: int, end: int) -> None:
        """Take the mapped pages out of the process, and those that a fault maps along."""
        if self._map is not None:
            begin = max(begin - 65536, 0) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, begin, min(end + 65536, len(self._map)) - begin)

    def close(self) -> None:
        """Let the map go, with whatever views an error may have kept."""
        views, self._views = self._views, []
        for view in views:
            view.release()
        if self._map is not None:
            self._map.close()
            self._map = None
