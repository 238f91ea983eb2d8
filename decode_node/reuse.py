"""What a request leaves behind for the next turn of its conversation, and how requests share what is here.

A request holds the numbers of its blocks (``block_store.py``) from its grant to its end. Then the whole blocks that it generated
get their hashes, as if they had been part of a prompt, and its pieces stay in the host cache until their room is wanted.
What another request is just pulling is waited for, so that a common prefix crosses the wire once even when
conversations start together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from decode_node.block_store import BlockStore
from decode_node.donor import MESSAGE_BYTES, OUTSTANDING_BYTES
from decode_node.entry import Entry
from decode_node.host_cache import HostCache
from decode_node.page_table import PageTable
from decode_node.pieces import PoolPieces
from decode_node.pull import DONE, PULLING, READY, SERVING, Pull
from decode_node.working_set import WorkingSets
from transport.hashing import page_hashes
from transport.records import split_hashes

PATIENCE_SECONDS = 2.0
"""An admission of which nothing arrives for so long holds up nobody any more: its tier may hang, and others may not need it."""


@dataclass(eq=False)
class Bringing:
    """An admission under way, and the blocks ``numbers`` int64 [n] that it was the first to ask for. ``landed``: bytes so far,
    last seen to grow at ``moved_at``."""

    entry: Entry
    numbers: np.ndarray
    moved_at: float
    landed: int = -1

    def ended(self, now: float) -> bool:
        """Whether nobody should wait for it any more."""
        pull = self.entry.pull
        if self.entry.released or pull.state not in (READY, PULLING):
            return True
        landed = sum(pull.bytes_by_phase.values())
        if landed != self.landed:
            self.landed, self.moved_at = landed, now
        return now >= self.moved_at + PATIENCE_SECONDS


def computed_tokens(req, start: int) -> list[int]:
    """The tokens from ``start`` on whose KV a request of SGLang's that has run leaves behind: nothing was computed from its last."""
    prompt = len(req.origin_input_ids)
    return [*req.origin_input_ids[start:], *req.output_ids[max(0, start - prompt) :]][:-1]


