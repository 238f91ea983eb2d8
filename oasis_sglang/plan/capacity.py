"""The capacity model. Pure functions of a served model, a request and a machine; bytes, seconds and tokens, over all ranks unless said otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from decode_node.budget import Budget
from oasis_sglang.config import OasisConfig
from oasis_sglang.plan import sizes
from oasis_sglang.plan.pulls import pulled, swapped
from oasis_sglang.plan.shapes import Shape
from transport.layout import KVLayout

STOCK_RESERVED = 512
"""Tokens that SGLang's decode keeps free for each running request, by default."""
MOST_OUTPUT = 1 << 20
"""An answer beyond this many tokens is none."""


@dataclass(frozen=True)
class Served:
    """A model as Oasis serves it. ``layout``: of one rank; ``critical``: (layer, KV head)s of a rank in the dense lane; ``cap``:
    ``fetch_blocks_per_step``; ``full``: admission=full; ``keeps``: decode keeps blocks for later requests (--radix-cache-backend oasis);
    ``tokens_per_step``: more than 1 where drafts are kept; ``hysteresis``: the option."""

    layout: KVLayout
    budget: Budget
    critical: int = 0
    cap: float = 2
    full: bool = False
    keeps: bool = True
    tokens_per_step: float = 1.0
    hysteresis: float = OasisConfig().hysteresis

    @property
    def ranks(self) -> int:
        return self.layout.tp_size

    @property
    def page(self) -> int:
        return self.layout.block_tokens


@dataclass(frozen=True)
class Ask:
    """A request: tokens."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Machine:
    """Of a decode node. ``hbm``: bytes of each GPU; ``share``: of them for weights and KV; ``bandwidth``: bytes per second of each; ``dram``:
    bytes of host memory for KV; ``bus``: bytes per second from it to each GPU; ``link``: bytes per second to the node; ``staging``:
    ``staging_bytes`` of each rank."""

    hbm: int
    dram: int
    link: float
    bandwidth: float
    bus: float = 55e9
    share: float = 0.9
    staging: int = 64 << 20


def full_transfer(layout: KVLayout, prompt: int) -> int:
    return layout.token_bytes * layout.tp_size * prompt


def admitted(served: Served, ask: Ask) -> dict[str, int]:
    """Bytes before the first decode step, by part: the phases of a decode node, ``pieces`` split into those of the working set and those that only
    critical heads have. Nothing of the prompt is on the node already."""
    layout, page = served.layout, served.page
    whole, rest = divmod(ask.prompt, page)
    need = served.budget.need(ask.prompt, ask.output)
    parts = {"manifest": sizes.manifest(layout, ask.prompt), "summaries": 0, "pieces": 0, "critical heads": 0, "records": 0,
             "partial page": layout.payload_bytes if rest else 0}
    if not need.selecting:
        parts["records"] = whole * layout.payload_bytes
    else:
        working = min(whole, need.working)
        chosen = whole if served.full else working
        parts |= {"summaries": whole * layout.index_bytes, "pieces": chosen * layout.payload_bytes,
                  "critical heads": (whole - chosen) * served.critical * layout.piece_bytes}
    return {part: size * served.ranks for part, size in parts.items()}


def on_demand(served: Served, ask: Ask, output: float | None = None) -> float:
    """Bytes pulled while ``output`` (None: all) tokens of the answer are decoded; the first of them comes with the manifest."""
    whole = ask.prompt // served.page
    need = served.budget.need(ask.prompt, ask.output)
    if not need.selecting or served.full:
        return 0.0
    blocks = pulled(steps(served, ask.output if output is None else output), min(whole, need.working), whole, served.cap, served.hysteresis)
    return blocks * _block_bytes(served)


def on_demand_limit(served: Served, ask: Ask) -> int:
    """What ``on_demand`` comes to in an endless answer: everything that was not admitted."""
    whole = ask.prompt // served.page
    need = served.budget.need(ask.prompt, ask.output)
    return 0 if not need.selecting or served.full else max(0, whole - need.working) * _block_bytes(served)


def on_demand_at_most(served: Served, ask: Ask) -> float:
    """``on_demand`` of an answer whose every step pulls ``fetch_blocks_per_step``, whatever the model."""
    most = on_demand_limit(served, ask)
    return min(steps(served, ask.output) * served.cap * _block_bytes(served), most) if served.cap else most


def steps(served: Served, output: float) -> float:
    """Decode steps of ``output`` tokens; the first of them came with the manifest."""
    return max(0.0, output - 1) / served.tokens_per_step


def _block_bytes(served: Served) -> int:
    """Of a block's pieces that select."""
    return (served.layout.pieces - served.critical) * served.layout.piece_bytes * served.ranks


