"""`stream_kda_layers`: layer after layer through reused slots, and nothing left behind."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import queue
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import (
    GLM,
    MEDIUM,
    UNEVEN,
    Stored,
    Written,
    having,
    kda_block,
    without,
    write_checkpoint,
)

from kda_stream import (
    GLM5_NEXT,
    ArgumentError,
    BindError,
    Checkpoint,
    CheckpointError,
    ConfigError,
    ErrorCode,
    KdaConfig,
    KdaLayer,
    KdaStreamError,
    KdaTpPlan,
    NotFoundError,
    PayloadError,
    ProblemKind,
    StreamError,
    kda_slot_bytes,
    open_checkpoint,
    stream_kda_layers,
)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
RunPython = Callable[..., Any]
ANSWERED_SECONDS = 0.2  # a tenth is promised; the machine that runs this may be busy
KDA_LAYERS = [0, 1, 2, 4, 5, 6]


def digest(parts: dict[str, bytes]) -> str:
    return hashlib.sha256(b"".join(parts[name] for name in sorted(parts))).hexdigest()


def digest_of(layer: KdaLayer) -> str:
    return digest({name: bytes(tensor.data) for name, tensor in layer.weights.items()})


def digests(written: Written) -> dict[int, str]:
    return {layer: digest(written.expected(layer)) for layer in written.kda_layers}


# Put before a script: what this process holds of threads, descriptors, locked memory and maps.
HELD = """
import json, os, sys, threading, time
import numpy
from kda_stream import *

folder = sys.argv[1]
arenas = []
most_tasks = len(os.listdir("/proc/self/task"))  # numpy may have started some

def ranges():
    return [line.split()[0] for line in open("/proc/self/maps")]

def note(layer):
    begin = numpy.frombuffer(layer.weights.q_proj.data, dtype=numpy.uint8).ctypes.data
    for text in ranges():
        first, last = (int(n, 16) for n in text.split("-"))
        if first <= begin < last:
            arenas.append(text)

def held():
    # The kernel takes a moment to end a thread.
    for _ in range(600):
        if len(os.listdir("/proc/self/task")) <= most_tasks:
            break
        time.sleep(0.005)
    return held_now()

def held_now():
    maps = open("/proc/self/maps").readlines()
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "locked": status["VmLck"].strip(),
        "arenas": len(set(arenas).intersection(ranges())),  # its address may be used anew
        "shards": sum(folder in line for line in maps),
    }
