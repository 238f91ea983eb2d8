"""Plans: which blocks each (layer, KV head) of a request keeps resident. Pure functions over arrays, no clock, no transport.

A working set is the w distinct blocks resident for one (layer, KV head). Pinned blocks (the first and the most recent) never
leave it; the others follow the expected attention mass. The rules are those of the selection study, section 6c: new blocks
come by the mass now, old ones go by its moving average, so that one odd query does not empty the working set.

Sizes: b requests, S = layers x KV heads, N blocks of the longest request.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

_INT32 = torch.iinfo(torch.int32)


class Plan(NamedTuple):
    """What one step wants, and how the step that has just run fared.

    Swaps and fetches are flat int64 tensors, sorted by request, then head, then pinned first, then most mass first.
    Swaps: ``swap_block`` is wanted and not resident, the block in ``swap_slot`` goes for it. Every wanted block has its swap,
    whether the host cache holds it yet or not; each may be carried out or left alone independently of the others.
    Fetches: wanted blocks that are neither in the host cache nor on their way, as many as the budget allows.
    """

    swap_request: torch.Tensor
    swap_head: torch.Tensor
    swap_slot: torch.Tensor
    swap_block: torch.Tensor
    fetch_request: torch.Tensor
    fetch_head: torch.Tensor
    fetch_block: torch.Tensor
    misses: torch.Tensor
    """int64 [b, S]: blocks of the actual row's own top set that are not resident."""
    missed_mass: torch.Tensor
    """float32 [b, S]: share of the actual row's mass that lies on blocks that are not resident, 0 to 1."""
    top: torch.Tensor
    """bool [b, S, N]: the actual row's own top set: the pinned blocks and its best, as many as are wanted."""
    wanted: torch.Tensor
    """int64 [b]: wanted blocks of each (layer, KV head) that selects, without the pinned ones; ``misses / wanted`` is the miss rate."""


def initial_selection(ranking: np.ndarray, whole: int, w: int, sink_blocks: int, recent_blocks: int) -> np.ndarray:
    """The blocks that each (layer, KV head) starts with: pinned, then the ranking's best, then the most recent.

    ``ranking``: integer [S, k] of blocks below ``whole``, best first, k may be 0; ``whole``: the prompt's whole blocks.
    Returns int64 [S, min(w, whole)], ascending and distinct in each row: when all blocks are selected, keys lie in the order
    that they have without selection, and attention is the same to the last bit. Raises ``ValueError`` for blocks outside
    the prompt, and when the pinned blocks alone exceed ``w``.
    """
    heads, k = ranking.shape
    if ranking.size and not 0 <= ranking.min() <= ranking.max() < whole:
        raise ValueError(f"the ranking names blocks {ranking.min()} to {ranking.max()} of a prompt of {whole} whole blocks")
    if w < min(whole, sink_blocks + recent_blocks):
        raise ValueError(f"{sink_blocks} sink and {recent_blocks} recent blocks do not fit a working set of {w} blocks")
    block = np.arange(whole)
    if whole <= w:
        return np.tile(block, (heads, 1))
    place = np.tile(k + whole - block, (heads, 1))  # after all ranked blocks, the most recent first
    np.put_along_axis(place, ranking.astype(np.int64), np.arange(k)[None], 1)
    place[:, (block < sink_blocks) | (block >= whole - recent_blocks)] = -1
    return np.sort(np.argpartition(place, w - 1, 1)[:, :w], 1)


def pinned_mask(blocks: torch.Tensor, sink_blocks: int, recent_blocks: int, n: int) -> torch.Tensor:
    """bool [b, n]: the first ``sink_blocks`` and the last ``recent_blocks`` of each request's ``blocks`` (int64 [b])."""
    block, end = torch.arange(n, device=blocks.device), blocks[:, None]
    return (block < end) & ((block < sink_blocks) | (block >= end - recent_blocks))


