"""Both nodes and a tier in one process: a real ``TierServer``, real sockets, loopback data plane, tiny KV pools."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
import uuid
from collections import Counter
from contextlib import suppress

import msgspec
import numpy as np
import torch

from decode_node.destination import WholePages
from decode_node.pages import PageSink
from decode_node.pull import PullLimits
from decode_node.puller import Puller
from oasis_sglang.selection.summaries import SUMMARIES
from prefill_node import publisher as publishing
from prefill_node.pages import PageSource
from prefill_node.publisher import Publisher
from transport.dataplane import MeteredPlane
from transport.layout import KVLayout
from transport.planes import incarnation, loopback, make_plane
from transport.security import Security
from transport.server import TierOptions, TierServer
from transport.staging import Staging
from transport.tier import TierLimits
from transport.worker_client import WorkerClient

ROW = (8, 12)
"""Bytes of the fields of the hand-over row."""
FINGERPRINT = "f" * 64
SEED = b"seed" * 8
SOURCE = "prefill/0"
WAIT = 60.0
"""Seconds after which a wait is a failure. Generous: the machine may be busy."""


def small_layout(**changes) -> KVLayout:
    summary = SUMMARIES["mean_var_int8"]
    fields = dict(num_layers=2, kv_heads=3, head_dim=4, block_tokens=4, dtype="float32", itemsize=4, tp_size=1,
                  summary=summary.name, summary_bytes=summary.bytes(4), metadata_lens=ROW)
    return KVLayout(**(fields | changes))


def until(condition, what: str = "", seconds: float = WAIT):
    """Polls until ``condition()`` is true and returns it."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.0005)
    return value


def descriptors() -> Counter[str]:
    """How many this process has open of what can be left behind: sockets, pipes, events, polls, shared memory."""
    kinds: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing
            kinds[re.sub(r":\[\d+\]$", "", os.readlink(f"/proc/self/fd/{number}"))] += 1
    return Counter({kind: count for kind, count in kinds.items() if kind in ("socket", "pipe") or kind.startswith(("anon_inode:", "/memfd:"))})


class LocalTier:
    """A ``TierServer`` on a thread of this process. ``faults``: the orders for its loopback data plane."""

    def __init__(self, path: str, *, records: int = 64, layout: KVLayout | None = None, listen: str = "127.0.0.1:0",
                 planes: tuple[str, ...] = ("loopback",), limits: TierLimits | None = None, **options):
        layout = layout or small_layout()
        stride = -(-layout.payload_bytes // 64) * 64 + -(-layout.index_bytes // 64) * 64
        self.path, self.records = path, records
        self.server = TierServer(TierOptions(local=path, listen=listen, arena_bytes=records * stride, node="tier", planes=planes,
                                             limits=limits or TierLimits(lease_seconds=2.0, grace_seconds=0.2, room_seconds=1.0), **options))
        self.loop = asyncio.new_event_loop()
        self.loop.add_signal_handler = lambda *_: None  # only a main thread may have them
        self.error: BaseException | None = None
        self._pauses: list[threading.Event] = []
        self.thread = threading.Thread(target=self._run, name="tier", daemon=True)
        self.thread.start()
        until(lambda: self.server.ready.is_set() or self.error, "the tier is ready")
        if self.error:
            raise self.error
        self.tier = self.server.tier
        served = [s for name, s in loopback._SERVERS.items() if name.endswith(self.server.epoch)]
        self.faults = served[0].faults if served else None

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self.server.run())
        except BaseException as error:
            self.error = error

    @property
    def control(self) -> str:
        return self.server.control

    @property
    def alive(self) -> bool:
        return self.thread.is_alive() and not self.server.stopping.is_set()

    def call(self, function, *args):
        """``function(*args)`` on the tier's loop, where its tables may be looked at."""
        done, box = threading.Event(), []

        def run():
            try:
                box.append((True, function(*args)))
            except BaseException as error:
                box.append((False, error))
            done.set()

        self.loop.call_soon_threadsafe(run)
        assert done.wait(WAIT), "the tier does not react"
        fine, value = box[0]
        if not fine:
            raise value
        return value

    def inventory(self) -> dict[str, int]:
        return self.call(self.tier.inventory)

    def pause(self) -> threading.Event:
        """Stops the loop until the returned event is set, as SIGSTOP would."""
        resume, stopped = threading.Event(), threading.Event()
        self._pauses.append(resume)
        self.loop.call_soon_threadsafe(lambda: (stopped.set(), resume.wait(60)))
        assert stopped.wait(WAIT)
        return resume

    def stop(self) -> None:
        for resume in self._pauses:
            resume.set()
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.stopping.set)
            self.thread.join(WAIT)
        self.loop.close()


