"""How far a chain of drafts may be believed. Pure functions over arrays.

All rows of a verify forward attend to one working set, chosen before any of their queries was known. A later row may need blocks
that are not there; what it then says about the next token is worth less, and a draft accepted on its word stays in the answer.
So a row that misses much more than the newest real row did is not believed: the chain ends there, its query helps to choose
the next blocks, and its token is verified once more when they are there.
"""

from __future__ import annotations

import torch

WORST_SHARE = 20
"""The excess is averaged over the one (layer, KV head) of so many where it is largest: a row that looks somewhere else shows in few heads."""


def missed_share(mass: torch.Tensor, resident: torch.Tensor) -> torch.Tensor:
    """Share of each row's ``mass`` float32 [b, R, S, N] that is not on ``resident`` blocks, bool [b, S, N]. float32 [b, R, S], 0 to 1."""
    return mass.masked_fill(resident[:, None], 0).sum(3) / mass.sum(3).clamp(min=torch.finfo(torch.float32).tiny)


def trusted_rows(missed: torch.Tensor, heads: torch.Tensor, limit: float) -> torch.Tensor:
    """How many drafted rows may be believed, int64 [b], 0 to R - 1.

    ``missed``: float32 [b, R, S] of ``missed_share``, row 0 the newest real one; ``heads``: int64 [k], those that select. A row
    is believed when those before it are, and when it misses at most ``limit`` more than row 0, on average over the twentieth
    of the heads where the difference is largest. Without such heads every row is believed; with a ``limit`` of 0 none is.
    """
    b, rows, _ = missed.shape
    if not len(heads):
        return torch.full((b,), rows - 1, dtype=torch.int64, device=missed.device)
    excess = (missed[:, 1:] - missed[:, :1]).clamp(min=0)[..., heads]
    worst = excess.topk(-(-len(heads) // WORST_SHARE), 2).values.mean(2)
    return (worst < limit).long().cumprod(1).sum(1)
