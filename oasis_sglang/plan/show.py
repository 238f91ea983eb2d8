"""Forecasts as JSON and as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from oasis_sglang.plan import capacity
from oasis_sglang.plan.capacity import Ask, Machine, Served
from oasis_sglang.plan.check import Compared
from oasis_sglang.plan.shapes import Shape


def forecast(shape: Shape, served: Served, ask: Ask, machine: Machine, *, offered: int | None = None, rank_seconds: float = 0.0) -> dict:
    """Everything that the model says of requests like ``ask``, by figure; bytes, seconds, tokens, bytes per second. What is infinite or
    never happens is None."""
    full, parts = capacity.full_transfer(served.layout, ask.prompt), capacity.admitted(served, ask)
    admitted = sum(parts.values())
    stock, oasis = capacity.stock_load(shape, served, ask, machine, offered), capacity.oasis_load(shape, served, ask, machine, offered)
    sooner = capacity.even_link(served, ask, rank_seconds)
    return {
        "prompt_tokens": ask.prompt, "output_tokens": ask.output,
        "full_transfer_bytes": full, "admitted_bytes": admitted, "admitted_bytes_by_part": parts, "admitted_share": admitted / full,
        "lifetime_bytes": capacity.lifetime(served, ask), "lifetime_share": capacity.lifetime(served, ask) / full,
        "lifetime_bytes_at_most": admitted + capacity.on_demand_at_most(served, ask),
        "lifetime_bytes_limit": admitted + capacity.on_demand_limit(served, ask),
        "even_output_tokens": capacity.even_output(served, ask.prompt),
        "device_bytes": capacity.device(served, ask), "stock_device_bytes": capacity.stock_tokens(ask, served.page) * served.layout.token_bytes * served.ranks,
        "decode_host_bytes": capacity.host(served, ask), "tier_bytes": capacity.tier(served, ask),
        "stock": asdict(stock), "oasis": asdict(oasis), "kv_pool_tokens": oasis.requests * served.budget.need(ask.prompt, ask.output).pages * served.page,
        "full_transfer_seconds": full / machine.link, "admitted_seconds": admitted / machine.link, "even_link": None if math.isinf(sooner) else sooner,
    }


SHARED = "prompts that share a beginning pull less than predicted on a decode node that keeps blocks"


def notes(shape: Shape, kv_dtype: str, served: Served, machine: Machine) -> list[str]:
    """What a reader has to know of these forecasts."""
    found = []
    if refusal := shape.refusal():
        found.append(f"planned only, decode refuses this class today: {refusal}")
    if kv_dtype == "float8":
        found.append("planned only, decode refuses working sets over a KV cache of codes today")
    if served.ranks > 1:
        found.append("tensor parallelism above one is implemented and was never run")
    if served.ranks > shape.kv_heads:
        found.append(f"{shape.kv_heads} KV heads on {served.ranks} ranks: each is stored and sent {served.ranks // shape.kv_heads} times")
    if (short := -capacity.room(shape, machine, served.ranks)) >= 0:
        found.append(f"no room: weights take {size(shape.weights)}, {size(short)} more than {machine.share:.0%} of {served.ranks} x {size(machine.hbm)}")
    return found


def size(value: float) -> str:
    """Bytes with a binary prefix, three digits."""
    for prefix in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5 or prefix == "TiB":
            break
        value /= 1024
    return f"{number(value)} {prefix}"


def number(value: float) -> str:
    """Three digits at least."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _rate(value: float) -> str:
    """Of a network, in bits per second."""
    return f"{number(value * 8 / 1e9)} Gbit/s"


def _seconds(value: float) -> str:
    return f"{number(value * 1e3)} ms" if value < 1 else f"{number(value)} s"


def _load(row: dict, key: str, text) -> str:
    return text(row[key]) if row["requests"] else "no room"