class Pool:
    """An MHA KV pool as SGLang's: per-layer tensors [slots, kv_heads, head_dim] of K and of V."""

    def __init__(self, layout: KVLayout, pages: int, *, dtype: torch.dtype = torch.float32, fill: float | None = None, seed: int = 0):
        shape = (pages * layout.block_tokens, layout.kv_heads, layout.head_dim)
        generator = torch.Generator().manual_seed(seed)

        def buffer():
            if fill is not None:
                return torch.full(shape, fill, dtype=dtype)
            return torch.randn(shape, generator=generator).to(dtype)

        self.layout = layout
        self.k = [buffer() for _ in range(layout.num_layers)]
        self.v = [buffer() for _ in range(layout.num_layers)]

    def tokens(self, pages: np.ndarray, count: int) -> np.ndarray:
        """float64 [2, layers, count, kv_heads, head_dim]: the first ``count`` tokens of ``pages``, slot by slot."""
        t = self.layout.block_tokens
        slots = [int(page) * t + offset for page in pages for offset in range(t)][:count]
        return np.stack([np.stack([b[slots].double().numpy() for b in side]) for side in (self.k, self.v)])

    def page(self, page: int) -> np.ndarray:
        return self.tokens(np.array([page]), self.layout.block_tokens)


def row_of(room: int) -> tuple[bytes, ...]:
    return (room.to_bytes(8, "little"), bytes([room % 251]) * 12)


class Prefill:
    """A publisher over a pool of its own."""

    def __init__(self, path: str, *, layout: KVLayout | None = None, pages: int = 64, reserve_seconds: float = 10.0,
                 timeout: float = 10.0, fingerprint: str = FINGERPRINT, seed: int = 0, on_attach=lambda welcome: None):
        self.layout = layout or small_layout()
        self.pool = Pool(self.layout, pages, seed=seed)
        self.source = PageSource(self.pool.k, self.pool.v, self.layout)
        hello = dict(node="prefill", rank=0, layout=self.layout, fingerprint=fingerprint)
        self.publisher = Publisher(WorkerClient(path, timeout=timeout), hello, self.source, SUMMARIES[self.layout.summary],
                                   reserve_seconds=reserve_seconds, on_attach=on_attach)
        self.publisher.start()

    def open(self, room: int, tokens: np.ndarray, seed: bytes | None = SEED):
        return self.publisher.publish(room, tokens, seed)

    def send(self, pub, pages: np.ndarray, chunk_pages: int = 1 << 30) -> None:
        """All of a prompt's pages, ``chunk_pages`` at a time."""
        total, t = len(pub.tokens), self.layout.block_tokens
        for first in range(0, len(pages), chunk_pages):
            part = pages[first : first + chunk_pages]
            self.publisher.send(pub, part, first, min(len(part) * t, total - first * t), None)

    def publish(self, room: int, tokens: np.ndarray, pages: np.ndarray, seed: bytes | None = SEED, chunk_pages: int = 1 << 30,
                queries: torch.Tensor | None = None, scale: float = 1.0):
        """Publishes and waits for the acknowledgement. ``queries``: of the last tokens; None: no ranking."""
        pub = self.open(room, tokens, seed)
        until(lambda: pub.state != publishing.OPENING, "room opened")
        if pub.state == publishing.OPEN:
            self.send(pub, pages, chunk_pages)
            self.publisher.commit(pub, row_of(room), queries, scale)
            until(lambda: pub.state in (publishing.COMMITTED, publishing.FAILED), "committed")
        return pub

    def close(self) -> None:
        self.publisher.close()


