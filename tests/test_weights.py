"""`iter_weights`: every tensor, byte for byte, through slots that are never filled too soon."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import UNEVEN
from support.fake_driver import FakeDriver, locked_bytes
from support.families import GLM5_NEXT, write_family
from support.files import Stored, numbered, write_checkpoint, write_shard
from support.left_behind import PROLOGUE

import kda_stream.weights
from kda_stream import (
    ArgumentError,
    Checkpoint,
    CheckpointError,
    KdaLayerStream,
    KdaStreamError,
    NotFoundError,
    PayloadError,
    PinnedArena,
    RawTensor,
    StreamError,
    TensorPiece,
    WeightStream,
    iter_weights,
    open_checkpoint,
)

RunPython = Callable[..., Any]
Mixed = tuple[Path, dict[str, Stored]]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc")
each_read = pytest.mark.parametrize("read", ["mapped", "positional", "direct", "auto"])
each_order = pytest.mark.parametrize("order", ["file", "layer"])

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
}
SHAPES = ((), (1,), (3,), (16, 3), (0,), (4, 0, 7), (5, 1, 8), (300,), (64, 40))


def stored(rng: random.Random) -> Stored:
    dtype, shape = rng.choice(list(BITS)), rng.choice(SHAPES)
    count = int(np.prod(shape))
    while count * BITS[dtype] % 8:
        dtype = rng.choice(list(BITS))
    return Stored(dtype, shape, rng.randbytes(count * BITS[dtype] // 8))


def write_mixed(folder: Path, *, shards: int = 12) -> dict[str, Stored]:
    """Tensors of every dtype and shape, at odd offsets; layers that lie in shards by chance."""
    rng = random.Random(1)
    names = [f"model.layers.{n % 11}.part{n}.weight" for n in range(15 * shards - 2)]
    names += ["lm_head.weight", "model.embed_tokens.weight"]
    rng.shuffle(names)
    all_stored = {name: stored(rng) for name in names}
    files = numbered(shards)
    write_checkpoint(
        folder,
        {file: {n: all_stored[n] for n in names[at::shards]} for at, file in enumerate(files)},
    )
    return all_stored


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    folder = tmp_path_factory.mktemp("mixed")
    return folder, write_mixed(folder)


@pytest.fixture
def checkpoint(mixed: Mixed) -> Iterator[Checkpoint]:
    with open_checkpoint(mixed[0]) as opened:
        yield opened


def as_stored(tensor: RawTensor) -> Stored:
    return Stored(tensor.dtype, tensor.shape, bytes(tensor.data))


# --- what comes -----------------------------------------------------------------------------------


@each_read
@each_order
@pytest.mark.parametrize("slot_bytes", [16384, 1 << 20])
def test_every_tensor_comes_once_with_its_dtype_shape_and_bytes(
    mixed: Mixed,
    checkpoint: Checkpoint,
    read: Any,
    order: Any,
    slot_bytes: int,
) -> None:
    found: dict[str, Stored] = {}
    stream = iter_weights(checkpoint, order=order, slot_bytes=slot_bytes, read=read)
    for name, tensor in stream:
        assert name not in found
        found[name] = as_stored(tensor)
    assert found == mixed[1]
    report = stream.report
    assert (report.tensors, report.slots) == (len(found), 3)
    assert report.bytes == sum(len(tensor.data) for tensor in found.values())
    assert (len(report.reads) == 1 and sum(report.reads.values()) > 5) or slot_bytes > 16384


def test_tensors_come_by_shard_and_offset(checkpoint: Checkpoint) -> None:
    came = [name for name, _ in iter_weights(checkpoint)]
    places = [(checkpoint.file_of(name), checkpoint.info(name).begin) for name in came]
    assert places == sorted(places)


def test_shard_10_comes_behind_shard_9(tmp_path: Path) -> None:
    files = {f"part-{n}.safetensors": {f"t{n}": bytes([n])} for n in (10, 9, 2, 1)}
    write_checkpoint(tmp_path, files)
    with open_checkpoint(tmp_path) as checkpoint:
        assert [name for name, _ in iter_weights(checkpoint)] == ["t1", "t2", "t9", "t10"]


def test_by_layer_the_tensors_outside_come_first_and_layers_in_numeric_order(
    checkpoint: Checkpoint,
) -> None:
    came = [name for name, _ in iter_weights(checkpoint, order="layer")]
    assert set(came[:2]) == {"lm_head.weight", "model.embed_tokens.weight"}
    numbers = [int(name.split(".")[2]) for name in came[2:]]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 11


def test_by_layer_a_checkpoint_without_layers_is_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "model.safetensors", {"a": b"1"})
    with open_checkpoint(shard) as checkpoint:
        with pytest.raises(CheckpointError, match=r"PREFIX\.layers"):
            iter_weights(checkpoint, order="layer")
        assert [name for name, _ in iter_weights(checkpoint)] == ["a"]


@each_order
def test_named_tensors_come_alone(mixed: Mixed, checkpoint: Checkpoint, order: Any) -> None:
    chosen = random.Random(2).sample(sorted(mixed[1]), 30)
    found = {n: as_stored(t) for n, t in iter_weights(checkpoint, names=chosen * 2, order=order)}
    assert found == {name: mixed[1][name] for name in chosen}
    assert list(iter_weights(checkpoint, names=[])) == []


def test_what_lies_between_named_tensors_is_not_read_when_it_is_long(tmp_path: Path) -> None:
    shard = write_shard(
        tmp_path / "model.safetensors", {"a": b"1" * 10, "gap": bytes(1 << 20), "b": b"2" * 10}
    )
    with open_checkpoint(shard) as checkpoint:
        batch = next(kda_stream.packing.batches(checkpoint, ["a", "b"], "file", "own", 1 << 20))
    assert sum(part.end - part.begin for part in batch.wanted) == 20


def test_shards_are_checked_as_they_come_where_that_was_asked_for(
    mixed: Mixed,
) -> None:
    with open_checkpoint(mixed[0], verify="needed") as checkpoint:
        stream = iter_weights(checkpoint)
        assert checkpoint.report.shards_checked == 0
        assert {name: as_stored(tensor) for name, tensor in stream} == mixed[1]


def test_every_element_lies_where_its_dtype_may_begin(checkpoint: Checkpoint) -> None:
    """Also of those that their files have at odd offsets."""
    for name, tensor in iter_weights(checkpoint):
        width = BITS[tensor.dtype] // 8
        if tensor.nbytes and width:
            array = np.frombuffer(tensor.data, np.uint8)
            assert array.__array_interface__["data"][0] % width == 0, name


def test_of_a_tensor_that_lies_in_two_shards_the_index_decides(tmp_path: Path) -> None:
    one, two = numbered(2)
    write_checkpoint(tmp_path, {one: {"a": b"old", "b": b"1"}, two: {"a": b"new"}})
    with open_checkpoint(tmp_path) as checkpoint:
        assert {n: bytes(t.data) for n, t in iter_weights(checkpoint)} == {"a": b"new", "b": b"1"}


# --- larger than a slot ---------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path) -> Iterator[tuple[Checkpoint, dict[str, bytes]]]:
    rng = random.Random(3)
    sizes = {"a": 100, "big": 50_000, "b": 10, "bigger": 80_000, "biggest": 90_000, "c": 7}
    data = {name: rng.randbytes(size) for name, size in sizes.items()}
    rows = {
        n: Stored("U8", [len(d) // 10, 10] if len(d) > 5000 else [len(d)], d)
        for n, d in data.items()
    }
    with open_checkpoint(write_shard(tmp_path / "model.safetensors", rows)) as checkpoint:
        yield checkpoint, data


@each_read
def test_a_tensor_larger_than_a_slot_has_memory_of_its_own(
    large: tuple[Checkpoint, dict[str, bytes]], read: Any
) -> None:
    checkpoint, data = large
    stream = iter_weights(checkpoint, slot_bytes=8192, slots=2, read=read)
    assert {name: bytes(tensor.data) for name, tensor in stream} == data


@each_read
def test_a_tensor_larger_than_a_slot_comes_in_pieces_of_whole_rows(
    large: tuple[Checkpoint, dict[str, bytes]], read: Any
) -> None:
    checkpoint, data = large
    whole: dict[str, bytearray] = {}
    stream = iter_weights(checkpoint, slot_bytes=8192, large="pieces", read=read)
    for name, tensor in stream:
        got = whole.setdefault(name, bytearray())
        if isinstance(tensor, TensorPiece):
            assert tensor.whole_shape == (len(data[name]) // 10, 10)
            assert tensor.row * 10 == len(got)
            assert tensor.shape == (len(tensor.data) // 10, 10)
            assert 0 < tensor.nbytes <= 8192
        else:
            assert name in ("a", "b", "c")
        got += tensor.data
    assert whole == data


def test_a_dtype_that_does_not_fill_bytes_does_not_come_in_pieces(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.safetensors", {"f4": Stored("F4", (40, 10), bytes(200))})
    with open_checkpoint(shard) as checkpoint:
        with pytest.raises(StreamError, match=r"rows do not fill bytes.*large='own'"):
            list(iter_weights(checkpoint, slot_bytes=100, large="pieces"))
        assert len(list(iter_weights(checkpoint, slot_bytes=100))) == 1


def test_rows_that_are_larger_than_a_slot_are_refused_by_name(
    large: tuple[Checkpoint, dict[str, bytes]],
) -> None:
    with pytest.raises(StreamError, match="slot_bytes=10 or more") as caught:
        list(iter_weights(large[0], slot_bytes=9, large="pieces", names=["big"]))
    assert caught.value.tensor == "big"


# --- how long -------------------------------------------------------------------------------------


def small(checkpoint: Checkpoint, **options: Any) -> WeightStream:
    """So that each slot is filled many times."""
    return iter_weights(checkpoint, slot_bytes=16384, lock="off", **options)


def test_what_is_kept_stays_right_while_the_stream_goes_on(
    mixed: Mixed, checkpoint: Checkpoint
) -> None:
    kept: list[tuple[str, np.ndarray[Any, Any]]] = []
    for name, tensor in small(checkpoint, slots=6):
        kept = [*kept, (name, np.frombuffer(tensor.data, np.uint8))][-4:]
        for before, array in kept:
            assert array.tobytes() == mixed[1][before].data


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_a_consumer_in_another_thread_that_is_late_gets_the_right_bytes(
    mixed: Mixed, checkpoint: Checkpoint, slots: int
) -> None:
    """It drops a tensor some time after it was handed over, and the stream waits for that."""
    handed: list[tuple[str, RawTensor]] = []
    wrong: list[str] = []
    over = threading.Event()

    def read_late() -> None:
        rng = random.Random(4)
        while not over.is_set() or handed:
            if not handed:
                time.sleep(0.0005)
                continue
            time.sleep(rng.choice([0, 0, 0.002]))
            name, tensor = handed.pop(0)
            if bytes(tensor.data) != mixed[1][name].data:
                wrong.append(name)
            del tensor

    reader = threading.Thread(target=read_late)
    reader.start()
    for name, tensor in small(checkpoint, slots=slots):
        handed.append((name, tensor))
        del tensor
    over.set()
    reader.join()
    assert wrong == []


@pytest.mark.parametrize("collect", [list, dict, sorted], ids=lambda c: c.__name__)
def test_keeping_all_of_them_is_an_error_and_neither_a_hang_nor_wrong_bytes(
    checkpoint: Checkpoint, collect: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kda_stream.weights, "KEPT_SECONDS", 0.3)
    with pytest.raises(StreamError, match="all 3 slots") as caught:
        collect(small(checkpoint))
    assert "copy what is needed longer" in str(caught.value)


def test_what_fits_the_slots_may_be_kept_altogether(mixed: Mixed, checkpoint: Checkpoint) -> None:
    kept = dict(iter_weights(checkpoint))
    assert {name: as_stored(tensor) for name, tensor in kept.items()} == mixed[1]


def test_what_was_handed_out_outlives_the_stream_and_the_checkpoint(
    mixed: Mixed,
) -> None:
    with open_checkpoint(mixed[0]) as checkpoint:
        stream = small(checkpoint)
        name, tensor = next(stream)
        stream.close()
    del stream
    assert as_stored(tensor) == mixed[1][name]


def test_tensors_in_a_cycle_are_not_taken_for_kept(checkpoint: Checkpoint) -> None:
    gc.disable()
    try:
        count = 0
        for _, tensor in small(checkpoint, slots=2):
            cycle: list[Any] = [tensor]
            cycle.append(cycle)
            count += 1
    finally:
        gc.enable()
    assert count == len(checkpoint)


def test_a_generator_between_them_may_keep_the_last_tensor(checkpoint: Checkpoint) -> None:
    def renamed() -> Iterator[tuple[str, RawTensor]]:
        for name, tensor in small(checkpoint, slots=2):
            yield f"x.{name}", tensor

    assert sum(1 for _ in renamed()) == len(checkpoint)


def test_of_several_threads_at_its_step_all_but_one_are_refused_and_no_bytes_are_wrong(
    mixed: Mixed, checkpoint: Checkpoint
) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    came: list[str] = []
    wrong: list[str] = []
    refused: list[str] = []

    def step(stream: WeightStream) -> None:
        while True:
            try:
                name, tensor = next(stream)
            except StopIteration:
                break
            except StreamError as error:
                refused.append(error.what)
                continue
            came.append(name)
            if bytes(tensor.data) != mixed[1][name].data:
                wrong.append(name)
            del tensor

    try:
        stream = iter_weights(checkpoint, slot_bytes=16384, slots=8, lock="off")
        threads = [threading.Thread(target=step, args=(stream,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []
    assert sorted(came) == sorted(mixed[1])
    assert set(refused) <= {"another thread is at its next step"}


# --- its end --------------------------------------------------------------------------------------


def test_a_stream_that_ended_stays_ended(checkpoint: Checkpoint) -> None:
    stream = iter_weights(checkpoint)
    for _ in stream:
        pass
    assert list(stream) == []
    stream.close()
    stream.close()


def test_a_stream_that_was_closed_does_not_look_like_one_that_has_given_all(
    checkpoint: Checkpoint,
) -> None:
    begun, never_begun = iter_weights(checkpoint), iter_weights(checkpoint)
    next(begun)
    for stream in (begun, never_begun):
        stream.close()
        with pytest.raises(StreamError, match="the stream is closed"):
            next(stream)


def test_a_loop_whose_stream_is_closed_meanwhile_ends_with_an_error(checkpoint: Checkpoint) -> None:
    stream = small(checkpoint)

    def take_all() -> None:
        for count, _ in enumerate(stream):
            if count == 5:
                stream.close()

    with pytest.raises(StreamError, match="the stream is closed"):
        take_all()


@pytest.mark.parametrize("gone", ["removed", "dangling"])
def test_a_shard_that_is_gone_when_its_turn_comes_is_told_of(tmp_path: Path, gone: str) -> None:
    write_mixed(tmp_path)
    last = tmp_path / numbered(12)[-1]
    with open_checkpoint(tmp_path, verify="needed") as checkpoint:
        last.unlink()
        if gone == "dangling":
            last.symlink_to(tmp_path / "none")
        with pytest.raises(KdaStreamError) as caught:
            for _ in iter_weights(checkpoint):
                pass
    assert last.name in str(caught.value)


def test_a_shard_that_changes_on_the_way_ends_the_stream_with_an_error(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        stream = small(checkpoint)
        next(stream)
        last = tmp_path / numbered(12)[-1]
        last.write_bytes(last.read_bytes()[:-1])
        with pytest.raises(PayloadError, match="has changed") as caught:
            for _ in stream:
                pass
        assert caught.value.path == str(last)
        with pytest.raises(StreamError, match="the stream is closed"):
            next(stream)


def test_closing_the_checkpoint_under_it_is_an_error_and_no_hang(
    mixed: Mixed,
) -> None:
    checkpoint = open_checkpoint(mixed[0])
    stream = small(checkpoint)
    next(stream)
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        for _ in stream:
            pass


def test_a_checkpoint_waits_for_the_copy_of_a_stream_that_was_dropped(tmp_path: Path) -> None:
    """Its thread looks into the map until then, and is no array that somebody has kept."""
    write_shard(tmp_path / "model.safetensors", {f"t{n}": bytes(48 << 20) for n in range(4)})
    for _ in range(10):
        with open_checkpoint(tmp_path) as checkpoint:
            for _, tensor in iter_weights(checkpoint, read="mapped", lock="off"):
                del tensor
                break


@pytest.mark.parametrize("read", ["mapped", "direct"])
def test_a_checkpoint_that_is_closed_under_the_stream_ends_it_with_an_error(
    tmp_path: Path, read: Any
) -> None:
    """Also in the midst of a copy; and never so that what has come looks like all there is."""
    write_shard(tmp_path / "model.safetensors", {f"t{n}": bytes(48 << 20) for n in range(6)})
    for _ in range(5):
        with open_checkpoint(tmp_path) as checkpoint:
            stream = iter_weights(checkpoint, read=read, lock="off")
            next(stream)
        with pytest.raises(ValueError, match="closed"):
            for _ in stream:
                pass


ENDS = {
    "all of it": "for _, tensor in stream: pass",
    "a break": "for _, tensor in stream: break",
    "an error in the body": "for _, tensor in stream: raise KeyError",
    "dropped": "next(stream); tensor = None; del stream",
    "never begun": "tensor = None",
    "with": "with stream: next(stream); tensor = None",
    "a cut shard": "next(stream); tensor = None; cut(); [None for _ in stream]",
    "keeping all": "tensor = None; list(stream)",
}


@pytest.mark.mlock
@linux_only
@each_read
@pytest.mark.parametrize("what", ENDS.values(), ids=ENDS)
def test_nothing_is_left_behind_however_it_ends(
    tmp_path: Path, run_python: RunPython, what: str, read: str
) -> None:
    write_mixed(tmp_path / "checkpoint", shards=3)
    script = (
        PROLOGUE
        + """
