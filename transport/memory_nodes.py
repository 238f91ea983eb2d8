"""Which memory node a room goes to: rendezvous hashing over a list of addresses, or over what a DNS name resolves to."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable

from transport.errors import ConfigError
from transport.security import split_key

log = logging.getLogger("oasis.nodes")

PLACEMENT_TOKENS = 256
"""The page that ends here decides: the turns of a conversation have it in common, different conversations mostly not."""
REFRESH_SECONDS = 30.0
PROBE_SECONDS = 3.0
"""A node that did not answer is asked this often whether it does now, and passed over until then."""


def placement_key(hashes: list[bytes], room: int, block_tokens: int) -> bytes:
    """Of a prompt with these page ``hashes`` (32 bytes each): the hash that covers its first ``PLACEMENT_TOKENS`` tokens, or all
    whole pages of a shorter one; without hashes its room."""
    if not hashes:
        return room.to_bytes(16, "little", signed=True)
    return hashes[min(len(hashes), max(1, PLACEMENT_TOKENS // block_tokens)) - 1]


async def resolve(host: str, port: int) -> tuple[str, ...]:
    """All addresses of a name, as ZeroMQ takes them. Raises ``OSError``."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(sorted({f"tcp://[{a[0]}]:{a[1]}" if family == socket.AF_INET6 else f"tcp://{a[0]}:{a[1]}" for family, _, _, _, a in found}))


class MemoryNodes:
    """``spec``: "tcp://host:port,..." or "dns://name:port", each with its ``#KEY`` where nodes have keys: those behind one name share
    theirs. ``addresses`` are those known now: of a name, what ``refresh`` last found. A name that cannot be resolved keeps what was
    known. Raises ``ConfigError`` when the spec is neither, ``ProtocolError`` for a malformed key."""

    def __init__(self, spec: str, *, clock: Callable[[], float] = time.monotonic,
                 resolve: Callable[[str, int], Awaitable[tuple[str, ...]]] = resolve):
        self.spec, self.clock, self._resolve = spec, clock, resolve
        self._down: dict[str, float] = {}
        self.name: tuple[str, int] | None = None
        parts = [part.strip() for part in spec.split(",") if part.strip()]
        if len(parts) == 1 and parts[0].startswith("dns://"):
            plain, key = split_key(parts[0][6:])
            self.name, self._mark = _host_port(plain, spec), f"#{key}" if key else ""
            self.addresses: tuple[str, ...] = ()
            return
        if not parts or not all(part.startswith("tcp://") for part in parts) or len(set(parts)) < len(parts):
            raise ConfigError(f"--memory-nodes must be tcp://host:port, comma separated and each once, or one dns://name:port, not {spec!r}")
        for part in parts:
            _host_port(split_key(part[6:])[0], spec)
        self.addresses = tuple(parts)

    @property
    def named(self) -> tuple[str, ...]:
        """The addresses as the spec has them."""
        return self.addresses if self.name is None else (f"tcp://{self.spec.strip()[6:]}",)

    def order(self, key: bytes) -> list[str]:
        """The nodes that are not marked down, best first. A node that comes or goes moves only the keys that it is best for."""
        up = [address for address in self.addresses if address not in self._down]
        return sorted(up, key=lambda address: hashlib.sha256(key + address.encode()).digest(), reverse=True)

    def mark_down(self, address: str) -> None:
        self._down[address] = self.clock() + PROBE_SECONDS

    def mark_up(self, address: str) -> None:
        self._down.pop(address, None)

    def is_down(self, address: str) -> bool:
        return address in self._down

    def due(self) -> list[str]:
        """Those that are to be asked again now; called again, not before the next time."""
        now = self.clock()
        found = [address for address, at in self._down.items() if now >= at]
        self._down.update(dict.fromkeys(found, now + PROBE_SECONDS))
        return found

    async def refresh(self) -> None:
        """Resolves the name again; nothing for a list."""
        if self.name is None:
            return
        try:
            found = tuple(address + self._mark for address in await self._resolve(*self.name))
        except OSError as error:
            log.warning("%s cannot be resolved, %d known memory nodes are kept: %s", self.spec, len(self.addresses), error)
            return
        if found and found != self.addresses:
            log.info("memory nodes of %s: %s", self.spec, ", ".join(found))
            self.addresses = found
            self._down = {address: at for address, at in self._down.items() if address in found}

    async def watch(self) -> None:
        """Refreshes for ever."""
        while self.name is not None:
            await asyncio.sleep(REFRESH_SECONDS)
            await self.refresh()


def _host_port(text: str, spec: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"--memory-nodes needs host:port, not {text!r}", limit=spec)
    return host.strip("[]"), int(port)
