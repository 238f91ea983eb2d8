"""The tier as staging: what its workers commit is moved to a memory node, and readers are sent there.

    OPENING --reserved there and here--> OPEN --Commit--> FILLING --it has all of it--> a redirect, for ``room_seconds``
        |                 `--> FETCHING --^ |                `- failed: once more, with the data planes of then
        `-----------------------`-----------`----------------`--> dropped: told to the memory node, which gives up its part

Records here are taken for pages that the memory node lacks, and for those that are worth fetching back from it (``fetch``). Once the
room has moved they are cache, as in any tier; ``Lookup`` is answered from this cache alone. A node that cannot be reached is passed
over for the next of the room's order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from transport import messages as m
from transport.errors import CapacityError, DeadlineExceeded, DuplicateRoom, IntegrityError, OasisError, PeerLost, ProtocolError, RoomFailed, StaleEpoch
from transport.fetch import Fetches, WaitingRoom
from transport.memory_nodes import MemoryNodes, placement_key
from transport.moving import Ended, Order
from transport.records import HASH_BYTES, split_hashes
from transport.rooms import Key, check_commit
from transport.tier import Tier

OPENING, FETCHING, OPEN, FILLING = "opening", "fetching", "open", "filling"
ASK_SECONDS = 10.0
"""For a memory node to answer what takes it no time: after that it is taken for dead."""
FILL_SECONDS = 600.0
"""For a move. Its reads have deadlines of their own there."""
ATTEMPTS = 2
RETRY_SECONDS = 0.5
"""Before a move is tried again: a data plane that ended has been noticed and mostly started again by then."""
TICK_SECONDS = 0.1
"""How late a wait for pages may end at most."""
UNREACHABLE = (PeerLost, DeadlineExceeded, StaleEpoch)


class Upstream(Protocol):
    """The way to the memory nodes (``upstream.Links``)."""

    def ask(self, address: str, make: type, fields: dict, done: Callable[[m.Reply | OasisError], None], seconds: float) -> None:
        """``done`` gets the reply or the error, once and never within this call. Requests to one node arrive in order. When a
        connection ends, ``RelayTier.node_lost`` is called before what was asked over it fails."""

    def control(self, address: str) -> str:
        """Where readers reach the node: what it says of itself, or ``address``."""

    def welcome(self, address: str) -> m.Welcome | None:
        """What the node last said of its arena; None: it is not connected."""

    def refresh(self, address: str) -> None:
        """Asks for another ``welcome``, after this call."""

    def reset(self) -> None:
        """Ends all connections: another model is served now."""


@dataclass(eq=False, kw_only=True)
class Relayed(WaitingRoom):
    """``nodes``: the memory nodes still to be asked, in order; the first is the one that is asked or has it. ``seq``: of the
    worker's request that waits for an answer (0: none). ``roots`` uint64 [pages]: until the commit, of the pages that the memory node
    has. ``lost``: the connection on which it was opened there ended."""

    nodes: list[str]
    state: str = OPENING
    seq: int = 0
    roots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    commit: m.Commit | None = None
    failures: int = 0
    again_at: float = float("inf")
    lost: OasisError | None = None


@dataclass
class Redirect:
    """``reader``: the session that was sent there, None: nobody yet. Once one was the room's number may be used again."""

    address: str
    expires: float
    reader: object | None


