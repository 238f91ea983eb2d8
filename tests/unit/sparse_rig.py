"""A decode node with working sets, driven the way SGLang's scheduler drives it, beside a real tier and a prefill rank.

SGLang's own KV pool, allocators and row table on the CPU; our wiring (``binding.py``) on top. The rig knows the true K and V of
every token of every request, and compares them with what the pool, the host cache and the tables hold.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch
from node_rig import ROW, SEED, SOURCE, WAIT, Decode, LocalTier, Pool, Prefill, World, until
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from decode_node.boundary import hold_back, without_blocked
from decode_node.budget import make_budget, most_sets
from decode_node.coordinator import Coordinator
from decode_node.lane import DenseLane
from decode_node.pages import PageSink
from decode_node.pool import CompactAllocator, CompactPool, logical_ratio
from decode_node.pull import PullLimits
from oasis_sglang.binding import _bind_working_sets
from oasis_sglang.config import OasisConfig
from oasis_sglang.selection.summaries import SUMMARIES
from prefill_node.pages import PageSource
from prefill_node.publisher import COMMITTED
from transport.errors import OasisError
from transport.layout import KVLayout
from transport.tier import TierLimits

SUMMARY = SUMMARIES["mean_var_int8"]


class SparsePrefill(Prefill):
    """Its pool may have any dtype."""

    def __init__(self, path: str, layout: KVLayout, pages: int):
        super().__init__(path, layout=layout, pages=1)
        self.pool = Pool(layout, pages, dtype=getattr(torch, layout.dtype))
        self.publisher.source = PageSource(self.pool.k, self.pool.v, layout)


class SparseWorld(World):
    def __init__(self, folder, layout: KVLayout, *, records: int, prefill_pages: int, windows: int, limits: TierLimits):
        self.path = str(folder / f"{uuid.uuid4().hex[:8]}.sock")
        self.tier = LocalTier(self.path, records=records, layout=layout, limits=limits)
        self.prefill = SparsePrefill(self.path, layout, prefill_pages)
        self.decode = Decode({SOURCE: self.tier.control}, layout=layout, pages=1, windows=windows,
                             limits=PullLimits(await_seconds=30.0, read_seconds=60.0, silence_seconds=30.0))


class Req:
    """The attributes of SGLang's ``Req`` that are used. ``truth`` [pieces, 2, tokens, head_dim]: K and V of all its tokens."""

    def __init__(self, rid: str, tokens: np.ndarray, new: int, custom: object, truth: torch.Tensor, first: int):
        self.rid, self.truth, self.length = rid, truth, len(tokens)
        self.origin_input_ids, self.output_ids = tokens.tolist(), [first]
        self.sampling_params = SimpleNamespace(max_new_tokens=new, custom_params=custom)
        self.kv = SimpleNamespace(req_pool_idx=None, kv_allocated_len=0, retraction_backup=None)
        self.to_finish = self.finished_reason = self.pull = self.error = None
        self.hisparse_staging = True

    def finished(self) -> bool:
        return self.finished_reason is not None


class Batch:
    """As far as ``hold_back`` needs SGLang's ``ScheduleBatch``."""

    def __init__(self):
        self.reqs: list[Req] = []
        self.batch_is_full = True

    def filter_batch(self, reqs_to_exclude=()):
        self.reqs = [r for r in self.reqs if not r.finished() and r not in reqs_to_exclude]