"""


# --- what is handed out ---------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("read", ["mapped", "positional", "direct", "auto"])
def test_every_kda_layer_comes_in_numeric_order_with_its_bytes(
    checkpoint: Checkpoint, written: Written, slots: int, read: Any
) -> None:
    with stream_kda_layers(checkpoint, slots=slots, read=read) as stream:
        found = [(layer.index, digest_of(layer)) for layer in stream]
    assert found == [(n, digests(written)[n]) for n in KDA_LAYERS]


def test_ten_and_more_layers_come_in_numeric_order(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, layers=14, prefix="model.layers.", shards=4)
    with open_checkpoint(tmp_path) as checkpoint, stream_kda_layers(checkpoint) as stream:
        found = {layer.index: digest_of(layer) for layer in stream}
    assert list(found) == [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13]
    assert found == digests(written)


@pytest.mark.parametrize(
    "prefix",
    ["model.language_model.layers.", "model.layers.", "language_model.model.layers.", "layers."],
)
def test_layers_are_found_under_any_prefix(tmp_path: Path, prefix: str) -> None:
    written = write_checkpoint(tmp_path, layers=3, prefix=prefix)
    with open_checkpoint(tmp_path) as checkpoint, stream_kda_layers(checkpoint) as stream:
        found = {layer.index: digest_of(layer) for layer in stream}
    assert found == digests(written)


@pytest.mark.parametrize("layers", [[5], [6, 0, 4], (0, 1), iter([2, 1]), range(3)], ids=repr)
def test_chosen_layers_come_in_the_order_given(
    checkpoint: Checkpoint, written: Written, layers: Any
) -> None:
    chosen = list(layers)
    with stream_kda_layers(checkpoint, layers=iter(chosen)) as stream:
        found = [(layer.index, digest_of(layer)) for layer in stream]
    assert found == [(n, digests(written)[n]) for n in chosen]


def kda_shaped_mtp(tensors: dict[str, Stored]) -> None:
    """Make the MTP layer, number 8, a KDA block."""
    prefix = "model.language_model.layers.8.self_attn."
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]
    tensors.update({prefix + leaf: stored for leaf, stored in kda_block(UNEVEN).items()})


def test_an_mtp_layer_is_left_out_even_when_it_is_a_kda_block(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, change=kda_shaped_mtp)
    with open_checkpoint(tmp_path) as checkpoint:
        with stream_kda_layers(checkpoint) as stream:
            assert [layer.index for layer in stream] == KDA_LAYERS
        with stream_kda_layers(checkpoint, layers=[8]) as stream:
            assert [digest_of(layer) for layer in stream] == [digest(written.expected(8))]


def test_each_layer_has_its_weights_and_its_report(
    checkpoint: Checkpoint, config: KdaConfig
) -> None:
    with stream_kda_layers(checkpoint) as stream:
        for layer in stream:
            assert layer.report.layer_idx == layer.index
            assert layer.report.bound == 15
            assert layer.report.bytes == 4156
            assert layer.weights.conv.shape == (config.conv_dim, config.conv_kernel)
            assert layer.report.lock == stream.report.lock


@pytest.mark.parametrize(
    ("read", "used"), [("mapped", "mapped"), ("positional", "positional"), ("direct", "direct")]
)
def test_the_stream_reports_what_it_handed_out(
    checkpoint: Checkpoint, config: KdaConfig, read: Any, used: str
) -> None:
    with stream_kda_layers(checkpoint, slots=2, lock="off", read=read) as stream:
        next(stream)
        assert (stream.report.layers, stream.report.bytes) == (1, 4156)
        for _ in stream:
            pass
        report = stream.report
    assert (report.layers, report.bytes) == (6, 6 * 4156)
    assert (report.slots, report.slot_bytes) == (2, kda_slot_bytes(config))
    assert report.reads == {used: 6}
    assert report.lock.policy == "off"
    assert report.seconds > 0


def test_geometry_given_stands_in_for_a_config_file(tmp_path: Path, config: KdaConfig) -> None:
    written = write_checkpoint(tmp_path, config=False)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        stream_kda_layers(checkpoint, config=config, layers=[0, 1]) as stream,
    ):
        found = {layer.index: digest_of(layer) for layer in stream}
    assert found == {n: digests(written)[n] for n in (0, 1)}


def test_two_streams_may_run_over_one_checkpoint(checkpoint: Checkpoint, written: Written) -> None:
    with stream_kda_layers(checkpoint) as one, stream_kda_layers(checkpoint) as two:
        for first, second in zip(one, two, strict=True):
            assert digest_of(first) == digest_of(second) == digests(written)[first.index]


# --- refusals before any payload ------------------------------------------------------------------


@pytest.mark.parametrize("leaf", list(kda_block(MEDIUM)))
def test_a_layer_that_lost_one_tensor_is_refused_and_not_skipped(tmp_path: Path, leaf: str) -> None:
    lost = f"model.language_model.layers.1.self_attn.{leaf}"
    write_checkpoint(tmp_path, layers=3, change=without(lost))
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(BindError) as caught:
        stream_kda_layers(checkpoint)
    (problem,) = caught.value.problems
    assert (problem.kind, problem.tensor) == (ProblemKind.MISSING, f"self_attn.{leaf}")


@pytest.mark.parametrize("left", ["A_log", "q_conv1d.weight", "f_b_proj.weight", "dt_bias"])
def test_a_layer_that_kept_one_tensor_is_refused_and_not_skipped(tmp_path: Path, left: str) -> None:
    prefix = "model.language_model.layers.1.self_attn."
    lost = [prefix + leaf for leaf in kda_block(MEDIUM) if leaf != left]
    write_checkpoint(tmp_path, layers=3, change=without(*lost))
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(BindError) as caught:
        stream_kda_layers(checkpoint)
    assert len(caught.value.problems) == 14


def test_every_problem_of_every_layer_is_in_one_error_before_payload_is_read(
    tmp_path: Path,
) -> None:
    prefix = "model.language_model.layers."

    def change(tensors: dict[str, Stored]) -> None:
        without(f"{prefix}1.self_attn.A_log", f"{prefix}1.self_attn.dt_bias")(tensors)
        having({f"{prefix}4.self_attn.q_conv1d.weight": Stored("F32", (15, 1, 3))})(tensors)
        having({f"{prefix}6.self_attn.q_proj.bias": Stored("BF16", (15,))})(tensors)

    written = write_checkpoint(tmp_path, change=change)
    with open_checkpoint(tmp_path) as checkpoint:
        for shard in set(written.weight_map.values()):
            os.truncate(tmp_path / shard, 0)  # any look at payload would fail otherwise
        with pytest.raises(BindError) as caught:
            stream_kda_layers(checkpoint)
    problems = {(p.layer_idx, p.tensor): p.kind.value for p in caught.value.problems}
    assert problems == {
        (1, "self_attn.A_log"): "missing",
        (1, "self_attn.dt_bias"): "missing",
        (4, "self_attn.q_conv1d.weight"): "dtype",
        (6, "self_attn.q_proj.bias"): "unknown",
    }
    text = str(caught.value)
    assert "\n" not in text
    for layer, tensor in problems:
        assert tensor in text
        assert re.search(rf"\b{layer}\b", text)


@pytest.mark.parametrize("layer", [3, 8], ids=["DSA", "MTP"])
def test_a_chosen_layer_that_is_not_kda_is_refused(checkpoint: Checkpoint, layer: int) -> None:
    with pytest.raises(BindError):
        stream_kda_layers(checkpoint, layers=[0, layer])


@pytest.mark.parametrize("layer", [9, 99, -1])
def test_a_chosen_layer_that_does_not_exist_is_refused(checkpoint: Checkpoint, layer: int) -> None:
    with pytest.raises(NotFoundError) as caught:
        stream_kda_layers(checkpoint, layers=[0, layer])
    assert caught.value.code is ErrorCode.LAYER_UNKNOWN


def test_a_checkpoint_without_a_config_is_refused_with_a_way_on(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers=1, config=False)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(ConfigError) as caught:
        stream_kda_layers(checkpoint)
    assert caught.value.code is ErrorCode.CONFIG_MISSING
    assert "config" in (caught.value.hint or "")


def test_a_config_without_the_geometry_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers=1)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 24}}))
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(ConfigError) as caught:
        stream_kda_layers(checkpoint)
    assert caught.value.path == str(tmp_path / "config.json")


def test_another_geometry_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(BindError) as caught:
        stream_kda_layers(checkpoint, config=KdaConfig(25, 3, 5, 3))
    assert len(caught.value.problems) == 7 * len(KDA_LAYERS)


def test_a_checkpoint_without_kda_layers_is_refused(tmp_path: Path) -> None:
    def only_dsa(tensors: dict[str, Stored]) -> None:
        for name in [name for name in tensors if ".layers.3." not in name]:
            del tensors[name]

    write_checkpoint(tmp_path, layers=4, mtp=False, change=only_dsa)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(KdaStreamError):
        stream_kda_layers(checkpoint)


@pytest.mark.parametrize(
    "arguments",
    [
        {"slots": 0},
        {"slots": -1},
        {"slots": 10_000},
        {"lock": "maybe"},
        {"read": "map"},
    ],
    ids=repr,
)
def test_arguments_outside_what_is_taken_are_refused(
    checkpoint: Checkpoint, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ArgumentError), stream_kda_layers(checkpoint, **arguments):
        pass


def test_a_checkpoint_without_a_layer_that_the_config_counts_is_refused(
    written: Written, tmp_path: Path
) -> None:
    """A layer that is not there would stay whatever memory held."""
    for path in written.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        name: shard for name, shard in index["weight_map"].items() if ".layers.2." not in name
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_checkpoint(tmp_path) as checkpoint:
        with pytest.raises(CheckpointError, match="2") as caught:
            stream_kda_layers(checkpoint)
        assert caught.value.code is ErrorCode.LAYERS_MISSING
        with stream_kda_layers(checkpoint, layers=[0, 1]) as stream:
            assert [layer.index for layer in stream] == [0, 1]


# --- lent, held, given back -----------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_data_end_with_the_next_step(checkpoint: Checkpoint, slots: int) -> None:
    with stream_kda_layers(checkpoint, slots=slots) as stream:
        data = [tensor.data for _, tensor in next(stream).weights.items()]
        assert all(bytes(view) for view in data)
        next(stream)
        for view in data:
            with pytest.raises(ValueError, match="released"):
                bytes(view)


def test_data_of_the_last_layer_end_with_the_loop(checkpoint: Checkpoint) -> None:
    with stream_kda_layers(checkpoint) as stream:
        for layer in stream:
            data = layer.weights.q_proj.data
        with pytest.raises(ValueError, match="released"):
            bytes(data)


def test_data_end_when_the_stream_is_left(checkpoint: Checkpoint) -> None:
    with stream_kda_layers(checkpoint, slots=3) as stream:
        held, lent = next(stream).hold(), next(stream)
    for layer in (held, lent):
        with pytest.raises(ValueError, match="released"):
            bytes(layer.weights.q_proj.data)
    held.release()
    lent.release()


def test_a_held_layer_outlasts_the_steps_behind_it(
    checkpoint: Checkpoint, written: Written
) -> None:
    expected = digests(written)
    with stream_kda_layers(checkpoint, slots=3) as stream:
        first, second = next(stream).hold(), next(stream).hold()
        assert (first.held, second.held) == (True, True)
        for layer in stream:
            assert digest_of(layer) == expected[layer.index]
            assert digest_of(first) == expected[0]
            assert digest_of(second) == expected[1]
        first.release()
        first.release()
        assert not first.held
        assert digest_of(second) == expected[1]


def test_a_layer_that_was_given_back_cannot_be_held_any_more(checkpoint: Checkpoint) -> None:
    with stream_kda_layers(checkpoint) as stream:
        layer = next(stream)
        next(stream)
        with pytest.raises(KdaStreamError):
            layer.hold()
        other = next(stream)
        other.release()
        with pytest.raises(KdaStreamError):
            other.hold()


def test_a_layer_released_early_ends_at_once(checkpoint: Checkpoint, written: Written) -> None:
    with stream_kda_layers(checkpoint, slots=1) as stream:
        found = []
        for layer in stream:
            found.append(digest_of(layer))
            layer.release()
            with pytest.raises(ValueError, match="released"):
                bytes(layer.weights.a_log.data)
    assert found == list(digests(written).values())


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_late_reader_in_another_thread_gets_the_right_bytes(
    checkpoint: Checkpoint, written: Written, slots: int
) -> None:
    """The reader is always behind: a slot that were refilled too soon would give a wrong sum."""
    waiting: queue.Queue[KdaLayer | None] = queue.Queue()
    found: list[tuple[int, str]] = []

    def read() -> None:
        while (layer := waiting.get()) is not None:
            time.sleep(0.01)
            found.append((layer.index, digest_of(layer)))
            layer.release()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with stream_kda_layers(checkpoint, slots=slots, layers=KDA_LAYERS * 4) as stream:
        for layer in stream:
            waiting.put(layer.hold())
        waiting.put(None)
        reader.join(timeout=30)
    assert not reader.is_alive()
    assert found == [(n, digests(written)[n]) for n in KDA_LAYERS * 4]


def test_a_stream_whose_slots_are_all_held_goes_on_when_one_is_given_back(
    checkpoint: Checkpoint,
) -> None:
    with stream_kda_layers(checkpoint, slots=2) as stream:
        first = next(stream).hold()
        next(stream).hold()
        begin = time.monotonic()
        releaser = threading.Timer(0.1, first.release)
        releaser.start()
        assert next(stream).index == 2
        assert time.monotonic() - begin > 0.05
        releaser.join()


def test_held_layers_may_be_given_back_in_any_order(
    checkpoint: Checkpoint, written: Written
) -> None:
    with stream_kda_layers(checkpoint, slots=3, layers=KDA_LAYERS * 5) as stream:
        pool: list[KdaLayer] = []
        for n, layer in enumerate(stream):
            pool.append(layer.hold())
            assert [digest_of(one) for one in pool] == [digests(written)[x.index] for x in pool]
            if len(pool) == 3 or n % 2:
                pool.pop(n % len(pool)).release()
        for layer in pool:
            layer.release()


def test_an_array_over_a_layer_that_went_on_is_an_error_in_development_mode(
    run_python: RunPython, written: Written
) -> None:
    script = """
        import json, sys
        import numpy
        from kda_stream import InUseError, open_checkpoint, stream_kda_layers
        with open_checkpoint(sys.argv[1]) as checkpoint, stream_kda_layers(checkpoint) as stream:
            layer = next(stream)
            array = numpy.frombuffer(layer.weights.q_proj.data, dtype=numpy.uint8)
            before = array.tobytes()
            try:
                next(stream)
            except InUseError as error:
                print(json.dumps([error.code.value, array.tobytes() == before]))
            else:
                print("null")
            del array
    """
    found = run_python(script, written.folder, flags=("-X", "dev"))
    assert found == ["memory-in-use", True]


# --- loops that are as they should be -------------------------------------------------------------


def progress(stream: Iterator[KdaLayer]) -> Iterator[KdaLayer]:
    """What a progress bar does."""
    yield from stream


def one_by_one(stream: Iterator[KdaLayer]) -> Iterator[KdaLayer]:
    for layer in stream:
        last = layer
        yield last


WAYS: dict[str, Callable[[Any], list[int]]] = {
    "a comprehension over indices": lambda s: [layer.index for layer in s],
    "a list of indices": lambda s: list(layer.index for layer in s),  # noqa: C400
    "a dict of digests": lambda s: list({layer.index: digest_of(layer) for layer in s}),
    "map": lambda s: list(map(digest_index, s)),
    "enumerate": lambda s: [layer.index for _, layer in enumerate(s)],
    "zip": lambda s: [layer.index for layer, _ in zip(s, itertools.count(), strict=False)],
    "islice": lambda s: [layer.index for layer in itertools.islice(s, 6)],
    "chain": lambda s: [layer.index for layer in itertools.chain(s, [])],
    "a generator in between": lambda s: [layer.index for layer in progress(s)],
    "a generator that keeps a name": lambda s: [layer.index for layer in one_by_one(s)],
    "two generators in between": lambda s: [layer.index for layer in one_by_one(progress(s))],
    "iter": lambda s: [layer.index for layer in iter(iter(s))],
}


def digest_index(layer: KdaLayer) -> int:
    return layer.index


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_loops_that_keep_no_layer_run_to_the_end(
    checkpoint: Checkpoint, way: Callable[[Any], list[int]], slots: int
) -> None:
    with stream_kda_layers(checkpoint, slots=slots) as stream:
        assert way(stream) == KDA_LAYERS


def test_layers_can_be_counted_and_drained(checkpoint: Checkpoint) -> None:
    with stream_kda_layers(checkpoint) as stream:
        assert sum(1 for _ in stream) == 6
    with stream_kda_layers(checkpoint) as stream:
        deque(stream, maxlen=0)
        assert stream.report.layers == 6


def test_a_loop_with_next_and_a_second_name_runs_to_the_end(checkpoint: Checkpoint) -> None:
    with stream_kda_layers(checkpoint) as stream:
        found = []
        layer = next(stream, None)
        while layer is not None:
            current = layer
            found.append(current.index)
            layer = next(stream, None)
    assert found == KDA_LAYERS


def test_a_loop_goes_on_where_another_stopped(checkpoint: Checkpoint) -> None:
    with stream_kda_layers(checkpoint) as stream:
        assert next(stream).index == 0
        for layer in stream:
            if layer.index == 2:
                break
        assert [layer.index for layer in stream] == [4, 5, 6]


def test_a_name_for_an_earlier_layer_is_no_collection(checkpoint: Checkpoint) -> None:
    with stream_kda_layers(checkpoint) as stream:
        first = next(stream)
        assert [layer.index for layer in stream] == [1, 2, 4, 5, 6]
        assert first.index == 0


def test_a_stream_that_ended_stays_ended(checkpoint: Checkpoint) -> None:
    with stream_kda_layers(checkpoint, layers=[0]) as stream:
        assert [layer.index for layer in stream] == [0]
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(stream)


# --- misuse ---------------------------------------------------------------------------------------

COLLECTORS = [
    "list(stream)",
    "tuple(stream)",
    "[layer for layer in stream]",
    "[*stream]",
    "sorted(stream, key=lambda layer: -layer.index)",
    "set(stream)",
    "dict(enumerate(stream))",
    "list(enumerate(stream))",
    "list(zip(stream, range(99)))",
    "list(map(lambda layer: layer, stream))",
    "list(layer for layer in stream)",
    "{layer.index: layer for layer in stream}",
    "collections.deque(stream)",
    "list(itertools.islice(stream, 5))",
    "list(itertools.chain(stream))",
]
COLLECT = """
    import collections, faulthandler, itertools, json, sys
    from kda_stream import StreamError, open_checkpoint, stream_kda_layers
    folder, slots, layers = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    found = {}
    with open_checkpoint(folder) as checkpoint:
        for way in json.loads(sys.argv[4]):
            faulthandler.dump_traceback_later(20, exit=True)
            try:
                with stream_kda_layers(checkpoint, slots=slots, layers=layers) as stream:
                    eval(way)
            except StreamError as error:
                found[way] = str(error)
            except BaseException as error:
                found[way] = "other: " + repr(error)
            else:
                found[way] = "no error"
    print(json.dumps(found))
