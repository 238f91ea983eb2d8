"""Checksums of records, of their pieces and of their index.

Each piece has an XXH3-64 *digest* of its bytes, so a reader that pulled nothing but this piece notices both damage and a
record that was freed and written again. The record's *root*, in the manifest, is the XXH3-64 of its digests: equal roots
mean equal bytes, in whichever arena. The index carries its digests and, behind the summaries, a checksum of those, seeded with
the record's generation. All of it guards against faults, not against an adversary (the control plane's authentication does that).
"""

from __future__ import annotations

import numpy as np
import xxhash

from transport.errors import IntegrityError
from transport.layout import KVLayout


def _checksums(rows: np.ndarray, seeds: np.ndarray | None = None) -> np.ndarray:
    """uint64 [n] XXH3-64 of ``rows`` uint8 [n, bytes] (each contiguous), seeded with ``seeds`` uint64 [n]."""
    more = () if seeds is None else (seeds.tolist(),)
    return np.fromiter(map(xxhash.xxh3_64_intdigest, rows, *more), np.uint64, len(rows))


def piece_digests(payloads: np.ndarray, pieces: int) -> np.ndarray:
    """uint64 [n, pieces] digests of ``payloads`` uint8 [n, payload_bytes] (C-contiguous)."""
    return _checksums(payloads.reshape(len(payloads) * pieces, -1)).reshape(len(payloads), pieces)


def roots(digests: np.ndarray) -> np.ndarray:
    """uint64 [n] roots of records with piece ``digests`` uint64 [n, pieces]."""
    return _checksums(np.ascontiguousarray(digests).view(np.uint8))


def block_checks(digests: np.ndarray, summaries: np.ndarray) -> np.ndarray:
    """uint64 [n]: one checksum for all of a block that travels in a message, from its piece ``digests`` uint64 [n, pieces] and its
    ``summaries`` uint8 [n, summary_total]: the XXH3-64 of these, seeded with the root of those."""
    return _checksums(np.ascontiguousarray(summaries), roots(digests))


def index_rows(digests: np.ndarray, summaries: np.ndarray | None, generations: np.ndarray, layout: KVLayout) -> np.ndarray:
    """uint8 [n, index_bytes] as the arena holds them, from ``digests`` [n, pieces] and ``summaries`` uint8 [n, summary_total]."""
    n, head = len(digests), layout.pieces * 8
    rows = np.zeros((n, layout.index_bytes), np.uint8)
    rows[:, :head] = np.ascontiguousarray(digests).view(np.uint8)
    if summaries is not None:
        rows[:, head:-8] = summaries
    rows[:, -8:] = _checksums(rows[:, head:-8].copy(), generations)[:, None].view(np.uint8)
    return rows


def verify_records(payloads: np.ndarray, expected: np.ndarray, records: np.ndarray, layout: KVLayout, *,
                   peer: str, room: int) -> None:
    """Whole records against their roots. Raises ``IntegrityError`` naming the first record whose bytes are not those that
    were published."""
    found = roots(piece_digests(payloads, layout.pieces))
    _require("records", found == expected, records, peer, room)


def verify_index(index: np.ndarray, generations: np.ndarray, expected: np.ndarray, records: np.ndarray, layout: KVLayout, *,
                 peer: str, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits ``index`` uint8 [n, index_bytes] into digests uint64 [n, pieces] and summaries uint8 [n, pieces, summary_bytes]
    once both are shown to belong to the records with roots ``expected``. Raises ``IntegrityError``."""
    head = layout.pieces * 8
    digests = index[:, :head].copy().view(np.uint64)
    summaries = index[:, head:-8].copy()
    sums = index[:, -8:].copy().view(np.uint64)[:, 0]
    fine = (roots(digests) == expected) & (_checksums(summaries, generations) == sums)
    _require("record indexes", fine, records, peer, room)
    return digests, summaries.reshape(len(index), layout.pieces, layout.summary_bytes)


def verify_pieces(pieces: np.ndarray, expected: np.ndarray, records: np.ndarray, *, peer: str, room: int) -> None:
    """``pieces`` uint8 [n, piece_bytes] of ``records`` [n] against their digests ``expected`` uint64 [n]. Raises ``IntegrityError``."""
    _require("pieces", _checksums(pieces) == expected, records, peer, room)


def verify_blocks(digests: np.ndarray, summaries: np.ndarray, expected: np.ndarray, *, peer: str) -> None:
    """Blocks of a message, as above, against their checksums ``expected`` uint64 [n]. Raises ``IntegrityError``."""
    _require("blocks", block_checks(digests, summaries) == expected, np.arange(len(expected)), peer, None)


def _require(what: str, fine: np.ndarray, records: np.ndarray, peer: str, room: int | None) -> None:
    wrong = np.flatnonzero(~fine)
    if len(wrong):
        raise IntegrityError(f"{len(wrong)} of {len(fine)} {what} differ from what was published, first record {int(records[wrong[0]])}",
                             peer=peer, room=room)
