"""What a tier keeps on others' behalf: their rooms, leases, waits and sessions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from transport import messages as m
from transport.errors import ProtocolError
from transport.layout import KVLayout

Key = tuple[int, int]
"""(bootstrap room, rank)"""


@dataclass
class TierLimits:
    """``lease_seconds``: a reader must renew within it, and a tier that publishes here must be heard of. ``grace_seconds``: how
    much longer a lease's records stay. ``room_seconds``: how long a committed room waits for its reader, and how long a
    failure is remembered."""

    lease_seconds: float = 30.0
    grace_seconds: float = 5.0
    room_seconds: float = 120.0


@dataclass(eq=False)
class Room:
    """``records`` int64 and ``fresh`` bool [pages of the prompt]: where each page is or is to be written; -1: not in this arena."""

    key: Key
    session: object
    records: np.ndarray
    fresh: np.ndarray
    seed: bytes
    hashes: bytes
    manifest: m.Manifest | None = None
    expires: float = float("inf")
    cancelled: bool = False

    @property
    def held(self) -> np.ndarray:
        """The records it is a holder of."""
        return self.records[self.records >= 0]


@dataclass
class Lease:
    """``session``: whose it is, who alone renews and ends it. ``key``: of the room it came from; None: pages held by hash."""

    session: object
    key: Key | None
    records: np.ndarray
    expires: float


@dataclass
class Waiter:
    """``begin_by``: when the prompt must have reached a worker; infinite once it has."""

    session: object
    seq: int
    deadline: float
    begin_by: float = float("inf")

    @property
    def due(self) -> float:
        return min(self.deadline, self.begin_by)


@dataclass
class Session:
    """``role`` and ``control`` as in ``Hello``. ``prompts``: those that have reached it, whether or not there was room for them yet;
    ``rooms``: of those, the ones that are open or committed."""

    role: str
    node: str
    seen: float
    control: str = ""
    rooms: set[Key] = field(default_factory=set)
    prompts: set[Key] = field(default_factory=set)


def check_commit(room: Room, request: m.Commit | m.Fill, layout: KVLayout) -> np.ndarray:
    """The roots, uint64 [pages], of a commit of this room. Raises ``ProtocolError``."""
    roots = m.unpack(request.roots, "u8", count=len(room.records))
    pages = -(-request.prompt_tokens // layout.block_tokens)
    if pages != len(room.records) or tuple(map(len, request.metadata)) != layout.metadata_lens:
        raise ProtocolError("the commit does not match what was opened", room=request.room, limit=f"{len(room.records)} pages")
    # Which blocks it names is the reader's to check: the tier only bounds what it keeps.
    ranked, rest = divmod(len(request.ranking), 4 * layout.pieces)
    whole = request.prompt_tokens // layout.block_tokens
    if rest or ranked > whole:
        raise ProtocolError(f"a ranking of {len(request.ranking)} bytes does not fit the prompt", room=request.room,
                            limit=f"{layout.pieces} pieces, {whole} whole blocks")
    return roots
