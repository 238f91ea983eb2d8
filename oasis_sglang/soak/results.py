"""What a soak found: the verdict over its timeline, and its tables. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from oasis_sglang.soak.asking import ANSWERED, FAILED, LEFT, REFUSED, STUCK, Outcome

BACK_PRESSURE = 503
"""What overload alone may be told, before the first token. Anything else needs a fault that it overlaps with."""
GRACE_SECONDS = 1.0
"""Around a fault: clocks of the client and of whoever strikes."""


class Row(msgspec.Struct, kw_only=True):
    """A fault. Times are seconds since the run began; ``detected`` and ``restored``: from the blow until another server showed that it knew
    (None: it did not), and until all that was in flight had ended and nothing was held any more (None: not within its time)."""

    fault: str
    what: str
    began: float
    ended: float = 0.0
    in_flight: int = 0
    lost: int = 0
    recovered: int = 0
    told: int = 0
    left: int = 0
    wrong: int = 0
    detected: float | None = None
    restored: float | None = None
    must_notice: bool = True
    still_held: dict[str, int] = {}


class Report(msgspec.Struct, kw_only=True):
    """A whole soak. ``outcomes`` in the order in which they were sent; ``problems``: one line each, none for a good run."""

    model: str
    seed: int
    seconds: float
    capacity: int
    most_at_once: int
    outcomes: list[Outcome]
    faults: list[Row]
    still_held: dict[str, int]
    internal_errors: dict[str, int]
    grown: list[str]
    problems: list[str] = []


def judged(row: Row, ids: Iterable[str], outcomes: Mapping[str, Outcome]) -> Row:
    """``row`` with what became of the requests ``ids`` that were under way at its blow."""
    struck = [outcomes[i] for i in ids]
    count = Counter(o.status for o in struck)
    return msgspec.structs.replace(row, in_flight=len(struck), lost=count[STUCK], recovered=count[ANSWERED], told=count[REFUSED] + count[FAILED],
                                   left=count[LEFT], wrong=sum(o.equal is False for o in struck))


def overlaps(outcome: Outcome, rows: Iterable[Row]) -> bool:
    """Whether a fault went on while this request did."""
    return any(outcome.sent <= row.ended + GRACE_SECONDS and outcome.ended >= row.began - GRACE_SECONDS for row in rows)


def problems(report: Report) -> list[str]:
    """Everything that is not as it should be, one line each."""
    found = []
    for o in report.outcomes:
        if o.status == STUCK:
            found.append(f"{o.id} was neither answered nor refused")
        elif o.equal is False:
            found.append(f"{o.id} ({o.prompt}) was answered wrongly")
        elif o.status in (REFUSED, FAILED) and not overlaps(o, report.faults) and not (o.status == REFUSED and o.code == BACK_PRESSURE):
            found.append(f"{o.id} {o.status} without a fault: {o.code} {o.error} {o.told[:200]}")
    for row in report.faults:
        if row.restored is None:
            found.append(f"{row.fault}: not back at its baseline, still held: {_show(row.still_held)}")
        if row.must_notice and row.detected is None:
            found.append(f"{row.fault}: nobody noticed")
    if report.still_held:
        found.append(f"at the end still held: {_show(report.still_held)}")
    found += [f"{count} internal errors of {name}" for name, count in report.internal_errors.items() if count]
    if not any(o.equal for o in report.outcomes):
        found.append("no answer was compared with its reference")
    return found + report.grown


def summary(report: Report) -> list[tuple[str, str]]:
    """(what, how much), for the table above the faults'."""
    count = Counter(o.status for o in report.outcomes)
    by_type = {status: Counter(o.error for o in report.outcomes if o.status == status) for status in (REFUSED, FAILED)}
    compared = [o for o in report.outcomes if o.equal is not None]
    return [
        ("requests", f"{len(report.outcomes)} in {report.seconds:.0f} s, at most {report.most_at_once} at once for {report.capacity} places"),
        ("answered", f"{count[ANSWERED]} ({sum(o.tokens for o in report.outcomes if o.status == ANSWERED)} tokens)"),
        ("left by their clients", str(count[LEFT])),
        ("refused", _types(count[REFUSED], by_type[REFUSED])),
        ("failed", _types(count[FAILED], by_type[FAILED])),
        ("lost or stuck", str(count[STUCK])),
        ("wrong output", f"{sum(not o.equal for o in compared)} of {len(compared)} compared"),
        ("held at the end", _show(report.still_held) or "nothing"),
    ]


COLUMNS = ("fault", "what was done", "requests in flight", "lost", "recovered", "told an error", "wrong output", "time to detect", "time to baseline")


def cells(row: Row) -> tuple[str, ...]:
    """Of one fault, as in ``COLUMNS``. In flight = lost + recovered + told an error + those whose client left."""
    return (row.fault, row.what, str(row.in_flight), str(row.lost), str(row.recovered), str(row.told), str(row.wrong),
            _seconds(row.detected, "not detected" if row.must_notice else "not meant to be"), _seconds(row.restored, "not reached"))


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/operations.md."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def load_rows(file: Path) -> list[Row]:
    """Of a soak's ``results.json``, or of a file of one row a line. Raises OSError, ValueError."""
    raw = file.read_bytes()
    try:
        if file.suffix == ".jsonl":
            return [msgspec.json.decode(line, type=Row) for line in raw.splitlines() if line]
        return msgspec.json.decode(raw, type=Report).faults
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file}: {error}") from error


def timeline(report: Report) -> str:
    """JSON lines: the requests and the faults, in the order in which they began."""
    lines = [(o.sent, {"request": msgspec.to_builtins(o)}) for o in report.outcomes] + [(r.began, {"fault": msgspec.to_builtins(r)}) for r in report.faults]
    return "".join(json.dumps(line) + "\n" for _, line in sorted(lines, key=lambda pair: pair[0]))


def _types(total: int, types: Counter) -> str:
    return f"{total}" + (" (" + ", ".join(f"{kind} {count}" for kind, count in types.most_common()) + ")" if total else "")


def _seconds(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.1f} s"


def _show(held: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in held.items())
