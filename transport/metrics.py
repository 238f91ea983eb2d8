"""What the tier exports. Gauges are read from the tables at scrape time, so they cannot drift from the truth."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_TOTALS = {
    "rooms_opened": "Rooms that a prefill worker opened.",
    "rooms_committed": "Rooms whose manifest was committed.",
    "rooms_claimed": "Committed rooms that a decode worker claimed.",
    "rooms_failed": "Rooms given up before the commit.",
    "rooms_cancelled": "Rooms that their decode worker no longer wanted.",
    "rooms_expired": "Committed rooms that no decode worker claimed in time.",
    "leases_released": "Leases ended by their reader.",
    "records_doubted": "Cached records that are found no more, since a reader got other bytes than were published.",
    "leases_expired": "Leases that ran out: their reader died or stalled.",
    "pages_fresh": "Prompt pages that had to be written.",
    "pages_reused": "Prompt pages found in the tier by content hash.",
    "lookups": "Requests that asked which pages are held.",
    "lookup_pages": "Pages asked for in them.",
    "lookup_hits": "Of those, pages held.",
    "pages_donated": "Pages that decode nodes had generated and that were kept.",
    "bytes_donated": "Bytes of those pages.",
    "rooms_moved": "Rooms moved to a memory node.",
    "pages_there": "Prompt pages that the memory node had already: neither written nor moved.",
    "pages_moved": "Pages that rooms took to a memory node.",
    "bytes_moved": "Bytes of those pages, each once.",
    "moves_retried": "Moves to a memory node that failed and were tried again.",
    "moves_failed": "Moves to a memory node given up.",
    "pages_fetched_back": "Pages read from a memory node into this arena, to be restored by a prefill worker.",
    "bytes_fetched_back": "Bytes read for that, payload and index.",
    "fetch_seconds": "Seconds that these reads took.",
    "fetches_failed": "Prompts that were computed because pages could not be fetched from a memory node in time.",
    "fetches_slower": "Prompts that were computed because fetching their pages from a memory node is the slower way.",
    "rooms_filled": "Rooms of other tiers filled here, as a memory node.",
    "bytes_filled": "Bytes read from other tiers' arenas for them: the first of the two hops of a prompt.",
    "fills_failed": "Attempts to fill a room that failed.",
    "mover_restarts": "Processes that move records started again after one ended.",
    "records_zeroed": "Freed records whose bytes were zeroed (zero_freed).",
    "refused": "Requests answered with an error, and what was no request.",
    "internal_errors": "Faults of ours caught while a request was handled.",
    "data_plane_restarts": "Data plane processes started again after one ended.",
}


class TierCollector:
    """Prometheus collector over a ``Tier`` and its arena."""

    def __init__(self, tier, arena):
        self.tier, self.arena = tier, arena

    def collect(self) -> Iterator[Metric]:
        inventory = self.tier.inventory()
        records = GaugeMetricFamily("oasis_tier_records", "Records of the arena by state.", labels=["state"])
        for state in ("free", "writing", "cached", "leased"):
            records.add_metric([state], inventory[state])
        yield records
        yield GaugeMetricFamily("oasis_tier_arena_bytes", "Host memory of the arena.", value=self.arena.size)
        for name, text in (("rooms", "Rooms open or committed and unclaimed."), ("leases", "Leases held by decode workers."),
                           ("waiters", "Decode workers' requests waiting for a commit."), ("workers", "Attached prefill workers.")):
            yield GaugeMetricFamily(f"oasis_tier_{name}", text, value=inventory[name])
        for name, text in (("moves", "Moves of rooms between tiers under way."), ("fetches", "Fetches of pages from memory nodes under way."),
                           ("redirects", "Rooms whose readers are sent to a memory node."),
                           ("tiers", "Other tiers connected to this memory node.")):
            yield GaugeMetricFamily(f"oasis_tier_{name}", text, value=inventory.get(name, 0))
        yield CounterMetricFamily("oasis_tier_evicted", "Cached records given up for room.", value=self.tier.table.evicted)
        for name, text in _TOTALS.items():
            yield CounterMetricFamily(f"oasis_tier_{name}", text, value=self.tier.totals[name])
