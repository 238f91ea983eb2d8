"""A tenant finds, holds, ends and inherits nothing of another's: not by name, not by number, not in freed memory."""

from __future__ import annotations

import numpy as np
import pytest
from node_rig import SEED, small_layout, until
from relay_rig import HELLO
from relay_rig import LAYOUT as MEMORY_LAYOUT
from relay_rig import Bench as MemoryBench
from tier_bench import LAYOUT, LIMITS, ROW_BYTES, Bench

from transport import messages as m
from transport import wiping
from transport.donation import Donations
from transport.errors import DeadlineExceeded, DuplicateRoom, ProtocolError
from transport.fill import MemoryTier
from transport.hashing import chain_seed, page_hashes
from transport.integrity import block_checks, piece_digests
from transport.records import RecordTable, split_hashes
from transport.wiping import Wiper

TOKENS = np.arange(16, dtype=np.int64)


def names(salt: str, tokens: np.ndarray = TOKENS) -> list[bytes]:
    """Page hashes of one prompt under a cache salt, as a prefill worker makes them."""
    return split_hashes(page_hashes(chain_seed(LAYOUT, "f", 0, "epoch", "", salt, ""), tokens, LAYOUT.block_tokens))


@pytest.fixture
def bench():
    """One worker, two decode nodes; tenant ``a`` has published a prompt."""
    bench = Bench()
    for session in ("W1", "R1", "R2"):
        bench.hello(session)
    bench.publish("W1", 1, names("a"), roots=range(11, 15))
    return bench


def lease_of(bench, session: str) -> int:
    return bench.lookup(session, names("a"), hold=True).lease


# -- by name ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", ["", "b", "aa", "A"])
def test_a_prompt_has_no_name_in_common_under_two_salts(salt):
    assert not set(names("a")) & set(names(salt)) and names("a") == names("a")


@pytest.mark.parametrize("session", ["W1", "R2"])
def test_another_tenants_pages_are_neither_found_nor_held(bench, session):
    held = bench.lookup(session, names("b"), hold=True)
    assert set(m.unpack(held.records, "u4").tolist()) == {m.NOWHERE} and held.lease == 0
    assert not m.unpack(held.roots, "u8").any() and not m.unpack(held.generations, "u8").any(), "not even what the bytes are"
    assert bench.empty() is True
    mixed = bench.lookup(session, [*names("b")[:2], *names("a")[2:]], hold=True)
    assert (m.unpack(mixed.records, "u4") != m.NOWHERE).tolist() == [False, False, True, True]


def test_another_tenants_prompt_is_written_anew(bench):
    opened = bench.open("W1", 2, names("b"))
    assert opened.fresh == b"\1\1\1\1" and not m.unpack(opened.roots, "u8").any()
    assert not set(m.unpack(opened.records, "u4").tolist()) & set(bench.tier.table.find(names("a")).tolist())


def test_what_a_tenant_donates_is_found_under_its_salt_alone(bench):
    arena = np.zeros(bench.tier.arena_size, np.uint8)
    bench.tier.serve(m.Donate, Donations(bench.tier, arena).take)
    payloads, summaries = np.ones((4, LAYOUT.payload_bytes), np.uint8), np.ones((4, LAYOUT.summary_total), np.uint8)
    checks = block_checks(piece_digests(payloads, LAYOUT.pieces), summaries)
    answer = dict(depth=4, payloads=payloads.tobytes(), summaries=summaries.tobytes(), checks=m.pack(checks, "u8"))
    bench.do("R1", m.Donate, hashes=b"".join(names("c")), **answer)
    found = {salt: (m.unpack(bench.lookup("R2", names(salt)).records, "u4") != m.NOWHERE).sum() for salt in "abc"}
    assert found == {"a": 4, "b": 0, "c": 4}
    bench.do("R1", m.Donate, hashes=b"".join(names("a")), **answer)  # what is there already stays what it was
    assert m.unpack(bench.lookup("R2", names("a")).roots, "u8").tolist() == [11, 12, 13, 14]


def test_a_prompt_of_another_tenant_shares_nothing_on_its_way_through_both_nodes(nodes):
    """The same tokens and the same K and V, from the pool of prefill to the host cache of decode."""
    node = nodes(keep=True, pages=80)
    first = node.arrive(400, 4)
    node.admit(first)
    node.run(first)
    published, saved = node.world.prefill.publisher.totals, node.coordinator.reuse.totals
    before = dict(published)
    other = node.arrive(400, 4, after=first, seed=b"other" + SEED[5:])
    assert (published["pages_published"] - before["pages_published"], published["pages_reused"]) == (25, before.get("pages_reused", 0))
    node.admit(other)
    assert not saved["hit_tokens"] and other.pull.bytes_by_phase["summaries"] == first.pull.bytes_by_phase["summaries"]
    node.run(other)
    third = node.arrive(400, 4, after=first)  # while the tenant itself shares
    assert published["pages_published"] - before["pages_published"] == 25
    node.admit(third)
    assert third.pull.bytes_by_phase["summaries"] == 0
    node.run(third)
    node.at_baseline()


