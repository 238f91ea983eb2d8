"""``oasis test``: the project's tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

_ROOT = Path(__file__).resolve().parents[2]


def test(context: typer.Context) -> None:
    """Run the tests. Arguments are pytest's; without any, all tests run and the slowest are listed."""
    if not (_ROOT / "tests").is_dir():
        typer.echo("oasis: there are no tests beside the installed package; run this in a checkout", err=True)
        raise typer.Exit(2)
    os.chdir(_ROOT)
    # Its exit code, its output and Ctrl-C are pytest's own.
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *(context.args or ["--durations=10"])])


def register(app: typer.Typer) -> None:
    through = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(context_settings=through)(test)
