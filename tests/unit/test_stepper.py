"""Around a forward: what is scored, what is pulled, what is committed when, what folds. Every step is compared with the true K and V."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from node_rig import until
from sparse_rig import Node, Req

from transport.errors import IntegrityError


def pointed(node: Node, prompt: int, new: int = 60, custom: object = None) -> Req:
    """A request whose blocks have keys around one direction each, so that a query can ask for a block."""
    blocks = -(-prompt // node.page)
    centre = torch.nn.functional.normalize(node.random(node.layout.pieces, blocks, 1, node.layout.head_dim), dim=-1) * 3
    keys = (centre + 0.05 * node.random(node.layout.pieces, blocks, node.page, node.layout.head_dim)).reshape(node.layout.pieces, -1, node.layout.head_dim)
    return node.arrive(prompt, new, custom, keys[:, :prompt])


def ask_for(node: Node, wanted: dict[Req, list[int]]) -> None:
    """From now on the queries of a request point to block ``wanted[req][piece]`` in each (layer, KV head)."""
    lay, group = node.layout, node.query_heads // node.layout.kv_heads

    def queries(reqs: list[Req]) -> torch.Tensor:
        out = torch.zeros(lay.num_layers, len(reqs), lay.kv_heads, group, lay.head_dim, dtype=node.dtype)
        for i, req in enumerate(reqs):
            for piece, block in enumerate(wanted[req]):
                mean = req.truth[piece, 0, block * node.page : (block + 1) * node.page].float().mean(0)
                out[piece // lay.kv_heads, i, piece % lay.kv_heads] = 8 * mean
        return out.view(lay.num_layers, len(reqs), -1)

    node.queries = queries


def resident(node: Node, req: Req) -> list[set[int]]:
    entry = node.coordinator.entries[req.kv.req_pool_idx]
    return [{b for b in row if b >= 0} for row in node.sets.block_at[entry.set].tolist()]


def aimed(node: Node, req: Req) -> list[int]:
    """For each piece a block of the prompt that is not resident there, another one each."""
    out: list[int] = []
    for held in resident(node, req):
        out.append(next(b for b in range(len(req.origin_input_ids) // node.page) if b not in held and b not in out))
    return out


def landed(node: Node, req: Req) -> None:
    entry = node.coordinator.entries[req.kv.req_pool_idx]
    until(lambda: not node.sets.flying[entry.set].any(), "what was asked for has landed")


# -- what is wanted comes -------------------------------------------------------------------------------------------


def test_each_head_of_each_request_gets_the_block_that_its_own_queries_ask_for(nodes):
    """Two requests, eight (layer, KV head)s, another block each; a third request in between selects nothing."""
    node = nodes(layers=4, pages=80)
    a, full, b = pointed(node, 330), pointed(node, 40), pointed(node, 400)
    node.admit(a, full, b)
    wanted = {a: aimed(node, a), b: aimed(node, b)[::-1], full: [0] * 8}
    for req in (a, b):
        wanted[req] = [w if w not in held else next(x for x in range(20) if x not in held) for w, held in zip(wanted[req], resident(node, req))]
    ask_for(node, wanted)
    node.step()
    for req in (a, b):
        entry = node.coordinator.entries[req.kv.req_pool_idx]
        landed(node, req)
        swaps = list(zip(entry.swaps.pieces.tolist(), entry.swaps.blocks.tolist()))
        assert all((piece, block) in swaps for piece, block in enumerate(wanted[req]))
    node.step()
    for req in (a, b):
        assert all(block in held for block, held in zip(wanted[req], resident(node, req)))
    node.run(a, full, b)
    node.at_baseline()


@pytest.mark.parametrize("cap", [0, 1, 2])
def test_no_more_is_pulled_per_step_than_the_cap_on_average_over_the_heads(nodes, cap):
    node = nodes(cap=cap, windows=2)
    req = node.arrive(500, 60)
    node.admit(req)
    demands: list[np.ndarray] = []
    pull = node.stepper.lookahead.pull
    node.stepper.lookahead.pull = lambda entry, pieces, blocks: (demands.append(np.bincount(pieces, minlength=4)), pull(entry, pieces, blocks))
    for _ in range(20):
        node.step()
        landed(node, req)
    most = max(d.sum() for d in demands)
    assert most == cap * 4 or cap == 0 and most > 2 * 4
    assert cap != 2 or max(d.max() for d in demands) > 2, "heads share what is left of the cap"
    assert node.stepper.totals["fetched"] == sum(d.sum() for d in demands) == node.puller.totals["demanded_items"]
    node.run(req)
    node.at_baseline()


def test_a_piece_crosses_the_wire_once_however_often_it_comes_and_goes(nodes):
    node = nodes()
    req = node.arrive(330, 60)
    node.admit(req)
    for _ in range(45):
        node.step()
        landed(node, req)
    totals = node.stepper.totals
    assert totals["swaps_committed"] > 2 * totals["fetched"] and totals["fetched"] <= 4 * (20 - 6)
    assert node.puller.totals["bytes_on_demand"] == totals["fetched"] * node.layout.piece_bytes
    node.run(req)
    node.at_baseline()


def test_a_full_budget_is_read_in_the_order_of_positions_and_nothing_is_scored_or_pulled(nodes):
    node = nodes(budget=24, pages=60)
    req = node.arrive(16 * 20 + 3, 200)
    node.admit(req)
    entry = node.coordinator.entries[req.kv.req_pool_idx]
    assert entry.set is not None
    while int(node.sets.blocks[entry.set]) < 24:  # it grows into its budget
        node.step()
        blocks = int(node.sets.blocks[entry.set])
        assert node.sets.block_at[entry.set, :, :blocks].tolist() == [list(range(blocks))] * 4
        assert int(node.table.lengths(np.array([entry.row]), np.array([req.length]))[0]) == req.length
    assert not node.stepper.totals["steps"] and not node.puller.totals["demands"] and not node.sets.ema[entry.set].any()
    assert req.pull.bytes_by_phase["pieces"] == 20 * node.layout.payload_bytes
    node.run(req)
    assert node.stepper.totals["steps"] > 0, "and past its budget it selects"
    node.at_baseline()


def test_queries_that_are_no_numbers_leave_residency_sound(nodes):
    node = nodes()
    req = node.arrive(400, 60)
    node.admit(req)
    usual = node.queries
    for value in (float("nan"), float("inf"), -float("inf"), 1e30):
        node.queries = lambda reqs, value=value: usual(reqs).fill_(value)
        node.step(), node.step()
    node.queries = usual
    node.run(req)
    assert node.stepper.totals["folds"] > 1
    node.at_baseline()


# -- late pieces ----------------------------------------------------------------------------------------------------


def test_a_swap_whose_piece_is_not_there_is_left_out_and_the_others_are_carried_out(nodes):
    node = nodes()
    req = pointed(node, 400)
    node.admit(req)
    entry = node.coordinator.entries[req.kv.req_pool_idx]
    first = aimed(node, req)
    ask_for(node, {req: first})
    node.step()
    landed(node, req)
    node.step()  # the first ones are in
    node.faults.hold = True
    before = resident(node, req)
    second = [next(b for b in range(20) if b not in held and b not in first) for held in before]
    ask_for(node, {req: second})
    node.step()
    late = node.stepper.totals["swaps_late"]
    pieces, blocks = entry.swaps.pieces, entry.swaps.blocks
    here = node.cache.held(entry.numbers)[pieces, blocks]
    assert not here.all()
    node.step()
    assert node.stepper.totals["swaps_late"] - late == (~here).sum()
    now = resident(node, req)
    assert all(block not in held for block, held in zip(second, now)) and all(len(held) == 6 for held in now)
    fetched = node.stepper.totals["fetched"]
    node.step()
    assert node.stepper.totals["fetched"] == fetched, "what flies is not asked for twice"
    node.land()
    landed(node, req)
    node.step()
    assert all(block in held for block, held in zip(second, resident(node, req)))
    node.run(req)
    node.at_baseline()


@pytest.mark.parametrize("cache", [24, 40])
def test_pieces_that_a_small_host_cache_dropped_are_read_again(nodes, cache):
    """24 pieces: as many as one working set, and of those 12 are promised to what is generated."""
    node = nodes(cache=cache, pages=20)
    reqs = [node.arrive(400, 40), node.arrive(350, 40)]
    while not all(r in node.ended for r in reqs):
        node.loop()
        until(lambda: not node.puller.reader.flights and not node.puller.reader.ready, "landed")
    assert node.cache.evicted > 50 and node.puller.totals["demanded_items"] > 2 * 4 * 25, "each piece more than once"
    assert node.stepper.totals["swaps_committed"] > 20 and all(r.finished_reason == "length" for r in reqs)
    node.at_baseline()


def test_a_piece_that_lands_broken_is_read_once_more_and_then_ends_its_request_alone(nodes):
    node = nodes()
    bad, good = node.arrive(400, 40), node.arrive(400, 60)
    node.admit(bad, good)
    node.batch.reqs.remove(good)
    node.faults.corrupt = 1
    while not node.puller.totals["read_failures"]:
        node.step()
        landed(node, bad)
    assert bad.pull.state == "serving" and not node.faults.corrupt
    node.faults.corrupt = 1000
    while bad.pull.state == "serving":
        node.step()
        until(lambda: not node.puller.reader.flights and not node.puller.reader.ready)
    node.faults.corrupt = 0
    assert isinstance(bad.pull.error, IntegrityError)
    node.batch.reqs.append(good)
    node.run(bad, good)
    reason = bad.finished_reason
    assert reason.message == f"IntegrityError: {bad.pull.error}" and reason.status_code == 503 and good.finished_reason == "length"
    node.at_baseline()


# -- waiting --------------------------------------------------------------------------------------------------------


def test_a_request_that_waits_is_blocked_until_its_pieces_are_there_and_then_has_them(nodes):
    node = nodes(wait=True)
    req, other = pointed(node, 400), pointed(node, 400, custom={"oasis": {"on_miss": "defer"}})
    node.admit(req, other)
    wanted = {r: aimed(node, r) for r in (req, other)}
    ask_for(node, wanted)
    assert not node.coordinator.blocked(req), "nothing was asked for yet"
    node.faults.hold = True
    node.step()
    assert node.coordinator.blocked(req) and not node.coordinator.blocked(other)
    node.loop()
    assert node.batch.reqs == [other] and node.waiting_queue == [req] and node.stepper.totals["waits"] == 1
    late = node.stepper.totals["swaps_late"]
    node.land()
    landed(node, req)
    landed(node, other)  # it swaps in the same step
    assert not node.coordinator.blocked(req) and node.coordinator.entries[req.kv.req_pool_idx].wait_until == 0
    node.loop()
    assert req in node.batch.reqs and all(block in held for block, held in zip(wanted[req], resident(node, req)))
    assert node.stepper.totals["swaps_late"] == late and not node.stepper.totals["waits_ended_by_bound"]
    node.run(req, other)
    node.at_baseline()


def test_a_wait_ends_at_its_bound(nodes):
    node = nodes(wait=True, wait_seconds=0.1)
    req = node.arrive(400, 10)
    node.admit(req)
    node.faults.hold = True
    node.step()
    began = time.monotonic()
    assert node.coordinator.blocked(req)
    until(lambda: not node.coordinator.blocked(req))
    assert 0.05 < time.monotonic() - began < 5 and node.stepper.totals["waits_ended_by_bound"] == 1
    node.step()
    assert node.stepper.totals["swaps_late"] > 0
    node.land()
    node.run(req)
    node.at_baseline()


def test_nothing_is_waited_for_that_does_not_fly(nodes):
    """What is in the host cache already, and what the cap keeps from being pulled."""
    node = nodes(wait=True, admission="full")
    req = node.arrive(400, 20)
    node.admit(req)
    node.faults.hold = True
    while not node.stepper.totals["misses"]:
        node.step()
    assert len(node.coordinator.entries[req.kv.req_pool_idx].swaps.blocks) and not node.coordinator.blocked(req)
    node.run(req)
    assert not node.puller.totals["demands"] and not node.stepper.totals["waits"] and not node.stepper.totals["swaps_late"]
    node.at_baseline()


# -- folding and the tap --------------------------------------------------------------------------------------------


def test_a_generated_block_leaves_and_comes_back_from_the_host_cache_alone(nodes):
    node = nodes(recent=1, admission="full")
    lay, req = node.layout, pointed(node, 16 * 12, 400)
    ways = torch.nn.functional.normalize(node.random(40, lay.num_layers, 1, 1, lay.kv_heads, lay.head_dim), dim=-1) * 3

    def contents(reqs):
        kv = node._random_contents(reqs) * 0.05
        kv[:, :1] += ways[(req.length - 1) // 16]
        return kv

    node.contents = contents
    node.admit(req)
    ask_for(node, {req: [3] * 4})
    while node.stepper.totals["folds"] < 12:
        node.step()
    gone = [next(b for b in range(12, 24) if b not in held) for held in resident(node, req)]
    ask_for(node, {req: gone})
    node.faults.hold = True
    node.step(), node.step()
    assert all(block in held for block, held in zip(gone, resident(node, req))) and not node.puller.totals["demands"]
    node.run(req)
    node.at_baseline()


@pytest.mark.parametrize("seed", range(3))
def test_of_two_folds_in_one_step_each_goes_to_its_own_request(nodes, seed):
    node = nodes(seed=seed, pages=60)
    reqs = [node.arrive(16 * k, 80) for k in (9, 14, 9, 3)]  # all turn their pages in the same step; the last one grows
    node.admit(*reqs)
    most = 0
    while node.batch.reqs:
        before = node.stepper.totals["folds"]
        node.step()
        most = max(most, node.stepper.totals["folds"] - before)
    assert most == 4 - 1 + (node.coordinator.budget.need(48, 80).selecting)
    node.at_baseline()


def test_a_long_limit_takes_room_as_it_is_used(nodes):
    """Many requests name a limit that they never reach: they are let in, and what they generate is kept as long as there is room."""
    node = nodes(pages=60, cache=4 * (512 // 16) + 4 * 40, rows=2)
    req = node.arrive(100, 900)
    node.admit(req)
    entry = node.coordinator.entries[req.kv.req_pool_idx]
    assert entry.need.generated > 512 // 16 and entry.room == 4 * 512 // 16 == node.cache.reserved_bytes // node.cache.piece_bytes
    while entry.kept < entry.room:
        node.step()
    for _ in range(40):
        node.step()
    assert entry.room == entry.kept > 4 * 512 // 16 and entry.failure is None
    node.end(req, "enough")
    node.at_baseline()


def test_a_host_cache_full_of_generated_blocks_ends_the_request_that_needs_more(nodes):
    node = nodes(pages=60, cache=4 * (512 // 16) + 4 * 3)
    req = node.arrive(100, 1500)
    node.admit(req)
    entry = node.coordinator.entries[req.kv.req_pool_idx]
    while entry.failure is None:
        node.step()
    assert entry.kept == node.cache.capacity - node.cache.capacity % 4 and "host_cache_bytes" in str(entry.failure)
    assert node.coordinator.failure(req) is entry.failure and not node.coordinator.blocked(req)
    node.end(req, "refused")
    node.at_baseline()
