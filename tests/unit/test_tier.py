"""The tier's protocol under a fake clock: each answer by itself, then every order of everything."""

from __future__ import annotations

import random

import numpy as np
import pytest
from node_rig import FINGERPRINT, small_layout
from tier_bench import LAYOUT, LIMITS, ROW_BYTES, SEED, Bench, digest, opened

from transport import messages as m
from transport.errors import (
    CapacityError,
    DeadlineExceeded,
    DuplicateRoom,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
    RoomFailed,
    StaleEpoch,
)
from transport.records import WRITING
from transport.tier import TierLimits


def test_the_record_size_these_tests_count_on():
    assert (LAYOUT.payload_bytes, LAYOUT.index_bytes, LAYOUT.pieces, LAYOUT.block_tokens) == (768, 104, 6, 4)


@pytest.fixture
def bench():
    bench = Bench()
    bench.hello("W1")
    bench.hello("R1")
    return bench


# -- hello --------------------------------------------------------------------------------------------------------


def test_nothing_is_served_before_hello():
    bench = Bench()
    for make, fields in ((m.Open, dict(room=1, rank=0, seed=b"", hashes=b"", private=1)), (m.Await, dict(room=1, rank=0, seconds=1.0)), (m.Renew, dict(leases=b"")),
                         (m.Lookup, dict(hashes=digest(1), hold=False))):
        with pytest.raises(StaleEpoch):
            bench.do("R1", make, **fields)
    with pytest.raises(CapacityError) as error:
        bench.hello("R1")
    assert error.value.retryable, "a worker may still come"
    assert isinstance(bench.do("R1", m.Ping), m.Ok)


@pytest.mark.parametrize("field, changes", [
    ("protocol", dict(protocol=m.PROTOCOL - 1)), ("protocol", dict(protocol=m.PROTOCOL + 1)), ("fingerprint", dict(fingerprint="0" * 64)), ("kv_heads", dict(layout=small_layout(kv_heads=1))),
    ("tp_size", dict(layout=small_layout(tp_size=2))), ("block_tokens", dict(layout=small_layout(block_tokens=16))),
    ("dtype", dict(layout=small_layout(dtype="bfloat16"))), ("metadata_lens", dict(layout=small_layout(metadata_lens=(8,))))])
@pytest.mark.parametrize("session", ["W2", "R2"])
def test_hello_refuses_what_differs_and_says_which(bench, session, field, changes):
    reply = bench.say(session, m.Hello, **(dict(protocol=m.PROTOCOL, role="reader" if session == "R2" else "worker", node="n", rank=0, layout=LAYOUT, fingerprint=FINGERPRINT) | changes))
    assert isinstance(reply, m.Failure) and reply.code == "LayoutMismatch" and field in reply.message
    assert session not in bench.tier.sessions


def test_an_unknown_role_is_refused(bench):
    with pytest.raises(ProtocolError):
        bench.hello("R9", role="admin")


