"""Blocks that a decode node has computed, taken into the arena: the next turn's prompt begins with them.

They are a cache like any record that nobody leases. The bytes come in the message and are written by the tier itself, since a
decode node has nothing that could be read from; answers are short beside prompts. Whoever may donate decides what others
find under a hash: only where ``--accept-generated`` says so.
"""

from __future__ import annotations

import numpy as np

from transport import messages as m
from transport.errors import ProtocolError
from transport.integrity import index_rows, piece_digests, roots, verify_blocks
from transport.records import split_hashes
from transport.tier import Tier


class Donations:
    """``arena`` uint8 [size] of ``tier``. Called by the tier's loop, which it holds up for as long as the copies take."""

    def __init__(self, tier: Tier, arena: np.ndarray):
        self.tier, self.arena = tier, arena

    def take(self, session: object, request: m.Donate) -> m.Reply:
        """Raises ``ProtocolError`` for what is not whole blocks, ``IntegrityError`` for bytes that are not those that were sent,
        ``CapacityError`` when all records are in use: nothing is kept then."""
        tier, layout = self.tier, self.tier.layout
        hashes = split_hashes(request.hashes)
        n = len(hashes)
        sizes = (len(request.payloads), len(request.summaries))
        if not n or len(set(hashes)) < n or not 0 <= request.depth <= m.MAX_RECORDS or sizes != (n * layout.payload_bytes, n * layout.summary_total):
            raise ProtocolError("donated bytes that are not distinct whole blocks", limit=f"{layout.payload_bytes} and {layout.summary_total} bytes each")
        checks = m.unpack(request.checks, "u8", count=n)
        new = np.flatnonzero(tier.table.find(hashes) < 0)
        if len(new):
            payloads, summaries = (np.frombuffer(raw, np.uint8).reshape(n, -1)[new] for raw in (request.payloads, request.summaries))
            digests = piece_digests(payloads, layout.pieces)
            verify_blocks(digests, summaries, checks[new], peer=tier.sessions[session].node)
            records, _ = tier.table.reserve([hashes[i] for i in new.tolist()], 0)
            payload_rows, indexes = tier.geometry.rows(self.arena)
            payload_rows[records, : layout.payload_bytes] = payloads
            indexes[records, : layout.index_bytes] = index_rows(digests, summaries, tier.table.generation[records], layout)
            tier.table.seal(records, roots(digests), [hashes[i] for i in new.tolist()], depths=request.depth + new)
            tier.table.unhold(records)
        tier.totals["pages_donated"] += len(new)
        tier.totals["bytes_donated"] += len(new) * layout.payload_bytes
        return m.Ok(seq=request.seq)


def refuse(session: object, request: m.Donate) -> m.Reply:
    """In place of ``Donations.take``."""
    raise ProtocolError("this tier takes no generated blocks: it was started without --accept-generated")
