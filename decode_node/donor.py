"""Giving the tier what this node has generated: prefill finds it there when the next turn begins with it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from decode_node.pull import Pull
from transport import messages as m
from transport.errors import OasisError, ProtocolError
from transport.integrity import block_checks, piece_digests

MESSAGE_BYTES = 8 << 20
OUTSTANDING_BYTES = 64 << 20
"""What has been sent and not been answered: beyond it answers are not published, since no request waits for that."""


class Donor:
    """Lives on the puller's thread. ``silence``: seconds that an answer may take. Tiers that take nothing are not asked again."""

    def __init__(self, totals: Counter[str], silence: float):
        self.totals, self.silence = totals, silence
        self._outstanding = 0
        self._unwilling: set[str] = set()

    def give(self, pull: Pull, depth: int, hashes: Sequence[bytes], payloads: np.ndarray, summaries: np.ndarray) -> None:
        """``payloads`` uint8 [n, payload_bytes] and ``summaries`` uint8 [n, summary_total] of the blocks with ``hashes``, which follow
        ``depth`` others of their chain, to the tier that served ``pull``: ``MESSAGE_BYTES`` at a time, of which the caller takes care."""
        link, n, size = pull.link, len(hashes), payloads.nbytes + summaries.nbytes
        if link.error is not None or link.epoch in self._unwilling or self._outstanding + size > OUTSTANDING_BYTES:
            self.totals["blocks_not_donated"] += n
            return
        self._outstanding += size
        checks = block_checks(piece_digests(payloads, link.layout.pieces), summaries)
        fields = dict(depth=depth, hashes=b"".join(hashes), payloads=payloads.tobytes(), summaries=summaries.tobytes(), checks=m.pack(checks, "u8"))
        link.request(m.Donate, fields, lambda reply, epoch=link.epoch: self._answered(reply, n, size, epoch), deadline=time.monotonic() + self.silence)

    def _answered(self, reply: m.Reply | OasisError, n: int, size: int, epoch: str) -> None:
        self._outstanding -= size
        if not isinstance(reply, OasisError):
            self.totals["blocks_donated"] += n
            self.totals["bytes_donated"] += size
            return
        self.totals["blocks_not_donated"] += n
        if isinstance(reply, ProtocolError):
            self._unwilling.add(epoch)
