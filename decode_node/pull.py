"""A request on its way into the KV pool and while it decodes: its states, its limits, what is known of it.

    RESOLVING --peer row--> AWAITING --manifest--> READY --destination--> PULLING --admitted--> DONE
         |                      |                    |                       |`--admitted--> SERVING --released--> DONE
         `----------------------`--------------------`-----------------------`------------------`--> FAILED (``error`` says why)

SERVING is admitted like DONE, but its lease lives on and more may be read for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from decode_node.tier_link import TierLink
from transport import messages as m
from transport.errors import LayoutMismatch, OasisError, ProtocolError
from transport.layout import KVLayout
from transport.records import HASH_BYTES, split_hashes

if TYPE_CHECKING:
    from decode_node.destination import Destination

RESOLVING, AWAITING, READY, PULLING = "resolving", "awaiting", "ready", "pulling"
SERVING, DONE, FAILED = "serving", "done", "failed"
PHASES = ("manifest", "records", "partial_page", "summaries", "pieces", "on_demand")
"""What bytes are counted as: whole records, the partial prompt page, indexes, the pieces of an admission, and those pulled
after it."""


class Event(Protocol):
    """Of CUDA, in effect."""

    def synchronize(self) -> None: ...


@dataclass
class PullLimits:
    """``await_seconds``: for the commit, from the request's arrival. ``begin_seconds``: of these, until its prompt has reached a prefill
    worker. ``read_seconds``: for one window to land. ``silence_seconds``: a tier that answers nothing for so long is taken for dead.
    ``hold_file``: for fault tests, no read starts while this file exists."""

    await_seconds: float = 300.0
    read_seconds: float = 30.0
    silence_seconds: float = 10.0
    begin_seconds: float = 60.0
    hold_file: str = ""


@dataclass(eq=False)
class Pull:
    """One request on one rank. Owner: its receiver; only the puller's thread writes ``state``.

    From READY on: ``records`` int64, ``generations`` and ``roots`` uint64 [pages of the prompt]; ``hashes`` of its whole
    pages, a chain that starts from the manifest's ``seed`` (empty: never shared); ``ranking`` int64 [pieces, k], for each
    (layer, KV head) the whole blocks its last tokens attend to most, best first (k may be 0).
    ``lock`` is held while anything happens at its destination, and by whoever cancels or releases it.
    """

    room: int
    source: str
    deadline: float
    rid: str = ""
    began: float = field(default_factory=time.monotonic)
    ready_at: float = 0.0
    fetched_at: float = 0.0
    admitted_at: float = 0.0
    """When it entered READY, PULLING and what follows; 0: not yet."""
    state: str = RESOLVING
    error: OasisError | None = None
    cancelled: bool = False
    released: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked: set[TierLink] = field(default_factory=set)
    """Where the room is awaited."""
    moves: int = 0
    doubt: OasisError | None = None
    """Why the first of those asked does not have it."""
    link: TierLink | None = None
    """To the tier that has it, from READY on."""
    manifest: m.Manifest | None = None
    lease_expires: float = 0.0
    records: np.ndarray | None = None
    generations: np.ndarray | None = None
    roots: np.ndarray | None = None
    hashes: list[bytes] = field(default_factory=list)
    ranking: np.ndarray | None = None
    destination: Destination | None = None
    write_row: Callable[[tuple[bytes, ...]], None] | None = None
    vacant: Event | None = None
    unfinished: int = 0
    """Jobs of its admission that are being read."""
    bytes_by_phase: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(PHASES, 0)))
    admitted_by_phase: dict[str, int] | None = None

    @property
    def wanted(self) -> bool:
        """Whether what is read for it still has a destination."""
        return self.state in (PULLING, SERVING) and not self.cancelled and not self.released

    def unpack(self, layout: KVLayout, fingerprint: str, rank: int) -> None:
        """Checks the manifest and takes its arrays over. Raises ``ProtocolError``, ``LayoutMismatch``, ``BoundsError``."""
        manifest, peer = self.manifest, self.link.peer
        if (manifest.epoch, manifest.room, manifest.rank) != (self.link.epoch, self.room, rank):
            raise ProtocolError("a manifest of another room", room=self.room, peer=peer)
        layout.require_equal(manifest.layout, peer=peer, room=self.room)
        if manifest.fingerprint != fingerprint:  # the tier's worker may have changed since it welcomed us
            raise LayoutMismatch(f"model differs: fingerprint {fingerprint[:12]} here, {manifest.fingerprint[:12]} in the manifest",
                                 field="fingerprint", peer=peer, room=self.room)
        whole, rest = divmod(manifest.prompt_tokens, layout.block_tokens)
        pages = whole + (rest > 0)
        self.records = m.unpack(manifest.records, "u4", count=pages).astype(np.int64)
        self.generations = m.unpack(manifest.generations, "u8", count=pages)
        self.roots = m.unpack(manifest.roots, "u8", count=pages)
        self.link.welcome.geometry.payload_offsets(self.records)
        self.hashes = split_hashes(manifest.hashes, room=self.room, peer=peer)
        if len(self.hashes) not in (0, whole) or (self.hashes and len(manifest.seed) != HASH_BYTES):
            raise ProtocolError("hashes that are not those of the prompt's whole pages", room=self.room, peer=peer, limit=f"{whole} pages")
        if len(set(self.hashes)) < len(self.hashes):
            raise ProtocolError("a page hash twice in one prompt", room=self.room, peer=peer)
        ranking = m.unpack(manifest.ranking, "u4", limit=layout.pieces * whole).astype(np.int64)
        if ranking.size % layout.pieces:
            raise ProtocolError("a ranking that does not cover every (layer, KV head)", room=self.room, peer=peer, limit=f"{layout.pieces} pieces")
        self.ranking = ranking.reshape(layout.pieces, -1)
        ordered = np.sort(self.ranking, axis=1)
        if (ordered >= whole).any() or (ordered[:, 1:] == ordered[:, :-1]).any():
            raise ProtocolError("a ranking names a block twice or one that is not there", room=self.room, peer=peer, limit=f"{whole} whole blocks")

    def admit(self) -> None:
        """All of its admission was read: what comes from now on is on demand. Under ``lock``."""
        self.admitted_by_phase, self.admitted_at = dict(self.bytes_by_phase), time.monotonic()
        self.state = SERVING if self.destination.keeps_lease else DONE

    def report(self, token_bytes: int) -> dict:
        """Its bytes, as ``/server_info`` shows them: until admission was complete, and until now."""
        lifetime = dict(self.bytes_by_phase)
        admitted = lifetime if self.admitted_by_phase is None else self.admitted_by_phase
        return {"room": self.room, "state": self.state, "prompt_tokens": self.manifest.prompt_tokens,
                "full_transfer_bytes": self.manifest.prompt_tokens * token_bytes,
                "admitted_bytes": sum(admitted.values()), "admitted_bytes_by_phase": dict(admitted),
                "lifetime_bytes": sum(lifetime.values()), "lifetime_bytes_by_phase": lifetime}
