"""Writes a report: ``results.json``, ``report.html`` that needs nothing beside it, ``summary.md`` and the charts; or a table on the console."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from oasis_sglang import charts
from oasis_sglang.bench import records, verdict, words
from oasis_sglang.bench.figures import FIGURES
from oasis_sglang.bench.records import Results
from oasis_sglang.bench.sections import view
from oasis_sglang.bench.view import BEST, WORST, Cell, Figures, Row, Section, Table, View

MARKS = {BEST: "▲ best", WORST: "▼ worst"}
CONSOLE = {"ttft_p50": "TTFT", "itl_mean": "ITL", "decode_tokens_per_second": "decode tok/s", "admitted_share": "admitted", "lifetime_share": "lifetime",
           "host_used_bytes_peak": "host peak", "concurrency": "batch", "accuracy": "acc.", "kl": "KL"}
"""Figures of the console and their headings."""


def write(results: Results, folder: Path) -> list[Path]:
    """The files, in a folder that is made; charts of an earlier report are replaced. Raises ``OSError``."""
    made = view(results)
    plots = folder / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    for old in plots.glob("*.png"):
        old.unlink()
    images = {picture.name: charts.png(picture.chart) for section in made.sections for picture in section.pictures}
    contents = {"results.json": lambda path: records.save(results, path), "report.html": _text(html(made, images)), "summary.md": _text(markdown(made)),
                **{f"plots/{name}.png": lambda path, image=image: path.write_bytes(image) for name, image in images.items()}}
    for name, content in contents.items():
        content(folder / name)
    return [folder / name for name in contents]


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, encoding="utf-8")


def html(made: View, images: dict[str, bytes]) -> str:
    """``images``: PNGs by the names of the pictures."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("oasis_sglang.bench"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cells"] = _cells
    return environment.get_template("report.html.j2").render(view=made, marks=MARKS, images={name: charts.inline(png) for name, png in images.items()})


def _cells(row: Row) -> list[Cell]:
    return [Cell(cell) if isinstance(cell, str) else cell for cell in row]


def markdown(made: View) -> str:
    """The sections that are brief, without charts."""
    lines = [f"# {_escaped(made.title)}", "", made.started, ""]
    for warning in made.warnings:
        lines += [f"> **Warning:** {_escaped(warning)}", ""]
    lines += [_escaped(made.verdict), ""]
    for section in made.sections:
        if section.brief:
            lines += _section(section)
    return "\n".join(lines)


def _section(section: Section) -> list[str]:
    lines = [f"{'#' * section.level} {_escaped(section.title)}", ""]
    for text in section.text:
        lines += [_escaped(text), ""]
    if section.items:
        lines += [*(f"- {_escaped(item)}" for item in section.items), ""]
    for table in section.tables:
        lines += [*_table(table), ""]
    return lines


def _table(table: Table) -> list[str]:
    width = len(table.head)
    lines = [_escaped(table.caption), ""] if table.caption else []
    lines += [_line(list(table.head)), _line(["---"] * width)]
    for row in table.rows:
        cells = _cells(row)
        texts = [" ".join(filter(None, [cell.text, cell.note, MARKS.get(cell.kind, "")])) for cell in cells]
        lines.append(_line(texts if len(cells) > 1 else [f"**{texts[0]}**", *[""] * (width - 1)]))
    return lines


def _line(texts: list[str]) -> str:
    return "| " + " | ".join(map(_escaped, texts)) + " |"


def _escaped(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")


def console(results: Results) -> None:
    """Warnings, the verdict, and a line of figures for each workload, point and system; for 80 columns and more."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Grid

    figures, out = Figures(results), Console()
    for warning in verdict.warnings(results):
        out.print(f"[bold red]Warning:[/] {escape(warning)}")
    held = [name for name in figures.names(figures.cases) if name in CONSOLE]
    grid = Grid(padding=(0, 1, 0, 0), pad_edge=False, box=None, header_style="bold")
    grid.add_column("system", no_wrap=True)
    for name in held:
        grid.add_column(CONSOLE[name], justify="right")
    for case in figures.cases:
        grid.add_row(f"[bold]{escape(str(case))}")
        for system in figures.systems:
            if any(figures.spread(case, system, name) is not None for name in held):
                grid.add_row(escape(f" {system}"), *(_brief(figures, case, system, name) for name in held))
    out.print(grid)
    out.print(f"Beneath a figure: its ratio to {escape(results.base)}'s, or to the first system that has it.\n", style="dim")
    out.print(escape(verdict.verdict(results, figures)))


def _brief(figures: Figures, case, system: str, name: str) -> str:
    value = figures.median(case, system, name)
    if value is None:
        return words.MISSING
    text = words.amount(value, FIGURES[name].unit if FIGURES[name].unit in ("s", "B") else "")
    ratio = figures.ratio(case, system, name)
    return text + (f"\n{words.ratio(ratio)}" if ratio is not None else "")
