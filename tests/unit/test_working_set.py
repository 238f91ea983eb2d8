"""Residency of blocks against a plain dictionary per (layer, KV head): place, replace, grow, fold; and what a plan is made from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.working_set import EMA_DECAY, WorkingSets
from oasis_sglang.selection.scorer import block_mass
from oasis_sglang.selection.summaries import SUMMARIES
from transport.layout import KVLayout

SUMMARY = SUMMARIES["mean_var_int8"]
LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=8, block_tokens=16, dtype="float32", itemsize=4, tp_size=1,
                  summary=SUMMARY.name, summary_bytes=SUMMARY.bytes(8), metadata_lens=(8,))
S, N, W, SINK, RECENT = LAYOUT.pieces, 24, 6, 1, 2
NUMBERS = 90


def make(sets: int = 3) -> WorkingSets:
    """Every block of every set has a number of its own, in no order."""
    made = WorkingSets(LAYOUT, SUMMARY, sets=sets, blocks=N, numbers=NUMBERS, working=W, sink=SINK, recent=RECENT, device="cpu", sticky=0)
    numbers = np.random.default_rng(7).permutation(NUMBERS)[: sets * N].reshape(sets, N)
    for chosen in range(sets):
        made.bind(chosen, 0, numbers[chosen])
    return made


def raw_of(sets: WorkingSets, chosen: int, blocks: int) -> torch.Tensor:
    """Summaries uint8 [S, blocks, bytes] of a set's first blocks, one by one."""
    return torch.stack([sets.raw[:, int(number)] for number in sets.number[chosen, :blocks]], 1)


