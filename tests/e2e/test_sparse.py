"""A decode node that admits selected blocks: bytes, what fits, options of a request, capacity, long answers."""

import matrix
import pytest
from pd import assert_baseline, flush, pair, wait_for, worker

from oasis_sglang.client import generate, generate_concurrently
from oasis_sglang.metrics import WORKING_SETS
from prefill_node.publisher import RANKED_BLOCKS

PAGE, BUDGET, TAIL = 16, 1024, 256


@pytest.fixture(scope="module")
def stack(oasis_stack):
    """Decode holds 12,000 tokens: in stock SGLang that is one prompt of 6,000 and what is kept free for it."""
    return oasis_stack(config={"budget_tokens": BUDGET, "tail_tokens": TAIL, "wait_seconds": 60.0}, max_running_requests=8,
                       prefill_flags=("--max-total-tokens", "20000"), decode_flags=("--max-total-tokens", "12000"))


@pytest.fixture(scope="module")
def long_prompt(prompt_maker, text):
    return prompt_maker.cut(text, 6007, skip=9000)


def sizes(info):
    layout = info["layout"]
    pieces = layout["num_layers"] * layout["kv_heads"]
    piece = 2 * layout["block_tokens"] * layout["head_dim"] * layout["itemsize"]
    return pieces, piece, pieces * (8 + layout["summary_bytes"]) + 8


def test_admission_pulls_a_quarter_at_most_and_a_life_never_more_than_everything(stack, long_prompt):
    flush(stack)
    before = worker(stack, "decode")
    generate(stack.url, long_prompt, max_new_tokens=64, rid="counted")
    after = worker(stack, "decode")
    pieces, piece, index = sizes(after)
    report = after["requests"]["counted"]
    phases, whole, working = report["admitted_bytes_by_phase"], len(long_prompt) // PAGE, BUDGET // PAGE
    assert phases == {"summaries": whole * index, "pieces": working * pieces * piece, "partial_page": pieces * piece, "records": 0,
                      "on_demand": 0, "manifest": phases["manifest"]}
    ranking = 4 * pieces * min(RANKED_BLOCKS, whole)
    assert ranking < phases["manifest"] < ranking + 64 * whole + 4096
    assert report["admitted_bytes"] == sum(phases.values()) <= 0.25 * report["full_transfer_bytes"]
    on_demand = report["lifetime_bytes_by_phase"]["on_demand"]
    assert on_demand > 0 and on_demand % piece == 0
    assert report["lifetime_bytes"] == report["admitted_bytes"] + on_demand
    assert report["lifetime_bytes"] <= report["full_transfer_bytes"] + pieces * piece + whole * index + phases["manifest"]
    landed = after["plane"]["landed_bytes"] - before["plane"]["landed_bytes"]
    assert landed == report["lifetime_bytes"] - phases["manifest"], "the data plane's own meter"
    assert after["working_sets"]["host_cache"]["evicted"] == 0
    assert_baseline(stack)


def test_prompts_that_fit_are_exact_also_among_those_that_do_not(stack, prompts, expected, long_prompt):
    chosen = [0, 1, 2, 3]
    assert all(len(prompts[i]) + matrix.OUTPUT_TOKENS <= BUDGET + TAIL for i in chosen)
    assert [generate(stack.url, prompts[i], max_new_tokens=matrix.OUTPUT_TOKENS).output_ids for i in chosen] == [expected[i] for i in chosen]
    mixed = generate_concurrently(stack.url, [long_prompt, *(prompts[i] for i in chosen), long_prompt[:3000]], max_new_tokens=matrix.OUTPUT_TOKENS)
    assert [answer.output_ids for answer in mixed[1:-1]] == [expected[i] for i in chosen]
    assert_baseline(stack)


def test_a_selecting_answer_is_the_same_alone_and_in_a_batch(stack, long_prompt, prompts):
    """With waiting nothing depends on when a piece lands. What is on the node before does count: it is not pulled, so that
    ``fetch_blocks_per_step`` does not hold it back."""
    def ask(prompt):
        return pair(stack, prompt, max_new_tokens=48, oasis={"on_miss": "wait"})[1]

    alone = []
    for prompt in (long_prompt, prompts[6], prompts[7]):
        flush(stack)
        alone.append(ask(prompt).result(120).output_ids)
    assert all(len(set(ids)) > 5 for ids in alone)
    flush(stack)
    together = [ask(prompt) for prompt in (long_prompt, prompts[6], prompts[7])]
    assert [post.result(240).output_ids for post in together] == alone
    assert_baseline(stack)


