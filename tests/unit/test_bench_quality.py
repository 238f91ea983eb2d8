"""Quality on forced answers: the processor that forces them with and without drafts, the figures, and who is asked what."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oasis_sglang.bench import quality
from oasis_sglang.bench.jobs import Job, Work
from oasis_sglang.bench.quality import QualityError, Teacher, cases, compare, divergence, force, measure, over_steps
from oasis_sglang.client import Generation

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


def test_servers_load_the_teacher_by_name():
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    text = Teacher.to_str()
    assert type(CustomLogitProcessor.from_str(text)) is Teacher
    assert len(text) < 300  # a name, not code


def save(folder: Path, logits: list[np.ndarray]) -> None:
    folder.mkdir()
    for step, row in enumerate(logits):
        np.save(folder / f"{step:05d}.npy", row.astype(np.float32))


def test_compare_leaves_the_first_token_out(tmp_path):
    one, other = np.log(np.array([0.5, 0.25, 0.25])), np.log(np.array([0.25, 0.5, 0.25]))
    save(tmp_path / "dense", [one, one, other, other])
    save(tmp_path / "system", [other, one, one, other])
    found = compare(tmp_path / "dense", tmp_path / "system", 4)
    worst = 0.25 * np.log(2)
    assert found["kl_worst_token"] == pytest.approx(worst, abs=1e-6) and found["kl"] == pytest.approx(worst / 3, abs=1e-6)
    assert found["top1"] == pytest.approx(2 / 3)


def job(name: str, prompt: list[int], continuation: tuple[int, ...] = (), after: str | None = None) -> Job:
    return Job(name, prompt, 8, after=after, continuation=continuation)


def work(*jobs: Job) -> Work:
    return Work("talk", "of the test", list(jobs))


def test_a_turn_has_the_whole_text_before_it_and_forces_what_is_measured():
    found = cases(work(job("a", [1, 2], (3, 4, 5, 6)), job("other", [9], ()), job("b", [7], (8, 9), after="a"), job("c", [0], (1, 2, 3), after="b")), steps=2)
    assert [tuple(case) for case in found] == [("a", [1, 2], [3, 4, 5]), ("b", [1, 2, 3, 4, 5, 6, 7], [8, 9]), ("c", [1, 2, 3, 4, 5, 6, 7, 8, 9, 0], [1, 2, 3])]


@pytest.mark.parametrize(("jobs", "said"), [
    ([job("a", [1]), job("b", [2], (3, 4), after="a")], "a, the turn before it, has none"),
    ([job("a", [1], (2,))], "continuation of a has one token"),
])
def test_a_job_that_cannot_be_asked_is_named(jobs, said):
    with pytest.raises(ValueError, match=said):
        cases(work(*jobs), steps=8)


def test_measure_asks_all_of_the_system_before_any_densely_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "forget", lambda url: asked.append(("forget", url)))
    pair = SimpleNamespace(urls={"decode": "there"})
    asked, dense, system = [], np.log(np.array([0.5, 0.25, 0.25])), np.log(np.array([0.25, 0.5, 0.25]))

    def ask(stack, case, folder, own):
        asked.append((stack, case.name, len(case.continuation), dict(own)))
        exact = own.get("mode") == "exact"
        save(folder, [dense if exact or case.name == "a" else system] * len(case.continuation))

    lines: list[str] = []
    rows = measure(pair, work(job("a", [1], (2, 3, 4)), job("plain", [5]), job("b", [1], (2, 3))), system="sparse", point={"budget": 512},
                   options={"budget_tokens": 512}, scratch=tmp_path, steps=64, progress=lines.append, ask=ask)
    ours = {"budget_tokens": 512}
    assert asked.pop(0) == ("forget", "there")
    assert asked == [(pair, "a", 3, ours), (pair, "b", 2, ours), (pair, "a", 3, {"mode": "exact"}), (pair, "b", 2, {"mode": "exact"})]
    assert [(r.system, r.workload, r.request, r.point, r.steps) for r in rows] == [("sparse", "talk", "a", {"budget": 512}, 2), ("sparse", "talk", "b", {"budget": 512}, 1)]
    assert (rows[0].kl, rows[0].top1) == (pytest.approx(0, abs=1e-9), 1.0)
    assert rows[1].kl == rows[1].kl_worst_token == pytest.approx(0.25 * np.log(2), abs=1e-6) and rows[1].top1 == 0.0
    assert len(lines) == 2 and list(tmp_path.iterdir()) == []


def test_force_sends_the_tokens_to_the_pair_and_takes_no_other_answer(tmp_path, monkeypatch):
    stack = SimpleNamespace(urls={"prefill": "http://p", "decode": "http://d"}, bootstrap_port=7, bootstrap_host="10.0.0.1")
    sent = {}

    def generate_on_pair(prefill, decode, port, prompt, **options):
        sent.update(options, to=(prefill, decode, port), prompt=prompt)
        return Generation("r", 2, answer, [0.1], {})

    monkeypatch.setattr(quality, "generate_on_pair", generate_on_pair)
    answer = [3, 4]
    case = quality.Case("a", [1, 2], [3, 4])
    assert force(stack, case, tmp_path / "one", {"budget_tokens": 64}).output_ids == [3, 4]
    assert sent["to"] == ("http://p", "http://d", 7) and sent["bootstrap_host"] == "10.0.0.1"
    assert (sent["prompt"], sent["max_new_tokens"]) == ([1, 2], 2)
    params = sent["sampling"]["custom_params"]
    assert params == {"folder": str(tmp_path / "one"), "forced": [3, 4], "oasis": {"budget_tokens": 64}}
    assert "callable" in json.loads(sent["extra"]["custom_logit_processor"])
    answer = [3, 5]
    with pytest.raises(QualityError, match="did not follow"):
        force(stack, case, tmp_path / "two", {})
