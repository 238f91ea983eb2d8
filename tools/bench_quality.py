"""What a working set costs in quality: KL and top-1 against dense attention, on forced continuations, through the served path.

Every request runs on the same prefill and decode servers; the dense one asks for ``mode: exact``. The next token is forced
by a custom logit processor, which also writes down the logits that the server computed. The first token comes from prefill
and is the same for all; the figures are over the decode steps.

    python tools/bench_quality.py [--budgets 256,512,1024,2048] [--summary mean_var_int8] [--on-miss wait] [--cap 0]
                                  [--admission selected] [--cases needle,agent] [--layers 30] [--tokens 64] [--json FILE]
    python tools/bench_quality.py --long 3000 --budgets 512     # 3,000 forced tokens from a prompt of 30
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import uuid
from pathlib import Path

import numpy as np
from quality_prompts import LONG_TEXTS, cases, digest, long_case
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from oasis_sglang import models
from oasis_sglang.client import generate_on_pair
from oasis_sglang.processes import Processes
from oasis_sglang.prompts import PromptMaker
from oasis_sglang.stack import Stack, StackSpec, import_environment


class Teacher(CustomLogitProcessor):
    """Writes the logits of each row to ``custom_params["folder"]`` and leaves one token possible."""

    def __call__(self, logits, custom_param_list=None):
        import numpy

        for row, params in zip(logits, custom_param_list):
            step = len(params["__req__"].output_ids)
            numpy.save(f"{params['folder']}/{step:05d}.npy", row.float().cpu().numpy())
            kept = row[params["forced"][step]].clone()
            row.fill_(float("-inf"))
            row[params["forced"][step]] = kept
        return logits


def log_probabilities(folder: Path, step: int) -> np.ndarray:
    """float64 [vocabulary]: of one decode step."""
    row = np.load(folder / f"{step:05d}.npy").astype(np.float64)
    row -= row.max()
    return row - np.log(np.exp(row).sum())


def ask(stack: Stack, case, scratch: Path, own: dict) -> tuple[Path, dict]:
    """The folder with the logits of each step, and decode's account of the request."""
    rid = f"{case.name}-{uuid.uuid4().hex[:8]}"
    folder = scratch / rid
    folder.mkdir()
    steps = len(case.continuation)
    params = {"folder": str(folder), "forced": case.continuation, "oasis": own}
    answer = generate_on_pair(stack.urls["prefill"], stack.urls["decode"], stack.bootstrap_port, case.prompt, max_new_tokens=steps, rid=rid, timeout=1200,
                              sampling={"custom_params": params}, extra={"custom_logit_processor": Teacher.to_str()})
    if answer.output_ids != case.continuation:
        raise SystemExit(f"{case.name}: the server did not follow the forced tokens")
    oasis = stack.server_info("decode")["internal_states"][0]["oasis"]
    sets = oasis["working_sets"]
    return folder, {**oasis["requests"][rid], "pool_peak": sets["physical_tokens_peak"], "folds": sets["steps"].get("folds", 0)}


def compare(dense: Path, sparse: Path, steps: int) -> dict:
    """Over the decode steps: KL(dense || sparse) in nats, and how often the most likely token is the same."""
    kl, same = np.zeros(steps - 1), np.zeros(steps - 1, bool)
    for step in range(1, steps):
        a, b = log_probabilities(dense, step), log_probabilities(sparse, step)
        kl[step - 1], same[step - 1] = (np.exp(a) * (a - b)).sum(), a.argmax() == b.argmax()
    figures = {"kl": float(kl.mean()), "kl_first_8": float(kl[:8].mean()), "kl_p95": float(np.quantile(kl, 0.95)), "kl_worst_token": float(kl.max()),
               "top1": float(same.mean())}
    if steps > 1000:
        figures |= {"kl_by_thousand": [float(part.mean()) for part in np.array_split(kl, steps // 1000)],
                    "top1_by_thousand": [float(part.mean()) for part in np.array_split(same, steps // 1000)]}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", default="256,512,1024,2048")
    parser.add_argument("--summary", default="mean_var_int8")
    parser.add_argument("--on-miss", choices=("wait", "defer"), default="wait")
    parser.add_argument("--admission", choices=("selected", "full"), default="selected")
    parser.add_argument("--cap", type=int, default=0, help="fetch_blocks_per_step, 0 = no limit")
    parser.add_argument("--cases", default="")
    parser.add_argument("--layers", type=int, choices=(4, 30), default=30)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--long", type=int, default=0, help="instead: so many forced tokens from a prompt of 30")
    parser.add_argument("--text", choices=sorted(LONG_TEXTS), default="prose", help="of --long")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = models.prepare() if args.layers == 30 else models.prepare(models.CUT_LAYERS)
    maker = PromptMaker(model)
    chosen = [c._replace(continuation=c.continuation[: args.tokens]) for c in cases(maker) if not args.cases or c.name in args.cases.split(",")]
    if args.long:
        chosen = [long_case(maker, args.long, args.text)]
    budgets = [int(b) for b in args.budgets.split(",")]
    options = {"budget_tokens": max(budgets), "summary": args.summary, "fetch_blocks_per_step": args.cap, "admission": args.admission, "wait_seconds": 30.0}
    flags = ("--enable-custom-logit-processor", "--context-length", "8192")
    rows = []
    with tempfile.TemporaryDirectory(prefix="oasis-quality-") as folder:
        scratch = Path(folder)
        with (Processes(log=scratch / "zygote.log", env=import_environment()) as processes,
              Stack(StackSpec("oasis", model, config=options, flags=flags, max_total_tokens=16_000, arena_bytes=3 << 30), processes,
                    run_dir=args.logs or scratch / "run") as stack):
            for case in chosen:
                asked = [ask(stack, case, scratch, {"budget_tokens": budget, "on_miss": args.on_miss}) for budget in budgets]
                dense, _ = ask(stack, case, scratch, {"mode": "exact"})
                for budget, (sparse, report) in zip(budgets, asked):
                    full = report["full_transfer_bytes"]
                    rows.append({"case": case.name, "prompt_tokens": len(case.prompt), "budget": budget, **compare(dense, sparse, len(case.continuation)),
                                 "pool_tokens_peak_so_far": report["pool_peak"], "folds_so_far": report["folds"],
                                 "admitted": report["admitted_bytes"] / full, "lifetime": report["lifetime_bytes"] / full,
                                 "summaries": report["lifetime_bytes_by_phase"]["summaries"] / full})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                    shutil.rmtree(sparse)
                shutil.rmtree(dense)
            steps = stack.server_info("decode")["internal_states"][0]["oasis"]["working_sets"]["steps"]
    result = {"settings": {k: v for k, v in vars(args).items() if k not in ("json", "logs")}, "prompts": digest(chosen), "rows": rows, "steps": steps,
              "by_budget": [summary(rows, budget) for budget in budgets]}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    for line in result["by_budget"]:
        print(json.dumps(line))


def summary(rows: list[dict], budget: int) -> dict:
    mine = [r for r in rows if r["budget"] == budget]
    worst = max(mine, key=lambda r: r["kl"])
    return {"budget": budget, "n": len(mine), **{k: statistics.fmean(r[k] for r in mine) for k in ("kl", "kl_first_8", "top1", "admitted", "lifetime")},
            "worst": worst["case"], "worst_kl": worst["kl"], "worst_top1": worst["top1"]}


if __name__ == "__main__":
    main()
