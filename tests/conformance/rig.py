"""What the conformance suite runs on: owners that can be killed and stopped, readers, and waiting with a deadline."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
from owner import KEYS, pattern, security

from oasis_sglang.keyring import Ring
from transport.dataplane import DataPlane, Endpoint, ReadBatch, Transfer
from transport.planes import incarnation, make_plane, make_server
from transport.staging import Staging

OWNER = Path(__file__).with_name("owner.py")
READER = Path(__file__).with_name("reader.py")
DEADLINE = 20.0
"""Seconds after which a wait of the suite is a failure. Generous: the machine may be busy."""

ARENA = 80 << 20
"""Bytes of the shared owner's arena: more than one part of any plane."""

SMALL = 300
"""Bytes of an arena that a plain Python oracle can go through."""

PLANES = ("loopback", "zmq", "zmq-keyed", "nixl", "nixl-tcp")


class ProcessOwner:
    """An owner in a process of its own. ``serving`` is the id of the process that serves: itself, or its child."""

    def __init__(self, kind: str, seed: int, size: int, port: int = 0):
        self.expected = pattern(seed, size)
        command = [sys.executable, str(OWNER), kind, incarnation("owner"), str(seed), str(size), str(port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if line.startswith("ENDPOINT "):
                self.endpoint, self.serving = self._parse(line.removeprefix("ENDPOINT "))
                return
        raise RuntimeError(f"the owner ended with {self.process.wait()} before it served")

    @property
    def name(self) -> str:
        return self.endpoint.name

    def refresh(self) -> bool:
        """Learns the endpoint of now, as a reader does from the tier; False while none is served."""
        now = self.now()
        if now is not None:
            self.endpoint, self.serving = now
        return now is not None

    def now(self) -> tuple[Endpoint, int] | None:
        """The endpoint and the process that serve now."""
        answer = self.order("serving")
        return None if answer == "none" else self._parse(answer)

    @staticmethod
    def _parse(answer: str) -> tuple[Endpoint, int]:
        endpoint, pid = answer.split()
        return msgspec.msgpack.decode(bytes.fromhex(endpoint), type=Endpoint), int(pid)

    def order(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """Returns once the serving process is gone as well."""
        self.process.kill()
        self.process.wait()
        _until(lambda: process_state(self.serving) in ("Z", ""), DEADLINE)

    def stop(self) -> None:
        os.kill(self.serving, signal.SIGSTOP)
        _until(lambda: process_state(self.serving) == "T", DEADLINE)

    def resume(self) -> None:
        os.kill(self.serving, signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


class LoopbackOwner:
    """The same surface over ``LoopbackFaults``."""

    def __init__(self, kind: str, seed: int, size: int, port: int = 0):
        self.name = incarnation("owner")
        self.expected = pattern(seed, size)
        self.server = make_server(kind, self.name, self.expected.copy())
        self.endpoint, self.faults = self.server.endpoint, self.server.faults

    def kill(self) -> None:
        self.faults.drop_peer()

    def stop(self) -> None:
        self.faults.hold = True

    def resume(self) -> None:
        self.faults.hold = False
        self.faults.finish()

    def close(self) -> None:
        self.server.close()


class Rig:
    """One plane kind under test: starts owners and readers of that kind and closes them all at the end."""

    def __init__(self, plane: str):
        self.plane_name = plane
        self.kind = plane.partition("-")[0]
        self._saved = os.environ.pop("UCX_TLS", None)
        if plane == "nixl-tcp":
            # UCX reads it when an agent is made; the owners inherit it.
            os.environ["UCX_TLS"] = "tcp"
        if plane == "zmq-keyed":
            # One node's keys for owners and readers: what tells nodes apart is tested elsewhere.
            os.environ[KEYS] = tempfile.mkdtemp(prefix="oasis-keys-")
            Ring(Path(os.environ[KEYS])).mark("node")
        self._open: list = []

    def owner(self, seed: int = 1, size: int = 1 << 20, port: int = 0):
        cls = LoopbackOwner if self.kind == "loopback" else ProcessOwner
        owner = cls(self.kind, seed, size, port)
        self._open.append(owner)
        return owner

    def reader(self, *owners, size: int = 1 << 20) -> tuple[DataPlane, np.ndarray]:
        """A plane over fresh memory, connected to ``owners``."""
        region = np.zeros(size, dtype=np.uint8)
        return self.over(region, *owners), region

    def over(self, region: np.ndarray, *owners) -> DataPlane:
        plane = make_plane(self.kind, incarnation("reader"), region, security=security())
        self._open.append(plane)
        for owner in owners:
            plane.connect(owner.endpoint)
        return plane

    def staged(self, owner, window_bytes: int, windows: int) -> tuple[DataPlane, Staging]:
        staging = Staging(window_bytes, windows)
        return self.over(staging.region, owner), staging

    def busy_reader(self, owner) -> tuple[subprocess.Popen, int]:
        """A reader process that reads from ``owner`` without pause until it is killed, and the process it reads from.
        Tries again when what served ended in between."""
        for _ in range(4):
            endpoint, serving = _until(owner.now, DEADLINE)
            command = [sys.executable, str(READER), msgspec.msgpack.encode(endpoint).hex()]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            if any(line.startswith("READING") for line in process.stdout):
                return process, serving
            process.wait()
            process.stdout.close()
        raise AssertionError("the readers ended before they read")

    def close_all(self, keep: int = 0) -> None:
        while len(self._open) > keep:
            self._open.pop().close()

    @property
    def opened(self) -> int:
        return len(self._open)

    def close(self) -> None:
        self.close_all()
        if KEYS in os.environ:
            shutil.rmtree(os.environ.pop(KEYS))
        os.environ.pop("UCX_TLS", None)
        if self._saved is not None:
            os.environ["UCX_TLS"] = self._saved


def process_state(pid: int) -> str:
    """The kernel's letter for it; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def batch(remote, local, lengths) -> ReadBatch:
    return ReadBatch(*(np.asarray(side, dtype=np.uint64) for side in (remote, local, lengths)))


def wait(transfer: Transfer, deadline: float = DEADLINE) -> None:
    """Polls until it landed. Raises what ``poll`` raises, ``TimeoutError`` at the deadline."""
    _until(transfer.poll, deadline)


def wait_drained(transfer: Transfer, deadline: float = DEADLINE) -> None:
    _until(lambda: transfer.drained, deadline)


def _until(condition, deadline: float):
    end, pause = time.monotonic() + deadline, 0.0
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline} s")
        # Sleeping leaves the core to the owner.
        time.sleep(pause)
        pause = min(0.002, pause + 0.0001)
    return value


def stays_pending(transfer: Transfer, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if transfer.poll():
            return False
        time.sleep(0.005)
    return True


def expect(region_size: int, fill: int, reads: ReadBatch, source: np.ndarray) -> np.ndarray:
    """What a region full of ``fill`` must hold after ``reads``: the oracle, range by range."""
    wanted = np.full(region_size, fill, dtype=np.uint8)
    for remote, local, length in zip(*(side.tolist() for side in reads), strict=True):
        wanted[local : local + length] = source[remote : remote + length]
    return wanted
