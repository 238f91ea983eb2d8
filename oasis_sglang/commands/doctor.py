"""``oasis doctor``: would a node start and serve here? Before it is started, or as an init container."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from oasis_sglang.commands.nodes import parse_bytes, run_or_refuse
from oasis_sglang.commands.running import say


def doctor(
    role: Annotated[str, typer.Option(help="What is to run here: prefill, decode, tier, or all of them.")] = "all",
    arena_bytes: Annotated[int, typer.Option(parser=parse_bytes, metavar="SIZE", help="As the tier will get it.")] = "1GiB",
    host_cache_bytes: Annotated[int, typer.Option(parser=parse_bytes, metavar="SIZE", help="As the decode worker will get it.")] = "2GiB",
    staging_bytes: Annotated[int, typer.Option(parser=parse_bytes, metavar="SIZE", help="The same.")] = "64MiB",
    port: Annotated[list[int] | None, typer.Option(min=1, max=65535, help="TCP port of a server to come; repeat for more.", show_default="none")] = None,
    data_plane: Annotated[str, typer.Option(help="Data planes, comma separated: nixl, zmq.", show_default="what the role uses")] = "",
    local: Annotated[str, typer.Option(help="The tier's unix socket.", show_default="the runtime directory")] = "",
    keys: Annotated[str, typer.Option(help="Secret key file of the node.", show_default="none")] = "",
    allowed: Annotated[str, typer.Option(help="Folder of the public keys that it trusts.", show_default="none")] = "",
    model: Annotated[str, typer.Option(metavar="DIR", help="Folder of the model; only its config.json is read.", show_default="none")] = "",
    no_transfer: Annotated[bool, typer.Option("--no-transfer", help="Leave the self-test transfer out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Check versions, limits, memory, devices, ports and keys, and read real records through each data plane. Exit code 1 when a check failed."""
    from oasis_sglang.doctor import report
    from oasis_sglang.doctor.asked import Asked, planes_of
    from oasis_sglang.doctor.checks import check_all
    from oasis_sglang.doctor.facts import gather
    from oasis_sglang.launch import default_tier_socket

    planes = run_or_refuse(lambda: planes_of(role, data_plane))
    asked = Asked(role, arena_bytes, host_cache_bytes, staging_bytes, local or default_tier_socket(), ports=tuple(port or ()), planes=planes, keys=keys,
                  allowed=allowed, model=model, transfer=not no_transfer)
    if asked.workers and not as_json:
        say("loading SGLang as a worker would (10 to 30 s)")
    checks = check_all(gather(asked), asked)
    if as_json:
        typer.echo(json.dumps(report.as_json(checks, asked), indent=1))
    else:
        _print(checks, asked)
    raise typer.Exit(report.exit_code(checks))


def _print(checks: list, asked) -> None:
    from rich.console import Console

    from oasis_sglang.doctor import report

    Console().print(report.table(checks, asked))
    for line in (*report.remedies(checks), report.summary(checks)):
        typer.echo(line)


def register(app: typer.Typer) -> None:
    app.command()(doctor)
