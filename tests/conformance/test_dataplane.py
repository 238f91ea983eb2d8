"""One suite for every data plane. ``nixl`` uses what UCX picks (CMA on one host), ``nixl-tcp`` is held to TCP."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import ARENA, DEADLINE, SMALL, batch, expect, wait

from transport.dataplane import MAX_DESCRIPTORS, MeteredPlane, ReadBatch, check_batch
from transport.errors import BoundsError, IntegrityError, PeerLost, ProtocolError, TransportError

FILL = 0xEE


def scattered(count: int, max_length: int, seed: int) -> ReadBatch:
    """``count`` ranges of random lengths at random, partly overlapping remote offsets, in shuffled local order with
    gaps between them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, max_length + 1, count, dtype=np.uint64)
    gaps = rng.integers(0, 3, count, dtype=np.uint64) * np.uint64(64)
    local = np.cumsum(lengths + gaps) - lengths
    remote = rng.integers(0, ARENA - max_length, count, dtype=np.uint64)
    order = rng.permutation(count)
    return ReadBatch(remote[order], local[order], lengths[order])


def adjacent(count: int, length: int) -> ReadBatch:
    at = np.arange(count, dtype=np.uint64) * np.uint64(length)
    return ReadBatch(at + np.uint64(4096), at, np.full(count, length, dtype=np.uint64))


EXACT = {
    "one byte": batch([12345], [777], [1]),
    "contiguous": batch([4096], [8192], [1 << 20]),
    "the whole arena's end": batch([ARENA - 4097], [0], [4097]),
    "adjacent 16 KiB x 64": adjacent(64, 16384),
    "scattered 100": scattered(100, 200_000, 1),
    "scattered 4096": scattered(4096, 8192, 2),
    "same source twice": batch([100, 100], [0, 5000], [4000, 4000]),
    "large 64 MiB": batch([4096], [4096], [64 << 20]),
    "larger than a part": batch([0], [1], [ARENA - 1]),
}


@pytest.mark.parametrize("case", EXACT)
def test_exact_bytes_and_untouched_guards(shared, case):
    owner, plane, region = shared
    region[:] = FILL
    transfer = plane.read(owner.name, EXACT[case])
    assert transfer.nbytes == EXACT[case].nbytes
    wait(transfer)
    assert transfer.poll() and transfer.drained
    assert np.array_equal(region, expect(region.size, FILL, EXACT[case], owner.expected))
    transfer.release()
    transfer.release()
    assert transfer.poll() and transfer.drained


def test_several_transfers_in_flight(shared):
    owner, plane, region = shared
    region[:] = FILL
    reads = [batch([k * 999_983], [k * (5 << 20)], [(4 << 20) + k]) for k in range(8)]
    pending = [plane.read(owner.name, read) for read in reads]
    end = time.monotonic() + DEADLINE
    while sum(transfer.poll() for transfer in pending) < len(pending):
        assert time.monotonic() < end
        time.sleep(0.0005)
    for transfer in pending:
        transfer.release()
    joined = ReadBatch(*(np.concatenate(sides) for sides in zip(*reads, strict=True)))
    assert np.array_equal(region, expect(region.size, FILL, joined, owner.expected))


def test_two_readers_at_once(fresh, shared):
    owner, first, first_region = shared
    second, second_region = fresh.reader(owner, size=ARENA)
    reads = [scattered(500, 20_000, 11), scattered(500, 20_000, 12)]
    for region in (first_region, second_region):
        region[:] = FILL
    pending = [first.read(owner.name, reads[0]), second.read(owner.name, reads[1])]
    for transfer in reversed(pending):
        wait(transfer)
    for region, read in zip((first_region, second_region), reads, strict=True):
        assert np.array_equal(region, expect(region.size, FILL, read, owner.expected))


def test_one_reader_of_two_owners(fresh):
    owners = [fresh.owner(seed=21), fresh.owner(seed=22)]
    plane, region = fresh.reader(*owners)
    half = region.size // 2
    for transfer in [
        plane.read(owner.name, batch([3], [k * half], [half])) for k, owner in enumerate(owners)
    ]:
        wait(transfer)
    for k, owner in enumerate(owners):
        assert np.array_equal(region[k * half : (k + 1) * half], owner.expected[3 : 3 + half])


def test_metered_plane_counts_exactly(shared):
    owner, plane, _ = shared
    meter = MeteredPlane(plane)
    reads = [scattered(50, 3000, 31), batch([0], [0], [12345])]
    for read in reads:
        transfer = meter.read(owner.name, read)
        wait(transfer)
        transfer.poll()
        transfer.release()
    with pytest.raises(BoundsError):
        meter.read(owner.name, batch([ARENA], [0], [1]))
    total = sum(read.nbytes for read in reads)
    assert meter.requested == meter.landed == {owner.name: total}
    assert (meter.reads, meter.descriptors) == (2, 51)


# What is refused


def is_valid(read: ReadBatch, remote_size: int, local_size: int) -> bool:
    """The rules of ``check_batch`` in plain Python integers."""
    taken: set[int] = set()
    rows = list(zip(*(side.tolist() for side in read), strict=True))
    for remote, local, length in rows:
        if length < 1 or remote + length > remote_size or local + length > local_size:
            return False
        if taken & set(range(local, local + length)):
            return False
        taken |= set(range(local, local + length))
    return 0 < len(rows) <= MAX_DESCRIPTORS


