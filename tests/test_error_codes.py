"""Each `ErrorCode` by a test that is named after it, and what every error promises its reader.

The test of a code makes the library raise it through its public functions, by files and a kernel
that are as such a fault has them; `Told` checks the rest. The last test of each part walks the
enum: a new code is found without a test, or a test without a code, by its name.
"""

from __future__ import annotations

import ast
import errno
import inspect
import json
import multiprocessing
import os
import pickle
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import RunPython
from support.checkpoints import (
    MEDIUM,
    UNEVEN,
    Stored,
    Written,
    having,
    kda_block,
    write_checkpoint,
)
from support.fake_driver import INVALID, NOT_SUPPORTED, FakeDriver
from support.files import INDEX_NAME, numbered, shard_bytes, write_index, write_shard
from support.files import Stored as FileStored
from support.headers import (
    GOOD,
    GOOD_SHARD,
    LFS_POINTER,
    entry,
    metadata,
    metadata_and_tensor,
    named,
    one,
    raw,
    span,
    two,
)
from support.refused_calls import Refused, where_refused
from support.told_errors import Told, state

import kda_stream
from kda_stream import (
    KIMI_K3,
    CopyPlan,
    CopyStop,
    ErrorCode,
    KdaConfig,
    KdaStreamError,
    ManifestError,
    PinnedArena,
    RawTensor,
    Span,
    bind_kda_weights,
    check_kda_weights,
    check_payload,
    errors,
    iter_weights,
    open_checkpoint,
    stream_kda_layers,
)
from kda_stream.arrays import as_torch
from kda_stream.cli.diff import diff_paths
from kda_stream.cli.verify import verify_path
from kda_stream.interop.transformers import fill_kda_layers
from kda_stream.testing import Layout
from kda_stream.testing import write_checkpoint as write_layout

TESTS = Path(__file__).parent
PACKAGE = Path(kda_stream.__file__).parent
SHARD = "model.safetensors"
MEDIUM_CONFIG = KdaConfig(hidden=256, heads=4, head_dim=32, conv_kernel=4)


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Told:
    return Told(request)


@pytest.fixture
def one_layer(tmp_path: Path) -> Written:
    """A checkpoint of one KDA layer in one shard."""
    return write_checkpoint(tmp_path / "one", geometry=MEDIUM, layers=1, mtp=False, shards=1)


def written_as(folder: Path, data: bytes) -> Path:
    """A shard of these bytes."""
    path = folder / SHARD
    path.write_bytes(data)
    return path


# --- the path and the file under it ---------------------------------------------------------------


def test_path_missing(told: Told, tmp_path: Path) -> None:
    with told(FileNotFoundError, path=tmp_path / "gone"):
        open_checkpoint(tmp_path / "gone")


def test_path_dangling_link(told: Told, tmp_path: Path) -> None:
    link = tmp_path / SHARD
    link.symlink_to("blobs/gone")
    with told(FileNotFoundError, path=link, expected="a link to a file", got="blobs/gone"):
        open_checkpoint(tmp_path)


def test_path_not_regular(told: Told, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SHARD)
    with told(OSError, path=tmp_path / SHARD, expected="a regular file", got="a named pipe"):
        open_checkpoint(tmp_path)


def test_path_not_readable(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, GOOD_SHARD)
    with told(OSError, path=shard, got=os.strerror(errno.EMFILE)):
        where_refused(lambda: open_checkpoint(shard), Refused("openat", errno.EMFILE))


def test_file_too_large(told: Told, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 1 << 30)
    with told(OSError, path=path, expected="at most 16777216 bytes", got="1073741824 bytes"):
        KdaConfig.from_json(path)


def test_file_changed(told: Told, one_layer: Written) -> None:
    shard = one_layer.shard_of(0, "A_log")
    with open_checkpoint(one_layer.folder) as checkpoint:
        os.truncate(shard, shard.stat().st_size - 1)
        with told(OSError, path=shard, expected=f"{shard.stat().st_size + 1} bytes", got="inode "):
            bind_kda_weights(MEDIUM_CONFIG, 0, checkpoint.layer(0))


# --- a shard's header -----------------------------------------------------------------------------


def test_header_foreign_file(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, LFS_POINTER)
    with told(ValueError, path=shard):
        open_checkpoint(shard)
    assert "Git LFS pointer" in told.error.what
    assert "git lfs pull" in told.error.hint


def test_header_file_too_short(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, b"1234567")
    with told(ValueError, path=shard, expected="at least 8 bytes", got="7 bytes"):
        open_checkpoint(shard)


def test_header_length_zero(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, bytes(4096))
    with told(ValueError, path=shard, expected="a JSON header", got="length 0"):
        open_checkpoint(shard)


def test_header_length_over_file(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, shard_bytes("{}", length=2**40))
    with told(ValueError, path=shard, expected="at most 2 bytes", got=str(2**40)):
        open_checkpoint(shard)


def test_header_length_over_cap(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, GOOD_SHARD)
    with told(ValueError, path=shard, expected="at most 10 bytes", got=" bytes"):
        open_checkpoint(shard, header_bytes_max=10)
    assert "header_bytes_max" in told.error.hint


def test_header_not_utf8(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, raw(b'{"caf\xe9":{}}'))
    with told(ValueError, path=shard, expected="UTF-8", got="0xe9 at 5"):
        open_checkpoint(shard)


def test_header_start(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, raw("\ufeff{}"))
    with told(ValueError, path=shard, expected="'{'", got=r"'\ufeff'"):
        open_checkpoint(shard)


def test_header_padding(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, raw("{}\n"))
    with told(ValueError, path=shard, expected="spaces", got=r"'\n'"):
        open_checkpoint(shard)


def test_header_not_json(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, raw('{"a":}'))
    with told(ValueError, path=shard, got="char 5"):
        open_checkpoint(shard)


def test_header_nesting(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, one("[" * 200_000))
    with told(ValueError, path=shard, expected="at most 3 levels"):
        open_checkpoint(shard)


def test_header_duplicate_key(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, raw(f'{{"a":{GOOD},"b":{span(2, 4)},"a":{GOOD}}}', 4))
    with told(ValueError, path=shard, tensor="a", expected="each name once"):
        open_checkpoint(shard)


