"""``oasis bench`` as a user runs it: one command, a folder with results that add up and a report that has them. With two hosts where
there can be some; the shared session servers are not used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from oasis_sglang.bench import records

HOSTED = os.getuid() == 0 and shutil.which("tc") is not None
LINK = 60e6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    hosts = ["--hosts", "--link", "60mbit"] if HOSTED else []
    argv = [sys.executable, "-P", "-m", "oasis_sglang.cli", "bench", "--model", "4", "--systems", "stock,exact,oasis:256", "--workloads", "needle,agent",
            "--tokens", "1500", "--output", "8", "--requests", "4", "--turns", "3", "--concurrency", "2", "--repeats", "1", "--quality", "4",
            "--serving", "--num-prompts 2 --random-input-len 100 --random-output-len 4", "--note", "A note <of> ours.", "--out", str(folder), *hosts]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "stdout").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return records.load(folder / "results.json")


def run_of(results, system, workload):
    [run] = [run for run in results.runs if (run.system, run.workload) == (system, workload)]
    return run


def summary_of(results, system, workload):
    [summary] = [s for s in results.summary if (s.system, s.workload) == (system, workload)]
    return {name: spread.median for name, spread in summary.figures.items()}


def test_every_request_was_answered_in_full(results):
    assert len(results.runs) == 6
    for run in results.runs:
        assert [request.error for request in run.requests] == [None] * len(run.requests)
        assert all(len(r.output_ids) == len(r.token_times) > 0 and r.token_times == sorted(r.token_times) for r in run.requests)
    assert [len(run_of(results, "stock", name).requests) for name in ("needle", "agent")] == [4, 3]


def test_systems_that_attend_to_everything_answer_as_stock_does(results):
    found = {(e.system, e.workload): (e.equal, e.of, e.required) for e in results.equality}
    assert found["exact", "needle"] == (4, 4, True)
    assert found["exact", "agent"] == (3, 3, True)
    assert found["oasis:256", "needle"][2] is False


def test_bytes_are_what_arithmetic_says(results):
    token = results.model["token_bytes"]
    assert token == 2 * 4 * 3 * 64 * 4
    for request in run_of(results, "exact", "needle").requests:
        whole = -(-request.prompt_tokens // 16) * 16 * token
        phases = request.admitted_bytes_by_phase
        assert phases["records"] + phases["partial_page"] == whole
        assert request.full_transfer_bytes == request.prompt_tokens * token
    stock, ours = (summary_of(results, name, "needle") for name in ("stock", "oasis:256"))
    assert 1.0 <= stock["admitted_share"] <= 1.02
    assert 0.15 < ours["admitted_share"] < 0.35 and ours["admitted_share"] < ours["lifetime_share"] <= 1.02
    assert ours["kv_pool_tokens"] == stock["kv_pool_tokens"] and ours["kv_pool_tokens_peak"] <= 2 * (256 + 256)


def test_later_turns_bring_little(results):
    by_turn = [sum(request.lifetime_bytes_by_phase.values()) / request.full_transfer_bytes for request in run_of(results, "exact", "agent").requests]
    assert by_turn[0] > 1.0 > 0.3 > max(by_turn[1:])


def test_memory_is_counted_and_metered(results):
    found = summary_of(results, "oasis:256", "needle")
    assert 0 < found["host_used_bytes_peak"] <= found["host_reserved_bytes"]
    assert found["tier_memory_bytes"] > 0 and found["decode_memory_bytes"] > 0
    spans = [(r.sent + r.token_times[0], r.sent + r.token_times[-1]) for r in run_of(results, "oasis:256", "needle").requests]
    assert found["client_concurrency"] == max(sum(begin <= at <= end for begin, end in spans) for at, _ in spans) <= 2, "answers may be too short to overlap"
    checks = [check for check in results.checks if "host cache" in check.name]
    assert [(check.system, check.workload) for check in checks] == [("oasis:256", "needle"), ("oasis:256", "agent")]
    assert all(check.passed for check in checks), [check.metered / check.counted for check in checks]


@pytest.mark.skipif(not HOSTED, reason="NOT RUN: two hosts need root and iproute2")
def test_the_interface_agrees_with_the_counters(results):
    checks = [check for check in results.checks if "interface" in check.name]
    assert len(checks) == 6
    assert all(check.passed for check in checks), [(c.system, c.workload, c.metered / c.counted) for c in checks]
    moved = run_of(results, "stock", "needle")
    least = moved.meters.wire_in_bytes * 8 / LINK
    assert moved.seconds > least, "no faster than the link"


def test_quality_has_a_row_for_each_answer_that_is_known(results):
    assert [(q.system, q.workload, q.steps) for q in results.quality] == [("oasis:256", "needle", 4)] * 4
    assert all(0 < q.kl <= q.kl_worst_token for q in results.quality)


def test_sglangs_own_load_generator_ran_on_each(results):
    assert [row["system"] for row in results.serving] == ["stock", "exact", "oasis:256"]
    assert all(row["completed"] == 2 for row in results.serving)


def test_the_report_has_it_all_and_needs_nothing(folder, results):
    html = (folder / "report.html").read_text()
    assert "A note &lt;of&gt; ours." in html and "oasis:256" in html
    assert not re.search(r"""(src|href)=["']?https?:""", html)
    assert (folder / "summary.md").stat().st_size > 500 and list((folder / "plots").glob("*.png"))
    assert "needle" in (folder / "stdout").read_text()


def test_the_capacity_model_reads_what_was_measured(folder):
    done = subprocess.run([sys.executable, "-P", "-m", "oasis_sglang.cli", "plan", "--check", str(folder / "results.json"), "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
