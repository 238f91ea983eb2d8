"""docs/routing.md for real: SGLang's router brings every turn of a conversation to the decode node that has its blocks."""

import json
import sys
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from pd import assert_baseline, flush, wait_for, worker

from oasis_sglang.stack import free_port, probe

PAGE = 16
NODES = ("decode", "decode1")
CONVERSATIONS, TURNS, NEW_TOKENS = 6, 3, 24
RECIPE = ("--prefill-policy", "manual", "--decode-policy", "manual", "--assignment-mode", "min_load")


@pytest.fixture(scope="module")
def stack(oasis_stack):
    return oasis_stack(decodes=len(NODES))


@contextmanager
def router(processes, stack, folder, *flags):
    """One more router over the workers of ``stack``, with ``flags``; gives its URL and its log."""
    port = free_port()
    argv = [sys.executable, "-P", "-m", "oasis_sglang.router", "--pd-disaggregation", "--prefill", stack.urls["prefill"], str(stack.bootstrap_port)]
    argv += [word for name in NODES for word in ("--decode", stack.urls[name])]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1", *flags]
    server = processes.run(argv, log=folder / "router.log", env={}, name="router")
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: server.poll() is not None or probe(url + "/readiness"), "the router is ready")
        assert server.poll() is None, server.tail()
        yield url, server.log
    finally:
        server.stop()


@pytest.fixture(scope="module")
def recipe(processes, stack, tmp_path_factory):
    with router(processes, stack, tmp_path_factory.mktemp("recipe"), *RECIPE) as (url, _):
        yield url


def post(url, body, key=None):
    headers = {"Content-Type": "application/json", **({"X-SMG-Routing-Key": key} if key else {})}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120) as reply:
        return json.load(reply)


class Chat:
    """A conversation at the OpenAI endpoint. What was said is tokenised anew with every turn."""

    exact = False

    def __init__(self, maker, system, text):
        self.messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]

    def ask(self, url, key):
        answer = post(url + "/v1/chat/completions", {"model": "any", "messages": self.messages, "max_tokens": NEW_TOKENS, "temperature": 0}, key)
        self.messages += [answer["choices"][0]["message"], {"role": "user", "content": "And what comes after that?"}]
        return answer["id"]


class Ids:
    """A conversation in token ids: all that decode generated, but for the last token, is part of the next turn."""

    exact = True

    def __init__(self, maker, system, text):
        self.maker, self.ids = maker, [*maker.encode(system), *maker.chat(text)]

    def ask(self, url, key):
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        answer = post(url + "/generate", {"input_ids": self.ids, "sampling_params": sampling}, key)
        self.ids = [*self.ids, *answer["output_ids"], *self.maker.chat("And what comes after that?")]
        return answer["meta_info"]["id"]


def served(stack, rid):
    """(node, its report) of a request that exactly one decode node has served."""
    [found] = [(name, report) for name in NODES if (report := worker(stack, name)["requests"].get(rid))]
    return found


def hit_tokens(stack):
    return {name: worker(stack, name)["working_sets"]["reuse"]["hit_tokens"] for name in NODES}


def record_bytes(stack):
    layout = worker(stack, "decode")["layout"]
    return 2 * layout["num_layers"] * layout["kv_heads"] * layout["head_dim"] * layout["itemsize"] * PAGE


@pytest.mark.parametrize("kind", [Chat, Ids])
def test_with_a_routing_key_each_turn_finds_what_the_last_one_left(stack, recipe, kind, prompt_maker, text):
    """All conversations begin with one system prompt and take their turns at the same time."""
    for name in NODES:
        flush(stack, name)
    record = record_bytes(stack)
    talks = [kind(prompt_maker, text[:1500], text[20_000 * (n + 1) :][:900]) for n in range(CONVERSATIONS)]
    home, known = {}, {}
    for turn in range(TURNS):
        before, hits = hit_tokens(stack), Counter(dict.fromkeys(NODES, 0))
        with ThreadPoolExecutor(CONVERSATIONS) as pool:
            rids = list(pool.map(lambda n: talks[n].ask(recipe, f"{kind.__name__} {n}"), range(CONVERSATIONS)))
        for n, rid in enumerate(rids):
            node, report = served(stack, rid)
            prompt, phases = report["prompt_tokens"], report["lifetime_bytes_by_phase"]
            pulled = phases["records"] + phases["partial_page"]
            here = -(-prompt // PAGE) * PAGE - pulled // record * PAGE
            assert pulled % record == 0 and phases["pieces"] == phases["on_demand"] == 0, "a full budget: whole blocks"
            if turn:
                assert node == home[n], f"conversation {n}, turn {turn}"
                assert known[n] // PAGE * PAGE <= here < prompt
                assert not kind.exact or here == known[n] // PAGE * PAGE
            home[n], known[n] = node, prompt + (NEW_TOKENS - 1 if kind.exact else 0)
            hits[node] += here
        if turn:
            assert {name: tokens - before[name] for name, tokens in hit_tokens(stack).items()} == hits
    assert set(Counter(home.values()).values()) == {CONVERSATIONS // len(NODES)}, "new conversations went where fewer were running"
    assert_baseline(stack)


def test_a_key_stays_with_its_node_however_busy_that_is(stack, recipe, prompt_maker):
    """Another key that comes meanwhile gets the other node."""
    ids, sampling = prompt_maker.chat("Tell a long story."), {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        long = [pool.submit(post, recipe + "/generate", {"input_ids": ids, "sampling_params": sampling, "rid": f"long-{n}"}, "busy") for n in range(2)]
        try:
            wait_for(lambda: any(worker(stack, name)["kv_pool_tokens"] > 0 for name in NODES), "it runs")
            [node] = [name for name in NODES if worker(stack, name)["kv_pool_tokens"] > 0]
            for n in range(4):
                assert served(stack, Ids(prompt_maker, "", f"Question {n}").ask(recipe, "busy"))[0] == node
            assert served(stack, Ids(prompt_maker, "", "Another question").ask(recipe, "idle"))[0] != node
            assert not any(answer.done() for answer in long)
        finally:
            for name in NODES:
                abort = urllib.request.Request(stack.urls[name] + "/abort_request", b'{"abort_all": true}', {"Content-Type": "application/json"})
                urllib.request.urlopen(abort, timeout=60).read()
    assert_baseline(stack)


@pytest.mark.parametrize("flags", [("--prefill-policy", "cache_aware", "--decode-policy", "cache_aware"), ("--policy", "cache_aware")])
def test_the_cache_aware_policy_of_this_router_has_no_tree_for_decode_nodes(processes, stack, tmp_path, prompt_maker, text, flags):
    """Why the recipe is another: with prefill and decode nodes it chooses at random. Fails with a router that does better."""
    with router(processes, stack, tmp_path, *flags, "--log-level", "debug") as (url, log):
        Chat(prompt_maker, text[:1500], text[20_000:][:900]).ask(url, None)
        wait_for(lambda: log.read_text(errors="replace").count("No tree found for model") == 2, "said for prefill and for decode")
