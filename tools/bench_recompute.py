"""What a recomputation does to quality: the tier is killed in the middle of answers, and comes back at its addresses.

Requests over a working set, with every token forced as in ``bench_quality.py``, are asked three times: undisturbed, with the kill, and
densely (``mode: exact``), which both are compared with. Forced tokens cross a recomputation: which one is next, the processor reads off
what the request has answered. At which step a request went on is said by the log of the prefill worker (tokens of the prompt that it computed
again), when by the times at which decode wrote each step's logits.

Greedy requests that hold all their blocks need no tier once they run. So they lose theirs while they are pulled (all reads are held until
the tier is dead), and others are taken off decode in the middle of the answer and computed again (SGLang's ``pause_generation``, mode
``retract``). Their text is compared with that of an undisturbed run, token for token.

    python tools/bench_recompute.py [--layers 4|30] [--prompts 6] [--shortest 3000] [--longest 6000] [--tokens 256] [--kill-at 64] [--budget 512]
                                    [--cold] [--greedy 6] [--greedy-tokens 64] [--set OPTION=VALUE ...] [--json FILE] [--markdown FILE] [--logs FOLDER]
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from bench_quality import option
from quality_prompts import digest
from recompute_figures import Interruption, by_part, identical, markdown, spread, together

from oasis_sglang import models
from oasis_sglang.bench.quality import EXACT, FLAGS, Case, QualityError, divergence, force
from oasis_sglang.client import GenerateError, forget, generate_on_pair
from oasis_sglang.processes import Processes
from oasis_sglang.prompts import PromptMaker, library_text
from oasis_sglang.soak import baseline
from oasis_sglang.soak.asking import ANSWERED, Asking, Outcome, since
from oasis_sglang.stack import Stack, StackSpec, import_environment

WAIT_S = 120.0
FAILURES = (GenerateError, QualityError, OSError)
FITS_TOKENS = 400
"""Prompt of a greedy request within the budget."""
PULLED, RETRACTED = "tier killed while it was pulled", "taken off in the middle"


def cases(maker: PromptMaker, count: int, shortest: int, longest: int, tokens: int) -> list[Case]:
    """Prompts of ``shortest`` to ``longest`` tokens, prose and code in turn, no text twice; continued by the ``tokens`` that really follow. Raises
    ``ValueError`` when there is not so much text."""
    texts = {"prose": maker.encode("\n\n".join(pydoc_data.topics.topics.values())), "code": maker.encode(library_text())}
    begin, found = dict.fromkeys(texts, 0), []
    for index in range(count):
        name = tuple(texts)[index % len(texts)]
        prompt = shortest + (longest - shortest) * index // max(1, count - 1)
        ids = texts[name][begin[name] : begin[name] + prompt + tokens]
        if len(ids) < prompt + tokens:
            raise ValueError(f"not enough {name} for {count} prompts")
        begin[name] += len(ids)
        found.append(Case(f"{name}_{index // len(texts)}", ids[:prompt], ids[prompt:]))
    return found


def request_lines(log: str) -> list[dict]:
    """What a worker has logged of its requests, in order."""
    return [json.loads("{" + line.partition("request {")[2]) for line in log.splitlines() if "request {" in line]


def computed_again(decode: Sequence[Mapping], prefill: Sequence[Mapping], rid: str) -> int | None:
    """Tokens that prefill computed for the room in which ``rid`` went on, of the ``request_lines`` of both workers; None when it did not go on."""
    line = next(line for line in reversed(decode) if line["rid"] == rid)
    if not line.get("recomputed"):
        return None
    return next(found["prompt_tokens"] for found in reversed(prefill) if found["room"] == line["room"])


def steps_of(folder: Path) -> list[Path]:
    """Files of logits that ``force`` left, in the order of their steps."""
    return sorted(folder.glob("*.npy"))


def divergences(dense: Path, other: Path) -> tuple[np.ndarray, np.ndarray]:
    """Of two folders of ``force`` with n + 1 steps each: KL float64 [n] and equal top-1 bool [n] of the decode steps."""
    pairs = zip(steps_of(dense)[1:], steps_of(other)[1:], strict=True)
    kl, same = zip(*(divergence(np.load(one), np.load(two)) for one, two in pairs))
    return np.array(kl), np.array(same)


def until(condition: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise QualityError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)


# -- the servers ------------------------------------------------------------------------------------------------


def totals(stack: Stack) -> dict[str, int]:
    return baseline.worker(stack, "decode")["totals"]


def kill_tier(stack: Stack) -> float:
    """Seconds of the clock that file times have."""
    tier, now = stack.servers["tier"], time.time()
    tier.signal(signal.SIGKILL, group=True)
    tier.wait(30)
    return now


def went_on(stack: Stack, rid: str) -> int | None:
    """As ``computed_again``, of what the workers have written by now."""

    def lines(name: str) -> list[dict]:
        return request_lines(stack.servers[name].log.read_text(errors="replace"))

    until(lambda: any(line["rid"] == rid for line in lines("decode")), f"decode's line of {rid}", 10)
    return computed_again(lines("decode"), lines("prefill"), rid)


def disturbed(stack: Stack, case: Case, folder: Path, own: Mapping[str, object], kill_at: int, cold: bool) -> dict:
    """Forces the answer and kills the tier when ``kill_at`` steps have their logits. What befell the request. Raises ``FAILURES``."""
    rid, before = f"{case.name}-{uuid.uuid4().hex[:8]}", totals(stack)
    with ThreadPoolExecutor(1) as pool:
        answer: Future = pool.submit(force, stack, case, folder, own, rid)
        until(lambda: answer.done() or len(steps_of(folder)) >= kill_at, f"{case.name} has answered {kill_at} tokens")
        if answer.done():
            answer.result()
            raise QualityError(f"{case.name} was answered before the kill: force more tokens")
        if cold:
            forget(stack.urls["prefill"])
        kill = kill_tier(stack)
        stack.restart("tier")
        restarted = time.time() - kill
        answer.result()
    counted = {name: value - before.get(name, 0) for name, value in totals(stack).items() if name.startswith("recompute")}
    again = went_on(stack, rid)
    times = np.array([path.stat().st_mtime for path in steps_of(folder)])
    seen = Interruption.of(times, kill, None if again is None else again - len(case.prompt))
    return {"seen": seen, "restart_seconds": restarted, "counted": counted, "recomputed": counted.get("recomputed", 0),
            "held": baseline.settle(lambda: baseline.held(stack), 30.0)}


def measure(stack: Stack, case: Case, scratch: Path, own: Mapping[str, object], kill_at: int, cold: bool) -> dict:
    """One row; with ``error`` when a request failed."""
    folders = {name: scratch / f"{case.name}-{name}" for name in ("undisturbed", "disturbed", "dense")}
    row = {"case": case.name, "prompt_tokens": len(case.prompt), "steps": len(case.continuation) - 1}
    try:
        forget(stack.urls["decode"])
        force(stack, case, folders["undisturbed"], own)
        forget(stack.urls["decode"])
        befell = disturbed(stack, case, folders["disturbed"], own, kill_at, cold)
        force(stack, case, folders["dense"], EXACT)
        seen: Interruption = befell.pop("seen")
        found = {name: divergences(folders["dense"], folders[name]) for name in ("undisturbed", "disturbed")}
        return {**row, "killed": seen.killed, "went_on": seen.went_on, "back_seconds": seen.back, "pause_seconds": seen.pause, **befell,
                "runs": {name: by_part(seen, *of) for name, of in found.items()},
                "kl_by_step": {name: kl.tolist() for name, (kl, _) in found.items()},
                "top1_by_step": {name: same.tolist() for name, (_, same) in found.items()}}
    except FAILURES as error:
        return {**row, "error": str(error)[:300]}
    finally:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)


# -- greedy text ------------------------------------------------------------------------------------------------


def ask(stack: Stack, prompt: Sequence[int], tokens: int, own: Mapping[str, object]) -> Asking:
    """The same request at both workers; returned is decode's, under way."""
    room = random.getrandbits(62)
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": {"oasis": dict(own)}}
    body = {"input_ids": list(prompt), "rid": f"greedy-{room}", "stream": True, "sampling_params": sampling, "bootstrap_host": stack.bootstrap_host,
            "bootstrap_port": stack.bootstrap_port, "bootstrap_room": room}
    clock, askings = since(time.monotonic()), []
    for name, wanted in (("prefill", 1), ("decode", tokens)):
        outcome = Outcome(id=body["rid"], prompt="", prompt_tokens=len(prompt), wanted=wanted, stream=True, sent=0.0)
        askings.append(Asking(stack.urls[name], body, outcome, clock, timeout=WAIT_S))
        threading.Thread(target=askings[-1].run, daemon=True).start()
    return askings[-1]


