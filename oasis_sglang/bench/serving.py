"""Drives SGLang's own load generator (``sglang.bench_serving``) against an endpoint: a server, the router of a pair, anything that speaks
its protocols. It runs in a process of its own, offline, as a user would start it.

What works without a network, also through the router of a pair: ``random-ids`` (the default here), ``generated-shared-prefix``, and with a
file for ``--dataset-path``: ``sharegpt``, ``random``, ``custom``, ``mooncake``; ``openai``, ``agentic-trace`` and several turns of
``generated-shared-prefix`` with ``--backend sglang-oai-chat``. Without a file those download theirs.

What to know of 0.5.23 when reading its figures:

- ``mooncake`` keeps a trace's times and output lengths, not its prompt lengths: 128 or so tokens for each hash id, whatever
  ``input_length`` says, and a warm-up request with 512. Only ``--backend sglang`` replays it.
- The router has no ``/server_info``, so that ``accept_length`` is null there. ``--flush-cache`` works through it; without that the warm-up
  leaves the first prompt in prefill's cache.
- A request refused inside an answered stream (a prompt longer than the context, on a pair) counts as completed, with all its
  tokens and a time to first token of 0. Here that is an error. An answer that breaks off later counts as completed with fewer tokens,
  which a row cannot show.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from oasis_sglang.bench import BenchError
from oasis_sglang.stack import import_environment

DEFAULTS = ("--num-prompts", "16", "--random-input-len", "1024", "--random-output-len", "64", "--random-range-ratio", "1.0", "--disable-tqdm")
TIMEOUT_S = 4 * 3600.0
_TAIL_CHARACTERS = 3000


class ServingError(BenchError):
    """``sglang.bench_serving`` failed, or requests of it did; the message ends with the tail of its output or the first error."""


def run(url: str, *, model: str, arguments: Sequence[str], folder: Path, progress: Callable[[str], None] = lambda line: None,
        name: str = "bench_serving", timeout: float = TIMEOUT_S) -> list[dict[str, object]]:
    """The rows that one run against ``url`` wrote, without what they have of each request: that stays in ``folder/<name>.jsonl``, its output
    in ``folder/<name>.log`` (both are replaced). ``model``: folder of the tokenizer. ``arguments``: its flags, they win over ours;
    ``timeout``: seconds for all of it.

    Raises ServingError when it fails, takes longer, or one of the requests it sent was not answered.
    """
    folder.mkdir(parents=True, exist_ok=True)
    output, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    output.unlink(missing_ok=True)
    argv = command(url, model, arguments, output)
    progress(f"bench_serving: {' '.join(argv[4:])}")
    with log.open("wb") as sink:
        try:
            done = subprocess.run(argv, env={**os.environ, **import_environment(), "PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL, stdout=sink,
                                  stderr=subprocess.STDOUT, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise ServingError(f"bench_serving did not end within {timeout:.0f} s\n{_tail(log)}") from None
    if done.returncode:
        raise ServingError(f"bench_serving ended with exit code {done.returncode}\n{_tail(log)}")
    rows = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    if not rows:
        raise ServingError(f"bench_serving wrote no result\n{_tail(log)}")
    for row in rows:
        check(row)
        progress(f"bench_serving: {row['completed']} requests in {row['duration']:.1f} s, {row['output_throughput']:.1f} tokens/s, "
                 f"TTFT {row['mean_ttft_ms']:.0f} ms")
    return [figures(row) for row in rows]


def command(url: str, model: str, arguments: Sequence[str], output: Path) -> list[str]:
    """The command line: our defaults, the user's arguments, and what they cannot change."""
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--backend", default="sglang")
    chosen.add_argument("--dataset-name", default="random-ids")
    choice, _ = chosen.parse_known_args(list(arguments))
    # Random ids as text come out as other ids, and more of them. Only this backend takes ids.
    ids = ("--tokenize-prompt",) if (choice.backend, choice.dataset_name) == ("sglang", "random-ids") else ()
    ours = ("--backend", "sglang", "--dataset-name", "random-ids", "--model", model, "--tokenizer", model, *DEFAULTS, *ids)
    return [sys.executable, "-P", "-m", "sglang.benchmark.serving", *ours, *arguments, "--base-url", url, "--output-file", str(output), "--output-details"]


def check(row: Mapping) -> None:
    """Raises ServingError when a request of ``row`` (with its details) was not answered: an HTTP error, or a stream without text."""
    errors = row["errors"]
    silent = [not error and tokens > 0 and ttft == 0 for error, tokens, ttft in zip(errors, row["output_lens"], row["ttfts"])]
    failed = [error for error in errors if error]
    if not failed and not any(silent):
        return
    said = [f"{len(failed)} failed"] * bool(failed) + [f"{sum(silent)} have no text (refused inside the stream, or special tokens only)"] * any(silent)
    raise ServingError(f"of {len(errors)} requests of bench_serving {' and '.join(said)}" + (f"\n{failed[0][-_TAIL_CHARACTERS:]}" if failed else ""))


def figures(row: Mapping) -> dict[str, object]:
    """``row`` without lists (a value for each request) and the server's account of itself; what JSON has no number for as a word."""
    return {name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items() if not isinstance(value, list) and name != "server_info"}


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
