"""Votes against dense attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.selection import votes
from oasis_sglang.selection.votes import ranking, vote


def case(layers, kv_heads, group, dim, block_tokens, tokens, n, dtype=torch.float32, seed=0):
    """Queries, a pool whose every slot outside the prompt is NaN or huge, the prompt's pages, and its keys [L, tokens, Hkv, D]."""
    generator = torch.Generator().manual_seed(seed)
    m = -(-tokens // block_tokens)
    pages = torch.randperm(m + 3, generator=generator)[:m]
    flat = torch.randn((layers, m * block_tokens, kv_heads, dim), generator=generator).to(dtype)
    garbage = flat.clone()
    garbage[:, tokens::2] = torch.nan
    garbage[:, tokens + 1 :: 2] = 3e4
    pool = torch.full((layers, m + 3, block_tokens, kv_heads, dim), torch.nan, dtype=dtype)
    pool[:, pages] = garbage.view(layers, m, block_tokens, kv_heads, dim)
    queries = torch.randn((n, layers, kv_heads * group, dim), generator=generator).to(dtype) * 2
    return queries, list(pool), pages, flat[:, :tokens].double().numpy()


def slow_vote(queries, keys, block_tokens, tokens, scale) -> np.ndarray:
    queries = queries.double().numpy()
    n, layers, heads, _ = queries.shape
    kv_heads = keys.shape[2]
    mass = np.zeros((layers, kv_heads, -(-tokens // block_tokens)))
    for i, layer, head in np.ndindex(n, layers, heads):
        kv_head = head * kv_heads // heads
        scores = keys[layer, : tokens - n + i + 1, kv_head] @ queries[i, layer, head] * scale
        weights = np.exp(scores - scores.max())
        for position, weight in enumerate(weights / weights.sum()):
            mass[layer, kv_head, position // block_tokens] += weight
    return mass


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.sampled_from([4, 16]), st.integers(1, 40), st.integers(1, 12),
       st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.sampled_from([1, 100, votes.SCRATCH]), st.integers(0, 99))
def test_votes_are_dense_attention_summed_by_block(layers, kv_heads, group, block_tokens, tokens, n, dtype, scratch, seed):
    n = min(n, tokens)
    queries, pool, pages, keys = case(layers, kv_heads, group, 8, block_tokens, tokens, n, dtype, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(votes, "SCRATCH", scratch)
        mass = vote(queries, pool, pages, tokens, 0.3)
    assert mass.dtype == torch.float32
    np.testing.assert_allclose(mass.numpy(), slow_vote(queries, keys, block_tokens, tokens, 0.3), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mass.sum(-1).numpy(), n * group, rtol=1e-4)


def test_a_full_window_of_64_queries():
    queries, pool, pages, keys = case(2, 2, 3, 16, 16, 150, 64)
    np.testing.assert_allclose(vote(queries, pool, pages, 150, 0.25).numpy(), slow_vote(queries, keys, 16, 150, 0.25), rtol=1e-4, atol=1e-5)


def test_a_block_that_only_one_early_query_asks_for_gets_its_vote():
    queries, pool, pages, _ = case(1, 1, 1, 8, 4, 40, 8)
    queries[2, 0, 0] = 0
    queries[2, 0, 0, 3] = 50
    pool[0][pages[5], 2, 0] = 0
    pool[0][pages[5], 2, 0, 3] = 50
    alone = vote(queries[-1:], pool, pages, 40, 1.0)[0, 0, 5]
    assert vote(queries, pool, pages, 40, 1.0)[0, 0, 5] > alone + 0.99


@pytest.mark.parametrize("change", ["too many queries", "a page short", "a page more", "a layer less", "other heads", "other dim"])
def test_sizes_that_do_not_belong_together_are_refused(change):
    queries, pool, pages, _ = case(2, 2, 1, 8, 4, 18, 6)
    tokens = 18
    if change == "too many queries":
        queries, tokens, pages = queries[:3], 2, pages[:1]
    elif change == "a page short":
        pages = pages[:-1]
    elif change == "a page more":
        pages = torch.cat([pages, pages[:1]])
    elif change == "a layer less":
        pool = pool[:1]
    elif change == "other heads":
        queries = queries.repeat(1, 1, 2, 1)[:, :, :3]
    else:
        queries = queries[..., :4]
    with pytest.raises(ValueError, match="do not fit"):
        vote(queries, pool, pages, tokens, 1.0)


def test_ranking_is_best_first_and_earlier_first_among_equals():
    mass = torch.tensor([[[3.0, 5, 3, 9, 5, 99]], [[0.0, 0, 0, 0, 1, 99]]])
    best = ranking(mass, 5, 4)
    assert best.dtype == np.int32 and best.tolist() == [[3, 1, 4, 0], [4, 0, 1, 2]]
    assert ranking(torch.ones(1, 2, 5000), 4999, 3000).tolist() == [list(range(3000))] * 2
    assert ranking(mass, 3, 128).tolist() == [[1, 0, 2], [0, 1, 2]]
    assert ranking(mass, 0, 4).shape == (2, 0) and ranking(mass, 5, 0).shape == (2, 0)
    with pytest.raises(ValueError, match="7 whole blocks"):
        ranking(mass, 7, 4)


def test_ranking_goes_through_layers_then_heads():
    mass = torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(2)).abs()
    best = ranking(mass, 20, 1)
    assert best.shape == (12, 1)
    for layer, head in np.ndindex(3, 4):
        assert best[layer * 4 + head, 0] == mass[layer, head].argmax()