"""


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_collecting_layers_is_an_error_that_speaks_of_slots_and_no_hang(
    run_python: RunPython, written: Written, slots: int
) -> None:
    found = run_python(COLLECT, written.folder, slots, "null", json.dumps(COLLECTORS))
    assert {way: text for way, text in found.items() if "slot" not in text} == {}
    assert all("\n" not in text for text in found.values())


@pytest.mark.parametrize("slots", [1, 2])
def test_collecting_a_single_layer_is_an_error_too(
    run_python: RunPython, written: Written, slots: int
) -> None:
    """It would come back with data that ended when the list was done."""
    ways = ["list(stream)", "tuple(stream)", "[*stream]", "sorted(stream)"]
    found = run_python(COLLECT, written.folder, slots, "[0]", json.dumps(ways))
    assert {way: text for way, text in found.items() if "slot" not in text} == {}


def test_a_stream_is_not_iterated_outside_its_with_block(checkpoint: Checkpoint) -> None:
    stream = stream_kda_layers(checkpoint)
    for use in (lambda: next(stream), lambda: next(iter(stream)), lambda: list(stream)):
        with pytest.raises(StreamError, match="with"):
            use()
    with stream:
        assert next(stream).index == 0
    for use in (lambda: next(stream), lambda: next(iter(stream)), lambda: list(stream)):
        with pytest.raises(StreamError):
            use()


def test_a_stream_is_entered_once(checkpoint: Checkpoint) -> None:
    stream = stream_kda_layers(checkpoint)
    with stream:
        with pytest.raises(StreamError):
            stream.__enter__()
        assert next(stream).index == 0, "it still works"
    with pytest.raises(StreamError):
        stream.__enter__()


def test_there_is_no_report_before_the_stream_was_entered(checkpoint: Checkpoint) -> None:
    with pytest.raises(StreamError):
        _ = stream_kda_layers(checkpoint).report


def test_closing_twice_is_once(checkpoint: Checkpoint) -> None:
    with stream_kda_layers(checkpoint) as stream:
        next(stream)
        stream.close()
        stream.close()
    stream.close()


def test_closing_a_stream_that_was_never_entered_does_nothing(checkpoint: Checkpoint) -> None:
    stream_kda_layers(checkpoint).close()


def test_a_step_that_waits_ends_when_another_thread_closes_the_stream(
    checkpoint: Checkpoint,
) -> None:
    with stream_kda_layers(checkpoint, slots=1) as stream:
        next(stream).hold()
        closer = threading.Timer(0.1, stream.close)
        closer.start()
        with pytest.raises((StreamError, StopIteration)):
            next(stream)
        closer.join()


def test_closing_the_checkpoint_under_a_stream_is_an_error_and_no_hang(written: Written) -> None:
    checkpoint = open_checkpoint(written.folder)
    with stream_kda_layers(checkpoint, slots=1) as stream:
        next(stream)
        checkpoint.close()
        with pytest.raises(KdaStreamError):
            deque(stream, maxlen=0)


# --- how a stream ends ----------------------------------------------------------------------------


class MineError(Exception):
    pass


def test_an_error_in_the_body_comes_out_as_it_is(checkpoint: Checkpoint) -> None:
    stream = stream_kda_layers(checkpoint)
    with pytest.raises(MineError), stream:
        raise MineError(next(stream).index)


def test_an_error_in_the_body_comes_out_although_an_array_is_left(checkpoint: Checkpoint) -> None:
    stream = stream_kda_layers(checkpoint)
    with pytest.raises(MineError), stream:
        raise MineError(np.frombuffer(next(stream).weights.q_proj.data, dtype=np.uint8))


@pytest.mark.parametrize("read", ["mapped", "positional", "direct", "auto"])
@pytest.mark.parametrize("keep", [0, 4096])
def test_a_shard_that_is_cut_on_the_way_ends_the_stream_with_an_error(
    tmp_path: Path, read: Any, keep: int
) -> None:
    written = write_checkpoint(tmp_path, geometry=MEDIUM)
    shard = written.shard_of(6, "q_proj.weight")
    found: dict[int, str] = {}

    def read_all(stream: Any) -> None:
        for layer in stream:
            found[layer.index] = digest_of(layer)
            if layer.index == 0:
                os.truncate(shard, keep)

    with (
        open_checkpoint(tmp_path) as checkpoint,
        stream_kda_layers(checkpoint, slots=2, read=read) as stream,
    ):
        with pytest.raises(PayloadError) as caught:
            read_all(stream)
        with pytest.raises((StreamError, PayloadError, StopIteration)):
            next(stream)
    assert caught.value.path == str(shard)
    assert 6 not in found
    assert found == {n: digests(written)[n] for n in found}


SCENARIOS = {
    "the end": "for layer in stream: note(layer)",
    "a break": "for layer in stream: note(layer); break",
    "no step at all": "pass",
    "an error in the body": "for layer in stream: note(layer); raise KeyError('mine')",
    "an exit in the body": "for layer in stream: note(layer); raise SystemExit(3)",
    "a held layer": "note(next(stream).hold()); note(next(stream)); next(stream)",
    "a reader that went on": "note(next(stream)); next(stream)",
    "a cut shard": "note(next(stream)); cut(); [note(layer) for layer in stream]",
    "a close in the loop": "note(next(stream)); stream.close()",
    "collecting": "note(next(stream)); list(stream)",
}
LEFT_BEHIND = (
    HELD
    + """
