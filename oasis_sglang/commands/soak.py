"""``oasis soak``: real servers under load for long, with faults in the middle."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from oasis_sglang.commands.running import processes, say, told_in_one_line


def soak(
    minutes: Annotated[float, typer.Option(min=0.5, help="How long new requests are sent.")] = 20.0,
    model: Annotated[str, typer.Option(help="Model directory, 4 for the 4-layer cut of SmolLM2, or 30 for all of it.")] = "4",
    seed: Annotated[int, typer.Option(help="Of prompts, lengths, and who leaves when.")] = 0,
    faults: Annotated[str, typer.Option(help="Comma separated, in this order; `--list` names them; \"\": none.")] = "tier-restart,prefill-kill",
    out: Annotated[Path | None, typer.Option(help="Folder for timeline.jsonl, results.json, table.md and logs.", show_default="soak-TIME")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of faults as markdown.")] = False,
    read: Annotated[list[Path] | None, typer.Option("--from", help="results.json of a soak, or rows.jsonl of the chaos tests; repeat. Nothing is run.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print the faults.")] = False,
) -> None:
    """Serve mixed requests, at times far more than there is room for, while clients leave and servers are killed.

    Ends with exit code 1 unless every request was answered or told why not, no answer was wrong, and everything was given back.
    """
    from oasis_sglang.soak import results
    from oasis_sglang.soak.faults import FAULTS
    from transport.errors import ConfigError

    if list_:
        typer.echo("\n".join(f"{name}: {fault.what}" for name, fault in FAULTS.items()))
        return
    with told_in_one_line():
        if read:
            try:
                rows = [row for file in read for row in results.load_rows(file)]
            except (OSError, ValueError) as error:
                raise ConfigError(f"--from: {error}") from error
            typer.echo(results.markdown(rows))
            return
        names = tuple(name.strip() for name in faults.split(",") if name.strip())
        if unknown := [name for name in names if name not in FAULTS]:
            raise ConfigError(f"--faults {', '.join(unknown)}: known are {', '.join(FAULTS)}")
    folder = out or Path(f"soak-{time.strftime('%Y%m%d-%H%M%S')}")
    with told_in_one_line(), processes(folder / "logs") as (started, directory):
        report = _run(started, directory, model=model, seed=seed, seconds=60 * minutes, names=names)
    _write(report, folder)
    typer.echo(results.markdown(report.faults)) if as_markdown else _show(report)
    for problem in report.problems:
        say(problem)
    say(f"results: {folder}")
    if report.problems:
        raise typer.Exit(1)


def _run(started, directory: Path, *, model: str, seed: int, seconds: float, names: tuple[str, ...]):
    from oasis_sglang import models
    from oasis_sglang.prompts import PromptMaker, library_text
    from oasis_sglang.soak import run, schedule
    from oasis_sglang.stack import Stack

    path = models.prepare(models.CUT_LAYERS if model == "4" else None, progress=say) if model in ("4", "30") else Path(model)
    prompts = schedule.menu(PromptMaker(path), library_text(), seed=seed, budget=run.CONFIG["budget_tokens"], context=run.CONTEXT)
    with Stack(run.spec(path), started, run_dir=directory, progress=say) as stack:
        one = run.Soak(stack, prompts=prompts, asks=schedule.asks(seed, len(prompts)), phases=schedule.phases(seconds, run.CAPACITY),
                       strikes=schedule.strikes(names, seconds), seconds=seconds, progress=say)
        return one.run(model=path.name, seed=seed)


def _write(report, folder: Path) -> None:
    import msgspec

    from oasis_sglang.soak import results

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "timeline.jsonl").write_text(results.timeline(report))
    (folder / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    (folder / "table.md").write_text(results.markdown(report.faults) + "\n")


def _show(report) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from oasis_sglang.soak import results

    console = Console()
    overview = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for line in results.summary(report):
        overview.add_row(*line)
    console.print(overview)
    if report.faults:
        table = Table(box=box.SIMPLE, pad_edge=False)
        for index, column in enumerate(results.COLUMNS):
            table.add_column(column, justify="left" if index < 2 else "right")
        for row in report.faults:
            table.add_row(*results.cells(row))
        console.print(table)


def register(app: typer.Typer) -> None:
    app.command()(soak)
