"""What a request pulls before it decodes, given what this node has of its prompt already.

``SelectedBlocks``: a request with a working set. The index of the whole blocks, then the selected pieces and the partial page.
Every piece goes to the host cache, so that it crosses the wire once however often it leaves and enters a slot, and however many
requests have its block; those of the first working set also go straight to their slots, which nothing reads before the
request runs. Of critical heads every piece is there, in the dense lane.

``AllBlocks``: a request that holds all its blocks, on a node that keeps them for the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from decode_node.block_store import BlockStore
from decode_node.destination import Destination
from decode_node.entry import Entry
from decode_node.host_cache import HostCache
from decode_node.lane import DenseLane
from decode_node.pages import PageSink
from decode_node.pieces import PoolPieces
from decode_node.pull import Pull
from decode_node.reader import Job
from decode_node.working_set import WorkingSets
from oasis_sglang.selection.planner import initial_selection
from transport.integrity import verify_index, verify_pieces, verify_records
from transport.layout import KVLayout

COPY_BYTES = 4 << 20
"""Pieces that are copied out of the host cache at a time: a step boundary that wants some waits for as long."""


class PieceReads:
    """Makes the jobs that read pieces of a request into the host cache. ``keep``: also those of critical heads, which the lane
    holds for as long as the request runs. ``totals`` counts what did not have to be read."""

    def __init__(self, layout: KVLayout, store: BlockStore, cache: HostCache, sets: WorkingSets, lane: DenseLane | None, totals: Counter[str],
                 *, keep: bool):
        self.layout, self.store, self.cache, self.sets, self.lane, self.totals, self.keep = layout, store, cache, sets, lane, totals, keep

    def job(self, entry: Entry, phase: str, pieces: np.ndarray, blocks: np.ndarray,
            landed: Callable[[np.ndarray, np.ndarray], None] = lambda payloads, which: None) -> Job:
        """Reads ``pieces`` int64 [n] of ``blocks`` int64 [n]. ``landed(payloads uint8 [k, piece_bytes], which int64 [k])`` is
        called with what was verified and cached, ``which`` of the n they are."""
        order = np.lexsort((pieces, blocks))  # neighbours in the arena become one descriptor
        pieces, blocks = pieces[order], blocks[order]
        pull, lay = entry.pull, self.layout
        records, numbers = pull.records[blocks], entry.numbers[blocks]
        digests = entry.digests[blocks, pieces]

        def accept(payloads: np.ndarray, start: int, stop: int) -> None:
            part = slice(start, stop)
            verify_pieces(payloads, digests[part], records[part], peer=pull.link.peer, room=pull.room)
            kept = slice(None) if self.lane is None or self.keep else self.lane.place[pieces[part]] < 0  # what is in the lane never leaves it
            self.cache.insert(pieces[part][kept], numbers[part][kept], payloads[kept])
            self.sets.flying[entry.set, pieces[part], blocks[part]] = False
            landed(payloads, order[part])

        offsets = pull.link.welcome.geometry.piece_offsets(records, pieces, lay)
        return Job(pull=pull, phase=phase, offsets=offsets, unit=lay.piece_bytes, accept=accept)

    def cached(self, pieces: np.ndarray, numbers: np.ndarray, taken: Callable[[np.ndarray, np.ndarray], None]) -> np.ndarray:
        """bool [n]: which ``pieces`` int64 [n] of blocks ``numbers`` int64 [n] this node has; ``taken(data uint8 [k,
        piece_bytes], which int64 [k])`` is called with them."""
        here = np.zeros(len(pieces), bool)
        step = max(1, COPY_BYTES // self.layout.piece_bytes)
        for start in range(0, len(pieces), step):
            part = slice(start, start + step)
            data, here[part] = self.cache.read(pieces[part], numbers[part])
            which = np.flatnonzero(here[part])
            if len(which):
                taken(data[which], which + start)
        self.totals["pieces"] += int(here.sum())
        self.totals["bytes_saved"] += int(here.sum()) * self.layout.piece_bytes
        return here

    def cached_blocks(self, numbers: np.ndarray, taken: Callable[[np.ndarray, np.ndarray], None]) -> np.ndarray:
        """bool [n]: which blocks ``numbers`` int64 [n] this node has complete; ``taken(payloads uint8 [k, payload_bytes], which
        int64 [k])`` is called with them."""
        here, each = self.cache.held(numbers).all(0), np.arange(self.layout.pieces)
        complete = np.flatnonzero(here)
        step = max(1, COPY_BYTES // self.layout.payload_bytes)
        for start in range(0, len(complete), step):
            part = complete[start : start + step]
            data, found = self.cache.read(np.tile(each, len(part)), np.repeat(numbers[part], len(each)))
            here[part] = whole = found.reshape(len(part), -1).all(1)  # others may have pushed some out meanwhile
            taken(data.reshape(len(part), -1)[whole], part[whole])
        self.totals["pieces"] += int(here.sum()) * len(each)
        self.totals["bytes_saved"] += int(here.sum()) * self.layout.payload_bytes
        return here


class SelectedBlocks(Destination):
    """Admission of ``entry``. ``whole_cache``: have every block on this node, not only the first working set (admission=full)."""

    keeps_lease = True

    def __init__(self, entry: Entry, reads: PieceReads, pool: PoolPieces, sink: PageSink, *, whole_cache: bool):
        self.entry, self.reads, self.pool, self.sink, self.whole_cache = entry, reads, pool, sink, whole_cache
        self.layout, self.lane = reads.layout, reads.lane
        self.whole = entry.prompt // self.layout.block_tokens
        self._asked = False

    def start(self, pull: Pull) -> list[Job]:
        entry, store = self.entry, self.reads.store
        entry.digests = np.zeros((self.whole, self.layout.pieces), np.uint64)
        if not self.whole:
            return []
        known = store.known(entry.numbers, pull.roots[: self.whole])
        entry.digests[known] = store.digests[entry.numbers[known]]
        self.reads.totals["indexes"] += int(known.sum())
        self.reads.totals["bytes_saved"] += int(known.sum()) * self.layout.index_bytes
        blocks = np.flatnonzero(~known)
        offsets = pull.link.welcome.geometry.index_offsets(pull.records[blocks])
        return [Job(pull=pull, phase="summaries", offsets=offsets, unit=self.layout.index_bytes,
                    accept=lambda payloads, start, stop: self._index(payloads, blocks[start:stop]))]

    def more(self, pull: Pull) -> list[Job]:
        jobs = [] if self._asked else self._rest(pull)
        self._asked = True
        if not jobs:
            self.pool.settle()
            if self.lane is not None:
                self.lane.settle()
        return jobs

    @property
    def working(self) -> int:
        """Slots in use at the start."""
        return min(self.whole, self.entry.need.working)

    def _rest(self, pull: Pull) -> list[Job]:
        jobs = [self._pieces(pull)] if self.whole else []
        if not self.whole:
            self.reads.sets.place(self.entry.set, np.zeros((self.layout.pieces, 0), np.int64), 0)
        if self.entry.prompt % self.layout.block_tokens:
            offsets = pull.link.welcome.geometry.payload_offsets(pull.records[self.whole :])
            jobs.append(Job(pull=pull, phase="partial_page", offsets=offsets, unit=self.layout.payload_bytes, accept=self._partial))
        return [job for job in jobs if len(job.offsets)]

    def _index(self, payloads: np.ndarray, blocks: np.ndarray) -> None:
        entry, pull = self.entry, self.entry.pull
        digests, summaries = verify_index(payloads, pull.generations[blocks], pull.roots[blocks], pull.records[blocks], self.layout,
                                          peer=pull.link.peer, room=pull.room)
        entry.digests[blocks] = digests
        self.reads.sets.summarise(entry.numbers[blocks], summaries)
        self.reads.store.learn(entry.numbers[blocks], pull.roots[blocks], digests)

    def _pieces(self, pull: Pull) -> Job:
        sets, entry = self.reads.sets, self.entry
        selection = initial_selection(pull.ranking, self.whole, self.working, sets.sink, sets.recent)
        sets.place(entry.set, selection, self.whole)
        pieces = np.repeat(np.arange(self.layout.pieces), selection.shape[1])
        blocks, slots = selection.reshape(-1), np.tile(np.arange(selection.shape[1]), self.layout.pieces)
        if self.whole_cache or self.lane is not None:
            rest = np.full((self.layout.pieces, self.whole), self.whole_cache)
            if self.lane is not None:
                rest[self.lane.pieces] = True
            rest[pieces, blocks] = False
            more = np.nonzero(rest)
            pieces, blocks = np.concatenate([pieces, more[0]]), np.concatenate([blocks, more[1]])
            slots = np.concatenate([slots, np.full(len(more[0]), -1)])

        def place(payloads: np.ndarray, part: np.ndarray) -> None:
            resident = slots[part] >= 0
            at = part[resident]
            self.pool.write(pieces[at], entry.pages[slots[at]], payloads[resident])
            if self.lane is not None:
                self.lane.write(entry.set, pieces[part], blocks[part], payloads)

        missing = np.flatnonzero(~self.reads.cached(pieces, entry.numbers[blocks], place))
        return self.reads.job(entry, "pieces", pieces[missing], blocks[missing], lambda payloads, part: place(payloads, missing[part]))

    def _partial(self, payloads: np.ndarray, start: int, stop: int) -> None:
        pull, last = self.entry.pull, slice(self.whole, self.whole + 1)
        verify_records(payloads, pull.roots[last], pull.records[last], self.layout, peer=pull.link.peer, room=pull.room)
        self.sink.scatter(payloads, self.entry.pages[self.working : self.working + 1])
        if self.lane is not None:
            self.lane.write_record(self.entry.set, self.whole, payloads[0])


class AllBlocks(Destination):
    """Admission of ``entry``, which has pages for all its blocks: those that the host cache has complete are copied, whole
    records are read for the others and kept there as well."""

    keeps_lease = False

    def __init__(self, entry: Entry, reads: PieceReads, sink: PageSink):
        self.entry, self.reads, self.sink, self.layout = entry, reads, sink, reads.layout
        self.whole = entry.prompt // self.layout.block_tokens

    def start(self, pull: Pull) -> list[Job]:
        pages = self.entry.pages
        here = self.reads.cached_blocks(self.entry.numbers, lambda payloads, which: self.sink.scatter(payloads, pages[which]))
        whole, partial = np.flatnonzero(~here), np.arange(self.whole, len(pull.records))
        return [self._job(pull, "records", whole), self._job(pull, "partial_page", partial)]

    def more(self, pull: Pull) -> list[Job]:
        return []

    def _job(self, pull: Pull, phase: str, blocks: np.ndarray) -> Job:
        each, entry = np.arange(self.layout.pieces), self.entry

        def accept(payloads: np.ndarray, start: int, stop: int) -> None:
            part = blocks[start:stop]
            verify_records(payloads, pull.roots[part], pull.records[part], self.layout, peer=pull.link.peer, room=pull.room)
            self.sink.scatter(payloads, entry.pages[part])
            if phase == "records":
                self.reads.cache.insert(np.tile(each, len(part)), np.repeat(entry.numbers[part], len(each)), payloads.reshape(-1, self.layout.piece_bytes))

        return Job(pull, phase, pull.link.welcome.geometry.payload_offsets(pull.records[blocks]), self.layout.payload_bytes, accept)
