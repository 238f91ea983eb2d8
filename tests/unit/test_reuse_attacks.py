"""Ways in which reuse could break a node: prompts that are not what was asked for, admissions that hold up others, answers that
are cut, steps that run ahead of their results, numbers that run out, and all of it at once."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from node_rig import SEED, until
from sparse_rig import Node, Req

from decode_node import reuse
from decode_node.block_store import BlockStore
from decode_node.host_cache import HostCache
from transport import messages as m
from transport.donation import Donations
from transport.errors import RoomFailed
from transport.hashing import page_hashes
from transport.records import split_hashes


def admitted(node: Node, req: Req, phase: str) -> int:
    """Items of ``phase`` pulled before it ran."""
    unit = {"summaries": node.layout.index_bytes, "pieces": node.layout.piece_bytes}.get(phase, node.layout.payload_bytes)
    return req.pull.admitted_by_phase[phase] // unit


# -- prompts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [380, 440, 30])
def test_a_prompt_that_is_not_the_committed_one_is_refused_and_nobody_else_notices(nodes, tokens):
    """As when a request was started again with what it had answered already."""
    node = nodes(keep=True, pages=80, budget=8)
    other, wrong = node.arrive(300, 20), node.arrive(420, 30)
    wrong.origin_input_ids = (wrong.origin_input_ids * 2)[:tokens]
    wrong.length = tokens
    assert not node.preallocate(wrong) and isinstance(wrong.error, RoomFailed)
    node.admit(other)
    node.run(other)
    node.at_baseline()


def test_a_request_that_is_started_again_goes_on_after_what_it_had_answered(nodes):
    """SGLang's retraction while weights are changed: prefill computes prompt and answer anew, the last answered token comes again."""
    node = nodes(keep=True, pages=80, budget=8)
    req = node.arrive(420, 30)
    prompt, last = req.origin_input_ids, req.output_ids
    req.origin_input_ids, req.output_ids, req.pd_rebootstrap_in_progress = prompt[:390], prompt[390:], True
    req.sampling_params.max_new_tokens = 60
    assert node.preallocate(req), req.error
    entry = node.coordinator.entries[req.kv.req_pool_idx]
    assert (entry.prompt, entry.need) == (420, entry.budget.need(420, 30))
    until(lambda: node.pop_transferred() or req not in node.transfer, "admitted")
    req.output_ids += last
    node.check_cache = lambda *args, **kwargs: None  # it takes all that was answered for generated here
    node.run(req)
    assert len(req.output_ids) == 60
    again = node.arrive(500, 20, after=req)
    node.admit(again)
    assert node.coordinator.reuse.totals["hit_tokens"] == (420 + 29) // 16 * 16
    node.run(again)
    node.at_baseline()


def test_a_seed_without_hashes_leaves_nothing_behind(nodes):
    """A tier may say so, whatever ours does."""
    node = nodes(keep=True, pages=80, budget=8)
    req = node.arrive(400, 60)
    req.pull.hashes = []
    node.admit(req)
    node.run(req)
    assert not node.coordinator.reuse.totals["blocks_kept"] and not node.coordinator.reuse.store.cached
    node.at_baseline()


# -- waiting for one another ----------------------------------------------------------------------------------------------


def test_those_that_waited_for_one_do_not_wait_for_one_another(nodes):
    """The first leaves blocks out that none of its heads selects; that is no reason to stand in line for them."""
    node = nodes(keep=True, pages=80, budget=4, sink=1, recent=1, layers=1, kv_heads=1)
    first = node.arrive(400, 20)
    others = [node.arrive(400, 20, after=first) for _ in range(3)]
    node.faults.hold = True
    for req in (first, *others):
        assert node.preallocate(req)
    assert [e.rid for e in node.coordinator.crowded] == [r.rid for r in others]
    node.land()
    until(lambda: first.pull.state == "serving", "the first is admitted")
    assert not node.cache.held(node.coordinator.entries[first.kv.req_pool_idx].numbers).any(0).all()
    node.faults.hold = True
    node.coordinator.tidy()
    assert not node.coordinator.crowded
    node.land()
    node.run(first, *others)
    assert [admitted(node, r, "summaries") for r in others] == [0, 0, 0]
    node.at_baseline()


