"""``oasis top``: a live view of a running decode node."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from oasis_sglang.commands.running import say


def top(
    url: Annotated[str, typer.Argument(help="URL of a decode worker.")],
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    layers: Annotated[bool, typer.Option("--layers", help="Misses and missed attention mass of each layer too.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object and end.")] = False,
) -> None:
    """Watch a running decode node: what it pulls, misses and holds. Ctrl-C ends it."""
    from oasis_sglang.top import TopError, figures, look

    url = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        before = look(url)
        time.sleep(interval)
        now = look(url)
        if as_json:
            typer.echo(json.dumps({"url": url, **figures(before, now)}, indent=2))
        else:
            _show(url, before, now, interval, layers, once)
    except TopError as error:
        say(str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _show(url, before, now, interval: float, layers: bool, once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    from oasis_sglang.top import figures, look
    from oasis_sglang.top_view import frame

    console = Console()
    if once:
        console.print(frame(url, figures(before, now), by_layer=layers))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(frame(url, figures(before, now), by_layer=layers), refresh=True)
            time.sleep(interval)
            before, now = now, look(url)


def register(app: typer.Typer) -> None:
    app.command()(top)
