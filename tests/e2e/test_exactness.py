"""Decision 29: the whole path answers token for token like stock SGLang PD and like one plain server."""

import json

import pytest
from matrix import OUTPUT_TOKENS
from pd import assert_baseline, flush, tier, wait_for, worker

from oasis_sglang.client import generate, generate_concurrently
from prefill_node.publisher import RANKED_BLOCKS

PAGE = 16


def ask(stack, prompts, **options):
    return [generate(stack.url, prompt, max_new_tokens=OUTPUT_TOKENS, **options).output_ids for prompt in prompts]


def saved_bytes(info):
    """Of pages that decode had already: these prompts begin alike."""
    return info.get("working_sets", {}).get("reuse", {}).get("bytes_saved", 0) + info.get("radix", {}).get("hit_bytes", 0)


def check_bytes(stack, before, after, prompts, page):
    """The data plane's own meter, the counters and arithmetic on the prompts say the same, to the byte."""
    layout = after["layout"]
    record = 2 * layout["num_layers"] * layout["kv_heads"] * layout["head_dim"] * layout["itemsize"] * page
    pages = sum(-(-len(prompt) // page) for prompt in prompts)
    partial = sum(len(prompt) % page != 0 for prompt in prompts)
    delta = {name: after["totals"].get(name, 0) - before["totals"].get(name, 0) for name in ("bytes_records", "bytes_partial_page", "admitted")}
    saved = saved_bytes(after) - saved_bytes(before)
    assert delta == {"bytes_records": (pages - partial) * record - saved, "bytes_partial_page": partial * record, "admitted": len(prompts)}
    assert after["plane"]["landed_bytes"] - before["plane"]["landed_bytes"] == pages * record - saved
    assert saved < pages * record / 10 and saved % record == 0
    assert after["plane"]["requested_bytes"] == after["plane"]["landed_bytes"]


def test_prompts_span_the_range_and_answers_are_varied(prompts, expected):
    assert len(prompts) >= 8 and len(prompts[0]) == 20 and len(prompts[-1]) == 7500
    assert sum(len(set(ids)) >= 20 for ids in expected) * 2 >= len(expected)


def test_stock_pd_answers_like_the_goldens(stock_pd, prompts, expected):
    assert ask(stock_pd(), prompts) == expected


def test_one_by_one_with_exact_byte_counts(oasis_stack, prompts, expected):
    stack = oasis_stack()
    assert worker(stack, "decode")["config"]["mode"] == "sparse", "the whole module runs on working sets that hold any prompt"
    flush(stack)
    before = worker(stack, "decode")
    assert ask(stack, prompts) == expected
    check_bytes(stack, before, worker(stack, "decode"), prompts, PAGE)
    assert_baseline(stack)


def test_each_request_reports_its_own_bytes(oasis_stack, prompts, expected):
    stack = oasis_stack()
    flush(stack)
    answer = generate(stack.url, prompts[3], max_new_tokens=4, rid="counted")
    assert answer.output_ids == expected[3][:4]
    info = worker(stack, "decode")
    report = info["requests"]["counted"]
    layout = info["layout"]
    token = 2 * layout["num_layers"] * layout["kv_heads"] * layout["head_dim"] * layout["itemsize"]
    phases = report["admitted_bytes_by_phase"]
    whole = len(prompts[3]) // PAGE
    assert report["prompt_tokens"] == len(prompts[3])
    assert report["full_transfer_bytes"] == token * len(prompts[3])
    assert (phases["records"], phases["partial_page"]) == (whole * PAGE * token, (len(prompts[3]) % PAGE > 0) * PAGE * token)
    ranking = 4 * layout["num_layers"] * layout["kv_heads"] * min(RANKED_BLOCKS, whole)
    assert ranking < phases["manifest"] < ranking + 64 * whole + 4096
    assert report["admitted_bytes"] == report["lifetime_bytes"] == sum(phases.values())


def test_metrics_of_workers_and_tier_move(oasis_stack, prompts, expected):
    import re
    import urllib.request

    def scrape(url):
        text = urllib.request.urlopen(url + "/metrics", timeout=30).read().decode()
        return {name: float(value) for name, value in re.findall(r"^(oasis_\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)}

    stack = oasis_stack()
    assert ask(stack, prompts[2:3]) == expected[2:3]
    totals = {name: worker(stack, name)["totals"] for name in ("prefill", "decode")}
    wait_for(lambda: scrape(stack.urls["decode"])["oasis_decode_admitted_total"] == totals["decode"]["admitted"], "the push of the second")
    decode, prefill, of_tier = (scrape(stack.urls[name]) for name in ("decode", "prefill", "tier"))
    assert decode["oasis_decode_bytes_records_total"] == totals["decode"]["bytes_records"] > 0
    assert decode["oasis_decode_host_bytes"] == worker(stack, "decode")["host_bytes_reserved"]
    assert prefill["oasis_prefill_rooms_committed_total"] == totals["prefill"]["rooms_committed"] > 0
    assert of_tier["oasis_tier_rooms_committed_total"] == of_tier["oasis_tier_rooms_claimed_total"] >= totals["decode"]["admitted"]
    assert of_tier["oasis_tier_workers"] == 2, "the publisher, and what restores prefixes"


def test_all_at_once(oasis_stack, prompts, expected):
    stack = oasis_stack()
    chosen = [0, 1, 2, 3, 4, 5, 2, 1]
    answers = generate_concurrently(stack.url, [prompts[i] for i in chosen], max_new_tokens=OUTPUT_TOKENS)
    assert [answer.output_ids for answer in answers] == [expected[i] for i in chosen]
    assert_baseline(stack)


def test_repeated_and_growing_prefixes_are_not_copied_again(oasis_stack, goldens, models, prompt_maker, text):
    stack = oasis_stack()
    base = prompt_maker.cut(text, 1000, skip=20_000)
    turns = [base, base + prompt_maker.chat("And then?"), base + prompt_maker.chat("And then? Go on.")]
    expected = goldens.get(models.s4, turns, OUTPUT_TOKENS)
    before = worker(stack, "prefill")["totals"]
    assert ask(stack, turns) == expected
    assert ask(stack, turns[:1]) == expected[:1]
    after = worker(stack, "prefill")["totals"]
    first = -(-len(base) // PAGE)
    shared = len(base) // PAGE
    # Each later prompt has the whole pages of the first already in the tier; the repetition has all but its partial page.
    assert after["pages_reused"] - before["pages_reused"] >= 3 * shared
    fresh = after["pages_published"] - before["pages_published"]
    assert fresh <= first + sum(-(-len(turn) // PAGE) - shared for turn in turns[1:]) + 1


def test_prefixes_stay_in_the_tier_when_prefill_forgot_them(oasis_stack, prompts, expected):
    """Prefill computes again, the tier recognises the pages by content, the answer stays the same."""
    import urllib.request

    stack = oasis_stack()
    assert ask(stack, prompts[2:3]) == expected[2:3]
    urllib.request.urlopen(urllib.request.Request(stack.urls["prefill"] + "/flush_cache", method="POST"), timeout=30).read()
    before, reads = worker(stack, "prefill")["totals"], worker(stack, "decode")["plane"]["landed_bytes"]
    assert ask(stack, prompts[2:3]) == expected[2:3]
    after = worker(stack, "prefill")["totals"]
    assert after["pages_reused"] - before["pages_reused"] == len(prompts[2]) // PAGE
    assert after["pages_published"] - before["pages_published"] == (len(prompts[2]) % PAGE > 0)
    assert worker(stack, "decode")["plane"]["landed_bytes"] > reads, "the partial page"


def test_first_token_logprobs_cross_over(oasis_stack, monolith, prompts):
    """The hand-over row carries what prefill computed beside the first token."""
    import urllib.request

    def logprobs(url):
        request = {"input_ids": prompts[1], "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
                   "return_logprob": True, "top_logprobs_num": 3}
        raw = urllib.request.Request(url + "/generate", json.dumps(request).encode(), {"Content-Type": "application/json"})
        meta = json.load(urllib.request.urlopen(raw, timeout=120))["meta_info"]
        return meta["output_token_logprobs"], meta["output_top_logprobs"]

    ours, top = logprobs(oasis_stack().url)
    theirs, their_top = logprobs(monolith().url)
    assert [entry[1] for entry in ours] == [entry[1] for entry in theirs]
    assert [entry[0] for entry in ours] == pytest.approx([entry[0] for entry in theirs], abs=1e-4)
    assert [[t[1] for t in row] for row in top] == [[t[1] for t in row] for row in their_top]


def test_openai_endpoint_streams_and_does_not(oasis_stack):
    import urllib.request

    url = oasis_stack().url
    request = {"model": "any", "messages": [{"role": "user", "content": "Name two colours."}], "max_tokens": 12, "temperature": 0}

    def post(body):
        raw = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        return urllib.request.urlopen(raw, timeout=120).read().decode()

    whole = json.loads(post(request))["choices"][0]["message"]["content"]
    lines = [line[6:] for line in post({**request, "stream": True}).splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    parts = [choice["delta"].get("content") or "" for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert len(whole) > 0 and "".join(parts) == whole


def test_over_tcp(oasis_stack, prompts, expected):
    """Without shared-memory short cuts, as between two hosts."""
    stack = oasis_stack(env={"UCX_TLS": "tcp"})
    before = worker(stack, "decode")
    assert ask(stack, prompts) == expected
    check_bytes(stack, before, worker(stack, "decode"), prompts, PAGE)


def test_over_zeromq(oasis_stack, prompts, expected):
    stack = oasis_stack(data_plane="zmq", config={"data_plane": "zmq"})
    before = worker(stack, "decode")
    assert ask(stack, prompts) == expected
    check_bytes(stack, before, worker(stack, "decode"), prompts, PAGE)
    assert worker(stack, "decode")["plane"]["kind"] == "zmq"


def test_page_size_one(oasis_stack, prompts, expected):
    stack = oasis_stack(flags=("--page-size", "1"), config={"mode": "exact"})
    before = worker(stack, "decode")
    assert ask(stack, prompts) == expected
    check_bytes(stack, before, worker(stack, "decode"), prompts, 1)
    assert tier(stack)["totals"]["pages_reused"] > 0


def test_without_working_sets(oasis_stack, prompts, expected):
    """mode=exact: SGLang's own KV pool, every page of the prompt in it."""
    stack = oasis_stack(config={"mode": "exact"})
    before = worker(stack, "decode")
    assert ask(stack, prompts[2:7]) == expected[2:7]
    check_bytes(stack, before, worker(stack, "decode"), prompts[2:7], PAGE)
    assert "working_sets" not in worker(stack, "decode")
    assert_baseline(stack)


def test_the_whole_model_once(oasis_stack, goldens, models, prompts):
    chosen = [prompts[1], prompts[4]]
    expected = goldens.get(models.s30, chosen, OUTPUT_TOKENS)
    stack = oasis_stack(model=models.s30)
    assert ask(stack, chosen) == expected
    assert worker(stack, "decode")["plane"]["landed_bytes"] > 0
