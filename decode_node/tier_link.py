"""A decode rank's conversation with one tier: a ZeroMQ DEALER driven by the puller's loop, never blocking.

A link is one incarnation on both sides. When the tier restarts (``StaleEpoch``) or stops answering, the link ends: all
that waits on it gets the error, and the next request makes a new link, which says Hello again.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from transport import messages as m
from transport.errors import AccessDenied, DeadlineExceeded, OasisError, PeerLost, ProtocolError, StaleEpoch
from transport.layout import KVLayout
from transport.security import BROKEN_OFF, REFUSED, Security, refusal, split_key

Callback = Callable[["m.Reply | OasisError"], None]


class TierLink:
    """Owner: the puller, on its thread. ``on_ready(link)`` is called once the tier welcomed us.

    ``hello``: fields of ``Hello``. ``silence`` seconds without any answer end the link while something is due. ``security``: what the
    tier, and the data planes that it names, are held to. Raises ``AccessDenied``, ``PeerLost``, ``ProtocolError``.
    """

    def __init__(self, context: zmq.Context, address: str, *, node: str, rank: int, layout: KVLayout, fingerprint: str,
                 silence: float, now: float, on_ready: Callable[[TierLink], None], security: Security | None = None):
        self.address, self.peer, self.security = address, f"tier {split_key(address)[0]}", security or Security()
        self.rank, self.layout, self.silence = rank, layout, silence
        self.welcome: m.Welcome | None = None
        self.error: OasisError | None = None
        self.on_ready = on_ready
        self._hello = dict(protocol=m.PROTOCOL, role="reader", node=node, rank=rank, layout=layout, fingerprint=fingerprint)
        self._seq = itertools.count(1)
        self._pending: dict[int, tuple[Callback, float]] = {}
        self._queued: list[tuple[type, dict, Callback, float]] = []
        self._hello_at = now
        self._give_up_at = now + silence
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.IDENTITY, b"\x01" + uuid.uuid4().bytes)
        self.socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self.socket.get_monitor_socket(REFUSED | (BROKEN_OFF if self.security.keys else 0))
        try:
            self.socket.connect(self.security.dial(self.socket, address, self.peer))
        except zmq.ZMQError as error:
            self._close()
            raise PeerLost(f"the tier's address cannot be used: {error.strerror}", peer=self.peer) from error
        except OasisError:
            self._close()
            raise
        self._say_hello()

    @property
    def epoch(self) -> str:
        return self.welcome.epoch if self.welcome else ""

    def request(self, make: type, fields: dict, callback: Callback, *, deadline: float) -> None:
        """Sends once the link is ready; ``callback`` gets the reply or the error, exactly once."""
        if self.error is not None:
            callback(self.error)
        elif self.welcome is None:
            self._queued.append((make, fields, callback, deadline))
        else:
            self._send(make, fields, callback, deadline)

    def _send(self, make, fields, callback, deadline) -> None:
        seq = next(self._seq)
        if "epoch" in make.__struct_fields__:
            fields = {**fields, "epoch": self.epoch}
        self._pending[seq] = (callback, deadline)
        try:
            self.socket.send(m.encode(make(seq=seq, **fields)), zmq.NOBLOCK)
        except zmq.Again:
            self.fail(PeerLost("the tier takes no messages", peer=self.peer))

    def _say_hello(self) -> None:
        self._send(m.Hello, self._hello, self._welcomed, self._give_up_at)

    def _welcomed(self, reply) -> None:
        if isinstance(reply, OasisError):
            if not reply.retryable:
                self.fail(reply)
            return  # no worker there yet: said again by ``process``
        if not self._accept(reply):
            return
        self.on_ready(self)
        queued, self._queued = self._queued, []
        for make, fields, callback, deadline in queued:
            if self.error is None:
                self._send(make, fields, callback, deadline)
            else:
                callback(self.error)

    def refresh(self, callback: Callback, now: float) -> None:
        """Asks the tier for its present ``welcome``: its data planes may have come back under other endpoints."""

        def answered(reply: m.Reply | OasisError) -> None:
            callback(reply if isinstance(reply, OasisError) or self._accept(reply) else self.error)

        if self.error is not None:
            callback(self.error)
        else:
            self._send(m.Hello, self._hello, answered, now + self.silence)

    def _accept(self, reply: m.Reply) -> bool:
        """Takes a welcome over; one that is unsound, or of another tier, ends the link."""
        try:
            if not isinstance(reply, m.Welcome):
                raise ProtocolError("the tier did not say welcome", peer=self.peer)
            if self.welcome is not None and reply.epoch != self.epoch:
                raise StaleEpoch("the tier restarted", peer=self.peer)
            for endpoint in reply.endpoints:
                endpoint.verify()
                if endpoint.kind == "zmq":
                    self.security.require(endpoint.address, self.peer)
                reply.geometry.require_sound(self.layout, endpoint.size, peer=self.peer)
        except OasisError as error:
            self.fail(error)
            return False
        self.welcome = reply
        return True

    def process(self, now: float) -> None:
        """Reads what has come, ends what is overdue."""
        while self.error is None:
            try:
                raw = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                reply = m.decode_reply(raw, peer=self.peer)
            except ProtocolError as error:
                self.fail(error)
                return
            callback, _ = self._pending.pop(reply.seq, (None, 0))
            if callback is None:
                continue
            try:
                answer = m.raise_failure(reply, peer=self.peer)
            except OasisError as error:
                answer = error
            callback(answer)
            if isinstance(answer, StaleEpoch):
                self.fail(answer)
        self._look_at_handshakes()
        if self.error is not None:
            return
        for _, deadline in list(self._pending.values()):
            if now >= deadline:
                # Whoever does not answer in time is taken for dead: stopped and partitioned peers give no error.
                self.fail(DeadlineExceeded("the tier does not answer", peer=self.peer, limit=f"{self.silence} s"))
                return
        if self.welcome is None and now >= self._hello_at + 0.5 and not self._pending:
            self._hello_at = now
            if now >= self._give_up_at:
                self.fail(DeadlineExceeded("no prefill worker is attached to the tier", peer=self.peer, limit=f"{self.silence} s"))
            else:
                self._say_hello()

    def _look_at_handshakes(self) -> None:
        if self.error is None and not self.security.trusts(self.address):
            self.fail(AccessDenied("the tier's key is not on this node's allow list any more", peer=self.peer))
        if self.error is None:
            with suppress(zmq.Again):
                self.fail(AccessDenied(refusal(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]), peer=self.peer))

    def _close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close()

    def fail(self, error: OasisError) -> None:
        """Ends the link; everything that waits on it learns why. Idempotent."""
        if self.error is not None:
            return
        self.error = error
        self._close()
        pending, self._pending = self._pending, {}
        queued, self._queued = self._queued, []
        for callback, _ in pending.values():
            if callback != self._welcomed:
                callback(error)
        for _, _, callback, _ in queued:
            callback(error)