def test_a_later_one_waits_for_what_nobody_has_brought_yet(nodes):
    """Those that share more with a waiting one than with the first."""
    node = nodes(keep=True, admission="full", pages=100, rows=8, budget=8)
    first = node.arrive(400, 20)
    second = node.arrive(480, 20, after=first)
    third = node.arrive(520, 20, after=second)
    node.faults.hold = True
    for req in (first, second, third):
        assert node.preallocate(req)
    node.land()
    until(lambda: first.pull.state == "serving", "the first is admitted")
    node.faults.hold = True
    node.coordinator.tidy()
    assert [e.rid for e in node.coordinator.crowded] == [third.rid]
    node.land()
    node.run(first, second, third)
    assert [admitted(node, r, "pieces") for r in (first, second, third)] == [25 * 4, 5 * 4, 2 * 4]
    node.at_baseline()


def test_blocks_that_were_let_go_are_waited_for_anew(nodes):
    node = nodes(keep=True, admission="full", pages=80, budget=8)
    first = node.arrive(400, 20)
    node.admit(first)
    node.run(first)
    store = node.coordinator.reuse.store
    node.cache.drop(store.find(first.pull.hashes))
    second, third = (node.arrive(400, 20, after=first) for _ in range(2))
    node.faults.hold = True
    assert node.preallocate(second) and node.preallocate(third)
    assert [e.rid for e in node.coordinator.crowded] == [third.rid]
    node.land()
    node.run(second, third)
    assert [admitted(node, r, "pieces") for r in (second, third)] == [25 * 4, 0]
    node.at_baseline()


def test_when_the_first_fails_one_takes_its_place_and_the_others_wait_for_that(nodes):
    node = nodes(keep=True, admission="full", pages=80, budget=8)
    first = node.arrive(400, 20)
    others = [node.arrive(400, 20, after=first) for _ in range(2)]
    node.faults.hold = True
    for req in (first, *others):
        assert node.preallocate(req)
    lost = node.coordinator.entries[first.kv.req_pool_idx]
    node.puller._post(node.puller._give_up, first.pull, RoomFailed("lost", room=first.pull.room))
    until(lambda: first.pull.state == "failed", "the first failed")
    assert not lost.released
    node.coordinator.tidy()
    assert [e.rid for e in node.coordinator.crowded] == [others[1].rid]
    node.land()
    node.run(*others)
    assert [admitted(node, r, "pieces") for r in others] == [25 * 4, 0]
    node.pop_transferred()
    node.at_baseline()


def test_one_whose_tier_hangs_holds_up_nobody_for_long(nodes):
    node = nodes(keep=True, admission="full", pages=80, budget=8)
    now = itertools.count(0.0, 0.75)
    node.coordinator.reuse._clock = lambda: next(now)  # three looks are more than the patience
    first = node.arrive(400, 20)
    second = node.arrive(420, 20, after=first)
    node.faults.hold = True
    assert node.preallocate(first) and node.preallocate(second)
    assert [e.rid for e in node.coordinator.crowded] == [second.rid]
    node.coordinator.tidy()
    assert node.coordinator.crowded
    for _ in range(3):
        node.coordinator.tidy()
    until(lambda: second.pull.state == "pulling", "it pulls by itself")
    assert first.pull.state == "pulling" and not node.coordinator.crowded
    node.land()
    node.run(first, second)
    assert admitted(node, second, "pieces") == 26 * 4
    node.at_baseline()


def test_one_that_makes_progress_is_waited_for(nodes):
    node = nodes(keep=True, admission="full", pages=80, budget=8)
    now = itertools.count(0.0, 1.5)
    node.coordinator.reuse._clock = lambda: next(now)
    first = node.arrive(400, 20)
    second = node.arrive(420, 20, after=first)
    node.faults.hold = True
    assert node.preallocate(first) and node.preallocate(second)
    for _ in range(6):
        first.pull.bytes_by_phase["pieces"] += 1
        node.coordinator.tidy()
    assert node.coordinator.crowded
    first.pull.bytes_by_phase["pieces"] -= 6
    node.coordinator.reuse._clock = lambda: 0.0
    node.land()
    node.run(first, second)
    assert admitted(node, second, "pieces") == 4
    node.at_baseline()


# -- steps that run ahead, answers that are cut ---------------------------------------------------------------------------