class Node:
    """The node and its scheduler's queues. Each test calls ``loop`` or the parts of it.

    A request goes ``prealloc`` (its prompt is committed) -> ``transfer`` (it waits for its grant, or is pulled) ->
    ``waiting_queue`` -> ``batch.reqs`` -> ``ended``, and from the batch to ``retracted`` and back to ``waiting_queue``.
    """

    def __init__(self, folder, *, seed: int = 0, layers: int = 2, kv_heads: int = 2, head_dim: int = 8, group: int = 2, page: int = 16,
                 dtype: str = "float32", pages: int = 60, rows: int = 6, context: int = 1024, budget: int = 6, sink: int = 1, recent: int = 2, tail: int = 2,
                 wait: bool = False, keep: bool = False, donate: bool = False, cap: int = 0, draft: int = 0, warmup: int = 0, ahead: int = 1,
                 critical: tuple[int, ...] = (), lane_pages: int = 200, cache: int = 4096, admission: str = "selected", wait_seconds: float = 10.0,
                 records: int = 512,
                 prefill_pages: int = 64, windows: int = 4, running: int = 8):
        """Sizes in pages (``budget``, ``sink``, ``recent``, ``tail``, ``pages``) and pieces (``cache``); ``running`` requests at
        once. ``draft`` > 0: each step verifies so many tokens, of which ``accept(reqs)`` int64 [b] are kept. ``critical``: pieces
        in the dense lane."""
        self.rng, self.generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.page, self.dtype, self.running, self.draft = page, getattr(torch, dtype), running, draft
        self.layout = lay = KVLayout(num_layers=layers, kv_heads=kv_heads, head_dim=head_dim, block_tokens=page, dtype=dtype, itemsize=self.dtype.itemsize,
                                     tp_size=1, summary=SUMMARY.name, summary_bytes=SUMMARY.bytes(head_dim), metadata_lens=ROW)
        self.world = SparseWorld(folder, lay, records=records, prefill_pages=prefill_pages, windows=windows,
                                 limits=TierLimits(lease_seconds=30.0, grace_seconds=0.2, room_seconds=10.0))
        self.pool = CompactPool(pages * page, page, self.dtype, kv_heads, head_dim, layers, "cpu", False)
        self.allocator = CompactAllocator(pages * page, page, self.dtype, "cpu", self.pool, False,
                                          host_to_device_ratio=logical_ratio(rows + 1, context, pages * page))
        self.rows = ReqToTokenPool(rows, context, "cpu", False)
        runner = SimpleNamespace(token_to_kv_pool=self.pool, token_to_kv_pool_allocator=self.allocator, req_to_token_pool=self.rows)
        sizes = make_budget(page, budget * page, sink * page, recent * page, tail * page, wait, draft)
        self.lane = DenseLane(np.array(critical), layers=layers, kv_heads=kv_heads, head_dim=head_dim, page=page, sets=most_sets(sizes, rows + 1, pages),
                              context=context + 2 * draft, tokens=lane_pages * page, dtype=self.dtype, device="cpu") if critical else None
        self.coordinator = Coordinator(runner, sizes, self.lane)
        self.puller, self.faults = self.world.decode.puller, self.world.tier.faults
        # Eager: working sets that change a lot are what these tests are about.
        options = OasisConfig(admission=admission, fetch_blocks_per_step=cap, warmup_steps=warmup, lookahead_rows=ahead, wait_seconds=wait_seconds,
                              hysteresis=0.25,
                              host_cache_bytes=cache * lay.piece_bytes, publish_generated=donate)
        self._fetch = _bind_working_sets(self.coordinator, kv_heads * group, options, SUMMARY, lay, PageSink(self.pool.k_buffer, self.pool.v_buffer, lay),
                                         self.puller, lambda: None, keep=keep)
        self.sets, self.cache, self.table, self.stepper = (getattr(self.coordinator, n) for n in ("sets", "cache", "table", "stepper"))
        self.query_heads, self.room = kv_heads * group, 0
        self.ids = itertools.count(1 << 40)
        """Of generated tokens: no two are alike, since their contents are not."""
        self.scheduler = SimpleNamespace(hisparse_coordinator=self.coordinator, waiting_queue=[], enable_overlap=False)
        self.batch = Batch()
        self.prealloc, self.transfer, self.retracted, self.ended = ([] for _ in range(4))
        self.handed: Counter[int] = Counter()
        self.queries, self.contents, self.accept = self._random_queries, self._random_contents, self._random_accept

    @property
    def waiting_queue(self) -> list[Req]:
        return self.scheduler.waiting_queue

    def live(self) -> list[Req]:
        return [*self.prealloc, *self.transfer, *self.waiting_queue, *self.batch.reqs, *self.retracted]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def _random_queries(self, reqs: list[Req]) -> torch.Tensor:
        """[layers, b * rows, q_heads * head_dim] of one step."""
        return self.random(self.layout.num_layers, len(reqs) * (self.draft or 1), self.query_heads * self.layout.head_dim) * 4

    def _random_contents(self, reqs: list[Req]) -> torch.Tensor:
        """K and V [layers, 2, b * rows, kv_heads, head_dim] of the newest tokens."""
        return self.random(self.layout.num_layers, 2, len(reqs) * (self.draft or 1), self.layout.kv_heads, self.layout.head_dim)

    def _random_accept(self, reqs: list[Req]) -> np.ndarray:
        return self.rng.integers(1, self.draft + 1, len(reqs))

    # -- requests -----------------------------------------------------------------------------------------------

    def arrive(self, prompt: int, new: int, custom: object = None, keys: torch.Tensor | None = None, after: Req | None = None,
               seed: bytes | None = SEED, recomputed: float = 0.0) -> Req:
        """A request whose prompt prefill has committed; decode has its manifest. Content and votes are random, except for
        ``keys`` [pieces, prompt, head_dim], and for what ``after`` had: its prompt and its answer start this one of ``prompt``
        tokens; prefill computes the answer's K and V ``recomputed`` larger. ``seed``: of its hash chain."""
        self.room += 1
        lay, pool, room = self.layout, self.world.prefill.pool, self.room
        truth = torch.zeros((lay.pieces, 2, prompt + new + 2 * self.draft, lay.head_dim), dtype=self.dtype)
        truth[:, :, :prompt] = self.random(lay.pieces, 2, prompt, lay.head_dim)
        tokens = np.arange(prompt, dtype=np.int64) + room * 1_000_003
        if after is not None:
            had = np.array([*after.origin_input_ids, *after.output_ids][:-1])[:prompt]
            tokens[: len(had)], truth[:, :, : len(had)] = had, after.truth[:, :, : len(had)]
        if keys is not None:
            truth[:, 0, :prompt] = keys
        committed = truth.clone()
        if after is not None:
            committed[:, :, len(after.origin_input_ids) : len(had)] += recomputed
        pages = self.rng.permutation(len(pool.k[0]) // self.page)[: -(-prompt // self.page)]
        slots = torch.from_numpy((pages[:, None] * self.page + np.arange(self.page)).reshape(-1)[:prompt])
        for layer in range(lay.num_layers):
            part = committed[layer * lay.kv_heads : (layer + 1) * lay.kv_heads, :, :prompt].permute(1, 2, 0, 3)
            pool.k[layer][slots], pool.v[layer][slots] = part[0], part[1]
        last = min(8, prompt)
        asked = self.random(last, lay.num_layers, self.query_heads, lay.head_dim)
        pub = self.world.prefill.publish(room, tokens, pages, seed=seed, queries=asked, scale=1.0)
        assert pub.state == COMMITTED, pub.error
        req = Req(f"r{room}", tokens, new, custom, truth, next(self.ids))
        req.pull = self.puller.pull(room, SOURCE, rid=req.rid)
        until(lambda: req.pull.state in ("ready", "failed"), "manifest")
        self.prealloc.append(req)
        return req

    def _take_row(self, req: Req) -> torch.Tensor:
        """SGLang's ``_pre_alloc``: a row and logical ids for what the request has."""
        row, one = self.rows.alloc_rows(1)[0], torch.tensor([req.length])
        req.kv.req_pool_idx, req.kv.kv_allocated_len = row, req.length
        ids = self.allocator.alloc_logical_only(torch.tensor([0]), torch.tensor([0]), one, one, torch.tensor([-1]), req.length)
        self.rows.write((row, slice(0, req.length)), ids)
        return ids

    def _give_row(self, req: Req) -> None:
        """SGLang's ``release_kv_cache``."""
        row = req.kv.req_pool_idx
        self.allocator.free(self.rows.req_to_token[row, : req.kv.kv_allocated_len].long())
        self.rows.free_rows([row])
        req.kv.req_pool_idx = None

    def preallocate(self, req: Req) -> bool:
        """False: refused, with ``req.error``."""
        self.prealloc.remove(req)
        self._take_row(req)
        self.transfer.append(req)
        room = req.pull.room
        try:
            self._fetch(req, req.pull, None, lambda row: self.handed.update([room]))
        except OasisError as error:  # as the receiver does
            req.error = error
            self.puller.cancel(req.pull, str(error))
            self.transfer.remove(req)
            self.end(req, "refused")
            return False
        return True

    def pop_transferred(self) -> None:
        for req in list(self.transfer):
            if req.pull.state in ("serving", "done"):
                self.coordinator.admit_request_direct(req)
                self.transfer.remove(req)
                self.waiting_queue.append(req)
            elif req.pull.state == "failed":
                self.transfer.remove(req)
                self.end(req, "failed")

    def admit(self, *reqs: Req) -> None:
        """Through all queues into the batch."""
        for req in reqs:
            assert self.preallocate(req), req.error
        until(lambda: self.pop_transferred() or not any(r in self.transfer for r in reqs), "admitted")
        self.prebuild()
        assert all(r in self.batch.reqs or r.finished_reason == "length" for r in reqs), [r.pull.error for r in reqs]

    def prebuild(self) -> None:
        """SGLang's ``get_new_prebuilt_batch``; the first output token came from prefill, and may be the only one."""
        with without_blocked(self.scheduler):
            room = self.running - len(self.batch.reqs)
            self.batch.reqs += self.waiting_queue[:room]
            self.scheduler.waiting_queue = self.waiting_queue[room:]
        self._end_complete()

    def _end_complete(self) -> None:
        for req in list(self.batch.reqs):
            if req.to_finish or len(req.output_ids) >= req.sampling_params.max_new_tokens:
                self.batch.reqs.remove(req)
                self.end(req, req.to_finish or "length")

    def end(self, req: Req, why: str) -> None:
        """What SGLang does with a request that holds a row, whatever its state."""
        req.finished_reason = why
        self.coordinator.request_finished(req)
        self._give_row(req)
        self.ended.append(req)

    def abort(self, req: Req) -> str:
        """SGLang's ``abort_request``; returns where the request was."""
        if req in self.waiting_queue:
            self.waiting_queue.remove(req)
            self.end(req, "aborted")
            return "admitted"
        if req in self.prealloc or req in self.transfer:
            where = "ready" if req in self.prealloc else "pulling" if self.coordinator.entries[req.kv.req_pool_idx].pages is not None else "waiting"
            self.puller.cancel(req.pull, "aborted on the decode node")
            if req in self.prealloc:
                self.prealloc.remove(req)
                self.ended.append(req)
            else:
                self.transfer.remove(req)
                self.end(req, "aborted")
            return where
        if req in self.retracted:
            self.retracted.remove(req)
            req.kv.retraction_backup = None
            self.ended.append(req)
            return "retracted"
        req.to_finish = "aborted"
        return "running"

    def retract(self, req: Req, *, backup: bool = True) -> None:
        """SGLang's ``release_req`` of a running request."""
        self.batch.reqs.remove(req)
        row = req.kv.req_pool_idx
        self.coordinator.retract_req(req)
        if backup:
            ids = self.rows.req_to_token[row, : req.length]
            req.kv.retraction_backup = SimpleNamespace(cpu_tensors=self.allocator.get_cpu_copy(ids, req_pool_index=row))
            self.retracted.append(req)
        self._give_row(req)

    def resume(self, req: Req) -> None:
        self.retracted.remove(req)
        ids = self._take_row(req)
        self.allocator.load_cpu_copy(req.kv.retraction_backup.cpu_tensors, ids, req_pool_index=req.kv.req_pool_idx)
        req.kv.retraction_backup = None
        self.waiting_queue.append(req)

    # -- steps --------------------------------------------------------------------------------------------------

    def loop(self, *, resume: bool = True) -> None:
        """One turn of SGLang's decode event loop."""
        while resume and self.retracted and self.rows.available_size():
            self.resume(self.retracted[0])
        if not self.retracted:
            self.pop_transferred()
            while self.prealloc and self.rows.available_size():
                self.preallocate(self.prealloc[0])
        self.prebuild()
        hold_back(self.scheduler, self.batch)
        if self.batch.reqs:
            self.step()

    def step(self) -> None:
        """One forward of the batch; afterwards every request is compared with the model."""
        reqs, lay, n = self.batch.reqs, self.layout, self.draft or 1
        rows = torch.tensor([r.kv.req_pool_idx for r in reqs])
        before = torch.tensor([r.length for r in reqs])
        ids, compact = self._prepare_verify(rows, before) if self.draft else self._prepare_decode(rows, before)
        kv, queries = self.contents(reqs), self.queries(reqs)
        if self.lane is not None:
            self._fill_lane(rows, before, kv)
        for layer in range(lay.num_layers):
            self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer), ids, kv[layer, 0], kv[layer, 1])
            self.coordinator.tap(layer, queries[layer], None, None, None)
        for i, req in enumerate(reqs):
            new = kv[:, :, i * n : (i + 1) * n].permute(0, 3, 1, 2, 4).reshape(lay.pieces, 2, n, lay.head_dim)
            req.truth[:, :, int(before[i]) : int(before[i]) + n] = new
            req.length = int(before[i]) + n
            self.check(req, int(compact[i]) + (n if self.draft else 0))
        accepted = self.accept(reqs) if self.draft else np.ones(len(reqs), np.int64)
        if self.draft:
            self.coordinator.verified(torch.from_numpy(accepted), np.full(len(reqs), n - 1))
        else:
            self.coordinator.end_step()
        self.check_pages()
        for req, kept, start in zip(reqs, accepted.tolist(), before.tolist()):
            req.length = start + kept
            req.output_ids += itertools.islice(self.ids, kept)
        self._end_complete()
        self.stepper.settle()

    def _fill_lane(self, rows: torch.Tensor, before: torch.Tensor, kv: torch.Tensor) -> None:
        """What the attention over the lane keeps of a forward."""
        sets, n, lay = self.coordinator.sets_of(rows.numpy()), self.draft or 1, self.layout
        slots = self.lane.slots(sets[:, None], before.numpy()[:, None] + np.arange(n)).reshape(-1)
        self.lane.upload()
        self.lane.kv[:, slots] = kv.permute(1, 2, 0, 3, 4).reshape(2, len(slots), lay.pieces, lay.head_dim)[:, :, self.lane.pieces]

    def _prepare_decode(self, rows: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        ids = self.allocator.alloc_decode(before + 1, before + 1, self.rows.req_to_token[rows, before - 1].long())
        self.rows.write((rows, before), ids.int())
        for req in self.batch.reqs:
            req.kv.kv_allocated_len += 1
        self.coordinator.map_last_loc_to_buffer(before + 1, ids, rows, before + 1, rows)
        return ids, self.coordinator.begin_step(rows.numpy(), (before + 1).numpy())

    def _prepare_verify(self, rows: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Logical ids for two verifications ahead, in whole pages, as SGLang does it."""
        for req, row in zip(self.batch.reqs, rows.tolist()):
            have, want = req.kv.kv_allocated_len, -(-(req.length + 2 * self.draft) // self.page) * self.page
            if want > have:
                one, two = torch.tensor([have]), torch.tensor([want])
                last = self.rows.req_to_token[row, have - 1 : have].long()
                self.rows.write((row, slice(have, want)), self.allocator.alloc_logical_only(one, one, two, two, last, want - have))
                req.kv.kv_allocated_len = want
        ids = self.rows.req_to_token[rows[:, None], before[:, None] + torch.arange(self.draft)].reshape(-1).long()
        return ids, self.coordinator.begin_step(rows.numpy(), before.numpy(), draft=self.draft, out_cache_loc=ids)

    def land(self) -> None:
        """Reads are no longer held."""
        self.faults.hold, posted = False, threading.Event()
        self.puller._post(posted.set)  # a read that was being posted meanwhile is held by then
        assert posted.wait(WAIT)
        self.faults.finish()

    def run(self, *reqs: Req) -> None:
        """Loops until ``reqs`` have ended."""
        end = time.monotonic() + WAIT
        while not all(r in self.ended for r in reqs):
            assert time.monotonic() < end, [(r.pull.state, r.length) for r in reqs]
            self.loop()

    # -- the model ----------------------------------------------------------------------------------------------

    def check(self, req: Req, compact: int) -> None:
        """What attention reads over the compact row is the true K and V of the blocks that the tables name, and of the tail."""
        row, n, page, lay = req.kv.req_pool_idx, req.length, self.page, self.layout
        entry = self.coordinator.entries[row]
        read = self.pool.kv[:, :, self.table.table[row, :compact].long()].permute(0, 3, 1, 2, 4).reshape(lay.pieces, 2, compact, lay.head_dim)
        if entry.set is None:
            assert compact == n and torch.equal(read, req.truth[:, :, :n]), req.rid
            return
        working, folded = int(self.table.working[row]), int(self.table.folded[row])
        blocks = self.sets.block_at[entry.set, :, :working].long()
        assert compact == working * page + n - folded * page
        assert 0 <= n - folded * page <= entry.budget.tail * page and working <= entry.budget.working
        assert (int(self.sets.working[entry.set]), int(self.sets.blocks[entry.set])) == (working, folded)
        self.check_tables(entry.set, blocks, folded)
        tokens = (blocks[:, :, None] * page + torch.arange(page)).view(lay.pieces, 1, -1, 1).expand(-1, 2, -1, lay.head_dim)
        assert torch.equal(read[:, :, : working * page], req.truth.gather(2, tokens)), f"{req.rid}: other blocks than the tables say"
        assert torch.equal(read[:, :, working * page :], req.truth[:, :, folded * page : n]), f"{req.rid}: tail"
        if self.lane is not None:
            inside = self.lane.kv[:, self.lane.table[entry.set + 1, :n].long()].permute(2, 0, 1, 3)
            assert torch.equal(inside, req.truth[self.lane.pieces, :, :n]), f"{req.rid}: lane"
        self.check_cache(req, entry.set, folded, whole=req.length // page if entry.failure else entry.prompt // page)

    def check_tables(self, chosen: int, blocks: torch.Tensor, folded: int) -> None:
        """``blocks`` int64 [pieces, working] are distinct, the two tables are inverse, and pinned blocks are among them."""
        slot_of = torch.full_like(self.sets.slot_of[chosen], -1)
        assert ((blocks >= 0) & (blocks < folded)).all() and (blocks.sort(1).values.diff(dim=1) > 0).all(), "not distinct blocks"
        slot_of.scatter_(1, blocks, torch.arange(blocks.shape[1], dtype=torch.int16).expand_as(blocks))
        assert torch.equal(self.sets.slot_of[chosen], slot_of) and (self.sets.block_at[chosen, :, blocks.shape[1] :] == -1).all()
        pinned = [b for b in range(folded) if b < self.sets.sink or b >= folded - self.sets.recent]
        assert (slot_of[:, pinned] >= 0).all(), "a pinned block left"

    def check_cache(self, req: Req, chosen: int, folded: int, whole: int) -> None:
        """The host cache holds true pieces only, and every block from ``whole`` on that was folded, for good. Summaries are true."""
        lay = self.layout
        content = req.truth[:, :, : folded * self.page].reshape(lay.pieces, 2, folded, self.page, lay.head_dim).transpose(1, 2).contiguous()
        with self.cache._lock:
            numbers = self.sets.number[chosen, :folded]
            assert len(np.unique(numbers)) == folded and np.array_equal(numbers, self.coordinator.entries[req.kv.req_pool_idx].numbers)
            slots = self.cache.slot[:, numbers]
            here = slots >= 0
            assert here[:, whole:].all() and self.cache._pinned[slots[:, whole:]].all(), "a generated block is not kept"
            cached = self.cache.memory[slots[here]]
        bytes_of = content.view(torch.uint8).reshape(lay.pieces, folded, lay.piece_bytes).numpy()
        assert np.array_equal(cached, bytes_of[here]), f"{req.rid}: the host cache holds other bytes"
        assert torch.equal(self.sets.raw[:, numbers], SUMMARY.build(content[:, :, 0])), f"{req.rid}: summaries"

    def check_pages(self) -> None:
        """Every physical page is free or has one owner; parked requests have none."""
        physical = self.coordinator.physical
        holders = [e for e in self.coordinator.entries.values() if e.pages is not None]
        owned = [self.table.pages[e.row, : e.need.pages] for e in holders]
        assert all(sorted(pages) == sorted(e.pages) for e, pages in zip(holders, owned))
        everything = np.concatenate([*owned, physical.get_all_free_pages().numpy()])
        assert sorted(everything.tolist()) == list(range(1, physical.size // self.page + 1)), "a page is lost or has two owners"
        assert self.coordinator.parked_pages <= physical.available_size() // self.page, "parked pages were given away"

    def at_baseline(self) -> None:
        """Everything everywhere is back at its start."""
        c = self.coordinator
        c.tidy()
        if c.reuse.enabled:
            assert self.cache.scan()["pinned"] == self.cache.reserved_bytes == c.reuse.store.held == 0 and not c.reuse._bringing and not c.crowded
            c.forget()
        assert c.reuse.store.cached == 0 and c.reuse.store._free_count == c.reuse.store.size
        assert not any((held := c.held()).values()), held
        assert c.leaks == 0 and not c.entries and not c.waiting and not c.parked and not self.stepper.folds
        assert c.physical.available_size() == c.physical.size and c.logical.available_size() == c.logical.size
        assert self.sets.free == self.sets.size and self.cache.scan()["used"] == self.cache.used_bytes == self.cache.reserved_bytes == 0
        assert not c.mapping[:-1].any() and c.mapping[-1] == -1 and not self.table.reserved.any() and not self.table.pages.any()
        assert self.rows.available_size() == self.rows.size
        self.check_pages()
        self.world.settle()
        assert not self.puller.totals["internal_errors"]

    def close(self) -> None:
        self.world.close()