EDGES = [
    0,
    1,
    SMALL - 1,
    SMALL,
    SMALL + 1,
    2**31,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**63 + 1,
    2**64 - SMALL,
    2**64 - 1,
]
NUMBERS = st.integers(0, SMALL) | st.sampled_from(EDGES)
BATCHES = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=6).map(
    lambda rows: ReadBatch(*np.array(rows, dtype=np.uint64).reshape(-1, 3).T.copy())
)
MOSTLY_VALID = st.lists(st.tuples(st.integers(0, 250), st.integers(0, 60)), min_size=1, max_size=6).map(
    lambda rows: batch(
        [r for r, _ in rows], [50 * k for k in range(len(rows))], [length for _, length in rows]
    )
)


@given(BATCHES | MOSTLY_VALID)
@settings(max_examples=600, deadline=None)
def test_check_batch_agrees_with_the_oracle(read):
    if is_valid(read, SMALL, SMALL):
        assert check_batch(read, SMALL, SMALL) == read.nbytes
    else:
        with pytest.raises(BoundsError):
            check_batch(read, SMALL, SMALL)


@given(BATCHES | MOSTLY_VALID)
@settings(max_examples=60, deadline=None)
def test_refused_or_exact(small, read):
    owner, plane, region = small
    region[:] = FILL
    if is_valid(read, SMALL, SMALL):
        transfer = plane.read(owner.name, read)
        wait(transfer)
        assert np.array_equal(region, expect(SMALL, FILL, read, owner.expected))
    else:
        with pytest.raises(BoundsError):
            plane.read(owner.name, read)
        assert (region == FILL).all()


U64 = np.array([0], dtype=np.uint64)
ONE = np.array([1], dtype=np.uint64)


@pytest.mark.parametrize(
    "read",
    [
        ReadBatch(U64.astype(np.int64), U64, ONE),
        ReadBatch(U64, U64.astype(np.int32), ONE),
        ReadBatch(U64, U64, ONE.astype(np.float64)),
        ReadBatch(U64, U64, np.array([1, 1], dtype=np.uint64)),
        ReadBatch(U64.reshape(1, 1), U64.reshape(1, 1), ONE.reshape(1, 1)),
        ReadBatch(U64[:0], U64[:0], U64[:0]),
        adjacent(MAX_DESCRIPTORS + 1, 1),
    ],
    ids=["int64", "int32", "float", "uneven", "2-D", "empty", "too many"],
)
def test_misshapen_batches_are_refused(shared, read):
    owner, plane, region = shared
    region[:4096] = FILL
    with pytest.raises(BoundsError):
        plane.read(owner.name, read)
    assert (region[:4096] == FILL).all()


def test_not_connected(shared):
    _, plane, _ = shared
    with pytest.raises(PeerLost):
        plane.read("nobody:0", batch([0], [0], [1]))


def test_disconnect_and_connect_are_idempotent(fresh, shared):
    owner, _, _ = shared
    plane, region = fresh.reader(owner, owner)
    for _ in range(2):
        plane.disconnect(owner.name)
    plane.disconnect("nobody:0")
    with pytest.raises(PeerLost):
        plane.read(owner.name, batch([0], [0], [1]))
    plane.connect(owner.endpoint)
    plane.connect(owner.endpoint)
    wait(plane.read(owner.name, batch([5], [0], [1000])))
    assert np.array_equal(region[:1000], owner.expected[5:1005])


def test_close_is_idempotent_and_final(fresh, shared):
    owner, _, _ = shared
    plane, _ = fresh.reader(owner)
    plane.close()
    plane.close()
    with pytest.raises(TransportError):
        plane.read(owner.name, batch([0], [0], [1]))


def test_damaged_endpoints_are_refused_and_the_good_one_still_works(fresh, shared):
    owner, _, _ = shared
    good = owner.endpoint
    plane, region = fresh.reader()
    cut = good.metadata[: len(good.metadata) // 2]
    flipped = (
        bytes([*good.metadata[:40], *(b ^ 1 for b in good.metadata[40:41]), *good.metadata[41:]]) or b"x"
    )
    for metadata in (cut or b"x", flipped, good.metadata + b"\0"):
        with pytest.raises(IntegrityError):
            plane.connect(msgspec.structs.replace(good, metadata=metadata))
    for field, value in (("size", 0), ("size", 1 << 62), ("base", 1 << 63), ("base", -1)):
        with pytest.raises(BoundsError):
            plane.connect(msgspec.structs.replace(good, **{field: value}))
    with pytest.raises(ProtocolError):
        plane.connect(msgspec.structs.replace(good, kind="carrier pigeon"))
    with pytest.raises(PeerLost):
        plane.read(owner.name, batch([0], [0], [1]))
    plane.connect(good)
    wait(plane.read(owner.name, batch([5], [0], [1000])))
    assert np.array_equal(region[:1000], owner.expected[5:1005])
    with pytest.raises(IntegrityError):
        plane.connect(msgspec.structs.replace(good, size=good.size - 1))


def test_an_endpoint_that_promises_too_much_reads_nothing(fresh, shared):
    """The reader's check passes, so the owner's (or NIXL's) has to hold."""
    owner, _, _ = shared
    plane, region = fresh.reader()
    region[:] = FILL
    liar = msgspec.structs.replace(owner.endpoint, size=2 * ARENA)
    if fresh.kind == "loopback":
        with pytest.raises(IntegrityError):
            plane.connect(liar)
        return
    plane.connect(liar)
    for read in (batch([ARENA], [0], [64]), batch([ARENA - 32], [0], [64])):
        with pytest.raises(BoundsError):
            wait(plane.read(owner.name, read))
        assert (region == FILL).all()
    wait(plane.read(owner.name, batch([0], [0], [64])))
