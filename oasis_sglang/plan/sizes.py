"""Sizes in bytes of what is kept and sent for a request, as the code that keeps and sends it has them.

Where that code loads torch its arithmetic is repeated here, in small, and a test compares the two.
"""

from __future__ import annotations

from decode_node.block_store import BlockStore
from decode_node.host_cache import HostCache
from oasis_sglang.plan.shapes import Shape
from transport import messages as m
from transport.errors import ConfigError
from transport.layout import ArenaGeometry, KVLayout
from transport.records import HASH_BYTES

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float8": 1, "float32": 4}
SUMMARY_BYTES = {"mean_var_int8": lambda head_dim: head_dim + 4, "minmax_int8": lambda head_dim: 2 * head_dim + 4, "minmax_int4": lambda head_dim: head_dim + 8}
"""``oasis_sglang.selection.summaries``: per piece."""
RANKED_BLOCKS = 1024
"""``prefill_node.publisher``: blocks of each (layer, KV head) that a manifest ranks."""
HANDOVER_BYTES = 1_580
"""Of the row with the first token and its log probabilities in a manifest, as SGLang 0.5.23 lays it out."""


def layout_of(layers: int, kv_heads: int, head_dim: int, itemsize: int, *, page: int = 16, tp: int = 1, summary: str = "mean_var_int8") -> KVLayout:
    """Of one rank. With more ranks than KV heads, each has a copy of one. Raises ``ConfigError``."""
    if summary not in SUMMARY_BYTES:
        raise ConfigError(f"no summary {summary!r}; known: {', '.join(SUMMARY_BYTES)}")
    if tp < 1 or max(kv_heads, tp) % min(kv_heads, tp):
        raise ConfigError(f"{kv_heads} KV heads cannot be divided over {tp} ranks")
    return KVLayout(num_layers=layers, kv_heads=max(1, kv_heads // tp), head_dim=head_dim, block_tokens=page, dtype=f"{itemsize} bytes", itemsize=itemsize,
                    tp_size=tp, summary=summary, summary_bytes=SUMMARY_BYTES[summary](head_dim), metadata_lens=(HANDOVER_BYTES,))


def layout_of_shape(shape: Shape, dtype: str, **more) -> KVLayout:
    """``more``: as in ``layout_of``. Raises ``ConfigError``."""
    if dtype not in ITEMSIZE:
        raise ConfigError(f"no KV dtype {dtype!r}; known: {', '.join(ITEMSIZE)}")
    return layout_of(shape.layers, shape.kv_heads, shape.head_dim, ITEMSIZE[dtype], **more)


def pages(tokens: int, page: int) -> int:
    return -(-tokens // page)


def manifest(layout: KVLayout, prompt: int) -> int:
    """What one rank's manifest of ``prompt`` tokens takes on the wire: it is made, of zeros."""
    whole, records = prompt // layout.block_tokens, pages(prompt, layout.block_tokens)
    ranking = bytes(4 * layout.pieces * min(RANKED_BLOCKS, whole))
    return len(m.encode(m.Manifest(
        epoch="0" * 32, room=1 << 62, rank=0, lease=1 << 32, lease_seconds=30.0, layout=layout, fingerprint="0" * 64, prompt_tokens=prompt, seed=bytes(32),
        hashes=bytes(HASH_BYTES * whole), records=bytes(4 * records), generations=bytes(8 * records), roots=bytes(8 * records), ranking=ranking,
        metadata=(bytes(HANDOVER_BYTES),))))


def tier(layout: KVLayout, prompt: int) -> int:
    """Of one rank's records of a prompt in the arena."""
    geometry = ArenaGeometry.fit(layout, 1 << 50)
    return pages(prompt, layout.block_tokens) * (geometry.payload_stride + geometry.index_stride)


def host_tables(layout: KVLayout, blocks: int) -> int:
    """Of one rank's decode host for ``blocks`` that it knows, beside their pieces: checksums, and where the pieces are."""
    return HostCache.table_bytes(layout.pieces, blocks) + BlockStore.bytes(layout.pieces, blocks)


def device_tables(layout: KVLayout, blocks: int, working: int, rows: int = 1) -> int:
    """Of one working set of ``working`` slots over ``blocks`` in one rank's device memory: summaries, attention mass, residency, and
    the scores of a step with ``rows`` queries (``decode_node.working_set``, ``decode_node.lookahead``)."""
    return layout.pieces * (blocks * (layout.summary_bytes + 8 + 4 * rows) + 4 * working) + 8 * blocks


def score_reads(layout: KVLayout, blocks: int, selecting: int) -> int:
    """Bytes that one step of one rank reads to score and plan ``selecting`` (layer, KV head)s over ``blocks``: summaries, and each
    table of a block once (mass, slot, flags, the new score)."""
    return selecting * blocks * (layout.summary_bytes + 12)
