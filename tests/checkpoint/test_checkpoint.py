"""A checkpoint: the ways to open one, an index against its headers, and who may use it how long."""

from __future__ import annotations

import copy
import errno
import gc
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.files import (
    INDEX_NAME,
    descriptors_under,
    layer_tensors,
    mapped_regions,
    numbered,
    shard_bytes,
    write_checkpoint,
    write_index,
    write_shard,
)
from support.headers import LFS_POINTER
from support.refused_calls import Refused, where_refused

from kda_stream import (
    ArgumentError,
    CheckpointError,
    ClosedError,
    HeaderError,
    InUseError,
    KdaStreamError,
    NotFoundError,
    PathError,
    ShardIndexError,
    ShardsMissingError,
    TensorInfo,
    open_checkpoint,
)
from kda_stream.checkpoint.checkpoint import require_checkpoint
from kda_stream.errors import ErrorCode as Code

PREFIX = "model.layers."
ONE, TWO, THREE = numbered(3)
SHARDS: dict[str, dict[str, bytes]] = {
    ONE: {"embed": b"embed", **layer_tensors(PREFIX, 0)},
    TWO: {"norm": b"norm", "empty": b""},
    THREE: layer_tensors(PREFIX, 1),
}
SHARD = "model.safetensors"
TENSORS = {name: data for tensors in SHARDS.values() for name, data in tensors.items()}

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of three shards."""
    return write_checkpoint(tmp_path / "folder", SHARDS)


def refusal(path: Path | str, kind: type[KdaStreamError], code: Code, **options: Any) -> Any:
    """The error of the class `kind` with the code `code` that opening `path` raises."""
    with pytest.raises(kind) as caught:
        open_checkpoint(path, **options)
    assert caught.value.code is code, str(caught.value)
    assert str(caught.value).isprintable()
    return caught.value


# The ways to open one ----------------------------------------------------------------------------


def assert_holds_all(path: Path | str) -> None:
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.keys() == list(checkpoint) == list(TENSORS)
        assert len(checkpoint) == len(TENSORS)
        assert list(checkpoint.shards) == [ONE, TWO, THREE]
        assert {name: bytes(checkpoint[name].data) for name in checkpoint} == TENSORS
        report = checkpoint.report
        assert (report.shards, report.tensors) == (3, len(TENSORS))
        assert report.tensor_bytes == sum(map(len, TENSORS.values()))
        assert (report.unlisted, report.ignored_files, report.notes) == ((), (), ())


def test_a_folder_with_an_index_opens(folder: Path) -> None:
    assert_holds_all(folder)
    assert_holds_all(str(folder))
    assert_holds_all(f"{folder}/")


def test_an_index_file_opens(folder: Path) -> None:
    assert_holds_all(folder / INDEX_NAME)


def test_a_folder_opens_from_inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert_holds_all(".")
    assert_holds_all(INDEX_NAME)
    monkeypatch.chdir(folder.parent)
    assert_holds_all(folder.name)


def test_a_checkpoint_that_was_opened_from_inside_outlives_a_change_of_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with open_checkpoint(".") as checkpoint:
        monkeypatch.chdir("/")
        assert checkpoint["norm"].data.tobytes() == b"norm"


@linux
def test_a_path_from_a_folder_that_is_gone_is_a_path_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert refusal(SHARD, PathError, Code.PATH_MISSING).path == SHARD


@pytest.mark.parametrize("name", [".", INDEX_NAME], ids=["the folder", "its index"])
def test_a_folder_that_may_not_be_listed_is_a_path_error(name: str, folder: Path) -> None:
    may_not = Refused("getdents64", errno.EACCES)
    with pytest.raises(PathError) as caught:
        where_refused(lambda: open_checkpoint(folder / name), may_not)
    assert caught.value.code is Code.PATH_NOT_READABLE
    assert caught.value.path == str(folder)
    assert caught.value.got == os.strerror(errno.EACCES)


def test_two_dots_after_a_link_lead_where_the_system_says(tmp_path: Path) -> None:
    """`link/..` is the folder above the link's target, not the one that the link is in."""
    right = write_checkpoint(tmp_path / "data" / "v2", {ONE: {"norm": b"right"}})
    write_checkpoint(tmp_path / "models" / "v2", {ONE: {"norm": b"wrong"}})
    (tmp_path / "data" / "v1").mkdir()
    link = tmp_path / "models" / "latest"
    link.symlink_to(tmp_path / "data" / "v1")
    path = f"{link}/../v2"
    assert os.path.samefile(path, right)
    for ending in ("", f"/{INDEX_NAME}", f"/{ONE}"):
        with open_checkpoint(path + ending) as checkpoint:
            assert checkpoint["norm"].data.tobytes() == b"right"


