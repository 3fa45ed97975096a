"""`verify="needed"`: a shard is opened and checked when the first of its tensors is asked for."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Written
from support.files import (
    DSA_NAMES,
    INDEX_NAME,
    descriptors_under,
    layer_tensors,
    numbered,
    shard_bytes,
    write_checkpoint,
    write_index,
    write_shard,
)
from support.headers import LFS_POINTER

from kda_stream import (
    ArgumentError,
    AttnBlockKind,
    Checkpoint,
    ClosedError,
    KdaStreamError,
    NotFoundError,
    PayloadError,
    ShardsMissingError,
    classify_attn_block,
    open_checkpoint,
    stream_kda_layers,
)
from kda_stream.checkpoint import shards as shards_module
from kda_stream.errors import ErrorCode as Code

RunPython = Callable[..., Any]

PREFIX = "model.layers."
ONE, TWO, THREE = numbered(3)
SHARDS: dict[str, dict[str, bytes]] = {
    ONE: {"embed": b"embed", **layer_tensors(PREFIX, 0)},
    TWO: {"norm": b"norm", "empty": b""},
    THREE: layer_tensors(PREFIX, 1, DSA_NAMES),
}
TENSORS = {name: data for tensors in SHARDS.values() for name, data in tensors.items()}
PLACES = {name: file for file, tensors in SHARDS.items() for name in tensors}

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of three shards: layer 0 in the first, layer 1 in the third."""
    return write_checkpoint(tmp_path / "folder", SHARDS)


@pytest.fixture
def opened(folder: Path) -> Iterator[Checkpoint]:
    with open_checkpoint(folder, verify="needed") as checkpoint:
        yield checkpoint


def checked(checkpoint: Checkpoint) -> int:
    return checkpoint.report.shards_checked


# What is opened, and when ------------------------------------------------------------------------


def test_the_shards_of_the_tensors_that_are_asked_for_are_opened_and_no_other(
    folder: Path, run_python: RunPython
) -> None:
    """As the interpreter sees it: every open of a shard, by the step that caused it."""
    script = """
        import json, os, sys
        from kda_stream import open_checkpoint
        seen, steps = [], {}

        def hook(event, arguments):
            if event == "open" and str(arguments[0]).endswith(".safetensors"):
                seen.append(os.path.basename(arguments[0]))

        def step(name, act):
            act()
            steps[name] = sorted(set(seen))
            seen.clear()

        sys.addaudithook(hook)
        with open_checkpoint(sys.argv[1], verify="needed") as checkpoint:
            step("open", lambda: None)
            step("names", lambda: (checkpoint.keys(), len(checkpoint), "norm" in checkpoint))
            step("layers", checkpoint.layers)
            step("kinds", lambda: [checkpoint.layer(i).names() for i in checkpoint.layers()])
            step("files", lambda: (list(checkpoint.shards), checkpoint.report.notes))
            step("layer", lambda: checkpoint.layer(0).info("self_attn.A_log"))
            step("again", lambda: checkpoint.layer(0).info("self_attn.dt_bias"))
            step("info", lambda: checkpoint.info("norm"))
            step("tensor", lambda: checkpoint.layer(1).get("self_attn.o_proj.weight"))
            step("all", lambda: [checkpoint.info(name) for name in checkpoint])
        print(json.dumps(steps))
    """
    assert run_python(script, folder) == {
        "open": [],
        "names": [],
        "layers": [],
        "kinds": [],
        "files": [],
        "layer": [ONE],
        "again": [],
        "info": [TWO],
        "tensor": [THREE],
        "all": [],
    }


def test_layers_and_their_kinds_come_from_the_index(opened: Checkpoint) -> None:
    kinds = [classify_attn_block(opened.layer(index).names()) for index in opened.layers()]
    assert kinds == [AttnBlockKind.KDA, AttnBlockKind.DSA]
    assert opened.layer_prefix == PREFIX
    assert checked(opened) == 0


def test_all_that_it_hands_out_is_as_when_all_is_checked_at_once(folder: Path) -> None:
    with (
        open_checkpoint(folder) as at_once,
        open_checkpoint(folder, verify="needed") as opened,
    ):
        assert opened.keys() == at_once.keys() == list(TENSORS)
        assert list(opened.shards) == list(at_once.shards)
        for name, data in TENSORS.items():
            assert opened.info(name) == at_once.info(name)
            assert bytes(opened[name].data) == data
        assert opened.report == at_once.report
        assert [shard.identity for shard in opened.shards.values()] == [
            shard.identity for shard in at_once.shards.values()
        ]


