"""The data planes, by kind. Nothing here imports NIXL or ZeroMQ before a plane of that kind is made.

| kind | owner's side | use |
|---|---|---|
| ``nixl`` | NIXL agent (UCX), at the tier in a child process (``host``) | default; RDMA, memory of one host, TCP |
| ``zmq`` | ROUTER thread | TCP-only clusters: the owner copies out, so no process memory is exposed |
| ``loopback`` | a registry in this process | tests; faults on demand |
"""

from __future__ import annotations

import importlib
import uuid
from typing import TYPE_CHECKING

import numpy as np

from transport.dataplane import DataPlane, DataServer
from transport.errors import ConfigError

if TYPE_CHECKING:
    from transport.security import Security

_PLANES = {
    "nixl": ("transport.planes.nixl", "NixlServer", "NixlPlane"),
    "zmq": ("transport.planes.zmq", "ZmqServer", "ZmqPlane"),
    "loopback": ("transport.planes.loopback", "LoopbackServer", "LoopbackPlane"),
}

KINDS = tuple(_PLANES)


def incarnation(node: str) -> str:
    """A name for a server or a reader that no other run of it will ever have: ``node:random``."""
    return f"{node}:{uuid.uuid4().hex}"


def make_server(
    kind: str, name: str, arena: np.ndarray, *, host: str = "127.0.0.1", port: int = 0, security: Security | None = None
) -> DataServer:
    """Serves ``arena`` (uint8 [size], C-contiguous) under ``name``, which must be fresh (see ``incarnation``).

    ``host`` and ``port`` (0: any free one) are where ``zmq`` listens, and ``security`` how; NIXL binds as UCX_NET_DEVICES says, and
    knows nothing but the metadata that the control plane carries. Raises ``ConfigError`` on an unknown kind, unusable memory, or when the plane cannot start.
    """
    module, server, _ = _find(kind)
    return getattr(module, server)(name, _memory(arena), host=host, port=port, **_protected(kind, security))


def make_plane(kind: str, name: str, region: np.ndarray, *, security: Security | None = None) -> DataPlane:
    """A reader into ``region`` (uint8 [size], C-contiguous, writable). ``security`` as in ``make_server``. Raises ``ConfigError`` as that."""
    module, _, plane = _find(kind)
    region = _memory(region)
    if not region.flags.writeable:
        raise ConfigError("the region to read into is not writable")
    return getattr(module, plane)(name, region, **_protected(kind, security))


def _protected(kind: str, security: Security | None) -> dict:
    """What only a plane with sockets of its own is told; without ``security``: plaintext on loopback."""
    return {"security": security} if kind == "zmq" and security is not None else {}


def _find(kind: str):
    if kind not in _PLANES:
        raise ConfigError(f"unknown data plane {kind!r}", limit=", ".join(KINDS))
    module, server, plane = _PLANES[kind]
    try:
        return importlib.import_module(module), server, plane
    except ImportError as error:
        raise ConfigError(f"data plane {kind!r} cannot be loaded: {error}") from error


def _memory(array: np.ndarray) -> np.ndarray:
    if array.dtype != np.uint8 or array.ndim != 1 or not array.size or not array.flags.c_contiguous:
        raise ConfigError("a data plane serves and fills one-dimensional contiguous uint8 memory")
    return array
