"""The host cache against a slow dictionary, and under threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.host_cache import HostCache
from transport.errors import CapacityError, ConfigError

PIECES, NUMBERS, BYTES = 3, 12, 8
WORTH = np.where(np.arange(NUMBERS) % 3 == 1, np.pi, 1.0)  # irrational: no two ages are equal after division


class Slow:
    """What a ``HostCache`` of ``capacity`` pieces should do, a piece at a time."""

    def __init__(self, capacity: int, worth: np.ndarray):
        self.capacity, self.worth = capacity, worth
        self.held: dict[tuple, bytes] = {}
        self.used: dict[tuple, int] = {}
        self.pinned: set[tuple] = set()
        self.reserved = self.evicted = self.uncached = self.peak = self.uses = 0

    def insert(self, keys: list[tuple], data: list[bytes], pinned: bool) -> bool:
        now = self.uses
        self.uses += len(keys)
        new = list(dict.fromkeys(k for k in keys if k not in self.held))
        old = {k for k in keys if k in self.held}
        if pinned:
            if len(self.pinned | old) + len(new) > self.reserved:
                return False
            self.pinned |= old
            room = self.capacity - len(self.held)
        else:
            room = self.capacity - max(self.reserved, len(self.pinned)) - (len(self.held) - len(self.pinned))
        if new and len(new) > room:
            victims = sorted((k for k in self.held if k not in self.pinned and k not in old), key=lambda k: (self.used[k] - now) / self.worth[k[1]])
            victims = victims[: max(len(new) - room, self.capacity // 16)]
            for key in victims:
                del self.held[key]
            room += len(victims)
            self.evicted += len(victims)
        placed = new[: max(0, room)]
        self.uncached += len(new) - len(placed)
        for i, (key, value) in enumerate(zip(keys, data)):
            if key in self.held or key in placed:
                self.held[key], self.used[key] = value, now + i
        self.pinned |= set(placed) if pinned else set()
        self.peak = max(self.peak, len(self.held))
        return True

    def read(self, keys: list[tuple]) -> list[bytes | None]:
        self.used.update({key: self.uses + i for i, key in enumerate(keys) if key in self.held})
        self.uses += len(keys)
        return [self.held.get(key) for key in keys]

    def reserve(self, n: int) -> bool:
        fits = self.reserved + n <= self.capacity
        self.reserved += n if fits else 0
        return fits

    def drop(self, numbers: set[int]) -> None:
        self.unpin(numbers)
        self.held = {k: v for k, v in self.held.items() if k[1] not in numbers}

    def unpin(self, numbers: set[int]) -> None:
        self.pinned = {k for k in self.pinned if k[1] not in numbers}


def columns(keys: list[tuple]) -> list[np.ndarray]:
    return list(np.array(keys, np.int64).reshape(-1, 2).T)


def rows(data: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(data), np.uint8).reshape(-1, BYTES)


def compare(cache: HostCache, slow: Slow) -> None:
    here = {tuple(k) for k in np.argwhere(cache.slot >= 0).tolist()}
    assert here == set(slow.held)
    assert {k: cache.memory[cache.slot[k]].tobytes() for k in here} == dict(slow.held)
    assert cache.scan() == {"used": len(slow.held), "pinned": len(slow.pinned), "free": slow.capacity - len(slow.held)}
    assert cache.used_bytes == len(slow.held) * BYTES and cache.pinned_bytes == len(slow.pinned) * BYTES
    assert cache.reserved_bytes == slow.reserved * BYTES and cache.peak_bytes == slow.peak * BYTES
    assert (cache.evicted, cache.uncached) == (slow.evicted, slow.uncached)


def numbered(numbers: set[int]) -> np.ndarray:
    return np.array(sorted(numbers), np.int64)


places = st.tuples(st.integers(0, PIECES - 1), st.integers(0, NUMBERS - 1))
blocks = st.sets(st.integers(0, NUMBERS - 1), max_size=6)
operations = st.one_of(
    st.tuples(st.just("insert"), st.lists(places, max_size=14), st.booleans()),
    st.tuples(st.just("read"), st.lists(places, max_size=8)),
    st.tuples(st.just("drop"), blocks),
    st.tuples(st.just("unpin"), blocks),
    st.tuples(st.just("reserve"), st.integers(0, 12)),
    st.tuples(st.just("unreserve"), st.integers(0, 12)),
)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 34), st.booleans(), st.lists(operations, max_size=40))
def test_it_is_what_a_dictionary_would_be(capacity, weighted, steps):
    cache = HostCache(PIECES, NUMBERS, BYTES, capacity * BYTES + BYTES // 2)
    slow = Slow(capacity, WORTH if weighted else np.ones(NUMBERS))
    if weighted:
        cache.worth = lambda numbers: WORTH[numbers]
    value = iter(range(1 << 30))
    for name, *arguments in steps:
        if name == "insert":
            keys, pinned = arguments
            data = [next(value).to_bytes(BYTES, "little") for _ in keys]
            if slow.insert(keys, data, pinned):
                cache.insert(*columns(keys), rows(data), pinned)
            else:
                with pytest.raises(CapacityError, match="reserved"):
                    cache.insert(*columns(keys), rows(data), pinned)
        elif name == "read":
            data, here = cache.read(*columns(arguments[0]))
            wanted = slow.read(arguments[0])
            assert here.tolist() == [w is not None for w in wanted]
            assert [d.tobytes() for d in data] == [w or bytes(BYTES) for w in wanted]
        elif name in ("drop", "unpin"):
            getattr(slow, name)(*arguments)
            for _ in range(2):
                getattr(cache, name)(numbered(*arguments))
        elif name == "reserve":
            assert cache.reserve(*arguments) == slow.reserve(*arguments)
        elif arguments[0] <= slow.reserved:
            slow.reserved -= arguments[0]
            cache.unreserve(*arguments)
        else:
            with pytest.raises(ValueError):
                cache.unreserve(*arguments)
        compare(cache, slow)
    which = np.array([[1, 0, 7], [7, 11, 1]])
    assert np.array_equal(cache.held(which), (cache.slot >= 0)[:, which])
    cache.drop(np.arange(NUMBERS))
    assert cache.scan() == {"used": 0, "pinned": 0, "free": capacity}


def put(cache: HostCache, piece: int, numbers, fill: int = 0, pinned: bool = False) -> None:
    """One piece each of blocks ``numbers``."""
    numbers = np.array(numbers, int)
    cache.insert(np.full(len(numbers), piece), numbers, np.full((len(numbers), BYTES), fill, np.uint8), pinned)


def filled(n: int, capacity: int, numbers: int = 1000, **more) -> HostCache:
    cache = HostCache(4, numbers, BYTES, capacity * BYTES, **more)
    put(cache, 0, range(n))
    return cache


def test_the_least_recently_used_sixteenth_goes_first():
    cache = filled(160, 160)
    cache.read(np.zeros(5, int), np.arange(5))
    put(cache, 1, [0], 1)
    assert np.flatnonzero(cache.slot[0] < 0)[:10].tolist() == list(range(5, 15)) and cache.evicted == 10
    assert (cache.slot[0, :5] >= 0).all() and cache.slot[1, 0] >= 0


def test_pieces_of_blocks_worth_more_age_slower_by_that_factor():
    """Blocks 0 to 9 are worth four times what the others are, which are used later."""
    cache = HostCache(1, 100, BYTES, 20 * BYTES)
    cache.worth = lambda numbers: np.where(numbers < 10, 4.0, 1.0)
    put(cache, 0, range(10))  # used at 0..9
    cache.read(np.zeros(30, int), np.full(30, 99))
    put(cache, 0, range(10, 20))  # used at 40..49
    cache.read(np.zeros(3, int), np.full(3, 99))
    put(cache, 0, range(20, 26))  # at 53: the ages of 0..9 count as 13.25, 13, 12.75..., those of 10..19 are 13, 12, 11...
    assert np.flatnonzero(cache.slot[0] < 0)[:7].tolist() == [0, 1, 2, 3, 4, 10, 26]
    assert cache.evicted == 6 and cache.uncached == 0


def test_room_promised_to_pinned_pieces_is_taken_from_the_others_only_when_used():
    cache = filled(10, 10)
    assert cache.reserve(6) and not cache.reserve(5) and cache.reserve(4) and cache.evicted == 0
    cache.unreserve(4)
    put(cache, 1, [0], 1)
    assert cache.used_bytes == 4 * BYTES and cache.evicted == 7, "others keep off what is promised"
    put(cache, 2, range(6), 1, pinned=True)
    assert cache.used_bytes == 10 * BYTES and cache.evicted == 7
    with pytest.raises(CapacityError) as caught:
        put(cache, 2, [6], 1, pinned=True)
    assert caught.value.limit == "6 of 10 pieces"


def test_what_is_no_longer_pinned_stays_until_its_room_is_wanted():
    cache = filled(0, 10)
    assert cache.reserve(10)
    put(cache, 2, range(10), 1, pinned=True)
    cache.unpin(np.arange(8))
    assert cache.used_bytes == 10 * BYTES and cache.pinned_bytes == 2 * BYTES and cache.held(np.arange(10))[2].all()
    cache.unreserve(8)
    put(cache, 0, range(100, 108))
    assert cache.held(np.arange(10))[2].tolist() == [False] * 8 + [True] * 2 and cache.held(np.arange(100, 108))[0].all()
    put(cache, 2, [0, 1], 1)
    assert cache.pinned_bytes == 2 * BYTES, "back, and nothing of the old pin with it"


def test_more_than_there_is_room_for_is_left_out_and_counted():
    cache = HostCache(1, 50, BYTES, 20 * BYTES)
    assert cache.reserve(15)
    put(cache, 0, range(30), 1)
    assert cache.held(np.arange(50))[0].tolist() == [True] * 5 + [False] * 45 and cache.uncached == 25


def test_the_average_is_weighed_by_time():
    now = [100.0]
    cache = HostCache(1, 10, BYTES, 10 * BYTES, clock=lambda: now[0])
    assert cache.average_bytes() == 0.0
    now[0] = 102.0
    put(cache, 0, range(4))
    now[0] = 103.0
    put(cache, 0, range(4, 10))
    now[0] = 105.0
    cache.drop(np.arange(4))
    now[0] = 108.0
    assert cache.average_bytes() == pytest.approx((2 * 0 + 1 * 4 + 2 * 10 + 3 * 6) * BYTES / 8)
    assert cache.peak_bytes == 10 * BYTES and cache.used_bytes == 6 * BYTES


@pytest.mark.parametrize("sizes", [(0, 1, 8, 64), (1, 0, 8, 64), (1, 1, 0, 64), (1, 1, 8, -1), (1, 1, 1, 1 << 40)])
def test_sizes_that_cannot_be(sizes):
    with pytest.raises(ConfigError):
        HostCache(*sizes)


def test_memory_that_is_not_to_be_had():
    with pytest.raises(CapacityError):
        HostCache(1, 1, 1 << 60, 1 << 63)


@pytest.mark.parametrize("wrong", [dict(piece=[3]), dict(piece=[-1]), dict(number=[-1]), dict(number=[4]), dict(data=np.zeros((1, BYTES - 1), np.uint8))])
def test_what_is_outside_the_tables_is_refused_and_changes_nothing(wrong):
    cache = HostCache(3, 4, BYTES, 5 * BYTES)
    good = dict(piece=[0], number=[0], data=np.zeros((1, BYTES), np.uint8)) | wrong
    with pytest.raises(ValueError):
        cache.insert(np.array(good["piece"]), np.array(good["number"]), good["data"])
    assert cache.scan() == {"used": 0, "pinned": 0, "free": 5}


@pytest.mark.parametrize("outside", [-1, 4])
def test_blocks_outside_the_tables_end_no_piece(outside):
    cache = HostCache(3, 4, BYTES, 5 * BYTES)
    assert cache.reserve(4)
    put(cache, 1, range(4), pinned=True)
    for end in (cache.drop, cache.unpin):
        with pytest.raises(ValueError):
            end(np.array([0, outside]))
    assert cache.scan() == {"used": 4, "pinned": 4, "free": 1}


def test_threads_see_whole_pieces_or_none():
    """Each piece's bytes say whose they are; eviction, drops, reads and inserts run at once. A quarter of the blocks is pinned at times."""
    pieces, numbers, size, quarter = 5, 160, 64, 40
    cache, stop, faults = HostCache(pieces, numbers, size, 300 * size), threading.Event(), []
    cache.worth = lambda which: 1.0 + which % 3
    assert cache.reserve(100)

    def content(piece, number):
        return np.repeat((piece * numbers + number).astype(np.uint32)[:, None], size // 4, 1).view(np.uint8)

    def run(seed: int, body) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                n = int(rng.integers(1, 60))
                body(rng, rng.integers(0, pieces, n), rng.integers(0, numbers, n))
        except BaseException as error:
            faults.append(error)

    def insert(rng, piece, number):
        cache.insert(piece, number, content(piece, number))

    def pin(rng, piece, number):
        number = numbers - 1 - number % quarter
        try:
            cache.insert(piece, number, content(piece, number), pinned=True)
        except CapacityError:
            (cache.drop if rng.integers(0, 2) else cache.unpin)(np.arange(numbers - quarter, numbers))

    def read(rng, piece, number):
        data, here = cache.read(piece, number)
        assert np.array_equal(data[here], content(piece, number)[here])
        cache.held(np.arange(numbers))

    def drop(rng, piece, number):
        cache.drop(np.arange(quarter) + quarter * int(rng.integers(0, numbers // quarter)))
        now = cache.scan()
        assert now["used"] + now["free"] == 300 and now["pinned"] <= 100
        stop.wait(0.001)

    threads = [threading.Thread(target=run, args=(seed, body)) for seed, body in enumerate((insert, insert, pin, read, read, drop))]
    for thread in threads:
        thread.start()
    stop.wait(1.5)
    stop.set()
    for thread in threads:
        thread.join(10)
    assert not faults, faults
    cache.drop(np.arange(numbers))
    cache.unreserve(100)
    assert cache.scan() == {"used": 0, "pinned": 0, "free": 300} and cache.reserved_bytes == cache.used_bytes == cache.pinned_bytes == 0
    assert sorted(cache._free.tolist()) == list(range(300)), "every slot is free, once"
