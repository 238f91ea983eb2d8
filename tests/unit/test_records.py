"""The record table against a dictionary that forgets nothing, in any order of calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from transport.errors import CapacityError, ProtocolError
from transport.records import FREE, HASH_BYTES, LEASED, MAX_HASHES, SEALED, WRITING, RecordTable, split_hashes


def digest(n: int) -> bytes:
    return n.to_bytes(32, "big")


def test_reserving_is_all_or_nothing():
    table = RecordTable(4)
    table.reserve([], 3)
    before = table.counts(), table.generation.tolist()
    with pytest.raises(CapacityError) as error:
        table.reserve([digest(1)], 1)
    assert error.value.retryable and error.value.limit == "2 records wanted, 1 of 4 available"
    assert (table.counts(), table.generation.tolist()) == before
    with pytest.raises(CapacityError) as error:
        table.reserve([], 5)
    assert not error.value.retryable and error.value.limit == "5 of 4 records"


def test_a_failed_reservation_lets_go_of_the_pages_it_found():
    table = RecordTable(3)
    records, _ = table.reserve([digest(1)], 0)
    table.seal(records, np.array([11], np.uint64), [digest(1)])
    table.unhold(records)
    table.reserve([], 1)
    with pytest.raises(CapacityError):
        table.reserve([digest(1), digest(2)], 1)
    assert table.counts() == {"free": 1, "writing": 1, "cached": 1, "leased": 0}
    again, fresh = table.reserve([digest(1)], 0)
    assert again.tolist() == records.tolist() and not fresh.any() and table.root[again].tolist() == [11]


def test_the_least_recently_used_goes_first_and_never_a_page_of_this_very_prompt():
    table = RecordTable(3)
    for n in (1, 2, 3):
        records, _ = table.reserve([digest(n)], 0)
        table.seal(records, np.array([n], np.uint64), [digest(n)])
        table.unhold(records)
    hit, _ = table.reserve([digest(1)], 0)  # 2 is now the oldest
    table.unhold(hit)
    records, fresh = table.reserve([digest(2), digest(9)], 0)
    assert fresh.tolist() == [False, True]
    assert records[0] == 1 and records[1] == 2, "2 was pinned, so 3 was the oldest left"
    assert table.generation.tolist() == [1, 1, 2]


def put(table: RecordTable, numbers: list[int]) -> None:
    """One prompt of whole pages, written as far as they are not there, and let go of."""
    hashes = [digest(n) for n in numbers]
    records, fresh = table.reserve(hashes, 0)
    new = np.flatnonzero(fresh)
    table.seal(records[new], new.astype(np.uint64), [hashes[i] for i in new], depths=new)
    table.unhold(records)


def squeeze(table: RecordTable, pages: int, among: range) -> list[int]:
    """Takes ``pages`` records for something else; which of ``among`` are still found."""
    records, _ = table.reserve([], pages)
    left = [n for n in among if table.find([digest(n)])[0] >= 0]
    table.unhold(records)
    return left


@pytest.mark.parametrize("pages", range(6))
def test_a_chain_loses_its_tail_first(pages):
    table = RecordTable(5)
    put(table, [1, 2, 3, 4, 5])
    assert squeeze(table, pages, range(1, 6)) == [1, 2, 3, 4, 5][: 5 - pages] and table.evicted == pages


@pytest.mark.parametrize("pages", range(6))
def test_a_chain_grown_by_a_later_prompt_still_loses_its_tail_first(pages):
    """The later prompt finds the prefix when it opens and writes the rest when it commits."""
    table = RecordTable(5)
    put(table, [1, 2, 3])
    put(table, [1, 2, 3, 4, 5])
    assert squeeze(table, pages, range(1, 6)) == [1, 2, 3, 4, 5][: 5 - pages]


def test_recency_counts_before_depth():
    table = RecordTable(6)
    put(table, [1, 2, 3])
    put(table, [7, 8, 9])
    put(table, [1, 2, 3])  # nothing new, but 7, 8, 9 are now the older
    assert squeeze(table, 2, range(1, 10)) == [1, 2, 3, 7]
    put(table, [7])
    assert squeeze(table, 4, range(1, 10)) == [1, 7], "two were free; 3 and 2 are older than 7"
    assert table.evicted == 4


def test_what_is_held_longest_goes_last():
    """A page is in use until it is let go of."""
    table = RecordTable(4)
    put(table, [1, 2])
    held = table.find([digest(1), digest(2)])
    table.hold(held)
    put(table, [8, 9])
    table.unhold(held)
    assert squeeze(table, 2, range(1, 10)) == [1, 2]


def test_the_depth_is_that_of_the_page_in_its_prompt():
    table = RecordTable(4)
    put(table, [1, 2])
    records, fresh = table.reserve([digest(n) for n in (1, 2, 3)], 1)
    new = np.flatnonzero(fresh)
    table.seal(records[new], np.zeros(2, np.uint64), [digest(3), None], depths=new)
    assert table.depth[records].tolist() == [0, 1, 2, 3]


def test_finding_is_not_using():
    table = RecordTable(2)
    put(table, [1])
    put(table, [2])
    assert table.find([digest(1), digest(3), digest(1)]).tolist() == [0, -1, 0] and table.find([]).tolist() == []
    assert squeeze(table, 1, range(1, 3)) == [2] and table.counts()["leased"] == 0


def test_what_is_still_being_written_is_not_found():
    table = RecordTable(2)
    records, _ = table.reserve([digest(1)], 0)
    assert table.find([digest(1)]).tolist() == [-1]
    table.seal(records, np.array([1], np.uint64), [digest(1)])
    assert table.find([digest(1)]).tolist() == records.tolist()


def test_a_record_held_twice_in_one_list_is_let_go_of_twice():
    table = RecordTable(2)
    put(table, [1])
    twice = table.find([digest(1), digest(1)])
    table.hold(twice)
    assert table.holders.tolist() == [2, 0] and table.counts()["leased"] == 1
    table.unhold(twice[:1])
    assert table.counts()["leased"] == 1
    table.unhold(twice[:1])
    assert table.counts() == {"free": 1, "writing": 0, "cached": 1, "leased": 0}


def test_hashes_are_split_or_refused():
    assert split_hashes(b"") == [] and split_hashes(bytes(range(64))) == [bytes(range(32)), bytes(range(32, 64))]
    for raw in (bytes(1), bytes(31), bytes(33), bytes(HASH_BYTES * (MAX_HASHES + 1))):
        with pytest.raises(ProtocolError, match=f"{len(raw)} bytes") as error:
            split_hashes(raw, room=3, peer="p")
        assert (error.value.room, error.value.peer, error.value.limit) == (3, "p", f"{MAX_HASHES} pages")


def test_letting_go_twice_is_noticed():
    table = RecordTable(2)
    records, _ = table.reserve([], 1)
    table.unhold(records)
    with pytest.raises(AssertionError):
        table.unhold(records)


def test_sealing_what_is_not_being_written_is_noticed():
    table = RecordTable(2)
    records, _ = table.reserve([digest(1)], 0)
    table.seal(records, np.array([1], np.uint64), [digest(1)])
    with pytest.raises(AssertionError):
        table.seal(records, np.array([1], np.uint64), [digest(1)])


def test_two_writers_of_one_hash_keep_their_own_records():
    table = RecordTable(4)
    first, fresh_a = table.reserve([digest(1)], 0)
    second, fresh_b = table.reserve([digest(1)], 0)
    assert fresh_a.all() and fresh_b.all() and first[0] != second[0]
    table.seal(second, np.array([22], np.uint64), [digest(1)])
    table.seal(first, np.array([22], np.uint64), [digest(1)])
    third, fresh = table.reserve([digest(1)], 0)
    assert third.tolist() == second.tolist() and not fresh.any()
    table.unhold(first)  # private after all: nobody could find it
    assert table.state[first[0]] == FREE


def test_the_same_page_twice_in_one_prompt():
    table = RecordTable(4)
    records, fresh = table.reserve([digest(1), digest(1)], 0)
    assert fresh.all() and records[0] != records[1]
    table.seal(records, np.array([5, 5], np.uint64), [digest(1), digest(1)])
    again, fresh = table.reserve([digest(1), digest(1)], 0)
    assert not fresh.any() and again[0] == again[1] and table.holders[again[0]] == 3
    table.unhold(again)
    table.unhold(records)
    assert table.counts() == {"free": 3, "writing": 0, "cached": 1, "leased": 0} and not table.holders.any()


class Table(RuleBasedStateMachine):
    """Holds are lists the model keeps; what every record must be is worked out from them anew after every step."""

    @initialize(size=st.integers(1, 12))
    def make(self, size):
        self.size = size
        self.table = RecordTable(size)
        self.writing: list[tuple[list[int], list[bool], list[bytes | None]]] = []
        self.holds: list[list[int]] = []
        self.sealed: dict[bytes, int] = {}  # hash -> record, while the record is findable
        self.used = [0] * size  # when each record was last used, in steps of the model
        self.depth = [0] * size
        self.now = 0
        self.evicted = 0
        self.roots: dict[int, int] = {}
        self.generation = [1] * size
        self.root = 0

    def counted(self) -> dict[int, int]:
        count = dict.fromkeys(range(self.size), 0)
        for records in (*self.holds, *(w[0] for w in self.writing)):
            for record in records:
                count[record] += 1
        return count

    def touch(self, records):
        self.now += 1
        for record in records:
            self.used[record] = self.now

    def free(self, record):
        self.generation[record] += 1
        self.sealed = {h: r for h, r in self.sealed.items() if r != record}

    @rule(hashes=st.lists(st.integers(0, 9), max_size=6, unique=True), private=st.integers(0, 3))
    def reserve(self, hashes, private):
        hashes = [digest(h) for h in hashes]
        if not hashes and not private:
            return
        count = self.counted()
        hits = [self.sealed[h] for h in hashes if h in self.sealed]
        wanted = len(hashes) + private - len(hits)
        free = [r for r in range(self.size) if not count[r] and r not in self.sealed.values()]
        cached = [r for r in self.sealed.values() if not count[r] and r not in hits]
        if len(hashes) + private > self.size or wanted > len(free) + len(cached):
            with pytest.raises(CapacityError) as error:
                self.table.reserve(hashes, private)
            assert error.value.retryable == (len(hashes) + private <= self.size)
            if error.value.retryable:
                self.touch(hits)
            return
        records, fresh = self.table.reserve(hashes, private)
        self.touch(hits)
        for victim in sorted(cached, key=lambda r: (self.used[r], -self.depth[r], r))[: max(0, wanted - len(free))]:
            self.free(victim)
            self.evicted += 1
            free.append(victim)
        assert [r for r, f in zip(records.tolist(), fresh) if not f] == hits
        taken = records[fresh].tolist()
        assert taken == sorted(free)[:wanted], "the lowest free records, after the least recently used were evicted"
        assert set(taken).isdisjoint(r for r, n in count.items() if n)
        self.writing.append((records.tolist(), fresh.tolist(), [*hashes, *[None] * private]))

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def seal(self, data):
        records, fresh, hashes = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        new = [r for r, f in zip(records, fresh) if f]
        roots = list(range(self.root, self.root + len(new)))
        self.root += len(new)
        depths = [n for n, f in enumerate(fresh) if f]
        self.table.seal(np.array(new, np.int64), np.array(roots, np.uint64), [h for h, f in zip(hashes, fresh) if f], depths=np.array(depths, np.int64))
        for record, depth in zip(new, depths):
            self.depth[record] = depth
        self.roots.update(zip(new, roots))
        for record, page_hash in zip(records, hashes):
            if page_hash is not None:
                self.sealed.setdefault(page_hash, record)
        self.touch(new)
        self.holds.append(records)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abort(self, data):
        records, _, _ = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        self.let_go(records)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data):
        self.let_go(self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))))

    @precondition(lambda self: self.sealed)
    @rule(hashes=st.lists(st.integers(0, 9), max_size=6), hold=st.booleans())
    def look(self, hashes, hold):
        """As a lookup does, with hashes named twice too."""
        found = self.table.find([digest(h) for h in hashes])
        assert found.tolist() == [self.sealed.get(digest(h), -1) for h in hashes]
        here = found[found >= 0]
        if hold and len(here):
            self.table.hold(here)
            self.touch(here.tolist())
            self.holds.append(here.tolist())

    def let_go(self, records):
        self.table.unhold(np.array(records, np.int64))
        self.touch(records)
        count = self.counted()
        for record in dict.fromkeys(records):
            if not count[record] and record not in self.sealed.values():
                self.free(record)

    @invariant()
    def agrees(self):
        count = self.counted()
        being_written = [r for records, fresh, _ in self.writing for r, f in zip(records, fresh) if f]
        assert len(being_written) == len(set(being_written)), "two writers share a record"
        for record in range(self.size):
            if record in being_written:
                state = WRITING
            elif count[record]:
                state = LEASED
            else:
                state = SEALED if record in self.sealed.values() else FREE
            assert self.table.state[record] == state
            if state in (SEALED, LEASED):
                assert self.table.root[record] == self.roots[record]
        assert self.table.holders.tolist() == list(count.values())
        assert self.table.generation.tolist() == self.generation and self.table.evicted == self.evicted
        states = self.table.state.tolist()
        names = {"free": FREE, "writing": WRITING, "cached": SEALED, "leased": LEASED}
        assert self.table.counts() == {name: states.count(state) for name, state in names.items()}


Table.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestTable = Table.TestCase


def test_what_is_disowned_is_found_no_more_and_free_once_let_go():
    table = RecordTable(4)
    put(table, [1, 2])
    records, fresh = table.reserve([digest(1), digest(2), digest(3)], 0)
    table.disown(records[:1])
    assert table.find([digest(1), digest(2)]).tolist() == [-1, records[1]] and not fresh[:2].any()
    table.seal(records[2:], np.array([3], np.uint64), [digest(3)], depths=2)
    table.unhold(records)
    assert table.counts() == {"free": 2, "writing": 0, "cached": 2, "leased": 0}
    table.disown(records[1:2])
    assert table.find([digest(2)]).tolist() == [-1]
