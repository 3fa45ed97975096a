"""`residency`: what a load leaves in the page cache, asked of the kernel before and after."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import (
    FIELD_LEAVES,
    MEDIUM,
    Geometry,
    Stored,
    kda_block,
    save_raw_shard,
    write_checkpoint,
)
from support.file_systems import fuse, mounted
from support.groups import memory_group, run_in
from support.page_cache import PAGE_BYTES, cached_pages, cool, has_a_page_cache, pages_of, warm

from kda_stream import (
    KdaBindReport,
    KdaConfig,
    KdaWeights,
    PayloadError,
    bind_kda_weights,
    open_checkpoint,
    stream_kda_layers,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its pages")
each_read = pytest.mark.parametrize("read", ["mapped", "positional", "direct", "auto"])
through_the_cache = pytest.mark.parametrize("read", ["mapped", "positional"])
RunPython = Callable[..., Any]

MIB = 1024**2
READ_AHEAD_LEFT_BYTES = 16 * MIB
"""What the kernel may still be reading ahead when a load ends: pages it is filling cannot go."""


@dataclass(frozen=True)
class Layer:
    """One KDA layer of about 4.4 MB between other tensors of the same file."""

    path: Path
    config: KdaConfig
    begins: dict[str, int] = field(repr=False)
    stored: dict[str, Stored] = field(repr=False)

    def bound(self, parts: str, **how: Any) -> tuple[KdaWeights, KdaBindReport, set[int]]:
        """Bind the layer; also which pages were cached before, the header's not among them."""
        with open_checkpoint(self.path) as checkpoint:
            before = prepared(self.path, parts)
            return *bind_kda_weights(self.config, 0, checkpoint.layer(0), **how), before

    def assert_right(self, weights: KdaWeights) -> None:
        for name, leaves in FIELD_LEAVES.items():
            full = [f"model.layers.0.self_attn.{leaf}" for leaf in leaves]
            expected = b"".join(self.stored[name].bytes_of(name) for name in full)
            assert bytes(getattr(weights, name).data) == expected, name

    @property
    def payload_pages(self) -> set[int]:
        names = [name for name in self.begins if ".self_attn." in name]
        spans = [(self.begins[n], self.begins[n] + self.stored[n].nbytes) for n in names]
        return set().union(*(pages_of(begin, end) for begin, end in spans))


def write_layer(folder: Path, before: int, between: int, after: int) -> Layer:
    """The layer behind `before` bytes, `between` bytes after every third tensor, `after` behind."""
    if not has_a_page_cache(folder):
        pytest.skip("files here do not leave the page cache")
    geometry = Geometry(1024, 8, 64, 4)
    stored = {"before": Stored("U8", (before,), bytes(before))}
    for n, (leaf, tensor) in enumerate(kda_block(geometry).items()):
        stored[f"model.layers.0.self_attn.{leaf}"] = tensor
        if n % 3 == 2:
            stored[f"between.{n}"] = Stored("U8", (between,), bytes(between))
    stored["after"] = Stored("U8", (after,), bytes(after))
    path = folder / "model.safetensors"
    begins = save_raw_shard(path, stored)
    return Layer(path, KdaConfig(1024, 8, 64, 4), begins, stored)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Layer:
    """A file with little beside the layer."""
    return write_layer(tmp_path_factory.mktemp("alone"), 0, 0, 0)


@pytest.fixture(scope="module")
def scattered(tmp_path_factory: pytest.TempPathFactory) -> Layer:
    """A layer whose tensors lie between others, so that there is something to read ahead."""
    return write_layer(tmp_path_factory.mktemp("scattered"), 300_001, 700_003, 500_009)


@pytest.fixture(scope="module")
def in_a_large_file(tmp_path_factory: pytest.TempPathFactory) -> Layer:
    """A layer with 60 MiB on either side: more than any window of read-ahead."""
    return write_layer(tmp_path_factory.mktemp("large"), 60 * MIB, 0, 60 * MIB)


@pytest.fixture(params=["alone", "scattered"])
def layer(request: pytest.FixtureRequest) -> Layer:
    return request.getfixturevalue(request.param)