def lifetime(served: Served, ask: Ask, output: float | None = None) -> float:
    """Bytes from admission until ``output`` tokens have been decoded."""
    return sum(admitted(served, ask).values()) + on_demand(served, ask, output)


def host(served: Served, ask: Ask, output: int | None = None) -> dict[str, float]:
    """Bytes in a decode node's host memory when ``output`` (None: all) tokens of the answer are there. ``cache`` = pieces that it pulled and blocks
    that it generated, ``tables`` of its blocks. Staging is the node's, not the request's."""
    layout, page = served.layout, served.page
    whole = ask.prompt // page
    need = served.budget.need(ask.prompt, ask.output)
    blocks = sizes.pages(ask.prompt + (ask.output if output is None else output), page)
    if not need.selecting:
        kept = served.keeps and not served.budget.exact
        parts = {"cache": whole * layout.payload_bytes if kept else 0, "tables": sizes.host_tables(layout, blocks) if kept else 0}
        return {part: float(size * served.ranks) for part, size in parts.items()}
    chosen = whole if served.full else min(whole, need.working)
    # Without reuse what is in the lane is in the lane only.
    pieces = chosen * layout.pieces + (whole - chosen) * served.critical if served.keeps else chosen * (layout.pieces - served.critical)
    folded = max(0, blocks - whole - need.tail)
    cache = (pieces * layout.piece_bytes + folded * layout.payload_bytes) * served.ranks + on_demand(served, ask, output)
    return {"cache": cache, "tables": float(sizes.host_tables(layout, blocks) * served.ranks)}


def tier(served: Served, ask: Ask) -> int:
    """Bytes of a prompt's records in tiers, until its request ends."""
    return sizes.tier(served.layout, ask.prompt) * served.ranks


def device(served: Served, ask: Ask) -> dict[str, int]:
    """Bytes of device memory that a request holds: ``working set`` and ``tail`` in the KV pool, its ``lane``, and its ``tables``, most of which are
    summaries. A request that selects nothing holds all its pages."""
    layout, page = served.layout, served.page
    need = served.budget.need(ask.prompt, ask.output)
    blocks = sizes.pages(ask.prompt + ask.output, page)
    if not need.selecting:
        parts = {"working set": need.pages * layout.payload_bytes, "tail": 0, "lane": 0, "tables": 0}
    else:
        parts = {"working set": need.working * layout.payload_bytes, "tail": need.tail * layout.payload_bytes,
                 "lane": blocks * served.critical * layout.piece_bytes,
                 "tables": sizes.device_tables(layout, blocks, need.working, served.budget.draft or 1)}
    return {part: size * served.ranks for part, size in parts.items()}


def stock_tokens(ask: Ask, page: int = 1) -> int:
    """Tokens of its KV pool that stock SGLang needs for a request: all of the prompt, and the answer or what it keeps free for one."""
    return sizes.pages(ask.prompt + max(ask.output, STOCK_RESERVED), page) * page


# -- of a node ------------------------------------------------------------------------------------------------------


def room(shape: Shape, machine: Machine, ranks: int) -> int:
    """Bytes of device memory for KV, all GPUs together; negative when not even the weights fit."""
    return int(machine.hbm * ranks * machine.share) - shape.weights


@dataclass(frozen=True)
class Load:
    """``requests`` that a node holds at once, as far as ``limit`` lets it; ``step``: seconds of a decode step that reads weights, resident KV
    and what is scored at full bandwidth, and before that brings the pieces that are exchanged over the host bus (``swaps``: seconds of that), all
    else free; ``tokens``: output tokens per second of that, ``linked``: as far as the link brings the bytes; ``wire``: bytes per second of
    ``tokens``. All 0 without room."""

    requests: int
    limit: str
    step: float = 0.0
    swaps: float = 0.0
    tokens: float = 0.0
    wire: float = 0.0
    linked: float = 0.0