def test_the_arena_is_cut_anew_only_when_nobody_holds_anything(bench):
    other = small_layout(head_dim=8, summary_bytes=12)
    bench.open("W1", 1, private=1)
    bench.commit("W1", 1, 1)
    bench.tier.disconnect("W1")
    with pytest.raises(LayoutMismatch):
        bench.hello("W2", layout=other)
    lease = bench.await_("R1", 1).lease
    with pytest.raises(LayoutMismatch):
        bench.hello("W2", layout=other)
    bench.do("R1", m.Release, leases=m.pack([lease], "u8"))
    welcome = bench.hello("W2", layout=other)
    assert welcome.geometry.payload_stride == 1536 and bench.inventory(records=16 * 896 // (1536 + 128)) is True
    with pytest.raises(LayoutMismatch):
        bench.hello("R2")
    assert bench.hello("R3", layout=other).geometry == welcome.geometry


# -- one room -----------------------------------------------------------------------------------------------------


def test_a_room_from_open_to_release(bench):
    reply = bench.open("W1", 7, [digest(1), digest(2)], private=1)
    assert m.unpack(reply.records, "u4").tolist() == [0, 1, 2] and reply.fresh == b"\1\1\1"
    assert bench.inventory(writing=3, free=13, rooms=1, holders=3, held=3) is True
    assert bench.await_("R1", 7) is None and bench.inventory(waiters=1) is True
    order = m.pack([[1, 0]] * 6, "u4")
    assert isinstance(bench.commit("W1", 7, 3, roots=[11, 12, 13], tokens=9, ranking=order), m.Ok)
    [(session, manifest)] = bench.mail()
    assert session == "R1" and manifest.prompt_tokens == 9 and manifest.room == 7 and manifest.metadata == ROW_BYTES
    assert manifest.ranking == order and manifest.seed == SEED and manifest.hashes == digest(1) + digest(2)
    assert m.unpack(manifest.roots, "u8").tolist() == [11, 12, 13] and m.unpack(manifest.generations, "u8").tolist() == [1, 1, 1]
    assert bench.inventory(leased=3, rooms=0, leases=1, waiters=0) is True
    bench.do("R1", m.Release, leases=m.pack([manifest.lease], "u8"))
    bench.do("R1", m.Release, leases=m.pack([manifest.lease, 12345], "u8"))  # idempotent
    assert bench.inventory(cached=2, free=14, leases=0, holders=0) is True
    again = bench.open("W1", 8, [digest(1), digest(2)], private=1)
    assert again.fresh == b"\0\0\1" and m.unpack(again.roots, "u8").tolist() == [11, 12, 0]
    assert m.unpack(again.generations, "u8").tolist() == [1, 1, 2], "the private record was freed once"


@pytest.mark.parametrize("changes", [dict(tokens=13), dict(tokens=8), dict(metadata=(b"",)), dict(metadata=(bytes(12), bytes(8))), dict(roots=[1, 2])])
def test_a_commit_that_is_not_what_was_opened(bench, changes):
    bench.open("W1", 7, private=3)
    with pytest.raises(ProtocolError):
        bench.commit("W1", 7, **(dict(pages=3) | changes))
    assert bench.inventory(writing=3, rooms=1) is True
    bench.commit("W1", 7, 3)


@pytest.mark.parametrize("size", [4, 4 * 5, 4 * 6 + 1, 4 * 7, 4 * 6 * 3, 1 << 20])
def test_a_ranking_that_cannot_be_one_of_the_prompt(bench, size):
    """11 tokens are two whole blocks: at most two per (layer, KV head), as many for each of the six."""
    bench.open("W1", 7, private=3)
    with pytest.raises(ProtocolError, match="ranking") as error:
        bench.commit("W1", 7, 3, tokens=11, ranking=bytes(size))
    assert error.value.room == 7 and error.value.limit == "6 pieces, 2 whole blocks"
    assert bench.inventory(writing=3, rooms=1) is True
    bench.commit("W1", 7, 3, tokens=11)


@pytest.mark.parametrize("tokens, size", [(11, 0), (11, 4 * 6), (11, 4 * 6 * 2), (12, 4 * 6 * 3), (3, 0)])
def test_a_ranking_that_fits_reaches_the_reader_as_it_is(bench, tokens, size):
    pages, ranking = -(-tokens // 4), bytes(range(256))[:size]
    bench.open("W1", 7, private=pages)
    bench.commit("W1", 7, pages, tokens=tokens, ranking=ranking)
    assert bench.await_("R1", 7).ranking == ranking


def test_without_a_whole_block_nothing_can_be_ranked(bench):
    bench.open("W1", 7, private=1)
    with pytest.raises(ProtocolError, match="ranking"):
        bench.commit("W1", 7, 1, tokens=3, ranking=bytes(4 * 6))


@pytest.mark.parametrize("hashes, private", [(b"", 0), (b"x" * 31, 0), (b"x" * 33, 1), (b"", -1), (b"x" * 64, -1), (b"", m.MAX_RECORDS + 1)])
def test_page_lists_out_of_bounds(bench, hashes, private):
    with pytest.raises(ProtocolError) as error:
        bench.do("W1", m.Open, room=1, rank=0, seed=SEED, hashes=hashes, private=private)
    assert error.value.room == 1 and bench.empty() is True


@pytest.mark.parametrize("seed", [b"", b"x" * 31, b"x" * 33])
def test_hashes_without_the_seed_of_their_chain_are_refused(bench, seed):
    with pytest.raises(ProtocolError, match="seed") as error:
        bench.open("W1", 7, [digest(1)], private=1, seed=seed)
    assert (error.value.room, error.value.limit) == (7, "32 bytes") and bench.empty() is True
    assert bench.open("W1", 7, [digest(1)], private=1).fresh == b"\1\1"


@pytest.mark.parametrize("seed", [b"", SEED])
def test_a_prompt_without_a_whole_page_may_have_a_seed(bench, seed):
    bench.open("W1", 7, private=1, seed=seed)
    bench.commit("W1", 7, 1, tokens=3)
    manifest = bench.await_("R1", 7)
    assert (manifest.seed, manifest.hashes) == (seed, b"")


def test_a_seed_of_another_length_is_refused_with_or_without_hashes(bench):
    with pytest.raises(ProtocolError, match="seed"):
        bench.open("W1", 7, private=1, seed=b"x" * 5)


def test_a_reader_is_told_the_hashes_of_reused_pages_too(bench):
    bench.publish("W1", 1, [digest(1), digest(2)])
    assert bench.open("W1", 2, [digest(1), digest(2), digest(3)], private=1, seed=b"s" * 32).fresh == b"\0\0\1\1"
    bench.commit("W1", 2, 4, tokens=13)
    manifest = bench.await_("R1", 2)
    assert manifest.seed == b"s" * 32 and manifest.hashes == digest(1) + digest(2) + digest(3)
    assert len(m.unpack(manifest.records, "u4")) == 4, "the partial page has a record and no hash"


def test_only_its_opener_commits_or_aborts_a_room(bench):
    bench.hello("W2")
    bench.open("W1", 7, private=1)
    with pytest.raises(ProtocolError):
        bench.commit("W2", 7, 1)
    bench.do("W2", m.Abort, room=7, rank=0, reason="not mine")
    bench.commit("W1", 7, 1)
    with pytest.raises(ProtocolError):
        bench.commit("W1", 7, 1)
    bench.do("W1", m.Abort, room=7, rank=0, reason="too late")
    assert isinstance(bench.await_("R1", 7), m.Manifest)


def test_a_room_in_use_is_refused_in_every_state_and_the_first_goes_on(bench):
    bench.hello("W2")
    bench.open("W1", 7, private=2)
    for session in ("W1", "W2"):
        with pytest.raises(DuplicateRoom) as error:
            bench.open(session, 7, private=1)
        assert error.value.room == 7
    bench.open("W2", 7, private=1, rank=1)  # another rank is another room
    bench.commit("W1", 7, 2)
    with pytest.raises(DuplicateRoom):
        bench.open("W2", 7, private=1)
    lease = bench.await_("R1", 7).lease
    with pytest.raises(DuplicateRoom):
        bench.open("W2", 7, private=1)
    bench.do("R1", m.Release, leases=m.pack([lease], "u8"))
    bench.open("W2", 7, private=1)


def test_a_second_reader_of_a_room_is_refused_and_cannot_take_it_away(bench):
    bench.hello("R2")
    assert bench.await_("R1", 7) is None
    with pytest.raises(DuplicateRoom):
        bench.await_("R2", 7)
    bench.do("R2", m.Cancel, room=7, rank=0)  # what a reader says that gives up
    bench.open("W1", 7, private=1)
    bench.do("R2", m.Cancel, room=7, rank=0)
    bench.commit("W1", 7, 1)
    [(session, manifest)] = bench.mail()
    assert session == "R1" and isinstance(manifest, m.Manifest)
    with pytest.raises(DuplicateRoom):
        bench.await_("R2", 7)


def test_abort_reaches_readers_before_and_after_they_ask(bench):
    bench.open("W1", 7, [digest(1)], private=1)
    bench.await_("R1", 7)
    bench.do("W1", m.Abort, room=7, rank=0, reason="out of memory")
    [(session, error)] = bench.mail()
    assert session == "R1" and isinstance(error, RoomFailed) and error.message == "out of memory" and error.room == 7
    assert bench.empty() is True and bench.inventory(cached=0) is True, "what was not sealed is no cache"
    bench.do("W1", m.Abort, room=8, rank=0, reason="never opened")
    with pytest.raises(RoomFailed, match="never opened"):
        bench.await_("R1", 8)
    bench.later(LIMITS.room_seconds / 2)
    with pytest.raises(RoomFailed):
        bench.await_("R1", 8)
    bench.later(LIMITS.room_seconds / 2)
    assert bench.await_("R1", 8) is None, "a failure is forgotten in time"


def test_a_dead_worker_fails_its_open_rooms_only(bench):
    bench.hello("W2")
    bench.open("W1", 1, private=1)
    bench.open("W1", 2, private=1)
    bench.open("W2", 3, private=1)
    bench.commit("W1", 1, 1)
    bench.await_("R1", 2)
    bench.tier.disconnect("W1")
    bench.tier.disconnect("W1")
    [(session, error)] = bench.mail()
    assert session == "R1" and isinstance(error, PeerLost) and error.retryable and "W1" in error.message
    assert isinstance(bench.await_("R1", 1), m.Manifest)
    assert bench.inventory(writing=1, rooms=1, leases=1, workers=1) is True


@pytest.mark.parametrize("lost, error", [(False, RoomFailed), (True, PeerLost)])
def test_a_room_that_was_given_up_and_one_that_was_lost_with_its_tier(bench, lost, error):
    """Before and after somebody waits for it: the worker tells a tier that came up after its prompt was begun."""
    bench.await_("R1", 7)
    bench.do("W1", m.Abort, room=7, rank=0, reason="why", retryable=lost, lost=lost)
    [(_, told)] = bench.mail()
    bench.do("W1", m.Abort, room=8, rank=0, reason="why", retryable=lost, lost=lost)
    with pytest.raises(error) as later:
        bench.await_("R1", 8)
    assert type(told) is type(later.value) is error and told.retryable == later.value.retryable == lost


def test_the_first_reason_stands(bench):
    bench.open("W1", 7, private=1)
    bench.tier.disconnect("W1")
    bench.hello("W1")
    bench.do("W1", m.Abort, room=7, rank=0, reason="what it thinks of it")
    with pytest.raises(PeerLost, match="died before the commit"):
        bench.await_("R1", 7)


def test_a_prompt_that_never_reached_a_worker_is_waited_for_in_vain_no_longer_than_that(bench):
    bench.do("R1", m.Await, room=7, rank=0, seconds=8.0, begin=5.0)
    bench.do("R1", m.Await, room=8, rank=0, seconds=8.0, begin=5.0)
    bench.open("W1", 8, private=1)
    bench.later(4.9)
    assert bench.mail() == [] and 0 < bench.tier.tick() <= 0.11, "it looks again in time"
    bench.later(0.1)
    [(session, error)] = bench.mail()
    assert session == "R1" and isinstance(error, PeerLost) and error.room == 7 and error.retryable and "not reached" in error.message
    bench.later(2.9)
    assert bench.mail() == [], "the other one had begun"
    bench.later(0.1)
    [(_, error)] = bench.mail()
    assert type(error) is DeadlineExceeded and error.room == 8


@pytest.mark.parametrize("awaited_first", [False, True])
def test_a_prompt_that_there_is_no_room_for_has_begun_and_dies_with_its_worker(bench, awaited_first):
    bench.open("W1", 1, private=16)
    bench.commit("W1", 1, 16)

    def wait():
        bench.do("R1", m.Await, room=7, rank=0, seconds=100.0, begin=5.0)

    if awaited_first:
        wait()
    with pytest.raises(CapacityError):
        bench.open("W1", 7, private=1)
    if not awaited_first:
        wait()
    bench.later(6.0)
    assert bench.mail() == [], "it waits in the worker's queue"
    bench.tier.disconnect("W1")
    [(_, error)] = bench.mail()
    assert isinstance(error, PeerLost) and error.retryable and "W1" in error.message
    assert bench.tier.sessions.keys() == {"R1"} and not bench.tier.failed


def test_what_a_worker_gave_up_is_not_lost_with_it(bench):
    bench.open("W1", 1, private=16)
    bench.commit("W1", 1, 16)
    with pytest.raises(CapacityError):
        bench.open("W1", 7, private=1)
    bench.do("W1", m.Abort, room=7, rank=0, reason="too late")
    bench.await_("R1", 1)
    assert not bench.tier.sessions["W1"].prompts, "a claimed room is not the worker's either"
    bench.tier.disconnect("W1")
    with pytest.raises(RoomFailed, match="too late"):
        bench.await_("R1", 7)


def test_cancel_before_open_before_commit_and_after(bench):
    bench.do("R1", m.Cancel, room=1, rank=0)
    bench.open("W1", 1, private=1)
    bench.open("W1", 2, private=1)
    bench.do("R1", m.Cancel, room=2, rank=0)
    bench.open("W1", 3, private=1)
    for room in (1, 2, 3):
        bench.commit("W1", room, 1)
    assert bench.inventory(rooms=1, leased=1) is True
    bench.do("R1", m.Cancel, room=3, rank=0)
    assert bench.empty() is True and bench.mail() == []


def test_a_cancelled_wait_is_answered(bench):
    """A reader takes a request without an answer for a dead tier."""
    bench.await_("R1", 7)
    asked = bench.seq
    bench.do("R1", m.Cancel, room=7, rank=0)
    [(session, reply)] = bench.tier.outbox
    assert session == "R1" and reply.seq == asked and reply.code == "RoomFailed"


@pytest.mark.parametrize("opened_first", [False, True])
def test_asking_again_for_a_cancelled_room_is_answered(bench, opened_first):
    if opened_first:
        bench.open("W1", 7, private=1)
    bench.do("R1", m.Cancel, room=7, rank=0)
    with pytest.raises(RoomFailed):
        bench.await_("R1", 7)
    if not opened_first:
        bench.open("W1", 7, private=1)
        with pytest.raises(RoomFailed):
            bench.await_("R1", 7)
    bench.commit("W1", 7, 1)
    assert bench.empty() is True and bench.mail() == []


def test_waiting_ends_at_its_deadline(bench):
    bench.await_("R1", 7, seconds=3.0)
    bench.later(2.999)
    assert bench.mail() == []
    bench.later(0.001)
    [(session, error)] = bench.mail()
    assert session == "R1" and isinstance(error, DeadlineExceeded) and error.room == 7
    assert bench.await_("R1", 7) is None


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, float("-inf")])
def test_an_impossible_wait_ends_at_once(bench, seconds):
    bench.await_("R1", 7, seconds=seconds)
    bench.later(0.0)
    [(_, error)] = bench.mail()
    assert isinstance(error, DeadlineExceeded)


