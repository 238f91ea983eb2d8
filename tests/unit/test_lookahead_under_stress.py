"""The lookahead at its edges: pieces that land while a plan is made, full caches and lanes, counters that must add up."""

from __future__ import annotations

import numpy as np
import pytest
from test_lookahead import accepting, row_queries
from test_stepper import aimed, landed, pointed

from decode_node import coordinator as coordinating


def test_a_piece_that_lands_while_a_plan_is_made_is_not_pulled_twice(nodes):
    """It lands after the plan has looked at the host cache, and before it looks at what flies."""
    node = nodes(pages=80)
    req = pointed(node, 400)
    node.admit(req)
    wanted = aimed(node, req)
    row_queries(node, {(req, 0): wanted})
    asked, pull = [], node.stepper.lookahead.pull
    node.stepper.lookahead.pull = lambda entry, pieces, blocks: (asked.extend(zip(pieces.tolist(), blocks.tolist())), pull(entry, pieces, blocks))
    node.faults.hold = True
    node.step()
    assert asked
    held = node.cache.held

    def late(numbers):
        seen = held(numbers)
        node.land()
        landed(node, req)
        return seen

    node.cache.held = late
    node.step()
    node.cache.held = held
    assert len(asked) == len(set(asked)), "pulled twice"
    node.run(req)
    node.at_baseline()


@pytest.mark.parametrize("draft", [4, 8, 12, 16])
def test_a_full_lane_ends_one_request_and_not_the_scheduler(nodes, monkeypatch, draft):
    monkeypatch.setattr(coordinating, "GENERATED_TOKENS", 64)
    node = nodes(critical=(1, 2), draft=draft, lane_pages=20 + 4, pages=60, context=2048)
    accepting(node, draft)
    req = node.arrive(320, 400)
    node.admit(req)
    while req not in node.ended:
        node.loop()
    assert "lane_tokens" in req.finished_reason.message
    node.at_baseline()


def test_a_generated_block_that_could_not_be_kept_is_not_pulled_from_a_tier(nodes, monkeypatch):
    """One pinned recent block and a page of tokens per step: the step after the one that could not keep it may want it again."""
    monkeypatch.setattr(coordinating, "GENERATED_TOKENS", 16)
    node = nodes(draft=16, recent=1, pages=60, context=2048, budget=4)
    accepting(node, 16)
    req = node.arrive(320, 400)
    node.admit(req)
    node.cache.reserve(left := node.cache.capacity - node.cache._reserved)
    entry = node.coordinator.entries[req.kv.req_pool_idx]
    row_queries(node, {})
    point = node.queries

    def queries(reqs):
        if entry.error is not None:
            lost = 20 + np.flatnonzero(~node.cache.held(entry.numbers[20:]).any(0))[0]
            row_queries(node, {(req, row): [int(lost)] * node.layout.pieces for row in range(16)})
            chosen, node.queries = node.queries, queries
            return chosen(reqs) if (node.sets.slot_of[entry.set, :, lost] < 0).any() else point(reqs)
        return point(reqs)

    node.queries = queries
    while req not in node.ended:
        node.loop()
    node.cache.unreserve(left)
    node.at_baseline()


def test_all_that_was_fetched_was_used_or_wasted_when_the_cache_evicts(nodes):
    node = nodes(pages=80, cache=4 * 6 + 4 * 6, cap=0)
    reqs = [node.arrive(400, 30), node.arrive(330, 30)]
    node.admit(*reqs)
    node.run(*reqs)
    totals = node.stepper.totals
    assert node.cache.evicted > 0
    assert totals["fetched"] == totals["fetched_used"] + totals["fetched_wasted"]


@pytest.mark.parametrize("seed", range(12))
def test_requests_come_wait_retract_and_end_in_any_order(nodes, seed):
    rng = np.random.default_rng(seed)
    draft = [0, 4, 16, 3][seed % 4]
    node = nodes(seed=seed, draft=draft, critical=(1, 2) if seed // 2 % 2 else (), pages=70, cap=2, wait=bool(seed % 3), wait_seconds=0.2, lane_pages=120, rows=5,
                 admission="full" if seed % 4 == 3 else "selected", warmup=3, ahead=9)
    settle, end, step, skip = node.stepper.settle, node._end_complete, node.step, [False, False]

    def settling():  # as SGLang: nothing settles at the end of a step
        if skip[1]:
            skip[1] = False
            return
        settle()

    def ending():
        end()
        skip[1] = skip[0]

    def stepping():
        skip[0] = True
        step()
        skip[:] = [False, False]

    node.stepper.settle, node._end_complete, node.step = settling, ending, stepping
    for _ in range(150):
        if len(node.live()) < 5 and rng.random() < 0.3:
            node.arrive(int(rng.choice([5, 16, 15, 17, 64, 320, 333, 400])), int(rng.integers(1, 60)),
                        rng.choice([None, {"oasis": {"mode": "exact"}}, {"oasis": {"budget_tokens": 64}}]))
        node.faults.hold = rng.random() < 0.3
        if not node.faults.hold:
            node.faults.finish()
        if node.live() and rng.random() < 0.05:
            node.abort(node.live()[rng.integers(len(node.live()))])
        if node.batch.reqs and rng.random() < 0.05:
            node.retract(node.batch.reqs[0])
        node.loop(resume=rng.random() < 0.5)
    node.faults.hold = False
    node.faults.finish()
    node.run(*node.live())
    totals = node.stepper.totals
    node.at_baseline()
    assert totals["fetched"] == totals["fetched_used"] + totals["fetched_wasted"]
    assert totals["misses"] <= totals["wanted"] and (node.stepper.lookahead.heads["missed_mass"] <= totals["request_steps"] + 1e-3).all()
