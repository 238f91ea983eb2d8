"""A request read in several jobs that lives on with its lease: index, then chosen pieces and the partial page, then more on
demand, all from a real tier over the loopback plane."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from node_rig import LocalTier, World, row_of, small_layout, until
from test_arena_peer import Plane
from test_puller import committed, ready, still_serves

from decode_node import arena_peer
from decode_node.pull import PHASES, PullLimits
from decode_node.reader import Job
from oasis_sglang.selection.summaries import SUMMARIES
from transport import messages as m
from transport.errors import CapacityError, DeadlineExceeded, IntegrityError, LeaseExpired, OasisError, PeerLost, ProtocolError, RoomFailed, TransportError
from transport.integrity import verify_index, verify_pieces, verify_records
from transport.tier import TierLimits

LAYOUT = small_layout()
PIECES, T = LAYOUT.pieces, LAYOUT.block_tokens


class Selected:
    """Index of all whole blocks, then ``chosen`` blocks int [pieces, k] and the partial page. Keeps what it was given.

    ``calls`` says what was called in which order; ``closed`` is set by a test once nothing may be called any more.
    """

    keeps_lease = True

    def __init__(self, chosen: np.ndarray | None = None):
        self.chosen = np.zeros((PIECES, 0), int) if chosen is None else chosen
        self.calls: list[str] = []
        self.pieces: dict[tuple[int, int], bytes] = {}
        self.partial: list[bytes] = []
        self.digests: np.ndarray | None = None
        self.summaries: np.ndarray | None = None
        self.indexed = np.zeros(0, bool)
        self.closed = False
        self.late = 0
        self.on_call = lambda name: None

    def called(self, name: str) -> None:
        self.late += self.closed
        self.calls.append(name)
        self.on_call(name)

    def start(self, pull):
        self.called("start")
        whole = self.whole = pull.manifest.prompt_tokens // T
        self.indexed = np.zeros(whole, bool)
        self.digests, self.summaries = np.zeros((whole, PIECES), np.uint64), np.zeros((whole, PIECES, LAYOUT.summary_bytes), np.uint8)
        offsets = pull.link.welcome.geometry.index_offsets(pull.records[:whole])

        def accept(rows, start, stop):
            self.called("index")
            span = slice(start, stop)
            self.digests[span], self.summaries[span] = verify_index(
                rows, pull.generations[span], pull.roots[span], pull.records[span], LAYOUT, peer=pull.link.peer, room=pull.room)
            self.indexed[span] = True

        return [Job(pull, "summaries", offsets, LAYOUT.index_bytes, accept, lambda: self.called("indexed"))]

    def more(self, pull):
        self.called("more")
        if self.calls.count("more") > 1:
            return []
        pieces = np.repeat(np.arange(PIECES), self.chosen.shape[1])
        jobs = [self.job(pull, pieces, self.chosen.reshape(-1), "pieces")]
        last = slice(self.whole, len(pull.records))

        def partial(payloads, start, stop):
            self.called("partial")
            verify_records(payloads, pull.roots[last], pull.records[last], LAYOUT, peer=pull.link.peer, room=pull.room)
            self.partial.append(payloads[0].tobytes())

        return [*jobs, Job(pull, "partial_page", pull.link.welcome.geometry.payload_offsets(pull.records[last]), LAYOUT.payload_bytes, partial)]

    def job(self, pull, pieces, blocks, phase="on_demand"):
        order = np.lexsort((pieces, blocks))
        pieces, blocks = pieces[order], blocks[order]
        offsets = pull.link.welcome.geometry.piece_offsets(pull.records[blocks], pieces, LAYOUT)

        def accept(payloads, start, stop):
            self.called(phase)
            span = slice(start, stop)
            verify_pieces(payloads, self.digests[blocks[span], pieces[span]], pull.records[blocks[span]],
                          peer=pull.link.peer, room=pull.room)
            for piece, block, payload in zip(pieces[span].tolist(), blocks[span].tolist(), payloads):
                assert (piece, block) not in self.pieces, "accepted twice"
                self.pieces[piece, block] = payload.tobytes()

        return Job(pull, phase, offsets, LAYOUT.piece_bytes, accept, lambda: self.called(f"{phase} finished"))


def piece_of(world: World, pages: np.ndarray, piece: int, block: int) -> bytes:
    """What prefill's pool holds of it, element by element."""
    layer, head = divmod(piece, LAYOUT.kv_heads)
    first, pool = int(pages[block]) * T, world.prefill.pool
    return b"".join(side[layer][first + token, head].numpy().tobytes() for side in (pool.k, pool.v) for token in range(T))


