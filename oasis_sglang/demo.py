"""The demo: the same prompts through stock SGLang PD over NIXL, then through Oasis, and what differed.

Oasis runs with its defaults: a prompt that fits the budget is attended to as a whole, a longer one through a working set.
The longer ones run once more with ``mode: exact``, all blocks, which must answer as stock SGLang does.

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

from oasis_sglang.client import Generation, generate, generate_concurrently, generate_on_pair
from oasis_sglang.processes import Processes
from oasis_sglang.prompts import PromptMaker, repository_text
from oasis_sglang.stack import Stack, StackError, StackSpec

LONG_TOKENS = 6000
MEDIUM_TOKENS = 2000
AT_ONCE = ", at once"
EXACT = ", exact"
_VERSIONS = ("oasis-sglang", "sglang", "sglang-router", "nixl", "torch", "transformers")
_ACCOUNTED = ("full_transfer_bytes", "admitted_bytes", "admitted_bytes_by_phase", "lifetime_bytes")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Prompt:
    name: str
    input_ids: list[int]


def make_prompts(model: Path) -> list[Prompt]:
    """One long and one medium chat about this repository's own text, and four short questions."""
    maker = PromptMaker(model)
    text = repository_text()
    return [
        Prompt("long", maker.cut(text, LONG_TOKENS)),
        Prompt("medium", maker.cut(text, MEDIUM_TOKENS, skip=LONG_TOKENS)),
        *(Prompt(f"short {index}", ids) for index, ids in enumerate(maker.short(), 1)),
    ]


def run(
    model: Path,
    processes: Processes,
    *,
    run_dir: Path,
    output_tokens: int,
    progress: Progress = lambda line: None,
) -> dict:
    """The report (the object ``oasis demo --json`` prints). Raises StackError, GenerateError or ConfigError."""
    prompts = make_prompts(model)
    answers: dict[str, dict[str, Generation]] = {}
    for kind, title in (("stock", "stock SGLang PD over NIXL"), ("oasis", "Oasis")):
        progress(f"--- {title}")
        with Stack(StackSpec(kind, model), processes, run_dir=run_dir / kind, progress=progress) as stack:
            answers[kind] = ask_all(stack.url, prompts, output_tokens, progress)
            if kind == "oasis":
                answers[kind] |= ask_exactly(stack, prompts[:2], output_tokens, progress)
                state = decode_state(stack)
    return {
        "requests": compare(answers["stock"], answers["oasis"], state["requests"]),
        "decode_host_bytes_peak": state["host_bytes_peak"] + state["working_sets"]["host_cache"]["peak_bytes"],
        "kv_pool_tokens_peak": state["kv_pool_tokens_peak"],
        "config": {
            "model": model.name,
            "machine": describe_machine(),
            "runs_per_prompt": 1,
            "output_tokens": output_tokens,
            "order": ["stock", "oasis"],
            "oasis": state["config"],
            "layout": state.get("layout"),
        },
        "versions": {"python": machine.python_version(), **{name: version(name) for name in _VERSIONS}},
    }


def ask_all(
    url: str, prompts: Sequence[Prompt], output_tokens: int, progress: Progress
) -> dict[str, Generation]:
    """Answers by prompt name: each prompt alone, then the short ones at once."""
    short = [prompt for prompt in prompts if prompt.name.startswith("short")]
    for prompt in short[:2]:  # first requests pay for connections and first-use work on either side
        generate(url, prompt.input_ids, max_new_tokens=4)
    answers = {}
    for prompt in prompts:
        answer = generate(url, prompt.input_ids, max_new_tokens=output_tokens, rid=f"demo-{prompt.name}")
        progress(
            f"{prompt.name}: {answer.prompt_tokens} tokens, first token after {answer.ttft_seconds:.2f} s"
        )
        answers[prompt.name] = answer
    at_once = generate_concurrently(
        url, [prompt.input_ids for prompt in short], max_new_tokens=output_tokens, rid="demo-at-once"
    )
    progress(f"{len(short)} short ones at once: done")
    return answers | {prompt.name + AT_ONCE: answer for prompt, answer in zip(short, at_once, strict=True)}


def ask_exactly(stack: Stack, prompts: Sequence[Prompt], output_tokens: int, progress: Progress) -> dict[str, Generation]:
    """The same prompts over all their blocks. Not through the router, which does not pass ``custom_params`` on."""
    answers = {}
    for prompt in prompts:
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
