"""Block masses against a softmax written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oasis_sglang.selection import scorer
from oasis_sglang.selection.scorer import block_mass
from oasis_sglang.selection.summaries import SUMMARIES


def slow_mass(summary, queries, raw, blocks) -> np.ndarray:
    b, s, n, _ = raw.shape
    mass = np.zeros((b, s, n))
    for i, head in np.ndindex(b, s):
        for query in queries[i, head]:
            scores = [summary.estimate(query[None], raw[i, head, block : block + 1]).item() for block in range(blocks[i])]
            weights = np.exp(np.array(scores) - max(scores, default=0))
            mass[i, head, : blocks[i]] += weights / weights.sum()
    return mass


def case(name: str, blocks: list[int], heads=4, group=3, n=12, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn((len(blocks), heads, n, 16, dim), generator=generator) * 2
    raw = SUMMARIES[name].build(keys)
    for i, count in enumerate(blocks):
        raw[i, :, count:] = 0xFF  # every float16 in there is NaN
    return torch.randn((len(blocks), heads, group, dim), generator=generator), raw, torch.tensor(blocks)


@pytest.mark.parametrize("scratch", [1, 200, scorer.SCRATCH])
@pytest.mark.parametrize("name", sorted(SUMMARIES))
def test_masses_are_softmaxes_over_the_valid_blocks(name, scratch, monkeypatch):
    monkeypatch.setattr(scorer, "SCRATCH", scratch)
    queries, raw, blocks = case(name, [12, 1, 7])
    mass = block_mass(SUMMARIES[name], queries, raw, blocks)
    assert mass.shape == (3, 4, 12) and mass.dtype == torch.float32
    np.testing.assert_allclose(mass.numpy(), slow_mass(SUMMARIES[name], queries, raw, blocks.tolist()), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mass.sum(-1), torch.full((3, 4), 3.0))
    assert not mass[1, :, 1:].any() and not mass[2, :, 7:].any()


def test_a_request_without_blocks_has_no_mass():
    queries, raw, blocks = case("mean_var_int8", [0, 5])
    mass = block_mass(SUMMARIES["mean_var_int8"], queries, raw, blocks)
    assert not mass[0].any() and mass[1].sum() == pytest.approx(12, rel=1e-4)


def test_half_precision_queries_are_scored_in_float32():
    queries, raw, blocks = case("mean_var_int8", [12])
    mass = block_mass(SUMMARIES["mean_var_int8"], queries.half(), raw, blocks)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass, block_mass(SUMMARIES["mean_var_int8"], queries.half().float(), raw, blocks))
