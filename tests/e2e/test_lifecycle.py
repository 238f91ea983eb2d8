"""Requests that end early give everything back; a dead prefill worker takes nothing committed with it."""

import random
import time

import matrix
import pytest
from pd import Post, assert_baseline, body, flush, next_room, pair, tier, wait_for, worker

from oasis_sglang.client import generate

ABORTS_PER_STATE = 5


@pytest.fixture(scope="module")
def hold(tmp_path_factory):
    """While this file exists decode starts no read: requests stay in the state before."""
    return tmp_path_factory.mktemp("hold") / "reads"


@pytest.fixture(scope="module")
def stack(oasis_stack, hold):
    """Room for one long request on decode, and for few records in the tier, so that every queue can fill."""
    return oasis_stack(prefill_flags=("--chunked-prefill-size", "2048"), decode_flags=("--max-total-tokens", "5600"),
                       config={"hold_reads_file": str(hold), "await_seconds": 60.0}, arena_bytes=64 << 20)


def drop(*posts):
    for post in posts:
        post.drop()


def abort(*posts):
    for post in posts:
        post.abort()


def test_aborts_in_every_state_of_a_pull(stack, hold, prompts):
    """awaiting: nothing committed yet; ready: committed, no KV pages free; pulling: reads held back."""
    before = worker(stack, "decode")["totals"]

    def failed(state):
        return worker(stack, "decode")["totals"].get(f"failed_{state}", 0) - before.get(f"failed_{state}", 0)

    for _ in range(ABORTS_PER_STATE):  # decode alone: no prefill ever opens the room
        lonely = Post(stack.urls["decode"], body(stack, prompts[1], room=next_room(), max_new_tokens=4))
        wait_for(lambda: worker(stack, "decode")["pulls"] == 1, "the pull started")
        wait_for(lambda: tier(stack)["inventory"]["waiters"] == 1, "the tier was asked")
        drop(lonely)
        assert_baseline(stack)
    assert failed("awaiting") >= ABORTS_PER_STATE

    flush(stack)
    hold.touch()
    try:
        big = [pair(stack, prompts[6], max_new_tokens=4) for _ in range(1 + ABORTS_PER_STATE)]  # 3,005 of 5,600 tokens each
        wait_for(lambda: tier(stack)["inventory"]["leases"] == len(big), "all are committed and claimed", 120)
        wait_for(lambda: worker(stack, "decode")["kv_pool_tokens"] > 3000, "one has its pages")
        for _, decode in big[1:]:  # those that wait first: pages that come free would move them on
            drop(decode)
        wait_for(lambda: worker(stack, "decode")["pulls"] == 1, "all but the first ended")
        drop(big[0][1])
        wait_for(lambda: worker(stack, "decode")["pulls"] == 0, "all ended")
        for prefill, _ in big:
            assert prefill.result().status == 200  # prefill had done its part long before
        assert failed("ready") >= ABORTS_PER_STATE
        assert_baseline(stack)

        for _ in range(ABORTS_PER_STATE):
            prefill, decode = pair(stack, prompts[3], max_new_tokens=4)
            wait_for(lambda: worker(stack, "decode")["kv_pool_tokens"] > 0, "it has its pages")
            drop(decode)
            prefill.result()
            assert_baseline(stack)
        assert failed("pulling") >= ABORTS_PER_STATE
    finally:
        hold.unlink(missing_ok=True)


