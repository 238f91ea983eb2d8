"""The frame that ``oasis top`` draws of ``top.figures``; "-" stands for what the node does not report."""

from __future__ import annotations

from pathlib import PurePath

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oasis_sglang.top import PHASES

MOST_REQUESTS = 20
_REQUEST = {"rid": "rid", "state": "state", "prompt": "prompt", "blocks": "blocks", "working": "work", "tail": "tail", "selecting": "sel", "steps": "steps",
            "pulled_bytes": "pulled"}
"""Columns of the table of requests and their headings; all of it fits 80 columns."""


def number(value: float | None, unit: str = "") -> str:
    """Three digits at least."""
    if value is None:
        return "-"
    return (f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}") + unit


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def size(value: float | None, unit: str = "") -> str:
    """Bytes with a binary prefix."""
    if value is None:
        return "-"
    for prefix in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or prefix == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {prefix}{unit}" if prefix == "B" else f"{value:.1f} {prefix}{unit}"


def clock(seconds: float | None) -> str:
    """h:mm:ss."""
    return "-" if seconds is None else f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


def frame(url: str, figures: dict, *, by_layer: bool = False) -> RenderableType:
    """Fits 80 columns."""
    sides = Table.grid(padding=(0, 2))
    sides.add_row(_rates(figures), _held(figures))
    tiers = ", ".join(f"{address} {epoch[:8] or 'lost'}" for address, epoch in figures["tiers"].items())
    parts = [_header(url, figures["node"]), sides, Text(f"tiers: {tiers or 'none yet'}"), _requests(figures)]
    if by_layer:
        parts.append(_layers(figures))
    return Group(*parts)


def _header(url: str, node: dict) -> Text:
    shown = {key: "-" if value is None else str(value) for key, value in node.items()}
    drafts = f", {shown['speculation']}" if node["speculation"] else ""
    return Text.assemble(("oasis top ", "bold"), f"{url}  up {clock(node['uptime_seconds'])}\n{PurePath(shown['model']).name}\n",
                         f"{shown['mode']}, budget {shown['budget_tokens']} + {shown['tail_tokens']} tokens, {shown['summary']}, "
                         f"on_miss {shown['on_miss']}, cap {shown['fetch_blocks_per_step']}{drafts}\n")


def _rates(figures: dict) -> Table:
    now, total = figures["now"] or {}, figures["total"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column(f"last {now['seconds']:.1f} s" if now else "last look", justify="right", no_wrap=True)
    table.add_column("since start", justify="right", no_wrap=True)

    def flow(label: str, name: str, form=number) -> None:
        table.add_row(label, form(now.get("per_second", {}).get(name), "/s"), form(total["count"][name]))

    def share(label: str, name: str, form=percent) -> None:
        table.add_row(label, form(now.get(name)), form(total[name]))

    flow("steps", "steps")
    flow("tokens accepted", "tokens_accepted")
    share("tokens per verify", "tokens_per_verify", number)
    share("drafts accepted", "drafts_accepted_share")
    share("misses of wanted", "misses_share")
    share("missed mass", "missed_mass", lambda v: "-" if v is None else f"{v:.4f}")
    share("without lookahead", "fallback_share")
    flow("pieces fetched", "fetched")
    share("  used", "used_share")
    share("  wasted", "wasted_share")
    share("  late swaps", "late_share")
    flow("stale plans", "plans_stale")
    share("plan us/step", "plan_us_per_step", number)
    share("score us/step", "score_us_per_step", number)
    share("stalls", "stalls", number)
    for name in ("p50", "p95", "p99"):
        share(f"  {name} ms", f"stall_{name}_ms", number)
    for phase in PHASES:
        flow(phase.replace("_", " "), f"bytes_{phase}", size)
    return table


def _held(figures: dict) -> Table:
    pool, sets, cache, lane = figures["kv_pool"], figures["working_sets"], figures["host_cache"] or {}, figures["lane"] or {}
    staging, reuse = figures["staging"] or {}, figures["reuse"] or {}
    known = reuse["hit_tokens"] / reuse["prompt_tokens"] if reuse.get("prompt_tokens") else None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("held", no_wrap=True)
    table.add_column("", justify="right")
    rows = [
        ("KV pool tokens", number(pool["tokens"])), ("  peak", number(pool["peak_tokens"])), ("  size", number(pool["size_tokens"])),
        ("working sets", number(sets["used"])), ("  size", number(sets["size"])),
        ("host cache", size(cache.get("used_bytes"))), ("  peak", size(cache.get("peak_bytes"))), ("  size", size(cache.get("capacity_bytes"))),
        ("  pinned", size(cache.get("pinned_bytes"))), ("  pieces evicted", number(cache.get("evicted"))),
        ("prompt tokens known", percent(known)), ("  bytes saved", size(reuse.get("bytes_saved"))), ("  blocks cached", number(reuse.get("blocks_cached"))),
        ("dense lane tokens", number(lane.get("tokens"))), ("  peak", number(lane.get("peak_tokens"))), ("  size", number(lane.get("capacity_tokens"))),
        ("  heads", number(lane.get("heads"))), ("  memory", size(lane.get("bytes"))),
        ("pulls", number(figures["pulls"])), ("reads in flight", number(figures["reads"])), ("leases", number(figures["leases"])),
        ("windows leased", number(staging.get("leased"))), ("  quarantined", number(staging.get("quarantined"))), ("leaks", number(figures["leaks"])),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _requests(figures: dict) -> RenderableType:
    title = f"requests: {number(figures['running'])} held, {number(figures['waiting'])} of them waiting for room"
    requests = figures["requests"]
    if not requests:
        return Text(title)
    columns = [column for column in _REQUEST if any(column in request for request in requests)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left", title=title)
    for column in columns:
        table.add_column(_REQUEST[column], justify="left" if column in ("rid", "state") else "right", no_wrap=True,
                         max_width=12 if column == "rid" else None)
    for request in requests[:MOST_REQUESTS]:
        table.add_row(*(_cell(column, request) for column in columns))
    if len(requests) > MOST_REQUESTS:
        table.caption = f"and {len(requests) - MOST_REQUESTS} more"
    return table


def _cell(column: str, request: dict) -> str:
    value = request.get(column)
    if column == "pulled_bytes":
        return size(value)
    if column == "selecting":
        return "yes" if value else "no"
    return number(value) if isinstance(value, (int, float)) or value is None else str(value)


def _layers(figures: dict) -> RenderableType:
    """Of the last look, or since the start where nothing ran meanwhile."""
    found = figures["layers"]
    if found is None:
        return Text("layers: not reported yet")
    since = "now" if found["now"] else "total"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left",
                  title=f"layers, {'last look' if since == 'now' else 'since start'}; * has the worst head of all")
    for column in ("layer", "misses", "missed mass", "worst head", "its missed mass"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found[since]:
        table.add_row(f"{'* ' if row['worst'] else ''}{row['layer']}", percent(row["misses_share"]), f"{row['missed_mass']:.4f}", str(row["worst_head"]),
                      f"{row['worst_missed_mass']:.4f}", style="bold" if row["worst"] else None)
    return table
