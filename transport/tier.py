"""The tier's decisions: rooms, leases and records, without a socket in sight.

``Tier.handle`` takes one decoded request of one session and returns the reply, or None when the answer comes later
(a reader that waits for a room); late answers and answers to other sessions collect in ``outbox``. Time comes from an
injected monotonic clock: leases are the owner's promise and follow the owner's clock alone.

    room:   opened by a worker -> committed -> claimed by a reader (becomes a lease) -> released
                   `-> aborted, or its worker died: readers get RoomFailed, records are reclaimed
    lease:  alive until released or until ``expires + grace``; a reader must renew before ``expires``
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from transport import messages as m
from transport.dataplane import Endpoint
from transport.errors import CapacityError, DeadlineExceeded, DuplicateRoom, LayoutMismatch, OasisError, PeerLost, ProtocolError, RoomFailed, StaleEpoch
from transport.layout import ArenaGeometry, KVLayout
from transport.records import HASH_BYTES, RecordTable, split_hashes
from transport.rooms import Key, Lease, Room, Session, TierLimits, Waiter, check_commit
from transport.wiping import Wiper

log = logging.getLogger("oasis.tier")

MAX_WAIT_SECONDS = 3600.0
MAX_REMEMBERED = 100_000
"""Rooms remembered as unwanted before they were opened, and as many as failed before they were asked for."""


class Tier:
    """One arena, its records, and everyone's claims on them. Not thread safe: owned by one event loop.

    ``inventory()`` is what a baseline check reads: it scans, it does not count. ``endpoints`` may be replaced at any
    time, as data planes go and come back; ``planes`` are the kinds that should be among them. A ``wiper``, set before the first
    Hello, zeroes what is freed. What is kept for a prefill node elsewhere is ``MemoryTier``'s, what this one keeps elsewhere ``RelayTier``'s.
    """

    roles = ("worker", "reader")

    def __init__(self, *, epoch: str, arena_size: int, control: str, endpoints: tuple[Endpoint, ...],
                 planes: tuple[str, ...] = (), limits: TierLimits | None = None, clock: Callable[[], float] = time.monotonic):
        self.epoch, self.arena_size, self.control, self.endpoints = epoch, arena_size, control, endpoints
        self.planes = planes
        self.limits = limits or TierLimits()
        self.clock = clock
        self.layout: KVLayout | None = None
        self.fingerprint = ""
        self.geometry: ArenaGeometry | None = None
        self.table = RecordTable(0)
        self.wiper: Wiper | None = None
        self.sessions: dict[object, Session] = {}
        self.rooms: dict[Key, Room] = {}
        self.leases: dict[int, Lease] = {}
        self.leased_keys: dict[Key, int] = {}
        self.waiters: dict[Key, Waiter] = {}
        self.failed: dict[Key, tuple[OasisError, float]] = {}
        self.cancelled: dict[Key, float] = {}
        self.outbox: list[tuple[object, m.Reply]] = []
        self.totals: Counter[str] = Counter()
        self._handlers = {
            m.Hello: self._hello, m.Ping: self._ping, m.Open: self._open, m.Commit: self._commit, m.Abort: self._abort,
            m.Await: self._await, m.Renew: self._renew, m.Release: self._release, m.Cancel: self._cancel, m.Lookup: self._lookup,
        }

    # -- entry points -------------------------------------------------------------------------------------------

    def handle(self, session: object, request: m.Request) -> m.Reply | None:
        try:
            if not isinstance(request, (m.Hello, m.Ping)) and session not in self.sessions:
                raise StaleEpoch("say Hello first: this tier does not know you", peer=self.epoch)
            if getattr(request, "epoch", self.epoch) != self.epoch:
                raise StaleEpoch("the tier restarted", peer=self.epoch)
            if session in self.sessions:
                self.sessions[session].seen = self.clock()
            return self._handlers[type(request)](session, request)
        except OasisError as error:
            self.totals["refused"] += 1
            return m.failure(error, request.seq)
        except Exception as error:  # a fault of ours must not end the tier under everybody else
            log.exception("request failed: %s", type(request).__name__)
            self.totals["internal_errors"] += 1
            return m.failure(ProtocolError(f"internal error of the tier: {error!r}"), request.seq)

    def serve(self, kind: type, handler: Callable) -> None:
        """``handler(session, request)`` answers requests of one more ``kind``, as those below answer theirs."""
        self._handlers[kind] = handler

    def disconnect(self, session: object) -> None:
        """The session's process is gone. A worker's uncommitted rooms fail; committed ones live on."""
        gone = self.sessions.pop(session, None)
        if gone is None:
            return
        for key in list(gone.rooms):
            self._orphan(self.rooms[key], f"prefill {gone.role} {gone.node} died before the commit")
        for key in gone.prompts - gone.rooms:
            self._remember_failure(key, PeerLost(f"prefill {gone.role} {gone.node} died before there was room for it", room=key[0], retryable=True))
        for key in [k for k, w in self.waiters.items() if w.session == session]:
            del self.waiters[key]

    def tick(self) -> float:
        """Ends what has expired; returns seconds until the next expiry (at most 1)."""
        now = self.clock()
        for key, waiter in list(self.waiters.items()):
            if now >= waiter.due:
                del self.waiters[key]
                error = DeadlineExceeded("no prefill worker committed this room in time", room=key[0], peer=f"tier {self.epoch[:8]}")
                if now < waiter.deadline:
                    error = PeerLost("its prompt has not reached a prefill worker", room=key[0], peer=f"tier {self.epoch[:8]}", retryable=True)
                self.outbox.append((waiter.session, m.failure(error, waiter.seq)))
        for number, lease in list(self.leases.items()):
            if now >= lease.expires + self.limits.grace_seconds:
                self._end_lease(number)
                self.totals["leases_expired"] += 1
        for room in list(self.rooms.values()):
            if now >= room.expires:
                self._drop(room)
                self.totals["rooms_expired"] += 1
        # A live reader renews three times per lease, and may say Hello again; a tier pings as often.
        silence = {"reader": max(self.limits.room_seconds, self.limits.lease_seconds), "tier": self.limits.lease_seconds}
        for session, about in list(self.sessions.items()):
            if now >= about.seen + silence.get(about.role, float("inf")):
                self.disconnect(session)
        self.failed = {k: v for k, v in self.failed.items() if now < v[1]}
        self.cancelled = {k: t for k, t in self.cancelled.items() if now < t}
        dues = [w.due for w in self.waiters.values()] + [x.expires + self.limits.grace_seconds for x in self.leases.values()]
        more = self.wiper.step() if self.wiper is not None else 1.0
        return max(0.01, min([1.0, more] + [d - now for d in dues]))

    def inventory(self) -> dict[str, int]:
        """Everything held now, by scanning tables: records per state, rooms, leases, waiters, sessions."""
        held = sum(len(r.held) for r in self.rooms.values()) + sum(len(x.records) for x in self.leases.values())
        workers = sum(s.role == "worker" for s in self.sessions.values())
        return {**self.table.counts(), "records": self.table.size, "holders": int(self.table.holders.sum()), "held": held,
                "rooms": len(self.rooms), "leases": len(self.leases), "waiters": len(self.waiters), "workers": workers}

    # -- both ---------------------------------------------------------------------------------------------------

    def _ping(self, session, request) -> m.Reply:
        return m.Ok(seq=request.seq)

    def _hello(self, session, hello: m.Hello) -> m.Reply:
        if hello.protocol != m.PROTOCOL:
            raise LayoutMismatch(f"protocol {hello.protocol} at {hello.node}, {m.PROTOCOL} at the tier", field="protocol", peer=hello.node)
        if hello.role not in self.roles:
            raise ProtocolError(f"no role here: {hello.role!r}", peer=hello.node, limit=", ".join(self.roles))
        if hello.role != "reader":
            self._format(hello)
        if self.layout is None:
            raise CapacityError("no prefill worker has attached to this tier yet", retryable=True, peer=hello.node)
        self.layout.require_equal(hello.layout, peer=hello.node)
        if self.fingerprint != hello.fingerprint:
            raise LayoutMismatch(f"model differs: fingerprint {self.fingerprint[:12]} at the tier, {hello.fingerprint[:12]} at {hello.node}",
                                 field="fingerprint", peer=hello.node)
        self.sessions.setdefault(session, Session(hello.role, hello.node, self.clock(), hello.control))
        return m.Welcome(seq=hello.seq, epoch=self.epoch, control=self.control, geometry=self.geometry,
                         endpoints=self.endpoints, planes=self.planes, lease_seconds=self.limits.lease_seconds)

    def _format(self, hello: m.Hello) -> None:
        """The first writer's layout cuts the arena; another layout only once nobody holds anything of the old one."""
        if self.layout == hello.layout and self.fingerprint == hello.fingerprint:
            return
        if self.layout is not None and self._in_use():
            return  # _hello then names the field that differs
        geometry = ArenaGeometry.fit(hello.layout, self.arena_size)
        self.layout, self.fingerprint, self.geometry = hello.layout, hello.fingerprint, geometry
        self.table = RecordTable(geometry.num_records) if self.wiper is None else self.wiper.make_table(geometry)

    def _in_use(self) -> bool:
        return any(s.role != "reader" for s in self.sessions.values()) or bool(self.rooms or self.leases)

    # -- writer -------------------------------------------------------------------------------------------------

    def _open(self, session, request: m.Open) -> m.Reply | None:
        hashes = self._check_open(session, request)
        try:
            records, fresh = self.table.reserve(hashes, request.private)
        except CapacityError as error:
            error.room = request.room
            raise
        room = self._add(Room((request.room, request.rank), session, records, fresh, request.seed, request.hashes))
        return self._opened(room, request.seq, np.zeros(len(records), np.uint64))

    def _check_open(self, session, request: m.Open) -> list[bytes]:
        """The page hashes. Whoever waits for the room may wait on, also while there is none. Raises ``DuplicateRoom``, ``ProtocolError``."""
        key = (request.room, request.rank)
        if key in self.rooms or key in self.leased_keys:
            raise DuplicateRoom("the bootstrap room is in use", room=request.room)
        hashes = split_hashes(request.hashes, room=request.room)
        if not 0 <= request.private <= m.MAX_RECORDS or not 0 < len(hashes) + request.private <= m.MAX_RECORDS:
            raise ProtocolError("page list out of bounds", room=request.room, limit=f"1..{m.MAX_RECORDS} pages")
        if len(request.seed) not in ((HASH_BYTES,) if hashes else (0, HASH_BYTES)):
            raise ProtocolError("hashes without the seed of their chain", room=request.room, limit=f"{HASH_BYTES} bytes")
        if len(self.sessions[session].prompts) < MAX_REMEMBERED:
            self.sessions[session].prompts.add(key)
        if key in self.waiters:
            self.waiters[key].begin_by = float("inf")
        return hashes

    def _add(self, room: Room) -> Room:
        room.cancelled = self.cancelled.pop(room.key, None) is not None
        self.failed.pop(room.key, None)
        self.rooms[room.key] = room
        self.sessions[room.session].rooms.add(room.key)
        return room

    def _opened(self, room: Room, seq: int, elsewhere: np.ndarray) -> m.Opened:
        """``elsewhere`` uint64 [pages]: roots of the pages that are not in this arena."""
        here, at = room.records >= 0, room.records
        self.totals["rooms_opened"] += 1
        self.totals["pages_fresh"] += int(room.fresh.sum())
        self.totals["pages_reused"] += int((~room.fresh).sum())
        roots = np.where(room.fresh, 0, np.where(here, self.table.root[at], elsewhere))
        return m.Opened(seq=seq, records=m.pack(np.where(here, at, m.NOWHERE), "u4"), roots=m.pack(roots, "u8"),
                        generations=m.pack(np.where(here, self.table.generation[at], 0), "u8"), fresh=room.fresh.astype(np.uint8).tobytes())

    def _commit(self, session, request: m.Commit) -> m.Reply | None:
        room = self._own_room(session, request)
        self._seal(room, check_commit(room, request, self.layout))
        self._publish(room, request)
        return m.Ok(seq=request.seq)

    def _seal(self, room: Room, roots: np.ndarray) -> None:
        fresh, pages = np.flatnonzero(room.fresh), len(room.records)
        hashes = split_hashes(room.hashes) + [None] * (pages - len(room.hashes) // HASH_BYTES)
        self.table.seal(room.records[fresh], roots[fresh], [hashes[i] for i in fresh.tolist()], depths=fresh)

    def _publish(self, room: Room, request: m.Commit | m.Fill) -> None:
        room.manifest = m.Manifest(
            epoch=self.epoch, room=request.room, rank=request.rank, lease=0, lease_seconds=self.limits.lease_seconds,
            layout=self.layout, fingerprint=self.fingerprint, prompt_tokens=request.prompt_tokens,
            seed=room.seed, hashes=room.hashes, records=m.pack(room.records, "u4"), generations=m.pack(self.table.generation[room.records], "u8"),
            roots=m.pack(self.table.root[room.records], "u8"), ranking=request.ranking, metadata=request.metadata)
        room.expires = self.clock() + self.limits.room_seconds
        self.totals["rooms_committed"] += 1
        waiter = self.waiters.pop(room.key, None)
        if room.cancelled:
            self._drop(room)
        elif waiter is not None:
            self.outbox.append((waiter.session, self._claim(waiter.session, room, waiter.seq)))

    def _abort(self, session, request: m.Abort) -> m.Reply:
        room = self.rooms.get((request.room, request.rank))
        if room is not None and room.session == session and room.manifest is None:
            self._fail(room, _given_up(request))
        elif room is None:
            self.sessions[session].prompts.discard((request.room, request.rank))
            self._remember_failure((request.room, request.rank), _given_up(request))
        return m.Ok(seq=request.seq)

    def _own_room(self, session, request) -> Room:
        room = self.rooms.get((request.room, request.rank))
        if room is None or room.session != session or room.manifest is not None:
            raise ProtocolError("not an open room of this worker", room=request.room)
        return room

    # -- reader -------------------------------------------------------------------------------------------------

    def _await(self, session, request: m.Await) -> m.Reply | None:
        key = (request.room, request.rank)
        if key in self.leased_keys or key in self.waiters:
            raise DuplicateRoom("another reader holds or awaits this bootstrap room", room=request.room)
        room = self.rooms.get(key)
        if room is not None and room.manifest is not None:
            return self._claim(session, room, request.seq)
        if room is None and key in self.failed:
            error, _ = self.failed[key]
            raise type(error)(error.message, room=request.room, retryable=error.retryable)  # as who waited was told
        if key in self.cancelled or (room is not None and room.cancelled):
            raise RoomFailed("a reader cancelled the room", room=request.room)
        seconds, begin = (x if x > 0 else 0.0 for x in (request.seconds, request.begin))  # not max(): it would let NaN through
        now, begun = self.clock(), room is not None or any(key in s.prompts for s in self.sessions.values())
        self.waiters[key] = Waiter(session, request.seq, now + min(seconds, MAX_WAIT_SECONDS), float("inf") if begun else now + begin)
        return None

    def _lease(self, session, key: Key | None, records: np.ndarray) -> int:
        number = secrets.randbits(63) | 1  # not to be guessed, although only its session may use it
        self.leases[number] = Lease(session, key, records, self.clock() + self.limits.lease_seconds)
        return number

    def _own_leases(self, session, request: m.Renew | m.Release) -> list[int]:
        """Those it names, also ones that are gone. Raises ``ProtocolError`` when one is another session's: then nothing is done."""
        numbers = m.unpack(request.leases, "u8").tolist()
        if any(self.leases[number].session != session for number in numbers if number in self.leases):
            raise ProtocolError("a lease of another session", peer=self.sessions[session].node)
        return numbers

    def _claim(self, session, room: Room, seq: int) -> m.Manifest:
        """The room becomes a lease of ``session``: its holds on the records pass over unchanged."""
        number = self.leased_keys[room.key] = self._lease(session, room.key, room.records)
        self._forget(room)
        self.totals["rooms_claimed"] += 1
        manifest = room.manifest
        return m.Manifest(**{f: getattr(manifest, f) for f in manifest.__struct_fields__} | {"seq": seq, "lease": number})

    def _lookup(self, session, request: m.Lookup) -> m.Reply:
        hashes = split_hashes(request.hashes)
        records = self.table.find(hashes)
        here = records[records >= 0]
        self.totals["lookups"] += 1
        self.totals["lookup_pages"] += len(hashes)
        self.totals["lookup_hits"] += len(here)
        lease = 0
        if request.hold and len(here):
            self.table.hold(here)
            lease = self._lease(session, None, here)
        return m.Held(seq=request.seq, records=m.pack(np.where(records < 0, m.NOWHERE, records), "u4"),
                      generations=m.pack(np.where(records < 0, 0, self.table.generation[records]), "u8"),
                      roots=m.pack(np.where(records < 0, 0, self.table.root[records]), "u8"), lease=lease,
                      lease_seconds=self.limits.lease_seconds)

    def _renew(self, session, request: m.Renew) -> m.Reply:
        now, gone = self.clock(), []
        for number in self._own_leases(session, request):
            lease = self.leases.get(number)
            if lease is None or now >= lease.expires:
                gone.append(number)
            else:
                lease.expires = now + self.limits.lease_seconds
        return m.Renewed(seq=request.seq, gone=m.pack(gone, "u8"))

    def _release(self, session, request: m.Release) -> m.Reply:
        for number in self._own_leases(session, request):
            if number not in self.leases:
                continue
            if request.doubted:
                self.totals["records_doubted"] += self.table.disown(self.leases[number].records)
            self._end_lease(number)
            self.totals["leases_released"] += 1
        return m.Ok(seq=request.seq)

    def _cancel(self, session, request: m.Cancel) -> m.Reply:
        key = (request.room, request.rank)
        waiter = self.waiters.get(key)
        if waiter is not None and waiter.session != session:
            return m.Ok(seq=request.seq)  # the room is another reader's; this one was refused
        if waiter is not None:
            # Its Await is answered all the same: a reader takes silence for a dead tier.
            del self.waiters[key]
            self.outbox.append((session, m.failure(RoomFailed("its reader cancelled the room", room=key[0]), waiter.seq)))
        room = self.rooms.get(key)
        if room is None:
            if key not in self.leased_keys and key not in self.failed:
                self.cancelled[key] = self.clock() + self.limits.room_seconds
                if len(self.cancelled) > MAX_REMEMBERED:
                    del self.cancelled[next(iter(self.cancelled))]
        elif room.manifest is not None:
            self._drop(room)
        else:
            room.cancelled = True
        self.totals["rooms_cancelled"] += 1
        return m.Ok(seq=request.seq)

    # -- ends ---------------------------------------------------------------------------------------------------

    def _orphan(self, room: Room, reason: str) -> None:
        """Whoever wrote it is gone."""
        if room.manifest is None:
            self._fail(room, PeerLost(reason, room=room.key[0], retryable=True))

    def _fail(self, room: Room, error: OasisError) -> None:
        self._drop(room)
        self.totals["rooms_failed"] += 1
        self._remember_failure(room.key, error)

    def _remember_failure(self, key: Key, error: OasisError) -> None:
        waiter = self.waiters.pop(key, None)
        if waiter is not None:
            self.outbox.append((waiter.session, m.failure(error, waiter.seq)))
        elif key not in self.failed:  # the first reason: what its worker says after it was cut off is not why
            self.failed[key] = (error, self.clock() + self.limits.room_seconds)
            if len(self.failed) > MAX_REMEMBERED:
                del self.failed[next(iter(self.failed))]

    def _drop(self, room: Room) -> None:
        self._forget(room)
        self.table.unhold(room.held)

    def _forget(self, room: Room) -> None:
        del self.rooms[room.key]
        if (session := self.sessions.get(room.session)) is not None:
            session.rooms.discard(room.key)
            session.prompts.discard(room.key)

    def _end_lease(self, number: int) -> None:
        lease = self.leases.pop(number)
        if lease.key is not None:
            del self.leased_keys[lease.key]
        self.table.unhold(lease.records)


def _given_up(request: m.Abort) -> OasisError:
    return (PeerLost if request.lost else RoomFailed)(request.reason, room=request.room, retryable=request.retryable)
