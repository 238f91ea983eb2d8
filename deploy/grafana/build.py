"""``python deploy/grafana/build.py``: writes ``oasis.json``, the dashboard described below, for Grafana 10 and newer.

Metrics are those of docs/metrics.md and SGLang's own; a test compares each query with what the code exports. A row here is a row there. Where an alert of
the chart looks at the same figure, the threshold is the alert's.
"""

from __future__ import annotations

import json
from pathlib import Path

OUT = Path(__file__).with_name("oasis.json")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SHOWN = 'namespace=~"$namespace", pod=~"$pod"'
ROLE = "app_kubernetes_io_component"
COLUMNS, HEIGHT = 24, 8


# -- queries ------------------------------------------------------------------------------------------------------------


def only(metric: str, match: str = "") -> str:
    return f"{metric}{{{SHOWN}{', ' if match else ''}{match}}}"


def added(vector: str, by: str) -> str:
    return f"sum by ({by}) ({vector})" if by else f"sum({vector})"


def now(metric: str, by: str = "pod", match: str = "") -> str:
    """A gauge, summed over what ``by`` does not name."""
    return added(only(metric, match), by)


def per_second(metric: str, by: str = "pod", match: str = "") -> str:
    return added(f"rate({only(metric, match)}[$__rate_interval])", by)


def of_all(metrics: list[str], by: str = "pod") -> str:
    return "(" + " + ".join(per_second(metric, by) for metric in metrics) + ")"


def ratio(part: str, whole: str, by: str = "pod") -> str:
    """Of two counters."""
    return f"{per_second(part, by)} / {per_second(whole, by)}"


def quantile(q: float, buckets: str, match: str = "") -> str:
    return f"histogram_quantile({q}, {per_second(buckets, 'le', match)})"


def quantiles(buckets: str, match: str = "") -> dict[str, str]:
    return {f"p{100 * q:g}": quantile(q, buckets, match) for q in (0.5, 0.9, 0.99)}


def named(prefix: str, metrics: dict[str, str], by: str = "pod") -> dict[str, str]:
    """``metrics``: what follows the prefix -> what it is called. legend -> rate of each of these counters."""
    return {f"{legend} {{{{{by}}}}}": per_second(f"{prefix}_{name}_total", by) for name, legend in metrics.items()}


# -- panels -------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "timeseries": {"legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
                   "tooltip": {"mode": "multi", "sort": "desc"}},
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "background", "graphMode": "area",
             "textMode": "auto"},
    "table": {"showHeader": True, "footer": {"show": False}},
}


def panel(kind: str, title: str, text: str, queries: dict[str, str], *, unit: str = "short", width: int = 8, height: int = HEIGHT, warn: float | None = None,
          bad: float | None = None, stacked: bool = False, least: float | None = 0, most: float | None = None) -> dict:
    """``queries``: legend -> PromQL. ``warn``, ``bad``: where yellow and red begin. ``least``, ``most``: ends of the axis."""
    steps = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": value} for color, value in (("yellow", warn), ("red", bad)) if value is not None]
    custom = {}
    if kind == "timeseries":
        custom = {"lineWidth": 1, "fillOpacity": 20 if stacked else 5, "showPoints": "never", "thresholdsStyle": {"mode": "line" if len(steps) > 1 else "off"},
                  "stacking": {"mode": "normal" if stacked else "none", "group": "A"}}
    ends = {key: value for key, value in (("min", least), ("max", most)) if value is not None}
    return {
        "type": kind, "title": title, "description": text, "datasource": DATASOURCE, "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom, "thresholds": {"mode": "absolute", "steps": steps}, "color": {
            "mode": "thresholds" if kind == "stat" else "palette-classic"}, **ends}, "overrides": []},
        "options": OPTIONS[kind],
        "targets": [{"refId": chr(ord("A") + n), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend, "range": kind != "table",
                     "instant": kind == "table", "format": "table" if kind == "table" else "time_series"} for n, (legend, expr) in enumerate(queries.items())],
    }


def lines(title: str, text: str, queries: dict[str, str], **more) -> dict:
    return panel("timeseries", title, text, queries, **more)


def figure(title: str, text: str, query: str, **more) -> dict:
    return panel("stat", title, text, {title.lower(): query}, width=3, height=4, **more)


