"""The pass over all payload: every byte once, digests as hashlib gives them, values looked at."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Geometry
from support.checkpoints import Stored as Weights
from support.families import GLM5_NEXT, KIMI_K3, write_family
from support.files import Stored, shard_of, u8, write_index, write_shard, write_sparse_shard

from kda_stream import (
    ClosedError,
    InUseError,
    KdaConfig,
    PayloadDigestError,
    PayloadError,
    PayloadValueError,
    bind_kda_weights,
    check_payload,
    open_checkpoint,
)
from kda_stream.errors import ErrorCode as Code
from kda_stream.limits import CHECK_PIECE_BYTES
from kda_stream.testing import Layout, payload, write_checkpoint
from kda_stream.values import KdaValues

RunPython = Callable[..., Any]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc")
LAYOUT = Layout()
KDA_TENSORS = 15 * len(LAYOUT.kda_layers)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `Layout()`; not to be changed."""
    return write_checkpoint(tmp_path_factory.mktemp("sound"), LAYOUT)


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copied"))


def as_in_a_hubs_cache(folder: Path, cache: Path) -> Path:
    """The folder as links into blobs, each named by its sha256."""
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def overwrite(folder: Path, name: str, data: bytes, at: int = 0) -> Path:
    """Write `data` over bytes of the tensor `name`, from the byte `at` of it on."""
    with open_checkpoint(folder) as checkpoint:
        shard, info = checkpoint.shard_of(name), checkpoint.info(name)
        path, begin = Path(shard.path), shard.header.payload_begin + info.begin + at
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(data)
    return path


def kda(leaf: str, layer: int = LAYOUT.kda_layers[0]) -> str:
    return f"{LAYOUT.prefix}{layer}.self_attn.{leaf}"


# digests ------------------------------------------------------------------------------------------


def test_every_tensor_has_the_digest_that_hashlib_gives_its_bytes(sound: Path) -> None:
    with open_checkpoint(sound) as checkpoint:
        report = check_payload(checkpoint, digests=True)
    expected = {t.name: t for t in LAYOUT.tensors()}
    assert report.tensors.keys() == expected.keys()
    for name, entry in report.tensors.items():
        tensor = expected[name]
        digest = hashlib.sha256(payload(name, 0, tensor.nbytes)).hexdigest()
        assert (entry.dtype, entry.shape, entry.sha256) == (tensor.dtype, tensor.shape, digest)
    assert report.problems == ()


def test_every_byte_of_every_shard_is_read_once(sound: Path) -> None:
    seen: list[tuple[int, int]] = []
    with open_checkpoint(sound) as checkpoint:
        report = check_payload(checkpoint, progress=lambda *so_far: seen.append(so_far))
    file_bytes = sum(path.stat().st_size for path in sound.glob("*.safetensors"))
    assert report.bytes == file_bytes
    assert seen[-1] == (file_bytes, file_bytes)
    assert seen == sorted(seen)
    assert report.tensors == {}
    assert report.kda_tensors == KDA_TENSORS


@pytest.mark.parametrize("before_bytes", [0, 1, 4097])
def test_a_tensor_longer_than_a_piece_is_digested_whole(tmp_path: Path, before_bytes: int) -> None:
    """At any offset in the file, with small and empty tensors around it."""
    long = os.urandom(2 * CHECK_PIECE_BYTES + 5)
    tensors = {"empty": b"", "before": bytes(before_bytes), "long": long, "": b"after"}
    path = write_shard(tmp_path / "model.safetensors", tensors)
    with open_checkpoint(path) as checkpoint:
        report = check_payload(checkpoint, digests=True)
    digests = {name: entry.sha256 for name, entry in report.tensors.items()}
    assert digests == {name: hashlib.sha256(data).hexdigest() for name, data in tensors.items()}
    assert report.bytes == path.stat().st_size