def test_a_memory_node_keeps_tenants_and_their_tiers_apart():
    bench = MemoryBench(MemoryTier)
    for session in ("T1", "T2"):
        bench.ask(session, m.Hello, role="tier", control=session, **HELLO)
    bench.ask("R", m.Hello, role="reader", **HELLO)
    opened = [bench.ask(session, m.Open, room=room, rank=0, seed=SEED, hashes=b"".join(names(salt)), private=0)
              for session, room, salt in (("T1", 1, "a"), ("T2", 2, "b"))]
    assert [o.fresh for o in opened] == [b"\1\1\1\1"] * 2
    assert not set(m.unpack(opened[0].records, "u4").tolist()) & set(m.unpack(opened[1].records, "u4").tolist())
    fill = dict(room=1, rank=0, prompt_tokens=16, roots=m.pack(range(4), "u8"), ranking=b"", metadata=ROW_BYTES, sources=m.pack(range(4), "u4"),
                generations=m.pack([1] * 4, "u8"), geometry=bench.tier.geometry, endpoints=bench.tier.endpoints)
    refused = bench.ask("T2", m.Fill, **fill)
    assert (refused.code, refused.room) == ("ProtocolError", 1) and not bench.tier.orders
    bench.ask("T2", m.Abort, room=1, rank=0, reason="not mine")
    assert bench.tier.rooms[1, 0].session == "T1", "another tier's room is not given up"
    assert MEMORY_LAYOUT.block_tokens == LAYOUT.block_tokens


# -- by number ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thief", ["R2", "W1"])
@pytest.mark.parametrize("make", [m.Release, m.Renew])
def test_a_lease_of_another_session_is_refused_by_name_and_nothing_is_done(bench, make, thief):
    lease = lease_of(bench, "R1")
    mine = lease_of(bench, thief)
    bench.now += LIMITS.lease_seconds / 2
    with pytest.raises(ProtocolError, match="another session") as error:
        bench.do(thief, make, leases=m.pack([mine, lease], "u8"))
    assert error.value.peer == thief
    assert {n: bench.tier.leases[n].expires for n in (lease, mine)} == dict.fromkeys((lease, mine), 100.0 + LIMITS.lease_seconds)
    assert isinstance(bench.do(thief, make, leases=m.pack([mine, 2**63 - 2], "u8")), m.Ok | m.Renewed), "an unknown lease is nobody's"
    bench.do("R1", m.Release, leases=m.pack([lease], "u8"))


def test_a_lease_goes_to_nobody_when_its_session_has_left(bench):
    lease = lease_of(bench, "R1")
    bench.tier.disconnect("R1")
    bench.hello("R3")
    with pytest.raises(ProtocolError):
        bench.do("R3", m.Renew, leases=m.pack([lease], "u8"))
    bench.later(LIMITS.lease_seconds + LIMITS.grace_seconds)
    assert bench.empty() is True


def test_leases_cannot_be_guessed(bench):
    numbers = [lease_of(bench, "R1") for _ in range(200)]
    assert len(set(numbers)) == 200 and all(n % 2 and 0 < n < 2**63 for n in numbers)
    assert min(abs(a - b) for a, b in zip(sorted(numbers), sorted(numbers)[1:])) > 1 << 32
    bench.do("R1", m.Release, leases=m.pack(numbers, "u8"))
    assert bench.empty() is True


def test_a_guessed_room_is_refused_while_its_reader_waits_and_after_it_has_it(bench):
    bench.open("W1", 7, names("a"))
    assert bench.await_("R1", 7) is None
    with pytest.raises(DuplicateRoom) as error:
        bench.await_("R2", 7)
    assert error.value.room == 7
    bench.do("R2", m.Cancel, room=7, rank=0)
    bench.commit("W1", 7, 4)
    [(session, manifest)] = bench.mail()
    assert session == "R1" and bench.tier.leases[manifest.lease].session == "R1"
    with pytest.raises(DuplicateRoom):
        bench.await_("R2", 7)
    bench.do("R2", m.Cancel, room=7, rank=0)
    assert manifest.lease in bench.tier.leases
    bench.do("R1", m.Release, leases=m.pack([manifest.lease], "u8"))
    assert bench.await_("R2", 7, seconds=1.0) is None, "it is gone, and its records with it"
    bench.later(2.0)
    [(session, ended)] = bench.mail()
    assert session == "R2" and isinstance(ended, DeadlineExceeded)


def test_a_room_of_another_worker_is_not_committed_aborted_or_read_by_it(bench):
    bench.hello("W2")
    bench.open("W1", 7, private=1)
    with pytest.raises(ProtocolError):
        bench.commit("W2", 7, 1)
    bench.do("W2", m.Abort, room=7, rank=0, reason="not mine")
    assert (7, 0) in bench.tier.rooms and isinstance(bench.commit("W1", 7, 1), m.Ok)


