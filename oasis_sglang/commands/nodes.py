"""``oasis tier``, ``oasis prefill``, ``oasis decode``: one node's process each."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from transport.errors import OasisError


def parse_bytes(text: str) -> int:
    """A size on the command line. Raises ``typer.BadParameter``."""
    from oasis_sglang.config import parse_size

    try:
        return parse_size(text)
    except OasisError as error:
        raise typer.BadParameter(error.message) from None


def tier(
    local: Annotated[str, typer.Option(help="Unix socket for this node's prefill workers.", show_default="the runtime directory")] = "",
    listen: Annotated[str, typer.Option(help="host:port of the control plane for decode nodes; port 0 = any free one.")] = "127.0.0.1:0",
    http: Annotated[str, typer.Option(help="host:port of /healthz, /readyz, /metrics and /state.")] = "127.0.0.1:0",
    arena_bytes: Annotated[int, typer.Option(parser=parse_bytes, metavar="SIZE", help="Host memory for KV records.")] = "1GiB",
    data_plane: Annotated[str, typer.Option(help="Data planes to serve, comma separated: nixl, zmq.")] = "nixl,zmq",
    advertise: Annotated[str, typer.Option(help="Address that decode nodes are told.", show_default="the one listened on")] = "",
    memory_nodes: Annotated[str, typer.Option(help="Memory nodes that committed prompts are moved to: tcp://host:port, comma separated, or dns://name:port.",
                                              show_default="none")] = "",
    accept_generated: Annotated[bool, typer.Option(help="Keep what decode nodes generate (publish_generated).")] = False,
    node: Annotated[str, typer.Option(help="Name of this node.", show_default="the host name")] = "",
    lease_seconds: Annotated[float, typer.Option(help="A decode node must renew its leases within this.")] = 30.0,
    grace_seconds: Annotated[float, typer.Option(help="How much longer records of a silent decode node stay.")] = 5.0,
    room_seconds: Annotated[float, typer.Option(help="How long a committed request waits for its decode node.")] = 120.0,
    drain_seconds: Annotated[float, typer.Option(help="After a SIGTERM, how long leases may take to end. A second one ends at once.")] = 30.0,
    zero_freed: Annotated[bool, typer.Option(help="Zero what freed records hold before others get them.")] = False,
    keys: Annotated[str, typer.Option(help="This node's secret key file (`oasis keys create`).", show_default="none")] = "",
    allowed: Annotated[str, typer.Option(help="Folder of the public keys of the nodes that may connect (`oasis keys allow`).", show_default="none")] = "",
    allow_plaintext: Annotated[bool, typer.Option(help="Serve other hosts without encryption (trusted networks only).")] = False,
) -> None:
    """Own the KV arena of this node: prefill workers write it, decode nodes read it. With --memory-nodes it is staging, and decode
    nodes read those, which are tiers without that option. Runs until SIGTERM."""
    from oasis_sglang.launch import default_tier_socket
    from transport.server import TierOptions, serve
    from transport.tier import TierLimits

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    options = TierOptions(
        local=local or default_tier_socket(), listen=listen, http=http, arena_bytes=arena_bytes,
        planes=tuple(p for p in data_plane.replace(" ", "").split(",") if p), advertise=advertise, node=node, memory_nodes=memory_nodes,
        accept_generated=accept_generated, drain_seconds=drain_seconds, zero_freed=zero_freed,
        keys=keys, allowed=allowed, allow_plaintext=allow_plaintext, limits=TierLimits(lease_seconds, grace_seconds, room_seconds))
    run_or_refuse(lambda: serve(options))


def prefill(context: typer.Context) -> None:
    """Serve as a prefill worker. Takes any `sglang serve` flag, and --oasis-OPTION VALUE."""
    _worker("prefill", context.args)


def decode(context: typer.Context) -> None:
    """Serve as a decode worker. Takes any `sglang serve` flag, and --oasis-OPTION VALUE."""
    _worker("decode", context.args)


def _worker(role: str, flags: list[str]) -> None:
    from oasis_sglang.launch import run_worker

    run_or_refuse(lambda: run_worker(role, flags))


def run_or_refuse(work):
    """``work()``; an error of ours becomes one line and exit code 2."""
    try:
        return work()
    except OasisError as error:
        typer.echo(f"oasis: {error}", err=True)
        raise typer.Exit(2) from None


def register(app: typer.Typer) -> None:
    through = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command()(tier)
    app.command(context_settings=through)(prefill)
    app.command(context_settings=through)(decode)