import glob, shutil
what, slots, read = sys.argv[2], int(sys.argv[3]), sys.argv[4]
shutil.copytree(folder, "c")
folder = os.path.abspath("c")

def cut():
    for shard in glob.glob(folder + "/*.safetensors"):
        os.truncate(shard, 100)

with open_checkpoint(folder) as checkpoint:
    with stream_kda_layers(checkpoint, layers=[0], read=read) as stream:
        note(next(stream))
del stream
checkpoint = open_checkpoint(folder)
before = held()
raised = None
during = None
try:
    with stream_kda_layers(checkpoint, slots=slots, lock="require", read=read) as stream:
        try:
            exec(what)
        finally:
            during = held_now()
except BaseException as error:
    raised = type(error).__name__
after = held()
checkpoint.close()
closed = held()
print(json.dumps([before, during, after, closed, raised]))
"""
)


@pytest.mark.mlock
@linux_only
@pytest.mark.parametrize("read", ["mapped", "positional", "direct"])
@pytest.mark.parametrize("what", SCENARIOS.values(), ids=SCENARIOS)
def test_nothing_is_left_behind_however_a_stream_ends(
    run_python: RunPython, written: Written, what: str, read: str
) -> None:
    before, during, after, closed, raised = run_python(LEFT_BEHIND, written.folder, what, 2, read)
    if "close" not in what:
        assert during["locked"] != before["locked"], "the test looks at the wrong thing"
        assert during["arenas"] or "note" not in what, "the test looks at the wrong thing"
    for key in ("threads", "descriptors", "locked"):
        assert after[key] == before[key], key
        assert closed[key] == before[key], key
    assert after["arenas"] == 0
    assert closed["shards"] == 0
    expected = {
        SCENARIOS["an error in the body"]: "KeyError",
        SCENARIOS["an exit in the body"]: "SystemExit",
        SCENARIOS["a cut shard"]: "PayloadError",
        SCENARIOS["collecting"]: "StreamError",
    }
    assert raised == expected.get(what)


@pytest.mark.mlock
@linux_only
def test_a_stream_that_may_not_lock_leaves_nothing_behind(
    run_python: RunPython, written: Written
) -> None:
    script = (
        HELD
        + """
