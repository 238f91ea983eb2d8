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
    """What one step wants. Flat int64 tensors, sorted by request, then head, then pinned first, then most mass first.

    Swaps: ``swap_block`` is wanted and not resident, the block in ``swap_slot`` goes for it. Every wanted block has its swap,
    whether the host cache holds it yet or not; each may be carried out or left alone independently of the others.
    Fetches: wanted blocks that are neither in the host cache nor on their way.
    """

    swap_request: torch.Tensor
    swap_head: torch.Tensor
    swap_slot: torch.Tensor
    swap_block: torch.Tensor
    fetch_request: torch.Tensor
    fetch_head: torch.Tensor
    fetch_block: torch.Tensor
    misses: torch.Tensor
    """int64 [b, S]: wanted blocks that are not resident."""
    wanted: torch.Tensor
    """int64 [b]: wanted blocks of each (layer, KV head) without the pinned ones; ``misses / wanted`` is the miss rate."""


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
         held: torch.Tensor, flying: torch.Tensor, cap: int) -> Plan:
    """The swaps and fetches that bring each working set to its wanted blocks: the pinned ones and the best of the others.

    ``mass``, ``ema``: float32 [b, S, N], a block's expected mass now and its moving average; ``slot_of``: integer [b, S, N],
    the slot of a resident block, -1 for others; ``pinned``: bool [b, N]; ``w``: int64 [b], resident blocks of each (layer, KV
    head); ``blocks``: int64 [b], valid blocks, those beyond are ignored; ``held``, ``flying``: bool [b, S, N], the piece is in
    the host cache, or being fetched; ``cap``: fetches per (layer, KV head), 0 for no limit.

    What goes is resident, not pinned and not wanted: the lowest average first, for the most mass first, but for held blocks
    before the others, so that what can be carried out now replaces the worst. Of equal blocks the earlier comes first.
    A request whose ``w`` reaches ``blocks`` has everything resident and plans nothing.
    """
    valid = torch.arange(mass.shape[2], device=mass.device) < blocks[:, None]
    pinned = pinned & valid
    fixed = pinned.sum(1)
    room = (torch.minimum(w, blocks) - fixed).clamp(min=0)
    count = torch.where(w < blocks, fixed + room, 0)

    best = _largest(mass, max(count.tolist(), default=0), ~valid[:, None], pinned[:, None])
    wanted = torch.arange(best.shape[2], device=mass.device) < count[:, None, None]
    missing = wanted & (slot_of.gather(2, best) < 0)
    misses = missing.sum(2)
    cached = missing & held.gather(2, best)
    absent = missing & ~cached

    going = (slot_of >= 0) & valid[:, None]
    going.scatter_(2, best, going.gather(2, best) & ~wanted)
    worst = _largest(-ema, int(misses.amax()) if misses.numel() else 0, ~going)
    slots = slot_of.masked_fill(~going, -1).gather(2, worst)
    turn = torch.where(cached, cached.cumsum(2), cached.sum(2, keepdim=True) + absent.cumsum(2)) - 1
    request, head, rank = missing.nonzero(as_tuple=True)
    slot = slots[request, head, turn[request, head, rank]].long()
    # Only where pinned blocks alone exceed w does a miss find nothing to replace.
    request, head, rank, slot = (part[slot >= 0] for part in (request, head, rank, slot))

    fetch = absent & ~flying.gather(2, best)
    if cap:
        fetch &= fetch.cumsum(2) <= cap
    fetched = fetch.nonzero(as_tuple=True)
    return Plan(request, head, slot, best[request, head, rank], *fetched[:2], best[fetched], misses, room)


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

    Places under the mask ``first`` come before, those under ``last`` after all others. The sort key is the value's bits, made
    to count up with it, followed by the place: no two keys are equal, so every device and thread count gives one answer.
    """
    bits = values.view(torch.int32)
    bits = bits ^ ((bits >> 31) & _INT32.max)
    if first is not None:
        bits.masked_fill_(first, _INT32.max)
    bits.masked_fill_(last, _INT32.min)
    n = values.shape[2]
    key = (bits.long() << 32) | torch.arange(n - 1, -1, -1, device=values.device)
    return key.topk(k, 2).indices
