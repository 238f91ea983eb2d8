"""The self-test: records as prefill writes them, served by a child as a tier serves them, and read and checked as decode does.

    python -P -m oasis_sglang.doctor.transfer KIND

It shows that memory can be registered, that the two processes find each other by what the control plane would carry, and that the
bytes that arrive are those that were written. Both ends are on this host, so it says nothing of the network between hosts.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import NamedTuple

import msgspec
import numpy as np

from oasis_sglang.doctor import children
from transport.arena import Arena
from transport.dataplane import DataPlane, Endpoint, ReadBatch
from transport.errors import DeadlineExceeded, OasisError
from transport.integrity import index_rows, piece_digests, roots, verify_index, verify_records
from transport.layout import ArenaGeometry, KVLayout
from transport.planes import incarnation, make_plane
from transport.planes.host import HostedServer

SECONDS = 30.0
"""For all of it."""
READ_SECONDS = 20.0
RECORDS = 32
LAYOUT = KVLayout(num_layers=8, kv_heads=4, head_dim=64, block_tokens=16, dtype="bfloat16", itemsize=2, tp_size=1, summary="mean_var_int8",
                  summary_bytes=68, metadata_lens=())
ARENA_BYTES = 8 << 20


class Transferred(msgspec.Struct, frozen=True):
    """``nbytes`` that arrived and were checked, of ``records``, in ``seconds`` of reading. ``error``: why not."""

    records: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    error: str = ""


class Written(NamedTuple):
    """What a manifest says of the records of an arena: ``records`` [n], their ``generations`` and ``roots`` uint64 [n]."""

    geometry: ArenaGeometry
    records: np.ndarray
    generations: np.ndarray
    roots: np.ndarray


def write(arena: np.ndarray, seed: int) -> Written:
    """Fills ``arena`` uint8 [size] with ``RECORDS`` records of random bytes, in an order of their own."""
    rng = np.random.default_rng(seed)
    geometry = ArenaGeometry.fit(LAYOUT, arena.nbytes)
    records = rng.permutation(geometry.num_records)[:RECORDS]
    generations = rng.integers(1, 1 << 40, RECORDS, np.uint64)
    payloads = rng.integers(0, 256, (RECORDS, LAYOUT.payload_bytes), np.uint8)
    summaries = rng.integers(0, 256, (RECORDS, LAYOUT.summary_total), np.uint8)
    digests = piece_digests(payloads, LAYOUT.pieces)
    at_payload, at_index = geometry.rows(arena)
    at_payload[records, : LAYOUT.payload_bytes] = payloads
    at_index[records, : LAYOUT.index_bytes] = index_rows(digests, summaries, generations, LAYOUT)
    return Written(geometry, records, generations, roots(digests))


def read(plane: DataPlane, region: np.ndarray, endpoint: Endpoint, written: Written, seconds: float = READ_SECONDS) -> int:
    """Reads and checks all of ``written`` into ``region`` uint8; bytes. Raises ``DeadlineExceeded``, ``IntegrityError``, or as ``DataPlane``."""
    n, geometry = len(written.records), written.geometry
    sizes = (LAYOUT.payload_bytes, LAYOUT.index_bytes)
    lengths = np.repeat(np.array(sizes, np.uint64), n)
    local = np.cumsum(lengths, dtype=np.uint64) - lengths
    remote = np.concatenate([geometry.payload_offsets(written.records), geometry.index_offsets(written.records)])
    plane.connect(endpoint)
    transfer, end = plane.read(endpoint.name, ReadBatch(remote, local, lengths)), time.monotonic() + seconds
    while not transfer.poll():
        if time.monotonic() > end:
            raise DeadlineExceeded("the read did not end", peer=endpoint.name, limit=f"{seconds:g} s")
        time.sleep(0.0005)
    payloads, index = region[: n * sizes[0]].reshape(n, -1), region[n * sizes[0] : n * sum(sizes)].reshape(n, -1)
    verify_records(payloads, written.roots, written.records, LAYOUT, peer=endpoint.name, room=0)
    verify_index(index, written.generations, written.roots, written.records, LAYOUT, peer=endpoint.name, room=0)
    transfer.release()
    return transfer.nbytes


def run(kind: str) -> Transferred:
    """One round over data plane ``kind``. Raises ``OasisError``."""
    with ExitStack() as undo:
        arena = Arena.create(ARENA_BYTES, "oasis-doctor")
        undo.callback(arena.close)
        written = write(arena.bytes, time.time_ns())
        server = HostedServer(kind, "doctor", arena.fd, arena.size)
        undo.callback(server.close)
        region = np.zeros(RECORDS * (LAYOUT.payload_bytes + LAYOUT.index_bytes), np.uint8)
        plane = make_plane(kind, incarnation("doctor-reader"), region)
        undo.callback(plane.close)
        began = time.monotonic()
        nbytes = read(plane, region, server.endpoint, written)
        return Transferred(RECORDS, nbytes, time.monotonic() - began)


def main(kind: str) -> None:
    pipe = children.quiet()
    try:
        found = run(kind)
    except OasisError as error:
        found = Transferred(error=str(error))
    children.speak(found, pipe)


if __name__ == "__main__":
    main(*sys.argv[1:])
