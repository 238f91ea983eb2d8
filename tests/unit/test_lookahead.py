"""Steps that verify drafts, and what is planned beside the forward. Every step is compared with the true K and V."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from sparse_rig import Node, Req
from test_stepper import aimed, landed, pointed, resident

from decode_node.budget import make_budget
from decode_node.lookahead import LAYERS_PER_JOB, Rows
from oasis_sglang.attention import chain_mask
from oasis_sglang.selection.caps import warm_cap
from transport.errors import ConfigError


def row_queries(node: Node, asks: dict[tuple[Req, int], list[int]]) -> None:
    """From now on row ``r`` of ``req`` points to block ``asks[req, r][piece]`` in each (layer, KV head); other rows to block 0."""
    lay, group, n = node.layout, node.query_heads // node.layout.kv_heads, node.draft or 1

    def queries(reqs: list[Req]) -> torch.Tensor:
        out = torch.zeros(lay.num_layers, len(reqs), n, lay.kv_heads, group, lay.head_dim, dtype=node.dtype)
        for i, req in enumerate(reqs):
            for row in range(n):
                for piece in range(lay.pieces):
                    block = asks.get((req, row), [0] * lay.pieces)[piece]
                    mean = req.truth[piece, 0, block * node.page : (block + 1) * node.page].float().mean(0)
                    out[piece // lay.kv_heads, i, row, piece % lay.kv_heads] = 8 * mean
        return out.view(lay.num_layers, len(reqs) * n, -1)

    node.queries = queries


def accepting(node: Node, count: int) -> None:
    node.accept = lambda reqs: np.full(len(reqs), count)


# -- several tokens at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_accepted_every_request_reads_its_own_tokens(nodes, seed):
    """Prompts that grow into their budget, past it, and that hold all they have; pages that were opened for drafts in vain."""
    node = nodes(seed=seed, draft=[2, 4, 5, 16][seed % 4], pages=90, tail=2 + seed % 2, cap=seed % 3)
    reqs = [node.arrive(prompt, 70) for prompt in (330, 16 * 9, 40, 47, 400)]
    node.admit(*reqs)
    node.run(*reqs)
    assert node.stepper.totals["folds"] > 4 and node.stepper.totals["verify_steps"] > 30
    node.at_baseline()


def test_a_retracted_request_verifies_on_where_it_was(nodes):
    node = nodes(draft=4, pages=60)
    a, b = node.arrive(330, 60), node.arrive(300, 60)
    node.admit(a, b)
    for _ in range(5):
        node.step()
    node.retract(a)
    for _ in range(3):
        node.step()
    node.run(a, b)
    node.at_baseline()


def test_a_page_leaves_the_tail_only_once_it_is_committed(nodes):
    """The smallest tail, and as many drafts as a page has tokens: nothing is ever accepted but the target's own token."""
    node = nodes(draft=16, tail=2, pages=60)
    accepting(node, 1)
    req = node.arrive(330, 60)
    node.admit(req)
    node.run(req)
    assert node.stepper.totals["folds"] >= 2
    node.at_baseline()


def test_more_drafts_than_a_page_are_refused():
    with pytest.raises(ConfigError, match="speculative_num_draft_tokens=17"):
        make_budget(16, 96, 16, 32, 32, False, draft=17)
    assert make_budget(16, 1024, 16, 64, 256, False, draft=4).need(1000, 281).pages == 80
    assert make_budget(16, 1024, 16, 64, 256, False, draft=4).need(100, 4).pages == 7, "drafts of two steps are written past the end"


# -- which rows choose ----------------------------------------------------------------------------------------------


def test_the_newest_real_row_chooses_with_the_drafts_that_stand_where_the_next_tokens_will():
    rows = Rows(np.array([0, 2, 3, 0, 1]), np.array([3, 3, 3, 0, 1]))
    assert rows.choosing(4, 1).astype(int).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]]
    assert rows.choosing(4, 3).astype(int).tolist() == [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]]
    assert rows.choosing(4, 0).sum(1).tolist() == [1] * 5


