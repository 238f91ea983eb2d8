"""How a worker ends: SIGTERM to ``sglang serve`` until its process is gone.

    first SIGTERM   SGLang answers /health with 503; here: every rank takes no new request, and those refused get 503
    meanwhile       what runs goes on; SGLang looks every 5 s whether anything is left
    drain_seconds   what is left is aborted with 503; so at a second SIGTERM
    nothing left    SGLang ends its schedulers; here, in each: commits are finished, leases handed back, threads ended

SGLang by itself takes new requests until there are none left, however long that is, and its schedulers leave their threads to the end of
the process. Sources: ``sglang/srt/managers/tokenizer_manager.py`` (SignalHandler, sigterm_watchdog), ``scheduler.py`` (abort_request,
release_host_resources).
"""

from __future__ import annotations

import logging
import os
from http import HTTPStatus

log = logging.getLogger("oasis")

NO_MORE = "oasis-no-more"
"""An abort with this message tells the schedulers to take nothing new, in the order of all else they are sent. It has the id of a request that
never was, but ids are the clients' to choose, and clients abort their requests; messages are not."""
GOING_DOWN = "the server is going down"
CLOSING_SECONDS = 3.0
"""For commits and releases under way when all requests have ended. SGLang gives its schedulers 15 s."""


def install(manager) -> None:
    """``manager``: SGLang's tokenizer manager, in the process that serves HTTP and that a SIGTERM is sent to."""
    from sglang.srt.managers.io_struct import AbortReq

    stock, ours = manager.signal_handler_class, Drain(manager, drain_seconds(), AbortReq)

    class Handler(stock):
        def sigterm_handler(self, signum=None, frame=None):
            super().sigterm_handler(signum, frame)
            ours.signalled()

    manager.signal_handler_class = Handler


def drain_seconds() -> float:
    from sglang.srt.runtime_context import get_memory

    from oasis_sglang import config

    return config.load(get_memory().hisparse_config).drain_seconds


class Drain:
    """``abort``: SGLang's message for it. On the event loop of the process that serves HTTP."""

    def __init__(self, manager, seconds: float, abort: type):
        self.manager, self.seconds, self.abort = manager, seconds, abort
        self.signals = 0

    def signalled(self) -> None:
        self.signals += 1
        if self.signals > 1 or not self.seconds:
            self.finish()
            return
        self._no_more()
        self.manager.event_loop.call_later(self.seconds, self.finish)

    def finish(self) -> None:
        left = len(self.manager.rid_to_state)
        log.warning("%d requests are aborted: the server is going down", left)
        self._no_more()
        if left:
            # The message is for those that run, the reason for those that wait for a place in the batch.
            reason = {"type": "abort", "message": GOING_DOWN, "status_code": int(HTTPStatus.SERVICE_UNAVAILABLE)}
            self.manager._dispatch_to_scheduler(self.abort(abort_all=True, abort_message=GOING_DOWN, finished_reason=reason))

    def _no_more(self) -> None:
        self.manager._dispatch_to_scheduler(self.abort(rid=NO_MORE, abort_message=NO_MORE))


def node(scheduler):
    """The publisher of a prefill rank, the puller of a decode rank; None before either is bound."""
    for queue, owned in (("disagg_prefill_bootstrap_queue", "publisher"), ("disagg_decode_prealloc_queue", "puller")):
        if (found := getattr(scheduler, queue, None)) is not None:
            return getattr(found.kv_manager, owned, None)
    return None


def told(scheduler, message: str | None) -> bool:
    """In a scheduler, for each abort: whether its ``message`` was the word that nothing new is to be taken."""
    if message != NO_MORE:
        return False
    if (one := node(scheduler)) is not None:
        one.refuse_new()
    return True


def close(scheduler) -> None:
    """When the scheduler's loop has ended: nothing is left to expire at a tier. Whatever fails, SGLang's own
    resources are still to be released."""
    if (one := node(scheduler)) is None:
        return
    try:
        left = one.drain(CLOSING_SECONDS)
        one.close()
        log.info("drained (pid %d): %d left", os.getpid(), left)
    except Exception:
        log.exception("cannot end well: leases and open rooms are left to the tier")
