"""Fetching back: pages that a memory node has and this tier has not, read into its arena before a worker computes them.

    Open of a room --its wish pays--> reads under way --all there, an error, or time is up--> the worker is answered

A room waits for ``FETCH_SECONDS`` at most, and never longer than computing would take. Rooms that wish for the same pages wait for one
fetch. Its records stay in WRITING until the mover says that it has stopped, whether or not anybody still waits; what is whole
then is cache, and found as such by the worker's ``Lookup``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from transport import messages as m
from transport.dataplane import Endpoint
from transport.errors import OasisError, PeerLost
from transport.layout import ArenaGeometry
from transport.moving import Drop, Ended, Move, Order, common_plane
from transport.pace import Pace
from transport.records import split_hashes
from transport.rooms import Room
from transport.tier import Tier

FETCH_SECONDS = 3.0
"""How long a prompt is held back at most."""
REST_SECONDS = 5.0
"""How long nothing is fetched after a failure."""
PROBE_SECONDS = 30.0
"""While fetching is the slower way, it is done all the same so often: the estimate must be able to change."""


@dataclass(eq=False)
class Fetch:
    """Reads under way: the owner of ``records`` int64 [n], for the pages named ``hashes`` at ``depths`` int64 [n] of their chain, which have
    ``roots`` uint64 [n]. ``rooms``: who waits for it; without any it has been given up."""

    number: int
    hashes: list[bytes]
    depths: np.ndarray
    records: np.ndarray
    roots: np.ndarray
    node: str
    began: float
    rooms: list[WaitingRoom] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class WaitingRoom(Room):
    """``wish``: as in ``Open``, until it was looked at. ``kept`` int64: records of which it is a holder beside its own, so that they are
    still there when the worker restores them. ``fetches``: what it waits for, until ``fetch_until`` by the tier's clock."""

    wish: m.Wish | None = None
    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    fetches: set[Fetch] = field(default_factory=set)
    fetch_until: float = float("inf")

    @property
    def own(self) -> np.ndarray:
        """The records of its prompt that are in this arena."""
        return self.records[self.records >= 0]

    @property
    def held(self) -> np.ndarray:
        return np.concatenate([self.own, self.kept])


def obtainable(here: np.ndarray, there: np.ndarray, coming: np.ndarray, room: int) -> int:
    """How many pages, without a gap from the first on, this arena can have: ``here`` int64 [n] are their records, -1 = none, ``there``
    and ``coming`` bool [n] whether the memory node has them and whether they are being fetched; for ``room`` pages more there are records."""
    takes = np.cumsum((here < 0) & ~coming)
    return int(np.logical_and.accumulate(((here >= 0) | coming | there) & (takes <= room)).sum())


