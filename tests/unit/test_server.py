"""The tier's process: sockets, descriptors, garbage, dead workers, HTTP."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import msgspec
import numpy as np
import pytest
import zmq
from hostile_rig import frames_of, seeds
from node_rig import FINGERPRINT, ROW, LocalTier, small_layout, until
from typer.testing import CliRunner

from oasis_sglang.cli import app
from transport import messages as m
from transport.errors import (
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    DuplicateRoom,
    LayoutMismatch,
    OasisError,
    PeerLost,
    ProtocolError,
)
from transport.server import TierOptions, TierServer, split_address
from transport.tier import TierLimits
from transport.worker_client import WorkerClient

LAYOUT = small_layout()
HELLO = dict(node="test", rank=0, layout=LAYOUT, fingerprint=FINGERPRINT)

DYING_WORKER = """
import sys, time
import msgspec
from transport import messages as m
from transport.layout import KVLayout
from transport.worker_client import WorkerClient
client = WorkerClient(sys.argv[1])
client.attach(node="victim", rank=0, layout=msgspec.json.decode(sys.argv[2], type=KVLayout), fingerprint=sys.argv[3])
for room in (1, 2):
    client.call(m.Open, room=room, rank=0, seed=b"", hashes=b"", private=2)
client.call(m.Commit, room=2, rank=0, prompt_tokens=8, roots=bytes(16), ranking=b"", metadata=tuple(bytes(n) for n in client.welcome.geometry and (8, 12)))
print("OPEN", flush=True)
time.sleep(60)
"""

TIER = """
import sys
from transport.server import TierOptions, serve
serve(TierOptions(local=sys.argv[1], http=sys.argv[2], arena_bytes=1 << 20, planes=("zmq",)))
"""


@pytest.fixture
def tier(tmp_path):
    tier = LocalTier(str(tmp_path / "tier.sock"))
    yield tier
    tier.stop()


@pytest.fixture
def client(tier):
    client = WorkerClient(tier.path, timeout=10)
    client.attach(**HELLO)
    yield client
    client.close()


class Reader:
    """A reader's bare socket: what it says is up to the test."""

    def __init__(self, control: str):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self.socket.connect(control)
        self.seq = 0

    def send(self, make, **fields):
        self.seq += 1
        self.socket.send(m.encode(make(seq=self.seq, **fields)))

    def ask(self, make, **fields):
        self.send(make, **fields)
        return m.raise_failure(m.decode_reply(self.socket.recv()), peer="tier")

    def hello(self):
        return self.ask(m.Hello, protocol=m.PROTOCOL, role="reader", **HELLO)

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def reader(tier):
    reader = Reader(tier.control)
    yield reader
    reader.close()


