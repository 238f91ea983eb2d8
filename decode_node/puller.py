"""Pulling: one thread per decode rank asks tiers for manifests, has them read, and serves who needs more while it decodes.

Before READY (``pull.py`` has the states) a request holds no KV page: decode admits nothing that prefill has not committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import zmq

from decode_node.destination import Destination
from decode_node.donor import Donor
from decode_node.inbox import Inbox
from decode_node.leases import LeaseKeeper
from decode_node.pull import AWAITING, DONE, FAILED, PULLING, READY, RESOLVING, SERVING, Event, Pull, PullLimits
from decode_node.reader import Job, JobReader
from decode_node.rooms import RoomFinder
from decode_node.tier_link import TierLink
from transport import messages as m
from transport.dataplane import DataPlane
from transport.errors import CapacityError, DeadlineExceeded, Draining, IntegrityError, OasisError, PeerLost, RoomFailed
from transport.layout import KVLayout
from transport.security import Security
from transport.staging import Staging

log = logging.getLogger("oasis.puller")

BUSY_POLL_SECONDS = 0.0005
IDLE_SECONDS = 0.25
REPORTED_REQUESTS = 1024
RESOLVERS = 8
MAX_LIVE = 4096
"""Requests at most, those that wait included; SGLang's own queues have no bound."""


