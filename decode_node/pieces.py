"""Pieces in and out of the KV pool. A piece is K and V of one block of one (layer, KV head), as records hold it."""

from __future__ import annotations

import numpy as np
import torch

from transport.layout import KVLayout


class PoolPieces:
    """``kv``: the pool as one tensor [layers, 2, slots, kv_heads, head_dim]; ``pieces`` are layer * kv_heads + kv_head."""

    def __init__(self, kv: torch.Tensor, layout: KVLayout):
        self.layout = layout
        layers, two, slots, heads, dim = kv.shape
        self.kv = kv.view(layers, two, slots // layout.block_tokens, layout.block_tokens, heads, dim)

    def write(self, pieces: np.ndarray, pages: np.ndarray, data: np.ndarray) -> None:
        """``data`` uint8 [n, piece_bytes] over ``pages`` int64 [n] of ``pieces`` int64 [n], in the current stream's order."""
        lay, device = self.layout, self.kv.device
        if len(pieces) == 0:
            return
        layer, head = np.divmod(pieces, lay.kv_heads)
        block = torch.from_numpy(data).view(self.kv.dtype).view(len(pieces), 2, lay.block_tokens, lay.head_dim).to(device)
        self.kv[self._index(layer), :, self._index(pages), :, self._index(head)] = block

    def settle(self) -> None:
        """Returns when what this thread wrote is there for every stream."""
        if self.kv.is_cuda:
            torch.cuda.current_stream(self.kv.device).synchronize()

    def read(self, pages: np.ndarray) -> torch.Tensor:
        """Whole ``pages`` int64 [n] as [n, layers, kv_heads, 2, page_tokens, head_dim], contiguous, on the pool's device."""
        return self.kv[:, :, self._index(pages)].permute(2, 0, 4, 1, 3, 5).contiguous()

    def snapshot(self, pages: np.ndarray) -> torch.Tensor:
        """A host copy of whole ``pages`` that ``restore`` takes, with what any stream is still writing to them."""
        if self.kv.is_cuda:
            torch.cuda.synchronize(self.kv.device)
        return self.kv[:, :, self._index(pages)].cpu()

    def restore(self, pages: np.ndarray, content: torch.Tensor) -> None:
        self.kv[:, :, self._index(pages)] = content.to(self.kv.device)

    def _index(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.kv.device)
