"""Meters that no server has a say in: bytes on an interface, memory as the kernel counts it, what the client saw.

User and system time is another one: ``Stack.cpu_seconds``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import psutil

from oasis_sglang.hosts import Hosts


def wire(hosts: Hosts) -> tuple[int, int]:
    """Bytes that decode's host has received and sent on the data network, headers included."""
    return hosts.far.wire.heard(), hosts.far.wire.said()


class Resident(NamedTuple):
    """Bytes in memory of one process, from the kernel's running counts: ``private`` (anonymous) and ``shared`` (memory files)."""

    private: int
    shared: int


def resident(pid: int) -> Resident:
    """Zero once the process is gone. Walks no page tables, unlike ``smaps``: that holds the process' memory map for as long, and a process whose every
    step allocates then waits for its meter."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return Resident(0, 0)
    found = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in status.splitlines()) if name in ("RssAnon", "RssShmem")}
    return Resident(found.get("RssAnon", 0), found.get("RssShmem", 0))  # a zombie has neither


def in_memory(pids: Iterable[int]) -> int:
    """Of processes that share their memory files: what is private to each, and the most that one of them has of the files."""
    found = [resident(pid) for pid in pids]
    return sum(one.private for one in found) + max((one.shared for one in found), default=0)


def mapped_bytes(pid: int, name: str) -> int:
    """Bytes in memory of what the process has mapped of a memory file of that name; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    total, inside = 0, False
    for line in lines:
        if line.startswith("Rss:"):
            total += int(line.split()[1]) << 10 if inside else 0
        elif "-" in line.partition(" ")[0]:  # the head of a mapping: its addresses, at last what it is of
            inside = f"/memfd:{name} " in line + " "
    return total


def tree(pids: Iterable[int]) -> set[int]:
    """These processes and all that descend from them."""
    found: set[int] = set()
    for pid in pids:
        try:
            found |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return found


class Memory:
    """Resident memory of process trees, sampled by a thread from entering to leaving.

        with Memory({"decode": [stack.servers["decode"].pid], "tier": [...]}) as memory:
            ...
        memory.above_start("decode")

    ``roots``: by name, the processes whose trees count as one. ``start`` and ``peak`` are bytes by name; a name without a process has 0.
    A forked child counts the pages that it has from its parent as the parent does: what is said is how much they grew. ``period``: seconds.
    """

    def __init__(self, roots: Mapping[str, Sequence[int]], period: float = 0.5):
        self._roots = {name: tuple(pids) for name, pids in roots.items()}
        self._period = period
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oasis-memory", daemon=True)
        self.start: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.samples = 0

    def __enter__(self) -> Self:
        self.start = self._sample()
        self.peak = dict(self.start)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._left.set()
        self._thread.join()
        self._take()  # what came after the last sample

    def above_start(self, name: str) -> int:
        """Bytes of the peak above what there was at the start."""
        return self.peak[name] - self.start[name]

    def _run(self) -> None:
        while not self._left.wait(self._period):
            self._take()

    def _take(self) -> None:
        for name, size in self._sample().items():
            self.peak[name] = max(self.peak[name], size)

    def _sample(self) -> dict[str, int]:
        self.samples += 1
        return {name: in_memory(tree(pids)) for name, pids in self._roots.items()}


def client_concurrency(intervals: Sequence[tuple[float, float]]) -> int:
    """Most of these intervals (of each request, when its first and its last token came) that are open at one time, ends included.

    ``intervals``: seconds on one clock, first <= last; those of requests without a token are left out by the caller.
    """
    if not intervals:
        return 0
    times = np.asarray(intervals, np.float64)
    moments = np.concatenate([times[:, 0], times[:, 1]])
    change = np.repeat([1, -1], len(times))
    return int(np.cumsum(change[np.lexsort((-change, moments))]).max())  # at one moment, beginnings first
