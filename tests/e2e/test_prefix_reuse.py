"""Prompts that begin like earlier ones, on a pair without working sets: prefill copies back what its pool lost, decode pulls only
what its radix tree does not hold."""

import json
import urllib.request

import pytest
from matrix import OUTPUT_TOKENS
from pd import assert_baseline, flush, pair, tier, wait_for, worker

from oasis_sglang.client import generate_on_pair
from prefill_node.query_tap import WINDOW

PAGE = 16
POOL, CHUNK = 6400, 512
ABORTS = 5


@pytest.fixture(scope="module")
def stack(oasis_stack):
    """Prefill's pool holds the longest prompt here and little beside it."""
    return oasis_stack(config={"mode": "exact"}, prefill_flags=("--max-total-tokens", str(POOL), "--chunked-prefill-size", str(CHUNK)))


def ask(stack, prompt, *, new=OUTPUT_TOKENS, rid=None, **extra):
    options = {} if rid is None else {"rid": rid}
    return generate_on_pair(stack.urls["prefill"], stack.urls["decode"], stack.bootstrap_port, prompt, max_new_tokens=new, extra=extra, **options).output_ids


class Counted:
    """What prefill restored and computed, and what decode pulled and already had, since it was made."""

    def __init__(self, stack):
        self.stack, self.before = stack, self._now(stack)

    @staticmethod
    def _now(stack):
        prefill, decode = worker(stack, "prefill")["restore"], worker(stack, "decode")
        return {**{name: prefill.get(name, 0) for name in ("restores", "restored_tokens", "restored_bytes", "computed_tokens", "restore_failures")},
                **decode["radix"], "landed": decode["plane"]["landed_bytes"]}

    def __getattr__(self, name):
        return self._now(self.stack)[name] - self.before[name]


def restorable(prompt):
    """Whole pages before the tokens whose queries rank the prompt's blocks."""
    return (len(prompt) - WINDOW) // PAGE * PAGE


def record_bytes(stack):
    layout = worker(stack, "decode")["layout"]
    return 2 * layout["num_layers"] * layout["kv_heads"] * layout["head_dim"] * layout["itemsize"] * PAGE


def test_an_evicted_prompt_is_copied_back_and_not_computed(stack, prompts, expected):
    evicted, evicting = 6, 7
    assert ask(stack, prompts[evicted]) == expected[evicted]
    assert ask(stack, prompts[evicting]) == expected[evicting]
    counted = Counted(stack)
    assert ask(stack, prompts[evicted]) == expected[evicted]
    assert counted.restores == 1 and counted.restore_failures == 0
    left = POOL - len(prompts[evicting])
    assert restorable(prompts[evicted]) - left <= counted.restored_tokens <= restorable(prompts[evicted])
    assert counted.restored_bytes == counted.restored_tokens // PAGE * record_bytes(stack)
    assert counted.computed_tokens == len(prompts[evicted]) - restorable(prompts[evicted]) <= WINDOW + PAGE
    assert_baseline(stack)


def test_a_flushed_pool_is_filled_again_and_the_rest_is_computed_in_chunks(stack, prompts, expected):
    longest = prompts[7]
    assert ask(stack, longest) == expected[7]
    flush(stack, "prefill")
    counted = Counted(stack)
    assert ask(stack, longest) == expected[7]
    assert (counted.restored_tokens, counted.computed_tokens) == (restorable(longest), len(longest) - restorable(longest))
    flush(stack, "prefill")
    counted, known = Counted(stack), (len(longest) - 20) // PAGE * PAGE
    extended = [*longest[:-20], *prompts[3]]
    found = ask(stack, extended)
    assert (counted.restored_tokens, counted.computed_tokens) == (known, len(extended) - known) and counted.computed_tokens > CHUNK
    assert ask(stack, extended, cache_salt="another") == found, "computed from its first token it says the same"
    assert counted.computed_tokens == 2 * len(extended) - known
    assert_baseline(stack)


