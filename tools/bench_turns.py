"""Many turns of a conversation: what crosses the wire again, and what prefill computes again.

One agent's transcript (a long first turn, small ones after) and two sets of conversations with a system prompt of their own, one
set interleaved and one with all conversations at the same time. Every system serves the same, on a stack of its own, one
stack after the other: SGLang's own PD without and with its decode radix cache, Oasis over all blocks (``exact``), Oasis
with a budget (``sparse:TOKENS``, ``sparse:full`` holds every block), each without and with ``--radix-cache-backend oasis``
(``+reuse``). Requests are token ids. The next prompt has the transcript's fixed answer, or with ``--own`` the one that the
system gave, so that decode meets again what it generated.

Wire bytes: of Oasis, what its decode node received, by phase, and a second count at the data plane (which has no manifest);
of stock, SGLang's ``sglang:kv_transfer_total_mb`` (KV alone), with the pages that decode lacked by our count as the second.
Computed tokens: prompt tokens less prefill's own ``cached_tokens``, with ``sglang:realtime_tokens_total`` as the second count;
of what starts at the same time prefill computes a shared part once or several times, depending on what arrives when.
Answers of systems that attend to everything must be stock's, token for token, or the run fails. ``--quality``: with every
answer forced to be the fixed one, KL against dense attention with reuse and without, of each turn's answer.

    python tools/bench_turns.py [--model 4|30|DIR] [--turns 13] [--first 5000] [--conversations 4] [--own] [--json FILE]
                                [--systems stock,stock-radix,exact,exact+reuse,sparse:full+reuse,sparse:1024,sparse:1024+reuse]
    python tools/bench_turns.py --quality 512,1024 --systems ""
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import turns
from bench_quality import ask as ask_forced
from bench_quality import option, state
from quality_figures import mean
from turns import Heard, Round, Transcript

from oasis_sglang import models
from oasis_sglang.bench.about import shape_of
from oasis_sglang.bench.counters import sample_sum
from oasis_sglang.bench.quality import FLAGS, Case, compare
from oasis_sglang.client import Generation, generate
from oasis_sglang.launch import NO_REUSE
from oasis_sglang.processes import Processes
from oasis_sglang.prompts import PromptMaker, library_text
from oasis_sglang.stack import Stack, StackSpec, import_environment

PAGE = 16
CONTEXT = 8192
SYSTEMS = "stock,stock-radix,exact,exact+reuse,sparse:full,sparse:full+reuse,sparse:1024,sparse:1024+reuse,sparse:512,sparse:512+reuse"
REUSE = ("--radix-cache-backend", "oasis")
CACHE_ARGUMENTS = ("radix_cache_backend", "disable_radix_cache")
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DETERMINISTIC = {"on_miss": "wait", "wait_seconds": 30.0}
"""A step waits for its blocks, so that what a system answers does not depend on how fast they come."""


class System(NamedTuple):
    """``dense``: attends to everything, so that its answers must be those of stock."""

    name: str
    spec: StackSpec
    dense: bool


def system(name: str, model: Path, options: Mapping[str, object], **common) -> System:
    """A name of ``SYSTEMS`` as what to run; ``common``: fields of ``StackSpec``. Raises ``ValueError`` for another name."""
    flags = (*common.pop("flags", ()), "--enable-metrics", "--context-length", str(CONTEXT))
    if name in ("stock", "stock-radix"):
        decode = ("--disaggregation-decode-enable-radix-cache",) if name == "stock-radix" else ()
        return System(name, StackSpec("stock", model, flags=flags, decode_flags=decode, **common), name == "stock")
    parts = re.fullmatch(r"(exact|sparse:(full|\d+))(\+reuse)?", name)
    if parts is None:
        raise ValueError(f"{name!r} is none of stock, stock-radix, exact, sparse:TOKENS, sparse:full, the last three also with +reuse")
    _, budget, reuse = parts.groups()
    config = {**options, "mode": "sparse", "budget_tokens": CONTEXT if budget == "full" else int(budget)} if budget else {**options, "mode": "exact"}
    flags += REUSE if reuse else NO_REUSE
    return System(name, StackSpec("oasis", model, flags=flags, config=config, **common), budget in (None, "full"))


class Asked(NamedTuple):
    """Decode's answer, and what prefill says it had of the prompt."""

    answer: Generation
    cached_tokens: int


