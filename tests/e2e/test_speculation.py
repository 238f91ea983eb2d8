"""Target verify with chain masks on the CPU runtime: NGRAM speculation answers as plain decoding does."""

import json
import shutil
import urllib.request

import matrix
import pytest

from oasis_sglang.client import generate


@pytest.mark.skipif(shutil.which("g++") is None, reason="NOT RUN: SGLang compiles its n-gram corpus and needs g++")
def test_ngram_chain_equals_plain_decoding(fresh_stack, goldens, models, prompt_maker, text):
    prompts = matrix.prompts(prompt_maker, text)[1:5]
    expected = goldens.get(models.s4, prompts, matrix.OUTPUT_TOKENS)
    flags = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4", "--speculative-ngram-max-bfs-breadth", "1")
    with fresh_stack("monolith", flags=flags) as stack:
        for _ in range(2):  # the second time the corpus knows the answers
            answers = [generate(stack.url, prompt, max_new_tokens=matrix.OUTPUT_TOKENS).output_ids for prompt in prompts]
            assert answers == expected
        request = {"input_ids": prompts[0], "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}}
        raw = urllib.request.Request(stack.url + "/generate", json.dumps(request).encode(), {"Content-Type": "application/json"})
        meta = json.load(urllib.request.urlopen(raw, timeout=120))["meta_info"]
    assert meta["spec_accept_length"] > 1.5, "drafts were verified and accepted"
