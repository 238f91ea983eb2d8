"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasis_sglang.speculation.draft import PromptLookup, Request


def searched(tokens: list[int], n: int, longest: int, shortest: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest suffix that has one; going on with itself at the end."""
    for size in range(longest, shortest - 1, -1):
        for place in range(len(tokens) - 1, size - 1, -1):
            if tokens[place - size : place] == tokens[-size:]:
                grown = list(tokens)
                for i in range(n):
                    grown.append(grown[place + i])
                return grown[len(tokens) :]
    return []


def proposed(source: PromptLookup, prompt, output, n: int = 3, rid: str = "a") -> list[int]:
    drafts = source.propose([Request(rid, prompt, output)], n)
    assert drafts.tokens.shape == (1, n) and drafts.tokens.dtype == drafts.counts.dtype == np.int64
    assert drafts.counts[0] in (0, n) and not drafts.tokens[0, drafts.counts[0] :].any()
    return drafts.tokens[0, : drafts.counts[0]].tolist()


few = st.integers(0, 4)


@given(st.lists(few, max_size=40), st.lists(st.lists(few, min_size=1, max_size=4), min_size=1, max_size=12), st.integers(1, 6),
       st.sampled_from([(4, 1), (3, 2), (1, 1), (5, 5)]))
def test_each_step_of_an_answer_is_what_a_search_says(prompt, steps, n, sizes):
    source, output = PromptLookup(*sizes), array("q")
    for accepted in steps:
        output.extend(accepted)
        assert proposed(source, array("q", prompt), output, n) == searched(prompt + list(output), n, *sizes)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.data())
def test_where_the_prompt_ends_does_not_matter(text, data):
    cut = data.draw(st.integers(0, len(text) - 1))
    assert proposed(PromptLookup(), text[:cut], text[cut:]) == searched(text, 3, 4, 1)


def test_written_out():
    source = PromptLookup()
    prompt = [5, 6, 7, 8, 9, 6, 7, 1]
    assert proposed(source, prompt, [6, 7]) == [1, 6, 7], "the latest (6, 7) of the prompt, not the first"
    assert proposed(source, prompt, [6, 7, 8]) == [9, 6, 7], "(6, 7, 8) wins over the later 8"
    assert proposed(source, prompt, [6, 7, 8, 3]) == [], "never seen before"
    assert proposed(source, prompt, [6, 7, 8, 3, 4, 3]) == [4, 3, 4], "goes on with itself"
    assert proposed(PromptLookup(4, 2), prompt, [0, 8]) == [] and proposed(PromptLookup(4, 1), prompt, [0, 8]) == [9, 6, 7]
    assert proposed(PromptLookup(), [], [3]) == proposed(PromptLookup(), [3], [4]) == []


def test_large_token_ids_and_longest_ngrams():
    prompt = [151_935, 0, 151_934, 0, 151_935, 0, 7]
    assert proposed(PromptLookup(), prompt, [151_934, 0]) == [151_935, 0, 7]


def test_an_output_that_shrank_or_changed_is_indexed_anew():
    source, prompt = PromptLookup(), [1, 2, 3, 4]
    assert proposed(source, prompt, [9, 8, 1, 9]) == [8, 1, 9]
    for output in ([9, 8], [5, 6, 5], [9, 8, 1, 2, 5, 9]):  # shorter; another of the same rid; another and longer
        assert proposed(source, prompt, output) == searched(prompt + output, 3, 4, 1)
    assert proposed(source, [7, 5, 9], [5]) == [9, 5, 9], "another prompt"
    assert len(source) == 1


def test_requests_are_apart_and_forgotten():
    source = PromptLookup()
    drafts = source.propose([Request("a", [1, 2, 3], [1]), Request("b", [1, 5, 6], [1]), Request("c", [4], [2])], 2)
    assert drafts.tokens.tolist() == [[2, 3], [5, 6], [0, 0]] and drafts.counts.tolist() == [2, 2, 0]
    source.forget(["a", "c", "unknown"])
    assert len(source) == 1
    assert proposed(source, [1, 2, 3], [1, 2, 3, 9, 2]) == [3, 9, 2], "a request that comes back is indexed from its tokens"


def test_one_step_looks_at_new_tokens_only():
    class Counting(list):
        reads = 0

        def __getitem__(self, i):
            Counting.reads += 1
            return super().__getitem__(i)

    source, prompt, output = PromptLookup(), Counting(range(5000)), array("q", [3])
    proposed(source, prompt, output)
    before = Counting.reads
    output.extend([70, 71])
    proposed(source, prompt, output)
    assert Counting.reads - before <= 12


def test_impossible_sizes_are_refused():
    for sizes in ((2, 3), (4, 0)):
        with pytest.raises(ValueError, match="n-grams of"):
            PromptLookup(*sizes)