# Which parts of the file are in the page cache before, as parts of its size.
PARTS: dict[str, list[tuple[float, float]]] = {
    "nothing": [],
    "all of it": [(0, 1)],
    "the beginning": [(0, 0.4)],
    "the middle": [(0.3, 0.55)],
    "the end": [(0.7, 1)],
    "every other tenth": [(n / 10, (n + 1) / 10) for n in range(0, 10, 2)],
    "single pages": [(n / 50, n / 50 + 1e-9) for n in range(50)],
}


def prepared(path: Path, parts: str) -> set[int]:
    """Put the file into that state; which pages are cached then."""
    nbytes = path.stat().st_size
    cool(path)
    for begin, end in PARTS[parts]:
        warm(path, int(begin * nbytes), min(int(end * nbytes) + 1, nbytes))
    return cached_pages(path)


def settled(path: Path) -> set[int]:
    """The file's cached pages, once nothing is being read ahead any more."""
    before = cached_pages(path)
    for _ in range(20):
        time.sleep(0.02)
        now = cached_pages(path)
        if now == before:
            return now
        before = now
    return before


# --- drop -----------------------------------------------------------------------------------------


@each_read
@pytest.mark.parametrize("parts", PARTS)
def test_drop_leaves_every_page_as_it_was(layer: Layer, read: str, parts: str) -> None:
    weights, report, before = layer.bound(parts, read=read, residency="drop")
    layer.assert_right(weights)
    assert report.read.residency == "drop"
    after = settled(layer.path)
    assert sorted(before - after) == [], "pages that were cached are gone"
    assert sorted(after - before) == [], "pages that were not cached are there"


@each_read
def test_drop_leaves_of_what_was_read_ahead_in_a_large_file_at_most_one_window(
    in_a_large_file: Layer, read: str
) -> None:
    _, _, before = in_a_large_file.bound("nothing", read=read, residency="drop")
    assert not before
    after = settled(in_a_large_file.path)
    assert len(after) * PAGE_BYTES <= READ_AHEAD_LEFT_BYTES
    assert not after & in_a_large_file.payload_pages


@through_the_cache
def test_drop_leaves_no_page_of_a_load_that_failed(
    tmp_path: Path, scattered: Layer, read: str
) -> None:
    failing = fuse(tmp_path / "fuse", scattered.path.parent, fails_from=6 * MIB)
    with failing as folder, open_checkpoint(folder / scattered.path.name) as checkpoint:
        source = checkpoint.layer(0)
        path = folder / scattered.path.name
        for residency in ("keep", "drop"):
            prepared(path, "nothing")
            with pytest.raises(PayloadError):
                bind_kda_weights(scattered.config, 0, source, read=read, residency=residency)
            if residency == "keep":
                assert cached_pages(path), "the test looks at the wrong thing"
        assert settled(path) == set()


@each_read
def test_a_stream_that_drops_leaves_the_page_cache_as_it_was(tmp_path: Path, read: Any) -> None:
    if not has_a_page_cache(tmp_path):
        pytest.skip("files here do not leave the page cache")
    written = write_checkpoint(tmp_path, geometry=MEDIUM)
    shards = sorted(tmp_path.glob("*.safetensors"))
    cool(*shards)
    warm(shards[0])
    warm(shards[1], 100_000, 400_000)
    with open_checkpoint(tmp_path) as checkpoint:
        before = [cached_pages(shard) for shard in shards]
        with stream_kda_layers(checkpoint, read=read, residency="drop") as stream:
            assert [layer.index for layer in stream] == written.kda_layers
    for shard, pages in zip(shards, before, strict=True):
        after = settled(shard)
        assert sorted(pages - after) == [], "pages that were cached are gone"
        assert sorted(after - pages) == [], "pages that were not cached are there"


# --- keep and direct ------------------------------------------------------------------------------


@through_the_cache
@pytest.mark.parametrize("parts", ["nothing", "the middle", "all of it"])
def test_keep_leaves_every_page_of_the_payload(layer: Layer, read: str, parts: str) -> None:
    weights, report, before = layer.bound(parts, read=read, residency="keep")
    layer.assert_right(weights)
    assert report.read.residency == "keep"
    assert before | layer.payload_pages <= cached_pages(layer.path)