def test_a_request_may_ask_for_all_blocks(stack, prompts, expected):
    for index in (5, 7):
        _, decode = pair(stack, prompts[index], max_new_tokens=matrix.OUTPUT_TOKENS, oasis={"mode": "exact"})
        assert decode.result(120).output_ids == expected[index]
    sparse = generate(stack.url, prompts[7], max_new_tokens=matrix.OUTPUT_TOKENS).output_ids
    assert sparse != expected[7], "a sixth of the prompt answers differently: the equalities above mean something"
    assert_baseline(stack)


def test_a_smaller_budget_holds_fewer_pages(stack, prompts):
    def held(oasis):
        _, decode = pair(stack, prompts[7], max_new_tokens=300, oasis=oasis)
        wait_for(lambda: worker(stack, "decode")["working_sets"]["live"] == 1, "it has its pages")
        tokens = worker(stack, "decode")["kv_pool_tokens"]
        decode.abort()
        assert_baseline(stack)
        return tokens

    assert held({}) == BUDGET + TAIL
    assert held({"budget_tokens": 256}) == 256 + TAIL


@pytest.mark.parametrize("oasis, names", [({"budget_tokens": 4096}, "budget_tokens"), ({"mode": "dense"}, "mode"), ({"blocks": 3}, "custom_params.oasis")])
def test_what_a_request_cannot_have_is_refused_by_name(stack, prompts, oasis, names):
    answer = pair(stack, prompts[1], oasis=oasis)[1].result(60)
    assert answer.status >= 400 and "ConfigError" in answer.text and names in answer.text
    assert_baseline(stack)


def test_requests_wait_for_pages_in_the_order_of_arrival(stack, prompts, expected):
    first, second = (pair(stack, prompts[8], max_new_tokens=200, oasis={"mode": "exact"})[1] for _ in range(2))
    wait_for(lambda: worker(stack, "decode")["working_sets"]["held"]["waiting"] == 1, "the second waits for the first")
    third = pair(stack, prompts[1], max_new_tokens=8)[1]  # would fit now, but is not before its turn
    assert first.result(120).output_ids[: matrix.OUTPUT_TOKENS] == expected[8]
    assert second.result(120).output_ids[: matrix.OUTPUT_TOKENS] == expected[8]
    assert third.result(60).output_ids == expected[1][:8]
    assert_baseline(stack)


def test_six_long_requests_run_where_stock_holds_one(stack, prompt_maker, text):
    prompts = [prompt_maker.cut(text, 6000, skip=9000, question=f"Say something about part {n} of the text.") for n in range(8)]
    answers = generate_concurrently(stack.url, prompts, max_new_tokens=256)
    assert all(len(answer.output_ids) == 256 for answer in answers)
    sets = worker(stack, "decode")["working_sets"]
    assert sets["batch_peak"] >= 6
    assert sets["physical_tokens_peak"] <= 12_000
    assert_baseline(stack)