def test_an_index_under_another_name_opens(folder: Path) -> None:
    (folder / INDEX_NAME).rename(folder / "weights.safetensors.index.json")
    assert_holds_all(folder)


def test_a_folder_with_one_shard_and_no_index_opens(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", SHARDS[TWO])
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.keys() == list(SHARDS[TWO])
        assert list(checkpoint.shards) == ["model.safetensors"]
        assert checkpoint.report.total_size_listed is None


@pytest.mark.parametrize("name", ["model.safetensors", "weights", "a b.bin"])
def test_one_file_opens(name: str, tmp_path: Path) -> None:
    path = write_shard(tmp_path / name, SHARDS[TWO])
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.keys() == list(SHARDS[TWO])
        assert checkpoint["norm"].data.tobytes() == b"norm"


def test_one_shard_of_many_opens_alone(folder: Path) -> None:
    with open_checkpoint(folder / TWO) as checkpoint:
        assert checkpoint.keys() == list(SHARDS[TWO])


def test_a_hub_caches_snapshot_opens(tmp_path: Path) -> None:
    """Links by name into a folder of blobs, the index among them, as the hub's client leaves it."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "04c4e9e9"
    write_checkpoint(blobs, SHARDS, {"num_hidden_layers": 1})
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(blobs.iterdir())):
        blob = file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    assert_holds_all(snapshot)
    assert_holds_all(snapshot / INDEX_NAME)
    with open_checkpoint(snapshot / INDEX_NAME) as checkpoint:
        assert checkpoint.directory == str(snapshot)
        assert [layer.is_mtp for layer in checkpoint.layers()] == [False, True]
    with open_checkpoint(snapshot / TWO) as checkpoint:
        assert checkpoint["norm"].data.tobytes() == b"norm"


def test_a_checkpoint_answers_as_a_mapping(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        assert "norm" in checkpoint
        assert "absent" not in checkpoint
        assert checkpoint.info("norm") == TensorInfo("U8", (4,), 0, 4)
        assert checkpoint.shard_of("norm").file_name == TWO
        for ask in (
            checkpoint.info,
            checkpoint.tensor,
            checkpoint.shard_of,
            checkpoint.__getitem__,
        ):
            with pytest.raises(NotFoundError) as caught:
                ask("absent")
            assert caught.value.code is Code.TENSOR_UNKNOWN
            assert isinstance(caught.value, KeyError)
            assert "absent" in str(caught.value)
            assert str(folder) in str(caught.value)


def test_the_config_beside_the_shards_is_at_hand(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.config_path is None
        assert checkpoint.config is None
    (folder / "config.json").write_text('{"num_hidden_layers": 2}')
    for path in (folder, folder / INDEX_NAME, folder / TWO):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.config_path == str(folder / "config.json")
            assert checkpoint.config == {"num_hidden_layers": 2}


def test_an_unknown_level_of_verification_is_refused(folder: Path) -> None:
    open_checkpoint(folder, verify="all").close()
    with pytest.raises(ArgumentError):
        open_checkpoint(folder, verify="none")  # type: ignore[arg-type]


# Which files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [(TWO,), (ONE, THREE), (ONE, TWO, THREE)], ids=len)
def test_missing_shards_are_counted_and_named(gone: tuple[str, ...], folder: Path) -> None:
    for name in gone:
        (folder / name).unlink()
    error = refusal(folder, ShardsMissingError, Code.INDEX_SHARDS_MISSING)
    assert isinstance(error, FileNotFoundError)
    assert error.missing == gone
    assert f"{len(gone)} of 3" in str(error)
    assert all(name in str(error) for name in gone)


def test_of_many_missing_shards_the_error_holds_all_and_prints_some(tmp_path: Path) -> None:
    shards = numbered(500)
    folder = write_checkpoint(tmp_path / "folder", {shards[0]: {"t0": b"0"}})
    write_index(folder, {f"t{n}": shard for n, shard in enumerate(shards)})
    error = refusal(folder, ShardsMissingError, Code.INDEX_SHARDS_MISSING)
    assert error.missing == tuple(shards[1:])
    assert "499 of 500" in str(error)
    assert len(str(error)) < 4000


@pytest.mark.parametrize("name", ["model-00001-of-00062.safetensors", "m-7-of-10.safetensors"])
def test_one_shard_of_several_and_no_index_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x02" + bytes(7) + b"{}")
    error = refusal(tmp_path, CheckpointError, Code.CHECKPOINT_NO_INDEX)
    assert "one shard of several" in str(error)
    open_checkpoint(tmp_path / name).close()


def test_one_shard_of_one_opens_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    open_checkpoint(tmp_path).close()


def test_several_shards_and_no_index_are_refused(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    error = refusal(folder, CheckpointError, Code.CHECKPOINT_NO_INDEX)
    assert isinstance(error, ValueError)
    assert all(name in str(error) for name in (ONE, TWO, THREE))


def test_a_consolidated_file_and_a_shard_without_an_index_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", SHARDS[ONE])
    write_shard(tmp_path / "consolidated.safetensors", SHARDS[ONE])
    error = refusal(tmp_path, CheckpointError, Code.CHECKPOINT_NO_INDEX)
    assert "consolidated.safetensors" in str(error)


def test_two_indexes_are_refused_and_either_one_opens(folder: Path) -> None:
    other = folder / "consolidated.safetensors.index.json"
    other.write_bytes((folder / INDEX_NAME).read_bytes())
    error = refusal(folder, CheckpointError, Code.CHECKPOINT_TWO_INDEXES)
    assert INDEX_NAME in str(error)
    assert other.name in str(error)
    assert_holds_all(folder / INDEX_NAME)
    assert_holds_all(other)


@pytest.mark.parametrize("names", [(), ("pytorch_model.bin", "config.json"), ("model.gguf",)])
def test_a_folder_without_shards_is_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    error = refusal(tmp_path, CheckpointError, Code.CHECKPOINT_NO_SHARDS)
    assert str(tmp_path) in str(error)


def test_a_consolidated_file_beside_the_shards_is_ignored_and_reported(folder: Path) -> None:
    write_shard(folder / "consolidated.safetensors", {"norm": b"other", "more": b"1"})
    (folder / "broken.safetensors").write_bytes(LFS_POINTER)  # nobody reads it
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint["norm"].data.tobytes() == b"norm"
        assert "more" not in checkpoint
        assert checkpoint.report.ignored_files == ("broken.safetensors", "consolidated.safetensors")
        (note,) = checkpoint.report.notes
        assert "consolidated.safetensors" in note


def test_an_index_of_no_tensors_is_refused(folder: Path) -> None:
    write_index(folder, {})
    with pytest.raises(KdaStreamError):
        open_checkpoint(folder)


def test_an_index_that_is_too_long_is_not_read(folder: Path) -> None:
    os.truncate(folder / INDEX_NAME, (512 << 20) + 1)
    refusal(folder, PathError, Code.FILE_TOO_LARGE)


# The index against the headers -------------------------------------------------------------------


def listing(folder: Path, changes: dict[str, str], *, backwards: bool = False) -> Path:
    """Write the index of SHARDS anew with some changes."""
    places = {name: file for file, tensors in SHARDS.items() for name in tensors} | changes
    pairs = list(places.items())
    write_index(folder, dict(reversed(pairs) if backwards else pairs))
    return folder


def test_a_listed_name_that_its_shard_lacks_is_refused(folder: Path) -> None:
    error = refusal(listing(folder, {"absent": TWO}), ShardIndexError, Code.INDEX_TENSORS_MISSING)
    assert "absent" in str(error)
    assert TWO in str(error)


def test_a_name_that_another_shard_holds_is_refused_too(folder: Path) -> None:
    error = refusal(listing(folder, {"norm": ONE}), ShardIndexError, Code.INDEX_TENSORS_MISSING)
    assert "norm" in str(error)
    assert ONE in str(error)


def test_names_that_several_shards_lack_are_all_told(folder: Path) -> None:
    listing(folder, {"absent 1": ONE, "absent 2": TWO, "absent 3": THREE, "absent 4": THREE})
    with pytest.raises((CheckpointError, ShardIndexError)) as caught:
        open_checkpoint(folder)
    line = str(caught.value)
    assert all(f"absent {n}" in line for n in (1, 2, 3, 4))
    assert all(name in line for name in (ONE, TWO, THREE))


@pytest.mark.parametrize("files", [(ONE, TWO, THREE), (THREE, TWO, ONE), (TWO, THREE, ONE)])
def test_shards_that_lack_names_are_told_in_the_order_of_the_index(
    files: tuple[str, ...], folder: Path
) -> None:
    listing(folder, {f"absent in {file}": file for file in files})
    error = refusal(folder, CheckpointError, Code.CHECKPOINT_PROBLEMS)
    assert [problem.tensor for problem in error.problems] == [f"absent in {f}" for f in files]
    assert "3 shards" in str(error)


def test_a_tensor_that_the_index_does_not_list_is_no_part_and_is_reported(folder: Path) -> None:
    write_shard(folder / TWO, {"stray": b"stray", **SHARDS[TWO]})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.keys() == list(TENSORS)
        assert "stray" not in checkpoint
        with pytest.raises(NotFoundError):
            checkpoint.tensor("stray")
        assert checkpoint["norm"].data.tobytes() == b"norm"
        assert checkpoint.report.unlisted == (("stray", TWO),)
        assert checkpoint.report.tensor_bytes == sum(map(len, TENSORS.values()))
        (note,) = checkpoint.report.notes
        assert "stray" in note
        assert TWO in note


def test_a_layer_that_the_index_does_not_list_is_no_layer(folder: Path) -> None:
    write_shard(folder / TWO, {**SHARDS[TWO], **layer_tensors(PREFIX, 9)})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.layers() == (0, 1)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("listed", "other"), [(ONE, THREE), (THREE, ONE)])
def test_of_a_tensor_in_two_shards_the_index_decides(
    listed: str, other: str, backwards: bool, folder: Path
) -> None:
    for file in (ONE, THREE):
        write_shard(folder / file, {"norm": f"in {file}".encode(), **SHARDS[file]})
    listing(folder, {"norm": listed}, backwards=backwards)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint["norm"].data.tobytes() == f"in {listed}".encode()
        assert checkpoint.shard_of("norm").file_name == listed
        assert set(checkpoint.report.unlisted) == {("norm", other), ("norm", TWO)}


@pytest.mark.parametrize("listed", [ONE, THREE])
def test_a_tensor_of_two_shards_and_shapes_is_the_listed_one(listed: str, folder: Path) -> None:
    write_shard(folder / ONE, {**SHARDS[ONE], "twice": b"12"})
    write_shard(folder / THREE, {**SHARDS[THREE], "twice": b"12345"})
    with open_checkpoint(listing(folder, {"twice": listed})) as checkpoint:
        assert checkpoint.info("twice").shape == ((2,) if listed == ONE else (5,))


# Many faults at once -----------------------------------------------------------------------------


BAD_FILES = {
    Code.HEADER_FOREIGN_FILE: LFS_POINTER,
    Code.HEADER_FILE_TOO_SHORT: b"",
    Code.FILE_LONG: shard_bytes("{}", b"tail"),
    Code.HEADER_NOT_JSON: shard_bytes("{]"),
}


def test_all_bad_shards_are_told_in_one_error(tmp_path: Path) -> None:
    good, *bad = numbered(6)
    folder = write_checkpoint(tmp_path / "folder", {good: {"t0": b"0"}})
    for name, data in zip(bad, BAD_FILES.values(), strict=False):
        (folder / name).write_bytes(data)
    (folder / bad[4]).mkdir()
    write_index(folder, {f"t{n}": name for n, name in enumerate((good, *bad))})
    error = refusal(folder, CheckpointError, Code.CHECKPOINT_PROBLEMS)
    assert [problem.code for problem in error.problems] == [*BAD_FILES, Code.PATH_NOT_REGULAR]
    assert [problem.path for problem in error.problems] == [str(folder / name) for name in bad]
    assert [type(problem) for problem in error.problems] == [HeaderError] * 4 + [PathError]
    assert all(name in str(error) for name in bad)
    assert good not in str(error)
    assert "5" in str(error)


def test_one_bad_shard_is_told_as_itself(folder: Path) -> None:
    (folder / TWO).write_bytes(LFS_POINTER)
    error = refusal(folder, HeaderError, Code.HEADER_FOREIGN_FILE)
    assert error.path == str(folder / TWO)


def test_a_shard_that_is_cut_short_is_refused_before_any_other_is_used(folder: Path) -> None:
    os.truncate(folder / THREE, (folder / THREE).stat().st_size - 1)
    error = refusal(folder, HeaderError, Code.FILE_SHORT)
    assert error.path == str(folder / THREE)


@linux
def test_a_refused_checkpoint_leaves_nothing_open(folder: Path) -> None:
    (folder / THREE).write_bytes(LFS_POINTER)
    for _ in range(3):
        refusal(folder, HeaderError, Code.HEADER_FOREIGN_FILE)
    assert descriptors_under(folder) == []
    assert [mapped_regions(folder / name) for name in SHARDS] == [[], [], []]


# The end of its use ------------------------------------------------------------------------------


@linux
def test_after_close_no_map_and_no_descriptor_is_left(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    views = [checkpoint[name].data for name in checkpoint]
    assert [len(mapped_regions(folder / name)) for name in SHARDS] == [1, 1, 1]
    checkpoint.close()
    assert [mapped_regions(folder / name) for name in SHARDS] == [[], [], []]
    assert descriptors_under(folder) == []
    assert len(views) == len(TENSORS)


def test_a_view_that_is_used_after_close_raises(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        tensor, view = checkpoint["norm"], checkpoint["norm"].data
        layer = checkpoint.layer(0)
        late = layer.get("self_attn.A_log")
    for use in (lambda: view[0], view.tobytes, lambda: np.frombuffer(view, np.uint8)):
        with pytest.raises(ValueError, match="released"):
            use()
    with pytest.raises(ValueError, match=r"closed|released"):
        _ = tensor.data
    assert late is not None
    with pytest.raises(ClosedError):
        _ = late.data


def test_a_closed_checkpoint_gives_no_tensors(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        layer = checkpoint.layer(0)
    for use in (
        lambda: checkpoint.tensor("norm"),
        lambda: checkpoint["norm"],
        lambda: layer.get("self_attn.A_log"),
    ):
        with pytest.raises(ClosedError) as caught:
            use()
        assert caught.value.code is Code.CHECKPOINT_CLOSED
        assert isinstance(caught.value, ValueError)
        assert str(folder) in str(caught.value)


def test_closing_twice_is_closing_once(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint["norm"].data.tobytes() == b"norm"
    checkpoint.close()
    checkpoint.close()
    with checkpoint:
        pass


def test_an_array_that_outlives_close_is_told_and_stays_readable(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    array = np.frombuffer(checkpoint["norm"].data, np.uint8)
    assert checkpoint["embed"].data.tobytes() == b"embed"
    with pytest.raises(InUseError) as caught:
        checkpoint.close()
    assert isinstance(caught.value, BufferError)
    assert caught.value.code is Code.MEMORY_IN_USE
    assert TWO in str(caught.value)
    assert ONE not in str(caught.value)
    assert array.tobytes() == b"norm"
    if sys.platform == "linux":
        assert [len(mapped_regions(folder / name)) for name in SHARDS] == [0, 1, 0]
    with pytest.raises(ClosedError):
        checkpoint.tensor("norm")
    del array
    gc.collect()
    if sys.platform == "linux":
        assert mapped_regions(folder / TWO) == []
        assert descriptors_under(folder) == []
    checkpoint.close()


def test_a_part_of_a_view_that_outlives_close_is_told_and_stays_readable(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    part = checkpoint["norm"].data[1:3]
    with pytest.raises(InUseError):
        checkpoint.close()
    assert part.tobytes() == b"or"


def test_leaving_a_with_block_tells_of_an_array_that_outlives_it(folder: Path) -> None:
    with pytest.raises(InUseError), open_checkpoint(folder) as checkpoint:
        array = np.frombuffer(checkpoint["norm"].data, np.uint8)
    assert array.tobytes() == b"norm"


def test_leaving_a_with_block_hides_no_other_error(folder: Path) -> None:
    arrays = []

    def use() -> None:
        with open_checkpoint(folder) as checkpoint:
            arrays.append(np.frombuffer(checkpoint["norm"].data, np.uint8))
            raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        use()
    assert arrays[0].tobytes() == b"norm"


@linux
def test_a_checkpoint_that_is_dropped_leaves_no_map(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint["norm"].data.tobytes() == b"norm"
    assert len(mapped_regions(folder / TWO)) == 1
    del checkpoint
    gc.collect()
    assert mapped_regions(folder / TWO) == []


# Many shards, many threads -----------------------------------------------------------------------


@linux
def test_1500_shards_open_and_are_mapped_under_a_limit_of_1024_descriptors(
    tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    shards = numbered(1500)
    folder = write_checkpoint(
        tmp_path / "folder", {name: {f"t{n}": b"%d" % n} for n, name in enumerate(shards)}
    )
    counts = run_python(
        """
        import json, os, resource, sys
        from pathlib import Path
        from kda_stream import open_checkpoint

        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))

        def mapped():
            lines = Path("/proc/self/maps").read_text().splitlines()
            return [line for line in lines if line.endswith("-of-01500.safetensors")]

        before = len(os.listdir("/proc/self/fd"))
        checkpoint = open_checkpoint(sys.argv[1])
        none_mapped = len(mapped())
        views = [checkpoint[f"t{n}"].data for n in range(1500)]
        right = sum(view == b"%d" % n for n, view in enumerate(views))
        maps = mapped()
        held = len(os.listdir("/proc/self/fd")) - before
        checkpoint.close()
        left = len(mapped())
        files = len({line.split()[-1] for line in maps})
        print(json.dumps([none_mapped, right, len(maps), files, held, left]))
        """,
        folder,
    )
    assert counts == [0, 1500, 1500, 1500, 0, 0]


@pytest.fixture
def hurried_threads() -> Iterator[None]:
    """Threads take turns a thousand times as often as they do by default."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 1000)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hurried_threads")