def test_pages_that_were_copied_back_are_leased_again_and_not_published_again(stack, prompts, expected):
    assert ask(stack, prompts[4]) == expected[4]
    flush(stack, "prefill")
    before = worker(stack, "prefill")["totals"]
    assert ask(stack, prompts[4]) == expected[4]
    after = worker(stack, "prefill")["totals"]
    assert after["pages_reused"] - before["pages_reused"] == len(prompts[4]) // PAGE
    assert after["pages_published"] - before["pages_published"] == (len(prompts[4]) % PAGE > 0)


def test_tenants_share_nothing(stack, prompts, expected):
    prompt, pages = prompts[3], -(-len(prompts[3]) // PAGE)
    flush(stack, "decode")
    assert ask(stack, prompt, cache_salt="one") == expected[3]
    flush(stack, "prefill")
    counted = Counted(stack)
    assert ask(stack, prompt, cache_salt="two") == expected[3]
    assert (counted.restored_tokens, counted.computed_tokens) == (0, len(prompt))
    assert (counted.hit_tokens, counted.landed) == (0, pages * record_bytes(stack))
    flush(stack, "prefill")
    counted = Counted(stack)
    assert ask(stack, prompt, cache_salt="one") == expected[3]
    assert counted.restored_tokens == restorable(prompt) and counted.hit_tokens == len(prompt) // PAGE * PAGE
    assert counted.landed == (len(prompt) % PAGE > 0) * record_bytes(stack), "what decode has of this tenant, it does not pull"


def test_a_next_turn_pulls_only_what_is_new(stack, goldens, models, prompt_maker, text):
    """Decode's tree holds the prompt and what was generated from it."""
    first = prompt_maker.cut(text, 1200, skip=30_000)
    [said] = goldens.get(models.s4, [first], OUTPUT_TOKENS)
    second = [*first, *said, *prompt_maker.chat("And then?")]
    [said_again] = goldens.get(models.s4, [second], OUTPUT_TOKENS)
    third = [*second, *said_again, *prompt_maker.chat("Go on.")]
    [last] = goldens.get(models.s4, [third], OUTPUT_TOKENS)
    known = 0
    for turn, answer, rid in ((first, said, "turn-1"), (second, said_again, "turn-2"), (third, last, "turn-3")):
        counted = Counted(stack)
        assert ask(stack, turn, rid=rid) == answer
        held = known // PAGE * PAGE
        new = (-(-len(turn) // PAGE) - held // PAGE) * record_bytes(stack)
        assert (counted.hit_tokens, counted.landed) == (held, new)
        report = worker(stack, "decode")["requests"][rid]
        phases = report["lifetime_bytes_by_phase"]
        assert phases["records"] + phases["partial_page"] == new and report["full_transfer_bytes"] > new or not held
        known = len(turn) + OUTPUT_TOKENS - 1  # nothing was computed from the last token
    assert_baseline(stack)


def test_aborts_while_a_prompt_is_copied_back(stack, prompts, expected):
    assert ask(stack, prompts[7]) == expected[7]
    for wait in range(ABORTS):
        flush(stack, "prefill")
        counted = Counted(stack)
        posts = pair(stack, prompts[7], max_new_tokens=OUTPUT_TOKENS)
        if wait:
            wait_for(lambda: counted.restores == 1, "it is copied back")
        for post in posts:
            post.abort()
        assert_baseline(stack)
    flush(stack, "prefill")
    assert ask(stack, prompts[7]) == expected[7]


def test_metrics_of_restoring(stack, prompts, expected):
    flush(stack, "prefill")
    assert ask(stack, prompts[3]) == expected[3]
    flush(stack, "prefill")
    assert ask(stack, prompts[3]) == expected[3]
    shown = worker(stack, "prefill")["restore"]
    assert shown["restored_tokens"] > 0 and shown["milliseconds"]["restored"] < shown["milliseconds"]["computed"]
    print(json.dumps(shown))

    def exported(name):
        scraped = urllib.request.urlopen(stack.urls["prefill"] + "/metrics", timeout=30).read().decode()
        return [float(line.rpartition(" ")[2]) for line in scraped.splitlines() if line.startswith(f"oasis_prefill_{name}_total")]

    wait_for(lambda: exported("restored_tokens") == [shown["restored_tokens"]], "the push of the second")
    assert exported("computed_tokens") == [shown["computed_tokens"]]
    assert tier(stack)["totals"]["lookup_hits"] > 0
