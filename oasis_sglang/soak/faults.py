"""Faults by name: what is done to which server, how it is seen that the others have noticed, and how it is undone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from oasis_sglang.soak import baseline
from oasis_sglang.stack import Stack

SILENCE_SECONDS = 5.0
"""After which a tier that does not answer is taken for dead: the option ``silence_seconds`` of the stacks that this is for."""
DEATH_S = 30.0
ATTACH_S = 60.0

Noticed = Callable[[Stack, dict], bool]
"""(stack, what ``signs`` said before the fault) -> whether another server shows that it knows."""


@dataclass(frozen=True)
class Fault:
    """``away``: seconds from the blow to the remedy. ``noticed`` None: nobody is meant to notice; ``must`` False: it depends on what was
    under way whether anybody can."""

    name: str
    what: str
    victim: str
    strike: Callable[[Stack], None]
    mend: Callable[[Stack], None]
    noticed: Noticed | None
    away: float = 2.0
    must: bool = True


def signs(stack: Stack) -> dict[str, float]:
    """Counters of the survivors that move when a peer is lost; what a dead or busy server would say is left out."""
    found: dict[str, float] = {}
    for name, read in (("tier", lambda: baseline.tier(stack)["totals"]), ("prefill", lambda: baseline.worker(stack, "prefill")["totals"]),
                       ("decode", lambda: baseline.worker(stack, "decode")["totals"])):
        try:
            found |= {f"{name} {key}": value for key, value in read().items()}
        except (OSError, ValueError, KeyError):
            continue
    return found


def _kill(name: str, number: int = signal.SIGKILL) -> Callable[[Stack], None]:
    def strike(stack: Stack) -> None:
        server = stack.servers[name]
        server.signal(number, group=number == signal.SIGKILL)
        server.wait(DEATH_S)

    return strike


def _restart(name: str) -> Callable[[Stack], None]:
    def mend(stack: Stack) -> None:
        stack.restart(name)
        _until(lambda: baseline.tier(stack)["inventory"]["workers"] > 0, ATTACH_S)

    return mend


def _send(name: str, number: int) -> Callable[[Stack], None]:
    return lambda stack: stack.servers[name].signal(number, group=True)


def _until(condition: Callable[[], bool], seconds: float) -> None:
    """As soon as the condition holds, at the latest after ``seconds``: what is wrong then, the baseline shows."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if condition():
                return
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.1)


def _grew(*names: str) -> Noticed:
    def noticed(stack: Stack, before: dict) -> bool:
        now = signs(stack)
        return any(now.get(name, 0) > before.get(name, 0) for name in names)

    return noticed


def _no_worker(stack: Stack, before: dict) -> bool:
    return baseline.tier(stack)["inventory"]["workers"] == 0


_LOST_TIER = _grew("decode links_lost", "prefill attach_failures", "prefill reattached")

FAULTS = {fault.name: fault for fault in (
    Fault("tier-restart", "SIGKILL to the tier, started again on the same ports", "tier", _kill("tier"), _restart("tier"), _LOST_TIER),
    Fault("tier-drain", "SIGTERM to the tier, started again on the same ports", "tier", _kill("tier", signal.SIGTERM), _restart("tier"), _LOST_TIER),
    Fault("tier-pause", "SIGSTOP to the tier for less than it may be silent", "tier", _send("tier", signal.SIGSTOP), _send("tier", signal.SIGCONT), None,
          away=SILENCE_SECONDS / 4, must=False),
    Fault("tier-stop", "SIGSTOP to the tier for longer than it may be silent", "tier", _send("tier", signal.SIGSTOP), _send("tier", signal.SIGCONT),
          _grew("decode links_lost"), away=3 * SILENCE_SECONDS),
    Fault("prefill-kill", "SIGKILL to prefill, started again on the same ports", "prefill", _kill("prefill"), _restart("prefill"), _no_worker),
    Fault("decode-kill", "SIGKILL to decode, started again on the same port", "decode", _kill("decode"), _restart("decode"),
          _grew("tier leases_expired", "tier rooms_expired"), must=False),
)}
DEFAULT = ("tier-restart", "prefill-kill")
