"""Line charts as SVG text, for pages that are read where nothing is installed.

Owns: axes, ticks, lines, bands, legend. Refuses: knowing what is drawn. No dependency, the same bytes every time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

COLORS = (
    "#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#0a7ea4", "#57606a", "#e16f24", "#2da44e",
    "#6639ba", "#953800", "#0550ae", "#a40e26", "#116329", "#4d2d00",
)  # fmt: skip
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 30, 40
_LEGEND_LINE = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    """NaN breaks the line."""
    low: Sequence[float] = ()
    """With `high`: a band around the line; empty: none."""
    high: Sequence[float] = ()
    color: str = ""
    """Empty: the next of COLORS."""
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes."""

    title: str
    lines: Sequence[Line]
    x_label: str = ""
    y_label: str = ""
    x_range: tuple[float, float] | None = None
    """None: what the lines need; the same for y_range."""
    y_range: tuple[float, float] | None = None
    marks: Sequence[float] = field(default_factory=tuple)
    """Vertical lines at these x."""
    x_names: Mapping[float, str] = field(default_factory=dict)
    """Ticks of the x axis with their names, e.g. of a logarithmic one. Empty: round numbers."""


Look = dict[str, tuple[str, bool]]
"""By label: colour, and whether it is dashed."""


def chart(
    panels: Sequence[Panel], *, width: int = 380, height: int = 260, legend: Literal["shared", "each"] = "shared"
) -> str:
    """Panels side by side, over one legend, or each over its own: then colours begin anew in every panel."""
    looks = [_look([panel]) for panel in panels] if legend == "each" else [_look(panels)] * len(panels)
    legend_width = width if legend == "each" else width * len(panels)
    longest = max((len(label) for look in looks for label in look), default=0)
    columns = max(1, legend_width // max(130, 36 + 6 * longest))
    rows = max((-(-len(look) // columns) for look in looks if len(look) > 1), default=0)
    full_width, full_height = width * len(panels), height + rows * _LEGEND_LINE + (6 if rows else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full_width} {full_height}" width="{full_width}" '
        f'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{full_width}" height="{full_height}" fill="#ffffff"/>',
    ]
    for place, (panel, look) in enumerate(zip(panels, looks, strict=True)):
        parts.append(_panel(panel, place * width, width, height, look))
        if rows and (legend == "each" or place == 0):
            parts += _legend(look, columns, place * width, legend_width, height + 8)
    return "\n".join([*parts, "</svg>", ""])


def _look(panels: Sequence[Panel]) -> Look:
    look: Look = {}
    for panel in panels:
        for line in panel.lines:
            look.setdefault(line.label, (line.color or COLORS[len(look) % len(COLORS)], line.is_dashed))
    return look


def _panel(panel: Panel, left: int, width: int, height: int, labels: Look) -> str:
    xs = panel.x_range or _range([x for line in panel.lines for x in line.xs])
    ys = panel.y_range or _range([y for line in panel.lines for y in (*line.ys, *line.low, *line.high)])
    inner_width, inner_height = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def at(x: float, y: float) -> str:
        across = left + _LEFT + inner_width * (x - xs[0]) / (xs[1] - xs[0])
        up = (min(max(y, ys[0]), ys[1]) - ys[0]) / (ys[1] - ys[0])
        return f"{across:.1f},{_TOP + inner_height * (1 - up):.1f}"

    middle = left + _LEFT + inner_width / 2
    parts = [f'<text x="{middle}" y="16" text-anchor="middle" font-weight="600">{escape(panel.title)}</text>']
    for tick in _ticks(*ys):
        start, end = at(xs[0], tick).split(",")
        parts.append(f'<path d="M{start},{end}H{left + width - _RIGHT}" stroke="#d8dee4" fill="none"/>')
        parts.append(f'<text x="{left + _LEFT - 6}" y="{float(end) + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick, name in (panel.x_names or {tick: _number(tick) for tick in _ticks(*xs)}).items():
        across, below = at(tick, ys[0]).split(",")
        parts.append(f'<text x="{across}" y="{float(below) + 15:.1f}" text-anchor="middle">{escape(name)}</text>')
    parts += [
        f'<path d="M{at(mark, ys[0])}L{at(mark, ys[1])}" stroke="#8c959f" stroke-dasharray="2 3"/>'
        for mark in panel.marks
    ]
    parts.append(f'<text x="{middle}" y="{height - 8}" text-anchor="middle">{escape(panel.x_label)}</text>')
    side = f"translate({left + 12},{_TOP + inner_height / 2}) rotate(-90)"
    parts.append(f'<text transform="{side}" text-anchor="middle">{escape(panel.y_label)}</text>')
    for line in panel.lines:
        color, is_dashed = labels[line.label]
        if line.low:
            band = [at(x, y) for x, y in zip(line.xs, line.low, strict=True)]
            band += [at(x, y) for x, y in zip(reversed(line.xs), reversed(line.high), strict=True)]
            parts.append(f'<path d="M{"L".join(band)}Z" fill="{color}" fill-opacity="0.12"/>')
        dash = ' stroke-dasharray="5 4"' if is_dashed else ""
        path = _path([(x, y) for x, y in zip(line.xs, line.ys, strict=True)], at)
        parts.append(f'<path d="{path}" stroke="{color}" stroke-width="1.8" fill="none"{dash}/>')
    return "\n".join(parts)


def _path(points: Sequence[tuple[float, float]], at: Callable[[float, float], str]) -> str:
    steps, is_drawing = [], False
    for x, y in points:
        if math.isnan(y):
            is_drawing = False
            continue
        steps.append(f"{'L' if is_drawing else 'M'}{at(x, y)}")
        is_drawing = True
    return "".join(steps)


def _legend(labels: Look, columns: int, left: int, width: int, top: int) -> list[str]:
    parts = []
    for place, (label, (color, is_dashed)) in enumerate(labels.items()):
        x = left + 16 + (place % columns) * (width - 16) / columns
        y = top + (place // columns) * _LEGEND_LINE
        dash = ' stroke-dasharray="5 4"' if is_dashed else ""
        parts.append(f'<path d="M{x:.1f},{y}h18" stroke="{color}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{x + 24:.1f}" y="{y + 4}">{escape(label)}</text>')
    return parts


def _range(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers inside the range."""
    rough = (high - low) / 5
    scale = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough)
    first = math.ceil(low / size - 1e-9)
    return [number * size for number in range(first, math.floor(high / size + 1e-9) + 1)]


def _number(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{round(value, 6):g}"
