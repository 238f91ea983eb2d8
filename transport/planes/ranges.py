"""Shaping of checked read batches before they are posted. Pure functions over arrays; order carries no meaning."""

from __future__ import annotations

import itertools

import numpy as np

from transport.dataplane import ReadBatch


def coalesce(batch: ReadBatch) -> ReadBatch:
    """The same bytes in the fewest ranges: neighbours that touch on both sides become one. Sorted by local offset."""
    order = np.argsort(batch.local, kind="stable")
    remote, local, lengths = (side[order] for side in batch)
    touching = (local[:-1] + lengths[:-1] == local[1:]) & (remote[:-1] + lengths[:-1] == remote[1:])
    first = np.flatnonzero(np.concatenate(([True], ~touching)))
    return ReadBatch(remote[first], local[first], np.add.reduceat(lengths, first))


def split(batch: ReadBatch, max_bytes: int) -> ReadBatch:
    """The same bytes with no range above ``max_bytes``."""
    remote, local, lengths = batch
    if int(lengths.max()) <= max_bytes:
        return batch
    limit = np.uint64(max_bytes)
    pieces = ((lengths - np.uint64(1)) // limit + np.uint64(1)).astype(np.int64)
    owner = np.repeat(np.arange(len(lengths)), pieces)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = nth.astype(np.uint64) * limit
    return ReadBatch(
        remote[owner] + offset, local[owner] + offset, np.minimum(limit, lengths[owner] - offset)
    )


def parts(batch: ReadBatch, max_bytes: int, max_ranges: int) -> list[ReadBatch]:
    """The batch cut into batches that each hold under ``2 * max_bytes`` and at most ``2 * max_ranges`` ranges.

    Every range weighs at least its share of ``max_bytes``, so one running sum bounds both bytes and ranges.
    """
    if batch.nbytes <= max_bytes and len(batch.lengths) <= max_ranges:
        return [batch]
    batch = split(batch, max_bytes)
    weight = np.maximum(batch.lengths, np.uint64(-(-max_bytes // max_ranges)))
    part = (np.cumsum(weight, dtype=np.uint64) - weight) // np.uint64(max_bytes)
    cuts = np.concatenate(([0], np.flatnonzero(part[1:] != part[:-1]) + 1, [len(part)]))
    return [ReadBatch(*(side[a:b] for side in batch)) for a, b in itertools.pairwise(cuts)]
