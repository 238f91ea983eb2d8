"""The bench of recomputation: an answer is cut where it was killed and where it went on, and failures are not averaged away."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from bench_recompute import cases, computed_again, divergences, request_lines  # noqa: E402
from recompute_figures import Interruption, by_part, identical, markdown, spread, together  # noqa: E402

PROMPT = 100
TIMES = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 9.5, 10.5, 11.5])
"""Of 8 steps: killed at 2.5, between steps 2 and 3; the request went on with step 5."""


def killed(again: int | None) -> Interruption:
    return Interruption.of(TIMES, 2.5, again)


def test_a_request_goes_on_with_the_step_after_the_token_that_was_put_aside():
    """Five tokens, 0 to 4, were answered; prefill has computed 0 to 3 again, 4 is replayed, and the next logits are those of token 5."""
    assert killed(4) == Interruption(killed=3, went_on=5, back=7.0, pause=5.5)
    assert killed(None) == Interruption(killed=3, went_on=None, back=None, pause=None)


@pytest.mark.parametrize("again", [0, 1, 7, 20])
def test_one_that_went_on_before_the_kill_or_after_the_end_is_no_measurement(again):
    with pytest.raises(ValueError, match="cannot go on"):
        killed(again)


def test_parts_are_cut_over_decode_steps():
    kl = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])  # of steps 1 to 7
    found = by_part(killed(4), kl, np.array([1, 0, 1, 1, 0, 0, 1], bool))
    assert {name: (part["steps"], part["kl"], part["kl_worst_token"], part["top1"]) for name, part in found.items()} == {
        "before": (2, 1.5, 2.0, 0.5), "without": (2, 6.0, 8.0, 1.0), "after": (3, 112 / 3, 64.0, 1 / 3)}


@pytest.mark.parametrize("interruption", [killed(4), killed(2), killed(None), killed(6), Interruption(0, 1, 1.0, 1.0), Interruption(8, None, None, None)])
def test_each_decode_step_is_in_one_part(interruption):
    parts = interruption.parts(7)
    assert [step for part in parts.values() for step in range(1, 8)[part]] == list(range(1, 8))


def test_a_part_without_steps_has_no_figures():
    assert by_part(killed(2), np.ones(7), np.ones(7, bool))["without"] is None
    assert by_part(killed(None), np.ones(7), np.ones(7, bool))["after"] is None


def row(case: str, after: tuple[float, float] | None, **more) -> dict:
    """``after``: KL of the two runs after the request went on."""
    def run(kl):
        part = {"steps": 4, "kl": kl, "kl_first_8": kl / 2, "kl_worst_token": 3 * kl, "top1": 1 - kl}
        return {"before": {**part, "steps": 2, "kl": 0.5}, "without": None, "after": part if kl else None}

    runs = dict(zip(("undisturbed", "disturbed"), map(run, after or (0, 0))))
    return {"case": case, "prompt_tokens": 3000, "steps": 7, "killed": 3, "went_on": 5 if after else None, "back_seconds": 7.0 if after else None,
            "pause_seconds": 5.5 if after else None, "runs": runs, **more}


FAILED = {"case": "c", "prompt_tokens": 3000, "steps": 7, "error": "HTTP 503"}
ROWS = [row("a", (0.1, 0.2)), row("b", (0.3, 0.6)), row("d", None), FAILED]


def test_prompts_count_the_same_and_the_worst_ones_are_kept():
    found = together(ROWS)
    assert found["disturbed"]["after"] == {"n": 2, "steps": 8, "kl": pytest.approx(0.4), "kl_first_8": pytest.approx(0.2), "kl_worst_prompt": 0.6,
                                           "kl_worst_step": pytest.approx(1.8), "top1": pytest.approx(0.6), "top1_worst_prompt": 0.4}
    assert found["undisturbed"]["after"]["kl"] == pytest.approx(0.2)
    assert found["undisturbed"]["before"]["n"] == 3 and found["disturbed"]["without"] is None


def test_spread_is_of_those_that_are_there():
    assert spread([1.0, None, 4.0]) == {"n": 2, "mean": 2.5, "least": 1.0, "most": 4.0} and spread([None]) is None


def greedy(mode: str, how: str, same: bool, recomputed: int) -> dict:
    return {"mode": mode, "how": how, "identical": same, "recomputed": recomputed}


GREEDY = [greedy("exact", "x", True, 1), greedy("exact", "y", True, 0), greedy("exact", "x", False, 1), greedy("exact", "x", True, 2)]


def test_identical_texts_are_counted_by_mode_and_way():
    assert identical(GREEDY) == [{"mode": "exact", "how": "x", "n": 3, "recomputed": 3, "identical": 2},
                                 {"mode": "exact", "how": "y", "n": 1, "recomputed": 0, "identical": 1}]


def test_tables_show_failures_too():
    result = {"rows": ROWS, "together": together(ROWS), "greedy": GREEDY}
    page = markdown(result)
    tables = [table.splitlines() for table in page.split("\n\n")]
    assert all(len({line.count("|") for line in table}) == 1 for table in tables) and len(tables) == 3
    assert "| after it went on | disturbed | 2, 8 | 0.4000 | 0.6000 | 1.800 | 0.2000 | 0.600, 0.400 |" in page
    assert "| a | 3,000 | 3, 5 of 7 | 0.5000 / 0.5000 | none | 0.1000 / 0.2000 | 7.0, 5.5 |" in page
    assert "| d | 3,000 | 3, - of 7 | 0.5000 / 0.5000 | none | none | not computed again |" in page
    assert "failed: HTTP 503" in page and "| exact | x | 3 | 3 | 2 |" in page


def test_where_it_went_on_is_in_the_logs_of_both_workers():
    def line(**fields) -> str:
        return f"[2026-01-01 00:00:00] request {json.dumps(fields)}"

    decode = request_lines("\n".join(["noise {", line(rid="other", room=8, recomputed=1), line(rid="r", room=9, rooms=[7, 8, 9], recomputed=1),
                                      line(rid="failed", room=10, recomputed=0), "more"]))
    prefill = request_lines("\n".join([line(room=7, prompt_tokens=PROMPT), line(room=8, prompt_tokens=1), line(room=9, prompt_tokens=PROMPT + 4)]))
    assert computed_again(decode, prefill, "r") == PROMPT + 4
    assert computed_again(decode, prefill, "failed") is None


def test_divergences_leave_prefills_token_out_and_want_as_many_steps(tmp_path):
    one, other = np.log(np.array([0.5, 0.25, 0.25], np.float32)), np.log(np.array([0.25, 0.5, 0.25], np.float32))
    for name, steps in (("dense", [one, one, other]), ("same", [other, one, one]), ("short", [one, one])):
        (tmp_path / name).mkdir()
        for step, logits in enumerate(steps):
            np.save(tmp_path / name / f"{step:05d}.npy", logits)
    kl, same = divergences(tmp_path / "dense", tmp_path / "same")
    assert kl == pytest.approx([0, 0.25 * np.log(2)], abs=1e-6) and same.tolist() == [True, False]
    with pytest.raises(ValueError):
        divergences(tmp_path / "dense", tmp_path / "short")


class Words:
    """A tokenizer: words and marks, numbered as they come."""

    def __init__(self):
        self.numbers: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.numbers.setdefault(word, len(self.numbers)) for word in re.findall(r"\w+|\S", text)]


def test_prompts_grow_and_no_text_is_used_twice():
    maker = Words()
    found = cases(maker, 6, 300, 600, 20)
    assert [len(case.prompt) for case in found] == [300, 360, 420, 480, 540, 600] and {len(case.continuation) for case in found} == {20}
    assert [case.name for case in found] == ["prose_0", "code_0", "prose_1", "code_1", "prose_2", "code_2"]
    texts = [case.prompt + case.continuation for case in found]
    assert len({tuple(text[i : i + 100]) for text in texts for i in range(0, len(text) - 100, 100)}) == sum((len(text) - 100 + 99) // 100 for text in texts)
    assert found == cases(maker, 6, 300, 600, 20)
    with pytest.raises(ValueError, match="not enough"):
        cases(maker, 200, 6000, 6000, 20)