def get(tier, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{tier.server.http_port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_worker_sees_the_tiers_memory_and_the_tier_sees_its(tier, client):
    mine, theirs = client.arena.bytes, tier.server.arena.bytes
    assert mine.size == theirs.size == tier.server.options.arena_bytes
    mine[123], theirs[4567] = 11, 22
    assert theirs[123] == 11 and mine[4567] == 22
    assert mine.ctypes.data != theirs.ctypes.data and os.fstat(client.arena.fd).st_ino == os.fstat(tier.server.arena.fd).st_ino
    second = WorkerClient(tier.path)
    second.attach(**{**HELLO, "rank": 1})
    assert second.arena.bytes[123] == 11
    second.close()
    assert client.alive() and not second.alive()


def test_what_a_welcome_says(tier, client):
    welcome = client.welcome
    assert welcome.epoch == tier.server.epoch and welcome.control == tier.control and welcome.lease_seconds == 2.0
    assert welcome.geometry.num_records == tier.records and welcome.endpoints[0].kind == "loopback"
    welcome.endpoints[0].verify()


def test_a_refused_worker_is_not_attached(tier, client):
    other = WorkerClient(tier.path)
    with pytest.raises(LayoutMismatch):
        other.attach(**{**HELLO, "fingerprint": "0" * 64})
    assert not other.alive() and other.arena is None
    with pytest.raises(PeerLost):
        other.call(m.Ping)
    other.attach(**HELLO)
    assert isinstance(other.call(m.Ping), m.Ok)
    other.close()


def test_no_tier_there(tmp_path):
    with pytest.raises(PeerLost) as error:
        WorkerClient(str(tmp_path / "none.sock")).attach(**HELLO)
    assert "none.sock" in str(error.value)


def test_a_stopped_tier_is_a_deadline(tier, client):
    client.timeout = 0.2
    client._socket.settimeout(0.2)
    resume = tier.pause()
    with pytest.raises(DeadlineExceeded) as error:
        client.call(m.Ping)
    assert error.value.limit == "0.2 s"
    assert not client.alive(), "a late reply would be taken for the next one's"
    resume.set()


def test_the_error_of_a_call_is_the_tiers(client):
    client.call(m.Open, room=1, rank=0, seed=b"", hashes=b"", private=1)
    with pytest.raises(DuplicateRoom) as error:
        client.call(m.Open, room=1, rank=0, seed=b"", hashes=b"", private=1)
    assert error.value.room == 1
    with pytest.raises(CapacityError) as error:
        client.call(m.Open, room=2, rank=0, seed=b"", hashes=b"", private=64)
    assert error.value.retryable and error.value.limit == "64 records wanted, 63 of 64 available"


def test_a_killed_worker_fails_its_open_room_and_keeps_its_committed_one(tier, reader):
    worker = subprocess.Popen([sys.executable, "-c", DYING_WORKER, tier.path, msgspec.json.encode(LAYOUT).decode(), FINGERPRINT],
                              stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout.readline() == "OPEN\n"
        epoch = reader.hello().epoch
        reader.send(m.Await, epoch=epoch, room=1, rank=0, seconds=30.0)
        until(lambda: tier.inventory()["waiters"] == 1)
        worker.send_signal(signal.SIGKILL)
        reply = m.decode_reply(reader.socket.recv())
        assert reply.seq == 2 and reply.code == "PeerLost" and "victim" in reply.message and reply.room == 1
        manifest = reader.ask(m.Await, epoch=epoch, room=2, rank=0, seconds=1.0)
        assert manifest.prompt_tokens == 8
        reader.ask(m.Release, epoch=epoch, leases=m.pack([manifest.lease], "u8"))
        inventory = tier.inventory()
        assert (inventory["free"], inventory["workers"], inventory["rooms"], inventory["leases"]) == (64, 0, 0, 0)
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()


def test_garbage_on_the_unix_socket_costs_only_its_sender(tier, client):
    for raw in [frame for _, rng in seeds(5, 0) for frame in frames_of(m.encode(m.Ping(seq=1)), m.MAX_MESSAGE, rng)]:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(tier.path)
            sock.sendall(raw)
    assert isinstance(client.call(m.Ping), m.Ok)
    until(lambda: tier.inventory()["workers"] == 1)
    until(lambda: len(tier.server.connections) == 1, "the connections are closed")
    assert tier.server.tier.totals["refused"] >= 5 * 5, "lengths and messages that cannot be are counted"


def test_a_worker_that_never_reads_its_answers_costs_only_itself(tier, client):
    raw = m.encode(m.Hello(seq=1, protocol=m.PROTOCOL, role="worker", **HELLO))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        sock.connect(tier.path)
        end, sent = time.monotonic() + 3, 0
        while time.monotonic() < end and sent < 3000:
            try:
                sock.sendall(struct.pack("<I", len(raw)) + raw)
                sent += 1
            except BlockingIOError:
                time.sleep(0.002)
            except OSError:
                break  # thrown out
        assert tier.alive, tier.error
        assert isinstance(client.call(m.Ping), m.Ok)


def test_garbage_from_a_reader_is_answered_and_counted(tier, client, reader):
    rng = np.random.default_rng(1)
    for raw in (b"", b"\xc1", rng.bytes(50), m.encode(m.Ok(seq=3)), m.encode(m.Ping(seq=1)) + b"x"):
        reader.socket.send(raw)
        reply = m.decode_reply(reader.socket.recv())
        assert reply.code == "ProtocolError"
    reader.socket.send_multipart([b"two", b"frames"])  # counted, not answered
    assert reader.hello().epoch == tier.server.epoch
    assert tier.server.tier.totals["refused"] == 6 and tier.alive


@pytest.mark.parametrize("make, fields", [
    (m.Open, dict(room=1, rank=0, seed=b"", hashes=b"", private=1)), (m.Commit, dict(room=1, rank=0, prompt_tokens=4, roots=bytes(8), ranking=b"", metadata=(bytes(8), bytes(12)))),
    (m.Abort, dict(room=1, rank=0, reason="")), (m.Hello, dict(protocol=m.PROTOCOL, role="worker", **HELLO))])
def test_a_reader_cannot_publish(tier, client, reader, make, fields):
    client.call(m.Open, room=1, rank=0, seed=b"", hashes=b"", private=1)
    reader.hello()
    with pytest.raises(ProtocolError, match="only a local worker"):
        reader.ask(make, **fields)
    assert tier.inventory()["rooms"] == 1 and tier.inventory()["workers"] == 1
    client.call(m.Commit, room=1, rank=0, prompt_tokens=4, roots=bytes(8), ranking=b"", metadata=tuple(bytes(n) for n in ROW))


def test_another_tier_on_the_same_socket_is_refused_and_the_first_goes_on(tier, client):
    with pytest.raises(ConfigError, match="another tier"):
        LocalTier(tier.path)
    assert isinstance(client.call(m.Ping), m.Ok)
    assert os.path.exists(tier.path)


def test_a_file_that_is_no_socket_is_not_overwritten_by_a_directory_error(tmp_path):
    with pytest.raises(ConfigError, match="--local"):
        LocalTier(str(tmp_path / ("x" * 200)))  # longer than a socket's path may be


def test_a_ports_owner_is_named(tier):
    taken = tier.control.rpartition(":")[2]
    with pytest.raises(ConfigError, match="--listen"):
        LocalTier(tier.path + "2", listen=f"127.0.0.1:{taken}")
    assert not os.path.exists(tier.path + "2")


def test_sockets_are_private_and_gone_afterwards(tmp_path):
    tier = LocalTier(str(tmp_path / "deep" / "tier.sock"))
    assert os.stat(tier.path).st_mode & 0o777 == 0o600
    tier.stop()
    assert not os.path.exists(tier.path) and tier.error is None


def test_a_killed_tiers_socket_is_taken_over_and_sigterm_ends_one_cleanly(tmp_path):
    path = str(tmp_path / "tier.sock")

    def start():
        process = subprocess.Popen([sys.executable, "-c", TIER, path, "127.0.0.1:0"], stderr=subprocess.DEVNULL)
        client = WorkerClient(path)
        until(lambda: process.poll() is not None or attached(client), "it serves", 30)
        assert process.poll() is None
        return process, client

    def attached(client):
        try:
            return client.attach(**HELLO)
        except PeerLost:
            time.sleep(0.05)

    first, client = start()
    first.kill()
    first.wait()
    assert os.path.exists(path) and not client.alive()
    with pytest.raises(OasisError):
        client.call(m.Ping)
    second, again = start()
    assert again.welcome.epoch != client.welcome.epoch
    second.terminate()
    assert second.wait(10) == 0 and not os.path.exists(path)
    client.close()
    again.close()


@pytest.mark.parametrize("options, named", [
    (dict(listen="0.0.0.0:0"), "allow-plaintext"), (dict(listen="10.0.0.1:0"), "allow-plaintext"),
    (dict(listen="0.0.0.0:0", allow_plaintext=True), "--advertise"), (dict(listen="nonsense"), "--listen"), (dict(listen="127.0.0.1:65536"), "--listen"),
    (dict(listen="127.0.0.1:²"), "--listen"), (dict(http="127.0.0.1"), "--http"), (dict(planes=()), "--data-plane"),
    (dict(limits=TierLimits(lease_seconds=0)), "--lease-seconds"), (dict(limits=TierLimits(room_seconds=float("nan"))), "--room-seconds")])
def test_options_are_refused_by_name(options, named):
    with pytest.raises(ConfigError, match=named):
        TierServer(TierOptions(local="unused", **options))


def test_a_trusted_network_is_allowed_when_asked_for():
    assert TierServer(TierOptions(local="unused", listen="0.0.0.0:0", allow_plaintext=True, advertise="10.1.2.3")).advertise == "10.1.2.3"
    assert split_address("localhost:80", "--x") == ("localhost", 80)


def test_http(tier, client):
    assert get(tier, "/healthz") == (200, "ok") and get(tier, "/readyz") == (200, "ready")
    assert get(tier, "/nothing")[0] == 404
    state = msgspec.json.decode(get(tier, "/state")[1])
    assert state["epoch"] == tier.server.epoch and state["inventory"]["workers"] == 1 and state["inventory"]["free"] == 64
    tier.server.ready.clear()
    assert get(tier, "/readyz") == (503, "starting")


def test_the_http_numbers_follow_the_tables(tier, client, reader):
    def scrape() -> dict[str, float]:
        lines = [x.rpartition(" ") for x in get(tier, "/metrics")[1].splitlines() if x.startswith("oasis_tier_")]
        return {name: float(value) for name, _, value in lines}

    before = scrape()
    assert before['oasis_tier_records{state="free"}'] == 64 and before["oasis_tier_arena_bytes"] == tier.server.options.arena_bytes
    client.call(m.Open, room=1, rank=0, seed=bytes(32), hashes=bytes(32), private=2)
    assert scrape()['oasis_tier_records{state="writing"}'] == 3 and scrape()["oasis_tier_pages_fresh_total"] == 3
    client.call(m.Commit, room=1, rank=0, prompt_tokens=12, roots=bytes(24), ranking=bytes(4 * 6 * 3), metadata=tuple(bytes(n) for n in ROW))
    epoch = reader.hello().epoch
    manifest = reader.ask(m.Await, epoch=epoch, room=1, rank=0, seconds=1.0)
    assert manifest.ranking == bytes(4 * 6 * 3)
    now = scrape()
    assert now['oasis_tier_records{state="leased"}'] == 3 and now["oasis_tier_leases"] == 1 and now["oasis_tier_rooms_claimed_total"] == 1
    reader.ask(m.Release, epoch=epoch, leases=m.pack([manifest.lease], "u8"))
    now = scrape()
    assert now['oasis_tier_records{state="cached"}'] == 1 and now['oasis_tier_records{state="free"}'] == 63 and now["oasis_tier_leases_released_total"] == 1


@pytest.mark.parametrize("asked", [True, False])
def test_what_a_freed_record_held_is_gone_only_where_that_is_asked_for(tmp_path, asked):
    """As another worker could read it, payloads and indexes, padding included."""
    tier, client = LocalTier(str(tmp_path / "tier.sock"), records=8, zero_freed=asked), WorkerClient(str(tmp_path / "tier.sock"), timeout=10)
    try:
        client.attach(**HELLO)
        sections = client.welcome.geometry.rows(client.arena.bytes)

        def reserve(room: int) -> None:
            assert sorted(m.unpack(client.call(m.Open, room=room, rank=0, seed=b"", hashes=b"", private=8).records, "u4").tolist()) == list(range(8))

        def fill_and_give_up(room: int, value: int) -> None:
            for section in sections:
                section[:] = value
            client.call(m.Abort, room=room, rank=0, reason="")

        def hold(value: int) -> bool:
            return all((section == value).all() for section in sections)

        reserve(1)
        fill_and_give_up(1, 7)
        if asked:
            until(lambda: hold(0), "zeroed while nobody wants them")
        else:
            tier.call(tier.tier.tick)
            assert hold(7)
        reserve(2)
        fill_and_give_up(2, 9)
        reserve(3)
        assert hold(0 if asked else 9), "given out, whether or not there was time before"
        assert tier.tier.totals["records_zeroed"] == 16 * asked
    finally:
        client.close()
        tier.stop()


@pytest.mark.parametrize("flags, asked", [([], False), (["--zero-freed"], True)])
def test_that_is_an_option_of_the_command(monkeypatch, flags, asked):
    served = []
    monkeypatch.setattr("transport.server.serve", served.append)
    assert CliRunner().invoke(app, ["tier", "--local", "unused", *flags]).exit_code == 0
    assert [options.zero_freed for options in served] == [asked]


def test_many_workers_at_once(tier):
    errors = []

    def work(n):
        try:
            client = WorkerClient(tier.path)
            client.attach(**{**HELLO, "rank": n})
            for k in range(20):
                opened = client.call(m.Open, room=k, rank=n, seed=b"", hashes=b"", private=2)
                client.arena.bytes[m.unpack(opened.records, "u4").astype(int) * 768] = n
                assert (client.arena.bytes[m.unpack(opened.records, "u4").astype(int) * 768] == n).all(), "a record of two writers"
                client.call(m.Abort, room=k, rank=n, reason="done")
            client.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    until(lambda: tier.inventory()["workers"] == 0)
    assert tier.inventory()["free"] == 64
