"""``python -m oasis_sglang.router FLAGS``: SGLang's router with the flags of ``sglang_router.launch_router``.

That launcher also imports SGLang for its Python fallback, which costs 6 s of CPU; the router itself does not.
"""

import argparse

import setproctitle
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    args = RouterArgs.from_cli_args(parser.parse_args(), use_router_prefix=False)
    args._validate_router_args()
    setproctitle.setproctitle("oasis: router")
    Router.from_args(args).start()


if __name__ == "__main__":
    main()
