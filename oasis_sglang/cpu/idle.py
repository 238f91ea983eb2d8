"""A scheduler that waits for something must not take the core that works on it."""

import time

PAUSE_MS = 2
"""Long against a pass of the event loop, short against a token of any model that is worth serving
on a CPU."""


def on_idle(original, self):
    """Around ``Scheduler.on_idle``: pause when there is no batch but requests are pending.

    ``--sleep-on-idle`` blocks only when nothing is pending at all. A prefill or decode server whose
    requests wait for a transfer polls with ``time.sleep(0)`` instead, at the expense of the process
    that computes. With ``--sleep-on-idle`` the pause ends early when a request arrives.
    """
    original(self)
    if self.is_fully_idle():
        return
    poller = getattr(self.idle_sleeper, "poller", None)
    if poller is not None:
        poller.poll(PAUSE_MS)
    else:
        time.sleep(PAUSE_MS / 1000)