def test_header_lone_surrogate(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, named(r'"a\ud800"'))
    with told(ValueError, path=shard, expected="Unicode", got="a\ud800"):
        open_checkpoint(shard)
    assert r"got a\ud800" in str(told.error)


def test_header_metadata(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, metadata_and_tensor('{"format":1}'))
    with told(ValueError, path=shard, expected="string values", got="a number for 'format'"):
        open_checkpoint(shard)


def test_entry_not_object(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, one('["U8",[2],[0,2]]'))
    with told(ValueError, path=shard, tensor="a", expected="an object", got="a list"):
        open_checkpoint(shard)


def test_entry_keys(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, one(GOOD[:-1] + ',"strides":[1]}'))
    with told(ValueError, path=shard, tensor="a", expected="data_offsets", got="strides"):
        open_checkpoint(shard)


def test_dtype_unknown(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, one(entry(dtype='"bfloat16"')))
    with told(ValueError, path=shard, tensor="a", expected="BF16", got="bfloat16"):
        open_checkpoint(shard)


def test_shape_invalid(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, one(entry(shape="[-2,-3]", offsets="[0,6]"), 6))
    with told(ValueError, path=shard, tensor="a", expected="integers from 0", got="[-2, -3]"):
        open_checkpoint(shard)


def test_shape_overflow(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, one(entry(shape=f"[{2**62},4]", offsets="[0,0]"), 0))
    with told(ValueError, path=shard, tensor="a", expected="2^64", got=f"U8 [{2**62}, 4]"):
        open_checkpoint(shard)


def test_shape_partial_byte(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, one(entry('"F4"', "[3]")))
    with told(ValueError, path=shard, tensor="a", expected="of 8 bits", got="12 bits for F4 [3]"):
        open_checkpoint(shard)


def test_offsets_invalid(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, one(entry(offsets="[0,2,2]")))
    with told(ValueError, path=shard, tensor="a", expected="two integers", got="[0, 2, 2]"):
        open_checkpoint(shard)


def test_offsets_size(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, one(entry(shape="[128,128]", offsets="[0,128]"), 128))
    with told(ValueError, path=shard, tensor="a", expected="16384 bytes", got="128 bytes at [0"):
        open_checkpoint(shard)


def test_offsets_overlap(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, two(span(0, 8), span(0, 8), 16))
    with told(ValueError, path=shard, tensor="b", expected="from 8", got="[0, 8]"):
        open_checkpoint(shard)


def test_offsets_hole(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, two(span(0, 4), span(64, 68), 68))
    with told(ValueError, path=shard, tensor="b", expected="from 4", got="[64, 68]"):
        open_checkpoint(shard)


def test_file_short(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, GOOD_SHARD[:-1])
    size = len(GOOD_SHARD)
    with told(ValueError, path=shard, expected=f"{size} bytes", got=f"{size - 1} bytes"):
        open_checkpoint(shard)
    assert "1 byte is missing" in told.error.hint


def test_file_long(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, GOOD_SHARD + b"x")
    size = len(GOOD_SHARD)
    with told(ValueError, path=shard, expected=f"{size} bytes", got=f"{size + 1} bytes"):
        open_checkpoint(shard)


# --- the index and the set of shards --------------------------------------------------------------


def test_index_not_json(told: Told, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_bytes(b"<!DOCTYPE html><html></html>")
    with told(ValueError, path=tmp_path / INDEX_NAME, got="an HTML or XML page"):
        open_checkpoint(tmp_path)


def test_index_weight_map(told: Told, tmp_path: Path) -> None:
    write_index(tmp_path, {})
    with told(ValueError, path=tmp_path / INDEX_NAME, expected="weight_map", got="weight_map"):
        open_checkpoint(tmp_path)


def test_index_shard_name(told: Told, tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "../model.safetensors"})
    with told(
        ValueError,
        path=tmp_path / INDEX_NAME,
        tensor="a",
        expected="a plain file name",
        got='"../model.safetensors"',
    ):
        open_checkpoint(tmp_path)


def test_index_shards_missing(told: Told, tmp_path: Path) -> None:
    there, gone, lost = numbered(3)
    write_shard(tmp_path / there, {"a": b"1"})
    index = write_index(tmp_path, {"a": there, "b": gone, "c": lost})
    with told(FileNotFoundError, path=index, expected="3 shards", got=f"2 of 3 missing: {gone}"):
        open_checkpoint(tmp_path)
    assert told.error.missing == (gone, lost)


def test_index_tensors_missing(told: Told, tmp_path: Path) -> None:
    shard = write_shard(tmp_path / SHARD, {"a": b"1"})
    write_index(tmp_path, {"a": SHARD, "b": SHARD})
    with told(
        ValueError, path=shard, tensor="b", expected="2 tensors of the index", got="1 missing: b"
    ):
        open_checkpoint(tmp_path)


