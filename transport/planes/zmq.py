"""Data plane over ZeroMQ: the reader asks, the owner answers with bytes of the arena.

The owner checks every range itself and exposes nothing but the arena, and a late answer is harmless, because the
reader decides whether to copy it. The price is one more copy on the reader's side. With keys (``security``) it is the one plane that is
encrypted, and the owner answers nobody who is not on its allow list.

Flow control is the reader's: a read is asked for in parts, and so many parts per peer are outstanding at once, shared
in turns by all reads of that peer. One part bounds what either side holds in memory for it and how long it can keep
others waiting. A reader that ignores this runs into the high-water mark of its own queue and loses answers.
"""

from __future__ import annotations

import threading
from collections import deque

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from transport.dataplane import DataPlane, DataServer, Endpoint, ReadBatch, Transfer, check_batch
from transport.errors import (
    AccessDenied,
    BoundsError,
    ConfigError,
    IntegrityError,
    OasisError,
    PeerLost,
    ProtocolError,
    StaleEpoch,
    TransportError,
    from_wire,
)
from transport.planes.ranges import coalesce, parts
from transport.security import BROKEN_OFF, REFUSED, Security, refusal

VERSION = 1
PART_BYTES = 4 << 20
PART_RANGES = 4096
PARTS_OUTSTANDING = 4
"""Per peer: 32 MiB of answers at most, since a part stays below twice ``PART_BYTES``."""

ZERO_COPY_BYTES = 64 << 10
"""A shorter range is gathered with its neighbours into one frame: a frame of its own would cost more than the copy."""

HEARTBEAT_MS, PEER_TIMEOUT_MS = 2_000, 10_000
"""A silent peer counts as lost after the timeout. Its host has failed or it was stopped; a busy one answers, because
ZeroMQ's own thread does."""

_U64 = np.dtype("<u8")


class ReadRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``remote`` and ``lengths`` are little-endian uint64 arrays of one length. ``name`` is the incarnation meant."""

    version: int
    name: str
    number: int
    remote: bytes
    lengths: bytes


class ReadReply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Head of an answer; frames follow whose bytes, end to end, are the ranges in the order asked. With ``error``
    (the code of an ``OasisError``) no frames follow."""

    version: int
    number: int
    error: str = ""
    message: str = ""


_decode_request = msgspec.msgpack.Decoder(ReadRequest).decode
_decode_reply = msgspec.msgpack.Decoder(ReadReply).decode
_encode = msgspec.msgpack.Encoder().encode


def _guard(socket: zmq.Socket, max_frame: int, queued: int) -> None:
    """Liveness and memory bounds of one socket; before bind or connect."""
    socket.linger = 0
    socket.maxmsgsize = max_frame
    socket.sndhwm = socket.rcvhwm = queued
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = PEER_TIMEOUT_MS
    socket.handshake_ivl = PEER_TIMEOUT_MS
    socket.connect_timeout = PEER_TIMEOUT_MS


