"""Scores: how much attention each block of a request is expected to get, from queries and summaries."""

from __future__ import annotations

import torch

from oasis_sglang.selection.summaries import Summary

SCRATCH = 2**21
"""Summary bytes unpacked at a time: float copies that stay near the cache cost a quarter of one large allocation."""


def block_mass(summary: Summary, queries: torch.Tensor, raw: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Expected softmax mass of each block, summed over the query heads of a group.

    ``queries``: float [b, S, G, head_dim], already multiplied by the softmax scale (S: layers x KV heads, G: query heads per
    KV head); ``raw``: uint8 [b, S, N, bytes], whose rows past ``blocks`` (int64 [b], 0 to N) may hold anything.
    Returns float32 [b, S, N]: the softmax goes over the first ``blocks[i]`` blocks only, so a row sums to G, and is exactly 0
    beyond. The sum over heads and the normalisation over all blocks follow the selection study (section 3).
    """
    mass = torch.zeros(raw.shape[:3], dtype=torch.float32, device=raw.device)
    for i, count in enumerate(blocks.tolist()):
        rows = max(1, SCRATCH // max(1, count * raw.shape[3]))
        parts = queries[i].float().split(rows), raw[i, :, :count].split(rows), mass[i, :, :count].split(rows)
        for query, part, out in zip(*parts):
            torch.sum(summary.estimate(query, part).softmax(-1), 1, out=out)
    return mass