# -- what is shown ------------------------------------------------------------------------------------------------------

ADMISSION = ["records", "partial_page", "manifest", "summaries", "pieces"]
ADMITTED = [f"oasis_decode_bytes_{phase}_total" for phase in ADMISSION]
PULLED = [*ADMITTED, "oasis_decode_bytes_on_demand_total"]
PROMPT_TOKENS = per_second("sglang:prompt_tokens_total", "namespace", 'engine_type="decode"')
MISSED_MASS = ("oasis_decode_missed_mass_ppm_total", "oasis_decode_request_steps_total")
TIERS = 'endpoint="tier-http"'
WORKERS = f'endpoint="http", {ROLE}=~"prefill|decode"'
REQUESTS = 'state=~"leased|writing"'
HELD = f"{now('oasis_tier_records', match=REQUESTS)} / {now('oasis_tier_records')}"
FIRST_TOKEN = ("sglang:time_to_first_token_seconds_bucket", 'engine_type="decode"')
FAULTS = [f"oasis_{role}_internal_errors_total" for role in ("tier", "prefill", "decode")]

ROWS = {
    "Overview": [
        figure("Tiers", "Tiers and memory nodes that answer Prometheus.", added(only("up", TIERS), "")),
        figure("Workers", "Prefill and decode workers that answer Prometheus.", added(only("up", WORKERS), "")),
        figure("Admitted", "Requests that decode workers admitted.", per_second("oasis_decode_admitted_total", ""), unit="reqps"),
        figure("Not admitted", "Share of the requests whose pull failed or was aborted; clients that leave count, too.",
               ratio("oasis_decode_failed_total", "oasis_decode_requests_total", ""), unit="percentunit", warn=0.02, bad=0.1),
        figure("First token", "Nine of ten requests had their first token within this, from their arrival at decode.", quantile(0.9, *FIRST_TOKEN), unit="s",
               warn=5, bad=10),
        figure("Missed mass", "Share of the expected attention on blocks that are not resident, mean over heads, steps and requests.",
               ratio(*MISSED_MASS, "") + " / 1e6", unit="percentunit", warn=0.05, bad=0.1),
        figure("Fullest arena", "Share of the records that belong to requests that run or wait, in the tier where it is highest.", f"max({HELD})",
               unit="percentunit", warn=0.75, bad=0.9),
        figure("Own faults", "Internal errors of tiers and workers in 24 hours.",
               added(" or ".join(f"increase({only(metric)}[24h])" for metric in FAULTS), ""), bad=1),
    ],
    "Admission": [
        lines("Requests", "Requests whose pull began, and what became of them.",
              named("oasis_decode", {"requests": "begun", "admitted": "admitted", "failed": "failed or aborted"}), unit="reqps"),
        lines("Time to first token", "From a request's arrival at decode: prefill's queue, its computing, the commit and the pull.",
              quantiles(*FIRST_TOKEN), unit="s", bad=10),
        lines("Time between tokens", "At decode.", quantiles("sglang:inter_token_latency_seconds_bucket", 'engine_type="decode"'), unit="s"),
        lines("Where requests wait", "SGLang's queues, prefill's publications under way, decode's requests that wait for a commit or are pulled.", {
            "prefill queue {{pod}}": now("sglang:num_queue_reqs", match='engine_type="prefill"'),
            "prefill bootstrap {{pod}}": now("sglang:num_prefill_bootstrap_queue_reqs", match='engine_type="prefill"'),
            "publications {{pod}}": now("oasis_prefill_publications"),
            "decode, no slots yet {{pod}}": now("sglang:num_decode_prealloc_queue_reqs", match='engine_type="decode"'),
            "decode, being pulled {{pod}}": now("oasis_decode_pulls"),
        }),
        lines("Rooms", "What becomes of the rooms that prefill workers open at tiers, all tiers together.", named("oasis_tier", {
            "rooms_opened": "opened", "rooms_committed": "committed", "rooms_claimed": "claimed", "rooms_cancelled": "cancelled", "rooms_failed": "failed",
            "rooms_expired": "expired"}, by="namespace"), unit="ops"),
        lines("Back-pressure", "How often prefill asks again for room in a full arena. After reserve_seconds a prompt gets 503.",
              {"{{pod}}": per_second("oasis_prefill_reserve_retries_total")}, unit="ops"),
        lines("Prompt pages at tiers", "Pages that had to be written, and pages that were there by content.", {
            "written {{pod}}": per_second("oasis_tier_pages_fresh_total"), "reused {{pod}}": per_second("oasis_tier_pages_reused_total"),
            "at the memory node {{pod}}": per_second("oasis_tier_pages_there_total")}, unit="ops"),
        lines("Prompt tokens at prefill", "Tokens that were computed, and tokens that were copied back from the tier instead.", {
            "computed {{pod}}": per_second("oasis_prefill_computed_tokens_total"), "restored {{pod}}": per_second("oasis_prefill_restored_tokens_total")},
            stacked=True),
        lines("Known at decode", "Share of the prompt tokens of admitted requests that lie in blocks which the worker knew already.",
              {"{{pod}}": ratio("oasis_decode_reuse_hit_tokens_total", "oasis_decode_reuse_prompt_tokens_total")},
              unit="percentunit", most=1),
    ],
    "Wire bytes": [
        lines("Pulled by decode", "Payload that decode workers received, by what it was: on demand is for running requests, the rest for admissions.",
              {phase.replace("_", " "): per_second(f"oasis_decode_bytes_{phase}_total", "") for phase in (*ADMISSION, "on_demand")},
              unit="Bps", stacked=True),
        lines("Per prompt token", "Bytes pulled for each prompt token of requests that have ended, at admission and until the end. Compare `oasis plan`.", {
            "admission {{namespace}}": f"{of_all(ADMITTED, 'namespace')} / {PROMPT_TOKENS}",
            "lifetime {{namespace}}": f"{of_all(PULLED, 'namespace')} / {PROMPT_TOKENS}"}, unit="bytes"),
        lines("Pulled by each worker", "All phases.", {"{{pod}}": of_all(PULLED)}, unit="Bps"),
        lines("Published", "Copied by prefill into its tier, over shared memory: payload and index.",
              {"{{pod}}": per_second("oasis_prefill_bytes_published_total")}, unit="Bps"),
        lines("Between tiers", "What memory nodes read for rooms, what staging tiers fetch back to restore prefixes, and what decode gives away.", {
            "filled {{pod}}": per_second("oasis_tier_bytes_filled_total"), "fetched back {{pod}}": per_second("oasis_tier_bytes_fetched_back_total"),
            "donated by {{pod}}": per_second("oasis_decode_bytes_donated_total")}, unit="Bps"),
        lines("Not pulled", "Bytes of pieces and indexes that admissions did not pull because the worker had them.",
              {"{{pod}}": per_second("oasis_decode_reuse_bytes_saved_total")}, unit="Bps"),
    ],
    "Misses and stalls": [
        lines("Miss rate", "Of the blocks that a step's newest row wanted beside the pinned ones, those that were not resident.",
              {"{{pod}}": ratio("oasis_decode_misses_total", "oasis_decode_wanted_total")}, unit="percentunit", most=1),
        lines("Missed mass", "Share of the expected attention on blocks that are not resident, mean over heads, steps and requests.",
              {"{{pod}}": ratio(*MISSED_MASS) + " / 1e6"}, unit="percentunit", warn=0.05, bad=0.1),
        lines("Pulls for running requests", "Pieces asked for by plans, and what became of them: wanted again while resident, or never.",
              named("oasis_decode", {"fetched": "fetched", "fetched_used": "used", "fetched_wasted": "wasted", "swaps_late": "late"}), unit="ops"),
        lines("Time aside", "With on_miss=wait: share of their time that running requests stand aside.", {
            "{{pod}}": f"{per_second('oasis_decode_stall_seconds_total')} / clamp_min({now('oasis_decode_working_sets')}, 1)"},
            unit="percentunit", warn=0.1, bad=0.2),
        lines("Length of waits", "Of waits that have ended, all workers together.", quantiles("oasis_decode_stalls_total"), unit="s"),
        lines("Waits", "Waits that began, and waits that ended before everything had landed.",
              named("oasis_decode", {"waits": "begun", "waits_ended_by_bound": "ended by the bound"}), unit="ops"),
        lines("Time per step", "Beside the forward: scoring and planning, on their own thread; and what a step waited for them.", {
            legend + " {{pod}}": ratio(f"oasis_decode_{name}_microseconds_total", "oasis_decode_steps_total")
            for name, legend in {"score": "scores", "plan": "plans", "plan_wait": "waits for the plan", "trust_wait": "waits for trust"}.items()}, unit="µs"),
        lines("Tokens per verified step", "With speculative decoding: the target's own included.",
              {"{{pod}}": ratio("oasis_decode_tokens_accepted_total", "oasis_decode_verify_steps_total")}),
        lines("Drafts accepted", "Share of the drafted tokens that were verified and kept.",
              {"{{pod}}": ratio("oasis_decode_drafts_accepted_total", "oasis_decode_drafts_proposed_total")}, unit="percentunit", most=1),
    ],
    "Host memory": [
        lines("Records by state", "Of all arenas. Leased and writing belong to requests; cached ones make room when it is wanted.",
              {"{{state}}": now("oasis_tier_records", "state")}, stacked=True),
        lines("Arena in use", "Share of each arena's records that belong to requests that run or wait.",
              {"{{pod}}": HELD}, unit="percentunit", most=1, warn=0.75, bad=0.9),
        lines("Records given up", "Cached records that made room for others.", {"{{pod}}": per_second("oasis_tier_evicted_total")}, unit="ops"),
        lines("Decode's host memory", "Cached pieces, and what is reserved for staging.", {
            "pieces {{pod}}": now("oasis_decode_host_cache_bytes"), "staging {{pod}}": now("oasis_decode_host_bytes")}, unit="bytes"),
        lines("Decode's cache", "Pieces that left it to make room, and blocks whose numbers others wanted. Pieces that leave are pulled again.",
              named("oasis_decode", {"cache_evicted": "pieces", "blocks_evicted": "blocks"}), unit="ops"),
        lines("Blocks known by content", "Those of running requests, and those kept for others.", {
            "running {{pod}}": now("oasis_decode_blocks_held"), "kept {{pod}}": now("oasis_decode_blocks_cached")}),
        lines("Container memory", "Working set of each container over its limit, as the kubelet and kube-state-metrics tell. Arenas count in full.", {
            "{{pod}} {{container}}": now("container_memory_working_set_bytes", "pod, container", 'container!=""') + " / "
            + now("kube_pod_container_resource_limits", "pod, container", 'resource="memory"')}, unit="percentunit", warn=0.9, bad=0.97),
        lines("Arenas", "Host memory of each arena.", {"{{pod}}": now("oasis_tier_arena_bytes")}, unit="bytes"),
        lines("KV pool of decode", "Tokens in use, and requests that hold fewer blocks than they have.", {
            "tokens {{pod}}": now("oasis_decode_kv_pool_tokens"), "working sets {{pod}}": now("oasis_decode_working_sets")}),
    ],
    "Leases": [
        lines("Leases", "Held by decode workers.", {"{{pod}}": now("oasis_tier_leases")}),
        lines("Rooms and waiters", "Rooms that are open or committed and unclaimed; decode's requests that wait for a commit.", {
            "rooms {{pod}}": now("oasis_tier_rooms"), "waiters {{pod}}": now("oasis_tier_waiters"), "redirects {{pod}}": now("oasis_tier_redirects")}),
        lines("Ends of leases", "Released by their reader, or expired because it died or stalled.",
              named("oasis_tier", {"leases_released": "released", "leases_expired": "expired"}), unit="ops"),
        lines("Attached", "Prefill workers of each tier, and other tiers of each memory node.", {
            "workers {{pod}}": now("oasis_tier_workers"), "tiers {{pod}}": now("oasis_tier_tiers")}),
        lines("Between tiers", "Moves of rooms to memory nodes, and fetches from them, under way.", {
            "moves {{pod}}": now("oasis_tier_moves"), "fetches {{pod}}": now("oasis_tier_fetches")}),
        lines("Look-ups", "Share of the pages that were asked for and held.",
              {"{{pod}}": ratio("oasis_tier_lookup_hits_total", "oasis_tier_lookup_pages_total")}, unit="percentunit", most=1),
    ],
    "Failures": [
        panel("table", "Alerts", "Alerts of the chart that are pending or firing.",
              {"alerts": 'ALERTS{alertname=~"Oasis.*", namespace=~"$namespace|"}'}, width=24, height=6, least=None),
        lines("Reads", "Reads that failed, timed out or did not verify; of those, with other bytes than were published.",
              named("oasis_decode", {"read_failures": "failed", "reads_damaged": "damaged"}), unit="ops"),
        lines("Computed again", "Requests that lost their tier, their lease or what they read.", named("oasis_decode", {
            "recomputes": "begun", "recomputed": "went on", "recompute_failed_attempts": "out of attempts", "recompute_failed_deadline": "out of time",
            "recompute_failed_refused": "not allowed"}, by="namespace"), unit="ops"),
        lines("Connections", "Connections to tiers that were lost, rooms that were sent on, and rooms looked for at memory nodes.",
              named("oasis_decode", {"links_lost": "lost", "moved": "sent on", "searches": "looked for"}), unit="ops"),
        lines("Staging out of use", "Windows that a read which was given up may still write to.", {"{{pod}}": now("oasis_decode_staging_quarantined")}, warn=1),
        lines("Refused", "Messages to tiers that were answered with an error.", {"{{pod}}": per_second("oasis_tier_refused_total")}, unit="ops", bad=1),
        lines("Records doubted", "Cached records that are found no more since a reader got other bytes.",
              {"{{pod}}": per_second("oasis_tier_records_doubted_total")}, unit="ops"),
        lines("Tiers", "Rooms given up or never claimed, moves and fetches between tiers that failed, processes started again.", named("oasis_tier", {
            "rooms_failed": "rooms failed", "rooms_expired": "rooms expired", "moves_failed": "moves", "fills_failed": "fills", "fetches_failed": "fetches",
            "data_plane_restarts": "data plane restarts", "mover_restarts": "mover restarts"}), unit="ops"),
        lines("Prefill", "Requests that were not committed, and times that restoring was stopped for a while.",
              named("oasis_prefill", {"rooms_failed": "rooms failed", "restore_failures": "restoring stopped", "reattached": "attached again"}), unit="ops"),
        lines("Own faults", "Internal errors, caught.", {
            f"{metric.split('_')[1]} {{{{pod}}}}": per_second(metric) for metric in FAULTS}, unit="ops"),
        lines("Errors to clients", "HTTP answers of workers: 503 is back-pressure or a drain, 400 and 500 will not succeed when sent again.",
              {"{{status_code}} {{pod}}": per_second("sglang:http_responses_total", "status_code, pod", 'status_code=~"[45].."')}, unit="reqps"),
    ],
}


