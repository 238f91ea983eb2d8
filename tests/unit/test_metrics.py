"""Every registered metric moves, and by what it says."""

from __future__ import annotations

import numpy as np
import prometheus_client
import pytest
import torch
from node_rig import LocalTier, until
from tier_bench import LIMITS, Bench, digest

from decode_node.pull import PullLimits
from oasis_sglang.metrics import COUNTERS, GAUGES, RECOVERING, RESTORING, STALLS, WORKING_SETS, Exporter
from transport import messages as m
from transport.errors import OasisError
from transport.metrics import TierCollector


class FakeArena:
    size = 4096


def read(collector) -> dict[str, float]:
    return {s.name + "".join(s.labels.values()): s.value for metric in collector.collect() for s in metric.samples}


ELSEWHERE = ("evicted", "rooms_moved", "pages_there", "pages_moved", "bytes_moved", "moves_retried", "moves_failed", "rooms_filled", "bytes_filled",
             "fills_failed", "mover_restarts", "pages_donated", "bytes_donated", "pages_fetched_back", "bytes_fetched_back", "fetch_seconds",
             "fetches_failed", "fetches_slower", "records_zeroed", "records_doubted")
"""Counters of tiers with memory nodes, memory nodes, donations, zero_freed and damage: test_memory_tier.py, test_relay.py, test_fetch_back.py,
test_donation.py, test_tenants.py, test_tier.py."""


def test_every_metric_of_the_tier_moves():
    bench = Bench()
    collector = TierCollector(bench.tier, FakeArena())
    seen = [read(collector)]

    def note():
        seen.append(read(collector))

    bench.hello("W1")
    bench.hello("R1")
    bench.open("W1", 1, [digest(1)], private=1)
    note()
    bench.commit("W1", 1, 2)
    bench.await_("R1", 2)
    note()
    lease = bench.await_("R1", 1).lease
    note()
    bench.do("R1", m.Release, leases=m.pack([lease], "u8"))
    bench.open("W1", 3, [digest(1)])
    bench.do("R1", m.Cancel, room=3, rank=0)
    bench.do("W1", m.Abort, room=3, rank=0, reason="")
    for room in (4, 5):
        bench.open("W1", room, private=1)
        bench.commit("W1", room, 1)
    bench.await_("R1", 4)
    with pytest.raises(OasisError):
        bench.await_("R1", 4)
    note()
    bench.later(LIMITS.room_seconds)
    bench.tier.totals["data_plane_restarts"] += 1  # counted by the server
    bench.tier._handlers[m.Ping] = lambda session, request: 1 / 0
    assert bench.tier.handle("W1", m.Ping(seq=9)).code == "ProtocolError"
    note()
    bench.hello("W1")
    bench.do("W1", m.Lookup, hashes=digest(1), hold=False)
    note()
    moved = {name for name in seen[0] if len({s[name] for s in seen}) > 1}
    still = {"oasis_tier_arena_bytes", *(f"oasis_tier_{name}" for name in ("moves", "fetches", "redirects", "tiers")), *(f"oasis_tier_{name}_total" for name in ELSEWHERE)}
    assert set(seen[0]) - moved == still and seen[0]["oasis_tier_arena_bytes"] == 4096
    last = seen[-1]
    assert {k: last[f"oasis_tier_{k}_total"] for k in ("rooms_opened", "rooms_committed", "rooms_claimed", "rooms_failed", "rooms_cancelled", "rooms_expired")} == {
        "rooms_opened": 4, "rooms_committed": 3, "rooms_claimed": 2, "rooms_failed": 1, "rooms_cancelled": 1, "rooms_expired": 1}
    assert (last["oasis_tier_leases_released_total"], last["oasis_tier_leases_expired_total"]) == (1, 1)
    assert (last["oasis_tier_pages_fresh_total"], last["oasis_tier_pages_reused_total"], last["oasis_tier_refused_total"]) == (4, 1, 1)
    assert all(metric.documentation.endswith(".") for metric in collector.collect())


