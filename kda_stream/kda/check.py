"""Whether a layer is exactly a KDA block: every deviation of it from its family's table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Literal

from ..errors import ArgumentError, BindError, ErrorCode, listed, shown
from ..limits import PROBLEMS_SHOWN_MAX
from .classify import AttnBlockKind, classify_attn_block
from .config import KdaConfig, require_config
from .diagnosis import prefix_left_on, what_it_looks_like
from .families import BLOCKS, FAMILIES, KDA_SIGNS
from .family import KdaFamily
from .geometry import StoredGeometry, stored_geometry
from .source import KdaTensorSource, PayloadFile, RawTensor, files_of
from .tensors import TensorSpec

FamilyChoice = KdaFamily | Literal["auto"]


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
    """One deviation of a layer from its family's table; a field that does not apply is None.

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
        expected = f"{self.expected_dtype}"
        if self.expected_shape is not None:
            expected += f" {list(self.expected_shape)}"
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
    """A layer that is exactly a KDA block of `family`: its tensors by layer-relative name.

    `self_attn_seen` and `non_attn_seen` count its names under the block's and all others.
    """

    layer_idx: int
    family: KdaFamily
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
        return files_of(self.tensors.values())


def check_kda_block(
    config: KdaConfig, layer_idx: int, source: KdaTensorSource, family: FamilyChoice
) -> CheckedBlock:
    """Check every name, dtype, shape and byte count of a layer, from metadata alone.

    With "auto" the family is the one that the layer is exactly a block of, with no name of another
    family's block beside it. Raises `BindError` with every problem there is; with "auto", those
    with the family that comes nearest.
    """
    require_config(config)
    require_source(source)
    if family == "auto":
        layer = _Layer.of(source, BLOCKS)
        chosen, _, problems = layer.nearest(dict.fromkeys(FAMILIES, config), layer_idx)
    else:
        chosen = require_family(family)
        layer = _Layer.of(source, (*BLOCKS, chosen.block))
        problems = layer.problems(chosen, config, layer_idx, chosen.block)
    if problems:
        raise _refusal(layer_idx, layer, chosen, config, problems, is_asked=family != "auto")
    attention = [name for name in layer.names if name.startswith(chosen.block)]
    found = {spec.name: layer.tensors[spec.name] for spec in chosen.tensors}
    return CheckedBlock(
        layer_idx,
        chosen,
        {name: tensor for name, tensor in found.items() if tensor is not None},
        len(attention),
        len(layer.names) - len(attention),
    )


def identify_family(source: KdaTensorSource, config: KdaConfig | None = None) -> KdaFamily:
    """The one family that the layer is exactly a KDA block of, by names, then dtypes and shapes.

    Without a `config` the geometry is that of the tensors themselves, which must agree on it. No
    payload is touched. Raises `BindError` when it is a block of no family, with the problems that
    it has with the nearest one; a shape that no tensor tells is None in these.

    Example: `identify_family(checkpoint.layer(0)).name == "GLM5_NEXT"`.
    """
    return identify_block(source, config)[0]


def identify_block(
    source: KdaTensorSource, config: KdaConfig | None = None
) -> tuple[KdaFamily, KdaConfig]:
    """`identify_family`, and the geometry of the layer: the config's, or that of its tensors."""
    require_source(source)
    layer = _Layer.of(source, BLOCKS)
    layer_idx = int(getattr(source, "index", -1))
    if config is not None:
        return check_kda_block(config, layer_idx, source, "auto").family, config
    geometries = {family: stored_geometry(layer.tensors, family) for family in FAMILIES}
    configs = {family: geometry.config for family, geometry in geometries.items()}
    family, chosen, problems = layer.nearest(configs, layer_idx)
    if problems:
        told = _without_guesses(problems, family, geometries[family])
        raise _refusal(layer_idx, layer, family, chosen, told, is_asked=False)
    return family, chosen


