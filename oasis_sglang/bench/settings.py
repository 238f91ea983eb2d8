"""What a benchmark runs: its settings, and the points of its sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from oasis_sglang.bench.records import Point
from oasis_sglang.bench.systems import Serving
from transport.errors import ConfigError

RESERVED_TOKENS = 512
"""Tokens that SGLang's decode keeps free for each running request unless told otherwise."""
SWEEPS = {
    "concurrency": "requests at once, and as many in all",
    "context": "prompt tokens",
    "budget": "budget_tokens of Oasis",
    "link": "rate of the data network, such as 200mbit; needs --hosts",
    "pool": "tokens of decode's KV pool",
}
PAGE = 16


@dataclass(frozen=True)
class Settings:
    """``tokens``: of a prompt; ``output``: of an answer. ``pool``: tokens of decode's KV pool, 0: two requests as stock counts them.
    ``rate``: requests per second (0: as fast as ``concurrency`` allows). ``slo``: seconds."""

    model: Path
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
        """One sweep after the other: all but one coordinate as set. Raises ``ConfigError``."""
        if unknown := set(self.sweeps) - set(SWEEPS):
            raise ConfigError(f"--sweep {', '.join(sorted(unknown))}: known are {', '.join(SWEEPS)}")
        if ("link" in self.sweeps or self.link) and not self.hosts:
            raise ConfigError("a link rate needs --hosts: network namespaces whose wire can be limited")
        return [{name: value} for name, values in self.sweeps.items() for value in values] or [{}]

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
        wanted = self.pool or 2 * (self.tokens + self.output + RESERVED_TOKENS)
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
    return dict(sweep(text) for text in texts)
