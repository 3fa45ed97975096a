"""The page of `inspect --html`: a checkpoint as a map of its layers, shards and dtypes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...checkpoint.checkpoint import Checkpoint
from ...errors import shown
from ...kda.claims import short_list
from ..output import exact_size, plural, size
from ..survey import MARKS, MTP, LayerFacts, kinds_text
from . import document
from .document import ROWS_MAX, Cell, Fact, Number, count, section, table
from .markup import Markup, element, joined
from .svg import Range, strip

_POINTS: Final = 1000
"""How many places along the largest shard can be told apart: what is nearer is drawn as one."""

_WORDS: Final = {"K": "KDA", "D": "DSA", "M": "MTP", "?": "unknown"}
_STYLES: Final = {"K": "kda", "D": "dsa", "M": "mtp", "?": "unknown"}


def checkpoint_page(
    checkpoint: Checkpoint, layers: Sequence[LayerFacts], facts: dict[str, Any]
) -> bytes:
    """The page, from what `inspect` found; `facts` are those of its --json."""
    places = _places(checkpoint, layers)
    parts = [
        _head(facts),
        *_strip_section(layers),
        _shards_section(facts, places),
        _dtypes_section(facts),
        *_tables(layers, facts, places),
        *document.notes(facts["notes"]),
    ]
    return document.page(_title(facts["path"]), _lead(facts), parts, facts)


@dataclass(slots=True)
class _KdaPlace:
    """Where KDA tensors of `layers` lie in a shard: bytes from the file's start."""

    begin: int
    end: int
    layers: list[int]


@dataclass(frozen=True, slots=True)
class _ShardPlaces:
    """What a shard holds of KDA layers: their `bytes`, by `layers`, and the `places` to draw."""

    bytes: int
    layers: Sequence[int]
    places: Sequence[_KdaPlace]


def _places(checkpoint: Checkpoint, layers: Sequence[LayerFacts]) -> dict[str, _ShardPlaces]:
    found: dict[str, list[tuple[int, int, int]]] = {file: [] for file in checkpoint.shards}
    for layer in layers:
        for name in layer.kda_tensors if layer.is_kda else ():
            file = checkpoint.file_of(name)
            header = checkpoint.shards[file].header
            info, start = header.info(name), header.payload_begin
            found[file].append((start + info.begin, start + info.end, int(layer.index)))
    nearest = max(shard.identity.file_bytes for shard in checkpoint.shards.values()) / _POINTS
    return {
        file: _ShardPlaces(
            sum(end - begin for begin, end, _ in tensors),
            sorted({layer for *_, layer in tensors}),
            _joined(sorted(tensors), nearest),
        )
        for file, tensors in found.items()
    }


def _joined(tensors: Iterable[tuple[int, int, int]], nearest: float) -> list[_KdaPlace]:
    """Neighbours made one: of one layer, or too small for the eye to part them."""
    places: list[_KdaPlace] = []
    for begin, end, layer in tensors:
        last = places[-1] if places else None
        if (
            last is None
            or begin - last.end > nearest
            or (last.layers != [layer] and end - last.begin > nearest)
        ):
            places.append(_KdaPlace(begin, end, [layer]))
            continue
        last.end = max(last.end, end)
        if layer not in last.layers:
            last.layers.append(layer)
    return places


# The head -----------------------------------------------------------------------------------------


def _title(path: str) -> str:
    return shown(os.path.basename(os.path.abspath(path)))


def _lead(facts: Mapping[str, Any]) -> str:
    shards, layers = len(facts["shards"]), len(facts["layer_details"])
    files = (
        f"{size(facts['tensor_bytes'])} in {plural(facts['tensors'], 'tensor')} "
        f"and {plural(shards, 'shard')}"
    )
    if not layers:
        return f"{files}; no decoder layers that are known."
    kda = facts["kda_bytes"]
    held = {file for one in _kda_details(facts) for file in one["kda_shards"]}
    return (
        f"{plural(layers, 'layer')}: {kinds_text(facts['layers'])}. {files}; the KDA layers are "
        f"{size(kda)} of it ({document.share(kda, facts['tensor_bytes'])}), in {len(held)} of "
        f"{plural(shards, 'shard')}."
    )


