"""What a ZeroMQ owner does with messages that no honest reader sends, and a reader with answers that no honest owner
sends."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import batch, wait

from transport.dataplane import Endpoint
from transport.errors import BoundsError, ConfigError, PeerLost, ProtocolError, StaleEpoch, TransportError
from transport.planes import incarnation, make_plane, make_server
from transport.planes.zmq import PART_BYTES, PART_RANGES, VERSION, ReadReply, ReadRequest

ARENA = 16 << 20


def u64(*values: int) -> bytes:
    return np.array(values, dtype="<u8").tobytes()


@pytest.fixture(scope="module")
def server():
    arena = np.frombuffer(np.random.default_rng(5).bytes(ARENA), dtype=np.uint8)
    server = make_server("zmq", incarnation("owner"), arena)
    server.arena = arena
    yield server
    server.close()


@pytest.fixture(scope="module")
def raw(server):
    """A bare socket to the owner."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 10_000
        socket.connect(server.endpoint.address)
        yield socket


def ask(
    raw, server, remote=b"", lengths=b"", *, version=VERSION, name=None, number=1
) -> tuple[ReadReply, list[bytes]]:
    name = server.endpoint.name if name is None else name
    raw.send(msgspec.msgpack.encode(ReadRequest(version, name, number, remote, lengths)))
    head, *frames = raw.recv_multipart()
    return msgspec.msgpack.decode(head, type=ReadReply), frames


def still_serves(raw, server) -> None:
    reply, frames = ask(raw, server, u64(3), u64(5), number=77)
    assert reply == ReadReply(VERSION, 77) and b"".join(frames) == server.arena[3:8].tobytes()


BAD_RANGES = {
    "none": (b"", b""),
    "uneven": (u64(0, 1), u64(1)),
    "not whole numbers": (b"1234567", b"1234567"),
    "zero length": (u64(0), u64(0)),
    "past the end": (u64(ARENA), u64(1)),
    "over the end": (u64(ARENA - 1), u64(2)),
    "wrapping": (u64(2**64 - 1), u64(2)),
    "huge": (u64(0), u64(2**64 - 1)),
    "too many bytes": (u64(0, 0), u64(PART_BYTES, PART_BYTES)),
    "too many bytes that wrap": (u64(0), u64(2**63)),
    "too many ranges": (u64(*[0] * (2 * PART_RANGES + 1)), u64(*[1] * (2 * PART_RANGES + 1))),
}


@pytest.mark.parametrize("case", BAD_RANGES)
def test_bad_ranges_are_refused_by_the_owner(raw, server, case):
    refused = server.refused
    reply, frames = ask(raw, server, *BAD_RANGES[case])
    assert (reply.error, frames, server.refused) == (BoundsError.__name__, [], refused + 1)
    still_serves(raw, server)


