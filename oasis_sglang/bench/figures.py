"""Figures of a run: their definitions, and how they come from what was recorded. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from oasis_sglang.bench.records import Equality, Point, Quality, Request, Results, Run, Spread, Summary


class Figure(NamedTuple):
    """``better``: which way is good, "" where neither is."""

    title: str
    unit: str
    better: str
    definition: str


_LOW, _HIGH = "lower", "higher"
FIGURES: dict[str, Figure] = {
    "ttft_mean": Figure("TTFT, mean", "s", _LOW, "Time to first token: from sending a request to its first output token, mean over requests."),
    "ttft_p50": Figure("TTFT, median", "s", _LOW, "Median of the time to first token."),
    "ttft_p95": Figure("TTFT, p95", "s", _LOW, "95th percentile of the time to first token (the nearest request above)."),
    "ttft_worst": Figure("TTFT, worst", "s", _LOW, "Largest time to first token."),
    "itl_mean": Figure("ITL, mean", "s", _LOW, "Inter-token latency: time between neighbouring output tokens, mean over all gaps of all requests. "
                       "Tokens of one chunk have no time between them."),
    "itl_p95": Figure("ITL, p95", "s", _LOW, "95th percentile of the gaps between neighbouring output tokens."),
    "itl_worst": Figure("ITL, worst", "s", _LOW, "Longest gap between neighbouring output tokens of any request."),
    "tpot_mean": Figure("TPOT, mean", "s", _LOW, "Time per output token: of each request (last - first token) / (output tokens - 1), mean over requests."),
    "output_tokens_per_second": Figure("throughput", "tokens/s", _HIGH, "Output tokens of all requests / time from the first request sent to the last token."),
    "decode_tokens_per_second": Figure("decode throughput", "tokens/s", _HIGH, "Output tokens after each request's first / time from the earliest first token "
                                       "to the last token: what decode does once it has begun."),
    "requests_per_second": Figure("requests", "1/s", _HIGH, "Requests answered / time from the first request sent to the last token."),
    "goodput": Figure("goodput", "1/s", _HIGH, "As `requests`, counting only those whose TTFT and mean ITL (their TPOT) are within the SLO."),
    "slo_share": Figure("within the SLO", "", _HIGH, "Share of requests whose TTFT and TPOT are within the SLO."),
    "failed": Figure("failed", "", _LOW, "Requests that ended with an error."),
    "full_transfer_bytes": Figure("full transfer", "B", "", "2 x layers x KV heads x head size x item size x prompt tokens, mean per request: as decode "
                                  "reports it, otherwise of the model that is known to be served."),
    "admitted_bytes": Figure("admitted", "B", _LOW, "Payload that decode received for a request before its first decode step (pieces, summaries, partial page, "
                             "manifest), mean per request. Stock: all that was transferred."),
    "lifetime_bytes": Figure("lifetime", "B", _LOW, "Payload that decode received for a request until its release, mean per request."),
    "admitted_share": Figure("admitted / full", "", _LOW, "Sum of admitted bytes / sum of full-transfer bytes."),
    "lifetime_share": Figure("lifetime / full", "", _LOW, "Sum of lifetime bytes / sum of full-transfer bytes."),
    "wire_bytes": Figure("wire, counted", "B", _LOW, "Payload from prefill's host to decode in the whole run, by the system's own counter."),
    "wire_metered_bytes": Figure("wire, metered", "B", _LOW, "What the network interface of decode's host received in the run, headers and control included; "
                                                             "only "
                                 "with --hosts."),
    "host_reserved_bytes": Figure("decode host, reserved", "B", _LOW, "Host memory of decode set aside for KV outside the pool: host cache and staging."),
    "host_used_bytes_mean": Figure("decode host, mean", "B", _LOW, "Of it in use, mean over samples while requests ran."),
    "host_used_bytes_peak": Figure("decode host, peak", "B", _LOW, "Of it in use, most."),
    "cluster_host_bytes_peak": Figure("cluster host, peak", "B", _LOW, "Records in the tiers and what decode's host has in use, each at its most; without the "
                                      "records that the tiers had kept of earlier runs when this one began (never less than 0: old ones give way to "
                                      "new). A capacity tier moves host memory, it does not abolish it."),
    "decode_memory_bytes": Figure("decode memory, metered", "B", _LOW, "Resident memory of decode's processes, private and memory files: the most since "
                                  "its stack was ready, above what it was then. Runs on one stack add up. Without a GPU this has the KV pool in it, and "
                                  "heap that is free but kept."),
    "tier_memory_bytes": Figure("tier memory, metered", "B", _LOW, "The same of the tier's processes; the arena, which they share, once."),
    "computed_tokens": Figure("prompt tokens computed", "", _LOW, "Prompt tokens that prefill computed; it had the others in its cache or from the tier."),
    "tokens_per_step": Figure("tokens per step", "", _HIGH, "Output tokens of a verify step of a request; only with drafts."),
    "kv_pool_tokens": Figure("KV pool", "tokens", "", "Tokens of decode's KV pool."),
    "kv_pool_tokens_peak": Figure("KV pool, peak", "tokens", _LOW, "Tokens of decode's KV pool in use, most of samples every half second."),
    "device_extra_bytes": Figure("device, beside the pool", "B", _LOW, "Memory of decode's device that is neither weights nor KV pool: summaries, tables of "
                                                                       "working "
                                 "sets, the lane of critical heads."),
    "concurrency": Figure("in one batch", "", _HIGH, "Most requests in one decode batch, by the server."),
    "client_concurrency": Figure("decoding at once", "", _HIGH, "Most requests between their first and last token at one time, by the client."),
    "misses_share": Figure("misses", "", _LOW, "Of the blocks that the newest rows wanted, the share that was not resident."),
    "missed_mass": Figure("missed mass", "", _LOW, "Share of a step's expected attention on blocks that were not resident, mean."),
    "swaps_per_step": Figure("swaps", "", _LOW, "Pieces that a request's decode step wrote over others in the KV pool, from the host cache, over all layers "
                                                "and heads."),
    "stalls": Figure("stalls", "", _LOW, "Steps that waited for blocks."),
    "stall_seconds": Figure("stalled", "s", _LOW, "Time that steps waited for blocks, in all."),
    "accuracy": Figure("accuracy", "", _HIGH, "Mean score of answers that are known: share of the expected strings in the text."),
    "kl": Figure("KL", "nats", _LOW, "KL(dense || system) of the next token, mean over forced decode steps and requests. Whatever the system's own options, "
                 "each step waits for the blocks it wants (on_miss: wait, at most 30 s), without SGLang's overlap schedule. This is what choosing blocks "
                 "costs; what blocks that come late cost is not in it."),
    "kl_worst": Figure("KL, worst request", "nats", _LOW, "The largest mean KL of any request; measured as KL."),
    "top1": Figure("top-1", "", _HIGH, "How often the most likely next token is the dense run's; measured as KL."),
    "top1_worst": Figure("top-1, worst request", "", _HIGH, "The lowest top-1 of any request; measured as KL."),
    "cpu_seconds": Figure("CPU", "s", _LOW, "User and system time of all processes of the system in the run."),
}

_RATES = ("output_tokens_per_second", "decode_tokens_per_second", "requests_per_second", "goodput", "slo_share")


def of_run(run: Run, slo: Mapping[str, float]) -> dict[str, float]:
    """Figures of one run by name; what nothing was recorded for is absent. ``slo``: ``ttft`` and ``itl`` in seconds. A run without an answer has
    rates of 0 and no latency."""
    answered = [request for request in run.requests if request.error is None and request.token_times]
    found: dict[str, float | None] = {"failed": len(run.requests) - len(answered), **_counted(run, answered), **_metered(run)}
    if answered:
        found |= _latency(answered) | _rates(run, answered, slo)
    elif run.requests:
        found |= dict.fromkeys(_RATES, 0.0)
    scores = [request.score for request in answered if request.score is not None]
    if scores:
        found["accuracy"] = statistics.fmean(scores)
    return {name: float(value) for name, value in found.items() if value is not None}


def _latency(answered: Sequence[Request]) -> dict[str, float]:
    first = sorted(request.token_times[0] for request in answered)
    gaps = sorted(later - earlier for request in answered for earlier, later in pairwise(request.token_times))
    found = {"ttft_mean": statistics.fmean(first), "ttft_p50": statistics.median(first), "ttft_p95": nearest(first, 0.95), "ttft_worst": first[-1]}
    if gaps:
        found |= {"itl_mean": statistics.fmean(gaps), "itl_p95": nearest(gaps, 0.95), "itl_worst": gaps[-1],
                  "tpot_mean": statistics.fmean(per_token(request) for request in answered if len(request.token_times) > 1)}
    return found


def per_token(request: Request) -> float:
    """Seconds per output token after the first; 0 of a single one."""
    times = request.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def nearest(ordered: Sequence[float], q: float) -> float:
    """Quantile ``q`` of values in order: the nearest one above."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def _rates(run: Run, answered: Sequence[Request], slo: Mapping[str, float]) -> dict[str, float | None]:
    tokens = sum(len(request.token_times) for request in answered)
    begun = min(request.sent + request.token_times[0] for request in answered)
    ended = max(request.sent + request.token_times[-1] for request in answered)
    good = sum(request.token_times[0] <= slo["ttft"] and per_token(request) <= slo["itl"] for request in answered)
    return {"output_tokens_per_second": tokens / run.seconds, "requests_per_second": len(answered) / run.seconds, "goodput": good / run.seconds,
            "slo_share": good / len(run.requests), "decode_tokens_per_second": (tokens - len(answered)) / (ended - begun) if ended > begun else None}


