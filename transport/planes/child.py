"""The process that serves an arena for ``host.HostedServer``; nobody else starts it.

    python -P -m transport.planes.child KIND NAME ARENA_FD SIZE REPORT_FD

It maps the arena and holds nothing else that is worth reading: over TCP a NIXL peer can read and write all memory of
the process that serves it. It writes its ``Endpoint`` (or, as text, why there is none) to ``REPORT_FD`` and lives until
its standard input ends, which is when the process that started it is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import sys

import msgspec
import numpy as np

from transport.errors import OasisError
from transport.planes import make_server

_PR_SET_PDEATHSIG = 1


def confine() -> None:
    """Ties this process to its parent's life, and keeps the arena out of core files."""
    # Standard input says so as well, but only to a thread that runs: a stopped process must go with its parent too.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group; the parent decides
    # UCX ends by SIGABRT on some errors of a peer.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(kind: str, name: str, arena_fd: str, size: str, report_fd: str) -> None:
    confine()
    arena = np.frombuffer(mmap.mmap(int(arena_fd), int(size)), dtype=np.uint8)
    os.close(int(arena_fd))
    server = None
    try:
        server = make_server(kind, name, arena)
        report = server.endpoint
    except OasisError as error:
        report = str(error)
    with open(int(report_fd), "wb") as pipe:
        pipe.write(msgspec.msgpack.encode(report))
    while server is not None and os.read(0, 4096):
        pass
    os._exit(server is None)  # closing an agent in good order could wait for peers


if __name__ == "__main__":
    main(*sys.argv[1:])
