"""The capacity model: sizes by hand, what has to hold for any request, and the page that explains it."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from decode_node.budget import make_budget
from oasis_sglang.bench.records import Meters, Node, Request, Results, Run, System, Workload, load, save
from oasis_sglang.cli import app
from oasis_sglang.config import OasisConfig
from oasis_sglang.plan import capacity, check, pulls, shapes, show, sizes, units
from oasis_sglang.plan.capacity import Ask, Machine, Served
from transport.errors import ConfigError

DOC = Path(__file__).parents[2] / "docs/plan.md"
LLAMA = shapes.find("Llama-3.1-8B")
MACHINE = Machine(hbm=80 << 30, dram=1 << 40, link=12.5e9, bandwidth=3.35e12)
GIB = 1 << 30


def served(layout=None, budget: int = 2048, **more) -> Served:
    layout = layout or sizes.layout_of_shape(LLAMA, "bfloat16")
    return Served(layout, make_budget(layout.block_tokens, budget, 16, 64, 256, wait=False), **more)


def small(budget: int = 512, **more) -> Served:
    return served(sizes.layout_of(30, 3, 64, 4), budget, **more)


# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, parameters, active", [
    ("meta-llama/Llama-3.1-8B", 8_030_261_248, 8_030_261_248), ("meta-llama/Llama-3.1-70B", 70_553_706_496, 70_553_706_496),
    ("Qwen/Qwen3-8B", 8_190_735_360, 8_190_735_360), ("Qwen/Qwen3-32B", 32_762_123_264, 32_762_123_264),
    ("Qwen/Qwen3-235B-A22B", 235_093_634_560, 22_190_763_520), ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008, 134_515_008)])
def test_known_shapes_have_as_many_parameters_as_published(name, parameters, active):
    shape = shapes.SHAPES[name]
    assert (shape.parameters, shape.active_parameters) == (parameters, active)


def test_models_are_found_by_short_names_and_unknown_ones_told_what_is_known():
    assert shapes.find("qwen3-8b").layers == 36 and shapes.find("Qwen/Qwen3-8B") is shapes.find("QWEN3-8B")
    with pytest.raises(ConfigError, match="Llama-3.1-8B.*Qwen/Qwen3-235B-A22B"):
        shapes.find("Llama-9")


def test_a_folder_says_its_shape_and_the_size_of_its_weights(tmp_path):
    config = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
              "intermediate_size": 128, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shapes.find(str(tmp_path))
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.weights) == (2, 2, 16, 2 * shape.parameters)
    assert shape.parameters == 2 * 100 * 64 + 64 + 2 * (2 * 64 * 6 * 16 + 8 * 16 + 2 * 64 + 3 * 64 * 128), "with biases of q, k and v"
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    (tmp_path / "b.safetensors").write_bytes(bytes(24))
    assert shapes.find(str(tmp_path)).weights == 1024
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": None}))
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        shapes.find(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 512}))
    with pytest.raises(ConfigError, match="kv_lora_rank"):
        shapes.find(str(tmp_path))


def test_classes_that_decode_refuses_are_planned_with_a_note():
    assert not any(shape.refusal() for name, shape in shapes.SHAPES.items() if "235B" not in name)
    assert "Qwen3MoeForCausalLM" in shapes.find("Qwen3-235B-A22B").refusal()


def test_a_step_reads_all_dense_weights_and_more_experts_the_more_tokens_it_has():
    read = LLAMA.weights_read(1)
    assert read == LLAMA.weights_read(64) == 2 * (LLAMA.parameters - 128_256 * 4096), "rows of the input embedding are looked up"
    moe = shapes.find("Qwen3-235B-A22B")
    assert moe.weights_read(1) == pytest.approx(2 * (moe.active_parameters - 151_936 * 4096))
    assert moe.weights_read(1) < moe.weights_read(8) < moe.weights_read(4096) <= 2 * moe.parameters


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_code_that_keeps_and_sends():
    from decode_node.lookahead import Lookahead
    from decode_node.working_set import WorkingSets
    from oasis_sglang.selection.summaries import SUMMARIES
    from prefill_node.publisher import RANKED_BLOCKS

    assert {name: [of(d) for d in (64, 128)] for name, of in sizes.SUMMARY_BYTES.items()} == {n: [s.bytes(d) for d in (64, 128)] for n, s in SUMMARIES.items()}
    assert sizes.RANKED_BLOCKS == RANKED_BLOCKS
    layout = sizes.layout_of(32, 8, 128, 2)
    for rows in (1, 4):
        held = WorkingSets.bytes(layout, 1, 8192, 8192, 128) + Lookahead.bytes(layout, 1, rows, 8192)
        assert sizes.device_tables(layout, 8192, 128, rows) == held


def test_llama_at_16k_by_hand():
    ask, layout = Ask(16_384, 512), served().layout
    assert capacity.full_transfer(layout, ask.prompt) == 2 * 32 * 8 * 128 * 2 * 16_384 == 2 * GIB
    parts = capacity.admitted(served(critical=16), ask)
    assert parts["pieces"] == 32 * 8 * 128 * 8192 == 256 << 20, "2,048 of 16,384 tokens"
    assert parts["critical heads"] == 16 * (1024 - 128) * 8192
    assert parts["summaries"] == 1024 * (256 * (132 + 8) + 8)
    assert parts["partial page"] == parts["records"] == 0
    assert parts["manifest"] > 256 * 1024 * 4 + 1024 * (32 + 4 + 8 + 8), "the ranking, and four fields of each record"
    held = capacity.device(served(critical=16), ask)
    assert held["working set"] == 256 << 20 and held["tail"] == 32 << 20 and held["lane"] == 1056 * 16 * 8192
    assert capacity.stock_tokens(Ask(16_384, 100), 16) == 16_384 + 512 and capacity.stock_tokens(Ask(16_384, 600), 16) == 16_992


def test_what_is_admitted_is_what_a_decode_node_counted():
    """Served, 5,866 tokens, budget 512, five of 90 heads critical; manifests had no hashes then."""
    parts = capacity.admitted(small(critical=5), Ask(5866, 64))
    assert parts["pieces"] + parts["critical heads"] == 37_273_600 and parts["summaries"] == 2_506_368 and parts["partial page"] == 737_280
    assert parts["manifest"] == pytest.approx(141_147 + 32 * 366, abs=16)


def test_a_budget_that_covers_the_request_sends_whole_records():
    ask = Ask(5000, 64)
    parts = capacity.admitted(small(8192), ask)
    assert parts["records"] == 312 * 737_280 and parts["partial page"] == 737_280 and parts["summaries"] == parts["pieces"] == 0
    assert capacity.on_demand(small(8192), ask) == capacity.on_demand_limit(small(8192), ask) == capacity.step_swaps(small(8192), ask) == 0
    assert sum(capacity.device(small(8192), ask).values()) == sizes.pages(5064, 16) * 737_280
    assert capacity.host(small(8192), ask)["cache"] == 312 * 737_280 and capacity.host(small(8192, keeps=False), ask)["cache"] == 0


def test_a_budget_of_the_whole_prompt_that_still_selects_sends_everything_and_summaries():
    one = small(5008)
    ask = Ask(5000, 2000)
    parts, full = capacity.admitted(one, ask), capacity.full_transfer(one.layout, 4992)
    assert parts["pieces"] == full and parts["summaries"] == 312 * one.layout.index_bytes and capacity.on_demand(one, ask) == 0
    assert capacity.even_output(one, 5000) == 1.0


def test_admission_of_everything_pulls_nothing_later():
    whole = small(full=True)
    parts = capacity.admitted(whole, Ask(6000, 64))
    assert parts["pieces"] == 375 * 737_280 and capacity.on_demand(whole, Ask(6000, 64)) == 0
    assert capacity.host(whole, Ask(6000, 64))["cache"] == 375 * 737_280


def test_the_host_keeps_what_was_pulled_and_what_left_the_tail():
    ask = Ask(6000, 1000)
    chosen, pulled = 32, capacity.on_demand(small(critical=5), ask)
    folded = (438 - 375 - 16) * 737_280
    assert capacity.host(small(critical=5), ask)["cache"] == (chosen * 90 + (375 - chosen) * 5) * 8192 + pulled + folded
    assert capacity.host(small(critical=5, keeps=False), ask)["cache"] == chosen * 85 * 8192 + pulled + folded, "the lane's pieces are in the lane"


def test_heads_are_divided_over_ranks_and_copied_where_there_are_too_few():
    moe = shapes.find("Qwen3-235B-A22B")
    one, eight = (sizes.layout_of_shape(moe, "bfloat16", tp=tp) for tp in (1, 8))
    assert eight.kv_heads == 1 and capacity.full_transfer(eight, 1000) == 2 * capacity.full_transfer(one, 1000)
    with pytest.raises(ConfigError, match="divided over 3"):
        sizes.layout_of_shape(moe, "bfloat16", tp=3)


# -- pulls ------------------------------------------------------------------------------------------------------------

WORKING, STEPS, CAPS = st.integers(6, 512), st.integers(0, 100_000), st.sampled_from([0, 0.5, 1, 2, 8])
HYSTERESIS = st.floats(0, 20)


@given(st.data(), WORKING, STEPS, CAPS, HYSTERESIS)
def test_pulls_grow_with_steps_and_stay_below_cap_and_prompt(data, working, steps, cap, hysteresis):
    blocks = data.draw(st.integers(working, 10_000))
    now, later = (pulls.pulled(steps + more, working, blocks, cap, hysteresis) for more in (0, 1))
    assert 0 <= now <= later <= blocks - working
    if cap:
        assert now <= cap * steps + 1e-6 and later - now <= cap + 1e-6


@given(WORKING, st.integers(1, 5000), CAPS, HYSTERESIS)
def test_a_longer_prompt_never_pulls_less(working, steps, cap, hysteresis):
    longer = [pulls.pulled(steps, working, working + more, cap, hysteresis) for more in (0, 1, 10, 100, 1000, 10_000)]
    assert longer == sorted(longer) and longer[0] == 0


def test_pulls_by_hand():
    assert pulls.pulled(8, 32, 375, 2, 0.25) == 16, "early on the cap binds"
    assert pulls.pulled(64, 64, 10**12, 0, 0.25) == pytest.approx(0.8 * 64**0.65 * 64**0.55), "without a cap and an end: A W^C t^B"
    assert pulls.pulled(64, 64, 10**12, 0, 3) == pytest.approx(0.65 * 0.8 * 64**0.65 * 64**0.55), "hysteresis scales A"
    assert pulls.pulled(1e12, 32, 375, 2, 8) == pytest.approx(343), "and at last everything"
    assert pulls.swapped(64, 1000, 0.25) == pytest.approx(0.5 * 64**0.65) and pulls.swapped(64, 67, 0.25) == 3
    assert pulls.swapped(64, 1000, 3) == pytest.approx(0.33 * 0.5 * 64**0.65)


def test_between_and_beyond_what_was_measured():
    assert [pulls.kept(h) for h in (0.25, 1, 3, 8)] == [pytest.approx(factors) for factors in pulls.HYSTERESIS.values()]
    assert pulls.kept(0) == (1, 1) and pulls.kept(1e6) == pulls.kept(8)
    middle = math.sqrt((1 + 1) * (1 + 3)) - 1
    assert pulls.kept(middle) == pytest.approx((0.75, 0.475)), "halfway in log(1 + hysteresis)"


@given(HYSTERESIS, HYSTERESIS, WORKING, st.integers(1, 5000), CAPS)
def test_more_hysteresis_never_pulls_or_swaps_more(one, other, working, steps, cap):
    less, more = sorted((one, other))
    assert pulls.pulled(steps, working, 1000, cap, more) <= pulls.pulled(steps, working, 1000, cap, less) + 1e-9
    assert pulls.swapped(working, 1000, more) <= pulls.swapped(working, 1000, less)


ON_DEMAND = {0.25: {5866: 51_740_672, 5797: 50_847_744, 6000: 38_256_640, 6001: 46_915_584},
             1.0: {5866: 45_514_752, 5797: 44_957_696, 6000: 33_308_672, 6001: 40_173_568},
             3.0: {5866: 36_093_952, 5797: 35_520_512, 6000: 26_525_696, 6001: 30_949_376}, 8.0: {5866: 26_615_808, 5797: 25_133_056}}
"""Served: hysteresis, prompt tokens (of two texts the same, one is counted up), bytes on demand: 64 tokens, budget 512, five of 90 heads critical, cap 2."""
SWAPPED = {0.25: 4.71, 1.0: 2.94, 3.0: 1.55, 8.0: 0.917}
"""Of the same runs: blocks per selecting head and step."""


def test_the_table_of_hysteresis_is_what_was_served(monkeypatch):
    def pace(blocks: int, bytes_: int) -> float:
        """A, relative to the law's, with which it pulls so many bytes."""
        low, high = 0.1, 10.0
        for _ in range(50):
            middle = math.sqrt(low * high)
            monkeypatch.setattr(pulls, "WANTED", 0.8 * middle)
            low, high = (middle, high) if pulls.pulled(63, 32, blocks, 2, 0.25) < bytes_ / 85 / 8192 else (low, middle)
        return low

    base = {prompt: pace(prompt // 16, bytes_) for prompt, bytes_ in ON_DEMAND[0.25].items()}
    assert math.prod(base.values()) ** 0.25 == pytest.approx(1, abs=0.06), "the law itself"
    for hysteresis, measured in ON_DEMAND.items():
        factors = [pace(prompt // 16, bytes_) / base[prompt] for prompt, bytes_ in measured.items()]
        wanted, swaps = pulls.HYSTERESIS[hysteresis]
        assert math.prod(factors) ** (1 / len(factors)) == pytest.approx(wanted, abs=0.006)
        assert max(factors) - min(factors) < 0.05
        assert SWAPPED[hysteresis] / SWAPPED[0.25] == pytest.approx(swaps, abs=0.006)
        assert pulls.swapped(32, 370, hysteresis) == pytest.approx(SWAPPED[hysteresis], rel=0.03)


@given(st.sampled_from([512, 1024, 2048, 4096]), st.integers(4200, 200_000))
def test_more_budget_admits_and_holds_more(budget, prompt):
    less, more, ask = served(budget=budget), served(budget=2 * budget), Ask(prompt, 512)
    assert sum(capacity.admitted(less, ask).values()) < sum(capacity.admitted(more, ask).values())
    assert sum(capacity.device(less, ask).values()) < sum(capacity.device(more, ask).values())
    assert capacity.oasis_load(LLAMA, less, ask, MACHINE).requests >= capacity.oasis_load(LLAMA, more, ask, MACHINE).requests


@given(st.integers(100, 200_000), st.integers(1, 5000), st.sampled_from([0, 16]))
def test_a_lifetime_is_between_admission_and_everything(prompt, output, critical):
    one, ask = served(critical=critical), Ask(prompt, output)
    admitted = sum(capacity.admitted(one, ask).values())
    assert admitted <= capacity.lifetime(one, ask) <= admitted + capacity.on_demand_limit(one, ask) + 1
    assert capacity.on_demand(one, ask) <= capacity.on_demand_at_most(one, ask) + 1
    pages = -(-prompt // 16) * 16
    everything = capacity.full_transfer(one.layout, pages) + sizes.pages(prompt, 16) * one.layout.index_bytes + sizes.manifest(one.layout, prompt)
    assert admitted + capacity.on_demand_limit(one, ask) <= everything


# -- of a node --------------------------------------------------------------------------------------------------------


def test_requests_at_once_by_hand():
    one, ask = served(), Ask(16_384, 512)
    room = int(0.9 * 80 * GIB) - LLAMA.weights
    assert capacity.stock_load(LLAMA, one, ask, MACHINE).requests == room // (16_896 * 131_072) == 27
    held = capacity.oasis_load(LLAMA, one, ask, MACHINE)
    assert (held.requests, held.limit) == (room // sum(capacity.device(one, ask).values()), "HBM")
    kept = sum(capacity.host(one, ask).values())
    for dram, requests in ((3 * kept + (64 << 20) + 1, 3), (3 * kept + (64 << 20) - 1, 2)):
        scarce = capacity.oasis_load(LLAMA, one, ask, Machine(80 << 30, int(dram), 12.5e9, 3.35e12))
        assert (scarce.requests, scarce.limit) == (requests, "DRAM"), "staging comes first"
    assert capacity.oasis_load(LLAMA, one, ask, MACHINE, offered=4).requests == 4


def test_a_step_is_what_it_reads_and_swaps():
    one, ask = served(), Ask(16_384, 512)
    stock, oasis = (of(LLAMA, one, ask, MACHINE, 8) for of in (capacity.stock_load, capacity.oasis_load))
    assert stock.step == pytest.approx((LLAMA.weights_read(8) + 8 * 16_640 * 131_072) / 3.35e12) and stock.swaps == 0
    compact, scored = (2048 + 256) * 131_072, 256 * 1024 * (132 + 12)
    assert oasis.swaps == pytest.approx(8 * 0.5 * 128**0.65 * pulls.kept(OasisConfig().hysteresis)[1] * 256 * 8192 / 55e9)
    tame, wild = (capacity.oasis_load(LLAMA, served(hysteresis=h), ask, MACHINE, 8) for h in (3, 0.25))
    assert tame.swaps == pytest.approx(0.33 * wild.swaps) and tame.step - tame.swaps == pytest.approx(wild.step - wild.swaps)
    assert oasis.step - oasis.swaps == pytest.approx((LLAMA.weights_read(8) + 8 * (compact + scored)) / 3.35e12)
    assert oasis.tokens == pytest.approx(8 / oasis.step) and oasis.wire == pytest.approx(oasis.tokens / 512 * capacity.lifetime(one, ask))


def test_the_link_bounds_what_it_has_to_carry():
    one, ask = served(), Ask(16_384, 512)
    slow = Machine(80 << 30, 1 << 40, 1e9, 3.35e12)
    narrow = capacity.stock_load(LLAMA, one, ask, slow)
    assert narrow.wire > 1e9 and narrow.linked == pytest.approx(1e9 / (2 * GIB) * 512)
    wide = capacity.stock_load(LLAMA, one, ask, Machine(80 << 30, 1 << 40, 1e12, 3.35e12))
    assert wide.linked == wide.tokens


def test_no_room_for_weights_is_told():
    moe = shapes.find("Qwen3-235B-A22B")
    one = served(sizes.layout_of_shape(moe, "bfloat16"))
    assert capacity.stock_load(moe, one, Ask(1000, 10), MACHINE).requests == 0
    assert any("no room" in note for note in show.notes(moe, "bfloat16", one, MACHINE))


@given(st.integers(2100, 200_000), st.sampled_from([0.5, 2, 8]))
def test_the_even_output_is_where_the_two_are_even(prompt, cap):
    one = served(cap=cap)
    even = capacity.even_output(one, prompt)
    full, last = capacity.full_transfer(one.layout, prompt), Ask(prompt, capacity.MOST_OUTPUT)
    if even is None:
        assert capacity.lifetime(one, last) < full
    elif even == 1.0:
        assert sum(capacity.admitted(one, last).values()) >= full
    else:
        assert capacity.lifetime(one, last, even) == pytest.approx(full, rel=1e-5)


def test_the_even_link_is_where_waiting_is_even():
    one, ask = served(), Ask(32_768, 512)
    link = capacity.even_link(one, ask, 0.06)
    full, admitted = capacity.full_transfer(one.layout, ask.prompt), sum(capacity.admitted(one, ask).values())
    assert full / link == pytest.approx(admitted / link + 0.06 * 32.768)
    assert capacity.even_link(one, ask, 0) == math.inf and capacity.even_link(served(budget=65_536), ask, 0.06) == 0


# -- measured ---------------------------------------------------------------------------------------------------------

MEASURED = [(512, 0.25, 5905, 64, 0, 0.098, 0.282), (1024, 0.25, 5905, 64, 0, 0.185, 0.415), (512, 0.25, 5905, 64, 5, 0.149, 0.327),
            (1024, 0.25, 5905, 64, 5, 0.231, 0.461), (1024, 0.25, 6000, 128, 0, 0.180, 0.493), (512, 0.25, 5916, 64, 5, 0.148, 0.321),
            (512, 1, 5916, 64, 5, 0.148, 0.299), (512, 3, 5916, 64, 5, 0.148, 0.267), (1024, 3, 5888, 64, 5, 0.231, 0.406)]
"""Budget, hysteresis, mean prompt tokens, output, critical heads of 90, admitted and lifetime share: docs/benchmarks.md."""


@pytest.mark.parametrize("budget, hysteresis, prompt, output, critical, admitted, lifetime", MEASURED)
def test_it_predicts_what_was_measured_and_the_page_says_how_well(budget, hysteresis, prompt, output, critical, admitted, lifetime):
    one, ask = small(budget, critical=critical, hysteresis=hysteresis), Ask(prompt, output)
    full = capacity.full_transfer(one.layout, prompt)
    first, all_of_it = sum(capacity.admitted(one, ask).values()) / full, capacity.lifetime(one, ask) / full
    assert first / admitted == pytest.approx(1, abs=0.02) and all_of_it / lifetime == pytest.approx(1, abs=0.06)
    row = f"| {budget:,} | {hysteresis} | {critical} of 90 | {output} | {admitted:.3f} | {first:.3f} | {lifetime:.3f} | {all_of_it:.3f} |"
    assert row in DOC.read_text(), row


def results(tmp_path: Path, **changes) -> Path:
    """Two requests at once through stock and Oasis."""
    one, ask = small(critical=5), Ask(6000, 64)
    phases = capacity.admitted(one, ask)
    times = [1.0 + 0.1 * i for i in range(64)]

    def requests(**counted) -> list[Request]:
        return [Request(f"r{i}", 6000, 0.0, 0.0, times, [7] * 64, 276_480_000, **counted) for i in range(2)]

    counted = dict(admitted_bytes_by_phase=phases, lifetime_bytes_by_phase={**phases, "on_demand": round(capacity.on_demand(one, ask) / 2)})
    oasis = Node(concurrency=2, kv_pool_tokens=13_280, kv_pool_tokens_peak=2 * 768, host_reserved_bytes=1 << 31,
                 host_used_bytes_peak=round(4 * capacity.host(one, ask)["cache"]), request_steps=126,
                 swapped_pieces=round(126 * 85 * pulls.swapped(32, 375, one.hysteresis) / 2))
    options = {"budget_tokens": 512, "profile": "gone.json"}
    systems = [System("stock", "stock", "", True), System("oasis", "oasis", "", False, **{"options": options, **changes})]
    model = {"layers": 30, "kv_heads": 3, "head_dim": 64, "itemsize": 4, "block_tokens": 16, "critical_heads": 5}
    runs = [Run("stock", "needle", 0, {"concurrency": 2}, 0, 9.0, requests(), Node(wire_bytes=2 * 276_480_000, concurrency=2, kv_pool_tokens=13_280), Meters()),
            Run("oasis", "needle", 0, {"concurrency": 2}, 1, 9.0, requests(**counted), oasis, Meters())]
    found = Results("", "", "", 0, model, {}, {}, {"ttft": 1, "itl": 1}, {}, 1, "stock", systems,
                    [Workload("needle", "", 2, [6000] * 3, [64] * 3, "", False)], runs)
    save(found, tmp_path / "results.json")
    return tmp_path / "results.json"


def test_predictions_stand_beside_measurements(tmp_path):
    rows = {(row.system, row.figure): row for row in check.compare(load(results(tmp_path)))}
    ratios = {key: round(row.ratio, 3) for key, row in rows.items()}
    lifetime = rows["oasis", "lifetime bytes"]
    assert ratios == {("stock", "wire bytes"): 1.0, ("stock", "requests at once"): 1.0, ("oasis", "admitted bytes"): 1.0, ("oasis", "requests at once"): 1.0,
                      ("oasis", "lifetime bytes"): round(lifetime.predicted / lifetime.measured, 3), ("oasis", "KV pool tokens"): 1.0,
                      ("oasis", "decode host bytes"): 0.5, ("oasis", "swaps per head and step"): 2.0}
    one, ask = small(critical=5), Ask(6000, 64)
    assert lifetime.predicted == pytest.approx(2 * capacity.lifetime(one, ask)) and lifetime.ratio > 1.1
    worst = check.worst(rows.values())
    assert worst["lifetime bytes"] is lifetime and worst["decode host bytes"].ratio == pytest.approx(0.5, abs=1e-6)


def test_a_pool_that_holds_one_of_three_requests_bounds_what_is_predicted(tmp_path):
    caches = []
    for reuse in ("", "oasis"):
        found = load(results(tmp_path, flags={"all": ["--radix-cache-backend", reuse]}))
        found.runs[1].node.kv_pool_tokens = 1000
        requests = found.runs[1].requests
        requests.append(replace(requests[0], prompt_tokens=200))  # fits the pool whole, beside others like it
        requests[1].prompt_tokens = 1100
        rows = {row.figure: row.predicted for row in check.compare(found) if row.system == "oasis"}
        assert (rows["requests at once"], rows["KV pool tokens"]) == (1, 768)
        caches.append(rows["decode host bytes"])
    alone, both = (small(critical=5, keeps=keeps) for keeps in (False, True))
    assert caches[0] == pytest.approx(capacity.host(alone, Ask(6000, 64))["cache"]), "the larger one"
    assert caches[1] == pytest.approx(sum(capacity.host(both, Ask(prompt, 64))["cache"] for prompt in (6000, 1100, 200))), "what is kept stays"


def test_the_command_prints_them_and_names_what_a_file_lacks(tmp_path):
    path = results(tmp_path)
    shown = CliRunner().invoke(app, ["plan", "--check", str(path), "--markdown"])
    assert shown.exit_code == 0 and "| worst decode host bytes | oasis | needle, concurrency 2, repeat 0 |" in shown.stdout and "| 0.50 |" in shown.stdout
    figures = json.loads(CliRunner().invoke(app, ["plan", "--check", str(path), "--json"]).stdout)
    assert figures["worst"]["admitted bytes"] == 1.0 and len(figures["runs"]) == 8
    raw = json.loads(path.read_text())
    del raw["model"]["itemsize"]
    path.write_text(json.dumps(raw))
    failed = CliRunner().invoke(app, ["plan", "--check", str(path)])
    assert failed.exit_code == 1 and "itemsize" in failed.stderr


def test_options_and_flags_of_a_system_become_the_model():
    model = {"layers": 30, "kv_heads": 3, "head_dim": 64, "itemsize": 4, "block_tokens": 16}
    full = System("full", "oasis", "", False, flags={"all": ["--radix-cache-backend", ""]}, options={"admission": "full", "fetch_blocks_per_step": 4})
    one = check.served_of(model, full)
    assert (one.full, one.cap, one.keeps, one.critical, one.budget.working) == (True, 4, False, 0, 64)
    exact = check.served_of(model, System("exact", "oasis", "", True, options={"mode": "exact"}))
    assert exact.keeps and capacity.admitted(exact, Ask(6000, 64))["records"] == 375 * 737_280
    swept = [check.served_of(model, System(name, "oasis", "", False), {"budget": 512}).budget.working for name in ("oasis", "oasis:1024")]
    assert swept == [32, 64]
    held = [check.served_of(model, System("oasis", "oasis", "", False, options=options)).hysteresis for options in ({"hysteresis": 0.5}, {})]
    assert held == [0.5, OasisConfig().hysteresis]
    profiled = System("oasis", "oasis", "", False, options={"profile": "gone.json"}, critical_heads=7)
    assert check.served_of({**model, "critical_heads": 5}, profiled).critical == 7, "each system has its own"
    assert check.served_of({**model, "critical_heads": 5}, replace(profiled, critical_heads=None)).critical == 5
    with pytest.raises(ConfigError, match="critical_heads"):
        check.served_of(model, System("oasis", "oasis", "", False, options={"profile": "gone.json"}))


def test_swaps_are_those_of_steps_of_requests_that_select(tmp_path):
    found = load(results(tmp_path, options={"budget_tokens": 512, "profile": "gone.json", "hysteresis": 1}))
    run = found.runs[1]
    run.requests[1] = replace(run.requests[1], prompt_tokens=200)  # selects nothing
    predicted = {row.figure: row.predicted for row in check.compare(found)}
    assert predicted["swaps per head and step"] == pytest.approx(pulls.swapped(32, 375, 1))
    run.requests[1] = replace(run.requests[1], prompt_tokens=528, output_ids=[7] * 300)  # one block beside its working set
    run.node.kv_pool_tokens, run.node.swapped_pieces = None, 85
    (row,) = (row for row in check.compare(found) if row.figure == "swaps per head and step")
    assert row.predicted == pytest.approx((63 * pulls.swapped(32, 375, 1) + 299) / (63 + 299)), "by steps"
    assert row.measured == pytest.approx(1 / 126), "without a pool too"
    run.node.swapped_pieces = None
    assert not any(row.figure == "swaps per head and step" for row in check.compare(found))


def test_predictions_of_a_run_by_hand():
    """Two requests of 5,998 tokens at once, 30 layers, 3 KV heads, float32: pieces of 8,192 bytes, 374 whole blocks, 5 of 90 heads critical, budget 512."""
    times = [1.0 + 0.1 * i for i in range(9)]
    # Served, profile of five heads: manifest, partial page, summaries; (32 x 90 + 342 x 5) pieces.
    phases = {"manifest": 156_206, "records": 0, "partial_page": 737_280, "summaries": 374 * (90 * 76 + 8), "pieces": (2880 + 1710) * 8192, "on_demand": 0}
    assert (phases["summaries"], phases["pieces"]) == (2_561_152, 37_601_280)
    demanded = 8 * 85 * 8192  # 8 steps to a cap of 1
    requests = [Request(f"r{i}", 5998, 0.0, 0.0, times, [7] * 9, 5998 * 46_080, phases, {**phases, "on_demand": demanded}) for i in range(2)]
    cache = (32 + 8) * 85 * 8192  # without the lane's; nothing that was generated has left the tail
    node = Node(concurrency=1, kv_pool_tokens=13_120, kv_pool_tokens_peak=2 * (512 + 256), host_reserved_bytes=1 << 32, host_used_bytes_peak=round(2 * cache / 0.8),
                request_steps=16, swapped_pieces=16 * 85)
    stock = Node(wire_bytes=2 * 375 * 16 * 46_080, concurrency=2, kv_pool_tokens=13_120)
    options = {"budget_tokens": 512, "profile": "gone.json", "fetch_blocks_per_step": 1, "hysteresis": 3}
    found = Results("", "", "", 0, {"layers": 30, "kv_heads": 3, "head_dim": 64, "itemsize": 4, "block_tokens": 16, "critical_heads": 5}, {}, {},
                    {"ttft": 1, "itl": 1}, {}, 1, "stock", [
                        System("stock", "stock", "", True),
                        System("oasis", "oasis", "", False, options=options, flags={"all": ["--radix-cache-backend", ""]})], [], [
                        Run("stock", "needle", 0, {}, 0, 9.0, [replace(r, admitted_bytes_by_phase=None) for r in requests], stock, Meters()),
                        Run("oasis", "needle", 0, {}, 1, 9.0, requests, node, Meters())])
    ratios = {(row.system, row.figure): row.ratio for row in check.compare(found)}
    assert ratios == pytest.approx({
        ("stock", "wire bytes"): 5998 / 6000, ("stock", "requests at once"): 1.0, ("oasis", "admitted bytes"): 1.0, ("oasis", "lifetime bytes"): 1.0,
        ("oasis", "swaps per head and step"): 0.5 * 0.33 * 32**0.65, ("oasis", "requests at once"): 2.0, ("oasis", "KV pool tokens"): 1.0,
        ("oasis", "decode host bytes"): 0.8}, abs=2e-5)


def timed(first: float, tokens: int, gap: float = 0.1, sent: float = 0.0, prompt: int = 6000) -> Request:
    return Request("", prompt, sent, sent, [first + gap * i for i in range(tokens)], [7] * tokens)


def test_requests_that_decode_at_one_time_are_counted_not_those_that_wait():
    # Eight sent together, each prefilled for a second after the one before, with 12 tokens in 2.2 seconds: three at a time, one of them for a moment only.
    staggered = [timed(1.0 + i, 12, 0.2) for i in range(8)]
    assert check.decoding_at_once(staggered, steps=0) == 3, "until a token is there the next has its first"
    assert check.decoding_at_once(staggered) == 1, "two are together for 6 tokens at most"
    assert check.decoding_at_once([timed(1.0 + i, 25, 0.2) for i in range(8)]) == 4, "of 4.8 seconds 3.2 begin what lasts 8 tokens"
    assert check.decoding_at_once([timed(1.0, 12, sent=5.0), timed(6.0, 12)]) == 2, "times count from when each was sent"
    assert check.decoding_at_once([timed(1.0, 3), timed(1.1, 3)]) == 1 and check.decoding_at_once([timed(1.0, 3)] * 2) == 2


def test_host_memory_is_what_each_request_has_by_then():
    one = small(keeps=False)
    early, late = timed(1.0, 64), timed(5.0, 64)  # the first ends at 7.3, when the other has 24
    whole, part = (capacity.host(one, Ask(6000, 64), tokens)["cache"] for tokens in (None, 24))
    assert whole > part > 32 * 90 * 8192
    assert check._host_peak(one, [early, late], 8) == pytest.approx(whole + part)
    assert check._host_peak(one, [early, late], 1) == pytest.approx(whole), "one fits the pool"
    assert check._host_peak(one, [timed(1.0, 64), timed(9.0, 64)], 8) == pytest.approx(whole), "one after the other"


def test_what_is_generated_goes_to_the_host_when_it_leaves_the_tail():
    one, ask = small(), Ask(6000, 1000)  # 375 whole blocks, a tail of 16
    early, late = (capacity.host(one, ask, tokens)["cache"] - capacity.on_demand(one, ask, tokens) for tokens in (16 * 16, 16 * 20))
    assert early == pytest.approx(32 * 90 * 8192) and late == pytest.approx(early + 4 * 90 * 8192)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, rate", [("100gbit", 12.5e9), ("200 mbit", 25e6), ("3.35TB/s", 3.35e12), ("1GiB/s", 1 << 30), ("8bit/s", 1)])
def test_rates(text, rate):
    assert units.parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "100", "10GB", "fast", "-1gbit", "0gbit", "10 furlong/s"])
def test_wrong_rates_are_named(text):
    with pytest.raises(ConfigError):
        units.parse_rate(text)


def test_token_lists():
    assert units.parse_tokens("16384, 32768") == [16_384, 32_768]
    for text in ("", "16k", "0", "5,,6", "-4", "99999999999"):
        with pytest.raises(ConfigError, match="token counts"):
            units.parse_tokens(text)


@pytest.mark.parametrize("arguments, told", [(["--model", "Llama-9"], "Qwen/Qwen3-8B"), (["--link", "fast"], "not a rate"),
                                             (["--budget", "32"], "budget_tokens"), (["--kv-dtype", "int3"], "float8"), (["--hbm", "many"], "not a size"), (["--check", "gone.json"], "gone.json")])
def test_wrong_arguments_are_told_in_one_line(arguments, told):
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert done.exit_code == 1 and told in done.stderr and done.stderr.count("\n") == 1


def test_json_has_every_figure_and_no_infinity():
    done = CliRunner().invoke(app, ["plan", "--json", "--context", "16384", "--rank-seconds", "0.06", "--requests", "4", "--kv-dtype", "float8"])
    out = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
    (forecast,) = out["forecasts"]
    assert forecast["full_transfer_bytes"] == GIB and forecast["oasis"]["requests"] == forecast["stock"]["requests"] == 4
    assert forecast["even_link"] == pytest.approx((GIB - forecast["admitted_bytes"]) / (0.06 * 16.384))
    assert "codes" in out["notes"][0]
    default = OasisConfig().hysteresis
    bytes_ = [json.loads(CliRunner().invoke(app, ["plan", "--json", "--context", "16384", *more]).stdout)["forecasts"][0]["lifetime_bytes"]
              for more in ([], ["--hysteresis", str(default)], ["--hysteresis", "0.25"])]
    assert bytes_[:2] == [capacity.lifetime(served(), Ask(16_384, 512))] * 2
    assert bytes_[2] == capacity.lifetime(served(hysteresis=0.25), Ask(16_384, 512)) > capacity.lifetime(served(hysteresis=8), Ask(16_384, 512))
    free = json.loads(CliRunner().invoke(app, ["plan", "--json", "--context", "16384"]).stdout)
    assert free["forecasts"][0]["even_link"] is None


def test_the_command_prints_a_table():
    done = CliRunner().invoke(app, ["plan", "--model", "Qwen3-235B-A22B", "--tp", "8", "--context", "16384", "--rank-seconds", "0.06"])
    assert done.exit_code == 0 and "full transfer" in done.stdout and "first token sooner" in done.stdout
    assert "planned only" in done.stderr and "2 times" in done.stderr


def test_the_tables_of_the_page_are_the_commands_output():
    page = DOC.read_text()
    commands = re.findall(r"^    (oasis plan .*--markdown)$", page, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0 and done.stdout.strip() in page, f"run: {command}"
