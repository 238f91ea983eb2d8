"""What a request is granted before anything is pulled for it, what is pulled, and what every size of budget, prompt and output leads to."""

from __future__ import annotations

import threading

import pytest
import torch
from node_rig import WAIT, until
from sparse_rig import Node, Req

from decode_node.pull import PULLING, READY
from transport.errors import CapacityError, ConfigError, RoomFailed


def entry_of(node: Node, req: Req):
    return node.coordinator.entries[req.kv.req_pool_idx]


def granted(node: Node, *reqs: Req) -> list[bool]:
    return [entry_of(node, r).pages is not None for r in reqs]


# -- grants ---------------------------------------------------------------------------------------------------------


def test_grants_are_made_in_the_order_of_arrival(nodes):
    """Eight pages each of twenty: the small one behind the third waits with it."""
    node = nodes(pages=20)
    reqs = [node.arrive(300, 20), node.arrive(300, 40), node.arrive(300, 20), node.arrive(20, 5)]
    for req in reqs:
        assert node.preallocate(req)
    assert granted(node, *reqs) == [True, True, False, False] and [e.rid for e in node.coordinator.waiting] == ["r3", "r4"]
    assert reqs[2].pull.state == reqs[3].pull.state == READY and node.coordinator.held()["waiting"] == 2
    node.run(reqs[0])
    assert granted(node, *reqs[1:]) == [True, True, True] and not node.coordinator.waiting
    node.run(*reqs)
    node.at_baseline()


