"""Line charts as SVG: enough for a study, and no plotting library to install."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
"""Colours that people with colour blindness tell apart (Okabe and Ito); lines that share one differ in their dashes."""

DASHES = ("", "6 3", "2 2", "8 3 2 3")
_WIDTH, _PLOT, _HEIGHT, _LEFT, _TOP, _LINE = 980, 560, 360, 70, 40, 16


def chart(title: str, x_label: str, y_label: str, series: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> str:
    """An SVG text: one line with dots for each named (xs, ys). Both axes are linear, y starts at 0. Raises ``ValueError`` without a point."""
    xs = [x for line in series.values() for x in line[0]]
    ys = [y for line in series.values() for y in line[1]]
    if not xs:
        raise ValueError(f"nothing to draw in {title}")
    low, high = min(xs), max(xs)
    low, high = (low, high) if low < high else (low - 1, high + 1)
    step = _step(max(*ys, 0) or 1.0)
    top = step * math.ceil((max(*ys, 0) or 1.0) / step)
    height = max(_HEIGHT, _LINE * len(series))
    bottom = _TOP + height

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (x - low) / (high - low) * _PLOT, bottom - y / top * height

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 50}" font-family="sans-serif" font-size="12">',
             f'<rect width="100%" height="100%" fill="white"/><text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>']
    for i in range(round(top / step) + 1):
        y = at(low, i * step)[1]
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _PLOT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                     f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{i * step:.4g}</text>')
    for x in sorted(set(xs)) if len(set(xs)) <= 8 else [low + (high - low) * i / 6 for i in range(7)]:
        parts.append(f'<text x="{at(x, 0)[0]:.1f}" y="{bottom + 16}" text-anchor="middle">{x:.4g}</text>')
    parts.append(f'<text x="{_LEFT + _PLOT / 2}" y="{bottom + 38}" text-anchor="middle">{escape(x_label)}</text>'
                 f'<text transform="translate(16 {_TOP + height / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    for i, (name, line) in enumerate(series.items()):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        points = [at(x, y) for x, y in zip(*line)]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}" points="'
                     + " ".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>')
        if len(points) <= 16:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        y = _TOP + 10 + i * _LINE
        parts.append(f'<line x1="{_LEFT + _PLOT + 16}" x2="{_LEFT + _PLOT + 40}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="1.8" '
                     f'stroke-dasharray="{dash}"/><text x="{_LEFT + _PLOT + 46}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _step(top: float) -> float:
    """A round distance of about five grid lines up to ``top``."""
    unit = 10.0 ** math.floor(math.log10(top / 5))
    return next(unit * factor for factor in (1, 2, 5, 10) if unit * factor * 5 >= top * 0.999)
