"""A data plane that brings other bytes than were asked for, and tells nobody."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from transport.dataplane import DataPlane, Endpoint, ReadBatch, Transfer

KINDS = ("flipped", "truncated", "foreign")


class DamagingPlane(DataPlane):
    """Around ``inner``, which reads into ``region``. Of the reads for which ``where(batch)`` holds the next ``count`` are damaged:

    ``flipped``: one bit of one byte (``at``: of which one of the read, None: another one each time); ``truncated``: the last eighth did not come, what an earlier read had left there did;
    ``foreign``: bytes from ``stride`` further on in the arena, which are another record's.
    """

    def __init__(self, inner: DataPlane, region: np.ndarray):
        self.inner, self.region, self.kind = inner, region, inner.kind
        self.damage, self.count, self.stride, self.at, self.damaged = "flipped", 0, 0, None, 0
        self.where: Callable[[ReadBatch], bool] = lambda batch: True

    def order(self, damage: str, count: int, where: Callable[[ReadBatch], bool] = lambda batch: True, stride: int = 0, at: int | None = None) -> None:
        self.damage, self.count, self.where, self.stride, self.at = damage, count, where, stride, at

    def connect(self, endpoint: Endpoint) -> None:
        self.inner.connect(endpoint)

    def disconnect(self, name: str) -> None:
        self.inner.disconnect(name)

    def read(self, name: str, batch: ReadBatch) -> Transfer:
        if self.count <= 0 or not self.where(batch):
            return self.inner.read(name, batch)
        self.count, self.damaged = self.count - 1, self.damaged + 1
        if self.damage == "foreign":
            return self.inner.read(name, ReadBatch(batch.remote + np.uint64(self.stride), batch.local, batch.lengths))
        if self.damage == "truncated":
            size = int(batch.lengths[-1])
            missing = slice(int(batch.local[-1]) + size - max(1, size // 8), int(batch.local[-1]) + size)
            return _Damaged(self.inner.read(name, batch), lambda: self.region.__setitem__(missing, 0xA5))
        at = 37 * self.damaged % batch.nbytes if self.at is None else self.at
        ends = np.cumsum(batch.lengths)
        which = int(np.searchsorted(ends, at, side="right"))
        where = int(batch.local[which] + batch.lengths[which]) - int(ends[which]) + at
        return _Damaged(self.inner.read(name, batch), lambda: self._flip(where))

    def _flip(self, at: int) -> None:
        self.region[at] ^= 1 << at % 8

    def close(self) -> None:
        self.inner.close()


class _Damaged(Transfer):
    def __init__(self, inner: Transfer, spoil: Callable[[], None]):
        self.inner, self.nbytes, self._spoil = inner, inner.nbytes, spoil

    def poll(self) -> bool:
        landed = self.inner.poll()
        if landed and self._spoil is not None:
            self._spoil()
            self._spoil = None
        return landed

    @property
    def drained(self) -> bool:
        return self.inner.drained

    def release(self) -> None:
        self.inner.release()
