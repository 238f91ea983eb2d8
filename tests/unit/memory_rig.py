"""Prefill nodes with local tiers in front of memory nodes: real ``TierServer``s on threads, real sockets, movers of their own."""

from __future__ import annotations

import functools
import os
import signal
import time
import uuid

import node_rig
import numpy as np
import zmq
from node_rig import FINGERPRINT, WAIT, LocalTier, Prefill, small_layout, until

from prefill_node.publisher import COMMITTED
from transport import messages as m
from transport.dataplane import ReadBatch
from transport.integrity import verify_records
from transport.planes import incarnation, make_plane
from transport.tier import TierLimits

LAYOUT = small_layout()
RECORD_BYTES = LAYOUT.payload_bytes + LAYOUT.index_bytes
LIMITS = TierLimits(lease_seconds=10.0, grace_seconds=0.2, room_seconds=60.0)
"""So that nothing expires on a slow machine that a test has not given up."""
SHORT = TierLimits(lease_seconds=1.5, grace_seconds=0.2, room_seconds=60.0)
"""For tests of a tier that falls silent."""


class NodeTier(LocalTier):
    """A tier that serves planes which reach across processes, with memory nodes or as one."""

    def __init__(self, path: str, *, memory_nodes: str = "", planes: tuple[str, ...] = ("zmq",), records: int = 256, listen: str = "127.0.0.1:0",
                 limits: TierLimits = LIMITS):
        whole = node_rig.TierOptions
        node_rig.TierOptions = functools.partial(whole, memory_nodes=memory_nodes)
        try:
            super().__init__(path, records=records, planes=planes, limits=limits, listen=listen)
        finally:
            node_rig.TierOptions = whole

    @property
    def totals(self):
        return self.tier.totals

    @property
    def mover_pid(self) -> int | None:
        return self.server.mover.pid

    def expire(self) -> None:
        """The time of every committed room that nobody has claimed is over."""
        def over() -> None:
            for room in self.tier.rooms.values():
                if room.manifest is not None:
                    room.expires = 0.0

        self.call(over)

    def at_baseline(self) -> bool:
        now = self.inventory()
        return (now["free"] + now["cached"] == now["records"] in (0, self.records)  # 0: nobody has said what it holds
                and not any(now[k] for k in ("writing", "leased", "holders", "held", "rooms", "leases", "waiters", "moves")) and not now.get("fetches"))


class Reader:
    """A decode rank's end of the protocol and of the data plane."""

    def __init__(self, control: str, kind: str = "zmq"):
        self.context, self.seq = zmq.Context(), 0
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(WAIT * 1000))
        self.socket.connect(control)
        self.region = np.zeros(1 << 20, np.uint8)
        self.plane = make_plane(kind, incarnation("reader"), self.region)
        self.welcome = self.ask(m.Hello, protocol=m.PROTOCOL, role="reader", node="reader", rank=0, layout=LAYOUT, fingerprint=FINGERPRINT)

    def send(self, make, **fields) -> None:
        self.seq += 1
        if "epoch" in make.__struct_fields__:
            fields["epoch"] = self.welcome.epoch
        self.socket.send(m.encode(make(seq=self.seq, **fields)))

    def receive(self):
        return m.raise_failure(m.decode_reply(self.socket.recv()), peer="tier")

    def ask(self, make, **fields):
        self.send(make, **fields)
        return self.receive()

    def wait(self, room: int, seconds: float = 10.0):
        return self.ask(m.Await, room=room, rank=0, seconds=seconds)

    def read(self, manifest: m.Manifest) -> np.ndarray:
        """uint8 [pages, payload_bytes], checked against the manifest's roots."""
        records = m.unpack(manifest.records, "u4").astype(np.int64)
        endpoint, size = self.welcome.endpoints[0], LAYOUT.payload_bytes
        self.plane.connect(endpoint)
        offsets = self.welcome.geometry.payload_offsets(records)
        lengths = np.full(len(records), size, np.uint64)
        transfer = self.plane.read(endpoint.name, ReadBatch(offsets, np.arange(len(records), dtype=np.uint64) * np.uint64(size), lengths))
        until(transfer.poll, "read")
        payloads = self.region[: len(records) * size].reshape(-1, size).copy()
        verify_records(payloads, m.unpack(manifest.roots, "u8"), records, LAYOUT, peer="", room=manifest.room)
        return payloads

    def release(self, manifest: m.Manifest) -> None:
        self.ask(m.Release, leases=m.pack([manifest.lease], "u8"))

    def close(self) -> None:
        self.plane.close()
        self.context.destroy(linger=0)


