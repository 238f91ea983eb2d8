"""The tier as a memory node: other tiers open rooms here and have them filled from their own arenas.

    room of a tier:  Open -> open --Fill--> moving --all there--> committed, like a worker's
                               ^--- error ----'  `-- aborted, or its tier is lost: nobody's, until the mover lets go of its records

The records of such a room are written by this node's mover alone. So when its tier is lost they come back as soon as the mover
says that it has stopped, which unlike a remote writer it always does.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from transport import messages as m
from transport.errors import ProtocolError, RoomFailed, from_wire
from transport.moving import Drop, Ended, Move, Order, common_plane
from transport.rooms import Room, check_commit
from transport.tier import Tier


@dataclass(eq=False)
class Filling:
    """A move under way. ``dropped``: its room is gone, only its records are still to come back."""

    number: int
    room: Room
    request: m.Fill
    roots: np.ndarray
    dropped: bool = False


class MemoryTier(Tier):
    """A tier that also serves other tiers. ``orders`` are for the mover, ``moved`` takes its answers."""

    roles = (*Tier.roles, "tier")

    def __init__(self, **about):
        super().__init__(**about)
        self.orders: list[Order] = []
        self.fillings: dict[int, Filling] = {}
        self._numbers = itertools.count(1)
        self.serve(m.Fill, self._fill)

    def inventory(self) -> dict[str, int]:
        now = super().inventory()
        dropped = sum(len(f.room.held) for f in self.fillings.values() if f.dropped)
        tiers = sum(s.role == "tier" for s in self.sessions.values())
        return {**now, "held": now["held"] + dropped, "moves": len(self.fillings), "tiers": tiers}

    def _in_use(self) -> bool:
        return super()._in_use() or bool(self.fillings)  # a dropped move may still write where another layout would have its records

    def moved(self, ended: Ended) -> None:
        """The mover no longer writes to the records of this move."""
        filling = self.fillings.pop(ended.number)
        room, seq = filling.room, filling.request.seq
        self.totals["bytes_filled"] += ended.nbytes
        if filling.dropped:
            self.table.unhold(room.held)
        elif ended.error is None:
            self._filled(room, filling.request, filling.roots)
            self.outbox.append((room.session, m.Ok(seq=seq)))
        else:
            self.totals["fills_failed"] += 1
            about = ended.error
            error = from_wire(about.code, about.message, retryable=about.retryable, room=room.key[0], peer=about.peer, limit=about.limit)
            self.outbox.append((room.session, m.failure(error, seq)))

    def _hello(self, session, hello: m.Hello) -> m.Reply:
        welcome = super()._hello(session, hello)
        if hello.role == "tier":
            # Its earlier connection is void: what it had asked there it will ask again, or has given up.
            for other in [s for s, about in self.sessions.items() if about.role == "tier" and about.control == hello.control and s != session]:
                self.disconnect(other)
        return welcome

    def _fill(self, session, request: m.Fill) -> m.Reply | None:
        room = self._own_room(session, request)
        if self.sessions[session].role != "tier" or self._filling(room) is not None:
            raise ProtocolError("not a room to be filled", room=request.room)
        roots, fresh = check_commit(room, request, self.layout), np.flatnonzero(room.fresh)
        sources = m.unpack(request.sources, "u4", count=len(fresh))
        m.unpack(request.generations, "u8", count=len(fresh))
        if not len(fresh):
            self._filled(room, request, roots)
            return m.Ok(seq=request.seq)
        endpoint = common_plane(self.planes, request.endpoints, room=request.room)
        request.geometry.require_sound(self.layout, endpoint.size, peer=endpoint.name)
        request.geometry.payload_offsets(sources)
        number, targets = next(self._numbers), room.records[fresh]
        self.fillings[number] = Filling(number, room, request, roots)
        self.orders.append(Move(
            number=number, room=request.room, endpoint=endpoint, layout=self.layout, geometry=request.geometry,
            sources=request.sources, source_generations=request.generations, own_geometry=self.geometry,
            targets=m.pack(targets, "u4"), target_generations=m.pack(self.table.generation[targets], "u8"), roots=m.pack(roots[fresh], "u8")))
        return None

    def _filled(self, room: Room, request: m.Fill, roots: np.ndarray) -> None:
        self._seal(room, roots)
        self._publish(room, request)
        self.totals["rooms_filled"] += 1

    def _filling(self, room: Room) -> Filling | None:
        return next((f for f in self.fillings.values() if f.room is room), None)

    def _drop(self, room: Room) -> None:
        filling = self._filling(room)
        if filling is None:
            super()._drop(room)
            return
        filling.dropped = True
        self.orders.append(Drop(filling.number))
        self._forget(room)
        self.outbox.append((room.session, m.failure(RoomFailed("the room was given up while it was filled", room=room.key[0]), filling.request.seq)))
