"""Scoring and planning beside the forward: which blocks the next step will want, and the pulls of those that are not here.

    tap     each layer of the forward leaves its queries; every few layers a job scores them, while the next layers run
    trusted before sampling: how many drafts of each request may be accepted, by what their rows miss
    plan    once it is known which rows were accepted, one job unites the rows that choose, plans and starts the pulls, while
            SGLang samples, streams and prepares the next step
    wait    the next step boundary takes the plan

All jobs run in order on one thread, which never waits for the network. A plan belongs to (set, generation, step); whoever
takes it checks that they still stand. On a GPU the jobs run on a stream of their own, behind events of the forward's stream.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch

from decode_node.entry import Entry, Swaps
from decode_node.host_cache import HostCache
from decode_node.working_set import WorkingSets
from oasis_sglang.selection.caps import warm_cap
from oasis_sglang.selection.scorer import union
from oasis_sglang.selection.trust import missed_share, trusted_rows
from transport.layout import KVLayout

LAYERS_PER_JOB = 8
"""Layers that are scored together: a job costs about 0.1 ms whatever its size."""


class Step(NamedTuple):
    """The requests of a forward that select, b of them. ``at`` int64 [b]: their places in its batch of ``batch``; ``rows``: query
    rows of each; ``mass`` float32 [b, rows, S, n] and ``missed`` [b, rows, S], the share of it on blocks not resident: what the
    jobs fill in; ``number``: counts steps."""

    entries: list[Entry]
    at: np.ndarray
    sets: np.ndarray
    generations: np.ndarray
    number: int
    batch: int
    rows: int
    mass: torch.Tensor
    missed: torch.Tensor


class Rows(NamedTuple):
    """Which rows of a verified step count. ``actual`` int64 [b]: the last one whose token was accepted; ``drafts`` int64 [b]:
    how many of the rows after the first verified a draft and not padding."""

    actual: np.ndarray
    drafts: np.ndarray

    def choosing(self, rows: int, ahead: int) -> np.ndarray:
        """bool [b, rows]: the actual row and at most ``ahead`` drafted rows after it, whose tokens were not accepted but stand
        where the next tokens will."""
        row = np.arange(rows)
        last = np.minimum(self.actual + ahead, self.drafts)
        return (row == self.actual[:, None]) | ((row > self.actual[:, None]) & (row <= last[:, None]))


class Lookahead:
    """Owner of the thread, of the tapped queries and of the plan that has not been taken yet.

    ``group``: query heads per KV head; ``cap``: new pulls per step and (layer, KV head) on average; ``warmup``: steps for which
    a new request may pull more; ``ahead``: drafted rows that choose beside the actual one; ``trust``: how much more of its mass
    than the newest real row a drafted row may miss and still be believed. ``pull(entry, pieces int64 [n],
    blocks int64 [n])`` starts an on-demand pull; ``totals``: counters, written by the thread only until ``wait`` returns.
    """

    def __init__(self, *, sets: WorkingSets, cache: HostCache, group: int, scale: float, cap: int, warmup: int, ahead: int,
                 trust: float, pull: Callable[[Entry, np.ndarray, np.ndarray], None], totals: Counter):
        self.sets, self.cache, self.pull, self.totals = sets, cache, pull, totals
        self.group, self.scale, self.cap, self.warmup, self.ahead, self.trust = group, scale, cap, warmup, ahead, trust
        lay, device = sets.layout, sets.raw.device
        self.layout = lay
        self.queries = torch.zeros((lay.num_layers, 1, lay.kv_heads * group * lay.head_dim), device=device)
        self.heads = {"misses": np.zeros(lay.pieces, np.int64), "wanted": np.zeros(lay.pieces, np.int64), "missed_mass": np.zeros(lay.pieces)}
        """By (layer, KV head), over all request steps so far."""
        self._selects = ~sets.dense.cpu().numpy()
        self._heads = (~sets.dense).nonzero()[:, 0]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="oasis-lookahead")
        self._stream = torch.cuda.Stream(device) if sets.raw.is_cuda else None
        self._jobs: list[Future] = []
        self._step: Step | None = None
        self._numbers = 0

    @staticmethod
    def bytes(layout: KVLayout, requests: int, rows: int, blocks: int) -> int:
        """What the scores of a step take on the device."""
        return requests * rows * layout.pieces * blocks * 4

    def begin(self, entries: Sequence[Entry | None], rows: int) -> None:
        """Before the first layer of a forward over ``entries`` with ``rows`` queries of each. Nothing may be under way."""
        at = [i for i, e in enumerate(entries) if e is not None and e.set is not None and self.sets.blocks[e.set] > self.sets.working[e.set]]
        self._numbers += 1
        if not at or not self._selects.any():
            self._step = None
            return
        chosen = [entries[i] for i in at]
        sets = np.fromiter((e.set for e in chosen), np.int64, len(chosen))
        mass = torch.empty((len(at), rows, self.layout.pieces, int(self.sets.blocks[sets].max())), device=self.sets.raw.device)
        missed = torch.empty(mass.shape[:3], device=mass.device)
        self._step = Step(chosen, np.array(at), sets, self.sets.generation[sets], self._numbers, len(entries), rows, mass, missed)
        for entry in chosen:
            entry.step = self._numbers

    def tap(self, layer: int, queries: torch.Tensor) -> None:
        """Keeps a layer's post-RoPE queries [b * rows, q_heads * head_dim]."""
        if self._step is None:
            return
        if self.queries.shape[1] < len(queries) or self.queries.dtype != queries.dtype:
            grown = max(self.queries.shape[1], len(queries))
            self.queries = torch.zeros((self.queries.shape[0], grown, self.queries.shape[2]), dtype=queries.dtype, device=queries.device)
        self.queries[layer, : len(queries)] = queries.view(len(queries), -1)
        if (layer + 1) % LAYERS_PER_JOB == 0 or layer + 1 == self.layout.num_layers:
            self._submit(self._score, self._step, self.queries, layer // LAYERS_PER_JOB * LAYERS_PER_JOB, layer + 1)

    def trusted(self) -> np.ndarray | None:
        """After the last layer of a step that verifies drafts: int64 [batch], how many drafted rows of each request may be
        believed (``selection/trust.py``); None: all. Waits for the scores."""
        if self._step is None or self.trust >= 1:
            return None
        started = time.perf_counter()
        self.wait()
        step = self._step
        rows = np.full(step.batch, step.rows - 1)
        rows[step.at] = trusted_rows(step.missed, self._heads, self.trust).cpu().numpy()
        self.totals["trust_wait_microseconds"] += int((time.perf_counter() - started) * 1e6)
        return rows

    def plan(self, accept_lens: torch.Tensor | None = None, drafts: np.ndarray | None = None) -> None:
        """After the last layer, and after sampling when the step verified drafts (see ``Coordinator.verified``). None: every
        request has one row."""
        step, self._step = self._step, None
        if step is not None or accept_lens is not None:
            self._submit(self._plan, step, accept_lens, drafts)

    def wait(self) -> tuple[Step, list[Swaps]] | None:
        """Returns when nothing is under way, with the step's plan: what each of its requests would swap. None: there was
        nothing to plan, or it was taken before."""
        jobs, self._jobs = self._jobs, []
        result = None
        for job in jobs:
            result = job.result()
        return result

    def stands(self, step: Step, i: int) -> bool:
        """Whether the plan of the ``i``-th request of ``step`` is still about that request, its set and its last step."""
        entry = step.entries[i]
        return not entry.released and entry.step == step.number and self.sets.generation[step.sets[i]] == step.generations[i]

    # -- on the thread ------------------------------------------------------------------------------------------

    def _submit(self, work, *args) -> None:
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record()
        self._jobs.append(self._thread.submit(self._run, event, work, *args))

    def _run(self, event, work, *args):
        with nullcontext() if event is None else torch.cuda.stream(self._stream), torch.inference_mode():
            if event is not None:
                self._stream.wait_event(event)
            started = time.perf_counter()
            result = work(*args)
            if event is not None:
                self._stream.synchronize()
            self.totals[f"{work.__name__.strip('_')}_microseconds"] += int((time.perf_counter() - started) * 1e6)
            return result

    def _score(self, step: Step, tapped: torch.Tensor, first: int, last: int) -> None:
        lay, b = self.layout, len(step.at)
        device = tapped.device
        at = torch.from_numpy((step.at[:, None] * step.rows + np.arange(step.rows)).reshape(-1)).to(device)
        queries = tapped[first:last, at].float().mul_(self.scale).view(last - first, b, step.rows, lay.kv_heads, self.group, lay.head_dim)
        queries = queries.permute(1, 0, 3, 2, 4, 5).reshape(b, (last - first) * lay.kv_heads, step.rows, self.group, lay.head_dim)
        part = slice(first * lay.kv_heads, last * lay.kv_heads)
        n = step.mass.shape[3]
        step.mass[:, :, part] = mass = self.sets.score(step.sets, part, queries, n)
        if step.rows > 1 and self.trust < 1:
            step.missed[:, :, part] = missed_share(mass, self.sets.slot_of[torch.from_numpy(step.sets).to(device), part, :n] >= 0)

    def _plan(self, step: Step | None, accept_lens: torch.Tensor | None, drafts: np.ndarray | None) -> tuple[Step, list[Swaps]] | None:
        accepted = None if accept_lens is None else accept_lens.cpu().numpy().astype(np.int64)
        if accepted is not None:
            self._count_drafts(accepted, drafts)
        if step is None:
            return None
        device, b, n = step.mass.device, len(step.at), step.mass.shape[3]
        one = np.zeros(b, np.int64)
        rows = Rows(one, one) if accepted is None else Rows(accepted[step.at] - 1, drafts[step.at])
        choosing = rows.choosing(step.rows, self.ahead)
        actual = step.mass[torch.arange(b, device=device), torch.from_numpy(rows.actual).to(device)]
        mass = actual if step.rows == 1 else union(step.mass, torch.from_numpy(choosing).to(device))
        # Before ``held``: a piece is cached before it flies no more, so one that lands in between is in both, never in neither.
        flying = self.sets.flying[torch.from_numpy(step.sets).to(device), :, :n]
        if self._stream is not None:
            self._stream.synchronize()
        held = self.cache.held(self.sets.number[step.sets, :n]).transpose(1, 0, 2)
        cap = warm_cap(self.cap, self.sets.working[step.sets], np.array([e.steps for e in step.entries]), self.warmup)
        plan = self.sets.plan(step.sets, mass, actual, held, flying, torch.from_numpy(cap).to(device))
        self._count(step, plan, choosing)
        self._fetch(step, plan)
        for entry in step.entries:
            entry.steps += 1
        return step, self._swaps(plan, b)

    def _count_drafts(self, accepted: np.ndarray, drafts: np.ndarray) -> None:
        self.totals["verify_steps"] += len(accepted)
        self.totals["drafts_proposed"] += int(drafts.sum())
        self.totals["drafts_accepted"] += int(np.minimum(accepted - 1, drafts).sum())
        self.totals["tokens_accepted"] += int(accepted.sum())

    def _count(self, step: Step, plan, choosing: np.ndarray) -> None:
        index = torch.from_numpy(step.sets).to(step.mass.device)
        n = step.mass.shape[3]
        ahead = self.sets.ahead[index, :, :n]
        used = ahead & plan.top & (self.sets.slot_of[index, :, :n] >= 0)
        self.sets.ahead[index, :, :n] = ahead & ~used
        misses, missed_mass = plan.misses.cpu().numpy(), plan.missed_mass.cpu().numpy()
        wanted = plan.wanted.cpu().numpy()
        drafted = int(choosing.sum()) - len(choosing)
        self.totals["steps"] += 1
        self.totals["request_steps"] += len(step.at)
        self.totals["misses"] += int(misses.sum())
        self.totals["wanted"] += int(wanted.sum()) * int(self._selects.sum())
        self.totals["missed_mass_ppm"] += int(missed_mass[:, self._selects].mean(1).sum() * 1e6)
        self.totals["fetched_used"] += int(used.sum())
        self.totals["lookahead_rows"] += drafted
        self.totals["fallback_rows"] += int((choosing.sum(1) == 1).sum())
        self.heads["misses"] += misses.sum(0)
        self.heads["wanted"] += wanted.sum() * self._selects
        self.heads["missed_mass"] += missed_mass.sum(0)

    def _fetch(self, step: Step, plan) -> None:
        if not len(plan.fetch_request):
            return
        where = torch.from_numpy(step.sets).to(plan.fetch_request.device)[plan.fetch_request], plan.fetch_head, plan.fetch_block
        self.totals["fetched_wasted"] += int(self.sets.ahead[where].sum())  # evicted before a real row wanted it
        self.sets.flying[where] = self.sets.ahead[where] = True
        request, pieces, blocks = (t.cpu().numpy() for t in (plan.fetch_request, plan.fetch_head, plan.fetch_block))
        self.totals["fetched"] += len(request)
        for i in np.unique(request):
            mine = request == i
            self.pull(step.entries[i], pieces[mine], blocks[mine])

    def _swaps(self, plan, b: int) -> list[Swaps]:
        request, pieces, slots, blocks = (t.cpu().numpy() for t in (plan.swap_request, plan.swap_head, plan.swap_slot, plan.swap_block))
        bounds = np.searchsorted(request, np.arange(b + 1))
        return [Swaps(pieces[a:z], slots[a:z], blocks[a:z]) for a, z in zip(bounds[:-1], bounds[1:])]
