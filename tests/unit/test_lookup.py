"""Asking a tier which pages it holds, by hash: what is said of each, what a hold protects, who may ask."""

from __future__ import annotations

import numpy as np
import pytest
import zmq
from node_rig import FINGERPRINT, ROW, LocalTier, small_layout, until
from tier_bench import LIMITS, SEED, Bench, digest

from transport import messages as m
from transport.errors import CapacityError, LayoutMismatch, ProtocolError, StaleEpoch
from transport.worker_client import WorkerClient

BIG = 2**64 - 1
"""A root that any detour over another number type would change."""


@pytest.fixture
def bench():
    """Pages 1, 2, 3 are cached with roots 11, 12, ``BIG`` in records 0, 1, 2 of 6."""
    bench = Bench(records=6)
    bench.hello("W1")
    bench.hello("R1")
    bench.publish("W1", 1, [digest(1), digest(2), digest(3)], roots=[11, 12, BIG])
    assert bench.inventory(cached=3, free=3, leases=0) is True
    return bench


def found(held: m.Held) -> list[tuple[int, int, int] | None]:
    """(record, generation, root) per hash, None: nowhere."""
    arrays = (m.unpack(held.records, "u4").tolist(), m.unpack(held.generations, "u8").tolist(), m.unpack(held.roots, "u8").tolist())
    assert len({len(a) for a in arrays}) == 1
    for record, *rest in zip(*arrays):
        assert record != m.NOWHERE or rest == [0, 0]
    return [None if one[0] == m.NOWHERE else one for one in zip(*arrays)]


def release(bench: Bench, held: m.Held, session: str = "R1") -> None:
    bench.do(session, m.Release, leases=m.pack([held.lease], "u8"))


# -- what is said -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", ["R1", "W1"])
@pytest.mark.parametrize("hold", [False, True])
def test_each_hash_is_answered_in_its_place(bench, session, hold):
    held = bench.lookup(session, [digest(9), digest(3), digest(1), digest(8)], hold)
    assert found(held) == [None, (2, 1, BIG), (0, 1, 11), None]
    assert bool(held.lease) == hold and held.lease_seconds == LIMITS.lease_seconds
    assert bench.inventory(leased=2 * hold, cached=3 - 2 * hold, leases=int(hold), holders=2 * hold, held=2 * hold) is True


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("hashes", [[], [digest(9)], [digest(8), digest(9), digest(8)]])
def test_where_nothing_is_found_nothing_is_held(bench, hashes, hold):
    held = bench.lookup("R1", hashes, hold)
    assert found(held) == [None] * len(hashes) and held.lease == 0
    assert bench.inventory(cached=3, leases=0) is True


def test_a_hash_named_twice_is_answered_twice_and_let_go_of_as_often(bench):
    held = bench.lookup("R1", [digest(2), digest(9), digest(2)], hold=True)
    assert found(held) == [(1, 1, 12), None, (1, 1, 12)]
    assert bench.inventory(leased=1, holders=2, held=2, leases=1) is True
    release(bench, held)
    assert bench.inventory(cached=3, holders=0, leases=0) is True
    assert found(bench.lookup("R1", [digest(2)])) == [(1, 1, 12)], "the record was not freed"


def test_only_what_is_sealed_is_found(bench):
    bench.open("W1", 2, [digest(5)], private=1)
    assert found(bench.lookup("R1", [digest(5)], hold=True)) == [None]
    bench.commit("W1", 2, 2, roots=[55, 56])
    assert found(bench.lookup("R1", [digest(5)])) == [(3, 1, 55)], "in a room that nobody claimed yet"
    lease = bench.await_("R1", 2).lease
    assert found(bench.lookup("R1", [digest(5)])) == [(3, 1, 55)], "under another's lease"
    bench.do("R1", m.Release, leases=m.pack([lease], "u8"))
    assert found(bench.lookup("R1", [digest(5)])) == [(3, 1, 55)], "cached"


def test_an_evicted_page_is_nowhere_and_has_another_generation_when_it_comes_back(bench):
    bench.publish("W1", 2, [], private=4)
    assert found(bench.lookup("R1", [digest(n) for n in (1, 2, 3)])) == [(0, 1, 11), (1, 1, 12), None], "the deepest goes first"
    bench.publish("W1", 3, [digest(1), digest(2), digest(3)], roots=[0, 0, BIG])
    assert found(bench.lookup("R1", [digest(3)])) == [(2, 3, BIG)], "freed as page 3, freed again as a private page"


@pytest.mark.parametrize("raw", [b"x", bytes(31), bytes(33), bytes(63), bytes(32 * ((1 << 20) + 1))])
@pytest.mark.parametrize("session", ["R1", "W1"])
def test_bytes_that_are_no_hashes_are_refused(bench, session, raw):
    with pytest.raises(ProtocolError, match=f"{len(raw)} bytes"):
        bench.do(session, m.Lookup, hashes=raw, hold=True)
    assert bench.inventory(cached=3, leases=0, holders=0) is True
    assert (bench.tier.totals["refused"], bench.tier.totals["internal_errors"], bench.tier.totals["lookups"]) == (1, 0, 0)


