"""Data plane over NIXL (UCX backend). Reads need no code of ours on the owner's side.

What decides the shape of this module:

* An ended transfer is the only proof that nothing will be written any more. Releasing a handle in flight, or dropping
  the peer, stops nothing: over TCP the owner's answer still lands. So no handle is released and no peer is dropped
  before all its transfers ended; only destroying the whole agent cuts that short, which is what ``close`` does.
* NIXL's Python wrapper frees handles in finalizers and fixes the progress thread's delay at zero (a full core of
  spinning), so the bindings below it are used directly and every handle has one owner here.
* ``UCX_TLS`` and the other UCX variables are read from the environment when an agent is made.
* Over TCP UCX answers reads in software, and an owner whose reader vanishes while answers are being written may be
  aborted by UCX itself (``ucp_request.inl: Fatal: unexpected error: Endpoint timeout``): the error of a send on a broken
  connection is not handled there. So ``close`` first waits for what is in flight, and the tier serves from a child
  process whose loss it can afford (``host.HostedServer``). The ``zmq`` plane has no such weakness.
* On the CMA transport posting a read copies the bytes before it returns: at most ``PART_BYTES`` x2 for one call here.
"""

from __future__ import annotations

import os
import time
from collections import deque

import numpy as np
from nixl import _bindings as nixl

from transport.dataplane import DataPlane, DataServer, Endpoint, ReadBatch, Transfer, check_batch
from transport.errors import (
    BoundsError,
    ConfigError,
    IntegrityError,
    OasisError,
    PeerLost,
    ProtocolError,
    TransportError,
)
from transport.planes.ranges import coalesce, parts

PROGRESS_DELAY_US = 1000
"""How long the owner's progress thread sleeps when nothing arrives; traffic wakes it earlier."""

PART_BYTES = 64 << 20
PART_RANGES = 1 << 14
CLOSE_DRAIN_SECONDS = 1.0
"""How long ``close`` lets reads in flight end by themselves."""

PARTS_IN_FLIGHT = 2
"""A read is posted in parts, so that one that is given up stops early; two keep the wire busy."""

_FAILURES = tuple(e for e in vars(nixl).values() if isinstance(e, type) and issubclass(e, Exception))
_LOST = (
    nixl.nixlRemoteDisconnectError,
    nixl.nixlNotFoundError,
    nixl.nixlBackendError,
    nixl.nixlCancelledError,
)


def _make_agent(name: str, *, progress_thread: bool) -> tuple[nixl.nixlAgent, int]:
    """An agent with one UCX backend and no listener, and the backend's handle."""
    config = nixl.nixlAgentConfig()
    config.useProgThread = progress_thread
    config.pthrDelay = PROGRESS_DELAY_US
    config.useListenThread = False
    config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
    try:
        agent = nixl.nixlAgent(name, config)
        # Peer error handling is what turns a dead owner into an error; it also rules out UCX's shm transports.
        return agent, agent.createBackend("UCX", {"ucx_error_handling_mode": "peer", "num_workers": "1"})
    except _FAILURES as error:
        raise ConfigError(
            f"NIXL agent cannot start (UCX_TLS={os.environ.get('UCX_TLS', 'unset')}): {error}"
        ) from error


def _descriptors(offsets: np.ndarray, lengths: np.ndarray, base: int) -> nixl.nixlXferDList:
    rows = np.zeros((len(offsets), 3), dtype=np.uint64)
    rows[:, 0] = offsets + np.uint64(base)
    rows[:, 1] = lengths
    return nixl.nixlXferDList(nixl.DRAM_SEG, rows)


def _register(agent: nixl.nixlAgent, backend: int, memory: np.ndarray) -> None:
    try:
        agent.registerMem(
            nixl.nixlRegDList(nixl.DRAM_SEG, [(memory.ctypes.data, memory.nbytes, 0, "")]), [backend]
        )
    except _FAILURES as error:
        raise ConfigError(f"NIXL cannot register {memory.nbytes} bytes: {error}") from error


def _typed(error: Exception, peer: str) -> OasisError:
    cls = PeerLost if isinstance(error, _LOST) else TransportError
    return cls(f"{type(error).__name__}: {error}", peer=peer)


class NixlServer(DataServer):
    """Owns the agent and, through it, the registration, which lasts as long as the agent. Keeps ``arena`` alive."""

    def __init__(self, name: str, arena: np.ndarray, *, host: str = "", port: int = 0):
        self._arena = arena
        self._agent, backend = _make_agent(name, progress_thread=True)
        _register(self._agent, backend, arena)
        self.endpoint = Endpoint.make(
            "nixl", name, "", arena.nbytes, arena.ctypes.data, self._agent.getLocalMD()
        )

    def close(self) -> None:
        """Destroys the agent, which closes its connections. The arena was never deregistered while a peer could read,
        and may be unmapped once this has returned."""
        self._agent = None
        self._arena = None


