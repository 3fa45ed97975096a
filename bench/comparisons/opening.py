"""Opening: what is asked before a byte of payload is read, against the safetensors package."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ..data import Geometry, Place, flush_to_disk
from ..measure import resident_bytes
from ..sides import Comparison, Request, Side, Timed, clocked

TOLD = """\
safetensors opens each shard and asks every slice for its dtype and shape; kda_stream opens the
checkpoint, which checks every header and the index. "Memory" is what the process has grown by
(RssAnon) when all is open."""
OURS, THEIRS = "kda_stream", "safetensors"


def load(is_ours: bool, request: Request) -> Timed:
    from .. import bench_open

    directory = request.checkpoint
    hold = bench_open.opened_by_kda_stream if is_ours else bench_open.opened_by_safetensors
    bench_open.close(hold(directory.parent / "warm-up")[1])  # loads what is loaded late

    def timed() -> dict[str, object]:
        before = resident_bytes(os.getpid())["RssAnon"]
        held: list[tuple[int, object]] = []
        figures = clocked(lambda: held.append(hold(directory)))
        figures["memory_bytes"] = resident_bytes(os.getpid())["RssAnon"] - before
        if request.checked:
            figures["delivered"] = _digest(bench_open.described(held[0][1]))
        return figures | {"tensors": held[0][0]}

    return timed


def _digest(rows: Iterator[tuple[object, ...]]) -> str:
    return hashlib.sha256(repr(sorted(rows)).encode()).hexdigest()


def make(write: Callable[[Path], int], name: str, root: Path, geometry: Geometry) -> Place:
    """Sparse files: headers alone take room. Under another name where the geometry is small."""
    folder = root / (name if geometry.is_full else f"{name}-small")
    counted = folder / "tensors"  # written last
    if not counted.exists():
        print(f"writing {name} to {folder} ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "checkpoint").mkdir(parents=True)
        (folder / "warm-up").mkdir()
        tensors = write(folder / "checkpoint")
        _write_one_shard(folder / "warm-up")
        flush_to_disk(sorted((folder / "checkpoint").iterdir()))
        counted.write_text(f"{tensors}\n")
    shards = len(list((folder / "checkpoint").glob("*.safetensors")))
    return Place(folder, {"shards": shards, "tensors": int(counted.read_text())})


def _write_one_shard(directory: Path) -> None:
    from ..bench_open import write_many_shards

    write_many_shards(directory, shards=1, tensors=1)


def make_glm53(root: Path, geometry: Geometry) -> Place:
    from ..bench_open import write_glm53

    return make(write_glm53, "opening-62", root, geometry)


def make_many_shards(root: Path, geometry: Geometry) -> Place:
    from ..bench_open import write_many_shards

    shards, tensors = (200, 500) if geometry.is_full else (8, 50)
    write = partial(write_many_shards, shards=shards, tensors=tensors)
    return make(write, "opening-200", root, geometry)


def no_files(_folder: Path) -> tuple[Path, ...]:
    """Sparse files of hundreds of GB are not read to warm them: each opening leaves them warm."""
    return ()


SIDES = (
    Side(
        OURS,
        "own",
        load=partial(load, True),
        packages=("kda_stream",),
        reads="headers, index",
        settings="open_checkpoint",
        files=no_files,
    ),
    Side(
        THEIRS,
        "peer",
        load=partial(load, False),
        packages=("safetensors",),
        reads="headers",
        settings='safe_open(path, "np"), get_slice, get_dtype, get_shape',
        files=no_files,
    ),
)


def _comparison(name: str, title: str, make: Callable[[Path, Geometry], Place]) -> Comparison:
    quick = make is make_many_shards
    return Comparison(name, title, TOLD, SIDES, (THEIRS,), OURS, ("warm",), make, quick)


COMPARISONS = (
    _comparison("opening", "Opening 62 shards, those of GLM-5.3-Flash", make_glm53),
    _comparison("opening many", "Opening many shards", make_many_shards),
)
