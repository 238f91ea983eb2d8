"""Where the time of one sparse decode step goes, stage by stage, on one core: the product's own classes over random KV.

    python tools/bench_step.py [--requests 8] [--layers 30] [--kv-heads 3] [--group 3] [--head-dim 64] [--tokens 6000]
                               [--budget 1024] [--summary mean_var_int8] [--churn 6] [--draft 4] [--repeat 20] [--json FILE]

``churn``: new blocks per (layer, KV head) and step, all of them in the host cache; 6.5 is what the selection study measured.
"attention" is torch's scaled_dot_product_attention over as many tokens as the compact view has, and over all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from decode_node.block_store import BlockStore
from decode_node.budget import make_budget
from decode_node.entry import Entry, Swaps
from decode_node.host_cache import HostCache
from decode_node.lookahead import Lookahead
from decode_node.page_table import PageTable
from decode_node.pieces import PoolPieces
from decode_node.pull import Pull
from decode_node.reuse import Reuse
from decode_node.stepper import Stepper
from decode_node.working_set import WorkingSets
from oasis_sglang.selection import planner
from oasis_sglang.selection.summaries import SUMMARIES
from transport.layout import KVLayout

PAGE = 16


def milliseconds(work, repeat: int) -> float:
    """Median of ``repeat`` runs after two that are not counted."""
    times = []
    for _ in range(repeat + 2):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("requests", 8), ("layers", 30), ("kv-heads", 3), ("group", 3), ("head-dim", 64), ("tokens", 6000), ("budget", 1024),
                          ("churn", 6), ("draft", 0), ("repeat", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--summary", choices=sorted(SUMMARIES), default="mean_var_int8")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    b, dim, blocks = args.requests, args.head_dim, args.tokens // PAGE
    summary, budget = SUMMARIES[args.summary], make_budget(PAGE, args.budget, 16, 64, 256, False)
    layout = KVLayout(num_layers=args.layers, kv_heads=args.kv_heads, head_dim=dim, block_tokens=PAGE, dtype="float32", itemsize=4, tp_size=1,
                      summary=summary.name, summary_bytes=summary.bytes(dim), metadata_lens=(8,))
    need = budget.need(args.tokens, 128)
    table = PageTable(b + 1, need.pages, PAGE, "cpu")
    kv = torch.randn(args.layers, 2, (b * need.pages + 1) * PAGE, args.kv_heads, dim)
    numbers = b * (blocks + 16)
    sets = WorkingSets(layout, summary, sets=b, blocks=blocks + 16, numbers=numbers, working=budget.working, sink=1, recent=4, device="cpu")
    cache = HostCache(layout.pieces, numbers, layout.piece_bytes, b * blocks * layout.payload_bytes)
    pool = PoolPieces(kv, layout)
    store = BlockStore(numbers, layout.pieces, cache)
    totals = Counter()
    lookahead = Lookahead(sets=sets, cache=cache, group=args.group, scale=dim**-0.5, cap=2, warmup=0, ahead=1, trust=0.25, pull=lambda *_: None, totals=totals)
    stepper = Stepper(table=table, sets=sets, cache=cache, pool=pool, lookahead=lookahead,
                      reuse=Reuse(store, cache, sets, table, pool, enabled=False), wait_seconds=1, totals=totals)
    query_rows = args.draft or 1
    entries, data = [], np.zeros((blocks, layout.piece_bytes), np.uint8)
    for row in range(b):
        entry = Entry(row=row, rid=str(row), prompt=args.tokens, budget=budget, need=need, pull=Pull(row, "", 0.0), set=sets.acquire(),
                      numbers=store.acquire([], blocks), pages=np.arange(1 + row * need.pages, 1 + (row + 1) * need.pages))
        table.bind(row, entry.pages, tokens=args.tokens, working=budget.working, most_working=budget.working, most_tail=budget.tail)
        ranking = np.argsort(np.random.default_rng(row).random((layout.pieces, blocks)), 1)
        sets.place(entry.set, planner.initial_selection(ranking, blocks, budget.working, 1, 4), blocks)
        sets.bind(entry.set, 0, entry.numbers)
        sets.raw[:, entry.numbers] = summary.build(torch.randn(layout.pieces, blocks, PAGE, dim))
        for piece in range(layout.pieces):
            cache.insert(np.full(blocks, piece), entry.numbers, data)
        entries.append(entry)
    rows, lengths = np.arange(b), np.full(b, args.tokens + 1)
    queries = torch.randn(b * query_rows, args.kv_heads * args.group * dim)
    index, counts = torch.arange(b), torch.full((b,), blocks)
    scaled = torch.randn(b, layout.pieces, query_rows, args.group, dim) * dim**-0.5

    def scores():
        return sets.score(rows, slice(0, layout.pieces), scaled, blocks)

    def held():
        return cache.held(sets.number[:, :blocks]).transpose(1, 0, 2)

    here, mass = torch.from_numpy(held()), scores()[:, 0]

    def commit():
        for entry in entries:
            taken = sets.block_at[entry.set, :, 1 : 1 + args.churn]
            incoming = planner._largest(-sets.slot_of[entry.set : entry.set + 1, :, :blocks].float(), args.churn,
                                        sets.slot_of[entry.set : entry.set + 1, :, :blocks] >= 0)[0]
            pieces = np.repeat(np.arange(layout.pieces), args.churn)
            entry.swaps = Swaps(pieces, np.tile(np.arange(1, 1 + args.churn), layout.pieces), incoming.reshape(-1).numpy())
            assert taken.shape == incoming.shape

    def begin():
        stepper.begin(entries, rows, lengths, query_rows)

    def begin_with_commit():
        commit()
        begin()

    def whole_step():
        """What the forward's thread does, and then waits for, when nothing else is to be done meanwhile."""
        setattr_none(entries)
        begin()
        for layer in range(args.layers):
            stepper.tap(layer, queries)
        if args.draft:
            lookahead.trusted()
            stepper.verified(torch.ones(b, dtype=torch.int32), np.full(b, args.draft - 1))
        else:
            stepper.end()
        stepper.settle()

    def attention(tokens: int):
        q = torch.randn(1, args.kv_heads * args.group, 1, dim)
        k = torch.randn(args.kv_heads, tokens, dim)[None]

        def work():
            for _ in range(b):
                scaled_dot_product_attention(q, k, k, enable_gqa=True)
        return work

    def plan():
        planner.plan(mass, sets.ema[index, :, :blocks], sets.slot_of[index, :, :blocks], sets.pinned(range(b), blocks), torch.full((b,), budget.working),
                     counts, here, sets.flying[index, :, :blocks], torch.full((b,), 2), floor=1)

    figures = {
        "what the host cache holds": milliseconds(held, args.repeat),
        "scores": milliseconds(scores, args.repeat),
        "plan": milliseconds(plan, args.repeat),
        "tap, scores, plan and settle, one after the other": milliseconds(whole_step, args.repeat),
        "begin of step, nothing to commit": milliseconds(lambda: (setattr_none(entries), begin()), args.repeat),
        "begin of step with commits": milliseconds(begin_with_commit, args.repeat) - milliseconds(commit, args.repeat),
        "attention over the compact view": milliseconds(attention(args.budget + 128), args.repeat) * args.layers,
        "attention over everything": milliseconds(attention(args.tokens), args.repeat) * args.layers,
    }
    result = {"settings": {k: v for k, v in vars(args).items() if k != "json"}, "milliseconds": {k: round(v, 2) for k, v in figures.items()},
              "bytes committed": b * layout.pieces * args.churn * layout.piece_bytes}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


def setattr_none(entries: list[Entry]) -> None:
    for entry in entries:
        entry.swaps = Swaps.none()


if __name__ == "__main__":
    main()
