"""Content hashes of pages: which tokens, under which model and layout, led to this KV.

The hash of a page chains over all pages before it, because KV depends on the whole prefix. The chain starts from
everything else that changes KV: model fingerprint, layout (dtype, page size, heads, rank), tenant salt and LoRA.
"""

from __future__ import annotations

import hashlib

import numpy as np

from transport.layout import KVLayout
from transport.records import HASH_BYTES


def chain_seed(layout: KVLayout, fingerprint: str, rank: int, *namespace: str) -> bytes:
    """Start of a chain. ``namespace``: whatever else separates prompts (cache salt, LoRA id), each length-prefixed so
    that no two lists collide."""
    h = hashlib.sha256(layout.digest())
    for part in (fingerprint, str(rank), *namespace):
        raw = part.encode()
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return h.digest()


def page_hashes(seed: bytes, tokens: np.ndarray, page_tokens: int) -> bytes:
    """``HASH_BYTES`` per whole page of ``tokens`` (int64 [n]); the rest of the last page is left out."""
    raw = np.ascontiguousarray(tokens, dtype="<i8")
    out, digest = bytearray(), seed
    for start in range(0, len(raw) // page_tokens * page_tokens, page_tokens):
        digest = hashlib.sha256(digest + raw[start : start + page_tokens].tobytes()).digest()
        out += digest
    assert len(out) == HASH_BYTES * (len(raw) // page_tokens)
    return bytes(out)
