"""How much a request may pull in a step. Pure arithmetic."""

from __future__ import annotations

import numpy as np


def warm_cap(cap: int, working: np.ndarray, steps: np.ndarray, warmup: int) -> np.ndarray:
    """New pulls per (layer, KV head) on average, int64 [b], for requests that have taken ``steps`` int64 [b] so far.

    A request's first ``warmup`` steps may pull more, from its whole working set (``working`` int64 [b] blocks) down to ``cap``
    in equal steps: the first tokens of an answer know better than the prompt what the answer needs (selection study,
    section 6a). ``cap`` 0 means no limit, now and later.
    """
    if cap == 0 or warmup == 0:
        return np.full(len(steps), cap, np.int64)
    left = np.maximum(0, warmup - steps)
    return cap + np.maximum(0, working - cap) * left // warmup
