"""Workloads by name. Equal settings make equal token ids, on every machine that has the same Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from oasis_sglang.bench import conversations, documents, records, ruler
from oasis_sglang.bench.jobs import Job, Wanted, Work
from oasis_sglang.prompts import PromptMaker
from transport.errors import ConfigError

NAMES: dict[str, str] = {
    **{name: description for name, (description, _) in ruler.TASKS.items()},
    "common-words": "the most common words of a list",
    "document-qa": "questions about long documents",
    "code": "a module's source, to be continued",
    "agent": "a transcript with a long first turn and many short ones",
    "chat": "conversations that share a system prompt",
    "reasoning": "a short task with a long answer",
}
_MAKERS: dict[str, Callable[[PromptMaker, Wanted], Work]] = {
    "common-words": ruler.common_words, "document-qa": documents.document_qa, "code": documents.code, "agent": conversations.agent, "chat": conversations.chat,
    "reasoning": documents.reasoning,
}
_COUNTS = ("tokens", "requests", "output_tokens", "long_output", "turns")


def make(name: str, maker: PromptMaker, wanted: Wanted) -> Work:
    """Prompts of a single turn have ``wanted.tokens`` tokens or up to 20 less, those of ``reasoning`` apart. Raises ``ConfigError`` for a
    name that is none, for what is wanted less than once, and for sizes that do not fit the texts or the model."""
    if name not in NAMES:
        raise ConfigError(f"{name!r} is no workload; known: {', '.join(NAMES)}")
    if wrong := [f"{what} {getattr(wanted, what)}" for what in _COUNTS if getattr(wanted, what) < 1]:
        raise ConfigError(f"workload {name}: {', '.join(wrong)}: at least 1 is needed")
    if wanted.rate is not None and not wanted.rate > 0:
        raise ConfigError(f"workload {name}: nothing arrives at a rate of {wanted.rate} per second")
    try:
        work = ruler.make(name, maker, wanted) if name in ruler.TASKS else _MAKERS[name](maker, wanted)
    except ValueError as error:
        raise ConfigError(f"workload {name}: {error}") from error
    longest = max(tokens + job.output_tokens for tokens, job in zip(work.prompt_tokens(), work.jobs))
    if longest > wanted.context:
        raise ConfigError(f"workload {name}: a prompt and its answer have {longest} tokens, the model's context is {wanted.context}")
    if wanted.share_document and not work.shared:
        work = replace(work, notes=(*work.notes, "no document is shared: prefill has nothing of these prompts in its cache before a run"))
    return work if wanted.rate is None else replace(work, jobs=_arriving(work.jobs, wanted.rate, random.Random(f"arrivals {wanted.seed}")))


def _arriving(jobs: list[Job], rate: float, rng: random.Random) -> list[Job]:
    """As a Poisson process of ``rate`` per second; what follows another job comes when that one has ended."""
    at, found = 0.0, []
    for job in jobs:
        if job.after is None:
            found.append(replace(job, arrival=at))
            at += rng.expovariate(rate)
        else:
            found.append(job)
    return found


def describe(work: Work) -> records.Workload:
    prompts, outputs = work.prompt_tokens(), [job.output_tokens for job in work.jobs]
    return records.Workload(work.name, work.description, len(work.jobs), _range(prompts), _range(outputs), work.digest,
                            scored=any(job.answers for job in work.jobs), notes=list(work.notes))


def _range(values: list[int]) -> list[int]:
    return [min(values), round(sum(values) / len(values)), max(values)]