def _counted(run: Run, answered: Sequence[Request]) -> dict[str, float | None]:
    node = run.node
    # Where decode reports requests one by one, those that it reported: it remembers only so many.
    reported = [request for request in answered if request.admitted_bytes_by_phase is not None] or answered
    known = [request.full_transfer_bytes for request in reported if request.full_transfer_bytes is not None]
    full = sum(known) if len(known) == len(reported) else 0  # the shares are of the same requests
    admitted, lifetime = (_bytes(getattr(request, name) for request in reported) for name in ("admitted_bytes_by_phase", "lifetime_bytes_by_phase"))
    if admitted is None and node.wire_bytes is not None and answered:  # counted as a whole
        admitted = lifetime = node.wire_bytes
    each = len(reported) or 1
    found = {"full_transfer_bytes": full / each if full else None,
             "admitted_bytes": None if admitted is None else admitted / each, "lifetime_bytes": None if lifetime is None else lifetime / each,
             "admitted_share": admitted / full if full and admitted is not None else None,
             "lifetime_share": lifetime / full if full and lifetime is not None else None,
             "swaps_per_step": node.swapped_pieces / node.request_steps if node.request_steps and node.swapped_pieces is not None else None,
             "misses_share": node.misses / node.wanted if node.wanted and node.misses is not None else None}
    if node.host_used_bytes_peak is not None and node.tier_used_bytes_peak is not None:
        found["cluster_host_bytes_peak"] = node.host_used_bytes_peak + max(0, node.tier_used_bytes_peak - (node.tier_kept_bytes or 0))
    same = ("wire_bytes", "computed_tokens", "tokens_per_step", "kv_pool_tokens", "kv_pool_tokens_peak", "device_extra_bytes", "concurrency",
            "host_reserved_bytes", "host_used_bytes_mean", "host_used_bytes_peak", "missed_mass", "stalls", "stall_seconds")
    return found | {name: getattr(node, name) for name in same}


