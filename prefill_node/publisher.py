"""Publishing: one thread per prefill rank moves finished pages from the KV pool into the tier's arena.

The scheduler thread never waits for the tier: it posts work and polls ``Publication.state``. Nor does this thread wait: a tier
with memory nodes may take long to reserve or to commit one prompt, and the others go on. The one exception is ``cancel``, which
waits for one copied batch or one ranking at most, because the pool's pages are reused the moment it returns.

    OPENING --reserved--> OPEN --chunks copied, commit acknowledged--> COMMITTED
        `---------------------`--> FAILED (``error`` says why)
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from prefill_node.pages import ArenaWriter, PageSource
from transport import messages as m
from transport import request_log
from transport.errors import CapacityError, DeadlineExceeded, Draining, DuplicateRoom, OasisError, PeerLost, RoomFailed
from transport.hashing import page_hashes
from transport.records import HASH_BYTES
from transport.worker_client import WorkerClient

log = logging.getLogger("oasis.publisher")

OPENING, OPEN, COMMITTED, FAILED = "opening", "open", "committed", "failed"
BATCH_BYTES = 16 << 20
RANKED_BLOCKS = 1024
"""Blocks per (layer, KV head) that a manifest ranks at most."""
RETRY_SECONDS = 0.02
ANSWER_SECONDS = 0.002
"""How long an answer of the tier is waited for between two looks at what else there is to do."""
REATTACH_SECONDS = 1.0
MAX_LIVE = 4096
"""Publications under way at most; each waits for room no longer than ``reserve_seconds``, and whoever comes then is refused at once."""


@dataclass(eq=False)
class Publication:
    """One request on one rank. ``tokens`` int64 [prompt]; ``seed`` starts its hash chain, None = never shared; ``wish``: as in ``Open``.
    ``pool_pages`` int64 [pages]: where in the KV pool each page of the prompt lies, known once it was sent.

    Owner: the sender that posted it; the publisher's thread alone writes ``state`` and the arrays.
    """

    room: int
    tokens: np.ndarray
    seed: bytes | None
    pages: int
    deadline: float
    wish: m.Wish | None = None
    rid: str = ""
    began: float = field(default_factory=time.monotonic)
    opened_at: float = 0.0
    state: str = OPENING
    error: OasisError | None = None
    cancelled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    records: np.ndarray | None = None
    generations: np.ndarray | None = None
    roots: np.ndarray | None = None
    fresh: np.ndarray | None = None
    pool_pages: np.ndarray | None = None
    copied_bytes: int = 0
    deferred: list[tuple] = field(default_factory=list)
    """Work that came before its room was open."""


class Publisher:
    """Owner of the worker's connection to the tier and of every copy in flight.

    ``on_attach(welcome)`` is called on the publisher's thread after each re-attachment (a tier that restarted has a new
    epoch). ``totals`` counts; ``export`` (optional) is called about once a second with it.
    """

    def __init__(self, client: WorkerClient, hello: dict, source: PageSource, summary, *, reserve_seconds: float,
                 on_attach: Callable[[m.Welcome], None] = lambda welcome: None, export: Callable[[dict, dict], None] = lambda totals, gauges: None):
        self.client, self.hello, self.source, self.summary = client, hello, source, summary
        self.layout = source.layout
        self.rank = hello["rank"]
        self.reserve_seconds = reserve_seconds
        self.on_attach, self.export = on_attach, export
        self.totals: Counter[str] = Counter()  # all whole numbers but votes_seconds
        self.live: set[Publication] = set()
        self.draining = False
        self._waiting: list[Publication] = []
        self._orphans: list[int] = []
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._stop = threading.Event()
        self._retry_at = self._exported_at = 0.0
        self.writer = self._attach()
        self._thread = threading.Thread(target=self._run, name="oasis-publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -- scheduler thread ---------------------------------------------------------------------------------------

    def publish(self, room: int, tokens: np.ndarray, seed: bytes | None, wish: m.Wish | None = None, rid: str = "") -> Publication:
        """Starts a publication: reserves its room and records. ``wish``: what the tier may fetch from a memory node before. ``rid`` names it
        in the log."""
        pages = -(-len(tokens) // self.layout.block_tokens)
        pub = Publication(room, tokens, seed, pages, time.monotonic() + self.reserve_seconds, wish, rid)
        self._inbox.put((self._open, pub))
        return pub

    def send(self, pub: Publication, pages: np.ndarray, first: int, tokens: int, ready: object | None) -> None:
        """Pool pages int [n] hold prompt pages ``first``... with ``tokens`` valid tokens in them; ``ready`` is an event
        that must have happened before they are read (None: they are complete)."""
        self._inbox.put((self._copy, pub, pages, first, tokens, ready))

    def commit(self, pub: Publication, metadata: tuple[bytes, ...], queries: torch.Tensor | None = None, scale: float = 1.0) -> None:
        """All pages were sent: publishes the manifest. ``queries`` float [n, layers, query heads, head_dim]: of the prompt's
        last n tokens, after RoPE, complete, on the pool's device; None: its blocks are not ranked. ``scale``: of the softmax."""
        self._inbox.put((self._commit, pub, metadata, queries, scale))

    def cancel(self, pub: Publication, reason: str) -> None:
        """After it returns the pool's pages are no longer read. Idempotent."""
        if pub.state in (COMMITTED, FAILED):
            return
        again, pub.cancelled = pub.cancelled, True  # before the lock, or the next batch may take it first
        with pub.lock:
            pass
        if not again:
            self._inbox.put((self._abandon, pub, RoomFailed(reason, room=pub.room)))

    def refuse_new(self) -> None:
        """From now on ``publish`` makes publications that fail with ``Draining``; those under way go on. Any thread."""
        self.draining = True

    def drain(self, seconds: float) -> int:
        """Takes nothing new and waits, ``seconds`` at most, until what was given up is told to the tier and commits under way are
        acknowledged. Returns how many publications are left: the tier reclaims their records when the connection closes."""
        self.refuse_new()
        end, seen = time.monotonic() + seconds, threading.Event()
        self._inbox.put((seen.set,))
        seen.wait(seconds)
        while self.live and time.monotonic() < end:
            time.sleep(RETRY_SECONDS)
        return len(self.live)

    def close(self) -> None:
        self._stop.set()
        self._inbox.put((lambda: None,))
        self._thread.join(timeout=10)
        self.client.close()

    # -- publisher thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._step()
            except Exception:  # a fault of ours that belongs to no publication: the thread goes on
                log.exception("publisher step failed")
                self.totals["internal_errors"] += 1
                time.sleep(0.05)

    def _step(self) -> None:
        outstanding = self.client.outstanding > 0
        try:
            work, *args = self._inbox.get(not outstanding, RETRY_SECONDS if self._waiting else 1.0)
        except queue.Empty:
            patience = ANSWER_SECONDS
        else:
            self._guard(work, *args)
            patience = 0.0
        if outstanding:
            self._answers(patience)
        now = time.monotonic()
        if now >= self._retry_at:
            self._retry_at = now + RETRY_SECONDS
            retry, self._waiting = self._waiting, []
            for pub in retry:
                self._guard(self._open, pub)
            self._check_connection()
        if now - self._exported_at >= 1.0:
            self._exported_at = now
            self.export(self.totals, {"publications": len(self.live)})

    def _answers(self, seconds: float) -> None:
        """Takes what the tier has answered, waiting at most ``seconds`` for it."""
        try:
            self.client.process(seconds)
        except OasisError as error:
            self._lost(error)

    def _guard(self, work, *args) -> None:
        """An error ends the publication it belongs to, never the thread."""
        pub = args[0] if args else None
        if pub is not None and (pub.state == FAILED or (pub.cancelled and work not in (self._abandon, self._committed))):
            return
        try:
            try:
                work(*args)
            except (PeerLost, DeadlineExceeded):
                raise
            except OasisError as error:
                self._abandon(pub, error)
            except Exception as error:  # a fault of ours must reach the request, not a dead thread
                log.exception("publication failed")
                if pub is not None:
                    self._abandon(pub, RoomFailed(f"internal error while publishing: {error!r}", room=pub.room))
        except OasisError as error:  # the tier, also while a room was being given up there
            self._lost(error)
            if pub is not None:
                self._fail(pub, error)

    def _open(self, pub: Publication) -> None:
        if any(other.room == pub.room for other in self.live - {pub}):
            raise DuplicateRoom("the bootstrap room is in use on this prefill node", room=pub.room)
        if pub not in self.live and (refusal := self._refusal(pub)):
            self._abandon(pub, refusal)
            return
        self._check_connection()  # a tier that is back need not be found first: who lost a request with the old one sends it here at once
        if pub.state == FAILED:
            return
        self.live.add(pub)
        hashes = b"" if pub.seed is None else page_hashes(pub.seed, pub.tokens, self.layout.block_tokens)
        private = pub.pages - len(hashes) // HASH_BYTES
        self.client.post(m.Open, lambda reply: self._guard(self._opened, pub, reply), room=pub.room, rank=self.rank, seed=pub.seed or b"",
                         hashes=hashes, private=private, wish=pub.wish if hashes else None)

    def _refusal(self, pub: Publication) -> OasisError | None:
        """Why this node takes no more; not raised, since it says nothing about the tier."""
        if self.draining:
            return Draining("the prefill node is going down and takes nothing new", room=pub.room, peer=self.hello["node"])
        if len(self.live) >= MAX_LIVE:
            return CapacityError("too many prompts wait on this prefill node", room=pub.room, limit=f"{MAX_LIVE} at a time", retryable=True)
        return None

    def _opened(self, pub: Publication, opened: m.Opened | OasisError) -> None:
        if isinstance(opened, CapacityError) and opened.retryable:
            if time.monotonic() < pub.deadline:
                self.totals["reserve_retries"] += 1
                self._waiting.append(pub)
                return
            opened.limit = f"{opened.limit}; waited {self.reserve_seconds} s"
        if isinstance(opened, OasisError):
            self._abandon(pub, opened)
            return
        pub.records = m.unpack(opened.records, "u4", count=pub.pages).astype(np.int64)
        pub.generations = m.unpack(opened.generations, "u8", count=pub.pages)
        pub.roots = m.unpack(opened.roots, "u8", count=pub.pages).copy()
        pub.fresh = np.frombuffer(opened.fresh, np.uint8).astype(bool)
        pub.pool_pages = np.full(pub.pages, -1, np.int64)
        pub.state, pub.opened_at = OPEN, time.monotonic()
        self.totals["pages_reused"] += int((~pub.fresh).sum())
        deferred, pub.deferred = pub.deferred, []
        for work, *args in deferred:
            self._guard(work, pub, *args)

    def _copy(self, pub: Publication, pages: np.ndarray, first: int, tokens: int, ready: object | None) -> None:
        if pub.state == OPENING:
            pub.deferred.append((self._copy, pages, first, tokens, ready))
            return
        if ready is not None:
            ready.synchronize()
        index = np.arange(first, first + len(pages))
        pub.pool_pages[index] = pages
        wanted = np.flatnonzero(pub.fresh[index])
        step = max(1, BATCH_BYTES // self.layout.payload_bytes)
        for start in range(0, len(wanted), step):
            part = wanted[start : start + step]
            ends_run = part[-1] == len(pages) - 1
            valid = len(part) * self.layout.block_tokens
            if ends_run:
                valid -= len(pages) * self.layout.block_tokens - tokens
            with pub.lock:
                if pub.cancelled:
                    return
                self._write(pub, index[part], pages[part], valid)

    def _write(self, pub: Publication, index: np.ndarray, pages: np.ndarray, tokens: int) -> None:
        block = self.source.gather(self._on_device(pages), tokens)
        summaries = None
        if self.summary is not None:
            summaries = self.summary.build(block[:, :, :, 0]).cpu()
        records = pub.records[index]
        pub.roots[index] = self.writer.write(records, pub.generations[index], block.cpu(), summaries)
        written = len(index) * (self.layout.payload_bytes + self.layout.index_bytes)
        pub.copied_bytes += written
        self.totals["pages_published"] += len(index)
        self.totals["bytes_published"] += written

    def _on_device(self, pages: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(pages).to(self.source.keys[0].device)

    def _commit(self, pub: Publication, metadata: tuple[bytes, ...], queries: torch.Tensor | None, scale: float) -> None:
        if pub.state == OPENING:
            pub.deferred.append((self._commit, metadata, queries, scale))
            return
        with pub.lock:  # SGLang keeps the pages until we report the commit, but for a cancelled request
            ranking = b"" if pub.cancelled else self._rank(pub, queries, scale)
        if pub.cancelled:
            return
        self.client.post(m.Commit, lambda reply: self._guard(self._committed, pub, reply), room=pub.room, rank=self.rank,
                         prompt_tokens=len(pub.tokens), roots=m.pack(pub.roots, "u8"), ranking=ranking, metadata=metadata)

    def _committed(self, pub: Publication, reply: m.Reply | OasisError) -> None:
        """Also of one that was cancelled since: then its reader cancels it, or it expires at the tier."""
        if isinstance(reply, OasisError):
            self._abandon(pub, reply)
            return
        pub.state = COMMITTED
        self.live.discard(pub)
        self.totals["rooms_committed"] += 1
        self._log(pub)

    def _rank(self, pub: Publication, queries: torch.Tensor | None, scale: float) -> bytes:
        """The manifest's ``ranking``, from the keys of every page of the prompt, also of those that the tier already had."""
        whole = len(pub.tokens) // self.layout.block_tokens
        if queries is None or not whole:
            return b""
        from oasis_sglang.selection import votes

        start = time.monotonic()
        mass = votes.vote(queries, self.source.keys, self._on_device(pub.pool_pages), len(pub.tokens), scale)
        ranking = m.pack(votes.ranking(mass, whole, RANKED_BLOCKS), "u4")
        self.totals["votes_seconds"] += time.monotonic() - start
        self.totals["rooms_ranked"] += 1
        return ranking

    def _abandon(self, pub: Publication, error: OasisError) -> None:
        if pub.state in (COMMITTED, FAILED):
            return
        self._fail(pub, error)
        others = isinstance(error, DuplicateRoom) or any(other.room == pub.room for other in self.live)
        if not others:  # else the room is another request's
            self.client.call(m.Abort, room=pub.room, rank=self.rank, reason=str(error), retryable=error.retryable)

    def _fail(self, pub: Publication, error: OasisError) -> None:
        if pub.state in (COMMITTED, FAILED):
            return
        self.live.discard(pub)
        self.totals[f"failed_{pub.state}"] += 1
        pub.error = error
        pub.state = FAILED
        self.totals["rooms_failed"] += 1
        self._log(pub)

    def _log(self, pub: Publication) -> None:
        now = time.monotonic()
        opened = pub.opened_at or now
        request_log.end("prefill", rid=pub.rid, room=pub.room, rank=self.rank, prompt_tokens=len(pub.tokens), pages=pub.pages,
                        pages_reused="" if pub.fresh is None else int((~pub.fresh).sum()), published_bytes=pub.copied_bytes, outcome=pub.state,
                        failure=pub.error.code if pub.error else "", reserving=opened - pub.began, computing=now - opened, total=now - pub.began)

    # -- the tier came and went ---------------------------------------------------------------------------------

    def _attach(self) -> ArenaWriter:
        welcome = self.client.attach(**self.hello)
        return ArenaWriter(self.client.arena, welcome.geometry, self.layout)

    def _lost(self, error: OasisError) -> None:
        """Every uncommitted publication is void: the tier that reserved its records is gone."""
        self.client.close()
        # Of readers that still wait; more could come while a tier stays away than it remembers.
        self._orphans = [*self._orphans, *(pub.room for pub in self.live)][-MAX_LIVE:]
        for pub in list(self.live):
            self._fail(pub, error)
        self._waiting.clear()

    def _check_connection(self) -> None:
        if self.client.alive():
            return
        if self.live:
            self._lost(PeerLost("the tier closed the connection", peer=self.client.peer))
        try:
            self.writer = self._attach()
        except OasisError as error:
            self._retry_at = time.monotonic() + REATTACH_SECONDS
            self.totals["attach_failures"] += 1
            log.debug("re-attachment failed: %s", error)
            return
        self.totals["reattached"] += 1
        # Readers already wait for these rooms at the new incarnation, which has never heard of them.
        try:
            while self._orphans:
                self.client.call(m.Abort, room=self._orphans[-1], rank=self.rank, reason="the tier restarted before the commit", retryable=True, lost=True)
                self._orphans.pop()
        except OasisError as error:
            self._lost(error)
            return
        log.info("re-attached to %s, epoch %s", self.client.peer, self.client.welcome.epoch[:8])
        try:
            self.on_attach(self.client.welcome)
        except Exception:  # the next request's peer look-up fails by name; publishing itself works
            log.exception("cannot announce the tier's new epoch")