def test_a_stream_of_it_is_as_when_all_is_checked_at_once(written: Written) -> None:
    answers = []
    for verify in ("all", "needed"):
        with (
            open_checkpoint(written.folder, verify=verify) as checkpoint,  # type: ignore[arg-type]
            stream_kda_layers(checkpoint) as stream,
        ):
            answers.append([(layer.index, bytes(layer.weights.conv.data)) for layer in stream])
    assert answers[0] == answers[1]
    assert answers[0]


@pytest.mark.parametrize("name", ["folder", "file"])
def test_a_checkpoint_without_an_index_is_checked_at_once(name: str, tmp_path: Path) -> None:
    path = write_shard(tmp_path / "model.safetensors", SHARDS[TWO])
    with open_checkpoint(tmp_path if name == "folder" else path, verify="needed") as checkpoint:
        assert (checked(checkpoint), checkpoint.report.tensor_bytes) == (1, 4)
    path.write_bytes(LFS_POINTER)
    with pytest.raises(KdaStreamError) as caught:
        open_checkpoint(tmp_path, verify="needed")
    assert caught.value.code is Code.HEADER_FOREIGN_FILE


@linux
def test_no_descriptor_stays_open(folder: Path, opened: Checkpoint) -> None:
    assert opened.tensor("norm").shape == (4,)
    assert descriptors_under(folder) == []


