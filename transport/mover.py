"""The process that moves records, as the tier sees it: started when there is something to move, watched, started again.

Why a process: see ``planes.host``. It is killed and waited for before its moves are called ended, so whatever it was doing,
nothing of it reaches the arena afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from transport import messages as m
from transport.errors import PeerLost
from transport.messages import LENGTH
from transport.mover_child import frames
from transport.moving import Drop, Ended, Move, Order, window_bytes
from transport.planes.host import MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS, STABLE_SECONDS, child_environment
from transport.security import Security

log = logging.getLogger("oasis.mover")


class Mover:
    """Owner of the child. Lives on the tier's event loop: ``run`` is its task, which ends only when it is cancelled.

    ``ended(Ended)``: each move that was posted, once, those that the child's end took along too. ``fd``: of the arena of
    ``size`` bytes, stays the caller's. ``restarts`` counts the children after the first.
    """

    def __init__(self, fd: int, size: int, node: str, ended: Callable[[Ended], None], security: Security | None = None):
        self.fd, self.size, self.node, self.security = fd, size, node, security or Security()
        self.restarts = 0
        self._ended = ended
        self._orders: asyncio.Queue[Order] = asyncio.Queue()
        self._running: set[int] = set()
        self._window = 0
        self._process: subprocess.Popen | None = None

    @property
    def pid(self) -> int | None:
        """Of the child; None while there is none."""
        return self._process.pid if self._process is not None else None

    def post(self, order: Order) -> None:
        if isinstance(order, Drop) and order.number not in self._running:
            return  # it has just ended
        if isinstance(order, Move):
            self._running.add(order.number)
            if self._process is not None and window_bytes(order.layout) != self._window:
                self._process.kill()  # another model: the next one's windows fit
        self._orders.put_nowait(order)

    async def run(self) -> None:
        pause = MIN_PAUSE_SECONDS
        while True:
            first, began = await self._orders.get(), time.monotonic()
            how = await self._one_life(first)
            lost, self._running = self._running, set()
            while not self._orders.empty():
                self._orders.get_nowait()
            for number in lost:
                self._ended(Ended(number, 0, m.failure(PeerLost(f"the process that moves records ended ({how})", peer=self.node), 0)))
            if time.monotonic() - began > STABLE_SECONDS:
                pause = MIN_PAUSE_SECONDS
            log.warning("mover ended (%s); another one in %.2f s", how, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
            self.restarts += 1

    async def _one_life(self, first: Move) -> str:
        """Starts a child and talks to it until its end. How it ended."""
        self._window = window_bytes(first.layout)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            # Standard output joins standard error: NIXL prints there, and the tier's own may be read by a program.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "transport.mover_child", self.node, *map(str, (self.fd, self.size, theirs.fileno(), self._window)),
                 *self.security.files, "plaintext" if self.security.allow_plaintext else ""],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=(self.fd, theirs.fileno()), env=child_environment())
        except OSError as error:
            ours.close()
            return f"it cannot start: {error}"
        finally:
            theirs.close()
        sender = asyncio.get_running_loop().create_task(self._send(ours, first))
        try:
            await self._receive(ours)
        finally:
            sender.cancel()
            self._process.kill()
            code = await asyncio.to_thread(self._process.wait)
            self._process = None
            ours.close()
        return f"status {code}"

    async def _send(self, link: socket.socket, first: Order) -> None:
        order, loop = first, asyncio.get_running_loop()
        try:
            while True:
                raw = msgspec.msgpack.encode(order)
                await loop.sock_sendall(link, LENGTH.pack(len(raw)) + raw)
                order = await self._orders.get()
        except OSError:
            pass  # its end shows where its answers are read

    async def _receive(self, link: socket.socket) -> None:
        buffer, loop, decoder = bytearray(), asyncio.get_running_loop(), msgspec.msgpack.Decoder(Ended)
        try:
            while part := await loop.sock_recv(link, 1 << 16):
                buffer += part
                for raw in frames(buffer):
                    ended = decoder.decode(raw)
                    if ended.number in self._running:
                        self._running.remove(ended.number)
                        self._ended(ended)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            log.warning("mover: %s", error)