def test_eight_threads_share_a_checkpoint(folder: Path) -> None:
    threads = 8
    for _ in range(20):
        start = threading.Barrier(threads)
        with open_checkpoint(folder) as checkpoint:

            def view_all(
                number: int, start: threading.Barrier = start, checkpoint: Any = checkpoint
            ) -> dict[str, memoryview]:
                names = list(TENSORS)
                names = names[number % 2 :] + names[: number % 2]
                start.wait()
                views = {name: checkpoint[name].data for name in names}
                assert checkpoint.layers() == (0, 1)
                return views

            with ThreadPoolExecutor(threads) as pool:
                seen = list(pool.map(view_all, range(threads)))
            assert all(views == TENSORS for views in seen)
            if sys.platform == "linux":
                assert [len(mapped_regions(folder / name)) for name in SHARDS] == [1, 1, 1]


def test_a_reader_that_meets_a_close_gets_bytes_or_an_error_and_no_signal(
    folder: Path, run_python: Callable[..., Any]
) -> None:
    outcomes = run_python(
        """
        import json, sys, threading
        from kda_stream import open_checkpoint

        seen, wrong = set(), []

        def read(checkpoint, start):
            start.wait()
            try:
                while True:
                    data = bytes(checkpoint["norm"].data)
                    seen.add("bytes")
                    if data != b"norm":
                        wrong.append(data)
            except ValueError:  # closed, or its view was released
                seen.add("closed")

        for _ in range(100):
            checkpoint = open_checkpoint(sys.argv[1])
            start = threading.Barrier(4)
            threads = [threading.Thread(target=read, args=(checkpoint, start)) for _ in range(3)]
            for thread in threads:
                thread.start()
            start.wait()
            try:
                checkpoint.close()
            except BufferError:  # a reader was at work on its view
                seen.add("in use")
            for thread in threads:
                thread.join()
        print(json.dumps([sorted(seen - {"in use"}), len(wrong)]))
        """,
        folder,
    )
    assert outcomes in ([["bytes", "closed"], 0], [["closed"], 0])


