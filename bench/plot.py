"""Panels of bars as hand-written SVG, readable on a light page and on a dark one."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from .rows import Spread

WIDTH = 900
NAMES_WIDTH = 350
FIGURE_WIDTH = 70  # right of the longest bar
BAR_HEIGHT = 15
BAR_GAP = 4
PANEL_HEAD = 44
MARGIN = 16
TOLD = {"own": "kda_stream", "peer": "others", "ceiling": "the machine", "memory": "memory alone"}
# The ground is drawn too, so that the picture is readable on a page of the other kind.
STYLE = """\
<style>
  .ground { fill: #ffffff; }
  text { fill: #1f2328; font-family: sans-serif; }
  .bad { fill: #b3261e; }
  .grid { stroke: #dfe3e7; }
  .round, .mark { stroke: #1f2328; }
  .own { fill: #2f7fc4; }
  .peer { fill: #d58a3d; }
  .ceiling { fill: #97a1aa; }
  .memory { fill: #c6cdd3; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; }
    text { fill: #e6edf3; }
    .bad { fill: #ff8a80; }
    .grid { stroke: #2d333b; }
    .round, .mark { stroke: #e6edf3; }
    .own { fill: #3f8fd6; }
    .peer { fill: #c27a30; }
    .ceiling { fill: #6e7781; }
    .memory { fill: #444c56; }
  }
</style>"""


@dataclass(frozen=True)
class Bar:
    """`figure` is None where there is none, and `outcome` stands in its place."""

    name: str
    kind: str
    figure: Spread | None
    outcome: str


@dataclass(frozen=True)
class Panel:
    """Bars with one scale; `mark` draws a line at that figure."""

    title: str
    bars: tuple[Bar, ...]
    mark: float | None = None


def svg(panels: list[Panel]) -> str:
    top = MARGIN + 24
    body: list[str] = []
    for panel in panels:
        body += _panel(panel, top)
        top += PANEL_HEAD + len(panel.bars) * (BAR_HEIGHT + BAR_GAP) + MARGIN
    kinds = {bar.kind for panel in panels for bar in panel.bars}
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" '
        f'viewBox="0 0 {WIDTH} {top}">'
    )
    ground = f'<rect class="ground" width="{WIDTH}" height="{top}" rx="6"/>'
    return "\n".join([head, STYLE, ground, *_legend(kinds, MARGIN + 14), *body, "</svg>\n"])


def _panel(panel: Panel, top: int) -> list[str]:
    scale_width = WIDTH - NAMES_WIDTH - FIGURE_WIDTH - MARGIN
    most = max((bar.figure.most for bar in panel.bars if bar.figure), default=0) or 1
    most = max(most, panel.mark or 0)
    parts = [_text(MARGIN, top + 20, panel.title, size=14)]
    bars_top = top + PANEL_HEAD
    bars_end = bars_top + len(panel.bars) * (BAR_HEIGHT + BAR_GAP)
    step = _step(most)
    for tick in range(int(most / step) + 1):
        x = NAMES_WIDTH + tick * step / most * scale_width
        parts.append(_line(x, bars_top - 4, x, bars_end, "grid"))
        parts.append(_text(x, bars_top - 7, f"{tick * step:g}", anchor="middle", size=10))
    for number, bar in enumerate(panel.bars):
        y = bars_top + number * (BAR_HEIGHT + BAR_GAP)
        middle = y + BAR_HEIGHT - 3
        parts.append(_text(NAMES_WIDTH - 8, middle, bar.name, anchor="end"))
        if bar.figure is None:
            parts.append(_text(NAMES_WIDTH + 6, middle, bar.outcome, style="bad"))
            continue
        length = bar.figure.median / most * scale_width
        parts.append(
            f'<rect class="{bar.kind}" x="{NAMES_WIDTH}" y="{y}" width="{length:.1f}" '
            f'height="{BAR_HEIGHT}"/>'
        )
        for value in bar.figure.each:
            x = NAMES_WIDTH + value / most * scale_width
            parts.append(_line(x, y + 4, x, y + BAR_HEIGHT - 4, "round"))
        furthest = NAMES_WIDTH + bar.figure.most / most * scale_width
        parts.append(_text(furthest + 6, middle, f"{bar.figure.median:.2f}"))
    if panel.mark is not None:
        x = NAMES_WIDTH + panel.mark / most * scale_width
        parts.append(_line(x, bars_top - 4, x, bars_end, "mark"))
    return parts


def _legend(kinds: set[str], y: int) -> list[str]:
    parts: list[str] = []
    x = MARGIN
    for kind, told in TOLD.items():
        if kind in kinds:
            parts.append(f'<rect class="{kind}" x="{x}" y="{y - 10}" width="12" height="12"/>')
            parts.append(_text(x + 17, y, told))
            x += 34 + 8 * len(told)
    parts.append(_text(x, y, "bar: median; thin lines: each round"))
    return parts


def _step(most: float) -> float:
    """A round distance of ticks, so that there are three to eight of them."""
    step = 0.001
    while most / step > 8:
        for factor in (2, 2.5, 2):
            step *= factor
            if most / step <= 8:
                break
    return step


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, style: str = ""
) -> str:
    styled = f' class="{style}"' if style else ""
    return (
        f'<text{styled} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
