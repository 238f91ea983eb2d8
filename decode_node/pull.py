"""A request on its way into the KV pool: its states, its limits, what is known of it.

    RESOLVING --peer row--> AWAITING --manifest--> READY --destination--> PULLING --> DONE
         `------------------------`----------------`--------------------------`--> FAILED (``error`` says why)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from decode_node.tier_link import TierLink
from transport import messages as m
from transport.errors import OasisError

RESOLVING, AWAITING, READY, PULLING, DONE, FAILED = "resolving", "awaiting", "ready", "pulling", "done", "failed"
PHASES = ("records", "partial_page", "manifest")


class Event(Protocol):
    """Of CUDA, in effect."""

    def synchronize(self) -> None: ...


@dataclass
class PullLimits:
    """``await_seconds``: for the commit, from the request's arrival. ``read_seconds``: for one window to land.
    ``silence_seconds``: a tier that answers nothing for so long is taken for dead. ``hold_file``: for fault tests, no
    read starts while this file exists."""

    await_seconds: float = 300.0
    read_seconds: float = 30.0
    silence_seconds: float = 10.0
    hold_file: str = ""


@dataclass(eq=False)
class Pull:
    """One request on one rank. Owner: its receiver; only the puller's thread writes ``state`` (cancel aside)."""

    room: int
    source: str
    deadline: float
    rid: str = ""
    state: str = RESOLVING
    error: OasisError | None = None
    cancelled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    link: TierLink | None = None
    manifest: m.Manifest | None = None
    lease_expires: float = 0.0
    records: np.ndarray | None = None
    generations: np.ndarray | None = None
    roots: np.ndarray | None = None
    pages: np.ndarray | None = None
    write_row: Callable[[tuple[bytes, ...]], None] | None = None
    vacant: Event | None = None
    cursor: int = 0
    landed: int = 0
    attempts: int = 0
    lost_connections: set[int] = field(default_factory=set)
    retry: list[tuple[int, int]] = field(default_factory=list)
    bytes_by_phase: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))

    @property
    def wanted(self) -> bool:
        """Whether what is read for it still has a destination."""
        return self.state == PULLING and not self.cancelled

    def report(self, token_bytes: int) -> dict:
        """Its bytes, as ``/server_info`` shows them."""
        admitted = sum(self.bytes_by_phase.values())
        return {"room": self.room, "prompt_tokens": self.manifest.prompt_tokens,
                "full_transfer_bytes": self.manifest.prompt_tokens * token_bytes, "admitted_bytes": admitted,
                "admitted_bytes_by_phase": dict(self.bytes_by_phase), "lifetime_bytes": admitted, "state": self.state}
