"""The memory a reader lands in, as equal windows with one owner each."""

from __future__ import annotations

import mmap

import numpy as np

from transport.dataplane import Transfer
from transport.errors import CapacityError, ConfigError


class Window:
    """A leased piece of the region: ``offset`` (bytes, page aligned) and ``view`` (uint8 [window_bytes]).

    One object is one lease. After it was released its number may be leased again as another object, so a late
    ``release`` of the old one frees nothing.
    """

    __slots__ = ("number", "offset", "view")

    def __init__(self, number: int, offset: int, view: np.ndarray):
        self.number, self.offset, self.view = number, offset, view

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    def __repr__(self) -> str:
        return f"Window(number={self.number}, offset={self.offset}, nbytes={self.nbytes})"


class Staging:
    """Owns ``region`` (uint8, anonymous memory, page aligned) and says which window of it may be written.

    A window is free, leased (its holder frees it with ``release``) or quarantined: given up while a transfer may still
    write into it. Only ``sweep`` frees a quarantined window, once all its transfers drained; it releases them too.
    Not thread safe: it belongs to the thread of the data plane that reads into it.
    """

    def __init__(self, window_bytes: int, windows: int, *, max_quarantined: int | None = None):
        """``max_quarantined`` (default: half of the windows, at least one): above it the plane has to be replaced.
        Raises ``ConfigError`` on sizes below one, ``CapacityError`` when the memory is not to be had."""
        if window_bytes < 1 or windows < 1 or (max_quarantined is not None and max_quarantined < 0):
            raise ConfigError(
                "staging needs at least one window of at least one byte", limit=f"{windows} x {window_bytes}"
            )
        self.window_bytes = window_bytes
        self._stride = -(-window_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.max_quarantined = max(1, windows // 2) if max_quarantined is None else max_quarantined
        try:
            memory = mmap.mmap(-1, self._stride * windows)
        except (OSError, OverflowError, ValueError) as error:
            raise CapacityError(
                f"no memory for staging: {error}", limit=f"{self._stride * windows} bytes"
            ) from error
        self.region = np.frombuffer(memory, dtype=np.uint8)
        self._free = list(range(windows))[::-1]
        self._leased: dict[int, Window] = {}
        self._quarantined: dict[int, tuple[Window, list[Transfer]]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def leased(self) -> int:
        return len(self._leased)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def acquire(self) -> Window | None:
        """Leases a window; its content is undefined. None when none is free."""
        if not self._free:
            return None
        number = self._free.pop()
        offset = number * self._stride
        window = Window(number, offset, self.region[offset : offset + self.window_bytes])
        self._leased[number] = window
        return window

    def release(self, window: Window) -> None:
        """Frees a leased window into which nothing is being written. Idempotent; no effect on one in quarantine."""
        if self._leased.get(window.number) is window:
            del self._leased[window.number]
            self._free.append(window.number)

    def quarantine(self, window: Window, transfer: Transfer) -> None:
        """Gives up a leased window that ``transfer`` may still write into; once more for a further transfer into it.

        Raises ``CapacityError`` when more windows than ``max_quarantined`` are out after a sweep. The window is in
        quarantine even then: an error must not make it usable. Raises ``ValueError`` for a window that is not out.
        """
        transfer.release()
        if self._leased.get(window.number) is window:
            del self._leased[window.number]
            self._quarantined[window.number] = (window, [transfer])
        elif self._quarantined.get(window.number, (None,))[0] is window:
            self._quarantined[window.number][1].append(transfer)
        else:
            raise ValueError(f"{window!r} is neither leased nor in quarantine")
        if self.quarantined > self.max_quarantined:
            self.sweep()
        if self.quarantined > self.max_quarantined:
            raise CapacityError(
                "too many windows wait for transfers that do not end", limit=f"{self.max_quarantined} windows"
            )

    def sweep(self) -> int:
        """Frees the quarantined windows whose transfers have all drained; returns how many."""
        freed = 0
        for number, (_, transfers) in list(self._quarantined.items()):
            transfers[:] = [transfer for transfer in transfers if not transfer.drained]
            if not transfers:
                del self._quarantined[number]
                self._free.append(number)
                freed += 1
        return freed

    def close(self) -> None:
        """Idempotent. Nothing can be leased afterwards. The memory itself goes when the last holder of a view lets go,
        which includes the data plane: close that first."""
        self._free.clear()
        self._leased.clear()
        self._quarantined.clear()
        self.region = np.empty(0, dtype=np.uint8)
