"""Pulling: one thread per decode rank asks tiers for manifests, keeps their leases and has the records read.

Before READY (``pull.py`` has the states) a request holds no KV page: decode admits nothing that prefill has not committed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import zmq

from decode_node.pages import PageSink
from decode_node.pull import AWAITING, DONE, FAILED, PULLING, READY, RESOLVING, Event, Pull, PullLimits
from decode_node.reader import RecordReader
from decode_node.tier_link import TierLink
from transport import messages as m
from transport.dataplane import DataPlane
from transport.errors import DeadlineExceeded, LayoutMismatch, LeaseExpired, OasisError, PeerLost, ProtocolError, RoomFailed
from transport.layout import KVLayout
from transport.staging import Staging

log = logging.getLogger("oasis.puller")

BUSY_POLL_SECONDS = 0.0005
IDLE_SECONDS = 0.25
REPORTED_REQUESTS = 1024
RESOLVERS = 8


class Puller:
    """Owner of the requests, the links to tiers and the leases; its ``reader`` owns the reads.

    ``resolve(source)`` -> peer row of a prefill node (blocking HTTP; runs on a small pool so that a dead node delays
    nobody else); ``forget(control address)`` says that what ``resolve`` cached about a tier is void; ``sample()`` is
    called at least every 0.25 s (peak gauges); ``export`` about once a second.
    """

    def __init__(self, *, node: str, rank: int, layout: KVLayout, fingerprint: str, sink: PageSink, plane: DataPlane, staging: Staging,
                 resolve: Callable[[str], dict], forget: Callable[[str], None], limits: PullLimits, sample: Callable[[], None] = lambda: None,
                 export: Callable[[dict, dict], None] = lambda totals, gauges: None):
        self.node, self.rank, self.layout, self.fingerprint = node, rank, layout, fingerprint
        self.resolve, self.forget, self.limits, self.sample, self.export = resolve, forget, limits, sample, export
        self.totals: Counter[str] = Counter()
        self.live: set[Pull] = set()
        self.reports: OrderedDict[str, dict] = OrderedDict()
        self.links: dict[str, TierLink] = {}
        self.reader = RecordReader(layout, sink, plane, staging, limits, self.totals, done=self._admitted, fail=self._give_up, guard=self._guard)
        self._inbox: list[tuple] = []
        self._inbox_lock = threading.Lock()
        self._context = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._resolving: dict[str, list[Pull]] = {}
        self._resolvers = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="oasis-resolve")
        self._renew_at = self._exported_at = self._sampled_at = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="oasis-puller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -- any thread ---------------------------------------------------------------------------------------------

    def pull(self, room: int, source: str, *, rid: str = "") -> Pull:
        """Starts a request: finds its tier and waits for its commit. ``rid`` names it in reports."""
        pull = Pull(room, source, time.monotonic() + self.limits.await_seconds, rid)
        self._post(self._begin, pull)
        return pull

    def fetch(self, pull: Pull, pages: np.ndarray, write_row: Callable[[tuple[bytes, ...]], None], vacant: Event | None = None) -> None:
        """Names the destination: pool pages int64 [pages of the prompt], in order; ``write_row`` takes the hand-over row.
        Nothing is written there before ``vacant`` has happened (None: it has)."""
        self._post(self._fetch, pull, pages, write_row, vacant)

    def cancel(self, pull: Pull, reason: str) -> None:
        """After it returns neither pages nor row are written any more. Idempotent."""
        with pull.lock:
            if pull.cancelled or pull.state in (DONE, FAILED):
                return
            pull.cancelled = True
        self._post(self._give_up, pull, RoomFailed(reason, room=pull.room))

    def source_lost(self, source: str) -> None:
        """A prefill node is dead. What it committed stands; the rest fails soon, by the tier or by this."""
        self._post(self._shorten, source)

    def close(self) -> None:
        self._stop = True
        self._post(lambda: None)
        self._thread.join(timeout=10)
        self._resolvers.shutdown(wait=False, cancel_futures=True)
        # An open socket would block whoever collects the context, for ever.
        self._context.destroy(linger=200)
        self.reader.close()

    def _post(self, work, *args) -> None:
        with self._inbox_lock:
            self._inbox.append((work, *args))
        os.eventfd_write(self._wake, 1)

    # -- the loop -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop:
            poller = zmq.Poller()
            poller.register(self._wake, zmq.POLLIN)
            for link in self.links.values():
                poller.register(link.socket, zmq.POLLIN)
            poller.poll(BUSY_POLL_SECONDS * 1000 if self.reader.busy else IDLE_SECONDS * 1000)
            try:
                self._step(time.monotonic())
            except Exception:  # a fault of ours: the requests end by their deadlines, the thread goes on
                log.exception("puller step failed")
                self.totals["internal_errors"] += 1
                time.sleep(0.05)

    def _step(self, now: float) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with self._inbox_lock:
            inbox, self._inbox = self._inbox, []
        for work, *args in inbox:
            self._guard(next((a for a in args if isinstance(a, Pull)), None), work, *args)
        for link in list(self.links.values()):
            self._guard(None, link.process, now)
        self.reader.seek(now)
        self._drop_failed_links()
        self.reader.step(now)
        for pull in [p for p in self.live if now >= p.deadline]:
            self._give_up(pull, DeadlineExceeded(f"request stayed in state {pull.state!r}", room=pull.room, peer=pull.source,
                                                 limit=f"{self.limits.await_seconds} s"))
        if now >= self._renew_at:
            self._renew(now)
        self._drop_failed_links()
        if self.reader.staging.quarantined:
            self.reader.staging.sweep()
        if now - self._sampled_at >= IDLE_SECONDS:
            self._sampled_at = now
            self.sample()
        if now - self._exported_at >= 1.0:
            self._exported_at = now
            self.export(self.totals, {"pulls": len(self.live), "staging_quarantined": self.reader.staging.quarantined})

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
        self.live.add(pull)
        self.totals["requests"] += 1
        same = self._resolving.setdefault(pull.source, [])
        same.append(pull)
        if len(same) == 1:  # one look-up at a time for each node: a hanging one takes one thread, not all
            self._resolvers.submit(self._resolve, pull.source)

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
                self._give_up(pull, answer)
            else:
                self._guard(pull, self._await, pull, answer["control"])

    def _await(self, pull: Pull, address: str) -> None:
        if pull.state != RESOLVING or pull.cancelled:
            return
        pull.link = self._link(address)
        pull.state = AWAITING
        seconds = max(0.0, pull.deadline - time.monotonic())
        pull.link.request(m.Await, dict(room=pull.room, rank=self.rank, seconds=seconds), lambda reply: self._manifest(pull, reply),
                          deadline=pull.deadline + self.limits.silence_seconds)

    def _link(self, address: str) -> TierLink:
        link = self.links.get(address)
        if link is not None and link.error is not None:
            self._drop_link(link)
            link = None
        if link is None:
            link = self.links[address] = TierLink(
                self._context, address, node=self.node, rank=self.rank, layout=self.layout, fingerprint=self.fingerprint,
                silence=self.limits.silence_seconds, now=time.monotonic(), on_ready=self._linked)
        return link

    def _linked(self, link: TierLink) -> None:
        self._renew_at = min(self._renew_at, time.monotonic() + link.welcome.lease_seconds / 3)
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

    def _manifest(self, pull: Pull, reply: m.Reply | OasisError) -> None:
        if isinstance(reply, OasisError):
            self._give_up(pull, reply)
            return
        if not isinstance(reply, m.Manifest):
            self._give_up(pull, ProtocolError("the tier answered with something else than a manifest", room=pull.room, peer=pull.link.peer))
            return
        release = dict(leases=m.pack([reply.lease], "u8"))
        if pull.state != AWAITING or pull.cancelled:
            self._tell(pull.link, m.Release, release)
            return
        pull.manifest = reply
        pull.lease_expires = time.monotonic() + reply.lease_seconds
        self._renew_at = min(self._renew_at, time.monotonic() + reply.lease_seconds / 3)
        try:
            if (reply.epoch, reply.room, reply.rank) != (pull.link.epoch, pull.room, self.rank):
                raise ProtocolError("a manifest of another room", room=pull.room, peer=pull.link.peer)
            self.layout.require_equal(reply.layout, peer=pull.link.peer, room=pull.room)
            if reply.fingerprint != self.fingerprint:  # the tier's worker may have changed since it welcomed us
                raise LayoutMismatch(f"model differs: fingerprint {self.fingerprint[:12]} here, {reply.fingerprint[:12]} in the manifest",
                                     field="fingerprint", peer=pull.link.peer, room=pull.room)
            pages = -(-reply.prompt_tokens // self.layout.block_tokens)
            pull.records = m.unpack(reply.records, "u4", count=pages).astype(np.int64)
            pull.generations = m.unpack(reply.generations, "u8", count=pages)
            pull.roots = m.unpack(reply.roots, "u8", count=pages)
            pull.link.welcome.geometry.payload_offsets(pull.records)
        except OasisError as error:
            self._give_up(pull, error)
            return
        pull.bytes_by_phase["manifest"] = len(m.encode(reply))
        pull.deadline = float("inf")  # from here the lease and the reads have deadlines of their own
        pull.state = READY

    # -- reading ------------------------------------------------------------------------------------------------

    def _fetch(self, pull: Pull, pages: np.ndarray, write_row, vacant: Event | None) -> None:
        if pull.state != READY or pull.cancelled:
            return
        if len(pages) != len(pull.records):
            self._give_up(pull, RoomFailed("prefill and decode disagree on the prompt", room=pull.room, peer=pull.source,
                                           limit=f"{len(pages)} pages here, {len(pull.records)} committed"))
            return
        pull.pages, pull.write_row, pull.vacant, pull.state = pages, write_row, vacant, PULLING
        self.reader.add(pull)

    # -- ends ---------------------------------------------------------------------------------------------------

    def _give_up(self, pull: Pull, error: OasisError) -> None:
        if pull.state in (DONE, FAILED):
            return
        if pull.state == AWAITING and pull.link.error is None:
            self._tell(pull.link, m.Cancel, dict(room=pull.room, rank=self.rank))
        self._refuse(pull, error)
        self._finish(pull)

    def _refuse(self, pull: Pull, error: OasisError) -> None:
        self.totals[f"failed_{pull.state}"] += 1
        pull.error = error
        pull.state = FAILED
        self.totals["failed"] += 1

    def _finish(self, pull: Pull) -> None:
        self.live.discard(pull)
        if pull.manifest is not None:
            if pull.link.error is None:
                self._tell(pull.link, m.Release, dict(leases=m.pack([pull.manifest.lease], "u8")))
            self.reports[pull.rid or str(pull.room)] = pull.report(self.layout.token_bytes)
            while len(self.reports) > REPORTED_REQUESTS:
                self.reports.popitem(last=False)

    def _admitted(self, pull: Pull) -> None:
        self.totals["admitted"] += 1
        for phase, n in pull.bytes_by_phase.items():
            self.totals[f"bytes_{phase}"] += n
        self._finish(pull)

    def _tell(self, link: TierLink, make: type, fields: dict) -> None:
        link.request(make, fields, lambda reply: None, deadline=time.monotonic() + self.limits.silence_seconds)

    def _renew(self, now: float) -> None:
        """One message per tier keeps all its leases alive, and tells a dead tier from a slow one."""
        pause = min((link.welcome.lease_seconds / 3 for link in self.links.values() if link.welcome), default=1.0)
        for link in self.links.values():
            if link.welcome is None or link.error is not None:
                continue
            held = [p for p in self.live if p.link is link and p.manifest is not None]
            sent = now
            link.request(m.Renew, dict(leases=m.pack([p.manifest.lease for p in held], "u8")),
                         lambda reply, held=held, link=link: self._renewed(held, link, sent, reply), deadline=now + self.limits.silence_seconds)
        self._renew_at = now + max(0.1, pause)

    def _renewed(self, held: list[Pull], link: TierLink, sent: float, reply: m.Reply | OasisError) -> None:
        if isinstance(reply, OasisError):
            return  # the link fails and takes its pulls along
        gone = set(m.unpack(reply.gone, "u8").tolist())
        for pull in held:
            if pull.manifest.lease in gone:
                self._give_up(pull, LeaseExpired("the tier ended the lease", room=pull.room, peer=link.peer))
            else:
                pull.lease_expires = sent + link.welcome.lease_seconds

    def _shorten(self, source: str) -> None:
        soon = time.monotonic() + self.limits.silence_seconds
        for pull in self.live:
            if pull.source == source and pull.state in (RESOLVING, AWAITING):
                pull.deadline = min(pull.deadline, soon)
