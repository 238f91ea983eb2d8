"""Requests on a node with a dense lane: what is pulled into it, who waits for it, and that it always holds all of K and V."""

from __future__ import annotations

import pytest
from node_rig import until

CRITICAL = (1, 2)  # of four (layer, KV head)s, in two layers


@pytest.mark.parametrize("draft, seed", [(0, 0), (0, 1), (4, 2), (5, 3)])
def test_the_lane_holds_every_token_of_its_heads_and_nothing_is_selected_for_them(nodes, draft, seed):
    node = nodes(seed=seed, draft=draft, critical=CRITICAL, pages=90, cap=2)
    reqs = [node.arrive(prompt, 60) for prompt in (330, 16 * 9, 40, 400)]
    node.admit(*reqs)
    node.run(*reqs)
    heads = node.stepper.lookahead.heads
    assert heads["wanted"][[1, 2]].tolist() == heads["misses"][[1, 2]].tolist() == [0, 0] and heads["missed_mass"][[1, 2]].tolist() == [0.0, 0.0]
    assert (heads["misses"][[0, 3]] > 0).all()
    node.at_baseline()
    assert node.lane.used_tokens == 0 and node.lane.peak_tokens > 800


@pytest.mark.parametrize("admission", ["selected", "full"])
def test_admitted_bytes_include_the_whole_prompt_of_critical_heads(nodes, admission):
    node = nodes(critical=CRITICAL, admission=admission)
    req = node.arrive(16 * 20 + 5, 8)
    node.admit(req)
    lay = node.layout
    whole = 20 * 4 if admission == "full" else 20 * len(CRITICAL) + 6 * (4 - len(CRITICAL))
    assert req.pull.admitted_by_phase["pieces"] == whole * lay.piece_bytes
    assert req.pull.admitted_by_phase["partial_page"] == lay.payload_bytes
    cached = (node.cache.slot >= 0).sum(1)
    assert cached.tolist() == ([20, 0, 0, 20] if admission == "full" else [6, 0, 0, 6]), "what the lane holds is not cached as well"
    node.run(req)
    node.at_baseline()


def test_a_critical_head_is_never_pulled_for_again(nodes):
    node = nodes(critical=CRITICAL)
    req = node.arrive(400, 60)
    node.admit(req)
    seen, pull = set(), node.stepper.lookahead.pull
    node.stepper.lookahead.pull = lambda entry, pieces, blocks: (seen.update(pieces.tolist()), pull(entry, pieces, blocks))
    node.run(req)
    assert seen == {0, 3}
    node.at_baseline()


def test_a_retracted_request_finds_its_lane_as_it_was(nodes):
    node = nodes(critical=CRITICAL, draft=3)
    a, b = node.arrive(330, 60), node.arrive(300, 60)
    node.admit(a, b)
    for _ in range(4):
        node.step()
    held = node.lane.used_tokens
    node.retract(a)
    assert node.lane.used_tokens == held
    for _ in range(3):
        node.step()
    node.run(a, b)
    node.at_baseline()


def test_requests_wait_for_room_in_the_lane_in_their_order(nodes):
    node = nodes(critical=CRITICAL, lane_pages=50, pages=60)
    a, b, c = node.arrive(400, 30), node.arrive(400, 30), node.arrive(330, 30)
    for req in (a, b, c):
        node.preallocate(req)
    until(lambda: a.pull.state == "serving", "the first")
    assert [b.pull.state, c.pull.state] == ["ready", "ready"] and len(node.coordinator.waiting) == 2
    node.run(a, b, c)
    node.at_baseline()


def test_a_request_that_no_lane_could_hold_is_refused_with_the_limit(nodes):
    node = nodes(critical=CRITICAL, lane_pages=20)
    req = node.arrive(400, 30)
    assert not node.preallocate(req)
    assert req.error.code == "CapacityError" and "lane_tokens=320" in str(req.error)
    small = node.arrive(100, 8)
    node.admit(small)
    node.run(small)
    node.at_baseline()


def test_a_full_lane_ends_the_request_that_grows_and_no_other(nodes):
    """It was let in for the first 512 generated tokens; others hold the rest when it wants more."""
    node = nodes(critical=CRITICAL, lane_pages=6 + 32 + 30, pages=60, cache=8192)
    long = node.arrive(100, 900)
    node.admit(long)
    other = node.arrive(400, 40)
    node.admit(other)
    entry = node.coordinator.entries[long.kv.req_pool_idx]
    while entry.failure is None:
        node.step()
        if other in node.ended:
            other = node.arrive(400, 40)
            node.admit(other)
    assert "lane_tokens=1088" in str(entry.failure) and long.length - 100 > 480
    node.end(long, "refused")
    node.batch.reqs.remove(long)
    node.run(other)
    node.at_baseline()