def test_strangers_and_readers_of_another_epoch_are_refused(bench):
    with pytest.raises(StaleEpoch):
        bench.lookup("R2", [digest(1)], hold=True)
    with pytest.raises(StaleEpoch):
        bench.do("R1", m.Lookup, epoch="old", hashes=digest(1), hold=True)
    assert bench.inventory(leases=0, cached=3) is True


def test_lookups_pages_and_hits_are_counted(bench):
    before = dict(bench.tier.totals)
    bench.lookup("R1", [])
    bench.lookup("R1", [digest(1), digest(9)], hold=True)
    bench.lookup("W1", [digest(1), digest(1), digest(2), digest(8), digest(9)])
    grown = {k: n - before.get(k, 0) for k, n in bench.tier.totals.items() if n != before.get(k, 0)}
    assert grown == {"lookups": 3, "lookup_pages": 7, "lookup_hits": 4}


# -- what a hold protects -----------------------------------------------------------------------------------------


def test_a_hold_keeps_its_pages_while_everything_else_is_evicted(bench):
    held = bench.lookup("R1", [digest(1), digest(3)], hold=True)
    bench.open("W1", 2, private=4)  # all that is free, and page 2
    with pytest.raises(CapacityError) as error:
        bench.open("W1", 3, private=1)
    assert error.value.retryable and error.value.limit == "1 records wanted, 0 of 6 available"
    assert found(bench.lookup("R1", [digest(n) for n in (1, 2, 3)])) == [(0, 1, 11), None, (2, 1, BIG)]
    release(bench, held)
    bench.open("W1", 3, private=2)
    assert found(bench.lookup("R1", [digest(1), digest(3)])) == [None, None]


def test_without_a_hold_what_was_found_may_go_and_its_generation_tells(bench):
    [(record, generation, _)] = found(bench.lookup("R1", [digest(1)]))
    bench.open("W1", 2, private=6)
    assert found(bench.lookup("R1", [digest(1)])) == [None] and bench.tier.table.generation[record] == generation + 1


def test_a_lookup_without_a_hold_is_no_use_of_the_page(bench):
    bench.publish("W1", 2, [digest(5)])
    bench.lookup("R1", [digest(1), digest(2), digest(3)])
    bench.open("W1", 3, private=5)
    assert found(bench.lookup("R1", [digest(n) for n in (1, 2, 3, 5)])) == [None, None, None, (3, 1, 0)]


def test_a_hold_makes_its_pages_the_last_to_go(bench):
    bench.publish("W1", 2, [digest(5), digest(6)])
    release(bench, bench.lookup("R1", [digest(1), digest(2)], hold=True))
    bench.open("W1", 3, private=4)
    assert found(bench.lookup("R1", [digest(n) for n in (1, 2, 3, 5, 6)])) == [(0, 1, 11), (1, 1, 12), None, None, None]


def test_a_hold_lives_by_renewal_and_ends_after_grace(bench):
    held = bench.lookup("R1", [digest(1)], hold=True)
    lease = m.pack([held.lease], "u8")
    for _ in range(4):
        bench.later(LIMITS.lease_seconds - 0.1)
        assert bench.do("R1", m.Renew, leases=lease).gone == b""
    bench.later(LIMITS.lease_seconds)
    assert bench.do("R1", m.Renew, leases=lease).gone == lease, "expired for its holder"
    bench.later(LIMITS.grace_seconds - 0.01)
    assert bench.inventory(leased=1, leases=1) is True, "but still there"
    bench.later(0.01)
    assert bench.inventory(leased=0, cached=3, leases=0, holders=0) is True and bench.tier.totals["leases_expired"] == 1
    release(bench, held)  # idempotent
    assert bench.inventory(cached=3, holders=0) is True


def test_each_hold_is_a_lease_of_its_own(bench):
    first, second = (bench.lookup(session, [digest(1), digest(2)], hold=True) for session in ("R1", "W1"))
    assert first.lease != second.lease and bench.inventory(leased=2, leases=2, holders=4) is True
    release(bench, first)
    release(bench, first)
    assert bench.inventory(leased=2, leases=1, holders=2) is True
    release(bench, second, "W1")
    assert bench.inventory(leased=0, cached=3, leases=0) is True


def test_a_hold_outlives_its_session_by_its_lease_alone(bench):
    bench.lookup("W1", [digest(1)], hold=True)
    bench.tier.disconnect("W1")
    assert bench.inventory(leased=1, leases=1) is True
    bench.later(LIMITS.lease_seconds + LIMITS.grace_seconds)
    assert bench.empty() is True and bench.inventory(cached=3) is True


