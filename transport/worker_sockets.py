"""The tier's unix socket: one connection per prefill worker, whose end of file says that the worker is dead.

Frames are a 4-byte little-endian length, then one message. What a connection is sent has a queue of its own, so that answers of
different origin do not mix, and a worker that reads none holds up nobody but itself.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable

from transport import messages as m
from transport.errors import ConfigError, ProtocolError
from transport.messages import LENGTH
from transport.tier import Tier

log = logging.getLogger("oasis.tier")

MAX_ANSWERS = 1024
"""Waiting for one worker to read them. Its requests wait for room; other answers end the connection."""


def listen(path: str) -> socket.socket:
    """Binds ``path``, also over what a tier that was killed left there. Raises ``ConfigError``."""
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.bind(path)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            sock.close()
            raise ConfigError(f"--local {path}: {error.strerror}") from error
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(path) == 0:
                sock.close()
                raise ConfigError(f"--local {path}: another tier serves there") from error
        os.unlink(path)
        sock.bind(path)
    os.chmod(path, 0o600)
    sock.listen(64)
    return sock


class WorkerSockets:
    """Serves workers for ``tier`` on its event loop. ``spawn(coroutine)`` makes a task of it, ``settled()`` is called after each
    request; ``arena_fd`` is handed out with each welcome."""

    def __init__(self, tier: Tier, arena_fd: int, *, spawn: Callable, settled: Callable[[], None]):
        self.tier, self.arena_fd, self.spawn, self.settled = tier, arena_fd, spawn, settled
        self.connections: dict[object, _Connection] = {}

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors: those who are attached must not suffer
                log.warning("cannot accept a worker: %s", error)
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            self.spawn(self._serve(sock))

    def send(self, session: object, reply: m.Reply) -> None:
        """An answer that was not asked for just now. A worker that has left is told nothing."""
        connection = self.connections.get(session)
        if connection is not None:
            connection.offer(reply)

    def close(self) -> None:
        for connection in self.connections.values():
            connection.sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        session, loop = object(), asyncio.get_running_loop()
        connection = self.connections[session] = _Connection(sock, self.arena_fd)
        halves = [loop.create_task(self._requests(session, connection)), loop.create_task(connection.write())]
        try:
            await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for half in halves:
                half.cancel()
            ends = await asyncio.gather(*halves, return_exceptions=True)
            del self.connections[session]
            sock.close()
            self.tier.disconnect(session)
            self.settled()
        for end in ends:
            self.tier.totals["refused"] += isinstance(end, ProtocolError)
            if isinstance(end, (ProtocolError, OSError)):
                if not isinstance(end, ConnectionError):  # OSError: it sends Hello without end and reads no answer
                    log.warning("worker connection dropped: %s", end)
            elif isinstance(end, Exception) and not isinstance(end, EOFError):
                raise end

    async def _requests(self, session: object, connection: _Connection) -> None:
        while True:
            (length,) = LENGTH.unpack(await connection.read(LENGTH.size))
            if not 0 < length <= m.MAX_MESSAGE:
                raise ProtocolError("frame length out of bounds", limit=f"{m.MAX_MESSAGE} bytes")
            reply = self.tier.handle(session, m.decode_request(await connection.read(length)))
            if reply is not None:
                await connection.answers.put(reply)
            self.settled()


class _Connection:
    def __init__(self, sock: socket.socket, arena_fd: int):
        self.sock, self.arena_fd = sock, arena_fd
        self.answers: asyncio.Queue[m.Reply] = asyncio.Queue(MAX_ANSWERS)

    def offer(self, reply: m.Reply) -> None:
        try:
            self.answers.put_nowait(reply)
        except asyncio.QueueFull:
            self.sock.shutdown(socket.SHUT_RDWR)

    async def read(self, n: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < n:
            part = await loop.sock_recv(self.sock, min(n - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    async def write(self) -> None:
        while True:
            reply = await self.answers.get()
            raw = m.encode(reply)
            frame = LENGTH.pack(len(raw)) + raw
            if isinstance(reply, m.Welcome):
                frame = frame[socket.send_fds(self.sock, [frame], [self.arena_fd]) :]
            if frame:
                await asyncio.get_running_loop().sock_sendall(self.sock, frame)
