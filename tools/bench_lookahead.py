"""What looking ahead costs and gives per token: decode ITL without drafts, with drafts, and with drafts that choose blocks.

One stack per variant, all running at once on the same model; requests go to them in turn, so that whatever else the machine does
meets all of them alike. The figures are medians of ratios between neighbours, and the parts of a decode step as the node counts them.

    python tools/bench_lookahead.py [--layers 30|4] [--rounds 3] [--cases needle,agent] [--output 64] [--budget 1024] [--profile FILE]
                                    [--draft 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from quality_prompts import cases

from oasis_sglang import models
from oasis_sglang.client import generate
from oasis_sglang.launch import NO_REUSE
from oasis_sglang.processes import Processes
from oasis_sglang.prompts import PromptMaker
from oasis_sglang.stack import Stack, StackSpec, import_environment

PARTS = ("score_microseconds", "plan_microseconds", "plan_wait_microseconds", "trust_wait_microseconds")


def counted(stack: Stack) -> dict:
    return dict(stack.server_info("decode")["internal_states"][0]["oasis"]["working_sets"]["steps"])


def ask(name: str, stack: Stack, case, output: int) -> dict:
    before = counted(stack)
    answer = generate(stack.url, case.prompt, max_new_tokens=output, timeout=1200)
    grown = {key: value - before.get(key, 0) for key, value in counted(stack).items()}
    decode = answer.chunk_times[-1] - answer.chunk_times[0]
    steps = max(1, grown["request_steps"])
    return {"variant": name, "case": case.name, "itl_ms": answer.itl_seconds_mean * 1e3, "ttft_s": answer.ttft_seconds, "steps": steps,
            "step_ms": decode * 1e3 / steps, "tokens_per_step": (output - 1) / steps, "misses": grown["misses"] / max(1, grown["wanted"]),
            "missed_mass": grown["missed_mass_ppm"] / 1e6 / steps, "fetched": grown.get("fetched", 0),
            **{part.replace("microseconds", "share_of_step"): grown.get(part, 0) / 1e6 / decode for part in PARTS}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, choices=(4, 30), default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default="needle,prose", help="the prompts of all cases have to fit the prefill pool of 16,000 tokens")
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--profile", default="")
    parser.add_argument("--draft", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = models.prepare() if args.layers == 30 else models.prepare(models.CUT_LAYERS)
    chosen = [case for case in cases(PromptMaker(model)) if case.name in args.cases.split(",")]
    drafts = ("--speculative-algorithm", "OASIS_NGRAM", "--speculative-num-draft-tokens", str(args.draft))
    variants = {"no drafts": ((), {}), "drafts": (drafts, {"lookahead_rows": 0}), "lookahead": (drafts, {"lookahead_rows": 1})}
    rows = []
    with tempfile.TemporaryDirectory(prefix="oasis-lookahead-") as folder, Processes(log=Path(folder) / "zygote.log", env=import_environment()) as processes:
        with ExitStack() as running:
            stacks = {}
            for name, (flags, options) in variants.items():
                config = {"budget_tokens": args.budget, **({"profile": args.profile} if args.profile else {}), **options}
                spec = StackSpec("oasis", model, config=config, decode_flags=(*flags, *NO_REUSE), max_total_tokens=16_000, arena_bytes=1 << 30)
                stacks[name] = running.enter_context(Stack(spec, processes, run_dir=Path(folder) / name.replace(" ", "-")))
            for stack in stacks.values():  # prompts are computed once, before
                for case in chosen:
                    generate(stack.url, case.prompt, max_new_tokens=2, timeout=1200)
            for turn in range(args.rounds):
                for case in chosen:
                    for name, stack in stacks.items():
                        rows.append({"round": turn, **ask(name, stack, case, args.output)})
                        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = {"settings": {k: v for k, v in vars(args).items() if k != "json"}, "rows": rows, "variants": [summary(rows, name) for name in variants]}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    for line in result["variants"]:
        print(json.dumps(line))


def summary(rows: list[dict], name: str) -> dict:
    """Ratios to the same request without drafts, in the same round."""
    base = {(row["round"], row["case"]): row for row in rows if row["variant"] == "no drafts"}
    mine = [row for row in rows if row["variant"] == name]
    ratios = {part: [row[part] / base[row["round"], row["case"]][part] for row in mine] for part in ("itl_ms", "step_ms")}
    means = {key: statistics.fmean(row[key] for row in mine) for key in mine[0] if isinstance(mine[0][key], float)}
    return {"variant": name, "n": len(mine), **{f"{part}_ratio_median": statistics.median(r) for part, r in ratios.items()},
            **{f"{part}_ratio_worst": max(r) for part, r in ratios.items()}, **means}


if __name__ == "__main__":
    main()