# Errors that travel ------------------------------------------------------------------------------


def _gone(folder: Path) -> object:
    return open_checkpoint(folder / "gone")


def _bad_header(folder: Path) -> object:
    entry = '{"dtype":"U8","shape":[3],"data_offsets":[0,2]}'
    (folder / TWO).write_bytes(shard_bytes(f'{{"a":{entry}}}', b"12"))
    return open_checkpoint(folder)


def _missing(folder: Path) -> object:
    (folder / ONE).unlink()
    (folder / TWO).unlink()
    return open_checkpoint(folder)


def _many(folder: Path) -> object:
    (folder / ONE).write_bytes(b"")
    (folder / TWO).write_bytes(LFS_POINTER)
    return open_checkpoint(folder)


def _unlisted(folder: Path) -> object:
    return open_checkpoint(listing(folder, {"absent": TWO}))


def _unknown(folder: Path) -> object:
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.tensor("absent")


def _unknown_layer(folder: Path) -> object:
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.layer(7)


def _closed(folder: Path) -> object:
    with open_checkpoint(folder) as checkpoint:
        pass
    return checkpoint.tensor("norm")


def _changed(folder: Path) -> object:
    with open_checkpoint(folder) as checkpoint:
        os.truncate(folder / TWO, 9)
        return checkpoint["norm"].data