class Puller:
    """Owner of the requests and the links to tiers; its ``rooms`` find what was committed, its ``reader`` owns the reads, its
    ``leases`` the leases.

    ``resolve(source)`` -> peer row of a prefill node (blocking HTTP; runs on a small pool so that a dead node delays
    nobody else); ``forget(control address)`` says that what ``resolve`` cached about a tier is void; ``sample()`` is
    called at least every 0.25 s (peak gauges); ``export`` about once a second. ``reports`` show the bytes of the requests
    admitted or ended last, by rid or room.
    """

    def __init__(self, *, node: str, rank: int, layout: KVLayout, fingerprint: str, plane: DataPlane, staging: Staging,
                 resolve: Callable[[str], dict], forget: Callable[[str], None], limits: PullLimits, sample: Callable[[], None] = lambda: None,
                 export: Callable[[dict, dict], None] = lambda totals, gauges: None, security: Security | None = None):
        self.node, self.rank, self.layout, self.fingerprint = node, rank, layout, fingerprint
        self.resolve, self.forget, self.limits, self.sample, self.export = resolve, forget, limits, sample, export
        self.security = security or Security()
        self.totals: Counter[str] = Counter()
        self.live: set[Pull] = set()
        self.draining = False
        self.reports: dict[str, dict] = {}
        self.links: dict[str, TierLink] = {}
        self.leases = LeaseKeeper(self.links, self.live, limits.silence_seconds, lost=self._give_up)
        self.rooms = RoomFinder(rank, limits, self.totals, self.leases, connect=self._link, found=self._found, fail=self._give_up, later=self._post)
        self.reader = JobReader(plane, staging, limits, self.totals, finished=self._finished, fail=self._give_up, guard=self._guard)
        self.donor = Donor(self.totals, limits.silence_seconds)
        self._inbox = Inbox()
        self._context = zmq.Context()
        self._resolving: dict[str, list[Pull]] = {}
        self._unwanted: dict[Pull, OasisError] = {}  # refused once their tiers can be told: prefill's records would wait for them
        self._resolvers = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="oasis-resolve")
        self._exported_at = self._sampled_at = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="oasis-puller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -- any thread ---------------------------------------------------------------------------------------------

    def pull(self, room: int, source: str, *, rid: str = "", seconds: float | None = None) -> Pull:
        """Starts a request: finds its tier and waits for its commit, ``seconds`` long (None: ``await_seconds``). ``rid`` names it in reports."""
        pull = Pull(room, source, time.monotonic() + (self.limits.await_seconds if seconds is None else seconds), rid)
        self._post(self._begin, pull)
        return pull

    def fetch(self, pull: Pull, destination: Destination, write_row: Callable[[tuple[bytes, ...]], None], vacant: Event | None = None) -> None:
        """Names the destination; ``write_row`` takes the hand-over row, last. No bytes are handed over before ``vacant`` has
        happened (None: it has)."""
        self._post(self._fetch, pull, destination, write_row, vacant)

    def demand(self, pull: Pull, job: Job) -> None:
        """Reads ``job`` of a SERVING request. No effect on any other: its ``finished`` is not called then, nor when the
        request fails or is released first."""
        self._post(self._demand, pull, job)

    def cancel(self, pull: Pull, reason: str) -> None:
        """Ends a request that is not admitted: after it returns nothing is written for it any more. Idempotent; no effect on
        an admitted one. Not from a destination's or job's own calls, nor holding a lock that those take."""
        with pull.lock:
            if pull.cancelled or pull.state in (SERVING, DONE, FAILED):
                return
            pull.cancelled = True
        self._post(self._give_up, pull, RoomFailed(reason, room=pull.room))

    def release(self, pull: Pull) -> None:
        """Ends a SERVING request well: after it returns no job of it is called any more. Idempotent; no effect on any other.
        Where ``cancel`` may not be called, this may not either."""
        with pull.lock:
            if pull.released or pull.state != SERVING:
                return
            pull.released = True
        self._post(self._release, pull)

    def donate(self, pull: Pull, depth: int, hashes: Sequence[bytes], payloads: np.ndarray, summaries: np.ndarray) -> None:
        """Offers blocks to the tier that served ``pull`` (see ``Donor.give``). Nobody waits for it, and nothing comes of failing."""
        self._post(self.donor.give, pull, depth, hashes, payloads, summaries)

    def source_lost(self, source: str) -> None:
        """A prefill node is dead. What it committed stands, at its tier or at a memory node; the rest fails soon."""
        self._post(self._source_lost, source)

    def refuse_new(self) -> None:
        """From now on ``pull`` makes requests that fail with ``Draining``; those under way go on. Any thread."""
        self.draining = True

    def drain(self, seconds: float) -> int:
        """Takes nothing new, ends what is left and tells the tiers, waiting ``seconds`` at most. Returns how many requests it could not
        end: their leases run out. Where ``cancel`` may not be called, this may not either."""
        self.refuse_new()
        for pull in list(self.live):
            self.cancel(pull, "the decode node is going down")
            self.release(pull)
        told = threading.Event()
        self._post(told.set)
        told.wait(seconds)
        return len(self.live)

    def close(self) -> None:
        self._stop = True
        self._post(lambda: None)
        self._thread.join(timeout=10)
        self._resolvers.shutdown(wait=False, cancel_futures=True)
        # An open socket would block whoever collects the context, for ever.
        self._context.destroy(linger=200)
        self.reader.close()

    def _post(self, work, *args) -> None:
        self._inbox.put(work, *args)

    # -- the loop -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop:
            poller = zmq.Poller()
            poller.register(self._inbox, zmq.POLLIN)
            for link in self.links.values():
                poller.register(link.socket, zmq.POLLIN)
            poller.poll(BUSY_POLL_SECONDS * 1000 if self.reader.busy else IDLE_SECONDS * 1000)
            try:
                self._step(time.monotonic())
            except Exception:  # a fault of ours: the requests end by their deadlines, the thread goes on
                log.exception("puller step failed")
                self.totals["internal_errors"] += 1
                time.sleep(0.05)
        self._inbox.close()

    def _step(self, now: float) -> None:
        for work, *args in self._inbox.take():
            self._guard(next((a for a in args if isinstance(a, Pull)), None), work, *args)
        for link in list(self.links.values()):
            self._guard(None, link.process, now)
        self.reader.seek(now)
        self._drop_failed_links()
        self.reader.step(now)
        for pull in [p for p in self.live if now >= p.deadline]:
            self._give_up(pull, pull.doubt or DeadlineExceeded(f"request stayed in state {pull.state!r}", room=pull.room, peer=pull.source,
                                                               limit=f"{self.limits.await_seconds} s"))
        self.leases.process(now)
        self._drop_failed_links()
        if self.reader.staging.quarantined:
            self.reader.staging.sweep()
        if now - self._sampled_at >= IDLE_SECONDS:
            self._sampled_at = now
            self.sample()
        if now - self._exported_at >= 1.0:
            self._exported_at = now
            pulls = sum(pull.state != SERVING for pull in self.live)
            self.export(self.totals, {"pulls": pulls, "staging_quarantined": self.reader.staging.quarantined})

    def _guard(self, pull: Pull | None, work, *args) -> None:
        """An error ends the pull it belongs to; a fault of ours must not take the others along."""
        try:
            work(*args)
        except OasisError as error:
            reason = error
        except Exception as error:
            log.exception("pull failed")
            self.totals["internal_errors"] += 1
            reason = RoomFailed(f"internal error while pulling: {error!r}", room=pull.room if pull else None)
        else:
            return
        if pull is not None:
            self._give_up(pull, reason)

    # -- finding the manifest -----------------------------------------------------------------------------------

    def _begin(self, pull: Pull) -> None:
        if any(p.room == pull.room for p in self.live):
            self._refuse(pull, RoomFailed("duplicate bootstrap room on this decode node", room=pull.room, peer=pull.source))
            return
        if self.draining or len(self.live) >= MAX_LIVE:
            self._unwanted[pull] = self._refusal(pull)
        self.live.add(pull)
        self.totals["requests"] += 1
        same = self._resolving.setdefault(pull.source, [])
        same.append(pull)
        if len(same) == 1:  # one look-up at a time for each node: a hanging one takes one thread, not all
            self._resolvers.submit(self._resolve, pull.source)

    def _refusal(self, pull: Pull) -> OasisError:
        if self.draining:
            return Draining("the decode node is going down and takes nothing new", room=pull.room, peer=self.node)
        return CapacityError("too many requests on this decode node", room=pull.room, limit=f"{MAX_LIVE} at a time", retryable=True)

    def _resolve(self, source: str) -> None:
        """On a resolver thread."""
        try:
            answer = self.resolve(source)
        except OasisError as error:
            answer = error
        except Exception as error:
            answer = PeerLost(f"cannot learn the prefill node's tier: {error!r}", peer=source)
        self._post(self._resolved, source, answer)

    def _resolved(self, source: str, answer: dict | OasisError) -> None:
        for pull in self._resolving.pop(source):
            if isinstance(answer, OasisError):
                self._guard(pull, self.rooms.unresolved, pull, answer)
            else:
                self._guard(pull, self.rooms.begin, pull, answer["control"])
            if refusal := self._unwanted.pop(pull, None):
                self._give_up(pull, refusal)

    def _source_lost(self, source: str) -> None:
        for pull in [p for p in self.live if p.source == source and p.state in (RESOLVING, AWAITING)]:
            self.rooms.source_lost(pull)

    def _link(self, address: str) -> TierLink:
        link = self.links.get(address)
        if link is not None and link.error is not None:
            self._drop_link(link)
            link = None
        if link is None:
            try:
                link = self.links[address] = TierLink(
                    self._context, address, node=self.node, rank=self.rank, layout=self.layout, fingerprint=self.fingerprint,
                    silence=self.limits.silence_seconds, now=time.monotonic(), on_ready=self._linked, security=self.security)
            except OasisError:
                self.forget(address)  # perhaps its prefill node names another one by now
                raise
        return link

    def _linked(self, link: TierLink) -> None:
        self.leases.expect(link.welcome.lease_seconds)
        self.rooms.welcomed(link)
        try:
            self.reader.attach(link)
        except OasisError as error:
            link.fail(error)

    def _drop_link(self, link: TierLink) -> None:
        if self.links.get(link.address) is link:
            del self.links[link.address]
        self.totals["links_lost"] += 1
        self.forget(link.address)
        for pull in [p for p in self.live if p.link is link]:
            self._give_up(pull, link.error)
        self.reader.detach(link)

    def _drop_failed_links(self) -> None:
        for link in [link for link in self.links.values() if link.error is not None]:
            self._drop_link(link)

    def _found(self, pull: Pull, link: TierLink, manifest: m.Manifest) -> None:
        pull.link, pull.manifest = link, manifest
        pull.lease_expires = time.monotonic() + manifest.lease_seconds
        self.leases.expect(manifest.lease_seconds)
        try:
            pull.unpack(self.layout, self.fingerprint, self.rank)
        except OasisError as error:
            self._give_up(pull, error)
            return
        n = len(m.encode(manifest))
        pull.bytes_by_phase["manifest"] += n
        self.totals["bytes_manifest"] += n
        pull.deadline, pull.ready_at = float("inf"), time.monotonic()  # from here the lease and the reads have deadlines of their own
        pull.state = READY

    # -- reading ------------------------------------------------------------------------------------------------

    def _fetch(self, pull: Pull, destination: Destination, write_row, vacant: Event | None) -> None:
        with pull.lock:
            if pull.state != READY or pull.cancelled:
                return
            jobs = destination.start(pull)
            pull.destination, pull.write_row, pull.vacant, pull.fetched_at, pull.state = destination, write_row, vacant, time.monotonic(), PULLING
        self._read(pull, jobs)

    def _read(self, pull: Pull, jobs: list[Job]) -> None:
        """Reads what its admission needs next."""
        pull.unfinished = len(jobs)
        for job in jobs:
            self.reader.add(job)
        if not jobs:
            self._advance(pull)

    def _finished(self, job: Job) -> None:
        pull = job.pull
        with pull.lock:
            if not pull.wanted:
                return
            job.finished()
        if pull.state == SERVING:
            self._report(pull)
            return
        pull.unfinished -= 1
        if not pull.unfinished:
            self._advance(pull)

    def _advance(self, pull: Pull) -> None:
        """All that its destination asked for so far is there."""
        with pull.lock:
            if not pull.wanted:
                return
            jobs = pull.destination.more(pull)
            if not jobs:
                pull.write_row(pull.manifest.metadata)
                self.totals["admitted"] += 1
                pull.admit()
        if jobs:
            self._read(pull, jobs)
        elif pull.state == SERVING:
            self._report(pull)
        else:
            self._finish(pull)

    def _demand(self, pull: Pull, job: Job) -> None:
        if pull.state == SERVING and not pull.released:
            self.totals["demands"] += 1
            self.totals["demanded_items"] += len(job.offsets)
            self.reader.add(job)

    # -- ends ---------------------------------------------------------------------------------------------------

    def _give_up(self, pull: Pull, error: OasisError) -> None:
        if pull.state in (DONE, FAILED):
            return
        if pull.released:
            self._release(pull)
            return
        self.rooms.withdraw(pull)
        self._refuse(pull, error)
        self._finish(pull)

    def _refuse(self, pull: Pull, error: OasisError) -> None:
        self.totals[f"failed_{pull.state}"] += 1
        self.totals["failed"] += 1
        pull.error = error
        pull.state = FAILED

    def _release(self, pull: Pull) -> None:
        if pull.state == SERVING:
            self.totals["released"] += 1
            pull.state = DONE
            self._finish(pull)

    def _finish(self, pull: Pull) -> None:
        if pull.manifest is not None:
            self._report(pull)
        self.live.discard(pull)
        if pull.manifest is not None:
            self.leases.release(pull.link, pull.manifest.lease, doubted=isinstance(pull.error, IntegrityError))

    def _report(self, pull: Pull) -> None:
        name = pull.rid or str(pull.room)
        self.reports.pop(name, None)
        self.reports[name] = pull.report(self.layout.token_bytes)
        if len(self.reports) > REPORTED_REQUESTS:
            del self.reports[next(iter(self.reports))]
