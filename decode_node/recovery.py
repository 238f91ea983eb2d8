"""Requests that go on after their KV was lost: who is computed again, with what payload, and how one leaves the running batch.

A running request takes SGLang's own way of recomputation after weight updates (``Scheduler.pause_generation(mode="retract")``): its row
and pages go back, its newest token is put aside, prompt and answer before it are computed again as if they were a prompt, and the token
that prefill samples after them is replaced by the one put aside. So nothing is sampled twice, also with a temperature. One that was
not admitted yet just gets another room (``OasisReceiver``); its first token then comes from that.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter

import msgspec

from decode_node.lifecycle import Lifecycle
from decode_node.policy import RecoveryLimits, Verdict, decide, obstacle
from decode_node.recompute import Order, Recomputer
from transport.errors import OasisError

log = logging.getLogger("oasis.decode")

PAUSE_SECONDS = 2.0
"""Before an attempt that is not the first: a tier that restarts gets its workers back within one second."""
FIRST_TOKEN = ("stop_token_ids", "min_new_tokens", "json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "sampling_seed")
"""Sampling parameters that matter for a first token and that SGLang's payload leaves out, because it never needs that token."""


class Recovery:
    """Scheduler thread only, but for ``recomputer``. ``ranks``: that compute each request together."""

    def __init__(self, limits: RecoveryLimits, ranks: int, recomputer: Recomputer):
        self.limits, self.ranks, self.recomputer = limits, ranks, recomputer
        self.totals: Counter[str] = Counter()

    def verdict(self, req, error: OasisError, deadline: float = float("inf")) -> Verdict:
        """On a request that has just failed, once per failure. ``deadline``: until when it may begin anew, beside that of a recovery
        that is under way."""
        life: Lifecycle = req.oasis
        life.error = error
        verdict = decide(error, wanted=life.on_failure, obstacle=obstacle(req, self.ranks), attempts=life.attempts, limit=self.limits.attempts,
                         now=time.monotonic(), deadline=min(deadline, life.deadline))
        if not verdict.recompute:
            life.refused = verdict.reason
            self.totals["recompute_failed_" + (verdict.reason if verdict.reason in ("attempts", "deadline") else "refused")] += 1
        return verdict

    def order(self, req, home: str, seen: set[str]) -> Order:
        """Has the prompt of ``req``, and what it has answered but for a token put aside, computed again in a room of its own, which is
        ``req``'s from now on. ``home``: bootstrap address that it came with; ``seen``: those that failed it."""
        life, now = req.oasis, time.monotonic()
        life.attempts += 1
        life.deadline = min(life.deadline, now + self.limits.seconds)
        req.bootstrap_room = 1 + secrets.randbelow((1 << 62) - 1)
        order = Order(req.bootstrap_room, req.rid, home, payload(req, life.attempts), life.deadline, set(seen),
                      not_before=now + PAUSE_SECONDS if life.attempts > 1 else now)
        self.totals["recomputes"] += 1
        log.warning("request %s is computed again in room %d, attempt %d: %s", req.rid, req.bootstrap_room, life.attempts,
                    life.error.code if life.error else "asked by SGLang")
        self.recomputer.submit(order)
        return order

    def went_on(self, req) -> None:
        self.totals["recomputed"] += 1
        req.oasis.went_on()

    def restart(self, scheduler, req) -> None:
        """Takes ``req``, which has left the running batch, back to where requests arrive: nothing of it stays on this node but its tokens."""
        from sglang.srt.managers.schedule_batch import release_req

        scheduler.hisparse_coordinator.request_finished(req)
        release_req(req=req, remaing_req_count=len(scheduler.running_batch.reqs), req_to_token_pool=scheduler.req_to_token_pool,
                    token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator, tree_cache=scheduler.tree_cache,
                    hisparse_coordinator=scheduler.hisparse_coordinator, offload_kv=False)
        req.time_stats.set_retract_time()
        # Not through the queue's ``add``, which looks for the prefill worker that the request came from: that one may be dead.
        scheduler.disagg_decode_prealloc_queue._create_receiver_and_enqueue(req, is_rebootstrap=True)


def put_aside(req) -> None:
    """The newest token, whose KV is not computed yet, is replayed when the request goes on. Idempotent. Not in the turn in which it leaves the
    batch: with overlap SGLang looks once more at what it has answered, and would send that token twice."""
    if getattr(req, "pd_rebootstrap_in_progress", False):
        return
    req.pd_rebootstrap_forced_output_id = req.output_ids.pop() if req.output_ids else None
    req.pd_rebootstrap_in_progress = True


def put_back(req) -> None:
    """A request that ends before it went on has answered that token as well."""
    token, req.pd_rebootstrap_forced_output_id = req.pd_rebootstrap_forced_output_id, None
    if token is not None:
        req.output_ids.append(token)


def payload(req, attempt: int) -> dict:
    """Of ``/generate``: SGLang's own, which is enough to replay a token, and for a first token all that shapes it."""
    body = req.build_rebootstrap_payload()
    body["rid"] = f"{req.rid}-again-{attempt}"  # the first one may still be known at the same worker
    if req.output_ids or req.pd_rebootstrap_forced_output_id is not None:
        return body
    params = req.sampling_params
    shapes = {name: msgspec.to_builtins(value) for name in FIRST_TOKEN if (value := getattr(params, name)) is not None}
    shapes["min_new_tokens"] = min(1, shapes.get("min_new_tokens", 0))
    custom = {name: value for name, value in (params.custom_params or {}).items() if name != "__req__"}
    body["sampling_params"] |= shapes | ({"custom_params": custom} if custom else {})
    if req.custom_logit_processor is not None:
        body["custom_logit_processor"] = req.custom_logit_processor
    body["require_reasoning"] = req.require_reasoning  # a grammar waits for the end of it
    if req.return_sampling_mask:
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": req.sampling_logprobs_mode}
    if req.return_logprob:
        body |= {"return_logprob": True, "top_logprobs_num": req.logprob.top_logprobs_num, "token_ids_logprob": req.logprob.token_ids_logprob}
    return body
