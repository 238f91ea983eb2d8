"""A decode node with working sets from admission to release: every step compared with the true K and V, every end with the start."""

from __future__ import annotations

import gc
import json
import random
import sys
import threading
import weakref
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from node_rig import until
from sparse_rig import Node, Req

from decode_node.budget import make_budget
from decode_node.coordinator import Coordinator
from transport.errors import LeaseExpired


def lose(node: Node, req: Req) -> None:
    """The tier ends the request's lease."""
    node.puller._post(node.puller._give_up, req.pull, LeaseExpired("the tier ended the lease", room=req.pull.room))


def running(node: Node, *sizes: tuple[int, int], custom: object = None) -> list[Req]:
    """Admitted requests of (prompt, new) tokens."""
    reqs = [node.arrive(*size, custom) for size in sizes]
    node.admit(*reqs)
    return reqs


# -- many requests ------------------------------------------------------------------------------------------------


class Fuzz:
    """Arrivals, aborts, retractions, lost leases and held reads at random; ``seen`` counts what happened in which state."""

    def __init__(self, node: Node, seed: int):
        self.node, self.rng, self.seen = node, random.Random(seed), Counter()

    def arrive(self) -> None:
        node, rng, page = self.node, self.rng, self.node.page
        smaller = {"budget_tokens": (node.coordinator.budget.working - 1) * page}
        own = rng.choice([None, None, {"oasis": {}}, {"oasis": smaller}, {"oasis": {"mode": "exact"}}, {"oasis": {"on_miss": "wait"}}])
        prompt = rng.choice([rng.randint(1, page - 1), page * rng.randint(1, 20), rng.randint(1, 22 * page)])
        node.arrive(prompt, rng.choice([1, rng.randint(2, 64), 4 * page, 5 * page if page < 64 else 20]), own)

    def turn(self) -> None:
        node, rng = self.node, self.rng
        if rng.random() < 0.3 and len(node.live()) < 9:
            self.arrive()
        if rng.random() < 0.12 and (going := [r for r in node.batch.reqs if not r.to_finish]):
            node.retract(rng.choice(going))
            self.seen["retract"] += 1
        if rng.random() < 0.12 and node.live():
            queues = [q for q in (node.prealloc, node.transfer, *[node.waiting_queue] * 3, node.batch.reqs, *[node.retracted] * 3) if q]
            self.seen[node.abort(rng.choice(rng.choice(queues)))] += 1
        if rng.random() < 0.02 and node.live():
            lose(node, rng.choice(node.live()))
            self.seen["lease lost"] += 1
        if rng.random() < 0.15:
            node.faults.hold = True
        if rng.random() < 0.3:
            node.land()
        node.loop(resume=rng.random() < 0.4)
        self.check_grants()

    def check_grants(self) -> None:
        """In the order of arrival, and no later than what the first one needs is there."""
        node, waiting = self.node, self.node.coordinator.waiting
        assert (rids := [e.rid for e in waiting]) == [r.rid for r in node.transfer if r.rid in rids]
        if waiting:
            need = waiting[0].need
            room = node.cache.capacity - node.cache.reserved_bytes // node.cache.piece_bytes
            pages = node.coordinator.physical.available_size() // node.page - node.coordinator.parked_pages
            assert pages < need.pages or need.selecting and (not node.sets.free or room < node.coordinator._first_room(need)), "granted too late"

    def run(self, turns: int) -> Counter:
        node = self.node
        for _ in range(turns):
            self.turn()
        node.land()
        node.run(*node.live())
        node.at_baseline()
        totals = node.stepper.totals
        return self.seen + Counter(folds=totals["folds"], commits=totals["swaps_committed"], late=totals["swaps_late"], evicted=node.cache.evicted, runs=1)


PROFILES = {
    "plain": dict(pages=28, rows=8, running=3),
    "a small host cache, few fetches": dict(pages=28, rows=8, running=3, cap=1, cache=64),
    "waiting for misses": dict(pages=28, rows=8, running=3, cap=2, wait=True, wait_seconds=0.05),
    "all blocks pulled": dict(pages=28, rows=8, running=3, cache=300, admission="full"),
    "pages of 32, three heads": dict(pages=40, rows=8, page=32, layers=1, kv_heads=3, group=3, context=2048),
    "pages of 64, bfloat16": dict(pages=40, rows=8, page=64, layers=1, dtype="bfloat16", group=1, context=4096, prefill_pages=32),
}
TOTAL: Counter[str] = Counter()