def test_what_the_next_drafted_row_asks_for_is_resident_in_the_next_step(nodes):
    node = nodes(draft=3, layers=4, pages=80)
    req = pointed(node, 400)
    node.admit(req)
    accepting(node, 2)
    real, ahead, late, early = (aimed(node, req) for _ in range(4))
    ahead, late, early = ahead[1:] + ahead[:1], late[2:] + late[:2], early[3:] + early[:3]
    row_queries(node, {(req, 0): early, (req, 1): real, (req, 2): ahead})
    node.step()
    landed(node, req)
    row_queries(node, {})
    node.step()
    held = resident(node, req)
    assert all(block in h for block, h in zip(real, held)), "the last accepted row"
    assert all(block in h for block, h in zip(ahead, held)), "and the draft after it"
    assert node.stepper.totals["lookahead_rows"] >= 1 and node.stepper.totals["fallback_rows"] == 0
    node.end(req, "enough")
    node.batch.reqs.clear()
    node.at_baseline()


def test_only_the_real_row_is_asked_what_was_missed(nodes):
    node = nodes(draft=2, pages=80)
    req = pointed(node, 400)
    node.admit(req)
    accepting(node, 1)
    missing = aimed(node, req)
    there = [next(b for b in sorted(held) if 0 < b < 20) for held in resident(node, req)]
    row_queries(node, {(req, 0): there, (req, 1): missing})
    node.step()
    by_draft = node.stepper.lookahead.heads["missed_mass"].copy()
    assert (by_draft < 0.2).all(), "the draft missed its block; that counts for nothing"
    absent = [next(b for b in range(1, 20) if b not in held and b != coming) for held, coming in zip(resident(node, req), missing)]
    row_queries(node, {(req, 0): absent, (req, 1): there})
    node.step()
    assert (node.stepper.lookahead.heads["missed_mass"] - by_draft > 0.5).all()
    node.end(req, "enough")
    node.batch.reqs.clear()
    node.at_baseline()


@pytest.mark.parametrize("draft, accepted, fallback", [(0, 1, 1), (4, 4, 1), (4, 2, 0)])
def test_without_a_drafted_row_the_newest_real_one_chooses_alone_and_that_is_counted(nodes, draft, accepted, fallback):
    node = nodes(draft=draft)
    req = node.arrive(400, 40)
    node.admit(req)
    accepting(node, accepted)
    for _ in range(3):
        node.step()
    totals = node.stepper.totals
    assert (totals["fallback_rows"], totals["lookahead_rows"], totals["request_steps"]) == (3 * fallback, 3 - 3 * fallback, 3)
    node.run(req)
    node.at_baseline()


# -- beside the forward ---------------------------------------------------------------------------------------------


def test_scores_are_made_on_another_thread_while_the_layers_still_run(nodes):
    """With 17 layers the first jobs are through before the last layer is tapped; nothing on the forward's thread scores."""
    node = nodes(layers=2 * LAYERS_PER_JOB + 1, kv_heads=1, pages=40)
    req = node.arrive(300, 8)
    node.admit(req)
    seen, first = [], threading.Event()
    score = node.sets.score
    node.sets.score = lambda sets, part, *rest: (seen.append((threading.current_thread().name, part.start, part.stop)), first.set(), score(sets, part, *rest))[2]
    usual, tap = node.queries, node.coordinator.tap

    def tapping(layer, *rest):
        if layer == node.layout.num_layers - 1:
            assert first.wait(10), "a score was made before the last layer"
        tap(layer, *rest)

    node.coordinator.tap, node.queries = tapping, usual
    node.step()
    assert [(a, b) for _, a, b in seen] == [(0, 8), (8, 16), (16, 17)]
    assert all(name.startswith("oasis-lookahead") for name, *_ in seen)
    node.run(req)
    node.at_baseline()


def test_a_plan_for_a_request_that_ended_meanwhile_is_dropped(nodes):
    node = nodes(pages=80)
    a, b = node.arrive(400, 60), node.arrive(330, 60)
    node.admit(a, b)
    settle, node.stepper.settle = node.stepper.settle, lambda: None  # the rig takes the plan at the end of its step
    node.step()
    node.stepper.settle = settle
    entry, other = (node.coordinator.entries[r.kv.req_pool_idx] for r in (a, b))
    node.batch.reqs.remove(a)
    node.end(a, "aborted")
    assert node.stepper.totals["plans_stale"] == 1 and not len(entry.swaps.blocks) and len(other.swaps.blocks)
    node.run(b)
    node.at_baseline()


