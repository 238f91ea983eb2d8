"""An owner process for the conformance suite and the benchmark.

    python owner.py KIND NAME SEED SIZE [PORT]

Serves SIZE bytes of ``pattern(SEED)`` and prints the endpoint (msgpack, hex) as its first line. Then it obeys lines on
stdin, one answer line each: ``fill SEED`` rewrites the arena, ``counts`` prints what the server counted, ``quit`` ends.
"""

from __future__ import annotations

import mmap
import sys

import msgspec
import numpy as np

from transport.planes import make_server


def pattern(seed: int, size: int) -> np.ndarray:
    """uint8 [size] that a wrong offset or another seed does not reproduce."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size), dtype=np.uint8)


def main(kind: str, name: str, seed: str, size: str, port: str = "0") -> None:
    arena = np.frombuffer(mmap.mmap(-1, int(size)), dtype=np.uint8)
    arena[:] = pattern(int(seed), arena.size)
    server = make_server(kind, name, arena, port=int(port))
    # NIXL may print to stdout as well, hence the prefix.
    print("ENDPOINT", msgspec.msgpack.encode(server.endpoint).hex(), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "fill":
            arena[:] = pattern(int(arguments[0]), arena.size)
            print("ok", flush=True)
        elif command == "counts":
            print(*(getattr(server, count, 0) for count in ("malformed", "refused", "dropped")), flush=True)
        elif command == "quit":
            break
    server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
