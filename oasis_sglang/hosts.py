"""Hosts of their own on one machine: network namespaces, whose interface counters are a meter that no server has a say in.

    with hosted(run_dir) as there:
        with Stack(spec, there.processes, run_dir=run_dir / "oasis", places=there.places) as stack:
            there.hosts.limit("200mbit")
            before = there.hosts.far.wire.heard()

Prefill and its tier live on ``near``, decode on ``far``. What they say to one another goes over the data network (``wire0`` on each host);
clients, the router and everything else that is HTTP reach them over the service network (``front0``), so that the counters of ``wire0``
hold nothing else. Needs root and iproute2. Addresses are from 198.18.0.0/15, which RFC 2544 sets aside for measurements.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from oasis_sglang.processes import Processes
from oasis_sglang.stack import Place, StackError, import_environment

CLONE_NEWNET, CLONE_NEWNS, MS_REC, MS_SLAVE = 0x40000000, 0x00020000, 0x4000, 0x80000
WIRE, FRONT = "wire0", "front0"
"""Devices of a host on the data and on the service network."""
_NETS = {WIRE: "198.19", FRONT: "198.18"}
_OWN = 254
"""Last number of this process' address on a network."""
_TICK_S = 0.004
"""A kernel timer tick at 250 Hz, the slowest usual: a bucket has to hold what one lets pass."""
_LEAST_BURST, _QUEUE = 1 << 16, "50ms"
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}

_serial = itertools.count()


class HostsError(StackError):
    """This machine gives no network namespaces, no virtual cables or no rate limit."""


def require(*programs: str) -> None:
    """Raises HostsError unless there is hope for namespaces (``programs``: what else has to be installed)."""
    if os.getuid() != 0:
        raise HostsError("network namespaces need root")
    for program in ("ip", *programs):
        if shutil.which(program) is None:
            raise HostsError(f"there is no `{program}`: install iproute2")


def ip(*words: str) -> str:
    """Output of `ip`. Raises HostsError."""
    return _command("ip", *words)


def within(namespace: str, work: Callable):
    """``work()`` on a thread that lives in the namespace; processes it starts stay there. Raises what it raises, and HostsError."""

    def run():
        libc = ctypes.CDLL(None, use_errno=True)

        def call(function, *args) -> None:
            if function(*args) != 0:
                raise HostsError(f"cannot enter the namespace {namespace}: {os.strerror(ctypes.get_errno())}")

        with open(f"/var/run/netns/{namespace}") as there:
            call(libc.setns, there.fileno(), CLONE_NEWNET)
        # UCX finds interfaces in /sys, which shows those of the namespace it was mounted in.
        call(libc.unshare, CLONE_NEWNS)
        call(libc.mount, b"none", b"/", None, MS_REC | MS_SLAVE, None)
        call(libc.mount, b"sysfs", b"/sys", b"sysfs", 0, None)
        return work()

    with ThreadPoolExecutor(1) as thread:  # which nothing else ever runs on
        return thread.submit(run).result()


