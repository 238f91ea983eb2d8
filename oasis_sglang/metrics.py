"""Worker metrics on SGLang's own ``/metrics``.

Our threads keep plain counters; about once a second they are pushed into ``prometheus_client``, which in SGLang's
multi-process mode means a file per process. The client is imported inside the scheduler process only: it chooses its
mode at import.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

WORKING_SETS = {
    "bytes_summaries": "Bytes of block summaries and piece checksums pulled by this rank.",
    "bytes_pieces": "Payload bytes of pieces pulled at admission by this rank.",
    "bytes_on_demand": "Payload bytes of pieces pulled for running requests by this rank.",
    "demands": "Pulls for running requests by this rank.",
    "steps": "Steps of this rank that planned for at least one request.",
    "request_steps": "Steps of this rank, counted once for each request that it planned for.",
    "misses": "Blocks that a step's newest row wanted and that were not resident, over layers and KV heads of this rank.",
    "wanted": "Blocks that a step's newest row wanted beside the pinned ones, over layers and KV heads of this rank.",
    "missed_mass_ppm": "Attention mass on blocks that were not resident, mean over heads, summed over steps and requests of this rank, in millionths.",
    "fetched": "Pieces that plans of this rank asked for.",
    "fetched_used": "Pieces pulled for running requests that were wanted again while resident on this rank.",
    "fetched_wasted": "Pieces that this rank pulled for running requests and none wanted before they were pulled again or the request ended.",
    "swaps_committed": "Pieces committed into slots by this rank.",
    "swaps_late": "Planned swaps of this rank whose piece had not landed at the step boundary.",
    "plans_stale": "Plans of this rank dropped because their request, working set or step was no longer the one they were made for.",
    "folds": "Generated blocks that entered a working set on this rank.",
    "waits": "Times a request of this rank stepped aside to wait for its misses.",
    "waits_ended_by_bound": "Waits of this rank that ended before everything had landed.",
    "plan_microseconds": "Microseconds this rank spent on plans.",
    "plan_wait_microseconds": "Microseconds that steps of this rank waited for the plan of the step before.",
    "trust_wait_microseconds": "Microseconds that verified steps of this rank waited for their scores before sampling.",
    "score_microseconds": "Microseconds this rank spent on scoring blocks.",
    "verify_steps": "Verify forwards of this rank, counted once for each request in them.",
    "drafts_proposed": "Drafted tokens that this rank verified.",
    "drafts_accepted": "Drafted tokens that this rank accepted.",
    "tokens_accepted": "Tokens that verify forwards of this rank produced, the target's own included.",
    "lookahead_rows": "Rows of drafted tokens whose queries chose blocks for a next step on this rank.",
    "reuse_prompt_tokens": "Prompt tokens of requests that this rank granted a place while it keeps blocks.",
    "reuse_hit_tokens": "Of those, tokens in blocks that this rank knew already.",
    "reuse_pieces": "Pieces of admissions that were copied from this rank's host cache instead of being pulled.",
    "reuse_indexes": "Block indexes of admissions that this rank knew already.",
    "reuse_bytes_saved": "Bytes of pieces and indexes that admissions of this rank did not pull because they were here.",
    "reuse_blocks_kept": "Blocks generated on this rank and kept for later requests.",
    "reuse_blocks_not_offered": "Blocks generated on this rank that were not offered to a tier: too many waited for it, or they were not here whole.",
    "blocks_donated": "Blocks generated on this rank that a tier has taken.",
    "bytes_donated": "Bytes of blocks generated on this rank that a tier has taken.",
    "blocks_not_donated": "Blocks generated on this rank that no tier has taken: it would not, was full, or did not answer.",
    "cache_evicted": "Pieces that left the host cache of this rank to make room.",
    "blocks_evicted": "Cached blocks of this rank whose numbers were wanted by others.",
    "fallback_rows": "Request-steps of this rank whose blocks were chosen without a lookahead row.",
}
"""Counters of a decode rank with working sets; another rank's stay at nought."""

STALLS = {
    "stalls": "Waits of on_miss=wait that have ended on this rank, by the seconds that they lasted at most.",
    "stall_seconds": "Seconds that requests of this rank stood aside in waits that have ended.",
}
"""The histogram of waits, as cumulative counters with the label ``le``: ``histogram_quantile`` takes them like a histogram's buckets.
A ``Histogram`` of the client can only observe single values: counts that were made elsewhere would have to go through its private
fields, and a collector of our own is not seen in SGLang's multi-process mode, where ``/metrics`` reads files."""

