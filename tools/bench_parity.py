"""Oasis with everything pulled against stock SGLang PD: TTFT and ITL as ratios within one run, and idle CPU.

Both stacks run side by side and are asked in turn (stock, Oasis, stock, ...), each pair with a prompt that neither has
seen, after a warm-up of the same shape. Reported: medians, the ratio of medians, the median of paired ratios, the worst
pair. In float32 answers must be equal, token for token, or the run fails; in other types the leading tokens that agree
are reported.

    python tools/bench_parity.py [--layers 4|30] [--lengths 1500,3000] [--pairs 8] [--dtype float32] [--idle 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform as host
import statistics
import sys
import tempfile
import time
from pathlib import Path

from oasis_sglang import models
from oasis_sglang.client import generate
from oasis_sglang.launch import NO_REUSE
from oasis_sglang.processes import Processes
from oasis_sglang.prompts import PromptMaker, library_text
from oasis_sglang.stack import Stack, StackSpec, import_environment

OUTPUT_TOKENS = 32


def agreement(a: list[int], b: list[int]) -> int:
    """Leading tokens that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def measure(stock: Stack, oasis: Stack, maker: PromptMaker, text: str, length: int, pairs: int, dtype: str) -> dict:
    rows, agreed = [], []
    for number in range(-2, pairs):  # two warm-up pairs
        prompt = maker.cut(text, length, skip=(number + 3) * 211 + length)
        pair = [generate(stack.url, prompt, max_new_tokens=OUTPUT_TOKENS) for stack in ((stock, oasis) if number % 2 else (oasis, stock))]
        theirs, ours = pair if number % 2 else pair[::-1]
        agreed.append(agreement(theirs.output_ids, ours.output_ids))
        if dtype == "float32" and agreed[-1] != OUTPUT_TOKENS:
            raise SystemExit(f"answers differ at {length} tokens: the times mean nothing")
        if number >= 0:
            rows.append((theirs.ttft_seconds, ours.ttft_seconds, theirs.itl_seconds_mean, ours.itl_seconds_mean))
    columns = list(zip(*rows))
    return {"prompt_tokens": length, "pairs": pairs, "agreement_tokens": agreed,
            **{f"{name}_{what}": statistics.median(columns[i]) for i, (name, what) in enumerate(
                [("stock", "ttft_seconds"), ("oasis", "ttft_seconds"), ("stock", "itl_seconds"), ("oasis", "itl_seconds")])},
            "ttft_ratio_of_pairs": statistics.median(o / s for s, o, _, _ in rows), "ttft_ratio_worst": max(o / s for s, o, _, _ in rows),
            "itl_ratio_of_pairs": statistics.median(o / s for _, _, s, o in rows), "itl_ratio_worst": max(o / s for _, _, s, o in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, choices=(4, 30), default=4)
    parser.add_argument("--lengths", default="1500,3000")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of idling to measure; 0 for none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = models.prepare(models.CUT_LAYERS) if args.layers == 4 else models.prepare()
    maker, text = PromptMaker(model), library_text()
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731
    run_dir = Path(tempfile.mkdtemp(prefix="oasis-bench-"))
    result: dict = {"model": f"SmolLM2-135M-Instruct, {args.layers} layers, {args.dtype}", "machine": f"{host.machine()}, {os.cpu_count()} CPUs",
                    "output_tokens": OUTPUT_TOKENS, "latency": [], "idle_cores": {}}
    with Processes(log=run_dir / "zygote.log", env=import_environment()) as processes:
        with (Stack(StackSpec("stock", model, flags=("--dtype", args.dtype)), processes, run_dir=run_dir / "stock", progress=say) as stock,
              Stack(StackSpec("oasis", model, flags=("--dtype", args.dtype, *NO_REUSE), config={"mode": "exact"}), processes,
                    run_dir=run_dir / "oasis", progress=say) as oasis):
            for length in map(int, args.lengths.split(",")):
                row = measure(stock, oasis, maker, text, length, args.pairs, args.dtype)
                result["latency"].append(row)
                say(json.dumps(row))
            if args.idle:
                time.sleep(5)
                before = {name: stack.cpu_seconds() for name, stack in (("stock", stock), ("oasis", oasis))}
                start = time.monotonic()
                time.sleep(args.idle)
                elapsed = time.monotonic() - start
                result["idle_cores"] = {n: (s.cpu_seconds() - before[n]) / elapsed for n, s in (("stock", stock), ("oasis", oasis))}
                result["idle_seconds"] = elapsed
    result["load_average"] = os.getloadavg()
    text_out = json.dumps(result, indent=2)
    print(text_out)
    if args.json:
        args.json.write_text(text_out + "\n")


if __name__ == "__main__":
    main()
