"""Rooms that are not at their prefill node's own tier: redirected, and looked for once that tier is lost. Real tiers; what a
tier with memory nodes says is put into its mouth, and whoever publishes at a memory node stands for the tier that moved it there."""

from __future__ import annotations

from itertools import count

import msgspec
import numpy as np
import pytest
from node_rig import SOURCE, Decode, LocalTier, Prefill, row_of, small_layout, until

from decode_node.pull import PullLimits
from prefill_node.publisher import COMMITTED
from transport import messages as m
from transport.errors import DeadlineExceeded, LayoutMismatch, PeerLost, ProtocolError, RoomFailed, StaleEpoch, TransportError
from transport.tier import TierLimits

SEED = b"s" * 32
TOKENS = 23
SILENCE = 0.6
LIMITS = PullLimits(await_seconds=60.0, read_seconds=5.0, silence_seconds=SILENCE)
LEASES = TierLimits(lease_seconds=0.9, grace_seconds=0.2, room_seconds=5.0)


class Cluster:
    """A prefill node's own tier ``home``, two ``memory`` nodes, one decode node."""

    def __init__(self, folder):
        self.folder, self._names = folder, count()
        self.tiers: list[LocalTier] = []
        self.prefills: list[Prefill] = []
        self.home = self.tier()
        self.memory = [self.tier(), self.tier()]
        self.at_home = self.prefill(self.home)
        self.movers = {tier: self.prefill(tier) for tier in self.memory}
        self.names_memory_nodes(self.home)
        self.decode = Decode({SOURCE: self.home.control}, limits=LIMITS)

    def tier(self, **more) -> LocalTier:
        self.tiers.append(LocalTier(str(self.folder / f"{next(self._names)}.sock"), limits=LEASES, **more))
        return self.tiers[-1]

    def prefill(self, tier: LocalTier, **more) -> Prefill:
        self.prefills.append(Prefill(tier.path, seed=3, **more))
        until(lambda: tier.inventory()["workers"], "attached")
        return self.prefills[-1]

    def names_memory_nodes(self, tier: LocalTier, nodes: tuple[str, ...] | None = None) -> None:
        nodes = tuple(t.control for t in self.memory) if nodes is None else nodes
        say = tier.tier._handlers[m.Hello]
        tier.tier._handlers[m.Hello] = lambda session, hello: msgspec.structs.replace(say(session, hello), memory_nodes=nodes)

    def redirects(self, tier: LocalTier, control: str) -> None:
        tier.tier._handlers[m.Await] = lambda session, request: m.Moved(seq=request.seq, control=control)

    def put(self, prefill: Prefill, room: int) -> np.ndarray:
        pages = np.arange(-(-TOKENS // prefill.layout.block_tokens))[::-1].copy()
        pub = prefill.publish(room, np.arange(TOKENS), pages, seed=SEED)
        assert pub.state == COMMITTED, pub.error
        return pages

    def awaiting(self, room: int):
        """A pull that waits at home."""
        pull = self.decode.pull(room)
        until(lambda: self.home.inventory()["waiters"] == 1, "the room is awaited at home")
        return pull

    def lose(self, how: str) -> None:
        """The tier at home goes: its host falls silent, its process ends, or it comes back with nothing."""
        if how == "silent":
            self.home.pause()
            return
        port = self.home.control.rpartition(":")[2]
        self.home.stop()
        if how == "restarted":
            self.home = LocalTier(self.home.path, listen=f"127.0.0.1:{port}", limits=LEASES)
            self.tiers.append(self.home)

    def arrives(self, pull, source: np.ndarray) -> None:
        until(lambda: pull.state in ("ready", "failed"), "manifest")
        assert pull.state == "ready", pull.error
        target = np.arange(20, 20 + len(source))
        self.decode.fetch(pull, target)
        until(lambda: pull.state in ("done", "failed"), "pulled")
        assert pull.state == "done", pull.error
        assert np.array_equal(self.at_home.pool.tokens(source, TOKENS), self.decode.pool.tokens(target, TOKENS))
        assert self.decode.rows[pull.room] == row_of(pull.room)

    def settle(self, *tiers: LocalTier) -> None:
        """Nothing is held on decode, nor at ``tiers`` (all memory nodes unless told)."""
        until(self.decode.at_baseline, "decode at baseline")
        for tier in tiers or self.memory:
            until(lambda tier=tier: not any(tier.inventory()[k] for k in ("held", "holders", "rooms", "leases", "waiters")), "tier at baseline")

    @property
    def totals(self):
        return self.decode.puller.totals

    def close(self) -> None:
        self.decode.close()
        for prefill in self.prefills:
            prefill.close()
        for tier in self.tiers:
            if not tier.loop.is_closed():
                tier.stop()


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path)
    yield made
    made.close()


# -- redirected ---------------------------------------------------------------------------------------------------


def test_a_moved_room_is_pulled_from_the_memory_node_alone(cluster):
    source = cluster.put(cluster.movers[cluster.memory[1]], 7)
    cluster.redirects(cluster.home, cluster.memory[1].control)
    pull = cluster.decode.pull(7)
    cluster.arrives(pull, source)
    assert pull.link.address == cluster.memory[1].control and pull.moves == 1
    (peer,) = cluster.decode.plane.landed
    assert peer.endswith(cluster.memory[1].server.epoch)
    assert cluster.decode.plane.landed[peer] == pull.bytes_by_phase["records"] + pull.bytes_by_phase["partial_page"] > 0
    assert cluster.totals["moved"] == 1 and cluster.totals["searches"] == 0
    assert cluster.memory[0].tier.totals["rooms_claimed"] == 0
    cluster.settle()


def test_its_lease_is_renewed_at_the_memory_node_and_outlives_the_tier_at_home(cluster):
    source = cluster.put(cluster.movers[cluster.memory[0]], 7)
    cluster.redirects(cluster.home, cluster.memory[0].control)
    pull = cluster.decode.pull(7)
    until(lambda: pull.state == "ready", "manifest")
    first = pull.lease_expires
    cluster.lose("silent")
    until(lambda: cluster.home.control not in cluster.decode.puller.links, "the silence was noticed")
    until(lambda: pull.lease_expires > first + LEASES.lease_seconds, "renewed after the lease would have ended")
    cluster.arrives(pull, source)
    assert cluster.memory[0].tier.totals["leases_expired"] == 0
    cluster.settle()


def test_a_room_that_waits_at_the_memory_node_until_it_is_there(cluster):
    """The redirection may be faster than the commit."""
    cluster.redirects(cluster.home, cluster.memory[0].control)
    pull = cluster.decode.pull(7)
    until(lambda: cluster.memory[0].inventory()["waiters"] == 1, "awaited at the memory node")
    cluster.arrives(pull, cluster.put(cluster.movers[cluster.memory[0]], 7))
    cluster.settle()


def test_a_chain_of_two_moves_is_followed(cluster):
    source = cluster.put(cluster.movers[cluster.memory[1]], 7)
    cluster.redirects(cluster.home, cluster.memory[0].control)
    cluster.redirects(cluster.memory[0], cluster.memory[1].control)
    cluster.arrives(cluster.decode.pull(7), source)
    cluster.settle()


@pytest.mark.parametrize("circle", [(0,), (0, 1)])
def test_a_circle_of_redirections_is_an_error_that_names_it(cluster, circle):
    tiers = [cluster.home, *(cluster.memory[i] for i in circle)]
    for tier, following in zip(tiers, (*tiers[1:], tiers[0])):
        cluster.redirects(tier, following.control)
    pull = cluster.decode.pull(7)
    until(lambda: pull.state == "failed", "an end")
    assert isinstance(pull.error, ProtocolError) and pull.error.room == 7 and "2 moves" in str(pull.error)
    assert cluster.totals["moved"] == 2
    cluster.settle()


def test_a_redirection_to_no_address_at_all(cluster):
    cluster.redirects(cluster.home, "nowhere")
    pull = cluster.decode.pull(7)
    until(lambda: pull.state == "failed", "an end")
    assert isinstance(pull.error, PeerLost) and "nowhere" in str(pull.error)
    assert cluster.totals["internal_errors"] == 0
    cluster.settle()


def test_the_memory_node_is_lost_before_it_answered(cluster):
    """Who has the room is known then, so nobody else is asked."""
    cluster.memory[0].pause()
    cluster.redirects(cluster.home, cluster.memory[0].control)
    pull = cluster.decode.pull(7)
    until(lambda: pull.state == "failed", "an end")
    assert isinstance(pull.error, DeadlineExceeded) and cluster.memory[0].control in str(pull.error)
    assert cluster.totals["searches"] == 0
    cluster.settle(cluster.memory[1])


def test_the_memory_node_is_lost_after_it_answered(cluster):
    cluster.put(cluster.movers[cluster.memory[0]], 7)
    cluster.redirects(cluster.home, cluster.memory[0].control)
    pull = cluster.decode.pull(7)
    until(lambda: pull.state == "ready", "manifest")
    cluster.memory[0].stop()
    until(lambda: pull.state == "failed", "an end")
    assert isinstance(pull.error, TransportError) and cluster.memory[0].control in str(pull.error)
    assert cluster.totals["searches"] == 0
    cluster.settle(cluster.memory[1])


# -- looked for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["silent", "ended", "restarted"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_committed_room_outlives_the_tier_at_home(cluster, how, at):
    there, elsewhere = cluster.memory[at], cluster.memory[1 - at]
    pull = cluster.awaiting(7)
    source = cluster.put(cluster.movers[there], 7)
    cluster.lose(how)
    cluster.arrives(pull, source)
    assert pull.link.address == there.control and pull.error is None
    assert cluster.totals["searches"] == 1 and cluster.totals["failed"] == 0
    until(lambda: elsewhere.tier.totals["rooms_cancelled"] == 1, "the other node is told that nobody waits")
    cluster.settle()


def test_a_room_that_two_memory_nodes_have_is_taken_once(cluster):
    pull = cluster.awaiting(7)
    for mover in cluster.movers.values():
        source = cluster.put(mover, 7)
    cluster.lose("silent")
    cluster.arrives(pull, source)
    cluster.settle()
    for tier in cluster.memory:  # claimed and released, or cancelled before it was claimed
        assert tier.tier.totals["leases_released"] + tier.tier.totals["rooms_cancelled"] >= 1
        assert tier.tier.totals["leases_expired"] == tier.tier.totals["rooms_expired"] == 0


@pytest.mark.parametrize("how, error", [("silent", DeadlineExceeded), ("restarted", StaleEpoch)])
def test_a_room_that_nobody_has_fails_soon_and_says_who_was_lost(cluster, how, error):
    pull = cluster.awaiting(7)
    cluster.lose(how)
    until(lambda: pull.state == "failed", "long before the 60 s that a commit may take")
    assert isinstance(pull.error, error) and "no prefill worker" not in str(pull.error)
    if how == "silent":
        assert cluster.home.control in str(pull.error)
    assert cluster.totals["searches"] == 1
    cluster.settle()


def test_a_memory_node_that_is_lost_too_delays_nobody(cluster):
    pull = cluster.awaiting(7)
    source = cluster.put(cluster.movers[cluster.memory[0]], 7)
    cluster.memory[1].pause()
    cluster.lose("silent")
    cluster.arrives(pull, source)
    cluster.settle(cluster.memory[0])


def test_several_rooms_are_looked_for_at_once(cluster):
    pulls = [cluster.decode.pull(room) for room in range(6)]
    until(lambda: cluster.home.inventory()["waiters"] == 6, "all wait at home")
    sources = [cluster.put(cluster.movers[cluster.memory[room % 2]], room) for room in range(5)]
    cluster.lose("silent")
    for pull, source in zip(pulls, sources):
        cluster.arrives(pull, source)
        assert pull.link.address == cluster.memory[pull.room % 2].control
    until(lambda: pulls[5].state == "failed", "the one that nobody has")
    cluster.settle()


@pytest.mark.parametrize("resolvable", [True, False])
def test_a_request_that_comes_after_the_prefill_host_was_lost(cluster, resolvable):
    """What its tier once named is remembered, whether or not the node still says where its tier was."""
    cluster.put(cluster.at_home, 1)
    cluster.arrives(cluster.decode.pull(1), np.arange(6)[::-1])
    cluster.lose("ended")
    until(lambda: not cluster.decode.puller.links.get(cluster.home.control), "the loss was noticed")
    if not resolvable:
        def resolve(source):
            raise PeerLost("cannot reach the prefill node")
        cluster.decode.puller.resolve = resolve
    source = cluster.put(cluster.movers[cluster.memory[1]], 7)
    pull = cluster.decode.pull(7)
    cluster.arrives(pull, source)
    assert pull.link.address == cluster.memory[1].control
    cluster.settle()


def test_a_prefill_node_never_heard_of_fails_as_ever(cluster):
    def resolve(source):
        raise PeerLost("cannot reach the prefill node")

    cluster.decode.puller.resolve = resolve
    pull = cluster.decode.pull(7, "another/0")
    until(lambda: pull.state == "failed", "an end")
    assert isinstance(pull.error, PeerLost) and cluster.totals["searches"] == 0


def test_a_tier_without_memory_nodes_fails_as_ever(cluster):
    lone = cluster.tier()
    cluster.prefill(lone)
    cluster.decode.controls["lone/0"] = lone.control
    pull = cluster.decode.pull(7, "lone/0")
    until(lambda: lone.inventory()["waiters"] == 1, "awaited")
    lone.pause()
    until(lambda: pull.state == "failed", "an end")
    assert isinstance(pull.error, DeadlineExceeded) and cluster.totals["searches"] == 0


def test_a_tier_that_refuses_us_is_not_lost(cluster):
    """It came back under the same address with another model: that is the request's error, not a reason to look elsewhere."""
    pull = cluster.awaiting(1)
    cluster.at_home.close()
    cluster.lose("restarted")
    cluster.prefill(cluster.home, layout=small_layout(head_dim=8))
    until(lambda: pull.state == "failed" and cluster.home.control not in cluster.decode.puller.links, "the restart was noticed")
    searches = cluster.totals["searches"]
    pull = cluster.decode.pull(7)
    until(lambda: pull.state == "failed", "an end")
    assert isinstance(pull.error, LayoutMismatch) and cluster.totals["searches"] == searches
    cluster.settle()


# -- a dead prefill node ------------------------------------------------------------------------------------------


def test_a_dead_prefill_node_does_not_take_a_moved_room_along(cluster):
    """Its tier has not been silent for long enough to be lost, and the room would be given up before it is."""
    pull = cluster.awaiting(7)
    source = cluster.put(cluster.movers[cluster.memory[0]], 7)
    cluster.decode.puller.source_lost(SOURCE)
    cluster.arrives(pull, source)
    assert pull.link.address == cluster.memory[0].control
    until(lambda: cluster.home.tier.totals["rooms_cancelled"] == 1, "its own tier is told that nobody waits")
    cluster.settle(*cluster.memory, cluster.home)


def test_a_dead_prefill_nodes_own_tier_may_still_have_it(cluster):
    pull = cluster.awaiting(7)
    cluster.decode.puller.source_lost(SOURCE)
    until(lambda: all(tier.inventory()["waiters"] == 1 for tier in cluster.memory), "the memory nodes are asked as well")
    cluster.arrives(pull, cluster.put(cluster.at_home, 7))
    assert pull.link.address == cluster.home.control
    cluster.settle(*cluster.memory, cluster.home)


def test_a_redirection_to_a_node_that_was_asked_already_asks_nobody_twice(cluster):
    pull = cluster.awaiting(7)
    cluster.decode.puller.source_lost(SOURCE)
    until(lambda: cluster.memory[0].inventory()["waiters"] == 1, "the memory nodes are asked")
    (key,) = cluster.home.tier.waiters
    waiter = cluster.home.call(cluster.home.tier.waiters.pop, key)
    cluster.home.call(cluster.home.tier.outbox.append, (waiter.session, m.Moved(seq=waiter.seq, control=cluster.memory[0].control)))
    until(lambda: pull.moves == 1, "redirected")
    cluster.arrives(pull, cluster.put(cluster.movers[cluster.memory[0]], 7))
    assert cluster.memory[0].tier.totals["refused"] == 0
    cluster.settle()


def test_what_a_dead_prefill_node_did_not_commit_fails_soon(cluster):
    pull = cluster.awaiting(7)
    cluster.at_home.close()
    cluster.decode.puller.source_lost(SOURCE)
    until(lambda: pull.state == "failed", "long before the 60 s that a commit may take")
    assert isinstance(pull.error, (RoomFailed, DeadlineExceeded))
    cluster.settle(*cluster.memory, cluster.home)


def test_a_request_given_up_while_it_is_looked_for_leaves_nobody_waiting(cluster):
    pull = cluster.awaiting(7)
    cluster.decode.puller.source_lost(SOURCE)
    until(lambda: all(tier.inventory()["waiters"] == 1 for tier in cluster.memory), "all are asked")
    cluster.decode.puller.cancel(pull, "the client left")
    until(lambda: pull.state == "failed", "cancelled")
    cluster.settle(*cluster.memory, cluster.home)
    for tier in (*cluster.memory, cluster.home):
        assert tier.tier.totals["rooms_cancelled"] == 1
