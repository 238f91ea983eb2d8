"""What happens to working sets around one decode forward.

    begin   on the forward's stream, before it: landed pieces are committed into slots, sealed blocks are folded, the
            compact rows are brought up to date
    (forward: exact attention over the compact rows; the tap keeps each layer's queries)
    end     the newest rows' queries score all blocks of their requests; the plan says what should come in and what leaves;
            what this node does not have is pulled

Nothing in a forward ever sees a slot change. Everything is vectorised over requests x layers x KV heads; the loops are over
the requests that pull or fold in this step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from decode_node.entry import Entry, Swaps
from decode_node.host_cache import HostCache
from decode_node.page_table import Fold, PageTable
from decode_node.pieces import PoolPieces
from decode_node.working_set import WorkingSets
from transport.errors import CapacityError


class Stepper:
    """Owner of nothing but the folds that a step still has to do; lives on the scheduler thread.

    ``pull(entry, pieces int64 [n], blocks int64 [n])`` starts an on-demand pull. ``group``: query heads per KV head.
    """

    def __init__(self, *, table: PageTable, sets: WorkingSets, cache: HostCache, pool: PoolPieces, group: int, scale: float, cap: int,
                 wait_seconds: float, pull: Callable[[Entry, np.ndarray, np.ndarray], None]):
        self.table, self.sets, self.cache, self.pool, self.pull = table, sets, cache, pool, pull
        self.group, self.scale, self.cap, self.wait_seconds = group, scale, cap, wait_seconds
        self.folds: list[Fold] = []
        self.totals: Counter[str] = Counter()
        lay = pool.layout
        self.queries = torch.zeros((lay.num_layers, 1, lay.kv_heads * group * lay.head_dim), device=sets.raw.device)

    def begin(self, entries: Sequence[Entry | None], rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """``entries``, ``rows`` int64 [b] and true ``lengths`` int64 [b] of the batch; returns compact lengths int64 [b]."""
        selecting = [e for e in entries if e is not None and e.set is not None]
        self._commit([e for e in selecting if len(e.swaps.blocks)])
        by_row = {e.row: e for e in selecting}
        for fold in self.folds:
            if entry := by_row.get(fold.row):
                self._fold(entry, fold)
        self.folds.clear()
        self.table.upload()
        return self.table.lengths(rows, lengths)

    def tap(self, layer: int, queries: torch.Tensor) -> None:
        """Keeps a layer's post-RoPE queries [b, q_heads * head_dim]."""
        if self.queries.shape[1] < len(queries) or self.queries.dtype != queries.dtype:
            grown = max(self.queries.shape[1], len(queries))
            self.queries = torch.zeros((self.queries.shape[0], grown, self.queries.shape[2]), dtype=queries.dtype, device=queries.device)
        self.queries[layer, : len(queries)] = queries.view(len(queries), -1)

    def end(self, entries: Sequence[Entry | None]) -> None:
        """Scores and plans for the requests of the forward that has just run, in the order of its batch."""
        at = [i for i, e in enumerate(entries) if e is not None and e.set is not None and self.sets.blocks[e.set] > self.sets.working[e.set]]
        if not at:
            return
        started = time.perf_counter()
        chosen = [entries[i] for i in at]
        sets = np.fromiter((e.set for e in chosen), np.int64, len(chosen))
        lay = self.pool.layout
        queries = self.queries[:, at].float().mul_(self.scale).view(lay.num_layers, len(at), lay.kv_heads, self.group, lay.head_dim)
        queries = queries.permute(1, 0, 2, 3, 4).reshape(len(at), lay.pieces, self.group, lay.head_dim)
        held = self.cache.held(sets, int(self.sets.blocks[sets].max()))
        plan = self.sets.plan(sets, queries, held, self.cap)
        self._count(plan)
        self._fetch(chosen, sets, plan)
        self._schedule(chosen, sets, plan)
        self.totals["plan_microseconds"] += int((time.perf_counter() - started) * 1e6)

    # -- begin --------------------------------------------------------------------------------------------------

    def _commit(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        counts = [len(e.swaps.blocks) for e in entries]
        sets = np.repeat([e.set for e in entries], counts)
        rows = np.repeat([e.row for e in entries], counts)
        pieces, slots, blocks = (np.concatenate([getattr(e.swaps, name) for e in entries]) for name in ("pieces", "slots", "blocks"))
        for entry in entries:
            entry.swaps = Swaps.none()
        data, here = self.cache.read(sets, pieces, blocks)
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
        pieces = np.arange(lay.pieces)
        if self._room(entry):
            self.cache.insert(entry.set, pieces, np.full(lay.pieces, fold.block), data, pinned=True)
            entry.kept += lay.pieces
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

    # -- end ----------------------------------------------------------------------------------------------------

    def _count(self, plan) -> None:
        self.totals["misses"] += int(plan.misses.sum())
        self.totals["wanted"] += int(plan.wanted.sum()) * self.pool.layout.pieces
        self.totals["steps"] += 1

    def _fetch(self, chosen: Sequence[Entry], sets: np.ndarray, plan) -> None:
        request, pieces, blocks = (t.cpu().numpy() for t in (plan.fetch_request, plan.fetch_head, plan.fetch_block))
        if not len(request):
            return
        self.sets.flying[torch.from_numpy(sets).to(self.sets.raw.device)[plan.fetch_request], plan.fetch_head, plan.fetch_block] = True
        self.totals["fetched"] += len(request)
        for i in np.unique(request):
            mine = request == i
            self.pull(chosen[i], pieces[mine], blocks[mine])

    def _schedule(self, chosen: Sequence[Entry], sets: np.ndarray, plan) -> None:
        """Each request keeps its swaps for its next forward, and what it waits for."""
        request, pieces, slots, blocks = (t.cpu().numpy() for t in (plan.swap_request, plan.swap_head, plan.swap_slot, plan.swap_block))
        bounds = np.searchsorted(request, np.arange(len(chosen) + 1))
        for i, entry in enumerate(chosen):
            part = slice(bounds[i], bounds[i + 1])
            entry.swaps = Swaps(pieces[part], slots[part], blocks[part])
            if entry.wait and len(entry.swaps.blocks):
                entry.wait_until = time.monotonic() + self.wait_seconds

    def ready(self, entry: Entry) -> bool:
        """Whether a request that waits for its misses may go on: all of what flies has landed, or the bound has passed."""
        if entry.failure or entry.wait_until == 0.0:
            return True
        pieces, blocks = (torch.from_numpy(a).to(self.sets.raw.device) for a in (entry.swaps.pieces, entry.swaps.blocks))
        if bool(self.sets.flying[entry.set, pieces, blocks].any()):
            if time.monotonic() < entry.wait_until:
                return False
            self.totals["waits_ended_by_bound"] += 1
        entry.wait_until = 0.0
        return True