class Ahead(Node):
    """As with SGLang's overlap schedule: each step runs before the results of the one before are looked at, so that a request
    that has ended takes part in one more, and what was under way when one is retracted is lost. ``cut()`` -> how many of the
    last step's tokens a request may still keep at its end, None: it goes on (a grammar that ends, a sampling mask)."""

    cut = staticmethod(lambda: None)

    def __init__(self, folder, **sizes):
        super().__init__(folder, **sizes)
        self.scheduler.enable_overlap = self.coordinator.overlap = True
        self.under_way: list[tuple[Req, list[int]]] = []
        self.stepping = False

    def step(self) -> None:
        had = [(req, len(req.output_ids)) for req in self.batch.reqs]
        self.stepping = True
        super().step()
        self.stepping = False
        results, self.under_way = self.under_way, [(req, req.output_ids[n:]) for req, n in had]
        for req, n in had:
            del req.output_ids[n:]
        for req, tokens in results:
            if req not in self.batch.reqs:
                continue
            keep = self.cut()
            req.output_ids += tokens[:keep]
            if keep is not None or req.to_finish or len(req.output_ids) >= req.sampling_params.max_new_tokens:
                self.batch.reqs.remove(req)
                self.end(req, req.to_finish or ("length" if keep is None else "cut"))

    def _end_complete(self) -> None:
        started = {id(req) for req, _ in self.under_way}
        for req in [] if self.stepping else list(self.batch.reqs):
            if id(req) not in started and (req.to_finish or len(req.output_ids) >= req.sampling_params.max_new_tokens):
                self.batch.reqs.remove(req)
                self.end(req, req.to_finish or "length")

    def retract(self, req: Req, **kwargs) -> None:
        self.under_way = [pair for pair in self.under_way if pair[0] is not req]
        req.length = len(req.origin_input_ids) + len(req.output_ids) - 1
        super().retract(req, **kwargs)


@pytest.fixture
def ahead(tmp_path):
    made = []
    yield lambda **sizes: made.append(Ahead(tmp_path, **sizes)) or made[-1]
    for node in made:
        node.close()


def named_blocks_are_true(node: Node, req: Req) -> int:
    """Whatever can be found under the hashes of what ``req`` was and answered holds its true K and V. Returns how many pieces."""
    tokens = np.array([*req.origin_input_ids, *req.output_ids])
    hashes = split_hashes(page_hashes(SEED, tokens, node.page))
    numbers = node.coordinator.reuse.store.find(hashes)
    found = 0
    for block in np.flatnonzero(numbers >= 0).tolist():
        pieces = np.flatnonzero(node.cache.held(numbers[block : block + 1])[:, 0])
        data, here = node.cache.read(pieces, np.full(len(pieces), numbers[block]))
        true = req.truth[pieces, :, block * node.page : (block + 1) * node.page].contiguous().view(torch.uint8).reshape(-1, node.layout.piece_bytes).numpy()
        assert np.array_equal(data[here], true[here]), f"block {block} of {req.rid} is another one"
        found += int(here.sum())
    return found


