"""A conversation's next turns on a sparse decode node: what it keeps is the very bytes that it attended to before."""

import copy

import numpy as np
import pytest
import reference
from matrix import OUTPUT_TOKENS
from pd import assert_baseline, flush, pair, tier, wait_for, worker
from reference import PAGE

from oasis_sglang.client import generate_on_pair
from prefill_node.query_tap import WINDOW

BUDGET, SINK, RECENT, TAIL = 256, 16, 32, 48
NEW_TOKENS = 128


def ask(stack, prompt, *, new=OUTPUT_TOKENS, rid=None, **extra):
    options = {} if rid is None else {"rid": rid}
    return generate_on_pair(stack.urls["prefill"], stack.urls["decode"], stack.bootstrap_port, prompt, max_new_tokens=new, extra=extra, **options).output_ids


def reuse(stack):
    return worker(stack, "decode")["working_sets"]["reuse"]


def pulled(stack, rid):
    """Bytes by phase, without the manifest."""
    phases = dict(worker(stack, "decode")["requests"][rid]["lifetime_bytes_by_phase"])
    phases.pop("manifest")
    return phases


def sizes(stack):
    layout = worker(stack, "decode")["layout"]
    pieces = layout["num_layers"] * layout["kv_heads"]
    piece = 2 * layout["block_tokens"] * layout["head_dim"] * layout["itemsize"]
    return pieces * piece, pieces * (8 + layout["summary_bytes"]) + 8


# -- attention over what was kept -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def turns(fresh_stack, models, prompt_maker, text, tmp_path_factory):
    """Two turns of a traced conversation, and how many of its tokens decode kept in whole blocks after the first."""
    folder, hold = tmp_path_factory.mktemp("trace"), tmp_path_factory.mktemp("hold") / "reads"
    options = {"budget_tokens": BUDGET, "sink_tokens": SINK, "recent_tokens": RECENT, "tail_tokens": TAIL, "trace_dir": str(folder),
               "hold_reads_file": str(hold)}
    with fresh_stack("oasis", config=options) as stack:
        first = prompt_maker.cut(text, 1503, skip=50_000)
        rooms, [said] = reference.ask(stack, [first], max_new_tokens=NEW_TOKENS, hold=hold)
        second = [*first, *said, *prompt_maker.chat("What else is in it?")]
        more, _ = reference.ask(stack, [second], max_new_tokens=NEW_TOKENS, hold=hold)
        shown = reuse(stack)
    requests = reference.load(folder, models.s4, rooms + more, [len(first), len(second)], NEW_TOKENS - 1, turns=True)
    return requests, (len(first) + NEW_TOKENS - 1) // PAGE * PAGE, shown


def kept(requests, tokens):
    """The second turn with the first one's K and V in its first ``tokens``."""
    before, after = requests
    ours = copy.copy(after)
    ours.keys, ours.values = after.keys.copy(), after.values.copy()
    ours.keys[:, :tokens], ours.values[:, :tokens] = before.keys[:, :tokens], before.values[:, :tokens]
    return ours


def test_the_second_turn_attends_over_the_bytes_of_the_first(turns):
    requests, tokens, shown = turns
    worst = reference.assert_exact(kept(requests, tokens))
    print(f"largest error {worst:.2g}")
    assert shown["hit_tokens"] == tokens and shown["pieces"] > 0


def test_the_checker_sees_whose_bytes_they_are(turns):
    """Prefill has computed the first answer again, over the whole prompt: those are other bytes than decode's own."""
    requests, tokens, _ = turns
    assert not np.array_equal(requests[1].keys[:, requests[0].prompt : tokens], requests[0].keys[:, requests[0].prompt : tokens])
    with pytest.raises(AssertionError, match="from the reference"):
        reference.assert_exact(requests[1])


# -- bytes and answers at a full budget -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(oasis_stack):
    return oasis_stack()


