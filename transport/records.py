"""Who holds which record: the tier's table.

    FREE -> WRITING(session) -> SEALED -> LEASED -> ... -> SEALED (cached) -> FREE
                     `--> FREE (aborted, or its writer is known to be dead)

WRITING is never reclaimed by a timeout: a slow writer still has the memory mapped. A sealed record that nobody holds
stays as a cache, found by its content hash, until its memory is wanted: least recently used first, and of pages used together
the deepest of their chain first, since a prefix is of use without what follows it and not the other way round. ``generation``
grows whenever a record is freed, so a stale reader can tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from transport.errors import CapacityError, ProtocolError

FREE, WRITING, SEALED, LEASED = range(4)
HASH_BYTES = 32
MAX_HASHES = 1 << 20
"""Of one prompt at most."""


def split_hashes(raw: bytes, **about) -> list[bytes]:
    """Raises ``ProtocolError`` (naming ``about``: room, peer) when these are not whole hashes, or too many."""
    n, rest = divmod(len(raw), HASH_BYTES)
    if rest or n > MAX_HASHES:
        raise ProtocolError(f"{len(raw)} bytes are no list of page hashes", limit=f"{MAX_HASHES} pages", **about)
    return [raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES)]


class RecordTable:
    """States of ``n`` records. One owner: the tier's control loop; not thread safe.

    Arrays [n]: ``state`` uint8, ``holders`` int32 (rooms and leases that pin the record), ``generation`` uint64,
    ``root`` uint64 (checksum of a sealed record), ``used`` uint64 (logical time of last use), ``depth`` int64 (pages before it
    in its chain), ``stale`` bool (free, and still holding an earlier owner's bytes).

    ``wipe(records int64 [k])`` zeroes what records hold: no record is given out before it was called for the bytes of its earlier
    owner. None: freed bytes stay until they are written over.
    """

    def __init__(self, n: int, wipe: Callable[[np.ndarray], None] | None = None):
        self.size, self.wipe = n, wipe
        self.state = np.zeros(n, np.uint8)
        self.holders = np.zeros(n, np.int32)
        self.generation = np.ones(n, np.uint64)
        self.root = np.zeros(n, np.uint64)
        self.used = np.zeros(n, np.uint64)
        self.depth = np.zeros(n, np.int64)
        self.stale = np.zeros(n, bool)
        self.evicted = 0
        self._hash_of: dict[int, bytes] = {}
        self._by_hash: dict[bytes, int] = {}
        self._clock = itertools.count(1)

    def counts(self) -> dict[str, int]:
        """Records per state, found by scanning (``cached`` = sealed and unheld)."""
        n = np.bincount(self.state, minlength=4)
        return {"free": int(n[FREE]), "writing": int(n[WRITING]), "cached": int(n[SEALED]), "leased": int(n[LEASED])}

    @property
    def available(self) -> int:
        """Records that could be taken now: free ones, and cached ones that would be evicted."""
        return int(((self.state == FREE) | (self.state == SEALED)).sum())

    def reserve(self, hashes: list[bytes], private: int) -> tuple[np.ndarray, np.ndarray]:
        """Pins the sealed records of ``hashes`` that are here and takes fresh ones for the rest, all or nothing.

        Returns (records int64 [pages], fresh bool [pages]), hashed pages first, then ``private`` ones. Fresh records
        are WRITING and bound to their hash only when sealed. Raises ``CapacityError``, ``retryable`` if the prompt
        could fit once others have left.
        """
        pages = len(hashes) + private
        if pages > self.size:
            raise CapacityError("the prompt has more pages than the arena has records", limit=f"{pages} of {self.size} records")
        records = np.concatenate([self.find(hashes), np.full(private, -1, np.int64)])
        fresh = records < 0
        hits = records[~fresh]
        # Pin the hits before looking for victims: they must not be evicted for this very prompt.
        self.hold(hits)
        try:
            records[fresh] = self._take(int(fresh.sum()))
        except CapacityError:
            self.unhold(hits)
            raise
        return records, fresh

    def find(self, hashes: list[bytes]) -> np.ndarray:
        """int64 [n]: the sealed record of each hash, -1 where there is none."""
        return np.fromiter((self._by_hash.get(h, -1) for h in hashes), np.int64, len(hashes))

    def _take(self, n: int) -> np.ndarray:
        """``n`` records, now WRITING with one holder. Lowest indices first, so that runs stay contiguous."""
        free = np.flatnonzero(self.state == FREE)
        if len(free) < n:
            cached = np.flatnonzero(self.state == SEALED)
            if len(free) + len(cached) < n:
                raise CapacityError("the arena is full", retryable=True,
                                    limit=f"{n} records wanted, {len(free) + len(cached)} of {self.size} available")
            victims = cached[np.lexsort((-self.depth[cached], self.used[cached]))[: n - len(free)]]
            self._free(victims)
            self.evicted += len(victims)
            free = np.flatnonzero(self.state == FREE)
        taken = free[:n]
        self._clean(taken[self.stale[taken]])
        self.state[taken] = WRITING
        self.holders[taken] = 1
        return taken

    def clean(self, most: int) -> int:
        """Wipes at most ``most`` of the stale records, so that whoever takes them need not wait for it. How many."""
        stale = np.flatnonzero(self.stale)[:most]
        self._clean(stale)
        return len(stale)

    def _clean(self, records: np.ndarray) -> None:
        if len(records):
            self.wipe(records)
            self.stale[records] = False

    def forget(self) -> None:
        """Frees and wipes all that nobody holds: what was cached is found no more."""
        self._free(np.flatnonzero(self.state == SEALED))
        self.clean(self.size)

    def hold(self, records: np.ndarray) -> None:
        """One holder more each, of sealed records."""
        np.add.at(self.holders, records, 1)
        self.state[records] = LEASED
        self.used[records] = next(self._clock)

    def seal(self, records: np.ndarray, roots: np.ndarray, hashes: list[bytes | None], depths: np.ndarray | int = 0) -> None:
        """WRITING -> LEASED by the room that wrote them. A hash that another writer sealed meanwhile keeps its first
        record; ours then stays private."""
        assert (self.state[records] == WRITING).all(), "sealing a record that is not being written"
        self.state[records] = LEASED
        self.root[records], self.depth[records] = roots, depths
        self.used[records] = next(self._clock)
        for record, digest in zip(records.tolist(), hashes):
            if digest is not None and digest not in self._by_hash:
                self._by_hash[digest] = record
                self._hash_of[record] = digest

    def disown(self, records: np.ndarray) -> int:
        """Their bytes are not what was published: they are found no more, and free once nobody holds them. Returns how many were found."""
        digests = [self._hash_of.pop(record) for record in records.tolist() if record in self._hash_of]
        for digest in digests:
            del self._by_hash[digest]
        return len(digests)

    def unhold(self, records: np.ndarray) -> None:
        """One holder less each. A record without holders becomes cached if it has a hash and is sealed, else free."""
        if not len(records):
            return
        np.subtract.at(self.holders, records, 1)
        # One time for all: pages that a prompt found are otherwise older than those it wrote behind them, and go first.
        self.used[records] = next(self._clock)
        assert (self.holders[records] >= 0).all(), "a record was let go twice"
        loose = records[self.holders[records] == 0]
        hashed = np.fromiter((r in self._hash_of for r in loose.tolist()), bool, len(loose))
        keep = hashed & (self.state[loose] == LEASED)
        self.state[loose[keep]] = SEALED
        self._free(loose[~keep])

    def _free(self, records: np.ndarray) -> None:
        self.state[records] = FREE
        self.holders[records] = 0
        self.generation[records] += np.uint64(1)
        self.stale[records] = self.wipe is not None
        for record in records.tolist():
            digest = self._hash_of.pop(record, None)
            if digest is not None:
                del self._by_hash[digest]
