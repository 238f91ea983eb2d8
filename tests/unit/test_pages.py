"""Pool -> arena -> pool, for any layout and dtype, against element-wise loops."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from node_rig import Pool, small_layout

from decode_node.pages import PageSink
from oasis_sglang.selection.summaries import SUMMARIES
from prefill_node.pages import ArenaWriter, PageSource
from transport import arena as arenas
from transport.arena import Arena, available_bytes
from transport.errors import CapacityError
from transport.integrity import index_rows, piece_digests, verify_index
from transport.layout import ArenaGeometry

DTYPES = {"float32": (torch.float32, 4), "bfloat16": (torch.bfloat16, 2), "float16": (torch.float16, 2)}
SUMMARY = SUMMARIES["mean_var_int8"]


def layout_of(dtype: str, **dims):
    return small_layout(dtype=dtype, itemsize=DTYPES[dtype][1], summary_bytes=SUMMARY.bytes(dims["head_dim"]), **dims)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.fixture(scope="module")
def arena():
    arena = Arena.create(1 << 20)
    yield arena
    arena.close()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(DTYPES)), st.integers(1, 3), st.sampled_from([1, 3, 4]), st.sampled_from([2, 8, 10]), st.sampled_from([1, 2, 16]),
       st.integers(1, 7), st.integers(0, 10**6))
def test_a_round_trip_through_an_arena_keeps_every_bit(arena, dtype, layers, heads, dim, page, n, seed):
    layout = layout_of(dtype, num_layers=layers, kv_heads=heads, head_dim=dim, block_tokens=page)
    rng = np.random.default_rng(seed)
    source, sink = Pool(layout, 9, dtype=DTYPES[dtype][0], seed=seed), Pool(layout, 11, dtype=DTYPES[dtype][0], fill=5.0)
    pages, target = rng.permutation(9)[:n], rng.permutation(11)[:n]
    tokens = int(rng.integers((n - 1) * page + 1, n * page + 1))
    geometry = ArenaGeometry.fit(layout, arena.size)
    records = rng.permutation(min(geometry.num_records, 20))[:n].astype(np.int64)
    generations = rng.integers(1, 99, n).astype(np.uint64)
    arena.bytes[:] = 0xAA

    block = PageSource(source.k, source.v, layout).gather(torch.from_numpy(pages), tokens)
    writer = ArenaWriter(arena, geometry, layout)
    summaries = SUMMARY.build(block[:, :, :, 0])
    roots = writer.write(records, generations, block, summaries)

    offsets = geometry.payload_offsets(records).tolist()
    payloads = np.stack([arena.bytes[o : o + layout.payload_bytes] for o in offsets])
    digests = np.array([[xxhash.xxh3_64_intdigest(piece.tobytes()) for piece in p.reshape(layout.pieces, -1)] for p in payloads], np.uint64)
    assert roots.tolist() == [xxhash.xxh3_64_intdigest(row.tobytes()) for row in digests]
    written = np.zeros(arena.size, bool)
    indexes = geometry.index_offsets(records).tolist()
    for o, i in zip(offsets, indexes):
        written[o : o + layout.payload_bytes] = True
        written[i : i + layout.index_bytes] = True
    index = np.stack([arena.bytes[i : i + layout.index_bytes] for i in indexes])
    assert np.array_equal(index, index_rows(digests, summaries.reshape(n, -1).numpy(), generations, layout))
    verify_index(index, generations, roots, records, layout, peer="", room=0)
    assert (arena.bytes[~written] == 0xAA).all(), "a byte outside the records was written"

    PageSink(sink.k, sink.v, layout).scatter(payloads, target)
    for a, b in zip((*source.k, *source.v), (*sink.k, *sink.v)):
        expected = torch.full_like(b, 5.0)
        for k in range(n):
            for t in range(page):
                alive = k * page + t < tokens
                expected[target[k] * page + t] = a[pages[k] * page + t] if alive else 0
        assert np.array_equal(bits(b), bits(expected))


@pytest.mark.parametrize("tokens", [33, 40, 47, 48])
def test_slots_past_the_prompt_are_zeroed_in_k_and_v_and_nowhere_else(tokens):
    layout = layout_of("float32", num_layers=2, kv_heads=3, head_dim=4, block_tokens=16)
    pool = Pool(layout, 8, fill=3.0)
    block = PageSource(pool.k, pool.v, layout).gather(torch.tensor([7, 0, 2]), tokens)
    flat = block.permute(0, 4, 1, 2, 3, 5).reshape(48, -1)
    assert (flat[:tokens] == 3.0).all() and not flat[tokens:].any()
    assert all((b == 3.0).all() for b in (*pool.k, *pool.v)), "the pool itself is only read"


def test_the_same_page_may_be_gathered_twice():
    layout = layout_of("float32", num_layers=1, kv_heads=1, head_dim=2, block_tokens=4)
    pool = Pool(layout, 4)
    block = PageSource(pool.k, pool.v, layout).gather(torch.tensor([1, 1, 3]), 12)
    assert torch.equal(block[0], block[1]) and not torch.equal(block[0], block[2])


def test_a_pool_with_slots_past_its_last_whole_page():
    """SGLang's pools have one more page of padding; a remainder must not shift anything."""
    layout = layout_of("float32", num_layers=1, kv_heads=2, head_dim=2, block_tokens=4)
    pool = Pool(layout, 4)
    longer = [torch.cat([b, torch.full((3, 2, 2), 9.0)]) for b in (pool.k[0], pool.v[0])]
    block = PageSource(longer[:1], longer[1:], layout).gather(torch.tensor([3]), 4)
    assert torch.equal(block[0, 0, :, 0].transpose(0, 1), pool.k[0][12:16]) and torch.equal(block[0, 0, :, 1].transpose(0, 1), pool.v[0][12:16])


