"""Where drafts come from: guesses at the next tokens of each request of a decode step.

The target model verifies every draft, so a wrong one costs its row of the forward and never changes an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Request(NamedTuple):
    """``output``: everything after the prompt that is committed, the newest token last; its KV does not exist yet."""

    rid: str
    prompt: Sequence[int]
    output: Sequence[int]


class Drafts(NamedTuple):
    tokens: np.ndarray
    """int64 [b, n]"""
    counts: np.ndarray
    """int64 [b]: how many of a request's n are guesses, the rest is padding; 0 when there is none."""


class DraftSource(Protocol):
    """Called on the scheduler's thread before each verify forward.

    A source with a model on the device (EAGLE3) fits behind it when it is also built with the target's runner and told, after
    each verification, the hidden states [b * (n + 1), layers * hidden] of its rows and the accept lengths [b]; it would
    run its model in ``propose``. ``rid`` is the key of whatever state it keeps.
    """

    def propose(self, requests: Sequence[Request], n: int) -> Drafts: ...

    def forget(self, rids: Iterable[str]) -> None:
        """Drops what is kept for these requests, known or not. One that comes back is taken up from its tokens."""


KEPT = 64
"""Requests whose n-grams are kept, or twice those of a step: what stood aside or was retracted need not be read again."""


class PromptLookup:
    """Prompt lookup (Saxena 2023): what followed the latest earlier occurrence of the request's last tokens, in its own
    prompt and output. The longest match of ``longest`` to ``shortest`` tokens counts.

    Matches of a single token are taken too: 4 to 1 tokens had .32 of first drafts and .86 of four accepted, 4 to 2 tokens
    .28 and .79, and the verify row is computed in any case. A guess that reaches the end goes on with itself, so a loop
    shorter than n still gives n drafts; counts are 0 or n.

    A request's first step indexes its prompt (arrays, 16 bytes per distinct n-gram); each later one costs O(new tokens).
    """

    def __init__(self, longest: int = 4, shortest: int = 1):
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of {longest} to {shortest} tokens")
        self.longest, self.shortest = longest, shortest
        self._indexes: dict[str, _Index] = {}

    def __len__(self) -> int:
        return len(self._indexes)

    def propose(self, requests: Sequence[Request], n: int) -> Drafts:
        tokens, counts = np.zeros((len(requests), n), np.int64), np.zeros(len(requests), np.int64)
        for i, request in enumerate(requests):
            index = self._indexes.pop(request.rid, None)  # the one used last comes last
            if index is None or not index.continued_by(request):
                index = _Index(request.prompt, self.longest, self.shortest)
            self._indexes[request.rid] = index
            if guess := index.guess(request, n):
                tokens[i], counts[i] = guess, n
        while len(self._indexes) > max(KEPT, 2 * len(requests)):
            del self._indexes[next(iter(self._indexes))]
        return Drafts(tokens, counts)

    def forget(self, rids: Iterable[str]) -> None:
        for rid in rids:
            self._indexes.pop(rid, None)


_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class _Index:
    """One request's n-grams by 64-bit key: the position after the latest occurrence of each that something follows.

    The prompt's are two sorted arrays, made once; those that the output continues, a dict. Two n-grams of one key would
    make a wrong guess and nothing worse.
    """

    def __init__(self, prompt: Sequence[int], longest: int, shortest: int):
        self.longest, self.shortest = longest, shortest
        self.start = len(prompt)
        self.keys, self.places = _prompt_index(prompt, longest, shortest)
        self.recent: dict[int, int] = {}
        self.seen, self.last = 0, -1
        """Indexed output tokens and the last of them: enough to notice another output."""

    def continued_by(self, request: Request) -> bool:
        if len(request.prompt) != self.start or len(request.output) < self.seen:
            return False
        return not self.seen or request.output[self.seen - 1] == self.last

    def guess(self, request: Request, n: int) -> list[int]:
        """The n tokens that may follow; empty without a match."""
        prompt, output, start = request.prompt, request.output, self.start
        length = start + len(output)

        def at(i: int) -> int:
            return prompt[i] if i < start else output[i - start]

        for i in range(start + self.seen, length):
            self.recent.update((key, i) for key in self._keys_before(i, at))
        if output:
            self.seen, self.last = len(output), output[-1]
        for key in reversed(list(self._keys_before(length, at))):
            place = self.recent.get(key) or self._in_prompt(key)
            if place:
                guess: list[int] = []
                for i in range(place, place + n):
                    guess.append(at(i) if i < length else guess[i - length])
                return guess
        return []

    def _keys_before(self, end: int, at) -> Iterator[int]:
        """Keys of the n-grams that end just before position ``end``, the shortest first."""
        key = 0
        for size in range(1, min(self.longest, end) + 1):
            key = (key + at(end - size) + 1) * _FACTOR & _MASK
            if size >= self.shortest:
                yield key

    def _in_prompt(self, key: int) -> int:
        """The position after the n-gram, 0 if the prompt has none."""
        i = int(np.searchsorted(self.keys, np.uint64(key)))
        return int(self.places[i]) if i < len(self.keys) and int(self.keys[i]) == key else 0


def _prompt_index(prompt: Sequence[int], longest: int, shortest: int) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [m] ascending distinct keys of the n-grams that a prompt token follows, int64 [m] its latest position."""
    tokens = np.asarray(prompt, np.int64).astype(np.uint64)
    key = np.zeros(len(tokens), np.uint64)
    keys, places = [key[:0]], [np.zeros(0, np.int64)]
    for size in range(1, min(longest, len(tokens) - 1) + 1):
        # Of the n-grams that end at size - 1, ..., len - 2; arithmetic modulo 2**64, as in _keys_before.
        key = (key[1:] + tokens[: len(tokens) - size] + np.uint64(1)) * np.uint64(_FACTOR)
        if size >= shortest:
            keys.append(key)
            places.append(np.arange(size, len(tokens)))
    found, first = np.unique(np.concatenate(keys)[::-1], return_index=True)  # reversed: the latest comes first
    return found, np.concatenate(places)[::-1][first]