def short_of_pages(node: Node):
    pages = node.coordinator.physical.alloc((node.coordinator.physical.size // node.page - 7) * node.page)
    return lambda: node.coordinator.physical.free(pages)


def short_of_sets(node: Node):
    taken = [node.sets.acquire() for _ in range(node.sets.size)]
    return lambda: [node.sets.release(chosen) for chosen in taken]


def short_of_cache(node: Node):
    room = node.cache.capacity - 4 * node.coordinator.budget.need(300, 40).generated + 1
    assert node.cache.reserve(room)
    return lambda: node.cache.unreserve(room)


@pytest.mark.parametrize("short", [short_of_pages, short_of_sets, short_of_cache])
def test_a_grant_is_all_that_a_request_needs_or_nothing(nodes, short):
    node = nodes()
    enough = short(node)
    before = (node.coordinator.physical.available_size(), node.sets.free, node.cache.reserved_bytes)
    req = node.arrive(300, 40)
    assert node.preallocate(req) and granted(node, req) == [False] and entry_of(node, req).set is None
    assert (node.coordinator.physical.available_size(), node.sets.free, node.cache.reserved_bytes) == before
    enough()
    node.coordinator._grant()
    entry = entry_of(node, req)
    assert (len(entry.pages), node.cache.reserved_bytes // node.layout.piece_bytes) == (8, 4 * entry.need.generated) and entry.set is not None
    node.run(req)
    node.at_baseline()


def test_waiting_is_refused_where_steps_overlap(nodes):
    node = nodes()
    node.coordinator.overlap = True
    req = node.arrive(300, 40, {"oasis": {"on_miss": "wait"}})
    assert not node.preallocate(req)
    assert isinstance(req.error, ConfigError) and "--disable-overlap-schedule" in str(req.error)
    node.at_baseline()


@pytest.mark.parametrize("how", ["aborted", "failed"])
def test_a_request_that_ends_while_it_waits_lets_the_next_one_through(nodes, how):
    node = nodes(pages=10)
    first, second, third = node.arrive(300, 20), node.arrive(300, 20), node.arrive(20, 5)
    for req in (first, second, third):
        node.preallocate(req)
    assert granted(node, first, second, third) == [True, False, False]
    if how == "aborted":
        assert node.abort(second) == "waiting"
    else:
        node.puller._post(node.puller._give_up, second.pull, RoomFailed("gone", room=2))
        until(lambda: second.pull.state == "failed")
        node.pop_transferred()
    assert second in node.ended and granted(node, third) == [True] and granted(node, first) == [True]
    node.run(first, third)
    node.at_baseline()


@pytest.mark.parametrize("what, windows", [("index", 1), ("pieces and the partial page", 4)])
def test_a_request_may_end_while_it_is_read(nodes, what, windows):
    """What lands late goes nowhere, though the next request has the same set, row and pages. SGLang tells the coordinator
    before it tells the receiver."""
    node = nodes(pages=8)
    req, after = node.arrive(300, 20), node.arrive(300, 5)
    node.faults.hold = True
    node.preallocate(req)
    if what != "index":
        until(lambda: node.faults.in_flight == 1)
        node.faults.finish()
    until(lambda: node.faults.in_flight == windows, what)
    entry = entry_of(node, req)
    assert req.pull.state == PULLING
    node.transfer.remove(req)
    node.end(req, "failed")
    node.preallocate(after)
    assert (entry_of(node, after).set, entry_of(node, after).row) == (entry.set, entry.row) and entry.pages is None
    raw, kv = node.sets.raw.clone(), node.pool.kv.clone()
    node.faults.finish(windows)
    until(lambda: not any(flight.job.pull is req.pull for flight in node.puller.reader.flights))
    assert torch.equal(node.sets.raw, raw) and torch.equal(node.pool.kv, kv) and not node.cache.used_bytes
    assert req.pull.cancelled
    node.land()
    node.run(after)
    assert node.handed == {2: 1}
    node.at_baseline()


@pytest.mark.parametrize("serving", [False, True])
def test_nothing_lands_once_the_coordinator_was_told_of_the_end(nodes, serving):
    """In the middle of a turn of the puller, which hears of it at its next: the pages have an owner again by then."""
    node = nodes(pages=8)
    req, after = node.arrive(400, 20), node.arrive(400, 5)
    if serving:
        node.admit(req)
    node.faults.hold = True
    node.step() if serving else node.preallocate(req)
    until(lambda: node.faults.in_flight == 1)
    if not serving:
        node.faults.finish()  # the index; pieces follow
        until(lambda: node.faults.in_flight == 3)
    reader, reached, ended = node.puller.reader, threading.Event(), threading.Event()
    step = reader.step

    def turn(now: float) -> None:
        reader.step = step
        reached.set()
        assert ended.wait(WAIT)
        node.faults.finish(3 - 2 * serving)
        step(now)

    reader.step = turn
    assert reached.wait(WAIT)
    (node.batch.reqs if serving else node.transfer).remove(req)
    node.end(req, "failed")
    assert node.preallocate(after) and entry_of(node, after).set == 0
    kv, raw = node.pool.kv.clone(), node.sets.raw.clone()
    ended.set()
    until(lambda: not any(flight.job.pull is req.pull for flight in reader.flights))
    assert torch.equal(node.pool.kv, kv) and torch.equal(node.sets.raw, raw) and not node.cache.used_bytes
    node.land()
    node.run(after)
    node.at_baseline()


@pytest.mark.parametrize("prompt, custom", [(200, {"oasis": {"mode": "exact"}}), (16 * 12, {"oasis": {"mode": "exact"}})])
def test_a_request_larger_than_the_pool_is_refused_by_its_limit(nodes, prompt, custom):
    node = nodes(pages=12)
    req = node.arrive(prompt, 20, custom)
    assert not node.preallocate(req)
    assert isinstance(req.error, CapacityError) and req.error.room == 1
    assert req.error.limit == f"{12 * 16} tokens, it needs {-(-(prompt + 20) // 16) * 16}"
    fits = node.arrive(172, 20, custom)
    node.run(fits)
    node.at_baseline()


def test_a_request_that_may_generate_more_than_the_host_cache_holds_is_refused_by_its_limit(nodes):
    node = nodes(cache=24)
    req = node.arrive(300, 100)
    assert not node.preallocate(req)
    assert isinstance(req.error, CapacityError) and req.error.limit == f"host_cache_bytes={24 * node.layout.piece_bytes}" and req.error.room == 1
    fits = node.arrive(300, 84)  # 18 whole blocks of 24
    node.run(fits)
    node.at_baseline()


@pytest.mark.parametrize("oasis, option", [
    ({"mode": "dense"}, "mode"), ({"mode": ["sparse"]}, "mode"), ({"on_miss": "later"}, "on_miss"), ({"on_miss": True}, "on_miss"),
    ({"budget_tokens": 63}, "budget_tokens"), ({"budget_tokens": 97}, "budget_tokens"), ({"budget_tokens": "64"}, "budget_tokens"),
    ({"budget_tokens": True}, "budget_tokens"), ({"budget_tokens": 64.0}, "budget_tokens"), ({"tail_tokens": 32}, "tail_tokens"),
    ({"mode": "sparse", 3: 4}, "3"), ([1], "oasis"), ("exact", "oasis"), (7, "oasis"),
])
def test_wrong_options_of_a_request_are_refused_by_name(nodes, oasis, option):
    node = nodes()
    req = node.arrive(300, 20, {"oasis": oasis})
    assert not node.preallocate(req)
    assert isinstance(req.error, ConfigError) and option in str(req.error)
    node.at_baseline()


@pytest.mark.parametrize("custom", [None, {}, {"oasis": None}, {"oasis": {}}, {"other": 1}, "text", [1]])
def test_custom_params_of_others_are_none_of_our_business(nodes, custom):
    node = nodes()
    req = node.arrive(300, 3, custom)
    assert node.preallocate(req) and entry_of(node, req).budget == node.coordinator.budget
    node.run(req)
    node.at_baseline()


def test_options_of_a_request_are_its_own(nodes):
    node = nodes(pages=60)
    reqs = [node.arrive(300, 20, {"oasis": o}) for o in ({"budget_tokens": 79}, {"budget_tokens": 64}, {"mode": "exact"}, {"on_miss": "wait"}, {})]
    for req in reqs:
        assert node.preallocate(req)
    entries = [entry_of(node, r) for r in reqs]
    assert [e.need.pages for e in entries] == [6, 6, 20, 8, 8] and [e.wait for e in entries] == [False, False, False, True, False]
    assert [e.set is None for e in entries] == [False, False, True, False, False]
    node.run(*reqs)
    node.at_baseline()


def test_parked_pages_are_not_given_away(nodes):
    node = nodes(pages=17)
    a, b = node.arrive(300, 30), node.arrive(300, 8)
    node.admit(a, b)
    node.step()
    node.retract(a)
    late = node.arrive(16 * 2, 5)  # three pages; nine are free, eight of them are parked
    node.preallocate(late)
    assert granted(node, late) == [False] and node.coordinator.physical.available_size() == 9 * 16
    node.resume(a)
    assert granted(node, late) == [False] and node.coordinator.parked_pages == 0
    node.run(a, b, late)
    node.at_baseline()


# -- what is pulled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selecting", [True, False])
def test_a_prompt_of_another_length_than_was_committed_fails(nodes, selecting):
    node = nodes()
    req = node.arrive(300 if selecting else 40, 20)
    req.origin_input_ids, req.length = req.origin_input_ids[:-16], req.length - 16
    node.preallocate(req)
    until(lambda: req.pull.state == "failed")
    assert isinstance(req.pull.error, RoomFailed) and "disagree" in str(req.pull.error)
    node.loop()
    assert req in node.ended
    node.at_baseline()


@pytest.mark.parametrize("admission", ["selected", "full"])
@pytest.mark.parametrize("prompt", [300, 16 * 18, 16 * 3 + 1, 5])
def test_every_byte_of_an_admission_is_accounted_for(nodes, admission, prompt):
    node = nodes(admission=admission)
    lay, req = node.layout, node.arrive(prompt, 140)
    node.admit(req)
    whole, entry = prompt // 16, entry_of(node, req)
    pulled = whole if admission == "full" else min(whole, 6)
    phases = req.pull.bytes_by_phase
    assert phases["summaries"] == whole * lay.index_bytes and phases["pieces"] == pulled * lay.payload_bytes
    assert phases["partial_page"] == (lay.payload_bytes if prompt % 16 else 0) and not phases["records"] and not phases["on_demand"]
    assert node.cache.scan()["used"] == pulled * lay.pieces and not node.sets.flying[entry.set].any()
    assert node.handed == {1: 1} and req.pull.state == "serving"
    node.run(req)
    node.at_baseline()


def test_the_first_working_set_is_what_prefill_ranked_and_what_is_pinned(nodes):
    node = nodes()
    req = node.arrive(16 * 20 + 5, 40)
    node.admit(req)
    rows = node.sets.block_at[entry_of(node, req).set].tolist()
    for piece, row in enumerate(rows):
        best = [b for b in req.pull.ranking[piece].tolist() if b not in (0, 18, 19)][:3]
        assert row == sorted([0, 18, 19, *best])
    assert len({tuple(row) for row in rows}) > 1
    node.run(req)
    node.at_baseline()


def test_pieces_that_do_not_fit_the_host_cache_are_admitted_all_the_same(nodes):
    """All of the cache is promised to what others generate: the slots are filled, and the cache keeps nothing."""
    node = nodes(cache=24)
    assert node.cache.reserve(12)
    req = node.arrive(300, 33)  # three generated blocks, twelve pieces
    node.admit(req)
    assert node.cache.scan()["used"] == 0 and node.cache.uncached == 24
    node.run(req)
    assert not node.stepper.totals["swaps_committed"] and node.stepper.totals["folds"]
    node.cache.unreserve(12)
    node.at_baseline()


# -- sizes ------------------------------------------------------------------------------------------------------------

W, T = 6, 2
EDGES = [(1, 1), (1, 2), (1, 200), (15, 3), (16, 1), (16, 40), (17, 130), (W * 16 - 1, 60), (W * 16, 60), (W * 16 + 1, 60), ((W + T) * 16, 1),
         ((W + T) * 16 - 1, 1), ((W + T) * 16 - 20, 20), ((W + T) * 16 - 20, 21), ((W + 1) * 16, 16), ((W + 1) * 16, 17), (W * 16 + 15, 2),
         (16 * 20, T * 16), (16 * 20, T * 16 + 1), (16 * 20, T * 16 + 2), (16 * 20 + 1, T * 16), (16 * 20 + 15, 3 * 16), (16 * 21 - 1, 4)]


@pytest.mark.parametrize("custom", [None, {"oasis": {"budget_tokens": 64}}], ids=["", "smaller"])
def test_prompts_and_outputs_around_every_boundary(nodes, custom):
    node = nodes(pages=90, rows=12, running=12)
    for start in range(0, len(EDGES), 8):
        reqs = [node.arrive(prompt, new, custom) for prompt, new in EDGES[start : start + 8]]
        node.run(*reqs)
        for req in reqs:
            assert req.finished_reason == "length" and req.length == len(req.origin_input_ids) + req.sampling_params.max_new_tokens - 1
    node.at_baseline()


@pytest.mark.parametrize("prompt, new, selecting", [((W + T) * 16 - 20, 20, False), ((W + T) * 16 - 20, 21, True)])
def test_one_token_decides_whether_a_request_selects(nodes, prompt, new, selecting):
    node = nodes()
    req = node.arrive(prompt, new)
    node.admit(req)
    entry = entry_of(node, req)
    assert (entry.need.selecting, entry.set is not None, len(entry.pages)) == (selecting, selecting, W + T)
    assert node.puller.totals["bytes_records" if not selecting else "bytes_pieces"] == 6 * node.layout.payload_bytes
    node.run(req)
    node.at_baseline()


def test_a_request_that_does_not_select_gives_its_lease_back_at_once(nodes):
    node = nodes()
    req = node.arrive(100, 20)
    node.admit(req)
    until(lambda: node.world.tier.inventory()["leases"] == 0)
    assert req.pull.state == "done"
    node.run(req)
    node.at_baseline()


@pytest.mark.parametrize("page, dtype, kv_heads, group, head_dim", [
    (16, "bfloat16", 3, 1, 16), (32, "float32", 1, 9, 8), (32, "float16", 2, 3, 8), (64, "bfloat16", 2, 4, 16), (64, "float32", 3, 2, 4)])
def test_page_sizes_dtypes_and_head_groups(nodes, page, dtype, kv_heads, group, head_dim):
    node = nodes(page=page, dtype=dtype, kv_heads=kv_heads, group=group, head_dim=head_dim, context=4096, pages=40, prefill_pages=24)
    reqs = [node.arrive(page * 20 + 7, page * 3), node.arrive(page * 12, page * 2 + 3), node.arrive(page - 1, 5)]
    node.run(*reqs)
    assert node.stepper.totals["swaps_committed"] > 20 and node.stepper.totals["folds"] >= 1
    node.at_baseline()


def test_the_smallest_working_set_has_one_block_to_choose(nodes):
    node = nodes(budget=4, sink=1, recent=2, tail=2)
    req = node.arrive(16 * 15 + 3, 150)
    node.run(req)
    assert node.stepper.totals["folds"] > 5 and node.stepper.totals["swaps_committed"]
    node.at_baseline()


@pytest.mark.parametrize("sink, recent", [(1, 1), (3, 2), (1, 4)])
def test_other_numbers_of_pinned_blocks(nodes, sink, recent):
    node = nodes(sink=sink, recent=recent)
    req = node.arrive(16 * 15 + 3, 120)
    node.run(req)
    assert node.stepper.totals["folds"] > 3
    node.at_baseline()


def test_a_request_may_grow_to_the_longest_context(nodes):
    node = nodes(context=400, pages=30)
    req = node.arrive(300, 200)
    node.admit(req)
    assert entry_of(node, req).need.generated == 25 - 18
    req.sampling_params.max_new_tokens = 100  # as SGLang cuts it
    node.run(req)
    assert req.length == 399
    node.at_baseline()