RESTORING = {
    "lookups": "Times this rank asked the tier for pages that its KV pool did not hold.",
    "restores": "Requests of this rank whose prompt begins with pages copied back from the tier.",
    "restored_tokens": "Prompt tokens that this rank copied back from the tier instead of computing them.",
    "restored_bytes": "KV bytes that this rank copied back from the tier.",
    "restore_seconds": "Seconds this rank's scheduler spent on copying back from the tier, look-ups included.",
    "restores_slower": "Times this rank computed what the tier holds because that was the faster way.",
    "restores_gone": "Times pages left the tier between the look-up and the copy on this rank.",
    "restore_failures": "Times this rank stopped restoring for a while because the tier failed it or a record was damaged.",
    "computed_tokens": "Prompt tokens that this rank computed.",
}
"""Counters of a prefill rank with ``--radix-cache-backend oasis``; another rank's stay at nought."""

RECOVERING = {
    "recomputes": "Times this rank had a request computed again after it lost its tier, its lease or what it read.",
    "recomputed": "Times that a request of this rank went on after it was computed again.",
    "recompute_failed_attempts": "Requests of this rank that failed after all their attempts to be computed again.",
    "recompute_failed_deadline": "Requests of this rank that were not computed again in time.",
    "recompute_failed_refused": "Requests of this rank that failed and were not computed again: policy, error or request forbid it.",
}
"""Counters of a decode rank whose requests have failed; another rank's stay at nought."""

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
        **RESTORING,
    },
    "decode": {
        "requests": "Requests whose pull this rank started.",
        "admitted": "Requests this rank admitted, complete and verified.",
        "failed": "Requests whose pull failed or was aborted on this rank.",
        "bytes_records": "Payload bytes of whole pages pulled by this rank.",
        "bytes_partial_page": "Payload bytes of partial prompt pages pulled by this rank.",
        "bytes_manifest": "Bytes of manifests received by this rank.",
        "read_failures": "Reads of this rank that failed, timed out or did not verify.",
        "reads_damaged": "Of those, reads of this rank that brought other bytes than were published.",
        "quarantined": "Staging windows of this rank given up while a read might still write into them.",
        "moved": "Rooms that a tier sent on to a memory node, for requests of this rank.",
        "searches": "Rooms that this rank looked for at memory nodes because their tier or prefill node was lost.",
        "links_lost": "Connections to tiers that this rank lost.",
        "internal_errors": "Faults of ours caught by this rank's pull loop.",
        **RECOVERING,
        **WORKING_SETS,
    },
}
GAUGES = {
    "prefill": {"publications": "Requests being published by this rank."},
    "decode": {
        "pulls": "Requests that wait for a commit or are being pulled by this rank.",
        "host_cache_bytes": "Host bytes of pieces cached by this rank.",
        "blocks_held": "Blocks of running requests that this rank knows by content.",
        "blocks_cached": "Blocks that this rank knows by content and no running request has.",
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
        self._sent: dict[tuple[str, ...], float] = {}
        self._metrics: dict | None = None

    def _create(self) -> dict:
        from prometheus_client import Counter, Gauge

        made = {n: Counter(f"oasis_{self.role}_{n}", text, ["rank"]) for n, text in COUNTERS[self.role].items()}
        if self.role == "decode":
            labels = {"stalls": ["rank", "le"], "stall_seconds": ["rank"]}
            made |= {n: Counter(f"oasis_decode_{n}", text, labels[n]) for n, text in STALLS.items()}
        return made | {n: Gauge(f"oasis_{self.role}_{n}", text, ["rank"], multiprocess_mode="mostrecent") for n, text in GAUGES[self.role].items()}

    def __call__(self, totals: Mapping[str, int], gauges: Mapping[str, float], stalls: Mapping | None = None) -> None:
        """``stalls``: {"bounds_ms": [n], "counts": [n or n + 1] per bucket, "sum_ms", "count"}, totals as well."""
        if self._metrics is None:
            self._metrics = self._create()
        for name in COUNTERS[self.role]:
            self._grow(name, totals.get(name, 0))
        if stalls:
            for bound, count in cumulative(stalls):
                self._grow("stalls", count, bound)
            self._grow("stall_seconds", stalls["sum_ms"] / 1000)
        for name, value in gauges.items():
            self._metrics[name].labels(self.rank).set(value)

    def _grow(self, name: str, total: float, *labels: str) -> None:
        self._metrics[name].labels(self.rank, *labels).inc(total - self._sent.get((name, *labels), 0))
        self._sent[name, *labels] = total


def cumulative(stalls: Mapping) -> list[tuple[str, int]]:
    """(``le`` in seconds, waits of at most that) of each bucket, the last one without a bound."""
    bounds, counts = stalls["bounds_ms"], stalls["counts"]
    below = list(accumulate(counts[: len(bounds)]))
    return [*((f"{bound / 1000:g}", n) for bound, n in zip(bounds, below)), ("+Inf", stalls["count"])]
