"""The figures of a study: every setting on every case, and over all cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from oasis_sglang.study.engine import Result, dense, walk
from oasis_sglang.study.model import Model
from oasis_sglang.study.policies import Setting
from oasis_sglang.study.texts import Case


class Row(NamedTuple):
    """Of one setting on one case, or the mean over all (``case`` empty). ``kl``: KL(dense || sparse) in nats per token; ``top1``: share
    of tokens whose most likely successor is the same; ``recall``: share of the dense softmax on what was seen; ``miss_rate``: of the
    newest rows' top sets, not resident; ``missed_mass``: share of their expected mass, averaged over heads that select;
    ``worst_missed_mass``: of ``worst_head``, "layer.head"; ``tokens_per_step``: more than 1 where drafts are kept. Of all of the
    prompt's KV: ``admitted`` before the first step, ``per_step`` pulled in a step, ``lifetime`` until the end."""

    case: str
    kl: float
    kl_p95: float
    kl_worst: float
    top1: float
    recall: float
    miss_rate: float
    missed_mass: float
    worst_missed_mass: float
    worst_head: str
    tokens_per_step: float
    admitted: float
    per_step: float
    lifetime: float


class Study(NamedTuple):
    """``rows[i][j]``: of setting i on case j; ``means[i]``; ``curves[i]``: share of the prompt's KV pulled until each token, [T]."""

    settings: list[Setting]
    rows: list[list[Row]]
    means: list[Row]
    curves: list[np.ndarray]


def study(model: Model, cases: Sequence[Case], settings: Sequence[Setting], heads: dict[str, np.ndarray], *, seed: int = 0,
          progress: Callable[[str, float], None] = lambda what, share: None) -> Study:
    """Each case's prompt is computed once for all settings. ``heads`` and ``seed`` as in ``walk``."""
    rows: list[list[Row]] = [[] for _ in settings]
    curves: list[list[np.ndarray]] = [[] for _ in settings]
    prompt = None
    for i, case in enumerate(cases):
        progress(f"{case.name}: prompt", i / len(cases))
        if prompt is None or prompt.ids != case.prompt:
            prompt = model.prefill(case.prompt)
        reference = dense(model, prompt, case.answer).log_probabilities
        all_tokens = len(settings) * len(case.answer)
        results = walk(model, prompt, case.answer, settings, heads, reference, seed=seed,
                       progress=lambda done: progress(case.name, (i + done / all_tokens) / len(cases)))
        for mine, curve, result in zip(rows, curves, results):
            mine.append(row(case, result, model.kv_heads))
            curve.append(result.bytes / result.full)
    shortest = min(len(case.answer) for case in cases)
    return Study(list(settings), rows, [mean(mine) for mine in rows], [np.mean([c[:shortest] for c in curve], 0) for curve in curves])


def row(case: Case, result: Result, kv_heads: int) -> Row:
    kl, selects = result.kl[case.counted :], result.selects
    worst = int(result.missed_mass.argmax())
    return Row(case.name, float(kl.mean()), float(np.quantile(kl, 0.95)), float(kl.max()), float(result.top1[case.counted :].mean()),
               float(result.recall[case.counted :].mean()), result.misses / result.wanted if result.wanted else 0.0,
               float(result.missed_mass[selects].mean()) if selects.any() else 0.0, float(result.missed_mass[worst]), f"{worst // kv_heads}.{worst % kv_heads}",
               len(result.kl) / result.steps, result.admitted / result.full, (result.bytes[-1] - result.admitted) / result.full / result.steps,
               result.bytes[-1] / result.full)


def mean(rows: Sequence[Row]) -> Row:
    """Of all cases, but the worst of the worst: head, and token."""
    worst = max(rows, key=lambda r: r.worst_missed_mass)
    figures = {f: float(np.mean([getattr(r, f) for r in rows])) for f in Row._fields if f not in ("case", "worst_head")}
    figures |= {"worst_missed_mass": worst.worst_missed_mass, "kl_worst": max(r.kl_worst for r in rows)}
    return Row(case="", worst_head=worst.worst_head, **figures)
