"""Data plane inside one process: reads are copies, and every fault of a real plane can be called for by a test."""

from __future__ import annotations

from collections import deque

import numpy as np

from transport.dataplane import DataPlane, DataServer, Endpoint, ReadBatch, Transfer, check_batch
from transport.errors import ConfigError, IntegrityError, OasisError, PeerLost, ProtocolError, TransportError

_SERVERS: dict[str, LoopbackServer] = {}
"""What the network is for the other planes: the servers of this process, by name."""


class LoopbackFaults:
    """Orders for one server. Nothing happens by time or by chance.

    ``hold``: reads stay in flight until ``finish``. ``corrupt``: so many of the next reads land with one byte
    flipped. ``refuse``: so many of the next posts raise ``TransportError``. ``dead``: the peer is gone.
    """

    def __init__(self):
        self.hold = False
        self.corrupt = 0
        self.refuse = 0
        self.dead = False
        self._held: deque[LoopbackTransfer] = deque()

    @property
    def in_flight(self) -> int:
        """Reads that are held, those given up by their reader included."""
        return len(self._held)

    def finish(self, count: int | None = None) -> None:
        """Lands the oldest ``count`` held reads (None: all). One that was given up is written too, late, and drains."""
        for _ in range(len(self._held) if count is None else count):
            self._held.popleft().land()

    def fail(self, error: OasisError, count: int | None = None) -> None:
        """Fails the oldest ``count`` held reads (None: all) with ``error``; nothing is written."""
        for _ in range(len(self._held) if count is None else count):
            self._held.popleft().end(error)

    def drop_peer(self) -> None:
        """The owner dies: held reads fail, later ones are refused."""
        self.dead = True
        self.fail(PeerLost("the loopback peer was dropped"))

    def start(self, transfer: LoopbackTransfer) -> None:
        """Takes over a new read."""
        if self.hold:
            self._held.append(transfer)
        else:
            transfer.land()

    def forget(self, transfers: set[LoopbackTransfer], error: OasisError) -> None:
        """Ends the held reads of a reader that goes away; they will not be written."""
        for transfer in [t for t in self._held if t in transfers]:
            self._held.remove(transfer)
            transfer.end(error)

    def take(self, order: str) -> bool:
        """Uses up one of ``corrupt`` or ``refuse``."""
        left = getattr(self, order)
        setattr(self, order, max(0, left - 1))
        return left > 0


class LoopbackServer(DataServer):
    """Serves ``arena`` to the planes of this process. ``faults`` is where a test gives its orders."""

    def __init__(self, name: str, arena: np.ndarray, *, host: str = "", port: int = 0):
        if name in _SERVERS:
            raise ConfigError("a server of this name is running", limit=name)
        self.arena, self.faults = arena, LoopbackFaults()
        self.endpoint = Endpoint.make("loopback", name, "", arena.nbytes)
        _SERVERS[name] = self

    def close(self) -> None:
        if _SERVERS.get(self.endpoint.name) is self:
            del _SERVERS[self.endpoint.name]
            self.faults.drop_peer()


class LoopbackTransfer(Transfer):
    __slots__ = (
        "_abandoned",
        "_batch",
        "_corrupt",
        "_error",
        "_landed",
        "_on_end",
        "_region",
        "_server",
        "nbytes",
    )

    def __init__(self, server: LoopbackServer, region: np.ndarray, batch: ReadBatch, on_end):
        self.nbytes = batch.nbytes
        self._server, self._region, self._batch, self._on_end = server, region, batch, on_end
        self._corrupt = server.faults.take("corrupt")
        self._error: OasisError | None = None
        self._landed = self._abandoned = False

    def poll(self) -> bool:
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._abandoned:
            raise TransportError("the transfer was released before it ended", peer=self._server.endpoint.name)
        return self._landed

    @property
    def drained(self) -> bool:
        return self._batch is None

    def release(self) -> None:
        self._abandoned = self._abandoned or not self._landed

    def land(self) -> None:
        """Copies, whether or not somebody still waits for it: a plane cannot recall a read."""
        for remote, local, length in zip(*(side.tolist() for side in self._batch), strict=True):
            self._region[local : local + length] = self._server.arena[remote : remote + length]
        if self._corrupt:
            self._region[int(self._batch.local[0])] ^= 0xFF
        self._landed = not self._abandoned
        self._end()

    def end(self, error: OasisError) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._batch = None
        self._on_end(self)


class LoopbackPlane(DataPlane):
    kind = "loopback"

    def __init__(self, name: str, region: np.ndarray):
        self._region = region
        self._peers: dict[str, Endpoint] = {}
        self._in_flight: set[LoopbackTransfer] = set()

    def connect(self, endpoint: Endpoint) -> None:
        if endpoint.kind != self.kind:
            raise ProtocolError(f"an endpoint of kind {endpoint.kind!r}", peer=endpoint.name)
        endpoint.verify()
        server = self._server(endpoint.name)
        if server.endpoint != endpoint:
            raise IntegrityError("the endpoint is not the one that was served", peer=endpoint.name)
        self._peers[endpoint.name] = endpoint

    def disconnect(self, name: str) -> None:
        self._peers.pop(name, None)

    def read(self, name: str, batch: ReadBatch) -> Transfer:
        if name not in self._peers:
            raise PeerLost("not connected", peer=name)
        check_batch(batch, self._peers[name].size, self._region.nbytes, name)
        server = self._server(name)
        if server.faults.take("refuse"):
            raise TransportError("the loopback refused the post", peer=name)
        transfer = LoopbackTransfer(server, self._region, batch, self._in_flight.discard)
        self._in_flight.add(transfer)
        server.faults.start(transfer)
        return transfer

    def close(self) -> None:
        for server in list(_SERVERS.values()):
            server.faults.forget(self._in_flight, TransportError("the plane was closed"))
        self._peers.clear()

    def _server(self, name: str) -> LoopbackServer:
        server = _SERVERS.get(name)
        if server is None or server.faults.dead:
            raise PeerLost("no loopback server of this name", peer=name)
        return server
