"""Work that any thread leaves for one thread, which waits for it and for sockets at the same time."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class Inbox:
    """Its descriptor (``fileno``) is readable while something may be in it. Thread safe.

    Owner: the thread that takes; it closes it when it takes nothing any more. Whoever still leaves something then is not told.
    """

    def __init__(self):
        self._left: list[tuple] = []
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake

    def put(self, *work) -> None:
        with self._lock:  # also for the descriptor: a number that was closed may be somebody else's by now
            self._left.append(work)
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def take(self) -> list[tuple]:
        """What was left since the last call, in order; does not wait."""
        with self._lock:
            if self._wake >= 0:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            taken, self._left = self._left, []
        return taken

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1
