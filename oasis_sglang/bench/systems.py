"""The systems that can be compared, by name, as what to start; or endpoints that are there already.

    stock           SGLang's own PD over NIXL, under the same runtime
    stock-radix     the same with --disaggregation-decode-enable-radix-cache
    monolith        one SGLang server, no transfer
    full            Oasis with admission: full, everything pulled to the decode host
    oasis           Oasis as configured
    exact           Oasis with mode: exact, every block in the KV pool

``full`` and ``oasis`` take a budget (``oasis:512``) and each Oasis system more options (``oasis+on_miss=wait``); ``+reuse`` and
``-reuse`` say whether decode and prefill keep blocks from one request to the next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from oasis_sglang import launch
from oasis_sglang.bench import records
from oasis_sglang.selection.profile import Profile
from oasis_sglang.stack import StackSpec
from transport.errors import ConfigError

DECODE_LOG_INTERVAL = 8
"""Steps between the lines in which a decode worker tells its batch."""
REUSE = ("--radix-cache-backend", "oasis")

DESCRIPTIONS = {
    "stock": "SGLang's own PD over NIXL: the whole KV cache of a prompt goes to decode's KV pool",
    "stock-radix": "SGLang's own PD over NIXL, decode with its radix cache",
    "monolith": "one SGLang server that prefills and decodes",
    "full": "Oasis, admission: full: the whole KV cache of a prompt goes to decode's host, a working set to its KV pool",
    "oasis": "Oasis as configured: the blocks that were chosen go to decode, others when they are wanted",
    "exact": "Oasis, mode: exact: the whole KV cache of a prompt goes to decode's KV pool",
}
_NAME = re.compile(r"(?P<base>[a-z-]+?)(:(?P<budget>\d+))?(?P<reuse>[+-]reuse)?(?P<options>(\+[a-z_]+=[^+]+)*)")


@dataclass(frozen=True)
class Serving:
    """How systems are served, the same for all that are compared. ``pool``, ``prefill_pool``: tokens. ``flags``: of SGLang, for all
    workers. ``options``: Oasis options."""

    model: Path
    pool: int
    prefill_pool: int
    context: int
    max_running: int
    budget: int | None = None
    reuse: bool = True
    arena_bytes: int = 4 << 30
    host_cache_bytes: int | None = None
    flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)


class Chosen(NamedTuple):
    """A system and what to start for it; nothing to start of an endpoint."""

    system: records.System
    spec: StackSpec | None
    endpoint: Endpoint | None = None


class Endpoint(NamedTuple):
    """Servers that run already. ``prefill``, ``decode``, ``tier``: where their counters are, if the user says."""

    url: str
    prefill: str = ""
    decode: str = ""
    tier: str = ""


def endpoint(text: str) -> Chosen:
    """``NAME=URL[,prefill=URL][,decode=URL][,tier=URL]``. Raises ``ConfigError``."""
    name, _, rest = text.partition("=")
    url, *more = rest.split(",")
    places = dict(part.partition("=")[::2] for part in more)
    if not name or not url.startswith("http") or not set(places) <= {"prefill", "decode", "tier"}:
        raise ConfigError(f"--endpoint {text}: give NAME=URL, then ,prefill=URL ,decode=URL ,tier=URL as there are")
    return Chosen(records.System(name, "endpoint", f"servers at {url}", dense=False), None, Endpoint(url.rstrip("/"), **places))


def named(name: str, serving: Serving) -> Chosen:
    """Raises ``ConfigError`` for a name that is none, for options that Oasis does not have, and for a profile that cannot be read."""
    parts = _NAME.fullmatch(name)
    if parts is None or parts["base"] not in DESCRIPTIONS:
        raise ConfigError(f"{name!r} is no system; known: {', '.join(DESCRIPTIONS)}, with :BUDGET, +reuse or -reuse, +OPTION=VALUE")
    base = parts["base"]
    ours = base in ("full", "oasis", "exact")
    if not ours and name != base:
        raise ConfigError(f"{name!r}: {base} has no budget, reuse or options")
    common = ["--context-length", str(serving.context), "--decode-log-interval", str(DECODE_LOG_INTERVAL), "--enable-metrics", *serving.flags]
    decode = list(serving.decode_flags)
    options: dict[str, object] = {}
    if ours:
        budget = int(parts["budget"]) if parts["budget"] else serving.budget
        reuse = {"+reuse": True, "-reuse": False, None: serving.reuse}[parts["reuse"]]
        common += REUSE if reuse else launch.NO_REUSE
        options = {**({"budget_tokens": budget} if budget else {}), **({"host_cache_bytes": serving.host_cache_bytes} if serving.host_cache_bytes else {}),
                   **serving.options, **dict(part.partition("=")[::2] for part in parts["options"].split("+")[1:])}
        options |= {"full": {"admission": "full"}, "exact": {"mode": "exact"}}.get(base, {})
        options = launch.split_flags([f"{launch.PREFIX}{key}={value}" for key, value in options.items()])[0]
    elif base == "stock-radix":
        decode.append("--disaggregation-decode-enable-radix-cache")
    prefill = ["--max-total-tokens", str(serving.prefill_pool)]
    kind = "oasis" if ours else "monolith" if base == "monolith" else "stock"
    spec = StackSpec(kind, serving.model, flags=tuple(common), prefill_flags=tuple(prefill), decode_flags=tuple(decode), config=options,
                     arena_bytes=serving.arena_bytes, max_running_requests=serving.max_running, max_total_tokens=serving.pool)
    covers = ours and int(options.get("budget_tokens", 0)) >= serving.context
    flags = {role: of for role, of in (("all", common), ("prefill", prefill), ("decode", decode)) if of}
    system = records.System(name, kind, DESCRIPTIONS[base], dense=base in ("stock", "monolith", "exact") or covers, flags=flags, options=options,
                            critical_heads=_critical(options.get("profile")))
    return Chosen(system, spec)


def _critical(profile: object) -> int | None:
    if not profile:
        return None
    try:
        return len(Profile.load(Path(str(profile))).heads)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Oasis option profile: {error}") from error
