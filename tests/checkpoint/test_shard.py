"""One shard: what may stand under its name, what opening it touches, how long its bytes last."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.files import (
    INDEX_NAME,
    Stored,
    descriptors_under,
    mapped_regions,
    numbered,
    write_checkpoint,
    write_index,
    write_shard,
    write_sparse_shard,
)
from support.page_cache import cached_pages
from support.refused_calls import Refused, where_refused

from kda_stream import ClosedError, PathError, PayloadError, RawTensor, open_checkpoint
from kda_stream.checkpoint.shard import Shard, open_shard
from kda_stream.errors import ErrorCode as Code

SHARD = "model.safetensors"
PAGE = mmap.PAGESIZE
TENSORS = {"a": b"first", "b": bytes(range(200)) * 100, "c": b"", "d": b"last"}

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_shard(tmp_path / SHARD, TENSORS)


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


# What stands under the name ----------------------------------------------------------------------


def put_directory(path: Path) -> None:
    path.mkdir()


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("gone"))


def put_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_socket(path: Path) -> None:
    """A path of a socket may be too long for it: bind under a short name, then move it."""
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{short}/s")
        shutil.move(f"{short}/s", path)


STAND_INS = [
    pytest.param(put_directory, {Code.PATH_NOT_REGULAR}, "directory", id="a directory"),
    pytest.param(put_fifo, {Code.PATH_NOT_REGULAR}, "pipe", id="a FIFO"),
    pytest.param(put_socket, {Code.PATH_NOT_REGULAR}, "socket", id="a socket"),
    pytest.param(put_device, {Code.PATH_NOT_REGULAR}, "device", id="a device"),
    pytest.param(put_dangling_link, {Code.PATH_DANGLING_LINK}, "link", id="a dangling link"),
    pytest.param(
        put_link_to_itself,
        {Code.PATH_DANGLING_LINK, Code.PATH_NOT_REGULAR, Code.PATH_NOT_READABLE},
        "link",
        id="a link to itself",
    ),
]

OPEN_AND_TELL = """
    import json, sys
    from kda_stream import KdaStreamError, open_checkpoint
    try:
        open_checkpoint(sys.argv[1])
    except KdaStreamError as error:
        print(json.dumps([type(error).__name__, error.code.value, error.path, str(error)]))
"""


@pytest.mark.parametrize(("put", "codes", "word"), STAND_INS[1:])  # a folder may be a checkpoint
def test_what_is_no_file_is_called_what_it_is(
    put: Callable[[Path], None],
    codes: set[Code],
    word: str,
    tmp_path: Path,
    run_python: Callable[..., Any],
) -> None:
    """In a process of its own with little time: opening a FIFO as a file would never end."""
    path = tmp_path / SHARD
    put(path)
    kind, code, told_path, line = run_python(OPEN_AND_TELL, path, seconds=20)
    assert kind in ("PathError", "PathMissingError")
    assert Code(code) in codes
    assert told_path == str(path)
    assert word in line.lower()


@pytest.mark.parametrize(("put", "codes", "word"), STAND_INS)
def test_what_is_no_file_is_called_what_it_is_when_an_index_names_it(
    put: Callable[[Path], None],
    codes: set[Code],
    word: str,
    tmp_path: Path,
    run_python: Callable[..., Any],
) -> None:
    good, bad = numbered(2)
    write_checkpoint(tmp_path, {good: {"a": b"1"}})
    write_index(tmp_path, {"a": good, "b": bad})
    put(tmp_path / bad)
    _, code, told_path, line = run_python(OPEN_AND_TELL, tmp_path, seconds=20)
    assert Code(code) in codes
    assert told_path == str(tmp_path / bad)
    assert word in line.lower()


@pytest.mark.parametrize(("put", "codes", "word"), STAND_INS)
def test_what_is_no_file_is_called_what_it_is_in_place_of_the_index(
    put: Callable[[Path], None],
    codes: set[Code],
    word: str,
    tmp_path: Path,
    run_python: Callable[..., Any],
) -> None:
    write_shard(tmp_path / SHARD, TENSORS)
    put(tmp_path / INDEX_NAME)
    kind, code, told_path, line = run_python(OPEN_AND_TELL, tmp_path, seconds=20)
    assert kind in ("PathError", "PathMissingError")
    assert Code(code) in codes
    assert told_path == str(tmp_path / INDEX_NAME)
    assert word in line.lower()


def test_a_path_that_is_not_there_is_a_path_error(tmp_path: Path) -> None:
    with pytest.raises(PathError) as caught:
        open_checkpoint(tmp_path / "gone")
    assert caught.value.code is Code.PATH_MISSING
    assert isinstance(caught.value, OSError)
    assert str(tmp_path / "gone") in str(caught.value)


@pytest.mark.parametrize("path", ["", "a\0b", "a" * 5000], ids=lambda path: repr(path[:20]))
def test_a_path_that_the_system_refuses_is_a_path_error(
    path: str, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shard.parent)
    with pytest.raises(PathError):
        open_checkpoint(path)


AS_NOBODY = """
    import json, os, sys
    from kda_stream import KdaStreamError, open_checkpoint
    with open_checkpoint(sys.argv[1]):
        pass  # every module that this needs is loaded
    if os.geteuid() == 0:
        os.setegid(65534)
        os.seteuid(65534)
    with open_checkpoint(sys.argv[1]):
        pass  # the folder itself is open to all
    answers = []
    for path in sys.argv[2:]:
        try:
            open_checkpoint(path).close()
            answers.append("opens")
        except KdaStreamError as error:
            answers.append([error.code.value, str(error)])
    print(json.dumps(answers))