def test_special_values_survive():
    layout = layout_of("bfloat16", num_layers=1, kv_heads=1, head_dim=4, block_tokens=1)
    pool = Pool(layout, 2, dtype=torch.bfloat16)
    pool.k[0][1] = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-40]])
    block = PageSource(pool.k, pool.v, layout).gather(torch.tensor([1]), 1)
    sink = Pool(layout, 2, dtype=torch.bfloat16, fill=0.0)
    PageSink(sink.k, sink.v, layout).scatter(bits(block).reshape(1, -1), np.array([0]))
    assert np.array_equal(bits(sink.k[0][0]), bits(pool.k[0][1]))


def test_without_summaries_the_index_holds_digests_alone(arena):
    layout = small_layout(summary="none", summary_bytes=0)
    geometry = ArenaGeometry.fit(layout, arena.size)
    pool = Pool(layout, 4)
    arena.bytes[:] = 0xAA
    block = PageSource(pool.k, pool.v, layout).gather(torch.tensor([0, 1]), 8)
    records, generations = np.array([3, 4]), np.array([1, 5], np.uint64)
    roots = ArenaWriter(arena, geometry, layout).write(records, generations, block, None)
    index = np.stack([arena.bytes[i : i + layout.index_bytes] for i in geometry.index_offsets(records).tolist()])
    digests, summaries = verify_index(index, generations, roots, records, layout, peer="", room=0)
    assert digests.tolist() == piece_digests(bits(block).reshape(2, -1), layout.pieces).tolist() and summaries.size == 0
    end = geometry.index_base + 5 * geometry.index_stride
    assert (arena.bytes[geometry.index_base : end - 2 * geometry.index_stride] == 0xAA).all() and (arena.bytes[end:] == 0xAA).all()
    first = geometry.payload_stride * 3
    assert (arena.bytes[:first] == 0xAA).all() and not (arena.bytes[first : first + layout.payload_bytes] == 0xAA).all()


def test_equal_pages_have_equal_roots_in_whichever_record(arena):
    layout = layout_of("float32", num_layers=1, kv_heads=2, head_dim=4, block_tokens=4)
    pool = Pool(layout, 4)
    writer = ArenaWriter(arena, ArenaGeometry.fit(layout, arena.size), layout)
    block = PageSource(pool.k, pool.v, layout).gather(torch.tensor([2, 0]), 8)
    summaries = SUMMARY.build(block[:, :, :, 0])
    first = writer.write(np.array([1, 2]), np.array([1, 1], np.uint64), block, summaries)
    again = writer.write(np.array([7, 3]), np.array([9, 2**64 - 1], np.uint64), block, summaries)
    assert first.tolist() == again.tolist() and first[0] != first[1]


def test_an_arena_is_shared_by_descriptor_and_refuses_to_be_larger_than_it_is():
    arena = Arena.create(8192)
    other = Arena.attach(os.dup(arena.fd), 8192)
    arena.bytes[5000] = 42
    assert other.bytes[5000] == 42
    with pytest.raises(CapacityError) as error:
        Arena.attach(os.dup(arena.fd), 8193)
    assert error.value.limit == "8192 of 8193 bytes"
    view = other.bytes[4999:5001]
    for each in (other, arena, other):
        each.close()
    assert view[1] == 42 and other.bytes.size == 0, "a view outlives the arena it was taken from"


def test_an_arena_larger_than_memory_is_refused_before_the_kernel_kills_somebody(monkeypatch):
    monkeypatch.setattr(arenas, "available_bytes", lambda: 8191)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("the memory was asked for"))
    with pytest.raises(CapacityError) as error:
        Arena.create(8192)
    assert error.value.limit == "8192 of 8191 bytes"


MEMINFO = "MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:  5000 kB\n"


@pytest.mark.parametrize("files, wanted", [
    ({}, 5000 << 10),
    ({"memory.max": "max", "memory.current": "7", "memory.stat": "anon 1\n"}, 5000 << 10),
    ({"memory.max": "1000000", "memory.current": "900000", "memory.stat": "file 999999\ninactive_file 20000\nactive_file 5000\n"}, 125_000),
    ({"memory.max": "1000", "memory.current": "2000", "memory.stat": "inactive_file 0\n"}, 0),
    ({"memory/memory.limit_in_bytes": "1000000", "memory/memory.usage_in_bytes": "900000",
      "memory/memory.stat": "inactive_file 1\nactive_file 2\ntotal_inactive_file 20000\ntotal_active_file 5000\n"}, 125_000),
    ({"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "900000", "memory/memory.stat": "active_file 2\n"}, 5000 << 10),
])
def test_what_is_available_is_the_least_of_host_and_container(tmp_path, files, wanted):
    (tmp_path / "meminfo").write_text(MEMINFO)
    for name, text in files.items():
        (tmp_path / "cg" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cg" / name).write_text(text)
    assert available_bytes(tmp_path, tmp_path / "cg") == wanted
