"""The way that `kda-stream env` tells is the way that a bind takes then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from cli.running import Run
from safetensors.numpy import save_file
from support.checkpoints import MEDIUM, write_checkpoint
from support.file_systems import fuse, mounted
from support.page_cache import cool, has_a_page_cache, warm

from kda_stream import KdaConfig, bind_kda_weights, open_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the paths are Linux's")

Place = Callable[[Path], AbstractContextManager[Path]]
CONFIG = KdaConfig(256, 4, 32, 4)


def write(folder: Path) -> Path:
    return write_checkpoint(
        folder, geometry=MEDIUM, layers=1, mtp=False, shards=1, sparse=True
    ).folder


@contextmanager
def cached(tmp_path: Path) -> Iterator[Path]:
    folder = write(tmp_path / "cached")
    for shard in folder.glob("*.safetensors"):
        warm(shard)
    yield folder


@contextmanager
def cold(tmp_path: Path) -> Iterator[Path]:
    if not has_a_page_cache(tmp_path):
        pytest.skip("files here do not leave the page cache")
    folder = write(tmp_path / "cold")
    cool(*folder.glob("*.safetensors"))
    yield folder


@contextmanager
def without_direct_reads(tmp_path: Path) -> Iterator[Path]:
    with mounted("ramfs", tmp_path / "ram") as folder:
        yield write(folder)


@contextmanager
def remote(tmp_path: Path) -> Iterator[Path]:
    write(tmp_path / "behind")
    with fuse(tmp_path / "fuse", tmp_path / "behind") as folder:
        yield folder


@pytest.mark.parametrize(
    ("place", "path", "word"),
    [
        (cached, "mapped", "100 %"),
        (cold, "direct", "0 %"),
        (without_direct_reads, "positional", "not direct"),
        (remote, "positional", "FUSE"),
    ],
)
def test_the_way_that_is_told_is_the_way_that_is_taken(
    run: Run, tmp_path: Path, place: Place, path: str, word: str
) -> None:
    with place(tmp_path) as folder:
        read = run("env", folder, "--json").json["read"]
        with open_checkpoint(folder) as checkpoint:
            weights, report = bind_kda_weights(CONFIG, 0, checkpoint.layer(0))
            weights.release()
    taken = report.read
    assert (read["layer"], read["bytes"]) == (0, report.bytes)
    assert read["path"] == taken.path == path
    assert read["reason"] == "; ".join((taken.reason, *taken.notes))
    assert word in read["reason"]
    assert read["cached_bytes"] == taken.cached_before_bytes


def test_a_layer_that_cannot_be_bound_has_no_way_and_says_why(run: Run, tmp_path: Path) -> None:
    folder = write(tmp_path / "folder")
    (shard,) = folder.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes().replace(b"self_attn.A_log", b"self_attn.a_log", 1))
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("0.self_attn.A_log", "0.self_attn.a_log"))
    ran = run("env", folder, "--json")
    assert ran.status == 0
    read = ran.json["read"]
    assert (read["layer"], read["path"], read["cached_bytes"], read["bytes"]) == (
        0,
        None,
        None,
        None,
    )
    assert "A_log" in read["reason"]
    assert "A_log" in run("env", folder).stdout


def test_of_a_checkpoint_without_kda_layers_nothing_is_read(run: Run, tmp_path: Path) -> None:
    save_file({"model.layers.0.weight": np.zeros(1, "f4")}, tmp_path / "model.safetensors")
    ran = run("env", tmp_path / "model.safetensors", "--json")
    assert ran.status == 0
    assert ran.json["read"] is None
