"""What becomes of a request whose KV cannot be had any more: it is computed again, or it ends. Pure functions.

``recompute``: a prefill worker computes prompt and answer so far once more, and the request goes on where it was. ``fail``: it
ends with its error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from transport.errors import ConfigError, DeadlineExceeded, IntegrityError, LeaseExpired, OasisError, PeerLost, RoomFailed, StaleEpoch

RECOMPUTE, FAIL = "recompute", "fail"
CURABLE = (PeerLost, DeadlineExceeded, StaleEpoch, LeaseExpired, IntegrityError)
"""What is wrong with one place or one copy of the KV. Computing it again elsewhere changes nothing about the others: a limit, an
option, a layout, a key, a node that goes down, a request that was given up. Just these classes, not what derives from them."""


class RecoveryLimits(NamedTuple):
    """``on_failure``: of requests that say nothing; ``attempts``: for one request at most; ``seconds``: from a failure until the
    request goes on, all attempts together."""

    on_failure: str = RECOMPUTE
    attempts: int = 2
    seconds: float = 60.0


class Verdict(NamedTuple):
    """``reason``: what decided, when it is not computed again: policy, error, obstacle, attempts or deadline."""

    recompute: bool
    reason: str = ""


def on_failure(params: object, default: str) -> str:
    """Of a request with ``custom_params`` (or None). Raises ``ConfigError`` for a policy that there is not."""
    own = params.get("oasis") if isinstance(params, Mapping) else None
    wanted = own.get("on_failure", default) if isinstance(own, Mapping) else default
    if wanted not in (RECOMPUTE, FAIL):
        raise ConfigError(f"custom_params.oasis.on_failure={wanted!r} is not one of {RECOMPUTE}, {FAIL}")
    return wanted


def decide(error: OasisError, *, wanted: str, obstacle: str, attempts: int, limit: int, now: float, deadline: float) -> Verdict:
    """``obstacle``: why a prompt like this cannot be computed again here, "" if it can; ``attempts``: how many have begun, of at most
    ``limit``; ``deadline``: until when one may begin, on the clock of ``now``.

    A room that was given up is no reason, since somebody wanted that: but for the rooms of our own attempts."""
    if wanted != RECOMPUTE:
        return Verdict(False, "policy")
    if not (type(error) in CURABLE or (attempts and type(error) is RoomFailed)):
        return Verdict(False, "error")
    if obstacle:
        return Verdict(False, "obstacle")
    if attempts >= limit:
        return Verdict(False, "attempts")
    if now >= deadline:
        return Verdict(False, "deadline")
    return Verdict(True)


def obstacle(req, ranks: int) -> str:
    """Why token ids alone do not bring back what SGLang's ``req`` has computed, or not here; "" when they do. ``ranks``: that
    compute each request together."""
    if ranks > 1:
        return "its ranks would have to agree on it"
    had = {"images or other media": req.multimodal_inputs, "input embeddings": req.input_embeds, "a LoRA adapter": req.lora_id,
           "beams": req.beam_group, "a session": req.session,
           "a watermark": not req.output_ids and getattr(req.sampling_params, "watermark", None)}
    return next((f"it has {name}" for name, value in had.items() if value), "")
