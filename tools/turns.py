"""Transcripts of several turns and the figures of ``bench_turns.py``. Pure functions.

A transcript is kept as token ids, turn by turn, so that what two prompts share they share token for token. Texts: the installed
Python's standard library, cut when the tool runs, and text written here. ``digest`` goes with a result.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from quality_prompts import AGENT_ANSWER, CHAT_ANSWER, DOC_ANSWER, NEEDLE_ANSWER

from oasis_sglang.bench.conversations import AGENT, ANSWER_TOKENS, ASKS, NEW_TOKENS
from oasis_sglang.prompts import PromptMaker, library_text

_CHARACTERS_PER_TOKEN = 8
"""More than a token of the library's text has, on average."""


class Turn(NamedTuple):
    """Token ids. ``new``: what the prompt has after the last answer. ``answer``: the fixed one."""

    new: list[int]
    answer: list[int]


class Transcript(NamedTuple):
    """``turns`` of one conversation, in order."""

    name: str
    turns: list[Turn]

    def prompt(self, turn: int, answers: Sequence[Sequence[int]] | None = None) -> list[int]:
        """Token ids of ``turn``'s prompt, after ``answers`` to the earlier turns (default: the fixed ones)."""
        given = [t.answer for t in self.turns] if answers is None else answers
        ids = [token for earlier, answer in zip(self.turns[:turn], given) for token in (*earlier.new, *answer)]
        return ids + self.turns[turn].new


class _Tokens:
    """Deals a text out, each token once."""

    def __init__(self, ids: list[int]):
        self._ids, self._at = ids, 0

    def take(self, count: int) -> list[int]:
        taken = self._ids[self._at : self._at + count]
        if len(taken) < count:
            raise ValueError(f"the text has {len(self._ids)} tokens, {self._at + count} are wanted")
        self._at += count
        return taken


class _Writer:
    """Makes turns out of two texts: ``text`` for prompts, each token once, and written answers, over and over."""

    def __init__(self, maker: PromptMaker, tokens: int, rng: random.Random):
        skip = rng.randrange(1000)
        self.text = _Tokens(maker.encode(library_text()[: (skip + tokens) * _CHARACTERS_PER_TOKEN])[skip:])
        self.answers = maker.encode(" ".join((AGENT_ANSWER, DOC_ANSWER, CHAT_ANSWER, NEEDLE_ANSWER)))
        self.encode, self.rng, self.at = maker.encode, rng, 0

    def turn(self, head: list[int], tokens: int) -> Turn:
        """One of ``tokens`` tokens that begins with ``head``: a question, text, and the place where the answer goes."""
        end = self.encode("<|im_end|>\n<|im_start|>assistant\n")
        begin = [*head, *self.encode("<|im_start|>user\n" + self.rng.choice(ASKS))]
        new = [*begin, *self.text.take(tokens - len(begin) - len(end)), *end]
        return Turn(new, self._answer())

    def later(self) -> Turn:
        return self.turn(self.encode("<|im_end|>\n"), self.rng.randint(*NEW_TOKENS))

    def _answer(self) -> list[int]:
        count = self.rng.randint(*ANSWER_TOKENS)
        ids = [self.answers[(self.at + i) % len(self.answers)] for i in range(count)]
        self.at += count
        return ids


def agent(maker: PromptMaker, turns: int, first: int, seed: int = 0) -> Transcript:
    """One of ``turns`` turns, the first of ``first`` tokens. Raises ``ValueError`` when the text is too short."""
    rng = random.Random(f"agent {seed}")
    writer = _Writer(maker, first + turns * NEW_TOKENS[1], rng)
    system = maker.encode("<|im_start|>system\n" + AGENT.strip() + "<|im_end|>\n")
    return Transcript("agent", [writer.turn(system, first), *(writer.later() for _ in range(turns - 1))])


def conversations(maker: PromptMaker, count: int, turns: int, system: int, name: str, seed: int = 0) -> list[Transcript]:
    """``count`` of ``turns`` turns, whose first ``system`` tokens are one system prompt: no other ``name`` has it. Raises
    ``ValueError`` when the text is too short."""
    rng = random.Random(f"{name} {seed}")
    writer = _Writer(maker, system + count * turns * NEW_TOKENS[1], rng)
    begin, end = maker.encode(f"<|im_start|>system\nProject {name}. {AGENT}"), maker.encode("<|im_end|>\n")
    shared = [*begin, *writer.text.take(system - len(begin) - len(end)), *end]
    return [Transcript(f"{name}-{i}", [writer.turn(shared, system + rng.randint(*NEW_TOKENS)), *(writer.later() for _ in range(turns - 1))])
            for i in range(count)]


class Round(NamedTuple):
    """Requests that are sent at the same time: turn ``turn`` of ``transcripts``."""

    name: str
    turn: int
    transcripts: list[Transcript]


