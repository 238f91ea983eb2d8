"""The process that moves records for ``mover.Mover``; nobody else starts it.

    python -P -m transport.mover_child NODE ARENA_FD SIZE SOCKET_FD WINDOW_BYTES KEYS ALLOWED plaintext

Like a data plane's process it maps the arena and holds nothing else that is worth reading, since a peer on TCP may reach the
memory of whoever owns a NIXL agent, reading ones included. Orders come and ends go over the socket, framed as on the tier's own;
it lives until that is closed.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import socket
import sys
import time

import msgspec
import numpy as np

from transport.errors import CapacityError
from transport.messages import LENGTH, MAX_MESSAGE
from transport.moving import WINDOWS, Ended, Moves, Order
from transport.planes import incarnation, make_plane
from transport.planes.child import confine
from transport.security import Security
from transport.staging import Staging

POLL_SECONDS = 0.0005
"""Between two looks at reads in flight."""
IDLE_POLL_SECONDS = 60.0


def main(node: str, arena_fd: str, size: str, socket_fd: str, window: str, keys: str, allowed: str, plaintext: str) -> None:
    confine()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    arena = np.frombuffer(mmap.mmap(int(arena_fd), int(size)), dtype=np.uint8)
    os.close(int(arena_fd))
    link = socket.socket(fileno=int(socket_fd))
    staging = Staging(int(window), WINDOWS)

    def send(ended: Ended) -> None:
        raw = msgspec.msgpack.encode(ended)
        link.sendall(LENGTH.pack(len(raw)) + raw)

    security = Security.load(keys, allowed, bool(plaintext))
    moves = Moves(arena, staging, lambda kind: make_plane(kind, incarnation(f"{node}/mover"), staging.region, security=security), send)
    orders, buffer = msgspec.msgpack.Decoder(Order), bytearray()
    poll = select.poll()  # the tier's descriptors keep their numbers here, and those may be too large for select()
    poll.register(link, select.POLLIN)
    while True:
        if poll.poll(0 if moves.busy else IDLE_POLL_SECONDS * 1000):
            part = link.recv(1 << 20)
            if not part:
                os._exit(0)  # closing an agent in good order could wait for peers
            buffer += part
            for raw in frames(buffer):
                moves.take(orders.decode(raw), time.monotonic())
        elif moves.busy:
            time.sleep(POLL_SECONDS)  # the shortest wait that poll() knows is twice as long
        try:
            moves.step(time.monotonic())
        except CapacityError as error:
            # The end of this process ends every read in flight; the tier starts another and what was moved is moved again.
            logging.getLogger("oasis.mover").error("%s", error)
            os._exit(1)


def frames(buffer: bytearray) -> list[bytes]:
    """The whole frames at the front of ``buffer``, taken out of it. Raises ``ValueError`` on an impossible length."""
    found = []
    while len(buffer) >= LENGTH.size:
        (length,) = LENGTH.unpack_from(buffer)
        if not 0 < length <= MAX_MESSAGE:
            raise ValueError(f"a frame of {length} bytes")
        if len(buffer) < LENGTH.size + length:
            break
        found.append(bytes(buffer[LENGTH.size : LENGTH.size + length]))
        del buffer[: LENGTH.size + length]
    return found


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError:
        os._exit(0)  # the tier is gone
