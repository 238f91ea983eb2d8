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
from transport.integrity import roots, verify

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


@given(st.integers(1, 5), st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_roots_are_xxh3_of_the_row_seeded_by_its_generation(n, size, generation):
    payload = np.frombuffer(np.random.default_rng(size).bytes(n * size), np.uint8).reshape(n, size)
    generations = (np.uint64(generation) + np.arange(n, dtype=np.uint64)).astype(np.uint64)
    assert roots(payload, generations).tolist() == [xxhash.xxh3_64(payload[k].tobytes(), seed=int(generations[k])).intdigest() for k in range(n)]


def test_every_flipped_byte_and_every_other_generation_is_found():
    rng = np.random.default_rng(0)
    payload = np.frombuffer(rng.bytes(3 * 96), np.uint8).reshape(3, 96).copy()
    generations, records = np.array([1, 2, 3], np.uint64), np.array([40, 50, 60])
    good = roots(payload, generations)
    verify(payload, generations, good, records, peer="tier", room=7)
    for row in range(3):
        for column in range(96):
            payload[row, column] ^= 1 << column % 8
            with pytest.raises(IntegrityError) as error:
                verify(payload, generations, good, records, peer="tier", room=7)
            payload[row, column] ^= 1 << column % 8
            assert f"1 of 3 records differ from what was published, first record {records[row]}" in str(error.value)
            assert (error.value.peer, error.value.room) == ("tier", 7)
        later = generations.copy()
        later[row] += 1
        with pytest.raises(IntegrityError):
            verify(payload, later, good, records, peer="tier", room=7)
    with pytest.raises(IntegrityError, match="3 of 3 .* record 40"):
        verify(payload[[1, 2, 0]], generations, good, records, peer="tier", room=7)


def test_rows_of_a_larger_view_count_alone():
    window = np.zeros((4, 128), np.uint8)
    window[:, 100:] = 9
    assert roots(window[:, :100].copy(), np.ones(4, np.uint64)).tolist() == [xxhash.xxh3_64_intdigest(bytes(100), 1)] * 4
