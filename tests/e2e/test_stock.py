"""The reference itself: SGLang's own PD over NIXL, under our CPU runtime, answers as one plain server does."""

import pytest

from oasis_sglang.client import generate, generate_concurrently

OUTPUT_TOKENS = 64
LENGTHS = (40, 300, 1500, 5000)  # the last is more than one prefill chunk


@pytest.fixture(scope="module")
def prompts(prompt_maker, text):
    cuts = [prompt_maker.cut(text, length, skip=length) for length in LENGTHS]
    return [*prompt_maker.short()[:2], *cuts]


@pytest.fixture(scope="module")
def expected(goldens, models, prompts):
    return goldens.get(models.s4, prompts, OUTPUT_TOKENS)


def test_goldens_are_varied_enough_to_tell_answers_apart(expected):
    varied = [len(set(ids)) >= 20 for ids in expected]
    assert all(len(ids) == OUTPUT_TOKENS for ids in expected)
    assert sum(varied) * 2 >= len(varied)


def test_one_by_one(stock_pd, prompts, expected):
    stack = stock_pd()
    answers = [generate(stack.url, prompt, max_new_tokens=OUTPUT_TOKENS) for prompt in prompts]
    assert [answer.output_ids for answer in answers] == expected
    assert [answer.prompt_tokens for answer in answers] == [len(prompt) for prompt in prompts]


def test_four_at_once_and_the_router_keeps_request_ids(stock_pd, prompts, expected):
    answers = generate_concurrently(stock_pd().url, prompts[:4], max_new_tokens=OUTPUT_TOKENS, rid="at-once")
    assert [answer.output_ids for answer in answers] == expected[:4]
    assert [answer.rid for answer in answers] == [f"at-once-{index}" for index in range(4)]
