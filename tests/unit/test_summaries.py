"""Summaries: bytes against decoders written here, estimates against numpy in float64."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.selection import SUMMARY_NAMES
from oasis_sglang.selection.summaries import SUMMARIES

NAMES = sorted(SUMMARIES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def halves(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float64)


def decode_mean_var(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """uint8 [..., bytes] -> mean [..., dim], variance [...], step of the mean [..., 1]."""
    tail = halves(raw[..., -4:])
    return raw[..., :-4].view(np.int8) * tail[..., :1], tail[..., 1], tail[..., :1]


def decode_minmax8(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """uint8 [..., bytes] -> largest, smallest [..., dim], the wider of the two steps [..., 1]."""
    dim = (raw.shape[-1] - 4) // 2
    codes, scale = raw[..., : 2 * dim].view(np.int8), halves(raw[..., 2 * dim :])
    return codes[..., :dim] * scale[..., :1], codes[..., dim:] * -scale[..., 1:], scale.max(-1, keepdims=True)


def decode_minmax4(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    dim = raw.shape[-1] - 8
    tail = halves(raw[..., dim:])
    largest = tail[..., 2:3] + tail[..., 0:1] * (raw[..., :dim] % 16)
    smallest = -(tail[..., 3:4] + tail[..., 1:2] * (raw[..., :dim] // 16))
    return largest, smallest, tail[..., :2].max(-1, keepdims=True)


DECODE_BOUNDS = {"minmax_int8": decode_minmax8, "minmax_int4": decode_minmax4}
key_cases = given(st.sampled_from(DTYPES), st.sampled_from([1, 4, 16, 64]), st.sampled_from([2, 64, 80]),
                  st.floats(-3, 3), st.sampled_from([1e-3, 1.0, 30.0]), st.integers(0, 999))


def some_keys(dtype, tokens, dim, shift, scale, seed) -> torch.Tensor:
    return (torch.randn((2, 3, tokens, dim), generator=torch.Generator().manual_seed(seed)) * scale + shift).to(dtype)


def test_the_names_that_options_may_use_are_the_ones_there_are():
    assert set(SUMMARY_NAMES) == set(SUMMARIES) and all(s.name == name for name, s in SUMMARIES.items())


def test_the_names_are_known_without_torch():
    done = subprocess.run([sys.executable, "-c", "import sys; from oasis_sglang.selection import SUMMARY_NAMES; print('torch' in sys.modules)"],
                          capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stdout + done.stderr


@pytest.mark.parametrize(("name", "dim", "size"), [("mean_var_int8", 64, 68), ("minmax_int8", 64, 132), ("minmax_int4", 64, 72), ("minmax_int4", 128, 136)])
def test_sizes(name, dim, size):
    raw = SUMMARIES[name].build(torch.randn(2, 3, 16, dim))
    assert SUMMARIES[name].bytes(dim) == size and raw.shape == (2, 3, size) and raw.dtype == torch.uint8 and raw.is_contiguous()


@settings(max_examples=100, deadline=None)
@key_cases
def test_mean_and_variance_are_what_numpy_says(dtype, tokens, dim, shift, scale, seed):
    keys = some_keys(dtype, tokens, dim, shift, scale, seed)
    mean, variance, _ = decode_mean_var(SUMMARIES["mean_var_int8"].build(keys).numpy())
    exact = keys.double().numpy()
    wanted = exact.mean(-2)
    step = np.abs(wanted).max(-1, keepdims=True) / 127
    rounding = 127 * 0.5 * np.spacing(step.astype(np.float16)).astype(float)  # the scale is stored in float16
    assert (np.abs(mean - wanted) <= 0.501 * step + 1.01 * rounding + 1e-7).all()
    np.testing.assert_allclose(variance, exact.var(-2).mean(-1), rtol=2e-3, atol=1e-6)


@settings(max_examples=100, deadline=None)
@key_cases
def test_int8_bounds_hold_and_are_tight(dtype, tokens, dim, shift, scale, seed):
    keys = some_keys(dtype, tokens, dim, shift, scale, seed)
    largest, smallest, step = decode_minmax8(SUMMARIES["minmax_int8"].build(keys).numpy())
    exact = keys.double().numpy()
    slack = 1e-6 * np.abs(exact).max()  # codes are computed in float32
    assert (largest >= exact.max(-2) - slack).all() and (largest <= exact.max(-2) + step + slack).all()
    assert (smallest <= exact.min(-2) + slack).all() and (smallest >= exact.min(-2) - step - slack).all()
    widest = np.maximum(np.abs(exact.max(-2)), np.abs(exact.min(-2))).max(-1, keepdims=True)
    assert (step <= widest / 127 * 1.003 + 2.0**-23).all(), "all codes are in use"


@settings(max_examples=100, deadline=None)
@key_cases
def test_int4_bounds_are_half_a_step_off_at_most(dtype, tokens, dim, shift, scale, seed):
    keys = some_keys(dtype, tokens, dim, shift, scale, seed)
    largest, smallest, step = decode_minmax4(SUMMARIES["minmax_int4"].build(keys).numpy())
    exact = keys.double().numpy()
    tops, bottoms = exact.max(-2), exact.min(-2)
    # 15 steps that are stored in float16 may end below the range they should cover, and the base lies off its channel.
    slack = np.abs(exact).max() * 2.0**-10 + 1e-6
    assert (np.abs(largest - tops) <= 0.5 * step + slack).all() and (np.abs(smallest - bottoms) <= 0.5 * step + slack).all()
    spread = np.maximum(np.ptp(tops, -1), np.ptp(bottoms, -1))[..., None]
    assert (step <= spread / 15 + slack).all(), "all codes are in use"


def test_the_wire_formats_are_written_out():
    keys = torch.tensor([[1.0, -2.0], [3.0, -2.0]])  # mean 2, -2; largest 3, -2; negated smallest -1, 2
    raw = {name: SUMMARIES[name].build(keys).numpy() for name in NAMES}
    row = raw["mean_var_int8"]
    assert row[:2].view(np.int8).tolist() == [127, -127]
    assert row[2:4].view(np.float16)[0] == np.float16(2 / 127) and row[4:].view(np.float16)[0] == np.float16(0.5)
    row = raw["minmax_int8"]
    scales = np.array([3, 2]) / 127 * (1 + 2**-10) + 2.0**-24
    assert row[4:].view(np.float16).tolist() == scales.astype(np.float16).tolist()
    assert row[:4].view(np.int8).tolist() == [127, -84, -63, 127]
    row = raw["minmax_int4"]
    assert row[:2].tolist() == [15 | 0 << 4, 0 | 15 << 4]
    assert row[2:].view(np.float16).tolist() == [np.float16(1 / 3), np.float16(0.2), -2, -1]


@pytest.mark.parametrize("name", NAMES)
def test_each_piece_depends_on_its_own_keys(name):
    summary = SUMMARIES[name]
    keys, queries = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(1)), torch.randn(2, 5, 8)
    whole = summary.build(keys)
    estimate = summary.estimate(queries, whole)
    assert estimate.shape == (2, 5, 3) and estimate.dtype == torch.float32
    for a in range(2):
        for b in range(3):
            assert torch.equal(summary.build(keys[a, b]), whole[a, b])
            torch.testing.assert_close(summary.estimate(queries[a], whole[a, b : b + 1]), estimate[a, :, b : b + 1])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from([2, 64, 80]), st.sampled_from([0.01, 1.0, 20.0]), st.integers(0, 999))
def test_estimates_are_the_formulas_of_the_decoded_bytes(name, dim, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn((2, 7, 16, dim), generator=generator) * scale + torch.randn(dim, generator=generator)
    queries = torch.randn((2, 3, dim), generator=generator)
    before = queries.clone()
    raw = SUMMARIES[name].build(keys)
    estimate = SUMMARIES[name].estimate(queries, raw).numpy()
    assert torch.equal(queries, before)
    for a, query, block in np.ndindex(2, 3, 7):
        q = queries[a, query].double().numpy()
        if name == "mean_var_int8":
            mean, variance, _ = decode_mean_var(raw[a, block].numpy())
            wanted = q @ mean + 0.5 * (q @ q) * variance
        else:
            largest, smallest, _ = DECODE_BOUNDS[name](raw[a, block].numpy())
            wanted = np.where(q > 0, q * largest, q * smallest).sum()  # in 4 bits the two may have crossed
        assert estimate[a, query, block] == pytest.approx(wanted, rel=1e-4, abs=1e-4 * (1 + scale))


def test_mean_and_variance_give_the_log_of_the_mean_weight_where_keys_are_gaussian():
    generator = torch.Generator().manual_seed(3)
    spreads = torch.tensor([0.1, 0.5, 1.0, 1.5])
    keys = torch.randn((4, 8192, 32), generator=generator) * spreads[:, None, None] + torch.randn((4, 1, 32), generator=generator)
    queries = torch.randn((6, 32), generator=generator)
    queries = queries / queries.norm(dim=-1, keepdim=True)
    summary = SUMMARIES["mean_var_int8"]
    estimate = summary.estimate(queries, summary.build(keys))
    exact = torch.logsumexp(torch.einsum("md,ntd->mnt", queries.double(), keys.double()), -1) - np.log(8192)
    assert (estimate - exact).abs().max() < 0.12
    means = torch.einsum("md,nd->mn", queries, keys.mean(1))
    assert (means - exact).abs().max() > 0.5, "the variance matters in this test"


@pytest.mark.parametrize("name", sorted(DECODE_BOUNDS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_key_scores_above_the_bounds(name, dtype):
    generator = torch.Generator().manual_seed(5)
    keys = (torch.randn((40, 16, 64), generator=generator) * 3).to(dtype)
    queries = torch.randn((9, 64), generator=generator)
    raw = SUMMARIES[name].build(keys)
    estimate = SUMMARIES[name].estimate(queries, raw)
    best = torch.einsum("md,ntd->mnt", queries, keys.float()).amax(-1)
    allowed = 0.0
    if name == "minmax_int4":
        step = torch.from_numpy(decode_minmax4(raw.numpy())[2]).float().mT
        allowed = 0.51 * queries.abs().sum(-1, keepdim=True) * step
    assert (estimate >= best - allowed - 1e-3).all()
    exact = torch.maximum(queries[:, None] * keys.amax(-2).float(), queries[:, None] * keys.amin(-2).float()).sum(-1)
    assert ((estimate - exact).abs() <= 0.06 * exact).all(), "and the bound is not a loose one"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_planted_block_comes_first_and_its_opposite_last(name, dtype):
    generator = torch.Generator().manual_seed(7)
    keys = torch.randn((2, 50, 16, 64), generator=generator)
    queries = torch.randn((2, 3, 64), generator=generator) / 8
    direction = queries.sum(1)[:, None] * 8
    keys[:, 31] += direction
    keys[:, 17] -= direction
    estimate = SUMMARIES[name].estimate(queries, SUMMARIES[name].build(keys.to(dtype)))
    assert (estimate.argmax(-1) == 31).all()
    if name == "mean_var_int8":  # for bounds the opposite is a spread like any other
        assert (estimate.argmin(-1) == 17).all()


@pytest.mark.parametrize("name", sorted(DECODE_BOUNDS))
def test_one_key_suffices_to_raise_the_bounds(name):
    generator = torch.Generator().manual_seed(9)
    keys = torch.randn((50, 16, 64), generator=generator)
    query = torch.randn((1, 64), generator=generator)
    keys[20, 5] = query[0] * 3
    assert SUMMARIES[name].estimate(query, SUMMARIES[name].build(keys)).argmax() == 20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, 1e-8, 7e4, 3e38, "mixed", "halves"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_stay_finite(name, value, dtype):
    if value == "mixed":
        keys = torch.tensor([3e38, -3e38, 0.0, 1.0] * 16).reshape(1, 16, 4).roll(1, 1)
        keys[0, ::2] *= -1
    elif value == "halves":  # partial sums would be infinities of both signs
        keys = torch.full((1, 64, 4), 3e38)
        keys[0, 32:] *= -1
    else:
        keys = torch.full((1, 16, 4), value)
    keys = keys.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    estimate = SUMMARIES[name].estimate(torch.tensor([[1.0, -1.0, 0.5, 0.0]]), SUMMARIES[name].build(keys))
    assert torch.isfinite(estimate).all()
    if value == 0.0:
        assert estimate.abs().max() < 1e-3


def test_a_wide_spread_is_capped_not_infinite():
    keys = torch.tensor([[-1e5], [1e5]]).repeat(1, 4).reshape(1, 2, 4)
    _, variance, _ = decode_mean_var(SUMMARIES["mean_var_int8"].build(keys).numpy())
    assert variance.tolist() == [65504.0]