def require_family(family: object) -> KdaFamily:
    """`family`; raises `ArgumentError` when it is none."""
    if isinstance(family, KdaFamily):
        return family
    raise ArgumentError(
        ErrorCode.ARGUMENT,
        "family is none",
        expected='a KdaFamily, or "auto"',
        got=repr(family),
        hint="pass one of " + ", ".join(one.name for one in FAMILIES),
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """All names of a layer, and the tensors of its attention blocks."""

    names: Sequence[str]
    tensors: Mapping[str, RawTensor | None]

    @classmethod
    def of(cls, source: KdaTensorSource, blocks: tuple[str, ...]) -> _Layer:
        names = source.names()
        attention = dict.fromkeys(name for name in names if name.startswith(blocks))
        return cls(names, {name: _got(source, name) for name in attention})

    def nearest(
        self, geometries: Mapping[KdaFamily, KdaConfig], layer_idx: int
    ) -> tuple[KdaFamily, KdaConfig, list[BindProblem]]:
        """The family that the layer is a block of, or else the one of which it has most tensors.

        Names of every block count here, so that two blocks in one layer are of no family.
        """
        judged = [
            (family, config, self.problems(family, config, layer_idx, BLOCKS))
            for family, config in geometries.items()
        ]

        def distance(one: tuple[KdaFamily, KdaConfig, list[BindProblem]]) -> tuple[int, ...]:
            family, _, problems = one
            forms = sum(map(_is_of_form, problems))
            names = sum(map(_is_of_names, problems))
            return (bool(problems), names - len(family.tensors), len(problems), forms)

        return min(judged, key=distance)

    def problems(
        self, family: KdaFamily, config: KdaConfig, layer_idx: int, blocks: str | tuple[str, ...]
    ) -> list[BindProblem]:
        """Every way in which the names that begin with `blocks` are not that family's block."""
        problems = [
            problem
            for specs in family.fields.values()
            for spec in specs
            if (problem := self._problem(layer_idx, spec, specs[0], config)) is not None
        ]
        order = {spec.name: number for number, spec in enumerate(family.tensors)}
        problems.sort(key=lambda problem: order[problem.tensor])
        seen = [name for name in self.names if name.startswith(blocks)]
        problems += [
            _stored(layer_idx, name, ProblemKind.UNKNOWN, self.tensors[name])
            for name in sorted(set(seen).difference(family.names))
        ]
        repeated = sorted(name for name, count in Counter(seen).items() if count > 1)
        return problems + [BindProblem(layer_idx, n, ProblemKind.REPEATED) for n in repeated]

    def _problem(
        self, layer_idx: int, spec: TensorSpec, first: TensorSpec, config: KdaConfig
    ) -> BindProblem | None:
        """The first way in which a tensor is not what `spec` asks: dtype, then shape, then bytes.

        `first` is the first of those that it is joined to, which must have one dtype.
        """
        tensor, joined = self.tensors.get(spec.name), self.tensors.get(first.name)
        dtypes = {dtype.value: dtype for dtype in spec.dtypes}
        shape = spec.expected_shape(config)
        nbytes = spec.expected_bytes(config, None if tensor is None else dtypes.get(tensor.dtype))
        if tensor is None:
            kind = ProblemKind.MISSING
        elif tensor.dtype not in dtypes:
            kind = ProblemKind.DTYPE
        elif joined is not None and joined.dtype in dtypes and joined.dtype != tensor.dtype:
            kind = ProblemKind.DTYPE
            dtypes = {joined.dtype: dtypes[joined.dtype]}
        elif tuple(tensor.shape) != shape:
            kind = ProblemKind.SHAPE
        elif tensor.nbytes != nbytes:
            kind = ProblemKind.BYTES
        else:
            return None
        return replace(
            _stored(layer_idx, spec.name, kind, tensor),
            expected_dtype=" or ".join(dtypes),
            expected_shape=shape,
            expected_bytes=nbytes,
        )


def require_source(source: object) -> None:
    """Raise `ArgumentError` when `source` is no `KdaTensorSource`."""
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


def _without_guesses(
    problems: Sequence[BindProblem], family: KdaFamily, geometry: StoredGeometry
) -> list[BindProblem]:
    """The problems without the expected shapes that no tensor of the layer tells."""
    guessed = {spec.name for spec in family.tensors if not geometry.tells(spec)}
    return [
        replace(problem, expected_shape=None, expected_bytes=None)
        if problem.tensor in guessed
        else problem
        for problem in problems
    ]


def _is_of_names(problem: BindProblem) -> bool:
    """Whether it is a name or a number of dimensions, which no cast and no geometry explains."""
    stored, expected = len(problem.stored_shape or ()), len(problem.expected_shape or ())
    return problem.kind not in (ProblemKind.DTYPE, ProblemKind.SHAPE, ProblemKind.BYTES) or (
        stored != expected
    )


def _is_of_form(problem: BindProblem) -> bool:
    """Whether it is a wrong dtype or number of dimensions, which no geometry explains."""
    stored, expected = len(problem.stored_shape or ()), len(problem.expected_shape or ())
    return problem.kind is ProblemKind.DTYPE or (
        problem.kind is ProblemKind.SHAPE and stored != expected
    )


def _refusal(
    layer_idx: int,
    layer: _Layer,
    family: KdaFamily,
    config: KdaConfig,
    problems: list[BindProblem],
    *,
    is_asked: bool,
) -> BindError:
    """The refusal of a layer; `is_asked` says whether the caller named the family."""
    is_dsa = classify_attn_block(layer.names) is AttnBlockKind.DSA
    number = f"layer {layer_idx}" if layer_idx >= 0 else "the layer"
    if is_dsa:
        what = f"{number} is a DSA block, not a KDA block"
    elif set(layer.names).isdisjoint((*KDA_SIGNS, *family.signs)):
        names = listed(sorted(layer.tensors or layer.names))
        has = f"its names are {names}" if names else "it has no names"
        what = f"{number} has no KDA block: {has}"
        if is_asked:
            what += f"; of {family}: {_told(problems)}"
    else:
        what = f"{number} is not exactly a KDA block of {family}: {_told(problems)}"
    places = [tensor.place for tensor in layer.tensors.values() if tensor is not None]
    shards = [problem.shard for problem in problems]
    shards += [place.file.path for place in places if place is not None]
    path = next((shard for shard in shards if shard is not None), None)
    others = [
        other
        for other in FAMILIES
        if other is not family and not layer.problems(other, config, layer_idx, BLOCKS)
    ]
    wrong = [problem.tensor for problem in problems if problem.kind is ProblemKind.DTYPE]
    looks = what_it_looks_like(layer.tensors, others, wrong)
    if is_dsa:
        looks = "leave the layer out: only KDA layers are bound"
    elif not layer.tensors:
        looks = prefix_left_on(layer.names, (*KDA_SIGNS, *family.signs))
    return _bind_error(what, path, problems, looks)


def _told(problems: Sequence[BindProblem]) -> str:
    told = list(map(str, problems[:PROBLEMS_SHOWN_MAX]))
    if len(problems) > len(told):
        told.append(f"and {len(problems) - len(told)} more")
    return "; ".join(told)


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
    looks = {error.looks_like for error in errors}
    return _bind_error(what, path, problems, looks.pop() if len(looks) == 1 else None)


def _layer_list(numbers: Sequence[str]) -> str:
    return f"layer{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


_WHAT_ELSE: Final = (
    "bytes are never changed to fit: load a checkpoint that stores the layer as expected, or the "
    "config.json that belongs to this one"
)


def _bind_error(
    what: str, path: str | None, problems: list[BindProblem], looks_like: str | None
) -> BindError:
    error = BindError(ErrorCode.BIND_REFUSED, what, path=path, hint=looks_like or _WHAT_ELSE)
    error.problems = tuple(problems)
    error.looks_like = looks_like
    return error
