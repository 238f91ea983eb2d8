"""Speculation on a decode node with working sets, and critical heads: real servers, the 4-layer model.

With every head critical, attention is exact at any budget, though the working sets hold a fraction of the prompt: whatever is
wrong with the lane, the compact rows or the drafts' pages changes a token.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import matrix
import pytest
from pd import assert_baseline, flush, pair, wait_for, worker
from test_speculation import OASIS_NGRAM, accept_length

from oasis_sglang.client import generate, generate_concurrently
from oasis_sglang.fingerprint import profile_fingerprint
from oasis_sglang.selection.profile import VERSION, Profile

LAYERS, KV_HEADS, PAGE, BUDGET = 4, 3, 16, 512
EVERY = tuple((layer, head) for layer in range(LAYERS) for head in range(KV_HEADS))
SOME = ((1, 2), (3, 0))


@pytest.fixture(scope="module")
def profiles(models, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("profiles")
    kl = tuple((0.0,) * KV_HEADS for _ in range(LAYERS))
    for name, heads in (("every", EVERY), ("some", SOME)):
        Profile(VERSION, profile_fingerprint(str(models.s4)), LAYERS, KV_HEADS, heads, kl, {}).save(folder / f"{name}.json")
    return {name: folder / f"{name}.json" for name in ("every", "some")}


@pytest.fixture(scope="module")
def stack(oasis_stack, profiles):
    """Every head is critical. In its pool a prompt of 7,500 tokens fits as well."""
    return oasis_stack(config={"budget_tokens": BUDGET, "profile": str(profiles["every"])}, max_running_requests=8,
                       prefill_flags=("--max-total-tokens", "20000"), decode_flags=(*OASIS_NGRAM, "--max-total-tokens", "16000"))


def test_with_drafts_answers_over_all_blocks_are_the_same(stack, prompts, expected):
    """``mode: exact``: each request holds all its pages, in the compact rows."""
    for i in (2, 5, 8):
        _, decode = pair(stack, prompts[i], max_new_tokens=matrix.OUTPUT_TOKENS, oasis={"mode": "exact"})
        assert decode.result().output_ids == expected[i]
    assert_baseline(stack)


def test_with_every_head_critical_answers_are_exact_at_any_budget(stack, prompts, expected):
    flush(stack)
    before = worker(stack, "decode")
    answers = [generate(stack.url, prompts[i], max_new_tokens=matrix.OUTPUT_TOKENS, rid=f"critical-{i}").output_ids for i in (3, 5, 6, 8)]
    assert answers == [expected[i] for i in (3, 5, 6, 8)]
    at_once = generate_concurrently(stack.url, [prompts[i] for i in (5, 2, 6, 1, 4)], max_new_tokens=matrix.OUTPUT_TOKENS)
    assert [answer.output_ids for answer in at_once] == [expected[i] for i in (5, 2, 6, 1, 4)]
    after = worker(stack, "decode")
    lane = after["working_sets"]["lane"]
    assert lane["heads"] == len(EVERY) and lane["peak_tokens"] > 7500 and after["working_sets"]["physical_tokens_peak"] <= 16_000
    report, layout = after["requests"]["critical-8"], after["layout"]
    piece = 2 * PAGE * layout["head_dim"] * layout["itemsize"]
    assert report["admitted_bytes_by_phase"]["pieces"] == len(prompts[8]) // PAGE * len(EVERY) * piece, "critical heads pull the whole prompt"
    assert report["lifetime_bytes_by_phase"]["on_demand"] == 0
    grown = {name: value - before["working_sets"]["steps"].get(name, 0) for name, value in after["working_sets"]["steps"].items()}
    assert grown["drafts_accepted"] > 0 and grown["tokens_accepted"] > grown["verify_steps"] > 0
    assert_baseline(stack)


def test_a_long_answer_outgrows_its_first_room_in_the_lane(stack, prompts):
    """More than the 512 tokens that are promised at admission, and folds all along; the same as without selection."""
    tokens = 700
    _, exact = pair(stack, prompts[1], max_new_tokens=tokens, oasis={"mode": "exact"})
    wanted = exact.result().output_ids
    before = worker(stack, "decode")["working_sets"]["steps"].get("folds", 0)
    _, sparse = pair(stack, prompts[1], max_new_tokens=tokens, oasis={"budget_tokens": 256})
    assert sparse.result().output_ids == wanted
    assert worker(stack, "decode")["working_sets"]["steps"]["folds"] > before + 20
    assert_baseline(stack)


def test_aborts_during_verification_leave_nothing_behind(stack, prompts):
    for _ in range(5):
        _, decode = pair(stack, prompts[5], max_new_tokens=2000)
        wait_for(lambda: worker(stack, "decode")["working_sets"]["lane"]["tokens"] > 0, "it runs", 60)
        decode.abort()
        decode.result()
        assert_baseline(stack)


def test_accepted_drafts_are_kept(stack, prompt_maker):
    assert accept_length(stack.url, prompt_maker.chat("Repeat this line again and again: one two three four five six.\n" * 20)) > 1.3


def test_top_shows_what_runs(stack, prompts):
    def top(*options):
        return subprocess.run([sys.executable, "-P", "-m", "oasis_sglang.cli", "top", *options], capture_output=True, text=True, timeout=60)

    _, decode = pair(stack, prompts[5], max_new_tokens=1500)
    wait_for(lambda: worker(stack, "decode")["working_sets"]["lane"]["tokens"] > 0, "it runs", 60)
    shown = top(stack.urls["decode"], "--once", "--interval", "1")
    decode.abort()
    decode.result()
    assert shown.returncode == 0 and "serving" in shown.stdout and "dense lane" in shown.stdout, shown.stdout + shown.stderr
    derived = json.loads(top(stack.urls["decode"], "--json", "--interval", "0.2").stdout)
    assert derived["total"]["tokens_per_verify"] > 1
    assert top(stack.urls["prefill"], "--once").returncode == 1
    assert_baseline(stack)


def test_some_heads_critical_the_others_select_and_look_ahead(oasis_stack, profiles, prompts):
    """The same answers whether requests come alone or at once, bytes to the byte, and the counters of lookahead move."""
    stack = oasis_stack(config={"budget_tokens": BUDGET, "profile": str(profiles["some"]), "fetch_blocks_per_step": 0, "on_miss": "wait", "wait_seconds": 60.0},
                        max_running_requests=8, prefill_flags=("--max-total-tokens", "20000"),
                        decode_flags=(*OASIS_NGRAM, "--max-total-tokens", "16000", "--disable-overlap-schedule"))
    chosen = [prompts[i] for i in (5, 7, 2, 6)]
    before = worker(stack, "decode")
    alone = [generate(stack.url, prompt, max_new_tokens=48, rid=f"some-{i}").output_ids for i, prompt in enumerate(chosen)]
    after = worker(stack, "decode")
    layout, whole = after["layout"], len(chosen[1]) // PAGE
    piece = 2 * PAGE * layout["head_dim"] * layout["itemsize"]
    expected = piece * (len(SOME) * whole + (len(EVERY) - len(SOME)) * BUDGET // PAGE)
    assert after["requests"]["some-1"]["admitted_bytes_by_phase"]["pieces"] == expected
    landed = after["plane"]["landed_bytes"] - before["plane"]["landed_bytes"]
    reports = [after["requests"][f"some-{i}"] for i in range(4)]
    counted = sum(r["lifetime_bytes"] - r["lifetime_bytes_by_phase"]["manifest"] for r in reports)
    assert counted <= landed < 1.01 * counted, "the data plane's own meter; what was in flight when its request ended belongs to none"
    steps, heads = after["working_sets"]["steps"], after["working_sets"]["heads"]
    assert min(steps[name] for name in ("verify_steps", "drafts_proposed", "drafts_accepted", "lookahead_rows", "fallback_rows", "fetched", "fetched_used")) > 0
    assert after["working_sets"]["stalls"]["count"] > 0 and sum(after["working_sets"]["stalls"]["counts"]) == after["working_sets"]["stalls"]["count"]
    critical = [layer * KV_HEADS + head for layer, head in SOME]
    assert [heads["wanted"][piece] for piece in critical] == [0, 0] and sum(heads["wanted"]) == steps["wanted"] > 0
    at_once = generate_concurrently(stack.url, chosen, max_new_tokens=48)
    assert [answer.output_ids for answer in at_once] == alone
    assert_baseline(stack)


def test_a_profile_of_another_model_is_refused_at_start(processes, tmp_path, models, profiles):
    from test_refusals import ends_with, serve

    raw = json.loads(profiles["some"].read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(raw | {"fingerprint": "0" * 64}))
    server = serve(processes, tmp_path, "decode", "--model-path", str(models.s4), "--host", "127.0.0.1", "--port", "0", "--oasis-profile", str(other))
    ends_with(server, "Oasis option profile=.*fingerprint")