def _bytes(by_phase: Iterable[Mapping[str, int] | None]) -> int | None:
    found = [sum(phases.values()) for phases in by_phase if phases is not None]
    return sum(found) if found else None


def _metered(run: Run) -> dict[str, float | None]:
    meters = run.meters
    return {"wire_metered_bytes": meters.wire_in_bytes, "decode_memory_bytes": meters.decode_memory_bytes,
            "tier_memory_bytes": meters.tier_memory_bytes, "client_concurrency": meters.client_concurrency, "cpu_seconds": meters.cpu_seconds}


def of_quality(rows: Sequence[Quality]) -> dict[str, float]:
    """At least one row."""
    return {"kl": statistics.fmean(row.kl for row in rows), "kl_worst": max(row.kl for row in rows),
            "top1": statistics.fmean(row.top1 for row in rows), "top1_worst": min(row.top1 for row in rows)}


def spread(values: Sequence[float]) -> Spread:
    """At least one value."""
    return Spread(statistics.median(values), min(values), max(values), statistics.fmean(values), len(values))


def summarise(results: Results) -> list[Summary]:
    """One summary for each system, workload and point, in the order of the runs; quality has no repeats."""
    runs: dict[tuple, list[dict[str, float]]] = {}
    for run in results.runs:
        runs.setdefault(_key(run.system, run.workload, run.point), []).append(of_run(run, results.slo))
    quality: dict[tuple, list[Quality]] = {}
    for row in results.quality:
        quality.setdefault(_key(row.system, row.workload, row.point), []).append(row)
    summaries = []
    for key in dict.fromkeys([*runs, *quality]):
        found: dict[str, list[float]] = {}
        for figures in [*runs.get(key, ()), *([of_quality(quality[key])] if key in quality else [])]:
            for name, value in figures.items():
                found.setdefault(name, []).append(value)
        system, workload, point = key
        summaries.append(Summary(system, workload, dict(point), {name: spread(found[name]) for name in FIGURES if name in found}))
    return summaries


def equality(results: Results) -> list[Equality]:
    """Of each system's answers with the base's, by workload and point. Both have to have answered."""
    dense = {system.name: system.dense for system in results.systems}
    base: dict[tuple, list[int]] = {}
    for run in results.runs:
        if run.system == results.base:
            base |= {(*_key(run.workload, run.point), run.repeat, r.name): r.output_ids for r in run.requests if r.error is None}
    found: dict[tuple, list[bool]] = {}
    for run in results.runs:
        if run.system != results.base:
            same = found.setdefault(_key(run.system, run.workload, run.point), [])
            for request in run.requests:
                other = base.get((*_key(run.workload, run.point), run.repeat, request.name))
                if request.error is None and other is not None:
                    same.append(request.output_ids == other)
    return [Equality(system, results.base, workload, dict(point), sum(same), len(same), dense[system] and dense[results.base])
            for (system, workload, point), same in found.items()]


def _key(*parts: str | Point) -> tuple:
    return tuple(tuple(sorted(part.items())) if isinstance(part, dict) else part for part in parts)
