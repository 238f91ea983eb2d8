"""What the servers of a system say of themselves: looked at before and after a run, and sampled meanwhile."""

from __future__ import annotations

import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple, Self

from prometheus_client.parser import text_string_to_metric_families

from oasis_sglang.bench.records import Node, Request
from oasis_sglang.probes import get_json
from oasis_sglang.top import counters, growth, shares

PERIOD_S = 0.5
SETTLE_S = 20.0
_ANSWER_S = 60.0
_BATCH = re.compile(r"Decode batch.*?#running-req: (\d+).*?token usage: [\d.]+")
WAITS = {"wait for the plan": "plan_wait_microseconds", "wait for trust": "trust_wait_microseconds"}
STAGES = {"scores, beside it": "score_microseconds", "plan, beside it": "plan_microseconds", **WAITS}
BLOCKS = "wait for blocks"
"""Of a request, while others go on."""
REST = "forward and the rest"


class Places(NamedTuple):
    """URLs of the servers whose counters are read; "" where there is none. ``log``: of decode."""

    prefill: str = ""
    decode: str = ""
    tiers: tuple[str, ...] = ()
    log: Path | None = None


class Look(NamedTuple):
    """``oasis``: decode's report, empty for others. ``log_size``: bytes of decode's log. ``tiers``: bytes of their records in use or kept; None
    without tiers."""

    oasis: dict
    info: dict
    computed: float | None
    transferred: float | None
    log_size: int
    tiers: int | None = None


def sample_sum(page: str, name: str, **labels: str) -> float | None:
    """Sum of the samples ``name`` with these labels in a Prometheus page; None when there is none, which is not the same as 0."""
    found = [s.value for family in text_string_to_metric_families(page) for s in family.samples if s.name == name and labels.items() <= s.labels.items()]
    return sum(found) if found else None


def look(places: Places) -> Look:
    """Raises ``OSError``, and ``ValueError`` for what is no answer of such a server."""
    computed = transferred = None
    if places.prefill:
        with urllib.request.urlopen(places.prefill + "/metrics", timeout=_ANSWER_S) as reply:
            page = reply.read().decode()
        computed = sample_sum(page, "sglang:realtime_tokens_total", mode="prefill_compute")
        moved = sample_sum(page, "sglang:kv_transfer_total_mb_sum")
        transferred = None if moved is None else moved * 2**20
    info = get_json(places.decode + "/server_info", _ANSWER_S) if places.decode else {}
    return Look(_oasis(info), info, computed, transferred, places.log.stat().st_size if places.log else 0, _tiers(places))


def settled(places: Places) -> Look:
    """Once nothing is being pulled any more: reads on demand may end after the answer."""
    deadline = time.monotonic() + SETTLE_S
    while (now := look(places)).oasis.get("pulls") and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


def _oasis(info: Mapping) -> dict:
    states = info.get("internal_states") or [{}]
    return states[0].get("oasis") or {}


def _tiers(places: Places) -> int | None:
    return sum(tier_used(get_json(url + "/state", _ANSWER_S)) for url in places.tiers) if places.tiers else None


def several(look: Look) -> bool:
    """Whether decode has more schedulers than the one whose counters are read."""
    return len(look.info.get("internal_states") or ()) > 1


def wire_bytes(before: Look, after: Look) -> int | None:
    if after.oasis:
        total = [look.oasis["plane"]["landed_bytes"] + look.oasis["totals"].get("bytes_manifest", 0) for look in (before, after)]
        return total[1] - total[0]
    return _grown(before.transferred, after.transferred)


def _grown(before: float | None, after: float | None) -> int | None:
    """What was not there before has come with its first count."""
    return None if after is None else round(after - (before or 0.0))


class Sampler:
    """Looks at decode and the tiers every ``PERIOD_S`` seconds while a block runs; what cannot be read once is left out. Every kind of decode is
    asked for its ``/server_info``, which its scheduler has to answer between steps: what that costs is the same for all."""

    def __init__(self, places: Places):
        self.places = places
        self.host: list[int] = []
        self.pool: list[int] = []
        self.tiers: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while True:
            try:
                self._sample()
            except (OSError, LookupError, TypeError, ValueError, HTTPException):
                pass
            if self._stop.wait(PERIOD_S):
                return

    def _sample(self) -> None:
        if (tiers := _tiers(self.places)) is not None:
            self.tiers.append(tiers)
        if not self.places.decode:
            return
        if oasis := _oasis(get_json(self.places.decode + "/server_info", _ANSWER_S)):
            self.host.append(host_used(oasis))
            self.pool.append(pool_used(oasis))
        else:  # of what the scheduler has published, without asking it
            self.pool.append(pool_loaded(get_json(self.places.decode + "/v1/loads?include=core", _ANSWER_S)))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()


