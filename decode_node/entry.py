"""A request on the decode node, from its reservation to its release."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import torch

from decode_node.budget import Budget, Need
from decode_node.pull import FAILED, Pull
from transport.errors import OasisError


class Swaps(NamedTuple):
    """Blocks that come into a working set at its next step: int64 [n] each, slots distinct per piece."""

    pieces: np.ndarray
    slots: np.ndarray
    blocks: np.ndarray

    @classmethod
    def none(cls) -> Self:
        empty = np.zeros(0, np.int64)
        return cls(empty, empty, empty)


@dataclass(eq=False)
class Entry:
    """Owner: the coordinator. ``row``: SGLang's request row; ``set``: its working set, None while all its blocks fit.

    ``numbers`` int64 [n]: of its blocks so far, less those in the tail; None: this node keeps nothing of it. ``digests`` uint64
    [whole, S]: checksums of the prompt's pieces in the tier, known once the index has landed.
    """

    row: int
    rid: str
    prompt: int
    budget: Budget
    need: Need
    pull: Pull
    write_row: Callable[[tuple[bytes, ...]], None] | None = None
    """Takes the hand-over row when the pull is complete."""
    pages: np.ndarray | None = None
    set: int | None = None
    numbers: np.ndarray | None = None
    epoch: int = 0
    """Of the store when it took its numbers: what was computed before a flush is not found after it."""
    digests: np.ndarray | None = None
    swaps: Swaps = field(default_factory=Swaps.none)
    step: int = 0
    """The last step that it took part in while it held fewer blocks than it has; ``steps``: how many there were."""
    steps: int = 0
    wait_until: float = 0.0
    stalled_at: float = 0.0
    """Since when it stands aside; 0: it does not."""
    waits: int = 0
    stalled: float = 0.0
    """Times that it stood aside, and seconds of them that have ended."""
    room: int = 0
    """Pieces that the host cache has promised room for; ``kept`` of them are in use by what was generated."""
    kept: int = 0
    error: OasisError | None = None
    released: bool = False

    @property
    def wait(self) -> bool:
        return self.budget.wait

    @property
    def failure(self) -> OasisError | None:
        """Why the request cannot go on."""
        return self.error or (self.pull.error if self.pull.state == FAILED else None)


@dataclass(eq=False)
class Parked:
    """A retracted request: its entry, a host copy of its pages and what the page table said of them."""

    entry: Entry
    content: torch.Tensor
    counts: tuple[int, ...]
    guard: weakref.finalize | None = None
