"""Plans against a planner of plain loops, and against what must hold for every plan."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.selection.planner import fold_victims, initial_selection, pinned_mask, plan

# ---------------------------------------------------------------------------------------------- the start of a request


def slow_initial(ranking: list[list[int]], whole: int, w: int, sink: int, recent: int) -> list[list[int]]:
    out = []
    for row in ranking:
        order = [n for n in range(whole) if n < sink or n >= whole - recent] + list(row) + list(range(whole - 1, -1, -1))
        out.append(sorted(list(dict.fromkeys(order))[:w]))
    return out


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 3), st.integers(0, 4), st.integers(0, 30), st.integers(0, 999))
def test_initial_selection_is_what_loops_say(whole, w, sink, recent, k, seed):
    rng = random.Random(seed)
    k, w = min(k, whole), max(w, min(whole, sink + recent))
    ranking = [rng.sample(range(whole), k) for _ in range(5)]
    chosen = initial_selection(np.array(ranking, np.int32).reshape(5, k), whole, w, sink, recent)
    assert chosen.dtype == np.int64 and chosen.shape == (5, min(w, whole))
    assert chosen.tolist() == slow_initial(ranking, whole, w, sink, recent)


def test_initial_selection_written_out():
    ranking = np.array([[4, 9, 0, 6, 2], [1, 2, 3, 4, 5]], np.int32)
    assert initial_selection(ranking, 10, 5, 1, 2).tolist() == [[0, 4, 6, 8, 9], [0, 1, 2, 8, 9]]
    assert initial_selection(ranking[:, :0], 10, 5, 1, 2).tolist() == [[0, 6, 7, 8, 9]] * 2
    assert initial_selection(ranking[:, :0], 3, 5, 1, 2).tolist() == [[0, 1, 2]] * 2


def test_a_ranking_that_repeats_itself_still_gives_distinct_blocks():
    chosen = initial_selection(np.full((2, 4), 3, np.int32), 10, 4, 1, 1)
    assert chosen.tolist() == [[0, 3, 8, 9]] * 2


@pytest.mark.parametrize("ranking", [[[10]], [[-1]]])
def test_a_ranking_of_blocks_that_are_not_there_is_refused(ranking):
    with pytest.raises(ValueError, match="10 whole blocks"):
        initial_selection(np.array(ranking), 10, 4, 1, 1)


def test_pinned_blocks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="working set of 4"):
        initial_selection(np.zeros((1, 0), int), 10, 4, 1, 4)
    assert initial_selection(np.zeros((1, 0), int), 4, 4, 1, 4).tolist() == [[0, 1, 2, 3]]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(0, 4), st.integers(0, 5))
def test_pinned_blocks_are_the_first_and_the_last(blocks, sink, recent):
    wanted = [[n < end and (n < sink or n + recent >= end) for n in range(12)] for end in blocks]
    assert pinned_mask(torch.tensor(blocks), sink, recent, 12).tolist() == wanted


# ------------------------------------------------------------------------------------------------------------- a step


@dataclass
class Case:
    mass: torch.Tensor
    ema: torch.Tensor
    slot_of: torch.Tensor
    pinned: torch.Tensor
    w: torch.Tensor
    blocks: torch.Tensor
    held: torch.Tensor
    flying: torch.Tensor
    cap: int


def values(kind: str, shape, generator) -> torch.Tensor:
    uniform = torch.rand(shape, generator=generator)
    if kind == "ties":
        return (uniform * 4).floor() / 4
    return uniform.log() if kind == "negative" else uniform**8


@st.composite
def cases(draw) -> Case:
    """Requests of different lengths; what stands in the arrays beyond a request's blocks is garbage."""
    b, s, n = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 24))
    rng = random.Random(draw(st.integers(0, 9999)))
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    sink, recent = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    blocks = torch.tensor([rng.randint(0, n) for _ in range(b)])
    pinned = pinned_mask(blocks, sink, recent, n) | (torch.rand((b, n), generator=generator) < 0.1) & (torch.arange(n) >= blocks[:, None])
    w = torch.tensor([rng.randint(min(sink + recent, int(end)), int(end)) for end in blocks])
    kind = draw(st.sampled_from(["ties", "negative", "skewed"]))
    mass, ema = values(kind, (b, s, n), generator), values(kind, (b, s, n), generator)
    dtype = draw(st.sampled_from([torch.int16, torch.int32]))
    slot_of = torch.full((b, s, n), -1, dtype=dtype)
    for i, head in np.ndindex(b, s):
        end, size = int(blocks[i]), int(w[i])
        fixed = [block for block in range(end) if pinned[i, block]]
        others = rng.sample([block for block in range(end) if not pinned[i, block]], size - len(fixed))
        slots = rng.sample(range(100), size)
        for block, slot in zip(fixed + others, slots):
            slot_of[i, head, block] = slot
        mass[i, head, end:] = torch.tensor(rng.choices([torch.nan, torch.inf, 7.0], k=n - end))
        ema[i, head, end:] = -1e9
        slot_of[i, head, end:] = 55
    held, flying = torch.rand((b, s, n), generator=generator) < 0.4, torch.rand((b, s, n), generator=generator) < 0.2
    return Case(mass, ema, slot_of, pinned, w, blocks, held, flying, draw(st.integers(0, 3)))


