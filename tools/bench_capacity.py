"""How many long requests one decode node runs at once, and how fast, with the same KV pool: stock SGLang PD, Oasis with
selected admission, Oasis with full admission (every block in the decode node's host cache, as SGLang's HiSparse has it).

The pool holds two such requests in stock SGLang. All requests are sent at once; their prompts share a long text, so that
prefill is not what is measured. Stacks run one after the other. Throughput is over the time from the first token of any
request to the last token of the last one.

    python tools/bench_capacity.py [--layers 30|4] [--requests 8] [--tokens 6000] [--output 128] [--budget 1024] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

from oasis_sglang import models
from oasis_sglang.client import generate, generate_concurrently
from oasis_sglang.launch import NO_REUSE
from oasis_sglang.processes import Processes
from oasis_sglang.prompts import PromptMaker, library_text
from oasis_sglang.stack import Stack, StackSpec, import_environment

RESERVED = 512
"""Tokens that stock decode keeps free for each running request."""


class Sampler:
    """Samples the decode worker's host cache once a second while a block runs."""

    def __init__(self, stack: Stack):
        self.stack, self.used, self._stop = stack, [], threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            sets = self.stack.server_info("decode")["internal_states"][0].get("oasis", {}).get("working_sets")
            if sets and sets["live"]:
                self.used.append(sets["host_cache"]["used_bytes"])

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()


def running_at_most(log: Path) -> int:
    return max(map(int, re.findall(r"Decode batch.*?#running-req: (\d+)", log.read_text(errors="replace"))), default=0)


def measure(name: str, spec: StackSpec, processes: Processes, folder: Path, prompts: list[list[int]], output: int) -> dict:
    with Stack(spec, processes, run_dir=folder / name) as stack:
        generate(stack.url, prompts[0], max_new_tokens=2, timeout=1200)  # the shared text is computed once, before
        with Sampler(stack) as sampler:
            started = time.perf_counter()
            answers = generate_concurrently(stack.url, prompts, max_new_tokens=output, timeout=2400)
            wall = time.perf_counter() - started
        first = min(answer.chunk_times[0] for answer in answers)
        span = max(answer.chunk_times[-1] for answer in answers) - first
        tokens = sum(len(answer.output_ids) - 1 for answer in answers)
        result = {"name": name, "requests": len(prompts), "decode_tokens_per_second": tokens / span, "wall_seconds": wall,
                  "ttft_seconds_worst": max(answer.ttft_seconds for answer in answers),
                  "itl_seconds_mean": sum(a.itl_seconds_mean for a in answers) / len(answers)}
        oasis = stack.server_info("decode")["internal_states"][0].get("oasis")
        if oasis:
            sets, reports = oasis["working_sets"], [r for r in oasis["requests"].values()][-len(prompts) :]
            steps = sets["steps"]
            result |= {"batch_peak": sets["batch_peak"], "kv_pool_tokens_peak": sets["physical_tokens_peak"],
                       "host_cache_bytes_peak": sets["host_cache"]["peak_bytes"], "host_cache_bytes_average": sum(sampler.used) // max(1, len(sampler.used)),
                       "host_cache_evicted": sets["host_cache"]["evicted"], "staging_bytes": oasis["host_bytes_reserved"],
                       "admitted": sum(r["admitted_bytes"] for r in reports) / sum(r["full_transfer_bytes"] for r in reports),
                       "lifetime": sum(r["lifetime_bytes"] for r in reports) / sum(r["full_transfer_bytes"] for r in reports),
                       "plan_ms_per_step": steps.get("plan_microseconds", 0) / 1000 / max(1, steps.get("steps", 0)),
                       "miss_rate": steps.get("misses", 0) / max(1, steps.get("wanted", 0))}
        print(json.dumps(result), file=sys.stderr, flush=True)
    log = folder / name / "decode.log"
    result["running_in_log"] = running_at_most(log)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, choices=(4, 30), default=30)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--kinds", default="stock,selected,full")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = models.prepare() if args.layers == 30 else models.prepare(models.CUT_LAYERS)
    maker = PromptMaker(model)
    text = library_text()
    prompts = [maker.cut(text, args.tokens, question=f"In question {n}: what does part {n} of the text above say, and why does it matter?")
               for n in range(args.requests)]
    pool = (2 * (args.tokens + args.output + RESERVED)) // 16 * 16
    common = dict(max_running_requests=args.requests, max_total_tokens=pool, prefill_flags=("--max-total-tokens", str(4 * args.tokens)), arena_bytes=4 << 30)
    wanted = {"stock": StackSpec("stock", model, **common),
              **{how: StackSpec("oasis", model, **common, decode_flags=NO_REUSE,
                                config={"budget_tokens": args.budget, "admission": how, "host_cache_bytes": 4 << 30})
                 for how in ("selected", "full")}}
    with tempfile.TemporaryDirectory(prefix="oasis-capacity-") as scratch:
        folder = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with Processes(log=folder / "zygote.log", env=import_environment()) as processes:
            rows = [measure(kind, wanted[kind], processes, folder, prompts, args.output) for kind in args.kinds.split(",")]
    result = {"settings": {k: v for k, v in vars(args).items() if k not in ("json", "logs")}, "decode_pool_tokens": pool, "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
