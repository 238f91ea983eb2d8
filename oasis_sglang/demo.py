"""The demo: the same prompts through Oasis, then through stock SGLang PD over NIXL, and what differed.

Oasis runs with its defaults: a prompt that fits the budget is attended to as a whole, a longer one through a working set.
The longer ones run once more with ``mode: exact``, all blocks, which must answer as stock SGLang does. What Oasis' decode node
keeps is flushed before every prompt but one, the next turn of the long one: Oasis runs first, since its answer is part of that.

One stack runs at a time, so neither takes CPU from the other; both are warmed first. Every prompt runs once (n = 1):
this shows that the path works and what it moves, it is not a benchmark.
"""

from __future__ import annotations

import os
import platform as machine
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from oasis_sglang import client
from oasis_sglang.client import Generation, generate, generate_concurrently, generate_on_pair
from oasis_sglang.processes import Processes
from oasis_sglang.prompts import PromptMaker, repository_text
from oasis_sglang.stack import Stack, StackError, StackSpec

LONG_TOKENS = 6000
MEDIUM_TOKENS = 2000
AT_ONCE = ", at once"
EXACT = ", exact"
SECOND_TURN = ", turn 2"
_FOLLOW_UP = "Which of these parts would you read first, and why?"
_VERSIONS = ("oasis-sglang", "sglang", "sglang-router", "nixl", "torch", "transformers")
_ACCOUNTED = ("full_transfer_bytes", "admitted_bytes", "admitted_bytes_by_phase", "lifetime_bytes")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Prompt:
    """``fresh``: asked of an Oasis decode node that keeps nothing of what was asked before."""

    name: str
    input_ids: list[int]
    fresh: bool = True


def make_prompts(maker: PromptMaker) -> list[Prompt]:
    """One long and one medium chat about this repository's own text, and four short questions."""
    text = repository_text()
    return [
        Prompt("long", maker.cut(text, LONG_TOKENS)),
        Prompt("medium", maker.cut(text, MEDIUM_TOKENS, skip=LONG_TOKENS)),
        *(Prompt(f"short {index}", ids) for index, ids in enumerate(maker.short(), 1)),
    ]


def second_turn(maker: PromptMaker, first: Prompt, answer: Generation) -> Prompt:
    """``first``, the answer to it and one more question."""
    more = [*maker.encode("<|im_end|>\n"), *maker.chat(_FOLLOW_UP)]
    return Prompt(first.name + SECOND_TURN, [*first.input_ids, *answer.output_ids, *more], fresh=False)


def run(
    model: Path,
    processes: Processes,
    *,
    run_dir: Path,
    output_tokens: int,
    progress: Progress = lambda line: None,
) -> dict:
    """The report (the object ``oasis demo --json`` prints). Raises StackError, GenerateError or ConfigError."""
    maker = PromptMaker(model)
    prompts = make_prompts(maker)
    progress("--- Oasis")
    with Stack(StackSpec("oasis", model), processes, run_dir=run_dir / "oasis", progress=progress) as stack:
        warm_up(stack, prompts)
        oasis = ask(stack, prompts[:1], output_tokens, progress)
        prompts.insert(1, second_turn(maker, prompts[0], oasis["long"]))
        oasis |= ask(stack, prompts[1:], output_tokens, progress) | ask_at_once(stack, prompts, output_tokens, progress)
        oasis |= ask_exactly(stack, [prompts[0], prompts[2]], output_tokens, progress)
        state = decode_state(stack)
    progress("--- stock SGLang PD over NIXL")
    with Stack(StackSpec("stock", model), processes, run_dir=run_dir / "stock", progress=progress) as stack:
        warm_up(stack, prompts)
        stock = ask(stack, prompts, output_tokens, progress) | ask_at_once(stack, prompts, output_tokens, progress)
    return {
        "requests": compare(stock, oasis, state["requests"]),
        "decode_host_bytes_peak": state["host_bytes_peak"] + state["working_sets"]["host_cache"]["peak_bytes"],
        "kv_pool_tokens_peak": state["kv_pool_tokens_peak"],
        "config": {
            "model": model.name,
            "machine": describe_machine(),
            "runs_per_prompt": 1,
            "output_tokens": output_tokens,
            "order": ["oasis", "stock"],
            "oasis": state["config"],
            "layout": state.get("layout"),
        },
        "versions": {"python": machine.python_version(), **{name: version(name) for name in _VERSIONS}},
    }


def short_ones(prompts: Sequence[Prompt]) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt.name.startswith("short")]


def warm_up(stack: Stack, prompts: Sequence[Prompt]) -> None:
    """First requests pay for connections and first-use work on either side."""
    for prompt in short_ones(prompts)[:2]:
        generate(stack.url, prompt.input_ids, max_new_tokens=4)


def forget(stack: Stack) -> None:
    """What an Oasis decode node keeps of earlier requests is gone. A stock one keeps nothing unless told to. Raises OSError."""
    if stack.spec.kind == "oasis":
        client.forget(stack.urls["decode"])


def ask(stack: Stack, prompts: Sequence[Prompt], output_tokens: int, progress: Progress) -> dict[str, Generation]:
    """Answers by prompt name, one prompt after the other."""
    answers = {}
    for prompt in prompts:
        if prompt.fresh:
            forget(stack)
        answer = generate(stack.url, prompt.input_ids, max_new_tokens=output_tokens, rid=f"demo-{prompt.name}")
        progress(
            f"{prompt.name}: {answer.prompt_tokens} tokens, first token after {answer.ttft_seconds:.2f} s"
        )
        answers[prompt.name] = answer
    return answers


