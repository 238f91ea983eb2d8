"""Worker metrics on SGLang's own ``/metrics``.

Our threads keep plain counters; about once a second they are pushed into ``prometheus_client``, which in SGLang's
multi-process mode means a file per process. The client is imported inside the scheduler process only: it chooses its
mode at import.
"""

from __future__ import annotations

from collections.abc import Mapping

WORKING_SETS = {
    "bytes_summaries": "Bytes of block summaries and piece checksums pulled by this rank.",
    "bytes_pieces": "Payload bytes of pieces pulled at admission by this rank.",
    "bytes_on_demand": "Payload bytes of pieces pulled for running requests by this rank.",
    "demands": "Pulls for running requests by this rank.",
    "misses": "Blocks that a step's newest row wanted and that were not resident, over layers and KV heads of this rank.",
    "wanted": "Blocks that a step's newest row wanted beside the pinned ones, over layers and KV heads of this rank.",
    "swaps_committed": "Pieces committed into slots by this rank.",
    "folds": "Generated blocks that entered a working set on this rank.",
    "waits": "Times a request of this rank stepped aside to wait for its misses.",
    "waits_ended_by_bound": "Waits of this rank that ended before everything had landed.",
}
"""Counters of a decode rank with working sets; another rank's stay at nought."""

COUNTERS = {
    "prefill": {
        "pages_published": "Prompt pages copied into the tier by this rank.",
        "pages_reused": "Prompt pages found in the tier by content hash and not copied, by this rank.",
        "bytes_published": "Bytes of payload and index copied into the tier by this rank.",
        "rooms_committed": "Requests whose manifest this rank committed.",
        "rooms_ranked": "Requests that this rank committed with a ranking of their blocks.",
        "votes_seconds": "Seconds this rank spent on rankings.",
        "rooms_failed": "Requests that this rank did not commit.",
        "reserve_retries": "Times this rank asked again because the arena was full.",
        "reattached": "Times this rank attached to a restarted tier.",
        "internal_errors": "Faults of ours caught by this rank's publishing loop.",
    },
    "decode": {
        "requests": "Requests whose pull this rank started.",
        "admitted": "Requests this rank admitted, complete and verified.",
        "failed": "Requests whose pull failed or was aborted on this rank.",
        "bytes_records": "Payload bytes of whole pages pulled by this rank.",
        "bytes_partial_page": "Payload bytes of partial prompt pages pulled by this rank.",
        "bytes_manifest": "Bytes of manifests received by this rank.",
        "read_failures": "Reads of this rank that failed, timed out or did not verify.",
        "quarantined": "Staging windows of this rank given up while a read might still write into them.",
        "links_lost": "Connections to tiers that this rank lost.",
        "internal_errors": "Faults of ours caught by this rank's pull loop.",
        **WORKING_SETS,
    },
}
GAUGES = {
    "prefill": {"publications": "Requests being published by this rank."},
    "decode": {
        "pulls": "Requests that wait for a commit or are being pulled by this rank.",
        "host_cache_bytes": "Host bytes of pieces cached by this rank.",
        "working_sets": "Running requests of this rank that hold fewer blocks than they have.",
        "staging_quarantined": "Staging windows in quarantine on this rank.",
        "host_bytes": "Host bytes reserved for staging by this rank.",
        "kv_pool_tokens": "KV-pool tokens in use on this rank.",
    },
}


class Exporter:
    """Pushes counter totals and gauges of one role; creates the metrics on first use."""

    def __init__(self, role: str, rank: int):
        self.role, self.rank = role, str(rank)
        self._sent: dict[str, int] = {}
        self._metrics: dict | None = None

    def _create(self) -> dict:
        from prometheus_client import Counter, Gauge

        made = {n: Counter(f"oasis_{self.role}_{n}", text, ["rank"]) for n, text in COUNTERS[self.role].items()}
        return made | {n: Gauge(f"oasis_{self.role}_{n}", text, ["rank"], multiprocess_mode="mostrecent") for n, text in GAUGES[self.role].items()}

    def __call__(self, totals: Mapping[str, int], gauges: Mapping[str, float]) -> None:
        if self._metrics is None:
            self._metrics = self._create()
        for name in COUNTERS[self.role]:
            new = totals.get(name, 0) - self._sent.get(name, 0)
            self._metrics[name].labels(self.rank).inc(new)
            self._sent[name] = totals.get(name, 0)
        for name, value in gauges.items():
            self._metrics[name].labels(self.rank).set(value)
