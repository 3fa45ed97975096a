"""The decoder layers of a checkpoint: found from the tensor names, seen under relative names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Final, Protocol

from ..errors import CheckpointError, ErrorCode, listed, shown
from ..kda.families import BLOCKS, KDA_SIGNS
from ..kda.source import RawTensor
from ..kda.tensors import DSA_MARKERS
from ..limits import LAYER_DIGITS_MAX
from .header import TensorInfo

_LAYER_NAME: Final = re.compile(
    rf"((?:.*?\.)?layers\.)(0|[1-9][0-9]{{0,{LAYER_DIGITS_MAX - 1}}})\.(?=.)", re.DOTALL
)


class LayerIndex(int):
    """A layer's number; `is_mtp` marks a multi-token-prediction layer behind the decoder's own."""

    is_mtp: bool

    def __new__(cls, number: int, *, is_mtp: bool = False) -> LayerIndex:
        """The number `number`, marked."""
        index = super().__new__(cls, number)
        index.is_mtp = is_mtp
        return index


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The decoder layers that the names show: full tensor names by layer number, numbers in order.

    `prefix` is what stands before the number, such as `model.language_model.layers.`.
    """

    prefix: str
    by_number: Mapping[int, tuple[str, ...]] = field(repr=False)


class TensorHolder(Protocol):
    """Whoever holds the tensors of a layer under their full names; a `Checkpoint` is one."""

    def info(self, name: str) -> TensorInfo:
        """What the headers say of the tensor `name`."""
        ...

    def tensor(self, name: str) -> RawTensor:
        """The tensor `name`."""
        ...


class LayerSource:
    """One decoder layer under layer-relative names: a `KdaTensorSource` over a checkpoint.

    `index` is the layer's number, `prefix` what its full names begin with. The tensors it gives are
    lent until the checkpoint is closed.
    """

    def __init__(
        self, holder: TensorHolder, index: LayerIndex, prefix: str, full_names: Iterable[str]
    ) -> None:
        self.index = index
        self.prefix = prefix
        self._holder = holder
        self._full_names = {name[len(prefix) :]: name for name in full_names}

    def names(self) -> list[str]:
        """Every layer-relative name of the layer, attention or not."""
        return list(self._full_names)

    def info(self, name: str) -> TensorInfo | None:
        """What the header says of the tensor `name`, or None when the layer has no such tensor."""
        full_name = self._full_names.get(name)
        return None if full_name is None else self._holder.info(full_name)

    def get(self, name: str) -> RawTensor | None:
        """The tensor `name`, a read-only view without a copy, or None when there is none."""
        full_name = self._full_names.get(name)
        return None if full_name is None else self._holder.tensor(full_name)

    def __repr__(self) -> str:
        mtp = ", MTP" if self.index.is_mtp else ""
        return f"LayerSource({shown(repr(self.prefix))}, {len(self._full_names)} tensors{mtp})"


def find_layers(names: Collection[str], *, path: object = None) -> LayerNames:
    """Group tensor names by decoder layer, finding the prefix from the names themselves.

    A candidate is what stands before `layers.N.`. Where several are (a vision tower has layers
    too), it is the one under which KDA tensors lie; else the one with DSA markers; else with
    attention at all. Raises `CheckpointError` when none is left, or more than one.
    """
    found = names_by_layer(names)
    if not found:
        raise CheckpointError(
            ErrorCode.LAYERS_NONE,
            "no tensor name has the form PREFIX.layers.N.NAME",
            path=path,
            expected="names such as model.layers.0.self_attn.A_log",
            got=listed(list(names)) or "no names",
            hint="this is no checkpoint of a decoder, or its names were rewritten",
        )
    prefix = _decoder_prefix(found, path)
    layers = found[prefix]
    return LayerNames(prefix, {number: tuple(layers[number]) for number in sorted(layers)})


def names_by_layer(names: Iterable[str]) -> dict[str, dict[int, list[str]]]:
    """Full tensor names by what stands before a layer's number, and by that number."""
    found: dict[str, dict[int, list[str]]] = {}
    for name in names:
        match = _LAYER_NAME.match(name)
        if match is not None:
            found.setdefault(match[1], {}).setdefault(int(match[2]), []).append(name)
    return found


def _decoder_prefix(found: Mapping[str, Mapping[int, list[str]]], path: object) -> str:
    candidates = list(found)
    for marks in (KDA_SIGNS, DSA_MARKERS, BLOCKS):
        if len(candidates) == 1:
            break
        marked = [prefix for prefix in candidates if _has_any(prefix, found[prefix], marks)]
        candidates = marked or candidates
        if marks is KDA_SIGNS and marked:
            break
    if len(candidates) == 1:
        return candidates[0]
    raise CheckpointError(
        ErrorCode.LAYERS_TWO_PREFIXES,
        "the names show more than one decoder",
        path=path,
        expected="one prefix",
        got=" and ".join(f"{prefix}N. ({_layers(found[prefix])})" for prefix in candidates),
        hint="two models were saved into one checkpoint: separate them",
    )


def _layers(numbers: Sized) -> str:
    return "1 layer" if len(numbers) == 1 else f"{len(numbers)} layers"


def _has_any(prefix: str, layers: Mapping[int, list[str]], marks: tuple[str, ...]) -> bool:
    return any(
        name.startswith(marks, len(prefix) + len(str(number)) + 1)
        for number, names in layers.items()
        for name in names
    )
