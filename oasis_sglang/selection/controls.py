"""Scorers that no one should serve with: they bracket what a summary can be worth when quality is measured.

``control_keys`` carries the keys themselves, so its estimate is exact; ``control_random`` knows nothing.
"""

from __future__ import annotations

import math

import torch

BLOCK_TOKENS = 16
"""The controls are for blocks of this size only."""


class ExactKeys:
    """All keys of the block as float32: the best that any summary could do."""

    name = "control_keys"

    def bytes(self, head_dim: int) -> int:
        return BLOCK_TOKENS * head_dim * 4

    def build(self, keys: torch.Tensor) -> torch.Tensor:
        """Raises ``ValueError`` for blocks of another size."""
        if keys.shape[-2] != BLOCK_TOKENS:
            raise ValueError(f"{self.name} is for blocks of {BLOCK_TOKENS} tokens, not {keys.shape[-2]}")
        return keys.float().contiguous().flatten(-2).view(torch.uint8)

    def estimate(self, queries: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        keys = raw.contiguous().view(torch.float32).view(*raw.shape[:-2], raw.shape[-2] * BLOCK_TOKENS, queries.shape[-1])
        logits = (queries @ keys.transpose(-1, -2)).unflatten(-1, (raw.shape[-2], BLOCK_TOKENS))
        return logits.logsumexp(-1) - math.log(BLOCK_TOKENS)


class Random:
    """A byte per block, and a new opinion on every call."""

    name = "control_random"

    def bytes(self, head_dim: int) -> int:
        return 1

    def build(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.zeros((*keys.shape[:-2], 1), dtype=torch.uint8, device=keys.device)

    def estimate(self, queries: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        return torch.randn(*queries.shape[:-1], raw.shape[-2], device=raw.device)


CONTROLS = {control.name: control for control in (ExactKeys(), Random())}
