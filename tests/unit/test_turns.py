"""The bench of many turns: transcripts share what they should, and figures are sums and ratios of what was counted."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import bench_turns  # noqa: E402
import turns  # noqa: E402
from turns import Heard, Turn  # noqa: E402

from oasis_sglang.bench.counters import sample_sum


class Words:
    """A tokenizer: words, spaces and marks, numbered as they come."""

    def __init__(self):
        self.numbers: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.numbers.setdefault(word, len(self.numbers)) for word in re.findall(r"<\|\w+\|>|\w+| +|.|\n", text)]


@pytest.fixture(scope="module")
def maker() -> Words:
    return Words()


def leading(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def test_each_prompt_of_the_agent_begins_with_the_one_before_and_its_answer(maker):
    made = turns.agent(maker, 13, 5000)
    assert len(made.turns) == 13 and len(made.prompt(0)) == 5000
    for n in range(1, 13):
        before = made.prompt(n - 1) + made.turns[n - 1].answer
        assert made.prompt(n)[: len(before)] == before
        assert turns.NEW_TOKENS[0] <= len(made.turns[n].new) == len(made.prompt(n)) - len(before) <= turns.NEW_TOKENS[1]
    assert all(turns.ANSWER_TOKENS[0] <= len(turn.answer) <= turns.ANSWER_TOKENS[1] for turn in made.turns)
    assert len({len(turn.new) for turn in made.turns[1:]}) > 4 and len({tuple(turn.answer) for turn in made.turns}) == 13


def test_another_seed_is_another_text_and_the_same_seed_the_same(maker):
    first, again, other = (turns.agent(maker, 3, 1500, seed) for seed in (0, 0, 1))
    assert first == again and turns.digest([first]) == turns.digest([again])
    assert leading(first.prompt(0), other.prompt(0)) < 100 and turns.digest([first]) != turns.digest([other])


def test_own_answers_take_the_place_of_the_fixed_ones(maker):
    made = turns.agent(maker, 3, 1500)
    prompt = made.prompt(2, [[7, 8], [9]])
    assert prompt == made.turns[0].new + [7, 8] + made.turns[1].new + [9] + made.turns[2].new


def test_conversations_share_the_system_prompt_and_no_more_than_the_question_after_it(maker):
    made = turns.conversations(maker, 4, 5, 1500, "one")
    asked = max(len(maker.encode("<|im_start|>user\n" + ask)) for ask in turns.ASKS)
    for i, a in enumerate(made):
        for b in made[i + 1 :]:
            assert 1500 <= leading(a.prompt(0), b.prompt(0)) <= 1500 + asked
            assert a.prompt(0) == b.prompt(0)[:1500] + a.prompt(0)[1500:]
    assert [len(t.turns) for t in made] == [5] * 4 and len({t.name for t in made}) == 4
    assert all(40 <= len(t.turns[0].new) - 1500 <= 200 for t in made)


def test_two_sets_of_conversations_and_the_agent_have_nothing_to_reuse_of_each_other(maker):
    sets = [turns.conversations(maker, 2, 2, 1500, name) for name in ("one", "two")]
    agent = turns.agent(maker, 2, 1500)
    pairs = [(sets[0][0], sets[1][0]), (sets[0][0], agent), (sets[1][1], agent)]
    assert all(leading(a.prompt(0), b.prompt(0)) < 16 for a, b in pairs), "a page in common"


def test_a_text_that_is_too_short_is_refused(maker):
    with pytest.raises(ValueError, match="are wanted"):
        turns.agent(maker, 2, 10_000_000)


def test_rounds_go_turn_by_turn(maker):
    made = turns.conversations(maker, 3, 2, 200, "one")
    names = [t.name for t in made]
    assert [(r.turn, [t.name for t in r.transcripts]) for r in turns.one_by_one("x", made)] == [(turn, [name]) for turn in (0, 1) for name in names]
    assert [(r.turn, [t.name for t in r.transcripts]) for r in turns.at_once("x", made)] == [(0, names), (1, names)]


def test_what_was_heard_is_the_longest_beginning_of_one_text():
    heard = Heard()
    assert heard.shared([1, 2, 3]) == 0
    heard.add([1, 2, 9, 4])
    heard.add([1, 2, 3, 4])
    heard.add([5])
    assert [heard.shared(p) for p in ([1, 2, 3, 7], [1, 2, 3, 4, 5], [1, 2], [5, 1], [6], [])] == [3, 4, 2, 1, 0, 0]


@pytest.mark.parametrize("tokens, held, pages", [(33, 0, 3), (32, 0, 2), (33, 16, 2), (33, 31, 2), (33, 32, 1), (48, 47, 1)])
def test_a_transfer_is_of_whole_pages(tokens, held, pages):
    assert turns.transfer_bytes(tokens, held, 16, 10) == pages * 160


PAGE = """# TYPE sglang:realtime_tokens counter
sglang:realtime_tokens_total{mode="prefill_compute",rank="0"} 70.0
sglang:realtime_tokens_total{mode="prefill_compute",rank="1"} 30.0
sglang:realtime_tokens_total{mode="decode",rank="0"} 5.0
# TYPE sglang:kv_transfer_total_mb histogram
sglang:kv_transfer_total_mb_bucket{le="1.0"} 2.0
sglang:kv_transfer_total_mb_sum{} 1.5
sglang:kv_transfer_total_mb_count{} 2.0
"""


def test_samples_are_summed_by_name_and_label():
    assert sample_sum(PAGE, "sglang:realtime_tokens_total", mode="prefill_compute") == 100
    assert sample_sum(PAGE, "sglang:kv_transfer_total_mb_sum") == 1.5
    assert sample_sum(PAGE, "sglang:realtime_tokens_total", mode="prefill_cache") is None


def row(name: str, turn: int, wire: dict, *, requests: int = 1, computed: int = 10, ttft: float = 1.0, host: int = 0, answers=((1, 2),)) -> dict:
    return {"name": name, "turn": turn, "requests": requests, "prompt_tokens": 100, "new_tokens": 20, "computed_tokens": computed, "computed_tokens_metric": computed,
            "wire_bytes": sum(wire.values()), "wire_bytes_second": sum(wire.values()), "full_transfer_bytes": 1000, "wire_by_phase": wire, "ttft_seconds": ttft,
            "host_cache_bytes": host, "answers": [list(a) for a in answers]}


def test_totals_are_over_requests():
    found = turns.totals([row("a", 0, {"manifest": 1, "records": 5}, ttft=4.0, host=9), row("a", 1, {"manifest": 2, "pieces": 7}, requests=3, ttft=2.0, host=4)])
    assert found["wire_by_phase"] == {"manifest": 3, "records": 5, "pieces": 7} and found["wire_bytes"] == 15
    assert (found["requests"], found["prompt_tokens"], found["ttft_seconds"], found["host_cache_bytes"]) == (4, 200, 2.5, 9)


def test_later_turns_are_a_group_of_their_own_and_ratios_are_to_the_same_group():
    base = turns.groups([row("a", 0, {"nixl": 100}), row("a", 1, {"nixl": 100}), row("b", 0, {"nixl": 50})])
    mine = turns.groups([row("a", 0, {"records": 100}), row("a", 1, {"records": 10}, computed=5), row("b", 0, {"records": 50})])
    assert list(mine) == ["a", "a, later turns", "b"]
    assert turns.ratios(mine["a"], base["a"])["wire_bytes"] == 0.55
    assert turns.ratios(mine["a, later turns"], base["a, later turns"]) == {"wire_bytes": 0.1, "computed_tokens": 0.5, "ttft_seconds": 1.0}
    assert turns.ratios(mine["b"], {**base["b"], "wire_bytes": 0})["wire_bytes"] is None


def test_equality_counts_answers_and_names_the_first_that_differs():
    base = [row("a", 0, {}), row("b", 2, {}, answers=((1, 2), (3, 4)))]
    assert turns.equality(base, base) == {"equal": 3, "of": 3, "first_difference": None}
    other = [base[0], row("b", 2, {}, answers=((1, 2), (3, 5)))]
    assert turns.equality(other, base) == {"equal": 2, "of": 3, "first_difference": "b turn 3 request 2"}
    with pytest.raises(ValueError):
        turns.equality(base[:1], base)


def test_the_table_has_a_column_for_every_phase_that_moved_something_and_a_line_for_every_round():
    lines = turns.table([row("a", 0, {"records": 2_000_000, "nixl": 0}), row("a", 1, {"pieces": 500_000}, host=3_000_000)])
    assert [word for word in lines[0].split() if word in ("pieces", "records", "nixl")] == ["pieces", "records"]
    assert lines[1].split() == ["a", "1", "1", "100", "20", "10", "2.00", "0.00", "2.00", "1.00", "0.0"]
    assert lines[2].split() == ["a", "2", "1", "100", "20", "10", "0.50", "0.50", "0.00", "1.00", "3.0"]


@pytest.mark.parametrize("name, kind, config, reuse, dense", [
    ("stock", "stock", {}, False, True), ("exact", "oasis", {"mode": "exact"}, False, True), ("exact+reuse", "oasis", {"mode": "exact"}, True, True),
    ("sparse:512", "oasis", {"mode": "sparse", "budget_tokens": 512}, False, False),
    ("sparse:full+reuse", "oasis", {"mode": "sparse", "budget_tokens": bench_turns.CONTEXT}, True, True)])
def test_a_system_by_its_name(name, kind, config, reuse, dense):
    made = bench_turns.system(name, Path("model"), {}, flags=("--dtype", "float32"), max_total_tokens=99)
    assert (made.spec.kind, made.spec.config, made.dense, made.spec.max_total_tokens) == (kind, config, dense, 99)
    said = [made.spec.flags[i + 1] for i, flag in enumerate(made.spec.flags) if flag == "--radix-cache-backend"]
    assert said == {"stock": [], "oasis": ["oasis" if reuse else ""]}[kind]
    assert made.spec.flags[:2] == ("--dtype", "float32") and "--enable-metrics" in made.spec.flags


@pytest.mark.parametrize("name", ["exact:512", "sparse", "sparse:few", "stock+reuse", "exact+again", "sparse:", ""])
def test_a_name_of_no_system_is_refused(name):
    with pytest.raises(ValueError, match="is none of"):
        bench_turns.system(name, Path("model"), {})


class Answered:
    """Stands for a stack's requests: counts what the bench reads, and answers with the request's own tokens reversed."""

    def __init__(self, monkeypatch, spec, token_bytes: int):
        self.spec, self.prompts, self.moved = spec, [], 0
        monkeypatch.setattr(bench_turns, "counts", lambda stack: bench_turns.Counts(0, self.moved, {}))
        monkeypatch.setattr(bench_turns, "ask", self.ask)

    def ask(self, stack, prompt, tokens, rid):
        self.prompts.append(prompt)
        self.moved += 1000
        return bench_turns.Asked(bench_turns.Generation(rid, len(prompt), prompt[:tokens][::-1], [0.5, 1.0], {}), len(prompt) - 30)


@pytest.mark.parametrize("own", [False, True])
def test_own_answers_are_in_the_next_prompt_and_only_a_cache_holds_what_was_heard(monkeypatch, maker, own):
    made = turns.Transcript("t", [Turn(list(range(100, 140)), [1] * 12), Turn([7] * 24, [2] * 12)])
    for name, held in (("stock", 0), ("stock-radix", 51 if own else 40)):
        stack = Answered(monkeypatch, bench_turns.system(name, Path("model"), {}).spec, 10)
        server = bench_turns.Server(stack, own, 10)
        first, second = (server.serve(r) for r in turns.one_by_one("t", [made]))
        given = first["answers"][0]
        assert stack.prompts[1] == made.turns[0].new + (given if own else [1] * 12) + made.turns[1].new
        assert (first["wire_bytes"], first["wire_bytes_second"], first["new_tokens"], first["computed_tokens"]) == (1000, 3 * 160, 40, 30)
        assert second["wire_bytes_second"] == (5 - held // 16) * 160  # 76 tokens
        assert second["new_tokens"] == 76 - (51 if own else 40) and second["ttft_seconds"] == 0.5
