"""Summaries: the stored mean and variance against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.selection import SUMMARY_NAMES
from oasis_sglang.selection.summaries import SUMMARIES

SUMMARY = SUMMARIES["mean_var_int8"]


def test_the_names_that_options_may_use_are_the_ones_there_are():
    assert set(SUMMARY_NAMES) == set(SUMMARIES) and all(s.name == name for name, s in SUMMARIES.items())


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.sampled_from([1, 4, 16, 64]), st.sampled_from([2, 64, 80]),
       st.floats(-3, 3), st.sampled_from([1e-3, 1.0, 30.0]), st.integers(0, 999))
def test_mean_and_variance_are_what_numpy_says(dtype, tokens, dim, shift, scale, seed):
    keys = (torch.randn((2, 3, tokens, dim), generator=torch.Generator().manual_seed(seed)) * scale + shift).to(dtype)
    raw = SUMMARY.build(keys)
    assert raw.dtype == torch.uint8 and raw.shape == (2, 3, SUMMARY.bytes(dim)) and raw.is_contiguous()
    mean, variance = SUMMARY.read(raw, dim)
    exact = keys.double().numpy()
    wanted = exact.mean(-2)
    step = np.abs(wanted).max(-1, keepdims=True) / 127
    rounding = 127 * 0.5 * np.spacing(step.astype(np.float16)).astype(float)  # the scale is stored in float16
    assert (np.abs(mean.numpy() - wanted) <= 0.501 * step + 1.01 * rounding + 1e-7).all()
    np.testing.assert_allclose(variance.numpy(), exact.var(-2).mean(-1), rtol=2e-3, atol=1e-6)


def test_the_wire_format_is_written_out():
    keys = torch.tensor([[1.0, -2.0], [3.0, -2.0]]).reshape(1, 2, 2)
    raw = SUMMARY.build(keys)[0].numpy()
    assert raw[:2].view(np.int8).tolist() == [127, -127]
    assert raw[2:4].view(np.float16)[0] == np.float16(2 / 127) and raw[4:].view(np.float16)[0] == np.float16(0.5)


def test_each_piece_depends_on_its_own_keys():
    keys = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(1))
    whole = SUMMARY.build(keys)
    for a in range(2):
        for b in range(3):
            assert torch.equal(SUMMARY.build(keys[a, b]), whole[a, b])


@pytest.mark.parametrize("value", [0.0, 1e-8, 7e4, 3e38])
def test_extremes_stay_finite(value):
    mean, variance = SUMMARY.read(SUMMARY.build(torch.full((1, 16, 4), value)), 4)
    assert torch.isfinite(mean).all() and torch.isfinite(variance).all()
    if value == 0.0:
        assert not mean.any() and not variance.any()


def test_a_wide_spread_is_capped_not_infinite():
    keys = torch.tensor([[-1e5], [1e5]]).repeat(1, 4).reshape(1, 2, 4)
    _, variance = SUMMARY.read(SUMMARY.build(keys), 4)
    assert variance.tolist() == [65504.0]