class Decode:
    """A puller over a pool of its own, all of it a sentinel value."""

    SENTINEL = 777.0

    def __init__(self, controls: dict[str, str], *, layout: KVLayout | None = None, pages: int = 64, windows: int = 4,
                 window_records: int = 2, limits: PullLimits | None = None, resolve=None, fingerprint: str = FINGERPRINT,
                 kind: str = "loopback", security: Security | None = None):
        self.layout = layout or small_layout()
        self.pool = Pool(self.layout, pages, fill=self.SENTINEL)
        self.windows = windows
        self.staging = Staging(window_records * self.layout.payload_bytes, windows)
        self.plane = MeteredPlane(make_plane(kind, incarnation("decode"), self.staging.region, security=security))
        self.controls, self.forgotten = controls, []
        self.rows: dict[int, tuple[bytes, ...]] = {}
        self.sink = PageSink(self.pool.k, self.pool.v, self.layout)
        self.puller = Puller(
            node="decode", rank=0, layout=self.layout, fingerprint=fingerprint, plane=self.plane, staging=self.staging,
            resolve=resolve or (lambda source: {"control": self.controls[source]}), forget=self.forgotten.append,
            limits=limits or PullLimits(await_seconds=10.0, read_seconds=5.0, silence_seconds=5.0), security=security)
        self.puller.start()

    def pull(self, room: int, source: str = SOURCE):
        return self.puller.pull(room, source)

    def fetch(self, pull, pages: np.ndarray, write_row=None, vacant=None) -> None:
        """Whole records over ``pages``."""
        self.give(pull, WholePages(self.sink, self.layout, pages), write_row, vacant)

    def give(self, pull, destination, write_row=None, vacant=None) -> None:
        """``write_row`` (None: keep it in ``rows``) takes the hand-over row."""
        self.puller.fetch(pull, destination, write_row or (lambda row: self.rows.__setitem__(pull.room, row)), vacant)

    def untouched(self, pages: np.ndarray) -> bool:
        return bool((self.pool.tokens(pages, len(pages) * self.layout.block_tokens) == self.SENTINEL).all())

    def wipe(self, pages: np.ndarray) -> None:
        t = self.layout.block_tokens
        slots = [int(page) * t + offset for page in pages for offset in range(t)]
        for buffer in (*self.pool.k, *self.pool.v):
            buffer[slots] = self.SENTINEL

    def at_baseline(self) -> bool:
        return (not self.puller.live and not self.puller.reader.flights
                and (self.staging.free, self.staging.leased, self.staging.quarantined) == (self.windows, 0, 0))

    def close(self) -> None:
        self.puller.close()


class World:
    """One tier, one prefill rank, one decode rank."""

    def __init__(self, folder, *, tier: dict | None = None, prefill: dict | None = None, decode: dict | None = None):
        self.path = str(folder / f"{uuid.uuid4().hex[:8]}.sock")
        self.tier = LocalTier(self.path, **(tier or {}))
        self.prefill = Prefill(self.path, **(prefill or {}))
        self.decode = Decode({SOURCE: self.tier.control}, **(decode or {}))

    def prompt(self, tokens: int, *, at: int = 0, salt: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(token ids, pages of prefill's pool). The pages are in reverse order, so that page order is tested too."""
        pages = -(-tokens // self.prefill.layout.block_tokens)
        return np.arange(tokens, dtype=np.int64) + salt * 1_000_003, np.arange(at, at + pages)[::-1].copy()

    def pull_into(self, room: int, pages: np.ndarray):
        """Pulls a committed room and waits for the end."""
        pull = self.decode.pull(room)
        until(lambda: pull.state in ("ready", "failed"), "manifest")
        if pull.state == "ready":
            self.decode.fetch(pull, pages)
            until(lambda: pull.state in ("done", "failed"), "pulled")
        return pull

    def arrived(self, source: np.ndarray, target: np.ndarray, tokens: int) -> bool:
        """Whether decode's pages hold what prefill's hold."""
        return np.array_equal(self.prefill.pool.tokens(source, tokens), self.decode.pool.tokens(target, tokens))

    def tier_at_baseline(self) -> bool:
        now = self.tier.inventory()
        return (now["free"] + now["cached"] == now["records"] == self.tier.records
                and not any(now[k] for k in ("writing", "leased", "holders", "held", "rooms", "leases", "waiters")))

    def settle(self) -> None:
        """Waits until everything everywhere is back at its start."""
        until(lambda: not self.prefill.publisher.live and not self.prefill.publisher._waiting, "publications ended")
        until(self.decode.at_baseline, "decode at baseline")
        until(self.tier_at_baseline, "tier at baseline")

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
        self.tier.stop()


def manifest_bytes(manifest) -> int:
    return len(msgspec.msgpack.encode(manifest))
