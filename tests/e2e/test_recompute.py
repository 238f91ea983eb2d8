"""Requests whose tier is killed under them go on: computed again by a prefill worker, over real servers."""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager

import matrix
import pytest
from pd import assert_baseline, pair, wait_for, worker

from oasis_sglang.client import generate

BUDGET = 512
CONFIG = {"budget_tokens": BUDGET, "silence_seconds": 3.0, "read_seconds": 3.0, "recompute_seconds": 60.0}


@contextmanager
def killed(stack, name: str):
    """The server is dead inside, and back at its addresses afterwards."""
    server = stack.servers[name]
    server.signal(signal.SIGKILL, group=True)
    wait_for(lambda: server.poll() is not None, f"{name} is dead")
    try:
        yield
    finally:
        stack.restart(name)


def totals(stack) -> dict[str, int]:
    return worker(stack, "decode")["totals"]


def lines(stack, name: str) -> list[dict]:
    """What the worker has logged of its requests."""
    text = stack.servers[name].log.read_text(errors="replace")
    return [json.loads("{" + line.partition("request {")[2]) for line in text.splitlines() if "request {" in line]


@pytest.fixture(scope="module")
def hold(tmp_path_factory):
    """While this file exists decode starts no read."""
    return tmp_path_factory.mktemp("hold") / "reads"


@pytest.fixture
def stack(fresh_stack, hold):
    hold.unlink(missing_ok=True)
    with fresh_stack("oasis", config={**CONFIG, "hold_reads_file": str(hold)}, prefill_flags=("--max-total-tokens", "20000"),
                     decode_flags=("--max-total-tokens", "4000")) as started:
        yield started


def running(stack, prompt, *, new: int, oasis: dict | None = None):
    before = worker(stack, "decode")["working_sets"]["steps"].get("steps", 0)
    post = pair(stack, prompt, max_new_tokens=new, oasis=oasis)[1]
    wait_for(lambda: worker(stack, "decode")["working_sets"]["steps"].get("steps", 0) > before + 4, "it runs")
    return post


def test_a_running_request_notices_nothing_but_a_pause(stack, prompts, expected):
    admitted = totals(stack).get("admitted", 0)
    fits = pair(stack, prompts[2], max_new_tokens=400)[1]
    wait_for(lambda: totals(stack).get("admitted", 0) > admitted, "the one that needs no tier runs")
    needs = running(stack, prompts[6], new=600)
    with killed(stack, "tier"):
        pass
    answer = needs.result(180)
    assert answer.status == 200 and len(answer.output_ids) == 600
    assert fits.result(180).output_ids[: matrix.OUTPUT_TOKENS] == expected[2]
    assert totals(stack)["recomputes"] >= 1 and totals(stack)["recomputed"] == 1 and totals(stack).get("recompute_failed_attempts", 0) == 0
    assert generate(stack.url, prompts[1], max_new_tokens=8).output_ids == expected[1][:8]
    assert_baseline(stack)
    [line] = [found for found in lines(stack, "decode") if found["rid"] == needs.rid]
    assert line["recomputed"] == 1 and line["output_tokens"] == 600 and line["mode"] == "selecting"
    rooms = {found["room"] for found in lines(stack, "prefill") if found["outcome"] == "committed"}
    assert line["room"] in rooms and set(line["rooms"]) <= rooms | {found["room"] for found in lines(stack, "prefill")}


@pytest.mark.parametrize("index, oasis", [(2, None), (4, {"mode": "exact"})], ids=["within its budget", "exact"])
def test_one_that_was_being_pulled_says_what_it_would_have_said(stack, hold, prompts, expected, index, oasis):
    """Greedy text after a recomputation is that of an undisturbed run."""
    hold.touch()
    post = pair(stack, prompts[index], max_new_tokens=matrix.OUTPUT_TOKENS, oasis=oasis)[1]
    wait_for(lambda: worker(stack, "decode")["working_sets"]["live"] == 1, "it has its pages")
    with killed(stack, "tier"):
        hold.unlink()
    assert post.result(180).output_ids == expected[index]
    assert totals(stack)["recomputed"] == 1
    assert_baseline(stack)


def test_one_that_would_rather_fail_ends_with_the_reason(stack, prompts, expected):
    needs = running(stack, prompts[6], new=2000, oasis={"on_failure": "fail"})
    with killed(stack, "tier"):
        failed = needs.result(120)
    assert failed.status == 503 or '"abort"' in failed.text
    assert "not computed again: policy" in failed.text and totals(stack)["recompute_failed_refused"] == 1
    assert generate(stack.url, prompts[1], max_new_tokens=8).output_ids == expected[1][:8]
    assert_baseline(stack)


def test_without_a_prefill_worker_it_ends_in_time(fresh_stack, prompts):
    config = {**CONFIG, "recompute_seconds": 8.0}
    with fresh_stack("oasis", config=config, prefill_flags=("--max-total-tokens", "20000"), decode_flags=("--max-total-tokens", "4000")) as stack:
        needs = running(stack, prompts[6], new=2000)
        for name in ("prefill", "tier"):
            stack.servers[name].signal(signal.SIGKILL, group=True)
        failed = needs.result(60)
        assert failed.status == 503 or '"abort"' in failed.text
        assert "not computed again: deadline" in failed.text or "no prefill worker" in failed.text, failed.text
        wait_for(lambda: not any(worker(stack, "decode")["working_sets"]["held"].values()), "decode holds nothing")
        assert worker(stack, "decode")["working_sets"]["leaks"] == 0


def test_a_client_that_leaves_while_it_is_computed_again(stack, prompts, expected):
    needs = running(stack, prompts[6], new=2000)
    with killed(stack, "tier"):
        wait_for(lambda: totals(stack).get("recomputes", 0) >= 1, "it left the batch")
        needs.abort()
        wait_for(lambda: not any(worker(stack, "decode")["working_sets"]["held"].values()), "decode holds nothing")
    assert generate(stack.url, prompts[1], max_new_tokens=8).output_ids == expected[1][:8]
    assert_baseline(stack)