def keys(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn((*shape, S, 16, 8), generator=torch.Generator().manual_seed(seed))


class Model:
    """One set. ``rows``: for each piece the block in each slot."""

    def __init__(self, selection: np.ndarray, blocks: int):
        self.rows, self.blocks = selection.tolist(), blocks

    def pinned(self, block: int) -> bool:
        return block < SINK or block >= self.blocks - RECENT

    def fold(self, block: int, ema: torch.Tensor) -> list[int]:
        """The earliest of the least liked that may leave."""
        self.blocks, slots = block + 1, []
        for piece, row in enumerate(self.rows):
            victim = min((b for b in row if not self.pinned(b)), key=lambda b: (float(ema[piece, b]), b))
            slots.append(row.index(victim))
            row[slots[-1]] = block
        return slots

    def check(self, sets: WorkingSets, chosen: int) -> None:
        w = len(self.rows[0])
        assert (int(sets.working[chosen]), int(sets.blocks[chosen])) == (w, self.blocks)
        assert sets.block_at[chosen, :, :w].tolist() == self.rows and (sets.block_at[chosen, :, w:] == -1).all()
        for piece, row in enumerate(self.rows):
            assert len(set(row)) == w
            assert sets.slot_of[chosen, piece].tolist() == [row.index(b) if b in row else -1 for b in range(N)]
            assert all(b in row for b in range(self.blocks) if self.pinned(b))


def initial(rng: np.random.Generator, whole: int) -> np.ndarray:
    """int64 [S, min(W, whole)]: pinned blocks and others at random."""
    pinned = [b for b in range(whole) if b < SINK or b >= whole - RECENT]
    others = [b for b in range(whole) if b not in pinned]
    return np.stack([np.sort(np.concatenate([pinned, rng.permutation(others)[: min(W, whole) - len(pinned)]])) for _ in range(S)]).astype(np.int64)


@settings(max_examples=40, deadline=None)
@given(whole=st.integers(0, 14), seed=st.integers(0, 10_000), steps=st.lists(st.sampled_from(["fold", "replace"]), max_size=16))
def test_residency_follows_the_model(whole, seed, steps):
    rng = np.random.default_rng(seed)
    sets = make()
    other = sets.acquire()
    sets.place(other, initial(rng, 10), 10)
    untouched = Model(sets.block_at[other].numpy().copy(), 10)
    chosen = sets.acquire()
    model = Model(initial(rng, whole), whole)
    sets.place(chosen, np.array(model.rows, np.int64).reshape(S, -1), whole)
    for step in steps:
        w = len(model.rows[0])
        if step == "fold" and model.blocks < N:
            block, content = model.blocks, keys(seed + model.blocks)
            if w < W:
                sets.grow(chosen, block, w, content)
                model.rows, model.blocks = [[*row, block] for row in model.rows], block + 1
            else:
                sets.ema[chosen] = torch.from_numpy(rng.integers(0, 3, (S, N)).astype(np.float32))  # many are equal
                assert sets.fold(chosen, block, content).tolist() == model.fold(block, sets.ema[chosen])
            assert torch.equal(sets.raw[:, sets.number[chosen, block]], SUMMARY.build(content))
        elif step == "replace":
            moves = []
            for piece, row in enumerate(model.rows):
                going = [s for s, b in enumerate(row) if not model.pinned(b)]
                coming = [b for b in range(model.blocks) if b not in row]
                n = int(rng.integers(0, min(len(going), len(coming)) + 1))
                moves += [(piece, int(s), int(b)) for s, b in zip(rng.permutation(going)[:n], rng.permutation(coming)[:n])]
            rng.shuffle(moves)
            pieces, slots, blocks = torch.tensor(moves, dtype=torch.int64).view(-1, 3).unbind(1)
            at = torch.full_like(pieces, chosen)
            assert (sets.slot_of[at, pieces, blocks] < 0).all()
            sets.replace(at, pieces, slots, blocks)
            for piece, slot, block in moves:
                model.rows[piece][slot] = block
            assert (sets.slot_of[at, pieces, blocks] >= 0).all()
        model.check(sets, chosen)
        untouched.check(sets, other)


def test_blocks_of_two_sets_are_exchanged_in_one_call():
    sets = make()
    a, b = sets.acquire(), sets.acquire()
    for chosen in (a, b):
        sets.place(chosen, np.tile(np.arange(4, 10), (S, 1)), 10)
    sets.replace(torch.tensor([b, a]), torch.tensor([2, 0]), torch.tensor([1, 1]), torch.tensor([0, 3]))
    assert (sets.block_at[b, 2, 1], sets.block_at[a, 0, 1]) == (0, 3) and sets.slot_of[b, 2, 5] == sets.slot_of[a, 0, 5] == -1
    assert sets.block_at[a, 2, 1] == sets.block_at[b, 0, 1] == 5


def test_sets_are_handed_out_cleared_and_once():
    sets = make(2)
    a, b = sets.acquire(), sets.acquire()
    assert {a, b} == {0, 1} and sets.acquire() is None and (sets.free, sets.size) == (0, 2)
    sets.place(a, np.tile(np.arange(W), (S, 1)), 9)
    sets.ema[a], sets.flying[a] = 1, True
    sets.release(a)
    with pytest.raises(AssertionError, match="twice"):
        sets.release(a)
    assert sets.acquire() == a and sets.free == 0
    for tensor, empty in ((sets.ema, 0), (sets.flying, False), (sets.slot_of, -1), (sets.block_at, -1)):
        assert (tensor[a] == empty).all()
    assert sets.working[a] == sets.blocks[a] == 0


def test_summaries_lie_by_piece_and_number():
    sets = make()
    rows = np.random.default_rng(0).integers(0, 256, (5, S, LAYOUT.summary_bytes)).astype(np.uint8)
    numbers = np.array([70, 3, 89, 0, 41])
    sets.summarise(numbers, rows)
    for i, number in enumerate(numbers):
        for piece in range(S):
            assert sets.raw[piece, number].numpy().tolist() == rows[i, piece].tolist()
    assert not sets.raw[:, np.setdiff1d(np.arange(NUMBERS), numbers)].any()


def test_numbers_are_bound_from_a_block_on_to_one_set():
    sets = make()
    before = sets.number.copy()
    sets.bind(1, 5, np.array([88, 2, 14]))
    before[1, 5:8] = 88, 2, 14
    assert np.array_equal(sets.number, before) and np.array_equal(sets._number.numpy(), before), "those that are scored by as well"


def test_the_tables_take_as_many_bytes_as_is_said():
    sets = make()
    tables = sets.raw, sets.ema, sets.slot_of, sets.block_at, sets.flying, sets.ahead, sets._number
    assert WorkingSets.bytes(LAYOUT, 3, N, NUMBERS, W) == sum(t.nbytes for t in tables)


def test_sets_that_share_blocks_share_their_summaries():
    """A summary that comes late, or that a set has grown, is what the other is scored by."""
    sets = make()
    a, b = sets.acquire(), sets.acquire()
    sets.bind(a, 0, np.array([50, 60, 70]))
    sets.bind(b, 0, np.array([70, 50]))
    sets.place(a, np.tile([0, 1], (S, 1)), 2)
    sets.place(b, np.tile([0, 1], (S, 1)), 2)
    sets.grow(a, 2, 2, keys(1))
    sets.summarise(np.array([60, 50]), SUMMARY.build(keys(2, 2)).numpy())
    queries = torch.randn((1, S, 1, 2, 8), generator=torch.Generator().manual_seed(3)).expand(2, -1, -1, -1, -1)
    mass = scored(sets, [a, b], queries, 3)
    late = SUMMARY.build(keys(2, 2)).transpose(0, 1)
    content = {60: late[:, 0], 50: late[:, 1], 70: SUMMARY.build(keys(1))}
    for row, numbers in enumerate([(50, 60, 70), (70, 50)]):
        alone = block_mass(SUMMARY, queries[:1], [torch.stack([content[n] for n in numbers], 1)], 3)[0, 0]
        assert torch.allclose(mass[row], alone, atol=1e-6) and not mass[row, :, len(numbers) :].any()


def test_a_set_with_more_blocks_than_asked_for_is_scored_over_the_first():
    """Its request has gone since the step began, and a longer one has the set."""
    sets, _ = filled()
    queries = torch.randn((2, S, 1, 2, 8), generator=torch.Generator().manual_seed(4))
    mass = scored(sets, [1, 0], queries, 14)
    for row, chosen in enumerate([1, 0]):
        assert torch.allclose(mass[row], block_mass(SUMMARY, queries[row : row + 1], [raw_of(sets, chosen, 14)], 14)[0, 0], atol=1e-6)


def test_some_pieces_are_scored_as_all_are():
    sets, _ = filled()
    queries = torch.randn((3, S, 2, 2, 8), generator=torch.Generator().manual_seed(4))
    order, part = np.array([2, 0, 1]), slice(1, 3)
    assert torch.allclose(sets.score(order, part, queries[:, part], 20), sets.score(order, slice(0, S), queries, 20)[:, :, part], atol=1e-6)


def planned(sets: WorkingSets, order: list[int], blocks: dict[int, int], seed: int = 5) -> tuple:
    n = max(blocks.values())
    queries = torch.randn((len(order), S, 1, 2, 8), generator=torch.Generator().manual_seed(seed))
    mass = scored(sets, order, queries, n)
    return queries, sets.plan(np.array(order), mass, mass, np.zeros((len(order), S, n), bool), sets.flying[order, :, :n],
                              torch.zeros(len(order), dtype=torch.int64))


def scored(sets: WorkingSets, order: list[int], queries: torch.Tensor, n: int) -> torch.Tensor:
    """float32 [b, S, n] by one row each."""
    return sets.score(np.array(order), slice(0, S), queries, n)[:, 0]


def filled() -> tuple[WorkingSets, dict[int, int]]:
    """Three sets of 10, 20 and 14 blocks with random summaries and averages."""
    sets, blocks = make(), {2: 10, 1: 20, 0: 14}
    assert {sets.acquire() for _ in blocks} == set(blocks)
    sets.raw[:] = 0xFF  # every float16 in there is NaN, should a number past a set's blocks be looked at
    for chosen, count in blocks.items():
        content = keys(chosen, count)
        sets.summarise(sets.number[chosen, :count], SUMMARY.build(content).numpy())
        sets.place(chosen, initial(np.random.default_rng(chosen), count), count)
    sets.ema[:] = torch.rand(sets.ema.shape, generator=torch.Generator().manual_seed(9))
    return sets, blocks


def test_a_plan_smooths_the_mass_of_its_own_sets_only():
    sets, blocks = filled()
    before, order = sets.ema.clone(), [1, 2]
    queries, _ = planned(sets, order, {i: blocks[i] for i in order})
    for row, chosen in enumerate(order):
        count = blocks[chosen]
        mass = block_mass(SUMMARY, queries[row : row + 1], [raw_of(sets, chosen, count)], count)[0, 0]
        assert torch.allclose(sets.ema[chosen, :, :count], before[chosen, :, :count] * EMA_DECAY + mass * (1 - EMA_DECAY), atol=1e-6)
        assert torch.allclose(sets.ema[chosen, :, count:20], before[chosen, :, count:20] * EMA_DECAY) and torch.allclose(mass.sum(-1), torch.tensor(2.0))
    assert torch.equal(sets.ema[0], before[0]) and torch.equal(sets.ema[:, :, 20:], before[:, :, 20:])


def test_a_plan_wants_the_blocks_of_most_mass_and_gives_up_the_least_liked():
    """Each piece on its own: the wanted blocks by mass now, the leaving ones by the average."""
    sets, blocks = filled()
    queries, plan = planned(sets, [0], {0: 14})
    mass = block_mass(SUMMARY, queries, [raw_of(sets, 0, 14)], 14)[0, 0]
    for piece in range(S):
        row = sets.block_at[0, piece].tolist()
        pinned = [0, 12, 13]
        wanted = pinned + sorted((b for b in range(14) if b not in pinned), key=lambda b: -float(mass[piece, b]))[: W - 3]
        missing = [b for b in wanted if b not in row]
        mine = plan.swap_head == piece
        assert plan.swap_block[mine].tolist() == missing and plan.misses[0, piece] == len(missing)
        leaving = sorted((b for b in row if b not in wanted), key=lambda b: float(sets.ema[0, piece, b]))[: len(missing)]
        assert [row[s] for s in plan.swap_slot[mine].tolist()] == leaving
        assert plan.fetch_block[plan.fetch_head == piece].tolist() == missing
    assert plan.wanted.tolist() == [W - 3]


def test_plans_of_several_sets_do_not_depend_on_their_order():
    def outcome(order):
        sets, blocks = filled()
        n = max(blocks[i] for i in order)
        every = torch.randn((3, S, 1, 2, 8), generator=torch.Generator().manual_seed(5))
        held = np.random.default_rng(1).random((3, S, 24)) < 0.3
        sets.flying[:] = torch.from_numpy(np.random.default_rng(2).random((3, S, N)) < 0.3)
        mass = scored(sets, order, every[order], n)
        plan = sets.plan(np.array(order), mass, mass, held[order][:, :, :n], sets.flying[order, :, :n], torch.ones(len(order), dtype=torch.int64))
        swaps = zip(*(t.tolist() for t in plan[:4]))
        fetches = zip(*(t.tolist() for t in plan[4:7]))
        return ({(order[r], *rest) for r, *rest in swaps}, {(order[r], *rest) for r, *rest in fetches}, sets, held)

    swaps, fetches, sets, held = outcome([0, 1, 2])
    assert (swaps, fetches) == outcome([2, 0, 1])[:2] and swaps and fetches
    alone = [outcome([i])[:2] for i in range(3)]
    assert swaps == set.union(*(a for a, _ in alone)) and fetches == set.union(*(b for _, b in alone))
    for chosen, piece, block in fetches:
        assert not held[chosen, piece, block] and not sets.flying[chosen, piece, block] and sets.slot_of[chosen, piece, block] < 0
    assert max(sum(f[:2] == (i, s) for f in fetches) for i in range(3) for s in range(S)) == 1, "one new block per piece"
