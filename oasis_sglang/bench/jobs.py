"""What is asked: requests with their prompts, their places in a schedule and what is known of their answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Job:
    """One request. Greedy, to full length."""

    name: str
    """Unique in its workload."""
    prompt: list[int]
    """Token ids. Of a job with ``after``, what comes after that job's prompt and the answer to it."""
    output_tokens: int
    arrival: float | None = None
    """Seconds after the start of a run at which it is sent; None: as soon as the run's concurrency allows. Of a job with ``after``, seconds
    after that job's end at the earliest."""
    after: str | None = None
    """Name of an earlier job in the list: the turn before this one."""
    answers: tuple[str, ...] = ()
    """Each of them has to be in a right answer's text (letter case ignored)."""
    continuation: tuple[int, ...] = ()
    """Token ids to force when quality is measured: a written answer, or the text that really follows."""


@dataclass(frozen=True)
class Wanted:
    """What a workload is made from. ``tokens``: of a prompt. ``rate``: arrivals per second, None: no schedule. ``context``: of the model.
    ``long_output``: tokens of an answer where long answers are the point. ``share_document``: prompts begin with one document, which
    does not depend on ``seed``."""

    tokens: int = 6000
    requests: int = 4
    output_tokens: int = 64
    long_output: int = 2000
    turns: int = 13
    seed: int = 0
    share_document: bool = False
    rate: float | None = None
    context: int = 8192


@dataclass(frozen=True)
class Work:
    """A workload: its jobs in the order of arrival."""

    name: str
    description: str
    jobs: list[Job]
    notes: tuple[str, ...] = ()
    shared: tuple[list[int], ...] = field(default=())
    """Prompts that a run has served before it is measured, so that prefill's radix cache holds what they begin with."""

    def prompt_tokens(self) -> list[int]:
        """Of each job, with the turns before it and their answers."""
        ends: dict[str, int] = {}
        for job in self.jobs:
            ends[job.name] = (ends[job.after] if job.after is not None else 0) + len(job.prompt) + job.output_tokens
        return [ends[job.name] - job.output_tokens for job in self.jobs]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([(j.name, j.prompt, j.output_tokens, j.arrival, j.after) for j in self.jobs]).encode()).hexdigest()[:16]


def score(text: str, answers: Sequence[str]) -> float:
    """Share of ``answers`` that are in ``text``, letter case and runs of white space ignored (RULER's string match). At least one answer."""
    plain = " ".join(text.lower().split())
    return sum(" ".join(answer.lower().split()) in plain for answer in answers) / len(answers)
