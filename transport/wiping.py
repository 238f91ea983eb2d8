"""Zeroing what freed records hold (``oasis tier --zero-freed``), so that no tenant's bytes outlive their record.

Freed records are wiped beside the requests, some at each tick of the tier, and those that are given out before their turn has come
are wiped then. So a reservation in a full arena pays for the records that it evicts, and hardly any other does.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from transport.layout import ArenaGeometry
from transport.records import RecordTable

WIPED_BYTES = 16 << 20
"""Zeroed at a time: so long all others wait (``tools/bench_integrity.py`` has the speed)."""
NEXT_SECONDS = 0.01
"""Until there is time for more."""


class Wiper:
    """Of ``arena`` uint8 [size], on the tier's loop. Counts ``records_zeroed`` in ``totals``."""

    def __init__(self, arena: np.ndarray, totals: Counter[str]):
        self.arena, self.totals = arena, totals
        self.table = RecordTable(0)

    def make_table(self, geometry: ArenaGeometry) -> RecordTable:
        """The table of an arena cut anew, after nothing is left of what the last one held."""
        self.table.forget()
        sections = geometry.rows(self.arena)

        def wipe(records: np.ndarray) -> None:
            for section in sections:
                section[records] = 0
            self.totals["records_zeroed"] += len(records)

        self._most = max(1, WIPED_BYTES // (geometry.payload_stride + geometry.index_stride))
        self.table = RecordTable(geometry.num_records, wipe)
        return self.table

    def step(self) -> float:
        """Wipes some of what was freed; seconds until it wants to go on."""
        if not self.table.stale.any():
            return float("inf")
        self.table.clean(self._most)
        return NEXT_SECONDS if self.table.stale.any() else float("inf")
