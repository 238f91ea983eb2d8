"""A study on disk: result.json, rows.csv, table.md, and a chart of each figure."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from oasis_sglang import charts
from oasis_sglang.study.policies import Setting, label
from oasis_sglang.study.table import Row, Study

CHARTS = {"kl": "KL(dense || sparse), nats per token", "top1": "same most likely token, share", "recall": "recall of attention mass",
          "miss_rate": "misses of the newest row's top set, share", "missed_mass": "missed attention mass, mean over heads",
          "worst_missed_mass": "missed attention mass of the worst head", "per_step": "pulled per step, share of the prompt's KV"}

COLUMNS = {"KL": "kl", "KL p95": "kl_p95", "top-1": "top1", "recall": "recall", "misses": "miss_rate", "missed mass": "missed_mass",
           "worst head": "worst_head", "its missed mass": "worst_missed_mass", "tokens/step": "tokens_per_step", "admitted": "admitted",
           "per step": "per_step", "lifetime": "lifetime"}


def cells(row: Row) -> list[str]:
    """The columns of ``COLUMNS`` as text; bytes are shares of the prompt's KV."""
    values = (getattr(row, field) for field in COLUMNS.values())
    return [value if isinstance(value, str) else f"{value:.4f}" for value in values]


def markdown(study: Study) -> str:
    """Means over all cases, then KL and top-1 of each case."""
    names = [label(s, study.settings) for s in study.settings]
    head = ["setting", *COLUMNS]
    lines = [_line(head), _line(["---"] * len(head)), *(_line([name, *cells(row)]) for name, row in zip(names, study.means))]
    cases = [row.case for row in study.rows[0]]
    lines += ["", "KL / top-1 of each case:", "", _line(["setting", *cases]), _line(["---"] * (1 + len(cases)))]
    lines += [_line([name, *(f"{row.kl:.4f} / {row.top1:.3f}" for row in rows)]) for name, rows in zip(names, study.rows)]
    return "\n".join(lines) + "\n"


def write(folder: Path, study: Study, about: dict) -> None:
    """``about``: what makes the result repeatable (model, texts, seed). The folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [label(s, study.settings) for s in study.settings]
    settings = [{"name": name, **s._asdict(), "mean": mean._asdict(), "cases": [row._asdict() for row in rows], "lifetime_by_token": list(curve)}
                for name, s, mean, rows, curve in zip(names, study.settings, study.means, study.rows, study.curves)]
    (folder / "result.json").write_text(json.dumps({"about": about, "settings": settings}, indent=1) + "\n")
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Setting._fields, *Row._fields])
        for setting, mean, rows in zip(study.settings, study.means, study.rows):
            writer.writerows([[*setting, *row] for row in [*rows, mean._replace(case="all")]])
    about_lines = "".join(f"- {key}: {value}\n" for key, value in about.items())
    (folder / "table.md").write_text(f"{about_lines}\nMeans over all cases. Bytes are shares of the prompt's KV; the worst head and its missed mass are of the "
                                     f"worst case.\n\n{markdown(study)}")
    for figure, title in CHARTS.items():
        drawn = charts.Lines(title, "budget, tokens", figure, by_budget(study, figure), ticks={s.budget: str(s.budget) for s in study.settings})
        (folder / f"{figure}.png").write_bytes(charts.png(drawn))
    curves = {name: charts.Line(range(1, len(curve) + 1), curve) for name, curve in zip(names, study.curves)}
    drawn = charts.Lines("pulled until each token of the answer, share of the prompt's KV", "token of the answer", "share", curves)
    (folder / "lifetime.png").write_bytes(charts.png(drawn))


def by_budget(study: Study, figure: str) -> dict[str, charts.Line]:
    """A line of budgets and values of ``figure`` for all settings that differ in nothing else."""
    lines: dict[Setting, list[tuple[float, float]]] = {}
    for setting, mean in zip(study.settings, study.means):
        lines.setdefault(setting._replace(budget=0), []).append((setting.budget, getattr(mean, figure)))
    return {label(key, list(lines)): charts.Line(*map(list, zip(*sorted(points)))) for key, points in lines.items()}


def _line(values: list[str]) -> str:
    return "| " + " | ".join(values) + " |"
