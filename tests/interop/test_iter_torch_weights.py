"""`iter_torch_weights`: what an engine's `load_weights` is given, against safetensors' loader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the interop extra")

import torch
from safetensors.torch import load_file, save_file

import kda_stream.weights
from kda_stream import ArgumentError, StreamError, iter_torch_weights, open_checkpoint

pytestmark = pytest.mark.interop

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
]
SHAPES = [(), (1,), (3,), (0,), (2, 0, 3), (5, 7), (64, 40)]


def same(one: Any, other: Any) -> bool:
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and torch.equal(
            one.view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
        )
    )


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch") / "model.safetensors"
    torch.manual_seed(1)
    tensors = {
        f"model.layers.{n % 3}.{str(dtype)[6:]}.{at}": (torch.randn(shape) * 9).to(dtype)
        for n, dtype in enumerate(DTYPES)
        for at, shape in enumerate(SHAPES)
    }
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("order", ["file", "layer"])
@pytest.mark.parametrize("slot_bytes", [4096, 1 << 20])
def test_every_tensor_is_what_safetensors_loads(shard: Path, order: Any, slot_bytes: int) -> None:
    expected = load_file(shard)
    came = set()
    with open_checkpoint(shard) as checkpoint:
        for name, tensor in iter_torch_weights(checkpoint, order=order, slot_bytes=slot_bytes):
            assert same(tensor, expected[name]), name
            came.add(name)
    assert came == set(expected)


class Engine:
    """Copies each tensor into a parameter of its own, as engines do."""

    def __init__(self, shard: Path) -> None:
        self.parameters = {name: torch.empty_like(t) for name, t in load_file(shard).items()}

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            self.parameters[name].copy_(tensor)
            loaded.add(name)
        return loaded


def test_an_engine_s_load_weights_takes_it(shard: Path) -> None:
    engine = Engine(shard)
    with open_checkpoint(shard) as checkpoint:
        loaded = engine.load_weights(iter_torch_weights(checkpoint, slot_bytes=4096, slots=2))
    expected = load_file(shard)
    assert loaded == set(expected)
    assert all(same(engine.parameters[name], expected[name]) for name in expected)


def test_a_tensor_that_is_kept_stays_right(shard: Path) -> None:
    expected = load_file(shard)
    kept: dict[str, Any] = {}
    with open_checkpoint(shard) as checkpoint:
        for name, tensor in iter_torch_weights(checkpoint, slot_bytes=4096, slots=8):
            if len(kept) < 3:
                kept[name] = tensor
    assert all(same(tensor, expected[name]) for name, tensor in kept.items())


def test_keeping_all_of_them_is_an_error(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda_stream.weights, "KEPT_SECONDS", 0.2)
    with open_checkpoint(shard) as checkpoint, pytest.raises(StreamError, match="being kept"):
        dict(iter_torch_weights(checkpoint, slot_bytes=2048))


def test_options_are_looked_at_before_the_first_tensor_is_asked_for(shard: Path) -> None:
    with open_checkpoint(shard) as checkpoint, pytest.raises(ArgumentError, match="order"):
        iter_torch_weights(checkpoint, order="shard")  # type: ignore[arg-type]


def test_a_generator_that_is_closed_ends_the_stream(shard: Path) -> None:
    with open_checkpoint(shard) as checkpoint:
        weights: Any = iter_torch_weights(checkpoint)
        name, tensor = next(weights)
        weights.close()
        assert list(weights) == []
    assert same(tensor, load_file(shard)[name])