SEEDS = 2


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", PROFILES)
def test_any_sequence_of_events_leaves_true_bytes_and_nothing_behind(nodes, name, seed):
    seed += 100 * list(PROFILES).index(name)
    TOTAL.update(Fuzz(nodes(seed=seed, **PROFILES[name]), seed).run(80 if "64" in name else 150))


def test_the_events_happened():
    """Of the test above, when all of it has run."""
    if TOTAL["runs"] < SEEDS * len(PROFILES):
        pytest.skip("not all of the sequences have run")
    states = ("ready", "waiting", "pulling", "admitted", "running", "retracted")
    assert all(TOTAL[state] >= 5 for state in states), TOTAL
    least = {"retract": 50, "lease lost": 10, "folds": 40, "commits": 1000, "late": 50, "evicted": 50}
    assert all(TOTAL[event] >= n for event, n in least.items()), TOTAL


def test_pieces_land_on_the_puller_thread_while_others_step(nodes):
    """The threads change places as often as the interpreter lets them."""
    interval = sys.getswitchinterval()
    node = nodes(pages=60, running=6, cap=0, cache=400)
    sys.setswitchinterval(1e-6)
    try:
        reqs = running(node, (400, 40), (333, 60), (500, 50), (257, 60))
        node.run(*reqs, *(node.arrive(16 * 25, 20) for _ in range(3)))
    finally:
        sys.setswitchinterval(interval)
    assert node.stepper.totals["swaps_committed"] > 500 and node.puller.totals["demanded_items"] > 100
    node.at_baseline()


# -- a set that had another owner -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["abort", "retract", "lease lost"])
def test_reads_of_a_request_that_has_ended_do_nothing_to_the_next_owner_of_its_set(nodes, end):
    node = nodes(pages=8)  # room for one
    [old] = running(node, (400, 60))
    chosen = node.coordinator.entries[row := old.kv.req_pool_idx].set
    node.faults.hold = True
    node.step()
    until(lambda: node.faults.in_flight == 1, "what it missed is being read")
    asked = node.sets.flying[chosen].nonzero().tolist()
    assert len(asked) > 4
    if end == "retract":
        node.retract(old)
        node.abort(old)
        node.loop()
    elif end == "lease lost":
        lose(node, old)
        until(lambda: old.pull.state == "failed")
        node.loop()
    else:
        node.batch.reqs.remove(old)
        node.end(old, "aborted")
    assert old in node.ended
    new = node.arrive(400, 60)
    assert node.preallocate(new)
    assert new.kv.req_pool_idx == row and node.coordinator.entries[row].set == chosen and not node.sets.flying[chosen].any()
    for piece, block in asked:  # as if the new owner had asked for the same
        node.sets.flying[chosen, piece, block] = True
    node.faults.finish(1)
    until(lambda: not any(flight.job.pull is old.pull for flight in node.puller.reader.flights), "the late read is over")
    assert node.sets.flying[chosen].nonzero().tolist() == asked and node.cache.used_bytes == 0
    node.sets.flying[chosen] = False
    node.land()
    node.run(new)
    node.at_baseline()


# -- retraction -----------------------------------------------------------------------------------------------------


def test_a_retracted_request_goes_on_where_it_was_in_another_row_and_other_pages(nodes):
    node = nodes(pages=40)
    req, other = running(node, (300, 90), (16 * 18, 90))
    for _ in range(25):  # its tail has been turned round by then
        node.step()
    node.faults.hold = True
    node.step()
    entry = node.coordinator.entries[req.kv.req_pool_idx]
    before, row, pages, tables = entry.swaps, entry.row, entry.pages.copy(), node.sets.block_at[entry.set].clone()
    assert len(before.blocks) and not np.array_equal(node.table.pages[row, : len(pages)], pages)
    node.retract(req)
    assert node.coordinator.parked_pages == 8 and row not in node.coordinator.entries
    node.step()
    held_row, others = node.rows.alloc_rows(1), node.coordinator.physical.alloc(node.page * 8)
    node.resume(req)
    node.coordinator.physical.free(others)
    assert req.kv.req_pool_idx != row and set(entry.pages) != set(pages) and entry.row == req.kv.req_pool_idx
    assert entry.swaps is before and torch.equal(node.sets.block_at[entry.set], tables)
    node.rows.free_rows(held_row)
    node.land()
    node.run(req, other)
    node.at_baseline()


