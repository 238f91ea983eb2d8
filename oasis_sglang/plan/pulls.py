"""How much of a prompt a request pulls while it decodes: a small law with three fitted numbers and a table of what ``hysteresis`` leaves of it.

What an answer attends to drifts: after t steps the blocks that a (layer, KV head) of W slots has wanted and not been given at admission are about
A W^C t^B, were the prompt without end (as new words in a growing text, Heaps' law). A prompt has M blocks that were not admitted; draws hit one
that is here already in proportion to how many are, so that x = M (1 - exp(-A W^C t^B / M)) are pulled, and never more than all. No step pulls more
than ``fetch_blocks_per_step``: x first grows by that, and by the law from where the law grows slower. A was fitted at a ``hysteresis`` of 0.25: at
another it is that times ``kept(hysteresis)[0]``.
"""

from __future__ import annotations

import math

import numpy as np

WANTED = 0.8
"""A."""
DRIFT = 0.55
"""B."""
WIDTH = 0.65
"""C. All: fitted to offline runs of SmolLM2-135M (docs/plan.md); nothing says that other models drift at the same pace."""
SWAPPED = 0.5
"""Times W^C: blocks that a step exchanges, most of them with the host cache. Served runs of the same model, hysteresis 0.25, budgets of 512 and 1,024."""

# The same requests were served at each hysteresis (four texts of 5,800 to 6,000 tokens, W 32, cap 2, 63 steps; at 8 the two that pull most). Shares of a full
# transfer do not compare: they contain what was admitted, and pulls saturate. So of each text x is its on-demand bytes / (selecting heads x piece), and
# its A the one with which ``pulled`` gives that x, as y = -M log(1 - x / M) does where no cap binds. Texts differ by half in A, but hardly in A / A(0.25):
# by 0.05 at most. The geometric mean of that over texts is in the table. Swaps were counted per run, not per text: at 8 those of two texts are
# compared with those of four.
HYSTERESIS = {0.25: (1.0, 1.0), 1.0: (0.85, 0.62), 3.0: (0.65, 0.33), 8.0: (0.45, 0.19)}
"""What is left of ``WANTED`` and of ``SWAPPED``."""


def kept(hysteresis: float) -> tuple[float, float]:
    """Factors of ``WANTED`` and ``SWAPPED``: between two entries of ``HYSTERESIS`` linear in log(1 + hysteresis), beyond them as at the nearest."""
    at = np.log1p(list(HYSTERESIS))
    wanted, swaps = (float(np.interp(math.log1p(max(0.0, hysteresis)), at, factors)) for factors in zip(*HYSTERESIS.values()))
    return wanted, swaps


def pulled(steps: float, working: int, blocks: int, cap: float, hysteresis: float) -> float:
    """Blocks of each (layer, KV head) that selects, on average, pulled in ``steps`` after the admission of ``working`` of ``blocks``;
    ``cap``: at most so many a step, 0 for no limit."""
    rest = blocks - working
    if rest <= 0 or steps <= 0:
        return 0.0
    pace = WANTED * kept(hysteresis)[0] * working**WIDTH
    if cap <= 0:
        return _law(pace * steps**DRIFT, rest)
    turn = _turn(pace, rest, cap)
    if steps * cap <= turn:
        return steps * cap
    # From the turn on along the law, as if it had begun so much earlier or later.
    wanted = -rest * math.log1p(-turn / rest)
    ahead = (wanted / pace) ** (1 / DRIFT) + steps - turn / cap
    return _law(pace * ahead**DRIFT, rest)


def swapped(working: int, blocks: int, hysteresis: float) -> float:
    """Blocks of each (layer, KV head) that selects which a step writes over others of its ``working``, out of ``blocks``."""
    return min(SWAPPED * kept(hysteresis)[1] * working**WIDTH, max(0, blocks - working))


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
