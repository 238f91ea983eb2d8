"""Assembles a report from results: sections, tables and charts, as plain data. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from oasis_sglang.bench import drawings, verdict, words
from oasis_sglang.bench.figures import FIGURES
from oasis_sglang.bench.records import Results, System
from oasis_sglang.bench.view import FAIL, PASS, Case, Cell, Figures, Row, Section, Table, View, case_of

GROUPS = {
    "latency": ("ttft_mean", "ttft_p50", "ttft_p95", "ttft_worst", "itl_mean", "itl_p95", "itl_worst", "tpot_mean"),
    "throughput": ("output_tokens_per_second", "decode_tokens_per_second", "requests_per_second", "goodput", "slo_share", "failed", "concurrency",
                   "client_concurrency", "tokens_per_step", "computed_tokens", "cpu_seconds"),
    "bytes": ("full_transfer_bytes", "admitted_bytes", "lifetime_bytes", "admitted_share", "lifetime_share", "wire_bytes", "wire_metered_bytes"),
    "memory": ("host_reserved_bytes", "host_used_bytes_mean", "host_used_bytes_peak", "cluster_host_bytes_peak", "decode_memory_bytes", "tier_memory_bytes",
               "kv_pool_tokens", "kv_pool_tokens_peak", "device_extra_bytes"),
    "selection": ("misses_share", "missed_mass", "swaps_per_step", "stalls", "stall_seconds"),
    "quality": ("accuracy", "kl", "kl_worst", "top1", "top1_worst"),
}
LEGEND = ("Median over repeats; beneath, [lowest–highest] unless all are the same, and the ratio to {base}, or to the system that is named where {base} cannot "
          "say. ↓ lower is better, ↑ higher is. ▲ best and ▼ worst only where there are repeats and no other system's overlap. – was not measured.")


def view(results: Results) -> View:
    figures = Figures(results)
    made = [about(results), workloads(results), *tables(figures), *sweeps(results, figures), transfers(results, figures), equality(results), quality(results),
            profiles(results), checks(results), serving(results), definitions(results, figures),
            Section("What this does not show", items=verdict.limits(results))]
    kept = [section for section in made if section is not None]
    return View(results.title, results.started, verdict.warnings(results), verdict.verdict(results, figures), kept)


def about(results: Results) -> Section:
    facts = [("started", results.started), ("seed", str(results.seed)), ("repeats", str(results.repeats)), ("ratios are to", results.base),
             ("machine", words.plain(results.machine)), ("model", words.plain(results.model)), ("versions", words.plain(results.versions)),
             ("link", words.plain(results.link)), ("SLO", words.plain({name: words.amount(value, "s") for name, value in results.slo.items()})),
             ("order of runs", order(results))]
    text = ["Options of systems: of the first point of the sweep; budget_tokens is swept."] if "budget" in results.sweeps else []
    systems = [[one.name, one.kind, one.description, _attends(one), _flags(one), words.plain(one.options) or "defaults"]
               for one in results.systems]
    return Section("What was run", text=text, code=results.command, brief=False, tables=[
        Table(["", ""], facts), Table(["system", "kind", "description", "attends to", "SGLang flags", "Oasis options"], systems)])


def _attends(system: System) -> str:
    return "every token" if system.dense else "not known" if system.kind == "endpoint" else "a part"


def _flags(system: System) -> str:
    return "; ".join(f"{role}: {' '.join(flags)}" for role, flags in system.flags.items()) or "defaults"


def order(results: Results) -> str:
    """``repeat 1: stock, oasis; repeat 2: oasis, stock``: stacks in the order of time."""
    stacks: list[tuple[int, str]] = []
    for run in sorted(results.runs, key=lambda run: run.order):
        if stacks[-1:] != [(run.repeat, run.system)]:
            stacks.append((run.repeat, run.system))
    repeats: dict[int, list[str]] = {}
    for repeat, system in stacks:
        repeats.setdefault(repeat, []).append(system)
    return "; ".join(f"repeat {repeat + 1}: {', '.join(systems)}" for repeat, systems in repeats.items()) or words.MISSING


def workloads(results: Results) -> Section:
    head = ["workload", "description", "requests", "prompt tokens", "output tokens", "answers known", "digest", "notes"]
    rows = [[one.name, one.description, str(one.requests), _range(one.prompt_tokens), _range(one.output_tokens), words.plain(one.scored), one.digest,
             " ".join(one.notes)] for one in results.workloads]
    first = " and ".join([*(["of the first repeat"] if results.repeats > 1 else []), *(["of the first point of the sweep"] if results.sweeps else [])])
    text = "Tokens: least / mean / most. Digest: of all prompts." + (
        f" Both are {first} alone: the others have prompts of their own, made from the same seed." if first else "")
    return Section("Workloads", text=[text], tables=[Table(head, rows)], brief=False)


def _range(tokens: Sequence[int]) -> str:
    return " / ".join(f"{n:,}" for n in tokens) or words.MISSING


def tables(figures: Figures) -> list[Section]:
    """Figures x systems of each workload, and bars over those that belong to no sweep."""
    still = [case for case in figures.served if not case.coordinates]
    found = [Section("Figures by workload", text=[LEGEND.format(base=figures.base)], pictures=drawings.overview(figures, still, "overview") if still else [],
                     brief=bool(still))]
    for case in figures.served:
        held = figures.names([case])
        groups = {**GROUPS, "other": [name for name in FIGURES if not any(name in group for group in GROUPS.values())]}
        rows: list[Row] = []
        for group, members in groups.items():
            if shown := [name for name in members if name in held]:
                rows += [[group], *(_figure(figures, case, name) for name in shown)]
        found.append(Section(str(case), level=3, tables=[Table(["figure", *figures.systems], rows)], brief=case in still))
    return found


def _figure(figures: Figures, case: Case, name: str) -> Row:
    marks = figures.marks(case, name)
    row: list[Cell | str] = [words.title(name)]
    for system in figures.systems:
        spread = figures.spread(case, system, name)
        if spread is None:
            row.append(Cell(words.MISSING))
            continue
        note = " ".join(filter(None, [words.bounds(name, spread), figures.ratio_words(case, system, name)]))
        row.append(Cell(words.of_figure(name, spread.median), note, marks.get(system, "")))
    return row


def sweeps(results: Results, figures: Figures) -> list[Section]:
    """A section for each coordinate and workload: charts and a table of ratios."""
    found = []
    for coordinate in results.sweeps:
        for workload in dict.fromkeys(case.workload for case in figures.cases):
            cases = [case for case in figures.cases if case.workload == workload and coordinate in case.point]
            if not cases:
                continue
            at = drawings.positions([case.point[coordinate] for case in cases])
            cases.sort(key=lambda case: at[case.point[coordinate]])
            held = [(name, system) for name in drawings.DRAWN for system in figures.systems if any(figures.spread(case, system, name) for case in cases)]
            rows = [[words.title(name), system, *(_ratio(figures, case, system, name) for case in cases)] for name, system in held]
            head = ["figure", "system", *(words.coordinates(case.point) for case in cases)]
            text = ["Ratios of medians, the figure itself beneath. Bars in the charts: lowest to highest."]
            found.append(Section(f"Sweep of {coordinate}: {workload}", text=text, tables=[Table(head, rows)],
                                 pictures=drawings.sweep(figures, coordinate, cases)))
    return found


def _ratio(figures: Figures, case: Case, system: str, name: str) -> Cell:
    value = figures.median(case, system, name)
    if value is None:
        return Cell(words.MISSING)
    text, ratio = words.of_figure(name, value), figures.ratio_words(case, system, name)
    return Cell(ratio, text) if ratio else Cell(text)


def transfers(results: Results, figures: Figures) -> Section | None:
    pictures = [picture for case in figures.served if (picture := drawings.phases(results, figures, case)) is not None]
    text = ["Admitted: before a request's first decode step. Lifetime: until its release. Full transfer: K and V of the whole prompt."]
    return Section("Bytes by phase", text=text, pictures=pictures, brief=False) if pictures else None


def equality(results: Results) -> Section | None:
    rows = [[one.system, words.place(one.workload, one.point), f"{one.equal} of {one.of}",
             Cell("not required") if not one.required else Cell("PASS", kind=PASS) if one.equal == one.of and one.of else Cell("FAIL", kind=FAIL)]
            for one in results.equality]
    text = [f"Greedy answers, token for token against {results.base}'s. Required where both attend to every token."]
    return Section("Equality of answers", text=text, tables=[Table(["system", "workload", "equal", "required"], rows)]) if rows else None


def quality(results: Results) -> Section | None:
    """Over the requests whose answers were forced, by system and case."""
    found: dict[tuple[str, Case], list] = {}
    for row in results.quality:
        found.setdefault((row.system, case_of(row.workload, row.point)), []).append(row)
    rows = []
    for (system, case), mine in found.items():
        worst = max(mine, key=lambda row: row.kl)
        rows.append([system, str(case), str(len(mine)), str(sum(row.steps for row in mine)), words.number(statistics.fmean(row.kl for row in mine)),
                     Cell(words.number(worst.kl), worst.request), words.number(max(row.kl_worst_token for row in mine)),
                     words.number(statistics.fmean(row.top1 for row in mine)), words.number(min(row.top1 for row in mine))])
    head = ["system", "workload", "requests", "steps", "KL, nats", "worst request", "worst token", "top-1", "worst request"]
    text = ["Next-token distribution with the answer forced, against the same servers attending to all blocks."]
    return Section("Quality", text=text, tables=[Table(head, rows)]) if rows else None


def profiles(results: Results) -> Section | None:
    found: dict[Case, dict[str, list]] = {}
    for one in results.profiles:
        found.setdefault(case_of(one.workload, one.point), {}).setdefault(one.system, []).append(one.stages)
    tables_, pictures = [], []
    for case, by_system in found.items():
        names = list(dict.fromkeys(name for runs in by_system.values() for stages in runs for name in stages))
        means = {system: {name: statistics.fmean(held) for name in names if (held := [stages[name] for stages in runs if name in stages])}
                 for system, runs in by_system.items()}
        rows = [[name, *(words.number(stages[name]) if name in stages else words.MISSING for stages in means.values())] for name in names]
        tables_.append(Table(["stage, ms per step", *means], rows, str(case)))
        if (picture := drawings.profile(means, case)) is not None:
            pictures.append(picture)
    text = ["Mean over the steps of all repeats. Scores and plan run beside the forward and are no part of the whole step; forward, commits, sampling and "
            "scheduler are what it has left without the waits. The wait for blocks is that of a request, while others go on."]
    return Section("Where the time goes", text=text, tables=tables_, pictures=pictures, brief=False) if tables_ else None


def checks(results: Results) -> Section | None:
    rows = [[one.name, one.system, words.place(one.workload, one.point), words.number(one.counted), words.number(one.metered),
             words.ratio(one.metered / one.counted) if one.counted else words.MISSING, f"{words.number(one.low)}–{words.number(one.high)}",
             Cell("PASS", kind=PASS) if one.passed else Cell("FAIL", kind=FAIL), one.note] for one in results.checks]
    head = ["what", "system", "workload", "counted", "metered", "metered / counted", "allowed", "", "note"]
    text = ["A counter of the system beside a meter that no server has a say in."]
    return Section("Counters against meters", text=text, tables=[Table(head, rows)]) if rows else None


def serving(results: Results) -> Section | None:
    """A column for each row that the tool wrote. A row's ``point``: of the servers, where those of other points were others."""
    names = [name for name in dict.fromkeys(name for row in results.serving for name in row) if name not in ("system", "point")]
    rows = [[name, *(words.plain(row.get(name)) for row in results.serving)] for name in names if any(row.get(name) is not None for row in results.serving)]
    head = ["", *(words.place(str(row.get("system", words.MISSING)), row.get("point") or {}) for row in results.serving)]
    text = ["SGLang's own load generator against the same servers, once, in the first repeat; its names, its definitions."]
    return Section("sglang.bench_serving", text=text, tables=[Table(head, rows)], brief=False) if rows else None


def definitions(results: Results, figures: Figures) -> Section | None:
    rows = [[FIGURES[name].title, FIGURES[name].unit or "share or count", FIGURES[name].better or words.MISSING, FIGURES[name].definition]
            for name in figures.names(figures.cases)]
    slo = ", ".join(f"{name.upper()} at most {words.amount(value, 's')}" for name, value in results.slo.items())
    head = ["figure", "unit", "better", "definition"]
    return Section("Definitions", text=[f"SLO: {slo}."] if slo else [], tables=[Table(head, rows)], brief=False) if rows else None
