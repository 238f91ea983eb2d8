"""The host as a process of ours finds it: limits, memory, devices, sockets. Paths can be given, so that other hosts can be shown to it."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/")
IPC_LOCK = 14
"""Bit of CAP_IPC_LOCK among the capabilities of a process (linux/capability.h)."""
UNLIMITED = 1 << 60
"""The older interface writes "no limit" as the largest multiple of a page."""
SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket (``sun_path`` and its end)."""


@dataclass(frozen=True)
class MemoryGroup:
    """A control group that this process is in, or one above it: ``limit`` bytes of which ``used`` are taken, ``cache`` of these by files that
    can be dropped."""

    path: str
    limit: int
    used: int
    cache: int

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used + self.cache)


@dataclass(frozen=True)
class Interface:
    """A network interface that is up. ``bridge``: it joins others, as docker0 does, and leads nowhere by itself."""

    name: str
    addresses: tuple[str, ...]
    loopback: bool
    bridge: bool


@dataclass(frozen=True)
class RdmaDevice:
    """``active``: ports that are. ``usable``: its verbs device can be opened by this process."""

    name: str
    active: tuple[int, ...]
    usable: bool


@dataclass(frozen=True)
class Shm:
    """/dev/shm: ``free`` of ``size`` bytes; ``error``: why nothing can be written there."""

    size: int = 0
    free: int = 0
    error: str = ""


@dataclass(frozen=True)
class HugePages:
    """``reserved`` bytes of pages that nobody has taken; ``shmem``: whether the kernel makes large pages of shared memory by itself."""

    reserved: int
    shmem: str


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """Of /proc/meminfo, bytes where it has kB."""
    rows = re.findall(r"^(\S+):\s+(\d+)( kB)?$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    return {name: int(number) << (10 if kilo else 0) for name, number, kilo in rows}


def memory_groups(root: Path = ROOT) -> tuple[MemoryGroup, ...]:
    """Those that limit memory, the process' own first. In a container the own one is the root of what is mounted."""
    found = []
    for base, own, files in _hierarchies(root):
        inside = base / own.lstrip("/")
        for folder in (inside, *inside.parents) if inside.is_dir() else (base,):
            if folder != base and base not in folder.parents:
                break
            if group := _group(folder, base, *files):
                found.append(group)
    return tuple(found)


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = ("memory.max", "memory.current", "")


def _hierarchies(root: Path) -> Iterator[tuple[Path, str, tuple[str, str, str]]]:
    mounted = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, own = line.split(":", 2)
            if "memory" in controllers.split(","):
                yield mounted / "memory", own, _V1
            elif number == "0" and not controllers:
                yield (mounted if (mounted / "cgroup.controllers").exists() else mounted / "unified"), own, _V2


def _group(folder: Path, base: Path, limit: str, used: str, whole: str) -> MemoryGroup | None:
    """None: it limits nothing."""
    with suppress(OSError, ValueError):  # no such file, or "max"
        most, stat = int((folder / limit).read_text()), (folder / "memory.stat").read_text()
        cache = re.findall(rf"^{whole}(?:in)?active_file (\d+)", stat, re.MULTILINE)
        if most < UNLIMITED:
            return MemoryGroup(f"/{folder.relative_to(base)}".replace("/.", "/"), most, int((folder / used).read_text()), sum(map(int, cache)))
    return None


def memlock() -> int | None:
    """Bytes that this process may lock; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def may_lock(root: Path = ROOT) -> bool:
    """Whether the limit does not count for this process. What a pod's capabilities say is given to root alone."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", (root / "proc/self/status").read_text(), re.MULTILINE)
    return bool(found and int(found[1], 16) >> IPC_LOCK & 1)


def shm(root: Path = ROOT) -> Shm:
    path = root / "dev/shm"
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return Shm(error=error.strerror)
    error = "" if os.access(path, os.W_OK | os.X_OK) else "not writable"
    return Shm(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize, error)


def huge_pages(root: Path = ROOT) -> HugePages:
    numbers = meminfo(root)
    chosen = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    return HugePages(numbers.get("HugePages_Free", 0) * numbers.get("Hugepagesize", 0), chosen[1] if chosen else "unknown")


def interfaces(root: Path = ROOT) -> tuple[Interface, ...]:
    """Those that are up and have an address."""
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    found = []
    for name in addresses:
        own = tuple(a.address for a in addresses[name] if a.family in (socket.AF_INET, socket.AF_INET6) and not a.address.startswith("fe80:"))
        if own and name in states and states[name].isup:
            found.append(Interface(name, own, name == "lo", (root / "sys/class/net" / name / "bridge").exists()))
    return tuple(found)


def default_route(root: Path = ROOT) -> str:
    """Interface of the default route, the one of the lowest metric; "": there is none."""
    rows = [line.split() for line in _text(root / "proc/net/route").splitlines()[1:]]
    return min(((int(row[6]), row[0]) for row in rows if row[1] == row[7] == "00000000"), default=(0, ""))[1]


def rdma_devices(root: Path = ROOT) -> tuple[RdmaDevice, ...]:
    """/sys shows them in every container; their files in /dev are in those that were given them."""
    usable = set()
    for verbs in _entries(root / "sys/class/infiniband_verbs"):
        if (device := _text(verbs / "ibdev").strip()) and os.access(root / "dev/infiniband" / verbs.name, os.R_OK | os.W_OK):
            usable.add(device)
    return tuple(RdmaDevice(device.name, tuple(_active(device)), device.name in usable) for device in _entries(root / "sys/class/infiniband"))


def _active(device: Path) -> Iterator[int]:
    for port in _entries(device / "ports"):
        if "ACTIVE" in _text(port / "state"):
            yield int(port.name)


def busy_ports(ports: Iterable[int]) -> dict[int, str]:
    """Why a server could not listen there, of those where it could not."""
    busy = {}
    for port in ports:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("0.0.0.0", port))
            except OSError as error:
                busy[port] = error.strerror
    return busy


def serves(path: str) -> str:
    """Of a tier's socket: "yes", "" when there is none, or what happens to those who connect."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        try:
            code = caller.connect_ex(path)
        except OSError as error:  # the path is too long
            return str(error)
    if code in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        return ""
    return os.strerror(code) if code else "yes"


def cannot_listen(path: str) -> str:
    """Why a tier could not make its socket at ``path``; "": it could. Where the folder is still to be made, whether it could be."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        return f"the path has {len(os.fsencode(path))} bytes, a socket's may have {SOCKET_PATH_BYTES}"
    folder = Path(os.path.dirname(path) or ".")
    if not os.path.exists(folder):
        there = next(parent for parent in folder.absolute().parents if os.path.exists(parent))
        return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable, and {folder} is not there"
    trial = str(folder / f".{os.getpid()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(trial)
            os.unlink(trial)
        except OSError as error:
            return f"{folder}: {error.strerror}"
    return ""


def driver(root: Path = ROOT) -> str:
    """Version of the NVIDIA kernel driver; "": it is not loaded."""
    found = re.search(r"NVRM version:.*?\s(\d+\.\d+[.\d]*)\s", _text(root / "proc/driver/nvidia/version"))
    return found[1] if found else ""


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.iterdir())
    return []


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""
