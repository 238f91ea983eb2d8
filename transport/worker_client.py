"""A prefill worker's connection to its node's tier: blocking, one thread, closes with the process.

The connection *is* the worker's life as the tier sees it: when it ends, rooms that were not committed fail and their
records are reclaimed.
"""

from __future__ import annotations

import itertools
import socket

from transport import messages as m
from transport.arena import Arena
from transport.errors import DeadlineExceeded, OasisError, PeerLost, ProtocolError
from transport.layout import KVLayout
from transport.messages import LENGTH


class WorkerClient:
    """Owner: the publisher thread. ``welcome`` and ``arena`` are set by ``attach``."""

    def __init__(self, path: str, *, timeout: float = 30.0):
        self.path, self.timeout = path, timeout
        self.peer = f"tier at {path}"
        self._seq = itertools.count(1)
        self._socket: socket.socket | None = None
        self.arena: Arena | None = None
        self.welcome: m.Welcome | None = None

    def attach(self, *, node: str, rank: int, layout: KVLayout, fingerprint: str) -> m.Welcome:
        """Connects, introduces this worker and maps the arena. Raises ``PeerLost``, ``LayoutMismatch``, ``BoundsError``."""
        self.close()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self.timeout)
        try:
            sock.connect(self.path)
        except OSError as error:
            sock.close()
            raise PeerLost(f"cannot reach the tier: {error.strerror or error}", peer=self.peer) from error
        self._socket = sock
        try:
            return self._introduce(node, rank, layout, fingerprint)
        except OasisError:
            self.close()  # half attached is not attached: ``alive`` must say so
            raise

    def _introduce(self, node: str, rank: int, layout: KVLayout, fingerprint: str) -> m.Welcome:
        hello = m.Hello(seq=next(self._seq), protocol=m.PROTOCOL, role="worker", node=node, rank=rank, layout=layout, fingerprint=fingerprint)
        self._send(hello)
        fds: list[int] = []
        welcome = m.raise_failure(self._receive(hello.seq, fds), peer=self.peer)
        if not isinstance(welcome, m.Welcome) or len(fds) != 1:
            raise ProtocolError("the tier handed out no arena", peer=self.peer)
        self.arena = Arena.attach(fds[0], welcome.geometry.size)
        welcome.geometry.require_sound(layout, self.arena.size, peer=self.peer)
        self.welcome = welcome
        return welcome

    def call(self, make, **fields) -> m.Reply:
        """Sends ``make(seq=..., **fields)`` and returns its reply; an error reply is raised as the error it carries."""
        request = make(seq=next(self._seq), **fields)
        self._send(request)
        return m.raise_failure(self._receive(request.seq), peer=self.peer)

    def alive(self) -> bool:
        """Whether the tier still holds the other end (never blocks)."""
        if self._socket is None:
            return False
        try:
            self._socket.setblocking(False)
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self._socket.settimeout(self.timeout)

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def _send(self, message: m.Message) -> None:
        if self._socket is None:
            raise PeerLost("not attached to a tier", peer=self.peer)
        raw = m.encode(message)
        try:
            self._socket.sendall(LENGTH.pack(len(raw)) + raw)
        except TimeoutError as error:
            raise DeadlineExceeded("the tier takes no request", peer=self.peer, limit=f"{self.timeout} s") from error
        except OSError as error:
            raise PeerLost(f"the tier is gone: {error.strerror or error}", peer=self.peer) from error

    def _receive(self, seq: int, fds: list[int] | None = None) -> m.Reply:
        (length,) = LENGTH.unpack(self._read(LENGTH.size, fds))
        if not 0 < length <= m.MAX_MESSAGE:
            raise ProtocolError("frame length out of bounds", peer=self.peer, limit=f"{m.MAX_MESSAGE} bytes")
        reply = m.decode_reply(self._read(length, fds), peer=self.peer)
        if reply.seq != seq:
            raise ProtocolError(f"reply {reply.seq} to request {seq}", peer=self.peer)
        return reply

    def _read(self, n: int, fds: list[int] | None) -> bytes:
        data = bytearray()
        try:
            while len(data) < n:
                if fds is None:
                    part = self._socket.recv(min(n - len(data), 1 << 20))
                else:
                    part, got, _, _ = socket.recv_fds(self._socket, n - len(data), 1)
                    fds += got
                if not part:
                    raise PeerLost("the tier closed the connection", peer=self.peer)
                data += part
        except TimeoutError as error:
            self.close()  # a reply that comes later would be taken for the next one's
            raise DeadlineExceeded("the tier does not answer", peer=self.peer, limit=f"{self.timeout} s") from error
        except ConnectionError as error:
            raise PeerLost("the tier is gone", peer=self.peer) from error
        return bytes(data)
