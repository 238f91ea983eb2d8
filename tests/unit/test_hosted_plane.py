"""A real tier process that serves NIXL over TCP from its child: the child may die at any moment, the tier may too."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import numpy as np
import pytest
from node_rig import SOURCE, Decode, Prefill, small_layout, until

from decode_node.pull import PullLimits
from prefill_node.publisher import COMMITTED
from transport.arena import Arena
from transport.errors import ConfigError
from transport.planes.host import MAX_PAUSE_SECONDS, HostedServer

pytest.importorskip("nixl")
psutil = pytest.importorskip("psutil")

TIER = """
import logging, sys
from transport.server import TierOptions, serve
logging.basicConfig(level="INFO")
serve(TierOptions(local=sys.argv[1], arena_bytes=1 << 20, planes=("nixl", "zmq"), node="tier"))
"""
TOKENS = 90


class TierProcess:
    def __init__(self, folder: Path):
        self.path, log = str(folder / f"{uuid.uuid4().hex[:8]}.sock"), folder / "tier.log"
        with log.open("w") as out:
            self.process = subprocess.Popen([sys.executable, "-c", TIER, self.path], stdout=out, stderr=out)
        line = until(lambda: self._failed() or re.search(r"ready: (\{.*\})", log.read_text()), "tier ready", 30)
        self.about = json.loads(line[1])

    def _failed(self) -> None:
        assert self.process.poll() is None, "the tier ended at start"

    @property
    def child(self) -> psutil.Process:
        """The process that serves NIXL."""
        (child,) = until(lambda: psutil.Process(self.process.pid).children(), "a child")
        return child

    def get(self, page: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.about['http']}/{page}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def inventory(self) -> dict[str, int]:
        return json.loads(self.get("state")[1])["inventory"]

    def restarts(self) -> int:
        return int(float(re.search(r"^oasis_tier_data_plane_restarts_total (\S+)", self.get("metrics")[1], re.MULTILINE)[1]))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(20)


class Pair:
    """A tier process, a publisher and a puller, everything on TCP."""

    def __init__(self, folder: Path):
        self.tier = TierProcess(folder)
        self.prefill = Prefill(self.tier.path)
        self.decode = Decode({SOURCE: self.tier.about["control"]}, kind="nixl",
                             limits=PullLimits(await_seconds=30.0, read_seconds=20.0, silence_seconds=20.0))

    def publish(self, room: int) -> np.ndarray:
        """Commits a prompt of ``TOKENS`` tokens; returns its pages at prefill."""
        pages = -(-TOKENS // small_layout().block_tokens)
        source = np.arange(room, room + pages)[::-1].copy()
        pub = self.prefill.publish(room, np.arange(TOKENS, dtype=np.int64) + room * 1_000_003, source)
        assert pub.state == COMMITTED, pub.error
        return source

    def ready(self, room: int):
        pull = self.decode.pull(room)
        until(lambda: pull.state in ("ready", "failed"), "manifest", 30)
        assert pull.state == "ready", pull.error
        return pull

    def arrived(self, pull, source: np.ndarray, target: np.ndarray) -> bool:
        until(lambda: pull.state in ("done", "failed"), "pulled", 30)
        assert pull.state == "done", pull.error
        return np.array_equal(self.prefill.pool.tokens(source, TOKENS), self.decode.pool.tokens(target, TOKENS))

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
        self.tier.close()


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def test_reads_go_on_over_the_next_incarnation(pair):
    """Three times: killed with reads in flight of two requests; all arrives, nobody's lease or record is lost."""
    for turn in range(3):
        rooms = (10 * turn + 1, 10 * turn + 2)
        later = 10 * turn + 3
        sources = {room: pair.publish(room) for room in (*rooms, later)}
        pulls = {room: pair.ready(room) for room in rooms}
        assert pair.tier.get("readyz")[0] == 200
        child, failures = pair.tier.child, pair.decode.puller.totals["read_failures"]
        child.suspend()  # so that the reads are certainly in flight when it dies
        targets = {room: np.arange(len(sources[room])) + 30 * k for k, room in enumerate(rooms)}
        for room, pull in pulls.items():
            pair.decode.fetch(pull, targets[room])
        until(lambda: len(pair.decode.puller.reader.flights) == pair.decode.windows, "all windows in flight")
        jobs = {flight.job for flight in list(pair.decode.puller.reader.flights)}
        child.kill()
        status, text = until(lambda: (a := pair.tier.get("readyz"))[0] != 200 and a, "not ready")
        assert status == 503 and "nixl" in text
        assert pair.tier.get("healthz")[0] == 200 and pair.tier.inventory()["leases"] == 2
        for room, pull in pulls.items():
            assert pair.arrived(pull, sources[room], targets[room])
        assert {job.attempts for job in jobs} == {1}, "one loss counts once, however many windows it took along"
        assert pair.decode.puller.totals["read_failures"] == failures + pair.decode.windows
        # What was committed before the loss is still there for who comes later.
        pull = pair.ready(later)
        pair.decode.wipe(targets[rooms[0]])
        pair.decode.fetch(pull, targets[rooms[0]])
        assert pair.arrived(pull, sources[later], targets[rooms[0]])
        pair.decode.wipe(np.arange(60))
        until(pair.decode.at_baseline)
        until(lambda: pair.tier.get("readyz")[0] == 200)
        assert pair.tier.restarts() == turn + 1 and pair.tier.child.pid != child.pid
    until(lambda: pair.tier.inventory()["leases"] == 0)
    totals = json.loads(pair.tier.get("state")[1])["totals"]
    assert totals["leases_released"] == totals["rooms_claimed"] == 9 and totals.get("leases_expired", 0) == 0
    assert pair.decode.puller.totals["links_lost"] == pair.decode.puller.totals["failed"] == 0
    assert len(pair.decode.plane.requested) == 4, "four incarnations were read from, each under its own name"