def test_an_endless_wait_is_cut(bench):
    bench.await_("R1", 7, seconds=float("inf"))
    for _ in range(3599):
        bench.now += 1.0
        bench.do("R1", m.Ping)
    bench.later(0.0)
    assert bench.mail() == []
    bench.later(1.0)
    assert len(bench.mail()) == 1


def test_doubted_records_are_found_no_more(bench):
    bench.publish("W1", 1, [digest(3)], roots=[3])
    bench.open("W1", 7, [digest(1), digest(2)], private=1)
    bench.commit("W1", 7, 3)
    first = bench.await_("R1", 7)
    bench.open("W1", 8, [digest(1), digest(4)])
    bench.commit("W1", 8, 2)
    second = bench.await_("R1", 8)
    bench.do("R1", m.Release, leases=m.pack([first.lease], "u8"), doubted=True)
    assert bench.tier.totals["records_doubted"] == 2
    assert bench.inventory(leased=2, cached=1, leases=1) is True, "another has them until it notices itself"
    assert bench.open("W1", 9, [digest(1), digest(2), digest(3), digest(4)]).fresh == b"\1\1\0\0"
    bench.commit("W1", 9, 4)
    bench.do("R1", m.Release, leases=m.pack([second.lease], "u8"))
    assert bench.inventory(leased=4, cached=0, leases=0, rooms=1) is True
    again = m.unpack(bench.lookup("R1", [digest(1), digest(2)]).records, "u4").tolist()
    assert again == m.unpack(bench.await_("R1", 9).records, "u4").tolist()[:2], "those that were published anew"