# -- in freed memory ----------------------------------------------------------------------------------------------


class Wiped(Bench):
    """A tier that zeroes what is freed. Whoever opens a room fills its records with ``mark``, padding too."""

    def __init__(self, records: int = 16):
        super().__init__(records)
        self.arena = np.zeros(self.tier.arena_size, np.uint8)
        self.tier.wiper = Wiper(self.arena, self.tier.totals)
        self.hello("W1")
        self.hello("R1")

    @property
    def rows(self):
        return np.concatenate(self.tier.geometry.rows(self.arena), axis=1)

    def fill(self, opened: m.Opened, mark: int) -> np.ndarray:
        records = m.unpack(opened.records, "u4").astype(np.int64)
        fresh = records[np.frombuffer(opened.fresh, np.uint8).astype(bool)]
        assert not self.rows[fresh].any(), "given out with another's bytes"
        for section in self.tier.geometry.rows(self.arena):
            section[fresh] = mark
        return records


def test_freed_records_hold_nothing_after_a_tick():
    bench = Wiped()
    records = bench.fill(bench.open("W1", 1, names("a"), private=2), 7)
    bench.do("W1", m.Abort, room=1, rank=0, reason="")
    assert bench.rows[records].all() and bench.tier.table.stale[records].all(), "not while others wait"
    bench.later(0.0)
    assert not bench.arena.any() and not bench.tier.table.stale.any() and bench.tier.totals["records_zeroed"] == 6


def test_what_is_cached_or_held_stays():
    bench = Wiped()
    records = bench.fill(bench.open("W1", 1, names("a"), private=1), 7)
    bench.commit("W1", 1, 5)
    manifest = bench.await_("R1", 1)
    bench.later(1.0)
    assert bench.rows[records].all()
    bench.do("R1", m.Release, leases=m.pack([manifest.lease], "u8"))
    bench.later(0.0)
    assert bench.rows[records[:4]].all() and not bench.rows[records[4]].any(), "the partial page is nobody's cache"
    assert bench.lookup("R1", names("a")).records == m.pack(records[:4], "u4")


def test_evicted_records_are_zeroed_before_the_next_tenant_has_them():
    bench = Wiped(records=4)
    bench.fill(bench.open("W1", 1, names("a")), 7)
    bench.commit("W1", 1, 4)
    bench.do("R1", m.Cancel, room=1, rank=0)
    assert bench.tier.table.counts()["cached"] == 4
    bench.fill(bench.open("W1", 2, names("b")), 9)  # looks first
    assert bench.tier.table.evicted == 4 and bench.tier.totals["records_zeroed"] == 4 and (bench.rows == 9).all()


def test_a_lot_is_zeroed_bit_by_bit(monkeypatch):
    monkeypatch.setattr(wiping, "WIPED_BYTES", 3 * 896)
    bench = Wiped()
    bench.fill(bench.open("W1", 1, private=8), 7)
    bench.do("W1", m.Abort, room=1, rank=0, reason="")
    pauses = [(bench.tier.tick(), int(bench.tier.table.stale.sum())) for _ in range(4)]
    assert pauses == [(wiping.NEXT_SECONDS, 5), (wiping.NEXT_SECONDS, 2), (1.0, 0), (1.0, 0)] and not bench.arena.any()


def test_another_model_finds_an_empty_arena():
    bench = Wiped()
    bench.fill(bench.open("W1", 1, names("a")), 7)
    bench.commit("W1", 1, 4)
    bench.do("R1", m.Cancel, room=1, rank=0)
    bench.tier.disconnect("W1")
    assert bench.tier.table.counts()["cached"] == 4 and bench.arena.any()
    bench.hello("W2", layout=small_layout(head_dim=8, summary_bytes=12))
    assert not bench.arena.any() and bench.tier.table.counts()["cached"] == 0


def test_without_the_option_nothing_is_zeroed():
    table = RecordTable(3)
    records, _ = table.reserve([], 3)
    table.unhold(records)
    assert not table.stale.any() and table.clean(3) == 0


def test_real_bytes_are_gone(worlds):
    """A tier on its sockets: what decode was given is not in the arena any more."""
    world = worlds(tier=dict(records=16))
    server = world.tier.server
    until(lambda: world.tier.tier.geometry is not None, "the table is there that is to be replaced by one that wipes")
    world.tier.call(lambda: _wipe_from_now_on(world.tier.tier, server.arena.bytes))
    ids, pages = world.prompt(22)
    world.prefill.publish(5, ids, pages, seed=None)
    assert server.arena.bytes.any()
    assert world.pull_into(5, np.arange(6)).state == "done" and world.arrived(pages, np.arange(6), 22)
    world.settle()
    world.tier.call(world.tier.tier.tick)
    assert not server.arena.bytes.any() and world.tier.tier.totals["records_zeroed"] == 6


def _wipe_from_now_on(tier, arena) -> None:
    tier.wiper = Wiper(arena, tier.totals)
    tier.table = tier.wiper.make_table(tier.geometry)
