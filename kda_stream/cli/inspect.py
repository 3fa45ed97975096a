"""`kda-stream inspect`: what a checkpoint holds, on one screen."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..errors import KdaStreamError, PathError, shown
from ..kda.claims import short_list
from ..kda.config import KdaConfig
from ..kda.families import FAMILIES
from ..selection import config_of
from .arguments import Commands, Parser, add_command, add_path, names_files
from .output import Exit, Result, exact_size, note_rows, path_line, plural, row, size, some
from .page.checkpoint_map import checkpoint_page
from .page.document import file_row, maybe_file
from .survey import (
    MARKS,
    LayerFacts,
    count_kinds,
    geometry_json,
    geometry_text,
    kinds_text,
    survey_layers,
)

Fact = TypeVar("Fact")
Sums = dict[str, dict[str, int]]  # dtype to its tensors and bytes

_STRIP_COLUMNS: Final = 80
_STRIP_LAYERS_MAX: Final = 4 * _STRIP_COLUMNS
_ITEMS_MAX: Final = 6


def add_parser(commands: Commands[Parser]) -> None:
    """Add `inspect` to the subcommands."""
    summary = "tell what a checkpoint holds, on one screen"
    parser = add_command(commands, "inspect", summary, example="GLM-5.3-Flash", run=_run)
    add_path(parser)
    page = parser.add_argument(
        "--html", metavar="FILE", help="draw it too, as a page for a browser, in this new file"
    )
    names_files(page)


def _run(arguments: Namespace) -> Result:
    return inspect_path(arguments.path, html=arguments.html)


def inspect_path(path: str, *, html: str | None = None) -> Result:
    """Tell what the checkpoint at `path` holds; raises what `open_checkpoint` does.

    With `html` it is drawn as a page too, in a new file of that name; raises `PathError`, before it
    looks at anything, where that cannot be made.

    The facts: `path`, `shards` (file, tensors, bytes), `tensors`, `tensor_bytes`, `file_bytes`,
    `prefix`, `geometry`, `layers` (how many of each kind), `layer_details` (index, kind, family,
    is_mtp, is_broken_kda, kda_bytes, kda_shards), `kda_bytes`, `dtypes` (tensors and bytes of
    each), `other_dtypes` (the same without the KDA tensors of KDA layers), `notes` and `html` (the
    file of the page, null without). What is not known is null or empty, and a note says why.
    """
    with maybe_file(html) as page, open_checkpoint(path) as checkpoint:
        known = _look(checkpoint)
        facts = {**_facts(checkpoint, known), "html": html}
        result = Result(Exit.DONE, facts, _lines(checkpoint, known))
        if page is not None:
            try:
                page.finish(checkpoint_page(checkpoint, known.layers, facts))
            except PathError as error:
                return result.without_file(error, html=None)
        return replace(result, lines=[*result.lines, *file_row("page", html)])


@dataclass(frozen=True, slots=True)
class _Known:
    """What names and config tell; None or empty where they do not, and `notes` say why."""

    prefix: str | None
    layers: tuple[LayerFacts, ...]
    config: KdaConfig | None
    dtypes: Sums
    other_dtypes: Sums
    notes: list[str]


def _look(checkpoint: Checkpoint) -> _Known:
    unknown: dict[str, list[str]] = {}

    def if_known(what: str, read: Callable[[], Fact]) -> Fact | None:
        try:
            return read()
        except KdaStreamError as error:  # no decoder, no config, or one that cannot be used
            unknown.setdefault(str(error), []).append(what)
            return None

    config_facts = "MTP layers, geometry" if checkpoint.config_path is None else "geometry"
    prefix = if_known("prefix", lambda: checkpoint.layer_prefix)
    layers = if_known("layers", lambda: survey_layers(checkpoint)) or ()
    config = if_known(config_facts, lambda: config_of(checkpoint))
    notes = [
        *checkpoint.report.notes,
        *(f"not known: {', '.join(what)}: {reason}" for reason, what in unknown.items()),
        *_broken_notes(layers),
    ]
    kda = frozenset(name for layer in layers if layer.is_kda for name in layer.kda_tensors)
    others = (name for name in checkpoint if name not in kda)
    return _Known(
        prefix,
        layers,
        config,
        _dtypes(checkpoint, checkpoint),
        _dtypes(checkpoint, others),
        notes,
    )


def _broken_notes(layers: Sequence[LayerFacts]) -> Iterator[str]:
    broken = [int(layer.index) for layer in layers if layer.is_broken_kda]
    if broken:
        yield (
            f"{plural(len(broken), 'unknown layer')} with some of a KDA layer's tensors: "
            f"{some(broken, len(broken))}; `kda-stream verify` tells what is wrong"
        )


def _facts(checkpoint: Checkpoint, known: _Known) -> dict[str, Any]:
    report = checkpoint.report
    return {
        "path": checkpoint.path,
        "shards": [
            {"file": file, "tensors": len(shard.header), "bytes": shard.identity.file_bytes}
            for file, shard in checkpoint.shards.items()
        ],
        "tensors": report.tensors,
        "tensor_bytes": report.tensor_bytes,
        "file_bytes": report.file_bytes,
        "prefix": known.prefix,
        "geometry": geometry_json(known.config),
        "layers": count_kinds(known.layers),
        "layer_details": [layer.json() for layer in known.layers],
        "kda_bytes": sum(layer.kda_bytes for layer in known.layers if layer.is_kda),
        "dtypes": known.dtypes,
        "other_dtypes": known.other_dtypes,
        "notes": known.notes,
    }


def _dtypes(checkpoint: Checkpoint, names: Iterable[str]) -> Sums:
    """The dtypes of these tensors, the one with most bytes first."""
    found: Sums = {}
    for name in names:
        info = checkpoint.info(name)
        sums = found.setdefault(info.dtype, {"tensors": 0, "bytes": 0})
        sums["tensors"] += 1
        sums["bytes"] += info.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


# Text ---------------------------------------------------------------------------------------------


def _lines(checkpoint: Checkpoint, known: _Known) -> list[str]:
    report = checkpoint.report
    return [
        path_line(checkpoint.path),
        *row(
            "files",
            f"{plural(report.shards, 'shard')}, {plural(report.tensors, 'tensor')}, "
            + exact_size(report.tensor_bytes),
        ),
        *row("prefix", "not known" if known.prefix is None else shown(known.prefix) + "N."),
        *row("geometry", "not known" if known.config is None else geometry_text(known.config)),
        *_layer_rows(known.layers, list(checkpoint.shards)),
        *_dtype_rows(known),
        *note_rows(known.notes),
    ]


def _layer_rows(layers: Sequence[LayerFacts], files: list[str]) -> Iterator[str]:
    if not layers:
        return
    yield from row("layers", f"{len(layers)}: {kinds_text(count_kinds(layers))}")
    yield from _strip(layers)
    kda = [layer for layer in layers if layer.is_kda]
    if not kda:
        return
    sizes = sorted({layer.kda_bytes for layer in kda})
    each = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    total = sum(layer.kda_bytes for layer in kda)
    used = {file for layer in kda for file in layer.kda_shards}
    yield from row(
        "KDA",
        f"{plural(len(kda), 'layer')} of {each} bytes, {total:,} in all ({size(total)}), "
        f"in {len(used)} of {plural(len(files), 'shard')}",
    )
    yield from _family_rows(kda)
    places = some((_place_text(layer, files) for layer in kda), len(kda), _STRIP_LAYERS_MAX, " ")
    yield from row("shards", f"layer:shard {places}")
    spanning = [layer for layer in kda if len(layer.kda_shards) > 1]
    yield from row(
        "spanning",
        some((_spanning_text(layer, files) for layer in spanning), len(spanning), _ITEMS_MAX)
        or "no KDA layer lies in more than one shard",
    )


def _family_rows(kda: Sequence[LayerFacts]) -> Iterator[str]:
    """A row for each family, and with several of them which layers are of it."""
    about = {family.name: family.about for family in FAMILIES}
    found: dict[str | None, list[int]] = {}
    for layer in kda:
        found.setdefault(layer.family, []).append(int(layer.index))
    for at, (name, numbers) in enumerate(found.items()):
        which = plural(len(numbers), "layer")
        if len(found) > 1:
            which = f"layer{'s' if len(numbers) > 1 else ''} {short_list(numbers)}"
        told = "what is wrong: `kda-stream verify`" if name is None else about[name]
        yield from row("" if at else "family", f"{name or 'none'} ({which}): {told}")


def _place_text(layer: LayerFacts, files: list[str]) -> str:
    numbers = "+".join(str(files.index(file) + 1) for file in layer.kda_shards)
    return f"{int(layer.index)}:{numbers}"


def _spanning_text(layer: LayerFacts, files: list[str]) -> str:
    numbers = " + ".join(str(files.index(file) + 1) for file in layer.kda_shards)
    return f"layer {int(layer.index)} in shards {numbers}"


def _strip(layers: Sequence[LayerFacts]) -> Iterator[str]:
    """A mark for each layer number, 80 to a line under a ruler; `.` where there is no layer."""
    marks = {int(layer.index): MARKS[layer.label] for layer in layers}
    end = max((number + 1 for number in marks if number < _STRIP_LAYERS_MAX), default=0)
    text = "".join(marks.get(number, ".") for number in range(end))
    for begin in range(0, end, _STRIP_COLUMNS):
        piece = text[begin : begin + _STRIP_COLUMNS]
        ruler = "".join(f"{tens:<10}" for tens in range(begin, begin + len(piece), 10))
        yield from (f"{'':12}{line}".rstrip() for line in (ruler, piece))
    beyond = sum(number >= end for number in marks)
    if beyond:
        yield from row("", f"and {plural(beyond, 'layer')} up to {shown(str(max(marks)))}")
    words = {"K": "KDA", "D": "DSA", "M": "MTP", "?": "unknown", ".": "no such layer"}
    legend = "   ".join(f"{mark} {word}" for mark, word in words.items() if mark in text)
    yield f"{'':12}{legend}"


def _dtype_rows(known: _Known) -> Iterator[str]:
    for number, (dtype, sums) in enumerate(known.dtypes.items()):
        label = "" if number else "dtypes"
        if number == _ITEMS_MAX:
            yield from row(label, f"and {len(known.dtypes) - number} more")
            return
        yield from row(
            label,
            f"{dtype:8} {sums['bytes']:>19,} bytes in {plural(sums['tensors'], 'tensor')}"
            + _other_text(known, dtype),
        )


def _other_text(known: _Known, dtype: str) -> str:
    """How much of a dtype is of no KDA layer, in a checkpoint that has some."""
    others = known.other_dtypes.get(dtype)
    if known.other_dtypes == known.dtypes:
        return ""
    if others is None:
        return ", all KDA"
    if others == known.dtypes[dtype]:
        return ", none KDA"
    return f", {others['bytes']:,} in {others['tensors']:,} not KDA"
