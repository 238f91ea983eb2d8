"""What a running decode node does, in figures: two looks at its ``/server_info`` and what grew between them.

``figures`` is a pure function of the looks; ``oasis top`` draws it (``top_view.py``) or prints it. A counter that the node does not
report, or that nothing has moved yet, gives None.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from oasis_sglang.stack import get_json

PHASES = ("manifest", "summaries", "pieces", "partial_page", "records", "on_demand")
FLOWS = ("steps", "tokens_accepted", "fetched", "swaps_committed", "swaps_late", "plans_stale", "folds", "waits", *(f"bytes_{p}" for p in PHASES))
"""Counters shown per second and in total."""
QUANTILES = (0.5, 0.95, 0.99)
TIMEOUT_S = 10.0


class TopError(Exception):
    """No decode node answers at the URL; the message is one line."""


class Look(NamedTuple):
    """``seconds``: when, on any steady clock. ``info``: the node's whole ``/server_info``; dp rank 0 is looked at."""

    seconds: float
    info: dict

    @property
    def oasis(self) -> dict:
        return self.info["internal_states"][0]["oasis"]

    @property
    def sets(self) -> dict:
        """Empty for a node with ``mode=exact``."""
        return self.oasis.get("working_sets") or {}


def look(url: str) -> Look:
    """Raises ``TopError``."""
    try:
        seconds, info = time.monotonic(), get_json(url + "/server_info", TIMEOUT_S)
    except urllib.error.HTTPError as error:
        raise TopError(f"{url} is not an Oasis worker: {error}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise TopError(f"no server answers at {url}: {getattr(error, 'reason', None) or error}") from error
    try:
        oasis = info["internal_states"][0]["oasis"]
    except (TypeError, KeyError, IndexError):
        raise TopError(f"{url} is not an Oasis worker") from None
    if oasis.get("role") != "decode":
        raise TopError(oasis.get("error") or f"{url} is a prefill worker; give the URL of a decode worker")
    return Look(seconds, info)


def counters(oasis: Mapping) -> dict[str, float | np.ndarray]:
    """All that only grows, by name; ``stall_counts`` int64 [buckets], ``head_misses``, ``head_wanted``, ``head_missed_mass`` [layers * kv_heads]."""
    sets = oasis.get("working_sets") or {}
    found = {**oasis.get("totals", {}), **oasis.get("speculation", {}), **sets.get("steps", {})}
    if stalls := sets.get("stalls"):
        found |= {"stall_counts": np.array(stalls["counts"]), "stall_sum_ms": stalls["sum_ms"], "stall_count": stalls["count"]}
    if heads := sets.get("heads"):
        found |= {f"head_{k}": np.array(heads[k]) for k in ("misses", "wanted", "missed_mass")}
    return found


def growth(before: Mapping, after: Mapping) -> dict:
    """``after - before`` by name. What has shrunk was started anew: then all of ``after`` is growth."""
    grown = {name: value - before[name] if name in before else value for name, value in after.items()}
    return dict(after) if any(np.min(value, initial=0) < 0 for value in grown.values()) else grown


def shares(grown: Mapping, bounds_ms: Sequence[float] = ()) -> dict:
    """Ratios of counters that grew together.

    ``misses_share`` of wanted blocks; ``missed_mass``: attention mass of a request's step on blocks that were not there, mean over
    its selecting heads; ``used_share`` and ``wasted_share`` of fetched pieces; ``late_share`` of swaps; ``stall_*_ms`` of waits.
    """
    def of(part: str, *whole: str) -> float | None:
        below = sum(grown[name] for name in whole if name in grown)
        return float(grown[part] / below) if part in grown and below else None

    mass = of("missed_mass_ppm", "request_steps")
    found = {"misses_share": of("misses", "wanted"), "missed_mass": None if mass is None else mass / 1e6,
             "tokens_per_verify": of("tokens_accepted", "verify_steps"), "drafts_accepted_share": of("drafts_accepted", "drafts_proposed"),
             "used_share": of("fetched_used", "fetched"), "wasted_share": of("fetched_wasted", "fetched"),
             "late_share": of("swaps_late", "swaps_late", "swaps_committed"), "fallback_share": of("fallback_rows", "fallback_rows", "lookahead_rows"),
             "plan_us_per_step": of("plan_microseconds", "steps"), "score_us_per_step": of("score_microseconds", "steps"),
             "stalls": grown.get("stall_count"), "stall_mean_ms": of("stall_sum_ms", "stall_count")}
    for q in QUANTILES:
        found[f"stall_p{q * 100:g}_ms"] = quantile(bounds_ms, grown["stall_counts"], grown["stall_count"], q) if "stall_counts" in grown else None
    return found


def quantile(bounds: Sequence[float], counts: Sequence[int], total: int, q: float) -> float | None:
    """Of a histogram: ``counts`` [len(bounds) or one more] per bucket, ``total`` of all. Linear within a bucket; the last bound for what lies above it."""
    below = [0, *accumulate(int(n) for n in counts[: len(bounds)])]
    if total <= 0 or not bounds:
        return None
    for i, bound in enumerate(bounds):
        if below[i + 1] >= q * total:
            low = bounds[i - 1] if i else 0.0
            inside = below[i + 1] - below[i]
            return float(low + (bound - low) * ((q * total - below[i]) / inside if inside else 1.0))
    return float(bounds[-1])


def layers(grown: Mapping, num_layers: int, kv_heads: int) -> list[dict]:
    """Per layer: share of misses and missed mass, mean over its heads, and the head that misses the most mass per step of a
    request; ``worst`` marks the layer with the worst head of all. Empty without steps."""
    steps = grown.get("request_steps")
    if not steps or "head_wanted" not in grown:
        return []
    misses, wanted, mass = (grown[f"head_{k}"].reshape(num_layers, kv_heads) for k in ("misses", "wanted", "missed_mass"))
    mass, most = mass / steps, wanted.sum(1)
    worst = mass.argmax(1)
    top = int(mass.max(1).argmax())
    return [{"layer": n, "misses_share": float(misses[n].sum() / most[n]) if most[n] else None, "missed_mass": float(mass[n].mean()),
             "worst_head": int(worst[n]), "worst_missed_mass": float(mass[n, worst[n]]), "worst": n == top} for n in range(num_layers)]


def figures(before: Look | None, now: Look) -> dict:
    """All that ``oasis top`` shows. ``now``: since ``before``, None without one; ``total``: since the node started."""
    oasis, sets, info = now.oasis, now.sets, now.info
    config, layout, total = oasis.get("config", {}), oasis.get("layout", {}), counters(now.oasis)
    bounds = (sets.get("stalls") or {}).get("bounds_ms", ())
    window = None
    grown = total
    if before is not None:
        seconds, grown = now.seconds - before.seconds, growth(counters(before.oasis), total)
        window = {"seconds": seconds, "per_second": {n: float(grown[n] / seconds) if n in grown else None for n in FLOWS}, **shares(grown, bounds)}
    by_layer = {since: layers(part, layout["num_layers"], layout["kv_heads"]) if layout else [] for since, part in (("now", grown), ("total", total))}
    return {
        "node": {"model": info.get("served_model_name") or info.get("model_path"), "uptime_seconds": oasis.get("uptime_seconds"),
                 "speculation": info.get("speculative_algorithm"),
                 **{k: config.get(k) for k in ("mode", "budget_tokens", "tail_tokens", "summary", "on_miss", "admission", "fetch_blocks_per_step")}},
        "now": window,
        "total": {"count": {n: total.get(n) for n in FLOWS}, **shares(total, bounds)},
        "layers": by_layer if by_layer["total"] else None,
        "kv_pool": {"tokens": oasis.get("kv_pool_tokens"), "peak_tokens": sets.get("physical_tokens_peak", oasis.get("kv_pool_tokens_peak")),
                    "size_tokens": sets.get("physical_tokens", info.get("max_total_num_tokens"))},
        "working_sets": {"used": sets.get("held", {}).get("sets"), "size": sets.get("sets")},
        "host_cache": sets.get("host_cache"), "reuse": sets.get("reuse"),
        "lane": sets.get("lane"),
        "tiers": oasis.get("tiers", {}),
        "leases": oasis.get("leases"),
        "pulls": oasis.get("pulls"),
        "reads": oasis.get("flights"),
        "staging": oasis.get("staging"),
        "leaks": sets.get("leaks"),
        "running": sets.get("live"),
        "waiting": sets.get("held", {}).get("waiting"),
        "requests": sets.get("live_requests"),
    }
