"""Each model class served: equal to one plain server at full budget, exact attention over what is named at a small one.

Each runs with another summary, and what is named is what that summary would choose.
"""

import itertools

import numpy as np
import pytest
import reference
import tiny_models
from reference import PAGE

from oasis_sglang.client import generate

SUMMARY_OF = {"LlamaForCausalLM": "mean_var_int8", "Qwen2ForCausalLM": "minmax_int8", "Qwen3ForCausalLM": "minmax_int4"}
SINK, RECENT, WORKING = 1, 2, 16
TOKENS = 32
NEW_TOKENS = 64
LENGTHS = (1203, 608)


@pytest.fixture(scope="module", params=SUMMARY_OF)
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def model(architecture, models, tmp_path_factory):
    return tiny_models.write(tmp_path_factory.mktemp("tiny") / architecture, architecture, models.s4)


@pytest.fixture(scope="module")
def cut(prompt_maker, text):
    """New prompts each time it is called: prefill computes nothing again that its radix cache holds."""
    skips = itertools.count(5000, 2000)
    return lambda: [prompt_maker.cut(text, length, skip=next(skips)) for length in LENGTHS]


@pytest.fixture(scope="module")
def prompts(cut):
    return cut()


@pytest.fixture(scope="module")
def expected(goldens, model, prompts):
    return goldens.get(model, prompts, TOKENS)


@pytest.fixture(scope="module")
def folder(architecture, tmp_path_factory):
    return tmp_path_factory.mktemp(f"trace-{architecture}")


@pytest.fixture(scope="module")
def hold(tmp_path_factory):
    return tmp_path_factory.mktemp("hold") / "reads"


@pytest.fixture(scope="module")
def stack(fresh_stack, architecture, model, expected, folder, hold):
    """Its budget holds any request; requests ask for less."""
    options = {"budget_tokens": tiny_models.CONTEXT, "sink_tokens": SINK * PAGE, "recent_tokens": RECENT * PAGE, "tail_tokens": 2 * PAGE,
               "fetch_blocks_per_step": 0, "hysteresis": 0, "wait_seconds": 60.0, "summary": SUMMARY_OF[architecture], "trace_dir": str(folder), "hold_reads_file": str(hold)}
    with fresh_stack("oasis", model=model, config=options, prefill_flags=("--chunked-prefill-size", "512")) as stack:
        yield stack


@pytest.fixture(scope="module")
def small(stack, model, cut, folder, hold):
    """Requests that wait for their misses, so that each step has the blocks that the step before wanted."""
    options = {"budget_tokens": WORKING * PAGE, "on_miss": "wait"}
    rooms, _ = reference.ask(stack, cut(), max_new_tokens=NEW_TOKENS, hold=hold, options=[options] * len(LENGTHS))
    return reference.load(folder, model, rooms, LENGTHS, NEW_TOKENS - 1)


def test_full_budget_answers_like_one_plain_server(stack, prompts, expected):
    assert all(len(set(ids)) >= 10 for ids in expected)
    assert [generate(stack.url, prompt, max_new_tokens=TOKENS).output_ids for prompt in prompts] == expected


def test_small_budget_attends_exactly_over_what_it_names(small, record_property):
    worst = max(reference.assert_exact(request) for request in small)
    record_property("largest_error", worst)
    print(f"largest error {worst:.2g}")
    for request in small:
        reference.assert_well_formed(request, most=WORKING, sink=SINK, recent=RECENT)
        assert reference.heads_differ(request) > len(request.steps) / 2
        assert reference.swaps(request).sum() > 0
        for step, without in reference.controls(request, np.random.default_rng(3), sink=SINK, recent=RECENT, count=10):
            with pytest.raises(AssertionError, match="from the reference"):
                reference.assert_exact(request, [step], without=without)


def test_the_configured_summary_chooses(small, architecture):
    """What it would choose from prefill's K is resident one step later, and another kind would choose otherwise."""
    for request in small:
        share = {kind: reference.followed(request, kind, sink=SINK, recent=RECENT) for kind in SUMMARY_OF.values()}
        print(share)
        assert share.pop(SUMMARY_OF[architecture]) > 0.99  # rounding may decide between two blocks of the same mass
        assert max(share.values()) < 0.9


def test_a_working_set_with_room_grows_first(stack, model, cut, folder, hold):
    """All of the prompt is resident in order; the first sealed block takes a free slot, later ones take another's."""
    whole = [length // PAGE for length in LENGTHS]
    rooms, answers = reference.ask(stack, cut(), max_new_tokens=NEW_TOKENS, hold=hold, options=[{"budget_tokens": (n + 1) * PAGE} for n in whole])
    assert all(len(set(ids)) >= 10 for ids in answers)
    for request, n in zip(reference.load(folder, model, rooms, LENGTHS, NEW_TOKENS - 1), whole):
        reference.assert_exact(request)
        reference.assert_well_formed(request, most=n + 1, sink=SINK, recent=RECENT)
        assert (request.steps[0].blocks == np.arange(n)).all()
        assert {step.working for step in request.steps} == {n, n + 1} and request.steps[-1].folded > n + 1
