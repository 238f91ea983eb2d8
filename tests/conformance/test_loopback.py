"""The faults that the loopback plane can be ordered to make: other suites build on each of them."""

from __future__ import annotations

import numpy as np
import pytest
from rig import batch

from transport.errors import ConfigError, IntegrityError, PeerLost, TransportError
from transport.planes import incarnation, make_plane, make_server

SIZE = 4096


@pytest.fixture
def pair():
    arena = np.arange(SIZE, dtype=np.uint16).astype(np.uint8)
    region = np.zeros(SIZE, dtype=np.uint8)
    server = make_server("loopback", incarnation("owner"), arena)
    plane = make_plane("loopback", incarnation("reader"), region)
    plane.connect(server.endpoint)
    yield server, plane, region
    plane.close()
    server.close()


def start(server, plane, local=0):
    return plane.read(server.endpoint.name, batch([1], [local], [100]))


def test_hold_and_finish_in_order(pair):
    server, plane, region = pair
    server.faults.hold = True
    first, second = start(server, plane), start(server, plane, local=200)
    assert not first.poll() and not first.drained and server.faults.in_flight == 2
    server.faults.finish(1)
    assert first.poll() and first.drained and not second.poll()
    assert np.array_equal(region[:100], server.arena[1:101]) and not region[100:].any()
    server.faults.finish()
    assert second.poll() and server.faults.in_flight == 0


def test_late_write_after_release(pair):
    server, plane, region = pair
    server.faults.hold = True
    transfer = start(server, plane)
    transfer.release()
    assert not transfer.drained and not region.any()
    server.faults.finish()
    assert transfer.drained and np.array_equal(region[:100], server.arena[1:101])
    with pytest.raises(TransportError):
        transfer.poll()


def test_fail_with_a_chosen_error(pair):
    server, plane, region = pair
    server.faults.hold = True
    transfer = start(server, plane)
    server.faults.fail(IntegrityError("ordered"))
    for _ in range(2):
        with pytest.raises(IntegrityError, match="ordered"):
            transfer.poll()
    assert transfer.drained and not region.any()


def test_drop_peer_ends_held_reads_and_refuses_new_ones(pair):
    server, plane, region = pair
    server.faults.hold = True
    transfer = start(server, plane)
    server.faults.drop_peer()
    with pytest.raises(PeerLost):
        transfer.poll()
    with pytest.raises(PeerLost):
        start(server, plane)
    with pytest.raises(PeerLost):
        plane.connect(server.endpoint)
    assert not region.any()


def test_corrupt_flips_one_byte_of_so_many_reads(pair):
    server, plane, region = pair
    server.faults.corrupt = 1
    assert start(server, plane).poll()
    assert np.count_nonzero(region[:100] != server.arena[1:101]) == 1
    assert start(server, plane).poll()
    assert np.array_equal(region[:100], server.arena[1:101])


def test_refused_posts(pair):
    server, plane, region = pair
    server.faults.refuse = 2
    for _ in range(2):
        with pytest.raises(TransportError):
            start(server, plane)
    assert not region.any() and server.faults.in_flight == 0
    assert start(server, plane).poll()


def test_a_closed_plane_is_not_written_into(pair):
    server, plane, region = pair
    server.faults.hold = True
    transfer = start(server, plane)
    plane.close()
    server.faults.finish()
    assert transfer.drained and not region.any()


def test_names_are_unique(pair):
    server, _, _ = pair
    with pytest.raises(ConfigError):
        make_server("loopback", server.endpoint.name, server.arena)


def test_unusable_memory_and_unknown_kinds_are_refused():
    with pytest.raises(ConfigError):
        make_server("pigeon", "x", np.zeros(8, dtype=np.uint8))
    for memory in (
        np.zeros(8, dtype=np.int8),
        np.zeros((2, 4), dtype=np.uint8),
        np.zeros(16, dtype=np.uint8)[::2],
        np.zeros(0, np.uint8),
    ):
        with pytest.raises(ConfigError):
            make_plane("loopback", "x", memory)
    frozen = np.zeros(8, dtype=np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ConfigError):
        make_plane("loopback", "x", frozen)
