"""Restoring: pages of a prompt that the KV pool no longer holds come back from the node's tier instead of being computed again.

The scheduler's thread asks and copies, over a connection of its own: the tier answers within a fraction of a second or not at
all, and after any failure nothing is asked for a while. Requests are then computed, as without a tier. Records are leased from
the look-up until they are copied and each is checked against its root first, so what was restored is what was published.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from prefill_node.pages import PageSource
from transport import messages as m
from transport.errors import IntegrityError, OasisError
from transport.integrity import verify_records
from transport.pace import Pace
from transport.records import HASH_BYTES
from transport.worker_client import WorkerClient

log = logging.getLogger("oasis.restore")

ANSWER_SECONDS = 0.25
"""How long the tier may take for an answer: the scheduler waits."""
REST_SECONDS = 5.0
"""How long nothing is asked after a failure."""
REMEMBER_SECONDS = 0.5
"""How long an answer is good: SGLang asks again for a waiting request with each batch that it builds."""
REMEMBERED = 1024
PROBE_SECONDS = 30.0
"""While restoring is the slower way, one is done all the same so often: the estimate must be able to change."""
BATCH_BYTES = 16 << 20


def runs(records: np.ndarray, most: int) -> list[slice]:
    """Cuts ``records`` int64 [n] into slices of at most ``most`` that are neighbours in the arena, in order."""
    at = np.arange(len(records))
    first = np.maximum.accumulate(np.where(np.diff(records, prepend=-2) != 1, at, 0))
    starts = np.flatnonzero((at - first) % most == 0).tolist()
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(records)])]


class Restorer:
    """Owner of the scheduler's connection to the tier. One thread.

    ``min_tokens``: shorter runs are computed. ``stream``: on which forwards write the pool, None = that of the caller.
    ``totals`` counts; ``restoring`` and ``computing`` are the paces that are compared, per token.
    """

    def __init__(self, client: WorkerClient, hello: dict, source: PageSource, *, min_tokens: int, stream: torch.cuda.Stream | None = None):
        self.client, self.hello, self.source, self.min_tokens, self.stream = client, hello, source, min_tokens, stream
        self.layout = source.layout
        self.totals: Counter[str] = Counter()
        self.restoring, self.computing = Pace(), Pace()
        self._answers: dict[tuple[bytes, bytes], tuple[float, int]] = {}
        self._built: deque[float] = deque(maxlen=2)  # SGLang keeps two forwards in flight at most
        self._rests_until = self._probes_at = self._computed_at = 0.0
        self._attached = False

    # -- from the tier into the pool ----------------------------------------------------------------------------

    def find(self, hashes: bytes) -> int:
        """How many pages of ``hashes`` (``HASH_BYTES`` each), from the first on, are to be restored."""
        page = self.layout.block_tokens
        if len(hashes) // HASH_BYTES * page < self.min_tokens:
            return 0
        pages = self._held_pages(hashes)
        if not pages or pages * page < self.min_tokens:
            return 0
        if self.slower and time.monotonic() < self._probes_at:
            self.totals["restores_slower"] += 1
            return 0
        return pages

    def restore(self, hashes: bytes, pages: np.ndarray) -> bool:
        """Fills pool ``pages`` int64 [n] with the records of ``hashes``; they are complete for whatever is launched next. False:
        what they hold then is undefined, and must be computed."""
        start = time.monotonic()
        held = self._ask(hashes, hold=True)
        if held is None:
            return False
        records, failure = m.unpack(held.records, "u4", count=len(pages)), None
        complete = bool((records != m.NOWHERE).all())
        if complete:
            try:
                self._copy(records.astype(np.int64), m.unpack(held.roots, "u8", count=len(pages)), pages)
            except OasisError as error:
                failure = error
        else:
            self.totals["restores_gone"] += 1
            self.forget()
        if held.lease:
            self._call(m.Release, epoch=self.client.welcome.epoch, leases=m.pack([held.lease], "u8"), doubted=isinstance(failure, IntegrityError))
        if failure is not None:
            self._rest(failure)
        if failure is not None or not complete:
            return False
        tokens, seconds = len(pages) * self.layout.block_tokens, time.monotonic() - start
        self.restoring.add(tokens, seconds)
        self._probes_at = time.monotonic() + PROBE_SECONDS
        self.totals.update(restores=1, restored_tokens=tokens, restored_bytes=len(pages) * self.layout.payload_bytes, restore_seconds=seconds)
        return True

    def _copy(self, records: np.ndarray, roots: np.ndarray, pages: np.ndarray) -> None:
        """Raises ``IntegrityError``, ``BoundsError``."""
        geometry, size = self.client.welcome.geometry, self.layout.payload_bytes
        geometry.payload_offsets(records)  # are they all in the arena?
        payloads, _ = geometry.rows(self.client.arena.bytes)
        for part in runs(records, max(1, BATCH_BYTES // size)):
            rows = payloads[records[part.start] : records[part.stop - 1] + 1, :size].copy()  # what is checked is what is used
            verify_records(rows, roots[part], records[part], self.layout, peer=self.client.peer, room=None)
            self._scatter(rows, pages[part])

    def _scatter(self, rows: np.ndarray, pages: np.ndarray) -> None:
        """Payloads uint8 [n, payload_bytes] over ``pages`` int64 [n] of every layer."""
        lay, pool = self.layout, self.source.keys[0]
        block = torch.from_numpy(rows).view(pool.dtype).view(len(pages), lay.num_layers, lay.kv_heads, 2, lay.block_tokens, lay.head_dim)
        block, target = block.to(pool.device), torch.from_numpy(pages).to(pool.device)
        with self._behind_forwards(block, target):
            for layer, (k, v) in enumerate(zip(self.source.keys, self.source.values)):
                k[target] = block[:, layer, :, 0].transpose(1, 2)
                v[target] = block[:, layer, :, 1].transpose(1, 2)

    @contextmanager
    def _behind_forwards(self, *tensors: torch.Tensor) -> Iterator[None]:
        """A page that was just freed may still be written by the forward of the request that had it."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        for tensor in tensors:
            tensor.record_stream(self.stream)

    # -- is it worth it? ----------------------------------------------------------------------------------------

    @property
    def slower(self) -> bool:
        """Whether a restored token has lately cost more seconds than a computed one."""
        restoring, computing = self.restoring.each, self.computing.each
        return restoring is not None and computing is not None and restoring > computing

    def wish(self, first: int, stop: int) -> m.Wish | None:
        """What the tier may fetch from a memory node for a prompt whose pages ``first`` to ``stop`` the pool lacks; None: nothing."""
        page = self.layout.block_tokens
        least = max(1, -(-self.min_tokens // page))
        if stop - first < least or self.slower or time.monotonic() < self._rests_until:
            return None
        computing = self.computing.each
        saved = float("inf") if computing is None else (computing - (self.restoring.each or 0.0)) * page
        return m.Wish(first, stop, least, saved)

    def built(self) -> None:
        """A batch goes to the device now."""
        self._built.append(time.monotonic())

    def computed(self, tokens: int) -> None:
        """The oldest batch that was built has been computed; it took ``tokens`` tokens. The device works on one at a time, so this
        one began when it was built or when the one before it had ended."""
        now = time.monotonic()
        if self._built and tokens:
            self.computing.add(tokens, now - max(self._built.popleft(), self._computed_at))
        self._computed_at = now
        self.totals["computed_tokens"] += tokens

    def report(self) -> dict:
        """For ``/server_info``; ``milliseconds`` per thousand tokens, None: not known yet."""
        paces = {"restored": self.restoring.each, "computed": self.computing.each}
        return {**self.totals, "resting": time.monotonic() < self._rests_until,
                "milliseconds": {name: None if pace is None else round(pace * 1e6, 3) for name, pace in paces.items()}}

    def forget(self) -> None:
        """What was heard from the tier is void."""
        self._answers.clear()

    def close(self) -> None:
        self.client.close()

    # -- the tier -----------------------------------------------------------------------------------------------

    def _held_pages(self, hashes: bytes) -> int:
        """Pages that the tier holds without a gap, by its answer of just now or a new one."""
        # The last hash stands for all tokens before it; the first one says where the question began.
        key, now = (hashes[:HASH_BYTES], hashes[-HASH_BYTES:]), time.monotonic()
        until, pages = self._answers.get(key, (0.0, 0))
        if now < until:
            return pages
        held = self._ask(hashes, hold=False)
        if held is None:
            return 0
        missing = np.flatnonzero(m.unpack(held.records, "u4", count=len(hashes) // HASH_BYTES) == m.NOWHERE)
        pages = int(missing[0]) if len(missing) else len(hashes) // HASH_BYTES
        if len(self._answers) >= REMEMBERED:
            self._answers.clear()
        self._answers[key] = (now + REMEMBER_SECONDS, pages)
        return pages

    def _ask(self, hashes: bytes, *, hold: bool) -> m.Held | None:
        if not self._awake():
            return None
        self.totals["lookups"] += 1
        return self._call(m.Lookup, epoch=self.client.welcome.epoch, hashes=hashes, hold=hold)

    def _call(self, make, **fields) -> m.Reply | None:
        try:
            return self.client.call(make, **fields)
        except OasisError as error:
            self._rest(error)
            return None

    def _awake(self) -> bool:
        if self._attached:
            return True
        if time.monotonic() < self._rests_until:
            return False
        try:
            self.client.attach(**self.hello)
        except OasisError as error:
            self._rest(error)
            return False
        self._attached = True
        self.forget()
        return True

    def _rest(self, error: OasisError) -> None:
        log.warning("nothing is restored for %g s: %s", REST_SECONDS, error)
        self.totals["restore_failures"] += 1
        self._attached = False
        self._rests_until = time.monotonic() + REST_SECONDS
