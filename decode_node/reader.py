"""Reading: from a tier's arena into staging windows, and from there to whoever asked, who verifies the bytes first.

A read that missed its deadline may still write later, so its window goes to quarantine; a destination is never written by
a data plane.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from decode_node.arena_peer import ArenaPeer
from decode_node.pull import Pull, PullLimits
from decode_node.tier_link import TierLink
from transport.dataplane import MAX_DESCRIPTORS, DataPlane, ReadBatch, Transfer
from transport.errors import CapacityError, DeadlineExceeded, IntegrityError, LeaseExpired, OasisError, PeerLost
from transport.planes.ranges import coalesce
from transport.staging import Staging, Window

log = logging.getLogger("oasis.reader")

ATTEMPTS = 2
"""A read that failed is tried once more; one lost connection counts once per job, however many reads it took along."""


def _nothing() -> None:
    pass


def _ignore(*_) -> None:
    pass


@dataclass(eq=False)
class Job:
    """Items to read for one request: ``unit`` bytes at each of ``offsets`` (uint64 [n], in the tier's arena).

    ``accept(payloads, start, stop)`` gets items [start, stop) as uint8 [stop - start, unit], to be read during the call
    only. It verifies them, raising ``IntegrityError`` before it used any, and takes them over. Windows may land in any
    order, each item is accepted once. ``finished()`` follows when all were; ``phase`` is what their bytes are counted as.
    Both are called on the puller's thread under ``pull.lock``, and no more after ``cancel`` or ``release`` returned.
    """

    pull: Pull
    phase: str
    offsets: np.ndarray
    unit: int
    accept: Callable[[np.ndarray, int, int], None]
    finished: Callable[[], None] = _nothing
    cursor: int = field(default=0, init=False)
    landed: int = field(default=0, init=False)
    attempts: int = field(default=0, init=False)
    lost_connections: set[int] = field(default_factory=set, init=False)
    retry: list[tuple[int, int]] = field(default_factory=list, init=False)


@dataclass(eq=False)
class Flight:
    """One window being read: items [start, stop) of a job."""

    job: Job
    start: int
    stop: int
    window: Window
    transfer: Transfer
    connection: int
    deadline: float
    posted: float


class JobReader:
    """Owner of the data plane, the staging memory and every read in flight. Lives on the puller's thread.

    ``finished(job)``: all its items were accepted; ``fail(pull, error)``: it cannot be served; ``guard(pull, work, *args)``:
    runs work so that an error ends that pull alone. ``landed(phase, posted, now, bytes)``: for tests, after each read that was
    accepted (monotonic seconds).
    """

    def __init__(self, plane: DataPlane, staging: Staging, limits: PullLimits, totals: Counter, *, finished: Callable[[Job], None],
                 fail: Callable[[Pull, OasisError], None], guard: Callable):
        self.plane, self.staging, self.limits, self.totals = plane, staging, limits, totals
        self.finished, self.fail, self.guard = finished, fail, guard
        self.arenas: dict[TierLink, ArenaPeer] = {}
        self.flights: list[Flight] = []
        self.ready: list[Job] = []
        self.staged_peak = 0
        self.landed: Callable[[str, float, float, int], None] = _ignore
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
        """The link is gone, and with it the way to its arena, unless another link leads there as well. Idempotent."""
        arena = self.arenas.pop(link, None)
        if arena is not None and arena.endpoint not in [other.endpoint for other in self.arenas.values()]:
            arena.close()

    def add(self, job: Job) -> None:
        """Raises ``CapacityError`` when not even one item fits a window."""
        if job.unit > self.staging.window_bytes:
            raise CapacityError(f"items of {job.unit} bytes do not fit a staging window", room=job.pull.room, limit=f"{self.staging.window_bytes} bytes")
        if len(job.offsets):
            self.ready.append(job)
        else:
            self.finished(job)

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

    def _sought(self, parked: list[Job], error: OasisError | None) -> None:
        """A tier's data plane is back, or will not come back."""
        if error is None:
            self.ready.extend(job for job in parked if job not in self.ready)
        for job in parked if error else ():
            self.fail(job.pull, error)

    def _launch(self, now: float) -> None:
        """Fills free windows, one per job in turn, so that a long prompt does not hold back a short one."""
        if self.limits.hold_file and os.path.exists(self.limits.hold_file):
            return
        while self.ready and self.staging.free:
            job = self.ready.pop(0)
            if not job.pull.wanted:
                continue
            arena = self.arenas[job.pull.link]
            if arena.seeking:
                arena.park(job)
                continue
            if job.retry:
                start, stop = job.retry.pop()
            else:
                start, items = job.cursor, min(self.staging.window_bytes // job.unit, MAX_DESCRIPTORS)
                stop = job.cursor = min(start + items, len(job.offsets))
            try:
                self._read(job, start, stop, now)
            except PeerLost as error:
                self._failed_read(job, start, stop, arena.connection, error)
                continue
            except OasisError as error:
                self.fail(job.pull, error)
                continue
            if job.retry or job.cursor < len(job.offsets):
                self.ready.append(job)

    def _fail_starved(self) -> None:
        """Every window is in quarantine, and only the peers that hold them can give them back."""
        starved, self.ready = self.ready, []
        for pull in (job.pull for job in starved):
            if pull.wanted:
                self.fail(pull, CapacityError("no window to read into: all wait for peers that do not answer", room=pull.room,
                                              limit=f"{self.staging.quarantined} windows, {self.limits.read_seconds} s"))

    def _read(self, job: Job, start: int, stop: int, now: float) -> None:
        arena, window = self.arenas[job.pull.link], self.staging.acquire()
        n, unit = stop - start, np.uint64(job.unit)
        batch = coalesce(ReadBatch(
            remote=job.offsets[start:stop],
            local=np.uint64(window.offset) + np.arange(n, dtype=np.uint64) * unit,
            lengths=np.full(n, unit)))
        try:
            transfer = self.plane.read(arena.name, batch)
        except OasisError:
            self.staging.release(window)
            raise
        self.flights.append(Flight(job, start, stop, window, transfer, arena.connection, now + self.limits.read_seconds, now))
        used = (len(self.flights) + self.staging.quarantined) * self.staging.window_bytes
        self.staged_peak = max(self.staged_peak, used)

    def _land(self, now: float) -> None:
        for flight in list(self.flights):
            job, pull = flight.job, flight.job.pull
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
                self.guard(pull, self._failed_read, job, flight.start, flight.stop, flight.connection, error)
            else:
                self.flights.remove(flight)
                flight.transfer.release()
                self.staging.release(flight.window)
                if job.landed == len(job.offsets):
                    self.guard(pull, self.finished, job)

    def _accept(self, flight: Flight, now: float) -> None:
        """Hands over what landed. Raises ``LeaseExpired`` and what the job raises."""
        job, pull = flight.job, flight.job.pull
        if now >= pull.lease_expires:
            raise LeaseExpired("the lease ran out while records were read", room=pull.room, peer=pull.link.peer)
        if pull.vacant is not None:
            pull.vacant.synchronize()
            pull.vacant = None
        n = flight.stop - flight.start
        with pull.lock:
            if not pull.wanted:
                return
            job.accept(flight.window.view[: n * job.unit].reshape(n, job.unit), flight.start, flight.stop)
        pull.bytes_by_phase[job.phase] += n * job.unit
        self.totals[f"bytes_{job.phase}"] += n * job.unit
        job.landed += n
        self.landed(job.phase, flight.posted, now, n * job.unit)

    def _failed_read(self, job: Job, start: int, stop: int, connection: int, error: Exception) -> None:
        if not isinstance(error, OasisError):
            raise error
        pull, lost = job.pull, isinstance(error, PeerLost)
        if lost and (arena := self.arenas.get(pull.link)):
            arena.lost(connection, time.monotonic())
        if not pull.wanted:
            return
        self.totals["read_failures"] += 1
        self.totals["reads_damaged"] += isinstance(error, IntegrityError)
        if not lost or connection not in job.lost_connections:  # one loss takes all reads in flight along
            job.attempts += 1
        if lost:
            job.lost_connections.add(connection)
        if job.attempts >= ATTEMPTS or isinstance(error, LeaseExpired):
            self.fail(pull, error)
            return
        log.warning("read again once: %s", error)
        job.retry.append((start, stop))
        if job not in self.ready:
            self.ready.append(job)

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
            flight.job.pull.link.fail(error)
