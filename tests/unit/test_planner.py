"""Plans against a planner of plain loops, and against what must hold for every plan."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

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
    cap: torch.Tensor
    actual: torch.Tensor | None = None
    dense: torch.Tensor | None = None
    floor: int = 0
    sticky: float = 0.0

    def heads(self, i: int) -> list[int]:
        """Those of request ``i`` that select."""
        silent = self.dense.tolist() if self.dense is not None else [False] * self.mass.shape[1]
        return [head for head, out in enumerate(silent) if not out and self.w[i] < self.blocks[i]]

    def of(self, requests: slice, heads) -> Case:
        """The part of some requests and heads."""
        changed = {name: getattr(self, name)[requests] for name in ("pinned", "w", "blocks", "cap")}
        for name in ("mass", "ema", "slot_of", "held", "flying", "actual"):
            changed[name] = None if getattr(self, name) is None else getattr(self, name)[requests][:, heads]
        return replace(self, **changed, dense=None if self.dense is None else self.dense[heads])


def values(kind: str, shape, generator) -> torch.Tensor:
    uniform = torch.rand(shape, generator=generator)
    if kind == "ties":
        return (uniform * 4).floor() / 4
    return uniform.log() if kind == "negative" else uniform**8


@st.composite
def cases(draw) -> Case:
    """Requests of different lengths; what stands in the arrays beyond a request's blocks is garbage."""
    b, s, n = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.sampled_from([*range(1, 13), *[24] * 12]))
    rng = random.Random(draw(st.integers(0, 9999)))
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    sink, recent = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    blocks = torch.tensor([rng.choice([rng.randint(0, n), n]) for _ in range(b)])
    pinned = pinned_mask(blocks, sink, recent, n) | (torch.rand((b, n), generator=generator) < 0.1) & (torch.arange(n) >= blocks[:, None])
    w = torch.tensor([max(min(sink + recent, end), rng.choice([rng.randint(0, end), end // 2])) for end in blocks.tolist()])
    kinds = st.sampled_from(["ties", "skewed"])
    weights = torch.tensor(rng.choices([1, 0.01], k=s))[:, None]  # heads of one request that cannot win against others
    mass, actual = (values(draw(kinds), (b, s, n), generator) * weights for _ in range(2))
    ema = values(draw(st.sampled_from(["ties", "negative", "skewed"])), (b, s, n), generator)
    dtype = draw(st.sampled_from([torch.int16, torch.int32]))
    slot_of = torch.full((b, s, n), -1, dtype=dtype)
    complete = draw(st.booleans())  # or pinned blocks may be missing
    for i, head in np.ndindex(b, s):
        end, size = int(blocks[i]), int(w[i])
        fixed = [block for block in range(end) if pinned[i, block] and complete]
        others = rng.sample([block for block in range(end) if block not in fixed], size - len(fixed))
        slots = rng.sample(range(100), size)
        for block, slot in zip(fixed + others, slots):
            slot_of[i, head, block] = slot
        for masses in (mass, actual):
            masses[i, head, end:] = torch.tensor(rng.choices([torch.nan, torch.inf, 7.0], k=n - end))
        ema[i, head, end:] = -1e9
        slot_of[i, head, end:] = 55
    held, flying = torch.rand((b, s, n), generator=generator) < draw(st.sampled_from([0, 0.4])), torch.rand((b, s, n), generator=generator) < 0.2
    dense = torch.tensor([rng.random() < 0.3 for _ in range(s)]) if draw(st.booleans()) else None
    return Case(mass, ema, slot_of, pinned, w, blocks, held, flying, torch.tensor([rng.randint(0, 3) for _ in range(b)]),
                actual if draw(st.booleans()) else None, dense, draw(st.sampled_from([0, 1, 1, 2, 4])), draw(st.sampled_from([0.0, 0.25, 2.0])))


def slow_best(c: Case, i: int, mass: list[float]) -> list[int]:
    """The pinned blocks, then the best of the others, as many as are wanted."""
    fixed = [block for block in range(int(c.blocks[i])) if c.pinned[i, block]]
    free = [block for block in range(int(c.blocks[i])) if not c.pinned[i, block]]
    return fixed + sorted(free, key=lambda block: (-mass[block], block))[: max(0, int(c.w[i]) - len(fixed))]


def competing(c: Case, i: int, head: int) -> list[float]:
    bonus = np.float32(1 + c.sticky)
    return [float(mass * bonus) if slot >= 0 else float(mass) for mass, slot in zip(c.mass[i, head].numpy(), c.slot_of[i, head].tolist())]


def slow_candidates(c: Case, i: int) -> dict[int, list[int]]:
    """What each head would fetch if nothing were limited, the most wanted first."""
    return {head: [block for block in slow_best(c, i, competing(c, i, head))
                   if c.slot_of[i, head, block] < 0 and not c.held[i, head, block] and not c.flying[i, head, block]] for head in c.heads(i)}


def slow_fetches(c: Case, i: int) -> list[tuple[int, int]]:
    """(head, block) of one request."""
    cap, waiting = int(c.cap[i]), slow_candidates(c, i)
    if cap == 0 or c.floor >= cap:
        return [(head, block) for head, blocks in waiting.items() for block in blocks[: cap or None]]
    granted = [(head, block) for head, blocks in waiting.items() for block in blocks[: c.floor]]
    rest = [(head, block) for head, blocks in waiting.items() for block in blocks[c.floor :]]
    rest.sort(key=lambda one: (not c.pinned[i, one[1]], 0 if c.pinned[i, one[1]] else -c.mass[i, one[0], one[1]].item(), one))
    granted += rest[: cap * len(waiting) - len(granted)]
    return [(head, block) for head, blocks in waiting.items() for block in blocks if (head, block) in granted]


def slow_plan(c: Case):
    """Swaps (request, head, slot, block), fetches (request, head, block), misses and missed mass [b][S], top sets, wanted [b]."""
    b, s, _ = c.mass.shape
    swaps, fetches, misses, share, top = [], [], np.zeros((b, s), int), np.zeros((b, s)), np.zeros(c.mass.shape, bool)
    for i in range(b):
        for head in c.heads(i):
            ema, slot_of = c.ema[i, head].tolist(), c.slot_of[i, head].tolist()
            wanted = slow_best(c, i, competing(c, i, head))
            missing = [block for block in wanted if slot_of[block] < 0]
            victims = [block for block in range(int(c.blocks[i])) if slot_of[block] >= 0 and block not in wanted]
            victims.sort(key=lambda block: (ema[block], block))
            here = [block for block in missing if c.held[i, head, block]]
            pairs = dict(zip(here + [block for block in missing if block not in here], victims, strict=True))
            swaps += [(i, head, slot_of[pairs[block]], block) for block in missing]

            actual = (c.mass if c.actual is None else c.actual)[i, head, : int(c.blocks[i])].tolist()
            own = slow_best(c, i, actual)
            top[i, head, own] = True
            misses[i, head] = sum(slot_of[block] < 0 for block in own)
            if sum(actual):
                share[i, head] = sum(mass for mass, slot in zip(actual, slot_of) if slot < 0) / sum(actual)
        fetches += [(i, *fetch) for fetch in slow_fetches(c, i)]
    fixed = (c.pinned & (torch.arange(c.mass.shape[2]) < c.blocks[:, None])).sum(1)
    return swaps, fetches, misses, share, top, (c.w - fixed).clamp(min=0).tolist()


def run(c: Case):
    made = plan(**vars(c))
    assert all(part.dtype == torch.int64 for name, part in made._asdict().items() if name not in ("missed_mass", "top"))
    swaps = list(zip(*(part.tolist() for part in made[:4]), strict=True))
    return made, swaps, list(zip(*(part.tolist() for part in made[4:7]), strict=True))


@settings(max_examples=400, deadline=None)
@given(cases())
def test_plans_are_what_loops_say(c):
    made, swaps, fetches = run(c)
    wanted_swaps, wanted_fetches, misses, share, top, wanted = slow_plan(c)
    assert swaps == wanted_swaps
    assert fetches == wanted_fetches
    assert made.misses.tolist() == misses.tolist() and made.wanted.tolist() == wanted
    assert made.top.dtype == torch.bool and made.top.tolist() == top.tolist()
    assert made.missed_mass.dtype == torch.float32
    np.testing.assert_allclose(made.missed_mass.numpy(), share, rtol=1e-5, atol=1e-7)


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(0, 999))
def test_any_part_of_a_plan_keeps_w_distinct_blocks_the_pinned_and_the_wanted_ones(c, seed):
    _, swaps, fetches = run(c)
    rng = random.Random(seed)
    after = {(i, head): {int(c.slot_of[i, head, block]): block for block in range(int(c.blocks[i])) if c.slot_of[i, head, block] >= 0}
             for i, head in np.ndindex(*c.mass.shape[:2])}
    before = {place: dict(table) for place, table in after.items()}
    for i, head, slot, block in rng.sample(swaps, rng.randint(0, len(swaps))):
        assert block < c.blocks[i] and block not in before[i, head].values()
        assert before[i, head][slot] not in slow_best(c, i, competing(c, i, head))
        after[i, head][slot] = block
    for (i, head), table in after.items():
        assert len(set(table.values())) == len(table) == c.w[i]
        assert {block for block in before[i, head].values() if c.pinned[i, block]} <= set(table.values())
    assert len({swap[:3] for swap in swaps}) == len(swaps) == len({(i, head, block) for i, head, _, block in swaps})
    assert len(set(fetches)) == len(fetches) and set(fetches) <= {(i, head, block) for i, head, _, block in swaps}
    for place in fetches:
        assert not c.held[place] and not c.flying[place]


@settings(max_examples=200, deadline=None)
@given(cases())
def test_a_plan_carried_out_leaves_nothing_to_do_and_nothing_better_outside(c):
    c = replace(c, actual=None)
    _, swaps, _ = run(c)
    slot_of = c.slot_of.clone()
    for i, head, slot, block in swaps:
        slot_of[i, head, : c.blocks[i]].masked_fill_(c.slot_of[i, head, : c.blocks[i]] == slot, -1)
        slot_of[i, head, block] = slot
    again, swaps, fetches = run(replace(c, slot_of=slot_of))
    assert not swaps and not fetches and (c.sticky or not again.misses.any())
    for i in range(len(c.blocks)):
        for head in c.heads(i):
            free = [block for block in range(int(c.blocks[i])) if not c.pinned[i, block]]
            inside = [c.mass[i, head, block].item() for block in free if slot_of[i, head, block] >= 0]
            outside = [c.mass[i, head, block].item() for block in free if slot_of[i, head, block] < 0]
            assert min(inside, default=torch.inf) * (1 + c.sticky) * (1 + 1e-6) >= max(outside, default=-torch.inf)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_a_budget_is_kept_used_up_and_every_head_has_its_floor_of_it(c):
    _, _, fetches = run(c)
    for i, cap in enumerate(c.cap.tolist()):
        waiting = slow_candidates(c, i)
        got = {head: [block for request, one, block in fetches if (request, one) == (i, head)] for head in waiting}
        total, candidates = sum(map(len, got.values())), sum(map(len, waiting.values()))
        assert total == sum(request == i for request, _, _ in fetches)
        for head, blocks in waiting.items():
            assert got[head] == blocks[: len(got[head])], "a head's fetches are its best"
            assert len(got[head]) >= min(c.floor, len(blocks), cap or len(blocks))
        if cap == 0:
            assert total == candidates
        elif c.floor >= cap:
            assert all(len(got[head]) == min(cap, len(waiting[head])) for head in waiting)
        else:
            assert total == min(cap * len(waiting), candidates)
            rank = lambda head, block: torch.inf if c.pinned[i, block] else c.mass[i, head, block].item()  # noqa: E731
            won = [rank(head, block) for head in waiting for block in got[head][c.floor :]]
            lost = [rank(head, block) for head in waiting for block in waiting[head] if block not in got[head]]
            assert min(won, default=torch.inf) >= max(lost, default=-torch.inf), "what is shared goes to the most mass"


@settings(max_examples=150, deadline=None)
@given(cases(), st.floats(0, 4))
def test_more_hysteresis_swaps_a_part_of_what_less_would(c, more):
    _, swaps, _ = run(c)
    _, fewer, _ = run(replace(c, sticky=c.sticky + more))
    assert {(i, head, block) for i, head, _, block in fewer} <= {(i, head, block) for i, head, _, block in swaps}


def same(made, other, heads: list[int], first: int = 0) -> None:
    """``other`` is the plan of ``heads`` only, of the requests from ``first`` on."""
    of = {head: place for place, head in enumerate(heads)}
    last = first + len(other.wanted)
    for one, its in ((made[:4], other[:4]), (made[4:7], other[4:7])):
        mine = [(i - first, of[head], *rest) for i, head, *rest in zip(*(part.tolist() for part in one)) if first <= i < last and head in of]
        assert mine == list(zip(*(part.tolist() for part in its)))
    for one, its in zip((made.misses, made.missed_mass, made.top), (other.misses, other.missed_mass, other.top)):
        torch.testing.assert_close(one[first:last][:, heads], its)


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(1, 15))
def test_dense_heads_are_silent_and_count_for_nobody(c, bits):
    dense = torch.tensor([bool(bits >> head & 1) for head in range(c.mass.shape[1])])
    made, swaps, fetches = run(replace(c, dense=dense))
    assert not any(dense[head] for _, head, *_ in swaps + fetches)
    assert not made.misses[:, dense].any() and not made.missed_mass[:, dense].any() and not made.top[:, dense].any()
    heads = (~dense).nonzero()[:, 0].tolist()
    same(made, run(replace(c, dense=None).of(slice(None), heads))[0], heads)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_requests_know_nothing_of_each_other_and_heads_only_share_the_budget_above_the_floor(c):
    heads = list(range(c.mass.shape[1]))
    made = run(c)[0]
    for i in range(len(c.blocks)):
        same(made, run(c.of(slice(i, i + 1), heads))[0], heads, i)
    alone = replace(c, floor=3)  # no cap is higher
    made = run(alone)[0]
    for head in heads:
        same(made, run(alone.of(slice(None), [head]))[0], [head])


@settings(max_examples=100, deadline=None)
@given(cases())
def test_the_actual_row_measures_and_decides_nothing(c):
    made, swaps, fetches = run(replace(c, actual=None))
    _, *lists = run(replace(c, actual=made.top.float()))
    assert lists == [swaps, fetches]
    ours = run(replace(c, actual=c.mass.clone()))[0]
    assert torch.equal(made.misses, ours.misses) and torch.equal(made.top, ours.top) and torch.equal(made.missed_mass, ours.missed_mass)
    assert 0 <= made.missed_mass.min() <= made.missed_mass.max() <= 1


def written_out(**change) -> Case:
    """One head with blocks 0 and 7 pinned, 1 to 3 resident beside them, and 6, 5 and 4 (in this order) wanted instead."""
    fields = dict(
        mass=torch.tensor([[[0.0, 1, 2, 3, 5, 6, 7, 0]]]), ema=torch.tensor([[[0.0, 0.3, 0.1, 0.2, 0, 0, 0, 0]]]),
        slot_of=torch.tensor([[[10, 11, 12, 13, -1, -1, -1, 17]]]), pinned=pinned_mask(torch.tensor([8]), 1, 1, 8), w=torch.tensor([5]),
        blocks=torch.tensor([8]), held=torch.zeros(1, 1, 8, dtype=torch.bool), flying=torch.zeros(1, 1, 8, dtype=torch.bool), cap=torch.tensor([0]))
    return Case(**{**fields, **change})


def beside(*weights: float, **change) -> Case:
    """Heads like the one above, with so many times its mass."""
    c, s = written_out(), len(weights)
    both = {name: getattr(c, name).repeat(1, s, 1) for name in ("ema", "slot_of", "held", "flying")}
    return replace(c, **{**both, "mass": c.mass * torch.tensor(weights)[:, None], **change})


def mask(*blocks: int) -> torch.Tensor:
    return torch.isin(torch.arange(8), torch.tensor(blocks))[None, None]


def test_the_best_block_replaces_the_worst():
    made, swaps, fetches = run(written_out())
    assert swaps == [(0, 0, 12, 6), (0, 0, 13, 5), (0, 0, 11, 4)] and fetches == [(0, 0, 6), (0, 0, 5), (0, 0, 4)]
    assert made.misses.tolist() == [[3]] and made.wanted.tolist() == [3] and torch.equal(made.top, mask(0, 4, 5, 6, 7))
    assert made.missed_mass.item() == pytest.approx(18 / 24)


def test_a_block_at_hand_replaces_the_worst_before_a_better_one_far_away():
    _, swaps, fetches = run(written_out(held=mask(4)))
    assert swaps == [(0, 0, 13, 6), (0, 0, 11, 5), (0, 0, 12, 4)] and fetches == [(0, 0, 6), (0, 0, 5)]


@pytest.mark.parametrize("floor", [0, 1, 2])
def test_the_cap_counts_new_fetches_only(floor):
    made, swaps, fetches = run(written_out(flying=mask(6), cap=torch.tensor([1]), floor=floor))
    assert fetches == [(0, 0, 5)] and len(swaps) == 3 and made.misses.tolist() == [[3]]


@pytest.mark.parametrize("floor, fetched", [(0, [(0, 6), (0, 5), (0, 4), (1, 6), (1, 5), (1, 4)]), (1, [(0, 6), (0, 5), (0, 4), (1, 6), (1, 5), (2, 6)]),
                                            (2, [(0, 6), (0, 5), (1, 6), (1, 5), (2, 6), (2, 5)]), (9, [(0, 6), (0, 5), (1, 6), (1, 5), (2, 6), (2, 5)])])
def test_heads_share_a_budget_above_the_floor(floor, fetched):
    assert run(beside(1, 0.5, 0.125, cap=torch.tensor([2]), floor=floor))[2] == [(0, head, block) for head, block in fetched]


def test_a_strong_head_takes_what_has_no_floor():
    assert run(beside(0.5, 1, cap=torch.tensor([1])))[2] == [(0, 1, 6), (0, 1, 5)]
    assert run(beside(0.5, 1, cap=torch.tensor([1]), dense=torch.tensor([False, True])))[2] == [(0, 0, 6)]
    assert run(beside(1, 1, 1, cap=torch.tensor([1])))[2] == [(0, 0, 6), (0, 1, 6), (0, 2, 6)]


def test_what_a_head_leaves_of_its_floor_others_may_have_unless_the_floor_is_the_cap():
    held = torch.cat([mask(), mask(4, 5, 6)], 1)
    assert run(beside(1, 1, held=held, cap=torch.tensor([2]), floor=1))[2] == [(0, 0, 6), (0, 0, 5), (0, 0, 4)]
    assert run(beside(1, 1, held=held, cap=torch.tensor([2]), floor=2))[2] == [(0, 0, 6), (0, 0, 5)]


def test_a_resident_block_stays_until_another_is_better_by_the_margin():
    made, swaps, _ = run(written_out(sticky=1.0))  # 2, 4 and 6 against 5, 6 and 7: of 6 and 6 the earlier
    assert swaps == [(0, 0, 12, 6), (0, 0, 11, 5)] and made.misses.tolist() == [[3]] and torch.equal(made.top, mask(0, 4, 5, 6, 7))


def test_the_actual_row_alone_is_what_misses_are_measured_by():
    made, swaps, _ = run(written_out(actual=torch.tensor([[[1.0, 4, 3, 0, 2, 0, 0, 0]]])))
    assert len(swaps) == 3 and made.misses.tolist() == [[1]] and made.missed_mass.item() == pytest.approx(0.2) and torch.equal(made.top, mask(0, 1, 2, 4, 7))


def test_no_mass_is_no_missed_mass():
    assert run(written_out(actual=torch.zeros(1, 1, 8)))[0].missed_mass.tolist() == [[0.0]]


def test_a_pinned_block_that_is_missing_comes_first():
    c = written_out(slot_of=torch.tensor([[[10, 11, 12, 13, 17, -1, -1, -1]]]), cap=torch.tensor([1]))
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
    assert made.missed_mass.tolist() == [[0.0]] and not made.top.any()


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
