"""Checksums of records.

A record's *root* is the XXH3-64 of its payload, seeded with its generation: it ties the bytes to one use of the
record, so a reader notices both damage and a record that was freed and written again. It guards against faults, not
against an adversary (the control plane's authentication does that).
"""

from __future__ import annotations

import numpy as np
import xxhash

from transport.errors import IntegrityError


def roots(payloads: np.ndarray, generations: np.ndarray) -> np.ndarray:
    """uint64 [n] roots of ``payloads`` uint8 [n, payload_bytes] (rows contiguous) with ``generations`` uint64 [n]."""
    return np.fromiter((xxhash.xxh3_64_intdigest(row, seed) for row, seed in zip(payloads, generations.tolist())), np.uint64, len(payloads))


def verify(payloads: np.ndarray, generations: np.ndarray, expected: np.ndarray, records: np.ndarray, *, peer: str, room: int) -> None:
    """Raises ``IntegrityError`` naming the first record whose bytes are not those that were published."""
    wrong = np.flatnonzero(roots(payloads, generations) != expected)
    if len(wrong):
        raise IntegrityError(f"{len(wrong)} of {len(payloads)} records differ from what was published, first record {int(records[wrong[0]])}",
                             peer=peer, room=room)