def _in_use(folder: Path) -> object:
    checkpoint = open_checkpoint(folder)
    array = np.frombuffer(checkpoint["norm"].data, np.uint8)
    checkpoint.close()
    return array


FAULTS = [
    *(_gone, _bad_header, _missing, _many, _unlisted),
    *(_unknown, _unknown_layer, _closed, _changed, _in_use),
]


def plain(error: KdaStreamError) -> dict[str, object]:
    """All that an error holds, the errors inside it too, as values that compare."""
    state: dict[str, object] = {"type": type(error), "line": str(error), "args": error.args}
    for name, value in vars(error).items():
        state[name] = tuple(map(plain, value)) if name == "problems" else value
    return state


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_an_error_is_pickled_and_copied_whole(
    fault: Callable[[Path], object], folder: Path
) -> None:
    with pytest.raises(KdaStreamError) as caught:
        fault(folder)
    error = caught.value
    assert error.code
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert plain(pickle.loads(pickle.dumps(error, protocol))) == plain(error)
    assert plain(copy.copy(error)) == plain(error)
    assert plain(copy.deepcopy(error)) == plain(error)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_an_error_says_where_and_what_next_in_one_line(
    fault: Callable[[Path], object], folder: Path
) -> None:
    with pytest.raises(KdaStreamError) as caught:
        fault(folder)
    line = str(caught.value)
    assert line.startswith(str(folder))
    assert line.isprintable()
    assert caught.value.hint
    assert caught.value.hint in line


