"""Which charts a report has, from the figures. Pure functions."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence

from oasis_sglang.bench import words
from oasis_sglang.bench.figures import FIGURES
from oasis_sglang.bench.records import Results
from oasis_sglang.bench.view import Case, Figures, Picture, case_of
from oasis_sglang.charts import Bars, Line, Lines, Stacked
from oasis_sglang.hosts import HostsError, bits_per_second
from oasis_sglang.top import PHASES

DRAWN = ("decode_tokens_per_second", "ttft_p50", "itl_mean", "admitted_share", "lifetime_share", "host_used_bytes_peak", "concurrency", "accuracy", "kl")
X_LABELS = {"concurrency": "requests at once", "context": "prompt tokens", "budget": "budget, tokens", "link": "rate of the data network",
            "pool": "tokens of decode's KV pool"}
_MOST_TICKS = 10
_WIDE, _VERY_WIDE = 8, 30
"""An axis whose ends differ more than this is logarithmic: x, y."""
_WHOLE = "not divided"


def overview(figures: Figures, cases: Sequence[Case], prefix: str) -> list[Picture]:
    """Bars of each figure by case and system; of more than one system only."""
    pictures = []
    for name in DRAWN if len(figures.systems) > 1 else ():
        spreads = {system: [figures.spread(case, system, name) for case in cases] for system in figures.systems}
        held = [spread for found in spreads.values() for spread in found if spread is not None]
        if not any(spread.high for spread in held):
            continue
        factor, unit = words.scale(FIGURES[name].unit, max(spread.median for spread in held))
        bars = {system: [None if one is None else (one.median / factor, one.low / factor, one.high / factor) for one in found]
                for system, found in spreads.items()}
        pictures.append(Picture(_file(prefix, name), Bars(words.title(name), unit or "share", [str(case) for case in cases], bars)))
    return pictures


def sweep(figures: Figures, coordinate: str, cases: Sequence[Case]) -> list[Picture]:
    """Lines of each figure over a coordinate; ``cases`` of one workload, each has the coordinate."""
    values = list(dict.fromkeys(case.point[coordinate] for case in cases))
    at = positions(values)
    pictures = []
    for name in DRAWN:
        points: dict[str, list] = {system: [] for system in figures.systems}
        for case in cases:
            rest = {key: value for key, value in case.point.items() if key != coordinate}
            for system in figures.systems:
                if (spread := figures.spread(case, system, name)) is not None:
                    points.setdefault(words.place(system, rest), []).append((at[case.point[coordinate]], spread))
        held = [spread for found in points.values() for _, spread in found]
        if not any(spread.high for spread in held):
            continue
        factor, unit = words.scale(FIGURES[name].unit, max(spread.median for spread in held))
        series = {system: Line(*([part / factor if index else part for part in column] for index, column in enumerate(zip(
            *sorted((x, spread.median, spread.low, spread.high) for x, spread in found))))) if found else Line((), ()) for system, found in points.items()}
        lows = [spread.low for spread in held]
        pictures.append(Picture(_file("sweep", coordinate, cases[0].workload, name), Lines(
            f"{words.title(name)}, {cases[0].workload}", X_LABELS.get(coordinate, coordinate), unit or FIGURES[name].title, series,
            ticks={x: words.plain(value) for value, x in at.items()} if len(at) <= _MOST_TICKS else {},
            log_x=min(at.values()) > 0 and max(at.values()) >= _WIDE * min(at.values()),
            log_y=min(lows) > 0 and max(spread.high for spread in held) >= _VERY_WIDE * min(lows))))
    return pictures


def positions(values: Sequence[float | str]) -> dict[float | str, float]:
    """Where values stand on the x axis: numbers and link rates (Mbit/s) by their size, other words side by side."""
    try:
        return {value: bits_per_second(value) / 1e6 if isinstance(value, str) else float(value) for value in values}
    except HostsError:
        return {value: float(index) for index, value in enumerate(values)}


def phases(results: Results, figures: Figures, case: Case) -> Picture | None:
    """Bytes of the mean request, admitted and until its release, by phase; systems that count a whole as one part."""
    full = max((figures.median(case, system, "full_transfer_bytes") or 0.0 for system in figures.systems), default=0.0)
    found: dict[str, dict[str, float]] = {"full transfer": {_WHOLE: full}} if full else {}
    for system in figures.systems:
        requests = [request for run in results.runs if run.system == system and case_of(run.workload, run.point) == case for request in run.requests]
        for what in ("admitted", "lifetime"):
            counted = [parts for request in requests if (parts := getattr(request, f"{what}_bytes_by_phase")) is not None]
            whole = figures.median(case, system, f"{what}_bytes")
            if bar := _mean(counted) if counted else {_WHOLE: whole} if whole else {}:
                found[f"{system}: {what}"] = bar
    if not found:
        return None
    factor, unit = words.scale("B", max(sum(bar.values()) for bar in found.values()))
    bars = {name: {part.replace("_", " "): size / factor for part, size in bar.items()} for name, bar in found.items()}
    parts = dict.fromkeys(part.replace("_", " ") for part in (_WHOLE, *PHASES, *(part for bar in found.values() for part in bar)))
    return Picture(_file("phases", str(case)), Stacked(f"bytes to decode, mean request, {case}", unit, list(parts), bars))


def _mean(counted: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """By phase; phases in which nothing ever came are left out."""
    names = dict.fromkeys(name for parts in counted for name in parts)
    means = {name: statistics.fmean(parts.get(name, 0) for parts in counted) for name in names}
    return {name: mean for name, mean in means.items() if mean}


def profile(stages: Mapping[str, Mapping[str, float]], case: Case) -> Picture | None:
    """Bars of each stage by system, milliseconds. Stages run beside each other, so that they are not stacked."""
    names = list(dict.fromkeys(name for parts in stages.values() for name in parts))
    series = {system: [(parts[name],) * 3 if name in parts else None for name in names] for system, parts in stages.items()}
    if not any(value for values in series.values() for value in values):
        return None
    return Picture(_file("profile", str(case)), Bars(f"a decode step, {case}", "ms per step", names, series))


def _file(*parts: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(parts)).strip("-")
