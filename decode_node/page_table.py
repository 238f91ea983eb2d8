"""Which physical pages a request holds, in the order in which attention reads them.

A row's pages are [working set][tail][spare]. The working set's slots hold other blocks for every (layer, KV head)
(``working_set.py``); a tail page holds one block for all. Block b of the request is in the tail when b >= ``folded``.
Everything here happens on the scheduler's side of a step, and only ever appends: the forward that is still running reads
a copy of the row that ``upload`` made on its own stream.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class Fold(NamedTuple):
    """Block ``block`` of ``row`` leaves the tail, complete in physical ``page``. ``slot``: its slot in the working set, or
    -1 when that is full and the page is about to be written again."""

    row: int
    block: int
    page: int
    slot: int


class PageTable:
    """Owner of the compact rows. ``table`` int32 [rows, max_pages * page] of physical token slots, on the device."""

    def __init__(self, rows: int, max_pages: int, page: int, device: torch.device | str):
        self.page = page
        self.pages = np.zeros((rows, max_pages), np.int64)
        self.reserved = np.zeros(rows, np.int64)
        self.working = np.zeros(rows, np.int64)
        """Working-set pages in use."""
        self.most_working = np.zeros(rows, np.int64)
        self.most_tail = np.zeros(rows, np.int64)
        self.tail = np.zeros(rows, np.int64)
        """Tail pages in use."""
        self.folded = np.zeros(rows, np.int64)
        self.table = torch.zeros((rows, max_pages * page), dtype=torch.int32, device=device)
        self._offsets = np.arange(page)
        self._dirty: set[int] = set()

    def bind(self, row: int, pages: np.ndarray, *, tokens: int, working: int, most_working: int, most_tail: int) -> None:
        """Gives ``row`` its reserved physical ``pages`` int64 [n]. ``tokens``: length so far, its first
        ``tokens // page`` blocks are folded; ``working``: slots of the working set in use."""
        self.pages[row] = 0
        self.pages[row, : len(pages)] = pages
        self.reserved[row], self.working[row] = len(pages), working
        self.most_working[row], self.most_tail[row] = most_working, most_tail
        self.folded[row] = tokens // self.page
        self.tail[row] = int(tokens % self.page > 0)
        self._dirty.add(row)

    def clear(self, row: int) -> None:
        """Idempotent."""
        for column in self._columns:
            column[row] = 0
        self.pages[row] = 0
        self._dirty.add(row)

    def counts(self, row: int) -> tuple[int, ...]:
        """What ``restore`` needs beside the row's pages."""
        return tuple(int(column[row]) for column in self._columns)

    def restore(self, row: int, pages: np.ndarray, counts: tuple[int, ...]) -> None:
        """Binds ``row`` as another row was, over ``pages`` in that row's order."""
        self.pages[row] = 0
        self.pages[row, : len(pages)] = pages
        for column, value in zip(self._columns, counts):
            column[row] = value
        self._dirty.add(row)

    @property
    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.reserved, self.working, self.most_working, self.most_tail, self.tail, self.folded

    def append(self, rows: np.ndarray, first: np.ndarray, count: int = 1) -> tuple[np.ndarray, list[Fold]]:
        """Places of the ``count`` tokens at positions ``first`` int64 [b]... of each of ``rows`` int64 [b]; the tokens before
        them are committed. Pages that are open already, for drafts that were not accepted, are used again.

        Returns physical token slots int64 [b, count] and the blocks that had to leave a tail for it. A row without pages (a
        warm-up request) writes to the padding page.
        """
        held = self.reserved[rows] > 0
        last = (first + count - 1) // self.page
        folds: list[Fold] = []
        # A page per row at most once every ``page`` tokens: the loop is over those rows only.
        while len(short := np.flatnonzero((last - self.folded[rows] >= self.tail[rows]) & held)):
            for row, committed in zip(rows[short].tolist(), first[short].tolist()):
                folds += self._open_page(row, committed)
        positions = first[:, None] + np.arange(count)
        at = np.where(held[:, None], self.working[rows, None] + positions // self.page - self.folded[rows, None], 0)
        return np.where(held[:, None], self.pages[rows[:, None], at], 0) * self.page + positions % self.page, folds

    def _open_page(self, row: int, committed: int) -> list[Fold]:
        self._dirty.add(row)
        folds = []
        if self.tail[row] == self.most_tail[row]:
            if (self.folded[row] + 1) * self.page > committed:
                raise AssertionError(f"row {row} folds a block that is not committed")
            first, block = int(self.working[row]), int(self.folded[row])
            page = int(self.pages[row, first])
            if first < self.most_working[row]:
                folds.append(Fold(row, block, page, first))
                self.working[row] += 1
            else:
                folds.append(Fold(row, block, page, -1))
                used = first + int(self.tail[row])
                self.pages[row, first:used] = np.roll(self.pages[row, first:used], -1)
            self.folded[row] += 1
            self.tail[row] -= 1
        self.tail[row] += 1
        if self.working[row] + self.tail[row] > self.reserved[row]:
            raise AssertionError(f"row {row} outgrew its {self.reserved[row]} reserved pages")
        return folds

    def lengths(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Compact lengths int64 [b] of requests with true ``lengths`` int64 [b]; 1 for rows without pages."""
        compact = lengths + (self.working[rows] - self.folded[rows]) * self.page
        return np.where(self.reserved[rows] > 0, compact, 1)

    def upload(self) -> None:
        """Brings ``table`` up to date. On the forward's stream, before it reads."""
        if not self._dirty:
            return
        rows = np.fromiter(self._dirty, np.int64, len(self._dirty))
        self._dirty.clear()
        slots = (self.pages[rows][:, :, None] * self.page + self._offsets).reshape(len(rows), -1).astype(np.int32)
        device = self.table.device
        self.table[torch.from_numpy(rows).to(device)] = torch.from_numpy(slots).to(device)