def test_an_error_comes_back_from_a_process_pool(folder: Path) -> None:
    _bad = folder / TWO
    _bad.write_bytes(LFS_POINTER)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        error = pool.submit(open_checkpoint, str(folder)).exception(timeout=60)
    assert isinstance(error, HeaderError)
    assert error.code is Code.HEADER_FOREIGN_FILE
    assert error.path == str(_bad)


# What is printed ---------------------------------------------------------------------------------


NASTY = ["a\nb", "\x1b[31mred", "\u202egnp.", "\u2066x\u2069", "\u2028", "a\rb", "\x7f", "\x9b31m"]


@pytest.mark.parametrize("nasty", NASTY, ids=ascii)
def test_a_path_is_printed_escaped(nasty: str, tmp_path: Path) -> None:
    folder = tmp_path / nasty
    for path in (folder, folder / "model.safetensors"):
        error = refusal(path, PathError, Code.PATH_MISSING)
        assert error.path == str(path)
        assert nasty not in str(error)
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(nasty + "x")
    refusal(folder, PathError, Code.PATH_DANGLING_LINK)
    (folder / "model.safetensors").unlink()
    refusal(folder, CheckpointError, Code.CHECKPOINT_NO_SHARDS)
    for name in ("1.safetensors", "2.safetensors"):
        write_shard(folder / (nasty + name), {"a": b"1"})
    refusal(folder, CheckpointError, Code.CHECKPOINT_NO_INDEX)
    with open_checkpoint(folder / f"{nasty}1.safetensors") as checkpoint:
        assert repr(checkpoint).isprintable()