class _Peer:
    """One loaded incarnation. Leaves NIXL only when ``transfers`` (those not drained) is empty."""

    __slots__ = ("endpoint", "forgotten", "lost", "transfers")

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self.transfers: set[NixlTransfer] = set()
        self.lost = False
        self.forgotten = False


class NixlTransfer(Transfer):
    """One read as parts: waiting, then posted (a NIXL handle), then ended. Owns its handles; frees each exactly once,
    after it ended."""

    __slots__ = ("_abandoned", "_error", "_landed", "_peer", "_plane", "_posted", "_waiting", "nbytes")

    def __init__(self, plane: NixlPlane, peer: _Peer, batch: ReadBatch):
        self.nbytes = batch.nbytes
        self._plane, self._peer = plane, peer
        self._waiting = deque(parts(coalesce(batch), PART_BYTES, PART_RANGES))
        self._posted: list[int] = []
        self._error: OasisError | None = None
        self._landed = self._abandoned = False
        peer.transfers.add(self)
        self._advance()

    def poll(self) -> bool:
        self._advance()
        if self._landed:
            return True
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._abandoned:
            raise TransportError("the transfer was released before it ended", peer=self._peer.endpoint.name)
        return False

    @property
    def drained(self) -> bool:
        self._advance()
        return not self._posted and not self._waiting

    def release(self) -> None:
        self._abandoned = True
        self._waiting.clear()
        self._advance()

    def _advance(self) -> None:
        """Collects the parts that ended and posts the next ones. Never blocks on a peer, never raises."""
        if self not in self._peer.transfers:
            return
        for handle in list(self._posted):
            if self._ended(self._plane.agent.getXferStatus, handle):
                self._posted.remove(handle)
        while self._waiting and len(self._posted) < PARTS_IN_FLIGHT:
            self._post(self._waiting.popleft())
        if not self._posted and not self._waiting:
            self._landed = self._error is None and not self._abandoned
            self._plane.settled(self._peer, self)

    def _post(self, part: ReadBatch) -> None:
        agent, endpoint = self._plane.agent, self._peer.endpoint
        local = _descriptors(part.local, part.lengths, self._plane.base)
        remote = _descriptors(part.remote, part.lengths, endpoint.base)
        try:
            handle = agent.createXferReq(nixl.NIXL_READ, local, remote, endpoint.name)
        except nixl.nixlNotFoundError as error:
            # Also what NIXL says of a range outside the owner's registration: the endpoint promised more than there is.
            if self._plane.knows(endpoint.name):
                unregistered = BoundsError("the owner has not registered this range", peer=endpoint.name)
                self._fail(unregistered, peer_lost=False)
            else:
                self._fail(error)
            return
        except _FAILURES as error:
            self._fail(error)
            return
        if not self._ended(agent.postXferReq, handle):
            self._posted.append(handle)

    def _ended(self, ask, handle: int) -> bool:
        """Asks NIXL about a handle; frees it if it ended, either way. A failure shows as a status or as an exception."""
        try:
            status = ask(handle)
        except _FAILURES as error:
            self._fail(error)
        else:
            if status == nixl.NIXL_IN_PROG:
                return False
            if status != nixl.NIXL_SUCCESS:
                self._fail(TransportError(f"NIXL reports {status.name}", peer=self._peer.endpoint.name))
        self._plane.free(handle)
        return True

    def _fail(self, error: Exception, *, peer_lost: bool = True) -> None:
        # UCX closes a connection as a whole on its first error, so the peer is unusable until it is loaded again.
        self._peer.lost |= peer_lost
        self._waiting.clear()
        if self._error is None:
            self._error = error if isinstance(error, OasisError) else _typed(error, self._peer.endpoint.name)

    def cut_off(self) -> None:
        """For ``NixlPlane.close``: gives the handles back; the agent's end is what stops the writes."""
        for handle in self._posted:
            self._plane.free(handle)
        self._posted.clear()
        self._waiting.clear()
        if self._error is None:
            self._error = TransportError("the plane was closed", peer=self._peer.endpoint.name)