def plan(mass: torch.Tensor, ema: torch.Tensor, slot_of: torch.Tensor, pinned: torch.Tensor, w: torch.Tensor, blocks: torch.Tensor,
         held: torch.Tensor, flying: torch.Tensor, cap: torch.Tensor, *, actual: torch.Tensor | None = None, dense: torch.Tensor | None = None,
         floor: int = 0, sticky: float = 0.0) -> Plan:
    """The swaps and fetches that bring each working set to its wanted blocks: the pinned ones and the best of the others.

    ``mass``: float32 [b, S, N], 0 or more, decides who is wanted (the union of the actual row and the lookahead rows); a
    resident block competes with ``mass * (1 + sticky)``. ``ema``: float32 [b, S, N], a moving average, decides who leaves.
    ``slot_of``: integer [b, S, N], the slot of a resident block, -1 for others; ``pinned``: bool [b, N]; ``w``: int64 [b],
    resident blocks of each (layer, KV head); ``blocks``: int64 [b], valid blocks, those beyond are ignored; ``held``,
    ``flying``: bool [b, S, N], the piece is in the host cache, or being fetched.

    ``actual``: float32 [b, S, N], the mass of the actual row alone, by default ``mass``: it measures ``misses``,
    ``missed_mass`` and ``top``, without ``sticky``, and changes nothing else. ``dense``: bool [S], heads that are served
    exactly elsewhere: they want, miss and fetch nothing.

    What goes is resident, not pinned and not wanted: the lowest average first, for the most mass first, but for held blocks
    before the others, so that what can be carried out now replaces the worst. Of equal blocks the earlier comes first.
    A request whose ``w`` reaches ``blocks`` has everything resident and plans nothing.

    ``cap``: int64 [b], fetches per (layer, KV head) that selects, on average, 0 for no limit; what is held or flies is free.
    A request may thus fetch ``cap`` times as many blocks as it has heads that select *in this call*: planned by groups of
    layers, the budget is shared inside each group. Each head first gets its own best ``floor``, so that none falls behind
    because others win; what is left goes to the pinned blocks and the most ``mass`` of all heads, of equal ones to the
    earlier head, then block. A ``floor`` of ``cap`` or more shares nothing: each head has ``cap`` for itself, unused or not.

    Reads back b + 1 numbers and the lengths of four lists: six waits for the device, whatever the sizes.
    """
    valid = torch.arange(mass.shape[2], device=mass.device) < blocks[:, None]
    pinned = pinned & valid
    fixed = pinned.sum(1)
    room = (torch.minimum(w, blocks) - fixed).clamp(min=0)
    selects = (w < blocks)[:, None].expand(mass.shape[:2])
    if dense is not None:
        selects = selects & ~dense
    count = torch.where(selects, (fixed + room)[:, None], 0)
    most = max((fixed + room).where(w < blocks, 0).tolist(), default=0)
    resident = slot_of >= 0
    edges = ~valid[:, None], pinned[:, None]

    best, wanted, chosen = _best(torch.where(resident, mass * (1 + sticky), mass) if sticky else mass, count, most, *edges)
    missing = wanted & ~resident.gather(2, best)
    cached = missing & held.gather(2, best)
    absent = missing & ~cached

    going = resident & valid[:, None] & ~chosen
    needed = missing.sum(2)
    worst = _largest(-ema, int(needed.amax()) if needed.numel() else 0, ~going)
    slots = slot_of.masked_fill(~going, -1).gather(2, worst)
    turn = torch.where(cached, cached.cumsum(2), cached.sum(2, keepdim=True) + absent.cumsum(2)) - 1
    request, head, rank = missing.nonzero(as_tuple=True)
    slot = slots[request, head, turn[request, head, rank]].long()
    # Only where pinned blocks alone exceed w does a miss find nothing to replace.
    able = (slot >= 0).nonzero()[:, 0]
    request, head, rank = request[able], head[able], rank[able]

    top = chosen if actual is None and not sticky else _best(mass if actual is None else actual, count, most, *edges)[2]
    misses = (top & ~resident).sum(2)
    share = _missed_mass(mass if actual is None else actual, resident, valid[:, None] & selects[..., None])
    fetched = _granted(absent & ~flying.gather(2, best), best, mass, pinned, cap, selects.sum(1), floor)
    return Plan(request, head, slot[able], best[request, head, rank], *fetched, misses, share, top, room)