import ctypes, resource
libc = ctypes.CDLL(None)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(header, sets)
sets[0] &= ~(1 << 14)
libc.capset(header, sets)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
checkpoint = open_checkpoint(folder)
before = held()
try:
    with stream_kda_layers(checkpoint, lock="require") as stream:
        raised = None
except MemoryRefusedError as error:
    raised = error.code.value
after = held()
with stream_kda_layers(checkpoint, lock="prefer") as stream:
    indices = [layer.index for layer in stream]
    lock = stream.report.lock
print(json.dumps([before == after, raised, indices, lock.locked, bool(lock.refusal)]))
"""
    )
    assert run_python(script, written.folder) == [True, "lock-refused", KDA_LAYERS, False, True]


@pytest.mark.mlock
@linux_only
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_stream_locks_its_slots_and_no_more(
    run_python: RunPython, written: Written, slots: int
) -> None:
    script = (
        HELD
        + """
slots = int(sys.argv[2])
def locked():
    return int(held_now()["locked"].split()[0]) * 1024
with open_checkpoint(folder) as checkpoint:
    before = locked()
    with stream_kda_layers(checkpoint, slots=slots, lock="require") as stream:
        seen = {locked() - before for _ in stream}
        report = stream.report
    print(json.dumps([sorted(seen), locked() - before, report.lock.locked_bytes,
                      report.slot_bytes]))