@pytest.mark.parametrize("draft", [0, 4])
@pytest.mark.parametrize("prompt", [400, 100, 5])
@pytest.mark.parametrize("keep", [None, 0, 1])
def test_what_is_kept_of_an_answer_is_what_was_computed_from_its_tokens(ahead, draft, prompt, keep):
    """Of answers of every length around a page's end, and where an answer's last tokens were taken back."""
    node = ahead(keep=True, pages=80, budget=8, draft=draft)
    for new in (1, 2, 12, 13, 28, 29, 70):
        req = node.arrive(prompt, new)
        node.admit(req)
        if keep is not None:
            node.cut = lambda req=req, new=new: keep if len(req.output_ids) > new // 2 else None
        node.run(req)
        kept = (len(req.origin_input_ids) + len(req.output_ids) - 1) // 16
        store = node.coordinator.reuse.store
        hashes = split_hashes(page_hashes(SEED, np.array([*req.origin_input_ids, *req.output_ids]), 16))
        assert all(map(store.has, hashes[:kept])) and not any(map(store.has, hashes[kept:]))
        assert named_blocks_are_true(node, req) >= 4 * (kept - prompt // 16)
    node.at_baseline()


def starve(node: Node, tokens: int) -> np.ndarray:
    """Takes the block numbers that requests of at most ``tokens`` cannot need."""
    store, sets = node.coordinator.reuse.store, node.sets.size
    enough = sets * (-(-tokens // node.page) + 1) + node.coordinator.physical.size // node.page
    return store.acquire([], max(0, store.size - enough))


KINDS = [dict(), dict(draft=4), dict(critical=(1,)), dict(admission="full", cache=260), dict(critical=(0, 3), draft=3), dict(tail=4, draft=2, warmup=4)]


def storm(node: Node, rng: np.random.Generator, requests: int, longest: int = 600) -> list[Req]:
    """Turns of conversations that share their starts, under everything that may happen to them; the rig checks every step.
    ``longest``: tokens that a conversation may have before its last turn."""
    starved = starve(node, longest + 210)
    talks: list[Req] = []
    for _ in range(requests):
        over = [r for r in talks if r in node.ended and len(r.origin_input_ids) + len(r.output_ids) < longest]
        after = over[int(rng.integers(len(over)))] if over and rng.random() < 0.8 else None
        had = len(after.origin_input_ids) + len(after.output_ids) if after else 0
        if after is not None and rng.random() < 0.15:
            had = int(rng.integers(0, had))  # another answer, or the same start
        for _ in range(int(rng.choice([1, 1, 1, 3]))):
            custom = [None, None, None, {"oasis": {"mode": "exact"}}, {"oasis": {"budget_tokens": 5 * 16}}][int(rng.integers(5))]
            seed = [SEED, SEED, SEED, SEED, None, b"tenant b" * 4][int(rng.integers(6))]
            talks.append(node.arrive(had + int(rng.integers(1, 150)), int(rng.integers(1, 60)), custom, after=after, seed=seed))
        node.faults.hold = bool(rng.random() < 0.25)
        for _ in range(int(rng.integers(1, 14))):
            node.loop(resume=bool(rng.random() < 0.8))
        node.land()
        for event in rng.random(2):
            live = node.live()
            if event < 0.2 and live:
                node.abort(live[int(rng.integers(len(live)))])
            elif event < 0.35 and node.batch.reqs:
                node.retract(node.batch.reqs[int(rng.integers(len(node.batch.reqs)))], backup=bool(rng.random() < 0.8))
            elif event < 0.37:
                node.coordinator.forget()
        for req in talks[-4:]:
            if req in node.ended:
                named_blocks_are_true(node, req)
    node.run(*node.live())
    for req in talks:
        named_blocks_are_true(node, req)
    node.coordinator.reuse.store.release(starved)
    node.coordinator.leaks = 0  # those numbers
    return talks


@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_storms(nodes, ahead, seed):
    rng = np.random.default_rng(seed)
    make = ahead if seed % 2 else nodes
    node = make(keep=True, donate=True, seed=seed, pages=90, rows=6, cap=2, context=1024, records=700, budget=8, **{"cache": 200, **KINDS[seed]})
    if make is ahead:
        node.cut = lambda: int(rng.integers(0, 3)) if rng.random() < 0.01 else None
    tier = node.world.tier
    tier.call(lambda: tier.tier.serve(m.Donate, Donations(tier.tier, tier.server.arena.bytes).take))
    storm(node, rng, 14)
    totals = node.coordinator.reuse.totals
    assert totals["pieces"] > 0 and totals["blocks_kept"] > 0 and node.cache.evicted > 0
    node.at_baseline()


# -- what the scheduler must not spend its time on -----------------------------------------------------------------------------


def test_a_full_store_is_not_searched_for_every_block_that_is_generated():
    store = BlockStore(1024, 1, HostCache(1, 1024, 8, 8 * 16))
    old, new = ([bytes([kind]) * 28 + i.to_bytes(4, "little") for i in range(512)] for kind in (1, 2))
    for hashes in (old, new):
        store.release(store.acquire(hashes))
    store.release(store.acquire(old[:100]))  # used again
    taken = [store.acquire([], 1) for _ in range(5)]
    assert store.evicted == 8 and not any(n is None for n in taken)
    assert all(map(store.has, [*old[:100], *new])) and sum(map(store.has, old[100:])) == 412 - 8
    assert store.acquire([], 1020) is None and store.evicted == 8
    assert len(store.acquire([], 1019)) == 1019 and store.cached == 0


def test_an_answer_is_made_ready_for_the_tier_beside_the_scheduler(nodes):
    node = nodes(keep=True, donate=True, pages=80, budget=8)
    given = []
    node.coordinator.reuse.donate = lambda pull, depth, hashes, payloads, summaries: given.append((threading.current_thread().name, depth, len(hashes)))
    reuse.MESSAGE_BYTES, kept = 2 * node.layout.payload_bytes + 2 * node.layout.summary_total, reuse.MESSAGE_BYTES
    try:
        req = node.arrive(400, 60)
        node.admit(req)
        node.run(req)
        until(lambda: len(given) == 2, "given in two parts")
    finally:
        reuse.MESSAGE_BYTES = kept
    assert [part[1:] for part in given] == [(25, 2), (27, 1)] and all(part[0].startswith("oasis-publish") for part in given)
    node.at_baseline()