def test_every_counter_of_the_workers_moves(worlds):
    """One scenario with something of everything; a counter that stays at nought is not one."""
    world = worlds(tier=dict(records=8), decode=dict(limits=PullLimits(await_seconds=10, read_seconds=0.1, silence_seconds=5)))
    totals, report = world.prefill.publisher.totals, world.decode.puller.totals
    ids, pages = world.prompt(10)
    world.prefill.publish(1, ids, pages, queries=torch.randn(4, 2, 6, 4))
    world.tier.faults.corrupt = 1
    assert world.pull_into(1, np.arange(3)).state == "done"
    world.prefill.publish(2, ids, pages)
    held = world.decode.pull(2)
    until(lambda: held.state == "ready")
    world.tier.faults.hold = True
    world.decode.fetch(held, np.arange(3))
    until(lambda: report["quarantined"])
    world.tier.faults.hold = False
    world.tier.faults.finish()
    until(lambda: held.state in ("done", "failed"))
    world.prefill.publish(3, ids, pages)
    faulty = world.decode.pull(3)
    until(lambda: faulty.state == "ready")
    world.decode.fetch(faulty, np.array([0, 1, 10_000]))
    waiting = world.prefill.open(4, np.arange(30), seed=None)
    until(lambda: waiting.state == "open")
    full = world.prefill.open(5, np.arange(30), seed=None)
    until(lambda: totals["reserve_retries"])
    for pub in (waiting, full):
        world.prefill.publisher.cancel(pub, "")
    port = world.tier.control.rpartition(":")[2]
    world.tier.stop()
    world.tier = LocalTier(world.path, listen=f"127.0.0.1:{port}")
    until(lambda: totals["reattached"] and report["links_lost"])
    world.prefill.publisher.export = lambda totals, gauges: 1 / 0
    until(lambda: totals["internal_errors"])
    assert {name for name in COUNTERS["prefill"] if not totals[name]} == set(RESTORING), "those need a radix tree: tests/e2e/test_prefix_reuse.py"
    assert {name for name in COUNTERS["decode"] if not report[name]} == {*WORKING_SETS, *RECOVERING, "moved", "searches"}, \
        "those need a coordinator, memory nodes, or what test_recovery.py does"
    assert totals["rooms_committed"] == 3 and totals["rooms_failed"] == 2 and totals["pages_published"] == 5 and totals["pages_reused"] == 4


@pytest.fixture
def registry(monkeypatch):
    """What an exporter creates goes here."""
    own = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge"):
        real = getattr(prometheus_client, name)
        monkeypatch.setattr(prometheus_client, name, lambda *args, real=real, **more: real(*args, registry=own, **more))
    return own


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_exporter_pushes_growth_not_totals(registry, role):
    first, second = (Exporter(role, rank) for rank in (0, 1))
    first({name: n for n, name in enumerate(COUNTERS[role], 1)}, dict.fromkeys(GAUGES[role], 5))
    first({name: n * 10 for n, name in enumerate(COUNTERS[role], 1)}, dict.fromkeys(GAUGES[role], 3))
    second._metrics = first._metrics
    second({"unknown": 9}, {})
    for n, name in enumerate(COUNTERS[role], 1):
        assert registry.get_sample_value(f"oasis_{role}_{name}_total", {"rank": "0"}) == n * 10
        assert registry.get_sample_value(f"oasis_{role}_{name}_total", {"rank": "1"}) == 0
    for name in GAUGES[role]:
        assert registry.get_sample_value(f"oasis_{role}_{name}", {"rank": "0"}) == 3


@pytest.mark.parametrize("overflow", [[2], []])
def test_stalls_are_cumulative_buckets_and_grow(registry, overflow):
    """With or without a bucket for what is above the last bound: the count covers it."""
    def bucket(le):
        return registry.get_sample_value("oasis_decode_stalls_total", {"rank": "0", "le": le})

    exporter = Exporter("decode", 0)
    exporter({}, {}, {"bounds_ms": [1, 2.5, 1000], "counts": [0, 0, 0, *[0 for _ in overflow]], "sum_ms": 0, "count": 0})
    assert [bucket(le) for le in ("0.001", "0.0025", "1", "+Inf")] == [0, 0, 0, 0]
    stalls = {"bounds_ms": [1, 2.5, 1000], "counts": [3, 0, 4, *overflow], "sum_ms": 4500.0, "count": 9}
    for _ in range(2):
        exporter({}, {}, stalls)
    assert [bucket(le) for le in ("0.001", "0.0025", "1", "+Inf")] == [3, 3, 7, 9]
    exporter({}, {}, {**stalls, "counts": [3, 5, 4, *overflow], "sum_ms": 4510.0, "count": 14})
    exporter({}, {})
    assert [bucket(le) for le in ("0.001", "0.0025", "1", "+Inf")] == [3, 8, 12, 14]
    assert registry.get_sample_value("oasis_decode_stall_seconds_total", {"rank": "0"}) == pytest.approx(4.51)


def test_names_and_help_follow_the_rules():
    for texts in (*COUNTERS.values(), STALLS, *GAUGES.values()):
        for name, text in texts.items():
            assert not name.endswith("_total") and text.endswith(".") and "rank" in text, name