"""
    )
    seen, after, locked_bytes, slot_bytes = run_python(script, written.folder, slots)
    page = os.sysconf("SC_PAGESIZE")
    assert seen == [locked_bytes]
    assert slots * slot_bytes <= locked_bytes < slots * (slot_bytes + page)
    assert after == 0


@linux_only
@pytest.mark.parametrize("where", ["in the body", "waiting for a slot"])
def test_ctrl_c_ends_a_stream_at_once_and_leaves_nothing(
    interrupt_python: RunPython, written: Written, where: str
) -> None:
    script = (
        HELD
        + """
where = sys.argv[2]
with open_checkpoint(folder) as checkpoint:
    with stream_kda_layers(checkpoint, layers=[0]) as stream:
        note(next(stream))
checkpoint = open_checkpoint(folder)
before = held()
caught = None
try:
    with stream_kda_layers(checkpoint, slots=1, lock="require") as stream:
        layer = next(stream)
        note(layer)
        print("ready", flush=True)
        if where == "in the body":
            time.sleep(30)
        else:
            layer.hold()
            next(stream)
except KeyboardInterrupt:
    caught = time.monotonic()
after = held()
checkpoint.close()
closed = held()
print(json.dumps({"caught": caught, "before": before, "after": after, "closed": closed}))
"""
    )
    delays = []
    for _ in range(3):  # a busy machine may be late once
        found = interrupt_python(script, written.folder, where)
        for key in ("threads", "descriptors", "locked"):
            assert found["after"][key] == found["before"][key], key
        assert found["after"]["arenas"] == 0
        assert found["closed"]["shards"] == 0
        delays.append(found["delay"])
        if delays[-1] < ANSWERED_SECONDS:
            break
    assert min(delays) < ANSWERED_SECONDS


@linux_only
def test_ctrl_c_at_any_moment_comes_out_as_itself_and_leaves_nothing(
    run_python: RunPython, written: Written
) -> None:
    script = (
        HELD
        + """
