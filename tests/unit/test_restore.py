"""Restoring out of a real tier: the same bytes or none, and nothing is left held."""

from __future__ import annotations

import numpy as np
import pytest
from node_rig import FINGERPRINT, LocalTier, Pool, Prefill, small_layout, until

from oasis_sglang.selection.summaries import SUMMARIES
from prefill_node import restore
from prefill_node.pages import PageSource
from prefill_node.publisher import COMMITTED
from prefill_node.restore import Restorer, runs
from transport import messages as m
from transport.hashing import page_hashes
from transport.pace import FADE, Pace
from transport.records import HASH_BYTES
from transport.worker_client import WorkerClient

SEED, OTHER = b"s" * 32, b"o" * 32
SLIVER = dict(num_layers=1, kv_heads=1, head_dim=3, summary_bytes=SUMMARIES["mean_var_int8"].bytes(3))
"""A record of 96 bytes, which do not fill their 128 in the arena."""


class Rig:
    """A tier, a publisher, and a restorer over an empty pool of its own."""

    def __init__(self, folder, *, records=64, min_tokens=4, timeout=5.0, layout=None):
        self.layout, self.path = layout or small_layout(), str(folder / "tier.sock")
        self.records = records
        self.tier = LocalTier(self.path, records=records, layout=self.layout)
        self.prefill = Prefill(self.path, layout=self.layout)
        self.pool = Pool(self.layout, 64, fill=-1.0)
        hello = dict(node="prefill", rank=0, layout=self.layout, fingerprint=FINGERPRINT)
        self.client = WorkerClient(self.path, timeout=timeout)
        self.restorer = Restorer(self.client, hello, PageSource(self.pool.k, self.pool.v, self.layout), min_tokens=min_tokens)
        self.totals = self.restorer.totals

    def publish(self, room: int, tokens: int, *, salt: int = 0, seed: bytes = SEED) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, pages of prefill's pool, in reverse order)."""
        ids, pages = np.arange(tokens, dtype=np.int64) + salt, np.arange(-(-tokens // 4))[::-1].copy()
        assert self.prefill.publish(room, ids, pages, seed=seed).state == COMMITTED
        return ids, pages

    def leases(self) -> int:
        return self.tier.inventory()["leases"]

    def settle(self) -> None:
        """Waits until the rooms, which nobody claims, have expired and nothing is held."""
        def at_rest() -> bool:
            now = self.tier.inventory()
            return now["free"] + now["cached"] == now["records"] and not any(now[k] for k in ("holders", "held", "rooms", "leases"))

        until(at_rest, "nothing is held")

    def untouched(self, pages) -> bool:
        return bool((self.pool.tokens(pages, 4 * len(pages)) == -1).all())

    def close(self) -> None:
        self.restorer.close()
        self.prefill.close()
        self.tier.stop()


@pytest.fixture
def rigs(tmp_path):
    made = []
    yield lambda **sizes: made.append(Rig(tmp_path, **sizes)) or made[-1]
    for rig in made:
        rig.close()


def hashes_of(ids: np.ndarray, seed: bytes = SEED) -> bytes:
    return page_hashes(seed, ids, 4)


def answer(rig: Rig, hashes: bytes) -> int:
    rig.restorer.forget()
    return rig.restorer.find(hashes)


@pytest.mark.parametrize("layout", [{}, SLIVER])
@pytest.mark.parametrize("batch", [1, 1 << 30])
def test_what_is_restored_is_what_was_published(rigs, monkeypatch, layout, batch):
    monkeypatch.setattr(restore, "BATCH_BYTES", batch)
    rig = rigs(layout=small_layout(**layout))
    ids, source = rig.publish(1, 4 * 21 + 3)
    raw = hashes_of(ids)
    assert rig.restorer.find(raw) == 21, "the partial page is nobody else's"
    target = np.array([3, 50, 51, 52, 7, *range(8, 24)])
    assert rig.restorer.restore(raw, target)
    assert np.array_equal(rig.pool.tokens(target, 84), rig.prefill.pool.tokens(source[:21], 84))
    assert rig.untouched(np.setdiff1d(np.arange(64), target))
    assert (rig.totals["restores"], rig.totals["restored_tokens"], rig.totals["restored_bytes"]) == (1, 84, 21 * rig.layout.payload_bytes)
    assert rig.leases() == 0
    rig.settle()


def test_only_an_unbroken_beginning_counts_and_the_middle_of_a_prompt_can_be_asked_for(rigs):
    rig = rigs()
    ids, source = rig.publish(1, 40)
    longer = np.concatenate([ids, np.arange(900, 920)])
    raw = hashes_of(longer)
    assert rig.restorer.find(raw) == 10
    tail = raw[4 * HASH_BYTES : 10 * HASH_BYTES]
    assert rig.restorer.find(tail) == 6
    assert rig.restorer.restore(tail, np.arange(6))
    assert np.array_equal(rig.pool.tokens(np.arange(6), 24), rig.prefill.pool.tokens(source[4:], 24))
    other = np.concatenate([[7], ids[1:]])
    assert rig.restorer.find(hashes_of(other)) == 0, "the first token differs, and so does all that follows it"


def test_another_tenants_pages_are_not_found(rigs):
    rig = rigs()
    ids, _ = rig.publish(1, 40)
    assert rig.restorer.find(hashes_of(ids, OTHER)) == 0
    assert rig.restorer.find(hashes_of(ids)) == 10


def test_short_runs_are_computed(rigs):
    rig = rigs(min_tokens=20)
    ids, _ = rig.publish(1, 40)
    assert rig.restorer.find(hashes_of(ids)[: 4 * HASH_BYTES]) == 0 and rig.totals["lookups"] == 0
    assert rig.restorer.find(hashes_of(ids)[: 5 * HASH_BYTES]) == 5
    short = np.concatenate([ids[:16], np.arange(900, 924)])
    assert rig.restorer.find(hashes_of(short)) == 0 and rig.totals["lookups"] == 2


def test_an_answer_is_good_for_a_moment(rigs, monkeypatch):
    rig = rigs()
    ids, _ = rig.publish(1, 40)
    assert [rig.restorer.find(hashes_of(ids)) for _ in "abc"] == [10, 10, 10] and rig.totals["lookups"] == 1
    monkeypatch.setattr(restore, "REMEMBER_SECONDS", 0.0)
    rig.restorer.forget()
    assert [rig.restorer.find(hashes_of(ids)) for _ in "abc"] == [10, 10, 10] and rig.totals["lookups"] == 4


def test_a_damaged_record_is_not_used(rigs, monkeypatch):
    monkeypatch.setattr(restore, "BATCH_BYTES", 1)  # record by record: what came before the damage was already written
    rig = rigs()
    ids, _ = rig.publish(1, 40)
    raw = hashes_of(ids)
    [record] = m.unpack(rig.restorer._ask(raw[5 * HASH_BYTES : 6 * HASH_BYTES], hold=False).records, "u4")
    rig.tier.server.arena.bytes[int(record) * rig.tier.tier.geometry.payload_stride + 17] ^= 1
    assert rig.restorer.find(raw) == 10
    assert not rig.restorer.restore(raw, np.arange(10))
    assert rig.untouched(np.arange(5, 10)) and rig.leases() == 0
    assert (rig.totals["restore_failures"], rig.totals["restores"]) == (1, 0) and rig.restorer.report()["resting"]
    assert answer(rig, raw) == 0, "nothing is asked for a while"


def test_pages_that_left_the_tier_after_the_look_up(rigs):
    rig = rigs(records=16)
    ids, _ = rig.publish(1, 40)
    raw = hashes_of(ids)
    assert rig.restorer.find(raw) == 10
    rig.settle()
    rig.publish(2, 40, salt=5000)  # six of the sixteen records were free
    assert not rig.restorer.restore(raw, np.arange(10)) and rig.untouched(np.arange(10))
    assert rig.totals["restores_gone"] == 1 and rig.leases() == 0 and not rig.restorer.report()["resting"]
    left = rig.restorer.find(raw)
    assert left == 6, "what follows goes before what it follows, and the old answer is forgotten"
    assert rig.restorer.restore(raw[: left * HASH_BYTES], np.arange(left))


def test_a_tier_that_does_not_answer_costs_one_short_wait(rigs, monkeypatch):
    rig = rigs(timeout=0.05)
    ids, source = rig.publish(1, 40)
    raw = hashes_of(ids)
    assert rig.restorer.find(raw) == 10
    resume = rig.tier.pause()
    asked = rig.totals["lookups"]
    assert not rig.restorer.restore(raw, np.arange(10))
    assert answer(rig, raw) == 0 and not rig.restorer.restore(raw, np.arange(10)) and rig.untouched(np.arange(10))
    assert rig.totals["lookups"] == asked + 1 and rig.totals["restore_failures"] == 1
    resume.set()
    monkeypatch.setattr(rig.restorer, "_rests_until", 0.0)
    rig.client.timeout = 5.0
    assert answer(rig, raw) == 10 and rig.restorer.restore(raw, np.arange(10))
    assert np.array_equal(rig.pool.tokens(np.arange(10), 40), rig.prefill.pool.tokens(source, 40))
    rig.settle()


def test_a_tier_that_went_and_came_back(rigs, monkeypatch):
    rig = rigs()
    ids, _ = rig.publish(1, 40)
    raw = hashes_of(ids)
    assert rig.restorer.find(raw) == 10
    rig.tier.stop()
    assert not rig.restorer.restore(raw, np.arange(10)) and rig.untouched(np.arange(10))
    assert rig.totals["restore_failures"] == 1
    rig.tier = LocalTier(rig.path, records=rig.records, layout=rig.layout)
    until(lambda: rig.prefill.publisher.totals["reattached"] == 1, "the publisher is back")
    rig.publish(2, 40)
    monkeypatch.setattr(rig.restorer, "_rests_until", 0.0)
    assert answer(rig, raw) == 10 and rig.restorer.restore(raw, np.arange(10)), "under the new tier's epoch, from its arena"


def test_a_tier_that_is_not_there_at_first(tmp_path):
    pool, layout = Pool(small_layout(), 4), small_layout()
    hello = dict(node="prefill", rank=0, layout=layout, fingerprint=FINGERPRINT)
    restorer = Restorer(WorkerClient(str(tmp_path / "none.sock")), hello, PageSource(pool.k, pool.v, layout), min_tokens=4)
    assert restorer.find(b"h" * 3 * HASH_BYTES) == 0 and restorer.totals["restore_failures"] == 1
    assert restorer.find(b"h" * 3 * HASH_BYTES) == 0 and restorer.totals["restore_failures"] == 1 and restorer.totals["lookups"] == 0


# -- is it worth it? ----------------------------------------------------------------------------------------------


def test_a_pace_follows_its_last_samples():
    pace = Pace()
    assert pace.each is None
    pace.add(100, 2.0)
    assert pace.each == 0.02
    for _ in range(60):
        pace.add(10, 1.0)
    assert pace.each == pytest.approx(0.1, rel=1e-2)


def test_the_slower_way_is_not_taken_but_tried_now_and_then(rigs):
    rig = rigs()
    ids, _ = rig.publish(1, 40)
    raw = hashes_of(ids)
    rig.restorer.computing.add(1000, 1e-6)
    assert not rig.restorer.slower and rig.restorer.find(raw) == 10, "nothing is known of restoring yet"
    assert rig.restorer.restore(raw, np.arange(10))
    assert rig.restorer.slower and rig.restorer.find(raw) == 0 and rig.totals["restores_slower"] == 1
    rig.restorer._probes_at = 0.0
    assert rig.restorer.find(raw) == 10, "it is time to measure again"
    rig.restorer.computing.add(1000, 1e6)
    rig.restorer._probes_at = float("inf")
    assert not rig.restorer.slower and rig.restorer.find(raw) == 10


def test_computing_is_measured_from_the_later_of_build_and_the_end_before(monkeypatch):
    now = 0.0
    monkeypatch.setattr(restore.time, "monotonic", lambda: now)
    restorer = Restorer(None, {}, PageSource(*(Pool(small_layout(), 1).k,) * 2, small_layout()), min_tokens=4)

    def at(second, work, *args):
        nonlocal now
        now = second
        work(*args)

    at(1.0, restorer.built)
    at(3.0, restorer.built)  # while the first one runs
    at(5.0, restorer.computed, 40)
    assert restorer.computing.each == pytest.approx(4 / 40)
    at(11.0, restorer.computed, 60)
    expected = (4 * FADE + 6) / (40 * FADE + 60)
    assert restorer.computing.each == pytest.approx(expected)
    assert restorer.report()["milliseconds"] == {"restored": None, "computed": round(expected * 1e6, 3)} and restorer.totals["computed_tokens"] == 100


@pytest.mark.parametrize("records, most, expected", [
    ([], 3, []), ([4], 3, [(0, 1)]), ([4, 5, 6, 7, 8], 2, [(0, 2), (2, 4), (4, 5)]), ([0, 1, 9, 10, 11, 3], 3, [(0, 2), (2, 5), (5, 6)]),
    ([5, 4, 3], 8, [(0, 1), (1, 2), (2, 3)]), ([7, 7], 8, [(0, 1), (1, 2)])])
def test_runs_are_neighbours_in_order(records, most, expected):
    assert [(s.start, s.stop) for s in runs(np.array(records, np.int64), most)] == expected


# -- what the tier may fetch --------------------------------------------------------------------------------------


def test_what_is_wished_for_says_what_a_page_saves(rigs, monkeypatch):
    rig = rigs(min_tokens=10)
    restorer = rig.restorer
    assert restorer.wish(2, 9) == m.Wish(2, 9, 3, float("inf")), "nothing is known yet: it is tried"
    restorer.computing.add(100, 2.0)
    assert restorer.wish(0, 3) == m.Wish(0, 3, 3, 4 * 0.02)
    restorer.restoring.add(100, 0.5)
    wished = restorer.wish(1, 9)
    assert (wished.first, wished.stop, wished.least) == (1, 9, 3) and wished.page_seconds == pytest.approx(4 * 0.015)
    assert restorer.wish(7, 9) is None and restorer.wish(9, 9) is None and restorer.wish(9, 2) is None, "shorter than what is restored"
    restorer.restoring.add(100, 1e6)
    assert restorer.wish(1, 9) is None, "computing is faster than copying alone"
    restorer.computing.add(100, 1e9)
    assert restorer.wish(1, 9) is not None
    rig.tier.stop()
    assert restorer.find(b"h" * 9 * HASH_BYTES) == 0 and restorer.wish(1, 9) is None, "nothing is asked for a while"
    monkeypatch.setattr(restorer, "_rests_until", 0.0)
    assert restorer.wish(1, 9) is not None


def test_without_a_least_length_one_page_is_enough(rigs):
    assert rigs(min_tokens=0).restorer.wish(3, 4) == m.Wish(3, 4, 1, float("inf"))