"""


@linux
def test_a_file_or_folder_without_permission_is_a_path_error(
    run_python: Callable[..., Any],
) -> None:
    """As another user where this one is root, so the folder is one that all users reach."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        free = write_shard(folder / SHARD, TENSORS)
        barred = write_shard(folder / "barred.safetensors", TENSORS)
        barred.chmod(0)
        inside = write_shard(write_checkpoint(folder / "closed", {}) / SHARD, TENSORS)
        inside.parent.chmod(0)
        answers = run_python(AS_NOBODY, free, barred, inside, inside.parent)
        inside.parent.chmod(0o700)
    for answer, path in zip(answers, (barred, inside, inside.parent), strict=True):
        code, line = answer
        assert code == Code.PATH_NOT_READABLE.value
        assert str(path) in line


def test_a_header_that_the_disk_does_not_give_is_a_path_error(shard: Path) -> None:
    with pytest.raises(PathError) as caught:
        where_refused(lambda: open_checkpoint(shard), Refused("pread64", errno.EIO))
    assert caught.value.code is Code.PATH_NOT_READABLE
    assert (caught.value.path, caught.value.got) == (str(shard), os.strerror(errno.EIO))
    assert descriptors_under(shard.parent) == []


def test_where_the_system_takes_no_advice_a_shard_opens_all_the_same(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has no posix_fadvise."""
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    with open_checkpoint(shard) as checkpoint:
        assert checkpoint.tensor("b").data == TENSORS["b"]


def test_a_link_to_a_shard_is_a_shard_under_its_own_name(tmp_path: Path) -> None:
    blob = write_shard(tmp_path / "e3b0c44298fc1c14", TENSORS)
    (tmp_path / SHARD).symlink_to(blob.name)
    with open_checkpoint(tmp_path / SHARD) as checkpoint:
        assert list(checkpoint.shards) == [SHARD]
        assert checkpoint.tensor("b").data == TENSORS["b"]


# What opening touches ----------------------------------------------------------------------------


@linux
def test_opening_maps_nothing_and_holds_no_descriptor(shard: Path) -> None:
    with open_checkpoint(shard) as checkpoint:
        for name in checkpoint:
            assert checkpoint.tensor(name).nbytes == checkpoint.info(name).nbytes
        assert mapped_regions(shard) == []
        assert descriptors_under(shard.parent) == []
        assert checkpoint.tensor("a").data.tobytes() == b"first"
        assert len(mapped_regions(shard)) == 1
        assert descriptors_under(shard.parent) == []


@linux
def test_opening_reads_little_more_than_the_headers(
    tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    shards = numbered(3)
    for n, file in enumerate(shards):
        write_sparse_shard(tmp_path / file, [f"model.layers.{n}.self_attn.q_proj.weight"], 1 << 26)
    index = write_index(
        tmp_path,
        {f"model.layers.{n}.self_attn.q_proj.weight": file for n, file in enumerate(shards)},
    )
    read_bytes = run_python(
        """
        import sys
        from pathlib import Path
        from kda_stream import open_checkpoint

        def read_bytes():
            return int(Path("/proc/self/io").read_text().split()[1])

        with open_checkpoint(sys.argv[1]) as checkpoint:
            checkpoint.layers()  # every module that this needs is loaded
        before = read_bytes()
        with open_checkpoint(sys.argv[1]) as checkpoint:
            for index in checkpoint.layers():
                layer = checkpoint.layer(index)
                for name in layer.names():
                    layer.info(name), layer.get(name).shape
        print(read_bytes() - before)
        """,
        tmp_path,
    )
    assert index.stat().st_size < read_bytes < 3 * 4096


@linux
def test_opening_brings_no_page_of_payload_into_memory(tmp_path: Path) -> None:
    size = 8 << 20
    path = write_shard(tmp_path / SHARD, {"a": os.urandom(size), "b": os.urandom(size)})
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(path):
        pytest.skip("the file system keeps its pages in memory")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensor("b").shape == (size,)
        assert cached_pages(path) == {0}
        last = checkpoint.tensor("b").data[-1]
        assert path.stat().st_size // PAGE in cached_pages(path), last


# Views -------------------------------------------------------------------------------------------


def test_a_view_is_read_only(shard: Path) -> None:
    with open_checkpoint(shard) as checkpoint:
        data = checkpoint.tensor("a").data
        assert data.readonly
        with pytest.raises(TypeError):
            data[0] = 0
        array = np.frombuffer(data, np.uint8)
        with pytest.raises(ValueError, match=r"WRITEABLE|writeable"):
            array.flags.writeable = True
        del array


def test_a_view_is_flat_bytes(shard: Path) -> None:
    with open_checkpoint(shard) as checkpoint:
        data = checkpoint.tensor("b").data
        assert (data.format, data.ndim, data.itemsize, data.nbytes) == ("B", 1, 1, 20_000)
        assert data.c_contiguous


@linux
def test_a_view_lies_in_the_map_of_its_file(shard: Path) -> None:
    with open_checkpoint(shard) as checkpoint:
        data = checkpoint.tensor("b").data
        ((begin, end, permissions),) = mapped_regions(shard)
        assert begin <= address_of(data) < address_of(data) + len(data) <= end
        assert permissions.startswith("r--")
        offset = checkpoint.shards[SHARD].header.payload_begin + checkpoint.info("b").begin
        assert address_of(data) - begin == offset
        assert address_of(checkpoint.tensor("b").data) == address_of(data)


@linux
def test_a_shard_is_mapped_once_however_often_it_is_viewed(shard: Path) -> None:
    with open_checkpoint(shard) as checkpoint:
        views = [checkpoint.tensor(name).data for _ in range(50) for name in checkpoint]
        assert len(mapped_regions(shard)) == 1
        assert sum(map(len, views)) == 50 * sum(map(len, TENSORS.values()))


def test_an_empty_tensor_has_no_bytes(tmp_path: Path) -> None:
    path = write_shard(tmp_path / SHARD, {"a": Stored("BF16", (3, 0), b""), "b": b""})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensor("a").shape == (3, 0)
        assert bytes(checkpoint.tensor("a").data) == bytes(checkpoint.tensor("b").data) == b""


def test_values_of_two_bytes_at_an_odd_place_are_those_that_were_stored(tmp_path: Path) -> None:
    values = np.arange(1000, dtype="<u2")
    path = write_shard(
        tmp_path / SHARD, {"a": b"1", "b": Stored("BF16", (1000,), values.tobytes())}
    )
    with open_checkpoint(path) as checkpoint:
        begin = checkpoint.shards[SHARD].header.payload_begin + checkpoint.info("b").begin
        assert begin % 2 == 1
        assert np.frombuffer(checkpoint.tensor("b").data, "<u2").tolist() == values.tolist()


def test_a_tensor_says_where_its_bytes_lie(shard: Path) -> None:
    with open_checkpoint(shard) as checkpoint:
        place = checkpoint.tensor("b").place
        assert place is not None
        assert place.file.path == str(shard)
        assert shard.read_bytes()[place.begin : place.end] == TENSORS["b"]
    assert RawTensor("U8", (2,), b"ab").place is None


@linux
def test_a_shard_that_is_not_mapped_has_no_pages_to_let_go(shard: Path) -> None:
    opened = open_shard(str(shard))
    opened.unmap(0, 10)
    assert mapped_regions(shard) == []
    assert bytes(opened.view(0, 8)) == shard.read_bytes()[:8]
    opened.unmap(0, 10)
    assert bytes(opened.view(0, 8)) == shard.read_bytes()[:8]
    opened.close()


@linux
def test_a_shard_can_be_read_through_a_file_of_ones_own(shard: Path) -> None:
    opened = open_shard(str(shard))
    with opened.open() as file:
        assert os.pread(file.fileno(), 1 << 20, 0) == shard.read_bytes()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(file.fileno(), b"x")
    opened.close()
    assert descriptors_under(shard.parent) == []


# The file behind it ------------------------------------------------------------------------------


def replaced(path: Path) -> None:
    """Another file of the same size and time comes under the name."""
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[:-1] + b"X")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def rewritten(path: Path) -> None:
    """The same file gets other bytes, as many as before, a nanosecond later."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"X")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def cut(path: Path) -> None:
    """The file loses its last byte and keeps its time."""
    status = path.stat()
    os.truncate(path, status.st_size - 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def grown(path: Path) -> None:
    """The file gets a byte more and keeps its time."""
    status = path.stat()
    os.truncate(path, status.st_size + 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES = [replaced, rewritten, cut, grown]


def assert_told_as_changed(error: PayloadError, path: Path) -> None:
    assert error.code is Code.FILE_CHANGED
    assert isinstance(error, OSError)
    assert error.path == str(path)
    assert error.expected != error.got


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_changes_before_its_first_view_is_refused(
    change: Callable[[Path], None], shard: Path
) -> None:
    with open_checkpoint(shard) as checkpoint:
        change(shard)
        with pytest.raises(PayloadError) as caught:
            _ = checkpoint.tensor("b").data
        assert_told_as_changed(caught.value, shard)
        with pytest.raises(PayloadError) as caught:
            checkpoint.shards[SHARD].open()
        assert_told_as_changed(caught.value, shard)


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_changes_under_its_map_is_told_when_asked(
    change: Callable[[Path], None], shard: Path
) -> None:
    with open_checkpoint(shard) as checkpoint:
        assert checkpoint.tensor("a").data.tobytes() == b"first"
        checkpoint.shards[SHARD].check_unchanged()
        change(shard)
        with pytest.raises(PayloadError) as caught:
            checkpoint.shards[SHARD].check_unchanged()
        assert_told_as_changed(caught.value, shard)


def test_a_refused_shard_leaves_no_descriptor(shard: Path) -> None:
    with open_checkpoint(shard) as checkpoint:
        replaced(shard)
        for _ in range(3):
            with pytest.raises(PayloadError):
                _ = checkpoint.tensor("a").data
        if sys.platform == "linux":
            assert descriptors_under(shard.parent) == []
            assert mapped_regions(shard) == []


def test_a_link_that_is_turned_to_another_blob_is_a_change(tmp_path: Path) -> None:
    old, new = (write_shard(tmp_path / name, TENSORS) for name in ("old", "new"))
    link = tmp_path / SHARD
    link.symlink_to(old.name)
    with open_checkpoint(link) as checkpoint:
        link.unlink()
        link.symlink_to(new.name)
        with pytest.raises(PayloadError) as caught:
            _ = checkpoint.tensor("a").data
        assert_told_as_changed(caught.value, link)


def test_a_shard_that_is_gone_before_its_first_view_is_an_error_with_its_path(shard: Path) -> None:
    with open_checkpoint(shard) as checkpoint:
        shard.unlink()
        with pytest.raises((PayloadError, PathError)) as caught:
            _ = checkpoint.tensor("a").data
        assert caught.value.path == str(shard)
        with pytest.raises((PayloadError, PathError)):
            checkpoint.shards[SHARD].check_unchanged()


def test_a_shard_that_can_no_longer_be_looked_at_is_an_error_with_the_systems_reason(
    shard: Path,
) -> None:
    opened = open_shard(str(shard))
    shard.unlink()
    shard.symlink_to(shard.name)
    with pytest.raises(PayloadError) as caught:
        opened.check_unchanged()
    assert caught.value.code is Code.PAYLOAD_OPEN
    assert (caught.value.path, caught.value.got) == (str(shard), os.strerror(errno.ELOOP))


def test_a_shard_that_cannot_be_opened_for_its_first_view_is_an_error_with_the_systems_reason(
    shard: Path,
) -> None:
    opened = open_shard(str(shard))
    with pytest.raises(PayloadError) as caught:
        where_refused(lambda: opened.view(0, 8), Refused("openat", errno.EMFILE))
    assert caught.value.code is Code.PAYLOAD_OPEN
    assert (caught.value.path, caught.value.got) == (str(shard), os.strerror(errno.EMFILE))
    assert bytes(opened.view(0, 8)) == shard.read_bytes()[:8]
    opened.close()


@linux
def test_a_file_system_without_direct_reads_is_told_as_such(shard: Path) -> None:
    opened = open_shard(str(shard))
    directly = {2: (os.O_DIRECT, os.O_DIRECT)}
    with pytest.raises(PayloadError) as caught:
        where_refused(lambda: opened.open(direct=True), Refused("openat", errno.EINVAL, directly))
    assert caught.value.code is Code.DIRECT_REFUSED
    assert caught.value.path == str(shard)


@linux
def test_a_shard_that_becomes_a_fifo_is_refused_at_once(
    tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    write_shard(tmp_path / SHARD, TENSORS)
    answer = run_python(
        """
        import json, os, sys
        from kda_stream import KdaStreamError, open_checkpoint
        with open_checkpoint(sys.argv[1]) as checkpoint:
            os.unlink(sys.argv[1])
            os.mkfifo(sys.argv[1])
            try:
                checkpoint.tensor("a").data
            except KdaStreamError as error:
                print(json.dumps(type(error).__name__))
        """,
        tmp_path / SHARD,
        seconds=20,
    )
    assert answer in ("PayloadError", "PathError")


def test_a_closed_shard_gives_no_more_views(shard: Path) -> None:
    opened = open_shard(str(shard))
    view = opened.view(0, 8)
    assert int.from_bytes(view, "little") > 0
    opened.close()
    with pytest.raises(ValueError, match="released"):
        view.tobytes()
    with pytest.raises(ClosedError):
        opened.view(0, 8)


def view_closed_at(event: int, opened: Shard) -> tuple[bool, memoryview]:
    """Whether the shard was closed at that call or return on the way to a view, and the view.

    As a destructor or a signal's handler may have it, which run in between.
    """
    seen, is_closed = 0, False

    def watch(_frame: object, _what: str, called: object) -> None:
        nonlocal seen, is_closed
        seen += 1
        if seen == event and called is not sys.setprofile:
            is_closed = True
            opened.close()

    sys.setprofile(watch)
    try:
        view = opened.view(0, 8)
    finally:
        sys.setprofile(None)
    return is_closed, view


@linux
def test_a_shard_that_is_closed_while_its_view_is_made_keeps_no_map(shard: Path) -> None:
    refused = 0
    for event in itertools.count(1):
        opened = open_shard(str(shard))
        try:
            is_closed, view = view_closed_at(event, opened)
        except ClosedError:
            refused += 1
        else:
            if not is_closed:
                assert view == shard.read_bytes()[:8]
                opened.close()
                break
            with pytest.raises(ValueError, match="released"):
                view.tobytes()
        assert mapped_regions(shard) == [], f"after event {event}"
        assert descriptors_under(shard.parent) == [], f"after event {event}"
    assert refused > 20


# --- pages of one's own ---------------------------------------------------------------------------


def test_bytes_copied_on_write_are_the_file_s_until_they_are_written(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.safetensors", {"x": bytes(range(200)) * 50})
    shard = open_shard(str(path))
    whole = path.read_bytes()
    for begin, end in ((0, len(whole)), (3, 9), (4095, 4097), (5000, 5000)):
        view = shard.copy_on_write(begin, end)
        assert bytes(view) == whole[begin:end]
        view[:] = bytes(len(view))
        del view
    assert path.read_bytes() == whole
    assert shard.close()


def test_pages_of_one_s_own_are_told_of_at_close_until_they_are_gone(tmp_path: Path) -> None:
    shard = open_shard(str(write_shard(tmp_path / "a.safetensors", {"x": bytes(100)})))
    view = shard.copy_on_write(0, 50)
    assert not shard.close()
    assert bytes(view) == (tmp_path / "a.safetensors").read_bytes()[:50]
    del view
    assert shard.close()
    with pytest.raises(ClosedError):
        shard.copy_on_write(0, 50)