def test_another_incarnation_and_version_are_refused(raw, server):
    assert ask(raw, server, u64(0), u64(1), name="owner:past")[0].error == StaleEpoch.__name__
    assert ask(raw, server, u64(0), u64(1), version=99)[0].error == ProtocolError.__name__
    still_serves(raw, server)


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_noise_is_counted_and_ignored(raw, server, frames):
    malformed = server.malformed
    raw.send_multipart(frames)
    still_serves(raw, server)
    assert server.malformed == malformed + 1


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_damaged_requests_do_no_harm(raw, server, data):
    message = bytearray(
        msgspec.msgpack.encode(ReadRequest(VERSION, server.endpoint.name, 1, u64(8), u64(64)))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    counts = server.malformed + server.refused
    raw.send(bytes(message))
    raw.send(msgspec.msgpack.encode(ReadRequest(VERSION, server.endpoint.name, 77, u64(3), u64(5))))
    while True:
        head, *frames = raw.recv_multipart()
        reply = msgspec.msgpack.decode(head, type=ReadReply)
        if reply.number == 77 and b"".join(frames) == server.arena[3:8].tobytes():
            break
        # The damage may leave a request that is good, for other bytes of the arena.
        assert reply.error or frames
    assert server.malformed + server.refused <= counts + 1


def test_an_oversized_message_costs_its_sender_the_connection(server, raw):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo, socket.reconnect_ivl = 0, 300, -1
        socket.connect(server.endpoint.address)
        socket.send(bytes(64 << 20))
        with pytest.raises(zmq.Again):
            socket.recv()
    still_serves(raw, server)


def test_a_greedy_reader_cannot_hold_unbounded_memory(server, raw):
    """Sends requests without taking answers: its own queue fills, answers are dropped, others are served."""
    request = msgspec.msgpack.encode(ReadRequest(VERSION, server.endpoint.name, 1, u64(0), u64(PART_BYTES)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as greedy:
        greedy.linger, greedy.rcvhwm, greedy.rcvbuf = 0, 1, 4096
        greedy.connect(server.endpoint.address)
        dropped = server.dropped
        for _ in range(200):
            greedy.send(request)
            still_serves(raw, server)
        assert server.dropped > dropped


def test_wildcard_addresses_and_taken_ports_are_refused(server):
    arena = np.zeros(16, dtype=np.uint8)
    with pytest.raises(ConfigError):
        make_server("zmq", "x:1", arena, host="0.0.0.0")
    with pytest.raises(ConfigError):
        make_server("zmq", "x:1", arena, port=int(server.endpoint.address.rpartition(":")[2]))


def test_close_is_idempotent():
    server = make_server("zmq", "x:1", np.zeros(16, dtype=np.uint8))
    server.close()
    server.close()


class TestDishonestOwner:
    """A ROUTER that answers whatever the test says."""

    @pytest.fixture
    def fake(self):
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger, router.rcvtimeo = 0, 10_000
            router.bind("tcp://127.0.0.1:*")
            endpoint = Endpoint.make("zmq", "fake:1", router.last_endpoint.decode(), 1000)
            region = np.zeros(1000, dtype=np.uint8)
            plane = make_plane("zmq", "reader:1", region)
            plane.connect(endpoint)
            yield router, plane, region
            plane.close()

    @staticmethod
    def answer(router, plane, *frames):
        """Starts a read of 100 bytes, answers it with ``frames`` (``NUMBER``: a good head) and returns it."""
        transfer = plane.read("fake:1", batch([0], [0], [100]))
        reader, message = router.recv_multipart()
        number = msgspec.msgpack.decode(message, type=ReadRequest).number
        good = msgspec.msgpack.encode(ReadReply(VERSION, number))
        router.send_multipart([reader, *(good if frame == "GOOD" else frame for frame in frames)])
        return transfer

    @pytest.mark.parametrize(
        "frames",
        [
            (b"noise",),
            (b"",),
            (msgspec.msgpack.encode(ReadReply(VERSION, 12345)), bytes(100)),
            ("GOOD",),
            ("GOOD", b"x" * 99),
            ("GOOD", b"x" * 101),
            ("GOOD", b"x" * 100, b"x"),
        ],
        ids=["noise", "empty", "unasked", "no data", "short", "long", "an extra frame"],
    )
    def test_answers_that_do_not_fit_fail_the_read_unwritten(self, fake, frames):
        router, plane, region = fake
        transfer = self.answer(router, plane, *frames)
        with pytest.raises(ProtocolError):
            wait(transfer)
        assert transfer.drained and not region.any()

    def test_a_reported_error_keeps_its_class(self, fake):
        router, plane, _ = fake
        plane_read = plane.read("fake:1", batch([0], [0], [100]))
        reader, message = router.recv_multipart()
        number = msgspec.msgpack.decode(message, type=ReadRequest).number
        router.send_multipart(
            [reader, msgspec.msgpack.encode(ReadReply(VERSION, number, "StaleEpoch", "gone"))]
        )
        with pytest.raises(StaleEpoch, match="gone"):
            wait(plane_read)

    def test_an_oversized_answer_costs_the_owner_the_connection(self, fake):
        router, plane, region = fake
        transfer = self.answer(router, plane, "GOOD", bytes(64 << 20))
        with pytest.raises(PeerLost):
            wait(transfer)
        assert not region.any()

    def test_an_answer_to_a_released_read_is_not_written(self, fake):
        router, plane, region = fake
        transfer = plane.read("fake:1", batch([0], [0], [100]))
        reader, message = router.recv_multipart()
        number = msgspec.msgpack.decode(message, type=ReadRequest).number
        transfer.release()
        assert transfer.drained
        router.send_multipart([reader, msgspec.msgpack.encode(ReadReply(VERSION, number)), b"x" * 100])
        second = self.answer(router, plane, "GOOD", b"y" * 100)
        wait(second)
        assert (region[:100] == ord("y")).all()
        with pytest.raises(TransportError):
            transfer.poll()