def ask(stack: Stack, prompt: list[int], tokens: int, rid: str) -> Asked:
    room = random.getrandbits(62)
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": stack.bootstrap_port, "bootstrap_room": room}
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "rid": rid, **pair}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(_post, stack.urls["prefill"] + "/generate", body)
        answer = generate(stack.urls["decode"], prompt, max_new_tokens=tokens, rid=rid, extra=pair, timeout=1200)
        return Asked(answer, first.result()["meta_info"]["cached_tokens"])


def _post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=1200) as reply:
        return json.load(reply)


class Counts(NamedTuple):
    """Of a stack so far. ``moved``: stock, bytes that prefill says it sent; Oasis, bytes that decode's data plane received."""

    computed: float
    moved: float
    oasis: dict


def counts(stack: Stack) -> Counts:
    with urllib.request.urlopen(stack.urls["prefill"] + "/metrics", timeout=30) as reply:
        page = reply.read().decode()
    computed = sample_sum(page, "sglang:realtime_tokens_total", mode="prefill_compute") or 0.0
    if stack.spec.kind == "stock":
        return Counts(computed, (sample_sum(page, "sglang:kv_transfer_total_mb_sum") or 0.0) * 2**20, {})
    oasis = _settled(stack)
    return Counts(computed, oasis["plane"]["landed_bytes"], oasis)


def _settled(stack: Stack, seconds: float = 10.0) -> dict:
    """Decode's report once no request is being pulled: on-demand reads may end after the answer."""
    deadline = time.monotonic() + seconds
    while (report := state(stack))["pulls"] and time.monotonic() < deadline:
        time.sleep(0.05)
    return report


class Server:
    """Serves rounds on a stack and counts. ``token_bytes``: of the KV, for the second count of stock's bytes."""

    def __init__(self, stack: Stack, own: bool, token_bytes: int):
        self.stack, self.own, self.token_bytes = stack, own, token_bytes
        self.keeps = "--disaggregation-decode-enable-radix-cache" in stack.spec.decode_flags
        self.heard, self.answers = Heard(), {}

    def serve(self, round_: Round) -> dict:
        """One row of the result. Answers of earlier turns are remembered by transcript."""
        prompts = [t.prompt(round_.turn, self.answers.setdefault(t.name, []) if self.own else None) for t in round_.transcripts]
        rids = [f"{t.name}-{round_.turn}" for t in round_.transcripts]
        known = [self.heard.shared(prompt) for prompt in prompts]
        before = counts(self.stack)
        with ThreadPoolExecutor(len(prompts)) as pool:
            wanted = (len(t.turns[round_.turn].answer) for t in round_.transcripts)
            asked = list(pool.map(ask, [self.stack] * len(prompts), prompts, wanted, rids))
        after = counts(self.stack)
        new = 0
        for transcript, prompt, one in zip(round_.transcripts, prompts, asked):
            new += len(prompt) - self.heard.shared(prompt)
            self.heard.add([*prompt, *one.answer.output_ids[:-1]])  # the last token's KV is never made
            self.answers.setdefault(transcript.name, []).append(one.answer.output_ids)
        ttft = [one.answer.ttft_seconds for one in asked]
        return {"name": round_.name, "turn": round_.turn, "requests": len(prompts), "transcripts": [t.name for t in round_.transcripts],
                "prompt_tokens": sum(map(len, prompts)), "new_tokens": new,
                "computed_tokens": sum(len(prompt) - one.cached_tokens for prompt, one in zip(prompts, asked)),
                "computed_tokens_metric": after.computed - before.computed, "full_transfer_bytes": sum(map(len, prompts)) * self.token_bytes,
                **self._wire(before, after, rids, prompts, known), "ttft_seconds": sum(ttft) / len(ttft), "ttft_seconds_worst": max(ttft),
                "host_cache_bytes": (after.oasis.get("working_sets") or {}).get("host_cache", {}).get("used_bytes", 0),
                "answers": [one.answer.output_ids for one in asked]}

    def _wire(self, before: Counts, after: Counts, rids: list[str], prompts: list[list[int]], known: list[int]) -> dict:
        moved = after.moved - before.moved
        if self.stack.spec.kind == "stock":
            ours = sum(turns.transfer_bytes(len(p), min(k, len(p) - 1) if self.keeps else 0, PAGE, self.token_bytes) for p, k in zip(prompts, known))
            return {"wire_bytes": round(moved), "wire_by_phase": {"nixl": round(moved)}, "wire_bytes_second": ours}
        phases = Counter()
        for rid in rids:
            phases.update(after.oasis["requests"][rid]["lifetime_bytes_by_phase"])
        return {"wire_bytes": sum(phases.values()), "wire_by_phase": dict(phases), "wire_bytes_second": moved + phases["manifest"]}


