"""Whether a layer is exactly a KDA block: every deviation of its tensors from `KDA_TENSORS`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ..errors import ArgumentError, BindError, ErrorCode, listed, shown
from ..limits import PROBLEMS_SHOWN_MAX
from .classify import AttnBlockKind, classify_attn_block
from .config import KdaConfig
from .source import KdaTensorSource, PayloadFile, RawTensor
from .tensors import ATTENTION_PREFIX, KDA_TENSORS, TensorSpec


class ProblemKind(str, Enum):
    """In what way a tensor of a layer is not what a KDA block must have; judged in this order."""

    UNKNOWN = "unknown"
    REPEATED = "repeated"
    MISSING = "missing"
    DTYPE = "dtype"
    SHAPE = "shape"
    BYTES = "bytes"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class BindProblem:
    """One deviation of a layer from `KDA_TENSORS`; a field that does not apply is None.

    `tensor` is layer-relative, `shard` the path of the file that holds it.
    """

    layer_idx: int
    tensor: str
    kind: ProblemKind
    shard: str | None = None
    stored_dtype: str | None = None
    stored_shape: tuple[int, ...] | None = None
    stored_bytes: int | None = None
    expected_dtype: str | None = None
    expected_shape: tuple[int, ...] | None = None
    expected_bytes: int | None = None

    def __str__(self) -> str:
        where = "" if self.shard is None else f" in {shown(os.path.basename(self.shard))}"
        return self.fault + where

    @property
    def fault(self) -> str:
        """What is wrong with the tensor, in words that are the same for every layer and shard."""
        name = shown(self.tensor)
        stored = f"{shown(self.stored_dtype or '')} {shown(list(self.stored_shape or ()))}"
        expected = f"{self.expected_dtype} {list(self.expected_shape or ())}"
        match self.kind:
            case ProblemKind.UNKNOWN:
                return f"{name} is no tensor of a KDA block: stored {stored}"
            case ProblemKind.REPEATED:
                return f"{name} is listed twice"
            case ProblemKind.MISSING:
                return f"{name} is missing: expected {expected}"
            case ProblemKind.BYTES:
                return (
                    f"{name} has the wrong byte count: expected {self.expected_bytes}, "
                    f"got {self.stored_bytes}"
                )
            case _:
                return f"{name} has the wrong {self.kind}: expected {expected}, got {stored}"


@dataclass(frozen=True, slots=True)
class CheckedBlock:
    """A layer that is exactly a KDA block: its fifteen tensors by layer-relative name.

    `self_attn_seen` and `non_attn_seen` count its names under `self_attn.` and all others.
    """

    layer_idx: int
    tensors: Mapping[str, RawTensor]
    self_attn_seen: int
    non_attn_seen: int

    @property
    def nbytes(self) -> int:
        """The bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def files(self) -> tuple[PayloadFile, ...]:
        """The files that hold its tensors, each once, in the order of first use."""
        places = [tensor.place for tensor in self.tensors.values()]
        return tuple({id(p.file): p.file for p in places if p is not None}.values())


def check_kda_block(config: KdaConfig, layer_idx: int, source: KdaTensorSource) -> CheckedBlock:
    """Check every name, dtype, shape and byte count of a layer, from metadata alone.

    Raises `BindError` with every problem there is.
    """
    _require_source(source)
    names = source.names()
    attention = [name for name in names if name.startswith(ATTENTION_PREFIX)]
    specs = {spec.name: spec for spec in KDA_TENSORS}
    seen = set(attention)
    tensors = {name: _got(source, name) for name in specs if name in seen}
    problems = [
        problem
        for spec in KDA_TENSORS
        if (problem := _problem(layer_idx, spec, config, tensors.get(spec.name))) is not None
    ]
    unknown = tuple(sorted(seen.difference(specs)))
    problems += [
        _stored(layer_idx, name, ProblemKind.UNKNOWN, _got(source, name)) for name in unknown
    ]
    repeated = sorted(name for name, count in Counter(attention).items() if count > 1)
    problems += [BindProblem(layer_idx, name, ProblemKind.REPEATED) for name in repeated]
    if problems:
        raise _refusal(layer_idx, names, tensors, problems)
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return CheckedBlock(layer_idx, found, len(attention), len(names) - len(attention))


