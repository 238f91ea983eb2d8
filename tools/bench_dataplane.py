"""Times reads through the data planes between two processes of this host, and checks the bytes before it times them.

    python tools/bench_dataplane.py [--planes nixl,nixl-tcp,zmq] [--sizes 4K,64K,1M] [--counts 1,64,512] [--repeats 15]

Each read is ``count`` ranges of ``size`` bytes, scattered: gaps on both sides, so that nothing can be merged. The time
is from ``read`` to the first ``poll`` that says True, with a yield of the core between polls. ``nixl`` is whatever UCX
picks (CMA on one host), ``nixl-tcp`` sets UCX_TLS=tcp. One owner and one reader process per plane; the repeats of all
shapes are interleaved, so that a busy spell of the machine does not fall on one cell.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time

import msgspec
import numpy as np

from transport.dataplane import Endpoint, ReadBatch
from transport.planes import incarnation, make_plane, make_server

UNITS = {"K": 1 << 10, "M": 1 << 20}
WARM_UPS = 2
MAX_BYTES = 64 << 20
"""Shapes above it are left out: they would measure the memory of the machine."""


def to_bytes(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def content(size: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(1).bytes(size), dtype=np.uint8)


def scattered(size: int, count: int) -> ReadBatch:
    at = np.arange(count, dtype=np.uint64) * np.uint64(size + 64)
    return ReadBatch(at[::-1].copy(), at, np.full(count, size, dtype=np.uint64))


def span(shapes: list[tuple[int, int]]) -> int:
    return max((size + 64) * count for size, count in shapes)


def serve(kind: str, size: int) -> None:
    arena = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    arena[:] = content(size)
    server = make_server(kind, incarnation("bench-owner"), arena)
    print("ENDPOINT", msgspec.msgpack.encode(server.endpoint).hex(), flush=True)
    sys.stdin.read()
    server.close()


def measure(kind: str, shapes: list[tuple[int, int]], repeats: int) -> None:
    """Prints one JSON object: seconds per shape, ``"SIZExCOUNT": [seconds, ...]``."""
    total = span(shapes)
    command = [sys.executable, __file__, "--serve", kind, str(total)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        line = next(line for line in owner.stdout if line.startswith("ENDPOINT "))
        endpoint = msgspec.msgpack.decode(bytes.fromhex(line.split()[1]), type=Endpoint)
        region, expected = np.zeros(total, dtype=np.uint8), content(total)
        plane = make_plane(kind, incarnation("bench-reader"), region)
        plane.connect(endpoint)
        times: dict[str, list[float]] = {f"{size}x{count}": [] for size, count in shapes}
        for turn in range(-WARM_UPS, repeats):
            for size, count in shapes:
                reads = scattered(size, count)
                started = time.perf_counter()
                transfer = plane.read(endpoint.name, reads)
                while not transfer.poll():
                    os.sched_yield()
                took = time.perf_counter() - started
                transfer.release()
                if turn >= 0:
                    times[f"{size}x{count}"].append(took)
                    continue
                for remote, local in zip(reads.remote.tolist(), reads.local.tolist(), strict=True):
                    assert np.array_equal(region[local : local + size], expected[remote : remote + size])
        plane.close()
        owner.stdin.close()
    print("TIMES", json.dumps(times), flush=True)


def compare(planes: list[str], shapes: list[tuple[int, int]], repeats: int) -> None:
    arguments = [json.dumps(shapes), str(repeats)]
    results = {}
    for plane in planes:
        environment = {key: value for key, value in os.environ.items() if key != "UCX_TLS"}
        if plane == "nixl-tcp":
            environment["UCX_TLS"] = "tcp"
        command = [sys.executable, __file__, "--measure", plane.partition("-")[0], *arguments]
        output = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        results[plane] = json.loads(
            next(line for line in output.splitlines() if line.startswith("TIMES "))[6:]
        )
    print(
        f"microseconds per read: median (min), n = {repeats}, {os.cpu_count()} cores; MB/s of the median in brackets"
    )
    print(f"{'size x count':>16}", *(f"{plane:>34}" for plane in planes))
    for size, count in shapes:
        cells = []
        for plane in planes:
            times = results[plane][f"{size}x{count}"]
            median = statistics.median(times)
            cells.append(f"{median * 1e6:.0f} ({min(times) * 1e6:.0f}) [{size * count / median / 1e6:.0f}]")
        print(f"{size:>9} x {count:<4}", *(f"{cell:>34}" for cell in cells))


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--serve":
        return serve(sys.argv[2], int(sys.argv[3]))
    if len(sys.argv) > 1 and sys.argv[1] == "--measure":
        return measure(sys.argv[2], [tuple(shape) for shape in json.loads(sys.argv[3])], int(sys.argv[4]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--planes", default="nixl,nixl-tcp,zmq")
    parser.add_argument("--sizes", default="4K,16K,64K,1M")
    parser.add_argument("--counts", default="1,64,512")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    sizes, counts = options.sizes.split(","), options.counts.split(",")
    shapes = [(to_bytes(size), int(count)) for size in sizes for count in counts]
    compare(options.planes.split(","), [s for s in shapes if s[0] * s[1] <= MAX_BYTES], options.repeats)


if __name__ == "__main__":
    main()