@pytest.mark.parametrize("verify", ["none", "", None, True, "ALL", "Needed"])
def test_another_level_of_verification_is_refused(verify: Any, folder: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        open_checkpoint(folder, verify=verify)
    assert caught.value.expected == "all or needed"
    assert caught.value.got == repr(verify)


# What is wrong with a shard ----------------------------------------------------------------------


def spoil_two(folder: Path, fault: str) -> None:
    """Make the second shard unusable, or the index wrong about it."""
    path = folder / TWO
    if fault == "absent name":
        write_index(folder, {**PLACES, "absent": TWO, "more": TWO})
    elif fault == "other shard's name":
        write_index(folder, {**PLACES, "embed": TWO})
    elif fault == "cut short":
        os.truncate(path, path.stat().st_size - 1)
    elif fault == "folder":
        path.unlink()
        path.mkdir()
    elif fault == "link to nothing":
        path.unlink()
        path.symlink_to("nothing")
    else:
        path.write_bytes({"pointer": LFS_POINTER, "empty": b"", "bad": shard_bytes("{]")}[fault])


FAULTS = {
    "absent name": Code.INDEX_TENSORS_MISSING,
    "other shard's name": Code.INDEX_TENSORS_MISSING,
    "cut short": Code.FILE_SHORT,
    "folder": Code.PATH_NOT_REGULAR,
    "link to nothing": Code.PATH_DANGLING_LINK,
    "pointer": Code.HEADER_FOREIGN_FILE,
    "empty": Code.HEADER_FILE_TOO_SHORT,
    "bad": Code.HEADER_NOT_JSON,
}


@pytest.mark.parametrize(("fault", "code"), FAULTS.items())
def test_a_shard_at_fault_raises_when_needed_what_it_would_at_once(
    fault: str, code: Code, folder: Path
) -> None:
    spoil_two(folder, fault)
    with pytest.raises(KdaStreamError) as caught:
        open_checkpoint(folder)
    at_once = caught.value
    assert at_once.code is code
    with open_checkpoint(folder, verify="needed") as checkpoint:
        assert (
            bytes(checkpoint[f"{PREFIX}0.self_attn.A_log"].data)
            == b"model.layers.0.self_attn.A_log"
        )
        for ask in (checkpoint.info, checkpoint.tensor, checkpoint.shard_of, checkpoint.info):
            with pytest.raises(type(at_once)) as caught:
                ask("norm")
            assert str(caught.value) == str(at_once)
            assert vars(caught.value) == vars(at_once)
        assert checked(checkpoint) == 1
        assert checkpoint.info(f"{PREFIX}1.self_attn.o_proj.weight").dtype == "U8"


def test_a_shard_at_fault_that_is_made_good_is_taken(folder: Path, opened: Checkpoint) -> None:
    good = (folder / TWO).read_bytes()
    (folder / TWO).write_bytes(LFS_POINTER)
    with pytest.raises(KdaStreamError):
        opened.info("norm")
    (folder / TWO).write_bytes(good)
    assert bytes(opened["norm"].data) == b"norm"


@pytest.mark.parametrize("gone", [(TWO,), (ONE, THREE)])
def test_missing_shards_are_noticed_at_the_opening(gone: tuple[str, ...], folder: Path) -> None:
    for file in gone:
        (folder / file).unlink()
    errors = []
    for verify in ("all", "needed"):
        with pytest.raises(ShardsMissingError) as caught:
            open_checkpoint(folder, verify=verify)  # type: ignore[arg-type]
        errors.append(caught.value)
    assert vars(errors[0]) == vars(errors[1])
    assert errors[1].missing == gone


def test_a_shard_that_goes_before_it_is_needed_is_missing(folder: Path, opened: Checkpoint) -> None:
    (folder / TWO).unlink()
    with pytest.raises(ShardsMissingError) as caught:
        opened.tensor("norm")
    assert caught.value.missing == (TWO,)
    assert bytes(opened["embed"].data) == b"embed"


def test_the_identity_of_a_shard_is_taken_when_it_is_first_checked(
    folder: Path, opened: Checkpoint
) -> None:
    write_shard(folder / TWO, {"norm": b"another norm", "empty": b""})
    assert opened.info("norm").shape == (12,)
    assert opened.shards[TWO].identity.file_bytes == (folder / TWO).stat().st_size
    write_shard(folder / TWO, SHARDS[TWO])
    with pytest.raises(PayloadError) as caught:
        opened["norm"].data.tobytes()
    assert caught.value.code is Code.FILE_CHANGED


def test_an_unknown_tensor_or_file_opens_nothing(opened: Checkpoint) -> None:
    with pytest.raises(NotFoundError):
        opened.info("absent")
    with pytest.raises(KeyError):
        opened.shards["absent"]
    assert ONE in opened.shards
    assert "absent" not in opened.shards
    assert checked(opened) == 0


# What the report says ----------------------------------------------------------------------------


def test_the_report_says_what_is_not_known_yet(folder: Path) -> None:
    write_shard(folder / TWO, {**SHARDS[TWO], "stray": b"stray"})
    write_index(folder, PLACES, metadata={"total_size": 1})
    with open_checkpoint(folder, verify="needed") as checkpoint:
        report = checkpoint.report
        assert (report.shards, report.shards_checked, report.tensors) == (3, 0, len(TENSORS))
        assert (report.tensor_bytes, report.file_bytes, report.unlisted) == (None, None, ())
        assert report.total_size_listed == 1
        assert len(report.notes) == 1
        assert "3 of 3 shards are not checked" in report.notes[0]

        checkpoint.info("norm")
        report = checkpoint.report
        assert (report.shards_checked, report.tensor_bytes) == (1, None)
        assert report.unlisted == (("stray", TWO),)
        assert "2 of 3 shards are not checked" in report.notes[0]

        for name in checkpoint:
            checkpoint.info(name)
        with open_checkpoint(folder) as at_once:
            assert checkpoint.report == at_once.report
        assert checkpoint.report.tensor_bytes == sum(map(len, TENSORS.values()))
        assert not any("not checked" in note for note in checkpoint.report.notes)
        assert any("total_size of 1 bytes" in note for note in checkpoint.report.notes)


# Threads and the end -----------------------------------------------------------------------------


def test_threads_that_ask_at_once_open_a_shard_once(
    opened: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[str] = []
    open_shard = shards_module.open_shard

    def slow(path: str, **options: Any) -> Any:
        paths.append(path)
        time.sleep(0.02)
        return open_shard(path, **options)

    monkeypatch.setattr(shards_module, "open_shard", slow)
    barrier = threading.Barrier(8)

    def ask(_: int) -> list[bytes]:
        barrier.wait()
        return [bytes(opened[name].data) for name in TENSORS]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [list(TENSORS.values())] * 8
    assert sorted(map(os.path.basename, paths)) == [ONE, TWO, THREE]


def test_after_the_end_nothing_is_opened_and_the_names_stay(folder: Path) -> None:
    with open_checkpoint(folder, verify="needed") as checkpoint:
        info = checkpoint.info("norm")
    assert checkpoint.info("norm") == info
    for ask in (checkpoint.info, checkpoint.tensor, checkpoint.shard_of):
        with pytest.raises(ClosedError):
            ask("embed")
    assert checkpoint.layers() == (0, 1)
    assert checkpoint.keys() == list(TENSORS)
    assert checked(checkpoint) == 1


def test_a_shard_that_is_being_opened_when_the_end_comes_is_closed(
    opened: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a destructor may have it, which runs in between in the same thread."""
    open_shard = shards_module.open_shard

    def end_and_open(path: str, **options: Any) -> Any:
        opened.close()
        return open_shard(path, **options)

    monkeypatch.setattr(shards_module, "open_shard", end_and_open)
    shard = opened.shard_of("norm")
    with pytest.raises(ClosedError):
        shard.view(0, 1)


def test_an_index_file_is_opened_as_its_folder_is(folder: Path) -> None:
    (folder / THREE).write_bytes(LFS_POINTER)
    with open_checkpoint(folder / INDEX_NAME, verify="needed") as checkpoint:
        assert bytes(checkpoint["norm"].data) == b"norm"
        assert checked(checkpoint) == 1
