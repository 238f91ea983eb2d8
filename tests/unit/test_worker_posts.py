"""A worker's connection with several requests outstanding, against a tier that is the test: any order, any pieces, any silence."""

from __future__ import annotations

import socket
import threading

import pytest
from node_rig import FINGERPRINT, small_layout

from transport import messages as m
from transport.arena import Arena
from transport.errors import CapacityError, DeadlineExceeded, PeerLost, ProtocolError
from transport.layout import ArenaGeometry
from transport.messages import LENGTH
from transport.worker_client import WorkerClient

LAYOUT = small_layout()
SIZE = 1 << 16


def frame(reply: m.Reply) -> bytes:
    raw = m.encode(reply)
    return LENGTH.pack(len(raw)) + raw


class Tier:
    """The other end of one attached client."""

    def __init__(self, folder, timeout: float = 10.0):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "tier.sock"))
        listener.listen()
        self.client = WorkerClient(str(folder / "tier.sock"), timeout=timeout)
        attaching = threading.Thread(target=self.client.attach, kwargs=dict(node="n", rank=0, layout=LAYOUT, fingerprint=FINGERPRINT))
        attaching.start()
        self.end, _ = listener.accept()
        self.end.settimeout(10)
        listener.close()
        arena = Arena.create(SIZE)
        welcome = m.Welcome(seq=self.request().seq, epoch="E", control="", geometry=ArenaGeometry.fit(LAYOUT, SIZE), endpoints=(), planes=(), lease_seconds=1.0)
        socket.send_fds(self.end, [frame(welcome)], [arena.fd])
        attaching.join()
        arena.close()

    def request(self) -> m.Request:
        (length,) = LENGTH.unpack(self.end.recv(LENGTH.size, socket.MSG_WAITALL))
        return m.decode_request(self.end.recv(length, socket.MSG_WAITALL))

    def say(self, *replies: m.Reply) -> None:
        self.end.sendall(b"".join(map(frame, replies)))


@pytest.fixture
def tiers(tmp_path):
    made = []
    yield lambda **more: made.append(Tier(tmp_path, **more)) or made[-1]
    for tier in made:
        tier.client.close()
        tier.end.close()


def abort(client, room: int, got: list) -> None:
    client.post(m.Abort, lambda reply: got.append((room, reply)), room=room, rank=0, reason="")


def test_answers_come_in_any_order_and_each_goes_to_its_own(tiers):
    tier, got = tiers(), []
    for room in (1, 2, 3):
        abort(tier.client, room, got)
    first, second, third = (tier.request().seq for _ in range(3))
    assert tier.client.outstanding == 3
    tier.client.process(0.0)
    assert not got
    tier.say(m.Ok(seq=third))
    tier.client.process(5.0)
    tier.say(m.failure(CapacityError("full", retryable=True), second), m.Ok(seq=first))
    while tier.client.outstanding:
        tier.client.process(5.0)
    assert [room for room, _ in got] == [3, 2, 1] and isinstance(got[1][1], CapacityError) and got[1][1].retryable
    assert isinstance(got[0][1], m.Ok) and got[2][1].seq == first


def test_a_frame_that_comes_in_pieces_is_waited_for_without_blocking(tiers):
    tier, got = tiers(), []
    abort(tier.client, 1, got)
    raw = frame(m.Ok(seq=tier.request().seq))
    for byte in raw[:-1]:
        tier.end.sendall(bytes([byte]))
        tier.client.process(5.0)
        assert not got
    tier.end.sendall(raw[-1:])
    tier.client.process(5.0)
    assert len(got) == 1 and not tier.client.outstanding


def test_a_call_takes_its_own_answer_and_keeps_the_others(tiers):
    tier, got = tiers(), []
    abort(tier.client, 1, got)
    posted = tier.request().seq
    answers = threading.Thread(target=lambda: (seq := tier.request().seq, tier.say(m.Ok(seq=posted), m.Ok(seq=seq))))
    answers.start()
    assert tier.client.call(m.Ping).seq == posted + 1
    answers.join()
    assert not got and tier.client.outstanding == 1, "not within the call"
    tier.client.process(0.0)
    assert [reply.seq for _, reply in got] == [posted]
    abort(tier.client, 2, got)
    posted = tier.request().seq
    answers = threading.Thread(target=lambda: (seq := tier.request().seq, tier.say(m.Ok(seq=seq), m.Ok(seq=posted))))
    answers.start()
    tier.client.call(m.Ping)
    answers.join()
    while tier.client.outstanding:
        tier.client.process(5.0)  # it may lie behind the call's answer, already read
    assert [room for room, _ in got] == [1, 2]


def test_an_answer_to_nothing_ends_the_connection(tiers):
    tier, got = tiers(), []
    abort(tier.client, 1, got)
    tier.say(m.Ok(seq=99))
    with pytest.raises(ProtocolError):
        tier.client.process(5.0)
    assert not tier.client.alive() and not tier.client.outstanding and not got


def test_a_tier_that_goes_is_a_lost_peer(tiers):
    tier, got = tiers(), []
    abort(tier.client, 1, got)
    tier.end.close()
    with pytest.raises(PeerLost):
        tier.client.process(5.0)
    assert not tier.client.alive() and not got
    with pytest.raises(PeerLost):
        abort(tier.client, 2, got)
    tier.client.process(0.0)  # nothing is outstanding: nothing to lose


def test_a_long_wait_is_no_silence_as_long_as_pings_are_answered(tiers):
    tier, got = tiers(timeout=0.2), []
    tier.client.post(m.Commit, got.append, room=1, rank=0, prompt_tokens=4, roots=bytes(8), ranking=b"", metadata=())
    commit = tier.request().seq
    for _ in range(5):
        answered = False
        while not answered:
            tier.client.process(0.01)
            tier.end.setblocking(False)
            try:
                tier.end.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                continue
            finally:
                tier.end.settimeout(10)
            ping = tier.request()
            assert isinstance(ping, m.Ping)
            tier.say(m.Ok(seq=ping.seq))
            answered = True
    assert not got
    tier.say(m.Ok(seq=commit))
    while not got:
        tier.client.process(0.01)
    assert got[0].seq == commit


def test_a_stopped_tier_is_a_deadline(tiers):
    tier, got = tiers(timeout=0.2), []
    abort(tier.client, 1, got)
    with pytest.raises(DeadlineExceeded) as error:
        while True:
            tier.client.process(0.01)
    assert error.value.limit == "0.2 s" and not tier.client.alive() and not got
    assert isinstance(tier.request(), m.Abort) and isinstance(tier.request(), m.Ping), "it was asked whether it lives"
