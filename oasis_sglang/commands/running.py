"""What the commands that run stacks share: run directory, signals, and errors told in one line."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from oasis_sglang.processes import Processes

_RUNS_KEPT = 10


def say(line: str) -> None:
    """Progress goes to stderr: stdout is for results."""
    typer.echo(f"oasis: {line}", err=True)


@contextmanager
def processes(run_dir: Path | None) -> Iterator[tuple[Processes, Path]]:
    """Processes for stacks and the directory of their logs; everything is stopped at the end, also when interrupted."""
    from oasis_sglang.processes import Processes
    from oasis_sglang.stack import import_environment

    directory = run_dir or _new_run_directory()
    interrupt_once()
    with Processes(log=directory / "zygote.log", env=import_environment()) as started:
        yield started, directory


def interrupt_once() -> None:
    """From now on the first SIGINT or SIGTERM raises KeyboardInterrupt, further ones are ignored: stopping is bounded by itself, and
    interrupting it is how processes get left behind."""

    def interrupt(*_) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Expected failures become a message and exit code 1, an interrupt exit code 130; the rest is a bug and raises."""
    from oasis_sglang.bench import BenchError
    from oasis_sglang.client import GenerateError
    from oasis_sglang.models import ModelError
    from oasis_sglang.processes import ProcessesError
    from oasis_sglang.stack import StackError
    from transport.errors import OasisError

    try:
        yield
    except (BenchError, GenerateError, ModelError, OasisError, ProcessesError, StackError) as error:
        say(str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        say("interrupted; everything is stopped")
        raise typer.Exit(130) from None


def _new_run_directory() -> Path:
    """A directory of logs in the cache; the oldest ones go."""
    from oasis_sglang.models import cache_dir

    runs = cache_dir() / "runs"
    directory = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    directory.mkdir(parents=True)
    for old in sorted(runs.iterdir())[:-_RUNS_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return directory
