"""From SGLang's KV pool to records: gather pages, checksum their pieces, copy payload and index into the arena."""

from __future__ import annotations

import numpy as np
import torch

from transport.arena import Arena
from transport.integrity import index_rows, piece_digests, roots
from transport.layout import ArenaGeometry, KVLayout


class PageSource:
    """Reads whole pages of an MHA KV pool (lists of per-layer tensors [slots, kv_heads, head_dim])."""

    def __init__(self, k_buffer: list[torch.Tensor], v_buffer: list[torch.Tensor], layout: KVLayout):
        t, h, d = layout.block_tokens, layout.kv_heads, layout.head_dim
        self.layout = layout
        paged = [b[: b.shape[0] // t * t].view(-1, t, h, d) for b in (*k_buffer, *v_buffer)]
        self.keys, self.values = paged[: layout.num_layers], paged[layout.num_layers :]

    def gather(self, pages: torch.Tensor, tokens: int) -> torch.Tensor:
        """``pages`` int64 [n] -> [n, layers, kv_heads, 2, page_tokens, head_dim] on the pool's device.

        ``tokens``: valid tokens of the whole run; slots past them hold other requests' leftovers and are zeroed.
        """
        lay = self.layout
        first = self.keys[0]
        out = torch.empty((len(pages), lay.num_layers, lay.kv_heads, 2, lay.block_tokens, lay.head_dim), dtype=first.dtype, device=first.device)
        for layer, (k, v) in enumerate(zip(self.keys, self.values)):
            out[:, layer, :, 0] = k[pages].transpose(1, 2)
            out[:, layer, :, 1] = v[pages].transpose(1, 2)
        rest = len(pages) * lay.block_tokens - tokens
        if rest:
            out[-1, ..., lay.block_tokens - rest :, :] = 0
        return out


class ArenaWriter:
    """Writes payloads and indexes into a mapped arena."""

    def __init__(self, arena: Arena, geometry: ArenaGeometry, layout: KVLayout):
        self.layout = layout
        self.payloads, self.indexes = geometry.rows(arena.bytes)

    def write(self, records: np.ndarray, generations: np.ndarray, block: torch.Tensor, summaries: torch.Tensor | None) -> np.ndarray:
        """Copies gathered pages and their indexes into ``records`` int64 [n] with ``generations`` uint64 [n]; returns their
        roots uint64 [n], taken from the source.

        ``block``: contiguous CPU tensor as ``PageSource.gather`` returns it; ``summaries``: uint8 CPU
        [n, layers, kv_heads, summary_bytes], None if the layout has none.
        """
        n = len(records)
        payload = block.reshape(n, -1).view(torch.uint8).numpy()
        digests = piece_digests(payload, self.layout.pieces)
        index = index_rows(digests, None if summaries is None else summaries.reshape(n, -1).numpy(), generations, self.layout)
        # The allocator hands out runs: a few large copies instead of one per record.
        for run in np.split(np.arange(n), np.flatnonzero(np.diff(records) != 1) + 1):
            span = slice(int(records[run[0]]), int(records[run[-1]]) + 1)
            part = slice(int(run[0]), int(run[-1]) + 1)
            self.payloads[span, : payload.shape[1]] = payload[part]
            self.indexes[span, : index.shape[1]] = index[part]
        return roots(digests)