def test_a_long_answer_stays_in_its_pages(stack, models, prompts):
    """1,200 tokens from a short prompt through a budget of 512: what leaves the pool stays in the host cache."""
    before = worker(stack, "decode")["working_sets"]["steps"].get("folds", 0)
    prompt, new = prompts[1], 1200
    _, decode = pair(stack, prompt, max_new_tokens=new, oasis={"budget_tokens": 512})
    pool, pinned = set(), 0
    while not decode.answer.done():
        info = worker(stack, "decode")
        pool.add(info["kv_pool_tokens"])
        pinned = max(pinned, info["working_sets"]["host_cache"]["pinned_bytes"])
    assert len(decode.result().output_ids) == new
    assert max(pool) == 512 + TAIL
    folds = worker(stack, "decode")["working_sets"]["steps"]["folds"] - before
    blocks = -(-(len(prompt) + new) // PAGE)
    assert blocks - TAIL // PAGE - len(prompt) // PAGE - 1 <= folds <= blocks - len(prompt) // PAGE
    pieces, piece, _ = sizes(worker(stack, "decode"))
    assert 0 < pinned <= folds * pieces * piece
    assert_baseline(stack)


def test_the_counters_of_working_sets_move(stack, prompts):
    import re
    import urllib.request

    for _ in range(2):  # the second finds what the first has left
        assert pair(stack, prompts[7], max_new_tokens=16)[1].result(60).status == 200
    assert pair(stack, prompts[1], max_new_tokens=600, oasis={"budget_tokens": 256})[1].result(120).status == 200
    counted = worker(stack, "decode")
    sets, kept = counted["working_sets"], counted["working_sets"]["reuse"]
    totals = {**counted["totals"], **sets["steps"], **{f"reuse_{name}": value for name, value in kept.items()},
              "cache_evicted": sets["host_cache"]["evicted"], "blocks_evicted": kept["blocks_evicted"]}
    elsewhere = {"waits", "waits_ended_by_bound", "plans_stale", "swaps_late"}  # test_sparse_lifecycle.py and chance
    drafts = {"verify_steps", "drafts_proposed", "drafts_accepted", "tokens_accepted", "lookahead_rows", "trust_wait_microseconds"}  # test_speculation.py
    donated = {"blocks_donated", "bytes_donated", "blocks_not_donated", "reuse_blocks_not_offered"}  # tests/unit/test_donation.py
    crowded = {"cache_evicted", "blocks_evicted"}  # test_sparse_reuse.py
    assert {name for name in WORKING_SETS if not totals.get(name)} <= elsewhere | drafts | donated | crowded | {"fetched_wasted"}

    def scraped():
        text = urllib.request.urlopen(stack.urls["decode"] + "/metrics", timeout=30).read().decode()
        found = dict(re.findall(r"^oasis_decode_(\w+)_total(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE))
        return {name: float(found[name]) for name in WORKING_SETS}

    wait_for(lambda: scraped() == {name: totals.get(name, 0) for name in WORKING_SETS}, "the push of the second")


def test_full_admission_fills_the_host_cache_before_the_first_step(oasis_stack, long_prompt, stack):
    flush(stack)
    selected = generate(stack.url, long_prompt, max_new_tokens=32, rid="selected")
    admitted = worker(stack, "decode")["requests"]["selected"]["admitted_bytes"]  # now: another stack may take its place
    full_stack = oasis_stack(config={"budget_tokens": BUDGET, "admission": "full"}, max_running_requests=8,
                             prefill_flags=("--max-total-tokens", "20000"), decode_flags=("--max-total-tokens", "12000"))
    full = generate(full_stack.url, long_prompt, max_new_tokens=32, rid="full")
    assert len(full.output_ids) == len(selected.output_ids) == 32
    info = worker(full_stack, "decode")
    report = info["requests"]["full"]
    pieces, piece, _ = sizes(info)
    assert report["admitted_bytes_by_phase"]["pieces"] == len(long_prompt) // PAGE * pieces * piece
    assert report["lifetime_bytes_by_phase"]["on_demand"] == 0
    assert info["working_sets"]["host_cache"]["peak_bytes"] >= len(long_prompt) // PAGE * pieces * piece
    assert admitted < 0.3 * report["admitted_bytes"]
    assert_baseline(full_stack)


def test_a_host_cache_smaller_than_one_admission_is_refused_at_start(processes, models, tmp_path):
    from test_refusals import ends_with, serve

    server = serve(processes, tmp_path, "decode", "--model-path", str(models.s4), "--oasis-host-cache-bytes", "1MiB")
    ends_with(server, r"host_cache_bytes=1048576 is smaller than one admission")


@pytest.mark.parametrize("flags, says", [
    (("--page-size", "1"), "needs --page-size 16, 32, 64, not 1"),
    (("--oasis-budget-tokens", "64"), "budget_tokens=64 leaves nothing to select"),
    (("--oasis-summary", "none"), "mode=sparse needs block summaries")])
def test_what_makes_no_working_set_is_refused_at_start(processes, models, tmp_path, flags, says):
    from test_refusals import ends_with, serve

    from transport.errors import ConfigError

    try:
        server = serve(processes, tmp_path, "decode", "--model-path", str(models.s4), *flags)
    except ConfigError as error:
        assert says in str(error)
        return
    ends_with(server, says)

