"""How long requests stood aside for blocks: a histogram with fixed bounds."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


class Stalls:
    """``counts``: one per bound (at most so many ms) and one for what is longer. Scheduler thread only."""

    def __init__(self):
        self.counts = [0] * (len(BOUNDS_MS) + 1)
        self.sum_ms = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_MS, seconds * 1e3)] += 1
        self.sum_ms += seconds * 1e3

    def report(self) -> dict:
        return {"bounds_ms": list(BOUNDS_MS), "counts": list(self.counts), "sum_ms": round(self.sum_ms, 3), "count": sum(self.counts)}