@contextmanager
def started(spec: StackSpec, processes: Processes, folder: Path, maker: PromptMaker) -> Iterator[Stack]:
    """A stack that has served one short prompt of its own, so that nothing is made for the first time in what is timed."""
    with Stack(spec, processes, run_dir=folder) as stack:
        ask(stack, maker.cut(library_text(), 100), 4, "first")
        yield stack


def run(chosen: System, rounds: list[Round], own: bool, token_bytes: int, processes: Processes, folder: Path,
        maker: PromptMaker) -> tuple[list[dict], dict]:
    """The rows, and what each worker's arguments say of its radix cache in the end."""
    with started(chosen.spec, processes, folder, maker) as stack:
        caches = {role: {name: stack.server_info(role).get(name) for name in CACHE_ARGUMENTS} for role in ("prefill", "decode")}
        server, rows = Server(stack, own, token_bytes), []
        for round_ in rounds:
            rows.append(server.serve(round_))
            print(json.dumps({"system": chosen.name, **{k: v for k, v in rows[-1].items() if k != "answers"}}), file=sys.stderr, flush=True)
    return rows, caches


def quality(transcript: Transcript, budget: str, make, processes: Processes, folder: Path, maker: PromptMaker, scratch: Path) -> dict:
    """KL over the decode steps of each turn's answer: dense against ``without`` and ``with`` reuse, and without against with.

    ``make(name)`` -> ``System``. Every token is forced, so decode generates just what the next prompt has. The dense answers are
    of the stack without reuse, after the others, as they fill no cache there.
    """
    cases = [Case(transcript.name, transcript.prompt(i), turn.answer) for i, turn in enumerate(transcript.turns)]
    found: dict[str, list] = {}
    for how, name in (("without", f"sparse:{budget}"), ("with", f"sparse:{budget}+reuse")):
        with started(make(name).spec, processes, folder / f"quality-{name}", maker) as stack:
            found[how] = [ask_forced(stack, case, scratch, {}) for case in cases]
            if how == "without":
                found["dense"] = [ask_forced(stack, case, scratch, {"mode": "exact"}) for case in cases]
    pairs = {"without": ("dense", "without"), "with": ("dense", "with"), "between": ("without", "with")}
    by_turn = [{label: compare(found[a][i].folder, found[b][i].folder, len(case.continuation)) for label, (a, b) in pairs.items()}
               for i, case in enumerate(cases)]
    for one in (one for several in found.values() for one in several):
        shutil.rmtree(one.folder)
    means = {figure: {label: mean(turn[label][figure] for turn in by_turn) for label in pairs} for figure in ("kl", "top1")}
    return {"budget": budget, "last_kl": {label: by_turn[-1][label]["kl"] for label in pairs}, **means,
            "wire_bytes": {how: sum(one.report["lifetime_bytes"] for one in found[how]) for how in ("without", "with")}, "turns": by_turn}


def summary(rows: dict[str, list[dict]], systems: list[System]) -> dict[str, dict]:
    """Of each system: totals and groups with ratios to the first system, equality of answers with it."""
    base = systems[0].name
    grouped = {name: turns.groups(of) for name, of in rows.items()}
    return {s.name: {"total": turns.totals(rows[s.name]), "groups": {g: {**t, "ratio": turns.ratios(t, grouped[base][g])} for g, t in grouped[s.name].items()},
                     "answers": {"must_be_equal": s.dense, **turns.equality(rows[s.name], rows[base])}} for s in systems}


def show(name: str, rows: list[dict], of: dict, base: str) -> None:
    print(f"\n{name}")
    print("\n".join(turns.table(rows)))
    for group, t in of["groups"].items():
        wire, computed, ttft = ("-" if r is None else f"{r:.3f}" for r in t["ratio"].values())
        print(f"{group}: wire {t['wire_bytes'] / 1e6:.2f} MB ({wire} of {base}; second count {t['wire_bytes_second'] / 1e6:.2f}), "
              f"computed {t['computed_tokens']} ({computed}; metric {t['computed_tokens_metric']:.0f}) of {t['prompt_tokens']}, new {t['new_tokens']}, "
              f"TTFT {t['ttft_seconds']:.2f} s ({ttft}), host cache {t['host_cache_bytes'] / 1e6:.1f} MB")
    answers = of["answers"]
    where = f", first difference: {answers['first_difference']}" if answers["first_difference"] else ""
    print(f"answers equal to {base}'s: {answers['equal']} of {answers['of']}{where}")