def test_the_index_says_which_of_two_tensors_of_one_name_is_digested(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", {"x": b"other", "y": b"yy"})
    write_shard(tmp_path / "b.safetensors", {"x": b"xx", "z": b"zz"})
    places = {"x": "b.safetensors", "y": "a.safetensors"}
    write_index(tmp_path, places)
    with open_checkpoint(tmp_path) as checkpoint:
        report = check_payload(checkpoint, digests=True)
    assert {name: entry.sha256 for name, entry in report.tensors.items()} == {
        "x": hashlib.sha256(b"xx").hexdigest(),
        "y": hashlib.sha256(b"yy").hexdigest(),
    }


def test_a_shard_without_tensors_is_read_too(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "model.safetensors", {})
    with open_checkpoint(path) as checkpoint:
        assert check_payload(checkpoint, digests=True).bytes == path.stat().st_size


# a hub's cache ------------------------------------------------------------------------------------


def test_files_of_a_hubs_cache_are_compared_with_their_names(sound: Path, tmp_path: Path) -> None:
    with open_checkpoint(as_in_a_hubs_cache(sound, tmp_path)) as checkpoint:
        report = check_payload(checkpoint)
    assert report.files_named_by_digest == LAYOUT.shards
    assert report.problems == ()


def test_a_bit_that_flipped_in_a_hubs_cache_is_found_wherever_it_is(
    sound: Path, tmp_path: Path
) -> None:
    snapshot = as_in_a_hubs_cache(sound, tmp_path)
    path = overwrite(
        snapshot, "lm_head.weight", b"\x01" if payload("lm_head.weight", 0, 1) == b"\0" else b"\0"
    )
    with open_checkpoint(snapshot) as checkpoint:
        (problem,) = check_payload(checkpoint).problems
    assert isinstance(problem, PayloadDigestError)
    assert problem.code is Code.PAYLOAD_DIGEST
    assert problem.path == os.fspath(path)
    blob = path.resolve()
    assert problem.expected == f"sha256 {blob.name}"
    assert problem.got == f"sha256 {hashlib.sha256(blob.read_bytes()).hexdigest()}"


def test_a_name_that_is_no_digest_is_compared_with_nothing(sound: Path) -> None:
    with open_checkpoint(sound) as checkpoint:
        assert check_payload(checkpoint).files_named_by_digest == 0


# values -------------------------------------------------------------------------------------------

BF16_NAN, BF16_INFINITY = b"\xc1\x7f", b"\x80\xff"
F32_NAN, F32_INFINITY = struct.pack("<f", float("nan")), struct.pack("<f", float("-inf"))


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        ("q_proj.weight", BF16_NAN),
        ("q_proj.weight", BF16_INFINITY),
        ("k_conv1d.weight", BF16_NAN),
        ("A_log", F32_NAN),
        ("dt_bias", F32_INFINITY),
    ],
)
@pytest.mark.parametrize("number", [0, -1])
def test_nan_and_infinity_in_a_kda_tensor_are_reported(
    copied: Path, leaf: str, value: bytes, number: int
) -> None:
    tensor = next(t for t in LAYOUT.tensors() if t.name == kda(leaf))
    path = overwrite(copied, tensor.name, value, number * len(value) % tensor.nbytes)
    with open_checkpoint(copied) as checkpoint:
        (problem,) = check_payload(checkpoint).problems
    assert isinstance(problem, PayloadValueError)
    assert problem.code is Code.PAYLOAD_NOT_FINITE
    assert (problem.path, problem.tensor) == (os.fspath(path), tensor.name)
    count = tensor.nbytes // len(value)
    assert problem.got == f"1 such values among {count}"


