"""What starting servers needs of the network: ports that are free, and whether somebody answers."""

from __future__ import annotations

import json
import random
import socket
import urllib.request
from pathlib import Path

from transport.errors import CapacityError

HOST = "127.0.0.1"
_PROBE_TIMEOUT_S = 5.0

_handed_out: set[int] = set()


def free_port() -> int:
    """A TCP port that nobody listens on, and that this process has not handed out before. Raises CapacityError.

    From below the range that the kernel takes ports from for everybody's outgoing connections and unnamed listeners: one
    from that range could be taken between now and the server's bind, and seconds lie between.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(min(10_000, low // 2), low), 200):
        with socket.socket() as probe_socket:
            if port not in _handed_out and probe_socket.connect_ex((HOST, port)) != 0:
                try:
                    probe_socket.bind((HOST, port))
                except OSError:
                    continue
                _handed_out.add(port)
                return port
    raise CapacityError("found no free TCP port", peer=HOST)


def can_listen(host: str, port: int) -> bool:
    """Whether a server could bind ``port`` now."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
        return True


def probe(url: str) -> bool:
    """Whether a GET answers 200."""
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_TIMEOUT_S) as reply:
            return reply.status == 200
    except (OSError, ValueError):  # refused, reset, timed out, or an HTTP error status
        return False


def get_json(url: str, timeout: float = 30.0) -> dict:
    """What a GET answers. Raises OSError (HTTP error statuses are among them) and ValueError."""
    with urllib.request.urlopen(url, timeout=timeout) as reply:
        return json.load(reply)
