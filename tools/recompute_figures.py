"""Figures of ``bench_recompute.py``: an answer in three parts, around the kill and the recomputation, and tables of them. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from oasis_sglang.bench.quality import over_steps

PARTS = {"before": "before the kill", "without": "without a tier", "after": "after it went on"}
RUNS = ("undisturbed", "disturbed")


class Interruption(NamedTuple):
    """Step s computes the logits of token s; prefill's is step 0. ``killed``: the first one after the kill. ``went_on``: the first one after the
    request was computed again; None when it was not. ``back``, ``pause``: seconds from the kill, and from the step before, until that one."""

    killed: int
    went_on: int | None
    back: float | None
    pause: float | None

    @classmethod
    def of(cls, times: np.ndarray, kill: float, again: int | None) -> Interruption:
        """``times`` float64 [n]: seconds at which each step had its logits, ``kill`` on the same clock. ``again``: tokens of the answer whose KV
        prefill has computed again, which are all but the newest; None: nothing was."""
        killed = int((times < kill).sum())
        if again is None:
            return cls(killed, None, None, None)
        step = again + 1
        if not max(1, killed) <= step < len(times):
            raise ValueError(f"it cannot go on at step {step} of {len(times)}, killed at {killed}")
        return cls(killed, step, float(times[step] - kill), float(times[step] - times[step - 1]))

    def parts(self, steps: int) -> dict[str, slice]:
        """By name of ``PARTS``: where it lies in arrays over the decode steps 1 to ``steps``. Without a recomputation there is no ``after``."""
        killed, went_on = max(1, self.killed), steps + 1 if self.went_on is None else self.went_on
        return {"before": slice(0, killed - 1), "without": slice(killed - 1, went_on - 1), "after": slice(went_on - 1, steps)}


def by_part(interruption: Interruption, kl: np.ndarray, same: np.ndarray) -> dict[str, dict | None]:
    """``kl`` float64 [n], ``same`` bool [n] of the decode steps: what ``over_steps`` says of each part, None of an empty one."""
    return {name: {"steps": len(kl[at]), **over_steps(kl[at], same[at])} if len(kl[at]) else None for name, at in interruption.parts(len(kl)).items()}


def together(rows: Sequence[Mapping]) -> dict[str, dict[str, dict | None]]:
    """By run and part, over the prompts that have it: how many, mean KL and top-1 (each prompt counts the same), worst prompt and worst step."""
    found: dict[str, dict[str, dict | None]] = {}
    for run in RUNS:
        found[run] = {}
        for part in PARTS:
            there = [row["runs"][run][part] for row in rows if row.get("runs") and row["runs"][run][part]]
            found[run][part] = None if not there else {
                "n": len(there), "steps": sum(p["steps"] for p in there), "kl": statistics.fmean(p["kl"] for p in there),
                "kl_first_8": statistics.fmean(p["kl_first_8"] for p in there), "kl_worst_prompt": max(p["kl"] for p in there),
                "kl_worst_step": max(p["kl_worst_token"] for p in there), "top1": statistics.fmean(p["top1"] for p in there),
                "top1_worst_prompt": min(p["top1"] for p in there)}
    return found


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    there = [value for value in values if value is not None]
    return {"n": len(there), "mean": statistics.fmean(there), "least": min(there), "most": max(there)} if there else None


def identical(rows: Sequence[Mapping]) -> list[dict]:
    """One line for each mode and way of greedy requests: how many said the same as undisturbed, how many were computed again."""
    groups: dict[tuple[str, str], list[Mapping]] = {}
    for row in rows:
        groups.setdefault((row["mode"], row["how"]), []).append(row)
    return [{"mode": mode, "how": how, "n": len(of), "recomputed": sum(row["recomputed"] > 0 for row in of),
             "identical": sum(row["identical"] for row in of)} for (mode, how), of in groups.items()]


# -- markdown ---------------------------------------------------------------------------------------------------


def markdown(result: Mapping) -> str:
    """Of what ``bench_recompute.py`` writes: by part, by prompt, greedy text."""
    sections = []
    if result["rows"]:
        sections += [_by_part(result), _by_prompt(result["rows"])]
    if result["greedy"]:
        lines = [f"| {g['mode']} | {g['how']} | {g['n']} | {g['recomputed']} | {g['identical']} |" for g in identical(result["greedy"])]
        sections.append(_table(("requests", "what befell them", "n", "computed again", "text identical"), lines))
    return "\n\n".join(sections)


def _by_part(result: Mapping) -> str:
    lines = []
    for part, text in PARTS.items():
        for run in RUNS:
            if (p := result["together"][run][part]) is not None:
                lines.append(f"| {text} | {run} | {p['n']}, {p['steps']} | {p['kl']:.4f} | {p['kl_worst_prompt']:.4f} | {p['kl_worst_step']:.3f} | "
                             f"{p['kl_first_8']:.4f} | {p['top1']:.3f}, {p['top1_worst_prompt']:.3f} |")
    return _table(("part", "run", "prompts, steps", "KL mean", "worst prompt", "worst step", "first 8", "top-1 mean, worst prompt"), lines)


def _by_prompt(rows: Sequence[Mapping]) -> str:
    lines = []
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['case']} | {row['prompt_tokens']:,} | failed: {row['error']} | | | | |")
            continue
        kls = ["none" if row["runs"]["disturbed"][p] is None else " / ".join(f"{row['runs'][run][p]['kl']:.4f}" for run in RUNS) for p in PARTS]
        seconds = "not computed again" if row["went_on"] is None else f"{row['back_seconds']:.1f}, {row['pause_seconds']:.1f}"
        where = f"{row['killed']}, {row['went_on'] or '-'} of {row['steps']}"
        lines.append(f"| {row['case']} | {row['prompt_tokens']:,} | {where} | {' | '.join(kls)} | {seconds} |")
    titles = (f"KL {text}, {' / '.join(RUNS)}" for text in PARTS.values())
    return _table(("prompt", "tokens", "step of the kill, of going on", *titles, "s from the kill, of them pause"), lines)


def _table(titles: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join((f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *lines))
