"""Small line charts with logarithmic axes, as SVG for light and dark pages. Does not know what is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 460, 360
"""Size of a panel."""
LEFT, RIGHT, TOP, BOTTOM = 64, 28, 40, 48
"""Margins around a panel's axes."""
LEGEND_ROW = 20
COLOURS = 8
"""Number of different colours; further series repeat them."""

_STYLE = """
svg { --page: #ffffff; --ink: #1f2328; --muted: #59636e; --grid: #d8dee4;
      --c0: #0b62c4; --c1: #b5470b; --c2: #1a7f37; --c3: #8250df;
      --c4: #9a6700; --c5: #0f7c8a; --c6: #b8286e; --c7: #57606a; background: var(--page); }
@media (prefers-color-scheme: dark) {
  svg { --page: #0d1117; --ink: #e6edf3; --muted: #9aa4af; --grid: #30363d;
        --c0: #6cb0ff; --c1: #ff9d5c; --c2: #56d364; --c3: #c69bff;
        --c4: #e3b341; --c5: #4fd0e0; --c6: #ff85b8; --c7: #b1bac4; } }
text { font: 12px system-ui, sans-serif; fill: var(--muted); }
.title { font-size: 14px; font-weight: 600; fill: var(--ink); }
.grid { stroke: var(--grid); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.dashed { stroke-dasharray: 5 4; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); }
.c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); } .c6 { stroke: var(--c6); } .c7 { stroke: var(--c7); }
circle { fill: var(--page); stroke-width: 2; }
"""


@dataclass(frozen=True)
class Series:
    """One line."""

    name: str
    points: tuple[tuple[float, float], ...]
    """(x, y), all above 0."""
    colour: int
    dashed: bool = False
    """Drawn dashed and without marks, for values that are not measured."""


@dataclass(frozen=True)
class Panel:
    """One chart."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]


def draw(caption: str, panels: Sequence[Panel]) -> str:
    """Draws panels side by side above a caption. All values must be positive."""
    rows = max(len(panel.series) for panel in panels)
    height, width = HEIGHT + LEGEND_ROW * rows + 40, WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(caption, {chr(34): "&quot;"})}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" style="fill: var(--page)"/>',
    ]
    for index, panel in enumerate(panels):
        parts += [f'<g transform="translate({index * WIDTH} 0)">', *_panel(panel), "</g>"]
    parts += [f'<text x="{LEFT}" y="{height - 12}">{escape(caption)}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(panel: Panel) -> list[str]:
    xs = [x for series in panel.series for x, _ in series.points]
    ys = [y for series in panel.series for _, y in series.points]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    x_of = _scale(min(xs), max(xs), LEFT, right)
    low, high = _bounds(ys)
    y_of = _scale(low, high, bottom, TOP)
    parts = [f'<text class="title" x="{LEFT}" y="22">{escape(panel.title)}</text>']
    for value in sorted(set(xs)):
        x = x_of(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    for value in _ticks(low, high):
        y = y_of(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text x="{(LEFT + right) / 2}" y="{bottom + 38}" text-anchor="middle">{escape(panel.x_label)}</text>'
    )
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">'
        f"{escape(panel.y_label)}</text>"
    )
    for row, series in enumerate(panel.series):
        parts += _line(series, x_of, y_of)
        parts += _legend(series, HEIGHT + 12 + LEGEND_ROW * row)
    return parts


def _line(series: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> list[str]:
    placed = [(x_of(x), y_of(y)) for x, y in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    parts = [f'<polyline class="{_classes(series)}" points="{path}"/>']
    if not series.dashed:
        parts += [f'<circle class="c{series.colour % COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed]
    return parts


def _legend(series: Series, y: int) -> list[str]:
    return [
        f'<line class="{_classes(series)}" x1="{LEFT}" y1="{y}" x2="{LEFT + 28}" y2="{y}"/>',
        f'<text x="{LEFT + 36}" y="{y + 4}">{escape(series.name)}</text>',
    ]


def _classes(series: Series) -> str:
    return f"line c{series.colour % COLOURS}{' dashed' if series.dashed else ''}"


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """A function from a value to its position, logarithmically. A single value is in the middle."""
    if low == high:
        low, high = low / 2, high * 2
    return lambda value: start + (end - start) * math.log(value / low) / math.log(high / low)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """The ticks just below and above the values."""
    steps = _ticks(min(values) / 10, max(values) * 10)
    return max(step for step in steps if step <= min(values)), min(step for step in steps if step >= max(values))


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from `low` to `high`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    return [step for step in steps if low * 0.999 <= step <= high * 1.001]
