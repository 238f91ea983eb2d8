"""What a report says in sentences: its verdict, its warnings, and what it does not show. All of it is made from the numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from oasis_sglang.bench import words
from oasis_sglang.bench.figures import FIGURES
from oasis_sglang.bench.records import Results
from oasis_sglang.bench.view import Case, Figures, case_of

_RATIOS = {"decode_tokens_per_second": "decode throughput", "goodput": "goodput", "ttft_p50": "median TTFT", "itl_mean": "mean ITL",
           "host_used_bytes_peak": "peak of decode's host memory", "kv_pool_tokens_peak": "peak of decode's KV pool", "concurrency": "requests in one batch"}
_SHARES = {"admitted_share": "admitted bytes", "lifetime_share": "bytes until release"}
FLOOR = 0.2
"""Mean accuracy of dense attention at which a model cannot do a task: what a system makes of it says nothing about the system."""
_FEW = 20
"""Of fewer requests the 95th percentile is the worst."""


def verdict(results: Results, figures: Figures) -> str:
    """One paragraph. Ratios are of medians over repeats, by workload and point: their geometric mean, and the worst beside it."""
    if not figures.served:
        return "Nothing was run."
    others = [system for system in figures.systems if system != results.base]
    if not others:
        return f"Only {results.base} was run: there is nothing to compare it with."
    return " ".join(_of_system(results, figures, system) for system in others)


def _of_system(results: Results, figures: Figures, system: str) -> str:
    pair = (system, results.base)
    never = {one: [case for case in figures.served if figures.spread(case, one, "failed") is None] for one in pair}
    ran = [case for case in figures.served if not any(case in never[one] for one in pair)]
    # A failure in one repeat is one: its figures are of other requests than the base's.
    whole = [case for case in ran if all(figures.spread(case, one, "failed").high == 0 for one in pair)]
    missed = [f"{one} was never run on {_and(map(str, cases))}" if len(cases) < len(figures.served) else f"{one} was never run"
              for one, cases in never.items() if cases]
    missed += [f"{one} was run in {spread.n} of {results.repeats} repeats of {case}" for one in pair for case in ran
               if (spread := figures.spread(case, one, "failed")).n < results.repeats]
    if not whole:
        why = f"; {'; '.join(missed)}" if missed else ""
        return f"{system}: no workload was answered in full by it and by {results.base}, so that it is compared in none{why}."
    parts = [part for name, title in _RATIOS.items() if (part := _ratio(figures, whole, system, name, title))]
    parts += [part for name, title in _SHARES.items() if (part := _share(figures, whole, system, name, title))]
    parts += [part for part in (*_accuracy(results, figures, whole, system), _kl(figures, system), *missed) if part]
    left_out = len(ran) - len(whole)
    over = f"over {len(whole)} workloads and points" if len(whole) > 1 else f"on {whole[0]}"
    over += f" (without {left_out} in which a request failed)" if left_out else ""
    return f"{system} against {results.base} {over}: {'; '.join(parts) or 'no figure that both have'}."


def _ratio(figures: Figures, cases: Sequence[Case], system: str, name: str, title: str) -> str:
    """Empty where no case has a ratio."""
    found = {case: ratio for case in cases if (ratio := figures.ratio(case, system, name)) is not None}
    if not found:
        return ""
    of = {figures.reference(case, name) for case in found} - {figures.base}
    alike = sum(ratio != 1 and figures.overlaps(case, system, figures.reference(case, name), name) for case, ratio in found.items())
    mean = words.ratio(_mean(found.values()))
    notes = _worst(found, max if FIGURES[name].better == "lower" else min, words.ratio, mean)
    notes += [f"the repeats overlap{f' in {alike} of {len(found)}' if len(found) > 1 else ''}"] if alike else []
    return f"{title} {mean}{f' of {_and(sorted(of))}' if of else ''}{_notes(notes)}"


def _share(figures: Figures, cases: Sequence[Case], system: str, name: str, title: str) -> str:
    found = {case: share for case in cases if (share := figures.median(case, system, name))}
    if not found:
        return ""
    mean = _mean(found.values())
    notes = _worst(found, max, lambda share: _less(share, ""), _less(mean, ""))
    return f"{title} {_less(mean, ' of a full transfer')}{_notes(notes)}"


def _accuracy(results: Results, figures: Figures, cases: Sequence[Case], system: str) -> list[str]:
    """Where dense attention answers next to nothing there is nothing to lose, so that keeping it is no success."""
    base = results.base
    found = {case: (one, other) for case in cases
             if None not in (one := figures.median(case, system, "accuracy"), other := figures.median(case, base, "accuracy"))}
    dense = any(one.name == base and one.dense for one in results.systems)
    lost = {case: mean for case in found if dense and (mean := figures.spread(case, base, "accuracy").mean) <= FLOOR + 1e-9}
    parts = [f"accuracy says nothing on {_and(map(str, lost))}: the model cannot do it at this length, {base} itself scores "
             f"{_and(map(words.digits, lost.values()))}"] if lost else []
    kept = {case: pair for case, pair in found.items() if case not in lost}
    return [*([_compared(kept)] if kept else []), *parts]


def _compared(found: dict[Case, tuple[float, float]]) -> str:
    (case, (one, other)) = min(found.items(), key=lambda item: item[1][0] - item[1][1])
    mean, worst = (f"{words.digits(mine)} against {words.digits(theirs)}" for mine, theirs in (map(statistics.fmean, zip(*found.values())), (one, other)))
    return f"accuracy {mean}{_notes([f'worst {worst}, {case}'] if worst != mean else [])}"


def _kl(figures: Figures, system: str) -> str:
    """Quality is measured apart from the runs, so that all its cases count."""
    held = {case: kl for case in figures.cases if (kl := figures.median(case, system, "kl")) is not None}
    worst = [worst for case in held if (worst := figures.median(case, system, "kl_worst")) is not None]
    if not held:
        return ""
    return f"KL to dense {words.number(statistics.fmean(held.values()))} nats per token" + (f" (worst request {words.number(max(worst))})" if worst else "")


def _mean(ratios: Iterable[float]) -> float:
    """Geometric: of ratios, twice and half are 1."""
    ratios = list(ratios)
    return math.exp(statistics.fmean(map(math.log, ratios))) if all(ratios) else 0.0


def _worst(found: dict[Case, float], pick: Callable, text: Callable[[float], str], mean: str) -> list[str]:
    """Nothing where it cannot be told from the mean."""
    case = pick(found, key=found.__getitem__)
    return [f"worst {text(found[case])}, {case}"] if text(found[case]) != mean else []


def _less(share: float, of: str) -> str:
    return f"{words.digits(share)}{of}" + (f", {words.digits(1 / share)}x less" if share < 1 else "")


def _notes(notes: Sequence[str]) -> str:
    return f" ({'; '.join(notes)})" if notes else ""


def _and(names: Iterable[str]) -> str:
    return " and ".join(names)


def warnings(results: Results) -> list[str]:
    """What makes the figures doubtful: it stands above everything."""
    found = []
    for one in results.equality:
        where = words.place(one.workload, one.point)
        if one.required and one.equal < one.of:
            found.append(f"{one.system} gave other answers than {one.base} in {one.of - one.equal} of {one.of} requests of {where}, "
                         "and both attend to every token.")
        if one.required and not one.of:
            found.append(f"No answer of {one.system} to {where} could be compared with {one.base}'s.")
    for check in results.checks:
        if not check.passed:
            found.append(f"{check.system}, {words.place(check.workload, check.point)}: the counter and the meter of {check.name} differ: "
                         f"counted {words.number(check.counted)}, metered {words.number(check.metered)}.")
    failed: dict[tuple[str, Case], list[str]] = {}
    for run in results.runs:
        failed.setdefault((run.system, case_of(run.workload, run.point)), []).extend(
            request.error or "no token came" for request in run.requests if request.error is not None or not request.token_times)
    of = {key: sum(len(run.requests) for run in results.runs if (run.system, case_of(run.workload, run.point)) == key) for key in failed}
    return found + [f"{len(errors)} of {of[key]} requests of {key[0]} to {key[1]} failed; the first: {errors[0]}" for key, errors in failed.items() if errors]


def limits(results: Results) -> list[str]:
    """What a reader must not conclude."""
    most = max((len(run.requests) for run in results.runs), default=0)
    found = list(results.notes)
    found.append(f"Each figure is the median of {results.repeats} repeats; [low–high] is all they gave, no confidence interval." if results.repeats > 1 else
                 "Everything was run once: there is no spread, and a difference may be chance.")
    if most:
        found.append(f"At most {most} requests in a run" + ("; the 95th percentile of so few is the worst of them." if most < _FEW else "."))
    if any(system.kind != "endpoint" for system in results.systems):
        cores = f" and its {results.machine['cores']} cores" if "cores" in results.machine else ""
        found.append(f"Servers and clients shared one machine{cores}: what one computes, the others wait for.")
    if results.machine.get("gpus") == 0:
        found.append("There is no GPU: a decode step costs what it costs on this CPU, and with it what a byte less on the wire or in memory is worth.")
    rate = "its rate is swept" if "link" in results.sweeps else results.link.get("rate") or "no limit"
    found.append(f"The link is emulated between network namespaces of one kernel ({rate})." if results.link.get("hosts") else
                 "Prefill and decode shared a host: bytes did not cross a network, so that transfers cost less than they do between machines.")
    for one in results.equality:
        if not one.required and one.equal < one.of:
            found.append(f"{one.of - one.equal} of {one.of} answers of {one.system} to {words.place(one.workload, one.point)} differ from {one.base}'s: "
                         "the tokens that were timed are not all the same.")
    if unscored := [workload.name for workload in results.workloads if not workload.scored]:
        found.append(f"No answers are known for {', '.join(unscored)}: accuracy is not measured there.")
    measured = {row.system for row in results.quality}
    if unmeasured := [system.name for system in results.systems if not system.dense and system.name not in measured]:
        found.append(f"The distance of the next-token distribution from dense attention was not measured for {', '.join(unmeasured)}.")
    if not results.checks:
        found.append("No counter was compared with an independent meter in this run.")
    return found
