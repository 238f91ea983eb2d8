"""Requests whose tier is killed under them go on: computed again by a prefill worker."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from chaos_rig import answered, at_rest, ended, flush, inventory, next_room, pair, request, running, sets, started, totals, wait_for

from oasis_sglang.soak.asking import ANSWERED, LEFT
from oasis_sglang.stack import Stack

PULLED = 64
"""Tokens of an answer that is compared."""


@contextmanager
def killed(stack: Stack, *names: str) -> Iterator[None]:
    """These are dead inside, and back at their addresses afterwards, with prefill attached."""
    for name in names:
        stack.servers[name].signal(signal.SIGKILL, group=True)
    for name in names:
        stack.servers[name].wait(30)
    try:
        yield
    finally:
        stack.restart(*names)
    wait_for(lambda: inventory(stack)["workers"] > 0, "prefill is attached")


def lines(stack: Stack, name: str) -> list[dict]:
    """What the worker has logged of its requests."""
    text = stack.servers[name].log.read_text(errors="replace")
    return [json.loads("{" + line.partition("request {")[2]) for line in text.splitlines() if "request {" in line]


def counted(stack: Stack, name: str, before: dict) -> int:
    return totals(stack, "decode").get(name, 0) - before.get(name, 0)


def test_a_running_request_notices_nothing_but_a_pause(stack, prompts, expected):
    before = totals(stack, "decode")
    fits, needs = pair(stack, prompts.fits, 150)[1], pair(stack, prompts.selects, 600)[1]
    running(stack, 2)
    with killed(stack, "tier"):
        pass
    answered(needs)
    assert len(needs.ids) == 600
    answered(fits)
    assert fits.ids[:PULLED] == expected["fits"]
    assert counted(stack, "recomputed", before) == 1 and counted(stack, "recompute_failed_attempts", before) == 0
    at_rest(stack)
    [line] = [found for found in lines(stack, "decode") if found["rid"] == needs.outcome.id]
    assert line["recomputed"] == 1 and line["output_tokens"] == 600 and line["mode"] == "selecting"
    committed = {found["room"] for found in lines(stack, "prefill") if found["outcome"] == "committed"}
    assert line["room"] in committed, "one line on each node, by the same room"


@pytest.mark.parametrize("prompt, oasis", [("fits", None), ("half", {"mode": "exact"})], ids=["within its budget", "exact"])
def test_one_that_was_being_pulled_says_what_it_would_have_said(stack, hold, prompts, expected, prompt, oasis):
    """Greedy text after a recomputation is that of an undisturbed run."""
    flush(stack)
    before = totals(stack, "decode")
    hold.touch()
    post = pair(stack, getattr(prompts, prompt), PULLED, oasis=oasis)[1]
    wait_for(lambda: sets(stack)["live"] == 1, "it has its pages")
    with killed(stack, "tier"):
        hold.unlink()
    answered(post, expected[prompt])
    assert counted(stack, "recomputed", before) == 1
    at_rest(stack)


def test_a_prompt_that_has_not_reached_prefill_is_brought_there(stack, prompts, expected):
    """As when its worker refused the router's connection, or died with the request in its queue."""
    flush(stack)
    before = totals(stack, "decode")
    body = request(prompts.fits, PULLED, bootstrap_host="127.0.0.1", bootstrap_port=stack.bootstrap_port, bootstrap_room=next_room())
    answered(started(stack.urls["decode"], body, wanted=PULLED), expected["fits"])
    assert counted(stack, "recomputed", before) == 1
    at_rest(stack)


def test_one_that_would_rather_fail_ends_with_the_reason(stack, prompts, expected):
    before = totals(stack, "decode")
    needs = pair(stack, prompts.selects, 2000, oasis={"on_failure": "fail"})[1]
    running(stack)
    with killed(stack, "tier"):
        outcome = ended(needs)
        assert outcome.status != ANSWERED and "not computed again: policy" in outcome.told, outcome
    assert counted(stack, "recompute_failed_refused", before) == 1 and counted(stack, "recomputes", before) == 0
    answered(pair(stack, prompts.fits, 8)[1], expected["fits"])


def test_without_a_prefill_worker_it_ends_in_time(stack, prompts):
    before = totals(stack, "decode")
    needs = pair(stack, prompts.selects, 2000)[1]
    running(stack)
    with killed(stack, "prefill", "tier"):
        outcome = ended(needs, 60)
        assert outcome.status != ANSWERED and ("not computed again: deadline" in outcome.told or "no prefill worker" in outcome.told), outcome
        wait_for(lambda: not any(sets(stack)["held"].values()), "decode holds nothing")
    assert counted(stack, "recomputed", before) == 0 and sets(stack)["leaks"] == 0


def test_a_client_that_leaves_while_it_is_computed_again(stack, prompts, expected):
    before = totals(stack, "decode")
    needs = pair(stack, prompts.selects, 2000)[1]
    running(stack)
    with killed(stack, "tier"):
        wait_for(lambda: counted(stack, "recomputes", before) >= 1, "it left the batch")
        needs.drop(LEFT)
        wait_for(lambda: not any(sets(stack)["held"].values()), "decode holds nothing")
    at_rest(stack)
    answered(pair(stack, prompts.fits, 8)[1], expected["fits"])