def slow_plan(c: Case):
    """Swaps (request, head, slot, block), fetches (request, head, block), misses [b][S], wanted [b]."""
    swaps, fetches, misses, wanted_counts = [], [], [], []
    for i in range(len(c.blocks)):
        end, w = int(c.blocks[i]), int(c.w[i])
        fixed = [block for block in range(end) if c.pinned[i, block]]
        free = [block for block in range(end) if not c.pinned[i, block]]
        wanted_counts.append(max(0, min(w, end) - len(fixed)))
        misses.append([])
        for head in range(c.mass.shape[1]):
            mass, ema, slot_of = c.mass[i, head].tolist(), c.ema[i, head].tolist(), c.slot_of[i, head].tolist()
            wanted = fixed + sorted(free, key=lambda block: (-mass[block], block))[: wanted_counts[i]]
            if w >= end:
                wanted = list(range(end))
            missing = [block for block in wanted if slot_of[block] < 0]
            victims = sorted((block for block in free if slot_of[block] >= 0 and block not in wanted), key=lambda block: (ema[block], block))
            cached = [block for block in missing if c.held[i, head, block]]
            absent = [block for block in missing if not c.held[i, head, block]]
            pairs = dict(zip(cached + absent, victims))
            swaps += [(i, head, slot_of[pairs[block]], block) for block in missing]
            fetches += [(i, head, block) for block in absent if not c.flying[i, head, block]][: c.cap or None]
            misses[i].append(len(missing))
    return swaps, fetches, misses, wanted_counts


def run(c: Case):
    made = plan(c.mass, c.ema, c.slot_of, c.pinned, c.w, c.blocks, c.held, c.flying, c.cap)
    assert all(part.dtype == torch.int64 for part in made)
    swaps = list(zip(*(part.tolist() for part in made[:4]), strict=True))
    return made, swaps, list(zip(*(part.tolist() for part in made[4:7]), strict=True))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_plans_are_what_loops_say(c):
    made, swaps, fetches = run(c)
    wanted_swaps, wanted_fetches, misses, wanted = slow_plan(c)
    assert swaps == wanted_swaps
    assert fetches == [tuple(fetch) for fetch in wanted_fetches]
    assert made.misses.tolist() == misses and made.wanted.tolist() == wanted


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(0, 999))
def test_any_part_of_a_plan_keeps_w_distinct_blocks_and_the_pinned_ones(c, seed):
    _, swaps, fetches = run(c)
    rng = random.Random(seed)
    after = {(i, head): {int(c.slot_of[i, head, block]): block for block in range(int(c.blocks[i])) if c.slot_of[i, head, block] >= 0}
             for i, head in np.ndindex(*c.mass.shape[:2])}
    before = {place: dict(table) for place, table in after.items()}
    for i, head, slot, block in rng.sample(swaps, rng.randint(0, len(swaps))):
        assert slot in before[i, head] and not c.pinned[i, before[i, head][slot]]
        assert block < c.blocks[i] and block not in before[i, head].values()
        after[i, head][slot] = block
    for (i, _), table in after.items():
        assert len(set(table.values())) == len(table) == c.w[i]
        assert {block for block in range(int(c.blocks[i])) if c.pinned[i, block]} <= set(table.values())
    assert len({swap[:3] for swap in swaps}) == len(swaps) == len({(i, head, block) for i, head, _, block in swaps})
    assert len(set(fetches)) == len(fetches)
    for i, head, block in fetches:
        assert block < c.blocks[i] and not c.held[i, head, block] and not c.flying[i, head, block] and c.slot_of[i, head, block] < 0


@settings(max_examples=200, deadline=None)
@given(cases())
def test_a_plan_carried_out_leaves_nothing_to_do_and_nothing_better_outside(c):
    made, swaps, _ = run(c)
    assert len(swaps) == made.misses.sum()
    slot_of = c.slot_of.clone()
    for i, head, slot, block in swaps:
        slot_of[i, head, : c.blocks[i]].masked_fill_(c.slot_of[i, head, : c.blocks[i]] == slot, -1)
        slot_of[i, head, block] = slot
    again, swaps, fetches = run(Case(**{**vars(c), "slot_of": slot_of}))
    assert not swaps and not fetches and not again.misses.any()
    for i, head in np.ndindex(*c.mass.shape[:2]):
        free = [block for block in range(int(c.blocks[i])) if not c.pinned[i, block]]
        inside = [c.mass[i, head, block].item() for block in free if slot_of[i, head, block] >= 0]
        outside = [c.mass[i, head, block].item() for block in free if slot_of[i, head, block] < 0]
        assert min(inside, default=torch.inf) >= max(outside, default=-torch.inf)


