"""Summaries: the few bytes per block that let a decode node guess how much attention a block will get.

Three kinds, each a row of bytes per piece (one block of one layer and KV head), with the bytes at head_dim 64 and their
share of the piece's bf16 keys and values:

    mean_var_int8   68 B  1.7 %   mean key and one scalar variance: the second-order expansion of log E[exp(q.k)], with the
                                  channels' variances averaged (per channel they do harm: RoPE phases are not Gaussian)
    minmax_int8    132 B  3.2 %   largest and smallest key of each channel: q.k of any key is at most the sum over channels
    minmax_int4     72 B  1.8 %     of max(q * largest, q * smallest) (Quest, arXiv 2406.10774)
"""

from __future__ import annotations

from typing import Protocol

import torch

HALF_MAX = 65504.0
HALF_TINY = 2.0**-24


class Summary(Protocol):
    """One kind of summary: pure functions of tensors on any device.

    ``bytes(head_dim)``: bytes per piece.
    ``build(keys)``: finite float [..., tokens, head_dim] -> uint8 [..., bytes].
    ``estimate(queries, raw)``: float32 [..., M, head_dim], already multiplied by the softmax scale, and uint8 [..., N, bytes]
    -> new float32 [..., M, N]: log of the mean of exp(q.k) over the block's keys, up to what is common to a query's blocks.
    """

    name: str

    def bytes(self, head_dim: int) -> int: ...

    def build(self, keys: torch.Tensor) -> torch.Tensor: ...

    def estimate(self, queries: torch.Tensor, raw: torch.Tensor) -> torch.Tensor: ...


class MeanVariance:
    """Mean key (int8, one scale per piece) and the mean over channels of the keys' variance.

    Wire format: int8 mean [head_dim] | float16 scale | float16 variance.
    """

    name = "mean_var_int8"

    def bytes(self, head_dim: int) -> int:
        return head_dim + 4

    def build(self, keys: torch.Tensor) -> torch.Tensor:
        # Past what the format holds nothing is lost, and sums and squares stay finite.
        keys = keys.float().clamp(-127 * HALF_MAX, 127 * HALF_MAX)
        mean = keys.mean(-2)
        # torch.var takes four times as long along this dimension.
        variance = (keys - mean[..., None, :]).square_().mean((-2, -1))[..., None].clamp(max=HALF_MAX)
        scale = (mean.abs().amax(-1, keepdim=True) / 127).clamp(HALF_TINY, HALF_MAX).half()
        codes = (mean / scale.float()).round().clamp(-127, 127).to(torch.int8)
        return torch.cat([codes.view(torch.uint8), _raw(scale), _raw(variance)], -1)

    def estimate(self, queries: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        scale, variance = _halves(raw[..., -4:])
        scores = queries @ raw[..., :-4].view(torch.int8).float().mT
        spread = 0.5 * queries.square().sum(-1, keepdim=True)
        return scores.mul_(scale).addcmul_(spread, variance)


class MinMax8:
    """Bounds of each channel, int8, one scale per side. Rounded up, so that no key scores above the estimate.

    Wire format: int8 largest [head_dim] | int8 negated smallest [head_dim] | float16 scale of the first | of the second.
    """

    name = "minmax_int8"

    def bytes(self, head_dim: int) -> int:
        return 2 * head_dim + 4

    def build(self, keys: torch.Tensor) -> torch.Tensor:
        bounds = _bounds(keys)
        scale = _half_above(bounds.abs().amax(-1) / 127)
        codes = (bounds / scale.float()[..., None]).ceil().clamp(-127, 127).to(torch.int8)
        return torch.cat([codes.view(torch.uint8).flatten(-2), _raw(scale)], -1)

    def estimate(self, queries: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        positive, negative = _sides(queries)
        largest, smallest = raw[..., :-4].view(torch.int8).float().chunk(2, -1)
        scale, scale_smallest = _halves(raw[..., -4:])
        return (positive @ largest.mT).mul_(scale).addcmul_(negative @ smallest.mT, scale_smallest)


class MinMax4:
    """Bounds of each channel, 4 bits: base + step * code, one base and step per side. Bounds to within half a step.

    Wire format: one byte per channel, the largest in its low and the negated smallest in its high bits [head_dim]
    | float16 steps of both | float16 bases of both.
    """

    name = "minmax_int4"

    def bytes(self, head_dim: int) -> int:
        return head_dim + 8

    def build(self, keys: torch.Tensor) -> torch.Tensor:
        bounds = _bounds(keys)
        base = bounds.amin(-1).clamp(-HALF_MAX, HALF_MAX).half()
        above = bounds - base.float()[..., None]
        step = (above.amax(-1) / 15).clamp(HALF_TINY, HALF_MAX).half()
        # To the nearest: up, as in 8 bits, would add half a step per channel, and steps differ from block to block.
        largest, smallest = (above / step.float()[..., None]).round().clamp(0, 15).to(torch.uint8).unbind(-2)
        return torch.cat([largest | (smallest << 4), _raw(step), _raw(base)], -1)

    def estimate(self, queries: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        positive, negative = _sides(queries)
        codes = raw[..., :-8]
        step, step_smallest, base, base_smallest = _halves(raw[..., -8:])
        scores = (positive @ (codes & 15).float().mT).mul_(step).addcmul_(negative @ (codes >> 4).float().mT, step_smallest)
        return scores.addcmul_(positive.sum(-1, keepdim=True), base).addcmul_(negative.sum(-1, keepdim=True), base_smallest)


def _bounds(keys: torch.Tensor) -> torch.Tensor:
    """[..., tokens, head_dim] -> float32 [..., 2, head_dim]: the keys' maximum and the negated keys'; both are upper bounds."""
    return torch.stack([keys.amax(-2), -keys.amin(-2)], -2).float()


def _sides(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What to multiply with the two bounds: max(q * largest, q * smallest) = relu(q) * largest + relu(-q) * -smallest."""
    return queries.clamp(min=0), (-queries).clamp(min=0)


def _raw(values: torch.Tensor) -> torch.Tensor:
    """float [..., c] -> the bytes as float16, uint8 [..., 2 c]."""
    return values.half().view(torch.uint8)


def _halves(raw: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Float16 columns, uint8 [..., N, 2 c] -> c tensors float32 [..., 1, N], which multiply scores [..., M, N]."""
    return raw.contiguous().view(torch.float16).float().mT.split(1, -2)


def _half_above(values: torch.Tensor) -> torch.Tensor:
    """A float16 at or a little above each of ``values`` (0 or more), never 0 and never infinite."""
    return (values * (1 + 2**-10) + HALF_TINY).clamp(max=HALF_MAX).half()


SUMMARIES: dict[str, Summary] = {s.name: s for s in (MeanVariance(), MinMax8(), MinMax4())}