def test_aborts_in_every_state_of_a_publication(stack, hold, prompts, prompt_maker, text):
    """open: prefill still computes; opening: the arena is full and the prompt waits for room."""
    before = worker(stack, "prefill")["totals"]

    def failed(state):
        return worker(stack, "prefill")["totals"].get(f"failed_{state}", 0) - before.get(f"failed_{state}", 0)

    for i in range(4 * ABORTS_PER_STATE):  # some aborts come too late, between the last chunk and the commit
        if failed("open") >= ABORTS_PER_STATE:
            break
        prompt = prompt_maker.cut(text, 3500, skip=40_000 + 100 * i)  # unseen: takes seconds
        prefill, decode = pair(stack, prompt, max_new_tokens=4)
        # The tier is asked, since the worker answers between chunks only.
        wait_for(lambda: tier(stack)["inventory"]["rooms"] == 1, "the room is open")
        abort(prefill, decode)
        assert_baseline(stack)
    assert failed("open") >= ABORTS_PER_STATE

    flush(stack)
    hold.touch()
    try:
        fillers = [pair(stack, prompts[index], max_new_tokens=4) for index in (7, 6)]  # 313 and 188 of about 670 records
        wait_for(lambda: tier(stack)["inventory"]["leased"] > 495, "the fillers hold their records", 120)
        for i in range(ABORTS_PER_STATE):
            prefill, decode = pair(stack, prompt_maker.cut(text, 3500, skip=50_000 + 100 * i), max_new_tokens=4)
            retries = worker(stack, "prefill")["totals"].get("reserve_retries", 0)
            wait_for(lambda: worker(stack, "prefill")["totals"].get("reserve_retries", 0) > retries, "it waits for room")
            abort(prefill, decode)
            wait_for(lambda: worker(stack, "prefill")["publications"] == 0, "it is gone")
        assert failed("opening") >= ABORTS_PER_STATE
    finally:
        hold.unlink(missing_ok=True)
    for _, decode in fillers:
        assert decode.result().status == 200
    assert_baseline(stack)


def test_two_hundred_requests_a_third_aborted(stack, prompts, goldens, models):
    """Mixed lengths, eight at a time; afterwards everything is as before and answers are still right."""
    assert_baseline(stack)
    chance = random.Random(7)
    expected = goldens.get(models.s4, prompts, matrix.OUTPUT_TOKENS)
    running, aborted, right = [], 0, 0
    for number in range(200):
        index = chance.choice([0, 1, 1, 2, 3])
        posts = pair(stack, prompts[index], max_new_tokens=6)
        running.append((posts, index, number % 3 == 0, time.monotonic() + chance.uniform(0, 0.4)))
        while len(running) >= 8:
            (prefill, decode), index, abort, at = running.pop(0)
            if abort:
                time.sleep(max(0.0, at - time.monotonic()))
                drop(prefill, decode)
                aborted += 1
            else:
                answer = decode.result()
                assert answer.status == 200, answer.text
                assert answer.output_ids == expected[index][:6]
                right += 1
    for (prefill, decode), *_ in running:
        drop(prefill, decode)
        aborted += 1
    assert aborted >= 200 // 3 and right >= 100
    assert_baseline(stack)
    assert generate(stack.url, prompts[3], max_new_tokens=16).output_ids == expected[3][:16]
    assert_baseline(stack)


def test_the_same_room_twice(stack, hold, prompts, goldens, models):
    """The second is refused with a clear error on both nodes; the first completes exactly; the room is free again."""
    expected = goldens.get(models.s4, prompts, matrix.OUTPUT_TOKENS)
    room = next_room()
    flush(stack)  # with all of the prompt there it would read nothing, and be done
    hold.touch()
    try:
        first = pair(stack, prompts[3], room=room, max_new_tokens=8)
        wait_for(lambda: tier(stack)["inventory"]["leases"] == 1, "the first is claimed")
        second = pair(stack, prompts[1], room=room, max_new_tokens=8)
        for post in second:
            answer = post.result(60)
            assert answer.status == 500 and "room" in answer.text and str(room) in answer.text
    finally:
        hold.unlink(missing_ok=True)
    assert first[1].result().output_ids == expected[3][:8]
    assert_baseline(stack)
    assert pair(stack, prompts[1], room=room, max_new_tokens=8)[1].result().output_ids == expected[1][:8]
    assert_baseline(stack)


def test_stock_health_generation_passes(stack):
    """SGLang's own probe requests have no room and no manifest."""
    import urllib.request

    for name in ("prefill", "decode"):
        with urllib.request.urlopen(stack.urls[name] + "/health_generate", timeout=60) as reply:
            assert reply.status == 200
    assert_baseline(stack)