def test_a_lease_lives_by_renewal_and_ends_after_grace(bench):
    bench.open("W1", 7, [digest(1)])
    bench.commit("W1", 7, 1)
    lease = m.pack([bench.await_("R1", 7).lease], "u8")
    for _ in range(5):
        bench.later(9.0)
        assert bench.do("R1", m.Renew, leases=lease).gone == b""
    bench.later(10.0)
    assert bench.do("R1", m.Renew, leases=lease).gone == lease, "expired for the reader"
    assert bench.inventory(leased=1) is True, "but still there"
    bench.later(1.99)
    assert bench.inventory(leased=1) is True
    bench.later(0.01)
    assert bench.inventory(leased=0, cached=1, leases=0) is True and bench.tier.totals["leases_expired"] == 1


def test_a_committed_room_that_nobody_wants_goes(bench):
    bench.open("W1", 7, private=2)
    bench.later(1000.0)
    assert bench.inventory(writing=2) is True, "never by time while it is written"
    bench.commit("W1", 7, 2)
    bench.later(49.9)
    assert bench.inventory(leased=2) is True
    bench.later(0.1)
    assert bench.empty() is True and bench.tier.totals["rooms_expired"] == 1


def test_a_silent_reader_is_forgotten_and_may_come_back(bench):
    bench.await_("R1", 7, seconds=1000)
    bench.later(50.0)
    assert bench.inventory(waiters=0) is True
    with pytest.raises(StaleEpoch):
        bench.await_("R1", 7)
    bench.hello("R1")
    assert bench.await_("R1", 7) is None


