"""The ``oasis`` command.

Commands import what they run when they run: ``oasis --help`` loads neither torch nor SGLang.
"""

from __future__ import annotations

import typer

from oasis_sglang.commands import bench, calibrate, demo, doctor, keys, nodes, plan, soak, study, test, top, up

app = typer.Typer(
    help="Prefill/decode disaggregation for SGLang with the KV cache in a capacity tier.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (demo, up, bench, top, calibrate, study, plan, soak, test, doctor, keys, nodes):
    module.register(app)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