def host_used(oasis: Mapping) -> int:
    """Host cache, and the windows of staging that reads own."""
    staging, cache = oasis.get("staging") or {}, (oasis.get("working_sets") or {}).get("host_cache") or {}
    windows = sum(staging.values())
    return cache.get("used_bytes", 0) + (oasis["host_bytes_reserved"] * (windows - staging["free"]) // windows if windows else 0)


def pool_used(oasis: Mapping) -> int:
    """Tokens of the KV pool in use."""
    sets = oasis.get("working_sets")
    return sets["held"]["pages"] * oasis["layout"]["block_tokens"] if sets else oasis["kv_pool_tokens"]


def pool_loaded(loads: Mapping) -> int:
    """The same of SGLang's own ``/v1/loads``. Tokens that it only keeps for a later request are not in use."""
    return sum(rank["num_used_tokens"] for rank in loads["loads"])


def tier_used(state: Mapping) -> int:
    """Bytes of records that are in use or kept."""
    inventory = state["inventory"]
    return (inventory["records"] - inventory["free"]) * state["record_bytes"]


def node(before: Look, after: Look, sampler: Sampler, places: Places, *, arena_bytes: int | None) -> Node:
    """What grew between two looks, and the samples in between."""
    oasis = after.oasis
    found = Node(wire_bytes=wire_bytes(before, after), concurrency=batch_at_most(places.log, before.log_size),
                 kv_pool_tokens=pool_size(after), tier_reserved_bytes=arena_bytes, computed_tokens=_grown(before.computed, after.computed),
                 tier_kept_bytes=before.tiers)
    if sampler.tiers:
        found.tier_used_bytes_peak = max(sampler.tiers)
    if sampler.pool:
        found.kv_pool_tokens_peak = max(sampler.pool)
    if not oasis:
        return found
    found.host_reserved_bytes = oasis["host_bytes_reserved"] + ((oasis.get("working_sets") or {}).get("host_cache") or {}).get("capacity_bytes", 0)
    if sets := oasis.get("working_sets"):
        found.device_extra_bytes = sets["sets_bytes"] + (sets["lane"] or {}).get("bytes", 0)
    if sampler.host:
        busy = [host for host, pool in zip(sampler.host, sampler.pool) if pool] or sampler.host
        found.host_used_bytes_mean, found.host_used_bytes_peak = statistics.fmean(busy), max(*sampler.host, _new_peak(before, after))
    grown = growth(counters(before.oasis), counters(oasis))
    if grown.get("steps"):
        found.wanted, found.misses = int(grown["wanted"]), int(grown["misses"])
        found.missed_mass = shares(grown)["missed_mass"]
        found.stalls, found.stall_seconds = int(grown["stall_count"]), float(grown["stall_sum_ms"]) / 1e3
        found.request_steps, found.swapped_pieces = int(grown["request_steps"]), int(grown.get("swaps_committed", 0))
        found.tokens_per_step = shares(grown)["tokens_per_verify"]
    return found


def _new_peak(before: Look, after: Look) -> int:
    """The host cache's highest since the start, if it was reached between two looks; a sample may miss it."""
    was, now = (((look.oasis.get("working_sets") or {}).get("host_cache") or {}).get("peak_bytes", 0) for look in (before, after))
    return now if now > was else 0


def stages(before: Look, after: Look, step_ms: float | None) -> dict[str, float]:
    """Mean milliseconds per decode step that Oasis' own work took, by stage, the whole step, and what is left of it without Oasis' waits; nothing
    counts the parts of that. ``step_ms``: as the client saw it, for all tokens of a step; None: there is no whole. Empty for systems without
    Oasis' counters."""
    if not after.oasis:
        return {}
    grown = growth(counters(before.oasis), counters(after.oasis))
    steps = grown.get("steps", 0)
    if not steps:
        return {}
    found = {stage: float(grown.get(name, 0)) / 1e3 / steps for stage, name in STAGES.items()}
    found[BLOCKS] = float(grown.get("stall_sum_ms", 0.0)) / (grown.get("request_steps") or 1)
    return found if step_ms is None else {"whole step": step_ms, REST: max(0.0, step_ms - sum(found[name] for name in (*WAITS, BLOCKS))), **found}


def pool_size(look: Look) -> int | None:
    sets = look.oasis.get("working_sets")
    return sets["physical_tokens"] if sets else look.info.get("max_total_num_tokens")


def batch_at_most(log: Path | None, skip: int) -> int | None:
    """Largest batch that a decode worker told of in its log after ``skip`` bytes."""
    if log is None:
        return None
    with log.open("rb") as file:
        file.seek(skip)
        return max(map(int, _BATCH.findall(file.read().decode(errors="replace"))), default=None)


def account(requests: list[Request], rids: list[str], after: Look, token_bytes: int | None) -> None:
    """Adds to ``requests`` what decode counted for each. ``token_bytes``: K and V of a token in all layers, for requests that decode does not
    report; None: the model that is served is not known."""
    reports = after.oasis.get("requests", {})
    for request, rid in zip(requests, rids):
        if request.error is None:
            if token_bytes is not None:
                request.full_transfer_bytes = request.prompt_tokens * token_bytes
            if rid in reports:
                request.full_transfer_bytes = reports[rid].get("full_transfer_bytes", request.full_transfer_bytes)
                request.admitted_bytes_by_phase = reports[rid]["admitted_bytes_by_phase"]
                request.lifetime_bytes_by_phase = reports[rid]["lifetime_bytes_by_phase"]