@pytest.mark.parametrize("custom", [None, {"oasis": {"mode": "exact"}}])
def test_requests_are_retracted_every_few_steps(nodes, custom):
    node = nodes(pages=50)
    reqs = running(node, (200, 60), (39, 60), (16 * 12, 60), custom=custom)
    for step in range(60):
        if step % 3 == 0 and node.batch.reqs:
            node.retract(node.batch.reqs[step % len(node.batch.reqs)])
        node.loop(resume=step % 2 == 0)
    node.run(*reqs)
    node.at_baseline()


def test_a_step_may_be_run_again_after_a_retraction(nodes):
    """With overlap the result of a request's last forward is dropped when it is retracted: its newest token comes again."""
    node = nodes(pages=40)
    reqs = running(node, (16 * 17 + 5, 60), (20, 200))
    for _ in range(50):
        node.step()
        for req in list(node.batch.reqs):
            req.length -= 1
            req.output_ids.pop()
            node.retract(req)
            node.resume(req)
        node.prebuild()
        node.step()
    assert node.stepper.totals["folds"] > 3
    node.run(*reqs)
    node.at_baseline()


@pytest.mark.parametrize("tokens", [300, 20])
def test_a_retracted_request_that_is_let_go_of_leaves_nothing(nodes, tokens):
    node = nodes(pages=12)
    [req] = running(node, (tokens, 60))
    node.step()
    node.retract(req)
    waiting = node.arrive(200, 5)
    assert node.preallocate(waiting) and (node.coordinator.waiting or tokens == 20), "parked pages were given away"
    assert node.abort(req) == "retracted"
    node.loop()
    assert not node.coordinator.waiting and not node.coordinator.parked_pages
    node.run(waiting)
    node.at_baseline()


def test_what_sglang_retracts_without_a_backup_is_released(nodes):
    """As it does before a weight update, and with the last request when memory is short (``release_req(offload_kv=False)``)."""
    node = nodes(pages=12)
    [req] = running(node, (300, 60))
    node.step()
    node.retract(req, backup=False)
    node.loop()
    node.at_baseline()


def test_a_row_never_hands_over_what_an_earlier_request_parked(nodes):
    node = nodes()
    [req] = running(node, (300, 60))
    node.step()
    row = req.kv.req_pool_idx
    node.retract(req, backup=False)
    warm = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row, kv_allocated_len=0))
    node.coordinator.retract_req(warm)
    assert node.allocator.get_cpu_copy(None, req_pool_index=row) is None
    node.allocator.load_cpu_copy(None, None, req_pool_index=row)
    node.at_baseline()


def test_a_parked_request_may_be_collected_on_any_thread_under_any_lock(nodes):
    """The collector runs wherever memory is allocated: also on the puller's thread, which then holds the request's lock."""
    node = nodes()
    [req] = running(node, (300, 60))
    node.step()
    node.retract(req)
    pull, parked = req.pull, weakref.ref(req.kv.retraction_backup.cpu_tensors)
    node.retracted.clear()
    req.kv.cycle = req.kv
    boxes = [req]
    del req

    def collect() -> None:
        with pull.lock, node.cache._lock:
            boxes.clear()
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive() and parked() is None, "deadlock"
    node.loop()
    node.at_baseline()


def test_no_leak_is_reported_while_sglang_keeps_a_retracted_request(nodes):
    node = nodes()
    req, other = running(node, (300, 60), (300, 5))
    node.step()
    node.retract(req)
    while other not in node.ended:
        node.loop(resume=False)
    assert node.coordinator.leaks == 0
    node.run(req)
    node.at_baseline()


# -- ends, warm-up requests, figures ----------------------------------------------------------------------------------


