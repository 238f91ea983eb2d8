"""Which block sits in which slot of each (layer, KV head), and what is known about the blocks that do not.

A *set* belongs to one request that may hold fewer blocks than it has. It keeps the numbers of all its blocks
(``block_store.py``), whose summaries it may share with other sets, a smoothed attention mass, and the residency. Every
(layer, KV head) of a set holds exactly ``working[set]`` distinct blocks: a block held twice would count twice in softmax.
Residency changes only in ``place`` (admission), and in ``replace``, ``grow`` and ``fold`` at step boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from oasis_sglang.selection import planner
from oasis_sglang.selection.scorer import block_mass
from oasis_sglang.selection.summaries import Summary
from transport.layout import KVLayout

EMA_DECAY = 0.7
"""Smoothing of the mass that decides who leaves; who comes is decided by the last row alone (selection study, section 6c)."""


FLOOR = 1
"""Of the pulls of a step, so many of each (layer, KV head)'s best missing blocks come before any other head gets more."""

STICKY = 3.0
"""By how much more than a resident block another one must promise to take its place: fewer pulls, the same divergence."""


class WorkingSets:
    """Owner of the sets. S = layers * kv_heads pieces, N = blocks of the longest request.

    raw uint8 [S, numbers, summary_bytes]; number int64 [sets, N], on the host; ema float32 [sets, S, N]; slot_of int16
    [sets, S, N] and block_at int32 [sets, S, W] are inverse to each other, -1 where there is none; flying bool [sets, S, N]: is
    being pulled; ahead bool [sets, S, N]: was pulled for a running request and no actual row has wanted it yet. ``generation`` int64 [sets] counts who
    has had a set. ``dense`` bool [S]: (layer, KV head)s that the dense lane serves; their slots hold nothing of use.
    """

    def __init__(self, layout: KVLayout, summary: Summary, *, sets: int, blocks: int, numbers: int, working: int, sink: int, recent: int,
                 device: torch.device | str, dense: np.ndarray | None = None, floor: int = FLOOR, sticky: float = STICKY, decay: float = EMA_DECAY):
        pieces = layout.pieces
        self.layout, self.summary, self.sink, self.recent = layout, summary, sink, recent
        self.floor, self.sticky, self.decay = floor, sticky, decay
        self.dense = torch.zeros(pieces, dtype=torch.bool, device=device)
        if dense is not None:
            self.dense[torch.from_numpy(dense)] = True
        self.raw = torch.zeros((pieces, numbers, layout.summary_bytes), dtype=torch.uint8, device=device)
        self.number = np.zeros((sets, blocks), np.int64)
        self._number = torch.from_numpy(self.number).to(device)  # on a CPU the same memory
        self.ema = torch.zeros((sets, pieces, blocks), device=device)
        self.slot_of = torch.full((sets, pieces, blocks), -1, dtype=torch.int16, device=device)
        self.block_at = torch.full((sets, pieces, working), -1, dtype=torch.int32, device=device)
        self.flying = torch.zeros((sets, pieces, blocks), dtype=torch.bool, device=device)
        self.ahead = torch.zeros((sets, pieces, blocks), dtype=torch.bool, device=device)
        self.generation = np.zeros(sets, np.int64)
        self.working = np.zeros(sets, np.int64)
        self.blocks = np.zeros(sets, np.int64)
        self._free = list(range(sets))[::-1]

    @staticmethod
    def bytes(layout: KVLayout, sets: int, blocks: int, numbers: int, working: int) -> int:
        """What the tables take on the device."""
        return layout.pieces * (numbers * layout.summary_bytes + sets * (blocks * (4 + 2 + 1 + 1) + working * 4)) + sets * blocks * 8

    @property
    def nbytes(self) -> int:
        """What they take on the device."""
        return sum(t.nbytes for t in (self.raw, self._number, self.ema, self.slot_of, self.block_at, self.flying, self.ahead))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def size(self) -> int:
        return len(self.blocks)

    def acquire(self) -> int | None:
        """A cleared set, or None when all are taken."""
        if not self._free:
            return None
        chosen = self._free.pop()
        self.ema[chosen] = 0
        self.slot_of[chosen] = -1
        self.block_at[chosen] = -1
        self.flying[chosen] = self.ahead[chosen] = False
        self.generation[chosen] += 1
        self.working[chosen] = self.blocks[chosen] = 0
        return chosen

    def release(self, chosen: int) -> None:
        if chosen in self._free:
            raise AssertionError(f"set {chosen} is released twice")
        self._free.append(chosen)

    def bind(self, chosen: int, first: int, numbers: np.ndarray) -> None:
        """Blocks ``first``... of a set have ``numbers`` int64 [n]."""
        self.number[chosen, first : first + len(numbers)] = numbers
        self._number[chosen, first : first + len(numbers)] = torch.from_numpy(numbers).to(self.raw.device)

    def summarise(self, numbers: np.ndarray, summaries: np.ndarray) -> None:
        """``summaries`` uint8 [n, S, bytes] of blocks ``numbers`` int64 [n]."""
        self.raw[:, torch.from_numpy(numbers).to(self.raw.device)] = torch.from_numpy(summaries).to(self.raw.device).transpose(0, 1)

    def place(self, chosen: int, selection: np.ndarray, blocks: int) -> None:
        """The first residents: ``selection`` int64 [S, w], slot by slot, of ``blocks`` in all."""
        blocks_at = torch.from_numpy(selection).to(self.raw.device)
        slots = torch.arange(selection.shape[1], dtype=torch.int16, device=self.raw.device).expand_as(blocks_at)
        self.slot_of[chosen].scatter_(1, blocks_at, slots)
        self.block_at[chosen, :, : selection.shape[1]] = blocks_at.to(torch.int32)
        self.working[chosen], self.blocks[chosen] = selection.shape[1], blocks

    def replace(self, sets: torch.Tensor, pieces: torch.Tensor, slots: torch.Tensor, blocks: torch.Tensor) -> None:
        """Block ``blocks[i]`` takes slot ``slots[i]`` of (``sets[i]``, ``pieces[i]``), all int64 [n]; slots are distinct."""
        leaving = self.block_at[sets, pieces, slots].long()
        self.slot_of[sets, pieces, leaving] = -1
        self.slot_of[sets, pieces, blocks] = slots.to(torch.int16)
        self.block_at[sets, pieces, slots] = blocks.to(torch.int32)

    def grow(self, chosen: int, block: int, slot: int, keys: torch.Tensor) -> None:
        """A sealed block, whose number is bound, enters at a free slot of all (layer, KV head). ``keys`` float [S, tokens, head_dim]."""
        self._learn(chosen, block, keys)
        self.slot_of[chosen, :, block] = slot
        self.block_at[chosen, :, slot] = block
        self.working[chosen] += 1

    def fold(self, chosen: int, block: int, keys: torch.Tensor) -> np.ndarray:
        """A sealed block enters a full set: returns the slot int64 [S] that it takes in each (layer, KV head)."""
        self._learn(chosen, block, keys)
        n = block + 1
        at = slice(chosen, chosen + 1)
        victims = planner.fold_victims(self.ema[at, :, :n], self.slot_of[at, :, :n], self.pinned([chosen], n), self._of(self.working, [chosen]))[0]
        pieces = torch.arange(len(victims), device=victims.device)
        self.replace(torch.full_like(pieces, chosen), pieces, victims, torch.full_like(pieces, block))
        return victims.cpu().numpy()

    def _learn(self, chosen: int, block: int, keys: torch.Tensor) -> None:
        self.raw[:, self.number[chosen, block]] = self.summary.build(keys)
        self.blocks[chosen] = block + 1

    def pinned(self, sets: Sequence[int], n: int) -> torch.Tensor:
        """bool [b, n]: the blocks that never leave."""
        return planner.pinned_mask(self._of(self.blocks, sets), self.sink, self.recent, n)

    def score(self, sets: np.ndarray, part: slice, queries: torch.Tensor, n: int) -> torch.Tensor:
        """Expected mass float32 [b, R, P, n] of the first ``n`` blocks of ``sets`` int64 [b], for the (layer, KV head)s ``part``,
        P of them, from scaled queries [b, P, R, G, head_dim] of R rows. A set may have more: it may have gone to another request."""
        raw, counts = self.raw[part], np.minimum(self.blocks[sets], n)
        return block_mass(self.summary, queries, [raw.index_select(1, self._number[i, :count]) for i, count in zip(sets, counts)], n)

    def plan(self, sets: np.ndarray, mass: torch.Tensor, actual: torch.Tensor, held: np.ndarray, flying: torch.Tensor,
             cap: torch.Tensor) -> planner.Plan:
        """One step's plan for ``sets`` int64 [b]: ``mass`` float32 [b, S, n] of the rows that choose, ``actual`` [b, S, n] of the
        newest row that was really generated, which alone says what was missed.

        ``held``, ``flying`` bool [b, S, n]: what this node's host cache has and what is being pulled, n = the longest of the sets
        in blocks; ``cap`` int64 [b]: new pulls per (layer, KV head) on average, 0 = no limit.
        """
        n = held.shape[2]
        index = torch.from_numpy(sets).to(self.raw.device)
        ema = self.ema[index, :, :n].mul_(self.decay).add_(mass, alpha=1 - self.decay)
        self.ema[index, :, :n] = ema
        return planner.plan(mass, ema, self.slot_of[index, :, :n], self.pinned(sets, n), self._of(self.working, sets), self._of(self.blocks, sets),
                            torch.from_numpy(held).to(self.raw.device), flying, cap, actual=None if actual is mass else actual,
                            dense=self.dense, floor=self.floor, sticky=self.sticky)

    def _of(self, column: np.ndarray, sets) -> torch.Tensor:
        return torch.from_numpy(column[np.asarray(sets)]).to(self.raw.device)
