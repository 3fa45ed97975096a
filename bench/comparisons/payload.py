"""`check_payload` beside sha256 alone: what reading all bytes and hashing them costs anyway."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from .. import data
from ..sides import Comparison, Request, Side, Timed, WrongBytesError, clocked, shards_in, threads

TOLD = """\
All bytes of the checkpoint read once. `check_payload` looks for NaN, infinity and nothing but zeros
in every KDA tensor; with `digests` it takes the sha256 of every tensor too. "sha256" does nothing
but read each shard and hash it, with Python's hashlib, in 16 MiB pieces: one shard after the other,
or as many at once as `check_payload` takes, one a processor and at most four."""
PIECE_BYTES = 16 * 1024**2
AT_ONCE = "sha256, at once"


def load_own(digests: bool, request: Request) -> Timed:
    from kda_stream import check_payload, open_checkpoint
    from kda_stream.staging.native import extension

    extension()
    nbytes = _file_bytes(request)

    def timed() -> dict[str, Any]:
        reports: list[Any] = []

        def job() -> None:
            with open_checkpoint(request.checkpoint) as checkpoint:
                reports.append(check_payload(checkpoint, digests=digests))

        figures = clocked(job)
        [report] = reports
        if report.problems:
            raise WrongBytesError(f"check_payload found problems: {report.problems[0]}")
        if request.checked and digests:
            _require_digests(request, report.tensors)
        return figures | {"payload_bytes": nbytes, "delivered": f"{report.bytes} bytes"}

    return timed


def _require_digests(request: Request, entries: Any) -> None:
    """Raise `WrongBytesError` unless every KDA tensor has the digest of its bytes in the file."""
    described = data.load(request.folder)
    for row in (row for layer in described.layers for row in layer.tensors):
        with open(request.checkpoint / row.file, "rb") as file:
            file.seek(row.begin)
            if hashlib.sha256(file.read(row.nbytes)).hexdigest() != entries[row.name].sha256:
                raise WrongBytesError(f"check_payload gives {row.name} another digest")


def load_sha256(at_once: bool, request: Request) -> Timed:
    nbytes = _file_bytes(request)
    paths = shards_in(request.folder)

    def timed() -> dict[str, Any]:
        read: list[int] = []

        def job() -> None:
            with ThreadPoolExecutor(threads() if at_once else 1) as pool:
                read.extend(pool.map(_hash, paths))

        figures = clocked(job)
        return figures | {"payload_bytes": nbytes, "delivered": f"{sum(read)} bytes"}

    return timed


def _hash(path: Path) -> int:
    """Hash a file; its size."""
    digest = hashlib.sha256()
    piece = memoryview(bytearray(PIECE_BYTES))
    size = 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            size += count
    return size


def _file_bytes(request: Request) -> int:
    return sum(path.stat().st_size for path in shards_in(request.folder))


def _own(name: str, digests: bool, settings: str) -> Side:
    packages = ("kda_stream",)
    load = partial(load_own, digests)
    return Side(name, "own", load, packages=packages, reads="whole shards", settings=settings)


def _sha256(name: str, at_once: bool, settings: str) -> Side:
    load = partial(load_sha256, at_once)
    return Side(name, "ceiling", load, reads="whole shards", settings=settings)


COMPARISON = Comparison(
    name="payload",
    title="Checking all bytes",
    told=TOLD,
    sides=(
        _own("check_payload", False, "check_payload(checkpoint)"),
        _own("check_payload, digests", True, "check_payload(checkpoint, digests=True)"),
        _sha256("sha256", False, "one shard after the other"),
        _sha256(AT_ONCE, True, "as many shards at once as processors, at most four"),
    ),
    references=(AT_ONCE,),
    own="check_payload, digests",
    conditions=("warm", "cold"),
    make=data.place,
)
