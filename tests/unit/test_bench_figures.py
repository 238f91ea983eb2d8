"""Figures of a run against values worked out by hand."""

import pytest

from oasis_sglang.bench import figures, records
from oasis_sglang.bench.quality import FLAGS
from oasis_sglang.bench.records import Meters, Node, Quality, Request, Run, System
from oasis_sglang.bench.run import DETERMINISTIC

SLO = {"ttft": 1.0, "itl": 0.2}


def request(name, sent, times, **more):
    return Request(name, 100, sent, sent, times, list(range(len(times))), **more)


def run_of(*requests, system="oasis", seconds=4.0, node=None, repeat=0, point=None, meters=None):
    return Run(system, "needle", repeat, point or {}, 0, seconds, list(requests), node or Node(), meters or Meters())


def results_of(runs, systems=("stock", "oasis"), dense=("stock",), quality=()):
    return records.Results("t", "c", "now", 0, {}, {}, {}, SLO, {}, 1, systems[0], [System(n, "oasis", "", n in dense) for n in systems], [], runs=list(runs), quality=list(quality))


def test_latency_is_what_the_client_saw():
    found = figures.of_run(run_of(request("a", 0.0, [0.5, 0.6, 0.8]), request("b", 1.0, [2.0, 2.0, 2.3])), SLO)
    assert found["ttft_mean"] == pytest.approx(1.25)
    assert found["ttft_p50"] == pytest.approx(1.25)
    assert found["ttft_p95"] == found["ttft_worst"] == 2.0
    assert found["itl_mean"] == pytest.approx((0.1 + 0.2 + 0.0 + 0.3) / 4)
    assert found["itl_worst"] == pytest.approx(0.3)
    assert found["tpot_mean"] == pytest.approx((0.15 + 0.15) / 2)


def test_rates_count_tokens_and_requests_over_the_right_time():
    found = figures.of_run(run_of(request("a", 0.0, [0.5, 0.6, 0.8]), request("b", 1.0, [2.0, 2.0, 2.3]), seconds=3.3), SLO)
    assert found["output_tokens_per_second"] == pytest.approx(6 / 3.3)
    assert found["decode_tokens_per_second"] == pytest.approx(4 / (3.3 - 0.5))
    assert found["requests_per_second"] == pytest.approx(2 / 3.3)
    assert found["goodput"] == pytest.approx(1 / 3.3), "b's first token is late"
    assert found["slo_share"] == 0.5


def test_a_failed_request_is_counted_as_failed_and_as_outside_the_slo():
    found = figures.of_run(run_of(request("a", 0.0, [0.5, 0.6]), request("b", 0.0, [], error="refused")), SLO)
    assert found["failed"] == 1
    assert found["slo_share"] == 0.5
    assert found["ttft_mean"] == 0.5


def test_bytes_per_request_and_of_what_a_full_transfer_takes():
    phases = {"pieces": 200, "manifest": 50}
    more = dict(full_transfer_bytes=1000, admitted_bytes_by_phase=phases, lifetime_bytes_by_phase={**phases, "on_demand": 150})
    found = figures.of_run(run_of(request("a", 0, [1.0], **more), request("b", 0, [1.0], **more), node=Node(wire_bytes=790)), SLO)
    assert (found["admitted_bytes"], found["lifetime_bytes"]) == (250, 400)
    assert (found["admitted_share"], found["lifetime_share"]) == (0.25, 0.4)
    assert found["wire_bytes"] == 790


def test_a_request_that_decode_no_longer_reports_flatters_nobody():
    more = dict(full_transfer_bytes=1000, admitted_bytes_by_phase={"pieces": 100}, lifetime_bytes_by_phase={"pieces": 300})
    found = figures.of_run(run_of(request("a", 0, [1.0], **more), request("b", 0, [1.0], full_transfer_bytes=1000)), SLO)
    assert (found["admitted_share"], found["lifetime_share"], found["admitted_bytes"]) == (0.1, 0.3, 100)


def test_a_system_that_only_counts_in_all_admits_all_it_transfers():
    found = figures.of_run(run_of(request("a", 0, [1.0], full_transfer_bytes=1000), request("b", 0, [1.0], full_transfer_bytes=1000), node=Node(wire_bytes=2040)), SLO)
    assert found["admitted_bytes"] == found["lifetime_bytes"] == 1020
    assert found["admitted_share"] == pytest.approx(1.02)


def test_what_nobody_recorded_is_absent():
    found = figures.of_run(run_of(request("a", 0, [1.0])), SLO)
    for name in ("admitted_share", "misses_share", "accuracy", "wire_bytes", "itl_mean", "kv_pool_tokens", "cluster_host_bytes_peak", "decode_tokens_per_second"):
        assert name not in found, name
    assert found["failed"] == 0


def test_memory_and_selection_come_from_the_node():
    node = Node(host_used_bytes_peak=30, tier_used_bytes_peak=70, wanted=10, misses=3, concurrency=4)
    found = figures.of_run(run_of(request("a", 0, [1.0]), node=node, meters=Meters(wire_in_bytes=5, client_concurrency=2)), SLO)
    assert found["cluster_host_bytes_peak"] == 100
    assert found["misses_share"] == pytest.approx(0.3)
    assert (found["concurrency"], found["client_concurrency"], found["wire_metered_bytes"]) == (4, 2, 5)


def test_what_the_tiers_had_kept_is_not_this_runs():
    def of(kept):
        node = Node(host_used_bytes_peak=30, tier_used_bytes_peak=70, tier_kept_bytes=kept)
        return figures.of_run(run_of(request("a", 0, [1.0]), node=node), SLO)["cluster_host_bytes_peak"]
    assert (of(None), of(0), of(50), of(90)) == (100, 100, 50, 30)


