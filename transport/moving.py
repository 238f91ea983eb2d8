"""Moving records from another tier's arena into this one: orders, reads in flight, checks, copies.

A read lands in a staging window. Only what was found to be what its writer published is copied from there into the arena, so
neither damage nor a late write of a read that was given up can reach a record. The index is written anew, because the
checksum in it is seeded with the generation of the record it belongs to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from transport import messages as m
from transport.dataplane import DataPlane, Endpoint, ReadBatch, Transfer
from transport.errors import DeadlineExceeded, OasisError, PeerLost, ProtocolError
from transport.integrity import index_rows, verify_index, verify_pieces
from transport.layout import ArenaGeometry, KVLayout
from transport.planes.ranges import coalesce
from transport.staging import Staging, Window

log = logging.getLogger("oasis.mover")

WINDOW_BYTES = 8 << 20
WINDOWS = 4
READ_SECONDS = 30.0
"""For one window to land."""
IDLE_SECONDS = 300.0
"""A connection to an arena that nothing was read from for so long ends."""


def window_bytes(layout: KVLayout) -> int:
    """Of a window that holds at least one record."""
    return max(WINDOW_BYTES, layout.payload_bytes + layout.index_bytes)


class Move(msgspec.Struct, frozen=True, tag=True):
    """Order: records ``sources`` of the arena at ``endpoint``, cut as ``geometry`` says, into ``targets`` of ours. All u32; the
    ``generations`` of both and the ``roots`` u64, one each per record. Exactly one ``Ended`` follows. Without records: connect."""

    number: int
    room: int
    endpoint: Endpoint
    layout: KVLayout
    geometry: ArenaGeometry
    sources: bytes
    source_generations: bytes
    own_geometry: ArenaGeometry
    targets: bytes
    target_generations: bytes
    roots: bytes


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Order: the move is no longer wanted."""

    number: int


class Ended(msgspec.Struct, frozen=True):
    """The move is over: nothing of it is written into the arena any more. ``nbytes``: read for it; ``error``: None when all of
    it is there, or it was dropped; ``seconds``: from the order to this."""

    number: int
    nbytes: int
    error: m.Failure | None = None
    seconds: float = 0.0


Order = Move | Drop


def common_plane(planes: tuple[str, ...], endpoints: tuple[Endpoint, ...], **about) -> Endpoint:
    """Of the owner's ``endpoints`` the one whose kind comes first in ``planes``, those that we serve ourselves. Raises ``PeerLost`` when
    there is none (naming ``about``: room, peer), ``IntegrityError``."""
    found = [e for kind in planes for e in endpoints if e.kind == kind]
    if not found:
        raise PeerLost("no data plane in common", limit=f"{', '.join(planes)} here, {', '.join(e.kind for e in endpoints) or 'none'} there", **about)
    found[0].verify()
    return found[0]


@dataclass(eq=False)
class _Job:
    """``cursor``: records asked for; ``landed``: records copied."""

    order: Move
    began: float
    plane: DataPlane
    sources: np.ndarray
    source_generations: np.ndarray
    targets: np.ndarray
    target_generations: np.ndarray
    roots: np.ndarray
    cursor: int = field(default=0, init=False)
    landed: int = field(default=0, init=False)
    nbytes: int = field(default=0, init=False)


@dataclass(eq=False)
class _Flight:
    job: _Job
    start: int
    stop: int
    window: Window
    transfer: Transfer
    deadline: float


