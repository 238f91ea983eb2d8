"""Command lines of ``oasis prefill`` and ``oasis decode``: any ``sglang serve`` flags, plus ours.

Ours are ``--oasis-OPTION VALUE`` (or ``--oasis-OPTION=VALUE``) for the fields of ``OasisConfig``. Defaults are put
before the user's flags; SGLang takes the last of a repeated flag, so whatever the user gives wins.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from oasis_sglang import config
from oasis_sglang.cpu import platform
from transport.errors import ConfigError

PREFIX = "--oasis-"

CPU_FLAGS = ("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--disable-overlap-schedule",
             "--sleep-on-idle", "--mem-fraction-static", "0.6", "--max-total-tokens", "40000")
"""What serving without a GPU needs: an fp32 default, since CPUs emulate bf16, and a pool of a stated size, since a
fraction of free memory would depend on what else runs on the host."""


NO_REUSE = ("--radix-cache-backend", "")
"""Flags that take our default back: nothing is kept on decode from one request to the next, nothing restored on prefill."""


def default_tier_socket() -> str:
    """Where ``oasis tier`` listens and ``oasis prefill`` looks unless told otherwise."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/oasis-{os.getuid()}"
    return str(Path(base) / "oasis" / "tier.sock")


def split_flags(flags: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """(Oasis options, flags for SGLang). Raises ``ConfigError`` for an unknown option or one without a value."""
    ours: dict[str, object] = {}
    rest: list[str] = []
    queue = list(flags)
    while queue:
        flag = queue.pop(0)
        if not flag.startswith(PREFIX):
            rest.append(flag)
            continue
        name, equals, value = flag[len(PREFIX):].partition("=")
        if not equals:
            if not queue:
                raise ConfigError(f"{flag} needs a value")
            value = queue.pop(0)
        ours[name] = value
    ours = config.plain(ours)
    unknown = sorted(set(ours) - set(config.OasisConfig.__struct_fields__))
    if unknown:
        known = ", ".join(PREFIX + f.replace("_", "-") for f in config.OasisConfig.__struct_fields__)
        raise ConfigError(f"unknown option {', '.join(PREFIX + u.replace('_', '-') for u in unknown)}; known: {known}")
    try:
        parsed = msgspec.convert(ours, config.OasisConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"Oasis options: {error}") from error
    return {name: getattr(parsed, name) for name in ours}, rest


def worker_flags(role: str) -> list[str]:
    """Default SGLang flags of an Oasis worker (``role``: prefill | decode) on this machine."""
    flags = ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "oasis", "--radix-cache-backend", "oasis", "--page-size", "16",
             "--enable-metrics"]
    if platform.wanted():
        flags += CPU_FLAGS
    return flags


def worker_argv(role: str, flags: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """SGLang's arguments and the extra environment of an Oasis worker. Raises ``ConfigError``."""
    ours, rest = split_flags(flags)
    options = {**config.inherited(), **ours}
    if role == "prefill":
        options.setdefault("tier", default_tier_socket())
    config.parse(options).validate(role)
    return [*worker_flags(role), *rest], {config.ENV: json.dumps(options)}


def run_worker(role: str, flags: Sequence[str]) -> None:
    """Becomes SGLang's server. Does not return."""
    argv, extra = worker_argv(role, flags)
    # SGLang's command as installed beside this interpreter: its module has no entry of its own for ``python -m``.
    script = Path(sys.executable).with_name("sglang")
    os.execve(sys.executable, [sys.executable, "-P", str(script), "serve", *argv], {**os.environ, **extra})