def test_warm_up_requests_need_nothing_and_are_no_leak(nodes):
    """SGLang's health requests have no prompt in a tier; they run over the padding page."""
    node = nodes()
    [req] = running(node, (300, 4))
    warm = Req("warm", np.arange(5), 3, None, torch.zeros(0), 0)
    node._take_row(warm)
    node.coordinator.admit_request_direct(warm)
    assert not warm.hisparse_staging and not node.coordinator.blocked(warm) and node.coordinator.failure(warm) is None
    c, rows = node.coordinator, torch.tensor([warm.kv.req_pool_idx])
    for length in (6, 7):
        at = torch.tensor([length])
        ids = node.allocator.alloc_decode(at, at, node.rows.req_to_token[rows, at - 2].long())
        node.rows.write((rows, at - 1), ids.int())
        warm.kv.kv_allocated_len = length
        c.map_last_loc_to_buffer(at, ids, rows, at, rows)
        assert 0 <= int(c.mapping[ids]) < node.page and c.begin_step(rows.numpy(), at.numpy()).tolist() == [1] and not c.table.table[rows].any()
        c.end_step()
    node.run(req)
    assert c.leaks == 0
    node.end(warm, "length")
    node.at_baseline()


def test_ends_are_idempotent_and_harmless_for_requests_that_were_never_admitted(nodes):
    node = nodes()
    c, never = node.coordinator, Req("never", np.arange(20), 3, None, torch.zeros(0), 0)
    c.request_finished(never)
    node._take_row(never)
    c.request_finished(never)
    node._give_row(never)
    [req] = running(node, (300, 60))
    entry = c.entries[req.kv.req_pool_idx]
    node.step()
    c.request_finished(req), c.request_finished(req), c._release(entry)
    node.batch.reqs.clear()
    node._give_row(req)
    node.at_baseline()


def test_nothing_freed_twice_when_sglang_frees_the_logical_ids(nodes):
    """The mapping of every id of a request is zero before SGLang frees the ids, or its pages would be freed with them."""
    node = nodes()
    req, other = running(node, (300, 40), (100, 60))
    for _ in range(35):
        node.step()
    ids = node.rows.req_to_token[req.kv.req_pool_idx, : req.length].long()
    assert (node.coordinator.mapping[ids] > 0).sum() == 35
    node.coordinator.request_finished(req)
    assert not node.coordinator.mapping[ids].any()
    node.batch.reqs.remove(req)
    node._give_row(req)
    node.check_pages()
    node.run(other)
    node.at_baseline()


def test_figures_follow_what_is_held(nodes):
    node = nodes(pages=40)
    [req] = running(node, (300, 40))
    c = node.coordinator
    stats, report = c.get_token_stats(), c.report()
    assert (stats.device_tokens, stats.device_token_usage) == (8 * 16, 8 / 40)
    assert stats.host_tokens == 6 * 16 and stats.host_token_usage == 24 / node.cache.capacity
    assert report["held"] == {"pages": 8, "mapped": 0, "sets": 1, "waiting": 0, "parked_pages": 0, "lane_tokens": 0, "blocks": 18, "cache_pinned": 0}
    assert json.loads(json.dumps(report)) == report and report["live"] == 1 and report["logical_tokens"] == 304
    node.run(req)
    assert (report := c.report())["physical_tokens_peak"] == 8 * 16 and report["batch_peak"] == 1 and report["host_cache"]["peak_bytes"] > 0
    assert node.allocator.available_size() == c.logical.size and c.padded_buffer_size == 16 and c.host_token_len(7) == 7
    assert not c.has_ongoing_staging() and c.collect_ready_reqs() == [] and c.wait_for_pending_backup() is None
    node.at_baseline()


def test_a_forward_before_anything_is_bound_reads_one_padding_token(nodes):
    node = nodes()
    runner = SimpleNamespace(token_to_kv_pool=node.pool, token_to_kv_pool_allocator=node.allocator, req_to_token_pool=node.rows)
    fresh = Coordinator(runner, make_budget(16, 96, 16, 32, 32, False))
    assert fresh.begin_step(np.array([1, 2]), np.array([9, 30])).tolist() == [1, 1]
    fresh.tap(0, torch.zeros(2, 32), None, None, None)
    fresh.end_step()
