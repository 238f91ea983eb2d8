"""What a working set costs in quality: KL and top-1 against dense attention, on forced continuations, through the served path.

Every request runs on the same prefill and decode servers; the dense one asks for ``mode: exact``. The next token is forced
by a custom logit processor, which also writes down the logits that the server computed. The first token comes from prefill
and is the same for all; the figures are over the decode steps. Times are the client's: TTFT with the prompt in
prefill's cache, ITL with the processor's writing.

    python tools/bench_quality.py [--budgets 256,512,1024,2048] [--summary mean_var_int8] [--on-miss wait] [--cap 0]
                                  [--admission selected] [--cases needle,agent] [--layers 30] [--tokens 64] [--json FILE]
                                  [--draft 4] [--profile FILE] [--warmup 8] [--set OPTION=VALUE ...]
    python tools/bench_quality.py --long 3000 --budgets 512     # 3,000 forced tokens from a prompt of 30
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import uuid
from pathlib import Path
from typing import NamedTuple

from quality_figures import Counted, grouped, kind
from quality_prompts import LONG_TEXTS, cases, digest, long_case

from oasis_sglang import models
from oasis_sglang.bench.quality import FLAGS, Case, compare, force
from oasis_sglang.client import Generation, generate_on_pair
from oasis_sglang.launch import NO_REUSE
from oasis_sglang.processes import Processes
from oasis_sglang.prompts import PromptMaker
from oasis_sglang.stack import Stack, StackSpec, import_environment


class Asked(NamedTuple):
    """``folder``: the logits of each step. ``report``: decode's account of the request, ``oasis`` its whole one afterwards."""

    folder: Path
    answer: Generation
    report: dict
    oasis: dict
    counted: Counted


def state(stack: Stack) -> dict:
    return stack.server_info("decode")["internal_states"][0]["oasis"]


def ask(stack: Stack, case: Case, scratch: Path, own: dict) -> Asked:
    rid = f"{case.name}-{uuid.uuid4().hex[:8]}"
    folder = scratch / rid
    before = state(stack)
    answer = force(stack, case, folder, own, rid)
    after = state(stack)
    return Asked(folder, answer, after["requests"][rid], after, Counted.between(before, after))


def row_of(case, budget: int, dense: Asked, sparse: Asked) -> dict:
    report, sets = sparse.report, sparse.oasis["working_sets"]
    full = report["full_transfer_bytes"]
    return {"case": case.name, "workload": kind(case.name), "prompt_tokens": len(case.prompt), "budget": budget,
            **compare(dense.folder, sparse.folder, len(case.continuation)),
            "ttft_seconds": sparse.answer.ttft_seconds, "itl_seconds": sparse.answer.itl_seconds_mean,
            "dense_ttft_seconds": dense.answer.ttft_seconds, "dense_itl_seconds": dense.answer.itl_seconds_mean,
            "pool_tokens_peak_so_far": sets["physical_tokens_peak"], "folds_so_far": sets["steps"].get("folds", 0),
            "admitted": report["admitted_bytes"] / full, "lifetime": report["lifetime_bytes"] / full,
            "summaries": report["lifetime_bytes_by_phase"]["summaries"] / full, "bytes_by_phase": report["lifetime_bytes_by_phase"],
            **sparse.counted.figures()}


def option(text: str) -> tuple[str, object]:
    """``OPTION=VALUE``; the value is JSON, or else a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not OPTION=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", default="256,512,1024,2048")
    parser.add_argument("--summary", default="mean_var_int8")
    parser.add_argument("--on-miss", choices=("wait", "defer"), default="wait")
    parser.add_argument("--admission", choices=("selected", "full"), default="selected")
    parser.add_argument("--cap", type=int, default=0, help="fetch_blocks_per_step, 0 = no limit")
    parser.add_argument("--draft", type=int, default=0, help="tokens verified per step, the newest and drafts of OASIS_NGRAM; 0 = no speculation")
    parser.add_argument("--profile", type=Path, help="of oasis calibrate; its critical heads are served from all blocks")
    parser.add_argument("--warmup", type=int, help="warmup_steps")
    parser.add_argument("--set", type=option, action="append", default=[], metavar="OPTION=VALUE", help="any Oasis option, for both workers; wins")
    parser.add_argument("--cases", default="", help="names, or kinds such as code")
    parser.add_argument("--layers", type=int, choices=(4, 30), default=30)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--long", type=int, default=0, help="instead: so many forced tokens from a prompt of 30")
    parser.add_argument("--text", choices=sorted(LONG_TEXTS), default="prose", help="of --long")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = models.prepare() if args.layers == 30 else models.prepare(models.CUT_LAYERS)
    maker = PromptMaker(model)
    wanted = set(filter(None, args.cases.split(",")))
    chosen = [c._replace(continuation=c.continuation[: args.tokens]) for c in cases(maker) if not wanted or {c.name, kind(c.name)} & wanted]
    if args.long:
        chosen = [long_case(maker, args.long, args.text)]
    budgets = [int(b) for b in args.budgets.split(",")]
    options = {"budget_tokens": max(budgets), "summary": args.summary, "fetch_blocks_per_step": args.cap, "admission": args.admission, "wait_seconds": 30.0}
    if args.profile:
        options["profile"] = str(args.profile.resolve())
    if args.warmup is not None:
        options["warmup_steps"] = args.warmup
    options |= dict(args.set)
    flags = (*FLAGS, "--context-length", "8192")
    drafts = ("--speculative-algorithm", "OASIS_NGRAM", "--speculative-num-draft-tokens", str(args.draft)) if args.draft else ()
    measured: list[tuple[dict, Counted]] = []
    with tempfile.TemporaryDirectory(prefix="oasis-quality-") as folder:
        scratch = Path(folder)
        with (Processes(log=scratch / "zygote.log", env=import_environment()) as processes,
              Stack(StackSpec("oasis", model, config=options, flags=flags, decode_flags=(*drafts, *NO_REUSE), max_total_tokens=16_000,
                              arena_bytes=3 << 30), processes,
                    run_dir=args.logs or scratch / "run") as stack):
            for case in chosen:
                # Prefill computes once, so that all that are timed find the prompt in its cache.
                generate_on_pair(stack.urls["prefill"], stack.urls["decode"], stack.bootstrap_port, case.prompt, max_new_tokens=2)
                asked = [ask(stack, case, scratch, {"budget_tokens": budget, "on_miss": args.on_miss}) for budget in budgets]
                dense = ask(stack, case, scratch, {"mode": "exact"})
                for budget, sparse in zip(budgets, asked):
                    measured.append((row_of(case, budget, dense, sparse), sparse.counted))
                    print(json.dumps(measured[-1][0]), file=sys.stderr, flush=True)
                    shutil.rmtree(sparse.folder)
                shutil.rmtree(dense.folder)
            end = state(stack)
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "logs")}
    result = {"settings": settings, "options": options, "prompts": digest(chosen), "rows": [row for row, _ in measured],
              "steps": end["working_sets"]["steps"], "lane": end["working_sets"].get("lane"),
              "by_budget": grouped(measured, "budget"), "by_workload": grouped(measured, "workload", "budget")}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1, default=str))
    for line in (*result["by_workload"], *result["by_budget"]):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
