"""A plot of the results as hand-written SVG: a panel for each condition, a bar for each entry."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

WIDTH = 900
NAMES_WIDTH = 350
FIGURE_WIDTH = 70  # right of the longest bar
BAR_HEIGHT = 15
BAR_GAP = 4
PANEL_HEAD = 44
MARGIN = 16
COLOURS = {"own": "#1f6fb2", "peer": "#c9772b", "ceiling": "#9aa5ad", "memory": "#ccd3d8"}
TOLD = {"own": "kda_stream", "peer": "peer", "ceiling": "ceiling", "memory": "memory alone"}


@dataclass(frozen=True)
class Bar:
    """`value` is the median in GB/s, None without one; `each` has one figure a round."""

    name: str
    kind: str
    value: float | None
    each: tuple[float, ...]
    outcome: str


@dataclass(frozen=True)
class Panel:
    title: str
    bars: tuple[Bar, ...]


def svg(title: str, panels: list[Panel]) -> str:
    top = MARGIN + 44
    body: list[str] = []
    for panel in panels:
        body += _panel(panel, top)
        top += PANEL_HEAD + len(panel.bars) * (BAR_HEIGHT + BAR_GAP) + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" '
        f'viewBox="0 0 {WIDTH} {top}" font-family="sans-serif" fill="#222">'
    )
    return "\n".join(
        [
            head,
            f'<rect width="{WIDTH}" height="{top}" fill="#fff"/>',
            _text(MARGIN, MARGIN + 12, title, size=16),
            *_legend(MARGIN + 34),
            *body,
            "</svg>\n",
        ]
    )


def _panel(panel: Panel, top: int) -> list[str]:
    scale_width = WIDTH - NAMES_WIDTH - FIGURE_WIDTH - MARGIN
    most = max((max((bar.value or 0, *bar.each)) for bar in panel.bars), default=0) or 1
    parts = [_text(MARGIN, top + 24, f"{panel.title}: GB/s", size=14)]
    bars_top = top + PANEL_HEAD - 8
    bars_end = bars_top + len(panel.bars) * (BAR_HEIGHT + BAR_GAP)
    step = _step(most)
    for tick in range(int(most / step) + 1):
        x = NAMES_WIDTH + tick * step / most * scale_width
        parts.append(_line(x, bars_top - 4, x, bars_end, "#e3e6e8"))
        parts.append(_text(x, bars_top - 8, f"{tick * step:g}", anchor="middle", size=10))
    for number, bar in enumerate(panel.bars):
        y = bars_top + number * (BAR_HEIGHT + BAR_GAP)
        middle = y + BAR_HEIGHT - 3
        parts.append(_text(NAMES_WIDTH - 8, middle, bar.name, anchor="end"))
        if bar.value is None:
            parts.append(_text(NAMES_WIDTH + 6, middle, bar.outcome, colour="#a33"))
            continue
        length = bar.value / most * scale_width
        parts.append(
            f'<rect x="{NAMES_WIDTH}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" '
            f'fill="{COLOURS[bar.kind]}"/>'
        )
        for value in bar.each:
            x = NAMES_WIDTH + value / most * scale_width
            parts.append(_line(x, y + 3, x, y + BAR_HEIGHT - 3, "#222"))
        furthest = NAMES_WIDTH + max(bar.value, *bar.each) / most * scale_width
        parts.append(_text(furthest + 6, middle, f"{bar.value:.2f}"))
    return parts


def _legend(y: int) -> list[str]:
    parts: list[str] = []
    x = MARGIN
    for kind, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 17, y, TOLD[kind]))
        x += 34 + 8 * len(TOLD[kind])
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
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
