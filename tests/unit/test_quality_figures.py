"""The quality bench: forced tokens with and without drafts, and figures of what a node counted."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from bench_quality import Teacher, option  # noqa: E402
from quality_figures import Counted, divergence, grouped, kind, over_steps  # noqa: E402

VOCABULARY = 12


def true_logits(history: list[int]) -> torch.Tensor:
    """float32 [VOCABULARY] of a model that looks at everything before: no two histories give the same."""
    return torch.from_numpy(np.random.default_rng(history).normal(size=VOCABULARY).astype(np.float32))


def request(folder, forced: list[int], output: list[int]) -> dict:
    return {"folder": str(folder), "forced": forced, "__req__": SimpleNamespace(output_ids=output)}


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_teacher_leaves_each_steps_true_logits_whatever_is_drafted(tmp_path, rows):
    """Two requests with drafts that are right, wrong, or right again after a wrong one, to past their ends."""
    rng = random.Random(rows)
    texts = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in (23, 17)]
    outputs: list[list[int]] = [[], []]
    folders = [tmp_path / str(i) for i in range(2)]
    for folder in folders:
        folder.mkdir()
    accepted_several = False
    while running := [i for i in range(2) if len(outputs[i]) < len(texts[i])]:
        drafts = {i: [texts[i][s] if s < len(texts[i]) and rng.random() < 0.7 else rng.randrange(VOCABULARY)
                      for s in range(len(outputs[i]), len(outputs[i]) + rows - 1)] for i in running}
        params = {i: request(folders[i], texts[i], outputs[i]) for i in running}
        logits = torch.stack([true_logits(outputs[i] + drafts[i][:n]) for i in running for n in range(rows)])
        chosen = Teacher()(logits, [params[i] for i in running for _ in range(rows)]).argmax(-1).view(len(running), rows).tolist()
        for i, tokens in zip(running, chosen):
            right = next((n for n, draft in enumerate(drafts[i]) if draft != tokens[n]), rows - 1)
            accepted_several |= right > 0
            outputs[i] = (outputs[i] + tokens[: right + 1])[: len(texts[i])]
    assert outputs == texts and accepted_several == (rows > 1)
    for folder, text in zip(folders, texts):
        assert sorted(p.name for p in folder.iterdir()) == [f"{step:05d}.npy" for step in range(len(text))]
        for step in range(len(text)):
            assert np.array_equal(np.load(folder / f"{step:05d}.npy"), true_logits(text[:step]).numpy()), step


def test_divergence_is_kl_of_the_softmaxes():
    dense, sparse = np.log(np.array([0.5, 0.25, 0.25], np.float32)), np.log(np.array([0.25, 0.5, 0.25], np.float32)) + 3
    kl, same = divergence(dense, sparse)
    assert kl == pytest.approx(0.5 * np.log(2) - 0.25 * np.log(2), abs=1e-6) and not same
    assert divergence(dense, dense + 7) == (pytest.approx(0, abs=1e-6), True)


def test_over_steps_takes_the_first_eight_apart():
    found = over_steps(np.array([1.0] * 8 + [0.0] * 24), np.array([False] * 8 + [True] * 24))
    assert (found["kl"], found["kl_first_8"], found["kl_worst_token"], found["top1"]) == (0.25, 1.0, 1.0, 0.75)
    assert over_steps(np.arange(2000.0), np.ones(2000, bool))["kl_by_thousand"] == [499.5, 1499.5]


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
