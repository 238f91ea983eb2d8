"""Summaries: the few bytes per block that let a decode node guess how much attention a block will get.

One kind so far, the default of the selection study: per (block, layer, KV head) the mean key in int8 with one scale,
and one scalar variance. 68 bytes for head_dim 64, 1.7 % of bf16 KV.

Wire format per piece: int8 mean [head_dim] | float16 scale | float16 variance.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Summary(Protocol):
    """``bytes(head_dim)``: bytes per piece; ``build(keys)``: float [..., tokens, head_dim] -> uint8 [..., bytes]."""

    name: str

    def bytes(self, head_dim: int) -> int: ...

    def build(self, keys: torch.Tensor) -> torch.Tensor: ...


class MeanVariance:
    """Mean key (int8, one scale per piece) and the mean over channels of the keys' variance (float16)."""

    name = "mean_var_int8"

    def bytes(self, head_dim: int) -> int:
        return head_dim + 4

    def build(self, keys: torch.Tensor) -> torch.Tensor:
        keys = keys.float()
        mean = keys.mean(-2)
        variance = keys.var(-2, unbiased=False).mean(-1, keepdim=True).clamp(max=65504)
        scale = (mean.abs().amax(-1, keepdim=True) / 127).clamp(2**-24, 65504).half()
        quantised = (mean / scale.float()).round().clamp(-127, 127).to(torch.int8)
        return torch.cat([quantised.view(torch.uint8), scale.view(torch.uint8), variance.half().view(torch.uint8)], -1)

    def read(self, raw: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [..., bytes] -> (mean float32 [..., head_dim], variance float32 [...])."""
        mean = raw[..., :head_dim].view(torch.int8).float()
        tail = raw[..., head_dim : head_dim + 4].contiguous().view(torch.float16).float()
        return mean * tail[..., :1], tail[..., 1]


SUMMARIES: dict[str, Summary] = {s.name: s for s in (MeanVariance(),)}
