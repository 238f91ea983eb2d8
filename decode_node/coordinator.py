"""The object that SGLang calls ``hisparse_coordinator``: requests hold working sets instead of whole prompts.

SGLang's scheduler asks it for admission, per-step slots, release and retraction (``sglang/srt/managers/hisparse_coordinator.py``
names the surface). A request is granted everything it will ever hold on the device (pages, a working set), and room in the host
cache for the first of what it generates, before anything is pulled for it, in the order of arrival.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from sglang.srt.managers.hisparse_coordinator import HiSparseTokenStats

from decode_node.budget import Budget, Need, require_possible
from decode_node.entry import Entry, Parked
from decode_node.lane import DenseLane
from decode_node.page_table import PageTable
from decode_node.pieces import PoolPieces
from decode_node.pool import NO_SPECULATION, CompactAllocator, VirtualHostPool
from decode_node.pull import DONE, SERVING, Pull
from decode_node.reuse import Reuse, computed_tokens
from transport.errors import CapacityError, ConfigError, RoomFailed

log = logging.getLogger("oasis.decode")

GENERATED_TOKENS = 512
"""Of which room in the host cache is promised to a request at once; SGLang keeps as many KV tokens free for each."""


class Coordinator:
    """Owner of the entries, of the physical pages they hold and of the page table. Scheduler thread only.

    Built with the KV pool, before attention back ends; ``bind`` adds what pulls and selects (``binding.py``).
    """

    def __init__(self, runner, budget: Budget, lane: DenseLane | None = None):
        allocator: CompactAllocator = runner.token_to_kv_pool_allocator
        allocator.coordinator = self
        self.budget, self.pool = budget, runner.token_to_kv_pool
        self.logical, self.physical = allocator.logical_attn_allocator, allocator.hisparse_attn_allocator
        self.mapping = allocator.full_to_hisparse_device_index_mapping
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.page = budget.page
        rows, context = self.req_to_token.shape
        self.max_blocks = -(-(context + 2 * budget.draft) // self.page)
        self.table = PageTable(rows, max(self.max_blocks, budget.working + budget.tail), self.page, self.pool.device)
        self.lane = lane
        self.entries: dict[int, Entry] = {}
        self.waiting: list[Entry] = []
        self.crowded: list[Entry] = []
        """Granted, but another admission is bringing blocks that they share with it."""
        self.parked: dict[int, Parked] = {}
        """By row, from ``retract_req`` until SGLang takes them over with ``park``."""
        self.parked_pages = 0
        self._dropped: deque[Entry] = deque()
        self.batch: list[Entry | None] = []
        self.stepper = self.trace = self.recovery = None
        self.overlap = False
        """Whether SGLang prepares a step while another one runs: then a request cannot stand aside between them."""
        self.peak_pages = self.peak_batch = 0
        self.leaks = 0
        # What SGLang reads.
        self.padded_buffer_size = self.page
        """Admission is ours (``reserve``); SGLang only has to see whether there is a page at all."""
        self.device_buffer_size = budget.working * self.page
        self.spec_swap = NO_SPECULATION
        self.num_real_reqs = torch.zeros(1, dtype=torch.int32, device=self.pool.device)
        self.mem_pool_host = VirtualHostPool(self.pool)
        self.req_to_host_pool = torch.zeros((0, 0), dtype=torch.int64)
        self.req_to_host_pool_allocated_len = torch.zeros(0, dtype=torch.int64)
        self.ack_staging_queue: list = []

    def bind(self, *, pieces: PoolPieces, sets, cache, stepper, reuse: Reuse, puller, admit: Callable[[Entry], None], trace=None) -> None:
        """``admit(entry)`` starts the pull of a request that has been granted what it needs. ``recovery`` is set where there is one."""
        self.pieces, self.sets, self.cache, self.stepper, self.reuse = pieces, sets, cache, stepper, reuse
        self.puller, self.admit, self.trace = puller, admit, trace

    # -- admission ----------------------------------------------------------------------------------------------

    def reserve(self, req, pull: Pull, write_row: Callable[[tuple[bytes, ...]], None] | None = None) -> Entry:
        """Queues a request whose prompt is committed; ``admit`` is called once it holds all it needs. Raises
        ``ConfigError`` for wrong options of the request, ``CapacityError`` for one that cannot ever be held, ``RoomFailed`` when
        another prompt was committed."""
        self.tidy()
        row = req.kv.req_pool_idx
        # What a request that SGLang starts all over had answered is part of what prefill has computed again.
        answered = len(req.output_ids) if getattr(req, "pd_rebootstrap_in_progress", False) else 0
        prompt, new = len(req.origin_input_ids) + answered, req.sampling_params.max_new_tokens - answered
        if pull.manifest.prompt_tokens != prompt:
            raise RoomFailed("prefill and decode disagree on the prompt", room=pull.room, peer=pull.source,
                             limit=f"{prompt} tokens here, {pull.manifest.prompt_tokens} committed")
        budget = self.budget.for_request(req.sampling_params.custom_params)
        if budget.wait and self.overlap:
            raise ConfigError("on_miss=wait needs --disable-overlap-schedule on the decode node", room=pull.room)
        need = budget.need(prompt, min(new, self.req_to_token.shape[1] - prompt))
        require_possible(need, self.physical.size // self.page, page=self.page, room=pull.room)
        if need.selecting and self._first_room(need) > self.cache.capacity:
            raise CapacityError("what the request generates does not fit the host cache", room=pull.room,
                                limit=f"host_cache_bytes={self.cache.capacity * self.cache.piece_bytes}")
        if need.selecting and self.lane is not None and self._lane_tokens(prompt, need) > self.lane.capacity:
            raise CapacityError("the request does not fit the dense lane", room=pull.room, limit=f"lane_tokens={self.lane.capacity}")
        if row in self.entries:
            raise AssertionError(f"row {row} is taken")
        entry = self.entries[row] = Entry(row=row, rid=req.rid, prompt=prompt, budget=budget, need=need, pull=pull, write_row=write_row)
        self.waiting.append(entry)
        self._grant()
        return entry

    def _grant(self) -> None:
        while self.waiting and self._granted(self.waiting[0]):
            entry = self.waiting.pop(0)
            need = entry.need
            self.table.bind(entry.row, entry.pages, tokens=entry.prompt, working=min(entry.prompt // self.page, need.working),
                            most_working=need.working, most_tail=need.tail)
            self._start(entry)

    def _start(self, entry: Entry) -> None:
        if self.reuse.crowded(entry):
            self.crowded.append(entry)
        else:
            self.reuse.begin(entry)
            self.admit(entry)

    def _granted(self, entry: Entry) -> bool:
        """All that ``entry`` needs, or nothing."""
        need = entry.need
        if self.physical.available_size() // self.page - self.parked_pages < need.pages:
            return False
        if need.selecting:
            lane_tokens = self._lane_tokens(entry.prompt, need) if self.lane is not None else 0
            if self.lane is not None and self.lane.free_pages * self.page < lane_tokens:
                return False
            if not self.sets.free or not self.cache.reserve(self._first_room(need)):
                return False
            entry.set, entry.room = self.sets.acquire(), self._first_room(need)
            if self.lane is not None and not self.lane.take(entry.set, lane_tokens):
                raise AssertionError("lane pages were free and are not")
        entry.pages = self._allocate(need.pages)
        self.reuse.take(entry)
        return True

    def _first_room(self, need: Need) -> int:
        """Pieces of generated blocks to promise room for: the limit that a request names is seldom what it generates, so
        the rest is asked for as it comes."""
        return min(need.generated, GENERATED_TOKENS // self.page) * self.sets.layout.pieces

    def _lane_tokens(self, prompt: int, need: Need) -> int:
        """Room in the lane at once: the prompt and, as in the host cache, the first of what is generated."""
        return (prompt // self.page + min(need.generated, GENERATED_TOKENS // self.page)) * self.page

    def _allocate(self, pages: int) -> np.ndarray:
        slots = self.physical.alloc(pages * self.page)
        if slots is None:
            raise AssertionError(f"{pages} pages were free and are not")
        self.peak_pages = max(self.peak_pages, self.used_pages)
        return (slots[:: self.page] // self.page).cpu().numpy().astype(np.int64)

    def admit_request_direct(self, req) -> None:
        """The pull is complete. Warm-up requests have no entry: they run over the padding page."""
        req.hisparse_staging = False

    # -- each step ----------------------------------------------------------------------------------------------

    def map_last_loc_to_buffer(self, seq_lens, out_cache_loc, req_pool_indices, seq_lens_cpu, req_pool_indices_cpu) -> None:
        rows, lengths = req_pool_indices_cpu.numpy(), seq_lens_cpu.numpy()
        self._place(rows, lengths - 1, 1, out_cache_loc)

    def _place(self, rows: np.ndarray, first: np.ndarray, count: int, out_cache_loc: torch.Tensor) -> None:
        """Where the ``count`` tokens from ``first`` int64 [b] on are written; ``out_cache_loc`` [b * count]: their logical ids."""
        if self.lane is not None:
            self._extend_lanes(rows, first + count)
        slots, folds = self.table.append(rows, first, count)
        self.stepper.folds += folds
        self.mapping[out_cache_loc] = torch.from_numpy(slots.reshape(-1)).to(self.mapping.device)
        self.peak_batch = max(self.peak_batch, len(rows))

    def _extend_lanes(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Ahead of ``lengths`` int64 [b] by what SGLang runs before it ends a request: a step, with overlap two, and their drafts."""
        sets, ahead = self.sets_of(rows), max(self.page, 3 * self.budget.draft)
        for i in np.flatnonzero((sets >= 0) & (self.lane.covered(sets) < lengths + ahead)):
            entry = self.entries[int(rows[i])]
            most = (entry.prompt // self.page + entry.need.generated) * self.page
            if entry.error is None and not self.lane.grow(entry.set, min(int(lengths[i]) + ahead, most)):
                entry.error = CapacityError("the dense lane is full", room=entry.pull.room, limit=f"lane_tokens={self.lane.capacity}")

    def sets_of(self, rows: np.ndarray) -> np.ndarray:
        """int64 [b]: the working sets of ``rows`` int64 [b], -1 without."""
        entries = (self.entries.get(row) for row in rows.tolist())
        return np.array([-1 if e is None or e.set is None else e.set for e in entries], np.int64)

    def begin_step(self, rows: np.ndarray, lengths: np.ndarray, *, draft: int = 0, out_cache_loc: torch.Tensor | None = None) -> np.ndarray:
        """On the forward's stream, before its first layer. ``draft`` > 0: it verifies so many tokens of each request after the
        ``lengths`` int64 [b] that are committed, and they go to the logical ids ``out_cache_loc`` [b * draft]; else the newest
        token, whose place is known since the step was scheduled, is part of ``lengths``. Returns compact lengths int64 [b]."""
        if self.stepper is None:  # a warm-up forward while the server starts
            return self.table.lengths(rows, lengths)
        if draft:
            self._place(rows, lengths, draft, out_cache_loc)
        self.batch = [self.entries.get(row) for row in rows.tolist()]
        compact = self.stepper.begin(self.batch, rows, lengths, queries=draft or 1)
        if self.trace:
            sets = [-1 if e is None or e.set is None else e.set for e in self.batch]
            self._began = time.monotonic()
            self.trace.write("step", rows=rows, lengths=lengths, compact=compact, folded=self.table.folded[rows], working=self.table.working[rows],
                             rooms=[-1 if e is None else e.pull.room for e in self.batch], block_at=self.sets.block_at[sets])
        return compact

    def tap(self, layer: int, q, k, v, out) -> None:
        if self.stepper is None:
            return
        self.stepper.tap(layer, q)
        if self.trace:
            self.trace.write(f"layer{layer}", q=q, k=k, v=v, out=out)

    def end_step(self) -> None:
        """After the last layer of a step without drafts."""
        if self.stepper is not None:
            self.stepper.end()
        if self.trace:
            self.trace.write("forward", began=self._began, ended=time.monotonic())

    def trusted(self) -> np.ndarray | None:
        """Before what a step with drafts verified is sampled: int64 [b], how many drafts of each request may be accepted; None: all."""
        return None if self.stepper is None else self.stepper.lookahead.trusted()

    def verified(self, accept_lens: torch.Tensor, drafts: np.ndarray) -> None:
        """After a step with drafts: ``accept_lens`` int [b] tokens of each request were accepted, the last of which comes from
        the target itself; ``drafts`` int64 [b]: how many of the verified tokens were drafts and not padding."""
        if self.stepper is not None:
            self.stepper.verified(accept_lens, drafts)

    def blocked(self, req) -> bool:
        """Whether a running request has to wait at the step boundary for blocks that it missed."""
        entry = self.entries.get(req.kv.req_pool_idx)
        return entry is not None and not self.stepper.ready(entry)

    def failure(self, req) -> Exception | None:
        """Why a running request cannot go on: its tier or its lease is gone, or the host cache is full."""
        entry = self.entries.get(req.kv.req_pool_idx)
        return entry.failure if entry is not None else None

    # -- ends ---------------------------------------------------------------------------------------------------

    def request_finished(self, req) -> None:
        """Idempotent, and harmless for requests that were never admitted."""
        row = req.kv.req_pool_idx
        if row is None:
            return
        # Before SGLang frees the logical ids: it would free again every page that they still point to.
        self.mapping[self.req_to_token[row, : req.kv.kv_allocated_len].long()] = 0
        if entry := self.entries.pop(row, None):
            ran = entry.pull.state in (SERVING, DONE)
            self._release(entry, computed_tokens(req, entry.prompt // self.page * self.page) if ran else ())

    def forget(self) -> None:
        """What no request holds is gone, and what is held serves no other any more."""
        self.reuse.store.forget()

    def _release(self, entry: Entry, tokens: Sequence[int] = ()) -> None:
        """``tokens``: those after the prompt's whole blocks whose KV it has, if another turn may come."""
        if entry.released:
            return
        entry.released = True
        if self.stepper is not None:
            self.stepper.settle()
        self.reuse.keep(entry, tokens)
        if entry in self.waiting:
            self.waiting.remove(entry)
        self.puller.cancel(entry.pull, "the request ended on the decode node")
        self.puller.release(entry.pull)
        self.reuse.release(entry)
        if entry.set is not None:
            self.stepper.totals["fetched_wasted"] += int(self.sets.ahead[entry.set].sum())
            self.cache.unreserve(entry.room)
            if self.lane is not None:
                self.lane.give(entry.set)
            self.sets.release(entry.set)
        self._free_pages(entry)
        self._grant()
        if not self.entries and not self.parked_pages and any((held := self.held()).values()):
            self.leaks += 1
            log.error("nothing runs, and yet something is held: %s", held)

    def _free_pages(self, entry: Entry) -> None:
        if entry.pages is not None:
            self.table.clear(entry.row)
            self.physical.free(torch.from_numpy((entry.pages[:, None] * self.page + np.arange(self.page)).reshape(-1)).to(self.pool.device))
            entry.pages = None

    # -- retraction ---------------------------------------------------------------------------------------------

    def retract_req(self, req) -> None:
        """Keeps a host copy of what the request's pages hold and gives them back. Its set, its host cache and its lease stay."""
        self.tidy()
        self.stepper.settle()
        row = req.kv.req_pool_idx
        self.mapping[self.req_to_token[row, : req.kv.kv_allocated_len].long()] = 0
        entry = self.entries.pop(row, None)
        if entry is None:
            return
        entry.pages = self.table.pages[row, : len(entry.pages)].copy()  # in the order that folding has given them
        parked = Parked(entry, self.pieces.snapshot(entry.pages), self.table.counts(row))
        parked.guard = weakref.finalize(parked, self._dropped.append, entry)
        parked.guard.atexit = False
        self.parked_pages += len(entry.pages)
        self._free_pages(entry)
        self.parked[row] = parked

    def park(self, row: int) -> Parked | None:
        """SGLang's request keeps the parked state; when it lets go of it without resuming, ``tidy`` releases everything."""
        return self.parked.pop(row, None)

    def unpark(self, parked: Parked | None, row: int) -> None:
        if parked is None:
            return
        entry = parked.entry
        parked.guard.detach()
        entry.row, entry.pages = row, self._allocate(parked.content.shape[2])
        self.parked_pages -= len(entry.pages)
        self.pieces.restore(entry.pages, parked.content)
        self.table.restore(row, entry.pages, parked.counts)
        self.entries[row] = entry

    def tidy(self) -> None:
        """Releases the retracted requests that SGLang has let go of, or never took over. At every turn of the scheduler: a
        finaliser may run on any thread, whatever locks that thread holds, so it only says what was dropped."""
        self.parked.clear()
        if self.reuse.arrived() and self.crowded:
            crowded, self.crowded = self.crowded, []
            for entry in crowded:
                if not entry.released:
                    self._start(entry)
        while self._dropped:
            entry = self._dropped.popleft()
            self.parked_pages -= entry.need.pages
            self._release(entry)

    def report(self) -> dict:
        """For ``/server_info``."""
        cache, stepper, lane = self.cache, self.stepper, self.lane
        return {"held": self.held(), "logical_tokens": self.logical.size - self.logical.available_size(), "live": len(self.entries),
                "physical_tokens": self.physical.size, "physical_tokens_peak": self.peak_pages * self.page, "batch_peak": self.peak_batch,
                "sets": self.sets.size, "sets_bytes": self.sets.nbytes, "leaks": self.leaks, "steps": dict(stepper.totals),
                "stalls": stepper.stalls.report(), "heads": {name: a.tolist() for name, a in stepper.lookahead.heads.items()},
                "live_requests": self._live(), "reuse": self.reuse.report(),
                "lane": None if lane is None else {"heads": len(lane.pieces), "bytes": lane.kv.nbytes + lane.table.nbytes, "tokens": lane.used_tokens,
                                                   "capacity_tokens": lane.capacity, "peak_tokens": lane.peak_tokens},
                "host_cache": {"capacity_bytes": cache.capacity * cache.piece_bytes, "used_bytes": cache.used_bytes, "peak_bytes": cache.peak_bytes,
                               "average_bytes": int(cache.average_bytes()), "pinned_bytes": cache.pinned_bytes, "reserved_bytes": cache.reserved_bytes,
                               "evicted": cache.evicted, "uncached": cache.uncached}}

    def _live(self) -> list[dict]:
        rows = [(e, e.row) for e in self.entries.values() if e.pages is not None]
        return [{"rid": e.rid, "room": e.pull.room, "prompt": e.prompt, "state": e.pull.state, "working": int(self.table.working[row]),
                 "tail": int(self.table.tail[row]), "blocks": int(self.table.folded[row] + self.table.tail[row]), "selecting": e.set is not None,
                 "steps": e.steps, "pulled_bytes": sum(e.pull.bytes_by_phase.values())} for e, row in rows]

    # -- figures and the rest of the surface --------------------------------------------------------------------

    @property
    def used_pages(self) -> int:
        return (self.physical.size - self.physical.available_size()) // self.page

    def held(self) -> dict[str, int]:
        """Everything a finished request must have given back, by scanning; all zero when nothing runs."""
        mapped = int((self.mapping[:-1] >= self.page).sum())  # warm-up requests write to the padding page
        lane_tokens = self.lane.used_tokens if self.lane is not None else 0
        return {"pages": self.used_pages, "mapped": mapped, "sets": self.sets.size - self.sets.free, "waiting": len(self.waiting),
                "parked_pages": self.parked_pages, "lane_tokens": lane_tokens, "blocks": self.reuse.store.held, "cache_pinned": self.cache.count_pinned()}

    def get_token_stats(self) -> HiSparseTokenStats:
        pages, size = self.used_pages * self.page, self.physical.size
        used, capacity = self.cache.used_bytes, self.cache.capacity * self.cache.piece_bytes
        per_token = self.sets.layout.token_bytes
        return HiSparseTokenStats(device_tokens=pages, device_token_usage=pages / size, host_tokens=used // per_token, host_token_usage=used / capacity)

    def host_token_len(self, kv_allocated_len: int) -> int:
        return kv_allocated_len

    def has_ongoing_staging(self) -> bool:
        return False

    def collect_ready_reqs(self) -> list:
        return []

    def wait_for_pending_backup(self) -> None:
        """Nothing is backed up on another stream."""

    def set_decode_producer_stream(self, stream) -> None:
        """Commits run on the forward's own stream."""

    def destroy(self) -> None:
        """Memory goes with the process."""
