"""Every failure that crosses a module boundary, as one tree.

    OasisError
    |-- ConfigError          an option or a model that Oasis refuses, at start
    |-- CapacityError        no room for it now (``retryable``) or ever
    |-- DuplicateRoom        the bootstrap room is already in use
    |-- RoomFailed           the prefill side gave the room up
    |-- LeaseExpired         records may have been reused
    `-- TransportError
        |-- DeadlineExceeded a wait of ours ended; the peer gave no error
        |-- PeerLost         the peer is gone
        |   |-- AccessDenied its key or ours is refused
        |   `-- Draining     it goes soon, and takes nothing new
        |-- StaleEpoch       the peer restarted since we met it
        |-- LayoutMismatch   the two sides describe KV differently; names the field
        |-- BoundsError      an address outside what was agreed
        |-- IntegrityError   bytes arrived, but not the bytes that were published
        `-- ProtocolError    a message that does not decode, or out of turn

Each names the request (room), the peer and the limit where there is one. ``code`` is what crosses the wire;
``from_wire`` rebuilds the class on the other side.
"""

from __future__ import annotations


class OasisError(Exception):
    """Base of all errors of this project.

    ``room``: bootstrap room of the request; ``peer``: who it is about; ``limit``: the bound that was hit, as text; ``retryable``:
    what it failed for passes, so the same request may succeed later or elsewhere.
    """

    retryable = False

    def __init__(self, message: str, *, room: int | None = None, peer: str | None = None, limit: str | None = None, retryable: bool = False):
        self.message, self.room, self.peer, self.limit = message, room, peer, limit
        if retryable:
            self.retryable = True
        super().__init__(message)

    @property
    def code(self) -> str:
        return type(self).__name__

    def __str__(self) -> str:
        about = [f"{k}={v}" for k, v in (("room", self.room), ("peer", self.peer), ("limit", self.limit)) if v is not None]
        return f"{self.message} [{', '.join(about)}]" if about else self.message


class ConfigError(OasisError):
    pass


class CapacityError(OasisError):
    pass


class DuplicateRoom(OasisError):
    pass


class RoomFailed(OasisError):
    pass


class LeaseExpired(OasisError):
    pass


class TransportError(OasisError):
    pass


class DeadlineExceeded(TransportError):
    pass


class PeerLost(TransportError):
    pass


class AccessDenied(PeerLost):
    pass


class Draining(PeerLost):
    """``limit`` says how long the peer lets what it holds end; whoever comes is better served elsewhere, or by its successor."""

    retryable = True


class StaleEpoch(TransportError):
    pass


class LayoutMismatch(TransportError):
    """``field`` differs: ``ours`` here, ``theirs`` at the peer."""

    def __init__(self, message: str, *, field: str = "", **about):
        super().__init__(message, **about)
        self.field = field


class BoundsError(TransportError):
    pass


class IntegrityError(TransportError):
    pass


class ProtocolError(TransportError):
    pass


def _subclasses(cls: type) -> dict[str, type]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found.update(_subclasses(sub))
    return found


_BY_CODE = _subclasses(OasisError)


def from_wire(code: str, message: str, *, retryable: bool = False, **about) -> OasisError:
    """The error a peer reported. An unknown code becomes ``ProtocolError``: a newer peer must not crash us."""
    return _BY_CODE.get(code, ProtocolError)(message, retryable=retryable, **about)
