"""Which blocks this node knows, by their content: a number each, shared by the requests that have them.

A block's *number* is where its summary, its checksums and its host-cache pieces lie. A block with a hash (``transport/hashing.py``:
the tokens that lead to it, under model, tenant and adapter) is found again by every prompt that starts the same way; one without
belongs to a single request. Numbers that nobody holds stay as a cache until theirs are wanted, the longest unused first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from decode_node.host_cache import HostCache

RELUCTANCE = 4.0
"""How much slower pieces age that a running request may want any moment, or that no tier may have."""

EVICTED_SHARE = 256
"""When numbers are short, at least so small a share of them all is freed at once."""


class BlockStore:
    """Owner of ``size`` numbers. Scheduler thread; ``learn`` on the puller's, for numbers that its request holds.

    Arrays [size]: ``holders`` int32; ``root`` uint64 and ``indexed`` bool: of the record whose ``digests`` uint64 [size, pieces]
    and summary are known; ``generated`` bool: computed on this node; ``used_at`` int64, logical time.
    """

    def __init__(self, size: int, pieces: int, cache: HostCache):
        self.size, self.cache = size, cache
        self.holders = np.zeros(size, np.int32)
        self.root = np.zeros(size, np.uint64)
        self.digests = np.zeros((size, pieces), np.uint64)
        self.indexed = np.zeros(size, bool)
        self.generated = np.zeros(size, bool)
        self.used_at = np.zeros(size, np.int64)
        self.evicted = self.epoch = 0
        self._number_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._named = np.zeros(size, bool)  # the keys of ``_hash_of``
        self._free = np.arange(size)[::-1].copy()
        self._free_count = size
        self._clock = itertools.count(1)
        cache.worth = self.worth

    @staticmethod
    def bytes(pieces: int, size: int) -> int:
        """What the tables take, nearly all of it for the digests."""
        return size * (pieces * 8 + 8 * 4)

    @property
    def held(self) -> int:
        return int((self.holders > 0).sum())

    @property
    def cached(self) -> int:
        """Numbers that nobody holds and that are found by hash."""
        return self.size - self._free_count - self.held

    def worth(self, numbers: np.ndarray) -> np.ndarray:
        """float64 [n]: by what factor the pieces of ``numbers`` int64 [n] age slower."""
        return np.where((self.holders[numbers] > 0) | self.generated[numbers], RELUCTANCE, 1.0)

    def acquire(self, hashes: Sequence[bytes], anonymous: int = 0) -> np.ndarray | None:
        """Numbers int64 of the blocks with these distinct ``hashes``, known or new, and of ``anonymous`` new ones without a
        hash; each has one holder more. None, and nothing has changed, when there are not enough."""
        known = self.find(hashes)
        numbers = np.concatenate([known, np.full(anonymous, -1, np.int64)])
        new = np.flatnonzero(numbers < 0)
        found = numbers[numbers >= 0]
        self.holders[found] += 1  # first, so that they are not evicted for the new ones
        taken = self._take(len(new))
        if taken is None:
            self.holders[found] -= 1
            return None
        numbers[new] = taken
        for i in new[new < len(hashes)].tolist():
            self._bind(int(numbers[i]), hashes[i])
        self.used_at[numbers] = next(self._clock)
        return numbers

    def release(self, numbers: np.ndarray) -> None:
        """One holder less of each of distinct ``numbers`` int64 [n]. Those without holder and hash are free, and their pieces go."""
        self.holders[numbers] -= 1
        if (self.holders[numbers] < 0).any():
            raise AssertionError("a block was let go twice")
        loose = numbers[self.holders[numbers] == 0]
        self.used_at[loose] = next(self._clock)
        self._vacate(loose[~self._named[loose]])

    def name(self, numbers: np.ndarray, hashes: Sequence[bytes]) -> None:
        """Lets blocks that their one holder has computed be found. Another block that has the hash already keeps it."""
        self.generated[numbers] = True
        for number, digest in zip(numbers.tolist(), hashes):
            if digest not in self._number_of:
                self._bind(number, digest)

    def has(self, digest: bytes) -> bool:
        return digest in self._number_of

    def find(self, hashes: Sequence[bytes]) -> np.ndarray:
        """int64 [n]: the number of the block with each hash, -1 where there is none."""
        return np.fromiter((self._number_of.get(h, -1) for h in hashes), np.int64, len(hashes))

    def known(self, numbers: np.ndarray, roots: np.ndarray) -> np.ndarray:
        """bool [n]: whether summary and digests of ``numbers`` int64 [n] are those of the records with ``roots`` uint64 [n]."""
        return self.indexed[numbers] & (self.root[numbers] == roots)

    def learn(self, numbers: np.ndarray, roots: np.ndarray, digests: np.ndarray) -> None:
        """``digests`` uint64 [n, pieces] of records with ``roots`` uint64 [n], whose summaries are in place."""
        self.root[numbers], self.digests[numbers], self.indexed[numbers] = roots, digests, True

    def forget(self) -> None:
        """Everything that nobody holds is free; what is held is not found any more."""
        idle = self._idle()
        self.epoch += 1
        self._number_of.clear()
        self._hash_of.clear()
        self._named[:] = False
        self._vacate(idle)

    def _bind(self, number: int, digest: bytes) -> None:
        self._number_of[digest], self._hash_of[number], self._named[number] = number, digest, True

    def _idle(self) -> np.ndarray:
        """int64 [n]: numbers that nobody holds and that are found by hash."""
        return np.flatnonzero(self._named & (self.holders == 0))

    def _take(self, n: int) -> np.ndarray | None:
        short = n - self._free_count
        if short > 0:
            idle = self._idle()
            if len(idle) < short:
                return None
            # More than are wanted: finding the longest unused costs a look at all of them, and a generated block wants one at a time.
            n_gone = min(len(idle), max(short, self.size // EVICTED_SHARE))
            gone = idle[np.argpartition(self.used_at[idle], n_gone - 1)[:n_gone]]
            self.evicted += n_gone
            self._vacate(gone)
        self._free_count -= n
        taken = self._free[self._free_count : self._free_count + n][::-1].copy()
        self.holders[taken] = 1
        self.indexed[taken] = self.generated[taken] = False
        return taken

    def _vacate(self, numbers: np.ndarray) -> None:
        for number in numbers.tolist():
            digest = self._hash_of.pop(number, None)
            if digest is not None:
                del self._number_of[digest]
        self._named[numbers] = False
        self.cache.drop(numbers)
        self._free[self._free_count : self._free_count + len(numbers)] = numbers
        self._free_count += len(numbers)
