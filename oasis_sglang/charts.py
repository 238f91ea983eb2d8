"""Charts as PNG: what is drawn is plain data, and matplotlib is imported when something is drawn.

Colours are those of Okabe and Ito, which people with colour blindness tell apart; lines differ in their markers and dashes besides.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
_MARKERS, _DASHES = "osD^vPX*", ("-", "--", ":", "-.")
_STYLE = {"font.size": 9, "font.family": "DejaVu Sans", "axes.titlesize": 10, "axes.titlelocation": "left", "axes.titlepad": 12, "axes.spines.top": False,
          "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e0e0e0", "legend.frameon": False, "svg.hashsalt": "oasis"}
_WIDTH, _HEIGHT, _DPI = 6.4, 3.6, 130
_BESIDE = 6
"""More names than this stand beside the axes, not under them."""
MOST_DOTS = 16
_WORDS_ACROSS = 84
"""Letters that fit under the axes."""


class Line(NamedTuple):
    """``lows`` and ``highs``: ends of the bar at each point; none: no bars. A line without points is not drawn and keeps its colour."""

    xs: Sequence[float]
    ys: Sequence[float]
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()


class Lines(NamedTuple):
    """``ticks``: words for places on the x axis; none: as matplotlib likes. y starts at 0 unless it is logarithmic."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Line]
    ticks: Mapping[float, str] = {}
    log_x: bool = False
    log_y: bool = False


class Bars(NamedTuple):
    """Groups of bars side by side. ``series``: for each group (value, low, high), or None where there is nothing."""

    title: str
    y_label: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[tuple[float, float, float] | None]]


class Stacked(NamedTuple):
    """One lying bar for each name, of parts that add up. ``parts``: their order from the left, and by it their colours."""

    title: str
    x_label: str
    parts: Sequence[str]
    bars: Mapping[str, Mapping[str, float]]


Chart = Lines | Bars | Stacked


def png(chart: Chart) -> bytes:
    """Raises ``ValueError`` for a chart without a point."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lying = isinstance(chart, Stacked)
    names = list(chart.parts if lying else chart.series)
    beside = not lying and len(names) > _BESIDE
    height = max(_HEIGHT, 0.2 * len(names) + 1.0 if beside else 0, 0.26 * len(chart.bars) + 1.4 if lying else 0)
    width = _WIDTH + (2.6 if beside else 0)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.set_title(chart.title)
        {Lines: _lines, Bars: _bars, Stacked: _stacked}[type(chart)](chart, axes)
        handles, labels = axes.get_legend_handles_labels()
        if not handles:
            raise ValueError(f"nothing to draw in {chart.title}")
        columns = 1 if beside else min(len(labels), max(1, _WORDS_ACROSS // (max(map(len, labels)) + 6)))
        figure.legend(handles, labels, loc="outside right upper" if beside else "outside lower center", ncols=columns)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=_DPI, metadata={"Software": None})
    return out.getvalue()


def inline(image: bytes) -> str:
    """A PNG as the address of an image."""
    return "data:image/png;base64," + base64.b64encode(image).decode()


def _lines(chart: Lines, axes) -> None:
    for index, (name, line) in enumerate(chart.series.items()):
        if not len(line.xs):
            continue
        bars = None
        if len(line.lows):
            bars = [[y - low for y, low in zip(line.ys, line.lows)], [high - y for y, high in zip(line.ys, line.highs)]]
        turn, colour = divmod(index, len(COLOURS))
        axes.errorbar(line.xs, line.ys, yerr=bars, label=name, color=COLOURS[colour], linestyle=_DASHES[(index + turn) % len(_DASHES)], linewidth=1.6,
                      marker=_MARKERS[colour] if len(line.xs) <= MOST_DOTS else None, markersize=4.5, capsize=3, elinewidth=1.2)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
        _plain(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    if chart.ticks:
        axes.set_xticks(list(chart.ticks), list(chart.ticks.values()))
        axes.set_xticks([], minor=True)


def _plain(axis) -> None:
    """Numbers as people write them, and more of them where the axis spans little."""
    from matplotlib.ticker import LogFormatter, LogLocator

    class Plain(LogFormatter):
        def _num_to_string(self, x, vmin, vmax):
            return f"{x:g}"

    axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.set_major_formatter(Plain(labelOnlyBase=False))
    axis.set_minor_formatter("")


def _bars(chart: Bars, axes) -> None:
    width = 0.8 / max(len(chart.series), 1)
    for index, (name, values) in enumerate(chart.series.items()):
        held = [(group + (index - (len(chart.series) - 1) / 2) * width, *value) for group, value in enumerate(values) if value is not None]
        if not held:
            continue
        at, heights, lows, highs = zip(*held)
        bars = [[y - low for y, low in zip(heights, lows)], [high - y for y, high in zip(heights, highs)]]
        made = axes.bar(at, heights, width * 0.92, yerr=bars if any(map(any, bars)) else None, label=name, color=COLOURS[index % len(COLOURS)],
                        hatch=("", "//", "..", "xx")[index // len(COLOURS) % 4], capsize=2, error_kw={"elinewidth": 1})
        if len(chart.series) * len(chart.groups) <= MOST_DOTS:
            axes.bar_label(made, [_short(y) for y in heights], fontsize=7, padding=2)
    axes.set_xticks(range(len(chart.groups)), chart.groups)
    if len(chart.groups) * max(map(len, chart.groups)) > _WORDS_ACROSS:
        axes.tick_params(axis="x", labelrotation=20)
    axes.tick_params(axis="x", length=0)
    axes.grid(False, axis="x")
    axes.set_ylabel(chart.y_label)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)


def _stacked(chart: Stacked, axes) -> None:
    places = range(len(chart.bars))
    left = [0.0] * len(chart.bars)
    for index, part in enumerate(chart.parts):
        if not any(part in bar for bar in chart.bars.values()):
            continue
        sizes = [float(bar.get(part, 0.0)) for bar in chart.bars.values()]
        axes.barh(places, sizes, 0.72, left=left, label=part, color=COLOURS[index % len(COLOURS)], edgecolor="white", linewidth=0.6)
        left = [start + size for start, size in zip(left, sizes)]
    for place, end in zip(places, left):
        axes.annotate(_short(end), (end, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(places, list(chart.bars))
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_ylim(len(chart.bars) - 0.4, -0.6)
    axes.set_xlabel(chart.x_label)
    axes.set_xlim(left=0)
    axes.margins(x=0.1)


def _short(value: float) -> str:
    """Three digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if 1e-4 < abs(value) < 1e7 else f"{value:.2g}"