def _require_source(source: object) -> None:
    if not callable(getattr(source, "names", None)) or not callable(getattr(source, "get", None)):
        raise ArgumentError(
            ErrorCode.ARGUMENT,
            "the source is no KdaTensorSource",
            expected="an object with names() and get(name)",
            got=type(source).__name__,
            hint="pass checkpoint.layer(i), or put the dict behind these two methods",
        )


def _got(source: KdaTensorSource, name: str) -> RawTensor | None:
    tensor: object = source.get(name)
    if tensor is None or isinstance(tensor, RawTensor):
        return tensor
    raise ArgumentError(
        ErrorCode.ARGUMENT,
        "the source gives something else than a RawTensor",
        tensor=name,
        expected="RawTensor(dtype, shape, data) or None",
        got=type(tensor).__name__,
        hint="wrap the bytes: RawTensor('BF16', shape, data)",
    )


def _problem(
    layer_idx: int, spec: TensorSpec, config: KdaConfig, tensor: RawTensor | None
) -> BindProblem | None:
    """The first way in which `tensor` is not what `spec` asks: dtype, then shape, then bytes."""
    shape, nbytes = spec.expected_shape(config), spec.expected_bytes(config)
    if tensor is None:
        kind = ProblemKind.MISSING
    elif tensor.dtype != spec.dtype.value:
        kind = ProblemKind.DTYPE
    elif tuple(tensor.shape) != shape:
        kind = ProblemKind.SHAPE
    elif tensor.nbytes != nbytes:
        kind = ProblemKind.BYTES
    else:
        return None
    return replace(
        _stored(layer_idx, spec.name, kind, tensor),
        expected_dtype=spec.dtype.value,
        expected_shape=shape,
        expected_bytes=nbytes,
    )


def _stored(layer_idx: int, name: str, kind: ProblemKind, tensor: RawTensor | None) -> BindProblem:
    """A problem with what is stored under `name`, and nothing yet of what was expected."""
    if tensor is None:
        return BindProblem(layer_idx, name, kind)
    return BindProblem(
        layer_idx,
        name,
        kind,
        shard=None if tensor.place is None else tensor.place.file.path,
        stored_dtype=tensor.dtype,
        stored_shape=tuple(tensor.shape),
        stored_bytes=tensor.nbytes,
    )


def _refusal(
    layer_idx: int,
    names: Sequence[str],
    tensors: Mapping[str, RawTensor | None],
    problems: list[BindProblem],
) -> BindError:
    told = list(map(str, problems[:PROBLEMS_SHOWN_MAX]))
    if len(problems) > len(told):
        told.append(f"and {len(problems) - len(told)} more")
    what = f"layer {layer_idx} is not exactly a KDA block: " + "; ".join(told)
    if classify_attn_block(names) is AttnBlockKind.DSA:
        what = f"layer {layer_idx} is a DSA block, not a KDA block"
    places = [tensor.place for tensor in tensors.values() if tensor is not None]
    shards = [problem.shard for problem in problems]
    shards += [place.file.path for place in places if place is not None]
    path = next((shard for shard in shards if shard is not None), None)
    return _bind_error(what, path, problems)


def joint_refusal(errors: Sequence[BindError], layers: int, path: str) -> BindError:
    """One error for the refusals of several of `layers` layers of the checkpoint `path`.

    A fault that they share is told once; `problems` holds every one.
    """
    if len(errors) == 1:
        return errors[0]
    problems = [problem for error in errors for problem in error.problems]
    numbers: dict[str, list[str]] = {}
    for problem in problems:
        numbers.setdefault(problem.fault, []).append(str(problem.layer_idx))
    faults = [f"{fault} in {_layer_list(which)}" for fault, which in numbers.items()]
    what = f"{len(errors)} of {layers} layers are refused: {'; '.join(faults)}"
    return _bind_error(what, path, problems)


def _layer_list(numbers: Sequence[str]) -> str:
    return f"layer{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


def _bind_error(what: str, path: str | None, problems: list[BindProblem]) -> BindError:
    error = BindError(
        ErrorCode.BIND_REFUSED,
        what,
        path=path,
        hint="bytes are never changed to fit: load a checkpoint that stores the layer as expected, "
        "or the config.json that belongs to this one",
    )
    error.problems = tuple(problems)
    return error
