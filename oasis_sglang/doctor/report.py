"""The doctor's findings as JSON, as a table, and as an exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from oasis_sglang.doctor.asked import Asked
from oasis_sglang.doctor.check import Check

VERSION = 1
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def as_json(checks: Sequence[Check], asked: Asked) -> dict:
    """``version`` is that of this schema."""
    return {"version": VERSION, "role": asked.role, "checks": [check._asdict() for check in checks]}


def exit_code(checks: Sequence[Check]) -> int:
    return int(any(check.status == "fail" for check in checks))


def table(checks: Sequence[Check], asked: Asked):
    from rich.table import Table
    from rich.text import Text

    shown = Table("check", "", title=f"oasis doctor: {asked.role}", title_justify="left")
    for heading in ("found", "wanted"):
        shown.add_column(heading, overflow="fold")
    for check in checks:
        shown.add_row(check.name, Text(check.status, _STYLES[check.status]), Text(check.found), Text(check.wanted))
    return shown


def remedies(checks: Sequence[Check]) -> list[str]:
    """What to do, the failures first."""
    wrong = sorted((check for check in checks if check.remedy), key=lambda check: check.status)
    return [f"{check.status}: {check.name}: {check.remedy}" for check in wrong]


def summary(checks: Sequence[Check]) -> str:
    counts = Counter(check.status for check in checks)
    return ", ".join(f"{counts[status]} {status}" for status in _STYLES if counts[status])