def written_out(**change) -> Case:
    """One head with blocks 0 and 7 pinned, 1 to 3 resident beside them, and 6, 5 and 4 (in this order) wanted instead."""
    fields = dict(
        mass=torch.tensor([[[0.0, 1, 2, 3, 5, 6, 7, 0]]]), ema=torch.tensor([[[0.0, 0.3, 0.1, 0.2, 0, 0, 0, 0]]]),
        slot_of=torch.tensor([[[10, 11, 12, 13, -1, -1, -1, 17]]]), pinned=pinned_mask(torch.tensor([8]), 1, 1, 8), w=torch.tensor([5]),
        blocks=torch.tensor([8]), held=torch.zeros(1, 1, 8, dtype=torch.bool), flying=torch.zeros(1, 1, 8, dtype=torch.bool), cap=0)
    return Case(**{**fields, **change})


def mask(*blocks: int) -> torch.Tensor:
    return torch.isin(torch.arange(8), torch.tensor(blocks))[None, None]


def test_the_best_block_replaces_the_worst():
    made, swaps, fetches = run(written_out())
    assert swaps == [(0, 0, 12, 6), (0, 0, 13, 5), (0, 0, 11, 4)] and fetches == [(0, 0, 6), (0, 0, 5), (0, 0, 4)]
    assert made.misses.tolist() == [[3]] and made.wanted.tolist() == [3]


def test_a_block_at_hand_replaces_the_worst_before_a_better_one_far_away():
    _, swaps, fetches = run(written_out(held=mask(4)))
    assert swaps == [(0, 0, 13, 6), (0, 0, 11, 5), (0, 0, 12, 4)] and fetches == [(0, 0, 6), (0, 0, 5)]


def test_the_cap_counts_new_fetches_only():
    made, swaps, fetches = run(written_out(flying=mask(6), cap=1))
    assert fetches == [(0, 0, 5)] and len(swaps) == 3 and made.misses.tolist() == [[3]]


def test_a_pinned_block_that_is_missing_comes_first():
    c = written_out(slot_of=torch.tensor([[[10, 11, 12, 13, 17, -1, -1, -1]]]), cap=1)
    _, swaps, fetches = run(c)
    assert swaps == [(0, 0, 12, 7), (0, 0, 13, 6), (0, 0, 11, 5)] and fetches == [(0, 0, 7)]


def test_more_pinned_blocks_than_slots_replace_what_may_go():
    c = written_out(slot_of=torch.tensor([[[10, 11, -1, -1, -1, -1, -1, -1]]]), w=torch.tensor([2]), pinned=mask(0, 6, 7)[0])
    made, swaps, _ = run(c)
    assert swaps == [(0, 0, 11, 6)] and made.misses.tolist() == [[2]] and made.wanted.tolist() == [0]


def test_a_request_that_holds_everything_plans_nothing():
    made, swaps, fetches = run(written_out(slot_of=torch.arange(8)[None, None], w=torch.tensor([8])))
    assert not swaps and not fetches and made.misses.tolist() == [[0]] and made.wanted.tolist() == [6]


@pytest.mark.parametrize("w", [8, 9])
def test_nothing_is_planned_for_a_request_with_room_for_all_its_blocks(w):
    made, swaps, fetches = run(written_out(w=torch.tensor([w])))
    assert not swaps and not fetches and made.misses.tolist() == [[0]] and made.wanted.tolist() == [6]


# ------------------------------------------------------------------------------------------------------------- a fold


@settings(max_examples=100, deadline=None)
@given(cases())
def test_fold_victims_are_the_lowest_that_may_go(c):
    c.slot_of.masked_fill_(torch.arange(c.mass.shape[2]) >= c.blocks[:, None, None], -1)
    free = [i for i in range(len(c.w)) if c.w[i] > int(c.pinned[i, : c.blocks[i]].sum())]
    victims = fold_victims(c.ema[free], c.slot_of[free], c.pinned[free], c.w[free])
    assert victims.shape == (len(free), c.mass.shape[1]) and victims.dtype == torch.int64
    for row, i in enumerate(free):
        for head in range(c.mass.shape[1]):
            able = [block for block in range(int(c.blocks[i])) if c.slot_of[i, head, block] >= 0 and not c.pinned[i, block]]
            worst = min(able, key=lambda block: (c.ema[i, head, block].item(), block))
            assert victims[row, head] == c.slot_of[i, head, worst]


def test_a_fold_refuses_a_working_set_of_another_size_or_of_pinned_blocks():
    c = written_out()
    assert fold_victims(c.ema, c.slot_of, c.pinned, c.w).tolist() == [[12]]
    with pytest.raises(ValueError, match=r"hold \[5\] blocks, not \[6\]"):
        fold_victims(c.ema, c.slot_of, c.pinned, torch.tensor([6]))
    with pytest.raises(ValueError, match="pinned"):
        fold_victims(c.ema, c.slot_of, c.pinned | True, c.w)
