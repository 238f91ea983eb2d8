"""What checking costs beside what it checks, on one core: digests of pieces and records, indexes, donated blocks, zeroed records.

    python tools/bench_integrity.py [--layers 30] [--kv-heads 3] [--head-dim 64] [--itemsize 4] [--page 16] [--summary-bytes 72]
                                    [--records 96] [--repeat 15] [--json FILE]

"copy" is numpy's of the same bytes: one read and one write of memory, what each step of an admission costs at least. "admission" is
what the decode node does with pieces once they are in a staging window, into a KV pool on the CPU: check, host cache, slot. The network
is not in it, so the check's share of a real admission is smaller than the share that is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from decode_node.host_cache import HostCache
from decode_node.pieces import PoolPieces
from transport.integrity import block_checks, index_rows, piece_digests, roots, verify_index, verify_pieces, verify_records
from transport.layout import ArenaGeometry, KVLayout
from transport.wiping import Wiper

ABOUT = dict(peer="", room=0)


def seconds(work: Callable[[], object], repeat: int) -> float:
    """Median of ``repeat`` runs after two that are not counted."""
    times = []
    for _ in range(repeat + 2):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def measure(layout: KVLayout, n: int, repeat: int) -> dict[str, dict[str, float]]:
    """By step: seconds, bytes and items of ``n`` records."""
    rng, each = np.random.default_rng(0), layout.pieces
    payloads, target = rng.integers(0, 256, (n, layout.payload_bytes), np.uint8), np.ones((n, layout.payload_bytes), np.uint8)
    summaries = rng.integers(0, 256, (n, layout.summary_total), np.uint8)
    generations, records = np.arange(1, n + 1, dtype=np.uint64), np.arange(n)
    digests = piece_digests(payloads, each)
    root, index = roots(digests), index_rows(digests, summaries, generations, layout)
    pieces, owners = payloads.reshape(n * each, -1), np.repeat(records, each)
    cache = HostCache(each, n, layout.piece_bytes, 2 * n * layout.payload_bytes)
    dtype = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}[layout.itemsize]
    pool = PoolPieces(torch.zeros(layout.num_layers, 2, n * layout.block_tokens, layout.kv_heads, layout.head_dim, dtype=dtype), layout)
    which, numbers = np.tile(np.arange(each), n), np.repeat(records, each)
    geometry = ArenaGeometry.fit(layout, (n + 1) * (layout.payload_bytes + layout.index_bytes + 128))
    table = Wiper(np.ones(geometry.size, np.uint8), Counter()).make_table(geometry)

    def copy() -> None:
        target[:] = payloads

    def steps(check: bool) -> Callable[[], None]:
        def admit() -> None:
            if check:
                verify_pieces(pieces, digests.ravel(), owners, **ABOUT)
            cache.insert(which, numbers, pieces)
            pool.write(which, numbers, pieces)
        return admit

    def wipe() -> None:
        table.stale[:n] = True
        table.clean(n)

    payload, count = payloads.nbytes, n * each
    work = {
        "copy": (copy, payload, count), "digests (publish)": (lambda: piece_digests(payloads, each), payload, count),
        "pieces": (lambda: verify_pieces(pieces, digests.ravel(), owners, **ABOUT), payload, count),
        "records": (lambda: verify_records(payloads, root, records, layout, **ABOUT), payload, n),
        "indexes": (lambda: verify_index(index, generations, root, records, layout, **ABOUT), index.nbytes, n),
        "donated blocks": (lambda: block_checks(piece_digests(payloads, each), summaries), payload + summaries.nbytes, n),
        "zero freed": (wipe, n * (geometry.payload_stride + geometry.index_stride), n),
        "admission": (steps(True), payload, count), "admission, unchecked": (steps(False), payload, count),
    }
    return {name: dict(seconds=seconds(run, repeat), nbytes=nbytes, items=items) for name, (run, nbytes, items) in work.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 30), ("kv-heads", 3), ("head-dim", 64), ("itemsize", 4), ("page", 16), ("summary-bytes", 72), ("records", 96),
                          ("repeat", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    layout = KVLayout(num_layers=args.layers, kv_heads=args.kv_heads, head_dim=args.head_dim, block_tokens=args.page, dtype="any", itemsize=args.itemsize,
                      tp_size=1, summary="any", summary_bytes=args.summary_bytes, metadata_lens=(8,))
    found = measure(layout, args.records, args.repeat)
    print(f"{args.records} records of {layout.pieces} pieces of {layout.piece_bytes} bytes\n")
    print("| step | GB/s | microseconds each | of |")
    print("|---|---|---|---|")
    for name, row in found.items():
        unit = "record" if row["items"] == args.records else "piece"
        print(f"| {name} | {row['nbytes'] / row['seconds'] / 1e9:.2f} | {row['seconds'] / row['items'] * 1e6:.2f} | {unit} |")
    share = 1 - found["admission, unchecked"]["seconds"] / found["admission"]["seconds"]
    print(f"\nthe check is {share:.1%} of an admission without a network")
    for gbit in (1, 10, 25, 100):
        wire = found["pieces"]["nbytes"] * 8 / (gbit * 1e9)
        print(f"beside a link of {gbit} Gbit/s: {found['pieces']['seconds'] / (wire + found['admission']['seconds']):.1%}")
    if args.json is not None:
        args.json.write_text(json.dumps({"layout": {"pieces": layout.pieces, "piece_bytes": layout.piece_bytes}, "steps": found}, indent=1))


if __name__ == "__main__":
    main()
