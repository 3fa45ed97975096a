"""Charts as SVG that take the width they are given: places across are percentages, texts keep size.

Lines are drawn in a box of their own that is stretched, all else is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from .markup import Markup, element, joined

_HEIGHT: Final = 200
_TICKS_DOWN: Final = 5
_TICKS_ACROSS: Final = 6
_BOX: Final = 1000.0  # both sides of the stretched box that lines are drawn in
_THINNEST: Final = 0.15  # percent of the width: what is there is seen

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Unit:
    """What an axis counts in: figures are divided by `scale`."""

    name: str
    scale: float


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart: its class and its points (seconds, figure), each of them a dot or not."""

    style: str
    points: Sequence[Point]
    has_dots: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A column of a chart: its class, its height, the number under it and the title it shows."""

    style: str
    figure: float
    number: str
    title: str


@dataclass(frozen=True, slots=True)
class Range:
    """A part of a strip, from `begin` on up to `end`: its class and the title it shows."""

    style: str
    begin: float
    end: float
    title: str


def bytes_unit(most: float) -> Unit:
    """The unit in which `most` bytes is a figure of one to three digits."""
    for name, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if most >= scale:
            return Unit(name, scale)
    return Unit("bytes", 1)


def seconds_unit(most: float) -> Unit:
    """The unit in which `most` seconds are well read."""
    if most >= 600:
        return Unit("minutes", 60)
    return Unit("s", 1) if most >= 1 else Unit("ms", 1e-3)


def round_ticks(most: float, ticks_max: int) -> list[float]:
    """Round figures at equal distances from 0 to `most` or a little less, at most `ticks_max`."""
    if not most > 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / ticks_max))
    steps = (power * factor for factor in (1, 2, 2.5, 5, 10, 20))
    step = next(step for step in steps if most / step < ticks_max)
    return [number * step for number in range(int(most / step * (1 + 1e-9)) + 1)]


def _top(most: float) -> float:
    """Where an axis ends that has room for `most`: at a tick."""
    ticks = round_ticks(most, _TICKS_DOWN)
    step = ticks[1] if len(ticks) > 1 else most or 1.0
    return step * max(1, math.ceil(most / step * (1 - 1e-9)))


def time_chart(lines: Sequence[Line], seconds: float, most: float, unit: Unit, told: str) -> Markup:
    """Lines over time from 0 to `seconds`, on an axis with room for `most`; `told` describes it."""
    top = _top(most / unit.scale) * unit.scale
    drawn: list[Markup] = []
    for line in lines:
        places = [
            f"{_BOX * at / seconds:.1f},{_BOX * (1 - figure / top):.1f}"
            for at, figure in line.points
        ]
        class_ = f"line {line.style}"
        drawn.append(element("polyline", points=Markup(" ".join(places)), class_=class_))
        if line.has_dots:  # strokes of no length, which the box does not stretch
            dots = Markup("".join(f"M{place}h0" for place in places))
            drawn.append(element("path", d=dots, class_=f"{class_} dots"))
    box = element(
        "svg",
        *drawn,
        width="100%",
        height=_HEIGHT,
        viewBox=f"0 0 {_BOX:.0f} {_BOX:.0f}",
        preserveAspectRatio="none",
    )
    time = seconds_unit(seconds)
    ticks = round_ticks(seconds / time.scale, _TICKS_ACROSS)
    last = f" {time.name}"
    across = [
        (100 * tick * time.scale / seconds, f"{tick:g}{last if at == len(ticks) - 1 else ''}")
        for at, tick in enumerate(ticks)
    ]
    return _chart([*_axis_down(top, unit), *_axis_across(across), box], told)


def bar_chart(bars: Sequence[Bar], unit: Unit, told: str) -> Markup:
    """A column for each bar, with their numbers under some of them."""
    top = _top(max(bar.figure for bar in bars) / unit.scale) * unit.scale
    pitch = 100 / len(bars)
    width = min(pitch * 0.8, 6.0)
    drawn = (
        element(
            "rect",
            element("title", bar.title),
            x=f"{pitch * (at + 0.5) - width / 2:.2f}%",
            width=f"{width:.2f}%",
            y=_HEIGHT * (1 - bar.figure / top),
            height=_HEIGHT * bar.figure / top,
            class_=bar.style,
        )
        for at, bar in enumerate(bars)
    )
    every = math.ceil(len(bars) / 12)
    across = [(pitch * (at + 0.5), bars[at].number) for at in range(0, len(bars), every)]
    return _chart([*_axis_down(top, unit), *drawn, *_axis_across(across, ticks=False)], told)


def strip(ranges: Iterable[Range], length: float, whole: float, style: str, told: str) -> Markup:
    """A bar of `length`, drawn to the scale of `whole`, with the `ranges` marked in it."""
    background = element("rect", width=_percent(length, whole), height="100%", class_=style)
    marked = (
        element(
            "rect",
            element("title", part.title),
            x=_percent(part.begin, whole),
            width=f"{max(_THINNEST, 100 * (part.end - part.begin) / whole):.2f}%",
            height="100%",
            class_=part.style,
        )
        for part in ranges
    )
    return element("svg", background, *marked, class_="bar", role="img", aria_label=told)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "0%"


def _chart(parts: Iterable[Markup], told: str) -> Markup:
    svg = element("svg", joined(parts), class_="plot", height=_HEIGHT, role="img", aria_label=told)
    return element("div", svg, class_="chart")


def _axis_down(top: float, unit: Unit) -> Iterable[Markup]:
    """Lines across at round figures, each figure left of its line."""
    ticks = round_ticks(top / unit.scale, _TICKS_DOWN + 2)
    for at, tick in enumerate(ticks):
        y = _HEIGHT * (1 - tick * unit.scale / top)
        text = f"{tick:g} {unit.name}" if at == len(ticks) - 1 else f"{tick:g}"
        style = "grid" if at else "axis"
        yield element("line", x1=0, x2="100%", y1=y, y2=y, class_=style)
        yield element("text", text, x=-8, y=y + 4, text_anchor="end")


def _axis_across(places: Iterable[tuple[float, str]], *, ticks: bool = True) -> Iterable[Markup]:
    """Texts under the places, given in percent."""
    for percent, text in places:
        x = f"{percent:.2f}%"
        if ticks:
            yield element("line", x1=x, x2=x, y1=_HEIGHT, y2=_HEIGHT + 5, class_="axis")
        yield element("text", text, x=x, y=_HEIGHT + 18, text_anchor="middle")