@pytest.mark.parametrize("nasty", NASTY, ids=ascii)
def test_names_from_the_files_are_printed_escaped(nasty: str, folder: Path) -> None:
    name = f"{PREFIX}0.{nasty}"
    write_shard(folder / ONE, {**SHARDS[ONE], name: b"1", f"stray {nasty}": b"2"})
    write_shard(folder / f"ignored {nasty}.safetensors", {"a": b"1"})
    listing(folder, {name: ONE})
    with open_checkpoint(folder) as checkpoint:
        assert len(checkpoint.report.notes) == 2
        assert all(note.isprintable() for note in checkpoint.report.notes)
        assert repr(checkpoint).isprintable()
        assert repr(checkpoint.layer(0)).isprintable()
        assert repr(checkpoint[name]).isprintable()
        with pytest.raises(NotFoundError) as caught:
            checkpoint.tensor(nasty)
        assert str(caught.value).isprintable()
    error = refusal(listing(folder, {nasty: TWO}), ShardIndexError, Code.INDEX_TENSORS_MISSING)
    assert nasty not in str(error)


@linux
def test_a_file_name_that_is_not_utf_8_is_printed_escaped(folder: Path) -> None:
    odd = os.fsencode(folder) + b"/\xff.safetensors"
    with open(odd, "wb") as file:
        file.write(LFS_POINTER)
    with open_checkpoint(folder) as checkpoint:
        assert len(checkpoint.report.ignored_files) == 1
        assert all(note.isprintable() for note in checkpoint.report.notes)
    error = refusal(os.fsdecode(odd), HeaderError, Code.HEADER_FOREIGN_FILE)
    assert r"\udcff" in str(error)
    str(error).encode("utf-8")


def test_a_checkpoint_tells_itself_apart_in_a_log(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        assert str(folder) in repr(checkpoint)
        assert "3" in repr(checkpoint)
        assert "closed" not in repr(checkpoint).lower().replace(str(folder), "")
    assert "closed" in repr(checkpoint).lower()


@pytest.mark.parametrize("thing", [None, "GLM-5.3-Flash", Path(), {}], ids=repr)
def test_what_is_no_open_checkpoint_is_told_how_to_open_one(thing: object) -> None:
    with pytest.raises(ArgumentError, match="open_checkpoint") as caught:
        require_checkpoint(thing)
    assert caught.value.got == type(thing).__name__


def test_whether_every_shard_is_checked_is_known(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path, {"a.safetensors": {"x": b"1"}, "b.safetensors": {"y": b"2"}}
    )
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.is_checked
    with open_checkpoint(folder, verify="needed") as checkpoint:
        assert not checkpoint.is_checked
        checkpoint.info("x")
        assert not checkpoint.is_checked
        checkpoint.info("y")
        assert checkpoint.is_checked
