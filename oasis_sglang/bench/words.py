"""Figures, ratios and points as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from oasis_sglang.bench.figures import FIGURES
from oasis_sglang.bench.records import Spread

MISSING = "–"
_SCALES = {"B": [(2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")], "s": [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs")]}


def digits(value: float) -> str:
    """Three digits at least."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}" if size < 1e9 else f"{value:.3g}"
    return "0" if size == 0 else f"{value:.{2 - math.floor(math.log10(size))}f}" if size >= 1e-3 else f"{value:.2e}"


def number(value: float) -> str:
    """As ``digits``, but whole numbers whole: for what is counted."""
    return f"{value:,.0f}" if abs(value) < 1e9 and value == round(value) else digits(value)


def scale(unit: str, value: float) -> tuple[float, str]:
    """What to divide by, and the unit then, so that ``value`` can be read."""
    scales = _SCALES.get(unit, [(1.0, unit)])
    return next((one for one in scales if abs(value) >= one[0]), scales[-1] if value else (1.0, unit))


def amount(value: float, unit: str) -> str:
    factor, shown = scale(unit, value)
    return f"{_form(unit, factor)(value / factor)} {shown}".rstrip()


def _form(unit: str, factor: float) -> Callable[[float], str]:
    """What may have been counted is whole if it is."""
    return number if unit in ("", "tokens") or (unit == "B" and factor == 1.0) else digits


def of_figure(name: str, value: float) -> str:
    return amount(value, FIGURES[name].unit)


def bounds(name: str, spread: Spread) -> str:
    """``[low–high]`` in the unit of the median; "" where there is nothing between them."""
    if spread.low == spread.high:
        return ""
    unit = FIGURES[name].unit
    factor, _ = scale(unit, spread.median)
    form = _form(unit, factor)
    return f"[{form(spread.low / factor)}–{form(spread.high / factor)}]"


def ratio(value: float) -> str:
    return f"{digits(value)}x"


def title(name: str) -> str:
    """With an arrow that says which way is better."""
    return FIGURES[name].title + {"lower": " ↓", "higher": " ↑", "": ""}[FIGURES[name].better]


def place(workload: str, point: Mapping[str, object]) -> str:
    """``needle, concurrency 4``."""
    return ", ".join([workload, *([points] if (points := coordinates(point)) else [])])


def coordinates(point: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in point.items())


def plain(value: object) -> str:
    """Of what was recorded about a model or a machine."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {plain(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: MISSING}[value]
    return number(value) if isinstance(value, float) else str(value)