import kda_stream.weights
from kda_stream import iter_weights, open_checkpoint

kda_stream.weights.KEPT_SECONDS = 0.1
folder, what, read = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def cut():
    for shard in folder.glob("*.safetensors"):
        os.truncate(shard, 100)
def run(what):
    raised = tensor = None
    with open_checkpoint(folder) as checkpoint:
        stream = iter_weights(checkpoint, slot_bytes=4096, lock="require", read=read)
        try:
            exec(what)
        except BaseException as error:
            raised = type(error).__name__
    return raised
run("for _ in stream: pass")
before = Before(folder)
raised = run(what)
gc.collect()
print(json.dumps([before.left(), raised]))
"""
    )
    left, raised = run_python(script, tmp_path / "checkpoint", what, read)
    assert left == {}
    assert raised == {
        ENDS["an error in the body"]: "KeyError",
        ENDS["a cut shard"]: "PayloadError",
        ENDS["keeping all"]: "StreamError",
    }.get(what)


@pytest.mark.parametrize("kind", [WeightStream, KdaLayerStream, PinnedArena])
def test_no_line_of_python_runs_when_one_is_dropped(kind: type) -> None:
    """A KeyboardInterrupt in a destructor is lost, and the thread would not be told to end."""
    assert not any("__del__" in vars(base) for base in kind.__mro__)


@linux_only
def test_ctrl_c_while_tensors_are_kept_is_answered_at_once(
    tmp_path: Path, interrupt_python: RunPython
) -> None:
    write_mixed(tmp_path / "checkpoint", shards=3)
    script = """
        import json, sys, time
        from kda_stream import iter_weights, open_checkpoint
        with open_checkpoint(sys.argv[1]) as checkpoint:
            print("ready", flush=True)
            try:
                kept = list(iter_weights(checkpoint, slot_bytes=4096))
            except KeyboardInterrupt:
                print(json.dumps({"caught": time.monotonic()}))
    """
    delays = [interrupt_python(script, tmp_path / "checkpoint")["delay"] for _ in range(3)]
    assert min(delays) < 0.2


@linux_only
def test_memory_is_the_slots_whatever_the_checkpoint_has(
    tmp_path: Path, run_python: RunPython
) -> None:
    tensors = {f"t{n}": bytes(1 << 20) for n in range(96)}
    write_shard(tmp_path / "model.safetensors", tensors)
    script = """
        import json, sys
        from kda_stream import iter_weights, open_checkpoint
        def most():
            lines = open("/proc/self/status").read().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10
        with open_checkpoint(sys.argv[1]) as checkpoint:
            for _ in iter_weights(checkpoint, names=["t0"], slot_bytes=4 << 20):
                pass
            before = most()
            for _ in iter_weights(checkpoint, slot_bytes=4 << 20, read="direct"):
                pass
            print(json.dumps(most() - before))
    """
    grown = run_python(script, tmp_path / "model.safetensors")
    assert grown < 32 << 20


def test_a_stream_belongs_to_the_process_before_a_fork(mixed: Mixed, run_python: RunPython) -> None:
    script = """
        import json, os, sys
        from kda_stream import StreamError, iter_weights, open_checkpoint
        checkpoint = open_checkpoint(sys.argv[1])
        stream = iter_weights(checkpoint, slot_bytes=16384)
        next(stream)
        child = os.fork()
        if not child:
            try:
                next(stream)
            except StreamError as error:
                os._exit(17 if "before the fork" in str(error) else 1)
            os._exit(2)
        _, status = os.waitpid(child, 0)
        count = 1 + sum(1 for _ in stream)
        print(json.dumps([os.waitstatus_to_exitcode(status), count]))
    """
    assert run_python(script, mixed[0]) == [17, len(mixed[1])]


@pytest.mark.parametrize("large", ["own", "pieces"])
def test_all_memory_is_registered_before_it_is_filled_and_unregistered_at_the_end(
    tmp_path: Path, large: Any
) -> None:
    tensors = {"a": bytes(100), "big": bytes(range(250)) * 200, "b": b"1" * 10}
    rows = {name: Stored("U8", [len(data) // 10, 10], data) for name, data in tensors.items()}
    driver = FakeDriver()
    with open_checkpoint(write_shard(tmp_path / "model.safetensors", rows)) as checkpoint:
        stream = iter_weights(checkpoint, slot_bytes=8192, large=large, register=driver)
        for _, tensor in stream:
            at = np.frombuffer(tensor.data, np.uint8).__array_interface__["data"][0]
            assert any(
                begin <= at and at + tensor.nbytes <= begin + nbytes
                for begin, nbytes in driver.standing.items()
            )
        lock = stream.report.lock
        assert lock is not None
        assert lock.registered
    driver.assert_clean()


@pytest.mark.mlock
@linux_only
def test_a_tensor_with_memory_of_its_own_is_locked_for_as_long_as_it_is_looked_at(
    tmp_path: Path,
) -> None:
    rows = {f"big{n}": Stored("U8", [10, 5000], bytes(50_000)) for n in range(4)}
    with open_checkpoint(write_shard(tmp_path / "model.safetensors", rows)) as checkpoint:
        before = locked_bytes()
        stream = iter_weights(checkpoint, slot_bytes=8192, lock="require")
        seen = [locked_bytes() - before for _ in stream]
        assert all(3 * 8192 + 50_000 <= locked < 3 * 16384 + 4 * 57_344 for locked in seen)
    assert locked_bytes() == before


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"order": "shard"}, "order is unknown"),
        pytest.param({"read": 10**5000}, "more digits than can be printed", id="long"),
        ({"large": "skip"}, "large is unknown"),
        ({"slots": 1}, "one slot is not enough"),
        ({"slots": 1000}, "slots is out of range"),
        ({"slot_bytes": 0}, "slot_bytes is too small"),
        ({"lock": "yes"}, "lock is unknown"),
        ({"read": "fast"}, "read is unknown"),
        ({"residency": "none"}, "residency is unknown"),
        ({"names": "lm_head.weight"}, "names is one text"),
    ],
)
def test_options_outside_what_is_taken_are_refused(
    checkpoint: Checkpoint, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ArgumentError, match=said):
        iter_weights(checkpoint, **options)


def test_a_path_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="open_checkpoint"):
        iter_weights(tmp_path)  # type: ignore[arg-type]


def test_an_unknown_name_is_refused_before_anything_is_read(checkpoint: Checkpoint) -> None:
    with pytest.raises(NotFoundError, match="no such tensor") as caught:
        iter_weights(checkpoint, names=["lm_head.weight", "other"])
    assert caught.value.tensor == "other"


def test_a_checkpoint_of_kda_layers_comes_as_its_files_hold_it(tmp_path: Path) -> None:
    write_family(tmp_path, GLM5_NEXT, UNEVEN)
    with open_checkpoint(tmp_path) as checkpoint:
        expected = {name: bytes(checkpoint.tensor(name).data) for name in checkpoint}
        assert {n: bytes(t.data) for n, t in iter_weights(checkpoint, order="layer")} == expected


def test_the_seconds_of_a_report_stop_with_the_stream(checkpoint: Checkpoint) -> None:
    with iter_weights(checkpoint) as stream:
        for _ in stream:
            pass
        ended = stream.report.seconds
        time.sleep(0.05)
        assert stream.report.seconds == ended > 0
