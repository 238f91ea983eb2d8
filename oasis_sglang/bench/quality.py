"""Quality: how far a system's next-token distributions are from dense attention's, on answers that are forced.

Both sides are the same pair of servers and the same prompts; the dense one asks for ``mode: exact``. A custom logit processor of
SGLang's forces every token and writes down the logits that decode computed, so that the two sides never drift apart and each step
is a measurement of its own. The first token comes from prefill, which attends to everything: figures are over the decode steps.
"""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from oasis_sglang.bench import BenchError
from oasis_sglang.bench.jobs import Work
from oasis_sglang.bench.records import Point, Quality
from oasis_sglang.client import Generation, forget, generate_on_pair

FLAGS = ("--enable-custom-logit-processor", "--disable-overlap-schedule")
"""What servers need. The processor counts on tokens being in a request's output before the next forward."""
EXACT = {"mode": "exact"}
TIMEOUT_S = 1200.0


class QualityError(BenchError):
    """The servers did not follow the forced tokens, so that there is nothing to compare."""


class Teacher:
    """A custom logit processor: writes the logits of each row to ``custom_params["folder"]`` and leaves one token possible.

    A verify forward has several rows of a request, of the steps from its newest token on. Those after a draft that is not the
    forced token are of a text that never was, but they are of steps that a later forward takes again: what a step's file holds
    in the end is from the row that was accepted.
    """

    def __call__(self, logits, custom_param_list=None):
        rows_of = {}
        for row, params in zip(logits, custom_param_list):
            request = params["__req__"]
            ahead = rows_of[id(request)] = rows_of.get(id(request), -1) + 1
            step = len(request.output_ids) + ahead
            if step >= len(params["forced"]):
                continue  # drafts go past the end
            np.save(_step(Path(params["folder"]), step), row.float().cpu().numpy())
            kept = row[params["forced"][step]].clone()
            row.fill_(float("-inf"))
            row[params["forced"][step]] = kept
        return logits

    @classmethod
    def to_str(cls) -> str:
        """As a request carries it. By name: the servers have this package. (SGLang's base class would do the same, for an import of
        seconds.)"""
        return json.dumps({"callable": pickle.dumps(cls).hex()})


class Case(NamedTuple):
    """Token ids. ``continuation``: the answer to force."""

    name: str
    prompt: list[int]
    continuation: list[int]


def cases(work: Work, steps: int) -> list[Case]:
    """Of the jobs that have a continuation, each cut to prefill's token and ``steps`` decode steps. A job that follows another one has
    that one's prompt and whole continuation before its own prompt.

    Raises ``ValueError`` when a continuation has no decode step, or the turn before has no continuation.
    """
    texts: dict[str, list[int]] = {}
    found = []
    for job in work.jobs:
        if not job.continuation:
            continue
        if len(job.continuation) < 2:
            raise ValueError(f"{work.name}: the continuation of {job.name} has one token, and the first one is prefill's")
        if job.after is not None and job.after not in texts:
            raise ValueError(f"{work.name}: {job.name} has a continuation, {job.after}, the turn before it, has none")
        prompt = [*(texts[job.after] if job.after is not None else ()), *job.prompt]
        texts[job.name] = [*prompt, *job.continuation]
        found.append(Case(job.name, prompt, list(job.continuation[: steps + 1])))
    return found


def force(stack, case: Case, folder: Path, own: Mapping[str, object], rid: str | None = None) -> Generation:
    """Asks ``stack`` (a pair started with ``FLAGS``) with the answer forced. ``own``: Oasis options of this request. ``folder``, which is
    made: afterwards decode's logits of each step, float32 [vocabulary], for ``compare``.

    Raises QualityError when the answer is another one; GenerateError or OSError when there is none.
    """
    folder.mkdir()
    params = {"folder": str(folder.resolve()), "forced": case.continuation, "oasis": dict(own)}
    answer = generate_on_pair(stack.urls["prefill"], stack.urls["decode"], stack.bootstrap_port, case.prompt, bootstrap_host=stack.bootstrap_host,
                              max_new_tokens=len(case.continuation), rid=rid or f"quality-{uuid.uuid4().hex}", timeout=TIMEOUT_S,
                              sampling={"custom_params": params}, extra={"custom_logit_processor": Teacher.to_str()})
    if answer.output_ids != case.continuation:
        raise QualityError(f"{case.name}: the servers did not follow the forced tokens; were they started with {' '.join(FLAGS)}?")
    return answer


