"""Where the tensors of one layer lie in a slot, and which bytes have to be brought there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .dtypes import DTYPE_BITS, KdaDtype
from .errors import ArgumentError, ErrorCode, in_words
from .kda.check import FamilyChoice, require_family
from .kda.config import KdaConfig, require_config
from .kda.families import FAMILIES, GLM5_NEXT
from .kda.family import KdaFamily
from .kda.source import Place, RawTensor, Rows
from .kda.tensors import TensorSpec
from .limits import LAYOUT_BYTES, READ_ALONG_BYTES_MAX, SLOT_ALIGNMENT_BYTES
from .staging.reading import Wanted
from .staging.spans import Span


@dataclass(frozen=True, slots=True)
class Field:
    """A field of `KdaWeights`: its name, dtype and shape, and the tensors joined to make it.

    `nbytes` of them are stored, and the first `counted_bytes` handed out: behind these is padding.
    `is_gathered`: it is made of rows that lie apart.
    """

    name: str
    dtype: KdaDtype
    shape: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    nbytes: int
    counted_bytes: int
    is_gathered: bool

    @property
    def is_made_here(self) -> bool:
        """Whether it is not just bytes of the source: joined, gathered, or with a tail to check."""
        return len(self.specs) > 1 or self.is_gathered or self.counted_bytes < self.nbytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each field begins in a slot, and what brings it there.

    `wanted` are ranges of files, `from_memory` the rest; both in ascending order of destination.
    `end` is how much of the slot is used.
    """

    begins: Mapping[str, int]
    wanted: tuple[Wanted, ...]
    from_memory: tuple[Span, ...]
    end: int

    @property
    def alignment_bytes(self) -> int:
        """The largest power of two, up to 4096, that divides every field's offset."""
        bits = LAYOUT_BYTES
        for begin in self.begins.values():
            bits |= begin
        return bits & -bits


def fields_of(
    config: KdaConfig, family: KdaFamily, tensors: Mapping[str, RawTensor]
) -> tuple[Field, ...]:
    """The fields of a layer of that family, in the order of `KdaWeights`, as its tensors are."""
    fields = []
    for name, specs in family.fields.items():
        dtype = KdaDtype(tensors[specs[0].name].dtype)
        nbytes = sum(spec.expected_bytes(config, dtype) for spec in specs)
        tail_bytes = specs[-1].tail(config) * DTYPE_BITS[dtype.value] // 8
        shape = family.handed_out_shape(name, config)
        is_gathered = any(tensors[spec.name].rows is not None for spec in specs)
        fields.append(Field(name, dtype, shape, specs, nbytes, nbytes - tail_bytes, is_gathered))
    return tuple(fields)


def kda_layer_bytes(config: KdaConfig, family: KdaFamily = GLM5_NEXT) -> int:
    """The most bytes of a layer's tensors; 275,481,088 at the geometry of GLM-5.3-Flash."""
    return sum(spec.most_bytes(config) for spec in family.tensors)


def kda_slot_bytes(config: KdaConfig, family: FamilyChoice = GLM5_NEXT) -> int:
    """The bytes of a slot that holds one layer, however its tensors lie in their files.

    Beside the tensors: 4 KiB for each of them, so that it can lie as in its file modulo the page,
    and the three conv tensors once more, which are read along between the others and joined
    elsewhere. 275,739,136 at the geometry of GLM-5.3-Flash, 0.1 % more than the tensors. With
    "auto", enough for any family.

    Raises `ArgumentError` for what is no geometry or no family.
    """
    if family == "auto":
        return max(kda_slot_bytes(config, one) for one in FAMILIES)
    require_config(config)
    nbytes = 0
    for specs in require_family(family).fields.values():
        stored = sum(spec.most_bytes(config) for spec in specs)
        nbytes += stored * (2 if len(specs) > 1 else 1) + len(specs) * LAYOUT_BYTES
    return nbytes


def slot_bytes_for(fields: Iterable[Field]) -> int:
    """The bytes of a slot that holds these fields, however their tensors lie in their files."""
    nbytes = 0
    for field in fields:
        read_along = field.nbytes if len(field.specs) > 1 else 0
        nbytes += field.nbytes + read_along + len(field.specs) * LAYOUT_BYTES
    return nbytes


def require_alignment(alignment: int | None) -> None:
    """Raise `ArgumentError` when no tensor can be aligned so."""
    if alignment is None or (
        type(alignment) is int
        and 1 <= alignment <= LAYOUT_BYTES
        and alignment & (alignment - 1) == 0
    ):
        return
    raise ArgumentError(
        ErrorCode.ARGUMENT,
        "alignment is not one that tensors can have",
        expected=f"a power of two up to {LAYOUT_BYTES}",
        got=in_words(alignment, repr),
        hint="leave it out: each tensor lies as far into a page as in its file then, which reads "
        "fastest",
    )


