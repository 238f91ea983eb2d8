"""Hosts of their own on one machine: network namespaces, whose interface counters are an independent meter. Needs root and iproute2."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from oasis_sglang import launch
from oasis_sglang.processes import Processes, Server

CLONE_NEWNET, CLONE_NEWNS, MS_REC, MS_SLAVE = 0x40000000, 0x00020000, 0x4000, 0x80000

marks = [
    pytest.mark.netns,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="NOT RUN: network namespaces need root and iproute2"),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def make_namespace(name: str) -> None:
    """Skips the test where there can be none."""
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"NOT RUN: no network namespaces here: {error.stderr.decode()}")


def within(name: str, work: Callable):
    """``work()`` on a thread that lives in the namespace; processes it starts stay there."""
    result: list = []

    def run():
        libc = ctypes.CDLL(None, use_errno=True)

        def call(function, *args):
            assert function(*args) == 0, os.strerror(ctypes.get_errno())

        with open(f"/var/run/netns/{name}") as there:
            call(libc.setns, there.fileno(), CLONE_NEWNET)
        # UCX finds interfaces in /sys, which shows those of the namespace it was mounted in.
        call(libc.unshare, CLONE_NEWNS)
        call(libc.mount, b"none", b"/", None, MS_REC | MS_SLAVE, None)
        call(libc.mount, b"sysfs", b"/sys", b"sysfs", 0, None)
        result.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


def wire_environment(device: str) -> dict[str, str]:
    """Nothing can take a short cut through shared memory, nor an interface that the others cannot reach."""
    return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": device}


def serve_worker(processes: Processes, role: str, model: Path, address: str, port: int, bootstrap: int, device: str, scratch: Path, *flags: str) -> Server:
    """An Oasis worker that other hosts reach at ``address``; its log is ``scratch``/log. A decode worker keeps nothing from one
    request to the next, so that bytes can be counted again for the same prompt."""
    (scratch / "metrics").mkdir(parents=True)
    keeping = ["--radix-cache-backend", ""] if role == "decode" else []
    argv, ours = launch.worker_argv(role, [
        "--model-path", str(model), "--host", address, "--port", str(port), "--skip-server-warmup", "--max-running-requests", "4",
        "--max-total-tokens", "20000", "--disaggregation-bootstrap-port", str(bootstrap), *keeping, *flags])
    own = {"TMPDIR": str(scratch), "PROMETHEUS_MULTIPROC_DIR": str(scratch / "metrics"), "SGLANG_HOST_IP": address}
    return processes.serve(argv, log=scratch / "log", env={**own, **ours, **wire_environment(device)}, name=role)


@dataclass
class Host:
    """One namespace on a bridge. ``wire`` is the bridge's end of its only cable, ``device`` its own."""

    name: str
    namespace: str
    address: str
    wire: str
    device: str

    def heard(self) -> int:
        """Bytes on the wire to it, so far."""
        return self._count("tx_bytes")

    def said(self) -> int:
        """Bytes on the wire from it, so far."""
        return self._count("rx_bytes")

    def cut(self) -> None:
        """Pulls its cable: from now on nobody hears of it, not even that its connections ended."""
        ip("link", "set", self.wire, "down")

    def _count(self, which: str) -> int:
        return int(Path(f"/sys/class/net/{self.wire}/statistics/{which}").read_text())


@contextmanager
def bridged(names: Sequence[str], network: str = "10.231.8") -> Iterator[dict[str, Host]]:
    """Hosts of these names on one bridge, which this process reaches too."""
    tag = f"{os.getpid() % 10000}"
    bridge = f"ob{tag}"
    hosts = {name: Host(name, f"oasis-{tag}-{name}", f"{network}.{number}", f"ow{tag}-{number}", "wire0") for number, name in enumerate(names, start=1)}
    with ExitStack() as undo:
        ip("link", "add", bridge, "type", "bridge")
        undo.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{network}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for host in hosts.values():
            make_namespace(host.namespace)
            undo.callback(ip, "netns", "del", host.namespace)
            ip("link", "add", host.wire, "type", "veth", "peer", "name", host.device, "netns", host.namespace)
            ip("link", "set", host.wire, "master", bridge, "up")
            for words in (("addr", "add", f"{host.address}/24", "dev", host.device), ("link", "set", host.device, "up"), ("link", "set", "lo", "up")):
                ip("-n", host.namespace, *words)
        yield hosts
