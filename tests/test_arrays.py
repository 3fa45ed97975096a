"""Memory as numpy arrays and by DLPack: without a copy, read-only, and kept in use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import UNEVEN
from support.families import GLM5_NEXT, kda_config, write_family

from kda_stream import (
    ArgumentError,
    ClosedError,
    InUseError,
    KdaWeights,
    PinnedArena,
    bind_kda_weights,
    kda_slot_bytes,
    open_checkpoint,
)
from kda_stream.arrays import as_dlpack, as_numpy

RunPython = Callable[..., Any]
CONFIG = kda_config(UNEVEN)
NUMPY = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "u2",
    "I16": "i2",
    "U32": "u4",
    "I32": "i4",
    "U64": "u8",
    "I64": "i8",
    "F16": "f2",
    "F32": "f4",
    "F64": "f8",
    "C64": "c8",
}
SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")

# Put before a script: torch and ml_dtypes cannot be imported, as where they are not installed.
WITHOUT_FRAMEWORKS = """
import sys
sys.modules["torch"] = sys.modules["ml_dtypes"] = None
"""


def bound(*, debug: bool = False, copy: bool = True) -> tuple[KdaWeights, PinnedArena]:
    arena = PinnedArena(kda_slot_bytes(CONFIG), lock="off", debug=debug)
    weights, _ = bind_kda_weights(CONFIG, 0, GLM5_NEXT.source(UNEVEN), into=arena, copy=copy)
    return weights, arena


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


# --- numpy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "code"), NUMPY.items())
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (4, 0, 2)])
def test_an_array_has_the_dtype_the_shape_and_the_very_memory(
    dtype: str, code: str, shape: tuple[int, ...]
) -> None:
    width = np.dtype(code).itemsize
    data = bytes(n % 2 for n in range(width * int(np.prod(shape))))
    memory = memoryview(data)
    array = as_numpy(dtype, shape, memory)
    assert (array.dtype, array.shape) == (np.dtype(code), shape)
    assert array.tobytes() == data
    assert not array.flags.writeable
    if data:
        assert address(array) == address(np.frombuffer(memory, np.uint8))


def test_an_array_may_lie_at_an_odd_address() -> None:
    array = as_numpy("F32", (2,), memoryview(bytes(range(9)))[1:])
    assert array.tobytes() == bytes(range(1, 9))


@pytest.mark.parametrize("dtype", [*SUB_BYTE, "NONE"])
def test_what_no_array_holds_is_refused_with_what_to_do(dtype: str) -> None:
    with pytest.raises(ArgumentError, match="view its bytes") as caught:
        as_numpy(dtype, (2,), memoryview(b"1"), name="q_proj")
    assert caught.value.tensor == "q_proj"


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 2)])
def test_memory_of_another_size_than_the_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="not of the shape's size"):
        as_numpy("F32", shape, memoryview(bytes(8)))


def test_a_field_is_an_array_of_its_shape_over_the_slot() -> None:
    weights, _ = bound()
    array = weights.a_log.numpy()
    assert array.shape == weights.a_log.shape
    assert array.tobytes() == bytes(weights.a_log.data)
    assert address(array) == address(np.frombuffer(weights.a_log.data, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_bf16_says_how_it_is_had_where_ml_dtypes_is_missing(run_python: RunPython) -> None:
    script = """
        import json
        from kda_stream import NotInstalledError
        from kda_stream.arrays import as_numpy
        try:
            as_numpy("BF16", (1,), memoryview(b"ab"), name="q_proj")
        except NotInstalledError as error:
            print(json.dumps(str(error)))
    """
    message = run_python(WITHOUT_FRAMEWORKS + "if True:" + script)
    assert "BF16 as a numpy array needs ml_dtypes" in message
    assert "pip install ml_dtypes" in message


# --- DLPack ---------------------------------------------------------------------------------------


def test_dlpack_hands_out_the_slot_itself() -> None:
    weights, _ = bound()
    array = np.from_dlpack(weights.a_log)  # type: ignore[arg-type]
    assert address(array) == address(weights.a_log.numpy())
    assert array.tobytes() == bytes(weights.a_log.data)


def test_dlpack_is_told_that_the_memory_is_the_processor_s() -> None:
    weights, _ = bound()
    assert weights.q_proj.__dlpack_device__() == weights.a_log.numpy().__dlpack_device__()


def test_dlpack_of_bf16_says_how_it_is_had_where_torch_is_missing(run_python: RunPython) -> None:
    script = """
        import json
        from kda_stream import NotInstalledError
        from kda_stream.arrays import as_dlpack
        try:
            as_dlpack("BF16", (1,), memoryview(b"ab"), {}, name="q_proj")
        except NotInstalledError as error:
            print(json.dumps(str(error)))
    """
    message = run_python(WITHOUT_FRAMEWORKS + "if True:" + script)
    assert "BF16 by DLPack needs torch" in message


def test_dlpack_refuses_an_address_where_no_element_may_begin() -> None:
    memory = memoryview(bytes(16))
    odd = memory[1:] if address(np.frombuffer(memory, np.uint8)) % 4 == 0 else memory[:15]
    with pytest.raises(ArgumentError, match="where no element may begin"):
        as_dlpack("F32", (2,), odd[:8], {}, name="a_log")


# --- how long -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["numpy", "dlpack"])
def test_a_slot_is_not_given_back_in_debug_mode_while_an_array_points_into_it(way: str) -> None:
    weights, arena = bound(debug=True)
    tensor = weights.a_log
    array = tensor.numpy() if way == "numpy" else np.from_dlpack(tensor)  # type: ignore[arg-type]
    part = array[1:]
    del array
    with pytest.raises(InUseError, match="still points into slot 0"):
        weights.release()
    del part
    weights.release()
    arena.close()


def test_nothing_is_made_of_a_slot_that_was_given_back() -> None:
    weights, _ = bound()
    weights.release()
    for make in (weights.a_log.numpy, weights.a_log.torch, weights.a_log.__dlpack__):
        with pytest.raises(ClosedError, match="released"):
            make()


@pytest.mark.parametrize("way", ["numpy", "dlpack"])
def test_an_array_keeps_the_memory_after_the_arena_is_closed(way: str) -> None:
    weights, arena = bound()
    expected = bytes(weights.a_log.data)
    tensor = weights.a_log
    array = tensor.numpy() if way == "numpy" else np.from_dlpack(tensor)  # type: ignore[arg-type]
    with pytest.raises(InUseError):
        arena.close()
    del weights, arena, tensor
    assert array.tobytes() == expected


def test_the_next_step_of_a_stream_in_debug_mode_tells_of_an_array_that_is_kept(
    tmp_path: Path, run_python: RunPython
) -> None:
    write_family(tmp_path / "checkpoint", GLM5_NEXT, UNEVEN)
    script = """
        import json, sys
        from kda_stream import InUseError, open_checkpoint, stream_kda_layers
        with open_checkpoint(sys.argv[1]) as checkpoint:
            kept = None
            try:
                with stream_kda_layers(checkpoint, lock="off") as stream:
                    for layer in stream:
                        kept = kept or layer.weights.a_log.numpy()
            except InUseError as error:
                print(json.dumps(str(error)))
    """
    message = run_python(script, tmp_path / "checkpoint", flags=("-X", "dev"))
    assert "still points into slot 0" in message


# --- copy on write --------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_what_is_written_over_a_view_of_the_file_stays_in_pages_of_its_own(tmp_path: Path) -> None:
    written = write_family(tmp_path, GLM5_NEXT, UNEVEN)
    checkpoint = open_checkpoint(tmp_path)
    weights, _ = bind_kda_weights(CONFIG, 0, checkpoint.layer(0), copy=False)
    name, tensor = next(
        (name, tensor)
        for name, tensor in weights.items()
        if name in ("a_log", "dt_bias") and address(tensor.numpy()) % 4 == 0
    )
    array = np.from_dlpack(tensor)  # type: ignore[arg-type]
    assert array.tobytes() == written.expected(0)[name]
    writable = np.asarray(tensor._writable_view())
    writable[:] = 255
    assert bytes(tensor.data) == written.expected(0)[name]
    weights.release()
    with pytest.raises(InUseError, match="still point into mapped shards"):
        checkpoint.close()
    assert writable.tobytes() == b"\xff" * writable.nbytes
    maps = Path("/proc/self/maps")
    assert maps.read_text().count("model-") == 2  # the arrays' own pages, and no shard's map
    del array, writable
    assert "model-" not in maps.read_text()


def test_no_view_is_made_of_a_file_that_has_changed(tmp_path: Path) -> None:
    write_family(tmp_path, GLM5_NEXT, UNEVEN)
    with open_checkpoint(tmp_path) as checkpoint:
        weights, _ = bind_kda_weights(CONFIG, 0, checkpoint.layer(0), copy=False)
        for shard in tmp_path.glob("*.safetensors"):
            shard.write_bytes(shard.read_bytes() + b"more")
        with pytest.raises(OSError, match="has changed"):
            weights.a_log.__dlpack__()
        weights.release()
