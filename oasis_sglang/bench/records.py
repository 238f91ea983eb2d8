"""What ``results.json`` holds, as types. ``oasis bench --schema`` prints them as a JSON Schema.

Times are seconds, sizes bytes, shares fractions of one. A field that a system cannot say is null, never zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

SCHEMA_VERSION = 1

Point = dict[str, float | int | str]
"""Coordinates of a run in a sweep, such as ``{"concurrency": 8}``; empty without a sweep."""


class System(Struct):
    """One of the systems compared. ``dense``: attends to every token, so that greedy answers have to be the base's."""

    name: str
    kind: str
    """``stock``, ``oasis``, ``monolith`` or ``endpoint``."""
    description: str
    dense: bool
    flags: dict[str, list[str]] = {}
    """SGLang flags by role: ``all``, ``prefill``, ``decode``."""
    options: dict[str, Any] = {}
    """Oasis options that differ from their defaults."""
    critical_heads: int | None = None
    """(layer, KV head)s that its profile serves from all blocks; null without a profile."""


class Workload(Struct):
    name: str
    description: str
    requests: int
    prompt_tokens: list[int]
    """Least, mean and most. Of a request that follows another, as asked of the first system."""
    output_tokens: list[int]
    """Least, mean and most."""
    digest: str
    """Of the token ids of all prompts as generated; equal digests are equal workloads."""
    scored: bool
    """Whether answers are known."""
    notes: list[str] = []
    """What a reader has to know, such as that prompts share a document so that prefill computes it once."""


class Request(Struct):
    """One request as the client saw it, and what decode counted for it."""

    name: str
    prompt_tokens: int
    arrival: float
    """When the schedule wanted it sent, since the start of the run."""
    sent: float
    token_times: list[float]
    """When each output token arrived, since ``sent``. Tokens that came in one chunk have one time."""
    output_ids: list[int]
    full_transfer_bytes: int | None = None
    """As decode reports it; otherwise of the model that is known to be served."""
    admitted_bytes_by_phase: dict[str, int] | None = None
    lifetime_bytes_by_phase: dict[str, int] | None = None
    score: float | None = None
    """Share of the known answers found in the text."""
    error: str | None = None


class Node(Struct):
    """What the servers counted during a run; peaks are of the run."""

    wire_bytes: int | None = None
    """Payload from prefill (or its tier) to decode by the system's own counter: stock, ``sglang:kv_transfer_total_mb``; Oasis, decode's
    data plane and manifests."""
    computed_tokens: int | None = None
    """Prompt tokens that prefill computed; the others were in its cache."""
    concurrency: int | None = None
    """Most requests in one decode batch that decode logged (every 8th step)."""
    kv_pool_tokens: int | None = None
    """Of decode, reserved."""
    kv_pool_tokens_peak: int | None = None
    """Sampled; of a server without Oasis what its scheduler published last, every few steps."""
    device_extra_bytes: int | None = None
    """On decode's device beside the pool: summaries, tables of working sets, the lane of critical heads."""
    host_reserved_bytes: int | None = None
    """Decode host memory for KV outside the pool: staging and host cache."""
    host_used_bytes_mean: float | None = None
    """Sampled while requests were running."""
    host_used_bytes_peak: int | None = None
    tier_reserved_bytes: int | None = None
    tier_used_bytes_peak: int | None = None
    """Of all tiers: records that are in use or kept."""
    tier_kept_bytes: int | None = None
    """The same when the run began: kept of earlier ones."""
    wanted: int | None = None
    """Blocks that a step's newest rows wanted, over layers and heads."""
    misses: int | None = None
    missed_mass: float | None = None
    """Mean share of a step's expected attention on blocks that were not resident."""
    stalls: int | None = None
    stall_seconds: float | None = None
    tokens_per_step: float | None = None
    request_steps: int | None = None
    """Decode steps of requests that select: a step of a batch counts once for each of them."""
    swapped_pieces: int | None = None
    """Pieces written over others in the KV pool, from the host cache."""


