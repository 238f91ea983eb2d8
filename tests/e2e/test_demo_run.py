"""``oasis demo`` on the 4-layer cut: everything the report says is there, and adds up."""

import json

from oasis_sglang import demo

OUTPUT_TOKENS = 16


def test_the_report_is_complete_exact_and_adds_up(models, stacks, processes, tmp_path):
    stacks.stop()  # its stacks are its own: leave it the machine
    report = demo.run(models.s4, processes, run_dir=tmp_path, output_tokens=OUTPUT_TOKENS, progress=print)
    assert json.loads(json.dumps(report)) == report
    requests = report["requests"]
    assert [entry["name"] for entry in requests[:3]] == ["long", "long" + demo.SECOND_TURN, "medium"]
    first, second, medium = requests[:3]
    assert (first["prompt_tokens"], medium["prompt_tokens"]) == (demo.LONG_TOKENS, demo.MEDIUM_TOKENS)
    assert second["prompt_tokens"] > demo.LONG_TOKENS + OUTPUT_TOKENS
    assert len(requests) == 13
    layout, budget = report["config"]["layout"], report["config"]["oasis"]["budget_tokens"]
    token_bytes = 2 * layout["num_layers"] * layout["kv_heads"] * layout["head_dim"] * layout["itemsize"]
    for entry in requests:
        selected = entry["prompt_tokens"] > budget and not entry["name"].endswith(demo.EXACT)
        assert entry["output_tokens"] == OUTPUT_TOKENS
        assert selected or entry["agreement_tokens"] == OUTPUT_TOKENS, entry["name"]
        assert entry["full_transfer_bytes"] == token_bytes * entry["prompt_tokens"]
        assert entry["admitted_bytes"] == sum(entry["admitted_bytes_by_phase"].values())
        assert entry["lifetime_bytes"] >= entry["admitted_bytes"]
        assert (entry["admitted_bytes"] >= entry["full_transfer_bytes"]) != selected
        assert all(entry[f"{side}ttft_seconds"] > 0 for side in ("", "stock_"))
        assert all(entry[f"{side}itl_seconds_mean"] > 0 for side in ("", "stock_"))
    assert sum(entry["admitted_bytes"] < 0.25 * entry["full_transfer_bytes"] for entry in requests) == 2, "the long ones"
    kept = first["admitted_bytes_by_phase"], second["admitted_bytes_by_phase"]
    assert 4 * kept[1]["summaries"] < kept[0]["summaries"] and 2 * kept[1]["pieces"] < kept[0]["pieces"], "the second turn finds most of it there"
    assert report["kv_pool_tokens_peak"] >= demo.LONG_TOKENS
    assert report["decode_host_bytes_peak"] > 0
    assert report["versions"]["sglang"] == "0.5.23"
