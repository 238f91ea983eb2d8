"""What a prefill rank says of itself over HTTP, at its bootstrap server: where its tier is and how its KV looks."""

from __future__ import annotations

import msgspec

from transport.errors import OasisError, ProtocolError
from transport.layout import KVLayout

MAX_ROW_BYTES = 64 << 10
"""Of JSON."""
MAX_RANK = 1 << 12
TOKEN_ENV, TOKEN_HEADER = "OASIS_REGISTRATION", "Oasis-Registration"
"""Where the processes of one worker inherit a secret of theirs, and where a rank shows it when it registers."""


class PeerRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``control``: ZeroMQ address of the rank's tier, ``epoch`` its incarnation."""

    dp_rank: int
    tp_rank: int
    control: str
    epoch: str
    layout: KVLayout
    fingerprint: str


_decoder = msgspec.json.Decoder(PeerRow)


def decode_peer_row(raw: bytes, *, peer: str) -> PeerRow:
    """Raises ``ProtocolError`` for anything that is not exactly one of ours."""
    if len(raw) > MAX_ROW_BYTES:
        raise ProtocolError("a description that is too long", peer=peer, limit=f"{MAX_ROW_BYTES} bytes")
    try:
        row = _decoder.decode(raw)
    except (msgspec.DecodeError, OasisError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a description that is not understood: {error}", peer=peer) from error
    if not (0 <= row.dp_rank < MAX_RANK and 0 <= row.tp_rank < MAX_RANK):
        raise ProtocolError("a rank that cannot be", peer=peer, limit=f"{MAX_RANK} ranks")
    return row
