"""How long things take of late: what the faster of two ways is chosen by."""

from __future__ import annotations

FADE = 0.9


class Pace:
    """Seconds per piece of work: each sample weighs ``FADE`` of the one after it, by its pieces."""

    def __init__(self):
        self._seconds = self._pieces = 0.0

    def add(self, pieces: int, seconds: float) -> None:
        self._seconds = self._seconds * FADE + seconds
        self._pieces = self._pieces * FADE + pieces

    @property
    def each(self) -> float | None:
        """Seconds; None before the first sample."""
        return self._seconds / self._pieces if self._pieces else None