def in_pool(prefill: Prefill, pages: np.ndarray, tokens: int) -> np.ndarray:
    """uint8 [pages, payload_bytes] as ``Reader.read`` should return it, token by token out of the pool; zeros past the prompt."""
    lay = prefill.layout
    out = np.zeros((len(pages), lay.num_layers, lay.kv_heads, 2, lay.block_tokens, lay.head_dim), np.float32)
    for n in range(tokens):
        page, offset = divmod(n, lay.block_tokens)
        slot = int(pages[page]) * lay.block_tokens + offset
        for layer in range(lay.num_layers):
            out[page, layer, :, 0, offset] = prefill.pool.k[layer][slot]
            out[page, layer, :, 1, offset] = prefill.pool.v[layer][slot]
    return out.reshape(len(pages), -1).view(np.uint8)


class Fleet:
    """``memory`` nodes and, in front of them, ``local`` tiers with a prefill rank each. All prefill pools hold the same KV."""

    def __init__(self, folder, *, local: int = 1, memory: int = 1, planes: tuple[str, ...] = ("zmq",), local_records: int = 256, memory_records: int = 256,
                 limits: TierLimits = LIMITS):
        self.folder, self.planes, self.readers = folder, planes, []
        self.memory = [NodeTier(self.path(), planes=planes, records=memory_records, limits=limits) for _ in range(memory)]
        nodes = ",".join(tier.control for tier in self.memory)
        self.local = [NodeTier(self.path(), memory_nodes=nodes, planes=planes, records=local_records, limits=limits) for _ in range(local)]
        self.prefill = [Prefill(tier.path, pages=128) for tier in self.local]

    def path(self) -> str:
        return str(self.folder / f"{uuid.uuid4().hex[:8]}.sock")

    def reader(self, control: str) -> Reader:
        self.readers.append(Reader(control, self.planes[0]))
        return self.readers[-1]

    def memory_at(self, control: str) -> NodeTier:
        return next(tier for tier in self.memory if tier.control == control)

    def settle(self, *skip) -> None:
        """Waits until every tier but ``skip`` is back at its start. Rooms that nobody has claimed by now expire."""
        for prefill in self.prefill:
            until(lambda: not prefill.publisher.live and not prefill.publisher._waiting, "publications ended")
        for tier in (*self.local, *self.memory):
            if tier not in skip:
                try:
                    until(lambda: tier.expire() or tier.at_baseline())
                except AssertionError:
                    raise AssertionError(f"not at baseline: {tier.inventory()}") from None

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        for prefill in self.prefill:
            prefill.close()
        for tier in (*self.local, *self.memory):
            tier.stop()


def prompt(tokens: int, salt: int = 0, at: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, pages of the pool, in reverse order)."""
    return np.arange(tokens, dtype=np.int64) + salt * 1_000_003, np.arange(at, at - (-tokens // 4))[::-1].copy()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "T", "stopped")


def warm(fleet: Fleet, memory: NodeTier) -> int:
    """Has one prompt moved, so that the mover runs; its pid."""
    ids, pages = prompt(5, salt=77)
    assert fleet.prefill[0].publish(999_983, ids, pages).state == COMMITTED
    reader = fleet.reader(memory.control)
    reader.release(reader.wait(999_983))
    return until(lambda: memory.mover_pid, "the mover runs")


def lives(fleet: Fleet, which: int = 0) -> None:
    """A further prompt of this prefill node goes all the way."""
    ids, pages = prompt(9, salt=int(time.monotonic() * 1e6) % 99_991)
    room = int(time.monotonic() * 1e6)
    pub = fleet.prefill[which].publish(room, ids, pages)
    assert pub.state == COMMITTED, pub.error
    moved = fleet.reader(fleet.local[which].control).wait(room)
    reader = fleet.reader(moved.control)
    manifest = reader.wait(room)
    assert np.array_equal(reader.read(manifest), in_pool(fleet.prefill[which], pages, 9))
    reader.release(manifest)
