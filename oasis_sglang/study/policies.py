"""Settings of a study: how large a working set is, whose queries choose its blocks, and how much it may pull."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from decode_node.working_set import EMA_DECAY, FLOOR, STICKY


class Policy(NamedTuple):
    """``now``: the row's own query chooses, as if blocks came in no time. ``drafted``: rows of drafted tokens run with the actual
    one; ``oracle``: they are the true next tokens; ``actual``: the actual row chooses too; ``kept``: drafts that are right are
    accepted, so that a step covers several tokens with one working set."""

    now: bool = False
    drafted: bool = False
    oracle: bool = False
    actual: bool = True
    kept: bool = False


POLICIES = {
    "on-demand": Policy(now=True),
    "previous": Policy(),
    "draft": Policy(drafted=True, actual=False),
    "union": Policy(drafted=True),
    "accept": Policy(drafted=True, kept=True),
    "oracle": Policy(drafted=True, oracle=True),
}

HEADS = {"none": "no profile", "profile": "profile", "arbitrary": "arbitrary heads"}
"""Which heads are dense, and what that is called in a table."""


class Setting(NamedTuple):
    """One row of a study's table. ``heads``: which (layer, KV head)s are dense; ``cap``: pulls per step and head on average, 0 = no
    limit; ``floor``, ``sticky``: of the planner; ``decay``: of the moving average; ``warmup``: steps that may pull more; ``ahead``:
    drafted rows that choose; ``drafts``: tokens drafted per step when right ones are kept,
    as far as ``trust`` goes (``selection/trust.py``; 1 keeps them all)."""

    budget: int = 512
    summary: str = "mean_var_int8"
    policy: str = "previous"
    heads: str = "none"
    cap: int = 2
    floor: int = FLOOR
    sticky: float = STICKY
    decay: float = EMA_DECAY
    warmup: int = 0
    ahead: int = 1
    drafts: int = 4
    trust: float = 0.25
    block: int = 16
    sink: int = 16
    recent: int = 64


def label(setting: Setting, among: Sequence[Setting]) -> str:
    """What tells ``setting`` from the others ``among`` which it stands."""
    different = [field for field in Setting._fields if len({getattr(s, field) for s in among}) > 1]
    values = {field: getattr(setting, field) for field in different}
    values["heads"] = HEADS[setting.heads]
    plain = ("budget", "summary", "policy", "heads")
    words = [f"{values[field]}" if field in plain else f"{field} {values[field]}" for field in different]
    return ", ".join(words) or f"{setting.summary}, {setting.policy}"