def test_a_reader_that_renews_as_often_as_its_leases_want_is_never_forgotten():
    bench = Bench(limits=TierLimits(lease_seconds=90.0, grace_seconds=1.0, room_seconds=10.0))
    bench.hello("W1")
    bench.hello("R1")
    for _ in range(3):
        bench.later(30.0)
        assert bench.do("R1", m.Renew, leases=b"").gone == b""


def test_another_epoch_is_refused(bench):
    for make, fields in ((m.Await, dict(room=1, rank=0, seconds=1.0)), (m.Renew, dict(leases=b"")), (m.Release, dict(leases=b"")), (m.Cancel, dict(room=1, rank=0)),
                         (m.Lookup, dict(hashes=b"", hold=False))):
        with pytest.raises(StaleEpoch):
            bench.do("R1", make, epoch="old", **fields)


def test_arrays_that_are_no_arrays(bench):
    for make in (m.Renew, m.Release):
        with pytest.raises(ProtocolError):
            bench.do("R1", make, leases=b"1234567")


def test_a_full_arena_is_retryable_and_a_prompt_that_never_fits_is_not(bench):
    bench.open("W1", 1, private=10)
    with pytest.raises(CapacityError) as error:
        bench.open("W1", 2, private=7)
    assert error.value.retryable and error.value.room == 2
    with pytest.raises(CapacityError) as error:
        bench.open("W1", 3, private=17)
    assert not error.value.retryable and error.value.room == 3
    assert bench.inventory(rooms=1, writing=10, holders=10) is True
    bench.open("W1", 2, private=6)


