"""A decode node and a tier that answers with whatever: requests of that tier end with a typed error, those of another are served."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hostile_rig import of_message, seeds
from middle_rig import MiddleTier
from node_rig import SOURCE, until

from decode_node.pull import PullLimits
from transport import messages as m
from transport.errors import OasisError, ProtocolError

replace = msgspec.structs.replace
MIDDLE = "middle/0"
LIMITS = PullLimits(await_seconds=5.0, read_seconds=1.0, silence_seconds=0.3)


@pytest.fixture
def middle(worlds):
    """``middle(alter)``: (a world, and how its decode node pulls a room, through a tier in the middle) -> the pull, ended or READY."""
    made = []

    def make(alter):
        world = worlds(decode=dict(limits=LIMITS))
        made.append(MiddleTier(world.tier.control, alter))
        world.decode.controls[MIDDLE] = made[-1].control
        return world, made[-1]

    yield make
    for one in made:
        one.close()


def committed(world, room: int, pages: int = 3):
    ids, at = world.prompt(4 * pages - 2, salt=room)
    world.prefill.publish(room, ids, at)
    return at


def tried(world, room: int):
    """A request that lives through as much of its life as it gets."""
    pull = world.decode.pull(room, MIDDLE)
    until(lambda: pull.state in ("ready", "failed"), "a manifest, or none")
    if pull.state == "ready":
        world.decode.fetch(pull, np.arange(3))
        until(lambda: pull.state in ("done", "failed"), "pulled")
    return pull


def test_whatever_a_tier_answers_ends_requests_of_its_own_alone(middle):
    rng, damage = random.Random(0), 0.3
    world, _ = middle(lambda reply: of_message(reply, rng) if rng.random() < damage else reply)
    ends = {"done": 0, "failed": 0}
    for seed, rng in seeds(200, 1):  # noqa: B007  what the middle damages with
        committed(world, seed)
        pull = tried(world, seed)
        ends[pull.state] += 1
        assert pull.error is None or isinstance(pull.error, OasisError), seed
        assert not world.decode.puller.totals["internal_errors"], seed
    assert min(ends.values()) > 5, ends
    damage = 0
    pages = committed(world, 9999)
    pull = world.pull_into(9999, np.arange(3))
    assert pull.source == SOURCE and pull.state == "done" and world.arrived(pages, np.arange(3), 10)
    world.settle()


@pytest.mark.parametrize("lease", [-1, -(2**63)])
def test_a_lease_below_zero_is_no_lease(middle, lease):
    """It could never be named in a message to that tier, nor could any other with it."""
    world, _ = middle(lambda reply: replace(reply, lease=lease) if isinstance(reply, m.Manifest) else reply)
    committed(world, 1)
    pull = world.decode.pull(1, MIDDLE)
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, ProtocolError) and "lease" in str(pull.error)
    committed(world, 2)
    assert world.pull_into(2, np.arange(3)).state == "done"
    assert not world.decode.puller.totals["internal_errors"]


@pytest.mark.parametrize("answer", [m.Ok(), m.Renewed(gone=b"odd")])
def test_a_renewal_that_is_not_answered_as_one_ends_the_link(middle, answer):
    world, _ = middle(lambda reply: replace(answer, seq=reply.seq) if isinstance(reply, m.Renewed) else reply)
    committed(world, 1)
    pull = world.decode.pull(1, MIDDLE)
    until(lambda: pull.state == "failed", "its tier makes no sense")
    assert isinstance(pull.error, ProtocolError) and not world.decode.puller.totals["internal_errors"]


def test_a_tier_that_names_anothers_data_plane_does_not_take_it_along(middle):
    """Two links to one arena, as when a memory node is known under two addresses: the end of one is none of the other's business."""
    world, between = middle(lambda reply: reply)
    puller = world.decode.puller
    committed(world, 1)
    assert tried(world, 1).state == "done"
    committed(world, 2)
    assert world.pull_into(2, np.arange(3)).state == "done"
    lost = puller.totals["links_lost"]
    between.close()
    until(lambda: puller.totals["links_lost"] > lost, "it is gone")
    committed(world, 3)
    assert world.pull_into(3, np.arange(3)).state == "done"
    assert not puller.totals["read_failures"], "its own connection stood"
