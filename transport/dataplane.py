"""The data plane: how bytes move from the tier's arena into a reader's memory.

The interface is pull only. The owner (the tier) serves one arena of ``size`` bytes and never learns the readers'
addresses; a reader registers one long-lived local region and reads scattered ranges into it. Offsets are relative to
the arena and to the region: absolute addresses never leave the process that owns them, and every range is checked here
before a plane sees it, because NIXL checks bounds in the initiator only.

Rules every plane keeps (one conformance suite holds them to it):

* ``Transfer.poll`` never blocks. It returns True once all bytes have landed, False while in flight, and raises a typed
  error when the transfer failed. It keeps giving the same answer after that.
* ``Transfer.drained`` is True once the plane can no longer write into the local region on behalf of this transfer.
  A transfer that is given up on (deadline) may still write later: its destination stays unusable until drained.
* Nobody but the plane touches the destination ranges between ``read`` and ``drained``.
* An endpoint is one incarnation of a tier. After a restart the peer has a new endpoint; the old one only fails.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import NamedTuple

import msgspec
import numpy as np

from transport.errors import BoundsError, IntegrityError

MAX_DESCRIPTORS = 1 << 20
"""Descriptors in one batch at most; a peer may refuse more."""


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where and how one incarnation of an arena is served.

    ``name`` is node plus a random incarnation and is never reused. ``metadata`` is the plane's own blob (NIXL agent
    metadata; empty elsewhere) and ``digest`` its SHA-256: a damaged blob that reached NIXL would poison the peer's name.
    ``base`` is the arena's address in the owner's process (NIXL needs it; 0 elsewhere), ``size`` its bytes.
    """

    kind: str
    name: str
    address: str
    size: int
    base: int = 0
    metadata: bytes = b""
    digest: bytes = b""

    @classmethod
    def make(cls, kind: str, name: str, address: str, size: int, base: int = 0, metadata: bytes = b"") -> Endpoint:
        return cls(kind, name, address, size, base, metadata, hashlib.sha256(metadata).digest())

    def verify(self) -> None:
        """Raises ``IntegrityError`` when the blob is not the one that was made, ``BoundsError`` on an absurd size."""
        if hashlib.sha256(self.metadata).digest() != self.digest:
            raise IntegrityError("endpoint metadata does not match its digest", peer=self.name)
        if not 0 < self.size < 1 << 62 or not 0 <= self.base < 1 << 63 or self.base + self.size >= 1 << 63:
            raise BoundsError("endpoint describes an impossible arena", peer=self.name, limit=f"{self.base}+{self.size}")


class ReadBatch(NamedTuple):
    """Scattered ranges: ``remote`` arena offsets, ``local`` region offsets, ``lengths`` bytes; each uint64 [n]."""

    remote: np.ndarray
    local: np.ndarray
    lengths: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum(dtype=np.uint64))


def check_batch(batch: ReadBatch, remote_size: int, local_size: int, peer: str = "") -> int:
    """Bytes of the batch. Raises ``BoundsError`` unless every range lies inside both sides.

    Comparisons are arranged so that they cannot wrap: sizes are below 2**62 and ``length <= size`` is tested before
    ``offset <= size - length``. Local ranges must not overlap, since the order of arrival is not defined.
    """
    remote, local, lengths = batch
    if not (remote.dtype == local.dtype == lengths.dtype == np.uint64) or not (remote.shape == local.shape == lengths.shape):
        raise BoundsError("a read batch is three uint64 arrays of one length", peer=peer)
    if remote.ndim != 1 or not 0 < remote.size <= MAX_DESCRIPTORS:
        raise BoundsError("descriptors in a read batch", peer=peer, limit=f"1..{MAX_DESCRIPTORS}")
    if not lengths.all():
        raise BoundsError("a range of zero bytes", peer=peer)
    for side, offsets, size in (("remote", remote, remote_size), ("local", local, local_size)):
        if (lengths > size).any() or (offsets > size - lengths).any():
            raise BoundsError(f"a {side} range leaves its memory", peer=peer, limit=f"{size} bytes")
    order = np.argsort(local, kind="stable")
    ends = local[order] + lengths[order]
    if (ends[:-1] > local[order][1:]).any():
        raise BoundsError("local ranges overlap", peer=peer)
    return batch.nbytes