def stock_load(shape: Shape, served: Served, ask: Ask, machine: Machine, offered: int | None = None) -> Load:
    token = served.layout.token_bytes * served.ranks
    held = stock_tokens(ask, served.page) * token
    most = {"HBM": max(0, room(shape, machine, served.ranks)) // held}
    return _load(shape, served, ask, machine, most, offered, (ask.prompt + ask.output / 2) * token, 0.0,
                 full_transfer(served.layout, ask.prompt))


def oasis_load(shape: Shape, served: Served, ask: Ask, machine: Machine, offered: int | None = None) -> Load:
    """Bounded by device memory, and by the host's: with more requests at once than that holds, pieces are evicted and pulled again."""
    kept = sum(host(served, ask).values())
    most = {"HBM": max(0, room(shape, machine, served.ranks)) // sum(device(served, ask).values()),
            "DRAM": int(max(0, machine.dram - machine.staging * served.ranks) // kept) if kept else 1 << 40}
    return _load(shape, served, ask, machine, most, offered, step_reads(served, ask), step_swaps(served, ask), lifetime(served, ask))


def step_reads(served: Served, ask: Ask) -> float:
    """Bytes of a request that a decode step in the middle of its answer reads: the compact row, the lane and what scoring needs."""
    layout, page = served.layout, served.page
    need = served.budget.need(ask.prompt, ask.output)
    length = ask.prompt + ask.output / 2
    if not need.selecting:
        return length * layout.token_bytes * served.ranks
    compact = need.working * page + min(need.tail * page, ask.prompt % page + ask.output / 2)
    lane = length * served.critical * layout.piece_bytes / page
    scored = sizes.score_reads(layout, ask.prompt // page, layout.pieces - served.critical)
    return (compact * layout.token_bytes + lane + scored) * served.ranks


def step_swaps(served: Served, ask: Ask) -> float:
    """Bytes of a request that a decode step brings from the host cache into the working set."""
    return exchanged(served, ask) * _block_bytes(served)


def exchanged(served: Served, ask: Ask) -> float:
    """Blocks of each (layer, KV head) that selects which a decode step brings from the host cache."""
    whole = ask.prompt // served.page
    need = served.budget.need(ask.prompt, ask.output)
    return swapped(min(whole, need.working), whole, served.hysteresis) if need.selecting else 0.0


def _load(shape: Shape, served: Served, ask: Ask, machine: Machine, most: dict[str, int], offered: int | None, reads: float, brought: float,
          wire: float) -> Load:
    if offered is not None:
        most = most | {"offered": offered}
    limit = min(most, key=most.get)
    n = most[limit]
    if not n:
        return Load(0, limit)
    swaps = n * brought / (machine.bus * served.ranks)
    step = (shape.weights_read(n) + n * reads) / (machine.bandwidth * served.ranks) + swaps
    tokens = n * served.tokens_per_step / step
    carried = machine.link / wire * ask.output
    return Load(n, limit, step, swaps, tokens, tokens / ask.output * wire, min(tokens, carried))


# -- against a full transfer ----------------------------------------------------------------------------------------


def even_output(served: Served, prompt: int, most: int = MOST_OUTPUT) -> float | None:
    """Output tokens at which a request has pulled as many bytes as a full transfer has; None when ``most`` are fewer."""
    ask = Ask(prompt, most)
    spare = full_transfer(served.layout, prompt) - sum(admitted(served, ask).values())
    if spare <= 0:
        return 1.0
    if on_demand(served, ask) < spare:
        return None
    low, high = 1.0, float(most)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if on_demand(served, ask, middle) < spare else (low, middle)
    return high


def even_link(served: Served, ask: Ask, rank_seconds: float) -> float:
    """Bytes per second below which admitting chosen blocks brings the first token sooner, when ranking them takes ``rank_seconds`` per
    thousand tokens of prompt on prefill; infinite when it takes none, 0 when nothing is saved."""
    saved = full_transfer(served.layout, ask.prompt) - sum(admitted(served, ask).values())
    cost = rank_seconds * ask.prompt / 1000
    return max(0.0, saved) / cost if cost else math.inf if saved > 0 else 0.0
