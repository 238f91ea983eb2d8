"""Aborts of requests with working sets, in every state, while reads come late, damaged, twice or never, are refused, or their peer or
their lease is lost: every page, set, block number, window, lease and host byte comes back, and every step reads true bytes.

Each seed runs a few requests through one node that all seeds share, with another pair of fault and state. ``OASIS_FUZZ=10`` runs ten times as many; whatever fails names its
seed.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter

import pytest
from node_rig import until
from sparse_rig import Node, Req

from decode_node import arena_peer
from transport.errors import LeaseExpired, OasisError, TransportError

FAULTS = ("none", "late", "failed", "corrupt", "corrupt twice", "refused", "duplicate", "missing", "peer lost", "lease lost")
STATES = ("never", "ready", "waiting", "pulling", "admitted", "running", "retracted")
PAIRS = list(itertools.product(FAULTS, STATES))
SEEDS = len(PAIRS) * int(os.environ.get("OASIS_FUZZ", "1"))
"""Of each node."""
NODES = {"plain": dict(pages=22), "keeps blocks, a small cache, few fetches": dict(pages=22, keep=True, cap=2, cache=200),
         "all blocks pulled, with a lane": dict(pages=22, keep=True, cache=600, admission="full", critical=(1,))}
MISSING_SECONDS = 0.03


class Fuzz:
    """``seen`` counts (state, fault) of what was aborted, ``ended`` what errors requests ended with."""

    def __init__(self, node: Node):
        self.node, self.seen, self.ended = node, Counter(), Counter()
        limits = node.world.tier.tier.limits
        limits.lease_seconds, limits.room_seconds = 1.5, 1.0  # a link that is lost tells nobody
        self.read_seconds = node.puller.limits.read_seconds
        self.last: Req | None = None

    def run(self, seed: int) -> None:
        rng, node = random.Random(seed), self.node
        fault, state = PAIRS[seed % len(PAIRS)]
        # With two before it the third waits for its grant.
        reqs = [self.arrive(rng, large=state == "waiting") for _ in range(3 if state == "waiting" else rng.choice([1, 1, 2]))]
        victim, early = reqs[-1], rng.random() < 0.6
        if early:
            self.begin(fault, victim)
        self.bring(victim, state, fault if early else "none")
        if not early:
            self.begin(fault, victim)
        for _ in range(rng.randint(0, 3) if state in ("running", "never") else 0):
            node.loop()
        self.abort(victim, state, fault)
        for _ in range(rng.randint(0, 2)):
            node.loop()
        self.end(fault, rng)
        node.run(*reqs)
        for req in reqs:
            assert req.pull.error is None or isinstance(req.pull.error, OasisError), req.pull.error
            self.ended[type(req.pull.error).__name__] += 1
        self.last = reqs[0] if reqs[0].finished_reason == "length" else None

    def arrive(self, rng: random.Random, large: bool) -> Req:
        node, page = self.node, self.node.page
        custom = rng.choice([None, None, {"oasis": {"mode": "exact"}}, {"oasis": {"on_miss": "wait"}}])
        after = self.last if rng.random() < 0.4 and node.coordinator.reuse.enabled else None
        prompt = rng.choice([rng.randint(1, page - 1), page * rng.randint(1, 14), rng.randint(1, 15 * page)]) if not large else page * rng.randint(9, 14)
        return node.arrive(max(prompt, after.length + 9) if after else prompt, rng.choice([2, 5, 12]), custom, after=after)

    def where(self, req: Req) -> str:
        node = self.node
        if req in node.prealloc:
            return "ready"
        if req in node.transfer:
            return "waiting" if node.coordinator.entries[req.kv.req_pool_idx].pages is None else "pulling"
        for queue, name in ((node.waiting_queue, "admitted"), (node.batch.reqs, "running"), (node.retracted, "retracted")):
            if req in queue:
                return name
        return "ended"

    def bring(self, req: Req, state: str, fault: str) -> None:
        """As far as ``state``, if ``fault`` and what the request asks for let it come there."""
        node = self.node
        node.faults.hold = node.faults.hold or state in ("waiting", "pulling")
        for _ in range(15 if fault == "missing" else 60):
            now = self.where(req)
            if now in (state, "ended") or (state == "never" and now == "running"):
                return
            if now == "pulling":
                if state in ("waiting", "pulling"):
                    return
                if fault != "missing":
                    node.faults.finish()
                time.sleep(0.001)
            if state == "admitted":  # without the batch that would take it
                while node.prealloc and node.rows.available_size():
                    node.preallocate(node.prealloc[0])
                node.pop_transferred()
            elif now == "running" and state == "retracted" and not req.to_finish:
                node.retract(req)
            else:
                node.loop(resume=False)

    def abort(self, req: Req, state: str, fault: str) -> None:
        now = self.where(req)
        if state == "never" or now == "ended" or req.to_finish:
            return
        self.node.abort(req)
        self.seen["state", now] += 1
        self.seen["fault", fault] += 1

    def begin(self, fault: str, req: Req) -> None:
        node, faults = self.node, self.node.faults
        faults.hold = fault in ("late", "failed", "duplicate", "missing", "peer lost")
        faults.corrupt = {"corrupt": 1, "corrupt twice": 6}.get(fault, 0)
        faults.refuse = int(fault == "refused")
        if fault == "missing":
            node.puller.limits.read_seconds = MISSING_SECONDS
        if fault == "lease lost":
            node.puller._post(node.puller._give_up, req.pull, LeaseExpired("the tier ended the lease", room=req.pull.room))

    def end(self, fault: str, rng: random.Random) -> None:
        """The fault is over; what was held comes, once or twice, or has been given up."""
        node, faults = self.node, self.node.faults
        if fault == "failed":
            faults.fail(TransportError("the loopback was told to fail"), rng.choice([1, None]) if faults.in_flight else None)
        if fault == "peer lost":
            faults.drop_peer()
            node.loop()
            faults.dead = False
        if fault == "missing":
            node.puller._post(self._overdue)
            until(lambda: node.loop() or not node.puller.reader.flights, "given up")
            node.puller.limits.read_seconds = self.read_seconds
        faults.corrupt = faults.refuse = 0
        node.land()
        if fault == "duplicate":
            faults.finish()

    def _overdue(self) -> None:
        """Also what was asked for before the fault came."""
        for flight in self.node.puller.reader.flights:
            flight.deadline = 0.0


@pytest.fixture(scope="module", params=NODES)
def fuzz(request, tmp_path_factory):
    steady = arena_peer.STEADY_SECONDS, arena_peer.ASK_SECONDS
    arena_peer.STEADY_SECONDS, arena_peer.ASK_SECONDS = 0.02, 0.01
    node = Node(tmp_path_factory.mktemp("sets"), seed=3, rows=5, running=3, **NODES[request.param])
    made = Fuzz(node)
    made.start = 1000 * len(PAIRS) * list(NODES).index(request.param)
    yield made
    node.close()
    arena_peer.STEADY_SECONDS, arena_peer.ASK_SECONDS = steady


def test_every_end_leaves_nothing_behind(fuzz):
    for seed in range(fuzz.start, fuzz.start + SEEDS):
        try:
            fuzz.run(seed)
            if seed % 35 == 34:
                fuzz.node.at_baseline()
                fuzz.last = None
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    fuzz.node.at_baseline()
    reader = fuzz.node.puller.reader
    assert not reader.ready and not reader.flights and not reader.staging.quarantined
    TOTAL.update(fuzz.seen)
    TOTAL.update(fuzz.ended)
    TOTAL["nodes"] += 1


TOTAL: Counter = Counter()


def test_every_state_and_every_fault_came(request):
    """Of the test above, when all of it has run."""
    if TOTAL["nodes"] < len(NODES):
        pytest.skip("not all of the nodes have run")
    assert all(TOTAL["state", state] >= 3 for state in STATES[1:]), TOTAL
    assert all(TOTAL["fault", fault] >= 3 for fault in FAULTS), TOTAL
    assert TOTAL["NoneType"] > 50 and TOTAL["IntegrityError"] > 2 and TOTAL["LeaseExpired"] > 2, TOTAL
