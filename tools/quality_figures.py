"""Figures of ``bench_quality.py``: what the decode node counted while answers were forced, and means by group. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from oasis_sglang.top import counters, growth, layers, shares

NODE = ("misses_share", "missed_mass", "tokens_per_verify", "drafts_accepted_share", "used_share", "wasted_share", "fallback_share", "stalls",
        "stall_p50_ms", "stall_p95_ms", "stall_p99_ms", "plan_us_per_step", "score_us_per_step")
"""What a row shows of the node's counters."""
MEANS = ("kl", "kl_first_8", "top1", "admitted", "lifetime", "ttft_seconds", "itl_seconds", "dense_ttft_seconds", "dense_itl_seconds")


def kind(case: str) -> str:
    """The workload a case belongs to: ``code`` for ``code_heapq``."""
    return case.partition("_")[0]


class Counted:
    """What a decode node counted between two reports (``oasis`` of its ``/server_info``), or in several such intervals."""

    def __init__(self, grown: Mapping, bounds_ms: Sequence[float], num_layers: int, kv_heads: int):
        self.grown, self.bounds_ms, self.shape = grown, bounds_ms, (num_layers, kv_heads)

    @classmethod
    def between(cls, before: Mapping, after: Mapping) -> Counted:
        stalls = (after.get("working_sets") or {}).get("stalls") or {}
        return cls(growth(counters(before), counters(after)), stalls.get("bounds_ms", ()), after["layout"]["num_layers"], after["layout"]["kv_heads"])

    @classmethod
    def together(cls, parts: Sequence[Counted]) -> Counted:
        """At least one part."""
        names = {name for part in parts for name in part.grown}
        return cls({name: sum(part.grown[name] for part in parts if name in part.grown) for name in names}, parts[-1].bounds_ms, *parts[-1].shape)

    def figures(self) -> dict:
        """None for what the node does not report. ``worst_head``: the head whose steps missed the most attention mass, on average."""
        found = shares(self.grown, self.bounds_ms)
        worst = next((row for row in layers(self.grown, *self.shape) if row["worst"]), None)
        head = worst and {"layer": worst["layer"], "head": worst["worst_head"], "missed_mass": worst["worst_missed_mass"]}
        return {**{name: found[name] for name in NODE}, "worst_head": head}


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there."""
    there = [value for value in values if value is not None]
    return statistics.fmean(there) if there else None


def grouped(measured: Sequence[tuple[dict, Counted]], *keys: str) -> list[dict]:
    """One line for each value of ``keys`` (names of columns), in the order of the first: means over requests, shares and
    percentiles over all that the node counted for them."""
    groups: dict[tuple, list[tuple[dict, Counted]]] = {}
    for row, counted in measured:
        groups.setdefault(tuple(row[key] for key in keys), []).append((row, counted))
    lines = []
    for values, members in groups.items():
        rows = [row for row, _ in members]
        worst = max(rows, key=lambda row: row["kl"])
        phases = {phase: mean(row["bytes_by_phase"].get(phase) for row in rows) for phase in rows[0]["bytes_by_phase"]}
        lines.append({**dict(zip(keys, values)), "n": len(rows), **{name: mean(row.get(name) for row in rows) for name in MEANS}, "bytes_by_phase": phases,
                      "worst": worst["case"], "worst_kl": worst["kl"], "worst_top1": worst["top1"],
                      **Counted.together([counted for _, counted in members]).figures()})
    return lines
