"""Requests with working sets that end early, step aside, are retracted, or lose their tier."""


import matrix
import pytest
from pd import assert_baseline, flush, pair, wait_for, worker

from oasis_sglang.processes import Processes
from oasis_sglang.stack import Stack, StackSpec, import_environment

ABORTS_PER_STATE = 5
BUDGET, TAIL = 512, 64


@pytest.fixture(scope="module")
def hold(tmp_path_factory):
    """While this file exists decode starts no read."""
    return tmp_path_factory.mktemp("hold") / "reads"


@pytest.fixture(scope="module")
def stack(oasis_stack, hold):
    """Pages for three selecting requests, and too few for a fourth."""
    return oasis_stack(config={"budget_tokens": BUDGET, "tail_tokens": TAIL, "hold_reads_file": str(hold), "wait_seconds": 60.0},
                       prefill_flags=("--max-total-tokens", "20000"), decode_flags=("--max-total-tokens", str(3 * (BUDGET + TAIL) + 160)))


def sets(stack):
    return worker(stack, "decode")["working_sets"]


def selecting(stack, prompts, *, new=400, wait=False):
    return pair(stack, prompts[6], max_new_tokens=new, oasis={"on_miss": "wait"} if wait else None)[1]


def stepped_aside(stack, hold, prompts, *, new=400):
    """A request that runs, and then waits for pieces that no other has left here: reads are held back from here on."""
    steps, waits = (sets(stack)["steps"].get(name, 0) for name in ("steps", "waits"))
    post = selecting(stack, prompts, new=new, wait=True)
    wait_for(lambda: sets(stack)["steps"].get("steps", 0) > steps, "it runs")
    hold.touch()
    wait_for(lambda: sets(stack)["steps"].get("waits", 0) > waits, "it waits for its misses")
    return post


def test_aborts_while_waiting_for_pages_pulling_running_and_stepping_aside(stack, hold, prompts):
    for _ in range(ABORTS_PER_STATE):
        hold.touch()
        try:
            posts = [selecting(stack, prompts) for _ in "1234"]
            wait_for(lambda: sets(stack)["held"]["sets"] == 3 and sets(stack)["held"]["waiting"] == 1, "three are pulled, one waits for pages", 120)
            posts[3].abort()
            wait_for(lambda: sets(stack)["held"]["waiting"] == 0, "the one that waited is gone")
            posts[2].abort()
            wait_for(lambda: sets(stack)["held"]["sets"] == 2, "the one that was pulled is gone")
        finally:
            hold.unlink(missing_ok=True)
        before = sets(stack)["steps"].get("steps", 0)
        wait_for(lambda: sets(stack)["steps"].get("steps", 0) > before, "the others run")
        posts[1].abort()
        wait_for(lambda: sets(stack)["held"]["sets"] == 1, "one that ran is gone")
        posts[0].abort()
        assert_baseline(stack)

        flush(stack)
        waiting = stepped_aside(stack, hold, prompts)
        try:
            waiting.abort()
            wait_for(lambda: sets(stack)["held"]["sets"] == 0, "one that had stepped aside is gone")
        finally:
            hold.unlink(missing_ok=True)
        assert_baseline(stack)


def test_a_request_that_waits_holds_up_nobody(stack, hold, prompts, expected):
    """Reads are held: the one that needs pieces stands still, the one whose blocks are all here answers to its end."""
    flush(stack)
    fits = pair(stack, prompts[2], max_new_tokens=250)[1]
    wait_for(lambda: sets(stack)["live"] == 1 and worker(stack, "decode")["pulls"] == 0, "it is admitted")
    waiting = stepped_aside(stack, hold, prompts, new=64)
    try:
        assert fits.result(120).output_ids[: matrix.OUTPUT_TOKENS] == expected[2]
        assert not waiting.answer.done(), "it still waits"
    finally:
        hold.unlink(missing_ok=True)
    assert len(waiting.result(120).output_ids) == 64
    assert_baseline(stack)


def test_the_bound_of_a_wait_ends_it(fresh_stack, tmp_path, prompts):
    hold = tmp_path / "reads"
    with fresh_stack("oasis", config={"budget_tokens": BUDGET, "hold_reads_file": str(hold), "wait_seconds": 0.2, "on_miss": "wait"}) as stack:
        post = pair(stack, prompts[6], max_new_tokens=24)[1]
        wait_for(lambda: sets(stack)["steps"].get("steps", 0) > 0, "it runs")
        hold.touch()
        assert len(post.result(120).output_ids) == 24, "without its blocks, but to the end"
        assert sets(stack)["steps"]["waits_ended_by_bound"] > 0
        hold.unlink()
        assert_baseline(stack)


def dropped_while_parked(stack, prompts):
    """Clients leave as soon as one of their requests is seen retracted. False: none was, the parked state is short and looked for from outside."""
    posts = [pair(stack, prompts[i], max_new_tokens=400)[1] for i in (7, 6, 3)]
    parked = False
    while not parked and not all(post.answer.done() for post in posts):
        parked = sets(stack)["held"]["parked_pages"] > 0
    for post in posts:
        post.abort()
    return parked


def test_retracted_requests_go_on_where_they_were(models, stacks, prompts, expected, tmp_path):
    """Every third step SGLang retracts a request and resumes it; nothing is lost, wherever its blocks are."""
    stacks.stop()
    # SGLang reads these while it is imported, hence servers of their own.
    env = {**import_environment(), "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}
    # Without a limit on pulls what a request attends to does not depend on what others have left here.
    spec = StackSpec("oasis", models.s4, config={"budget_tokens": 1024, "on_miss": "wait", "wait_seconds": 60.0, "fetch_blocks_per_step": 0})
    with Processes(log=tmp_path / "zygote.log", env=env) as processes, Stack(spec, processes, run_dir=tmp_path / "run") as stack:
        posts = [pair(stack, prompts[i], max_new_tokens=matrix.OUTPUT_TOKENS, oasis={"mode": "exact"} if i > 3 else None)[1] for i in (1, 3, 4, 5)]
        assert [post.result(240).output_ids for post in posts] == [expected[i] for i in (1, 3, 4, 5)]
        assert_baseline(stack)
        alone = pair(stack, prompts[7], max_new_tokens=40)[1].result(240).output_ids  # a single request is never retracted
        posts = [pair(stack, prompts[i], max_new_tokens=40)[1] for i in (7, 6, 7)]
        answers = [post.result(240).output_ids for post in posts]
        assert answers[0] == answers[2] == alone, "its working set came back as it was"
        assert any([dropped_while_parked(stack, prompts) for _ in range(4)]), "one was retracted when its client left"
        assert_baseline(stack)
    log = (tmp_path / "run" / "decode.log").read_text(errors="replace")
    assert log.count("#retracted_reqs: ") >= 10
