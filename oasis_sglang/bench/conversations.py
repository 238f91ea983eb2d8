"""Conversations: each turn goes on with what was said before and the system's own answer."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import count

from oasis_sglang.bench.jobs import Job, Wanted, Work
from oasis_sglang.prompts import PromptMaker, library_text

NEW_TOKENS = (40, 200)
"""Of a turn after the first, at least and at most: what the user says and what the chat format puts around it."""
ANSWER_TOKENS = (16, 32)
"""As agents answer: a call of a tool."""
ASKS = ("The tool printed this:\n\n", "Here is the next part of the file:\n\n", "What does this change?\n\n", "Compare with what we had:\n\n")
AGENT = "You are a coding agent with the tools shell and read_file. Rules and code of the project follow.\n\n"
_CHAT = "You are a helpful assistant. This is what you know of the project.\n\n"
_LIBRARY_TOKENS = 40_000


def agent(maker: PromptMaker, wanted: Wanted) -> Work:
    """Transcripts with a long first turn and short ones after, each with a project of its own: one for every four requests wanted."""
    return _made(maker, wanted, "agent", conversations=max(1, wanted.requests // 4), own=True)


def chat(maker: PromptMaker, wanted: Wanted) -> Work:
    """As many conversations as requests wanted, after one long system prompt."""
    return _made(maker, wanted, "chat", conversations=wanted.requests, own=False)


def _made(maker: PromptMaker, wanted: Wanted, name: str, conversations: int, own: bool) -> Work:
    """Raises ``ValueError`` when the later turns alone fill the model's context."""
    rng = random.Random(f"{name} {wanted.seed}")
    later = (wanted.turns - 1) * (NEW_TOKENS[1] + ANSWER_TOKENS[1]) + ANSWER_TOKENS[1]
    first = min(wanted.tokens, wanted.context - later)
    if first <= 4 * NEW_TOKENS[1]:
        raise ValueError(f"{wanted.turns} turns take up to {later} of the model's {wanted.context} tokens and leave {first} for the first")
    text = _Text(maker, rng)
    system = maker.encode("<|im_start|>system\n" + (AGENT if own else _CHAT))
    end = maker.encode("<|im_end|>\n")
    shared = [] if own else [*system, *text.take(first - NEW_TOKENS[1] - len(system) - len(end)), *end]
    jobs: list[Job] = []
    for index in range(conversations):
        begin = [*system, *text.take(first - NEW_TOKENS[1] - len(system) - len(end)), *end] if own else shared
        for turn in range(wanted.turns):
            before, asked = begin if turn == 0 else end, maker.encode(rng.choice(ASKS))
            frame = len(maker.wrapped(asked)) + (len(end) if turn else 0)
            asks = maker.wrapped([*asked, *text.take(rng.randint(*NEW_TOKENS) - frame)])
            jobs.append(Job(f"{name}-{index}-{turn}", [*before, *asks], rng.randint(*ANSWER_TOKENS),
                            after=f"{name}-{index}-{turn - 1}" if turn else None))
    order = [jobs[index * wanted.turns + turn] for turn in range(wanted.turns) for index in range(conversations)]
    what = "each with a project of its own" if own else f"after one system prompt of {len(shared)} tokens"
    notes = (f"{conversations} conversations of {wanted.turns} turns, {what}; the next prompt has the answer that the system gave",
             *([f"the first turn has at most {first} of {wanted.tokens} tokens, so that all turns fit the model's context"] if first < wanted.tokens else []))
    return Work(name, "many turns after a long first one" if own else "conversations that share a system prompt", order, notes=notes)


@lru_cache(maxsize=4)
def _library(maker: PromptMaker) -> list[int]:
    """Token ids; encoding them takes a quarter of a second."""
    return maker.encode(library_text()[: 8 * _LIBRARY_TOKENS])[:_LIBRARY_TOKENS]


class _Text:
    """Deals library text out from a random place on, over and over."""

    def __init__(self, maker: PromptMaker, rng: random.Random):
        self._ids = _library(maker)
        self._at = count(rng.randrange(len(self._ids)))

    def take(self, tokens: int) -> list[int]:
        return [self._ids[next(self._at) % len(self._ids)] for _ in range(tokens)]
