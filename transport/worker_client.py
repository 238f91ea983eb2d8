"""A prefill worker's connection to its node's tier: one thread, closes with the process. Short requests block (``call``), long
ones are answered later (``post``).

The connection *is* the worker's life as the tier sees it: when it ends, rooms that were not committed fail and their
records are reclaimed.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import time
from collections.abc import Callable

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
        self._buffer = bytearray()
        self._posted: dict[int, Callable[[m.Reply | OasisError], None]] = {}
        self._arrived: list[tuple[Callable[[m.Reply | OasisError], None], m.Reply]] = []
        self._heard_at, self._pinged = 0.0, False
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
        try:
            welcome = m.raise_failure(self._receive(hello.seq, fds), peer=self.peer)
            if not isinstance(welcome, m.Welcome) or len(fds) != 1:
                raise ProtocolError("the tier handed out no arena", peer=self.peer)
        except OasisError:
            for fd in fds:  # whatever came along is ours to close
                os.close(fd)
            raise
        self.arena = Arena.attach(fds[0], welcome.geometry.size)
        welcome.geometry.require_sound(layout, self.arena.size, peer=self.peer)
        self.welcome = welcome
        return welcome

    def call(self, make, **fields) -> m.Reply:
        """Sends ``make(seq=..., **fields)`` and returns its reply; an error reply is raised as the error it carries."""
        request = make(seq=next(self._seq), **fields)
        self._send(request)
        return m.raise_failure(self._receive(request.seq), peer=self.peer)

    def post(self, make, done: Callable[[m.Reply | OasisError], None], **fields) -> None:
        """Sends ``make(seq=..., **fields)``; ``process`` will call ``done`` with its reply, or the error that it carries, however
        long that takes. Forgotten when the connection ends."""
        request = make(seq=next(self._seq), **fields)
        self._send(request)
        if not self._posted:
            self._heard_at, self._pinged = time.monotonic(), False
        self._posted[request.seq] = done

    @property
    def outstanding(self) -> int:
        """Posted requests whose ``done`` has not been called."""
        return len(self._posted) + len(self._arrived)

    def process(self, seconds: float) -> None:
        """Hands out the replies that are there; waits at most ``seconds`` for one. A tier that is silent is asked whether it
        lives. Raises ``PeerLost``, ``DeadlineExceeded``, ``ProtocolError``: then the connection has ended."""
        if not self.outstanding:
            return
        try:
            self._sort_frames()
            if not self._arrived and self._readable(seconds):
                self._take(self._socket.recv(1 << 20))
                self._sort_frames()
        except OSError as error:
            self.close()
            raise PeerLost("the tier is gone", peer=self.peer) from error
        except OasisError:
            self.close()
            raise
        self._watch()
        arrived, self._arrived = self._arrived, []
        for done, reply in arrived:
            try:
                reply = m.raise_failure(reply, peer=self.peer)
            except OasisError as error:
                reply = error
            done(reply)

    def _readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _watch(self) -> None:
        silent = time.monotonic() - self._heard_at
        if silent >= self.timeout:
            self.close()
            raise DeadlineExceeded("the tier does not answer", peer=self.peer, limit=f"{self.timeout} s")
        if silent >= self.timeout / 2 and not self._pinged:
            self._pinged = True
            ping = m.Ping(seq=next(self._seq))
            self._posted[ping.seq] = _alive
            self._send(ping)

    def alive(self) -> bool:
        """Whether the tier still holds the other end (never blocks)."""
        if self._socket is None:
            return False
        try:
            return not self._readable(0) or self._socket.recv(1, socket.MSG_PEEK) != b""
        except OSError:
            return False

    def close(self) -> None:
        """Idempotent."""
        self._posted.clear()
        self._arrived.clear()
        self._buffer.clear()
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
        """The reply to ``seq``, which is waited for; what else comes meanwhile is kept for ``process``."""
        while True:
            while (raw := self._frame()) is None:
                self._wait(fds)
            reply = m.decode_reply(raw, peer=self.peer)
            if reply.seq == seq:
                return reply
            self._sort(reply)

    def _sort_frames(self) -> None:
        while raw := self._frame():
            self._sort(m.decode_reply(raw, peer=self.peer))

    def _sort(self, reply: m.Reply) -> None:
        if reply.seq not in self._posted:
            raise ProtocolError(f"reply {reply.seq} to no request of ours", peer=self.peer)
        self._arrived.append((self._posted.pop(reply.seq), reply))

    def _frame(self) -> bytes | None:
        """The next whole frame of what was read."""
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        if not 0 < length <= m.MAX_MESSAGE:
            raise ProtocolError("frame length out of bounds", peer=self.peer, limit=f"{m.MAX_MESSAGE} bytes")
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        raw = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return raw

    def _wait(self, fds: list[int] | None) -> None:
        """Reads what comes next, within ``timeout``."""
        try:
            if fds is None:
                self._take(self._socket.recv(1 << 20))
            else:
                part, got, _, _ = socket.recv_fds(self._socket, 1 << 20, 1)
                fds += got
                self._take(part)
        except TimeoutError as error:
            self.close()  # a reply that comes later would be taken for the next one's
            raise DeadlineExceeded("the tier does not answer", peer=self.peer, limit=f"{self.timeout} s") from error
        except ConnectionError as error:
            raise PeerLost("the tier is gone", peer=self.peer) from error

    def _take(self, part: bytes) -> None:
        if not part:
            raise PeerLost("the tier closed the connection", peer=self.peer)
        self._buffer += part
        self._heard_at, self._pinged = time.monotonic(), False


def _alive(reply) -> None:
    """An answer that only shows that the tier lives."""
