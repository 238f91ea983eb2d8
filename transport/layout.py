"""Where every byte of a record lives.

A *record* is one block (one KV-cache page of one request) with all layers and KV heads of one rank:

    payload  [layer][kv_head][K|V][token][dim]                  what attention needs
    index    digest [layer][kv_head], uint64                    what checking a piece needs
             summary [layer][kv_head][summary_bytes], uint64    what scoring needs, and its checksum

K and V of a (layer, KV head) are adjacent, so a *piece* is one range of ``piece_bytes``. The arena keeps all payloads
first and all indexes behind them, so that neighbouring records are neighbouring ranges in both sections:

    [payload 0][payload 1]...[payload n-1] | [index 0]...[index n-1]
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from transport.errors import BoundsError, LayoutMismatch

ALIGN = 64
"""Records start on a cache line, which also suits RDMA."""

_LIMIT = 1 << 62


def _round_up(n: int) -> int:
    return (n + ALIGN - 1) // ALIGN * ALIGN


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one rank stores KV. Two nodes exchange records only if every field is equal.

    ``dtype`` is the KV cache dtype by name and ``itemsize`` its bytes; ``summary`` names the summary kind and
    ``summary_bytes`` its bytes per piece (0: none); ``metadata_lens`` are the bytes of each field of the hand-over row
    (first token, logprobs, speculative seed).
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    itemsize: int
    tp_size: int
    summary: str
    summary_bytes: int
    metadata_lens: tuple[int, ...]

    def __post_init__(self):
        for field in ("num_layers", "kv_heads", "head_dim", "block_tokens", "itemsize", "tp_size"):
            value = getattr(self, field)
            if not 0 < value < 1 << 20:
                raise BoundsError(f"layout field {field} is {value}", limit="1..2**20-1")
        if not 0 <= self.summary_bytes < 1 << 20:
            raise BoundsError(f"layout field summary_bytes is {self.summary_bytes}", limit="0..2**20-1")
        if self.payload_bytes >= _LIMIT:
            raise BoundsError("a record's payload does not fit the address space", limit=f"{_LIMIT}")

    @property
    def piece_bytes(self) -> int:
        return 2 * self.block_tokens * self.head_dim * self.itemsize

    @property
    def pieces(self) -> int:
        """Pieces in a record."""
        return self.num_layers * self.kv_heads

    @property
    def payload_bytes(self) -> int:
        return self.pieces * self.piece_bytes

    @property
    def summary_total(self) -> int:
        return self.pieces * self.summary_bytes

    @property
    def index_bytes(self) -> int:
        """Of a record: a digest and a summary per piece, and the summaries' checksum."""
        return self.pieces * 8 + self.summary_total + 8

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token on this rank: the unit of full-transfer bytes."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.itemsize

    def digest(self) -> bytes:
        """32 bytes that differ when any field differs."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()

    def require_equal(self, theirs: KVLayout, *, peer: str, room: int | None = None) -> None:
        """Raises ``LayoutMismatch`` naming the first field that differs."""
        for field in self.__struct_fields__:
            a, b = getattr(self, field), getattr(theirs, field)
            if a != b:
                raise LayoutMismatch(f"KV layout differs in {field}: {a!r} here, {b!r} at the peer", field=field, peer=peer, room=room)


class ArenaGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an arena of ``size`` bytes is cut into records of one layout. Offsets are relative to the arena."""

    size: int
    num_records: int
    payload_stride: int
    index_stride: int
    index_base: int

    @classmethod
    def fit(cls, layout: KVLayout, size: int) -> ArenaGeometry:
        """As many records as fit. Raises ``BoundsError`` if not even one does."""
        if not 0 < size < _LIMIT:
            raise BoundsError("impossible arena size", limit=f"1..{_LIMIT}")
        payload, index = _round_up(layout.payload_bytes), _round_up(layout.index_bytes)
        n = size // (payload + index)
        if n < 1:
            raise BoundsError("the arena is smaller than one record", limit=f"{size} bytes, one record needs {payload + index}")
        return cls(size, n, payload, index, n * payload)

    def payload_offsets(self, records: np.ndarray) -> np.ndarray:
        """uint64 [n] arena offsets of the payloads of ``records``. Raises ``BoundsError``."""
        return self._checked(records).astype(np.uint64) * np.uint64(self.payload_stride)

    def index_offsets(self, records: np.ndarray) -> np.ndarray:
        """uint64 [n] arena offsets of the indexes of ``records``. Raises ``BoundsError``."""
        return self._checked(records).astype(np.uint64) * np.uint64(self.index_stride) + np.uint64(self.index_base)

    def piece_offsets(self, records: np.ndarray, pieces: np.ndarray, layout: KVLayout) -> np.ndarray:
        """uint64 [n] arena offsets of piece ``pieces[i]`` (layer * kv_heads + kv_head) of ``records[i]``. Raises ``BoundsError``."""
        pieces = np.asarray(pieces)
        if pieces.size and (int(pieces.min()) < 0 or int(pieces.max()) >= layout.pieces):
            raise BoundsError("piece outside its record", limit=f"{layout.pieces} pieces")
        return self.payload_offsets(records) + pieces.astype(np.uint64) * np.uint64(layout.piece_bytes)

    def rows(self, arena: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``arena`` uint8 [size] as uint8 [num_records, payload_stride] and [num_records, index_stride]: views of both sections."""
        payloads, indexes = self.num_records * self.payload_stride, self.num_records * self.index_stride
        return (arena[:payloads].reshape(self.num_records, self.payload_stride),
                arena[self.index_base : self.index_base + indexes].reshape(self.num_records, self.index_stride))

    def _checked(self, records: np.ndarray) -> np.ndarray:
        records = np.asarray(records)
        if records.size and (int(records.min()) < 0 or int(records.max()) >= self.num_records):
            raise BoundsError("record index outside the arena", limit=f"{self.num_records} records")
        return records

    def require_sound(self, layout: KVLayout, endpoint_size: int, *, peer: str) -> None:
        """Refuses a peer's geometry that does not hold what it claims. Raises ``BoundsError``."""
        sound = (
            0 < self.num_records < 1 << 40
            and self.payload_stride >= layout.payload_bytes
            and self.index_stride >= layout.index_bytes
            and self.index_base >= self.num_records * self.payload_stride
            and self.index_base + self.num_records * self.index_stride <= self.size
            and self.size <= endpoint_size < _LIMIT
        )
        if not sound:
            raise BoundsError("the peer's arena geometry is inconsistent", peer=peer, limit=f"{endpoint_size} bytes")