def exact(world: World, pages: np.ndarray, held: Selected) -> bool:
    """Whether every summary and piece held is what prefill published."""
    blocks = np.flatnonzero(held.indexed)
    if len(blocks):
        keys = torch.stack([k.view(-1, T, LAYOUT.kv_heads, LAYOUT.head_dim)[pages[blocks]] for k in world.prefill.pool.k], 1).transpose(2, 3)
        wanted = SUMMARIES[LAYOUT.summary].build(keys).numpy().view(np.uint8)
        if not np.array_equal(held.summaries[blocks], wanted.reshape(len(blocks), PIECES, LAYOUT.summary_bytes)):
            return False
    return all(payload == piece_of(world, pages, *key) for key, payload in held.pieces.items())


def chosen(whole: int, k: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(whole)[:k] for _ in range(PIECES)])


def admitted(world: World, room: int, tokens: int = 42, k: int = 3, at: int = 0):
    """A committed request, pulled with a few pieces: its pull, what it holds, prefill's pages."""
    pages = committed(world, room, tokens, at=at)
    pull, held = ready(world, room), Selected(chosen(tokens // T, k, room))
    world.decode.give(pull, held)
    until(lambda: pull.state in ("serving", "failed"), "admitted")
    assert pull.state == "serving", pull.error
    return pull, held, pages


def missing(held: Selected, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """``n`` pieces that are not here yet."""
    here = np.zeros((PIECES, held.whole), bool)
    for piece, block in held.pieces:
        here[piece, block] = True
    pieces, blocks = np.nonzero(~here)
    pick = np.random.default_rng(seed).permutation(len(pieces))[:n]
    return pieces[pick], blocks[pick]


def demand(world: World, pull, held: Selected, n: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    pieces, blocks = missing(held, n, seed)
    world.decode.puller.demand(pull, held.job(pull, pieces, blocks))
    return pieces, blocks


def fulfilled(held: Selected, times: int = 1) -> None:
    until(lambda: held.calls.count("on_demand finished") == times, "what was asked for")


def ends(world: World, *pulls) -> None:
    """Releases what serves; all accounts return to their start."""
    for pull in pulls:
        world.decode.puller.release(pull)
    until(lambda: all(pull.state in ("done", "failed") for pull in pulls))
    world.settle()


# -- what arrives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [3, 4, 23, 42])
@pytest.mark.parametrize("window_records", [1, 2, 100])
def test_index_then_pieces_arrive_exactly_and_the_lease_is_kept(worlds, tokens, window_records):
    world = worlds(decode=dict(window_records=window_records))
    pages = committed(world, 7, tokens)
    pull, whole = ready(world, 7), tokens // T
    held = Selected(chosen(whole, min(2, whole)))
    rows_at = []
    world.decode.give(pull, held, lambda row: rows_at.append((row, len(held.calls))))
    until(lambda: pull.state in ("serving", "failed"))
    assert pull.state == "serving", pull.error
    assert set(held.pieces) == {(piece, block) for piece, row in enumerate(held.chosen.tolist()) for block in row} and exact(world, pages, held)
    order = [name for name in held.calls if name in ("start", "indexed", "more", "pieces finished")]
    assert order == ["start", "indexed", "more", "pieces finished", "more"], "each round once, after the one before has ended"
    assert rows_at == [(row_of(7), len(held.calls))], "the row comes last, once"
    assert len(held.partial) == (tokens % T > 0)
    for payload in held.partial:
        record = np.frombuffer(payload, np.float32).reshape(LAYOUT.num_layers, LAYOUT.kv_heads, 2, T, LAYOUT.head_dim)
        got = record[:, :, :, : tokens % T].transpose(2, 0, 3, 1, 4)
        assert np.array_equal(got, world.prefill.pool.tokens(pages[-1:], tokens % T))
    assert pull in world.decode.puller.live and world.tier.inventory()["leases"] == 1
    ends(world, pull)
    assert pull.state == "done" and pull.error is None and world.decode.puller.totals["released"] == 1


@pytest.mark.parametrize("kind", ["zmq", "nixl"])
def test_pieces_arrive_exactly_over_a_network(worlds, kind, monkeypatch):
    if kind == "nixl":
        pytest.importorskip("nixl")
        monkeypatch.setenv("UCX_TLS", "tcp")
    world = worlds(tier=dict(planes=(kind,)), decode=dict(kind=kind))
    pull, held, pages = admitted(world, 1)
    demand(world, pull, held, 25)
    fulfilled(held)
    assert len(held.pieces) == 3 * PIECES + 25 and exact(world, pages, held) and len(held.partial) == 1
    assert sum(world.decode.plane.landed.values()) == (3 * PIECES + 25) * LAYOUT.piece_bytes + 10 * LAYOUT.index_bytes + LAYOUT.payload_bytes
    ends(world, pull)


def test_bytes_are_counted_by_phase_until_admission_and_after(worlds):
    world = worlds()
    pull, held, _ = admitted(world, 5)
    manifest = len(msgspec.msgpack.encode(pull.manifest))
    phases = dict.fromkeys(PHASES, 0) | {"manifest": manifest, "summaries": 10 * LAYOUT.index_bytes, "pieces": 3 * PIECES * LAYOUT.piece_bytes,
                                         "partial_page": LAYOUT.payload_bytes}
    first = until(lambda: world.decode.puller.reports.get("5"), "the report of a live request")
    assert first["admitted_bytes_by_phase"] == first["lifetime_bytes_by_phase"] == phases and first["state"] == "serving"
    assert first["admitted_bytes"] == first["lifetime_bytes"] == sum(phases.values()) and first["room"] == 5
    assert sum(world.decode.plane.landed.values()) == sum(phases.values()) - manifest
    demand(world, pull, held, 7)
    fulfilled(held)
    more = 7 * LAYOUT.piece_bytes
    live = until(lambda: (r := world.decode.puller.reports["5"])["lifetime_bytes"] > r["admitted_bytes"] and r, "the report follows")
    ends(world, pull)
    last = world.decode.puller.reports["5"]
    for report in (live, last):
        assert report["admitted_bytes_by_phase"] == phases and report["lifetime_bytes_by_phase"] == phases | {"on_demand": more}
        assert report["lifetime_bytes"] == report["admitted_bytes"] + more
        assert report["full_transfer_bytes"] == 42 * LAYOUT.token_bytes and report["prompt_tokens"] == 42
    assert (live["state"], last["state"]) == ("serving", "done")
    totals = world.decode.puller.totals
    assert {phase: totals[f"bytes_{phase}"] for phase in PHASES} == last["lifetime_bytes_by_phase"]
    assert (totals["demands"], totals["demanded_items"], totals["admitted"], totals["failed"]) == (1, 7, 1, 0)
    assert sum(world.decode.plane.landed.values()) == last["lifetime_bytes"] - manifest


def runs(offsets: np.ndarray, unit: int, items: int) -> int:
    """Ranges that a plane should be asked for, counted one by one."""
    count = 0
    for k, offset in enumerate(offsets.tolist()):
        count += k % items == 0 or offset != int(offsets[k - 1]) + unit
    return count


@pytest.mark.parametrize("seed", range(12))
def test_neighbours_in_the_arena_are_one_descriptor(worlds, seed):
    """Any offsets, ascending or not; counted by the meter around the plane."""
    rng = np.random.default_rng(seed)
    world = worlds(decode=dict(window_records=int(rng.integers(1, 4))))
    pull, held, _ = admitted(world, 1, k=0)
    n, plane = int(rng.integers(1, 50)), world.decode.plane
    units = rng.integers(0, 30, n)  # many are neighbours, some repeat
    if seed % 3 == 0:
        units.sort()
    unit = LAYOUT.piece_bytes
    offsets, got = units.astype(np.uint64) * np.uint64(unit), np.zeros((n, unit), np.uint8)
    before = (plane.descriptors, plane.reads, sum(plane.landed.values()))
    done = threading.Event()

    def accept(payloads, start, stop):
        got[start:stop] = payloads

    world.decode.puller.demand(pull, Job(pull, "on_demand", offsets, unit, accept, done.set))
    assert done.wait(10)
    arena = world.tier.server.arena.bytes
    assert np.array_equal(got, np.stack([arena[o : o + unit] for o in offsets.tolist()]))
    items = world.decode.staging.window_bytes // unit
    assert plane.descriptors - before[0] == runs(offsets, unit, items)
    assert plane.reads - before[1] == -(-n // items) and sum(plane.landed.values()) - before[2] == n * unit
    ends(world, pull)


def test_a_window_of_whole_records_is_one_descriptor(worlds):
    world = worlds(decode=dict(window_records=100))
    committed(world, 1, 40)
    assert world.pull_into(1, np.arange(10)).state == "done"
    assert (world.decode.plane.reads, world.decode.plane.descriptors) == (1, 1)
    world.settle()


def test_requests_and_their_jobs_take_turns(worlds):
    """One window: a short job is not held back by long ones, whether they came before or after it."""
    world = worlds(decode=dict(windows=1, window_records=1))
    pull, held, _ = admitted(world, 1, k=0)
    order, done = [], threading.Event()
    world.tier.faults.hold = True
    for name, n in (("long", 60), ("short", 1), ("longer", 60)):
        offsets = np.arange(n, dtype=np.uint64) * np.uint64(LAYOUT.payload_bytes)
        job = Job(pull, "on_demand", offsets, LAYOUT.payload_bytes, lambda payloads, start, stop, name=name: order.append(name),
                  lambda name=name: name == "longer" and done.set())
        world.decode.puller.demand(pull, job)
    until(lambda: world.tier.faults.in_flight and len(world.decode.puller.reader.ready) == 3)
    world.tier.faults.hold = False
    world.tier.faults.finish()
    assert done.wait(10) and len(order) == 121 and order.index("short") <= 3
    ends(world, pull)


def test_jobs_of_nothing_end_at_once(worlds):
    world = worlds()
    committed(world, 1, 8)
    pull, finished = ready(world, 1), []
    nothing = np.zeros(0, np.uint64)
    rounds = [[Job(pull, "pieces", nothing, 8, pytest.fail, lambda k=k: finished.append(k)) for k in (1, 2)], [], None]
    destination = SimpleNamespace(keeps_lease=True, start=lambda pull: rounds.pop(0), more=lambda pull: rounds.pop(0))
    world.decode.give(pull, destination)
    until(lambda: pull.state == "serving", pull.error)
    assert finished == [1, 2] and rounds == [None] and not world.decode.plane.reads
    world.decode.puller.demand(pull, Job(pull, "on_demand", nothing, 8, pytest.fail, lambda: finished.append(3)))
    until(lambda: finished == [1, 2, 3])
    ends(world, pull)


def test_an_item_larger_than_a_window_is_refused_by_name(worlds):
    world = worlds()
    pull, held, _ = admitted(world, 1)
    size = world.decode.staging.window_bytes
    world.decode.puller.demand(pull, Job(pull, "on_demand", np.zeros(1, np.uint64), size + 1, pytest.fail))
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, CapacityError) and pull.error.limit == f"{size} bytes"
    world.settle()


def test_nothing_is_handed_over_before_the_pages_are_vacant(worlds):
    world = worlds()
    committed(world, 1, 42)
    pull, held, forward = ready(world, 1), Selected(chosen(10, 2)), threading.Event()
    world.decode.give(pull, held, vacant=SimpleNamespace(synchronize=lambda: forward.wait(15)))
    until(lambda: world.decode.plane.landed, "a window landed")
    time.sleep(0.05)
    assert held.calls == ["start"]
    forward.set()
    until(lambda: pull.state == "serving", pull.error)
    ends(world, pull)


# -- the manifest's ranking ---------------------------------------------------------------------------------------


def ranked(world: World, room: int, raw: bytes):
    """A pull of a committed room whose manifest ranks blocks by ``raw``."""
    committed(world, room, 42)

    def rank():
        held = world.tier.tier.rooms[room, 0]
        held.manifest = msgspec.structs.replace(held.manifest, ranking=raw)

    world.tier.call(rank)
    pull = world.decode.pull(room)
    until(lambda: pull.state in ("ready", "failed"))
    return pull


@pytest.mark.parametrize("k", [0, 1, 4, 10])
def test_the_ranking_is_handed_over(worlds, k):
    world, ranking = worlds(), chosen(10, k)
    pull = ranked(world, 1, m.pack(ranking, "u4"))
    assert pull.state == "ready" and pull.ranking.dtype == np.int64 and np.array_equal(pull.ranking, ranking) and pull.ranking.shape == (PIECES, k)
    world.decode.puller.cancel(pull, "")
    world.settle()


@pytest.mark.parametrize("wrong", ["a block that is partial", "twice", "not for every piece", "too many", "half a number"])
def test_a_ranking_that_makes_no_sense_is_refused(worlds, wrong):
    world, ranking = worlds(), chosen(10, 4)
    if wrong == "a block that is partial":
        ranking[3, 2] = 10
    if wrong == "twice":
        ranking[2, 3] = ranking[2, 0]
    raw = m.pack(ranking, "u4")
    raw = {"not for every piece": raw[:-4], "too many": raw * 3, "half a number": raw[:-1]}.get(wrong, raw)
    pull = ranked(world, 1, raw)
    assert pull.state == "failed" and isinstance(pull.error, ProtocolError)
    still_serves(world)
    world.settle()


# -- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["index", "pieces", "on demand"])
@pytest.mark.parametrize("times", [1, 9])
def test_damage_is_read_again_once_and_never_used(worlds, when, times):
    world = worlds()
    pages = committed(world, 1, 42)
    pull, held = ready(world, 1), Selected(chosen(10, 3))

    def damage(name):
        if name == {"index": "start", "pieces": "more"}.get(when) and held.calls.count(name) == 1:
            world.tier.faults.corrupt = times

    held.on_call = damage
    world.decode.give(pull, held)
    until(lambda: pull.state in ("serving", "failed"))
    if when == "on demand":
        before = dict(held.pieces)
        world.tier.faults.corrupt = times
        demand(world, pull, held)
        until(lambda: pull.state == "failed" or "on_demand finished" in held.calls)
    assert exact(world, pages, held)
    assert world.decode.puller.totals["read_failures"] in ((1,) if times == 1 else (2, 3)), "the partial page has a try of its own"
    if times == 1:
        assert pull.state == "serving"
    else:
        assert pull.state == "failed" and isinstance(pull.error, IntegrityError) and pull.error.room == 1
        assert when != "on demand" or held.pieces == before
        assert (when == "on demand") == (1 in world.decode.rows)
    world.tier.faults.corrupt = 0
    until(lambda: world.tier.inventory()["leases"] == (times == 1))
    still_serves(world)
    ends(world, pull)


def test_each_demand_may_be_read_again_once(worlds):
    """A request that serves for long meets more than one damaged read in its life."""
    world = worlds()
    pull, held, pages = admitted(world, 1)
    for turn in range(1, 5):
        world.tier.faults.corrupt = 1
        demand(world, pull, held, 3, seed=turn)
        fulfilled(held, turn)
    assert pull.state == "serving" and exact(world, pages, held) and world.decode.puller.totals["read_failures"] == 4
    ends(world, pull)


@pytest.mark.parametrize("where", ["start", "index", "indexed", "more", "pieces", "pieces finished", "on_demand", "on_demand finished"])
@pytest.mark.parametrize("kind", [RoomFailed, ValueError])
def test_a_fault_of_a_destination_ends_that_request_alone(worlds, where, kind):
    world = worlds()
    committed(world, 1, 42)
    pull, held = ready(world, 1), Selected(chosen(10, 3))

    def fault(name):
        if name == where:
            raise kind("a fault")

    held.on_call = fault
    world.decode.give(pull, held)
    if where.startswith("on_demand"):
        until(lambda: pull.state == "serving")
        demand(world, pull, held)
    until(lambda: pull.state == "failed", "the faulty request ends")
    assert isinstance(pull.error, RoomFailed) and "a fault" in str(pull.error)
    assert world.decode.puller.totals["internal_errors"] == (kind is ValueError)
    still_serves(world)
    world.settle()


# -- serving ------------------------------------------------------------------------------------------------------


def test_demands_of_several_threads_all_arrive(worlds):
    world = worlds()
    pull, held, pages = admitted(world, 1, k=0)
    pieces, blocks = np.nonzero(np.ones((PIECES, held.whole), bool))
    parts = np.array_split(np.random.default_rng(3).permutation(len(pieces)), 12)
    threads = [threading.Thread(target=lambda part=part: world.decode.puller.demand(pull, held.job(pull, pieces[part], blocks[part]))) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fulfilled(held, 12)
    assert len(held.pieces) == PIECES * held.whole and exact(world, pages, held)
    assert world.decode.puller.totals["demanded_items"] == len(pieces) and world.decode.puller.totals["demands"] == 12
    ends(world, pull)


def test_an_idle_request_costs_no_polling(worlds):
    world = worlds()
    pull, held, _ = admitted(world, 1)
    until(lambda: not world.decode.puller.reader.busy)
    steps, step = Counter(), world.decode.puller._step

    def counted(now):
        steps["n"] += 1
        step(now)

    world.decode.puller._step = counted
    time.sleep(1.0)
    assert steps["n"] < 15, "only renewals, and four looks a second"
    demand(world, pull, held)
    fulfilled(held)
    ends(world, pull)


def test_cancel_does_not_end_a_request_that_serves(worlds):
    world = worlds()
    pull, held, _ = admitted(world, 1)
    world.decode.puller.cancel(pull, "too late")
    demand(world, pull, held)
    fulfilled(held)
    assert pull.state == "serving" and not pull.cancelled
    ends(world, pull)


def test_a_demand_for_a_request_that_does_not_serve_is_ignored(worlds):
    world = worlds()
    committed(world, 1, 42)
    early = ready(world, 1)
    never = Job(early, "on_demand", np.zeros(1, np.uint64), 8, pytest.fail, pytest.fail)
    world.decode.puller.demand(early, never)
    world.decode.fetch(early, np.arange(11))
    until(lambda: early.state == "done")
    world.decode.puller.demand(early, never)
    pull, held, _ = admitted(world, 2)
    world.decode.puller.release(pull)
    demand(world, pull, held)
    until(lambda: pull.state == "done")
    demand(world, pull, held)
    world.settle()
    totals = world.decode.puller.totals
    assert totals["demands"] == totals["internal_errors"] == 0 and not held.calls.count("on_demand")
    assert early.state == pull.state == "done"


@pytest.mark.parametrize("ending", ["late", "failed", "corrupt", "twice"])
def test_nothing_is_handed_over_after_release_returned(worlds, ending):
    world = worlds()
    for turn in range(4):
        pull, held, _ = admitted(world, turn + 1)
        world.tier.faults.hold, world.tier.faults.corrupt = True, int(ending == "corrupt")
        demand(world, pull, held, 20)
        until(lambda: world.tier.faults.in_flight)
        for _ in range(3 if ending == "twice" else 1):
            world.decode.puller.release(pull)
        held.closed = True
        until(lambda: pull.state == "done")
        if ending == "failed":
            world.tier.faults.fail(TransportError("told to"))
        world.tier.faults.hold = False
        world.tier.faults.finish()
        world.settle()
        assert not held.late and pull.error is None and "on_demand" not in held.calls
    still_serves(world)


def test_release_waits_for_the_hand_over_that_runs(worlds):
    world = worlds()
    pull, held, _ = admitted(world, 1)
    inside, go, returned = threading.Event(), threading.Event(), threading.Event()

    def stay(name):
        if name == "on_demand":
            inside.set()
            go.wait(10)

    held.on_call = stay
    demand(world, pull, held)
    assert inside.wait(10)
    thread = threading.Thread(target=lambda: (world.decode.puller.release(pull), returned.set()))
    thread.start()
    assert not returned.wait(0.1)
    go.set()
    assert returned.wait(10)
    held.closed = True
    thread.join()
    ends(world, pull)
    assert not held.late and pull.state == "done"


def test_a_release_before_the_puller_noticed_a_lost_link_ends_well(worlds):
    world = worlds()
    pull, held, _ = admitted(world, 1)
    world.decode.puller._post(lambda: (world.decode.puller.release(pull), pull.link.fail(PeerLost("the tier is gone"))))
    until(lambda: pull.state in ("done", "failed"))
    assert pull.state == "done" and world.decode.puller.totals["failed"] == 0
    world.settle()


# -- leases, lost and slow tiers ----------------------------------------------------------------------------------


def test_leases_are_renewed_while_requests_serve(worlds):
    world = worlds(tier=dict(limits=TierLimits(lease_seconds=0.6, grace_seconds=0.1, room_seconds=5)))
    pull, held, pages = admitted(world, 1)
    for turn in range(1, 4):
        time.sleep(0.6)
        demand(world, pull, held, seed=turn)
        fulfilled(held, turn)
    assert pull.state == "serving" and exact(world, pages, held) and world.tier.inventory()["leases"] == 1
    ends(world, pull)


def test_a_lease_that_the_tier_ended_fails_a_request_that_serves(worlds):
    world = worlds(tier=dict(limits=TierLimits(lease_seconds=0.6, grace_seconds=0.1, room_seconds=5)))
    pull, held, _ = admitted(world, 1)
    world.tier.call(world.tier.tier._end_lease, pull.manifest.lease)
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, LeaseExpired) and pull.error.room == 1
    assert world.decode.puller.totals["failed_serving"] == world.decode.puller.totals["failed"] == 1
    until(lambda: world.decode.puller.reports["1"]["state"] == "failed")
    world.decode.puller.release(pull)
    assert pull.state == "failed"
    world.settle()


def test_a_piece_read_after_its_lease_ran_out_is_not_used(worlds):
    world = worlds()
    pull, held, _ = admitted(world, 1)
    world.decode.puller._post(setattr, pull, "lease_expires", 0.0)
    demand(world, pull, held)
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, LeaseExpired) and "on_demand" not in held.calls
    world.settle()


@pytest.mark.parametrize("reading", [False, True])
def test_a_tier_that_ends_takes_the_requests_it_serves_along(worlds, reading):
    world = worlds()
    pull, held, _ = admitted(world, 1)
    if reading:
        world.tier.faults.hold = True
        demand(world, pull, held)
        until(lambda: world.tier.faults.in_flight)
    port = world.tier.control.rpartition(":")[2]
    world.tier.stop()
    world.tier = LocalTier(world.path, listen=f"127.0.0.1:{port}")
    until(lambda: pull.state == "failed", "noticed at the next renewal")
    assert isinstance(pull.error, TransportError) and "on_demand" not in held.calls
    until(lambda: world.prefill.publisher.totals["reattached"] == 1)
    still_serves(world)
    ends(world, pull)


@pytest.mark.parametrize("reading", [False, True])
def test_a_stopped_tier_fails_the_requests_it_serves_in_time(worlds, reading):
    world = worlds(decode=dict(limits=PullLimits(await_seconds=10, read_seconds=0.3, silence_seconds=0.5)))
    pull, held, _ = admitted(world, 1)
    world.tier.faults.hold = reading
    if reading:
        demand(world, pull, held)
    resume, began = world.tier.pause(), time.monotonic()
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, DeadlineExceeded) and time.monotonic() - began < 5
    assert "on_demand" not in held.calls
    resume.set()
    world.tier.faults.hold = False
    world.tier.faults.finish()
    world.settle()
    still_serves(world)


def test_demands_wait_for_a_data_plane_that_comes_back(worlds, monkeypatch):
    monkeypatch.setattr(arena_peer, "STEADY_SECONDS", 0.3)
    world = worlds()
    plane = Plane(world.tier)
    try:
        pull, held, pages = admitted(world, 1)
        plane.down()
        demand(world, pull, held, 12)
        arena = world.decode.puller.reader.arenas[pull.link]
        until(lambda: len(arena.parked) == 1)
        demand(world, pull, held, 5, seed=1)
        until(lambda: len(arena.parked) == 2)
        held.pieces.clear()  # the two demands may overlap
        held.on_call = lambda name: name == "on_demand finished" and held.pieces.clear()
        plane.up()
        fulfilled(held, 2)
        assert pull.state == "serving" and exact(world, pages, held)
        ends(world, pull)
    finally:
        plane.close()


def test_nothing_is_asked_of_a_destination_between_its_rounds_once_it_was_cancelled(worlds):
    world = worlds()
    committed(world, 1, 42)
    pull, held, advance = ready(world, 1), Selected(chosen(10, 2)), world.decode.puller._advance

    def cancelled_first(pull):
        world.decode.puller.cancel(pull, "the client left")
        advance(pull)

    world.decode.puller._advance = cancelled_first
    world.decode.give(pull, held)
    until(lambda: pull.state == "failed")
    world.settle()
    assert held.calls[-1] == "indexed" and not world.decode.rows


# -- aborts in every state ----------------------------------------------------------------------------------------

STATES = ("start", "index", "indexed", "more", "pieces", "pieces finished", "serving", "demanding", "on_demand", "released")
FAULTS = ("none", "late", "failed", "corrupt", "refused", "corrupt twice")


class Fuzz:
    """One world for all seeds; ``ended`` counts (state aborted in, fault, how the pull ended)."""

    def __init__(self, world: World):
        self.world, self.room, self.ended = world, 0, Counter()

    def end(self, pull, held) -> None:
        """What a decode node does at an abort, in whatever state."""
        self.world.decode.puller.cancel(pull, "the client left")
        self.world.decode.puller.release(pull)
        held.closed = True

    def run(self, seed: int) -> None:
        rng, world, faults = random.Random(seed), self.world, self.world.tier.faults
        self.room += 1
        tokens, state, fault = rng.randint(1, 40), rng.choice(STATES), rng.choice(FAULTS)
        ids, pages = world.prompt(tokens, salt=self.room)
        world.prefill.publish(self.room, ids, pages)
        pull, whole = ready(world, self.room), tokens // T
        held = Selected(chosen(whole, rng.randint(0, whole), seed))
        reached, aborter = threading.Event(), threading.Thread(target=lambda: reached.wait(10) and self.end(pull, held))
        held.on_call = lambda name: name == state and reached.set()
        aborter.start()
        faults.corrupt, faults.refuse = {"corrupt": 1, "corrupt twice": 99}.get(fault, 0), int(fault == "refused")
        faults.hold = fault in ("late", "failed")
        world.decode.give(pull, held)

        def settled() -> bool:
            if fault == "failed" and faults.in_flight:
                faults.fail(TransportError("told to"), 1)
                faults.hold = False
            if faults.in_flight and rng.random() < 0.3:
                faults.finish(1)
            return pull.state in ("serving", "done", "failed")

        until(settled, f"{seed}: {state}, {fault}, {pull.state}")
        if pull.state == "serving" and not reached.is_set():
            if state == "serving":
                reached.set()
            demand(world, pull, held, rng.randint(1, 12), seed)
            if state in ("demanding", "released"):
                reached.set()
        faults.hold = False
        until(lambda: (faults.in_flight and faults.finish(1), reached.is_set() or pull.state == "failed" or "on_demand finished" in held.calls)[1], f"{seed}")
        reached.set()
        aborter.join()
        if state == "released":
            self.end(pull, held)
        until(lambda: (faults.in_flight and faults.finish(1), pull.state in ("done", "failed"))[1], f"{seed}: ends")
        faults.corrupt = faults.refuse = 0
        until(lambda: (faults.in_flight and faults.finish(1), world.decode.at_baseline())[1], f"{seed}: at baseline")
        assert not held.late, f"{seed}: called after it was ended"
        assert exact(world, pages, held)
        assert (self.room in world.decode.rows) == (pull.admitted_by_phase is not None), f"{seed}: a row, and not admitted"
        assert isinstance(pull.error, OasisError) == (pull.state == "failed")
        self.ended[state, fault, pull.state] += 1


def test_aborts_in_every_state_leave_nothing_behind(worlds):
    limits = TierLimits(lease_seconds=0.9, grace_seconds=0.2, room_seconds=0.5)
    fuzz = Fuzz(worlds(tier=dict(limits=limits), decode=dict(limits=PullLimits(await_seconds=30, read_seconds=20, silence_seconds=20))))
    for seed in range(400):
        fuzz.run(seed)
    fuzz.world.settle()
    for state in STATES:
        assert sum(n for (s, _, _), n in fuzz.ended.items() if s == state) >= 20
    outcomes = Counter(how for (_, _, how), n in fuzz.ended.items() for _ in range(n))
    assert outcomes["done"] > 50 and outcomes["failed"] > 50
    totals = fuzz.world.decode.puller.totals
    assert totals["internal_errors"] == totals["links_lost"] == 0
    assert totals["requests"] == fuzz.room == totals["admitted"] + totals["failed"] - totals["failed_serving"]
    assert totals["admitted"] == totals["released"] + totals["failed_serving"]
    assert not fuzz.world.decode.puller.reader.ready
