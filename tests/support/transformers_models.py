"""What the tests with models of the transformers library share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open

from kda_stream import (
    FAMILIES,
    AttnBlockKind,
    BindError,
    KdaConfig,
    KdaFamily,
    KdaWeights,
    bind_kda_weights,
    classify_attn_block,
    open_checkpoint,
    stream_kda_layers,
)
from kda_stream.interop.transformers import FillReport, fill_kda_layers, published_source
from kda_stream.kda.check import FamilyChoice

INDEX = "model.safetensors.index.json"
CONV_LEAVES = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}

# The field of `KdaWeights` -> the parameter of the model's KDA attention module.
LOW_RANK_PARAMETERS = {
    "q_proj": "q_proj.weight",
    "k_proj": "k_proj.weight",
    "v_proj": "v_proj.weight",
    "conv": "conv1d.weight",
    "f_a": "forget_gate.f_a_proj.weight",
    "f_b": "forget_gate.f_b_proj.weight",
    "g_a": "g_a_proj.weight",
    "g_b": "g_b_proj.weight",
    "b_proj": "b_proj.weight",
    "a_log": "forget_gate.A_log",
    "dt_bias": "forget_gate.dt_bias",
    "o_norm": "o_norm.weight",
    "o_proj": "o_proj.weight",
}


class Stored(NamedTuple):
    """One bound tensor, copied out: a streamed slot is lent only until the next step."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def tensor(self) -> torch.Tensor:
        flat = torch.frombuffer(bytearray(self.data), dtype=TORCH_DTYPES[self.dtype])
        return flat.reshape(self.shape)


ModelTensors = dict[str, torch.Tensor]
BoundLayers = dict[int, dict[str, Stored]]
HowBound = Callable[[Path, FamilyChoice], BoundLayers]


# The model ----------------------------------------------------------------------------------------


def kda_modules(
    layers: Sequence[torch.nn.Module], layer_types: Sequence[str]
) -> dict[int, torch.nn.Module]:
    """The KDA attention of each layer that the model's config says has it."""
    return {
        number: layers[number].get_submodule("self_attn")
        for number, kind in enumerate(layer_types)
        if kind == "linear_attention"
    }


def model_tensors(
    modules: Mapping[int, torch.nn.Module],
    parameters: Mapping[str, str],
    views: Mapping[str, tuple[int, ...]],
) -> dict[int, ModelTensors]:
    """Every parameter of each module, by its field of `KdaWeights`.

    `views` are the shapes of the fields that are handed out in another one than the model's.
    """
    found = {}
    for number, module in modules.items():
        held = dict(module.named_parameters())
        assert set(parameters.values()) == set(held)
        found[number] = {field: held[name] for field, name in parameters.items()}
        for field, shape in views.items():
            found[number][field] = found[number][field].view(shape)
    return found


def make_random(layers: Iterable[torch.nn.Module]) -> None:
    """Fresh, some attention weights are the same in every layer: wrong bytes would pass."""
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.get_submodule("self_attn").parameters():
                parameter.normal_(std=0.3)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def cast_loses(tensor: torch.Tensor) -> bool:
    """Whether the tensor is F32 and would not come back from BF16."""
    return tensor.dtype is torch.float32 and not torch.equal(
        tensor.to(torch.bfloat16).to(torch.float32), tensor
    )


# The files ----------------------------------------------------------------------------------------


def weight_map_of(directory: Path) -> dict[str, str]:
    return dict(json.loads((directory / INDEX).read_bytes())["weight_map"])


def layer_map_of(directory: Path, prefix: str, number: int) -> dict[str, str]:
    """The layer-relative names of one layer, each with its shard, by the index file alone."""
    before = f"{prefix}{number}."
    weight_map = weight_map_of(directory)
    return {n.removeprefix(before): weight_map[n] for n in weight_map if n.startswith(before)}


def dtypes_of(directory: Path, prefix: str, number: int) -> dict[str, str]:
    """The layer-relative names of one layer, each with its dtype, read by safetensors itself."""
    before, dtypes = f"{prefix}{number}.", {}
    for shard in directory.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name.startswith(before):
                    dtypes[name.removeprefix(before)] = file.get_slice(name).get_dtype()
    return dtypes


def layers_in_two_shards(directory: Path, prefix: str, block: str, numbers: list[int]) -> list[int]:
    """Those of the layers whose attention lies in more than one shard."""
    shards = {number: layer_map_of(directory, prefix, number) for number in numbers}
    return [
        number
        for number, held in shards.items()
        if len({held[name] for name in held if name.startswith(block)}) > 1
    ]


# Bound --------------------------------------------------------------------------------------------


def copied_out(weights: KdaWeights) -> dict[str, Stored]:
    return {
        field: Stored(tensor.dtype, tensor.shape, bytes(tensor.data))
        for field, tensor in weights.items()
    }