@pytest.mark.parametrize("residency", ["keep", "drop", "auto"])
@pytest.mark.parametrize("parts", PARTS)
def test_direct_neither_adds_a_page_nor_takes_one(
    scattered: Layer, residency: str, parts: str
) -> None:
    weights, _, before = scattered.bound(parts, read="direct", residency=residency)
    assert cached_pages(scattered.path) == before
    scattered.assert_right(weights)


def test_bytes_that_are_in_the_page_cache_and_not_yet_on_the_disk_are_read_directly(
    tmp_path: Path,
) -> None:
    layer = write_layer(tmp_path, 100, 100, 100)
    with open_checkpoint(layer.path) as checkpoint:
        weights, _ = bind_kda_weights(layer.config, 0, checkpoint.layer(0), read="direct")
    layer.assert_right(weights)


@each_read
@pytest.mark.parametrize("residency", ["keep", "drop"])
def test_cached_before_counts_the_bytes_of_the_layer(
    scattered: Layer, read: str, residency: str
) -> None:
    for parts in ("nothing", "all of it"):
        _, report, _ = scattered.bound(parts, read=read, residency=residency)
        if report.read.cached_before_bytes is None:
            pytest.skip("the system does not say what is cached")
        assert report.read.cached_before_bytes == (report.bytes if parts != "nothing" else 0)


# --- auto, by the memory that is left -------------------------------------------------------------

IN_A_GROUP = """
import json, sys
from kda_stream import KdaConfig, bind_kda_weights, open_checkpoint
with open_checkpoint(sys.argv[1]) as checkpoint:
    _, report = bind_kda_weights(
        KdaConfig(4096, 16, 128, 4), 0, checkpoint.layer(0), read=sys.argv[2]
    )
print(json.dumps([report.read.path, report.read.residency]))
"""


@pytest.fixture(scope="module")
def large_layer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A layer of 70 MB, of zeros that take no room on the disk."""
    folder = tmp_path_factory.mktemp("large-layer")
    geometry = Geometry(4096, 16, 128, 4)
    write_checkpoint(folder, geometry=geometry, layers=1, mtp=False, shards=1, sparse=True)
    yield folder
    for shard in folder.glob("*.safetensors"):
        shard.unlink()


@pytest.mark.mlock  # a sanitizer takes the memory that is counted here
@pytest.mark.parametrize(("limit_mib", "residency"), [(130, "drop"), (700, "keep")])
@through_the_cache
def test_auto_drops_where_a_control_group_leaves_little_memory_and_keeps_where_it_leaves_much(
    large_layer: Path, limit_mib: int, residency: str, read: str
) -> None:
    (shard,) = large_layer.glob("*.safetensors")
    cool(shard)
    with memory_group(limit_mib * MIB) as group:
        done = run_in(group, sys.executable, "-c", IN_A_GROUP, str(large_layer), read)
        assert done.returncode == 0, (done.returncode, done.stderr, group.killed())
    assert json.loads(done.stdout) == [read, residency]
    cached = len(settled(shard)) * PAGE_BYTES
    assert (cached < READ_AHEAD_LEFT_BYTES) if residency == "drop" else (cached > 60 * MIB)


# --- other file systems ---------------------------------------------------------------------------


@each_read
@pytest.mark.parametrize("parts", ["nothing", "the middle", "all of it"])
def test_on_an_overlay_the_file_underneath_is_what_counts(
    tmp_path: Path, read: str, parts: str
) -> None:
    """The images of containers lie so; cachestat knows nothing there."""
    lower = tmp_path / "lower"
    lower.mkdir()
    layer = write_layer(lower, 50_000, 0, 50_000)
    cool(layer.path)  # above, nothing is written to the disk
    for name in ("upper", "work"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={lower},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    with mounted("overlay", tmp_path / "merged", options=options) as folder:
        above = Layer(folder / layer.path.name, layer.config, layer.begins, layer.stored)
        weights, report, before = above.bound(parts, read=read, residency="drop")
        layer.assert_right(weights)
        if read == "auto":
            expected = "mapped" if parts == "all of it" else "direct"
            assert report.read.path == expected, report.read
        after = settled(layer.path)
        assert (sorted(before - after), sorted(after - before)) == ([], [])
        weights.release()
