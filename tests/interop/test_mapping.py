"""`MappingSource`: tensors of numpy and torch, bound where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.checkpoints import UNEVEN
from support.families import FAMILIES, GLM5_NEXT, Family, kda_config

import kda_stream
from kda_stream import (
    ArgumentError,
    AttnBlockKind,
    BindError,
    MappingSource,
    RawTensor,
    bind_kda_weights,
    classify_attn_block,
    identify_family,
)

CONFIG = kda_config(UNEVEN)
PREFIX = "model.layers.3."


def arrays(family: Family, prefix: str = "") -> dict[str, Any]:
    """A layer as numpy arrays; BF16 by ml_dtypes, so that it has a dtype of its own."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs the numpy extra")
    dtypes = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype("f4")}
    return {
        f"{prefix}{name}": np.frombuffer(stored.bytes_of(name), dtypes[stored.dtype]).reshape(
            stored.shape
        )
        for name, stored in family.tensors(UNEVEN).items()
    }


def tensors(family: Family, prefix: str = "") -> dict[str, Any]:
    torch = pytest.importorskip("torch", reason="needs the interop extra")
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    return {
        f"{prefix}{name}": torch.frombuffer(
            bytearray(stored.bytes_of(name)), dtype=dtypes[stored.dtype]
        ).reshape(stored.shape)
        for name, stored in family.tensors(UNEVEN).items()
    }


def raw_tensors(family: Family, prefix: str = "") -> dict[str, Any]:
    return {
        f"{prefix}{name}": RawTensor(stored.dtype, stored.shape, stored.bytes_of(name))
        for name, stored in family.tensors(UNEVEN).items()
    }


holders = pytest.mark.parametrize(
    "holder",
    [
        pytest.param(arrays, marks=pytest.mark.interop),
        pytest.param(tensors, marks=pytest.mark.interop),
        raw_tensors,
    ],
)


@holders
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("copy", [True, False], ids=["copied", "viewed"])
def test_a_layer_of_every_family_is_bound_byte_for_byte(
    holder: Any, family: Family, copy: bool
) -> None:
    source = MappingSource(holder(family, PREFIX), prefix=PREFIX)
    assert identify_family(source).name == family.name
    table = getattr(kda_stream, family.name)
    weights, report = bind_kda_weights(CONFIG, 3, source, family=table, copy=copy)
    expected = family.expected(UNEVEN)
    assert {name: bytes(tensor.data) for name, tensor in weights.items()} == expected
    assert report.read.path == ("memory" if copy else "view")


def test_names_of_other_layers_are_left_out() -> None:
    held = raw_tensors(GLM5_NEXT, "model.layers.1.") | raw_tensors(GLM5_NEXT, "model.layers.10.")
    source = MappingSource(held | {"lm_head.weight": None}, prefix="model.layers.1.")
    assert sorted(source.names()) == sorted(GLM5_NEXT.tensors(UNEVEN))
    assert source.get("lm_head.weight") is None
    assert classify_attn_block(source.names()) is AttnBlockKind.KDA


def test_a_prefix_that_no_name_has_is_told_with_the_names() -> None:
    with pytest.raises(ArgumentError, match=r"layers\.0\.self_attn\.A_log.*got model\.layers\.1\."):
        MappingSource(raw_tensors(GLM5_NEXT, "model.layers.1."), prefix="layers.0.")


def test_an_empty_layer_is_refused_by_the_binder() -> None:
    with pytest.raises(BindError, match="missing"):
        bind_kda_weights(CONFIG, 0, MappingSource({}))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4), "f4").T[1:],
        np.zeros((4, 4), "f4")[:, :2],
        np.zeros(3, ">f4"),
        np.zeros(3, "c16"),
        np.zeros(2, object),
        np.array(["a"]),
        [1.0, 2.0],
        3.0,
        "text",
    ],
    ids=lambda array: type(array).__name__,
)
def test_what_is_no_plain_memory_is_refused_by_name(array: object) -> None:
    with pytest.raises(ArgumentError, match="no plain memory") as caught:
        MappingSource({"self_attn.A_log": array}).get("self_attn.A_log")
    assert caught.value.tensor == "self_attn.A_log"


@pytest.mark.parametrize("code", ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f8"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 2)])
def test_every_plain_dtype_and_shape_of_numpy_is_viewed(code: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, code)
    tensor = MappingSource({"x": array}).get("x")
    assert tensor is not None
    assert (tensor.shape, tensor.nbytes, bytes(tensor.data)) == (
        shape,
        array.nbytes,
        array.tobytes(),
    )
    if array.size:
        array[...] = 0
        assert not any(tensor.data)  # it is the caller's memory, and not a copy


@pytest.mark.interop
def test_what_torch_holds_otherwise_is_refused_with_what_to_call() -> None:
    torch = pytest.importorskip("torch", reason="needs the interop extra")
    for tensor, said in (
        (torch.zeros(4, 4).t(), "contiguous()"),
        (torch.zeros(4, device="meta"), "cpu()"),
        (torch.zeros(3).to_sparse(), "to_dense()"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "contiguous()"),
        (torch.zeros(3, dtype=torch.complex128), "dtype torch.complex128"),
    ):
        with pytest.raises(ArgumentError) as caught:
            MappingSource({"x": tensor}).get("x")
        assert said in str(caught.value)


@pytest.mark.interop
@pytest.mark.parametrize("left", [0, 1, 3999])
def test_a_tensor_whose_storage_was_freed_is_refused_and_not_read(left: int) -> None:
    torch = pytest.importorskip("torch", reason="needs the interop extra")
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(left)
    with pytest.raises(ArgumentError, match="it was freed"):
        MappingSource({"x": tensor}).get("x")


@pytest.mark.interop
def test_a_parameter_and_a_scalar_of_torch_are_viewed() -> None:
    torch = pytest.importorskip("torch", reason="needs the interop extra")
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    source = MappingSource({"p": parameter, "s": torch.tensor(2.0)})
    found = source.get("p")
    assert found is not None
    with torch.no_grad():
        parameter.fill_(0)
    assert not any(found.data)
    scalar = source.get("s")
    assert scalar is not None
    assert (scalar.shape, scalar.nbytes) == ((), 4)