# -- every order of everything ------------------------------------------------------------------------------------


class Chaos:
    """Random workers, readers, deaths and pauses. What must hold is checked after every step, from the tables."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.bench = Bench(records=self.rng.choice([6, 12, 24]))
        self.tier = self.bench.tier
        self.workers, self.readers, self.born = [], [], 0
        self.owed: dict[tuple[str, int], int] = {}  # (session, seq) -> room
        self.pages: dict[tuple[str, int], list[int]] = {}  # (worker, room) -> root of each page, 0: unknown
        self.promised: dict[int, list[int]] = {}  # room -> roots of its commit
        self.leases: dict[int, tuple[float, m.Manifest | m.Held]] = {}
        self.owner: dict[int, str] = {}  # of leases
        self.answers = self.found = self.foreign = 0
        self.join("W")
        self.join("R")
        self.generation = self.tier.table.generation.copy()

    def join(self, kind):
        self.born += 1
        name = f"{kind}{self.born}"
        self.bench.hello(name)
        (self.workers if kind == "W" else self.readers).append(name)

    def step(self):
        moves = {self.open: 12, self.commit: 10, self.abort: 4, self.wait: 12, self.cancel: 3, self.renew: 4, self.release: 8,
                 self.pass_time: 6, self.look: 6, self.newcomer: 1, self.die: 1, self.speak_of_old: 1}
        self.rng.choices(list(moves), list(moves.values()))[0]()
        self.collect()
        self.check()

    def attempt(self, session, make, **fields):
        reply = self.bench.say(session, make, **fields)
        return None if reply is None else opened(reply)

    def any_room(self):
        return self.rng.randint(0, 9)

    def open(self):
        if not self.workers:
            return self.join("W")
        worker, room = self.rng.choice(self.workers), self.any_room()
        numbers = [self.rng.randint(1, 15) for _ in range(self.rng.randint(0, 5))]
        private = self.rng.randint(0, 2)
        reply = self.attempt(worker, m.Open, room=room, rank=0, seed=SEED, hashes=b"".join(map(digest, numbers)), private=private)
        if isinstance(reply, m.Opened):
            roots = [1000 + n for n in numbers] + [self.rng.randint(10**6, 10**9) for _ in range(private)]
            known = m.unpack(reply.roots, "u8").tolist()
            assert all(k == (0 if f else r) for k, f, r in zip(known, reply.fresh, roots)), "another page's checksum"
            self.pages[worker, room] = roots

    def commit(self):
        if not self.pages:
            return
        (worker, room), roots = self.rng.choice(list(self.pages.items()))
        ok = self.attempt(worker, m.Commit, room=room, rank=0, prompt_tokens=len(roots) * 4, roots=m.pack(roots, "u8"), ranking=b"", metadata=ROW_BYTES)
        if worker in self.workers:
            assert isinstance(ok, m.Ok)
            self.promised[room] = roots
        del self.pages[worker, room]

    def abort(self):
        if not self.pages:
            return
        (worker, room), _ = self.pages.popitem() if self.rng.random() < 0.5 else ((self.rng.choice(self.workers or ["W0"]), self.any_room()), None)
        self.pages.pop((worker, room), None)
        self.attempt(worker, m.Abort, room=room, rank=0, reason="gave up")

    def wait(self):
        if not self.readers:
            return self.join("R")
        session, room = self.rng.choice(self.readers), self.any_room()
        reply = self.attempt(session, m.Await, room=room, rank=0, seconds=self.rng.choice([0.0, 1.0, 30.0, 5000.0]))
        if reply is None:
            self.owed[session, self.bench.seq] = room
        else:
            self.receive(session, reply, room)

    def look(self):
        numbers = [self.rng.randint(1, 15) for _ in range(self.rng.randint(0, 6))]
        hold, session = self.rng.random() < 0.5, self.rng.choice(self.readers + self.workers or ["R0"])
        reply = self.attempt(session, m.Lookup, hashes=b"".join(map(digest, numbers)), hold=hold)
        if isinstance(reply, StaleEpoch):
            return
        roots = m.unpack(reply.roots, "u8").tolist()
        here = m.unpack(reply.records, "u4") != m.NOWHERE
        assert roots == [1000 + n if there else 0 for n, there in zip(numbers, here)], "another page's checksum"
        assert bool(reply.lease) == (hold and here.any())
        self.found += int(bool(reply.lease))
        if reply.lease:
            self.leases[reply.lease], self.owner[reply.lease] = (self.bench.now + LIMITS.lease_seconds, reply), session

    def cancel(self):
        self.attempt(self.rng.choice(self.readers or ["R0"]), m.Cancel, room=self.any_room(), rank=0)

    def renew(self):
        if not self.readers or not self.leases:
            return
        numbers = self.rng.sample(list(self.leases), self.rng.randint(1, len(self.leases)))
        session = self.rng.choice(self.readers)
        if self.rng.random() < 0.8:
            numbers = [n for n in numbers if self.owner[n] == session]
        reply = self.attempt(session, m.Renew, leases=m.pack(numbers, "u8"))
        if isinstance(reply, StaleEpoch) or self.refused(session, numbers, reply):
            return
        gone = set(m.unpack(reply.gone, "u8").tolist())
        for number in numbers:
            due, manifest = self.leases[number]
            assert (number in gone) == (self.bench.now >= due)
            if number in gone:
                del self.leases[number]
            else:
                self.leases[number] = (self.bench.now + LIMITS.lease_seconds, manifest)

    def release(self):
        if self.readers and self.leases:
            number = self.rng.choice(list(self.leases))
            session = self.owner[number] if self.owner[number] in self.readers and self.rng.random() < 0.8 else self.rng.choice(self.readers)
            reply = self.attempt(session, m.Release, leases=m.pack([number], "u8"))
            if not isinstance(reply, StaleEpoch) and not self.refused(session, [number], reply):
                del self.leases[number]

    def refused(self, session, numbers, reply):
        """Whether it named leases of others that the tier still knows; then nothing is done, and ``check`` sees that."""
        foreign = any(self.owner[n] != session for n in numbers if n in self.tier.leases)
        assert isinstance(reply, ProtocolError) == foreign, "only its own session ends or renews a lease"
        self.foreign += foreign
        return foreign

    def pass_time(self):
        self.bench.now += self.rng.choice([0.1, 3.0, 9.0, 20.0, 60.0])
        pause = self.tier.tick()
        assert 0 < pause <= 1
        for name in [r for r in self.readers if r not in self.tier.sessions]:
            self.readers.remove(name)
            self.forget_debts(name)

    def newcomer(self):
        if len(self.workers) + len(self.readers) < 6:
            self.join(self.rng.choice("WR"))

    def die(self):
        everyone = self.workers + self.readers
        if len(everyone) > 2:
            name = self.rng.choice(everyone)
            self.tier.disconnect(name)
            (self.workers if name in self.workers else self.readers).remove(name)
            self.forget_debts(name)
            self.pages = {k: v for k, v in self.pages.items() if k[0] != name}

    def speak_of_old(self):
        reply = self.attempt(self.rng.choice(self.readers or ["R0"]), m.Release, epoch="old", leases=b"")
        assert isinstance(reply, StaleEpoch)

    def forget_debts(self, session):
        self.owed = {k: v for k, v in self.owed.items() if k[0] != session}

    def collect(self):
        out, self.tier.outbox = self.tier.outbox, []
        for session, reply in out:
            room = self.owed.pop((session, reply.seq), None)
            assert room is not None or session not in self.readers, "answered twice, or nobody asked"
            if room is not None:
                self.receive(session, opened(reply), room)

    def receive(self, session, reply, room):
        self.answers += 1
        if isinstance(reply, m.Manifest):
            assert reply.room == room and m.unpack(reply.roots, "u8").tolist() == self.promised[room]
            self.leases[reply.lease], self.owner[reply.lease] = (self.bench.now + LIMITS.lease_seconds, reply), session
        else:
            assert isinstance(reply, (RoomFailed, PeerLost, DuplicateRoom, DeadlineExceeded, StaleEpoch)), reply

    def check(self):
        tier, table = self.tier, self.tier.table
        now = tier.inventory()
        assert now["holders"] == now["held"] and now["free"] + now["writing"] + now["cached"] + now["leased"] == now["records"]
        writing = [r for room in tier.rooms.values() if room.manifest is None for r in room.records[room.fresh].tolist()]
        assert sorted(writing) == np.flatnonzero(table.state == WRITING).tolist(), "each record being written has one writer"
        assert all(room.session in tier.sessions for room in tier.rooms.values() if room.manifest is None), "an open room without a worker"
        assert {k for k, w in tier.waiters.items()} == {(room, 0) for (s, _), room in self.owed.items()}, "waiters are those who wait"
        assert len(table.generation) == len(self.generation) and (table.generation >= self.generation).all()
        self.generation = table.generation.copy()
        for due, manifest in self.leases.values():
            if self.bench.now < due + LIMITS.grace_seconds:
                records = m.unpack(manifest.records, "u4")
                here = records != m.NOWHERE
                assert table.generation[records[here]].tolist() == m.unpack(manifest.generations, "u8")[here].tolist(), "freed under a lease"
                assert table.root[records[here]].tolist() == m.unpack(manifest.roots, "u8")[here].tolist()

    def end(self):
        for name in self.workers:
            self.tier.disconnect(name)
        for _ in range(80):  # readers stay alive, so that all their waits must be answered
            self.bench.now += 49.0
            for name in self.readers:
                self.bench.say(name, m.Ping)
            self.tier.tick()
            self.collect()
        assert not self.owed and self.bench.empty() is True
        assert not self.tier.failed and not self.tier.cancelled and not self.tier.leased_keys


@pytest.mark.parametrize("block", range(6))
def test_any_order_of_anything_keeps_every_account(block):
    answers = found = foreign = 0
    for seed in range(block * 20, block * 20 + 20):
        chaos = Chaos(seed)
        for _ in range(250):
            chaos.step()
        chaos.end()
        answers, found, foreign = answers + chaos.answers, found + chaos.found, foreign + chaos.foreign
    assert answers > 300 and found > 100 and foreign > 20, "the fuzz must exercise what it is about"
