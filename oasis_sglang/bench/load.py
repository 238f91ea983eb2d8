"""The client's side of a run: who is asked when, and when each token came."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

from oasis_sglang.bench.jobs import Job
from oasis_sglang.bench.records import Request
from oasis_sglang.client import GenerateError, Generation, generate

Ask = Callable[[Sequence[int], int, str], Generation]
"""(prompt, output tokens, request id) -> answer. Raises ``GenerateError`` or ``OSError``."""


def asker(url: str, timeout: float) -> Ask:
    """Through the endpoint at ``url``. ``timeout``: seconds without a byte of an answer. An answer with fewer tokens than asked for, which no
    end-of-text token excuses, is a failed one: what took less time did less."""
    def ask(prompt: Sequence[int], tokens: int, rid: str) -> Generation:
        answer = generate(url, prompt, max_new_tokens=tokens, rid=rid, timeout=timeout)
        if len(answer.output_ids) < tokens:
            raise GenerateError(f"answered {len(answer.output_ids)} of {tokens} tokens")
        return answer

    return ask


def drive(jobs: Sequence[Job], ask: Ask, *, concurrency: int, prefix: str = "") -> tuple[list[Request], float]:
    """Sends all jobs; their requests in the order of ``jobs``, and the seconds from the first one sent to the last token.

    At most ``concurrency`` conversations are under way; a job that neither follows another nor is followed is one. They start in
    the order of their first jobs, each job at its arrival at the earliest. ``prefix`` of request ids. A request that fails is
    recorded as such, and those that would follow it fail too.
    """
    chains = conversations(jobs)
    start, stopped = time.perf_counter(), threading.Event()
    done: dict[str, Request] = {}

    def run(chain: list[Job]) -> None:
        texts: dict[str, list[int]] = {}
        for job in chain:
            if stopped.is_set():
                return
            done[job.name] = _one(job, ask, prefix + job.name, texts, start, stopped)

    pool = ThreadPoolExecutor(max(1, min(concurrency, len(chains))))
    try:
        list(pool.map(run, chains))
    finally:  # when interrupted, what is under way ends with its server; nothing new is sent
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
    requests = [done[job.name] for job in jobs]
    first = min((request.sent for request in requests), default=0.0)
    last = max((request.sent + request.token_times[-1] for request in requests if request.token_times), default=first)
    return requests, last - first


def conversations(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that follow one another together, in the order of their first."""
    found: list[list[Job]] = []
    of: dict[str, list[Job]] = {}
    for job in jobs:
        if job.after is None:
            found.append([])
        of[job.name] = found[-1] if job.after is None else of[job.after]
        of[job.name].append(job)
    return found


def _one(job: Job, ask: Ask, rid: str, texts: dict[str, list[int]], start: float, stopped: threading.Event) -> Request:
    """``texts``: by job, its prompt and the answer; this one's is added."""
    now = time.perf_counter() - start
    if job.after is not None and job.after not in texts:
        return Request(job.name, 0, now, now, [], [], error=f"{job.after}, the turn before, has no answer")
    prompt = [*(texts[job.after] if job.after is not None else ()), *job.prompt]
    due = now if job.arrival is None else job.arrival if job.after is None else now + job.arrival
    if stopped.wait(max(0.0, due - now)):
        return Request(job.name, len(prompt), due, now, [], [], error="stopped before it was sent")
    sent = time.perf_counter() - start
    try:
        answer = ask(prompt, job.output_tokens, rid)
    except (GenerateError, OSError, HTTPException) as error:
        return Request(job.name, len(prompt), due, sent, [], [], error=str(error)[:500])
    texts[job.name] = [*prompt, *answer.output_ids]
    times = [round(at, 6) for at, tokens in zip(answer.chunk_times, answer.chunk_tokens) for _ in range(tokens)]
    return Request(job.name, len(prompt), due, sent, times, answer.output_ids)
