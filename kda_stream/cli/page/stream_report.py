"""The page of `stream --report`: how a stream went, over time and layer by layer."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.layer import LayerIndex
from ...errors import PathError, shown
from ...files import NewFile
from ...staging.residency import MemoryUse
from ...stream import KdaLayer, KdaLayerStream
from ..output import Result, exact_size, plural, size
from ..survey import kda_tensors
from . import document
from .document import Cell, Fact, Number, about, count, file_row, section, table
from .markup import Markup, element, joined
from .sampling import INTERVAL_SECONDS, MemorySample, Sampler
from .svg import Bar, Line, Point, Unit, bar_chart, bytes_unit, seconds_unit, time_chart

_RATE: Final = Unit("GB/s", 1e9)
_WINDOW_SECONDS_MAX: Final = 1.0
_WINDOWS_MIN: Final = 20
_BARS_MAX: Final = 400

_WAYS: Final = {
    "mapped": ("way-mapped", "mapped: copied out of the mapped file"),
    "direct": ("way-direct", "direct: read past the page cache"),
    "positional": ("way-positional", "positional: read through the page cache"),
}
_MEMORY: Final[Sequence[tuple[str, str, Callable[[MemoryUse], int | None]]]] = (
    ("line-1", "anonymous, slots included", lambda memory: memory.anonymous_bytes),
    ("line-2", "pages of mapped files", lambda memory: memory.file_bytes),
    ("line-3", "page-locked", lambda memory: memory.locked_bytes),
)


@dataclass(frozen=True, slots=True)
class LayerTime:
    """A layer that was handed out `end_seconds` after the start.

    `begin_seconds` is when the one before it was, or 0.
    """

    number: int
    bytes: int
    begin_seconds: float
    end_seconds: float
    way: str
    reason: str
    cached_before_bytes: int | None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.begin_seconds

    @property
    def bytes_per_second(self) -> float:
        """How fast it came."""
        return self.bytes / self.seconds if self.seconds else 0.0


class StreamRecord:
    """What is noted of a stream for its page, in the new file `path`; nothing without a path.

    A context manager: the file is opened at once, and is not there when the `with` ends before
    `told`. Raises `PathError` where it cannot be made.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file = None if path is None else NewFile(path)
        self._sampler: Sampler | None = None
        self._layers: list[LayerTime] = []

    def __enter__(self) -> StreamRecord:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.discard()

    @contextmanager
    def sampling(self, checkpoint: Checkpoint, layers: Iterable[LayerIndex]) -> Iterator[None]:
        """Sample in this context, which begins right before the stream and ends after it."""
        if self._file is None:
            yield
            return
        files = {
            checkpoint.file_of(name)
            for index in layers
            for name in kda_tensors(checkpoint.layer(index))
        }
        with Sampler(checkpoint.shards[file] for file in files) as self._sampler:
            yield
        self._sampler.take_last()

    def add(self, layer: KdaLayer, stream: KdaLayerStream) -> None:
        """Note that the stream has handed out the layer now."""
        if self._sampler is None:
            return
        self._sampler.touch(layer.report.shards)
        read = layer.report.read
        self._layers.append(
            LayerTime(
                int(layer.index),
                layer.report.bytes,
                self._layers[-1].end_seconds if self._layers else 0.0,
                stream.report.seconds,
                read.path,
                read.reason,
                read.cached_before_bytes,
            )
        )

    def told(self, result: Result) -> Result:
        """The result with the page named in it, which is written now."""
        facts = {**result.facts, "report": self._path}
        if self._file is not None and self._sampler is not None:
            try:
                self._file.finish(stream_page(facts, self._layers, self._sampler))
            except PathError as error:
                return replace(result, facts=facts).without_file(error, report=None)
        return replace(result, facts=facts, lines=[*result.lines, *file_row("page", self._path)])


def stream_page(facts: dict[str, Any], layers: Sequence[LayerTime], sampler: Sampler) -> bytes:
    """The page, from the facts of --json and from what was noted and sampled meanwhile."""
    name = shown(os.path.basename(os.path.abspath(facts["path"])))
    seconds = max(facts["seconds"], sampler.memory[-1].seconds)
    charts = [
        _rate_section(facts, layers, seconds),
        _memory_section(facts, sampler.memory, seconds),
        _cache_section(sampler, seconds),
    ]
    parts = [
        _head(facts),
        element("div", *charts, class_="charts"),
        *_layers_sections(layers),
        _samples_section(sampler, facts["seconds"]),
        *document.notes(facts["notes"]),
    ]
    return document.page(f"Stream of {name}", _lead(facts), parts, facts)


# The head -----------------------------------------------------------------------------------------


def _lead(facts: Mapping[str, Any]) -> str:
    rate = facts["bytes_per_second"] / 1e9
    ways = ", ".join(f"{plural(layers, 'layer')} {way}" for way, layers in facts["reads"].items())
    locked = "page-locked" if facts["lock"]["locked"] else "not page-locked"
    return (
        f"{plural(facts['layers'], 'KDA layer')}, {size(facts['bytes'])} in "
        f"{facts['seconds']:.3f} s: {rate:.3f} GB/s, {ways}, into {locked} memory."
    )


