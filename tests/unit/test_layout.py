"""Address arithmetic against slow exact integers, and refusals that name what is wrong."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_rig import small_layout

from transport.dataplane import Endpoint
from transport.errors import BoundsError, IntegrityError, LayoutMismatch
from transport.layout import ArenaGeometry, KVLayout

LAYOUTS = st.builds(
    small_layout, num_layers=st.integers(1, 80), kv_heads=st.sampled_from([1, 2, 3, 5, 7, 8, 127]), head_dim=st.sampled_from([1, 64, 80, 96, 128, 576]),
    block_tokens=st.sampled_from([1, 16, 32, 64]), itemsize=st.sampled_from([1, 2, 4]), summary_bytes=st.sampled_from([0, 5, 68, 132]))


def brute_force(layout: KVLayout) -> tuple[int, int]:
    """(payload, summary, index) bytes, counted piece by piece."""
    payload = summary = 0
    index = 8
    for _ in range(layout.num_layers):
        for _ in range(layout.kv_heads):
            payload += sum(layout.block_tokens * layout.head_dim * layout.itemsize for _ in "KV")
            summary += layout.summary_bytes
            index += 8 + layout.summary_bytes
    return payload, summary, index


@given(LAYOUTS)
def test_sizes_are_counted_right(layout):
    payload, summary, index = brute_force(layout)
    assert (layout.payload_bytes, layout.summary_total, layout.index_bytes) == (payload, summary, index)
    assert layout.pieces * layout.piece_bytes == payload and layout.token_bytes * layout.block_tokens == payload


@settings(max_examples=200)
@given(LAYOUTS, st.integers(1, 1 << 45))
def test_an_arena_is_cut_without_overlap_and_without_waste(layout, size):
    payload, _, index = brute_force(layout)
    stride = [-(-n // 64) * 64 for n in (payload, index)]
    if size < sum(stride):
        with pytest.raises(BoundsError) as error:
            ArenaGeometry.fit(layout, size)
        assert str(size) in error.value.limit and str(sum(stride)) in error.value.limit
        return
    cut = ArenaGeometry.fit(layout, size)
    n = cut.num_records
    assert n * sum(stride) <= size < (n + 1) * sum(stride)
    some = np.unique(np.array([0, 1, n // 2, n - 2, n - 1]).clip(0, n - 1))
    payloads, indexes = cut.payload_offsets(some), cut.index_offsets(some)
    assert payloads.dtype == indexes.dtype == np.uint64
    for record, p, i in zip(some.tolist(), payloads.tolist(), indexes.tolist()):
        assert p == record * stride[0] and i == n * stride[0] + record * stride[1]
        assert p % 64 == 0 and p + payload <= n * stride[0] and i + index <= size
    cut.require_sound(layout, size, peer="x")


def test_every_piece_of_a_small_arena_is_where_numpy_says():
    layout = small_layout(num_layers=3, kv_heads=5, head_dim=3, block_tokens=16, itemsize=2, dtype="float16", summary_bytes=7)
    cut = ArenaGeometry.fit(layout, 50_000)
    arena = np.arange(cut.size, dtype=np.uint32)
    records = arena[: cut.num_records * cut.payload_stride].reshape(cut.num_records, cut.payload_stride)[:, : layout.payload_bytes]
    pieces = records.reshape(cut.num_records, 3, 5, 2, 16, 3, 2)
    for record, layer, head, side, token, dim in itertools.product(range(cut.num_records), range(3), range(5), range(2), (0, 9, 15), range(3)):
        by_hand = int(cut.payload_offsets([record])[0]) + (layer * 5 + head) * layout.piece_bytes + ((side * 16 + token) * 3 + dim) * 2
        assert pieces[record, layer, head, side, token, dim, 0] == by_hand
    which = np.repeat(np.arange(cut.num_records), 15), np.tile(np.arange(15), cut.num_records)
    assert np.array_equal(cut.piece_offsets(*which, layout), pieces[:, :, :, 0, 0, 0, 0].ravel())
    assert cut.piece_offsets(*which, layout).dtype == np.uint64


@pytest.mark.parametrize("records, pieces, limit", [([0, 1], [5, 6], "6 pieces"), ([0], [-1], "6 pieces"), ([8], [0], "8 records"), ([-1], [0], "8 records")])
def test_a_piece_outside_its_record_or_the_arena(records, pieces, limit):
    cut = ArenaGeometry.fit(small_layout(), 8 * 896)
    with pytest.raises(BoundsError) as error:
        cut.piece_offsets(np.array(records), np.array(pieces), small_layout())
    assert error.value.limit == limit
    assert cut.piece_offsets(np.array([], np.int64), np.array([], np.int64), small_layout()).tolist() == []
    assert cut.piece_offsets(np.array([7, 0]), np.array([5, 5]), small_layout()).tolist() == [7 * 768 + 5 * 128, 5 * 128]


@pytest.mark.parametrize("records", [[-1], [8], [0, 8], [1 << 40], [-(1 << 62)]])
def test_a_record_outside_the_arena(records):
    cut = ArenaGeometry.fit(small_layout(), 8 * 896)
    assert cut.num_records == 8
    for offsets in (cut.payload_offsets, cut.index_offsets):
        with pytest.raises(BoundsError) as error:
            offsets(np.array(records))
        assert error.value.limit == "8 records"


def test_no_records_have_no_offsets():
    cut = ArenaGeometry.fit(small_layout(), 8 * 896)
    assert cut.payload_offsets(np.array([], np.int64)).tolist() == []


@pytest.mark.parametrize("size", [0, -1, 1 << 62, 1 << 70])
def test_impossible_arena_sizes(size):
    with pytest.raises(BoundsError):
        ArenaGeometry.fit(small_layout(), size)


@pytest.mark.parametrize("field", ["num_layers", "kv_heads", "head_dim", "block_tokens", "itemsize", "tp_size"])
@pytest.mark.parametrize("value", [0, -1, 1 << 20, 1 << 63])
def test_a_dimension_out_of_bounds_is_named(field, value):
    with pytest.raises(BoundsError, match=field):
        small_layout(**{field: value})


def test_a_record_that_no_address_space_holds():
    huge = (1 << 20) - 1
    with pytest.raises(BoundsError, match="address space"):
        small_layout(num_layers=huge, kv_heads=huge, head_dim=huge)
    with pytest.raises(BoundsError, match="summary_bytes"):
        small_layout(summary_bytes=-1)


CHANGES = {"num_layers": 9, "kv_heads": 1, "head_dim": 8, "block_tokens": 16, "dtype": "bfloat16", "itemsize": 2, "tp_size": 2,
           "summary": "none", "summary_bytes": 0, "metadata_lens": (1, 2)}


def test_all_fields_are_compared():
    assert set(CHANGES) == set(KVLayout.__struct_fields__)


@pytest.mark.parametrize("field", CHANGES)
def test_the_field_that_differs_is_named_and_the_digest_differs(field):
    ours, theirs = small_layout(), small_layout(**{field: CHANGES[field]})
    with pytest.raises(LayoutMismatch, match=field) as error:
        ours.require_equal(theirs, peer="prefill", room=5)
    assert (error.value.field, error.value.peer, error.value.room) == (field, "prefill", 5)
    assert ours.digest() != theirs.digest() and ours.digest() == small_layout().digest()


@settings(max_examples=300)
@given(st.tuples(*[st.integers(-2, 1 << 63)] * 5), st.integers(-1, 1 << 63))
def test_a_peers_geometry_is_believed_only_if_every_byte_fits(fields, endpoint_size):
    layout = small_layout()
    cut = ArenaGeometry(*fields)
    try:
        cut.require_sound(layout, endpoint_size, peer="tier")
    except BoundsError as error:
        assert error.peer == "tier"
        return
    for record in (0, cut.num_records - 1):
        payload, index = int(cut.payload_offsets([record])[0]), int(cut.index_offsets([record])[0])
        assert 0 <= payload and payload + layout.payload_bytes <= cut.num_records * cut.payload_stride <= cut.index_base
        assert index + layout.index_bytes <= cut.size <= endpoint_size < 1 << 62


@pytest.mark.parametrize("change", [dict(num_records=9), dict(payload_stride=64), dict(index_stride=64), dict(index_base=64), dict(size=8 * 896 - 1)])
def test_a_geometry_that_is_almost_right(change):
    good = ArenaGeometry.fit(small_layout(), 8 * 896)
    good.require_sound(small_layout(), 8 * 896, peer="tier")
    with pytest.raises(BoundsError):
        msgspec.structs.replace(good, **change).require_sound(small_layout(), 8 * 896, peer="tier")


@pytest.mark.parametrize("base, size, fine", [
    (0, 1, True), ((1 << 63) - 4097, 4096, True), ((1 << 63) - 4096, 4096, False), (1 << 63, 1, False), (-1, 1, False), (0, 0, False), (0, 1 << 62, False)])
def test_endpoints_near_the_end_of_the_address_space(base, size, fine):
    endpoint = Endpoint.make("nixl", "n", "", size, base)
    if fine:
        endpoint.verify()
    else:
        with pytest.raises(BoundsError):
            endpoint.verify()


def test_a_damaged_endpoint_blob():
    good = Endpoint.make("nixl", "n", "", 4096, metadata=b"blob")
    with pytest.raises(IntegrityError):
        msgspec.structs.replace(good, metadata=b"blo8").verify()
