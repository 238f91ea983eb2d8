"""The host cache: bounded memory on the decode node for pieces that were pulled and for generated blocks that were sealed.

A piece belongs to a block, which has a number (``block_store.py``); several requests may share it. What a tier holds as well
may be evicted, the least valuable first: that is the longest unused, and ``worth`` says how much slower than others a block's
pieces age. What a running request needs and exists nowhere else is *pinned*; room for it is reserved beforehand, so that
keeping it cannot fail.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable

import numpy as np

from transport.errors import CapacityError, ConfigError

NAME = "oasis-host-cache"
EVICTED_SHARE = 16
"""When room is short, at least one sixteenth of all pieces goes at once: finding the oldest costs a look at all of them."""


class HostCache:
    """Pieces of ``piece_bytes`` by (piece, number of the block), in at most ``capacity_bytes``. Thread safe.

    ``slot`` int32 [pieces, numbers] says where in ``memory`` uint8 [capacity, piece_bytes] a piece is, -1: nowhere. What is asked
    is about blocks, at every step: all pieces of a block lie side by side in the tables.
    Pages of ``memory`` are taken from the system when first used; with ``pin`` at once, locked for CUDA.

    ``worth(numbers int64 [n])`` float [n], set by who owns the blocks, who also ends their pieces with ``drop``. At all times
    ``pinned <= reserved <= capacity``, and pieces that are not pinned leave ``reserved`` room alone or make way for it.
    """

    def __init__(self, pieces: int, numbers: int, piece_bytes: int, capacity_bytes: int, pin: bool = False, *,
                 clock: Callable[[], float] = time.monotonic):
        """Raises ``ConfigError`` on sizes that cannot be, ``CapacityError`` when the memory is not to be had."""
        self.piece_bytes, self.capacity = piece_bytes, capacity_bytes // max(1, piece_bytes)
        if min(pieces, numbers, piece_bytes) < 1 or not 0 <= self.capacity < 1 << 31:
            raise ConfigError("impossible size of a host cache", limit=f"{pieces} x {numbers} pieces of {piece_bytes} bytes in {capacity_bytes}")
        try:
            self.memory = _memory(self.capacity, piece_bytes, pin)
            self._table = np.full(numbers * pieces, -1, np.int32)
            self._here = np.zeros((numbers, pieces), bool)  # the same, in a quarter of the bytes
            self.slot = self._table.reshape(numbers, pieces).T
            # By slot: whose piece it holds (index into the table, -1: nobody's), when it was last used, whether it may go.
            self._owner = np.full(self.capacity, -1, np.int64)
            self._used_at = np.zeros(self.capacity, np.int64)
            self._pinned = np.zeros(self.capacity, bool)
            self._free = np.arange(self.capacity, dtype=np.int32)[::-1].copy()
        except (OSError, OverflowError, MemoryError, RuntimeError) as error:
            raise CapacityError(f"no memory for the host cache: {error}", limit=f"{capacity_bytes} bytes") from error
        self._free_count = self.capacity
        self._pinned_count = self._reserved = self._peak = self._uses = 0
        self.evicted = self.uncached = 0
        self.worth: Callable[[np.ndarray], np.ndarray] = lambda numbers: np.ones(len(numbers))
        self._lock = threading.Lock()
        self._clock = clock
        self._started = self._weighed_at = clock()
        self._weight = 0.0

    # -- figures ------------------------------------------------------------------------------------------------

    @staticmethod
    def table_bytes(pieces: int, numbers: int) -> int:
        """What the tables take beside the pieces."""
        return pieces * numbers * 5

    @property
    def used_bytes(self) -> int:
        return (self.capacity - self._free_count) * self.piece_bytes

    @property
    def pinned_bytes(self) -> int:
        return self._pinned_count * self.piece_bytes

    @property
    def reserved_bytes(self) -> int:
        """Of which ``pinned_bytes`` are in use."""
        return self._reserved * self.piece_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak * self.piece_bytes

    def average_bytes(self) -> float:
        """``used_bytes`` over the time since the start."""
        with self._lock:
            self._weigh()
            elapsed = self._weighed_at - self._started
            return self._weight / elapsed * self.piece_bytes if elapsed > 0 else float(self.used_bytes)

    def count_pinned(self) -> int:
        """Pinned pieces, recounted slot by slot."""
        return int(self._pinned.sum())

    def scan(self) -> dict[str, int]:
        """Pieces ``used``, ``pinned`` and ``free``, recounted from the tables, each from its own. Slow: not while anybody waits."""
        with self._lock:
            held = self._table[self._table >= 0]
            return {"used": len(held), "pinned": int(self._pinned[held].sum()), "free": int((self._owner < 0).sum())}

    # -- pieces -------------------------------------------------------------------------------------------------

    def insert(self, piece: np.ndarray, number: np.ndarray, data: np.ndarray, pinned: bool = False) -> None:
        """Copies ``data`` uint8 [n, piece_bytes], the pieces ``piece`` int [n] of blocks ``number`` int [n]; what was there
        is replaced. Without room for all that is not pinned the rest is left out and counted in ``uncached``. ``pinned``
        needs reserved room: raises ``CapacityError`` without it, and then nothing has changed."""
        keys = self._keys(piece, number)
        if data.shape != (len(keys), self.piece_bytes):
            raise ValueError(f"{len(keys)} pieces of {self.piece_bytes} bytes, and data of shape {data.shape}")
        with self._lock:
            now = self._uses
            self._uses += len(keys)
            slots = self._table[keys]
            here = slots[slots >= 0]
            new = _distinct(keys[slots < 0])
            if pinned:
                fresh = np.unique(here[~self._pinned[here]])
                want = self._pinned_count + len(fresh) + len(new)
                if want > self._reserved:
                    raise CapacityError("no room is reserved in the host cache for pinned pieces", limit=f"{self._reserved} of {self.capacity} pieces")
                self._pinned[fresh] = True
                self._pinned_count += len(fresh)
                room = self._free_count
            else:
                kept = self.capacity - self._free_count - self._pinned_count
                room = self.capacity - max(self._reserved, self._pinned_count) - kept
            self._used_at[here] = now  # so that they stay
            if 0 < len(new) > room:
                room += self._evict(len(new) - room, now)
            placed = new[: max(0, room)]
            self.uncached += len(new) - len(placed)
            self._place(placed, pinned)
            slots = self._table[keys]
            there = np.flatnonzero(slots >= 0)
            if len(there) < len(keys):
                slots, data = slots[there], data[there]
            self.memory[slots] = data
            self._used_at[slots] = now + there

    def read(self, piece: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A copy uint8 [n, piece_bytes] of pieces ``piece`` int [n] of blocks ``number`` int [n], and bool [n]: which of them are here (zeros
        stand for the others)."""
        keys = self._keys(piece, number)
        with self._lock:
            slots = self._table[keys]
            here = slots >= 0
            self._used_at[slots[here]] = self._uses + np.flatnonzero(here)
            self._uses += len(keys)
            if here.all():
                return self.memory.take(slots, axis=0), here
            data = np.zeros((len(keys), self.piece_bytes), np.uint8)
            data[here] = self.memory.take(slots[here], axis=0)
            return data, here

    def held(self, numbers: np.ndarray) -> np.ndarray:
        """bool [pieces, *]: which pieces of blocks ``numbers`` int [*] are here. Counts as no use."""
        with self._lock:
            return np.moveaxis(self._here.take(numbers, axis=0), -1, 0)

    def drop(self, numbers: np.ndarray) -> None:
        """Frees all pieces of distinct blocks ``numbers`` int64 [n], pinned ones too; a reservation is its owner's to give back.
        Idempotent. Raises ``ValueError`` for a number outside the table."""
        self._check(numbers)
        with self._lock:
            table = self.slot.T[numbers]
            self.slot.T[numbers], self._here[numbers] = -1, False
            self._vacate(table[table >= 0])

    def unpin(self, numbers: np.ndarray) -> None:
        """The pieces of distinct blocks ``numbers`` int64 [n] may go from now on, like those that a tier has. Idempotent. Raises
        ``ValueError`` for a number outside the table."""
        self._check(numbers)
        with self._lock:
            table = self.slot.T[numbers]
            slots = table[table >= 0]
            self._pinned_count -= int(self._pinned[slots].sum())
            self._pinned[slots] = False

    # -- room for pinned pieces -----------------------------------------------------------------------------------

    def reserve(self, n: int) -> bool:
        """Promises room for ``n`` more pinned pieces; False: there is none. Evicts nothing yet."""
        with self._lock:
            fits = self._reserved + n <= self.capacity
            self._reserved += n if fits else 0
            return fits

    def unreserve(self, n: int) -> None:
        """Takes back a promise, once ``drop`` or ``unpin`` has ended its use. Raises ``ValueError`` for more than was promised."""
        with self._lock:
            if not 0 <= n <= self._reserved:
                raise ValueError(f"{n} pieces were never reserved")
            self._reserved -= n

    def _check(self, numbers: np.ndarray) -> None:
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.slot.shape[1]:
            raise ValueError(f"blocks {numbers.min()} to {numbers.max()} of {self.slot.shape[1]}")

    # -- under the lock -------------------------------------------------------------------------------------------

    def _keys(self, piece: np.ndarray, number: np.ndarray) -> np.ndarray:
        """int64 [n] into the table. Raises ``ValueError`` for what is outside it."""
        return np.ravel_multi_index((number, piece), self._here.shape).astype(np.int64, copy=False)

    def _place(self, keys: np.ndarray, pinned: bool) -> None:
        """Gives free slots to distinct ``keys`` that have none."""
        self._weigh()
        n = len(keys)
        slots = self._free[self._free_count - n : self._free_count][::-1]
        self._free_count -= n
        self._table[keys], self._here.reshape(-1)[keys] = slots, True
        self._owner[slots] = keys
        self._pinned[slots] = pinned
        self._pinned_count += n if pinned else 0
        self._peak = max(self._peak, self.capacity - self._free_count)

    def _evict(self, need: int, now: int) -> int:
        """Frees at least ``need`` slots of pieces not pinned and not used since ``now``, or as many as there are."""
        candidates = np.flatnonzero((self._owner >= 0) & ~self._pinned & (self._used_at < now))
        n = min(len(candidates), max(need, self.capacity // EVICTED_SHARE))
        if n < len(candidates):
            age = (now - self._used_at[candidates]) / self.worth(self._owner[candidates] // self._here.shape[1])
            candidates = candidates[np.argpartition(-age, n)[:n]]
        keys = self._owner[candidates]
        self._table[keys], self._here.reshape(-1)[keys] = -1, False
        self._vacate(candidates)
        self.evicted += n
        return n

    def _vacate(self, slots: np.ndarray) -> None:
        self._weigh()
        self._pinned_count -= int(self._pinned[slots].sum())
        self._pinned[slots] = False
        self._owner[slots] = -1
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

    def _weigh(self) -> None:
        """Adds what was used since the last change to the average. Before every change."""
        now = self._clock()
        self._weight += (self.capacity - self._free_count) * (now - self._weighed_at)
        self._weighed_at = now


def _distinct(keys: np.ndarray) -> np.ndarray:
    """Each key once, in order of first appearance."""
    _, first = np.unique(keys, return_index=True)
    return keys[np.sort(first)]


def _memory(pieces: int, piece_bytes: int, pin: bool) -> np.ndarray:
    """uint8 [pieces, piece_bytes]."""
    if pin:
        import torch

        return torch.empty((pieces, piece_bytes), dtype=torch.uint8, pin_memory=True).numpy()
    size = pieces * piece_bytes
    # By name, so that the kernel can be asked how much of it is in memory (/proc/PID/smaps); pages come as they are written.
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, max(1, size))
        memory = mmap.mmap(fd, max(1, size))
    finally:
        os.close(fd)
    return np.frombuffer(memory, np.uint8)[:size].reshape(pieces, piece_bytes)
