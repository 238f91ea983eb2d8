"""The quality tool's figures of what a node counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from bench_quality import option  # noqa: E402
from quality_figures import Counted, grouped, kind  # noqa: E402


def report(steps: dict, mass: list[float] | None = None, counts: list[int] | None = None) -> dict:
    sets = {"steps": steps}
    if mass:
        sets["heads"] = {"misses": [0] * 4, "wanted": [8] * 4, "missed_mass": mass}
    if counts:
        sets["stalls"] = {"bounds_ms": [10, 100], "counts": counts, "sum_ms": 1.0, "count": sum(counts)}
    return {"layout": {"num_layers": 2, "kv_heads": 2}, "working_sets": sets}


def test_the_worst_head_is_of_the_request_not_of_the_node():
    before = report({"request_steps": 100, "wanted": 10, "misses": 9}, [90.0, 0, 0, 0], [50, 0, 0])
    after = report({"request_steps": 110, "wanted": 110, "misses": 14, "verify_steps": 4, "tokens_accepted": 9, "missed_mass_ppm": 2_000_000},
                   [91.0, 0, 0, 4.0], [50, 4, 0])
    found = Counted.between(before, after).figures()
    assert found["worst_head"] == {"layer": 1, "head": 1, "missed_mass": 0.4}
    assert (found["misses_share"], found["missed_mass"], found["tokens_per_verify"]) == (0.05, 0.2, 2.25)
    assert (found["stalls"], found["stall_p50_ms"], found["fallback_share"]) == (4, 55.0, None)


def test_a_node_that_reports_little_gives_none():
    found = Counted.between(report({}), report({"misses": 1, "wanted": 4})).figures()
    assert found.pop("misses_share") == 0.25 and set(found.values()) == {None}
    assert Counted.between({"layout": {"num_layers": 2, "kv_heads": 2}}, {"layout": {"num_layers": 2, "kv_heads": 2}}).figures()["misses_share"] is None


def measured(case: str, kl: float, misses: int, counts: list[int], itl: float | None = 0.1) -> tuple[dict, Counted]:
    row = {"case": case, "workload": kind(case), "budget": 512, "kl": kl, "kl_first_8": 1.0, "top1": 0.5, "itl_seconds": itl, "bytes_by_phase": {"pieces": 10}}
    return row, Counted.between(report({}), report({"misses": misses, "wanted": 100}, counts=counts))


def test_lines_are_means_of_requests_and_shares_of_all_that_was_counted():
    both = [measured("code_a", 0.1, 10, [9, 1, 0]), measured("prose", 0.9, 0, [0, 0, 5]), measured("code_b", 0.3, 30, [9, 1, 0], itl=None)]
    code, prose = grouped(both, "workload", "budget")
    assert (code["workload"], code["budget"], code["n"], code["worst"], code["worst_kl"]) == ("code", 512, 2, "code_b", 0.3)
    assert (code["kl"], code["misses_share"], code["itl_seconds"], code["admitted"]) == (pytest.approx(0.2), 0.2, 0.1, None)
    assert code["stalls"] == 20 and code["stall_p95_ms"] == pytest.approx(55.0) and code["bytes_by_phase"] == {"pieces": 10}
    assert (prose["n"], prose["stall_p50_ms"]) == (1, 100.0)
    (everything,) = grouped(both, "budget")
    assert everything["n"] == 3 and everything["misses_share"] == pytest.approx(40 / 300)


def test_options_are_json_or_words():
    assert [option(text) for text in ("cap=3", "summary=none", "x=0.5", "host_cache_bytes=1GiB")] == [
        ("cap", 3), ("summary", "none"), ("x", 0.5), ("host_cache_bytes", "1GiB")]