def ask_at_once(stack: Stack, prompts: Sequence[Prompt], output_tokens: int, progress: Progress) -> dict[str, Generation]:
    """The short prompts, all at the same time."""
    short = short_ones(prompts)
    forget(stack)
    answers = generate_concurrently(
        stack.url, [prompt.input_ids for prompt in short], max_new_tokens=output_tokens, rid="demo-at-once"
    )
    progress(f"{len(short)} short ones at once: done")
    return {prompt.name + AT_ONCE: answer for prompt, answer in zip(short, answers, strict=True)}


def ask_exactly(stack: Stack, prompts: Sequence[Prompt], output_tokens: int, progress: Progress) -> dict[str, Generation]:
    """The same prompts over all their blocks. Not through the router, which does not pass ``custom_params`` on."""
    answers = {}
    for prompt in prompts:
        forget(stack)
        answers[prompt.name + EXACT] = generate_on_pair(
            stack.urls["prefill"], stack.urls["decode"], stack.bootstrap_port, prompt.input_ids, max_new_tokens=output_tokens,
            rid=f"demo-{prompt.name}-exact", sampling={"custom_params": {"oasis": {"mode": "exact"}}})
        progress(f"{prompt.name}, all blocks: done")
    return answers


def decode_state(stack: Stack) -> dict:
    """What the decode worker counted."""
    state = stack.server_info("decode")["internal_states"][0].get("oasis")
    if not state:
        raise StackError("the decode worker's /server_info has no Oasis section: is the plugin loaded?")
    return state


def compare(
    stock: dict[str, Generation], oasis: dict[str, Generation], accounts: dict[str, dict]
) -> list[dict]:
    """One entry per request. ``accounts``: the decode worker's counts by request id."""
    entries = []
    for name, ours in oasis.items():
        theirs = stock[name.removesuffix(EXACT)]
        if ours.rid not in accounts:
            raise StackError(f"the decode worker has no byte counts for request {ours.rid}")
        entries.append(
            {
                "name": name,
                "prompt_tokens": ours.prompt_tokens,
                "output_tokens": len(ours.output_ids),
                **{key: accounts[ours.rid][key] for key in _ACCOUNTED},
                "ttft_seconds": ours.ttft_seconds,
                "itl_seconds_mean": ours.itl_seconds_mean,
                "stock_ttft_seconds": theirs.ttft_seconds,
                "stock_itl_seconds_mean": theirs.itl_seconds_mean,
                "agreement_tokens": agreement(ours.output_ids, theirs.output_ids),
            }
        )
    return entries


def agreement(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    count = 0
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            break
        count += 1
    return count


def describe_machine() -> str:
    cpu = machine.processor() or machine.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{len(os.sched_getaffinity(0))} cores, {cpu}, {machine.system()}"


def mebibytes(size: int) -> str:
    """Three digits: the table has 80 columns."""
    return f"{size / 2**20:.0f}" if size >= 100 << 20 else f"{size / 2**20:.1f}"


def show(report: dict) -> None:
    """The report as a table on stdout."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="Stock SGLang PD over NIXL, and Oasis, on the same prompts",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("prompt", no_wrap=True)
    for column in (
        "tokens",
        "full\nMiB",
        "adm.\nMiB",
        "life\nMiB",
        *("TTFT\nstock", "TTFT\nOasis"),
        *("ITL\nstock", "ITL\nOasis"),
        "equal",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in report["requests"]:
        table.add_row(
            entry["name"],
            str(entry["prompt_tokens"]),
            mebibytes(entry["full_transfer_bytes"]),
            mebibytes(entry["admitted_bytes"]),
            mebibytes(entry["lifetime_bytes"]),
            f"{entry['stock_ttft_seconds']:.2f}",
            f"{entry['ttft_seconds']:.2f}",
            f"{entry['stock_itl_seconds_mean'] * 1000:.0f}",
            f"{entry['itl_seconds_mean'] * 1000:.0f}",
            f"{entry['agreement_tokens']}/{entry['output_tokens']}",
        )
    config = report["config"]
    budget, tail = config["oasis"]["budget_tokens"], config["oasis"]["tail_tokens"]
    whole = [e for e in report["requests"] if e["name"].endswith(EXACT) or e["prompt_tokens"] + e["output_tokens"] <= budget + tail]
    equal = sum(entry["agreement_tokens"] == entry["output_tokens"] for entry in whole)
    console = Console()
    console.print(table)
    console.print(f"{equal} of the {len(whole)} answers over all blocks (prompts within the budget, and those marked exact) are token for token those of "
                  f"stock SGLang. The others attend to {budget} tokens of the prompt, chosen for each layer and KV head, and the newest {tail}.")
    console.print(
        f"Model {config['model']}, greedy, {config['output_tokens']} output tokens, each prompt once (n = 1), "
        f"one stack after the other on one machine: {config['machine']}. Times are single runs."
    )
    console.print(
        "full: KV bytes of the prompt. adm. (admitted): bytes decode received before its first step, summaries and manifest "
        "included. life: until the end. TTFT in s, ITL in ms. equal: leading output tokens equal to stock's. "
        f"Host memory of decode in use (staging and cache): at most {report['decode_host_bytes_peak'] / 2**20:,.1f} MiB. "
        f"KV pool: at most {report['kv_pool_tokens_peak']:,} tokens."
    )
    console.print(
        "Oasis' decode node was emptied before each prompt except turn 2, which goes on with Oasis' own answer and pulls only what the "
        "turn before has not left there; stock SGLang's decode node keeps nothing by default."
    )