class Transfer(ABC):
    """One read in flight. Owner: whoever called ``read``; ends it by polling until ``drained`` and then ``release``."""

    __slots__ = ()
    nbytes: int

    @abstractmethod
    def poll(self) -> bool:
        """True when all bytes landed, False while in flight. Raises ``PeerLost``, ``StaleEpoch``, ``BoundsError`` or
        ``TransportError``; a failed transfer raises the same error on every poll."""

    @property
    @abstractmethod
    def drained(self) -> bool:
        """Whether the plane can no longer write for this transfer. May itself make progress (never blocks)."""

    @abstractmethod
    def release(self) -> None:
        """Frees the plane's handle. Idempotent. Before ``drained`` it only marks the transfer as abandoned; the
        destination is still not reusable until ``drained``."""


class DataServer(ABC):
    """The owner's side. Serves one arena for its whole life; registered memory is never unmapped, resized or
    deregistered while a peer may read: ending the process revokes it."""

    endpoint: Endpoint | None
    """The incarnation that serves now. Only a server that restarts by itself (``HostedServer``) has another one later,
    and none in between."""

    restarts = 0

    @abstractmethod
    def close(self) -> None:
        """Stops serving. Idempotent."""


class DataPlane(ABC):
    """The reader's side. One per process and thread: calls are not thread safe."""

    kind: str

    @abstractmethod
    def __init__(self, name: str, region: np.ndarray):
        """``name``: this reader's unique name. ``region``: uint8 [size] C-contiguous host memory to land in, registered
        once and kept alive by the plane."""

    @abstractmethod
    def connect(self, endpoint: Endpoint) -> None:
        """Makes ``endpoint`` readable; idempotent per incarnation. Verifies the endpoint first. Raises
        ``IntegrityError``, ``BoundsError``, ``PeerLost``."""

    @abstractmethod
    def disconnect(self, name: str) -> None:
        """Forgets a peer. Transfers in flight fail or drain. Idempotent."""

    @abstractmethod
    def read(self, name: str, batch: ReadBatch) -> Transfer:
        """Starts reading from a connected peer. Checks ``check_batch`` first; raises ``PeerLost`` if not connected."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent. After it no transfer writes into the region (or the process must end)."""


class MeteredPlane(DataPlane):
    """Counts what a plane was asked to read and what landed: an account independent of the planner's own counters.

    ``requested`` and ``landed`` are bytes per peer name; ``landed`` grows when a transfer first reports True.
    """

    def __init__(self, inner: DataPlane):
        self.inner, self.kind = inner, inner.kind
        self.requested: dict[str, int] = {}
        self.landed: dict[str, int] = {}
        self.descriptors = 0
        self.reads = 0

    def connect(self, endpoint: Endpoint) -> None:
        self.inner.connect(endpoint)

    def disconnect(self, name: str) -> None:
        self.inner.disconnect(name)

    def read(self, name: str, batch: ReadBatch) -> Transfer:
        transfer = self.inner.read(name, batch)
        self.requested[name] = self.requested.get(name, 0) + batch.nbytes
        self.descriptors += len(batch.lengths)
        self.reads += 1
        return _MeteredTransfer(transfer, self.landed, name)

    def close(self) -> None:
        self.inner.close()


class _MeteredTransfer(Transfer):
    __slots__ = ("inner", "landed", "name", "counted", "nbytes")

    def __init__(self, inner: Transfer, landed: dict[str, int], name: str):
        self.inner, self.landed, self.name, self.counted, self.nbytes = inner, landed, name, False, inner.nbytes

    def poll(self) -> bool:
        done = self.inner.poll()
        if done and not self.counted:
            self.counted = True
            self.landed[self.name] = self.landed.get(self.name, 0) + self.nbytes
        return done

    @property
    def drained(self) -> bool:
        return self.inner.drained

    def release(self) -> None:
        self.inner.release()
