"""Scores: how much attention each block of a request is expected to get, from queries and summaries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oasis_sglang.selection.summaries import Summary

SCRATCH = 2**21
"""Summary bytes unpacked at a time: float copies that stay near the cache cost a quarter of one large allocation."""


def block_mass(summary: Summary, queries: torch.Tensor, raw: Sequence[torch.Tensor], n: int) -> torch.Tensor:
    """Expected softmax mass of each block for each row, summed over the query heads of a group.

    ``queries``: float [b, S, R, G, head_dim], already multiplied by the softmax scale (S: layers x KV heads, R: rows of a
    verify forward, G: query heads per KV head); ``raw``: uint8 [S, count_i, bytes] of each of the b requests, 0 to ``n`` blocks.
    Returns float32 [b, R, S, n]: each softmax goes over a request's own blocks, so a row sums to G, and is exactly 0 beyond.
    A summary is unpacked once for all rows. The sum over heads and the normalisation over all blocks follow the selection
    study (section 3).
    """
    b, heads, rows, group, _ = queries.shape
    queries = queries.float().flatten(2, 3)
    mass = torch.zeros((b, rows, heads, n), dtype=torch.float32, device=queries.device)
    # Request by request: on CPU as fast as one padded batch where lengths agree, and a third faster where they do not.
    for i, mine in enumerate(raw):
        count = mine.shape[1]
        chunk = max(1, SCRATCH // max(1, count * mine.shape[2]))
        parts = queries[i].split(chunk), mine.split(chunk), mass[i, :, :, :count].transpose(0, 1).split(chunk)
        for query, part, out in zip(*parts):
            torch.sum(summary.estimate(query, part).softmax(-1).unflatten(1, (rows, group)), 2, out=out)
    return mass


def union(mass: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What any of a request's rows expects: the largest mass of the rows that count.

    ``mass``: float32 [b, R, S, N], 0 or more; ``rows``: bool [b, R], at least one per request (a request without has no
    mass). Returns float32 [b, S, N]. The union of rows, not their mean, follows the selection study (section 5): a wrong
    draft must not hide what the actual row needs.
    """
    return mass.masked_fill(~rows[:, :, None, None], 0).amax(1)