class Meters(Struct):
    """Independent of every counter in ``Node``."""

    wire_in_bytes: int | None = None
    """What the interface of decode's host received on the data network, headers included."""
    wire_out_bytes: int | None = None
    decode_memory_bytes: int | None = None
    """Resident memory of decode's processes (private, and memory files once): the most since its stack was ready, above what it was then; runs
    on one stack add up. On a machine without a GPU this has the KV pool in it."""
    tier_memory_bytes: int | None = None
    client_concurrency: int | None = None
    """Most requests between their first and last token at one time, by the client's clock."""
    cpu_seconds: float | None = None
    """Of all processes of the system."""


class Run(Struct):
    system: str
    workload: str
    repeat: int
    point: Point
    order: int
    """Of all runs, in the order of time."""
    seconds: float
    """From the first request sent to the last token."""
    requests: list[Request]
    node: Node
    meters: Meters


class Quality(Struct):
    """Of one request whose answer was forced: each decode step's next-token distribution against that over all blocks, by the same
    servers."""

    system: str
    workload: str
    request: str
    point: Point
    steps: int
    kl: float
    """Mean KL(dense || system) in nats."""
    kl_worst_token: float
    top1: float
    """How often the most likely token is the same."""


class Check(Struct):
    """A counter of the system beside a meter that does not depend on it."""

    name: str
    system: str
    workload: str
    point: Point
    counted: float
    metered: float
    low: float
    """Bounds of ``metered / counted``."""
    high: float
    passed: bool
    note: str = ""


class Spread(Struct):
    """Of a figure over the repeats of a run."""

    median: float
    low: float
    high: float
    mean: float
    n: int


class Summary(Struct):
    """``figures``: by the names in ``figures.FIGURES``."""

    system: str
    workload: str
    point: Point
    figures: dict[str, Spread]


class Equality(Struct):
    """Answers of a system against the base's, token for token."""

    system: str
    base: str
    workload: str
    point: Point
    equal: int
    of: int
    required: bool
    """Both attend to everything."""


class Profile(Struct):
    """Where a decode step's time goes on a system, by stage: mean milliseconds per step, a step having as many tokens as its drafts gave it."""

    system: str
    workload: str
    point: Point
    stages: dict[str, float]


class Results(Struct):
    title: str
    command: str
    started: str
    """ISO 8601, UTC."""
    seed: int
    model: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    slo: dict[str, float]
    """``ttft`` and ``itl``, seconds, of ``goodput``."""
    link: dict[str, Any]
    """``hosts``: whether decode has a network namespace of its own; ``rate`` of its link; ``data_plane``."""
    repeats: int
    base: str
    """The system that ratios are to."""
    systems: list[System]
    workloads: list[Workload]
    runs: list[Run] = field(default_factory=list)
    quality: list[Quality] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    equality: list[Equality] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    serving: list[dict[str, Any]] = field(default_factory=list)
    """Rows of ``sglang.bench_serving`` as it wrote them, each with ``system``."""
    summary: list[Summary] = field(default_factory=list)
    sweeps: list[str] = field(default_factory=list)
    """Names of the coordinates that vary over ``runs``."""
    notes: list[str] = field(default_factory=list)
    schema: int = SCHEMA_VERSION


def save(results: Results, path: Path) -> None:
    """In one piece: whoever is interrupted leaves the file as it was."""
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    new.replace(path)


def load(path: Path) -> Results:
    """Raises ``OSError``, and ``ValueError`` for what is not such a file."""
    results = msgspec.json.decode(path.read_bytes(), type=Results)
    if results.schema != SCHEMA_VERSION:
        raise ValueError(f"{path} has schema {results.schema}, this is {SCHEMA_VERSION}")
    return results


def schema() -> dict:
    """JSON Schema of the file."""
    return msgspec.json.schema(Results)
