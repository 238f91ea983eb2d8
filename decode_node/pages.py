"""From records to SGLang's KV pool: scatter payloads over pages."""

from __future__ import annotations

import numpy as np
import torch

from transport.layout import KVLayout


class PageSink:
    """Writes whole pages of an MHA KV pool (lists of per-layer tensors [slots, kv_heads, head_dim])."""

    def __init__(self, k_buffer: list[torch.Tensor], v_buffer: list[torch.Tensor], layout: KVLayout):
        t, h, d = layout.block_tokens, layout.kv_heads, layout.head_dim
        self.layout = layout
        paged = [b[: b.shape[0] // t * t].view(-1, t, h, d) for b in (*k_buffer, *v_buffer)]
        self.keys, self.values = paged[: layout.num_layers], paged[layout.num_layers :]

    def scatter(self, payloads: np.ndarray, pages: np.ndarray) -> None:
        """``payloads`` uint8 [n, payload_bytes] -> pages int64 [n] of every layer, complete on return."""
        lay = self.layout
        pool = self.keys[0]
        block = torch.from_numpy(payloads).view(pool.dtype).view(len(pages), lay.num_layers, lay.kv_heads, 2, lay.block_tokens, lay.head_dim)
        block = block.to(pool.device)
        target = torch.from_numpy(pages).to(pool.device)
        for layer, (k, v) in enumerate(zip(self.keys, self.values)):
            k[target] = block[:, layer, :, 0].transpose(1, 2)
            v[target] = block[:, layer, :, 1].transpose(1, 2)
        if pool.is_cuda:
            torch.cuda.current_stream(pool.device).synchronize()