class NixlPlane(DataPlane):
    """Reader: one agent without a progress thread (polling drives it), one registered region."""

    kind = "nixl"

    def __init__(self, name: str, region: np.ndarray):
        self._region = region
        self.base = region.ctypes.data
        self.agent, backend = _make_agent(name, progress_thread=False)
        _register(self.agent, backend, region)
        self._peers: dict[str, _Peer] = {}
        self.unfreed_handles = 0

    def connect(self, endpoint: Endpoint) -> None:
        if endpoint.kind != self.kind:
            raise ProtocolError(f"an endpoint of kind {endpoint.kind!r}", peer=endpoint.name)
        endpoint.verify()
        if self.agent is None:
            raise TransportError("the plane was closed")
        peer = self._peers.get(endpoint.name)
        if peer is not None:
            if peer.endpoint != endpoint:
                raise IntegrityError(
                    "the name of an incarnation came back with another endpoint", peer=endpoint.name
                )
            peer.forgotten = False
            if not peer.lost:
                return
            if peer.transfers:
                raise PeerLost("the lost connection still has transfers to drain", peer=endpoint.name)
            self._unload(peer)
        self._load(endpoint)

    def disconnect(self, name: str) -> None:
        """Transfers in flight go on and may be polled; the peer leaves NIXL when the last of them drained."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.forgotten = True
            self._unload_if_idle(peer)

    def read(self, name: str, batch: ReadBatch) -> Transfer:
        peer = self._peers.get(name)
        if peer is None or peer.forgotten or peer.lost:
            raise PeerLost(
                "not connected" if peer is None or peer.forgotten else "connection lost", peer=name
            )
        check_batch(batch, peer.endpoint.size, self._region.nbytes, name)
        return NixlTransfer(self, peer, batch)

    def close(self) -> None:
        """Waits up to ``CLOSE_DRAIN_SECONDS`` for reads in flight, then ends them by destroying the agent: measured, an
        answer that a stopped owner sends afterwards no longer lands."""
        in_flight = [transfer for peer in self._peers.values() for transfer in peer.transfers]
        for transfer in in_flight:
            transfer.release()
        deadline = time.monotonic() + CLOSE_DRAIN_SECONDS
        while time.monotonic() < deadline and sum(not transfer.drained for transfer in in_flight):
            time.sleep(0.001)
        for peer in self._peers.values():
            for transfer in peer.transfers:
                transfer.cut_off()
            peer.transfers.clear()
        self._peers.clear()
        self.agent = None
        self._region = None

    def settled(self, peer: _Peer, transfer: NixlTransfer) -> None:
        """A transfer of ``peer`` drained."""
        peer.transfers.discard(transfer)
        self._unload_if_idle(peer)

    def free(self, handle: int) -> None:
        """Gives an ended handle back. One that NIXL keeps is left to the agent's end and counted."""
        try:
            self.agent.releaseXferReq(handle)
        except _FAILURES:
            self.unfreed_handles += 1

    def knows(self, name: str) -> bool:
        try:
            return self.agent.checkRemoteMD(name, nixl.nixlXferDList(nixl.DRAM_SEG)) == nixl.NIXL_SUCCESS
        except _FAILURES:
            return False

    def _load(self, endpoint: Endpoint) -> None:
        # A blob under another name would replace that peer in NIXL, so the name is looked for before NIXL sees it.
        if endpoint.name.encode() not in endpoint.metadata:
            raise IntegrityError("endpoint metadata does not carry the endpoint's name", peer=endpoint.name)
        try:
            loaded = self.agent.loadRemoteMD(endpoint.metadata).decode(errors="replace")
        except nixl.nixlBackendError as error:
            raise PeerLost(f"unreachable: {error}", peer=endpoint.name) from error
        except _FAILURES as error:
            raise IntegrityError(
                f"NIXL refuses the endpoint metadata: {error}", peer=endpoint.name
            ) from error
        if loaded != endpoint.name:
            raise IntegrityError("endpoint metadata names another agent", peer=endpoint.name)
        self._peers[endpoint.name] = peer = _Peer(endpoint)
        try:
            self.agent.makeConnection(endpoint.name, [])
        except _FAILURES as error:
            self._unload(peer)
            raise _typed(error, endpoint.name) from error

    def _unload_if_idle(self, peer: _Peer) -> None:
        if peer.forgotten and not peer.transfers and self._peers.get(peer.endpoint.name) is peer:
            self._unload(peer)

    def _unload(self, peer: _Peer) -> None:
        del self._peers[peer.endpoint.name]
        try:
            self.agent.invalidateRemoteMD(peer.endpoint.name)
        except nixl.nixlNotFoundError:
            pass  # NIXL dropped it itself, as it does after some failures
