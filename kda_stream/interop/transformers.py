"""Models of the transformers library: their KDA layers as sources, and filled from a checkpoint.

These models keep a KDA block as a module of its own form: the decay's tensors in `forget_gate`, the
three convolutions joined to one `conv1d` [3Q, 1, K]. Everything else is as in the published files.
Source: the models glm5_next, kimi_linear and bailing_hybrid of transformers 5.17 to 5.24.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..checkpoint.checkpoint import Checkpoint
from ..dtypes import KdaDtype
from ..errors import ArgumentError, BindError, ErrorCode, listed
from ..kda.check import FamilyChoice, check_kda_block, require_family
from ..kda.families import GLM5_NEXT_F32_CONV
from ..kda.family import A_LOG_FIELD, CONV_FIELD, KdaFamily, field_name
from ..kda.source import RawTensor
from ..layout import Field, fields_of
from ..require import require_kind
from ..selection import config_of
from ..staging.locking import LockPolicy, LockReport
from ..staging.reading import ReadPath
from ..stream import KdaLayer, stream_kda_layers
from .mapping import MappingSource, raw_tensor

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_BLOCK: Final = "self_attn."
_GATE: Final = "forget_gate."
_JOINED_CONV: Final = "conv1d.weight"
_DTYPES: Final = {KdaDtype.BF16: "bfloat16", KdaDtype.F32: "float32"}
_PARAMETER: Final = re.compile(r"((?:.*\.)?)layers\.(\d+)\.self_attn\.(.+)")


def published_source(
    tensors: Mapping[str, Any], prefix: str, *, family: KdaFamily = GLM5_NEXT_F32_CONV
) -> MappingSource:
    """One layer of a model's state_dict, under the names that the published files of `family` have.

    `prefix` is what stands before the layer's names, such as `model.language_model.layers.0.`. No
    byte is moved: each of the three convolutions is a third of the joined one. The memory stays the
    model's. Raises `ArgumentError` as `MappingSource` does.

    Example:
        source = published_source(model.state_dict(), "model.language_model.layers.0.")
        weights, report = bind_kda_weights(config, 0, source, family=GLM5_NEXT_F32_CONV)
    """
    require_family(family)
    found: dict[str, Any] = {}
    for full_name, tensor in tensors.items():
        if not full_name.startswith(prefix):
            continue
        name = full_name[len(prefix) :]
        if not name.startswith(_BLOCK):
            found[name] = tensor
            continue
        field = _field(name.removeprefix(_BLOCK))
        specs = family.fields.get(field, ())
        if field == CONV_FIELD:
            parts = _thirds(raw_tensor(tensor, name))
            found.update({spec.name: part for spec, part in zip(specs, parts, strict=True)})
        else:
            found[specs[0].name if specs else name] = tensor
    return MappingSource(found)


@dataclass(frozen=True, slots=True)
class FillReport:
    """What was filled: `layers` by number, and `tensors` of them, out of `bytes` that are stored.

    `widened` are the fields that are stored in BF16 and F32 in the model; `families` are those of
    the layers; `reads` counts them by the way they were read; `lock` tells of the slots' memory.
    """

    layers: tuple[int, ...]
    tensors: int
    bytes: int
    widened: tuple[str, ...]
    families: tuple[str, ...]
    reads: Mapping[str, int]
    lock: LockReport


def fill_kda_layers(
    model: Module,
    checkpoint: Checkpoint,
    *,
    layers: Iterable[int] | None = None,
    family: FamilyChoice = "auto",
    widen: bool = False,
    slots: int = 2,
    lock: LockPolicy = "prefer",
    read: ReadPath = "auto",
) -> FillReport:
    """Copy the checkpoint's KDA layers into the parameters of a model of the transformers library.

    `layers` are numbers, None means every KDA layer of the model. The parameters may be on any
    device, and are written in place, bytes unchanged: each must have the dtype that the checkpoint
    stores, and every parameter of a layer's KDA block is filled exactly once. All that is checked
    before the first is written. With `widen` a parameter in F32 also takes what is stored in BF16,
    each value as it is: the library keeps the convolutions in F32, and the published GLM-5.3-Flash
    stores them in BF16. `family`, `slots`, `lock` and `read` as for `stream_kda_layers`.

    Raises `ArgumentError` for a model without such layers, or with more than one decoder that has
    them; `BindError` when dtypes or shapes of model and checkpoint differ, or parameters are on the
    meta device (use `model.to_empty(device=...)`); and as `stream_kda_layers` does.
    """
    blocks = _kda_parameters(model)
    chosen = sorted(blocks) if layers is None else list(layers)
    unknown = [str(number) for number in chosen if number not in blocks]
    if unknown or not chosen:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "the model has no such KDA layers",
            expected=f"layers among {listed(list(map(str, sorted(blocks)))) or 'none'}",
            got=listed(unknown) or "none",
            hint="pass a GLM5-Next, Kimi-Linear or Ling model of the transformers library",
        )
    widened = _require_fitting(blocks, chosen, checkpoint, family, widen=widen)
    with stream_kda_layers(
        checkpoint, layers=chosen, family=family, slots=slots, lock=lock, read=read
    ) as stream:
        tensors, families = 0, []
        for layer in stream:
            tensors += _fill(blocks[layer.index], layer)
            families.append(layer.report.family)
        report = stream.report
    return FillReport(
        tuple(chosen),
        tensors,
        report.bytes,
        widened,
        tuple(dict.fromkeys(families)),
        report.reads,
        report.lock,
    )


def _field(leaf: str) -> str:
    """The field of `KdaWeights` for a parameter of that name in the model's KDA block."""
    bare = leaf.removeprefix(_GATE)
    return CONV_FIELD if bare == _JOINED_CONV else field_name(bare)