def test_a_hold_and_a_room_of_the_same_pages_do_not_end_each_other(bench):
    held = bench.lookup("R1", [digest(1), digest(2)], hold=True)
    bench.open("W1", 2, [digest(1), digest(2)])
    bench.commit("W1", 2, 2)
    claimed = bench.await_("R1", 2)
    release(bench, held)
    assert bench.inventory(leased=2, leases=1) is True and bench.tier.leased_keys == {(2, 0): claimed.lease}
    bench.do("R1", m.Release, leases=m.pack([claimed.lease], "u8"))
    assert bench.empty() is True and not bench.tier.leased_keys


def test_the_arena_is_not_cut_anew_under_a_hold(bench):
    held = bench.lookup("R1", [digest(1)], hold=True)
    bench.tier.disconnect("W1")
    before, other = bench.tier.layout, small_layout(head_dim=8, summary_bytes=12)
    with pytest.raises(LayoutMismatch):
        bench.hello("W2", layout=other)
    assert bench.tier.layout == before
    release(bench, held)
    bench.hello("W2", layout=other)
    assert bench.tier.layout == other


# -- over the sockets ---------------------------------------------------------------------------------------------

HELLO = dict(node="test", rank=0, layout=small_layout(), fingerprint=FINGERPRINT)


class Reader:
    """A reader's socket."""

    def __init__(self, control: str):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self.socket.connect(control)
        self.welcome = self.call(m.Hello, protocol=m.PROTOCOL, role="reader", **HELLO)

    def call(self, make, **fields):
        self.socket.send(m.encode(make(seq=3, **fields)))
        return m.raise_failure(m.decode_reply(self.socket.recv()), peer="tier")

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def tier(tmp_path):
    """Serves page 1 of ``SEED``'s chain, cached, with the root 77."""
    tier = LocalTier(str(tmp_path / "tier.sock"), records=8)
    writer = WorkerClient(tier.path, timeout=10)
    writer.attach(**HELLO)
    writer.call(m.Open, room=1, rank=0, seed=SEED, hashes=digest(1), private=0)
    writer.call(m.Commit, room=1, rank=0, prompt_tokens=4, roots=m.pack([77], "u8"), ranking=b"", metadata=tuple(bytes(n) for n in ROW))
    writer.call(m.Cancel, epoch=writer.welcome.epoch, room=1, rank=0)
    assert tier.inventory()["cached"] == 1
    yield tier
    writer.close()
    tier.stop()


@pytest.fixture(params=["worker", "reader"])
def asker(tier, request):
    asker = WorkerClient(tier.path, timeout=10) if request.param == "worker" else Reader(tier.control)
    if request.param == "worker":
        asker.attach(**{**HELLO, "rank": 1})
    yield asker
    asker.close()


def test_workers_and_readers_alike_may_ask_hold_and_let_go(tier, asker):
    epoch = asker.welcome.epoch
    held = asker.call(m.Lookup, epoch=epoch, hashes=digest(9) + digest(1), hold=False)
    assert found(held) == [None, (0, 1, 77)] and held.lease == 0 and tier.inventory()["leases"] == 0
    held = asker.call(m.Lookup, epoch=epoch, hashes=digest(1), hold=True)
    assert found(held) == [(0, 1, 77)] and held.lease_seconds == asker.welcome.lease_seconds
    assert (tier.inventory()["leases"], tier.inventory()["leased"]) == (1, 1)
    assert asker.call(m.Renew, epoch=epoch, leases=m.pack([held.lease], "u8")).gone == b""
    asker.call(m.Release, epoch=epoch, leases=m.pack([held.lease], "u8"))
    assert (tier.inventory()["leases"], tier.inventory()["cached"]) == (0, 1)
    assert [tier.tier.totals[k] for k in ("lookups", "lookup_pages", "lookup_hits")] == [2, 3, 2]


def test_a_hold_that_is_not_renewed_ends_by_itself(tier, asker):
    held = asker.call(m.Lookup, epoch=asker.welcome.epoch, hashes=digest(1), hold=True)
    assert held.lease and tier.inventory()["leased"] == 1
    until(lambda: tier.inventory()["leases"] == 0, "the lease ran out")
    assert tier.inventory()["cached"] == 1 and tier.tier.totals["leases_expired"] == 1


def test_malformed_lookups_are_refused_over_the_sockets_and_the_next_is_served(tier, asker):
    epoch = asker.welcome.epoch
    with pytest.raises(ProtocolError, match="31 bytes"):
        asker.call(m.Lookup, epoch=epoch, hashes=bytes(31), hold=True)
    with pytest.raises(StaleEpoch):
        asker.call(m.Lookup, epoch="old", hashes=digest(1), hold=True)
    assert found(asker.call(m.Lookup, epoch=epoch, hashes=digest(1), hold=False)) == [(0, 1, 77)]
    assert tier.inventory()["leases"] == 0 and tier.tier.totals["internal_errors"] == 0


def test_a_long_lookup_fits_a_message(tier, asker):
    hashes = np.random.default_rng(0).bytes(32 * 30_000) + digest(1)
    held = asker.call(m.Lookup, epoch=asker.welcome.epoch, hashes=hashes, hold=False)
    assert found(held) == [None] * 30_000 + [(0, 1, 77)]
