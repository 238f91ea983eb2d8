"""Owners that die, stop or come back, and readers that die, for every data plane."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from rig import DEADLINE, batch, expect, process_state, stays_pending, wait, wait_drained

from transport.errors import PeerLost, StaleEpoch, TransportError
from transport.planes.host import KEPT_PREFIXES, KEPT_VARIABLES

FILL = 0xEE


def test_owner_killed_before_the_read(fresh):
    owner, other = fresh.owner(seed=51), fresh.owner(seed=52)
    plane, region = fresh.reader(owner, other)
    wait(plane.read(owner.name, batch([0], [0], [4096])))
    owner.kill()
    region[:] = FILL
    with pytest.raises(PeerLost):
        wait(plane.read(owner.name, batch([0], [0], [4096])))
    assert (region == FILL).all()
    wait(plane.read(other.name, batch([0], [0], [4096])))
    assert np.array_equal(region[:4096], other.expected[:4096])


def test_owner_killed_before_the_first_connection(fresh):
    owner = fresh.owner(seed=53)
    plane, region = fresh.reader()
    region[:] = FILL
    owner.kill()
    with pytest.raises(PeerLost):
        plane.connect(owner.endpoint)
        wait(plane.read(owner.name, batch([0], [0], [4096])))
    assert (region == FILL).all()


def test_owner_killed_during_the_read(fresh):
    """Stopped first, so that the kill certainly meets a read in flight; the same error comes on every poll."""
    owner, other = fresh.owner(seed=54, size=32 << 20), fresh.owner(seed=55)
    plane, region = fresh.reader(owner, other, size=32 << 20)
    wait(plane.read(owner.name, batch([0], [0], [4096])))
    owner.stop()
    transfer = plane.read(owner.name, batch([0], [0], [24 << 20]))
    stopped_reads_land = not stays_pending(transfer, 0.1)
    owner.kill()
    if not stopped_reads_land:
        with pytest.raises(PeerLost):
            wait(transfer)
        with pytest.raises(PeerLost):
            transfer.poll()
    wait_drained(transfer)
    transfer.release()
    region[:] = FILL
    with pytest.raises(PeerLost):
        wait(plane.read(owner.name, batch([0], [0], [64])))
    time.sleep(0.2)
    wait(plane.read(other.name, batch([0], [0], [64])))
    assert (region[64:] == FILL).all()


def test_owner_killed_at_an_arbitrary_moment(fresh):
    """Either all bytes landed or PeerLost; several moments, one reader throughout."""
    plane, region = fresh.reader(size=32 << 20)
    for delay_ms in (0, 1, 3, 8):
        owner = fresh.owner(seed=56, size=32 << 20)
        plane.connect(owner.endpoint)
        wait(plane.read(owner.name, batch([0], [0], [64])))
        transfer = plane.read(owner.name, batch([0], [0], [32 << 20]))
        end = time.monotonic() + delay_ms / 1000
        while time.monotonic() < end:
            transfer.poll()
        owner.kill()
        try:
            wait(transfer)
        except PeerLost:
            pass
        else:
            assert np.array_equal(region, owner.expected)
        wait_drained(transfer)
        transfer.release()
        plane.disconnect(owner.name)


def test_stopped_owner_window_is_quarantined_until_it_drains(fresh):
    owner, other = fresh.owner(seed=61, size=8 << 20), fresh.owner(seed=62, size=8 << 20)
    plane, staging = fresh.staged(owner, window_bytes=1 << 20, windows=4)
    plane.connect(other.endpoint)
    wait(plane.read(owner.name, batch([0], [0], [4096])))
    staging.region[:] = FILL
    owner.stop()
    window = staging.acquire()
    transfer = plane.read(owner.name, batch([4096], [window.offset], [window.nbytes]))
    if not stays_pending(transfer, 1.0):
        assert fresh.plane_name == "nixl", "only the kernel's copy needs no owner"
        assert np.array_equal(window.view, owner.expected[4096 : 4096 + window.nbytes])
        return
    staging.quarantine(window, transfer)
    assert (staging.leased, staging.free + staging.quarantined) == (0, 4)
    # Others go on meanwhile, in windows that are not the quarantined one.
    second = staging.acquire()
    wait(plane.read(other.name, batch([0], [second.offset], [second.nbytes])))
    assert np.array_equal(second.view, other.expected[: second.nbytes])
    with pytest.raises(TransportError):
        transfer.poll()
    owner.resume()
    end = time.monotonic() + DEADLINE
    while staging.sweep() == 0 and staging.quarantined:
        assert time.monotonic() < end
        time.sleep(0.002)
    assert (staging.free, staging.leased, staging.quarantined) == (3, 1, 0)
    outside = np.ones(staging.region.size, dtype=bool)
    for used in (window, second):
        outside[used.offset : used.offset + used.nbytes] = False
    assert (staging.region[outside] == FILL).all()
    # And once drained nothing comes late.
    window.view[:] = FILL
    time.sleep(0.3)
    wait(plane.read(other.name, batch([0], [second.offset], [64])))
    assert (window.view == FILL).all()
    staging.release(second)


def test_release_in_flight_and_drained(fresh):
    owner = fresh.owner(seed=63, size=8 << 20)
    plane, region = fresh.reader(owner, size=8 << 20)
    wait(plane.read(owner.name, batch([0], [0], [4096])))
    owner.stop()
    region[:] = FILL
    transfer = plane.read(owner.name, batch([0], [0], [8 << 20]))
    landed = not stays_pending(transfer, 0.1)
    transfer.release()
    transfer.release()
    if fresh.plane_name in ("loopback", "nixl-tcp"):
        assert not transfer.drained
    if fresh.kind == "zmq":
        assert transfer.drained
    plane.disconnect(owner.name)
    if not landed:
        with pytest.raises(TransportError):
            transfer.poll()
    owner.resume()
    wait_drained(transfer)
    after = region.copy()
    time.sleep(0.3)
    assert np.array_equal(region, after)
    plane.connect(owner.endpoint)
    wait(plane.read(owner.name, batch([0], [0], [8 << 20])))
    assert np.array_equal(region, owner.expected)


def test_close_with_a_read_in_flight_stops_its_writes(fresh):
    owner = fresh.owner(seed=64, size=8 << 20)
    plane, region = fresh.reader(owner, size=8 << 20)
    wait(plane.read(owner.name, batch([0], [0], [4096])))
    owner.stop()
    transfer = plane.read(owner.name, batch([0], [0], [8 << 20]))
    if not stays_pending(transfer, 0.1):
        return
    started = time.monotonic()
    plane.close()
    assert time.monotonic() - started < 5
    region[:] = FILL
    owner.resume()
    time.sleep(0.5)
    assert (region == FILL).all()
    assert transfer.drained
    transfer.release()
    with pytest.raises(TransportError):
        transfer.poll()


def test_owner_restarts_as_a_new_incarnation(fresh):
    owner = fresh.owner(seed=71)
    plane, region = fresh.reader(owner)
    wait(plane.read(owner.name, batch([0], [0], [4096])))
    owner.kill()
    # On the same port where there is one: the old endpoint then reaches the new process.
    port = int(owner.endpoint.address.partition("#")[0].rpartition(":")[2] or 0)
    successor = fresh.owner(seed=72, port=port)
    assert successor.name != owner.name
    region[:] = FILL
    with pytest.raises(PeerLost):
        wait(plane.read(owner.name, batch([0], [0], [4096])))
    plane.connect(successor.endpoint)
    wait(plane.read(successor.name, batch([0], [4096], [4096])))
    assert np.array_equal(region[4096:8192], successor.expected[:4096])
    with pytest.raises((PeerLost, StaleEpoch)):
        plane.connect(owner.endpoint)
        wait(plane.read(owner.name, batch([0], [0], [4096])))
    assert (region[:4096] == FILL).all()
    wait(plane.read(successor.name, batch([0], [4096], [4096])))


def read_on(owner, plane, read) -> int:
    """Reads until it lands, over as many incarnations as that takes; returns how many were lost. What lands is exact
    or the caller sees it; only ``PeerLost`` may come in between."""
    end, lost = time.monotonic() + DEADLINE, 0
    while True:
        transfer = None
        try:
            transfer = plane.read(owner.name, read)
            wait(transfer)
            transfer.release()
            return lost
        except PeerLost:
            if transfer is not None:
                wait_drained(transfer)
                transfer.release()
        dead, lost = owner.name, lost + 1
        plane.disconnect(dead)
        while not owner.refresh() or owner.name == dead:
            assert time.monotonic() < end, "no other incarnation came up"
            assert owner.process.poll() is None, "the owner died with its reader"
            time.sleep(0.02)
        plane.connect(owner.endpoint)


@pytest.mark.parametrize("stopped", [False, True], ids=["running owner", "stopped owner"])
def test_owner_survives_readers_killed_while_they_read(fresh, stopped):
    """UCX aborts the serving process in some of these kills (TCP); the owner, its memory and other readers go on."""
    if fresh.kind == "loopback":
        pytest.skip("reader and owner are one process")
    owner = fresh.owner(seed=81, size=32 << 20)
    plane, region = fresh.reader(owner)
    at = np.arange(100, dtype=np.uint64)
    read = batch(at * np.uint64(300_007) + np.uint64(9), at * np.uint64(1024), [1000] * 100)
    wanted = expect(region.size, FILL, read, owner.expected)
    lost = 0
    for delay in (0.0, 0.01, 0.05) * (2 if stopped else 4):
        process, serving = fresh.busy_reader(owner)
        if stopped:
            os.kill(serving, signal.SIGSTOP)
        time.sleep(delay)
        process.kill()
        process.wait()
        process.stdout.close()
        if stopped:
            os.kill(serving, signal.SIGCONT)
        region[:] = FILL
        lost += read_on(owner, plane, read)
        assert np.array_equal(region, wanted)
        assert owner.process.poll() is None, "the owner died with its reader"
    print(f"{fresh.plane_name}: {lost} incarnations lost")
    assert lost == 0 or fresh.kind == "nixl", "only a hosted plane may lose its process"


def test_a_hosted_plane_comes_back_as_another_incarnation(fresh):
    if fresh.kind != "nixl":
        pytest.skip("served by its owner's own process")
    owner = fresh.owner(seed=82, size=32 << 20)
    plane, region = fresh.reader(owner, size=32 << 20)
    read = batch([5], [0], [24 << 20])
    names = {owner.name}
    for number in (signal.SIGKILL, signal.SIGABRT, signal.SIGTERM):
        wait(plane.read(owner.name, batch([0], [0], [64])))
        owner.stop()
        transfer = plane.read(owner.name, read)
        stays_pending(transfer, 0.05)
        os.kill(owner.serving, number)
        if number != signal.SIGKILL:  # which needs no running process
            owner.resume()
        try:
            wait(transfer)
        except PeerLost:
            pass
        else:
            assert fresh.plane_name == "nixl", "only the kernel's copy needs no owner"
        wait_drained(transfer)
        transfer.release()
        region[:] = FILL
        read_on(owner, plane, read)
        assert np.array_equal(region, expect(region.size, FILL, read, owner.expected))
        names.add(owner.name)
    assert len(names) == 4, "an agent name was used twice"


def test_no_process_outlives_its_owner(fresh):
    """However the owner ends, and even if the child is stopped."""
    if fresh.kind != "nixl":
        pytest.skip("served by its owner's own process")
    for ending in ("kill", "kill, child stopped", "quit"):
        owner = fresh.owner(seed=83)
        if ending == "kill, child stopped":
            owner.stop()
        started = time.monotonic()
        if ending == "quit":
            owner.process.stdin.write("quit\n")
            owner.process.stdin.flush()
        else:
            owner.process.kill()
        owner.process.wait(DEADLINE)
        while process_state(owner.serving) not in ("Z", ""):
            assert time.monotonic() - started < 2.0, ending
            time.sleep(0.005)


def test_the_serving_process_holds_the_arena_and_little_else(fresh, monkeypatch):
    if fresh.kind != "nixl":
        pytest.skip("served by its owner's own process")
    psutil = pytest.importorskip("psutil")
    monkeypatch.setenv("SOME_TOKEN", "hush")
    child = psutil.Process(fresh.owner(seed=84).serving)
    assert not {k for k in child.environ() if k not in KEPT_VARIABLES and not k.startswith(KEPT_PREFIXES)}
    loaded = {Path(entry.path).name for entry in child.memory_maps()}
    assert any("memfd:oasis-arena" in name for name in loaded)
    assert not [name for name in loaded if "torch" in name or "zmq" in name or "aiohttp" in name]
    assert child.memory_info().rss < 200 << 20


def test_idle_owner_uses_little_cpu(rig, shared):
    owner, plane, _ = shared
    if rig.kind == "loopback":
        pytest.skip("no process of its own")
    psutil = pytest.importorskip("psutil")
    wait(plane.read(owner.name, batch([0], [0], [4096])))
    processes = [psutil.Process(pid) for pid in {owner.process.pid, owner.serving}]

    def spent() -> float:
        return sum(t.user + t.system for t in (process.cpu_times() for process in processes))

    shares = []
    while not shares or (min(shares) >= 0.03 and len(shares) < 4):  # a machine that does other things counts some of them here
        before = spent()
        time.sleep(3.0)
        shares.append((spent() - before) / 3.0)
    print(f"{rig.plane_name}: idle owner uses {min(shares):.3f} of a core")
    assert min(shares) < 0.03
