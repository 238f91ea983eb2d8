"""What happens to working sets around one decode forward.

    begin      on the forward's stream, before it: the plan of the step before is taken, landed pieces are committed into slots,
               sealed blocks are folded, the compact rows are brought up to date
    (forward: exact attention over the compact rows; ``lookahead`` scores the queries of its layers)
    end        the forward is through, and what it verified is known: ``lookahead`` plans and pulls, beside what follows

Nothing in a forward ever sees a slot change. Everything is vectorised over requests x layers x KV heads; the loops are over
the requests that pull or fold in this step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from decode_node.entry import Entry, Swaps
from decode_node.host_cache import HostCache
from decode_node.lookahead import Lookahead
from decode_node.page_table import Fold, PageTable
from decode_node.pieces import PoolPieces
from decode_node.reuse import Reuse
from decode_node.stalls import Stalls
from decode_node.working_set import WorkingSets
from transport.errors import CapacityError


class Stepper:
    """Owner of the folds that a step still has to do, and of each request's swaps; lives on the scheduler thread."""

    def __init__(self, *, table: PageTable, sets: WorkingSets, cache: HostCache, pool: PoolPieces, lookahead: Lookahead, reuse: Reuse,
                 wait_seconds: float, totals: Counter[str]):
        self.table, self.sets, self.cache, self.pool, self.lookahead, self.reuse, self.totals = table, sets, cache, pool, lookahead, reuse, totals
        self.wait_seconds = wait_seconds
        self.folds: list[Fold] = []
        self.stalls = Stalls()

    def begin(self, entries: Sequence[Entry | None], rows: np.ndarray, lengths: np.ndarray, queries: int = 1) -> np.ndarray:
        """``entries``, ``rows`` int64 [b] and true ``lengths`` int64 [b] of the batch, ``queries`` rows of each that will be
        tapped; returns compact lengths int64 [b]."""
        started = time.perf_counter()
        self.settle()
        self.totals["plan_wait_microseconds"] += int((time.perf_counter() - started) * 1e6)
        selecting = [e for e in entries if e is not None and e.set is not None]
        self._commit([e for e in selecting if len(e.swaps.blocks)])
        by_row = {e.row: e for e in selecting}
        for fold in self.folds:
            if entry := by_row.get(fold.row):
                self._fold(entry, fold)
        self.folds.clear()
        self.table.upload()
        self.lookahead.begin(entries, queries)
        return self.table.lengths(rows, lengths)

    def tap(self, layer: int, queries: torch.Tensor) -> None:
        """A layer's post-RoPE queries [b * rows, q_heads * head_dim]."""
        self.lookahead.tap(layer, queries)

    def end(self) -> None:
        """The forward, one row per request, is through."""
        self.lookahead.plan()

    def verified(self, accept_lens: torch.Tensor, drafts: np.ndarray) -> None:
        """The forward and its sampling are through; see ``Coordinator.verified``."""
        self.lookahead.plan(accept_lens, drafts)

    def settle(self) -> None:
        """Takes the plan that is being made, once it is made. Before anything that it reads may change."""
        planned = self.lookahead.wait()
        if planned is None:
            return
        step, swaps = planned
        for i, (entry, mine) in enumerate(zip(step.entries, swaps)):
            if not self.lookahead.stands(step, i):
                self.totals["plans_stale"] += 1
                continue
            entry.swaps = mine
            if entry.wait and len(mine.blocks):
                entry.wait_until = time.monotonic() + self.wait_seconds

    # -- begin --------------------------------------------------------------------------------------------------

    def _commit(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        counts = [len(e.swaps.blocks) for e in entries]
        sets = np.repeat([e.set for e in entries], counts)
        rows = np.repeat([e.row for e in entries], counts)
        pieces, slots, blocks = (np.concatenate([getattr(e.swaps, name) for e in entries]) for name in ("pieces", "slots", "blocks"))
        numbers = np.concatenate([e.numbers[e.swaps.blocks] for e in entries])
        for entry in entries:
            entry.swaps = Swaps.none()
        data, here = self.cache.read(pieces, numbers)
        self.totals["swaps_late"] += int(len(here) - here.sum())
        if not here.all():
            sets, rows, pieces, slots, blocks, data = (a[here] for a in (sets, rows, pieces, slots, blocks, data))
        tensors = [torch.from_numpy(a).to(self.sets.raw.device) for a in (sets, pieces, slots, blocks)]
        self.sets.replace(*tensors)
        self.pool.write(pieces, self.table.pages[rows, slots], data)
        self.totals["swaps_committed"] += len(blocks)

    def _fold(self, entry: Entry, fold: Fold) -> None:
        """A sealed generated block becomes one of the request's blocks; the host cache keeps it for good."""
        lay = self.pool.layout
        content = self.pool.read(np.array([fold.page]))[0].reshape(lay.pieces, 2, lay.block_tokens, lay.head_dim)
        data = content.cpu().view(torch.uint8).reshape(lay.pieces, lay.piece_bytes).numpy()
        pieces, number = np.arange(lay.pieces), self.reuse.grow(entry, fold.block)
        if self._room(entry):
            self.cache.insert(pieces, np.full(lay.pieces, number), data, pinned=True)
            entry.kept += lay.pieces
        else:
            self.sets.flying[entry.set, :, fold.block] = True  # nobody has it to give: never ask
        if fold.slot >= 0:
            self.sets.grow(entry.set, fold.block, fold.slot, content[:, 0])
        else:
            slots = self.sets.fold(entry.set, fold.block, content[:, 0])
            self.pool.write(pieces, self.table.pages[entry.row, slots], data)
        self.totals["folds"] += 1

    def _room(self, entry: Entry) -> bool:
        """Whether one more generated block can be kept for good; if not, the request ends before its next step."""
        need = self.pool.layout.pieces
        if entry.kept + need > entry.room:
            if not self.cache.reserve(need):
                entry.error = CapacityError("the host cache is full of what requests have generated", room=entry.pull.room,
                                            limit=f"host_cache_bytes={self.cache.capacity * self.cache.piece_bytes}")
                return False
            entry.room += need
        return True

    # -- boundary -----------------------------------------------------------------------------------------------

    def ready(self, entry: Entry) -> bool:
        """Whether a request that waits for its misses may go on: all of what flies has landed, or the bound has passed."""
        if not entry.wait or entry.failure:
            return True
        self.settle()
        if entry.wait_until == 0.0:
            return True
        pieces, blocks = (torch.from_numpy(a).to(self.sets.raw.device) for a in (entry.swaps.pieces, entry.swaps.blocks))
        if bool(self.sets.flying[entry.set, pieces, blocks].any()):
            if time.monotonic() < entry.wait_until:
                entry.stalled_at = entry.stalled_at or time.monotonic()
                return False
            self.totals["waits_ended_by_bound"] += 1
        stalled = time.monotonic() - entry.stalled_at if entry.stalled_at else 0.0
        self.stalls.add(stalled)
        entry.waits += entry.stalled_at > 0.0
        entry.stalled += stalled
        entry.wait_until = entry.stalled_at = 0.0
        return True