import gc, signal

def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)

checkpoint = open_checkpoint(folder)
def once():
    with stream_kda_layers(checkpoint) as stream:
        for layer in stream:
            pass
took = 1.0
for _ in range(20):  # the fastest: the others measure the machine
    begin = time.monotonic()
    once()
    took = min(took, time.monotonic() - begin)
gc.collect()
before = held()
others = {}
turns = 400
for turn in range(turns):
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + took * turn / turns)
        once()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        others["ctrl-c"] = others.get("ctrl-c", 0) + 1
    except BaseException as error:
        others[repr(error)] = others.get(repr(error), 0) + 1
gc.collect()
print(json.dumps([before, held(), others]))
"""
    )
    before, after, others = run_python(script, written.folder)
    assert list(others) == ["ctrl-c"]
    assert others["ctrl-c"] > 20, "the test looks at the wrong moments"
    for key in ("threads", "descriptors", "locked"):
        assert after[key] == before[key], key


def test_a_stream_that_is_never_left_does_not_keep_the_interpreter_from_ending(
    run_python: RunPython, written: Written
) -> None:
    script = """
        import sys
        from kda_stream import open_checkpoint, stream_kda_layers
        checkpoint = open_checkpoint(sys.argv[1])
        stream = stream_kda_layers(checkpoint, slots=1)
        stream.__enter__()
        kept = next(stream).hold()
        print("true")
    """
    assert run_python(script, written.folder, seconds=20)


# --- at the size of GLM-5.3-Flash -----------------------------------------------------------------


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two KDA layers of 275 MB, all zeros, which take no room on the disk."""
    folder = tmp_path_factory.mktemp("full-size")
    write_checkpoint(folder, geometry=GLM, layers=2, mtp=False, shards=2, sparse=True)
    return folder


@linux_only
@pytest.mark.parametrize("read", ["mapped", "positional", "direct"])
def test_leaving_in_the_middle_of_a_copy_does_not_wait_for_its_end(
    full_size: Path, read: Any
) -> None:
    took = []
    for _ in range(3):
        with open_checkpoint(full_size) as checkpoint:
            with stream_kda_layers(checkpoint, slots=1, lock="off", read=read):
                time.sleep(0.02)
                begin = time.monotonic()
            took.append(time.monotonic() - begin)
    assert min(took) < ANSWERED_SECONDS


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("read", ["mapped", "positional", "direct"])
@pytest.mark.parametrize("after", [0.2, 0.37, 0.61])
def test_ctrl_c_is_answered_wherever_a_large_load_is(
    interrupt_python: RunPython, full_size: Path, read: str, after: float
) -> None:
    script = (
        HELD
        + """
read = sys.argv[2]
with open_checkpoint(folder) as checkpoint:
    with stream_kda_layers(checkpoint, layers=[0], slots=1, lock="off", read=read) as stream:
        note(next(stream))
    before = held()
    caught = None
    print("ready", flush=True)
    try:
        while True:
            with stream_kda_layers(checkpoint, slots=1, lock="off", read=read) as stream:
                for layer in stream:
                    note(layer)
    except KeyboardInterrupt:
        caught = time.monotonic()
    after = held()
print(json.dumps({"caught": caught, "before": before, "after": after}))
"""
    )
    delays = []
    for _ in range(3):
        found = interrupt_python(script, full_size, read, after=after, seconds=10)
        for key in ("threads", "descriptors", "locked"):
            assert found["after"][key] == found["before"][key], key
        assert found["after"]["arenas"] == 0
        delays.append(found["delay"])
        if delays[-1] < ANSWERED_SECONDS:
            break
    assert min(delays) < ANSWERED_SECONDS


