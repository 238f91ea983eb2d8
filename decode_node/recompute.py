"""Asking a prefill worker to compute a prompt once more, as a router would: threads and HTTP, nothing of SGLang's scheduler.

An order names a room that this node has drawn. A worker that answers is looked for, its room is awaited like any other, and
``/generate`` is posted to it with the room. Source: SGLang's own recomputation after weight updates (``submit_prefill_recompute``
in ``sglang/srt/disaggregation/common/conn.py``), which knows one worker only and waits for pages before it asks.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import requests

from decode_node.pull import Pull
from transport.errors import DeadlineExceeded, OasisError, PeerLost, RoomFailed

log = logging.getLogger("oasis.decode")

WORKERS = 32
"""Prompts that prefill workers compute again for this rank at once; the others wait, within their deadlines."""
SEARCH_SECONDS = 0.5
"""Between two looks for a worker that answers."""
CONNECT_SECONDS = 2.0


class Worker(NamedTuple):
    """A prefill worker: where it takes requests, where its rank's peer row is asked for, its data-parallel rank (None: it has one
    only), and where its tier listens."""

    url: str
    source: str
    dp_rank: int | None
    control: str


@dataclass(eq=False)
class Order:
    """One attempt. ``home``: bootstrap address that the request came with; ``payload``: of ``/generate``, less what names the worker;
    ``seen``: bootstrap addresses that failed this request before, asked last; ``not_before``: when to begin.

    ``pull`` and ``error`` are written by the thread that works on it, ``gone`` by its receiver, which no longer needs it then.
    """

    room: int
    rid: str
    home: str
    payload: dict
    deadline: float
    seen: set[str] = field(default_factory=set)
    not_before: float = 0.0
    pull: Pull | None = None
    error: OasisError | None = None
    gone: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, start: Callable[[], Pull]) -> bool:
        """False, and ``start`` is not called, when its receiver has gone."""
        with self._lock:
            if not self.gone.is_set():
                self.pull = start()
            return self.pull is not None

    def leave(self) -> Pull | None:
        """Its receiver goes; returns the pull, of which it takes care. None begins after that."""
        with self._lock:
            self.gone.set()
            return self.pull


class Recomputer:
    """Owner of the threads. ``addresses``: bootstrap addresses of workers that may be asked beside a request's own. No others: a prompt goes
    where its own client or this node's operator has sent it. ``look(address, room)`` -> its worker, raising ``OasisError`` (blocking);
    ``start(order, source)`` -> the pull of its room; ``cancel(pull, reason)`` ends it. ``headers``: of every ``/generate``."""

    def __init__(self, *, addresses: Sequence[str], look: Callable[[str, int], Worker], start: Callable[[Order, str], Pull],
                 cancel: Callable[[Pull, str], None], headers: dict[str, str] | None = None):
        self.addresses, self.look, self.start, self.cancel, self.headers = addresses, look, start, cancel, headers or {}
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._threads = 0

    def submit(self, order: Order) -> None:
        """On one thread only. Who submits looks at the order again, and nothing waits for the threads when the process ends."""
        self._orders.put(order)
        if self._threads < WORKERS:
            self._threads += 1
            threading.Thread(target=self._run, name=f"oasis-recompute-{self._threads}", daemon=True).start()

    def close(self) -> None:
        """Ends the threads, each once it is through with the order that it works on. Nothing may be submitted any more; not waited for."""
        for _ in range(self._threads):
            self._orders.put(None)

    # -- on its threads -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._work(order)

    def _work(self, order: Order) -> None:
        try:
            order.gone.wait(max(0.0, min(order.not_before, order.deadline) - time.monotonic()))
            worker = self._find(order)
            if worker is None or not order.begin(lambda: self.start(order, worker.source)):
                return
            self._post(order, worker)
        except OasisError as error:
            self._failed(order, error)
        except Exception as error:
            log.exception("cannot have a prompt computed again")
            self._failed(order, RoomFailed(f"internal error while computing again: {error!r}", room=order.room))

    def _failed(self, order: Order, error: OasisError) -> None:
        order.error = error
        if order.pull is not None:
            self.cancel(order.pull, str(error))

    def _find(self, order: Order) -> Worker | None:
        """A worker that answers and whose tier takes connections; None: nobody needs it any more. Raises the last reason why there is none,
        at the deadline."""
        while not order.gone.is_set():
            for address in sorted({order.home: None, **dict.fromkeys(self.addresses)}, key=lambda a: a in order.seen):
                if order.gone.is_set():
                    return None
                try:
                    worker = self.look(address, order.room)
                    require_listener(worker.control, room=order.room)
                    return worker
                except OasisError as error:
                    reason = error
            left = order.deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"no prefill worker to compute the prompt again: {reason}", room=order.room)
            order.gone.wait(min(left, SEARCH_SECONDS))
        return None

    def _post(self, order: Order, worker: Worker) -> None:
        """Returns when prefill has committed, or somebody else has ended the room. Raises ``PeerLost`` when it has not computed it."""
        parts = urllib.parse.urlsplit("//" + worker.source.rpartition("/")[0])
        body = {**order.payload, "bootstrap_host": parts.hostname, "bootstrap_port": parts.port, "bootstrap_room": order.room,
                "routed_dp_rank": worker.dp_rank, "disagg_prefill_dp_rank": worker.dp_rank}
        patience = max(CONNECT_SECONDS, order.deadline - time.monotonic())
        try:
            # Its body is not read: it says nothing that the room does not. Nor is it followed elsewhere, with the prompt and our key.
            with requests.post(f"{worker.url}/generate", json=body, headers=self.headers, timeout=(CONNECT_SECONDS, patience), stream=True,
                               allow_redirects=False) as answer:
                status = answer.status_code
        except requests.RequestException as error:
            raise PeerLost(f"the prefill worker did not compute the prompt again: {type(error).__name__}", room=order.room, peer=worker.url) from error
        if status != 200:
            raise PeerLost("the prefill worker refused to compute the prompt again", room=order.room, peer=worker.url,
                           limit=f"HTTP status {status}")


def require_listener(control: str, *, room: int | None = None) -> None:
    """Raises ``PeerLost`` when nobody takes connections at ``control`` ("tcp://host:port")."""
    try:
        parts = urllib.parse.urlsplit(control)
        socket.create_connection((parts.hostname, parts.port), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise PeerLost(f"its tier cannot be reached: {error}", room=room, peer=control) from error
