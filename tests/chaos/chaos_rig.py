"""Requests to a pair of workers, what the servers hold, and rows of the table of faults."""

from __future__ import annotations

import email.utils
import itertools
import mmap
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from oasis_sglang.soak import baseline
from oasis_sglang.soak.asking import ANSWERED, STUCK, Asking, Outcome, since
from oasis_sglang.soak.results import Row, judged
from oasis_sglang.stack import Stack

BUDGET, TAIL = 512, 64
OUTPUT = 64
"""Tokens of reference answers."""
SILENCE, LEASE, GRACE, RESERVE, DRAIN = 3.0, 6.0, 1.0, 4.0, 10.0
"""Seconds of the options of these names: short, so that each is met within a test."""
ANSWER_S = 120.0
BASELINE_S = 60.0
ROWS = os.environ.get("OASIS_CHAOS_OUT", "")
"""File that rows are added to, one a line: `oasis soak --markdown --from FILE` makes the table of them."""

clock = since(time.monotonic())
_rooms = itertools.count(random.getrandbits(40) << 20)
_beginnings = itertools.count(1)


def next_room() -> int:
    return next(_rooms)


def started(url: str, body: dict, *, wanted: int, name: str = "") -> Asking:
    outcome = Outcome(id=body["rid"], prompt=name, prompt_tokens=len(body["input_ids"]), wanted=wanted, stream=body["stream"], sent=clock())
    asking = Asking(url, body, outcome, clock, timeout=ANSWER_S)
    threading.Thread(target=asking.run, daemon=True).start()
    return asking


def request(prompt: Sequence[int], output: int, *, stream: bool = False, **more) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
    return {"input_ids": list(prompt), "rid": f"chaos-{next(_rooms)}", "stream": stream, "sampling_params": sampling, **more}


def pair(stack: Stack, prompt: Sequence[int], output: int, *, room: int | None = None, exact: bool = False, stream: bool = False,
         oasis: dict | None = None) -> tuple[Asking, Asking]:
    """The same request at both workers, as the router sends it: (prefill's, decode's). ``exact``: it holds all its blocks; ``oasis``: options
    of the request."""
    body = request(prompt, output, stream=stream, bootstrap_host="127.0.0.1", bootstrap_port=stack.bootstrap_port,
                   bootstrap_room=next_room() if room is None else room)
    if oasis := ({"mode": "exact"} if exact else {}) | (oasis or {}):
        body["sampling_params"]["custom_params"] = {"oasis": oasis}
    return started(stack.urls["prefill"], body, wanted=1), started(stack.urls["decode"], body, wanted=output)


def ended(asking: Asking, seconds: float = ANSWER_S) -> Outcome:
    """What became of it; one that has not ended within its time is ``stuck``."""
    if not asking.done.wait(seconds):
        asking.drop(STUCK)
        asking.done.wait(10)
    return asking.outcome


def answered(asking: Asking, expected: Sequence[int] | None = None, seconds: float = ANSWER_S) -> None:
    outcome = ended(asking, seconds)
    assert outcome.status == ANSWERED, outcome
    if expected is not None:
        outcome.equal = asking.ids == list(expected)[: outcome.wanted]
        assert outcome.equal, (asking.ids, expected)


def unseen(prompt: Sequence[int]) -> list[int]:
    """It with another beginning than any before: no cache holds a block of it."""
    return [*prompt[(at := next(_beginnings)) : at + 16], *prompt]


def flush(stack: Stack) -> None:
    """Decode keeps nothing of earlier requests: the next one has to read."""
    urllib.request.urlopen(urllib.request.Request(f"{stack.urls['decode']}/flush_cache?timeout=30", method="POST"), timeout=60).read()


def flip_bits(stack: Stack) -> None:
    """In each kilobyte of the arena, behind the tier's back."""
    arena = next(link for link in Path(f"/proc/{stack.servers['tier'].pid}/fd").iterdir() if "/memfd:oasis-arena" in os.readlink(link))
    with arena.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for at in range(0, len(memory), 1024):
            memory[at] ^= 1


def inventory(stack: Stack) -> dict:
    return baseline.tier(stack)["inventory"]


def totals(stack: Stack, name: str) -> dict:
    return baseline.tier(stack)["totals"] if name == "tier" else baseline.worker(stack, name)["totals"]


def sets(stack: Stack) -> dict:
    return baseline.worker(stack, "decode")["working_sets"]


def running(stack: Stack, count: int = 1) -> None:
    """``count`` requests decode now."""
    wait_for(lambda: sum(live["state"] in ("serving", "done") for live in sets(stack)["live_requests"]) >= count, f"{count} run")


def status_of(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wall_time(stack: Stack, name: str) -> float:
    """What the server thinks that it is, as seconds since 1970."""
    path = "/readyz" if name == "tier" else "/health"
    with urllib.request.urlopen(stack.urls[name] + path, timeout=20) as reply:
        return email.utils.parsedate_to_datetime(reply.headers["Date"]).timestamp()


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> float:
    """Seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - start


def at_rest(stack: Stack, seconds: float = BASELINE_S) -> None:
    left = baseline.settle(lambda: baseline.held(stack), seconds)
    assert not left, f"not back at the baseline: {left}"


class Blow:
    """A row in the making: ``noticed()`` and ``restored(askings)`` when it is so."""

    def __init__(self, fault: str, what: str):
        self.row = Row(fault=fault, what=what, began=round(clock(), 3))

    def noticed(self) -> None:
        self.row.detected = round(clock() - self.row.began, 1)

    def restored(self, *askings: Asking) -> Row:
        """Nothing is held any more, and these are what was under way."""
        self.row.restored, self.row.ended = round(clock() - self.row.began, 1), round(clock(), 3)
        row = judged(self.row, [a.outcome.id for a in askings], {a.outcome.id: a.outcome for a in askings})
        assert row.lost == 0 and row.wrong == 0, row
        if ROWS:
            with Path(ROWS).open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        return row