@linux_only
@pytest.mark.parametrize("body", ["ends", "was interrupted"])
@pytest.mark.parametrize("after", [0.002, 0.01, 0.02])
def test_ctrl_c_while_the_running_copy_is_waited_for_is_not_lost_and_leaves_nothing(
    run_python: RunPython, full_size: Path, after: float, body: str
) -> None:
    script = (
        HELD
        + """
import signal

def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)

def address_space():
    line = next(x for x in open("/proc/self/status") if x.startswith("VmSize"))
    return int(line.split()[1]) * 1024

checkpoint = open_checkpoint(folder)
before, space = held(), address_space()
stream = stream_kda_layers(checkpoint, slots=1, lock="off", read="positional")
raised = None
try:
    with stream:
        time.sleep(0.02)
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
        if sys.argv[3] == "was interrupted":
            raise KeyboardInterrupt
    time.sleep(0.2)
except BaseException as error:
    raised = repr(error)
signal.setitimer(signal.ITIMER_REAL, 0)
print(json.dumps([before, held(), raised, address_space() - space]))
stream.close()
"""
    )
    before, left, raised, space = run_python(script, full_size, after, body)
    assert raised == "KeyboardInterrupt()"
    for key in ("threads", "descriptors", "locked"):
        assert left[key] == before[key], key
    assert space < 128 * 1024**2, "the slot is still there"


# The caller's own family -------------------------------------------------------------------------


def test_a_stream_finds_the_layers_of_a_family_of_ones_own(
    tmp_path: Path, config: KdaConfig
) -> None:
    """Its block's name is that of no known one."""

    def renamed(tensors: dict[str, Stored]) -> None:
        for name in list(tensors):
            tensors[name.replace(".self_attn.", ".mixer.")] = tensors.pop(name)

    write_checkpoint(tmp_path, change=renamed)
    mine = replace(
        GLM5_NEXT,
        name="MINE",
        block="mixer.",
        tensors=tuple(
            replace(spec, name=spec.name.replace("self_attn.", "mixer."))
            for spec in GLM5_NEXT.tensors
        ),
    )
    with open_checkpoint(tmp_path) as checkpoint:
        with stream_kda_layers(checkpoint, family=mine) as stream:
            assert [layer.index for layer in stream] == KDA_LAYERS
        plan = KdaTpPlan(config, 0, 3, mine)
        assert list(stream_kda_layers(checkpoint, plan=plan).layers) == KDA_LAYERS
        with pytest.raises(CheckpointError, match="no layer of the checkpoint is a KDA layer"):
            stream_kda_layers(checkpoint)


def test_a_broken_layer_of_a_family_of_ones_own_is_refused_and_not_passed_over(
    tmp_path: Path,
) -> None:
    def renamed(tensors: dict[str, Stored]) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            if not name.endswith("layers.1.self_attn.o_proj.weight"):
                tensors[name.replace(".self_attn.", ".mixer.")] = tensor

    write_checkpoint(tmp_path, change=renamed)
    mine = replace(
        GLM5_NEXT,
        name="MINE",
        block="mixer.",
        tensors=tuple(
            replace(spec, name=spec.name.replace("self_attn.", "mixer."))
            for spec in GLM5_NEXT.tensors
        ),
    )
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(BindError, match=r"layer 1 .* mixer.o_proj.weight"),
    ):
        stream_kda_layers(checkpoint, family=mine)


# The clock ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["at its end", "closed"])
def test_the_seconds_of_a_report_stop_with_the_stream(checkpoint: Checkpoint, how: str) -> None:
    with stream_kda_layers(checkpoint) as stream:
        next(stream)
        if how == "at its end":
            for _ in stream:
                pass
            ended = stream.report.seconds
            time.sleep(0.05)
            assert stream.report.seconds == ended
    ended = stream.report.seconds
    time.sleep(0.05)
    assert stream.report.seconds == ended > 0


def test_a_stream_that_waits_for_held_layers_alone_logs_so_once(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kda_stream.stream.KEPT_SECONDS", 0.1)
    with stream_kda_layers(checkpoint, slots=2) as stream:
        held = [next(stream).hold(), next(stream).hold()]
        releaser = threading.Timer(1.0, held[0].release)
        releaser.start()
        assert next(stream).index == 2
        releaser.join()
    (record,) = caplog.records
    assert record.name == "kda_stream"
    assert "every slot has been held for 0.1 s" in record.getMessage()
    assert checkpoint.path in record.getMessage()