class Fetches:
    """The fetches of ``tier``. ``post`` takes orders for the mover; ``done(room)`` is told once a room waits no longer, ``unreadable(node)``
    that a fetch from there failed. ``pace``: seconds per page, as the mover measures them."""

    def __init__(self, tier: Tier, *, post: Callable[[Order], None], done: Callable[[WaitingRoom], None], unreadable: Callable[[str], None]):
        self.tier, self.post, self.done, self.unreadable = tier, post, done, unreadable
        self.live: dict[int, Fetch] = {}
        self.pace = Pace()
        self._coming: dict[bytes, Fetch] = {}
        self._met: set[str] = set()
        self._numbers = itertools.count(1)
        self._rests_until = self._probes_at = 0.0

    @property
    def held(self) -> int:
        """Records that are being written, found by scanning."""
        return sum(len(fetch.records) for fetch in self.live.values())

    def begin(self, room: WaitingRoom, node: str, welcome: m.Welcome | None, opened: m.Opened) -> bool:
        """Starts what ``room`` wishes for and ``node``, which said ``welcome`` and has ``opened`` the room, can give. The room's own records
        have been reserved before. False: there is nothing to wait for."""
        wish, room.wish = room.wish, None
        if wish is None:
            return False
        self._meet(node, welcome)
        try:
            return self._begin(room, wish, node, welcome, opened)
        except OasisError:
            self._failed(node, 1)
            return False

    def _meet(self, node: str, welcome: m.Welcome | None) -> None:
        """Has the mover started and connected by the time that there is something to fetch: a first fetch would be late."""
        with suppress(OasisError):
            endpoint = self._source(node, welcome)
            if endpoint.name not in self._met:
                self._met.add(endpoint.name)
                self._move(0, endpoint, welcome.geometry, *(np.zeros(0, np.uint64) for _ in range(4)))

    def _begin(self, room: WaitingRoom, wish: m.Wish, node: str, welcome: m.Welcome | None, opened: m.Opened) -> bool:
        table, hashes = self.tier.table, split_hashes(room.hashes)
        depths = np.arange(len(hashes))[max(0, wish.first) : max(0, wish.stop)]
        names = [hashes[i] for i in depths.tolist()]
        there = m.unpack(opened.fresh, "u1", count=len(room.records))[depths] == 0
        here, coming = table.find(names), np.fromiter((name in self._coming for name in names), bool, len(names))
        loose = int((table.holders[here[here >= 0]] == 0).sum())  # not to be evicted for what is to follow them
        run = obtainable(here, there, coming, table.available - loose)
        missing = here[:run] < 0
        if run < max(1, wish.least) or (missing.any() and not self._pays(int(missing.sum()), wish.page_seconds)):
            return False
        room.kept = here[:run][~missing & there[:run]]  # it holds those that are not there as its own
        table.hold(room.kept)
        new = np.flatnonzero(missing & ~coming[:run])
        fetches = {self._coming[names[i]] for i in np.flatnonzero(missing & coming[:run]).tolist()}
        if len(new):
            fetches.add(self._start(node, welcome, opened, [names[i] for i in new.tolist()], depths[new], len(room.records)))
        for fetch in fetches:
            fetch.rooms.append(room)
        room.fetches, room.fetch_until = fetches, self.tier.clock() + min(FETCH_SECONDS, int(missing.sum()) * wish.page_seconds)
        return bool(fetches)

    def _pays(self, pages: int, saved: float) -> bool:
        """Whether a page is fetched in less than the ``saved`` seconds."""
        now, pace = self.tier.clock(), self.pace.each
        if not saved > 0 or now < self._rests_until:
            return False
        if pace is None or pace < saved or now >= self._probes_at:
            return True
        self.tier.totals["fetches_slower"] += 1
        return False

    def _start(self, node: str, welcome: m.Welcome | None, opened: m.Opened, names: list[bytes], depths: np.ndarray, pages: int) -> Fetch:
        """Raises ``PeerLost``, ``IntegrityError``, ``BoundsError``, ``ProtocolError`` for what the node says."""
        endpoint, sources = self._source(node, welcome), m.unpack(opened.records, "u4", count=pages)[depths]
        generations, roots = (m.unpack(raw, "u8", count=pages)[depths] for raw in (opened.generations, opened.roots))
        welcome.geometry.payload_offsets(sources)
        targets, _ = self.tier.table.reserve(names, 0)
        number = next(self._numbers)
        fetch = self.live[number] = Fetch(number, names, depths, targets, roots, node, self.tier.clock())
        self._coming |= dict.fromkeys(names, fetch)
        self._move(number, endpoint, welcome.geometry, sources, generations, targets, roots)
        return fetch

    def _source(self, node: str, welcome: m.Welcome | None) -> Endpoint:
        """Where the node's arena is read."""
        if welcome is None:
            raise PeerLost("not connected", peer=node)
        endpoint = common_plane(self.tier.planes, welcome.endpoints, peer=node)
        welcome.geometry.require_sound(self.tier.layout, endpoint.size, peer=node)
        return endpoint

    def _move(self, number: int, endpoint: Endpoint, geometry: ArenaGeometry, sources, generations, targets, roots) -> None:
        """The order to the mover; arrays [n] as in ``Move``."""
        tier = self.tier
        self.post(Move(
            number=number, room=0, endpoint=endpoint, layout=tier.layout, geometry=geometry, sources=m.pack(sources, "u4"),
            source_generations=m.pack(generations, "u8"), own_geometry=tier.geometry, targets=m.pack(targets, "u4"),
            target_generations=m.pack(tier.table.generation[targets.astype(np.int64)], "u8"), roots=m.pack(roots, "u8")))

    def ended(self, ended: Ended) -> None:
        """The mover no longer writes to the records of this fetch."""
        if ended.number not in self.live:
            return  # it has connected
        tier, fetch = self.tier, self.live.pop(ended.number)
        self._forget(fetch)
        tier.totals["bytes_fetched_back"] += ended.nbytes
        tier.totals["fetch_seconds"] += ended.seconds
        if ended.error is None and ended.nbytes == len(fetch.records) * (tier.layout.payload_bytes + tier.layout.index_bytes):
            tier.table.seal(fetch.records, fetch.roots, fetch.hashes, depths=fetch.depths)
            tier.totals["pages_fetched_back"] += len(fetch.records)
            self.pace.add(len(fetch.records), ended.seconds)
            self._probes_at = tier.clock() + PROBE_SECONDS
            for room in fetch.rooms:
                found = tier.table.find(fetch.hashes)
                tier.table.hold(found)
                room.kept = np.concatenate([room.kept, found])
        elif fetch.rooms:
            self._failed(fetch.node, len(fetch.rooms))
        tier.table.unhold(fetch.records)
        for room in list(fetch.rooms):
            room.fetches.discard(fetch)
            if not room.fetches:
                self.done(room)

    def overdue(self, room: WaitingRoom) -> None:
        """It waits no longer: computing is faster by now."""
        now = self.tier.clock()
        for fetch in room.fetches:
            self.pace.add(len(fetch.records), now - fetch.began)
            self._probes_at = now + PROBE_SECONDS
        node = next(iter(room.fetches)).node
        self.leave(room)
        self._failed(node, 1)
        self.done(room)

    def leave(self, room: WaitingRoom) -> None:
        """The room is given up or answered; what nobody waits for any more is dropped. Idempotent."""
        for fetch in room.fetches:
            fetch.rooms.remove(room)
            if not fetch.rooms:
                self._forget(fetch)
                self.post(Drop(fetch.number))
        room.fetches = set()

    def let_go(self, room: WaitingRoom) -> None:
        """What it only keeps for the worker to restore is cache like any other. Idempotent."""
        self.tier.table.unhold(room.kept)
        room.kept = room.kept[:0]

    def _forget(self, fetch: Fetch) -> None:
        """Nobody is to wait for it any more."""
        for name in fetch.hashes:
            if self._coming.get(name) is fetch:
                del self._coming[name]

    def _failed(self, node: str, prompts: int) -> None:
        self.tier.totals["fetches_failed"] += prompts
        self._rests_until = self.tier.clock() + REST_SECONDS
        self._met.clear()  # the mover may have ended, too
        self.unreadable(node)
