"""Content hashes and checksums against their definitions, written out slowly."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from node_rig import FINGERPRINT, small_layout

from transport.errors import IntegrityError
from transport.hashing import chain_seed, page_hashes
from transport.integrity import index_rows, piece_digests, roots, verify_index, verify_pieces, verify_records

TOKENS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)


@given(TOKENS, st.integers(1, 9))
def test_a_pages_hash_chains_over_all_before_it(tokens, page):
    digest, out = b"seed", b""
    for start in range(0, len(tokens) - page + 1, page):
        digest = hashlib.sha256(digest + b"".join(struct.pack("<q", t) for t in tokens[start : start + page])).digest()
        out += digest
    assert page_hashes(b"seed", np.array(tokens, np.int64), page) == out


@given(st.lists(st.integers(0, 9), min_size=8, max_size=40), st.data())
def test_one_token_changes_its_page_and_all_after_it_but_none_before(tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = tokens.copy()
    changed[at] += 1
    a, b = (page_hashes(b"", np.array(x, np.int64), 4) for x in (tokens, changed))
    for page in range(len(tokens) // 4):
        assert (a[page * 32 : page * 32 + 32] == b[page * 32 : page * 32 + 32]) == (page < at // 4)


def test_token_ids_of_any_integer_type_hash_alike():
    wide = np.arange(32, dtype=np.int64)
    for dtype in (np.int32, np.uint16, ">i8"):
        assert page_hashes(b"s", wide.astype(dtype), 16) == page_hashes(b"s", wide, 16)
    assert page_hashes(b"s", np.arange(64, dtype=np.int64)[::2], 16) != page_hashes(b"s", wide, 16)


def test_seeds_differ_in_whatever_changes_kv():
    base = (small_layout(), FINGERPRINT, 0, "salt", "lora")
    seeds = [chain_seed(*base)] + [chain_seed(*changed) for changed in (
        (small_layout(dtype="float16"), *base[1:]), (base[0], "0" * 64, *base[2:]), (*base[:2], 1, *base[3:]), (*base[:3], "other", "lora"),
        (*base[:3], "salt", ""), (*base[:3], "saltl", "ora"), (*base[:3], "salt"), (*base[:3], "", "saltlora"), base[:3], (*base, ""))]
    assert len(set(seeds)) == len(seeds) and all(len(s) == 32 for s in seeds)
    assert chain_seed(*base) == seeds[0]


LAYOUT = small_layout(num_layers=2, kv_heads=2, head_dim=1, block_tokens=3, itemsize=4, summary_bytes=5)
"""4 pieces of 24 bytes; an index of 4 digests, 20 bytes of summaries and their checksum."""
RECORDS = np.array([40, 50, 60])
GENERATIONS = np.array([1, 2, 2**64 - 2], np.uint64)
PEER = dict(peer="tier", room=7)


def by_hand(data: bytes, seed=0) -> int:
    return xxhash.xxh3_64(data, seed=int(seed)).intdigest()


def published(layout=LAYOUT, generations=GENERATIONS, seed=0):
    """Payloads, summaries, index rows and roots of some records."""
    rng, n = np.random.default_rng(seed), len(generations)
    payloads, summaries = (rng.integers(0, 256, (n, size), np.uint8) for size in (layout.payload_bytes, layout.summary_total))
    digests = piece_digests(payloads, layout.pieces)
    return payloads, summaries, index_rows(digests, summaries, generations, layout), roots(digests)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(0, 9), st.integers(0, 2**64 - 1))
def test_digests_roots_and_indexes_are_what_the_docstring_says(n, layers, heads, tokens, summary_bytes, generation):
    layout = small_layout(num_layers=layers, kv_heads=heads, head_dim=3, block_tokens=tokens, itemsize=1, summary_bytes=summary_bytes)
    generations = (np.uint64(generation) + np.arange(n, dtype=np.uint64)).astype(np.uint64)
    payloads, summaries, index, found = published(layout, generations, seed=n)
    for row, seed in enumerate(generations):
        digests = [by_hand(payloads[row, k * layout.piece_bytes : (k + 1) * layout.piece_bytes].tobytes()) for k in range(layout.pieces)]
        assert piece_digests(payloads, layout.pieces)[row].tolist() == digests
        packed = struct.pack(f"<{layout.pieces}Q", *digests)
        assert found[row] == by_hand(packed)
        assert index[row].tobytes() == packed + summaries[row].tobytes() + struct.pack("<Q", by_hand(summaries[row].tobytes(), seed))
    digests, back = verify_index(index, generations, found, np.arange(n), layout, **PEER)
    assert digests.dtype == np.uint64 and digests.tolist() == piece_digests(payloads, layout.pieces).tolist()
    assert back.shape == (n, layout.pieces, summary_bytes) and back.tobytes() == summaries.tobytes()
    verify_records(payloads, found, np.arange(n), layout, **PEER)
    verify_pieces(payloads.reshape(-1, layout.piece_bytes), digests.ravel(), np.arange(n * layout.pieces), **PEER)


def test_without_summaries_the_index_ends_with_the_checksum_of_nothing():
    layout = small_layout(summary_bytes=0)
    payloads = np.zeros((1, layout.payload_bytes), np.uint8)
    generations = np.array([3], np.uint64)
    digests = piece_digests(payloads, layout.pieces)
    index = index_rows(digests, None, generations, layout)
    assert index.tobytes() == digests.tobytes() + struct.pack("<Q", by_hand(b"", 3))
    assert verify_index(index, generations, roots(digests), RECORDS[:1], layout, **PEER)[1].shape == (1, layout.pieces, 0)


CHECKS = {
    "records": lambda payloads, index, roots_, generations, records: verify_records(payloads, roots_, records, LAYOUT, **PEER),
    "record indexes": lambda payloads, index, roots_, generations, records: verify_index(index, generations, roots_, records, LAYOUT, **PEER),
    "pieces": lambda payloads, index, roots_, generations, records: verify_pieces(
        payloads[:, 24:48], index[:, 8:16].copy().view(np.uint64)[:, 0], records, **PEER),
}


@pytest.mark.parametrize("what", CHECKS)
def test_every_flipped_bit_is_found(what):
    payloads, _, index, good = published()
    check = CHECKS[what]
    check(payloads, index, good, GENERATIONS, RECORDS)
    damaged = {"records": payloads, "record indexes": index, "pieces": payloads[:, 24:48]}[what]
    for row in range(3):
        for column in range(damaged.shape[1]):
            for bit in range(8):
                damaged[row, column] ^= 1 << bit
                with pytest.raises(IntegrityError) as error:
                    check(payloads, index, good, GENERATIONS, RECORDS)
                damaged[row, column] ^= 1 << bit
            assert f"1 of 3 {what} differ from what was published, first record {RECORDS[row]}" in str(error.value)
            assert (error.value.peer, error.value.room) == ("tier", 7)
    with pytest.raises(IntegrityError, match=f"3 of 3 {what} .* record 40"):
        check(payloads[[1, 2, 0]], index if what == "pieces" else index[[1, 2, 0]], good, GENERATIONS, RECORDS)


def test_equal_bytes_have_equal_digests_and_roots_whatever_their_generation():
    payloads, _, index, good = published()
    _, _, later, again = published(generations=GENERATIONS[::-1].copy() + np.uint64(1))
    assert again.tolist() == good.tolist() and len(set(good.tolist())) == 3
    assert np.array_equal(later[:, :32], index[:, :32]), "the digests"
    assert np.array_equal(later[:, 32:-8], index[:, 32:-8]) and (later[:, -8:] != index[:, -8:]).any(1).all(), "the summaries, under another checksum"
    verify_records(payloads, again, RECORDS, LAYOUT, **PEER)


@pytest.mark.parametrize("row", range(3))
def test_an_index_of_another_generation_is_refused(row):
    """Its bytes are those that were published, digests and roots too: only the generation tells."""
    _, _, index, good = published()
    later = GENERATIONS.copy()
    later[row] += np.uint64(1)
    with pytest.raises(IntegrityError, match=f"1 of 3 record indexes .* first record {RECORDS[row]}"):
        verify_index(index, later, good, RECORDS, LAYOUT, **PEER)
    rewritten = published(generations=later)[2]
    verify_index(rewritten, later, good, RECORDS, LAYOUT, **PEER)


def test_digests_of_other_pieces_or_summaries_of_other_records_are_no_index():
    """What each checksum covers alone is not enough: the parts must belong together."""
    _, _, index, good = published()
    swapped = index.copy()
    swapped[:, :8], swapped[:, 8:16] = index[:, 8:16], index[:, :8]
    mixed = index.copy()
    mixed[0, 32:] = index[1, 32:]
    for forged in (swapped, mixed):
        with pytest.raises(IntegrityError):
            verify_index(forged, GENERATIONS, good, RECORDS, LAYOUT, **PEER)


def test_what_is_verified_does_not_alias_the_window_it_was_read_into():
    """The window is read into again while the index is in use."""
    _, summaries, index, good = published()
    digests, back = verify_index(index, GENERATIONS, good, RECORDS, LAYOUT, **PEER)
    before = digests.copy()
    index[:] = 0
    assert np.array_equal(digests, before) and back.tobytes() == summaries.tobytes()


def test_rows_of_a_wider_window_are_checked_as_they_lie():
    payloads, _, index, good = published()
    window = np.full((3, 200), 9, np.uint8)
    window[:, 10 : 10 + LAYOUT.index_bytes] = index
    verify_index(window[:, 10 : 10 + LAYOUT.index_bytes], GENERATIONS, good, RECORDS, LAYOUT, **PEER)
    window[:, :24] = payloads[:, :24]
    verify_pieces(window[:, :24], index[:, :8].copy().view(np.uint64)[:, 0], RECORDS, **PEER)
