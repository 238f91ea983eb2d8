"""What the doctor is asked: which roles are to run here, and with which sizes."""

from __future__ import annotations

from dataclasses import dataclass

from transport.errors import ConfigError

ROLES = ("prefill", "decode", "tier")
PLANES = ("nixl", "zmq")
_PLANES_OF = {"prefill": (), "decode": ("nixl",), "tier": PLANES, "all": PLANES}
"""What a role uses unless told otherwise. A prefill worker opens no data plane: it writes shared memory."""


@dataclass(frozen=True)
class Asked:
    """``roles``: those that start on this host or in this pod. Sizes in bytes; ``planes``: data planes they serve or read; ``local``: the
    tier's unix socket. Empty ``keys``, ``allowed``, ``model``: not given."""

    role: str
    arena: int
    host_cache: int
    staging: int
    local: str
    ports: tuple[int, ...] = ()
    planes: tuple[str, ...] = ()
    keys: str = ""
    allowed: str = ""
    model: str = ""
    transfer: bool = True

    @property
    def roles(self) -> tuple[str, ...]:
        return ROLES if self.role == "all" else (self.role,)

    @property
    def workers(self) -> bool:
        """Whether SGLang runs here."""
        return self.role != "tier"

    @property
    def parts(self) -> dict[str, int]:
        """Host memory that the roles take at start, by option."""
        parts = {"arena": self.arena} if "tier" in self.roles else {}
        return parts | ({"host cache": self.host_cache, "staging": self.staging} if "decode" in self.roles else {})

    @property
    def need(self) -> int:
        return sum(self.parts.values())

    @property
    def registered(self) -> int:
        """What RDMA pins of it in one process: limits are of each."""
        parts = self.parts
        return max(parts.get("arena", 0), parts.get("staging", 0)) if "nixl" in self.planes else 0


def planes_of(role: str, given: str) -> tuple[str, ...]:
    """Data planes, comma separated, or those of ``role`` when ``given`` is empty. Raises ``ConfigError``."""
    if role not in _PLANES_OF:
        raise ConfigError(f"--role {role!r} is not one of {', '.join(_PLANES_OF)}")
    planes = tuple(dict.fromkeys(plane for plane in given.replace(" ", "").split(",") if plane))
    if unknown := [plane for plane in planes if plane not in PLANES]:
        raise ConfigError(f"--data-plane {unknown[0]!r} is not one of {', '.join(PLANES)}")
    return planes or _PLANES_OF[role]