def _thirds(joined: RawTensor) -> list[RawTensor]:
    rows = joined.shape[0] if joined.shape else 0
    if rows % 3:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "the joined convolution is not three of one size",
            tensor=_JOINED_CONV,
            expected="[3 * heads * head_dim, 1, kernel]",
            got=joined.shape,
            hint="pass the state_dict of a whole model",
        )
    return [joined.part(0, n * rows // 3, (n + 1) * rows // 3) for n in range(3)]


def _kda_parameters(model: Module) -> dict[int, dict[str, Tensor]]:
    """The parameters of each KDA layer, by field of `KdaWeights`."""
    if not callable(getattr(model, "named_parameters", None)):
        hint = "pass a model of the transformers library"
        require_kind("model", model, (), "a torch module", hint)
    found: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        match = _PARAMETER.fullmatch(name)
        if match is not None:
            decoder = found.setdefault(match[1], {})
            decoder.setdefault(int(match[2]), {})[_field(match[3])] = parameter
    decoders = {
        prefix: {number: fields for number, fields in layers.items() if A_LOG_FIELD in fields}
        for prefix, layers in found.items()
    }
    with_kda = [prefix for prefix, layers in decoders.items() if layers]
    if len(with_kda) > 1:
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "the model has more than one decoder with KDA layers",
            expected="one",
            got=listed([f"{prefix}layers" for prefix in with_kda]),
            hint="pass the part of the model that is to be filled",
        )
    return decoders[with_kda[0]] if with_kda else {}


def _require_fitting(
    blocks: Mapping[int, Mapping[str, Tensor]],
    chosen: Iterable[int],
    checkpoint: Checkpoint,
    family: FamilyChoice,
    *,
    widen: bool,
) -> tuple[str, ...]:
    """The fields to be widened; raises when a parameter cannot take the checkpoint's bytes."""
    config = config_of(checkpoint)
    widened: dict[str, None] = {}
    for number in chosen:
        block = check_kda_block(config, number, checkpoint.layer(number), family)
        stored = {field.name: field for field in fields_of(config, block.family, block.tensors)}
        held = blocks[number]
        wrong = [f"{name} is in one of them only" for name in sorted(held.keys() ^ stored.keys())]
        for name in stored.keys() & held.keys():
            if widen and stored[name].dtype is KdaDtype.BF16 and _dtype(held[name]) == "float32":
                widened[name] = None
            elif _dtype(held[name]) != _DTYPES[stored[name].dtype]:
                wrong.append(f"{name} is {_dtype(held[name])}, stored {stored[name].dtype}")
            wrong += _differences(stored[name], held[name])
        if wrong:
            raise BindError(
                ErrorCode.MODEL_DIFFERS,
                f"layer {number} of the model cannot take the bytes of the checkpoint's",
                path=checkpoint.path,
                expected=f"the dtypes and shapes that are stored: {block.family}",
                got=listed(sorted(wrong)),
                hint="build the model in these dtypes and this geometry, or pass widen=True for "
                "F32 out of BF16; on the meta device, call model.to_empty(device=...) before",
            )
    return tuple(sorted(widened))


def _dtype(parameter: Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def _differences(field: Field, parameter: Tensor) -> Iterator[str]:
    if [n for n in parameter.shape if n != 1] != [n for n in field.shape if n != 1]:
        yield f"{field.name} is {list(parameter.shape)}, stored {list(field.shape)}"
    if parameter.is_meta:
        yield f"{field.name} is on the meta device"


def _fill(parameters: Mapping[str, Tensor], layer: KdaLayer) -> int:
    """Copy a layer's tensors into the parameters; how many."""
    import torch

    with torch.no_grad():
        for name, tensor in layer.weights.items():
            parameter = parameters[name]
            parameter.copy_(tensor.torch().view(parameter.shape))
    return len(parameters)