class RelayTier(Tier):
    """A tier in front of ``nodes``. Answers of ``upstream`` come in through the callbacks given to it; ``orders`` are for the mover,
    ``moved`` takes its answers."""

    def __init__(self, *, nodes: MemoryNodes, upstream: Upstream, **about):
        super().__init__(**about)
        self.nodes, self.upstream = nodes, upstream
        self.redirects: dict[Key, Redirect] = {}
        self.orders: list[Order] = []
        self.fetches = Fetches(self, post=lambda order: self.orders.append(order), done=self._let_in, unreadable=upstream.refresh)

    def inventory(self) -> dict[str, int]:
        now, moves = super().inventory(), sum(room.state == FILLING for room in self.rooms.values())
        untold = sum(redirect.reader is None for redirect in self.redirects.values())
        return {**now, "held": now["held"] + self.fetches.held, "moves": moves, "fetches": len(self.fetches.live), "redirects": len(self.redirects),
                "untold": untold}

    def moved(self, ended: Ended) -> None:
        """The mover no longer writes to the records of a fetch."""
        self.fetches.ended(ended)

    def tick(self) -> float:
        pause, now = min(super().tick(), TICK_SECONDS), self.clock()
        for room in [room for room in self.rooms.values() if room.state == FETCHING and now >= room.fetch_until]:
            self.fetches.overdue(room)
        self.redirects = {key: r for key, r in self.redirects.items() if now < r.expires}
        waiting = [room for room in self.rooms.values() if room.again_at < float("inf")]
        for room in waiting:
            if room.lost is not None:
                self._moved(room, room.lost)
            elif now >= room.again_at + (0.0 if self.endpoints else ASK_SECONDS):
                self._fill(room)
        for address in self.nodes.due():
            self.upstream.ask(address, m.Renew, dict(leases=b""), lambda reply, address=address: self._probed(address, reply), ASK_SECONDS)
        return pause

    def _probed(self, address: str, reply: m.Reply | OasisError) -> None:
        if not isinstance(reply, UNREACHABLE):  # one that refuses us is up, and says why to whoever asks
            self.nodes.mark_up(address)

    def node_lost(self, address: str, error: OasisError) -> None:
        """What was reserved at this node over the connection that ended is void."""
        for room in list(self.rooms.values()):
            if room.state == FETCHING and room.nodes[0] == address:
                self._ask_next(room, error)
            elif room.state != OPENING and room.nodes[0] == address and room.lost is None:
                room.lost = error

    def _hello(self, session, hello: m.Hello) -> m.Reply:
        welcome = super()._hello(session, hello)
        return m.Welcome(**{f: getattr(welcome, f) for f in welcome.__struct_fields__}
                         | {"memory_nodes": tuple(map(self.upstream.control, self.nodes.addresses))})

    def _format(self, hello: m.Hello) -> None:
        before = (self.layout, self.fingerprint)
        super()._format(hello)
        if before[0] is not None and before != (self.layout, self.fingerprint):
            self.upstream.reset()

    def _in_use(self) -> bool:
        return super()._in_use() or bool(self.fetches.live)  # the mover may still write where another layout would have its records

    # -- worker -------------------------------------------------------------------------------------------------

    def _open(self, session, request: m.Open) -> None:
        hashes, key = self._check_open(session, request), (request.room, request.rank)
        if key in self.redirects and self.redirects[key].reader is None:
            raise DuplicateRoom("the bootstrap room is in use", room=request.room, peer=self.redirects[key].address)
        pages = len(hashes) + request.private
        order = self.nodes.order(placement_key(hashes, request.room, self.layout.block_tokens))
        room = Relayed(key, session, np.full(pages, -1, np.int64), np.zeros(pages, bool), request.seed, request.hashes, nodes=order,
                       seq=request.seq, wish=request.wish)
        self._add(room)
        self._ask_open(room)

    def _ask_open(self, room: Relayed) -> None:
        if not room.nodes:
            known = ", ".join(self.nodes.addresses) or f"{self.nodes.spec} names none"
            self._refuse(room, CapacityError("no memory node can be reached", retryable=True, room=room.key[0], limit=known))
            return
        private = len(room.records) - len(room.hashes) // HASH_BYTES
        fields = dict(room=room.key[0], rank=room.key[1], seed=room.seed, hashes=room.hashes, private=private)
        self.upstream.ask(room.nodes[0], m.Open, fields, lambda reply: self._reserved(room, reply), ASK_SECONDS)

    def _ask_next(self, room: Relayed, error: OasisError) -> None:
        """The node that was asked, or has opened it, is gone."""
        self.fetches.leave(room)
        self.table.unhold(room.held)
        room.records[:], room.fresh[:], room.kept, room.state = -1, False, room.kept[:0], OPENING
        node = room.nodes.pop(0)
        if not isinstance(error, StaleEpoch):  # then it lives, and is asked the next time
            self.nodes.mark_down(node)
        self._ask_open(room)

    def _reserved(self, room: Relayed, reply: m.Reply | OasisError) -> None:
        """A memory node has answered: take staging records for the pages that it lacks."""
        if self.rooms.get(room.key) is not room:
            return  # given up meanwhile, and told so
        if isinstance(reply, UNREACHABLE):
            self._ask_next(room, reply)
            return
        try:
            if isinstance(reply, OasisError):
                raise reply
            if not isinstance(reply, m.Opened):
                raise ProtocolError("not an answer to Open", room=room.key[0], peer=room.nodes[0])
            pages, hashes = len(room.records), split_hashes(room.hashes)
            wanted = m.unpack(reply.fresh, "u1", count=pages).astype(bool)
            room.roots = m.unpack(reply.roots, "u8", count=pages)
            private = pages - len(hashes)
            if not wanted[len(hashes) :].all():
                raise ProtocolError("it claims to have pages that have no hash", room=room.key[0], peer=room.nodes[0])
            records, fresh = self._reserve([h for h, w in zip(hashes, wanted.tolist()) if w], private)
        except OasisError as error:
            error.room = room.key[0]
            self._refuse(room, error, reserved=isinstance(reply, m.Opened))
            return
        room.records[wanted], room.fresh[wanted], room.state = records, fresh, FETCHING
        if not self.fetches.begin(room, room.nodes[0], self.upstream.welcome(room.nodes[0]), reply):
            self._let_in(room)

    def _reserve(self, hashes: list[bytes], private: int) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self.table.reserve(hashes, private)
        except CapacityError as error:
            if not error.retryable:
                raise
        for room in self.rooms.values():  # what is kept to save time must hold no prompt back
            self.fetches.let_go(room)
        return self.table.reserve(hashes, private)

    def _let_in(self, room: Relayed) -> None:
        room.state = OPEN
        self.totals["pages_there"] += int((room.records < 0).sum())
        self._answer(room, self._opened(room, room.seq, room.roots))

    def _refuse(self, room: Relayed, error: OasisError, *, reserved: bool = False) -> None:
        """The worker may ask again, so readers go on waiting."""
        cancelled = room.cancelled
        self._answer(room, m.failure(error, room.seq))
        if reserved:
            self._drop(room)
        else:
            super()._drop(room)
        if session := self.sessions.get(room.session):
            session.prompts.add(room.key)
        if cancelled:
            self.cancelled[room.key] = self.clock() + self.limits.room_seconds

    def _commit(self, session, request: m.Commit) -> m.Reply | None:
        room = self._own_room(session, request)
        if room.state != OPEN:
            raise ProtocolError("not an open room of this worker", room=request.room)
        if room.lost is not None:
            self._fail(room, PeerLost(f"its memory node was lost: {room.lost}", room=room.key[0], retryable=True))
            raise room.lost
        roots = check_commit(room, request, self.layout)
        self._seal(room, roots)
        if room.cancelled:
            self._drop(room)
            return m.Ok(seq=request.seq)
        room.state, room.seq, room.commit, room.roots = FILLING, request.seq, request, roots
        self._fill(room)
        return None

    def _fill(self, room: Relayed) -> None:
        room.again_at = float("inf")
        records, commit = room.own, room.commit
        fields = dict(room=commit.room, rank=commit.rank, prompt_tokens=commit.prompt_tokens, roots=commit.roots, ranking=commit.ranking,
                      metadata=commit.metadata, sources=m.pack(records, "u4"), generations=m.pack(self.table.generation[records], "u8"),
                      geometry=self.geometry, endpoints=self.endpoints)
        self.upstream.ask(room.nodes[0], m.Fill, fields, lambda reply: self._moved(room, reply), FILL_SECONDS)

    def _moved(self, room: Relayed, reply: m.Reply | OasisError) -> None:
        if self.rooms.get(room.key) is not room:
            if not isinstance(reply, OasisError):  # it crossed our Abort, which says nothing of a committed room
                self._tell(room, m.Cancel)
            return
        if isinstance(reply, OasisError):
            room.failures += 1
            if room.failures < ATTEMPTS and room.lost is None:
                self.totals["moves_retried"] += 1
                room.again_at = self.clock() + RETRY_SECONDS
                return
            self.totals["moves_failed"] += 1
            if isinstance(reply, IntegrityError):
                self.table.disown(room.own)  # or every prompt that begins so would fail until they are evicted
            self._answer(room, m.failure(reply, room.seq))
            self._fail(room, RoomFailed(f"its move to a memory node failed: {reply}", room=room.key[0]))
            return
        waiter = self.waiters.pop(room.key, None)
        control = self.upstream.control(room.nodes[0])
        self.redirects[room.key] = Redirect(room.nodes[0], self.clock() + self.limits.room_seconds, waiter and waiter.session)
        if waiter is not None:
            self.outbox.append((waiter.session, m.Moved(seq=waiter.seq, control=control)))
        self.totals["rooms_committed"] += 1
        self.totals["rooms_moved"] += 1
        self.totals["pages_moved"] += len(room.own)
        self.totals["bytes_moved"] += len(room.own) * (self.layout.payload_bytes + self.layout.index_bytes)
        self._answer(room, m.Ok(seq=room.seq))
        super()._drop(room)

    # -- reader -------------------------------------------------------------------------------------------------

    def _await(self, session, request: m.Await) -> m.Reply | None:
        redirect = self.redirects.get((request.room, request.rank))
        if redirect is None or (request.room, request.rank) in self.rooms:
            return super()._await(session, request)
        if redirect.reader is None:
            redirect.reader = session
        return m.Moved(seq=request.seq, control=self.upstream.control(redirect.address))

    def _cancel(self, session, request: m.Cancel) -> m.Reply:
        key = (request.room, request.rank)
        redirect = self.redirects.get(key)
        if redirect is not None and key not in self.rooms and redirect.reader not in (None, session):
            return m.Ok(seq=request.seq)  # another reader was sent there; this one was refused
        self.redirects.pop(key, None)
        if redirect is not None and key not in self.rooms:
            self.upstream.ask(redirect.address, m.Cancel, dict(room=key[0], rank=key[1]), _ignore, ASK_SECONDS)
            self.totals["rooms_cancelled"] += 1
            return m.Ok(seq=request.seq)
        reply, room = super()._cancel(session, request), self.rooms.get(key)
        if room is not None and room.cancelled and room.state == FILLING:
            self._answer(room, m.Ok(seq=room.seq))  # as for a room that was cancelled before its commit
            self._drop(room)
        return reply

    # -- ends ---------------------------------------------------------------------------------------------------

    def _orphan(self, room: Relayed, reason: str) -> None:
        """What was committed goes on moving: its bytes are here and whole."""
        if room.state != FILLING:
            super()._orphan(room, reason)

    def _drop(self, room: Relayed) -> None:
        self.fetches.leave(room)
        super()._drop(room)
        self._answer(room, m.failure(RoomFailed("the room was given up", room=room.key[0]), room.seq))
        if room.lost is None and room.nodes:
            self._tell(room, m.Abort, reason="its tier gave the room up")

    def _tell(self, room: Relayed, make: type, **more) -> None:
        self.upstream.ask(room.nodes[0], make, dict(room=room.key[0], rank=room.key[1], **more), _ignore, ASK_SECONDS)

    def _answer(self, room: Relayed, reply: m.Reply) -> None:
        if room.seq:
            self.outbox.append((room.session, reply))
            room.seq = 0


def _ignore(reply) -> None:
    """Whatever it says: there is nothing left to do."""