def model_of(name: str) -> Path:
    return {"4": lambda: models.prepare(models.CUT_LAYERS), "30": models.prepare}.get(name, lambda: Path(name))()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="30", help="30, 4 (layers of SmolLM2-135M-Instruct), or a model's folder")
    parser.add_argument("--systems", default=SYSTEMS, help="the first one is what ratios are to; none with --quality: nothing but that")
    parser.add_argument("--turns", type=int, default=13)
    parser.add_argument("--first", type=int, default=5000, help="tokens of the agent's first turn")
    parser.add_argument("--conversations", type=int, default=4, help="in each of the two sets; 0: none")
    parser.add_argument("--conversation-turns", type=int, default=5)
    parser.add_argument("--system-tokens", type=int, default=1500, help="of the system prompt that conversations share")
    answers = parser.add_mutually_exclusive_group()
    answers.add_argument("--forced", dest="own", action="store_false", default=False, help="the next prompt has the transcript's answer (default)")
    answers.add_argument("--own", dest="own", action="store_true", default=False, help="the next prompt has the answer that the system gave")
    parser.add_argument("--quality", default="", metavar="BUDGETS", help="KL of the agent's answers with reuse and without, at these budgets")
    parser.add_argument("--set", type=option, action="append", default=[], metavar="OPTION=VALUE", help="any Oasis option, for both workers")
    parser.add_argument("--dtype", choices=sorted(ITEM_BYTES), default="float32")
    parser.add_argument("--pool", type=int, default=24_000, help="tokens of each worker's KV pool")
    parser.add_argument("--arena", type=int, default=3 << 30, help="bytes of the tier's arena")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = model_of(args.model)
    maker = PromptMaker(model)
    transcripts = [turns.agent(maker, args.turns, args.first, args.seed)]
    rounds = turns.one_by_one("agent", transcripts)
    if args.conversations:
        for name, order in (("interleaved", turns.one_by_one), ("at once", turns.at_once)):
            several = turns.conversations(maker, args.conversations, args.conversation_turns, args.system_tokens, name, args.seed)
            rounds += order(name, several)
            transcripts += several
    options = {**DETERMINISTIC, **dict(args.set)}
    common = {"max_total_tokens": args.pool, "arena_bytes": args.arena, "max_running_requests": max(4, args.conversations)}

    def make(name: str, *flags: str) -> System:
        return system(name, model, options, flags=("--dtype", args.dtype, *flags), **common)

    systems = [make(name) for name in filter(None, args.systems.split(","))]
    token_bytes = shape_of(model, ITEM_BYTES[args.dtype])["token_bytes"]
    rows: dict[str, list[dict]] = {}
    caches: dict[str, dict] = {}
    with tempfile.TemporaryDirectory(prefix="oasis-turns-") as scratch:
        folder = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with Processes(log=folder / "zygote.log", env=import_environment()) as processes:
            for chosen in systems:
                rows[chosen.name], caches[chosen.name] = run(chosen, rounds, args.own, token_bytes, processes, folder / chosen.name, maker)
            kl = [quality(transcripts[0], budget, lambda name: make(name, *FLAGS), processes, folder, maker, Path(scratch))
                  for budget in filter(None, args.quality.split(","))]
    of = summary(rows, systems) if systems else {}
    result = {"settings": {k: v for k, v in vars(args).items() if k not in ("json", "logs")}, "options": options, "prompts": turns.digest(transcripts),
              "token_bytes": token_bytes, "systems": of, "caches": caches, "rows": rows, "quality": kl}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1, default=str))
    print(f"transcripts {result['prompts']}, {token_bytes} bytes of KV per token, answers {'own' if args.own else 'fixed'}")
    for chosen in systems:
        show(chosen.name, rows[chosen.name], of[chosen.name], systems[0].name)
    for line in kl:
        print(json.dumps({k: v for k, v in line.items() if k != "turns"}))
    wrong = [s.name for s in systems if s.dense and of[s.name]["answers"]["first_difference"]]
    if wrong and systems[0].dense and args.dtype == "float32":
        raise SystemExit(f"answers differ from {systems[0].name}'s: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
