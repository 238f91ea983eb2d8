"""Forecasts beside what ``oasis bench`` measured, run by run.

Read from the results: of ``model`` ``layers``, ``kv_heads``, ``head_dim``, ``itemsize`` and ``block_tokens``; of a system ``kind``, ``options``,
``flags`` and, with a profile, ``critical_heads`` (older results have that of the model); of a run its requests' token counts, byte counts and times, and
``node``. The model knows nothing of prompts that share a beginning: where decode keeps blocks, those pull less than forecast.

Which requests were there at one time is taken from the clients' clock, first token to last: a request that waits, is prefilled or is being pulled has
no part in a batch. How many of them fit, what each holds in the pool, and what it has in host memory by then is the model's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from decode_node.budget import make_budget
from oasis_sglang import config
from oasis_sglang.bench.records import Request, Results, Run, System
from oasis_sglang.bench.systems import DECODE_LOG_INTERVAL
from oasis_sglang.plan import capacity, sizes
from oasis_sglang.plan.capacity import Ask, Served
from oasis_sglang.selection.profile import Profile
from transport.errors import ConfigError

MODEL_FIELDS = ("layers", "kv_heads", "head_dim", "itemsize", "block_tokens")


class Compared(NamedTuple):
    """``figure`` of one run."""

    figure: str
    system: str
    workload: str
    point: Mapping[str, Any]
    repeat: int
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured if self.measured else math.inf


def compare(results: Results) -> list[Compared]:
    """Of every run of a system of kind ``oasis`` or ``stock``, what was measured. Raises ``ConfigError`` naming what the results lack."""
    systems = {system.name: system for system in results.systems}
    return [row for run in results.runs if run.system in systems for row in _of_run(run, systems[run.system], results.model)]


def worst(rows: Iterable[Compared]) -> dict[str, Compared]:
    """By figure, the row farthest from 1 in ratio."""
    found: dict[str, Compared] = {}
    for row in rows:
        if row.figure not in found or _distance(row) > _distance(found[row.figure]):
            found[row.figure] = row
    return found


def _distance(row: Compared) -> float:
    return abs(math.log(row.ratio)) if 0 < row.ratio < math.inf else math.inf


def served_of(model: Mapping[str, Any], system: System, point: Mapping[str, Any] | None = None, tokens_per_step: float = 1.0) -> Served:
    """``point``: its budget counts, unless the system is named with one of its own. Raises ``ConfigError``."""
    if missing := [field for field in MODEL_FIELDS if type(model.get(field)) is not int]:
        raise ConfigError(f"the results do not say {', '.join(missing)} of their model")
    swept = {"budget_tokens": int(point["budget"])} if point and "budget" in point and ":" not in system.name else {}
    options = config.parse({**system.options, **swept})
    layout = sizes.layout_of(model["layers"], model["kv_heads"], model["head_dim"], model["itemsize"], page=model["block_tokens"], summary=options.summary)
    flags = [*system.flags.get("all", ()), *system.flags.get("decode", ())]
    budget = make_budget(layout.block_tokens, options.budget_tokens, options.sink_tokens, options.recent_tokens, options.tail_tokens,
                         options.on_miss == "wait", int(_last(flags, "--speculative-num-draft-tokens", "0")))
    return Served(layout, budget._replace(exact=options.mode == "exact"), critical=_critical(model, system, options.profile), cap=options.fetch_blocks_per_step,
                  full=options.admission == "full", keeps=_last(flags, "--radix-cache-backend", "oasis") == "oasis", tokens_per_step=tokens_per_step,
                  hysteresis=options.hysteresis)


def _last(flags: Sequence[str], name: str, default: str) -> str:
    """The value of ``name`` that counts: the last."""
    return next((value for flag, value in reversed(list(zip(flags, flags[1:]))) if flag == name), default)


def _critical(model: Mapping[str, Any], system: System, profile: str) -> int:
    """How many heads the profile serves from all blocks."""
    if not profile:
        return 0
    if system.critical_heads is not None:
        return system.critical_heads
    if "critical_heads" in model:
        return int(model["critical_heads"])
    try:
        return len(Profile.load(Path(profile)).heads)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the results do not say critical_heads of their model, and their profile is not there: {error}") from error


def _of_run(run: Run, system: System, model: Mapping[str, Any]) -> list[Compared]:
    if system.kind not in ("oasis", "stock"):
        return []
    answered = [request for request in run.requests if request.error is None and request.token_times]
    if not answered:
        return []
    served = served_of(model, system, run.point, run.node.tokens_per_step or 1.0)
    found = _oasis(run, served, answered) if system.kind == "oasis" else _stock(run, served, answered)
    return [Compared(figure, system.name, run.workload, run.point, run.repeat, float(predicted), float(measured))
            for figure, (predicted, measured) in found.items() if measured]


def _ask(request: Request) -> Ask:
    return Ask(request.prompt_tokens, max(1, len(request.output_ids)))


def _stock(run: Run, served: Served, answered: list[Request]) -> dict[str, tuple[float, float | None]]:
    asks = [_ask(request) for request in answered]
    found = {"wire bytes": (sum(capacity.full_transfer(served.layout, ask.prompt) for ask in asks), run.node.wire_bytes)}
    if run.node.kv_pool_tokens:
        held = max(capacity.stock_tokens(ask, served.page) for ask in asks)
        found["requests at once"] = (min(decoding_at_once(answered), run.node.kv_pool_tokens // held), run.node.concurrency)
    return found


def _oasis(run: Run, served: Served, answered: list[Request]) -> dict[str, tuple[float, float | None]]:
    node = run.node
    counted = [r for r in answered if r.admitted_bytes_by_phase is not None and r.lifetime_bytes_by_phase is not None]
    found = {
        "admitted bytes": (sum(sum(capacity.admitted(served, _ask(r)).values()) for r in counted),
                           sum(sum(r.admitted_bytes_by_phase.values()) for r in counted)),
        "lifetime bytes": (sum(capacity.lifetime(served, _ask(r)) for r in counted), sum(sum(r.lifetime_bytes_by_phase.values()) for r in counted))}
    asks = [_ask(request) for request in answered]
    if node.request_steps and node.swapped_pieces is not None:
        found["swaps per head and step"] = (_swaps(served, asks), node.swapped_pieces / node.request_steps / (served.layout.pieces - served.critical))
    if not node.kv_pool_tokens:
        return found
    needs = [served.budget.need(ask.prompt, ask.output).pages for ask in asks]
    fit = node.kv_pool_tokens // served.page // max(needs)
    at_once = min(decoding_at_once(answered), fit)
    found |= {"requests at once": (at_once, node.concurrency),
              "KV pool tokens": (sum(sorted(needs)[-at_once:]) * served.page if at_once else 0, node.kv_pool_tokens_peak)}
    # What is kept stays when its request has ended, as far as there is room.
    held = sum(capacity.host(served, ask)["cache"] for ask in asks) if served.keeps else _host_peak(served, answered, fit)
    found["decode host bytes"] = (min(held, node.host_reserved_bytes or math.inf), node.host_used_bytes_peak)
    return found


def _swaps(served: Served, asks: Sequence[Ask]) -> float:
    """Blocks of a (layer, KV head) that selects which a step exchanges, on average over the steps of requests that select."""
    steps = [capacity.steps(served, ask.output) * served.budget.need(ask.prompt, ask.output).selecting for ask in asks]
    return sum(n * capacity.exchanged(served, ask) for n, ask in zip(steps, asks)) / (sum(steps) or 1.0)


def _host_peak(served: Served, answered: Sequence[Request], fit: int) -> float:
    """Most bytes of host cache at one time, of at most ``fit`` requests, each with what it has by then. It grows until one of them ends."""
    most = 0.0
    for now in sorted({request.sent + request.token_times[-1] for request in answered}):
        then = [(request, tokens) for request in answered if (tokens := _tokens_by(request, now))]
        held = sorted((capacity.host(served, _ask(request), tokens)["cache"] for request, tokens in then), reverse=True)
        most = max(most, sum(held[:fit]))
    return most


def _tokens_by(request: Request, now: float) -> int:
    """Output tokens that a request has at ``now``; 0 before the first and after the last, when it holds nothing."""
    since, soon = now - request.sent, 1e-9  # what ends now is there
    return bisect_right(request.token_times, since + soon) if since - soon <= request.token_times[-1] else 0


def decoding_at_once(requests: Iterable[Request], steps: int = DECODE_LOG_INTERVAL) -> int:
    """Most requests that decode at one time, for ``steps`` of their tokens: a batch that lasts less may be gone before decode's log tells of it.
    At least 1. ``sent`` counts from the start of the run."""
    events = []
    for request in requests:
        times = request.token_times
        events += [(request.sent + times[0], -1), (request.sent + times[max(0, len(times) - 1 - steps)], 1)]
    now = most = 0
    for _, ended in sorted(events):  # of one time what begins comes first
        now -= ended
        most = max(most, now)
    return most