def one_by_one(name: str, transcripts: Sequence[Transcript]) -> list[Round]:
    """Turn by turn, in each turn one conversation after the other."""
    return [Round(name, turn, [t]) for turn in range(len(transcripts[0].turns)) for t in transcripts]


def at_once(name: str, transcripts: Sequence[Transcript]) -> list[Round]:
    """Turn by turn, all conversations at the same time."""
    return [Round(name, turn, list(transcripts)) for turn in range(len(transcripts[0].turns))]


def digest(transcripts: Sequence[Transcript]) -> str:
    return hashlib.sha256(json.dumps(transcripts).encode()).hexdigest()[:16]


class Heard:
    """The texts that a stack has served, and how much of a prompt was in one of them."""

    def __init__(self) -> None:
        self._texts: list[np.ndarray] = []

    def add(self, ids: Sequence[int]) -> None:
        self._texts.append(np.asarray(ids, dtype=np.int64))

    def shared(self, prompt: Sequence[int]) -> int:
        """Leading tokens of ``prompt`` that the best of the texts begins with."""
        ids = np.asarray(prompt, dtype=np.int64)
        return max((_common(ids, text) for text in self._texts), default=0)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


def transfer_bytes(tokens: int, held: int, page: int, token_bytes: int) -> int:
    """What a prompt of ``tokens`` costs a node that has its first ``held`` tokens: whole pages, the last one padded."""
    return (-(-tokens // page) - held // page) * page * token_bytes


SUMMED = ("requests", "prompt_tokens", "new_tokens", "computed_tokens", "computed_tokens_metric", "wire_bytes", "wire_bytes_second", "full_transfer_bytes")


def totals(rows: Sequence[Mapping]) -> dict:
    """Over rounds: sums of ``SUMMED`` and of the phases, mean TTFT over requests, the most that the host cache held."""
    phases: dict[str, int] = {}
    for row in rows:
        for phase, size in row["wire_by_phase"].items():
            phases[phase] = phases.get(phase, 0) + size
    requests = sum(row["requests"] for row in rows)
    return {**{name: sum(row[name] for row in rows) for name in SUMMED}, "wire_by_phase": phases,
            "ttft_seconds": sum(row["ttft_seconds"] * row["requests"] for row in rows) / requests if requests else None,
            "host_cache_bytes": max((row["host_cache_bytes"] for row in rows), default=0)}


def groups(rows: Sequence[Mapping]) -> dict[str, dict]:
    """``totals`` of each kind of transcript, and of its turns after the first where there are such."""
    found: dict[str, list[Mapping]] = {}
    for row in rows:
        found.setdefault(row["name"], []).append(row)
        if row["turn"]:
            found.setdefault(f"{row['name']}, later turns", []).append(row)
    return {name: totals(members) for name, members in found.items()}


def ratios(group: Mapping, base: Mapping) -> dict:
    """``group`` over ``base``: wire bytes, computed tokens, TTFT; None over nothing."""
    return {name: group[name] / base[name] if base[name] else None for name in ("wire_bytes", "computed_tokens", "ttft_seconds")}


def equality(rows: Sequence[Mapping], base: Sequence[Mapping]) -> dict:
    """Answers that are those of ``base``, token for token, of how many; ``first_difference``: where, or None."""
    pairs = [(row, i, ours == theirs) for row, other in zip(rows, base, strict=True)
             for i, (ours, theirs) in enumerate(zip(row["answers"], other["answers"], strict=True))]
    different = next((f"{row['name']} turn {row['turn'] + 1} request {i + 1}" for row, i, same in pairs if not same), None)
    return {"equal": sum(same for *_, same in pairs), "of": len(pairs), "first_difference": different}


def table(rows: Sequence[Mapping]) -> list[str]:
    """Lines of text, one for each round, with the phases that moved anything. MB are millions of bytes."""
    phases = sorted({phase for row in rows for phase, size in row["wire_by_phase"].items() if size})
    head = f"{'':<14}{'turn':>5}{'req':>4}{'prompt':>8}{'new':>7}{'computed':>9}{'wire MB':>9}" + "".join(f"{p:>13}" for p in phases)
    lines = [head + f"{'TTFT s':>8}{'host MB':>9}"]
    for row in rows:
        line = f"{row['name']:<14}{row['turn'] + 1:>5}{row['requests']:>4}{row['prompt_tokens']:>8}{row['new_tokens']:>7}{row['computed_tokens']:>9}"
        line += f"{row['wire_bytes'] / 1e6:>9.2f}" + "".join(f"{row['wire_by_phase'].get(p, 0) / 1e6:>13.2f}" for p in phases)
        lines.append(line + f"{row['ttft_seconds']:>8.2f}{row['host_cache_bytes'] / 1e6:>9.1f}")
    return lines
