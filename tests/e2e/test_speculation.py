"""Speculation on a real pair and on a plain server: answers are those of plain decoding, token for token, in fewer steps."""

import json
import shutil
import urllib.request

import matrix
import pytest
from pd import assert_baseline

from oasis_sglang.client import generate, generate_concurrently

OASIS_NGRAM = ("--speculative-algorithm", "OASIS_NGRAM", "--speculative-num-draft-tokens", "4")


def accept_length(url: str, prompt: list[int]) -> float:
    """Tokens per verify step of one greedy answer of 64 tokens."""
    request = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}}
    raw = urllib.request.Request(url + "/generate", json.dumps(request).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(raw, timeout=120))["meta_info"]["spec_accept_length"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="NOT RUN: SGLang compiles its n-gram corpus and needs g++")
def test_ngram_chain_equals_plain_decoding(fresh_stack, goldens, models, prompt_maker, text):
    prompts = matrix.prompts(prompt_maker, text)[1:5]
    expected = goldens.get(models.s4, prompts, matrix.OUTPUT_TOKENS)
    flags = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4", "--speculative-ngram-max-bfs-breadth", "1")
    with fresh_stack("monolith", flags=flags) as stack:
        for _ in range(2):  # the second time the corpus knows the answers
            answers = [generate(stack.url, prompt, max_new_tokens=matrix.OUTPUT_TOKENS).output_ids for prompt in prompts]
            assert answers == expected
        assert accept_length(stack.url, prompts[0]) > 1.5, "drafts were verified and accepted"


def test_oasis_ngram_equals_plain_decoding_on_a_pair(fresh_stack, prompts, expected, prompt_maker):
    """Only decode speculates; prefill runs without any flag of it."""
    prompts, expected = prompts[1:6], expected[1:6]
    with fresh_stack("oasis", decode_flags=OASIS_NGRAM, config={"mode": "exact"}) as stack:
        for _ in range(2):
            answers = [generate(stack.url, prompt, max_new_tokens=matrix.OUTPUT_TOKENS).output_ids for prompt in prompts]
            assert answers == expected
        at_once = generate_concurrently(stack.url, prompts[:3], max_new_tokens=matrix.OUTPUT_TOKENS)
        assert [answer.output_ids for answer in at_once] == expected[:3]
        repetitive = prompt_maker.chat("Repeat this line again and again: one two three four five six.\n" * 20)
        length = accept_length(stack.url, repetitive)
        assert length > 1.3, f"drafts were verified and accepted ({length})"
        assert_baseline(stack)


def test_oasis_ngram_without_disaggregation(fresh_stack, prompts, expected):
    with fresh_stack("monolith", flags=OASIS_NGRAM) as stack:
        answers = generate_concurrently(stack.url, prompts[1:4], max_new_tokens=matrix.OUTPUT_TOKENS)
        assert [answer.output_ids for answer in answers] == expected[1:4]