def test_a_plan_stands_only_for_the_same_holder_of_the_set_and_its_last_step(nodes):
    node = nodes(pages=80)
    req = node.arrive(400, 60)
    node.admit(req)
    entry = node.coordinator.entries[req.kv.req_pool_idx]
    node.step()
    look = node.stepper.lookahead
    look.begin([entry], 1)
    step = look._step
    assert look.stands(step, 0)
    for change, undo in ((lambda: node.sets.generation.__setitem__(entry.set, 99), lambda: node.sets.generation.__setitem__(entry.set, step.generations[0])),
                         (lambda: setattr(entry, "step", step.number + 1), lambda: setattr(entry, "step", step.number)),
                         (lambda: setattr(entry, "released", True), lambda: setattr(entry, "released", False))):
        change()
        assert not look.stands(step, 0)
        undo()
    assert look.stands(step, 0)
    look._step = None
    node.run(req)
    node.at_baseline()


def test_a_pull_that_never_lands_keeps_no_other_request_from_its_steps(nodes):
    node = nodes(pages=90, windows=8)
    a, b = pointed(node, 400, 30), pointed(node, 330, 30)
    node.admit(a, b)
    node.faults.hold = True
    for _ in range(6):
        node.step()
    assert node.stepper.totals["swaps_late"] > 0 and b.length == 336
    node.land()
    node.run(a, b)
    node.at_baseline()


# -- prefetched blocks, the cap of the first steps, masks -----------------------------------------------------------


def test_prefetched_blocks_are_counted_as_used_once_a_real_row_wants_them_and_as_wasted_at_the_end(nodes):
    node = nodes(pages=80)
    req = pointed(node, 400)
    node.admit(req)
    wanted = aimed(node, req)
    row_queries(node, {(req, 0): wanted})
    node.step()
    landed(node, req)
    totals = node.stepper.totals
    fetched = totals["fetched"]
    assert fetched >= 4 and totals["fetched_used"] == 0
    node.step()
    used = totals["fetched_used"]
    assert used >= 4, "the asked for blocks are there and wanted again"
    node.step()
    node.batch.reqs.clear()
    node.end(req, "enough")
    assert totals["fetched_wasted"] == totals["fetched"] - totals["fetched_used"]
    node.at_baseline()


def test_the_first_steps_of_a_request_may_pull_more(nodes):
    assert warm_cap(2, np.array([64, 64, 64, 64, 10]), np.array([0, 4, 8, 9, 4]), 8).tolist() == [64, 33, 2, 2, 6]
    assert warm_cap(2, np.array([1]), np.array([0]), 8).tolist() == [2] and warm_cap(0, np.array([64]), np.array([0]), 8).tolist() == [0]
    assert warm_cap(2, np.array([64]), np.array([0]), 0).tolist() == [2]
    node = nodes(cap=1, warmup=2, windows=2)
    req = node.arrive(500, 60)
    node.admit(req)
    counts, pull = [], node.stepper.lookahead.pull
    node.stepper.lookahead.pull = lambda entry, pieces, blocks: (counts.append(len(pieces)), pull(entry, pieces, blocks))
    for _ in range(4):
        node.step()
        landed(node, req)
    assert counts[0] > 4 and max(counts[2:]) <= 4
    node.run(req)
    node.at_baseline()


def test_a_chain_s_mask_is_made_from_the_lengths_that_are_read():
    small = chain_mask(torch.tensor([5, 2]), 3, whole=False).view(2, 3, 3).int().tolist()
    assert small == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]] * 2
    flat = chain_mask(torch.tensor([2, 1]), 2, whole=True)
    assert flat[:8].view(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]] and flat[8:].view(2, 3).int().tolist() == [[1, 1, 0], [1, 1, 1]]