def _head(facts: Mapping[str, Any]) -> Markup:
    def nbytes(label: str, name: str, more: str = "") -> Fact:
        if facts[name] is None:
            return Fact(label, name, None, "not counted", "by this system")
        return Fact(label, name, facts[name], size(facts[name]), more or f"{facts[name]:,} bytes")

    rate, lock = facts["bytes_per_second"], facts["lock"]
    figures = [
        Fact("KDA layers", "layers", facts["layers"], f"{facts['layers']:,}"),
        nbytes("Bytes", "bytes"),
        Fact("Time", "seconds", facts["seconds"], f"{facts['seconds']:.3f} s"),
        Fact("Rate", "bytes_per_second", rate, f"{rate / 1e9:.3f} GB/s", "over all"),
        Fact("Page-locked", "lock.locked_bytes", lock["locked_bytes"], *_lock_texts(lock)),
        nbytes("Peak, anonymous", "peak_anonymous_bytes", "the slots included"),
        nbytes("Peak, of any kind", "peak_resident_bytes", "with the pages of files"),
    ]
    words = {
        "Path": facts["path"],
        "Family": ", ".join(
            f"{name} ({plural(layers, 'layer')})" for name, layers in facts["families"].items()
        ),
        "Memory": f"{plural(facts['slots'], 'slot')} of {exact_size(facts['slot_bytes'])}",
        "Locking": lock["refusal"] or f"policy {lock['policy']}",
    }
    told = (
        element("div", element("dt", name), element("dd", text)) for name, text in words.items()
    )
    return joined([document.fact_list(figures), element("dl", *told, class_="words")])


def _lock_texts(lock: Mapping[str, Any]) -> tuple[str, str]:
    if lock["locked"]:
        return size(lock["locked_bytes"]), f"{lock['locked_bytes']:,} bytes"
    return "no", "by --lock off" if lock["refusal"] is None else "refused"


# Over time ----------------------------------------------------------------------------------------


def _rate_section(facts: Mapping[str, Any], layers: Sequence[LayerTime], seconds: float) -> Markup:
    window = min(_WINDOW_SECONDS_MAX, facts["seconds"] / _WINDOWS_MIN)
    points = rate_points(layers, window)
    mean = facts["bytes_per_second"]
    lines = [
        Line("line-1", points),
        Line("line-4", [(0.0, mean), (facts["seconds"], mean)]),
    ]
    most = max(mean, *(rate for _, rate in points))
    unit = _rate_unit(most)
    over_all = f"{mean / unit.scale:.3f} {unit.name}"
    told = f"rate over time, {over_all} over all"
    return section(
        "Rate",
        document.legend(
            [
                ("line-1", f"over the last {1000 * window:.3g} ms"),
                ("line-4", f"over all: {over_all}"),
            ]
        ),
        time_chart(lines, seconds, most, unit, told),
    )


def _rate_unit(most: float) -> Unit:
    return _RATE if most >= 1e9 else Unit("MB/s", 1e6)


def rate_points(layers: Sequence[LayerTime], window_seconds: float) -> list[Point]:
    """The rate over the last `window_seconds` (at first: since the start), as a line's points.

    A layer's bytes count as coming evenly over its time, so the line is straight between points.
    """
    ends = [0.0, *(layer.end_seconds for layer in layers)]
    totals = [0, *accumulate(layer.bytes for layer in layers)]

    def total_at(seconds: float) -> float:
        after = bisect_left(ends, seconds)
        if after == 0:
            return 0.0
        begin, end = ends[after - 1], ends[after]
        came = (seconds - begin) / (end - begin)
        return totals[after - 1] + came * (totals[after] - totals[after - 1])

    first = min(window_seconds, ends[1]) / 2
    bends = {first, window_seconds, *ends, *(end + window_seconds for end in ends)}
    points = []
    for at in sorted(bend for bend in bends if first <= bend <= ends[-1]):
        begin = max(0.0, at - window_seconds)
        points.append((at, (total_at(at) - total_at(begin)) / (at - begin)))
    return points


def _memory_section(
    facts: Mapping[str, Any], samples: Sequence[MemorySample], seconds: float
) -> Markup:
    slots = facts["slots"] * facts["slot_bytes"]
    lines = [Line("line-4", [(0.0, slots), (seconds, slots)])]
    entries = []
    for style, meaning, read in _MEMORY:
        figures = ((sample.seconds, read(sample.memory)) for sample in samples)
        points = [(at, figure) for at, figure in figures if figure is not None]
        if points:
            lines.append(Line(style, points))
            entries.append((style, meaning))
    if not entries:
        return section("Memory", about("This system does not count what is resident."))
    entries.append(("line-4", f"{plural(facts['slots'], 'slot')}: {size(slots)}"))
    most = max(figure for line in lines for _, figure in line.points)
    told = f"resident memory over time, at most {size(most)} of a kind"
    return section(
        "Memory of the process",
        document.legend(entries),
        time_chart(lines, seconds, most, bytes_unit(most), told),
    )


