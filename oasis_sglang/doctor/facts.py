"""All that the doctor looks at, gathered once: the checks look at nothing but this."""

from __future__ import annotations

import ctypes
import json
import os
import platform as python_platform
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from oasis_sglang.cpu import platform
from oasis_sglang.doctor import host_facts, transfer
from oasis_sglang.doctor.asked import Asked
from oasis_sglang.doctor.children import Child
from oasis_sglang.doctor.host_facts import HugePages, Interface, MemoryGroup, RdmaDevice, Shm
from oasis_sglang.doctor.probe import NixlFound, SglangFound
from oasis_sglang.doctor.transfer import Transferred
from oasis_sglang.models_supported import check_model
from transport.errors import ConfigError
from transport.security import Security

PROBE_SECONDS = 120.0
"""For SGLang to be loaded, from a cold disk."""
VARIABLES = ("CUDA_VISIBLE_DEVICES", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE", "UCX_NET_DEVICES", "UCX_TLS")
OURS, DEPENDS_ON = "oasis-sglang", ("sglang", "nixl")


@dataclass(frozen=True)
class Requirement:
    """``wanted`` by package ``by``: a version of ``name``; ``installed`` None: there is none; ``fits``: whether that is one."""

    by: str
    name: str
    wanted: str
    installed: str | None
    fits: bool


@dataclass(frozen=True)
class Accelerator:
    """``nodes``: whether there are NVIDIA device files; ``others``: of another make; ``library``: whether libcuda can be loaded;
    ``driver``: version of the kernel driver; ``cuda``: the newest CUDA that it runs, (0, 0) = unknown."""

    nodes: bool = False
    others: bool = False
    library: bool = False
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Facts:
    """Sizes in bytes. ``cpu``: whether workers would run without a GPU. ``sglang``, ``nixl``: None where nobody here needs them;
    ``transfers``: by data plane. ``groups``: control groups that limit memory; ``memlock`` None: no limit. ``busy``: why a port cannot be
    had, of those that cannot. ``tier_there``, ``tier_cannot``: as ``host_facts.serves`` and ``cannot_listen``. ``keys``, ``model``: what is
    wrong with them, "" = nothing; ``allowed``: nodes on the list. ``drift``: seconds that the wall clock went further than time did."""

    python: str
    requirements: tuple[Requirement, ...]
    ours: str | None
    variables: Mapping[str, str] = field(default_factory=dict)
    cpu: bool = True
    accelerator: Accelerator = field(default_factory=Accelerator)
    sglang: SglangFound | None = None
    nixl: NixlFound | None = None
    transfers: Mapping[str, Transferred] = field(default_factory=dict)
    available: int = 0
    total: int = 0
    groups: tuple[MemoryGroup, ...] = ()
    memlock: int | None = None
    may_lock: bool = False
    shm: Shm = field(default_factory=Shm)
    huge: HugePages = field(default_factory=lambda: HugePages(0, "unknown"))
    files: tuple[int, int] = (0, 0)
    interfaces: tuple[Interface, ...] = ()
    route: str = ""
    rdma: tuple[RdmaDevice, ...] = ()
    busy: Mapping[int, str] = field(default_factory=dict)
    tier_there: str = ""
    tier_cannot: str = ""
    keys: str = ""
    allowed: int = 0
    model: str = ""
    year: int = 0
    drift: float = 0.0


def gather(asked: Asked) -> Facts:
    """Looks at everything. Children run meanwhile and have ended when this returns, or is interrupted."""
    started = time.monotonic(), time.time()
    children: dict[str, Child] = {}
    try:
        if asked.workers:
            children["sglang"] = Child("oasis_sglang.doctor.probe", "sglang")
        if "nixl" in asked.planes:
            children["nixl"] = Child("oasis_sglang.doctor.probe", "nixl")
        transfers, until = {}, started[0] + transfer.SECONDS
        for plane in asked.planes if asked.transfer else ():  # one by one: they are timed
            child = children[f"transfer {plane}"] = Child("oasis_sglang.doctor.transfer", plane)
            transfers[plane] = child.result(Transferred, until - time.monotonic())
        numbers = host_facts.meminfo()
        keys, allowed = _keys(asked)
        found = dict(
            python=python_platform.python_version(), requirements=requirements(), ours=version(OURS),
            variables={name: os.environ[name] for name in VARIABLES if name in os.environ}, cpu=platform.wanted(), accelerator=accelerator(),
            available=numbers.get("MemAvailable", 0), total=numbers.get("MemTotal", 0), groups=host_facts.memory_groups(),
            memlock=host_facts.memlock(), may_lock=host_facts.may_lock(), shm=host_facts.shm(), huge=host_facts.huge_pages(),
            files=resource.getrlimit(resource.RLIMIT_NOFILE), interfaces=host_facts.interfaces(), route=host_facts.default_route(),
            rdma=host_facts.rdma_devices(), busy=host_facts.busy_ports(asked.ports), tier_there=host_facts.serves(asked.local),
            tier_cannot=host_facts.cannot_listen(asked.local), keys=keys, allowed=allowed, model=model_problem(asked.model) if asked.model else "")
        nixl = children["nixl"].result(NixlFound, transfer.SECONDS) if "nixl" in asked.planes else None
        sglang = children["sglang"].result(SglangFound, PROBE_SECONDS) if asked.workers else None
        drift = (time.time() - started[1]) - (time.monotonic() - started[0])
        return Facts(**found, sglang=sglang, nixl=nixl, transfers=transfers, year=time.gmtime().tm_year, drift=drift)
    finally:
        for child in children.values():
            child.end()


def version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def requirements() -> tuple[Requirement, ...]:
    """Of our package, and of those that it pins, as they were installed. None at all without ``packaging``, which an image for tiers may lack."""
    try:
        from packaging.requirements import Requirement as Parsed
    except ImportError:
        return ()
    found = []
    for by in (OURS, *DEPENDS_ON):
        for line in (metadata.requires(by) if version(by) else None) or ():
            parsed = Parsed(line)
            if parsed.marker is None or parsed.marker.evaluate({"extra": ""}):
                have = version(parsed.name)
                found.append(Requirement(by, parsed.name, str(parsed.specifier), have, have is not None and parsed.specifier.contains(have, prereleases=True)))
    return tuple(found)


def accelerator() -> Accelerator:
    """Asks the driver for its version alone: that does not start it."""
    if not platform.loads("libcuda.so.1"):
        return Accelerator(platform.exists(platform.NVIDIA_NODES), platform.exists(platform.OTHER_NODES), driver=host_facts.driver())
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return Accelerator(platform.exists(platform.NVIDIA_NODES), platform.exists(platform.OTHER_NODES), True, host_facts.driver(),
                       (number.value // 1000, number.value % 1000 // 10))


def model_problem(folder: str) -> str:
    """Why a model is refused; "": it is not."""
    path = Path(folder) / "config.json"
    try:
        read = json.loads(path.read_text())
        if not isinstance(read, dict):
            return f"{path} is not a JSON object"
        check_model(read)
    except OSError as error:
        return f"{path}: {error.strerror}"
    except ValueError as error:
        return f"{path} is not JSON: {error}"
    except ConfigError as error:
        return error.message
    return ""


def _keys(asked: Asked) -> tuple[str, int]:
    """What is wrong with the key files, and how many nodes they allow."""
    try:
        security = Security.load(asked.keys, asked.allowed, False)
    except ConfigError as error:
        return error.message, 0
    return "", 0 if security.allowed is None else len(list(Path(asked.allowed).glob("*.key")))