class Reuse:
    """Owner of what entries hold in the store. Scheduler thread. ``enabled``: off, nothing outlives its request.
    ``donate`` (``Puller.donate``) takes what was generated, None: it stays on this node.

    ``totals``: ``prompt_tokens`` of admitted requests and of them ``hit_tokens``, in blocks that were known here; ``blocks_kept``
    that were generated here; what ``admission.py`` did not have to read.
    """

    def __init__(self, store: BlockStore, cache: HostCache, sets: WorkingSets, table: PageTable, pool: PoolPieces, *, enabled: bool,
                 donate: Callable[..., None] | None = None, clock: Callable[[], float] = time.monotonic):
        self.store, self.cache, self.sets, self.table, self.pool, self.enabled, self.donate = store, cache, sets, table, pool, enabled, donate
        self.page, self.layout = pool.layout.block_tokens, pool.layout
        self.totals: Counter[str] = Counter(dict.fromkeys(("prompt_tokens", "hit_tokens", "pieces", "indexes", "bytes_saved", "blocks_kept"), 0))
        self._clock = clock
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="oasis-publish") if donate is not None else None
        self._offers: list[tuple[Future, int]] = []
        """What is being made ready for the tier, and its bytes."""
        self._arriving = np.zeros(store.size, bool)
        self._brought = np.zeros(store.size, bool)
        """Blocks that an admission has asked for and that are held since: what it did not bring of them, it did not need."""
        self._bringing: list[Bringing] = []

    def take(self, entry: Entry) -> None:
        """Numbers for the whole blocks of a prompt that is being granted its place. A request without a working set does without
        when there are none."""
        whole = entry.prompt // self.page
        hashes = entry.pull.hashes if self.enabled else []
        if entry.set is None and not (self.enabled and entry.pull.manifest.seed):
            return
        known = np.fromiter(map(self.store.has, hashes), bool, len(hashes))
        entry.numbers = self.store.acquire(hashes, whole - len(hashes))
        if entry.numbers is None:
            if entry.set is not None:
                raise AssertionError("block numbers were there for every working set and are not")
            return
        entry.epoch = self.store.epoch
        if entry.set is not None:
            self.sets.bind(entry.set, 0, entry.numbers)
        self.totals["prompt_tokens"] += entry.prompt
        self.totals["hit_tokens"] += int(known.sum()) * self.page

    def crowded(self, entry: Entry) -> bool:
        """Whether another admission is bringing blocks of ``entry``."""
        return entry.numbers is not None and bool(self._arriving[entry.numbers].any())

    def begin(self, entry: Entry) -> None:
        """``entry`` starts to pull what is not here."""
        if self.enabled and entry.numbers is not None:
            missing = entry.numbers[~(self._brought[entry.numbers] | self.cache.held(entry.numbers).any(0))]
            self._arriving[missing] = True
            self._bringing.append(Bringing(entry, missing, self._clock()))

    def arrived(self) -> bool:
        """Whether an admission has ended since the last call, one way or the other."""
        now = self._clock()
        ended = [bringing for bringing in self._bringing if bringing.ended(now)]
        if not ended:
            return False
        self._bringing = [bringing for bringing in self._bringing if bringing not in ended]
        for entry, numbers in ((bringing.entry, bringing.numbers) for bringing in ended):
            self._brought[numbers] |= not entry.released and entry.pull.state in (SERVING, DONE)
        self._arriving[:] = False
        for bringing in self._bringing:
            self._arriving[bringing.numbers] = True
        return True

    def grow(self, entry: Entry, block: int) -> int:
        """A number for ``block``, which ``entry`` has generated and which enters its working set."""
        number = self.store.acquire([], 1)
        if number is None:
            raise AssertionError("block numbers were there for every working set and are not")
        entry.numbers = np.concatenate([entry.numbers, number])
        self.sets.bind(entry.set, block, number)
        return int(number[0])

    def keep(self, entry: Entry, tokens: Sequence[int]) -> None:
        """At the end of a request that has run: ``tokens``, those after the prompt's whole blocks, have their KV in the pool or
        folded. The whole blocks among them can be found from now on."""
        if not self.enabled or entry.numbers is None or entry.pages is None or entry.failure or not entry.pull.manifest.seed:
            return
        first, new = entry.prompt // self.page, len(tokens) // self.page
        folded = len(entry.numbers) - first
        if not new or entry.epoch != self.store.epoch or len(entry.pull.hashes) != first or folded != self.table.folded[entry.row] - first:
            return
        before = entry.pull.hashes[-1] if first else entry.pull.manifest.seed
        hashes = split_hashes(page_hashes(before, np.asarray(tokens, np.int64), self.page))
        self.cache.unpin(entry.numbers[first:])
        self.store.name(entry.numbers[first:], hashes[:folded])
        self._keep_tail(entry, first + folded, hashes[folded:])
        if self.donate is not None:
            self._publish(entry, first, hashes)
        self.totals["blocks_kept"] += len(hashes)

    def _keep_tail(self, entry: Entry, first: int, hashes: list[bytes]) -> None:
        """Blocks ``first``..., complete in the tail's pages."""
        new = np.array([i for i, digest in enumerate(hashes) if not self.store.has(digest)], np.int64)
        numbers = self.store.acquire([hashes[i] for i in new])
        if numbers is None or not len(new):
            return
        self.store.generated[numbers] = True
        entry.numbers = np.concatenate([entry.numbers, numbers])
        row, each = entry.row, np.arange(self.layout.pieces)
        pages = self.table.pages[row, self.table.working[row] + first + new - self.table.folded[row]]
        data = self.pool.read(pages).cpu().view(torch.uint8).reshape(-1, self.layout.piece_bytes).numpy()
        self.cache.insert(np.tile(each, len(new)), np.repeat(numbers, len(each)), data)

    def _publish(self, entry: Entry, first: int, hashes: list[bytes]) -> None:
        """Blocks ``first``..., as far as the host cache has them whole. Only the copy is made here: a second of summaries for a long
        answer would be a second in which nobody decodes."""
        lay, numbers, each = self.layout, self.store.find(hashes), np.arange(self.layout.pieces)
        self._offers = [(offer, size) for offer, size in self._offers if not offer.done()]
        room = (OUTSTANDING_BYTES - sum(size for _, size in self._offers)) // lay.payload_bytes
        whole = (numbers >= 0) & self.cache.held(numbers).all(0)
        n = min(int(np.cumprod(whole).sum()), room)
        data, here = self.cache.read(np.tile(each, n), np.repeat(numbers[:n], len(each)))
        offered = n if here.all() else 0  # others may have pushed some out meanwhile
        self.totals["blocks_not_offered"] += len(hashes) - offered
        if offered:
            self._offers.append((self._publisher.submit(self._offer, entry.pull, first, hashes[:n], data.reshape(n, -1)), data.nbytes))

    def _offer(self, pull: Pull, first: int, hashes: list[bytes], payloads: np.ndarray) -> None:
        """On the publishing thread. In parts, so that the puller can do other things in between."""
        lay = self.layout
        step = max(1, MESSAGE_BYTES // (lay.payload_bytes + lay.summary_total))
        for start in range(0, len(hashes), step):
            part = slice(start, start + step)
            content = torch.from_numpy(payloads[part]).view(self.pool.kv.dtype).view(-1, lay.pieces, 2, lay.block_tokens, lay.head_dim)
            self.donate(pull, first + start, hashes[part], payloads[part], self.sets.summary.build(content[:, :, 0]).view(len(content), -1).cpu().numpy())

    def release(self, entry: Entry) -> None:
        """Idempotent."""
        if entry.numbers is not None:
            self.store.release(entry.numbers)
            self._brought[entry.numbers] &= self.store.holders[entry.numbers] > 0
            entry.numbers = None

    def report(self) -> dict:
        """For ``/server_info``."""
        return {**self.totals, "enabled": self.enabled, "blocks": self.store.size, "blocks_held": self.store.held, "blocks_cached": self.store.cached,
                "blocks_evicted": self.store.evicted}
