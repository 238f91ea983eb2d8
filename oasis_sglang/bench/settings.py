"""What a benchmark runs: its settings, and the points of its sweeps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from decode_node.budget import make_budget
from oasis_sglang.bench import systems
from oasis_sglang.bench.records import Point
from oasis_sglang.bench.systems import Serving
from oasis_sglang.config import parse
from oasis_sglang.hosts import HostsError, bits_per_second
from oasis_sglang.plan.capacity import STOCK_RESERVED
from transport.errors import ConfigError

SWEEPS = {
    "concurrency": "requests at once, and as many in all",
    "context": "prompt tokens",
    "budget": "budget_tokens of Oasis",
    "link": "rate of the data network, such as 200mbit; needs --hosts",
    "pool": "tokens of decode's KV pool",
}
PAGE = 16
UNFORCED = ("agent", "chat", "reasoning", "trace")
"""Workloads that have no text to force, so that quality cannot be measured on them, and whose prompts have lengths of their own."""
_SHORTER = 20
"""Tokens that a prompt of the others may have less than was wanted."""


@dataclass(frozen=True)
class Settings:
    """``tokens``: of a prompt; ``output``: of an answer. ``pool``: tokens of decode's KV pool, 0: two requests as stock counts them.
    ``rate``: requests per second (0: as fast as ``concurrency`` allows). ``slo``: seconds."""

    model: Path
    model_given: bool = True
    """Whether ``model`` is known to be what is served: it was named, or the servers are started here."""
    systems: tuple[str, ...] = ("stock", "full", "oasis")
    endpoints: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ("needle",)
    trace: Path | None = None
    repeats: int = 3
    seed: int = 0
    tokens: int = 6000
    output: int = 64
    long_output: int = 2000
    requests: int = 4
    turns: int = 13
    concurrency: int = 4
    rate: float = 0.0
    share_document: bool = False
    reuse: bool = True
    pool: int = 0
    budget: int | None = None
    link: str = ""
    hosts: bool = False
    data_plane: str = "nixl"
    slo: Mapping[str, float] = field(default_factory=lambda: {"ttft": 10.0, "itl": 0.5})
    sweeps: Mapping[str, tuple] = field(default_factory=dict)
    quality: int = 0
    """Decode steps of each request whose answer is known that are measured with forced tokens; 0: none."""
    serving: tuple[str, ...] = ()
    """Arguments of ``sglang.bench_serving``; none: it is not run."""
    options: Mapping[str, object] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    host_cache_bytes: int | None = None
    arena_bytes: int = 4 << 30
    trace_scale: float = 1.0
    trace_speed: float = 1.0

    def points(self) -> list[Point]:
        """One sweep after the other: all but one coordinate as set. Raises ``ConfigError``, also for a sweep that another option leaves without
        a meaning."""
        if unknown := set(self.sweeps) - set(SWEEPS):
            raise ConfigError(f"--sweep {', '.join(sorted(unknown))}: known are {', '.join(SWEEPS)}")
        if twice := [f"{name}={value}" for name, values in self.sweeps.items() for value in dict.fromkeys(values) if values.count(value) > 1]:
            raise ConfigError(f"--sweep {', '.join(twice)} is given twice")
        if not_one := [f"{name}={value}" for name, values in self.sweeps.items() for value in values if not isinstance(value, str) and value < 1]:
            raise ConfigError(f"--sweep {', '.join(not_one)}: at least 1")
        self._rates()
        if "concurrency" in self.sweeps:
            self._concurrency()
        if "budget" in self.sweeps:
            self._budget()
        return [{name: value} for name, values in self.sweeps.items() for value in values] or [{}]

    def _rates(self) -> None:
        rates = {"--link": (self.link,) if self.link else (), "--sweep link": self.sweeps.get("link", ())}
        if any(rates.values()) and not self.hosts:
            raise ConfigError("a link rate needs --hosts: network namespaces whose wire can be limited")
        for option, values in rates.items():
            for rate in values:
                try:
                    bits_per_second(rate)
                except HostsError as error:
                    raise ConfigError(f"{option}: {error}") from error

    def _concurrency(self) -> None:
        """A point asks as many requests as it has at once: what sets requests or their times otherwise rules it out."""
        others = {"--workloads agent": "agent" in self.workloads, "--workloads trace": "trace" in self.workloads, "--rate": self.rate > 0}
        why = {"--workloads agent": "its turns follow one another", "--workloads trace": "a trace has arrivals of its own",
               "--rate": "arrivals have a schedule"}
        for option, there in others.items():
            if there:
                raise ConfigError(f"--sweep concurrency and {option} do not go together: {why[option]}")

    def _budget(self) -> None:
        """Systems that say a budget themselves would be the same at every point."""
        if "budget_tokens" in self.options:
            raise ConfigError("--sweep budget and --set budget_tokens do not go together: every point would have that budget")
        if own := [name for name in self.systems if re.search(r":\d|\+budget_tokens=", name)]:
            raise ConfigError(f"--sweep budget and --systems {','.join(own)} do not go together: a budget in the name is the same at every point")

    def check(self, context: int) -> None:
        """What can be known to be wrong before anything starts. ``context``: of the model. Raises ``ConfigError`` naming the option."""
        points = self.points()
        if wide := [budget for budget in self.sweeps.get("budget", ()) if budget >= context]:
            raise ConfigError(f"--sweep budget={','.join(map(str, wide))}: the model's context is {context}, so that nothing would be selected; "
                              "the system `exact` attends to everything")
        if self.longest - _SHORTER + self.output > context and (prompts := [name for name in self.workloads if name not in UNFORCED]):
            raise ConfigError(f"--workloads {','.join(prompts)}: a prompt of {self.longest} tokens and its answer of {self.output} do not fit the model's "
                              f"context of {context}")
        chosen = [systems.named(name, self.at(point).serving_of(context, self.longest, self.most_at_once)).system
                  for point in points for name in self.systems]
        for options in (parse(dict(one.options)) for one in chosen if one.kind == "oasis"):
            make_budget(PAGE, options.budget_tokens, options.sink_tokens, options.recent_tokens, options.tail_tokens, options.on_miss == "wait")
        if self.quality and all(one.dense or one.kind != "oasis" for one in chosen):
            raise ConfigError(f"--quality and --systems {','.join(self.systems)}: nothing to measure, it is of Oasis systems that attend to a part")
        if self.quality and set(self.workloads) <= set(UNFORCED):
            raise ConfigError(f"--quality and --workloads {','.join(self.workloads)}: nothing to measure, they have no answers to force")

    def at(self, point: Point) -> Settings:
        """The settings of one point."""
        changes: dict[str, object] = dict(point)
        if "context" in changes:
            changes["tokens"] = changes.pop("context")
        if "concurrency" in changes:
            changes["requests"] = changes["concurrency"]
        return replace(self, sweeps={}, **changes)

    @property
    def longest(self) -> int:
        """Prompt tokens of the longest point."""
        return max([self.tokens, *self.sweeps.get("context", ())])

    @property
    def most_at_once(self) -> int:
        """Requests that the servers are to run: with a schedule of arrivals all may be there at one time."""
        scheduled = [self.requests] if self.rate or "trace" in self.workloads else []
        return max([self.concurrency, *scheduled, *self.sweeps.get("concurrency", ())])

    def pool_tokens(self) -> int:
        """Decode's KV pool, in whole pages."""
        wanted = self.pool or 2 * (self.tokens + self.output + STOCK_RESERVED)
        return wanted // PAGE * PAGE

    def serving_of(self, context: int, longest: int, most: int) -> Serving:
        """``context``: of the model; ``longest``, ``most``: over all points, so that one stack serves several."""
        return Serving(self.model, pool=self.pool_tokens(), prefill_pool=max(4 * longest, 2 * context) // PAGE * PAGE, context=context, max_running=most,
                       budget=self.budget, reuse=self.reuse, arena_bytes=self.arena_bytes, host_cache_bytes=self.host_cache_bytes,
                       flags=self.flags, options={**self.options, "data_plane": self.data_plane})

    def server_key(self, point: Point) -> tuple:
        """Points with equal keys can be served by the same servers."""
        at = self.at(point)
        return at.pool_tokens(), at.budget


def sweep(text: str) -> tuple[str, tuple]:
    """``NAME=VALUE,VALUE,...``. Raises ``ValueError``."""
    name, _, values = text.partition("=")
    if name not in SWEEPS or not values:
        raise ValueError(f"{text!r}: give NAME=VALUE,VALUE with a name of {', '.join(SWEEPS)}")
    return name, tuple(value if name == "link" else int(value) for value in values.split(","))


def merged(texts: Sequence[str]) -> dict[str, tuple]:
    """Several ``sweep`` texts. Raises ``ValueError``."""
    found = [sweep(text) for text in texts]
    if twice := [name for name, _ in found if [other for other, _ in found].count(name) > 1]:
        raise ValueError(f"--sweep {twice[0]} is given twice: give all values in one, {twice[0]}=VALUE,VALUE")
    return dict(found)