def test_a_full_budget_says_what_one_server_says_and_pulls_what_is_new(full, goldens, models, prompt_maker, text):
    """Six turns. What decode generated is not pulled either."""
    flush(full)
    record, _ = sizes(full)
    prompt, known = prompt_maker.cut(text, 1200, skip=70_000), 0
    for turn in range(6):
        [said] = goldens.get(models.s4, [prompt], OUTPUT_TOKENS)
        before = reuse(full)["hit_tokens"]
        assert ask(full, prompt, rid=f"full-{turn}") == said
        phases = pulled(full, f"full-{turn}")
        new = -(-len(prompt) // PAGE) - known // PAGE
        assert phases["records"] + phases["partial_page"] == new * record and not phases["pieces"]
        assert reuse(full)["hit_tokens"] - before == known // PAGE * PAGE
        known = len(prompt) + OUTPUT_TOKENS - 1
        prompt = [*prompt, *said, *prompt_maker.chat(f"And part {turn}?")]
    assert_baseline(full)


def test_a_flush_forgets(full, prompts, expected):
    assert ask(full, prompts[5]) == expected[5]
    flush(full)
    assert reuse(full)["blocks_cached"] == 0 and worker(full, "decode")["working_sets"]["host_cache"]["used_bytes"] == 0
    record, _ = sizes(full)
    assert ask(full, prompts[5], rid="after a flush") == expected[5]
    assert pulled(full, "after a flush")["records"] == len(prompts[5]) // PAGE * record
    assert_baseline(full)


def test_tenants_share_nothing(full, prompts, expected):
    record, _ = sizes(full)
    flush(full)
    for salt in ("one", "two"):
        assert ask(full, prompts[4], rid=f"salt {salt}", cache_salt=salt) == expected[4]
        assert pulled(full, f"salt {salt}")["records"] == len(prompts[4]) // PAGE * record
    assert ask(full, prompts[4], rid="again", cache_salt="one") == expected[4]
    assert pulled(full, "again")["records"] == 0
    assert_baseline(full)


def test_a_common_start_crosses_the_wire_once_even_when_all_ask_together(full, prompt_maker, text):
    """Four conversations with one system prompt, sent at the same time to an empty decode node."""
    flush(full)
    record, _ = sizes(full)
    system = prompt_maker.cut(text, 1500, skip=90_000)
    prompts = [[*system, *prompt_maker.chat(f"Question {n}: what is it about?")] for n in range(4)]
    posts = [pair(full, prompt, max_new_tokens=8)[1] for prompt in prompts]
    assert [post.result().status for post in posts] == [200] * 4
    rids = [post.rid for post in posts]
    whole = sum(pulled(full, rid)["records"] for rid in rids) // record
    distinct = {tuple(prompt[: end + PAGE]) for prompt in prompts for end in range(0, len(prompt) // PAGE * PAGE, PAGE)}
    assert whole == len(distinct) < len(system) // PAGE + 4 * 4
    assert_baseline(full)


# -- a quarter of the room ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(fresh_stack):
    """Host cache and tier for about a quarter of what the conversations below have; the smallest that one admission fits. Answers go
    to the tier."""
    record = 2 * 4 * 3 * 64 * 4 * PAGE
    with fresh_stack("oasis", config={"budget_tokens": 2048, "host_cache_bytes": 160 * record, "on_miss": "wait", "wait_seconds": 60.0,
                                      "publish_generated": True},
                     arena_bytes=220 * record * 104 // 100, tier_flags=("--accept-generated",), prefill_flags=("--max-total-tokens", "4096"),
                     decode_flags=("--max-total-tokens", "12000")) as stack:
        yield stack


def test_under_pressure_answers_stay_right_and_something_is_still_found(small, goldens, models, prompt_maker, text):
    """Six conversations of four turns, 1,100 to 1,700 tokens, within the budget: answers are exact."""
    talks = [prompt_maker.cut(text, 1100 + 40 * n, skip=2_000 + 15_000 * n) for n in range(6)]
    asked = 0
    for turn in range(4):
        for n, prompt in enumerate(talks):
            [said] = goldens.get(models.s4, [prompt], 32)
            assert ask(small, prompt, new=32) == said, f"conversation {n}, turn {turn}"
            asked += len(prompt)
            talks[n] = [*prompt, *said, *prompt_maker.chat(f"Go on with part {turn}.")]
    shown, cache, found = reuse(small), worker(small, "decode")["working_sets"]["host_cache"], tier(small)["totals"]
    print(f"decode found {shown['hit_tokens']} of {asked} tokens, evicted {cache['evicted']} pieces; the tier found {found['pages_reused']} pages")
    assert cache["evicted"] > 0 and cache["used_bytes"] <= cache["capacity_bytes"]
    assert 0 < shown["bytes_saved"]
    assert_baseline(small)


def test_prefill_copies_back_what_decode_has_said(small, goldens, models, prompt_maker, text):
    """Within the budget an answer's K and V are as good as prefill's own."""
    before = tier(small)["totals"].get("pages_donated", 0)
    first = prompt_maker.cut(text, 1000, skip=60_000)
    [said] = goldens.get(models.s4, [first], OUTPUT_TOKENS)
    assert ask(small, first) == said
    whole = (len(first) + OUTPUT_TOKENS - 1) // PAGE
    wait_for(lambda: tier(small)["totals"].get("pages_donated", 0) - before == whole - len(first) // PAGE, "the tier has the answer")
    flush(small, "prefill")
    second = [*first, *said, *prompt_maker.chat("What else is there in it, and where does it say so? Name the places, please, and quote them.")]
    [expected] = goldens.get(models.s4, [second], OUTPUT_TOKENS)
    restored, pages = worker(small, "prefill")["restore"].get("restored_tokens", 0), worker(small, "prefill")["totals"]["pages_published"]
    assert ask(small, second) == expected
    assert worker(small, "prefill")["restore"]["restored_tokens"] - restored == min(whole, (len(second) - WINDOW) // PAGE) * PAGE > len(first)
    assert worker(small, "prefill")["totals"]["pages_published"] - pages == -(-len(second) // PAGE) - whole
    assert_baseline(small)