def test_a_run_without_an_answer_has_rates_of_nothing_and_no_latency():
    run = run_of(request("a", 0.0, [], error="x"), request("b", 0.0, [], error="x"), seconds=0.0, node=Node(wire_bytes=500))
    assert figures.of_run(run, SLO) == {"failed": 2, "output_tokens_per_second": 0, "decode_tokens_per_second": 0, "requests_per_second": 0, "goodput": 0,
                                        "slo_share": 0, "wire_bytes": 500}


def test_a_repeat_in_which_all_failed_is_in_the_median():
    runs = [run_of(request("a", 0, [0.5, 0.6], error=error), repeat=i) for i, error in enumerate((None, "x", "x"))]
    [summary] = figures.summarise(results_of(runs))
    found = summary.figures
    assert (found["output_tokens_per_second"].median, found["output_tokens_per_second"].high, found["output_tokens_per_second"].n) == (0, 0.5, 3)
    assert (found["goodput"].median, found["slo_share"].mean, found["failed"].median) == (0, pytest.approx(1 / 3), 1)
    assert (found["ttft_mean"].median, found["ttft_mean"].n) == (0.5, 1)


def test_without_the_full_transfer_of_every_request_there_is_no_share():
    found = figures.of_run(run_of(request("a", 0, [1.0], full_transfer_bytes=1000), request("b", 0, [1.0]), node=Node(wire_bytes=800)), SLO)
    assert found["admitted_bytes"] == 400
    assert not {"full_transfer_bytes", "admitted_share", "lifetime_share"} & set(found)


def test_quality_of_two_points_is_two():
    rows = [Quality("oasis", "needle", "a", {"budget": budget}, 4, kl, kl, 0.9) for budget, kl in ((256, 0.5), (512, 0.1))]
    assert [(s.point, s.figures["kl"].median) for s in figures.summarise(results_of([], quality=rows))] == [({"budget": 256}, 0.5), ({"budget": 512}, 0.1)]


def test_the_definition_of_kl_says_how_it_is_measured():
    assert DETERMINISTIC["on_miss"] == "wait" and f"on_miss: wait, at most {DETERMINISTIC['wait_seconds']:.0f} s" in figures.FIGURES["kl"].definition
    assert "--disable-overlap-schedule" in FLAGS and "without SGLang's overlap schedule" in figures.FIGURES["kl"].definition


def test_every_figure_is_defined_and_every_definition_is_made():
    more = dict(full_transfer_bytes=1000, admitted_bytes_by_phase={"pieces": 1}, lifetime_bytes_by_phase={"pieces": 1}, score=1.0)
    node = Node(wire_bytes=1, concurrency=1, kv_pool_tokens=1, kv_pool_tokens_peak=1, host_reserved_bytes=1, host_used_bytes_mean=1.0, host_used_bytes_peak=1,
                tier_used_bytes_peak=1, wanted=1, misses=1, missed_mass=0.1, stalls=0, stall_seconds=0.0, computed_tokens=1, tokens_per_step=1.0,
                request_steps=2, swapped_pieces=7, device_extra_bytes=1)
    run = run_of(request("a", 0, [1.0, 1.5], **more), node=node, meters=Meters(1, 1, 1, 1, 1, 1.0))
    [summary] = figures.summarise(results_of([run], quality=[Quality("oasis", "needle", "a", {}, 4, 0.1, 0.2, 0.9)]))
    assert set(summary.figures) == set(figures.FIGURES)


def test_a_summary_has_the_spread_over_repeats():
    runs = [run_of(request("a", 0, [t]), repeat=i) for i, t in enumerate((1.0, 5.0, 2.0))]
    [summary] = figures.summarise(results_of(runs))
    found = summary.figures["ttft_mean"]
    assert (found.median, found.low, found.high, found.n) == (2.0, 1.0, 5.0, 3)
    assert found.mean == pytest.approx(8 / 3)


def test_points_are_kept_apart():
    runs = [run_of(request("a", 0, [1.0]), point={"concurrency": n}) for n in (1, 4)]
    assert [s.point for s in figures.summarise(results_of(runs))] == [{"concurrency": 1}, {"concurrency": 4}]


def test_answers_are_compared_with_the_base_of_the_same_repeat():
    same, other = request("a", 0, [1.0, 2.0]), request("a", 0, [1.0, 2.0])
    other.output_ids = [7, 8]
    runs = [run_of(same, system="stock"), run_of(other, system="stock", repeat=1), run_of(same, system="oasis"), run_of(same, system="oasis", repeat=1)]
    [found] = figures.equality(results_of(runs, dense=("stock", "oasis")))
    assert (found.system, found.equal, found.of, found.required) == ("oasis", 1, 2, True)
    [found] = figures.equality(results_of(runs))
    assert not found.required


def test_requests_of_one_name_at_two_points_are_two():
    a, b = request("a", 0, [1.0]), request("a", 0, [1.0])
    b.output_ids = [9]
    runs = [run_of(a, system="stock", point={"context": 1}), run_of(b, system="stock", point={"context": 2}),
            run_of(a, point={"context": 1}), run_of(a, point={"context": 2})]
    assert [(e.point["context"], e.equal) for e in figures.equality(results_of(runs))] == [(1, 1), (2, 0)]


def test_results_survive_the_file(tmp_path):
    results = results_of([run_of(request("a", 0, [1.0]))])
    records.save(results, tmp_path / "results.json")
    assert records.load(tmp_path / "results.json") == results
    results.schema = 99
    records.save(results, tmp_path / "other.json")
    with pytest.raises(ValueError, match="schema 99"):
        records.load(tmp_path / "other.json")
