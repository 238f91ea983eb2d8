"""Decision 31: a sparse decode node attends exactly over the blocks that it names and the tail, nothing else.

Two requests of different lengths in one batch; K and V come from prefill, by true position.
"""

import numpy as np
import pytest
import reference
from reference import PAGE

LENGTHS = (1503, 6000)
"""With and without a partial page at the end of the prompt."""
NEW_TOKENS = 128
BUDGET, SINK, RECENT, TAIL = 256, 16, 32, 48
WORKING = BUDGET // PAGE
PINS = {"sink": SINK // PAGE, "recent": RECENT // PAGE}


@pytest.fixture(scope="module")
def requests(fresh_stack, models, prompt_maker, text, tmp_path_factory):
    folder, hold = tmp_path_factory.mktemp("trace"), tmp_path_factory.mktemp("hold") / "reads"
    prompts = [prompt_maker.cut(text, length, skip=2 * length) for length in LENGTHS]
    options = {"budget_tokens": BUDGET, "sink_tokens": SINK, "recent_tokens": RECENT, "tail_tokens": TAIL, "trace_dir": str(folder),
               "hold_reads_file": str(hold), "hysteresis": 0.25}  # sets that change a lot
    with fresh_stack("oasis", config=options, prefill_flags=("--chunked-prefill-size", "2048")) as stack:
        rooms, answers = reference.ask(stack, prompts, max_new_tokens=NEW_TOKENS, hold=hold)
    assert all(len(set(ids)) >= 20 for ids in answers)
    return reference.load(folder, models.s4, rooms, LENGTHS, NEW_TOKENS - 1)


def test_every_layer_head_and_step_equals_the_reference(requests, record_property):
    worst = max(reference.assert_exact(request) for request in requests)
    record_property("largest_error", worst)
    print(f"largest error {worst:.2g}")


def test_working_sets_are_well_formed(requests):
    for request in requests:
        reference.assert_well_formed(request, most=WORKING, **PINS)


def test_both_requests_share_batches(requests):
    for request in requests:
        assert sum(len(step.rooms) == len(LENGTHS) for step in request.steps) > NEW_TOKENS // 2


def test_heads_hold_different_blocks_and_change_them(requests):
    for request in requests:
        assert reference.heads_differ(request) > len(request.steps) / 2
        swaps = reference.swaps(request)
        assert (swaps.sum(0) > len(request.steps) / 4).all()


def test_generated_blocks_are_folded_leave_and_come_back(requests):
    """They exist on this node only, so what comes back is what was kept."""
    returned = 0
    for request in requests:
        whole = request.prompt // PAGE
        assert request.steps[0].folded == whole and request.steps[-1].folded >= whole + 4
        for block in range(whole, request.steps[-1].folded):
            held = np.array([(step.blocks == block).any(1) for step in request.steps if step.folded > block])  # [steps, S]
            assert held[0].all()
            returned += (held[1:] & ~held[:-1]).sum()
    assert returned > 0


@pytest.mark.parametrize("wrong", ["swapped", "random", "dropped"])
def test_the_checker_sees(requests, wrong):
    for request in requests:
        for step, without in reference.controls(request, np.random.default_rng(1), **PINS, kinds=(wrong,)):
            with pytest.raises(AssertionError, match="from the reference"):
                reference.assert_exact(request, [step], without=without)
