"""One finding of the doctor's."""

from __future__ import annotations

from typing import NamedTuple


class Check(NamedTuple):
    """``status``: ok, warn (serves, but look at it), fail (would not start, or not do what was asked) or skip (says nothing here). ``remedy``: one
    sentence, of a warn or a fail."""

    name: str
    status: str
    found: str
    wanted: str = ""
    remedy: str = ""


def ok(name: str, found: str, wanted: str = "") -> Check:
    return Check(name, "ok", found, wanted)


def skip(name: str, found: str) -> Check:
    return Check(name, "skip", found)


def warn(name: str, found: str, wanted: str, remedy: str) -> Check:
    return Check(name, "warn", found, wanted, remedy)


def fail(name: str, found: str, wanted: str, remedy: str) -> Check:
    return Check(name, "fail", found, wanted, remedy)