def text_of(asking: Asking) -> tuple[list[int], str]:
    """Its tokens, and why they are not all: "" when they are."""
    if not asking.done.wait(WAIT_S) or asking.outcome.status != ANSWERED:
        return asking.ids, f"{asking.outcome.id}: {asking.outcome.status} {asking.outcome.told}"
    return asking.ids, ""


def post(url: str, body: Mapping[str, object]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=WAIT_S).read()


def lose_while_pulled(stack: Stack, prompt: Sequence[int], tokens: int, own: Mapping[str, object], hold: Path) -> Asking:
    hold.touch()
    try:
        asking = ask(stack, prompt, tokens, own)
        until(lambda: asking.done.is_set() or baseline.worker(stack, "decode")["working_sets"]["live"] == 1, "it has its pages")
        kill_tier(stack)
    finally:
        hold.unlink()
    stack.restart("tier")
    return asking


def take_off(stack: Stack, prompt: Sequence[int], tokens: int, own: Mapping[str, object], hold: Path) -> Asking:
    asking = ask(stack, prompt, tokens, own)
    until(lambda: asking.done.is_set() or len(asking.ids) >= tokens // 2, "it is in the middle of its answer")
    post(f"{stack.urls['decode']}/pause_generation", {"mode": "retract"})
    post(f"{stack.urls['decode']}/continue_generation", {})
    return asking


def compare_texts(stack: Stack, case: Case, tokens: int, hold: Path) -> list[dict]:
    """One row for each mode and way."""
    rows = []
    for mode, prompt, own in (("exact", case.prompt, EXACT), ("within budget", case.prompt[:FITS_TOKENS], {})):
        forget(stack.urls["decode"])
        expected, refused = text_of(ask(stack, prompt, tokens, own))
        for how, act in ((PULLED, lose_while_pulled), (RETRACTED, take_off)):
            forget(stack.urls["decode"])
            before = totals(stack).get("recomputed", 0)
            got, error = text_of(act(stack, prompt, tokens, own, hold))
            same = got == expected and not (refused or error)
            first = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
            rows.append({"case": case.name, "mode": mode, "how": how, "prompt_tokens": len(prompt), "tokens": tokens, "distinct": len(set(expected)),
                         "identical": same, "first_difference": None if same else first, "error": error or refused and f"undisturbed: {refused}",
                         "recomputed": totals(stack).get("recomputed", 0) - before, "held": baseline.settle(lambda: baseline.held(stack), 30.0)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, choices=(4, 30), default=30)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--shortest", type=int, default=3000, help="tokens of the first prompt")
    parser.add_argument("--longest", type=int, default=6000, help="of the last one")
    parser.add_argument("--tokens", type=int, default=256, help="forced in each answer")
    parser.add_argument("--kill-at", type=int, default=64, help="steps that have their logits when the tier is killed")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--on-miss", choices=("wait", "defer"), default="defer")
    parser.add_argument("--cold", action="store_true", help="prefill has forgotten the prompt when it is asked again")
    parser.add_argument("--greedy", type=int, default=0, help="prompts whose greedy text is compared, of those above")
    parser.add_argument("--greedy-tokens", type=int, default=64)
    parser.add_argument("--set", type=option, action="append", default=[], metavar="OPTION=VALUE", help="any Oasis option, for both workers; wins")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    model = models.prepare() if args.layers == 30 else models.prepare(models.CUT_LAYERS)
    chosen = cases(PromptMaker(model), args.prompts, args.shortest, args.longest, args.tokens)
    with tempfile.TemporaryDirectory(prefix="oasis-recompute-") as folder:
        scratch, hold = Path(folder), Path(folder) / "hold"
        options = {"budget_tokens": args.budget, "on_miss": args.on_miss, "hold_reads_file": str(hold), **dict(args.set)}
        spec = StackSpec("oasis", model, config=options, flags=(*FLAGS, "--context-length", "8192"), max_total_tokens=16_000, arena_bytes=3 << 30)
        with (Processes(log=scratch / "zygote.log", env=import_environment()) as processes,
              Stack(spec, processes, run_dir=args.logs or scratch / "run") as stack):
            rows, greedy = [], []
            for index, case in enumerate(chosen):
                # Prefill computes it once, so that all the others find it in its cache.
                generate_on_pair(stack.urls["prefill"], stack.urls["decode"], stack.bootstrap_port, case.prompt, max_new_tokens=2)
                rows.append(measure(stack, case, scratch, {}, args.kill_at, args.cold))
                print(json.dumps({k: v for k, v in rows[-1].items() if not k.endswith("_by_step")}), file=sys.stderr, flush=True)
                if index < args.greedy:
                    greedy += compare_texts(stack, case, args.greedy_tokens, hold)
                    print(json.dumps(greedy[-4:]), file=sys.stderr, flush=True)
            stack.check()
            faults = baseline.faults_of_ours(stack)
    options.pop("hold_reads_file")
    result = {"settings": {k: v for k, v in vars(args).items() if k not in ("json", "markdown", "logs")}, "options": options, "prompts": digest(chosen),
              "went_on": sum(row.get("went_on") is not None for row in rows), "back_seconds": spread(row.get("back_seconds") for row in rows),
              "pause_seconds": spread(row.get("pause_seconds") for row in rows), "internal_errors": faults, "together": together(rows),
              "identical": identical(greedy), "rows": rows, "greedy": greedy}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1, default=str))
    table = markdown(result)
    if args.markdown:
        args.markdown.write_text(table + "\n")
    print(table)
    print(json.dumps({k: v for k, v in result.items() if k not in ("rows", "greedy", "together")}, default=str))


if __name__ == "__main__":
    main()
