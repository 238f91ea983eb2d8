"""A tier whose data plane goes and comes back, on the loopback plane: when reads wait, go on or fail."""

from __future__ import annotations

import numpy as np
import pytest
from node_rig import LocalTier, Prefill, until
from test_puller import committed, ready, still_serves

from decode_node import arena_peer
from decode_node.pull import PullLimits
from transport.errors import PeerLost
from transport.planes import incarnation, make_server


class Plane:
    """The loopback server of a ``LocalTier``, taken down and brought up again as ``HostedServer`` does."""

    def __init__(self, tier: LocalTier):
        self.tier, self.made = tier, []

    def down(self) -> None:
        """The process dies, and a little later the tier knows it."""
        self.die()
        self.tier.call(setattr, self.tier.tier, "endpoints", ())

    def die(self) -> None:
        self.tier.faults.drop_peer()

    def up(self) -> None:
        server = make_server("loopback", incarnation("tier"), self.tier.server.arena.bytes)
        self.made.append(server)
        self.tier.faults = server.faults
        self.tier.call(setattr, self.tier.tier, "endpoints", (server.endpoint,))

    def close(self) -> None:
        for server in self.made:
            server.close()


@pytest.fixture
def world(worlds, monkeypatch):
    monkeypatch.setattr(arena_peer, "STEADY_SECONDS", 0.3)
    world = worlds(decode=dict(limits=PullLimits(await_seconds=10, read_seconds=1.5, silence_seconds=5)))
    world.plane = Plane(world.tier)
    yield world
    world.plane.close()


def in_flight(world, room: int, tokens: int = 60, at: int = 0):
    """A pull with all windows in flight, its source pages and its destination."""
    source = committed(world, room, tokens, at=at)
    target = np.arange(at, at + len(source))
    pull = ready(world, room)
    world.tier.faults.hold = True
    world.decode.fetch(pull, target)
    until(lambda: world.tier.faults.in_flight == world.decode.windows)
    return pull, source, target


@pytest.mark.parametrize("seconds_down", [0.0, 0.5])
def test_reads_wait_for_the_next_incarnation(world, seconds_down):
    pull, source, target = in_flight(world, 1)
    job = world.decode.puller.reader.flights[0].job
    world.plane.down()
    arena = world.decode.puller.reader.arenas[pull.link]
    if seconds_down:
        until(lambda: arena.parked == [job])
        until(lambda: not world.decode.puller.reader.flights)
        assert world.decode.staging.free == world.decode.windows, "what waits holds no window"
        assert world.tier.inventory()["leases"] == 1
    world.plane.up()
    until(lambda: pull.state in ("done", "failed"))
    assert pull.state == "done", pull.error
    assert world.arrived(source, target, 60) and job.attempts == 1
    assert world.decode.puller.totals["read_failures"] == world.decode.windows
    world.decode.wipe(target)
    still_serves(world)
    world.settle()


def test_the_reader_may_notice_before_the_tier_does(world):
    """The old endpoint is still named for a moment: it is not taken for a broken connection."""
    pull, source, target = in_flight(world, 1)
    world.plane.die()
    until(lambda: world.decode.puller.reader.arenas[pull.link].seeking)
    world.plane.up()
    until(lambda: pull.state in ("done", "failed"))
    assert pull.state == "done" and world.arrived(source, target, 60)
    world.settle()


def test_a_broken_connection_to_a_live_plane_is_made_again_once(world):
    pull, source, target = in_flight(world, 1)
    job = world.decode.puller.reader.flights[0].job
    world.tier.faults.hold = False
    world.tier.faults.fail(PeerLost("reset"))
    until(lambda: pull.state in ("done", "failed"))
    assert pull.state == "done" and job.attempts == 1 and world.arrived(source, target, 60)
    world.settle()


def test_a_second_loss_fails_the_pull(world):
    pull, _, _ = in_flight(world, 1)
    world.plane.down()
    world.plane.up()
    world.tier.faults.hold = True
    until(lambda: world.tier.faults.in_flight == world.decode.windows)
    world.plane.down()
    world.plane.up()
    until(lambda: pull.state in ("done", "failed"))
    assert pull.state == "failed" and isinstance(pull.error, PeerLost)
    world.decode.wipe(np.arange(64))
    still_serves(world)
    world.settle()


def test_a_plane_that_stays_away_fails_its_pulls_and_may_still_come_back(world):
    pull, _, _ = in_flight(world, 1)
    world.plane.down()
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, PeerLost) and "did not come back" in str(pull.error)
    until(lambda: world.tier.inventory()["leases"] == 0)
    assert world.decode.puller.totals["links_lost"] == 0
    world.plane.up()
    still_serves(world)
    world.settle()


def test_a_plane_that_is_gone_for_good_but_still_named_fails_its_pulls(world):
    pull, _, _ = in_flight(world, 1)
    world.plane.die()
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, PeerLost)
    world.plane.up()
    still_serves(world)
    world.settle()


def test_a_cancelled_pull_does_not_wait(world):
    pull, _, _ = in_flight(world, 1)
    world.plane.down()
    until(lambda: world.decode.puller.reader.arenas[pull.link].parked)
    world.decode.puller.cancel(pull, "the client left")
    until(lambda: pull.state == "failed" and world.tier.inventory()["leases"] == 0)
    world.plane.up()
    still_serves(world)
    world.settle()


def test_other_tiers_are_read_meanwhile(world, tmp_path):
    other = LocalTier(str(tmp_path / "other.sock"))
    prefill = Prefill(other.path, seed=5)
    try:
        world.decode.controls["other/0"] = other.control
        waiting, source, target = in_flight(world, 1, tokens=40)
        world.plane.down()
        until(lambda: world.decode.puller.reader.arenas[waiting.link].parked)
        pages = np.arange(6)
        prefill.publish(9, np.arange(24), pages)
        pull = ready(world, 9, "other/0")
        world.decode.fetch(pull, np.arange(50, 56))
        until(lambda: pull.state in ("done", "failed"))
        assert pull.state == "done" and waiting.state == "pulling"
        assert np.array_equal(prefill.pool.tokens(pages, 24), world.decode.pool.tokens(np.arange(50, 56), 24))
        world.plane.up()
        until(lambda: waiting.state in ("done", "failed"))
        assert waiting.state == "done" and world.arrived(source, target, 40)
        world.settle()
    finally:
        prefill.close()
        other.stop()


def test_a_tier_that_ends_while_its_plane_is_sought(world):
    pull, _, _ = in_flight(world, 1)
    world.plane.down()
    until(lambda: world.decode.puller.reader.arenas[pull.link].seeking)
    world.decode.puller._post(pull.link.fail, PeerLost("the tier is gone"))
    until(lambda: pull.state == "failed")
    until(lambda: not world.decode.puller.reader.arenas and not world.decode.puller.links)
    assert world.decode.forgotten
    world.plane.up()
    still_serves(world)