def variable(name: str, label: str, query: str) -> dict:
    return {"name": name, "label": label, "type": "query", "datasource": DATASOURCE, "query": {"query": query, "refId": name}, "definition": query,
            "multi": True, "includeAll": True, "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}, "refresh": 2, "sort": 1}


def dashboard() -> dict:
    panels: list[dict] = []
    top = 0
    for title, shown in ROWS.items():
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1}})
        top, left, high = top + 1, 0, 0
        for one in shown:
            width, height = one["gridPos"]["w"], one["gridPos"]["h"]
            if left + width > COLUMNS:
                top, left, high = top + high, 0, 0
            panels.append(one | {"gridPos": {"x": left, "y": top, "w": width, "h": height}})
            left, high = left + width, max(high, height)
        top += high
    return {
        "uid": "oasis-sglang", "title": "Oasis for SGLang", "tags": ["oasis", "sglang"], "schemaVersion": 38, "version": 1, "editable": True, "graphTooltip": 1,
        "refresh": "30s", "time": {"from": "now-1h", "to": "now"}, "timezone": "", "annotations": {"list": []}, "links": [],
        "templating": {"list": [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}},
            variable("namespace", "Namespace", f"label_values(up{{{ROLE}=~\".+\"}}, namespace)"),
            variable("role", "Role", f"label_values(up{{namespace=~\"$namespace\"}}, {ROLE})"),
            variable("pod", "Pod", f"label_values(up{{namespace=~\"$namespace\", {ROLE}=~\"$role\"}}, pod)"),
        ]},
        "panels": [one | {"id": n} for n, one in enumerate(panels, 1)],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    OUT.write_text(text())
