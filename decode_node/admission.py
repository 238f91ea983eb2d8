"""What a request with a working set pulls: the index of its whole blocks, then the selected pieces and the partial page.

Every piece goes to the host cache, so that it crosses the wire once however often it leaves and enters a slot; those of
the first working set also go straight to their slots, which nothing reads before the request runs. Of critical heads every
piece is pulled, into the dense lane.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

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
from transport.errors import RoomFailed
from transport.integrity import verify_index, verify_pieces, verify_records
from transport.layout import KVLayout


class PieceReads:
    """Makes the jobs that read pieces of a request into the host cache."""

    def __init__(self, layout: KVLayout, cache: HostCache, sets: WorkingSets, lane: DenseLane | None = None):
        self.layout, self.cache, self.sets, self.lane = layout, cache, sets, lane

    def job(self, entry: Entry, phase: str, pieces: np.ndarray, blocks: np.ndarray,
            landed: Callable[[np.ndarray, np.ndarray], None] = lambda payloads, which: None) -> Job:
        """Reads ``pieces`` int64 [n] of ``blocks`` int64 [n]. ``landed(payloads uint8 [k, piece_bytes], which int64 [k])`` is
        called with what was verified and cached, ``which`` of the n they are."""
        order = np.lexsort((pieces, blocks))  # neighbours in the arena become one descriptor
        pieces, blocks = pieces[order], blocks[order]
        pull, lay = entry.pull, self.layout
        records = pull.records[blocks]
        generations, digests = pull.generations[blocks], entry.digests[blocks, pieces]

        def accept(payloads: np.ndarray, start: int, stop: int) -> None:
            part = slice(start, stop)
            verify_pieces(payloads, generations[part], digests[part], records[part], peer=pull.link.peer, room=pull.room)
            kept = slice(None) if self.lane is None else self.lane.place[pieces[part]] < 0  # what is in the lane never leaves it
            self.cache.insert(entry.set, pieces[part][kept], blocks[part][kept], payloads[kept])
            self.sets.flying[entry.set, pieces[part], blocks[part]] = False
            landed(payloads, order[part])

        offsets = pull.link.welcome.geometry.piece_offsets(records, pieces, lay)
        return Job(pull=pull, phase=phase, offsets=offsets, unit=lay.piece_bytes, accept=accept)


class SelectedBlocks(Destination):
    """Admission of ``entry``. ``whole_cache``: pull every block, not only the first working set (admission=full)."""

    keeps_lease = True

    def __init__(self, entry: Entry, reads: PieceReads, pool: PoolPieces, sink: PageSink, *, whole_cache: bool):
        self.entry, self.reads, self.pool, self.sink, self.whole_cache = entry, reads, pool, sink, whole_cache
        self.layout, self.lane = reads.layout, reads.lane
        self.whole = entry.prompt // self.layout.block_tokens
        self._asked = False

    def start(self, pull: Pull) -> list[Job]:
        expected = -(-self.entry.prompt // self.layout.block_tokens)
        if pull.manifest.prompt_tokens != self.entry.prompt or len(pull.records) != expected:
            raise RoomFailed("prefill and decode disagree on the prompt", room=pull.room, peer=pull.source,
                             limit=f"{self.entry.prompt} tokens here, {pull.manifest.prompt_tokens} committed")
        self.entry.digests = np.zeros((self.whole, self.layout.pieces), np.uint64)
        if not self.whole:
            return []
        offsets = pull.link.welcome.geometry.index_offsets(pull.records[: self.whole])
        return [Job(pull=pull, phase="summaries", offsets=offsets, unit=self.layout.index_bytes, accept=self._index)]

    def more(self, pull: Pull) -> list[Job]:
        if self._asked:
            self.pool.settle()
            if self.lane is not None:
                self.lane.settle()
            return []
        self._asked = True
        jobs = [self._pieces(pull)] if self.whole else []
        if not self.whole:
            self.reads.sets.place(self.entry.set, np.zeros((self.layout.pieces, 0), np.int64), 0)
        if self.entry.prompt % self.layout.block_tokens:
            offsets = pull.link.welcome.geometry.payload_offsets(pull.records[self.whole :])
            jobs.append(Job(pull=pull, phase="partial_page", offsets=offsets, unit=self.layout.payload_bytes, accept=self._partial))
        return jobs

    @property
    def working(self) -> int:
        """Slots in use at the start."""
        return min(self.whole, self.entry.need.working)

    def _index(self, payloads: np.ndarray, start: int, stop: int) -> None:
        pull, part = self.entry.pull, slice(start, stop)
        digests, summaries = verify_index(payloads, pull.generations[part], pull.roots[part], pull.records[part], self.layout,
                                          peer=pull.link.peer, room=pull.room)
        self.entry.digests[part] = digests
        self.reads.sets.summarise(self.entry.set, start, summaries)

    def _pieces(self, pull: Pull) -> Job:
        sets = self.reads.sets
        selection = initial_selection(pull.ranking, self.whole, self.working, sets.sink, sets.recent)
        sets.place(self.entry.set, selection, self.whole)
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

        def landed(payloads: np.ndarray, part: np.ndarray) -> None:
            resident = slots[part] >= 0
            at = part[resident]
            self.pool.write(pieces[at], self.entry.pages[slots[at]], payloads[resident])
            if self.lane is not None:
                self.lane.write(self.entry.set, pieces[part], blocks[part], payloads)

        return self.reads.job(self.entry, "pieces", pieces, blocks, landed)

    def _partial(self, payloads: np.ndarray, start: int, stop: int) -> None:
        pull, last = self.entry.pull, slice(self.whole, self.whole + 1)
        verify_records(payloads, pull.generations[last], pull.roots[last], pull.records[last], self.layout, peer=pull.link.peer, room=pull.room)
        self.sink.scatter(payloads, self.entry.pages[self.working : self.working + 1])
        if self.lane is not None:
            self.lane.write_record(self.entry.set, self.whole, payloads[0])
