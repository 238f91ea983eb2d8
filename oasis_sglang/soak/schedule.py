"""What a soak does, from its seed alone: which requests, how many at once, which faults when. No effects.

Contents follow the seed; when each request is sent follows the servers, since as many run at once as the phase says. So two runs with
one seed send the same requests in the same order, up to where the slower one gets.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LEAVERS = 0.15
"""Share of clients that leave before their answer is complete."""
STREAMS = 0.7
"""Share of answers that are streamed."""
OUTPUTS = (1, 4, 16, 32, 64)
"""Tokens to generate."""
CALM_SECONDS, RUSH_SECONDS = 20.0, 10.0
RUSH = 4
"""Times the capacity."""


@dataclass(frozen=True)
class Prompt:
    """``compared``: its answer does not depend on what else runs, since it holds all its blocks."""

    name: str
    ids: tuple[int, ...]
    compared: bool


@dataclass(frozen=True)
class Ask:
    """One request. ``leaves``: seconds after which its client goes away; None: it waits for the end."""

    number: int
    prompt: int
    output: int
    stream: bool
    leaves: float | None = None

    @property
    def rid(self) -> str:
        return f"soak-{self.number}"


@dataclass(frozen=True)
class Phase:
    """From ``start`` (seconds) on, ``concurrency`` requests at once."""

    start: float
    concurrency: int


@dataclass(frozen=True)
class Strike:
    """The fault ``name`` at ``at`` seconds, or as soon as the one before it is over."""

    at: float
    name: str


def asks(seed: int, prompts: int) -> Iterator[Ask]:
    """Without end, over prompts 0 to ``prompts`` - 1."""
    chance, number = random.Random(seed), 0
    while True:
        leaves = chance.choice((0.05, 0.5, 2.0, 6.0)) * chance.uniform(0.5, 1.5) if chance.random() < LEAVERS else None
        yield Ask(number, chance.randrange(prompts), chance.choice(OUTPUTS), chance.random() < STREAMS, leaves)
        number += 1


def phases(seconds: float, capacity: int) -> list[Phase]:
    """Calm ones below ``capacity`` and rushes at four times of it, in turns."""
    found, at, rush = [], 0.0, False
    while at < seconds:
        found.append(Phase(at, RUSH * capacity if rush else max(1, capacity - 1)))
        at += RUSH_SECONDS if rush else CALM_SECONDS
        rush = not rush
    return found


def concurrency(phases: Sequence[Phase], at: float) -> int:
    """How many requests are to run at ``at`` seconds."""
    return next((phase.concurrency for phase in reversed(phases) if phase.start <= at), 0)


def strikes(names: Sequence[str], seconds: float) -> list[Strike]:
    """In the order of ``names``, evenly over the middle of the run: its first and last fifth are quiet."""
    step = 0.6 * seconds / max(1, len(names))
    return [Strike(0.2 * seconds + index * step, name) for index, name in enumerate(names)]


def menu(maker, text: str, *, seed: int, budget: int, context: int) -> list[Prompt]:
    """Prompts of ``text``, mixed lengths: questions, some that fit ``budget`` tokens with their longest answer, and longer ones up to
    about half of ``context``, which are attended to through a working set. ``maker``: ``prompts.PromptMaker``."""
    chance = random.Random(seed)
    fits = [length for length in (60, 130, 300, 500, 800) if length + max(OUTPUTS) <= budget]
    longer = [length for length in (1100, 1700, 2600, 3400) if budget < length <= context // 2]
    found = [Prompt(f"question {n}", tuple(ids), True) for n, ids in enumerate(maker.short(), 1)]
    for length in (*fits, *fits, *longer):
        found.append(Prompt(f"text {len(found)} of {length}", tuple(maker.cut(text, length, skip=chance.randrange(12_000))), length in fits))
    return found
