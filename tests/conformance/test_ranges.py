"""Shaping of batches never changes which bytes go where."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import batch, expect

from transport.planes.ranges import coalesce, parts, split

SIZE = 4096
ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=40)


def build(rows, step_remote: bool):
    """Ranges behind each other locally, with gaps now and then; remotely in step with them or jumping about."""
    remote, local, lengths, at = [], [], [], 0
    for jump, length, gap in rows:
        at += gap
        remote.append(at + 100 if step_remote or jump < 20 else jump)
        local.append(at)
        lengths.append(length)
        at += length
    return batch(remote, local, lengths)


@given(ROWS, st.booleans(), st.randoms(use_true_random=False), st.integers(1, 64), st.integers(1, 8))
@settings(max_examples=300, deadline=None)
def test_same_bytes_in_other_shapes(rows, in_step, random, max_bytes, max_ranges):
    read = build(rows, in_step)
    order = list(range(len(rows)))
    random.shuffle(order)
    read = batch(*(side[order] for side in read))
    source = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
    wanted = expect(SIZE, 0, read, source)

    merged = coalesce(read)
    assert np.array_equal(expect(SIZE, 0, merged, source), wanted)
    ends = zip(merged.local[:-1] + merged.lengths[:-1], merged.remote[:-1] + merged.lengths[:-1], strict=True)
    starts = zip(merged.local[1:], merged.remote[1:], strict=True)
    assert not any(end == start for end, start in zip(ends, starts, strict=True)), (
        "mergeable neighbours are left"
    )

    cut = split(merged, max_bytes)
    assert np.array_equal(expect(SIZE, 0, cut, source), wanted) and int(cut.lengths.max()) <= max_bytes

    pieces = parts(merged, max_bytes, max_ranges)
    assert sum(piece.nbytes for piece in pieces) == read.nbytes
    assert all(piece.nbytes < 2 * max_bytes and 0 < len(piece.lengths) <= 2 * max_ranges for piece in pieces)
    assert np.array_equal(sum(expect(SIZE, 0, piece, source).astype(int) for piece in pieces), wanted)


def test_adjacent_blocks_become_one_range():
    at = np.arange(1000) * 16384
    merged = coalesce(batch(at + 7, at, [16384] * 1000))
    assert [side.tolist() for side in merged] == [[7], [0], [16384 * 1000]]
