"""Block masses against a softmax written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oasis_sglang.selection import scorer
from oasis_sglang.selection.scorer import block_mass, union
from oasis_sglang.selection.summaries import SUMMARIES


def slow_mass(summary, queries, raw, n) -> np.ndarray:
    b, s, rows, group, _ = queries.shape
    mass = np.zeros((b, rows, s, n))
    for i, head, row, one in np.ndindex(b, s, rows, group):
        query, count = queries[i, head, row, one], raw[i].shape[1]
        scores = [summary.estimate(query[None], raw[i][head, block : block + 1]).item() for block in range(count)]
        weights = np.exp(np.array(scores) - max(scores, default=0))
        mass[i, row, head, :count] += weights / weights.sum()
    return mass


def case(name: str, blocks: list[int], heads=4, rows=2, group=3, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    raw = [SUMMARIES[name].build(torch.randn((heads, count, 16, dim), generator=generator) * 2) for count in blocks]
    return torch.randn((len(blocks), heads, rows, group, dim), generator=generator), raw


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("scratch", [1, 200, scorer.SCRATCH])
@pytest.mark.parametrize("name", sorted(SUMMARIES))
def test_masses_are_softmaxes_over_a_requests_own_blocks(name, scratch, rows, monkeypatch):
    monkeypatch.setattr(scorer, "SCRATCH", scratch)
    queries, raw = case(name, [12, 1, 7], rows=rows)
    mass = block_mass(SUMMARIES[name], queries, raw, 12)
    assert mass.shape == (3, rows, 4, 12) and mass.dtype == torch.float32
    np.testing.assert_allclose(mass.numpy(), slow_mass(SUMMARIES[name], queries, raw, 12), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mass.sum(-1), torch.full((3, rows, 4), 3.0))
    assert not mass[1, :, :, 1:].any() and not mass[2, :, :, 7:].any()


def test_masses_are_as_wide_as_asked_for():
    queries, raw = case("mean_var_int8", [5, 3])
    mass, wide = (block_mass(SUMMARIES["mean_var_int8"], queries, raw, n) for n in (5, 9))
    assert wide.shape == (2, 2, 4, 9) and torch.equal(wide[..., :5], mass) and not wide[..., 5:].any()


def test_summaries_are_unpacked_once_for_all_rows(monkeypatch):
    queries, raw = case("mean_var_int8", [12, 7], rows=5)
    summary, unpacked = SUMMARIES["mean_var_int8"], []
    estimate = type(summary).estimate
    monkeypatch.setattr(type(summary), "estimate", lambda self, query, part: unpacked.append(part.shape[:-1]) or estimate(self, query, part))
    block_mass(summary, queries, raw, 12)
    assert unpacked == [(4, 12), (4, 7)]


def test_a_request_without_blocks_has_no_mass():
    queries, raw = case("mean_var_int8", [0, 5], rows=1)
    mass = block_mass(SUMMARIES["mean_var_int8"], queries, raw, 5)
    assert not mass[0].any() and mass[1].sum() == pytest.approx(12, rel=1e-4)


def test_half_precision_queries_are_scored_in_float32():
    queries, raw = case("mean_var_int8", [12])
    mass = block_mass(SUMMARIES["mean_var_int8"], queries.half(), raw, 12)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass, block_mass(SUMMARIES["mean_var_int8"], queries.half().float(), raw, 12))


def test_a_union_is_the_largest_mass_of_the_rows_that_count():
    mass = torch.tensor([[[[0.1, 0.9]], [[0.4, 0.6]], [[1.0, 0.0]]], [[[0.3, 0.7]], [[0.0, 1.0]], [[0.5, 0.5]]]])
    rows = torch.tensor([[True, True, False], [False, True, True]])
    before = mass.clone()
    assert torch.equal(union(mass, rows), torch.tensor([[[0.4, 0.9]], [[0.5, 1.0]]])) and torch.equal(mass, before)
    assert torch.equal(union(mass[:, :1], torch.tensor([[True], [True]])), mass[:, 0])
