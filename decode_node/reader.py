"""Reading records: from a tier's arena into staging windows, verified, then over the request's pages.

Bytes are checked against the manifest before they are scattered. A read that missed its deadline may still write later, so
its window goes to quarantine, never its pages.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from decode_node.arena_peer import ArenaPeer
from decode_node.pages import PageSink
from decode_node.pull import DONE, Pull, PullLimits
from decode_node.tier_link import TierLink
from transport.dataplane import DataPlane, ReadBatch, Transfer
from transport.errors import CapacityError, DeadlineExceeded, LeaseExpired, OasisError, PeerLost
from transport.integrity import verify
from transport.layout import KVLayout
from transport.staging import Staging, Window

log = logging.getLogger("oasis.reader")

ATTEMPTS = 2
"""A read that failed is tried once more; one lost connection counts once, however many reads it took along."""


@dataclass(eq=False)
class Flight:
    """One window being read: records [start, stop) of a pull."""

    pull: Pull
    start: int
    stop: int
    window: Window
    transfer: Transfer
    connection: int
    deadline: float


class RecordReader:
    """Owner of the data plane, the staging memory and every read in flight. Lives on the puller's thread.

    ``done(pull)``: all its records are in the pool and its row is written; ``fail(pull, error)``: it cannot be served;
    ``guard(pull, work, *args)``: runs work so that an error ends that pull alone.
    """

    def __init__(self, layout: KVLayout, sink: PageSink, plane: DataPlane, staging: Staging, limits: PullLimits, totals: Counter, *,
                 done: Callable[[Pull], None], fail: Callable[[Pull, OasisError], None], guard: Callable):
        self.layout, self.sink, self.plane, self.staging, self.limits, self.totals = layout, sink, plane, staging, limits, totals
        self.done, self.fail, self.guard = done, fail, guard
        self.arenas: dict[TierLink, ArenaPeer] = {}
        self.flights: list[Flight] = []
        self.ready: list[Pull] = []
        self.staged_peak = 0
        self._moved_at = float("inf")

    @property
    def busy(self) -> bool:
        """Whether there is something to poll for."""
        return bool(self.flights) or (bool(self.ready) and self.staging.free > 0)

    def attach(self, link: TierLink) -> None:
        """A tier welcomed us: connect to its data plane. Raises ``PeerLost``."""
        arena = self.arenas[link] = ArenaPeer(link, self.plane, limit=self.limits.read_seconds, on_end=self._sought)
        arena.attach(time.monotonic())

    def detach(self, link: TierLink) -> None:
        """The link is gone, and with it the way to its arena. Idempotent."""
        if arena := self.arenas.pop(link, None):
            arena.close()

    def add(self, pull: Pull) -> None:
        """Its destination is known: read it."""
        self.ready.append(pull)

    def seek(self, now: float) -> None:
        """Goes on looking for data planes that were lost."""
        for arena in list(self.arenas.values()):
            self.guard(None, arena.process, now)

    def step(self, now: float) -> None:
        """Takes what has landed, starts what can start."""
        self._land(now)
        self._launch(now)
        if not self.ready or self.flights or self.staging.free:
            self._moved_at = now
        elif now - self._moved_at >= self.limits.read_seconds:
            self._fail_starved()

    def close(self) -> None:
        self.plane.close()
        self.staging.close()

    def _sought(self, parked: list[Pull], error: OasisError | None) -> None:
        """A tier's data plane is back, or will not come back."""
        if error is None:
            self.ready.extend(pull for pull in parked if pull not in self.ready)
        for pull in parked if error else ():
            self.fail(pull, error)

    def _launch(self, now: float) -> None:
        """Fills free windows, one per request in turn, so that a long prompt does not hold back a short one."""
        if self.limits.hold_file and os.path.exists(self.limits.hold_file):
            return
        while self.ready and self.staging.free:
            pull = self.ready.pop(0)
            if not pull.wanted:
                continue
            arena = self.arenas[pull.link]
            if arena.seeking:
                arena.park(pull)
                continue
            if pull.retry:
                start, stop = pull.retry.pop()
            else:
                start = pull.cursor
                stop = pull.cursor = min(start + self.staging.window_bytes // self.layout.payload_bytes, len(pull.records))
            try:
                self._read(pull, start, stop, now)
            except PeerLost as error:
                self._failed_read(pull, start, stop, arena.connection, error)
                continue
            except OasisError as error:
                self.fail(pull, error)
                continue
            if pull.retry or pull.cursor < len(pull.records):
                self.ready.append(pull)

    def _fail_starved(self) -> None:
        """Every window is in quarantine, and only the peers that hold them can give them back."""
        starved, self.ready = self.ready, []
        for pull in starved:
            if pull.wanted:
                self.fail(pull, CapacityError("no window to read into: all wait for peers that do not answer", room=pull.room,
                                              limit=f"{self.staging.quarantined} windows, {self.limits.read_seconds} s"))

    def _read(self, pull: Pull, start: int, stop: int, now: float) -> None:
        arena, window = self.arenas[pull.link], self.staging.acquire()
        n = stop - start
        size = np.uint64(self.layout.payload_bytes)
        batch = ReadBatch(
            remote=pull.link.welcome.geometry.payload_offsets(pull.records[start:stop]),
            local=np.uint64(window.offset) + np.arange(n, dtype=np.uint64) * size,
            lengths=np.full(n, size, dtype=np.uint64))
        try:
            transfer = self.plane.read(arena.name, batch)
        except OasisError:
            self.staging.release(window)
            raise
        self.flights.append(Flight(pull, start, stop, window, transfer, arena.connection, now + self.limits.read_seconds))
        used = (len(self.flights) + self.staging.quarantined) * self.staging.window_bytes
        self.staged_peak = max(self.staged_peak, used)

    def _land(self, now: float) -> None:
        for flight in list(self.flights):
            pull = flight.pull
            try:
                if not flight.transfer.poll():
                    if now < flight.deadline:
                        continue  # also when nobody wants it any more: its window comes back the sooner
                    raise DeadlineExceeded("a read did not land", room=pull.room, peer=pull.link.peer, limit=f"{self.limits.read_seconds} s")
                if pull.wanted:
                    self._accept(flight, now)
            except Exception as error:
                self.flights.remove(flight)
                self._discard(flight)
                self.guard(pull, self._failed_read, pull, flight.start, flight.stop, flight.connection, error)
            else:
                self.flights.remove(flight)
                flight.transfer.release()
                self.staging.release(flight.window)
                self.guard(pull, self._advance, pull)

    def _accept(self, flight: Flight, now: float) -> None:
        """Verifies what landed and hands it to the pool. Raises ``IntegrityError``, ``LeaseExpired``."""
        pull, span = flight.pull, slice(flight.start, flight.stop)
        n, size = flight.stop - flight.start, self.layout.payload_bytes
        payloads = flight.window.view[: n * size].reshape(n, size)
        verify(payloads, pull.generations[span], pull.roots[span], pull.records[span], peer=pull.link.peer, room=pull.room)
        if now >= pull.lease_expires:
            raise LeaseExpired("the lease ran out while records were read", room=pull.room, peer=pull.link.peer)
        if pull.vacant is not None:
            pull.vacant.synchronize()
            pull.vacant = None
        with pull.lock:
            if not pull.cancelled:
                self.sink.scatter(payloads, pull.pages[span])
        partial = int(flight.stop == len(pull.records) and pull.manifest.prompt_tokens % self.layout.block_tokens != 0)
        pull.bytes_by_phase["partial_page"] += partial * size
        pull.bytes_by_phase["records"] += (n - partial) * size
        pull.landed += n

    def _failed_read(self, pull: Pull, start: int, stop: int, connection: int, error: Exception) -> None:
        if not isinstance(error, OasisError):
            raise error
        lost = isinstance(error, PeerLost)
        if lost and (arena := self.arenas.get(pull.link)):
            arena.lost(connection, time.monotonic())
        if not pull.wanted:
            return
        self.totals["read_failures"] += 1
        if not lost or connection not in pull.lost_connections:  # one loss takes all reads in flight along
            pull.attempts += 1
        if lost:
            pull.lost_connections.add(connection)
        if pull.attempts >= ATTEMPTS or isinstance(error, LeaseExpired):
            self.fail(pull, error)
            return
        log.warning("read again once: %s", error)
        pull.retry.append((start, stop))
        if pull not in self.ready:
            self.ready.append(pull)

    def _discard(self, flight: Flight) -> None:
        """The window is reusable only once the plane can no longer write into it."""
        if flight.transfer.drained:
            flight.transfer.release()
            self.staging.release(flight.window)
            return
        self.totals["quarantined"] += 1
        try:
            self.staging.quarantine(flight.window, flight.transfer)
        except CapacityError as error:
            # Windows only come back when the stopped peer resumes or its connection ends: cut it off.
            log.error("quarantine is full, dropping the peer: %s", error)
            flight.pull.link.fail(error)

    def _advance(self, pull: Pull) -> None:
        if not pull.wanted or pull.landed < len(pull.records):
            return
        with pull.lock:
            if pull.cancelled:
                return
            pull.write_row(pull.manifest.metadata)
            pull.state = DONE
        self.done(pull)