def test_a_loss_between_requests_goes_unnoticed(pair):
    source = pair.publish(1)
    target = np.arange(len(source))
    pull = pair.ready(1)
    pair.decode.fetch(pull, target)
    assert pair.arrived(pull, source, target)
    source, pull = pair.publish(2), None
    pair.tier.child.kill()
    pull = pair.ready(2)  # the tier itself answers as ever
    pair.decode.wipe(target)
    pair.decode.fetch(pull, target)
    assert pair.arrived(pull, source, target)
    until(pair.decode.at_baseline)


def test_a_reader_that_comes_while_the_plane_is_down_waits_for_it(pair):
    source = pair.publish(1)
    target = np.arange(len(source))
    pair.tier.child.kill()
    until(lambda: pair.tier.get("readyz")[0] == 503)
    pull = pair.ready(1)
    pair.decode.fetch(pull, target)
    assert pair.arrived(pull, source, target)
    assert pair.decode.puller.totals["read_failures"] == pair.decode.puller.totals["links_lost"] == 0


def test_starts_that_fail_are_spaced_out_and_end_when_the_cause_does(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    arena, changes = Arena.create(1 << 20), []
    server = HostedServer("nixl", "node", arena.fd, arena.size, on_change=lambda: changes.append(server.endpoint))
    first = server.endpoint
    monkeypatch.setenv("UCX_TLS", "shm")  # NIXL refuses it
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: server.restarts >= 2)
    began, before = time.monotonic(), server.restarts
    time.sleep(2.0)
    assert server.restarts - before <= 4 and server.endpoint is None and server.pid is None
    monkeypatch.setenv("UCX_TLS", "tcp")
    until(lambda: server.endpoint, "back")
    assert time.monotonic() - began < 2 * MAX_PAUSE_SECONDS + 5
    assert changes == [None, server.endpoint] and server.endpoint.name != first.name
    pid = server.pid
    server.close()
    server.close()
    assert server.endpoint is None and not psutil.pid_exists(pid) and len(changes) == 2
    arena.close()


def test_a_plane_that_cannot_start_is_refused(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "shm")
    arena, threads, children = Arena.create(4096), threading.active_count(), psutil.Process().children()
    with pytest.raises(ConfigError, match="UCX_TLS=shm"):
        HostedServer("nixl", "node", arena.fd, arena.size)
    assert threading.active_count() == threads and psutil.Process().children() == children
    arena.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_child_goes_with_the_tier(pair, number):
    child = pair.tier.child
    os.kill(pair.tier.process.pid, number)
    started = time.monotonic()
    pair.tier.process.wait(20)
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - started < 2.0
        time.sleep(0.01)
