"""``oasis keys``: whom a node is, and whom it talks to (docs/operations.md, Security)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oasis_sglang.commands.nodes import run_or_refuse

app = typer.Typer(help="Keys of nodes: made, shown, allowed.", no_args_is_help=True)


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Of the node.")],
    out: Annotated[Path, typer.Option(help="Folder of its key files.")] = Path("keys"),
) -> None:
    """Make a pair of keys: NAME.key_secret stays on the node, NAME.key is for the others."""
    from oasis_sglang import keyring

    public, secret = run_or_refuse(lambda: keyring.create(out, name))
    typer.echo(f"{secret}  for --keys of {name}, and for nobody else\n{public}  for the others: oasis keys allow DIR {public.name}")


@app.command()
def show(file: Annotated[Path, typer.Argument(help="Either file of a pair.")]) -> None:
    """Print the public key as addresses have it: tcp://HOST:PORT#KEY."""
    from oasis_sglang import keyring

    typer.echo(run_or_refuse(lambda: keyring.public_key(file)))


@app.command()
def allow(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of this node's key files.")],
    public: Annotated[list[Path], typer.Argument(help="NAME.key of the nodes that it trusts.")],
) -> None:
    """Put nodes on the list DIR/allowed, for --allowed; nodes that run take note of it. Removing a file takes its node off."""
    from oasis_sglang import keyring

    for path in run_or_refuse(lambda: keyring.allow(folder, public)):
        typer.echo(str(path))


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="keys")