def _cache_section(sampler: Sampler, seconds: float) -> Markup:
    heading = "Page cache of the shards"
    points = [(sample.seconds, sample.cached_bytes) for sample in sampler.cache]
    refusal = sampler.cache_refusal
    if not points:
        return section(heading, about(f"Not known: {refusal}."))
    first, last, most = points[0][1], points[-1][1], max(figure for _, figure in points)
    told = f"{size(first)} before, {size(last)} after, at most {size(most)}"
    if first == last == most:
        told = f"{size(first)}, all the time"
    return section(
        heading,
        document.legend([("line-1", f"{told}; a dot for each sample")]),
        time_chart([Line("line-1", points, has_dots=True)], seconds, most, bytes_unit(most), told),
        *([about(f"Not known any more: {refusal}.")] if refusal else []),
    )


# The layers ---------------------------------------------------------------------------------------


def _layers_sections(layers: Sequence[LayerTime]) -> Iterator[Markup]:
    told = layers[:_BARS_MAX]
    most = max(layer.seconds for layer in told)
    bars = [
        Bar(
            _way(layer.way)[0],
            layer.seconds,
            str(layer.number),
            f"layer {layer.number}: {layer.seconds:.4f} s, {size(layer.bytes_per_second)}/s, "
            f"{layer.way}: {layer.reason}",
        )
        for layer in told
    ]
    ways = dict.fromkeys(layer.way for layer in told)
    more = len(layers) - len(told)
    yield section(
        "Time of each layer",
        about(
            "From the layer before to this one; the first from the start, so with the slots made "
            "and locked."
        ),
        document.legend(map(_way, ways)),
        _PATTERNS,
        bar_chart(bars, seconds_unit(most), f"time of each layer, at most {most:.4f} s"),
        *([about(f"and {plural(more, 'layer')} more, in the table")] if more else []),
    )
    heads = ("Order", "Layer", "Seconds", "GB/s", "Bytes", "Read", "Cached before", "Why so")
    rows = [_layer_cells(at, layer) for at, layer in enumerate(layers, 1)]
    yield section("Every layer", table("layers", heads, rows))


_PATTERNS: Final = Markup(
    '<svg class="patterns" aria-hidden="true"><defs>'
    '<pattern id="hatched" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="pattern-ground" width="6" height="6"/>'
    '<rect class="pattern-2" width="3" height="6"/></pattern>'
    '<pattern id="dotted" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<rect class="pattern-ground" width="5" height="5"/>'
    '<circle class="pattern-3" cx="2.5" cy="2.5" r="1.5"/></pattern>'
    "</defs></svg>"
)
"""What tells the ways of reading apart beside their colours."""


def _way(way: str) -> tuple[str, str]:
    """How a way of reading is drawn, and what it means."""
    return _WAYS.get(way, ("way-other", way))


def _layer_cells(number: int, layer: LayerTime) -> tuple[Cell, ...]:
    cached = layer.cached_before_bytes
    return (
        count(number),
        count(layer.number),
        Number(layer.seconds, f"{layer.seconds:.4f}"),
        Number(layer.bytes_per_second, f"{layer.bytes_per_second / 1e9:.3f}"),
        count(layer.bytes),
        layer.way,
        Number(-1, "not known") if cached is None else count(cached),
        layer.reason,
    )


# The samples --------------------------------------------------------------------------------------


def _samples_section(sampler: Sampler, seconds: float) -> Markup:
    taken = (
        f"{plural(len(sampler.memory), 'sample')} of memory, one every {INTERVAL_SECONDS:g} s or "
        f"fewer, and {len(sampler.cache):,} of the page cache, of each shard when a layer of it "
        "has come and of all at both ends. The thread that took them used "
        f"{1000 * sampler.spent_seconds:.3g} ms of processor time "
        f"({100 * sampler.spent_seconds / seconds:.2f} % of the stream's time)."
    )
    heads = ("Second", "Anonymous", "File pages", "Page-locked", "Peak")
    memory = table("memory", heads, [_memory_cells(sample) for sample in sampler.memory])
    rows = [(_seconds_cell(one.seconds), count(one.cached_bytes)) for one in sampler.cache]
    cached = table("cache", ("Second", "Page cache"), rows)
    opened = element("details", element("summary", taken), memory, cached)
    return section("Every sample", opened)


def _memory_cells(sample: MemorySample) -> tuple[Cell, ...]:
    memory = sample.memory
    figures = (
        memory.anonymous_bytes,
        memory.file_bytes,
        memory.locked_bytes,
        memory.peak_bytes,
    )
    return (
        _seconds_cell(sample.seconds),
        *(Number(-1, "") if figure is None else count(figure) for figure in figures),
    )


def _seconds_cell(seconds: float) -> Number:
    return Number(seconds, f"{seconds:.3f}")
