"""Votes: which blocks the end of a prompt attends to, exactly. The prefill node holds the keys, so it need not estimate.

A working set chosen by the last query alone misses what the question asks for; the last 64 together cover the question
(selection study, section 6; the observation window of SnapKV, arXiv 2404.14469).
"""

from __future__ import annotations

import numpy as np
import torch

SCRATCH = 2**22
"""Scores computed at a time: 16 MiB in float32, twice that with their softmax."""


def vote(queries: torch.Tensor, keys: list[torch.Tensor], pages: torch.Tensor, tokens: int, scale: float) -> torch.Tensor:
    """Softmax attention mass of each block, summed over queries and over the query heads of a KV head.

    ``queries``: float [n, L, Hq, D] of the last n prompt tokens, the prompt's last token in the last row; ``keys``: L float
    tensors [pool pages, block_tokens, Hkv, D] (a paged KV pool); ``pages``: int64 [m], the prompt's pages in order;
    ``tokens``: prompt length; ``scale``: of the softmax, usually D ** -0.5. Query i sees positions <= tokens - n + i; slots of
    the last page past ``tokens`` may hold anything.
    Returns float32 [L, Hkv, m]; each (layer, KV head) sums to n x Hq / Hkv. Computed in float32, one KV head at a time.
    Raises ``ValueError`` when the sizes do not belong together.
    """
    n, layers, heads, dim = queries.shape
    _, block_tokens, kv_heads, _ = keys[0].shape
    m, group = len(pages), heads // kv_heads
    if len(keys) != layers or heads % kv_heads or keys[0].shape[3] != dim:
        raise ValueError(f"queries of {layers} layers x {heads} heads x {dim} do not fit {len(keys)} layers of keys {tuple(keys[0].shape[2:])}")
    if not n <= tokens or m != -(-tokens // block_tokens):
        raise ValueError(f"{n} queries and {m} pages of {block_tokens} tokens do not fit a prompt of {tokens} tokens")
    mass = torch.zeros((layers, kv_heads, m), dtype=torch.float32, device=queries.device)
    first = tokens - n  # every query sees all positions up to this one
    position = torch.arange(first, m * block_tokens, device=queries.device)
    unseen = (position > position[:n, None]).repeat(group, 1)  # [group * n, m * block_tokens - first]
    rows = max(1, SCRATCH // max(1, m * block_tokens))
    for layer, pool in enumerate(keys):
        # [Hkv, group * n, D], the n queries of one head together
        asked = (queries[:, layer].float() * scale).view(n, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * n, dim)
        for head in range(kv_heads):
            key = pool[:, :, head][pages].float().view(m * block_tokens, dim)
            per_token = torch.zeros(m * block_tokens, device=queries.device)
            for query, hidden in zip(asked[head].split(rows), unseen.split(rows)):
                scores = query @ key.T
                scores[:, first:].masked_fill_(hidden, -torch.inf)
                per_token += scores.softmax(-1).sum(0)
            mass[layer, head] = per_token.view(m, block_tokens).sum(-1)
    return mass


def ranking(mass: torch.Tensor, whole: int, k: int) -> np.ndarray:
    """The first ``whole`` blocks of each (layer, KV head), most mass first, the earlier block where equal.

    ``mass``: float [L, Hkv, m], ``whole`` <= m: blocks all of whose tokens belong to the prompt. Returns int32
    [L * Hkv, min(k, whole)]. Raises ``ValueError`` when ``whole`` exceeds m.
    """
    if whole > mass.shape[2]:
        raise ValueError(f"{whole} whole blocks cannot be ranked by the mass of {mass.shape[2]}")
    order = mass.flatten(0, 1)[:, :whole].argsort(dim=-1, descending=True, stable=True)
    return order[:, :k].to(torch.int32).cpu().numpy()