def bits_per_second(rate: str) -> int:
    """Of ``200mbit`` or ``1.5gbit``. Raises HostsError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate.strip().lower())
    if found is None or float(found[1]) == 0:
        raise HostsError(f"{rate!r} is not a rate; say 200mbit or 1gbit")
    return round(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True)
class Cable:
    """Between a host and a network. ``outside``: the network's end, an interface of this process' namespace; ``device``: the host's, at
    ``address``."""

    outside: str
    device: str
    address: str

    @property
    def env(self) -> dict[str, str]:
        """For servers of the host: peers are told this address, and nothing takes a short cut through shared memory nor an interface that the
        others cannot reach."""
        return {"SGLANG_HOST_IP": self.address, "UCX_TLS": "tcp", "UCX_NET_DEVICES": self.device}

    def heard(self) -> int:
        """Bytes to the host so far, headers included. Segments that the kernel did not have to cut count one header for up to 64 KB."""
        return self._count("tx_bytes")

    def said(self) -> int:
        """Bytes from the host so far."""
        return self._count("rx_bytes")

    def limit(self, rate: str | None) -> None:
        """The host hears at most ``rate`` from now on; None: as much as there is. Raises HostsError."""
        if rate is None:
            if shutil.which("tc") is not None:  # without it there is no limit to take off
                _command("tc", "qdisc", "replace", "dev", self.outside, "root", "noqueue")
            return
        bits = bits_per_second(rate)
        burst = max(_LEAST_BURST, int(bits / 8 * _TICK_S))
        _command("tc", "qdisc", "replace", "dev", self.outside, "root", "tbf", "rate", f"{bits}bit", "burst", f"{burst}", "latency", _QUEUE)

    def cut(self) -> None:
        """From now on nobody hears of the host, not even that its connections ended."""
        ip("link", "set", self.outside, "down")

    def _count(self, which: str) -> int:
        return int(Path(f"/sys/class/net/{self.outside}/statistics/{which}").read_text())


@dataclass(frozen=True)
class Host:
    """One namespace. ``wire``: its cable to the data network; ``front``: the one that HTTP takes, the same where there is one network."""

    name: str
    namespace: str
    wire: Cable
    front: Cable


@dataclass(frozen=True)
class Hosts:
    near: Host
    far: Host

    def limit(self, rate: str | None) -> None:
        """Of the data network, each way. Raises HostsError."""
        for host in (self.near, self.far):
            host.wire.limit(rate)


@contextmanager
def two_hosts(rate: str | None = None) -> Iterator[Hosts]:
    """Two hosts that this process reaches over the service network only. ``rate``: see ``Hosts.limit``. Raises HostsError."""
    require(*([] if rate is None else ["tc"]))
    with _connected(["near", "far"], {WIRE: False, FRONT: True}) as (hosts, _):
        pair = Hosts(**hosts)
        if rate is not None:
            pair.limit(rate)
        yield pair


@contextmanager
def bridged(names: Sequence[str]) -> Iterator[tuple[dict[str, Host], Cable]]:
    """(hosts of these names on one network, this process' own cable to it). Raises HostsError."""
    require()
    with _connected(names, {WIRE: True}) as connected:
        yield connected


@dataclass(frozen=True)
class Hosted:
    """``places``: by role, for a Stack; ``processes``: what starts the rest of it."""

    hosts: Hosts
    processes: Processes
    places: dict[str, Place]


@contextmanager
def hosted(log_dir: Path, rate: str | None = None) -> Iterator[Hosted]:
    """Two hosts that stacks can be started on one after the other: SGLang is imported once on each, when the first one starts.

    Raises HostsError.
    """
    with ExitStack() as undo:
        hosts = undo.enter_context(two_hosts(rate))
        processes = undo.enter_context(Processes(log=log_dir / "zygote.log", env=import_environment()))

        def place(host: Host) -> Place:
            own = within(host.namespace, lambda: Processes(log=log_dir / f"zygote-{host.name}.log", env=import_environment()))
            return Place(undo.enter_context(own), host.front.address, host.wire.address, host.wire.env)

        near, far = place(hosts.near), place(hosts.far)
        yield Hosted(hosts, processes, {"tier": near, "memory": near, "prefill": near, "decode": far})


@contextmanager
def _connected(names: Sequence[str], networks: dict[str, bool]) -> Iterator[tuple[dict[str, Host], Cable]]:
    """Hosts with a device on each of ``networks`` (by device: whether this process is on it too), and its cable to the last."""
    tag = f"{os.getpid()}-{next(_serial)}"
    number = _free_number()
    with ExitStack() as undo:
        for name in names:
            ip("netns", "add", f"oasis-{tag}-{name}")
            undo.callback(ip, "netns", "del", f"oasis-{tag}-{name}")
            ip("-n", f"oasis-{tag}-{name}", "link", "set", "lo", "up")
        cables: dict[str, dict[str, Cable]] = {name: {} for name in names}
        for device, joined in networks.items():
            net, bridge = f"{_NETS[device]}.{number}", f"o{device[0]}{tag}"
            _add(undo, bridge, "type", "bridge")
            for place, name in enumerate(names, start=1):
                cables[name][device] = Cable(f"{bridge}-{place}", device, f"{net}.{place}")
                _connect(undo, cables[name][device], bridge, f"oasis-{tag}-{name}")
            ip("link", "set", bridge, "up")
            if joined:
                # Through a cable too: UCX does not take a bridge for a network device.
                own = Cable(f"{bridge}-0", f"{bridge}h", f"{net}.{_OWN}")
                _connect(undo, own, bridge)
        yield {name: Host(name, f"oasis-{tag}-{name}", cable[WIRE], cable.get(FRONT, cable[WIRE])) for name, cable in cables.items()}, own


def _connect(undo: ExitStack, cable: Cable, bridge: str, namespace: str | None = None) -> None:
    """``namespace``: the host's; None for this process' own."""
    _add(undo, cable.outside, "type", "veth", "peer", "name", cable.device, *(("netns", namespace) if namespace else ()))
    inside = ("-n", namespace) if namespace else ()
    # Neighbour discovery would be counted; everything here is IPv4.
    ip(*inside, "link", "set", cable.device, "addrgenmode", "none")
    ip(*inside, "addr", "add", f"{cable.address}/24", "dev", cable.device)
    ip(*inside, "link", "set", cable.device, "up")
    ip("link", "set", cable.outside, "master", bridge, "up")


def _add(undo: ExitStack, device: str, *kind: str) -> None:
    """A link of this process' namespace, deleted by ``undo``: at once, while one that goes with its namespace goes some time later."""
    ip("link", "add", device, *kind)
    undo.callback(ip, "link", "del", device)
    ip("link", "set", device, "addrgenmode", "none")


def _free_number() -> int:
    """Third number of networks that no interface of this process' namespace is on."""
    taken = {a["local"].rpartition(".")[0] for link in json.loads(ip("-j", "-4", "addr")) for a in link["addr_info"]}
    for step in range(256):
        number = (os.getpid() + step) % 256
        if not taken & {f"{net}.{number}" for net in _NETS.values()}:
            return number
    raise HostsError("every network of 198.18.0.0/15 is in use here")


def _command(*words: str) -> str:
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise HostsError(f"there is no `{words[0]}`: install iproute2") from error
    except subprocess.CalledProcessError as error:
        raise HostsError(f"`{' '.join(words)}` failed: {error.stderr.strip()}") from error