def test_checkpoint_no_shards(told: Told, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with told(ValueError, path=tmp_path, expected="model.safetensors", got="pytorch_model.bin"):
        open_checkpoint(tmp_path)


def test_checkpoint_no_index(told: Told, tmp_path: Path) -> None:
    first, second = numbered(2)
    write_shard(tmp_path / first, {"a": b"1"})
    write_shard(tmp_path / second, {"b": b"2"})
    with told(ValueError, path=tmp_path, expected=INDEX_NAME, got=f"{first}, {second}"):
        open_checkpoint(tmp_path)


def test_checkpoint_two_indexes(told: Told, tmp_path: Path) -> None:
    write_shard(tmp_path / SHARD, {"a": b"1"})
    index = write_index(tmp_path, {"a": SHARD})
    shutil.copy(index, tmp_path / "other.safetensors.index.json")
    with told(ValueError, path=tmp_path, expected="one index", got=f"{INDEX_NAME}, other."):
        open_checkpoint(tmp_path)


def test_checkpoint_problems(told: Told, tmp_path: Path) -> None:
    short, foreign = numbered(2)
    (tmp_path / short).write_bytes(GOOD_SHARD[:-1])
    (tmp_path / foreign).write_bytes(LFS_POINTER)
    write_index(tmp_path, {"a": short, "b": foreign})
    with told(ValueError, path=tmp_path, got=f"{tmp_path / short}: the file is cut short"):
        open_checkpoint(tmp_path)
    codes = [problem.code for problem in told.error.problems]
    assert codes == [ErrorCode.FILE_SHORT, ErrorCode.HEADER_FOREIGN_FILE]


def test_checkpoint_closed(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, GOOD_SHARD)
    with open_checkpoint(shard) as checkpoint:
        pass
    with told(ValueError, path=shard, tensor="a"):
        checkpoint.tensor("a")


def test_tensor_unknown(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, GOOD_SHARD)
    with open_checkpoint(shard) as checkpoint, told(KeyError, path=shard, tensor="b"):
        checkpoint.tensor("b")


# --- layers, config, bind -------------------------------------------------------------------------


def test_layers_none(told: Told, tmp_path: Path) -> None:
    shard = write_shard(tmp_path / SHARD, {"encoder.0.weight": b"1"})
    with (
        open_checkpoint(shard) as checkpoint,
        told(ValueError, path=shard, expected="model.layers.0.", got="encoder.0.weight"),
    ):
        checkpoint.layers()


def test_layers_two_prefixes(told: Told, tmp_path: Path) -> None:
    names = [f"{model}.layers.0.self_attn.A_log" for model in ("draft", "target")]
    shard = write_shard(tmp_path / SHARD, dict.fromkeys(names, b"1"))
    with (
        open_checkpoint(shard) as checkpoint,
        told(ValueError, path=shard, expected="one prefix", got="draft.layers.N. (1 layer) and"),
    ):
        checkpoint.layers()


def test_layer_unknown(told: Told, one_layer: Written) -> None:
    with (
        open_checkpoint(one_layer.folder) as checkpoint,
        told(KeyError, path=one_layer.folder, expected="layer 0, the only one under"),
    ):
        checkpoint.layer(7)
    assert "no layer 7" in told.error.what


def test_layers_missing(told: Told, one_layer: Written) -> None:
    path = one_layer.folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["num_hidden_layers"] = 3
    path.write_text(json.dumps(config))
    with (
        open_checkpoint(one_layer.folder) as checkpoint,
        told(ValueError, path=one_layer.folder, expected="3 layers", got="2 missing: 1, 2"),
    ):
        stream_kda_layers(checkpoint)


def test_config_not_json(told: Told, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size":')
    with told(ValueError, path=path, got="line 1 column 16"):
        KdaConfig.from_json(path)


def test_config_missing(told: Told, one_layer: Written) -> None:
    (one_layer.folder / "config.json").unlink()
    with (
        open_checkpoint(one_layer.folder) as checkpoint,
        told(ValueError, path=one_layer.folder),
    ):
        stream_kda_layers(checkpoint)


def test_config_key_missing(told: Told, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 64}')
    with told(ValueError, path=path, expected="linear_attn_config.num_heads or linear_num_heads"):
        KdaConfig.from_json(path)


def test_config_value(told: Told, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": "64"}')
    with told(ValueError, path=path, expected="a positive integer", got="'64'"):
        KdaConfig.from_json(path)


def test_config_contradiction(told: Told, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 64, "text_config": {"hidden_size": 65}}')
    with told(
        ValueError, path=path, expected="one value", got="hidden_size = 64, text_config.hidden_s"
    ):
        KdaConfig.from_json(path)


def test_bind_refused(told: Told, tmp_path: Path) -> None:
    change = having({"model.layers.0.self_attn.A_log": Stored("BF16", (3,))})
    folder = tmp_path / "checkpoint"
    written = write_checkpoint(folder, layers=1, prefix="model.layers.", change=change)
    with (
        open_checkpoint(folder) as checkpoint,
        told(ValueError, path=written.shard_of(0, "A_log")),
    ):
        bind_kda_weights(KdaConfig.from_json(folder / "config.json"), 0, checkpoint.layer(0))
    (problem,) = told.error.problems
    assert (problem.tensor, problem.shard) == ("self_attn.A_log", told.error.path)
    assert (problem.expected_dtype, problem.expected_shape) == ("F32", (3,))
    assert (problem.stored_dtype, problem.stored_shape) == ("BF16", (3,))
    assert str(problem) in told.error.what


# --- moving bytes ---------------------------------------------------------------------------------


def test_span_refused(told: Told) -> None:
    copy = Span(memoryview(b"1234"), 1, 5, 5, 0, tensor="a", path="/a/shard")
    with told(ValueError, path="/a/shard", tensor="a", expected="within", got="1 rows of 5 bytes"):
        CopyPlan((copy,)).run(memoryview(bytearray(8)))


def test_source_buffer(told: Told) -> None:
    with told(ValueError, expected="C-contiguous", got="ndarray"):
        RawTensor("U8", (2,), np.zeros(4, np.uint8)[::2])


# A copy pauses after each piece, and the shard is cut in the first of these pauses.
CUT_MIDWAY = """
    import json, os, pickle, sys
    from kda_stream import limits
    assert limits.PAUSE_NANOSECONDS > 0
    limits.PAUSE_NANOSECONDS = 0
    from kda_stream import KdaConfig, bind_kda_weights, open_checkpoint
    folder, shard, read = sys.argv[1:]
    config = KdaConfig(hidden=256, heads=4, head_dim=32, conv_kernel=4)
    with open_checkpoint(folder) as checkpoint:
        try:
            bind_kda_weights(config, 0, checkpoint.layer(0), read=read,
                             between=lambda: os.truncate(shard, 4096))
        except OSError as error:
            print(json.dumps(pickle.dumps(error).hex()))
"""


def unpickled(digits: str) -> KdaStreamError:
    error = pickle.loads(bytes.fromhex(digits))
    assert isinstance(error, KdaStreamError)
    return error


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the ways to read are Linux's")


@linux_only
def test_payload_fault(told: Told, one_layer: Written, run_python: RunPython) -> None:
    shard = one_layer.shard_of(0, "A_log")
    error = unpickled(run_python(CUT_MIDWAY, one_layer.folder, shard, "mapped"))
    tensor = error.tensor
    assert tensor in kda_names()
    with told(OSError, path=shard, tensor=tensor, got=os.strerror(errno.EFAULT)):
        raise error


@linux_only
def test_payload_end(told: Told, one_layer: Written, run_python: RunPython) -> None:
    shard = one_layer.shard_of(0, "A_log")
    error = unpickled(run_python(CUT_MIDWAY, one_layer.folder, shard, "positional"))
    tensor = error.tensor
    assert tensor in kda_names()
    with told(OSError, path=shard, tensor=tensor):
        raise error


def kda_names() -> set[str]:
    return {f"self_attn.{leaf}" for leaf in kda_block(UNEVEN)}


def bind_where(one_layer: Written, read: Any, *refused: Refused) -> None:
    """Bind the layer where these system calls are refused."""
    with open_checkpoint(one_layer.folder) as checkpoint:
        source = checkpoint.layer(0)
        where_refused(lambda: bind_kda_weights(MEDIUM_CONFIG, 0, source, read=read), *refused)


def test_payload_open(told: Told, one_layer: Written) -> None:
    shard = one_layer.shard_of(0, "A_log")
    with told(OSError, path=shard, got=os.strerror(errno.EMFILE)):
        bind_where(one_layer, "auto", Refused("openat", errno.EMFILE))
    assert "ulimit -n" in told.error.hint


def test_payload_read(told: Told, one_layer: Written) -> None:
    shard = one_layer.shard_of(0, "A_log")
    first = "self_attn.A_log"
    with told(OSError, path=shard, tensor=first, got=os.strerror(errno.EIO)):
        bind_where(one_layer, "positional", Refused("pread64", errno.EIO))


def problem_of_payload(path: Path) -> KdaStreamError:
    """The one problem that a pass over all payload finds."""
    with open_checkpoint(path) as checkpoint:
        (problem,) = check_payload(checkpoint).problems
    return problem


def test_payload_digest(told: Told, tmp_path: Path) -> None:
    """A shard as it lies in a hub's cache: a link to a file that is named by its digest."""
    blob = tmp_path / f"{'0' * 63}1"
    blob.write_bytes(GOOD_SHARD)
    shard = tmp_path / SHARD
    shard.symlink_to(blob.name)
    right = sha256(GOOD_SHARD).hexdigest()
    with told(ValueError, path=shard, expected=f"sha256 {blob.name}", got=f"sha256 {right}"):
        raise problem_of_payload(shard)


def test_payload_not_finite(told: Told, tmp_path: Path) -> None:
    name, values = "model.layers.0.self_attn.A_log", np.array([0, np.nan, 1], "<f4")
    shard = write_shard(tmp_path / SHARD, {name: FileStored("F32", (3,), values.tobytes())})
    with told(ValueError, path=shard, tensor=name, expected="finite", got="1 such values among 3"):
        raise problem_of_payload(shard)


def test_payload_zeros(told: Told, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.A_log"
    shard = write_shard(tmp_path / SHARD, {name: FileStored("F32", (3,), bytes(12))})
    with told(ValueError, path=shard, tensor=name, expected="not all zero", got="3 such values"):
        raise problem_of_payload(shard)


def test_payload_padding(told: Told) -> None:
    """Kimi-K3 stores more values of A_log than it has heads; those behind must be zeros."""
    config = KdaConfig(hidden=24, heads=3, head_dim=5, conv_kernel=2)
    tensors = {}
    for spec in KIMI_K3.tensors:
        data = bytearray(spec.expected_bytes(config))
        if spec.name.endswith("A_log"):
            data[-1] = 1
        shape = spec.expected_shape(config)
        tensors[spec.name] = RawTensor(spec.dtype.value, shape, bytes(data))
    with told(
        ValueError, tensor="self_attn.A_log", expected="125 zeros behind 3 values", got="1 bytes"
    ):
        bind_kda_weights(config, 0, Held(tensors), family="auto")


class Held:
    """A layer in memory."""

    def __init__(self, tensors: dict[str, RawTensor]) -> None:
        self.get, self.names = tensors.get, lambda: list(tensors)


def verified(folder: Path, code: ErrorCode) -> KdaStreamError:
    (problem,) = [found for found in verify_path(str(folder)).problems if found.code is code]
    return problem


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A sound checkpoint of eight layers whose `text_config` went through `edit`."""
    path = write_layout(folder / "edited") / "config.json"
    config = json.loads(path.read_text())
    edit(config["text_config"])
    path.write_text(json.dumps(config))
    return path


def test_config_layers(told: Told, tmp_path: Path) -> None:
    path = edited(tmp_path, lambda text: text.update(layer_types=["linear_attention"] * 8))
    with told(ValueError, path=path, expected="KDA layers 0-2, 4-6", got="KDA layers 0-7"):
        raise verified(path.parent, ErrorCode.CONFIG_LAYERS)


class HeldElsewhere:
    """What the library asks of a model of another library: its parameters."""

    def __init__(self, **parameters: tuple[str, tuple[int, ...]]) -> None:
        self._parameters = parameters

    def named_parameters(self) -> Iterator[tuple[str, SimpleNamespace]]:
        for name, (dtype, shape) in self._parameters.items():
            parameter = SimpleNamespace(dtype=dtype, shape=shape, is_meta=False)
            yield f"model.layers.0.self_attn.{name}", parameter


def test_model_differs(told: Told, one_layer: Written) -> None:
    model: Any = HeldElsewhere(A_log=("torch.bfloat16", (3,)))
    with (
        open_checkpoint(one_layer.folder) as checkpoint,
        told(
            ValueError,
            path=one_layer.folder,
            expected="stored: GLM5_NEXT",
            got="a_log is bfloat16, stored F32",
        ),
    ):
        fill_kda_layers(model, checkpoint)


def test_layers_stray(told: Told, tmp_path: Path) -> None:
    path = edited(tmp_path, lambda text: text.update(num_nextn_predict_layers=0))
    with told(ValueError, path=path.parent, expected="8 decoder layers and 0 MTP", got="layers 8"):
        raise verified(path.parent, ErrorCode.LAYERS_STRAY)


def test_layers_gap(told: Told, tmp_path: Path) -> None:
    tensors = {
        f"layers.{number}.self_attn.A_log": FileStored("U8", (1,), b"x") for number in (0, 2)
    }
    shard = write_shard(tmp_path / SHARD, tensors)
    with told(
        ValueError, path=shard, expected="every number up to 2", got="1 missing, 1 the first"
    ):
        raise verified(shard, ErrorCode.LAYERS_GAP)


def test_diff(told: Told, tmp_path: Path) -> None:
    one = write_layout(tmp_path / "one")
    other = write_layout(tmp_path / "other", Layout(dtypes={"A_log": "F64"}))
    problem = diff_paths(str(one), str(other)).problems[0]
    name = "model.language_model.layers.0.self_attn.A_log"
    shard = other / "model-00001-of-00003.safetensors"
    with told(ValueError, path=shard, tensor=name, expected="F32 [4]", got="F64 [4]"):
        raise problem


def test_manifest_invalid(told: Told, one_layer: Written) -> None:
    manifest = one_layer.folder / "manifest.json"
    manifest.write_text('{"format":"kda_stream.manifest","version":2}')
    with told(ValueError, path=manifest, expected="version 1", got="version 2"):
        verify_path(str(one_layer.folder), manifest=str(manifest))


def test_manifest_tensors(told: Told, tmp_path: Path) -> None:
    shard, manifest = written_as(tmp_path, GOOD_SHARD), tmp_path / "manifest.json"
    verify_path(str(shard), write_manifest=str(manifest))
    document = json.loads(manifest.read_text())
    document["tensors"]["lost"] = document["tensors"]["a"]
    manifest.write_text(json.dumps(document))
    problems = verify_path(str(shard), payload=True, manifest=str(manifest)).problems
    (problem,) = [problem for problem in problems if isinstance(problem, ManifestError)]
    with told(ValueError, path=manifest, expected="2 tensors", got="1: lost"):
        raise problem


def test_path_not_writable(told: Told, one_layer: Written) -> None:
    manifest = one_layer.folder / "gone" / "manifest.json"
    with told(OSError, path=manifest, got=os.strerror(errno.ENOENT)):
        verify_path(str(one_layer.folder), write_manifest=str(manifest))


def test_map_refused(told: Told, one_layer: Written) -> None:
    shard = one_layer.shard_of(0, "A_log")
    of_a_file = {2: (3, 1), 3: (3, 1)}  # PROT_READ alone, MAP_SHARED
    with told(OSError, path=shard, got=os.strerror(errno.ENOMEM)):
        bind_where(one_layer, "mapped", Refused("mmap", errno.ENOMEM, of_a_file))
    assert "ulimit -v" in told.error.hint


def test_populate_unsupported(told: Told, one_layer: Written) -> None:
    shard = one_layer.shard_of(0, "A_log")
    first = "self_attn.A_log"
    populate_read = {2: (0xFF, 22)}
    with told(OSError, path=shard, tensor=first, got=os.strerror(errno.EINVAL)):
        bind_where(one_layer, "mapped", Refused("madvise", errno.EINVAL, populate_read))
    assert 'read="positional"' in told.error.hint


def test_guard_refused(told: Told, one_layer: Written) -> None:
    shard = one_layer.shard_of(0, "A_log")
    first = "self_attn.A_log"
    of_sigbus = {0: (0xFF, 7)}
    with told(OSError, path=shard, tensor=first, got=os.strerror(errno.EPERM)):
        bind_where(one_layer, "mapped", Refused("rt_sigaction", errno.EPERM, of_sigbus))
    assert 'read="positional"' in told.error.hint


def test_direct_refused(told: Told, one_layer: Written) -> None:
    shard = one_layer.shard_of(0, "A_log")
    flag = getattr(os, "O_DIRECT", 0)
    with told(OSError, path=shard, got=os.strerror(errno.EINVAL)):
        bind_where(one_layer, "direct", Refused("openat", errno.EINVAL, {2: (flag, flag)}))
    assert 'read="auto"' in told.error.hint


def test_memory_refused(told: Told) -> None:
    with told(MemoryError, expected=f"{1 << 60} bytes", got=os.strerror(errno.ENOMEM)):
        PinnedArena(1 << 60, lock="off")


def test_lock_refused(told: Told) -> None:
    with told(MemoryError, expected=" bytes", got="locked already"):
        where_refused(lambda: PinnedArena(4096, lock="require"), Refused("mlock2", errno.ENOMEM))
    assert "ulimit -l" in told.error.hint


def test_register_refused(told: Told) -> None:
    driver = FakeDriver(answers=[NOT_SUPPORTED])
    with told(MemoryError, expected="4096 bytes registered", got="not supported (801)"):
        PinnedArena(4096, lock="require", register=driver)
    assert "pin_memory" in told.error.hint


def test_unregister_refused(told: Told) -> None:
    arena = PinnedArena(4096, lock="off", register=FakeDriver(unanswers=[INVALID]))
    with told(MemoryError, expected="the answer 0", got="invalid value (1)"):
        arena.close()


def test_slot_too_small(told: Told, one_layer: Written) -> None:
    with (
        open_checkpoint(one_layer.folder) as checkpoint,
        PinnedArena(4096, lock="off") as arena,
        told(RuntimeError, expected=" bytes", got="4096 bytes"),
    ):
        bind_kda_weights(MEDIUM_CONFIG, 0, checkpoint.layer(0), into=arena)


def test_slot_not_free(told: Told) -> None:
    with PinnedArena(8, lock="off") as arena:
        lease = arena.claim().lend()
        with told(RuntimeError, expected="a free slot among 1", got="lent"):
            arena.claim()
        lease.release()


def test_slot_not_claimed(told: Told) -> None:
    with (
        PinnedArena(8, lock="off") as arena,
        told(RuntimeError, expected="being filled", got="a slot that is free"),
    ):
        arena.slots[0].memory()


def test_arena_closed(told: Told) -> None:
    with PinnedArena(8, lock="off") as arena:
        pass
    with told(ValueError):
        arena.claim()


def test_memory_given_back(told: Told) -> None:
    with PinnedArena(8, lock="off") as arena:
        lease = arena.claim().lend()
        lease.release()
        with told(ValueError):
            lease.view(0, 8)


def test_memory_in_use(told: Told, tmp_path: Path) -> None:
    shard = written_as(tmp_path, GOOD_SHARD)
    checkpoint = open_checkpoint(shard)
    array = np.frombuffer(checkpoint["a"].data, np.uint8)
    with told(BufferError, path=tmp_path, got=SHARD):
        checkpoint.close()
    del array


def test_stream_row_too_large(told: Told, tmp_path: Path) -> None:
    shard = write_shard(tmp_path / SHARD, {"wide": FileStored("U8", (2, 300), bytes(600))})
    with (
        open_checkpoint(shard) as checkpoint,
        told(RuntimeError, path=shard, tensor="wide", expected="at most 200", got="rows of 300"),
    ):
        list(iter_weights(checkpoint, large="pieces", slot_bytes=200))


def test_stream_misuse(told: Told, one_layer: Written) -> None:
    with (
        open_checkpoint(one_layer.folder) as checkpoint,
        stream_kda_layers(checkpoint) as stream,
        told(RuntimeError, path=one_layer.folder),
    ):
        list(stream)


def test_stream_stopped(told: Told) -> None:
    stop = CopyStop()
    stop.set()
    copy = Span(memoryview(b"1234"), 1, 4, 4, 0)
    with told(ValueError):
        CopyPlan((copy,)).run(memoryview(bytearray(4)), stop=stop)


def test_stream_no_thread(told: Told, one_layer: Written) -> None:
    refused = [Refused(call, errno.EAGAIN) for call in ("clone", "clone3")]
    with open_checkpoint(one_layer.folder) as checkpoint:
        stream = stream_kda_layers(checkpoint)
        with told(RuntimeError, got="thread"):
            where_refused(stream.__enter__, *refused)


def test_argument(told: Told, tmp_path: Path) -> None:
    verify: Any = "some"
    with told(ValueError, expected="all or needed", got="'some'"):
        open_checkpoint(tmp_path, verify=verify)


# --- the build and the machine --------------------------------------------------------------------

RAISES_AT_IMPORT = """
    import json, pickle, sys
    {before}
    try:
        import kda_stream
        kda_stream.PinnedArena(8)
    except ImportError as error:
        sys.byteorder = "little"  # a class can be pickled where it can be imported
        print(json.dumps(pickle.dumps(error).hex()))
"""


def test_not_installed(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with told(ImportError, tensor="conv", got="torch"):
        as_torch("BF16", (2,), memoryview(bytes(4)), name="conv")


def test_not_built(told: Told, tmp_path: Path, run_python: RunPython) -> None:
    """A copy of the package without its compiled part; -S keeps the installed one out of sight."""
    copy = tmp_path / "tree" / "kda_stream"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    script = RAISES_AT_IMPORT.format(before="sys.path.insert(0, sys.argv[1])")
    error = unpickled(run_python(script, copy.parent, flags=("-S",)))
    with told(ImportError, path=copy, expected="kda_stream._native", got="_native"):
        raise error
    assert "pip install" in told.error.hint


def test_platform(told: Told, run_python: RunPython) -> None:
    script = RAISES_AT_IMPORT.format(before='sys.byteorder = "big"')
    with told(ImportError, expected="little", got="big"):
        raise unpickled(run_python(script))


# --- every code -----------------------------------------------------------------------------------


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            yield node


def test_each_code_has_one_test_that_is_named_after_it() -> None:
    """In this file or in any other; it takes `told`, or names the code itself."""
    names = {f"test_{code.name.lower()}": code for code in ErrorCode}
    found: Counter[str] = Counter()
    for path in TESTS.rglob("test_*.py"):
        for function in functions(path):
            code = names.get(function.name)
            if code is not None:
                found[function.name] += 1
                takes = {argument.arg for argument in function.args.args}
                assert "told" in takes or code.name in ast.unparse(function), function.name
    assert {name: found[name] for name in names if found[name] != 1} == {}


def sources() -> Iterator[tuple[str, ast.Module]]:
    """(path in the package, syntax tree) of each module, but of `errors` and the room `testing`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name != "errors.py" and not name.startswith("testing/"):
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def codes_in(node: ast.AST) -> Iterator[str]:
    """The codes that an expression may be: `ErrorCode.X`, or one of two by a condition."""
    if isinstance(node, ast.IfExp):
        yield from codes_in(node.body)
        yield from codes_in(node.orelse)
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ErrorCode":
        yield node.attr


def made_with(tree: ast.AST) -> Iterator[str]:
    """The codes that stand first in a call or in a row of a table: those that errors get."""
    for node in ast.walk(tree):
        first: list[ast.expr] = []
        if isinstance(node, ast.Call):
            first = node.args[:1]
        elif isinstance(node, ast.Tuple):
            first = node.elts[:1]
        for expression in first:
            yield from codes_in(expression)


def test_each_code_is_made_into_an_error_somewhere() -> None:
    made = {code for _, tree in sources() for code in made_with(tree)}
    assert sorted({code.name for code in ErrorCode} - made) == []


def test_the_search_for_codes_leaves_out_those_that_are_only_compared() -> None:
    text = """
        raise HeaderError(ErrorCode.A, "what")
        raise entry_error(ErrorCode.B if hole else ErrorCode.C, "what")
        TABLE = {"KDA_FILE_END": (ErrorCode.D, "what")}
        if error.code is ErrorCode.E or error.code in {ErrorCode.F}: pass
    """
    assert set(made_with(ast.parse(inspect.cleandoc(text)))) == {"A", "B", "C", "D"}


def test_each_error_in_the_sources_is_made_with_a_hint() -> None:
    without = set()
    for name, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id not in ERROR_CLASSES:
                continue
            hints = [keyword.value for keyword in node.keywords if keyword.arg == "hint"]
            if not hints or ast.unparse(hints[0]) == "None":
                without.add((name, ast.unparse(node.args[1])))
    assert without == set()


ERROR_CLASSES = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, KdaStreamError)
}


def test_errors_come_back_from_a_process_pool(tmp_path: Path) -> None:
    """Of several classes; the one with problems brings them along."""
    short, foreign = numbered(2)
    (tmp_path / short).write_bytes(GOOD_SHARD[:-1])
    (tmp_path / foreign).write_bytes(LFS_POINTER)
    write_index(tmp_path, {"a": short, "b": foreign})
    tasks: list[tuple[Callable[..., object], tuple[object, ...]]] = [
        (open_checkpoint, (tmp_path / "gone",)),
        (open_checkpoint, (tmp_path,)),
        (open_checkpoint, (tmp_path / short,)),
        (KdaConfig, (64, 4, 16, 0)),
        (PinnedArena, (1 << 60,)),
        (bind_kda_weights, (KdaConfig(64, 4, 16, 4), 0, None)),
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        futures = [pool.submit(task, *arguments) for task, arguments in tasks]
        came = [future.exception(timeout=60) for future in futures]
    for error, (task, arguments) in zip(came, tasks, strict=True):
        with pytest.raises(KdaStreamError) as here:
            task(*arguments)
        assert error is not None
        assert state(error) == state(here.value)
    assert [len(getattr(error, "problems", ())) for error in came] == [0, 2, 0, 0, 0, 0]


# --- names from files -----------------------------------------------------------------------------

# None of these characters may reach a terminal or a log as it is. A name is printed by its start.
NASTY = {
    "a control character": "a\x01b",
    "a NUL": "a\0b",
    "line breaks": "a\nb\r\nc\u2028d\x85e",
    "an escape sequence": "\x1b[2J\x1b]0;title\x07",
    "an escape sequence in one byte": "\x9b31m",
    "DEL": "\x7f",
    "a right-to-left override": "a\u202egnp.b",
    "isolates": "a\u2066b\u2069",
    "zero-width characters": "a\u200bb\u200cc\u200dd\u2060e\ufefff",
    "fillers and variation selectors": "a\u3164b\u115fc\ufe0fd\U000e0101e\u034ff",
    "a soft hyphen and a tag": "a\u00adb\U000e0041",
    "quotes and backslashes": "a'b\"c`d\\n",
    "no-break spaces": "a\u00a0b\u3000c",
    "10 MB": "a\n" * 5_000_000,
}
UNSEEN = {c for name in NASTY.values() for c in name if not " " <= c <= "~"}
LINE_CHARS_MAX = 25_000  # five parts, of each at most 4,000 characters before they are escaped


def assert_safe(text: str) -> None:
    assert not UNSEEN.intersection(text), ascii(text[:500])
    assert text.isprintable()
    assert len(text) <= LINE_CHARS_MAX
    text.encode("utf-8")


def escaped(name: str) -> str:
    """The beginning of a name as it must be printed."""
    return "".join(c if " " <= c <= "~" else ascii(c)[1:-1] for c in name[:100])


def texts_of(error: KdaStreamError) -> list[str]:
    """All that an error prints, and the errors in it."""
    texts = [str(error), error.finding, repr(error)]
    for problem in getattr(error, "problems", ()):
        texts += texts_of(problem) if isinstance(problem, KdaStreamError) else [str(problem)]
    return texts


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def refusal_of(act: Callable[..., object], *arguments: object, **options: object) -> list[str]:
    with pytest.raises(KdaStreamError) as caught:
        act(*arguments, **options)
    return texts_of(caught.value)


# By where a name is printed: what is printed of it.


def in_a_header(folder: Path, name: str) -> Iterator[str]:
    key, other = quoted(name), quoted(name + "2")
    for data in (
        raw(f"{{{key}:{entry(offsets='[0]')}}}", 2),
        raw(f"{{{key}:{GOOD},{key}:{GOOD}}}", 2),
        raw(f"{{{key}:{span(0, 8)},{other}:{span(0, 8)}}}", 16),
        one(GOOD[:-1] + f",{key}:0}}"),
        one(entry(dtype=key)),
        one(entry(shape=f"[{key}]")),
        metadata(f"{{{key}:0}}"),
        raw(f'{{{key}:{GOOD},"lone":{quoted(name)[:-1]}\\ud800"}}', 2),
    ):
        yield from refusal_of(open_checkpoint, written_as(folder, data))


def in_an_index(folder: Path, name: str) -> Iterator[str]:
    write_shard(folder / SHARD, {"a": b"1"})
    for text in (
        f"{{{quoted(name)}:{{}}}}",
        f'{{"weight_map":{{{quoted(name)}:"../x"}}}}',
        f'{{"weight_map":{{"a":{quoted(name + "/")}}}}}',
        f'{{"weight_map":{{{quoted(name)}:"a",{quoted(name)}:"a"}}}}',
        f'{{"weight_map":{{{quoted(name)}:"{SHARD}"}}}}',
        quoted(name),
    ):
        (folder / INDEX_NAME).write_text(text, encoding="utf-8")
        yield from refusal_of(open_checkpoint, folder)


def in_notes(folder: Path, name: str) -> Iterator[str]:
    write_shard(folder / SHARD, {"a": b"1", name: b"2"})
    write_index(folder, {"a": SHARD})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.report.notes
        yield from checkpoint.report.notes
        yield from refusal_of(checkpoint.tensor, name)
        yield from refusal_of(checkpoint.info, name)


def in_names_of_layers(folder: Path, name: str) -> Iterator[str]:
    for tensors in (
        [name],
        [f"{name}.layers.0.self_attn.A_log", f"{name}2.layers.0.self_attn.A_log"],
    ):
        path = write_shard(folder / SHARD, dict.fromkeys(tensors, b"1"))
        with open_checkpoint(path) as checkpoint:
            yield from refusal_of(checkpoint.layers)
    path = write_shard(folder / SHARD, {f"{name}.layers.0.self_attn.A_log": b"1"})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.layer_prefix == f"{name}.layers."
        yield repr(checkpoint.layer(0))
        yield repr(checkpoint.layer(0).get("self_attn.A_log"))
        yield from refusal_of(checkpoint.layer, 7)
        yield from refusal_of(checkpoint.layer, name)
        yield from refusal_of(bind_kda_weights, UNEVEN_CONFIG, 7, checkpoint.layer(0))


UNEVEN_CONFIG = KdaConfig(hidden=24, heads=3, head_dim=5, conv_kernel=3)


def in_a_refused_layer(folder: Path, name: str) -> Iterator[str]:
    """A name, a dtype and a shape that no KDA block has, in one layer and in many."""
    names = [
        f"layers.{layer}.self_attn.{leaf}" for layer in (0, 1) for leaf in (f"{name}.s", "dt_bias")
    ]
    header = {
        full: {"dtype": "U8", "shape": [1] * 20_000, "data_offsets": [at, at + 1]}
        for at, full in enumerate(names)
    }
    path = written_as(folder, shard_bytes(header, bytes(len(names))))
    with open_checkpoint(path) as checkpoint:
        layer = checkpoint.layer(0)
        yield repr(layer.get("self_attn.dt_bias"))
        yield from refusal_of(bind_kda_weights, UNEVEN_CONFIG, 0, layer)
        yield from refusal_of(check_kda_weights, UNEVEN_CONFIG, 0, layer)
        yield from refusal_of(stream_kda_layers, checkpoint, config=UNEVEN_CONFIG)


def in_a_source_of_ones_own(_: Path, name: str) -> Iterator[str]:
    tensor = RawTensor(name, (1,) * 20_000, b"1")
    yield repr(tensor)

    class Source:
        def names(self) -> list[str]:
            return ["self_attn.A_log", f"self_attn.{name}"]

        def get(self, _: str) -> RawTensor:
            return tensor

    yield from refusal_of(bind_kda_weights, UNEVEN_CONFIG, 0, Source())
    copy = Span(memoryview(b"1"), 1, 2, 2, 0, tensor=name, path=name)
    yield from refusal_of(CopyPlan((copy,)).run, memoryview(bytearray(2)))


def in_a_config(folder: Path, name: str) -> Iterator[str]:
    path = folder / "config.json"
    for value in (quoted(name), f"[{quoted(name)}]", f"{{{quoted(name)}:1}}"):
        path.write_text(f'{{"hidden_size":{value}}}', encoding="utf-8")
        yield from refusal_of(KdaConfig.from_json, path)
    yield from refusal_of(KdaConfig, name, 1, 1, 1)


def in_a_manifest(folder: Path, name: str) -> Iterator[str]:
    shard, manifest = write_shard(folder / SHARD, {name: b"1"}), folder / "manifest.json"
    yield from verify_path(str(shard), write_manifest=str(manifest)).lines
    check = partial(verify_path, str(shard), manifest=str(manifest))
    document = json.loads(manifest.read_text())
    entry = document["tensors"].pop(name)
    for tensors in ({name: {**entry, "shape": [name]}}, {name: {**entry, "sha256": name}}):
        manifest.write_text(json.dumps({**document, "tensors": tensors}))
        yield from refusal_of(check)
    for tensors in ({name + "2": entry}, {name: {**entry, "dtype": name}}):
        manifest.write_text(json.dumps({**document, "tensors": tensors}))
        result = check()
        yield from result.lines
        for problem in result.problems:
            yield from texts_of(problem)


def in_arguments(folder: Path, name: str) -> Iterator[str]:
    yield from refusal_of(open_checkpoint, folder, verify=name)
    yield from refusal_of(bind_kda_weights, UNEVEN_CONFIG, 0, None, read=name)
    yield from refusal_of(bind_kda_weights, UNEVEN_CONFIG, 0, None, alignment=name)
    yield from refusal_of(PinnedArena, 8, lock=name)
    yield from refusal_of(PinnedArena, name)


PLACES = [
    *(in_a_header, in_an_index, in_notes, in_names_of_layers, in_a_refused_layer),
    *(in_a_source_of_ones_own, in_a_config, in_a_manifest, in_arguments),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", NASTY.values(), ids=NASTY)
def test_a_name_is_printed_escaped_and_not_too_long(
    place: Callable[[Path, str], Iterator[str]], name: str, tmp_path: Path
) -> None:
    printed = list(place(tmp_path, name))
    begins = (escaped(name), repr(name[:100])[1:-1])
    assert any(begin in text for text in printed for begin in begins)
    for text in printed:
        assert_safe(text)


# What the file system takes as a name, with a byte that is no UTF-8.
FILE_NAMES = {
    **{what: name for what, name in NASTY.items() if len(name) < 100 and "\0" not in name},
    "a byte that is no UTF-8": "a\udcffb",
}


@pytest.mark.parametrize("name", FILE_NAMES.values(), ids=FILE_NAMES)
def test_a_file_name_is_printed_escaped(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    printed = refusal_of(open_checkpoint, folder)
    folder.mkdir()
    printed += refusal_of(open_checkpoint, folder)
    bad, other = folder / f"{name}1.safetensors", folder / f"{name}2.safetensors"
    bad.write_bytes(LFS_POINTER)
    printed += refusal_of(open_checkpoint, folder)
    write_shard(other, {"a": b"1", name if name.isascii() else "b": b"2"})
    printed += refusal_of(open_checkpoint, folder)
    write_shard(folder / SHARD, {"a": b"1"})
    index = write_index(folder, {"a": SHARD})
    with open_checkpoint(folder) as checkpoint:
        printed += [repr(checkpoint), *checkpoint.report.notes]
        array = np.frombuffer(checkpoint["a"].data, np.uint8)
        printed += refusal_of(checkpoint.close)
        del array
        printed.append(repr(checkpoint))
    os.truncate(index, 3)
    printed += refusal_of(open_checkpoint, folder)
    assert sum(escaped(name) in text for text in printed) > 5
    for text in printed:
        assert_safe(text)


HUGE = 10**5000


@pytest.mark.parametrize(
    "act",
    [
        lambda _: KdaConfig(HUGE, 1, 1, 1),
        lambda _: KdaConfig.from_json({"hidden_size": [HUGE]}),
        lambda _: PinnedArena(8, slots=HUGE),
        lambda _: PinnedArena(-HUGE),
        lambda folder: open_checkpoint(folder).layer(HUGE),
    ],
    ids=["a count", "a list of counts", "slots", "bytes", "a layer"],
)
def test_an_int_of_more_digits_than_python_prints_is_told_as_an_error_of_its_own(
    act: Callable[[Path], object], one_layer: Written
) -> None:
    for text in refusal_of(act, one_layer.folder):
        assert_safe(text)
