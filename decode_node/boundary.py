"""Step boundaries in SGLang's decode loop: a request that waits for its misses steps aside, the others go on; one that lost what it
needs is computed again or ends.

One that steps aside goes back to the waiting queue, where SGLang looks for it when a client aborts, and re-enters the batch the way a freshly
transferred request does. Sources: ``sglang/srt/managers/scheduler.py`` (update_running_batch), ``disaggregation/decode.py``
(_get_new_prebuilt_batch).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus


def hold_back(scheduler, batch) -> None:
    """Before a decode step is prepared: requests whose tier is gone leave the batch to be computed again, or are ended; those that wait
    leave the batch."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    coordinator = scheduler.hisparse_coordinator
    blocked, again = [], []
    for req in batch.reqs:
        if error := coordinator.failure(req):
            if req.to_finish is not None or req.finished():
                continue
            verdict = coordinator.recovery.verdict(req, error) if coordinator.recovery is not None else None
            if verdict is not None and verdict.recompute:
                again.append(req)
            else:
                refused = f" (not computed again: {verdict.reason})" if verdict is not None else ""
                req.to_finish = FINISH_ABORT(f"{error.code}: {error}{refused}", HTTPStatus.SERVICE_UNAVAILABLE)
        # With overlap its last result is still to come, and may end it: it must not be in the waiting queue then.
        elif not (scheduler.enable_overlap or req.finished() or req.to_finish) and coordinator.blocked(req):
            blocked.append(req)
    if blocked or again:
        batch.filter_batch(reqs_to_exclude=[*blocked, *again])
        batch.batch_is_full = False
    for req in again:  # with overlap SGLang drops its last result, which is still to come, as that of any retracted request
        coordinator.recovery.restart(scheduler, req)
    if blocked:
        scheduler.waiting_queue[:0] = blocked
        coordinator.stepper.totals["waits"] += len(blocked)


@contextmanager
def without_blocked(scheduler) -> Iterator[None]:
    """The waiting queue without those that still wait for blocks; they are back in it afterwards, in front. SGLang looks into
    the queue at every turn."""
    coordinator = scheduler.hisparse_coordinator
    coordinator.tidy()
    blocked = [req for req in scheduler.waiting_queue if coordinator.blocked(req)]
    if blocked:
        scheduler.waiting_queue = [req for req in scheduler.waiting_queue if req not in blocked]
    try:
        yield
    finally:
        scheduler.waiting_queue[:0] = blocked
