"""The host cache against a slow dictionary, and under threads."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.host_cache import HostCache
from transport.errors import CapacityError, ConfigError

SETS, PIECES, BLOCKS, BYTES = 2, 3, 6, 8


class Slow:
    """What a ``HostCache`` of ``capacity`` pieces should do, a piece at a time."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.held: OrderedDict[tuple, bytes] = OrderedDict()  # least recently used first
        self.pinned: set[tuple] = set()
        self.reserved = self.evicted = self.uncached = self.peak = 0

    def insert(self, keys: list[tuple], data: list[bytes], pinned: bool) -> bool:
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
            victims = [k for k in self.held if k not in self.pinned and k not in old]
            victims = victims[: max(len(new) - room, self.capacity // 16)]
            for key in victims:
                del self.held[key]
            room += len(victims)
            self.evicted += len(victims)
        placed = new[: max(0, room)]
        self.uncached += len(new) - len(placed)
        for key, value in zip(keys, data):
            if key in self.held or key in placed:
                self.held[key] = value
                self.held.move_to_end(key)
        self.pinned |= set(placed) if pinned else set()
        self.peak = max(self.peak, len(self.held))
        return True

    def read(self, keys: list[tuple]) -> list[bytes | None]:
        for key in keys:
            if key in self.held:
                self.held.move_to_end(key)
        return [self.held.get(key) for key in keys]

    def reserve(self, n: int) -> bool:
        fits = self.reserved + n <= self.capacity
        self.reserved += n if fits else 0
        return fits

    def drop(self, which: int) -> None:
        for key in [k for k in self.held if k[0] == which]:
            del self.held[key]
            self.pinned.discard(key)


def columns(keys: list[tuple]) -> list[np.ndarray]:
    return list(np.array(keys, np.int64).reshape(-1, 3).T)


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


places = st.tuples(st.integers(0, PIECES - 1), st.integers(0, BLOCKS - 1))
operations = st.one_of(
    st.tuples(st.just("insert"), st.integers(0, SETS - 1), st.lists(places, max_size=14), st.booleans()),
    st.tuples(st.just("read"), st.lists(st.tuples(st.integers(0, SETS - 1), places), max_size=8)),
    st.tuples(st.just("drop"), st.integers(0, SETS - 1)),
    st.tuples(st.just("reserve"), st.integers(0, 12)),
    st.tuples(st.just("unreserve"), st.integers(0, 12)),
)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 34), st.lists(operations, max_size=40))
def test_it_is_what_a_dictionary_would_be(capacity, steps):
    cache, slow = HostCache(SETS, PIECES, BLOCKS, BYTES, capacity * BYTES + BYTES // 2), Slow(capacity)
    value = iter(range(1 << 30))
    for name, *arguments in steps:
        if name == "insert":
            which, at, pinned = arguments
            data = [next(value).to_bytes(BYTES, "little") for _ in at]
            keys = [(which, *place) for place in at]
            if slow.insert(keys, data, pinned):
                cache.insert(which, *columns(keys)[1:], rows(data), pinned)
            else:
                with pytest.raises(CapacityError, match="reserved"):
                    cache.insert(which, *columns(keys)[1:], rows(data), pinned)
        elif name == "read":
            keys = [(which, *place) for which, place in arguments[0]]
            data, here = cache.read(*columns(keys))
            wanted = slow.read(keys)
            assert here.tolist() == [w is not None for w in wanted]
            assert [d.tobytes() for d in data] == [w or bytes(BYTES) for w in wanted]
        elif name == "drop":
            slow.drop(*arguments)
            cache.drop(*arguments)
            cache.drop(*arguments)
        elif name == "reserve":
            assert cache.reserve(*arguments) == slow.reserve(*arguments)
        elif arguments[0] <= slow.reserved:
            slow.reserved -= arguments[0]
            cache.unreserve(*arguments)
        else:
            with pytest.raises(ValueError):
                cache.unreserve(*arguments)
        compare(cache, slow)
    held = cache.held(np.array([1, 0, 1]), 4)
    assert np.array_equal(held, (cache.slot >= 0)[[1, 0, 1], :, :4])
    for which in range(SETS):
        cache.drop(which)
    assert cache.scan() == {"used": 0, "pinned": 0, "free": capacity}


def filled(n: int, capacity: int, blocks: int = 1000, **more) -> HostCache:
    cache = HostCache(4, 1, blocks, BYTES, capacity * BYTES, **more)
    cache.insert(0, np.zeros(n, int), np.arange(n), np.zeros((n, BYTES), np.uint8))
    return cache


def test_the_least_recently_used_sixteenth_goes_first():
    cache = filled(160, 160)
    cache.read(np.zeros(5, int), np.zeros(5, int), np.arange(5))
    cache.insert(1, np.zeros(1, int), np.zeros(1, int), np.ones((1, BYTES), np.uint8))
    assert np.flatnonzero(cache.slot[0, 0] < 0)[:10].tolist() == list(range(5, 15)) and cache.evicted == 10
    assert (cache.slot[0, 0, :5] >= 0).all() and cache.slot[1, 0, 0] >= 0


def test_room_promised_to_pinned_pieces_is_taken_from_the_others_only_when_used():
    cache = filled(10, 10)
    assert cache.reserve(6) and not cache.reserve(5) and cache.reserve(4) and cache.evicted == 0
    cache.unreserve(4)
    cache.insert(1, np.zeros(1, int), np.zeros(1, int), np.ones((1, BYTES), np.uint8))
    assert cache.used_bytes == 4 * BYTES and cache.evicted == 7, "others keep off what is promised"
    cache.insert(2, np.zeros(6, int), np.arange(6), np.ones((6, BYTES), np.uint8), pinned=True)
    assert cache.used_bytes == 10 * BYTES and cache.evicted == 7
    with pytest.raises(CapacityError) as caught:
        cache.insert(2, np.zeros(1, int), np.array([6]), np.ones((1, BYTES), np.uint8), pinned=True)
    assert caught.value.limit == "6 of 10 pieces"


def test_more_than_there_is_room_for_is_left_out_and_counted():
    cache = HostCache(1, 1, 50, BYTES, 20 * BYTES)
    assert cache.reserve(15)
    cache.insert(0, np.zeros(30, int), np.arange(30), np.ones((30, BYTES), np.uint8))
    assert cache.held(np.array([0]), 50)[0, 0].tolist() == [True] * 5 + [False] * 45 and cache.uncached == 25


def test_the_average_is_weighed_by_time():
    now = [100.0]
    cache = HostCache(2, 1, 10, BYTES, 10 * BYTES, clock=lambda: now[0])
    assert cache.average_bytes() == 0.0
    now[0] = 102.0
    cache.insert(0, np.zeros(4, int), np.arange(4), np.zeros((4, BYTES), np.uint8))
    now[0] = 103.0
    cache.insert(1, np.zeros(6, int), np.arange(6), np.zeros((6, BYTES), np.uint8))
    now[0] = 105.0
    cache.drop(0)
    now[0] = 108.0
    assert cache.average_bytes() == pytest.approx((2 * 0 + 1 * 4 + 2 * 10 + 3 * 6) * BYTES / 8)
    assert cache.peak_bytes == 10 * BYTES and cache.used_bytes == 6 * BYTES


@pytest.mark.parametrize("sizes", [(0, 1, 1, 8, 64), (1, 1, 1, 0, 64), (1, 1, 1, 8, -1), (1, 1, 1, 1, 1 << 40)])
def test_sizes_that_cannot_be(sizes):
    with pytest.raises(ConfigError):
        HostCache(*sizes)


def test_memory_that_is_not_to_be_had():
    with pytest.raises(CapacityError):
        HostCache(1, 1, 1, 1 << 60, 1 << 63)


@pytest.mark.parametrize("wrong", [dict(piece=[3]), dict(block=[-1]), dict(which=2), dict(data=np.zeros((1, BYTES - 1), np.uint8))])
def test_what_is_outside_the_tables_is_refused_and_changes_nothing(wrong):
    cache = HostCache(2, 3, 4, BYTES, 5 * BYTES)
    good = dict(which=1, piece=[0], block=[0], data=np.zeros((1, BYTES), np.uint8)) | wrong
    with pytest.raises(ValueError):
        cache.insert(good["which"], np.array(good["piece"]), np.array(good["block"]), good["data"])
    assert cache.scan() == {"used": 0, "pinned": 0, "free": 5}
    for which in (-1, 2):
        with pytest.raises(ValueError):
            cache.drop(which)


def test_threads_see_whole_pieces_or_none():
    """Each piece's bytes say whose they are; eviction, drops, reads and inserts run at once."""
    sets, pieces, blocks, size = 4, 5, 40, 64
    cache, stop, faults = HostCache(sets, pieces, blocks, size, 300 * size), threading.Event(), []
    assert cache.reserve(100)

    def content(which, piece, block):
        return np.repeat(((which * pieces + piece) * blocks + block).astype(np.uint32)[:, None], size // 4, 1).view(np.uint8)

    def run(seed: int, body) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                n = int(rng.integers(1, 60))
                body(rng, rng.integers(0, pieces, n), rng.integers(0, blocks, n))
        except BaseException as error:
            faults.append(error)

    def insert(rng, piece, block):
        which = int(rng.integers(0, sets))
        cache.insert(which, piece, block, content(np.full(len(piece), which), piece, block))

    def pin(rng, piece, block):
        try:
            cache.insert(3, piece, block, content(np.full(len(piece), 3), piece, block), pinned=True)
        except CapacityError:
            cache.drop(3)

    def read(rng, piece, block):
        which = rng.integers(0, sets, len(piece))
        data, here = cache.read(which, piece, block)
        assert np.array_equal(data[here], content(which, piece, block)[here])
        cache.held(np.arange(sets), blocks)

    def drop(rng, piece, block):
        cache.drop(int(rng.integers(0, sets)))
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
    for which in range(sets):
        cache.drop(which)
    cache.unreserve(100)
    assert cache.scan() == {"used": 0, "pinned": 0, "free": 300} and cache.reserved_bytes == cache.used_bytes == cache.pinned_bytes == 0
    assert sorted(cache._free.tolist()) == list(range(300)), "every slot is free, once"
