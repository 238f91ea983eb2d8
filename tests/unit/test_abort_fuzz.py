"""Aborts on either side, in every state, while reads come late, damaged, twice or never, are refused, or their peer is lost: nothing is
left behind.

Each seed runs a request through one world that all seeds share; the accounts are compared after every block. ``OASIS_FUZZ=10`` runs ten
times as many. Whatever fails names its seed.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter

import numpy as np
import pytest
from node_rig import SEED, World, row_of, until

from decode_node import arena_peer
from decode_node import pull as pulling
from decode_node.pull import PullLimits
from prefill_node import publisher as publishing
from transport.errors import CapacityError, DeadlineExceeded, IntegrityError, OasisError, RoomFailed, TransportError
from transport.tier import TierLimits

SEEDS_PER_BLOCK = 250 * int(os.environ.get("OASIS_FUZZ", "1"))
FAULTS = ("none", "late", "failed", "corrupt", "refused", "duplicate", "corrupt twice", "missing", "peer lost")
READ_SECONDS, MISSING_SECONDS = 20, 0.02
PREFILL_STATES = ("never", "opening", "open", "half copied", "committed")
DECODE_STATES = ("never", "resolving", "awaiting", "ready", "pulling", "pulling, one landed", "done")


class Fuzz:
    """One world; ``aborted`` counts (side, state) of what was aborted, ``ended`` how pulls ended."""

    def __init__(self, world: World):
        self.world, self.room = world, 0
        self.aborted: Counter = Counter()
        self.ended: Counter = Counter()
        self.faults: Counter = Counter()

    def run(self, seed: int) -> None:
        try:
            self._run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        world, faults = self.world, self.world.tier.faults
        self.room += 1
        room, tokens = self.room, rng.randint(1, 40)
        salt = rng.randrange(4)
        ids, _ = world.prompt(tokens, salt=salt)
        pages = np.random.default_rng(salt).permutation(64)[: -(-tokens // 4)]  # equal prefixes have equal KV
        target = np.array(rng.sample(range(64), len(pages)))
        fault = rng.choice(FAULTS)
        prefill_abort, decode_abort = rng.choice(PREFILL_STATES), rng.choice(DECODE_STATES)
        shared = rng.choice([SEED, None])
        pull = world.decode.pull(room, "gated/0" if decode_abort == "resolving" else "prefill/0")
        if decode_abort == "resolving":
            self.cancel_pull(pull, decode_abort)
            self.gate.release()
        if decode_abort == "awaiting":
            until(lambda: pull.state == "awaiting")
            self.cancel_pull(pull, decode_abort)
        pub = self.publish(room, ids, pages, shared, prefill_abort, rng)
        alive = decode_abort not in ("resolving", "awaiting") and prefill_abort in ("never", "committed")
        if pub.state == publishing.COMMITTED and alive:
            until(lambda: pull.state == "ready", f"{seed}: manifest, {pull.error}")
            self.read(pull, target, fault, decode_abort, seed)
        else:
            until(lambda: pull.state == "failed", f"{seed}: {pub.state} {pub.error}")
        self.ended[pull.state, type(pull.error).__name__] += 1
        until(lambda: not faults.in_flight)
        world.decode.puller.limits.read_seconds = READ_SECONDS
        faults.hold, faults.corrupt, faults.refuse = False, 0, 0
        if pull.state == "done":
            assert world.arrived(pages, target, tokens), f"{seed}: other bytes than were published"
            assert world.decode.rows.pop(room) == row_of(room)
            world.decode.wipe(target)
        else:
            assert isinstance(pull.error, OasisError)
            assert room not in world.decode.rows, f"{seed}: a row of a failed request"
            if decode_abort not in ("never", "done"):
                assert world.decode.untouched(target), f"{seed}: written after cancel returned"
            world.decode.wipe(target)
        assert world.decode.untouched(np.arange(64)), f"{seed}: a page of nobody was written"

    def publish(self, room, ids, pages, shared, abort_at, rng):
        world, publisher = self.world, self.world.prefill.publisher
        pub = world.prefill.open(room, ids, shared)
        if abort_at == "opening":
            self.cancel_pub(pub, abort_at)
        until(lambda: pub.state != publishing.OPENING)
        if abort_at == "open":
            self.cancel_pub(pub, abort_at)
        half = rng.randint(0, len(pages) - 1)
        if half:
            publisher.send(pub, pages[:half], 0, half * 4, None)
        if abort_at == "half copied":
            self.cancel_pub(pub, abort_at)
        publisher.send(pub, pages[half:], half, len(ids) - half * 4, None)
        publisher.commit(pub, row_of(room))
        until(lambda: pub.state in (publishing.COMMITTED, publishing.FAILED))
        if abort_at == "committed":
            self.cancel_pub(pub, abort_at)
            assert pub.state == publishing.COMMITTED
        elif abort_at != "never":
            assert pub.state == publishing.FAILED and isinstance(pub.error, RoomFailed)
        return pub

    def read(self, pull, target, fault, abort_at, seed):
        faults = self.world.tier.faults
        if abort_at == "ready":
            return self.cancel_pull(pull, abort_at)
        faults.corrupt = {"corrupt": 1, "corrupt twice": 99}.get(fault, 0)
        faults.refuse = int(fault == "refused")
        faults.hold = fault in ("late", "failed", "duplicate", "missing", "peer lost") or abort_at.startswith("pulling")
        self.world.decode.puller.limits.read_seconds = MISSING_SECONDS if fault == "missing" else READ_SECONDS
        self.world.decode.fetch(pull, target)
        if faults.hold:
            until(lambda: faults.in_flight or pull.state == "failed")
        if abort_at == "pulling, one landed" and pull.state == "pulling":
            faults.finish(1)
        if abort_at.startswith("pulling"):
            self.cancel_pull(pull, abort_at)
            self.world.decode.wipe(target)  # one that had landed before is no offence
        self.faults[fault] += 1
        if fault == "missing":
            until(lambda: pull.state in ("done", "failed") and not self.world.decode.puller.reader.flights, f"{seed}: given up")
        if fault == "peer lost":
            faults.drop_peer()
            faults.dead = False  # it is back by the time that it is looked for
        if fault == "failed" and faults.in_flight:
            faults.fail(TransportError("the loopback was told to fail"), 1)
        faults.hold = False
        until(lambda: (faults.finish(), pull.state in ("done", "failed"))[1], f"{seed}: {fault}, {abort_at}")
        if fault == "duplicate":
            faults.finish()
        if abort_at == "done" and pull.state == "done":
            self.cancel_pull(pull, abort_at)
        if abort_at in ("never", "done"):
            if fault in ("none", "late", "corrupt", "failed", "duplicate", "peer lost"):
                assert pull.state == "done", f"{seed}: {fault}: {pull.error}"
            elif fault == "missing":
                assert isinstance(pull.error, DeadlineExceeded | CapacityError)
            else:
                assert isinstance(pull.error, IntegrityError if fault == "corrupt twice" else TransportError)

    def cancel_pull(self, pull, state):
        self.aborted["decode", state, pull.state] += 1
        self.world.decode.puller.cancel(pull, "the client left")
        until(lambda: pull.state in ("done", "failed"))

    def cancel_pub(self, pub, state):
        self.aborted["prefill", state, pub.state] += 1
        self.world.prefill.publisher.cancel(pub, "the client left")


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory):
    gate = threading.Semaphore(0)
    limits = TierLimits(lease_seconds=0.9, grace_seconds=0.2, room_seconds=0.5)
    steady = arena_peer.STEADY_SECONDS, arena_peer.ASK_SECONDS
    arena_peer.STEADY_SECONDS, arena_peer.ASK_SECONDS = 0.02, 0.01
    world = World(tmp_path_factory.mktemp("fuzz"), tier=dict(records=64, limits=limits),
                  decode=dict(limits=PullLimits(await_seconds=30, read_seconds=READ_SECONDS, silence_seconds=20)))

    def resolve(source):
        if source == "gated/0":
            gate.acquire()
        return {"control": world.tier.control}

    world.decode.puller.resolve = resolve
    made = Fuzz(world)
    made.gate = gate
    yield made
    world.close()
    arena_peer.STEADY_SECONDS, arena_peer.ASK_SECONDS = steady


@pytest.mark.parametrize("block", range(4))
def test_every_account_returns_to_its_start(fuzz, block):
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        fuzz.run(seed)
    fuzz.world.settle()
    totals, report = fuzz.world.decode.puller.totals, fuzz.world.prefill.publisher.totals
    # Whoever lets every window go missing is cut off.
    assert totals["internal_errors"] == report["reattached"] == 0 and totals["links_lost"] <= fuzz.faults["missing"]
    assert totals["requests"] == totals["admitted"] + totals["failed"] == fuzz.room
    assert report["rooms_committed"] + report["rooms_failed"] == fuzz.room
    assert not fuzz.world.decode.puller.reader.ready and not fuzz.world.prefill.publisher._waiting
    assert not fuzz.world.tier.call(lambda: fuzz.world.tier.tier.leased_keys)


def test_every_state_was_aborted_often_enough(fuzz):
    """Runs after the blocks above: a fuzz that misses a state tests nothing there."""
    for side, states in (("prefill", PREFILL_STATES[1:]), ("decode", DECODE_STATES[1:])):
        for state in states:
            seen = sum(n for (s, wanted, _), n in fuzz.aborted.items() if (s, wanted) == (side, state))
            assert seen >= 5, (side, state, fuzz.aborted)
    real = {(side, actual) for side, _, actual in fuzz.aborted}
    assert {("decode", s) for s in (pulling.RESOLVING, pulling.AWAITING, pulling.READY, pulling.PULLING, pulling.DONE)} <= real
    assert {("prefill", s) for s in (publishing.OPENING, publishing.OPEN, publishing.COMMITTED)} <= real
    assert all(fuzz.faults[fault] >= 5 for fault in FAULTS), fuzz.faults
    assert fuzz.ended["done", "NoneType"] > 50 and fuzz.ended["failed", "RoomFailed"] > 50 and fuzz.ended["failed", "IntegrityError"] > 5
