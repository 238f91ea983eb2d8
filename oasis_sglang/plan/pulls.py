"""How much of a prompt a request pulls while it decodes: a small law with three fitted numbers.

What an answer attends to drifts: after t steps the blocks that a (layer, KV head) of W slots has wanted and not been given at admission are about
A W^C t^B, were the prompt without end (as new words in a growing text, Heaps' law). A prompt has M blocks that were not admitted; draws hit one
that is here already in proportion to how many are, so that x = M (1 - exp(-A W^C t^B / M)) are pulled, and never more than all. No step pulls more
than ``fetch_blocks_per_step``: x first grows by that, and by the law from where the law grows slower.
"""

from __future__ import annotations

import math

WANTED = 0.8
"""A."""
DRIFT = 0.55
"""B."""
WIDTH = 0.65
"""C. All: fitted to offline runs of SmolLM2-135M (docs/plan.md); nothing says that other models drift at the same pace."""
SWAPPED = 0.5
"""Times W^C: blocks that a step exchanges, most of them with the host cache. Served runs of the same model, hysteresis 0.25, budgets of 512 and 1,024."""


def pulled(steps: float, working: int, blocks: int, cap: float) -> float:
    """Blocks of each (layer, KV head) that selects, on average, pulled in ``steps`` after the admission of ``working`` of ``blocks``;
    ``cap``: at most so many a step, 0 for no limit."""
    rest = blocks - working
    if rest <= 0 or steps <= 0:
        return 0.0
    pace = WANTED * working**WIDTH
    if cap <= 0:
        return _law(pace * steps**DRIFT, rest)
    turn = _turn(pace, rest, cap)
    if steps * cap <= turn:
        return steps * cap
    # From the turn on along the law, as if it had begun so much earlier or later.
    wanted = -rest * math.log1p(-turn / rest)
    ahead = (wanted / pace) ** (1 / DRIFT) + steps - turn / cap
    return _law(pace * ahead**DRIFT, rest)


def swapped(working: int, blocks: int) -> float:
    """Blocks of each (layer, KV head) that selects which a step writes over others of its ``working``, out of ``blocks``."""
    return min(SWAPPED * working**WIDTH, max(0, blocks - working))


def _law(wanted: float, rest: int) -> float:
    return -rest * math.expm1(-wanted / rest)


def _turn(pace: float, rest: int, cap: float) -> float:
    """Blocks pulled when the law, which slows down, grows by no more than ``cap`` a step."""
    low, high = 0.0, 1.0  # share of the rest
    for _ in range(60):
        share = (low + high) / 2
        wanted = -rest * math.log1p(-share)
        if (1 - share) * DRIFT * pace ** (1 / DRIFT) * wanted ** (1 - 1 / DRIFT) > cap:
            low = share
        else:
            high = share
    return low * rest
