"""The arena: one piece of shared host memory that outlives the workers that write it.

``memfd_create`` rather than a named segment: it has no name to leak or to clash, the kernel frees it with its last
mapping, and no resource tracker unlinks it when one worker dies. ``posix_fallocate`` takes the memory at start, on the
tier's NUMA node, so that a full host fails here and not with SIGBUS in the middle of a copy.
"""

from __future__ import annotations

import mmap
import os
import re
from contextlib import suppress
from pathlib import Path

import numpy as np

from transport.errors import CapacityError

_CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that the host, and the container if there is one, can still give.

    The kernel does not refuse shared memory that it does not have: it kills a process.
    """
    found = re.search(r"MemAvailable:\s*(\d+) kB", (proc / "meminfo").read_text())
    available = int(found[1]) << 10 if found else 1 << 62
    for limit, used in _CGROUPS:
        with suppress(OSError, ValueError):  # not mounted, or "max"
            stat = (cgroup / used).with_name("memory.stat").read_text()
            whole = "total_" if "\ntotal_" in stat else ""  # the older interface: with all groups below
            cache = re.findall(rf"^{whole}(?:in)?active_file (\d+)", stat, re.MULTILINE)
            free = int((cgroup / limit).read_text()) - int((cgroup / used).read_text()) + sum(map(int, cache))
            available = min(available, max(0, free))
    return available


class Arena:
    """Shared memory of ``size`` bytes. ``bytes`` is a uint8 [size] view.

    Owner: the tier creates it (``create``) and keeps it until its data planes, the processes that serve it or read into it included,
    have ended, because peers may read it over RDMA at any time; a worker maps the same memory from the descriptor it was handed (``attach``) and closes its
    mapping when it leaves.
    """

    def __init__(self, fd: int, size: int):
        self.fd, self.size = fd, size
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, size: int, name: str = "oasis-arena") -> Arena:
        """Raises ``CapacityError`` when the host or the container cannot give the memory."""
        available = available_bytes()
        if size > available:
            raise CapacityError("cannot reserve the arena: not enough memory is available", limit=f"{size} of {available} bytes")
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
            return cls(fd, size)
        except OSError as error:
            os.close(fd)
            raise CapacityError(f"cannot reserve the arena: {error.strerror}", limit=f"{size} bytes") from error

    @classmethod
    def attach(cls, fd: int, size: int) -> Arena:
        """Takes ownership of ``fd``. Raises ``CapacityError`` if the memory behind it is smaller than ``size`` or cannot be mapped."""
        actual = os.fstat(fd).st_size
        try:
            if not 0 < size <= actual:
                raise CapacityError("the arena is smaller than announced", limit=f"{actual} of {size} bytes")
            return cls(fd, size)
        except OSError as error:
            os.close(fd)
            raise CapacityError(f"the arena cannot be mapped: {error.strerror}", limit=f"{size} bytes") from error
        except CapacityError:
            os.close(fd)
            raise

    def close(self) -> None:
        """Idempotent. Views handed out keep the mapping alive until they are dropped."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.bytes = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:
            pass  # a view is still referenced; the mapping goes with it
