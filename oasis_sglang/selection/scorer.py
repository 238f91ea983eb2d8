"""Scores: how much attention each block of a request is expected to get, from queries and summaries."""

from __future__ import annotations

import torch

from oasis_sglang.selection.summaries import Summary

SCRATCH = 2**21
"""Summary bytes unpacked at a time: float copies that stay near the cache cost a quarter of one large allocation."""


def block_mass(summary: Summary, queries: torch.Tensor, raw: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Expected softmax mass of each block for each row, summed over the query heads of a group.

    ``queries``: float [b, S, R, G, head_dim], already multiplied by the softmax scale (S: layers x KV heads, R: rows of a
    verify forward, G: query heads per KV head); ``raw``: uint8 [b, S, N, bytes], whose rows past ``blocks`` (int64 [b], 0 to
    N) may hold anything.
    Returns float32 [b, R, S, N]: each softmax goes over the first ``blocks[i]`` blocks only, so a row sums to G, and is
    exactly 0 beyond. A summary is unpacked once for all rows. ``blocks`` is read back to the host (b numbers). The sum over
    heads and the normalisation over all blocks follow the selection study (section 3).
    """
    b, heads, rows, group, _ = queries.shape
    queries = queries.float().flatten(2, 3)
    mass = torch.zeros((b, rows, *raw.shape[1:3]), dtype=torch.float32, device=raw.device)
    # Request by request: on CPU as fast as one padded batch where lengths agree, and a third faster where they do not.
    for i, count in enumerate(blocks.tolist()):
        chunk = max(1, SCRATCH // max(1, count * raw.shape[3]))
        parts = queries[i].split(chunk), raw[i, :, :count].split(chunk), mass[i, :, :, :count].transpose(0, 1).split(chunk)
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
