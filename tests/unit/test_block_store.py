"""Numbers of blocks against a slow dictionary, and which pieces the host cache gives up for their sake."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.block_store import RELUCTANCE, BlockStore
from decode_node.host_cache import HostCache

FEW, PIECES, BYTES = 5, 3, 8
HASHES = [bytes([65 + i]) * 32 for i in range(14)]


class Slow:
    """What a ``BlockStore`` of ``FEW`` numbers should do, a block at a time; which of the new numbers a block gets is the store's
    to say. ``pieces``: numbers that have some in the host cache, which is large enough for all."""

    def __init__(self):
        self.holders: dict[int, int] = {}  # numbers in use
        self.hash_of: dict[int, bytes] = {}
        self.used: dict[int, int] = {}
        self.known: dict[int, tuple[int, int]] = {}
        self.generated: set[int] = set()
        self.pieces: set[int] = set()
        self.clock = self.evicted = 0

    def number_of(self, digest: bytes) -> int | None:
        return next((n for n, h in self.hash_of.items() if h == digest), None)

    def idle(self) -> set[int]:
        return {n for n in self.hash_of if not self.holders[n]}

    def acquire(self, hashes: list[bytes], anonymous: int, numbers: np.ndarray | None) -> None:
        found = [self.number_of(h) for h in hashes] + [None] * anonymous
        need, idle = found.count(None), self.idle() - set(found)
        short = need - (FEW - len(self.holders))
        if short > len(idle):
            assert numbers is None
            return
        assert numbers.dtype == np.int64 and len(set(numbers.tolist())) == len(found)
        given = [(n, f) for n, f in zip(numbers.tolist(), found)]
        assert all(n == f for n, f in given if f is not None), "a hash has the number that it had"
        new = {n for n, f in given if f is None}
        victims = new & self.holders.keys()
        assert victims <= idle and len(victims) == max(0, short), "only as many go as must, and of those that nobody holds"
        assert all(self.used[v] <= self.used[n] for v in victims for n in idle - victims), "the longest unused go first"
        self.evicted += len(victims)
        self.free(victims)
        for number, digest in zip(numbers.tolist(), [*hashes, *[None] * anonymous]):
            self.holders[number] = self.holders.get(number, 0) + 1
            if digest is not None:
                self.hash_of[number] = digest
        self.touch(numbers.tolist())

    def release(self, numbers: list[int]) -> None:
        for number in numbers:
            self.holders[number] -= 1
        loose = [n for n in numbers if not self.holders[n]]
        self.touch(loose)
        self.free({n for n in loose if n not in self.hash_of})

    def name(self, numbers: list[int], hashes: list[bytes]) -> None:
        self.generated |= set(numbers)
        for number, digest in zip(numbers, hashes):
            if self.number_of(digest) is None:
                self.hash_of[number] = digest

    def forget(self) -> None:
        idle = self.idle()
        self.hash_of.clear()
        self.free(idle)

    def touch(self, numbers: list[int]) -> None:
        self.clock += 1
        self.used.update(dict.fromkeys(numbers, self.clock))

    def free(self, numbers: set[int]) -> None:
        for table in (self.holders, self.hash_of, self.used, self.known):
            for number in numbers:
                table.pop(number, None)
        self.generated -= numbers
        self.pieces -= numbers


def compare(store: BlockStore, slow: Slow) -> None:
    every = np.arange(FEW)
    assert store.holders.tolist() == [slow.holders.get(n, 0) for n in range(FEW)]
    assert len(set(slow.hash_of.values())) == len(slow.hash_of)
    assert [store.has(h) for h in HASHES] == [h in slow.hash_of.values() for h in HASHES]
    assert (store.held, store.cached, store.evicted) == (sum(h > 0 for h in slow.holders.values()), len(slow.idle()), slow.evicted)
    assert sorted(store._free[: store._free_count].tolist()) == sorted(set(range(FEW)) - slow.holders.keys()), "free are those, each once"
    assert store.cache.held(every).any(0).tolist() == [n in slow.pieces for n in range(FEW)]
    for number in slow.holders:
        root, digest = slow.known.get(number, (0, 0))
        assert store.known(np.array([number] * 2), np.array([root, root + 1], np.uint64)).tolist() == [number in slow.known, False]
        assert number not in slow.known or store.digests[number].tolist() == [digest] * PIECES
        assert store.worth(np.array([number]))[0] == (RELUCTANCE if slow.holders[number] or number in slow.generated else 1.0)


def made(size: int = 10, capacity: int = 30) -> BlockStore:
    return BlockStore(size, PIECES, HostCache(PIECES, size, BYTES, capacity * BYTES))


def put(store: BlockStore, numbers, piece: int = 0) -> None:
    """One piece of each of ``numbers``."""
    numbers = np.array(numbers)
    store.cache.insert(np.full(len(numbers), piece), numbers, np.zeros((len(numbers), BYTES), np.uint8))


some = st.integers(0, 1 << 20)
operations = st.one_of(
    st.tuples(st.just("acquire"), st.lists(st.sampled_from(HASHES), unique=True, max_size=4), st.integers(0, 2)),
    st.tuples(st.just("release"), some),
    st.tuples(st.just("name"), some, st.lists(st.sampled_from(HASHES), min_size=1, max_size=3)),
    st.tuples(st.just("learn"), some, st.integers(1, 3)),
    st.tuples(st.just("pieces"), some, st.integers(0, PIECES - 1)),
    st.tuples(st.just("forget")),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(operations, max_size=40))
def test_it_is_what_a_dictionary_would_be(steps):
    store, slow = made(FEW), Slow()
    requests: list[list[int]] = []
    for name, *arguments in steps:
        if name == "acquire":
            numbers = store.acquire(*arguments)
            slow.acquire(*arguments, numbers)
            if numbers is not None:
                requests.append(numbers.tolist())
        elif name == "forget":
            store.forget()
            slow.forget()
        elif requests:
            mine = requests[arguments[0] % len(requests)]
            if name == "release":
                requests.remove(mine)
                store.release(np.array(mine, np.int64))
                slow.release(mine)
            elif name == "name":
                computed = [n for n in mine if n not in slow.hash_of and slow.holders[n] == 1][: len(arguments[1])]
                store.name(np.array(computed, np.int64), arguments[1])
                slow.name(computed, arguments[1])
            elif name == "learn":
                count = len(mine)
                store.learn(np.array(mine, np.int64), np.full(count, arguments[1], np.uint64), np.full((count, PIECES), slow.clock, np.uint64))
                slow.known.update(dict.fromkeys(mine, (arguments[1], slow.clock)))
            else:
                put(store, np.array(mine, np.int64), arguments[1])
                slow.pieces |= set(mine)
        compare(store, slow)
    for mine in requests:
        store.release(np.array(mine, np.int64))
    assert store.held == 0
    store.forget()
    assert sorted(store._free.tolist()) == list(range(FEW)) and store.cached == 0 and store.cache.used_bytes == 0


def test_what_starts_alike_has_the_same_numbers():
    store = made()
    a, b = store.acquire(HASHES[:3], 1), store.acquire(HASHES[:5])
    assert a[:3].tolist() == b[:3].tolist() and len({*a.tolist(), *b.tolist()}) == 6
    assert store.holders[a].tolist() == [2, 2, 2, 1] and store.held == 6 and store.cached == 0
    store.release(a)
    assert store.held == 5 and store.cached == 0, "the one without a hash is free"
    store.release(b)
    assert store.held == 0 and store.cached == 5 and store.acquire(HASHES[3:5]).tolist() == b[3:].tolist()


def test_either_all_numbers_or_none_and_then_nothing_has_changed():
    store = made()
    kept = store.acquire(HASHES[:4], 2)
    put(store, kept)
    idle = store.acquire(HASHES[4:7])
    put(store, idle)
    store.release(idle)
    before = store.holders.copy(), store.used_at.copy()
    assert store.acquire(HASHES[:1] + HASHES[8:13]) is None, "one free number and three unused ones for five"
    assert np.array_equal(store.holders, before[0]) and np.array_equal(store.used_at, before[1])
    assert store.cached == 3 and store.evicted == 0 and store.cache.held(idle)[0].all() and not any(map(store.has, HASHES[7:]))
    assert len(store.acquire(HASHES[:1] + HASHES[8:12])) == 5 and store.evicted == 3
    assert not any(map(store.has, HASHES[4:7])) and store.cache.held(kept)[0].all()


def test_what_is_found_does_not_make_room_for_the_rest():
    """The oldest unused block is one of those asked for."""
    store = made(size=3)
    old = store.acquire(HASHES[:1])
    store.release(old)
    young = store.acquire(HASHES[1:3])
    store.release(young)
    numbers = store.acquire(HASHES[:1] + HASHES[3:5])
    assert numbers[0] == old[0] and store.has(HASHES[0]) and not store.has(HASHES[1]) and store.evicted == 2
    assert store.acquire(HASHES[5:6]) is None


def test_those_go_that_were_let_go_first():
    """Not those that were taken first."""
    store = made(size=5)
    taken = [store.acquire(HASHES[i : i + 1]) for i in range(5)]
    for i in (3, 1, 4, 0, 2):
        store.release(taken[i])
    assert store.acquire([], 1).tolist() == taken[3].tolist() and store.evicted == 1
    store.release(store.acquire(HASHES[1:2]))
    assert set(store.acquire([], 2).tolist()) == {taken[4][0], taken[0][0]} and store.evicted == 3
    assert [store.has(h) for h in HASHES[:5]] == [False, True, True, False, False]


def test_a_number_that_changes_hands_is_new():
    """Neither checksums nor pieces nor worth of who had it."""
    store = made(size=1)
    numbers = store.acquire([], 1)
    store.name(numbers, HASHES[:1])
    store.learn(numbers, np.array([5], np.uint64), np.full((1, PIECES), 9, np.uint64))
    put(store, numbers)
    store.release(numbers)
    assert store.worth(numbers) == RELUCTANCE and store.known(numbers, np.array([5], np.uint64)).all()
    assert store.acquire(HASHES[1:2]).tolist() == numbers.tolist() and store.evicted == 1
    assert not store.known(numbers, np.array([5], np.uint64)).any() and not store.cache.held(numbers).any() and not store.has(HASHES[0])
    store.release(numbers)
    assert store.worth(numbers) == 1.0
    assert store.acquire([], 1).tolist() == numbers.tolist() and store.cached == 0
    store.release(numbers)
    assert store.cached == 0 and store.evicted == 2, "without a hash it is free at once"
    assert store.acquire([], 1).tolist() == numbers.tolist() and store.evicted == 2


def test_the_first_block_to_get_a_hash_keeps_it():
    """Two requests have generated the same; a third finds one of them, and the other goes with its request."""
    store = made()
    a, b = store.acquire([], 2), store.acquire([], 2)
    store.name(a, HASHES[:2])
    store.name(b, HASHES[1:3])
    put(store, [*a, *b])
    store.release(a)
    store.release(b)
    assert store.cached == 3 and store.cache.held(b)[0].tolist() == [False, True]
    assert store.acquire(HASHES[:3]).tolist() == [*a.tolist(), b[1]]


def test_what_is_held_outlives_forgetting_and_ends_with_its_last_request():
    store = made()
    mine, idle = store.acquire(HASHES[:2]), store.acquire(HASHES[2:4])
    again = store.acquire(HASHES[:2])
    put(store, [*mine, *idle])
    store.release(idle)
    store.forget()
    assert not any(map(store.has, HASHES)) and store.cached == 0 and store.held == 2
    assert store.cache.held(mine)[0].all() and not store.cache.held(idle).any()
    other = store.acquire(HASHES[:2])
    assert not set(other.tolist()) & set(mine.tolist()), "the same hashes are other blocks from now on"
    store.release(again)
    assert store.cache.held(mine)[0].all() and store.held == 4
    store.release(mine)
    assert not store.cache.held(mine).any() and store.held == 2 and store.has(HASHES[0])


def test_a_block_is_let_go_as_often_as_it_was_taken():
    store = made()
    numbers = store.acquire(HASHES[:1])
    store.release(numbers)
    with pytest.raises(AssertionError, match="twice"):
        store.release(numbers)


# -- which pieces go ------------------------------------------------------------------------------------------------


def pass_time(store: BlockStore, uses: int) -> None:
    """Reads of what is not there."""
    _, here = store.cache.read(np.full(uses, PIECES - 1), np.zeros(uses, int))
    assert not here.any()


@pytest.mark.parametrize("kind", ["held", "generated"])
@pytest.mark.parametrize("idle_age,older_age,goes", [(10, 39, "idle"), (10, 41, "older"), (20, 21, "idle"), (20, 79, "idle"), (20, 81, "older")])
def test_what_a_tier_has_and_nobody_wants_goes_before_what_is_up_to_four_times_as_old(kind, idle_age, older_age, goes):
    """Ages count uses of the cache. ``older`` belongs to a running request, or was generated here by one that has ended."""
    assert RELUCTANCE == 4
    store = made(capacity=2)
    older, idle, new = store.acquire([], 1), store.acquire(HASHES[:1]), store.acquire(HASHES[1:2])
    put(store, older)
    pass_time(store, older_age - idle_age - 1)
    put(store, idle)
    pass_time(store, idle_age - 1)
    store.release(idle)
    if kind == "generated":
        store.name(older, HASHES[2:3])
        store.release(older)
    put(store, new)
    assert store.cache.held(new)[0].all()
    assert store.cache.held(np.concatenate([older, idle]))[0].tolist() == [goes != "older", goes != "idle"]


def test_among_blocks_of_one_kind_the_longest_unused_piece_goes():
    """A piece that was read is young again, whoever holds its block now."""
    store = made(capacity=4)
    running, idle = store.acquire([], 2), store.acquire(HASHES[:2])
    put(store, [*running, *idle])
    store.release(idle)
    store.cache.read(np.zeros(2, int), np.array([running[0], idle[0]]))
    assert store.cache.held(np.array([*running, *idle]))[0].all()
    pass_time(store, 100)
    put(store, store.acquire([], 2))
    assert store.cache.held(np.array([*running, *idle]))[0].tolist() == [True, True, False, False]
    put(store, store.acquire([], 1))
    assert store.cache.held(running)[0].tolist() == [True, False]