@pytest.mark.parametrize("zero", [b"\0\0", b"\0\x80"], ids=["zeros", "minus zeros"])
@pytest.mark.parametrize("leaf", ["o_norm.weight", "v_proj.weight"])
def test_a_kda_tensor_of_zeros_alone_is_reported(copied: Path, leaf: str, zero: bytes) -> None:
    tensor = next(t for t in LAYOUT.tensors() if t.name == kda(leaf))
    overwrite(copied, tensor.name, zero * (tensor.nbytes // 2))
    with open_checkpoint(copied) as checkpoint:
        (problem,) = check_payload(checkpoint).problems
    assert isinstance(problem, PayloadValueError)
    assert problem.code is Code.PAYLOAD_ZEROS
    assert problem.tensor == tensor.name


def test_one_value_that_is_not_zero_is_enough(copied: Path) -> None:
    tensor = next(t for t in LAYOUT.tensors() if t.name == kda("dt_bias"))
    overwrite(copied, tensor.name, bytes(tensor.nbytes - 4) + struct.pack("<f", 1e-45))
    with open_checkpoint(copied) as checkpoint:
        assert check_payload(checkpoint).problems == ()


def test_the_largest_finite_values_are_no_finding(copied: Path) -> None:
    overwrite(copied, kda("o_norm.weight"), b"\x7f\x7f\x7f\xff")
    overwrite(copied, kda("A_log"), struct.pack("<ff", 3.4028234e38, -3.4028234e38))
    with open_checkpoint(copied) as checkpoint:
        assert check_payload(checkpoint).problems == ()


def test_values_of_other_tensors_are_not_looked_at(copied: Path) -> None:
    dsa = next(i for i, kind in enumerate(LAYOUT.kinds) if i not in LAYOUT.kda_layers)
    overwrite(copied, f"{LAYOUT.prefix}{dsa}.self_attn.kv_b_proj.weight", BF16_NAN)
    overwrite(copied, "lm_head.weight", BF16_NAN)
    with open_checkpoint(copied) as checkpoint:
        assert check_payload(checkpoint).problems == ()


@pytest.mark.parametrize(
    ("dtype", "one", "nan"),
    [("BF16", b"\x80\x3f", BF16_NAN), ("F32", b"\0\0\x80\x3f", F32_NAN)],
)
def test_a_kda_tensor_is_judged_in_the_dtype_it_is_stored_in(
    tmp_path: Path, dtype: str, one: bytes, nan: bytes
) -> None:
    """Also where that is wrong for a KDA block, and at an odd address."""
    tensors = {
        "odd": Stored("U8", [1], b"\0"),
        "layers.0.self_attn.A_log": Stored(dtype, [3], 3 * one),
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(shard_of(tensors))
    with open_checkpoint(path) as checkpoint:
        report = check_payload(checkpoint)
    assert (report.kda_tensors, report.problems) == (1, ())
    overwrite(path, "layers.0.self_attn.A_log", nan, len(nan))
    with open_checkpoint(path) as checkpoint:
        (problem,) = check_payload(checkpoint).problems
    assert problem.code is Code.PAYLOAD_NOT_FINITE


# padding ------------------------------------------------------------------------------------------

HEADS = 3
SMALL = Geometry(24, HEADS, 5, 3)
PADDED = "language_model.model.layers.1.self_attn.A_log"


def finite(tensors: dict[str, Weights]) -> None:
    """Clear a bit of every exponent."""
    for name, tensor in tensors.items():
        data = bytearray(tensor.bytes_of(name))
        data[1::2] = bytes(byte & 0b1011_1111 for byte in data[1::2])
        tensors[name] = replace(tensor, data=bytes(data))


@pytest.fixture
def kimi_k3(tmp_path: Path) -> Path:
    """Of A_log 3 values count, and 125 zeros are behind them."""
    return write_family(tmp_path / "kimi_k3", KIMI_K3, SMALL, change=finite).folder


def test_padding_of_zeros_is_no_finding(kimi_k3: Path) -> None:
    with open_checkpoint(kimi_k3) as checkpoint:
        report = check_payload(checkpoint)
    assert (report.kda_tensors, report.problems) == (4 * 14, ())


@pytest.mark.parametrize("number", [HEADS, 64, 127])
@pytest.mark.parametrize(
    ("value", "not_zero"),
    [(F32_NAN, 2), (struct.pack("<f", -0.0), 1), (struct.pack("<f", 1e-45), 1)],
    ids=["NaN", "-0.0", "the least"],
)
def test_padding_that_is_not_zeros_is_reported_as_a_bind_refuses_it(
    kimi_k3: Path, number: int, value: bytes, not_zero: int
) -> None:
    path = overwrite(kimi_k3, PADDED, value, 4 * number)
    with open_checkpoint(kimi_k3) as checkpoint:
        (problem,) = check_payload(checkpoint).problems
        with pytest.raises(PayloadValueError) as refused:
            bind_kda_weights(KdaConfig(24, HEADS, 5, 3), 1, checkpoint.layer(1), family="auto")
    assert isinstance(problem, PayloadValueError)
    assert (problem.path, problem.tensor) == (os.fspath(path), PADDED)
    assert problem.expected == "125 zeros behind 3 values"
    assert problem.got == f"{not_zero} bytes that are not zero"
    bound = refused.value
    assert problem.code is bound.code is Code.PAYLOAD_PADDING
    assert (problem.expected, problem.got) == (bound.expected, bound.got)


@pytest.mark.parametrize(
    ("values", "code"),
    [(b"\0" * 4 * HEADS, Code.PAYLOAD_ZEROS), (F32_NAN * HEADS, Code.PAYLOAD_NOT_FINITE)],
)
def test_the_values_in_front_of_padding_are_judged_apart_from_it(
    kimi_k3: Path, values: bytes, code: Code
) -> None:
    overwrite(kimi_k3, PADDED, values + b"\1")
    with open_checkpoint(kimi_k3) as checkpoint:
        problems = check_payload(checkpoint).problems
    assert [problem.code for problem in problems] == [code, Code.PAYLOAD_PADDING]
    assert problems[0].got == "3 such values among 3"


def test_padding_is_looked_at_in_the_layers_of_that_family_alone(tmp_path: Path) -> None:
    """In a checkpoint of two, each layer as what it is; all of a GLM layer's A_log counts."""
    written = write_family(tmp_path, (GLM5_NEXT, KIMI_K3), SMALL, change=finite)
    names = [f"{written.prefix}{layer}.self_attn.A_log" for layer in written.kda_layers]
    for name in names:
        overwrite(tmp_path, name, struct.pack("<f", 1.0) * HEADS)
    overwrite(tmp_path, names[1], b"\1", 4 * HEADS)
    with open_checkpoint(tmp_path) as checkpoint:
        assert [problem.tensor for problem in check_payload(checkpoint).problems] == [names[1]]


def test_the_padding_of_a_layer_that_is_exactly_of_no_family_is_not_judged(tmp_path: Path) -> None:
    """`verify` refuses it for what it is."""

    def change(tensors: dict[str, Weights]) -> None:
        del tensors["language_model.model.layers.1.self_attn.dt_bias"]
        finite(tensors)

    write_family(tmp_path, KIMI_K3, SMALL, change=change)
    overwrite(tmp_path, PADDED, b"\1", 4 * HEADS)
    with open_checkpoint(tmp_path) as checkpoint:
        assert check_payload(checkpoint).problems == ()


@pytest.mark.parametrize("names", [[PADDED], ["lm_head.weight"]])
def test_padding_is_judged_where_its_tensor_is_among_those_that_are_read(
    kimi_k3: Path, names: list[str]
) -> None:
    overwrite(kimi_k3, PADDED, b"\1", 4 * HEADS)
    with open_checkpoint(kimi_k3) as checkpoint:
        problems = check_payload(checkpoint, names=names).problems
    assert [problem.tensor for problem in problems] == [name for name in names if name == PADDED]


def test_values_and_padding_are_told_apart_wherever_a_piece_is_cut() -> None:
    """4 values in BF16, of which 3 are padding, come by in every way of cutting them."""
    one = b"\x80\x3f"
    for cut in range(0, 9, 2):
        for data, codes in (
            (one + bytes(6), []),
            (one + bytes(5) + b"\1", [Code.PAYLOAD_PADDING]),
            (bytes(8), [Code.PAYLOAD_ZEROS]),
            (BF16_NAN + bytes(6), [Code.PAYLOAD_NOT_FINITE]),
            (one + BF16_NAN + bytes(4), [Code.PAYLOAD_PADDING]),
            (one + bytes(2) + BF16_NAN + bytes(2), [Code.PAYLOAD_PADDING]),
        ):
            values = KdaValues("BF16", 8, 3)
            for piece in (data[:cut], data[cut:]):
                values.take(memoryview(piece))
            assert [problem.code for problem in values.problems("x", "y")] == codes, (cut, data)


def test_without_a_decoder_there_are_digests_and_no_values(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "model.safetensors", {"vision.weight": b"\0\0"})
    with open_checkpoint(path) as checkpoint:
        report = check_payload(checkpoint, digests=True)
    assert (report.kda_tensors, len(report.tensors), report.problems) == (0, 1, ())


# what goes wrong ----------------------------------------------------------------------------------


def test_a_shard_that_changed_since_it_was_opened_is_a_problem_and_the_others_are_read(
    copied: Path,
) -> None:
    with open_checkpoint(copied) as checkpoint:
        changed = overwrite_shard(copied, "model-00002-of-00003.safetensors")
        report = check_payload(checkpoint, digests=True)
        (problem,) = report.problems
        placed = {
            name for name in checkpoint if checkpoint.shard_of(name).file_name != changed.name
        }
    assert isinstance(problem, PayloadError)
    assert (problem.code, problem.path) == (Code.FILE_CHANGED, os.fspath(changed))
    assert report.tensors.keys() == placed


def overwrite_shard(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(path.read_bytes())
    return path


def test_of_a_shard_that_cannot_be_read_to_its_end_nothing_else_is_reported(
    tmp_path: Path,
) -> None:
    """Also not what was seen of it before: it may be of no state that the file ever had."""
    nan = Stored("F32", [1], F32_NAN)
    long = u8(bytes(4 * CHECK_PIECE_BYTES))
    tensors = {"layers.0.self_attn.A_log": nan, "long": long}
    path = tmp_path / "model.safetensors"
    path.write_bytes(shard_of(tensors))
    with open_checkpoint(path) as checkpoint:

        def change(done: int, total: int) -> None:
            if 0 < done < total:
                os.utime(path)

        report = check_payload(checkpoint, digests=True, progress=change)
    (problem,) = report.problems
    assert problem.code is Code.FILE_CHANGED
    assert (report.tensors, report.kda_tensors) == ({}, 0)


def test_an_error_of_another_kind_ends_the_pass_at_once(tmp_path: Path) -> None:
    """Not only when all that is beside it has been read."""
    write_sparse_shard(tmp_path / "a.safetensors", "a", 50 * 2**30)
    write_sparse_shard(tmp_path / "b.safetensors", "b", 1)
    write_index(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    with open_checkpoint(tmp_path) as checkpoint:
        begins = time.monotonic()

        def close(done: int, total: int) -> None:
            assert total > done
            with contextlib.suppress(InUseError):  # a piece may be on its way
                checkpoint.close()

        with pytest.raises(ClosedError):
            check_payload(checkpoint, digests=True, progress=close)
        assert time.monotonic() - begins < 5


@linux_only
def test_where_the_system_gives_no_thread_the_caller_reads_all_itself(
    sound: Path, run_python: RunPython
) -> None:
    with process_group(1) as group:
        script = """
            import json, sys
            open(sys.argv[2] + "/cgroup.procs", "w").write("0")
            from kda_stream import check_payload, open_checkpoint
            with open_checkpoint(sys.argv[1]) as checkpoint:
                report = check_payload(checkpoint, digests=True)
            print(json.dumps([len(report.tensors), report.kda_tensors]))
        """
        assert run_python(script, sound, group) == [len(LAYOUT.tensors()), KDA_TENSORS]


@contextlib.contextmanager
def process_group(most: int) -> Iterator[Path]:
    """A control group of at most `most` processes and threads; skips where none can be made."""
    group = Path("/sys/fs/cgroup/pids") / f"kda_stream-{os.getpid()}"
    try:
        group.mkdir()
        (group / "pids.max").write_text(str(most))
    except OSError as error:
        pytest.skip(f"no control group for processes: {error.strerror}")
    try:
        yield group
    finally:
        group.rmdir()


def test_values_of_two_decoders_are_looked_at_both(tmp_path: Path) -> None:
    nan = Stored("F32", [1], F32_NAN)
    names = [f"{model}.layers.0.self_attn.A_log" for model in "ab"]
    path = tmp_path / "model.safetensors"
    path.write_bytes(shard_of(dict.fromkeys(names, nan)))
    with open_checkpoint(path) as checkpoint:
        assert [problem.tensor for problem in check_payload(checkpoint).problems] == names


def test_thousands_of_shards_take_time_in_proportion(tmp_path: Path) -> None:
    places = {}
    for number in range(3000):
        file = f"{number}.safetensors"
        write_shard(tmp_path / file, {str(number): b"x"})
        places[str(number)] = file
    write_index(tmp_path, places)
    with open_checkpoint(tmp_path) as checkpoint:
        report = check_payload(checkpoint, digests=True)
    assert len(report.tensors) == 3000
    assert report.seconds < 10  # three, and 27 when each look asks after every shard


@linux_only
def test_many_quick_interrupts_are_one_and_leave_nothing(
    tmp_path: Path, run_python: RunPython
) -> None:
    path = write_sparse_shard(tmp_path / "model.safetensors", "ab", 30 * 2**30)
    script = """
        import json, os, signal, sys, threading, time
        from kda_stream import check_payload, open_checkpoint
        def count():
            return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]
        def press(times):
            time.sleep(0.05)
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.002)
        caught = 0
        with open_checkpoint(sys.argv[1]) as checkpoint:
            before = count()
            for turn in range(30):
                presser = threading.Thread(target=press, args=(1 + turn % 4,))
                while True:
                    try:
                        presser.start()
                        check_payload(checkpoint, digests=True)
                    except KeyboardInterrupt:
                        caught += 1
                        break
                quiet = False
                while presser.is_alive() or not quiet:
                    try:
                        time.sleep(0.02)  # one that is on its way still comes
                        quiet = not presser.is_alive()
                    except KeyboardInterrupt:
                        quiet = False
            end = time.monotonic() + 10
            while count() != before and time.monotonic() < end:
                time.sleep(0.005)
            print(json.dumps([caught, before, count()]))
    """
    caught, before, after = run_python(script, path)
    assert caught == 30
    assert after == before


def test_a_closed_checkpoint_is_an_error(sound: Path) -> None:
    checkpoint = open_checkpoint(sound)
    checkpoint.close()
    with pytest.raises(ClosedError):
        check_payload(checkpoint)


def test_what_progress_raises_ends_the_pass_and_leaves_nothing(
    sound: Path, run_python: RunPython
) -> None:
    script = """
        import json, os, sys, time
        from kda_stream import check_payload, open_checkpoint
        def count():
            maps = open("/proc/self/maps").read().count(sys.argv[1])
            return [maps, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]
        def stop(done, total):
            raise TimeoutError
        def settled(wanted):
            end = time.monotonic() + 10  # a thread is gone a moment after it was joined
            while count() != wanted and time.monotonic() < end:
                time.sleep(0.005)
            return count()
        threads = count()[2]
        with open_checkpoint(sys.argv[1]) as checkpoint:
            check_payload(checkpoint)  # so that what is imported is, and the shards are mapped
            before = settled([*count()[:2], threads])
            try:
                check_payload(checkpoint, progress=stop)
            except TimeoutError:
                print(json.dumps([before, settled(before)]))
    """
    before, after = run_python(script, sound)
    assert after == before


def test_ctrl_c_is_answered_in_the_middle_of_a_pass(
    tmp_path: Path, interrupt_python: RunPython
) -> None:
    path = write_sparse_shard(tmp_path / "model.safetensors", "ab", 30 * 2**30)
    script = """
        import json, sys, time
        from kda_stream import check_payload, open_checkpoint
        with open_checkpoint(sys.argv[1]) as checkpoint:
            print("begins", flush=True)
            try:
                check_payload(checkpoint, digests=True)
            except KeyboardInterrupt:
                print(json.dumps({"caught": time.monotonic()}))
    """
    assert interrupt_python(script, path)["delay"] < 0.5


def test_memory_is_bounded_whatever_the_size_of_a_tensor(
    tmp_path: Path, run_python: RunPython
) -> None:
    path = write_sparse_shard(tmp_path / "model.safetensors", "a", 2**30)
    script = """
        import json, resource, sys
        from kda_stream import check_payload, open_checkpoint
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with open_checkpoint(sys.argv[1]) as checkpoint:
            read = check_payload(checkpoint, digests=True).bytes
        print(json.dumps([read, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)]))
    """
    read, taken_kib = run_python(script, path)
    assert read == path.stat().st_size
    assert taken_kib < 4 * 2 * CHECK_PIECE_BYTES // 1024
