"""A tier's connections to its memory nodes: one ZeroMQ DEALER each, on the tier's event loop.

As a reader's link, a connection is one incarnation on both sides. It ends when it breaks, when the node restarted, or lets
anything go unanswered; what was asked over it then fails, and the next request makes another, which says Hello and so voids the
first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from transport import messages as m
from transport.errors import AccessDenied, DeadlineExceeded, OasisError, PeerLost, ProtocolError, StaleEpoch
from transport.security import BROKEN_OFF, REFUSED, Security, refusal, split_key

log = logging.getLogger("oasis.upstream")

Done = Callable[["m.Reply | OasisError"], None]
HELLO_SECONDS = 5.0
PING_SECONDS = 2.0
"""Or three times per lease, if that is more often."""
SILENCE_SECONDS = 10.0
"""Without an answer to that, a node is taken for dead."""
_BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | REFUSED | BROKEN_OFF


class Links:
    """Owner of the sockets. ``hello()`` gives the fields of ``Hello`` that describe this tier now. ``lost(address, error)`` is called
    before what was asked over a connection fails, ``settled()`` after callbacks have run. Not thread safe; ``run`` is its task."""

    def __init__(self, context: zmq.asyncio.Context, hello: Callable[[], dict], *, lost: Callable[[str, OasisError], None],
                 settled: Callable[[], None], security: Security | None = None):
        self.context, self.hello, self.lost, self.settled = context, hello, lost, settled
        self.security = security or Security()
        self._links: dict[str, _Link] = {}

    def ask(self, address: str, make: type, fields: dict, done: Done, seconds: float) -> None:
        """Sends ``make(**fields)``; ``done`` gets the reply or the error, once and never within this call."""
        link = self._links.get(address)
        if link is None:
            try:
                link = self._links[address] = _Link(self, address)
            except OasisError as error:
                asyncio.get_running_loop().call_soon(lambda error=error: (done(error), self.settled()))
                return
        link.ask(make, fields, done, seconds)

    def control(self, address: str) -> str:
        """Where readers reach the node: what it says of itself, or ``address`` while it has said nothing."""
        link = self._links.get(address)
        return link.welcome.control if link is not None and link.welcome is not None else address

    def welcome(self, address: str) -> m.Welcome | None:
        """What the node last said of its arena; None: it is not connected."""
        link = self._links.get(address)
        return link.welcome if link is not None else None

    def refresh(self, address: str) -> None:
        """Asks for another ``welcome``, after this call: a data plane that ended comes back under another endpoint."""
        asyncio.get_running_loop().call_soon(self._refresh, address)

    def _refresh(self, address: str) -> None:
        if self.welcome(address) is not None:
            self._links[address].introduce()

    def connected(self, address: str) -> bool:
        return address in self._links and self._links[address].welcome is not None

    def reset(self) -> None:
        """Another model is served now: the next requests introduce it."""
        for link in list(self._links.values()):
            link.end(PeerLost("the tier serves another model now", peer=link.peer))

    async def run(self) -> None:
        """Pings, and ends connections on which something is overdue."""
        while True:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            for link in list(self._links.values()):
                link.tick(now)

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()
        self._links.clear()

    def forget(self, link: _Link, error: OasisError) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]
        self.lost(link.address, error)


class _Link:
    def __init__(self, links: Links, address: str):
        self.links, self.address, self.peer = links, address, f"memory node {split_key(address)[0]}"
        self.welcome: m.Welcome | None = None
        self._seq = itertools.count(1)
        self._pending: dict[int, tuple[Done, float]] = {}
        self._queued: list[tuple[type, dict, Done, float]] = []
        self._ping_at = float("inf")
        self._ended = False
        self.socket = links.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.IDENTITY, b"\x01" + uuid.uuid4().bytes)
        self.socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)  # what was asked over it would be lost in silence
        self.socket.setsockopt(zmq.IPV6, "[" in address)
        self._monitor = self.socket.get_monitor_socket(_BROKEN)
        self._tasks: list[asyncio.Task] = []
        try:
            self.socket.connect(links.security.dial(self.socket, address, self.peer))
        except zmq.ZMQError as error:
            self.close()
            raise PeerLost(f"its address cannot be used: {error.strerror}", peer=self.peer) from error
        except OasisError:
            self.close()
            raise
        self._tasks = [asyncio.get_running_loop().create_task(work) for work in (self._receive(), self._watch())]
        self.introduce()

    def introduce(self) -> None:
        self._send(m.Hello, dict(protocol=m.PROTOCOL, role="tier", **self.links.hello()), self._welcomed, time.monotonic() + HELLO_SECONDS)

    def ask(self, make: type, fields: dict, done: Done, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        if self.welcome is None:
            self._queued.append((make, fields, done, deadline))
        else:
            self._send(make, fields, done, deadline)

    def tick(self, now: float) -> None:
        if any(now >= deadline for _, deadline in self._pending.values()):
            self.end(DeadlineExceeded("the memory node does not answer", peer=self.peer))
        elif not self.links.security.trusts(self.address):
            self.end(AccessDenied("its key is not on this node's allow list any more", peer=self.peer))
        elif now >= self._ping_at:
            self._ping_at = now + min(PING_SECONDS, self.welcome.lease_seconds / 3)
            # Unlike a Ping it is refused where we are not, or no longer, known.
            self._send(m.Renew, dict(leases=b""), _pong, now + SILENCE_SECONDS)

    def end(self, error: OasisError) -> None:
        """Everything that waits on it learns why. Idempotent."""
        if self._ended:
            return
        self.close()
        self.links.forget(self, error)
        waiting = [done for done, _ in self._pending.values()] + [done for _, _, done, _ in self._queued]
        self._pending.clear()
        self._queued.clear()

        def tell() -> None:
            for done in waiting:
                done(error)
            self.links.settled()

        asyncio.get_running_loop().call_soon(tell)

    def close(self) -> None:
        self._ended = True
        for task in self._tasks:
            task.cancel()
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close()

    def _send(self, make: type, fields: dict, done: Done, deadline: float) -> None:
        seq = next(self._seq)
        if "epoch" in make.__struct_fields__:
            fields = {**fields, "epoch": self.welcome.epoch}
        self._pending[seq] = (done, deadline)
        sent = self.socket.send(m.encode(make(seq=seq, **fields)), zmq.NOBLOCK)  # at once, or not at all
        if sent.done() and sent.exception() is not None:
            self.end(PeerLost("the memory node takes no messages", peer=self.peer))

    def _welcomed(self, reply: m.Reply | OasisError) -> None:
        if self._ended:
            return
        if not isinstance(reply, m.Welcome):
            self.end(reply if isinstance(reply, OasisError) else ProtocolError("the memory node did not say welcome", peer=self.peer))
            return
        self.welcome, self._ping_at = reply, time.monotonic()
        queued, self._queued = self._queued, []
        for make, fields, done, deadline in queued:
            self._send(make, fields, done, deadline)

    async def _watch(self) -> None:
        event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
        if event & (REFUSED | BROKEN_OFF):
            self.end(AccessDenied(refusal(event), peer=self.peer))
        self.end(PeerLost("cannot connect" if self.welcome is None else "connection lost", peer=self.peer))

    async def _receive(self) -> None:
        while not self._ended:
            try:
                reply = m.decode_reply(await self.socket.recv(), peer=self.peer)
            except ProtocolError as error:
                self.end(error)
                return
            done, deadline = self._pending.pop(reply.seq, (_pong, 0.0))
            try:
                answer: m.Reply | OasisError = m.raise_failure(reply, peer=self.peer)
            except StaleEpoch as error:  # it restarted, or has given us up
                self._pending[reply.seq] = done, deadline
                self.end(error)
                return
            except OasisError as error:
                answer = error
            try:
                done(answer)
            except Exception:  # a fault of ours ends what it was about, not the connection
                log.exception("an answer of %s", self.peer)
            self.links.settled()


def _pong(reply) -> None:
    """An answer that only shows that the node lives."""