def lay_out(
    fields: Sequence[Field], tensors: Mapping[str, RawTensor], alignment: int | None
) -> Layout:
    """Place the fields in a slot.

    With an `alignment`, each begins at a multiple of it. With None, what lies side by side in a
    file lies so in the slot, at the same offset modulo the page: one long read brings it in, and
    the blocks of a direct read land in place. Only a joined field, and a tensor whose offset in
    the file is no multiple of its element's size, are placed apart, at multiples of 256.
    """
    plan = _Plan()
    if alignment is None:
        for run in _runs(fields, tensors):
            plan.place_run(run)
        for field in fields:
            if field.name not in plan.begins:
                plan.place_apart(field, tensors, SLOT_ALIGNMENT_BYTES)
    else:
        firsts = {field.name: tensors[field.specs[0].name].place for field in fields}
        for field in sorted(fields, key=lambda field: _file_order(firsts[field.name])):
            plan.place_apart(field, tensors, alignment)
    return Layout(plan.begins, tuple(_joined(plan.wanted)), tuple(plan.from_memory), plan.at)


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor where its file holds it; `field` is None when it is joined apart."""

    name: str
    place: Place
    field: str | None


def _file_order(place: Place | None) -> tuple[str, int]:
    return ("", 0) if place is None else (place.file.path, place.begin)


def _runs(fields: Iterable[Field], tensors: Mapping[str, RawTensor]) -> list[list[_Part]]:
    """The tensors that lie in files, side by side, in file order."""
    parts = []
    for field in fields:
        for spec in field.specs:
            place = tensors[spec.name].place
            if place is not None and not field.is_gathered:
                is_joined = len(field.specs) > 1
                if is_joined or place.begin % (DTYPE_BITS[field.dtype.value] // 8) == 0:
                    parts.append(_Part(spec.name, place, None if is_joined else field.name))
    parts.sort(key=lambda part: _file_order(part.place))
    runs: list[list[_Part]] = []
    for part in parts:
        before = runs[-1][-1].place if runs else None
        adjoins = (
            before is not None
            and before.file is part.place.file
            and before.end == part.place.begin
            and (part.field or part.place.end - part.place.begin <= READ_ALONG_BYTES_MAX)
        )
        if adjoins:
            runs[-1].append(part)
        elif part.field:
            runs.append([part])
    for run in runs:
        while run[-1].field is None:
            run.pop()
    return runs


class _Plan:
    """A layout in the making."""

    def __init__(self) -> None:
        self.at = 0
        self.begins: dict[str, int] = {}
        self.wanted: list[Wanted] = []
        self.from_memory: list[Span] = []

    def place_run(self, run: Sequence[_Part]) -> None:
        """The whole run in one piece, as far into a page as in its file."""
        first, last = run[0].place, run[-1].place
        begin = self.at + (first.begin - self.at) % LAYOUT_BYTES
        starts = tuple((part.place.begin - first.begin, part.name) for part in run)
        for part in run:
            if part.field is not None:
                self.begins[part.field] = begin + part.place.begin - first.begin
        self.wanted.append(Wanted(first.file, first.begin, last.end, begin, starts))
        self.at = begin + last.end - first.begin

    def place_apart(self, field: Field, tensors: Mapping[str, RawTensor], alignment: int) -> None:
        """The field's tensors one behind the other, from a multiple of `alignment` on."""
        self.at = self.begins[field.name] = -(-self.at // alignment) * alignment
        for spec in field.specs:
            tensor = tensors[spec.name]
            nbytes, place = tensor.nbytes, tensor.place
            rows = tensor.rows or Rows(1, nbytes, nbytes)
            if place is None:
                count, row_bytes, stride = rows.count, rows.nbytes, rows.stride
                span = Span(tensor.extent, count, row_bytes, stride, self.at, tensor=spec.name)
                self.from_memory.append(span)
            else:
                starts = ((0, spec.name),)
                part = Wanted(place.file, place.begin, place.end, self.at, starts)
                if tensor.rows is not None:
                    part = replace(
                        part, rows=rows.count, row_bytes=rows.nbytes, row_stride=rows.stride
                    )
                self.wanted.append(part)
            self.at += nbytes


def _joined(wanted: Iterable[Wanted]) -> list[Wanted]:
    """What adjoins in its file and in the slot, made one."""
    joined: list[Wanted] = []
    for part in wanted:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.file is part.file
            and last.rows == part.rows == 1
            and last.end == part.begin
            and last.destination + last.end - last.begin == part.destination
        ):
            moved = tuple((last.end - last.begin + at, name) for at, name in part.starts)
            starts = last.starts + moved
            part = Wanted(last.file, last.begin, part.end, last.destination, starts)
            joined.pop()
        joined.append(part)
    return joined
