"""What a tier keeps on others' behalf: their rooms, leases, waits and sessions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from transport import messages as m

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
    session: object
    seq: int
    deadline: float


@dataclass
class Session:
    """``role`` and ``control`` as in ``Hello``."""

    role: str
    node: str
    seen: float
    control: str = ""
    rooms: set[Key] = field(default_factory=set)