class ZmqServer(DataServer):
    """Owns one thread, which alone touches the ROUTER. Counts are for observation and only ever grow.

    ``malformed``: messages that are no request. ``refused``: requests answered with an error. ``dropped``: answers
    whose reader left, or took more than its turn.
    """

    def __init__(
        self, name: str, arena: np.ndarray, *, host: str = "127.0.0.1", port: int = 0, security: Security | None = None
    ):
        if host in ("", "*", "0.0.0.0", "::"):
            raise ConfigError("the data plane listens on one address that its readers can reach", limit=host)
        self._arena = memoryview(arena).toreadonly()
        self.malformed = self.refused = self.dropped = 0
        self._context, self._security = zmq.Context(), security or Security()
        self._guard = self._security.guard(self._context)
        self._router = self._context.socket(zmq.ROUTER)
        self._security.serve(self._router)
        _guard(self._router, 2 * PART_RANGES * 2 * _U64.itemsize + 4096, 4 * PARTS_OUTSTANDING)
        self._router.router_mandatory = True
        self._router.ipv6 = ":" in host
        try:
            self._router.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._destroy()
            raise ConfigError(f"cannot listen: {error}", limit=f"{host}:{port}") from error
        address = self._security.told(self._router.last_endpoint.decode())
        self.endpoint = Endpoint.make("zmq", name, address, arena.nbytes)
        self._stop, stopped = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")
        stopped.connect("inproc://stop")
        self._thread = threading.Thread(
            target=self._serve, args=(stopped,), name="oasis-zmq-arena", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        if self._context.closed:
            return
        self._stop.send(b"")
        self._thread.join()
        self._destroy()

    def _destroy(self) -> None:
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger=0)

    def _serve(self, stopped: zmq.Socket) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(stopped, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if stopped in ready:
                break
            reader, *message = self._router.recv_multipart(copy=False)
            try:
                answer = self._answer(reader, [frame.bytes for frame in message])
            except (msgspec.DecodeError, ProtocolError):
                self.malformed += 1
                continue
            try:
                self._router.send_multipart([reader.bytes, *answer], zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self.dropped += 1
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.dropped += 1
        stopped.close()
        self._router.close()

    def _answer(self, reader: zmq.Frame, message: list[bytes]) -> list:
        if len(message) != 1:
            raise ProtocolError("a request is one frame")
        request = _decode_request(message[0])
        try:
            if not self._security.hears(reader):
                raise AccessDenied("your key is not on the allow list any more")
            remote, lengths = self._check(request)
        except OasisError as error:
            self.refused += 1
            return [_encode(ReadReply(VERSION, request.number, error.code, error.message))]
        return [_encode(ReadReply(VERSION, request.number)), *self._frames(remote.tolist(), lengths.tolist())]

    def _check(self, request: ReadRequest) -> tuple[np.ndarray, np.ndarray]:
        if request.version != VERSION:
            raise ProtocolError(f"this owner speaks version {VERSION}")
        if request.name != self.endpoint.name:
            raise StaleEpoch("another incarnation serves here now")
        size = len(request.remote)
        if (
            size != len(request.lengths)
            or size % _U64.itemsize
            or not 0 < size // _U64.itemsize <= 2 * PART_RANGES
        ):
            raise BoundsError(f"a request names 1 to {2 * PART_RANGES} ranges")
        remote, lengths = np.frombuffer(request.remote, _U64), np.frombuffer(request.lengths, _U64)
        arena = np.uint64(len(self._arena))
        if not lengths.all() or (lengths > arena).any() or (remote > arena - lengths).any():
            raise BoundsError("a range leaves the arena")
        # Each length is at most the arena's and there are few, so this sum cannot wrap.
        if int(lengths.sum(dtype=np.uint64)) >= 2 * PART_BYTES:
            raise BoundsError(f"a request is for less than {2 * PART_BYTES} bytes")
        return remote, lengths

    def _frames(self, offsets: list[int], lengths: list[int]) -> list:
        """The ranges in order, long ones as views of the arena."""
        arena, frames, short = self._arena, [], []
        for offset, length in zip(offsets, lengths, strict=True):
            if length < ZERO_COPY_BYTES:
                short.append(arena[offset : offset + length])
                continue
            if short:
                frames.append(b"".join(short))
                short = []
            frames.append(arena[offset : offset + length])
        return [*frames, b"".join(short)] if short else frames


class _Peer:
    """One connection. ``asked`` maps the number of an outstanding part to who wants it; ``turns`` holds the transfers
    with parts left to ask for. ``error`` once it is lost; ZeroMQ is told not to reconnect."""

    def __init__(self, context: zmq.Context, endpoint: Endpoint, security: Security):
        self.endpoint = endpoint
        self.asked: dict[int, tuple[ZmqTransfer, ReadBatch]] = {}
        self.turns: deque[ZmqTransfer] = deque()
        self.error: OasisError | None = None
        self._next = 0
        self.socket = context.socket(zmq.DEALER)
        _guard(self.socket, 2 * PART_BYTES, 4 * PARTS_OUTSTANDING)
        self.socket.reconnect_ivl = -1
        self.socket.ipv6 = "[" in endpoint.address
        gone = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | REFUSED | BROKEN_OFF
        self._monitor = self.socket.get_monitor_socket(gone)
        try:
            self.socket.connect(security.dial(self.socket, endpoint.address, endpoint.name))
        except OasisError as error:
            self.close(error)
            raise
        except zmq.ZMQError as error:
            self.close(PeerLost(f"cannot connect: {error}", peer=endpoint.name))
            raise self.error from error

    def pump(self, region: memoryview) -> None:
        """Takes in the answers that are there, up to two parts' bytes, and asks for more parts. Never blocks."""
        taken = 0
        while self.error is None and taken < 2 * PART_BYTES:
            try:
                head, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._look_for_loss()
                break
            taken += self._take(head, frames, region)
        while self.error is None and self.turns and len(self.asked) < PARTS_OUTSTANDING:
            transfer = self.turns.popleft()
            if transfer.ended:
                continue
            part = transfer.waiting.popleft()
            if not self._ask(part):
                transfer.waiting.appendleft(part)
                self.turns.appendleft(transfer)
                break
            self.asked[self._next] = (transfer, part)
            if transfer.waiting:
                self.turns.append(transfer)

    def close(self, error: OasisError) -> None:
        """Gives the connection up: its transfers fail with ``error`` unless they ended before."""
        if self.error is not None:
            return
        self.error = error
        for transfer in {*self.turns, *(transfer for transfer, _ in self.asked.values())}:
            transfer.fail(error)
        self.turns.clear()
        self.asked.clear()
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)

    def _ask(self, part: ReadBatch) -> bool:
        request = ReadRequest(
            VERSION,
            self.endpoint.name,
            self._next + 1,
            part.remote.astype(_U64, copy=False).tobytes(),
            part.lengths.astype(_U64, copy=False).tobytes(),
        )
        try:
            self.socket.send(_encode(request), zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._next += 1
        return True

    def _take(self, head: zmq.Frame, frames: list[zmq.Frame], region: memoryview) -> int:
        """Handles one answer; returns the bytes it brought."""
        name = self.endpoint.name
        try:
            reply = _decode_reply(head.buffer)
            transfer, part = self.asked.pop(reply.number)
        except (msgspec.DecodeError, KeyError):
            self.close(ProtocolError("an answer that does not decode, or to nothing asked", peer=name))
            return 0
        brought = sum(len(frame) for frame in frames)
        if transfer.ended:
            return brought
        if reply.error:
            error = from_wire(reply.error, reply.message, peer=name)
            # Only transport failures leave a data plane, whatever the owner calls its own.
            transfer.fail(
                error if isinstance(error, TransportError) else ProtocolError(str(error), peer=name)
            )
        elif reply.version != VERSION or brought != part.nbytes:
            transfer.fail(
                ProtocolError(
                    "an answer of the wrong version or length", peer=name, limit=f"{part.nbytes} bytes"
                )
            )
        else:
            _scatter([frame.buffer for frame in frames], part, region)
            transfer.landed(part.nbytes)
        return brought

    def _look_for_loss(self) -> None:
        try:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
        except zmq.Again:
            return
        if event & (REFUSED | BROKEN_OFF):
            self.close(AccessDenied(refusal(event), peer=self.endpoint.name))
        self.close(PeerLost(f"connection lost ({zmq.Event(event).name})", peer=self.endpoint.name))


def _scatter(frames: list[memoryview], part: ReadBatch, region: memoryview) -> None:
    """Writes the frames, end to end, to the local ranges of ``part``; their bytes are equally many."""
    feed = iter(frames)
    frame, at = next(feed), 0
    for local, length in zip(part.local.tolist(), part.lengths.tolist(), strict=True):
        while length:
            if at == len(frame):
                frame, at = next(feed), 0
            step = min(length, len(frame) - at)
            region[local : local + step] = frame[at : at + step]
            local, length, at = local + step, length - step, at + step


class ZmqTransfer(Transfer):
    """Written into only by ``_Peer.pump`` and only while not ``ended``, so it is drained as soon as it ended."""

    __slots__ = ("_abandoned", "_error", "_left", "_peer", "_plane", "nbytes", "waiting")

    def __init__(self, plane: ZmqPlane, peer: _Peer, batch: ReadBatch):
        self.nbytes = self._left = batch.nbytes
        self.waiting = deque(parts(coalesce(batch), PART_BYTES, PART_RANGES))
        self._plane, self._peer = plane, peer
        self._error: OasisError | None = None
        self._abandoned = False
        peer.turns.append(self)

    @property
    def ended(self) -> bool:
        return not self._left or self._abandoned or self._error is not None

    drained = ended

    def poll(self) -> bool:
        if not self.ended:
            self._plane.pump(self._peer)
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._abandoned:
            raise TransportError("the transfer was released before it ended", peer=self._peer.endpoint.name)
        return not self._left

    def release(self) -> None:
        if not self.ended:
            self._abandoned = True
            self.waiting.clear()

    def landed(self, nbytes: int) -> None:
        self._left -= nbytes

    def fail(self, error: OasisError) -> None:
        if not self.ended:
            self._error = error
            self.waiting.clear()


class ZmqPlane(DataPlane):
    """Reader: one DEALER per peer, driven by polling only."""

    kind = "zmq"

    def __init__(self, name: str, region: np.ndarray, *, security: Security | None = None):
        self._region = memoryview(region)
        self._context, self._security = zmq.Context(), security or Security()
        self._peers: dict[str, _Peer] = {}

    def connect(self, endpoint: Endpoint) -> None:
        """Returns before the connection stands; that it does not come about shows in the reads. Raises ``AccessDenied`` for a key that is
        not on our allow list."""
        if endpoint.kind != self.kind or not endpoint.address.startswith("tcp://"):
            raise ProtocolError(
                f"an endpoint of kind {endpoint.kind!r} at {endpoint.address!r}", peer=endpoint.name
            )
        endpoint.verify()
        if self._context.closed:
            raise TransportError("the plane was closed")
        peer = self._peers.get(endpoint.name)
        if peer is not None:
            if peer.endpoint != endpoint:
                raise IntegrityError(
                    "the name of an incarnation came back with another endpoint", peer=endpoint.name
                )
            if peer.error is None:
                return
        self._peers[endpoint.name] = _Peer(self._context, endpoint, self._security)

    def disconnect(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.close(PeerLost("disconnected by the reader", peer=name))

    def read(self, name: str, batch: ReadBatch) -> Transfer:
        peer = self._peers.get(name)
        if peer is None:
            raise PeerLost("not connected", peer=name)
        if peer.error is not None:
            raise PeerLost(f"connection lost: {peer.error.message}", peer=name)
        check_batch(batch, peer.endpoint.size, self._region.nbytes, name)
        transfer = ZmqTransfer(self, peer, batch)
        peer.pump(self._region)
        return transfer

    def close(self) -> None:
        for name in list(self._peers):
            self.disconnect(name)
        self._context.destroy(linger=0)

    def pump(self, peer: _Peer) -> None:
        peer.pump(self._region)
