"""Blocks that a decode node has computed, taken into the arena: the next turn's prompt begins with them.

They are a cache like any record that nobody leases. The bytes come in the message and are written by the tier itself, since a
decode node has nothing that could be read from; answers are short beside prompts. Whoever may donate decides what others
find under a hash: only where ``--accept-generated`` says so.
"""

from __future__ import annotations

import numpy as np

from transport import messages as m
from transport.errors import ProtocolError
from transport.integrity import index_rows, piece_digests, roots
from transport.records import split_hashes
from transport.tier import Tier


class Donations:
    """``arena`` uint8 [size] of ``tier``. Called by the tier's loop, which it holds up for as long as the copies take."""

    def __init__(self, tier: Tier, arena: np.ndarray):
        self.tier, self.arena = tier, arena

    def take(self, session: object, request: m.Donate) -> m.Reply:
        """Raises ``ProtocolError`` for what is not whole blocks, ``CapacityError`` when all records are in use."""
        tier, layout = self.tier, self.tier.layout
        hashes = split_hashes(request.hashes)
        n = len(hashes)
        sizes = (len(request.payloads), len(request.summaries))
        if not n or len(set(hashes)) < n or request.depth < 0 or sizes != (n * layout.payload_bytes, n * layout.summary_total):
            raise ProtocolError("donated bytes that are not distinct whole blocks", limit=f"{layout.payload_bytes} and {layout.summary_total} bytes each")
        new = np.flatnonzero(tier.table.find(hashes) < 0)
        if len(new):
            records, _ = tier.table.reserve([hashes[i] for i in new.tolist()], 0)
            payloads, summaries = (np.frombuffer(raw, np.uint8).reshape(n, -1)[new] for raw in (request.payloads, request.summaries))
            digests = piece_digests(payloads, layout.pieces)
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
