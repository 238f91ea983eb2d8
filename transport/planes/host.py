"""A data plane in a process of its own, watched and restarted.

Why: a NIXL peer on TCP can read and write any memory of the process that serves it, and UCX aborts that process when
some readers die in the middle of a read. So it is not the tier that serves but a child that maps only the arena, and
its loss costs readers one more read. Each child is another incarnation: no agent name is ever used twice, because NIXL
peers would take the new one for the old.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from transport.dataplane import DataServer, Endpoint
from transport.errors import ConfigError
from transport.planes import incarnation

log = logging.getLogger("oasis.planes")

START_SECONDS = 120.0
"""For a child to serve: registering a large arena for RDMA takes a while."""

MIN_PAUSE_SECONDS = 0.05
MAX_PAUSE_SECONDS = 5.0
STABLE_SECONDS = 30.0
"""Pause before a restart: doubled each time, back to the minimum after a child that lived this long."""

MAX_REPORT = 1 << 20

KEPT_VARIABLES = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TZ")
KEPT_PREFIXES = ("UCX_", "NIXL_", "CUDA_", "IBV_", "MLX5_", "RDMAV_")


def child_environment() -> dict[str, str]:
    """What a child needs of our environment and no more: peers can read it, and tokens live there."""
    return {k: v for k, v in os.environ.items() if k in KEPT_VARIABLES or k.startswith(KEPT_PREFIXES)}


class HostedServer(DataServer):
    """Serves the memory behind ``fd`` (``size`` bytes, stays the caller's) through a child process.

    ``endpoint`` is the incarnation that serves now, None while there is none; ``restarts`` counts the children after
    the first. ``on_change`` is called after each change of ``endpoint``, on the watching thread; not by ``close``.
    Owner of the child: that thread, which also starts it, since PR_SET_PDEATHSIG follows the starting thread.
    Raises ``ConfigError`` when the first child does not come to serve.
    """

    def __init__(self, kind: str, node: str, fd: int, size: int, *, on_change: Callable[[], None] = lambda: None):
        self.kind, self.node, self.fd, self.size = kind, node, fd, size
        self.restarts = 0
        self._on_change = on_change
        self._endpoint: Endpoint | None = None
        self._child: _Child | None = None
        self._refusal = ""
        self._started = threading.Event()
        self._closing = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=f"oasis-{kind}-host", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._refusal:
            self.close()
            raise ConfigError(self._refusal)

    @property
    def endpoint(self) -> Endpoint | None:
        return self._endpoint

    @property
    def pid(self) -> int | None:
        """Of the child that serves now; None while there is none."""
        child = self._child
        return child.process.pid if child is not None and self._endpoint is not None else None

    def close(self) -> None:
        """Ends the child and waits for it. Idempotent."""
        if self._closing < 0:
            return
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        os.close(self._closing)
        self._closing = -1

    def _run(self) -> None:
        pause = MIN_PAUSE_SECONDS
        while True:
            began = time.monotonic()
            serves, end = self._one_life()
            if not serves and not self._started.is_set():
                self._refusal = end
                self._started.set()
                return
            if _readable([self._closing], 0):
                return
            if time.monotonic() - began > STABLE_SECONDS:
                pause = MIN_PAUSE_SECONDS
            log.warning("data plane %s: %s; another one in %.2f s", self.kind, end, pause)
            if _readable([self._closing], pause):
                return
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
            self.restarts += 1

    def _one_life(self) -> tuple[bool, str]:
        """Starts a child, watches it to its end. Whether it ever served, and how it ended."""
        name = incarnation(self.node)
        try:
            child = self._child = _Child(self.kind, name, self.fd, self.size)
        except OSError as error:
            return False, f"its process cannot start: {error}"
        report = child.report(START_SECONDS, self._closing)
        serves = isinstance(report, Endpoint)
        if serves:
            self._publish(report)
            self._started.set()
            _readable([child.pidfd, self._closing], None)
            self._publish(None)
        how = child.end()
        return serves, f"its process {child.process.pid} ended ({how})" if serves else report

    def _publish(self, endpoint: Endpoint | None) -> None:
        self._endpoint = endpoint
        if self._started.is_set() and not _readable([self._closing], 0):
            self._on_change()


class _Child:
    """One serving process. ``end`` closes what is held for it."""

    def __init__(self, kind: str, name: str, arena_fd: int, size: int):
        self._report, theirs = os.pipe()
        command = [sys.executable, "-P", "-m", "transport.planes.child", kind, name, *map(str, (arena_fd, size, theirs))]
        try:
            # Standard output joins standard error: NIXL prints there, and the tier's own may be read by a program.
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, pass_fds=(arena_fd, theirs),
                                            env=child_environment())
        except OSError:
            os.close(self._report)
            raise
        finally:
            os.close(theirs)
        self.pidfd = os.pidfd_open(self.process.pid)

    def report(self, seconds: float, closing: int) -> Endpoint | str:
        """The endpoint, or why there is none."""
        deadline, raw = time.monotonic() + seconds, b""
        while len(raw) < MAX_REPORT:
            ready = _readable([self._report, closing], max(0.0, deadline - time.monotonic()))
            if closing in ready:
                return "closed before it served"
            if not ready:
                return f"its process did not serve within {seconds} s"
            part = os.read(self._report, 65536)
            if not part:
                break
            raw += part
        try:
            return msgspec.msgpack.decode(raw, type=Endpoint | str)
        except msgspec.DecodeError:
            return "its process ended before it served"

    def end(self) -> str:
        """Kills the process, whatever it does, and waits for it. How it ended: a signal or an exit status."""
        self.process.kill()
        code = self.process.wait()
        self.process.stdin.close()
        os.close(self.pidfd)
        os.close(self._report)
        return signal.Signals(-code).name if code < 0 else f"status {code}"


def _readable(fds: list[int], seconds: float | None) -> list[int]:
    """Those of ``fds`` that are readable, within ``seconds`` (None: wait)."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)]
