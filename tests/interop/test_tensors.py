"""Bound tensors as torch tensors: the very memory, kept in use, and no file ever written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the interop extra")
pytest.importorskip("ml_dtypes", reason="needs the interop extra")

import ml_dtypes
import torch
from support.checkpoints import UNEVEN, Geometry
from support.families import FAMILIES, GLM5_NEXT, Family, kda_config, write_family

import kda_stream
from kda_stream import (
    ArgumentError,
    InUseError,
    KdaWeights,
    PinnedArena,
    bind_kda_weights,
    kda_slot_bytes,
    open_checkpoint,
    stream_kda_layers,
)
from kda_stream.arrays import as_numpy, as_torch

pytestmark = pytest.mark.interop

EVEN = Geometry(hidden=16, heads=4, head_dim=8, conv_kernel=4)
CONFIG = kda_config(EVEN)
TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
WIDTHS = {"BOOL": 1, "C64": 8}


def width(dtype: str) -> int:
    return WIDTHS.get(dtype) or int("".join(c for c in dtype.split("_")[0] if c.isdigit())) // 8


def bound(*, debug: bool = False) -> tuple[KdaWeights, PinnedArena]:
    arena = PinnedArena(kda_slot_bytes(CONFIG), lock="off", debug=debug)
    weights, _ = bind_kda_weights(CONFIG, 0, GLM5_NEXT.source(EVEN), into=arena)
    return weights, arena


def raw(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


# --- what they are --------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name"), TORCH.items())
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (4, 0, 2)])
def test_every_dtype_that_torch_has_is_a_view_of_the_memory(
    dtype: str, name: str, shape: tuple[int, ...]
) -> None:
    memory = memoryview(bytearray(n % 2 for n in range(width(dtype) * int(np.prod(shape)))))
    tensor = as_torch(dtype, shape, memory.toreadonly())
    assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, name), shape)
    assert raw(tensor) == bytes(memory)
    if memory.nbytes:
        assert tensor.data_ptr() == address(memory)


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2", "NONE"])
def test_a_dtype_that_torch_lacks_is_refused(dtype: str) -> None:
    with pytest.raises(ArgumentError, match=f"no {dtype} in"):
        as_torch(dtype, (2,), memoryview(b"1"))


def test_f4_has_two_values_in_each_element_of_torch() -> None:
    memory = memoryview(bytes(range(12)))
    tensor = as_torch("F4", (3, 8), memory)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float4_e2m1fn_x2, (3, 4))
    assert raw(tensor) == bytes(memory)
    with pytest.raises(ArgumentError, match="no F4"):
        as_torch("F4", (8, 3), memory)  # torch has no half of an element


def test_an_address_where_no_element_may_begin_is_refused() -> None:
    memory = memoryview(bytes(18))
    odd = memory[1:17] if address(memory) % 2 == 0 else memory[:16]
    with pytest.raises(ArgumentError, match="copy=True"):
        as_torch("BF16", (8,), odd)


@pytest.mark.parametrize("dtype", ["BF16", *(code for code in TORCH if code.startswith("F8_"))])
def test_numpy_has_what_ml_dtypes_has(dtype: str) -> None:
    array = as_numpy(dtype, (2, 1), memoryview(bytes(2 * width(dtype))))
    assert array.dtype == np.dtype(getattr(ml_dtypes, TORCH[dtype]))
    assert not array.flags.writeable


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_field_of_every_family_has_its_bytes_and_lies_in_the_slot(family: Family) -> None:
    table = getattr(kda_stream, family.name)
    weights, _ = bind_kda_weights(CONFIG, 0, family.source(EVEN), family=table)
    expected = family.expected(EVEN)
    for name, tensor in weights.items():
        made = tensor.torch()
        assert raw(made) == expected[name]
        assert tuple(made.shape) == tensor.shape
        assert str(made.dtype) == {"BF16": "torch.bfloat16", "F32": "torch.float32"}[tensor.dtype]
        assert made.data_ptr() == address(tensor.data)
        assert raw(torch.from_dlpack(tensor)) == raw(made)
        assert torch.from_dlpack(tensor).data_ptr() == made.data_ptr()
        assert raw(torch.from_numpy(tensor.numpy().view(np.uint8).copy())) == expected[name]


def test_making_one_warns_of_nothing() -> None:
    script = """
        import kda_stream.arrays as arrays
        arrays.as_torch("BF16", (2,), memoryview(bytes(4)))
    """
    run = [sys.executable, "-W", "error", "-c", "if True:" + script]
    done = subprocess.run(run, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- how long -------------------------------------------------------------------------------------


def as_it_is(tensor: Any) -> Any:
    return tensor.torch()


def by_dlpack(tensor: Any) -> Any:
    return torch.from_dlpack(tensor)


def a_slice(tensor: Any) -> Any:
    return tensor.torch()[1:]


def a_view(tensor: Any) -> Any:
    return tensor.torch().view(torch.uint8).t()


ways = pytest.mark.parametrize("way", [as_it_is, by_dlpack, a_slice, a_view])


@ways
def test_in_debug_mode_a_slot_is_not_given_back_while_a_tensor_points_into_it(
    way: Callable[[Any], Any],
) -> None:
    weights, arena = bound(debug=True)
    tensor = way(weights.q_proj)
    with pytest.raises(InUseError, match="still points into slot 0"):
        weights.release()
    del tensor
    weights.release()
    arena.close()


@ways
def test_a_tensor_keeps_the_memory_when_all_else_is_gone(way: Callable[[Any], Any]) -> None:
    weights, arena = bound()
    tensor = way(weights.q_proj)
    expected = raw(tensor)
    with pytest.raises(InUseError):
        arena.close()
    del weights, arena
    assert raw(tensor) == expected


def test_a_tensor_of_a_streamed_layer_that_is_kept_is_told_of_in_debug_mode(tmp_path: Path) -> None:
    write_family(tmp_path, GLM5_NEXT, EVEN)
    script = """
        import sys
        from kda_stream import InUseError, open_checkpoint, stream_kda_layers
        with open_checkpoint(sys.argv[1]) as checkpoint:
            kept = None
            try:
                with stream_kda_layers(checkpoint, lock="off") as stream:
                    for layer in stream:
                        kept = layer.weights.q_proj.torch() if kept is None else kept
            except InUseError as error:
                print(error)
    """
    run = [sys.executable, "-X", "dev", "-W", "ignore", "-c", "if True:" + script, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert "still points into slot 0" in done.stdout, done.stderr


def test_a_model_s_parameters_can_be_filled_in_the_loop(tmp_path: Path) -> None:
    written = write_family(tmp_path, GLM5_NEXT, EVEN)
    parameters = {}
    with open_checkpoint(tmp_path) as checkpoint, stream_kda_layers(checkpoint) as stream:
        for layer in stream:
            parameters[layer.index] = {n: t.torch().clone() for n, t in layer.weights.items()}
    for number, fields in parameters.items():
        assert {name: raw(tensor) for name, tensor in fields.items()} == written.expected(number)


# --- writing --------------------------------------------------------------------------------------


def test_writing_to_a_tensor_writes_the_slot_and_no_file(tmp_path: Path) -> None:
    write_family(tmp_path, GLM5_NEXT, EVEN)
    shards = {shard: shard.read_bytes() for shard in tmp_path.glob("*.safetensors")}
    with open_checkpoint(tmp_path) as checkpoint:
        weights, _ = bind_kda_weights(CONFIG, 0, checkpoint.layer(0))
        weights.q_proj.torch().fill_(3)
        assert weights.q_proj.torch().float().unique().tolist() == [3]
    assert shards == {shard: shard.read_bytes() for shard in shards}


def test_writing_over_a_view_of_the_file_writes_pages_of_the_tensor_s_own(tmp_path: Path) -> None:
    written = write_family(tmp_path, GLM5_NEXT, EVEN)
    shards = {shard: shard.read_bytes() for shard in tmp_path.glob("*.safetensors")}
    checkpoint = open_checkpoint(tmp_path)
    weights, _ = bind_kda_weights(CONFIG, 0, checkpoint.layer(0), copy=False)
    tensors = {}
    for name, tensor in weights.items():
        tensors[name] = tensor.torch()
        assert raw(tensors[name]) == written.expected(0)[name]
        tensors[name].fill_(3)
        if name != "conv":  # copied into a slot: there is no such field in the file
            assert bytes(tensor.data) == written.expected(0)[name]
    weights.release()
    with pytest.raises(InUseError):
        checkpoint.close()
    assert shards == {shard: shard.read_bytes() for shard in shards}
    for name in set(tensors) - {"conv"}:  # the checkpoint is closed, its own pages are here
        assert tensors[name].float().unique().tolist() == [3]


def test_a_view_at_an_odd_place_of_the_file_says_what_to_do(tmp_path: Path) -> None:
    """A header may be of odd length; what is copied into a slot lies well all the same."""
    write_family(tmp_path, GLM5_NEXT, UNEVEN)
    config = kda_config(UNEVEN)
    with open_checkpoint(tmp_path) as checkpoint:
        weights, _ = bind_kda_weights(config, 0, checkpoint.layer(0), copy=False)
        for name, tensor in weights.items():
            if address(tensor.data) % (4 if tensor.dtype == "F32" else 2):
                with pytest.raises(ArgumentError, match="copy=True"):
                    tensor.torch()
            else:
                assert tensor.torch() is not None, name
        copied, _ = bind_kda_weights(config, 0, checkpoint.layer(0))
        assert all(tensor.torch() is not None for _, tensor in copied.items())
        weights.release()