class Moves:
    """Owner of the staging memory, the data planes and every read in flight. One thread.

    ``arena`` uint8 [size]; ``plane(kind)`` makes a reader into ``staging.region``; ``send`` takes each ``Ended``.
    """

    def __init__(self, arena: np.ndarray, staging: Staging, plane: Callable[[str], DataPlane], send: Callable[[Ended], None]):
        self.arena, self.staging, self.send = arena, staging, send
        self._make_plane = plane
        self._planes: dict[str, DataPlane] = {}
        self._jobs: dict[int, _Job] = {}
        self._turns: list[_Job] = []
        self._flights: list[_Flight] = []
        self._used: dict[tuple[str, str], float] = {}

    @property
    def busy(self) -> bool:
        """Whether there is something to poll for."""
        return bool(self._flights or self._turns)

    def take(self, order: Order, now: float) -> None:
        if isinstance(order, Drop):
            if order.number in self._jobs:
                self._end(self._jobs[order.number], now)
            return
        try:
            job = self._start(order, now)
        except OasisError as error:
            self.send(Ended(order.number, 0, m.failure(error, 0)))
        else:
            self._jobs[order.number] = job
            if len(job.sources):
                self._turns.append(job)
            else:
                self._end(job, now)

    def step(self, now: float) -> None:
        """Takes what has landed and starts what can start. Raises ``CapacityError`` once too many windows wait for reads that
        do not end: only the end of this process gives them back."""
        self._land(now)
        self._launch(now)
        for (kind, name), used in list(self._used.items()):
            if now >= used + IDLE_SECONDS and not any(j.order.endpoint.name == name for j in self._jobs.values()):
                del self._used[kind, name]
                self._planes[kind].disconnect(name)

    def close(self) -> None:
        for plane in self._planes.values():
            plane.close()
        self.staging.close()

    def _start(self, order: Move, now: float) -> _Job:
        endpoint, n = order.endpoint, len(order.sources) // 4
        if order.layout.payload_bytes + order.layout.index_bytes > self.staging.window_bytes:
            raise ProtocolError("records larger than a window of this mover", limit=f"{self.staging.window_bytes} bytes")
        sources, targets = (m.unpack(raw, "u4", count=n).astype(np.int64) for raw in (order.sources, order.targets))
        more = (m.unpack(raw, "u8", count=n) for raw in (order.source_generations, order.target_generations, order.roots))
        order.geometry.require_sound(order.layout, endpoint.size, peer=endpoint.name)
        if endpoint.kind not in self._planes:
            self._planes[endpoint.kind] = self._make_plane(endpoint.kind)
        plane = self._planes[endpoint.kind]
        plane.connect(endpoint)
        self._used[endpoint.kind, endpoint.name] = now
        theirs, ours, roots = more
        return _Job(order, now, plane, sources, theirs, targets, ours, roots)

    def _launch(self, now: float) -> None:
        """Fills free windows, one per job in turn, so that a long prompt does not hold back a short one."""
        self.staging.sweep()
        while self._turns and self.staging.free:
            job = self._turns.pop(0)
            try:
                self._read(job, now)
            except OasisError as error:
                self._end(job, now, error)
                continue
            if job.cursor < len(job.sources):
                self._turns.append(job)

    def _read(self, job: _Job, now: float) -> None:
        """One window: the payloads of some records, then their indexes."""
        layout, geometry = job.order.layout, job.order.geometry
        start = job.cursor
        stop = min(len(job.sources), start + self.staging.window_bytes // (layout.payload_bytes + layout.index_bytes))
        sources, n = job.sources[start:stop], stop - start
        lengths = np.repeat(np.array([layout.payload_bytes, layout.index_bytes], np.uint64), n)
        remote = np.concatenate([geometry.payload_offsets(sources), geometry.index_offsets(sources)])
        window = self.staging.acquire()
        local = np.uint64(window.offset) + np.cumsum(lengths, dtype=np.uint64) - lengths
        try:
            transfer = job.plane.read(job.order.endpoint.name, coalesce(ReadBatch(remote, local, lengths)))
        except BaseException:
            self.staging.release(window)
            raise
        job.cursor = stop
        self._flights.append(_Flight(job, start, stop, window, transfer, now + READ_SECONDS))

    def _land(self, now: float) -> None:
        for flight in list(self._flights):
            job, error = flight.job, None
            try:
                if not flight.transfer.poll():
                    if now < flight.deadline:
                        continue  # also when nobody wants it any more: its window comes back the sooner
                    raise DeadlineExceeded("a read did not land", limit=f"{READ_SECONDS} s")
                if self._jobs.get(job.order.number) is job:
                    self._accept(flight)
            except OasisError as failed:
                error = failed
            self._flights.remove(flight)
            if error is not None and self._jobs.get(job.order.number) is job:
                self._end(job, now, error)
            elif job.landed == len(job.sources):
                self._end(job, now)
            self._give_back(flight)

    def _accept(self, flight: _Flight) -> None:
        """Checks what landed and copies it. Raises ``IntegrityError``."""
        job, layout, own = flight.job, flight.job.order.layout, flight.job.order.own_geometry
        span, n = slice(flight.start, flight.stop), flight.stop - flight.start
        about = dict(peer=job.order.endpoint.name, room=job.order.room)
        split = n * layout.payload_bytes
        job.nbytes += n * (layout.payload_bytes + layout.index_bytes)
        payloads = flight.window.view[:split].reshape(n, layout.payload_bytes)
        index = flight.window.view[split : split + n * layout.index_bytes].reshape(n, layout.index_bytes)
        sources, targets = job.sources[span], job.targets[span]
        digests, summaries = verify_index(index, job.source_generations[span], job.roots[span], sources, layout, **about)
        verify_pieces(payloads.reshape(n * layout.pieces, layout.piece_bytes), digests.ravel(), np.repeat(sources, layout.pieces), **about)
        rows = index_rows(digests, summaries.reshape(n, -1), job.target_generations[span], layout)
        payload_rows, indexes = own.rows(self.arena)
        payload_rows[targets, : layout.payload_bytes] = payloads
        indexes[targets, : layout.index_bytes] = rows
        job.landed += n

    def _give_back(self, flight: _Flight) -> None:
        """The window is reusable only once the plane can no longer write into it. Raises ``CapacityError``."""
        if flight.transfer.drained:
            flight.transfer.release()
            self.staging.release(flight.window)
            return
        log.warning("a read that was given up is still in flight: %s", flight.job.order.endpoint.name)
        self.staging.quarantine(flight.window, flight.transfer)

    def _end(self, job: _Job, now: float, error: OasisError | None = None) -> None:
        """Idempotent. What of it is still in flight lands in its window and is forgotten."""
        if self._jobs.pop(job.order.number, None) is None:
            return
        if job in self._turns:
            self._turns.remove(job)
        self.send(Ended(job.order.number, job.nbytes, None if error is None else m.failure(error, 0), now - job.began))
