"""What a report is made of, as plain data, and how one looks figures up for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from oasis_sglang.bench import words
from oasis_sglang.bench.figures import FIGURES
from oasis_sglang.bench.records import Point, Results, Spread
from oasis_sglang.charts import Chart

BEST, WORST, PASS, FAIL = "best", "worst", "pass", "fail"


class Cell(NamedTuple):
    """``note``: beneath the text. ``kind``: "" or one of BEST, WORST, PASS, FAIL, which are said in words besides any colour."""

    text: str
    note: str = ""
    kind: str = ""


Row = Sequence[Cell | str]
"""A row of one is the heading of those that follow."""


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Row]
    caption: str = ""


class Picture(NamedTuple):
    """``name``: of the file, without its ending."""

    name: str
    chart: Chart


class Section(NamedTuple):
    """``level``: 2, or 3 beneath the section before. ``text``: paragraphs; ``items``: of a list. ``code``: as it was typed. ``brief``:
    belongs into a summary."""

    title: str
    level: int = 2
    text: Sequence[str] = ()
    items: Sequence[str] = ()
    code: str = ""
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    brief: bool = True


class View(NamedTuple):
    title: str
    started: str
    warnings: Sequence[str]
    verdict: str
    sections: Sequence[Section]


class Case(NamedTuple):
    """A workload at a point of a sweep."""

    workload: str
    coordinates: tuple[tuple[str, float | int | str], ...] = ()

    @property
    def point(self) -> Point:
        return dict(self.coordinates)

    def __str__(self) -> str:
        return words.place(self.workload, self.point)


def case_of(workload: str, point: Point) -> Case:
    return Case(workload, tuple(sorted(point.items())))


class Figures:
    """The summary of ``results`` by case and system. ``cases``: in the order of the workloads; ``served``: those in which requests ran."""

    def __init__(self, results: Results):
        self.base = results.base
        self.systems = [system.name for system in results.systems]
        self._by = {(case_of(one.workload, one.point), one.system): one.figures for one in results.summary}
        order = [workload.name for workload in results.workloads]
        found = dict.fromkeys(case for case, _ in self._by)
        self.cases = sorted(found, key=lambda case: order.index(case.workload) if case.workload in order else len(order))
        ran = {case_of(run.workload, run.point) for run in results.runs}
        self.served = [case for case in self.cases if case in ran]

    def spread(self, case: Case, system: str, name: str) -> Spread | None:
        return self._by.get((case, system), {}).get(name)

    def median(self, case: Case, system: str, name: str) -> float | None:
        spread = self.spread(case, system, name)
        return None if spread is None else spread.median

    def names(self, cases: Sequence[Case]) -> list[str]:
        """Figures that a system has in one of these cases."""
        return [name for name in FIGURES if any(self.spread(case, system, name) for case in cases for system in self.systems)]

    def reference(self, case: Case, name: str) -> str | None:
        """The system that ratios are to: the base or, where it cannot say the figure, the first that can."""
        return next((system for system in (self.base, *self.systems) if self.spread(case, system, name) is not None), None)

    def ratio(self, case: Case, system: str, name: str) -> float | None:
        """To the reference's median; None of the reference itself, and where there is no ratio."""
        value, reference = self.median(case, system, name), self.reference(case, name)
        if value is None or reference in (None, system):
            return None
        against = self.median(case, reference, name)
        return value / against if against else None

    def ratio_words(self, case: Case, system: str, name: str) -> str:
        """``1.52x``, and of whom if not of the base; "" where there is no ratio."""
        found, reference = self.ratio(case, system, name), self.reference(case, name)
        if found is None:
            return ""
        return words.ratio(found) + (f" of {reference}" if reference != self.base else "")

    def overlaps(self, case: Case, system: str, other: str, name: str) -> bool:
        """Whether the repeats of the two systems cannot be told apart. Both have the figure."""
        one, two = self.spread(case, system, name), self.spread(case, other, name)
        return one.low <= two.high and two.low <= one.high

    def marks(self, case: Case, name: str) -> dict[str, str]:
        """The best and the worst system, if a figure has a better side, there were repeats and theirs do not overlap with any other system's."""
        held = [system for system in self.systems if self.spread(case, system, name) is not None]
        if len(held) < 2 or not FIGURES[name].better or any(self.spread(case, system, name).n < 2 for system in held):
            return {}
        ordered = sorted(held, key=lambda system: self.median(case, system, name), reverse=FIGURES[name].better == "higher")
        return {system: kind for system, kind in ((ordered[0], BEST), (ordered[-1], WORST))
                if not any(self.overlaps(case, system, other, name) for other in held if other != system)}