def bound_one_by_one(directory: Path, family: FamilyChoice) -> BoundLayers:
    return _bind_each(directory, family, copy=True)


def bound_as_views(directory: Path, family: FamilyChoice) -> BoundLayers:
    return _bind_each(directory, family, copy=False)


def bound_by_stream(
    directory: Path, family: FamilyChoice, layers: BoundLayers | None = None
) -> BoundLayers:
    layers = {} if layers is None else layers
    with (
        open_checkpoint(directory) as checkpoint,
        stream_kda_layers(checkpoint, family=family) as stream,
    ):
        for layer in stream:
            layers[int(layer.index)] = copied_out(layer.weights)
    return layers


WAYS = (bound_one_by_one, bound_as_views, bound_by_stream)


def _bind_each(directory: Path, family: FamilyChoice, *, copy: bool) -> BoundLayers:
    config = KdaConfig.from_json(directory / "config.json")
    layers: BoundLayers = {}
    with open_checkpoint(directory) as checkpoint:
        for index in checkpoint.layers():
            source = checkpoint.layer(index)
            if classify_attn_block(source.names(), FAMILIES) is AttnBlockKind.KDA:
                weights, _ = bind_kda_weights(config, index, source, family=family, copy=copy)
                layers[int(index)] = copied_out(weights)
                del weights
    return layers


def families_of(directory: Path, numbers: Iterable[int]) -> dict[int, str]:
    """The family that "auto" finds for each of the layers."""
    config = KdaConfig.from_json(directory / "config.json")
    found = {}
    with open_checkpoint(directory) as checkpoint:
        for number in numbers:
            source = checkpoint.layer(number)
            _, report = bind_kda_weights(config, number, source, family="auto")
            found[number] = report.family
    return found


def refusals(
    directory: Path, numbers: Iterable[int], family: FamilyChoice
) -> Iterator[tuple[int, BindError]]:
    """Each of the layers, with the error that its bind must raise."""
    config = KdaConfig.from_json(directory / "config.json")
    with open_checkpoint(directory) as checkpoint:
        for number in numbers:
            with pytest.raises(BindError) as refused:
                bind_kda_weights(config, number, checkpoint.layer(number), family=family)
            yield number, refused.value


def bound_from_state_dict(
    model: torch.nn.Module,
    config: KdaConfig,
    prefix: str,
    numbers: Iterable[int],
    family: KdaFamily,
) -> BoundLayers:
    """The KDA layers of a model that is in memory, bound out of its own parameters."""
    layers: BoundLayers = {}
    for number in numbers:
        source = published_source(model.state_dict(), f"{prefix}{number}.", family=family)
        weights, _ = bind_kda_weights(config, number, source, family=family, copy=False)
        layers[number] = copied_out(weights)
    return layers


def assert_filled_as_loaded(
    model: torch.nn.Module, directory: Path, numbers: list[int], *, widen: bool = False
) -> FillReport:
    """Fill a model whose KDA layers hold something else; then it is what it was when loaded."""
    loaded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(f"layers.{number}.self_attn." in name for number in numbers):
                parameter.fill_(7)
    with open_checkpoint(directory) as checkpoint:
        report = fill_kda_layers(model, checkpoint, widen=widen)
    assert report.layers == tuple(numbers)
    for name, parameter in model.named_parameters():
        assert raw_bytes(parameter) == raw_bytes(loaded[name]), name
    return report


def assert_filled_gives_the_same_logits(
    model: torch.nn.Module, directory: Path, numbers: list[int], *, widen: bool = False
) -> None:
    """A model computes what it did when loaded once its KDA layers are filled, and not before."""
    tokens = torch.arange(1, 13).view(1, -1)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            found = model(input_ids=tokens).logits
        assert isinstance(found, torch.Tensor)
        assert found.isfinite().all()
        return found

    loaded = logits()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(f"layers.{number}.self_attn." in name for number in numbers):
                parameter.mul_(0.5)
    assert not torch.equal(logits(), loaded)
    with open_checkpoint(directory) as checkpoint:
        fill_kda_layers(model, checkpoint, widen=widen)
    assert torch.equal(logits(), loaded)


def assert_bit_for_bit(bound: BoundLayers, expected: Mapping[int, ModelTensors]) -> None:
    """The layers have exactly these tensors: their dtypes, their shapes and their bytes."""
    assert list(bound) == list(expected)
    for number, tensors in expected.items():
        assert set(bound[number]) == set(tensors)
        for field, tensor in tensors.items():
            stored = bound[number][field]
            assert TORCH_DTYPES[stored.dtype] is tensor.dtype, (number, field)
            assert stored.shape == tuple(tensor.shape), (number, field)
            assert stored.data == raw_bytes(tensor), (number, field)