Ask = Callable[..., object]
"""As ``force``."""


def measure(stack, work: Work, *, system: str, point: Point, options: Mapping[str, object], scratch: Path, steps: int = 64,
            progress: Callable[[str], None] = lambda line: None, ask: Ask = force) -> list[Quality]:
    """One row for each job of ``work`` that has a continuation, in their order, over at most ``steps`` decode steps.

    ``stack``: of kind ``oasis``, started with ``FLAGS``. ``options``: Oasis options of the system's requests; with ``on_miss: wait`` the
    figures do not depend on how fast blocks come. ``scratch``: a folder that the servers can write to; it holds steps x vocabulary x 4
    bytes per job meanwhile. What a decode node keeps of one request changes which blocks the next one begins with, so it forgets what came
    before, and all jobs are asked of the system before any is asked densely. (Turns of one conversation do find what the turns
    before left, as they would in service.)

    Raises QualityError, ``ValueError`` (as ``cases``), and what ``ask`` raises.
    """
    chosen = cases(work, steps)
    rows = []
    with tempfile.TemporaryDirectory(prefix="quality-", dir=scratch) as folder:
        places = [(Path(folder) / f"{index}-system", Path(folder) / f"{index}-dense") for index in range(len(chosen))]
        forget(stack.urls["decode"])
        for case, (ours, _) in zip(chosen, places):
            ask(stack, case, ours, options)
        for case, (ours, dense) in zip(chosen, places):
            ask(stack, case, dense, EXACT)
            found = compare(dense, ours, len(case.continuation))
            rows.append(Quality(system, work.name, case.name, dict(point), len(case.continuation) - 1, found["kl"], found["kl_worst_token"], found["top1"]))
            progress(f"quality of {system} on {work.name}/{case.name}: KL {found['kl']:.4f}, top-1 {found['top1']:.3f}")
            shutil.rmtree(ours)
            shutil.rmtree(dense)
    return rows


def compare(dense: Path, other: Path, tokens: int) -> dict[str, object]:
    """Of two folders that ``force`` filled with ``tokens`` forced tokens, at least two: ``over_steps`` of the decode steps."""
    kl, same = zip(*(divergence(*(np.load(_step(folder, step)) for folder in (dense, other))) for step in range(1, tokens)))
    return over_steps(np.array(kl), np.array(same))


def divergence(dense: np.ndarray, other: np.ndarray) -> tuple[float, bool]:
    """Of one step's logits float [vocabulary] each: KL(dense || other) in nats, and whether the most likely token is the same."""
    a, b = (row - np.logaddexp.reduce(row) for row in (dense.astype(np.float64), other.astype(np.float64)))
    return float((np.exp(a) * (a - b)).sum()), bool(a.argmax() == b.argmax())


def over_steps(kl: np.ndarray, same: np.ndarray) -> dict[str, object]:
    """``kl`` float64 [n], ``same`` bool [n]: of the decode steps in order, at least one."""
    figures = {"kl": float(kl.mean()), "kl_first_8": float(kl[:8].mean()), "kl_p95": float(np.quantile(kl, 0.95)), "kl_worst_token": float(kl.max()),
               "top1": float(same.mean())}
    if len(kl) >= 1000:
        thousands = len(kl) // 1000
        figures |= {"kl_by_thousand": [float(part.mean()) for part in np.array_split(kl, thousands)],
                    "top1_by_thousand": [float(part.mean()) for part in np.array_split(same, thousands)]}
    return figures


def _step(folder: Path, step: int) -> Path:
    return folder / f"{step:05d}.npy"