def rows(forecasts: Sequence[dict]) -> list[tuple[str, list[str]]]:
    """Label and a cell for each of ``forecasts``; the first row is the heading."""
    def row(label: str, cell) -> tuple[str, list[str]]:
        return label, [cell(f) for f in forecasts]

    def both(label: str, key: str, text, times: bool = False) -> tuple[str, list[str]]:
        def cell(f: dict) -> str:
            more = f" ({f['oasis'][key] / f['stock'][key]:.2f} x)" if times and f["stock"]["requests"] and f["oasis"]["requests"] else ""
            return f"{_load(f['stock'], key, text)} / {_load(f['oasis'], key, text)}{more}"

        return row(label, cell)

    def capped(f: dict) -> str:
        return f"{size(f['lifetime_bytes_at_most'])} ({f['lifetime_bytes_at_most'] / f['full_transfer_bytes']:.3f})"

    def part(name: str) -> tuple[str, list[str]]:
        return row(f"- {name}", lambda f: size(f["admitted_bytes_by_part"][name]))

    used = [name for name in forecasts[0]["admitted_bytes_by_part"] if any(f["admitted_bytes_by_part"][name] for f in forecasts)]
    output = forecasts[0]["output_tokens"]
    table = [
        row("prompt tokens", lambda f: f"{f['prompt_tokens']:,}"),
        row("full transfer", lambda f: size(f["full_transfer_bytes"])),
        row("admitted (share of full)", lambda f: f"{size(f['admitted_bytes'])} ({f['admitted_share']:.3f})"),
        *map(part, used),
        row(f"lifetime, {output:,} tokens (share)", lambda f: f"{size(f['lifetime_bytes'])} ({f['lifetime_share']:.3f})"),
        row("- if every step pulls to its cap", capped),
        row("as much as full after", lambda f: "never" if f["even_output_tokens"] is None else f"{f['even_output_tokens']:,.0f} tokens"),
        row("transfer before the first token, full / admitted", lambda f: f"{_seconds(f['full_transfer_seconds'])} / {_seconds(f['admitted_seconds'])}"),
        row("HBM per request, stock / Oasis", lambda f: f"{size(f['stock_device_bytes'])} / {size(sum(f['device_bytes'].values()))}"),
        row("- of it summaries and tables", lambda f: size(f["device_bytes"]["tables"])),
        row("decode host per request", lambda f: size(sum(f["decode_host_bytes"].values()))),
        row("tier per request", lambda f: size(f["tier_bytes"])),
        both("requests at once, stock / Oasis", "requests", lambda n: f"{n:,}", times=True),
        row("- limited by", lambda f: f"{f['stock']['limit']} / {f['oasis']['limit']}"),
        row("KV pool of Oasis", lambda f: f"{f['kv_pool_tokens']:,} tokens"),
        both("decode step, bound", "step", _seconds),
        row("- of it swaps from the host", lambda f: _load(f["oasis"], "swaps", _seconds)),
        both("tokens/s, bound", "tokens", number, times=True),
        both("- wire for that", "wire", _rate),
        both("tokens/s, link counted", "linked", number, times=True),
    ]
    if any(f["even_link"] is not None for f in forecasts):
        table.append(row("first token sooner on links below", lambda f: "any" if f["even_link"] is None else _rate(f["even_link"])))
    return table


def markdown(title: str, table: list[tuple[str, list[str]]]) -> str:
    head, *body = ["| " + " | ".join((label, *cells)) + " |" for label, cells in table]
    return "\n".join((title, "", head, "|" + "---|" * (1 + len(table[0][1])), *body))


def rich_table(title: str, table: list[tuple[str, list[str]]]):
    from rich.table import Table

    (first, heads), *body = table
    shown = Table(first, title=title, title_justify="left")
    for head in heads:
        shown.add_column(head, justify="right")
    for label, cells in body:
        shown.add_row(label, *cells)
    return shown


def compared(rows: Sequence[Compared], worst: dict[str, Compared]) -> list[tuple[str, list[str]]]:
    """Of ``check.compare``: a line per run, the worst of each figure at the end."""
    def line(name: str, row: Compared) -> tuple[str, list[str]]:
        text = size if row.figure.endswith("bytes") else number
        where = ", ".join([row.workload, *(f"{key} {value}" for key, value in row.point.items()), f"repeat {row.repeat}"])
        return name, [row.system, where, text(row.predicted), text(row.measured), f"{row.ratio:.2f}"]

    return [("figure", ["system", "run", "predicted", "measured", "ratio"]), *(line(row.figure, row) for row in rows),
            *(line(f"worst {figure}", row) for figure, row in worst.items())]
