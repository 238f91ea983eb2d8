"""The dense lane: K and V of a few (layer, KV head) pairs for whole requests, beside the working sets.

About one pair in twenty carries nearly all of the quality that selection loses (selection study, critical heads). Those do not
fit the compact view, in which every pair of a request holds equally many blocks, so they have pages of their own and an
attention of their own (``oasis_sglang/lane_attention.py``); the other pairs never notice.

The lane belongs to working sets, not to logical ids: logical ids cover ``max_running_requests`` times the context, up to 64
times the KV pool, while this is as large as an option says. A request that holds all of its blocks anyway has no set and needs
no lane. A retracted request keeps its set, and so what it has here.
"""

from __future__ import annotations

import numpy as np
import torch


class DenseLane:
    """Owner of the lane's pages and of the table that says whose they are. Scheduler thread, except for ``write``,
    ``write_record`` and ``settle``, which pulls call while they hold their lock.

    ``kv`` [2, slots, n, head_dim]: K and V of token slots, for the n pieces in order, so that a layer's heads are one strided
    view and pieces of all layers are written at once. ``table`` int32 [sets + 1, width] of token slots on the device: the row
    of set s is s + 1, row 0 is for requests without a lane. Slots of page 0 are padding. What lies in a row past the pages that
    its set holds means nothing.
    """

    def __init__(self, pieces: np.ndarray, *, layers: int, kv_heads: int, head_dim: int, page: int, sets: int, context: int, tokens: int,
                 dtype: torch.dtype, device: torch.device | str):
        """``pieces`` int64 [n]: layer * kv_heads + head on this rank, ascending; ``context``: the longest request; ``tokens``:
        capacity, rounded down to pages. Raises ``ValueError`` for pieces that are not such."""
        self.pieces = np.asarray(pieces, np.int64)
        n, most = len(self.pieces), -(-context // page)
        if not n or self.pieces[0] < 0 or self.pieces[-1] >= layers * kv_heads or (np.diff(self.pieces) <= 0).any():
            raise ValueError(f"lane pieces are not ascending and distinct within {layers} layers x {kv_heads} KV heads: {self.pieces.tolist()}")
        self.page, self.head_dim = page, head_dim
        self.place = np.full(layers * kv_heads, -1)
        """int64 [layers * kv_heads]: a piece's place in ``kv``, -1 outside the lane."""
        self.place[self.pieces] = np.arange(n)
        ends = np.searchsorted(self.pieces, np.arange(layers + 1) * kv_heads)
        self._span = {layer: slice(ends[layer], ends[layer + 1]) for layer in range(layers) if ends[layer] < ends[layer + 1]}
        self._heads = {layer: torch.from_numpy(self.pieces[span] % kv_heads).to(device) for layer, span in self._span.items()}
        self.total_pages = tokens // page
        self.kv = torch.zeros((2, (1 + self.total_pages) * page, n, head_dim), dtype=dtype, device=device)
        self._paged = self.kv.view(2, -1, page, n, head_dim)
        self.pages = np.zeros((sets + 1, most), np.int32)
        self.held = np.zeros(sets, np.int64)
        """int64 [sets]: pages of each set."""
        self._uploaded = np.zeros(sets, np.int64)
        self._free = list(range(self.total_pages, 0, -1))
        self.peak_pages = 0
        self._offsets = np.arange(page, dtype=np.int32)
        self._table = torch.arange(page, dtype=torch.int32, device=device).repeat(sets + 1, most, 1)
        self.table = self._table.view(sets + 1, most * page)

    @staticmethod
    def bytes(pieces: int, *, head_dim: int, itemsize: int, page: int, sets: int, context: int, tokens: int) -> int:
        """What a lane of so many ``pieces`` takes on the device."""
        slots = (1 + tokens // page) * page
        return 2 * slots * pieces * head_dim * itemsize + (sets + 1) * -(-context // page) * page * 4

    # -- what is where ------------------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[int, ...]:
        """Those with a head in the lane, ascending."""
        return tuple(self._span)

    def heads(self, layer: int) -> torch.Tensor:
        """int64 [h] on the device: KV heads of ``layer`` in the lane."""
        return self._heads[layer]

    def keys(self, layer: int) -> torch.Tensor:
        """[slots, h, head_dim], a view."""
        return self.kv[0, :, self._span[layer]]

    def values(self, layer: int) -> torch.Tensor:
        """[slots, h, head_dim], a view."""
        return self.kv[1, :, self._span[layer]]

    @property
    def token_bytes(self) -> int:
        """K and V of one token in the lane."""
        return 2 * len(self.pieces) * self.head_dim * self.kv.element_size()

    @property
    def capacity(self) -> int:
        """Tokens of all sets together."""
        return self.total_pages * self.page

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_tokens(self) -> int:
        return (self.total_pages - len(self._free)) * self.page

    @property
    def peak_tokens(self) -> int:
        return self.peak_pages * self.page

    # -- pages --------------------------------------------------------------------------------------------------

    def take(self, chosen: int, tokens: int) -> bool:
        """Pages of set ``chosen``, which has none, for ``tokens``: all or, when there are not enough, none."""
        if self.held[chosen]:
            raise AssertionError(f"set {chosen} has lane pages already")
        return self.grow(chosen, tokens)

    def grow(self, chosen: int, tokens: int) -> bool:
        """So many more pages that set ``chosen`` can hold ``tokens`` (at most a row's width), or none when they do not suffice."""
        held = int(self.held[chosen])
        wanted = min(-(-tokens // self.page), self.pages.shape[1])
        if wanted <= held:
            return True
        left = len(self._free) - (wanted - held)
        if left < 0:
            return False
        self.pages[chosen + 1, held:wanted] = self._free[left:]
        del self._free[left:]
        self.held[chosen] = wanted
        self.peak_pages = max(self.peak_pages, self.total_pages - left)
        return True

    def covered(self, sets: np.ndarray) -> np.ndarray:
        """int64 [b]: tokens that ``sets`` int64 [b] can hold without growing."""
        return self.held[sets] * self.page

    def give(self, chosen: int) -> None:
        """Idempotent."""
        held = self.held[chosen]
        self._free += self.pages[chosen + 1, :held].tolist()
        self.pages[chosen + 1] = 0
        self.held[chosen] = self._uploaded[chosen] = 0

    def slots(self, sets: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Token slots int64 of ``positions`` of ``sets`` (-1: none, a padding slot), int64 arrays that broadcast."""
        blocks, rest = np.divmod(positions, self.page)
        if ((blocks >= self.held[sets]) & (sets >= 0)).any():
            raise AssertionError("a request outgrew its lane pages")
        return np.where(sets >= 0, self.pages[sets + 1, np.where(sets >= 0, blocks, 0)], 0).astype(np.int64) * self.page + rest

    def upload(self) -> None:
        """Brings ``table`` up to date: pages that are new since the last call. On the forward's stream, before it reads."""
        sets = np.flatnonzero(self._uploaded < self.held)
        if not len(sets):
            return
        old, new = self._uploaded[sets], self.held[sets]
        counts = new - old
        rows = np.repeat(sets + 1, counts)
        at = np.arange(counts.sum()) + np.repeat(new - np.cumsum(counts), counts)
        slots = self.pages[rows, at][:, None] * self.page + self._offsets
        rows, at, slots = (torch.from_numpy(a).to(self.table.device) for a in (rows, at, slots))
        self._table[rows, at] = slots
        self._uploaded[sets] = new

    # -- K and V of prompts -------------------------------------------------------------------------------------

    def write(self, chosen: int, pieces: np.ndarray, blocks: np.ndarray, data: np.ndarray) -> None:
        """Landed ``data`` uint8 [m, piece_bytes] of ``pieces`` int64 [m] of ``blocks`` int64 [m]; what is not in the lane is left out."""
        mine = self.place[pieces] >= 0
        if not mine.any():
            return
        blocks = blocks[mine]
        if blocks.max() >= self.held[chosen]:
            raise AssertionError(f"block {blocks.max()} is outside the {self.held[chosen]} lane pages of set {chosen}")
        content = torch.from_numpy(data[mine]).view(self.kv.dtype).view(-1, 2, self.page, self.head_dim).to(self.kv.device)
        self._paged[:, self._index(self.pages[chosen + 1, blocks]), :, self._index(self.place[pieces[mine]])] = content

    def write_record(self, chosen: int, block: int, payload: np.ndarray) -> None:
        """The lane's part of a whole record, ``payload`` uint8 [payload_bytes] of ``block``."""
        data = payload.reshape(len(self.place), -1)[self.pieces]
        self.write(chosen, self.pieces, np.full(len(self.pieces), block), data)

    def settle(self) -> None:
        """Returns when what this thread wrote is there for every stream."""
        if self.kv.is_cuda:
            torch.cuda.current_stream(self.kv.device).synchronize()

    def _index(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.kv.device)
