"""An owner process for the conformance suite and the benchmark.

    python owner.py KIND NAME SEED SIZE [PORT]

Serves SIZE bytes of ``pattern(SEED)`` as the tier would (NIXL from a child process) and prints the endpoint (msgpack,
hex) and the id of the serving process as its first line. Then it obeys lines on stdin, one answer line each: ``fill
SEED`` rewrites the arena, ``counts`` prints what the server counted, ``serving`` what the first line said, as it is
now, ``quit`` ends.
"""

from __future__ import annotations

import os
import sys

import msgspec
import numpy as np

from transport.arena import Arena
from transport.planes import make_server
from transport.planes.host import HostedServer
from transport.security import Security

KEYS = "CONFORMANCE_KEYS"
"""In the environment: the folder of the keys that owners and readers have; without it they have none."""


def security() -> Security | None:
    folder = os.environ.get(KEYS)
    return Security.load(f"{folder}/node.key_secret", f"{folder}/allowed", False) if folder else None


def pattern(seed: int, size: int) -> np.ndarray:
    """uint8 [size] that a wrong offset or another seed does not reproduce."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size), dtype=np.uint8)


def main(kind: str, name: str, seed: str, size: str, port: str = "0") -> None:
    memory = Arena.create(int(size))
    arena = memory.bytes
    arena[:] = pattern(int(seed), arena.size)
    if kind == "nixl":
        server = HostedServer(kind, name.partition(":")[0], memory.fd, memory.size)
    else:
        server = make_server(kind, name, arena, port=int(port), security=security())

    def serving() -> str:
        endpoint, pid = server.endpoint, getattr(server, "pid", os.getpid())
        return f"{msgspec.msgpack.encode(endpoint).hex()} {pid}" if endpoint and pid else "none"

    # NIXL may print to stdout as well, hence the prefix.
    print("ENDPOINT", serving(), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "fill":
            arena[:] = pattern(int(arguments[0]), arena.size)
            print("ok", flush=True)
        elif command == "counts":
            print(*(getattr(server, count, 0) for count in ("malformed", "refused", "dropped")), flush=True)
        elif command == "serving":
            print(serving(), flush=True)
        elif command == "quit":
            break
    server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
