"""What a conversation's next turn, and requests that start alike, need not pull again; and that what they share is the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from node_rig import until
from sparse_rig import Node, Req


def entry_of(node: Node, req: Req):
    return node.coordinator.entries[req.kv.req_pool_idx]


def admitted(node: Node, req: Req) -> dict[str, int]:
    """Items pulled before it ran, by phase."""
    units = {"summaries": node.layout.index_bytes, "pieces": node.layout.piece_bytes, "records": node.layout.payload_bytes,
             "partial_page": node.layout.payload_bytes}
    return {phase: req.pull.admitted_by_phase[phase] // unit for phase, unit in units.items()}


def turns(node: Node, *sizes: tuple[int, int]) -> list[Req]:
    """A conversation: (prompt, answer) of each turn, run to its end."""
    reqs: list[Req] = []
    for prompt, new in sizes:
        reqs.append(node.arrive(prompt, new, after=reqs[-1] if reqs else None))
        node.admit(reqs[-1])
        node.run(reqs[-1])
    return reqs


def test_the_next_turn_pulls_what_this_node_never_had(nodes):
    """A cache for everything, and admission=full: all of the first turn is here."""
    node = nodes(keep=True, admission="full", pages=80, budget=8)
    first, second = turns(node, (400, 60), (500, 40))
    assert admitted(node, first) == {"summaries": 25, "pieces": 25 * 4, "records": 0, "partial_page": 0}
    # 400 + 60 tokens, the last of which nothing was computed from: 28 whole blocks, 3 of them generated here. The tier's
    # index of those has to be pulled, for the day that their pieces have to go.
    assert admitted(node, second) == {"summaries": 31 - 25, "pieces": (31 - 28) * 4, "records": 0, "partial_page": 1}
    totals = node.coordinator.reuse.totals
    assert totals["hit_tokens"] == 28 * 16 and totals["prompt_tokens"] == 900 and totals["pieces"] == 28 * 4
    assert totals["bytes_saved"] == 28 * 4 * node.layout.piece_bytes + 25 * node.layout.index_bytes
    node.at_baseline()


@pytest.mark.parametrize("draft", [0, 4])
def test_thirteen_turns_are_what_they_are_without_reuse(nodes, draft):
    """The rig compares every byte that attention reads with the truth, in every step."""
    sizes = [(420, 20)]
    while len(sizes) < 13:
        sizes.append((sum(sizes[-1]) + 9, 20))
    node = nodes(keep=True, pages=60, budget=8, cap=2, context=1024, draft=draft)
    reqs = turns(node, *sizes)
    whole = sum(r.pull.manifest.prompt_tokens // 16 for r in reqs)
    assert sum(admitted(node, r)["summaries"] for r in reqs) < whole / 4
    assert sum(admitted(node, r)["pieces"] for r in reqs[1:]) < 12 * 8 * 4 / 2
    node.at_baseline()


def test_without_the_flag_nothing_outlives_a_request(nodes):
    node = nodes(pages=80, budget=8, admission="full")
    first, second = turns(node, (400, 60), (500, 40))
    assert admitted(node, second)["pieces"] == 31 * 4 and node.cache.used_bytes == 0
    node.at_baseline()


def test_a_request_that_holds_all_its_blocks_takes_and_leaves_them_too(nodes):
    node = nodes(keep=True, pages=80, budget=20)
    small, again, large = turns(node, (100, 30), (180, 20), (420, 20))
    assert entry_of_kind(small) == entry_of_kind(again) == "records" and entry_of_kind(large) == "pieces"
    assert admitted(node, small)["records"] == 6 and admitted(node, again)["records"] == 11 - 8
    assert admitted(node, large)["summaries"] == 26, "whole records carry no index"
    assert admitted(node, large)["pieces"] < 20 * 4
    node.at_baseline()


def entry_of_kind(req: Req) -> str:
    return "pieces" if req.pull.bytes_by_phase["summaries"] else "records"


def test_critical_heads_cross_the_wire_once(nodes):
    node = nodes(keep=True, critical=(1, 2), pages=80, budget=8)
    first, second = turns(node, (400, 60), (500, 40))
    assert admitted(node, first)["pieces"] == 25 * 2 + 8 * 2
    assert admitted(node, second)["pieces"] <= (31 - 28) * 2 + 8 * 2
    assert node.coordinator.reuse.totals["pieces"] >= 28 * 2
    node.at_baseline()


def test_tenants_share_nothing(nodes):
    node = nodes(keep=True, admission="full", pages=80, budget=8)
    ours = node.arrive(400, 20)
    node.admit(ours)
    node.run(ours)
    for seed in (b"other" * 6 + b"..", None):
        theirs = node.arrive(400, 20, after=ours, seed=seed)
        node.admit(theirs)
        assert admitted(node, theirs)["pieces"] == 25 * 4 and not node.coordinator.reuse.totals["hit_tokens"]
        node.run(theirs)
    node.at_baseline()


def test_requests_that_start_alike_and_together_pull_their_prefix_once(nodes):
    node = nodes(keep=True, admission="full", pages=80, budget=8)
    first = node.arrive(400, 20)
    others = [node.arrive(400 + 20 * n, 20, after=first) for n in (1, 2)]
    node.faults.hold = True
    for req in (first, *others):
        assert node.preallocate(req)
    assert [e.rid for e in node.coordinator.crowded] == [r.rid for r in others]
    stranger = node.arrive(300, 20)
    assert node.preallocate(stranger)
    until(lambda: stranger.pull.state == "pulling", "only those that share wait")
    until(lambda: node.puller.reader.flights, "reads")
    node.land()
    node.run(first, *others, stranger)
    assert [admitted(node, r)["pieces"] for r in others] == [(26 - 25) * 4, (27 - 25) * 4]
    node.at_baseline()


def test_one_that_waits_for_another_goes_on_by_itself_when_that_one_fails(nodes):
    node = nodes(keep=True, admission="full", pages=80, budget=8)
    first = node.arrive(400, 20)
    second = node.arrive(420, 20, after=first)
    node.faults.hold = True
    assert node.preallocate(first) and node.preallocate(second) and node.coordinator.crowded
    node.abort(first)
    node.faults.hold = False
    node.run(second)
    assert admitted(node, second)["pieces"] == 26 * 4 and second.finished_reason == "length"
    node.land()
    node.at_baseline()


def test_one_that_waits_for_another_may_be_aborted(nodes):
    node = nodes(keep=True, admission="full", pages=80, budget=8)
    first = node.arrive(400, 20)
    second = node.arrive(420, 20, after=first)
    node.faults.hold = True
    assert node.preallocate(first) and node.preallocate(second) and node.coordinator.crowded
    node.abort(second)
    node.land()
    node.run(first)
    assert not node.coordinator.crowded
    node.at_baseline()


def test_pieces_that_had_to_go_are_pulled_from_the_tier_with_its_own_checksums(nodes):
    """What was generated here and what prefill computes of it later may differ in their bytes. Both are true of the block."""
    node = nodes(keep=True, admission="full", pages=80, budget=8)
    first = node.arrive(400, 60)
    node.admit(first)
    node.run(first)
    second = node.arrive(500, 40, after=first, recomputed=1.0)
    store = node.coordinator.reuse.store
    ours = store.acquire(second.pull.hashes[26:27])
    assert store.generated[ours].all() and node.cache.held(ours).all()
    node.cache.drop(ours)
    store.release(ours)
    second.truth[:, :, 26 * 16 : 27 * 16] += 1.0
    second.truth[:, :, 28 * 16 : 459] += 1.0  # not a whole block then
    node.admit(second)
    assert admitted(node, second)["pieces"] == (31 - 28 + 1) * 4
    node.check_cache = lambda *args, **kwargs: None  # summaries are those of the tier's bytes
    node.run(second)
    node.at_baseline()


def test_a_flush_forgets_what_nobody_holds_and_runs_on(nodes):
    node = nodes(keep=True, admission="full", pages=80, budget=8)
    first = node.arrive(400, 60)
    node.admit(first)
    node.run(first)
    running = node.arrive(480, 40, after=first)
    node.admit(running)
    used = node.cache.used_bytes
    node.coordinator.forget()
    assert 0 < node.cache.used_bytes <= used and node.coordinator.reuse.store.cached == 0
    node.run(running)
    assert running.finished_reason == "length" and not node.coordinator.reuse.store.has(running.pull.hashes[0])
    node.at_baseline()


def test_what_was_running_when_all_was_forgotten_is_not_found_afterwards(nodes):
    """As when the weights have changed meanwhile."""
    node = nodes(keep=True, pages=80, budget=8)
    for prompt in (400, 100):
        req = node.arrive(prompt, 60)
        node.admit(req)
        node.coordinator.forget()
        node.run(req)
        assert node.coordinator.reuse.store.cached == 0 and not node.coordinator.reuse.totals["blocks_kept"]
    node.at_baseline()


@pytest.mark.parametrize("seed", range(6))
def test_conversations_over_a_cache_for_a_quarter_of_them(nodes, seed):
    """Turns of several conversations that share a start, aborted and retracted at any time; the rig checks every step."""
    node = nodes(keep=True, seed=seed, pages=70, rows=6, budget=8, cap=2, cache=220, tail=3, critical=(1,) if seed % 2 else (), draft=4 * (seed % 3 == 2),
                 context=1024)
    rng = np.random.default_rng(seed)
    talks: list[Req] = []
    for _ in range(24):
        after = talks[int(rng.integers(len(talks)))] if talks and rng.random() < 0.8 else None
        if after is not None and after not in node.ended:
            after = None
        had = len(after.origin_input_ids) + len(after.output_ids) if after else 0
        if had > 700:
            continue
        req = node.arrive(had + int(rng.integers(40, 200)), int(rng.integers(1, 50)), after=after)
        talks.append(req)
        for _ in range(int(rng.integers(1, 12))):
            node.loop()
        event = rng.random()
        if event < 0.2 and node.live():
            node.abort(node.live()[int(rng.integers(len(node.live())))])
        elif event < 0.3 and node.batch.reqs:
            node.retract(node.batch.reqs[0])
    node.run(*node.live())
    assert node.coordinator.reuse.totals["pieces"] > 0 and (node.cache.evicted > 0 or node.coordinator.reuse.store.evicted > 0)
    node.at_baseline()