def _best(values: torch.Tensor, count: torch.Tensor, most: int, invalid: torch.Tensor, pinned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pinned and then the largest ``count`` (int64 [b, S], at most ``most``) of ``values`` [b, S, N].

    Returns their places int64 [b, S, most], in order; which of those count, bool [b, S, most]; and the same as a mask [b, S, N].
    """
    best = _largest(values, most, invalid, pinned)
    wanted = torch.arange(most, device=values.device) < count[..., None]
    return best, wanted, torch.zeros_like(values, dtype=torch.bool).scatter_(2, best, wanted)


def _missed_mass(mass: torch.Tensor, resident: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """float32 [b, S]: share of the ``mass`` of the places that count which is not on ``resident`` ones, 0 where there is none."""
    mass = mass.where(counts, 0)
    total = mass.sum(2)
    return (mass.masked_fill_(resident, 0).sum(2) / total).where(total > 0, 0)


def _granted(absent: torch.Tensor, best: torch.Tensor, mass: torch.Tensor, pinned: torch.Tensor, cap: torch.Tensor, heads: torch.Tensor,
             floor: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Request, head and block of the ``absent`` (bool [b, S, k], of the blocks ``best``) that the budget of ``plan`` allows.

    ``heads``: int64 [b], how many of a request's heads select.
    """
    own = torch.where(cap > 0, cap.clamp(max=floor), absent.shape[2])
    budget = torch.where(own < cap, cap * heads, 0)
    request, head, rank = absent.nonzero(as_tuple=True)
    block = best[request, head, rank]
    first = absent.cumsum(2)[request, head, rank] <= own[request]
    # One stable sort: by request, then a head's own share before the rest, then pinned, then most mass; head and rank break ties.
    bits = _ordered(mass[request, head, block]).masked_fill_(pinned[request, block], _INT32.max)
    order = (((2 * request + ~first) << 32) - bits).sort(stable=True).indices
    each = absent.sum((1, 2))
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)) - (each.cumsum(0) - each)[request]
    kept = (first | (place < budget[request])).nonzero()[:, 0]
    return request[kept], head[kept], block[kept]


def fold_victims(ema: torch.Tensor, slot_of: torch.Tensor, pinned: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The slot of each working set that a newly generated block takes over: resident, not pinned, of the lowest average.

    ``ema`` float32 and ``slot_of`` integer [f, S, N], ``pinned`` bool [f, N], ``w`` int64 [f] as in ``plan``. Returns int64
    [f, S]; of equal blocks the earlier one goes. Raises ``ValueError`` for a (layer, KV head) that does not hold ``w`` blocks
    or has pinned ones only.
    """
    resident = slot_of >= 0
    if not torch.equal(resident.sum(2), w[:, None].expand(resident.shape[:2])):
        raise ValueError(f"working sets hold {resident.sum(2).unique().tolist()} blocks, not {w.tolist()}")
    going = resident & ~pinned[:, None]
    if not going.any(2).all():
        raise ValueError(f"no block may leave a working set of {w.tolist()} blocks: all are pinned")
    victim = ema.masked_fill(~going, torch.inf).argmin(2, keepdim=True)
    return slot_of.gather(2, victim)[..., 0].long()


def _largest(values: torch.Tensor, k: int, last: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
    """int64 [b, S, k]: places of the k largest float32 ``values`` [b, S, N], best first, the earlier of equal ones first.

    Places under the mask ``first`` come before, those under ``last`` after all others. The sort key is the value's order,
    followed by the place: no two keys are equal, so every device and thread count gives one answer.
    """
    bits = _ordered(values)
    if first is not None:
        bits.masked_fill_(first, _INT32.max)
    bits.masked_fill_(last, _INT32.min)
    n = values.shape[2]
    key = bits.long().bitwise_left_shift_(32).bitwise_or_(torch.arange(n - 1, -1, -1, device=values.device))
    return key.topk(k, 2).indices


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """The bits of float32 ``values`` as new int32 that count up with the value."""
    bits = values.view(torch.int32)
    return bits ^ ((bits >> 31) & _INT32.max)