def _kda_details(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [one for one in facts["layer_details"] if one["kind"] == "KDA" and not one["is_mtp"]]


def _head(facts: Mapping[str, Any]) -> Markup:
    def whole(label: str, name: str, noun: str = "") -> Fact:
        return Fact(label, name, facts[name], f"{facts[name]:,}", noun)

    def nbytes(label: str, name: str) -> Fact:
        return Fact(label, name, facts[name], size(facts[name]), f"{facts[name]:,} bytes")

    layers = len(facts["layer_details"])
    shards = len(facts["shards"])
    figures = [
        Fact("Layers", "layers", layers, f"{layers:,}", kinds_text(facts["layers"])),
        nbytes("KDA layers", "kda_bytes"),
        nbytes("All tensors", "tensor_bytes"),
        Fact("Shards", "shards", shards, f"{shards:,}", f"{size(facts['file_bytes'])} of files"),
        whole("Tensors", "tensors", f"{len(facts['dtypes'])} dtypes"),
    ]
    return joined([document.fact_list(figures), element("dl", *_words(facts), class_="words")])


def _words(facts: Mapping[str, Any]) -> Iterator[Markup]:
    geometry, prefix = facts["geometry"], facts["prefix"]
    families: dict[str, list[int]] = {}
    for one in _kda_details(facts):
        families.setdefault(one["family"] or "none", []).append(one["index"])
    told = {
        "Path": facts["path"],
        "Prefix": "not known" if prefix is None else f"{shown(prefix)}N.",
        "Geometry": "not known"
        if geometry is None
        else f"hidden {geometry['hidden']}, {geometry['heads']} heads of {geometry['head_dim']}, "
        f"conv kernel {geometry['conv_kernel']}",
        "Family": _families_text(families),
    }
    for label, text in told.items():
        yield element("div", element("dt", label), element("dd", text))


def _families_text(families: Mapping[str, Sequence[int]]) -> str:
    """Which layers are of which family; of a single one only how many."""
    if len(families) == 1:
        ((name, numbers),) = families.items()
        return f"{name} ({plural(len(numbers), 'layer')})"
    return (
        "; ".join(f"{name} ({_layers_text(numbers)})" for name, numbers in families.items())
        or "no KDA layers"
    )


# The map ------------------------------------------------------------------------------------------


def _strip_section(layers: Sequence[LayerFacts]) -> list[Markup]:
    if not layers:
        return []
    marks = {MARKS[layer.label] for layer in layers}
    entries = [(f"cell-{_STYLES[mark]}", f"{mark} {_WORDS[mark]}") for mark in _WORDS]
    legend = document.legend(
        entry for entry, mark in zip(entries, _WORDS, strict=True) if mark in marks
    )
    cells = element("ol", *_cells(layers[:ROWS_MAX]), class_="strip")
    return [section("Layers", legend, cells, document.more_than_shown(len(layers)))]


def _cells(layers: Iterable[LayerFacts]) -> Iterator[Markup]:
    """A cell for each layer, with a gap where numbers are missing between two."""
    expected = 0
    for layer in layers:
        number, mark = int(layer.index), MARKS[layer.label]
        if number != expected:
            missing = f"no layers {expected} to {number - 1}"
            yield element("li", "...", class_="gap", title=missing)
        expected = number + 1
        told = f"layer {number}: {layer.label}"
        if layer.kda_tensors:
            files = ", ".join(layer.kda_shards)
            told += f", {layer.family or 'of no family'}, {exact_size(layer.kda_bytes)}, {files}"
        text = shown(str(number), 6)
        yield element(
            "li",
            element("b", mark),
            element("i", text),
            class_=f"cell-{_STYLES[mark]}",
            title=told,
        )


_OTHER: Final = ("other", "other tensors")


def _shards_section(facts: Mapping[str, Any], places: Mapping[str, _ShardPlaces]) -> Markup:
    shards = facts["shards"]
    most = max(shard["bytes"] for shard in shards)
    parity = {one["index"]: at % 2 for at, one in enumerate(_kda_details(facts))}
    kda_entries = [("kda-0", "KDA layer"), ("kda-1", "the next one: the shades alternate")]
    rows = (
        _shard_row(number, shard, places[shard["file"]], most, parity)
        for number, shard in enumerate(shards[:ROWS_MAX], 1)
    )
    return section(
        "Shards",
        document.about(
            f"Each bar is a shard, to the scale of its bytes (the longest: {size(most)}). Beside "
            "it: which KDA layers lie in it."
        ),
        document.legend([*kda_entries[: len(parity)], _OTHER]),
        element("ol", *rows, class_="map"),
        document.more_than_shown(len(shards)),
    )


def _shard_row(
    number: int,
    shard: Mapping[str, Any],
    held: _ShardPlaces,
    most: int,
    parity: Mapping[int, int],
) -> Markup:
    ranges = [
        Range(
            f"kda-{parity[place.layers[0]]}",
            place.begin,
            place.end,
            f"KDA {_layers_text(place.layers)}: bytes {place.begin:,} to {place.end:,}",
        )
        for place in held.places
    ]
    layers = short_list(held.layers) if held.layers else ""
    told = (
        f"shard {number}, {shown(shard['file'])}: {exact_size(shard['bytes'])}, "
        f"{plural(shard['tensors'], 'tensor')}, "
        + (_layers_text(held.layers) if held.layers else "no KDA layer")
    )
    return element(
        "li",
        element("span", str(number), class_="number"),
        strip(ranges, shard["bytes"], most, "other", told),
        element("span", layers, class_="layers"),
        title=told,
    )


def _layers_text(layers: Sequence[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {short_list(sorted(layers))}"


def _dtypes_section(facts: Mapping[str, Any]) -> Markup:
    dtypes = facts["dtypes"]
    most = max((sums["bytes"] for sums in dtypes.values()), default=0)
    rows = []
    for dtype, sums in dtypes.items():
        kda = sums["bytes"] - _other(facts, dtype)["bytes"]
        told = f"{dtype}: {exact_size(sums['bytes'])}, {exact_size(kda)} of it of KDA layers"
        ranges = [Range("kda-0", 0, kda, told)] if kda else []
        rows.append(
            element(
                "li",
                element("span", dtype, class_="name"),
                strip(ranges, sums["bytes"], most, "other", told),
                element("span", size(sums["bytes"]), class_="number"),
                title=told,
            )
        )
    return section(
        "Bytes by dtype",
        document.legend([*([("kda-0", "KDA layers")] if facts["kda_bytes"] else []), _OTHER]),
        element("ol", *rows, class_="map dtypes"),
    )


def _other(facts: Mapping[str, Any], dtype: str) -> Mapping[str, int]:
    """What of a dtype is of no KDA layer."""
    found: Mapping[str, int] = facts["other_dtypes"].get(dtype, {"tensors": 0, "bytes": 0})
    return found


# The tables ---------------------------------------------------------------------------------------


def _tables(
    layers: Sequence[LayerFacts], facts: Mapping[str, Any], places: Mapping[str, _ShardPlaces]
) -> Iterator[Markup]:
    shards = facts["shards"]
    numbers = {shard["file"]: at for at, shard in enumerate(shards, 1)}
    if layers:
        yield section(
            "Every layer",
            table(
                "layers",
                ("Layer", "Kind", "Family", "KDA bytes", "Shards"),
                [_layer_cells(layer, numbers) for layer in layers],
            ),
        )
    yield section(
        "Every shard",
        table(
            "shards",
            ("Shard", "File", "Bytes", "Tensors", "KDA bytes", "KDA layers"),
            [_shard_cells(at, one, places[one["file"]]) for at, one in enumerate(shards, 1)],
        ),
    )
    yield section(
        "Every dtype",
        table(
            "dtypes",
            ("Dtype", "Bytes", "Tensors", "KDA bytes", "KDA tensors"),
            [_dtype_cells(facts, dtype) for dtype in facts["dtypes"]],
            sorted_by=1,
        ),
    )


def _shard_cells(number: int, shard: Mapping[str, Any], held: _ShardPlaces) -> tuple[Cell, ...]:
    return (
        count(number),
        shown(shard["file"]),
        count(shard["bytes"]),
        count(shard["tensors"]),
        count(held.bytes),
        short_list(held.layers) if held.layers else "",
    )


def _layer_cells(layer: LayerFacts, numbers: Mapping[str, int]) -> tuple[Cell, ...]:
    number = int(layer.index)
    kind = layer.label
    if layer.label == MTP:
        kind = f"{MTP} ({layer.kind.value})"
    return (
        Number(float(number), shown(str(number))),
        kind,
        layer.family or "",
        count(layer.kda_bytes),
        ", ".join(str(numbers[file]) for file in layer.kda_shards),
    )


def _dtype_cells(facts: Mapping[str, Any], dtype: str) -> tuple[Cell, ...]:
    sums, other = facts["dtypes"][dtype], _other(facts, dtype)
    return (
        dtype,
        count(sums["bytes"]),
        count(sums["tensors"]),
        count(sums["bytes"] - other["bytes"]),
        count(sums["tensors"] - other["tensors"]),
    )
