"""Traces in Mooncake's layout."""

import json

import pytest

from oasis_sglang import models
from oasis_sglang.bench import replay
from oasis_sglang.bench.workloads import describe
from oasis_sglang.prompts import PromptMaker
from transport.errors import ConfigError


@pytest.fixture(scope="module")
def maker():
    return PromptMaker(models.prepare(models.CUT_LAYERS))


def entry(timestamp, tokens, output, ids):
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids}


def written(tmp_path, *entries):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return path


def test_lengths_and_times_are_the_traces(tmp_path, maker):
    path = written(tmp_path, entry(1000, 1100, 7, [1, 2, 3]), entry(4000, 512, 9, [4]))
    work = replay.load(path, maker, speed=2.0)
    assert [(len(j.prompt), j.output_tokens, j.arrival) for j in work.jobs] == [(1100, 7, 0.0), (512, 9, 1.5)]


def test_prefixes_are_shared_exactly_as_far_as_the_ids(tmp_path, maker):
    path = written(tmp_path, entry(0, 1536, 1, [1, 2, 3]), entry(1, 1500, 1, [1, 2, 9]), entry(2, 600, 1, [5, 2]))
    a, b, c = (job.prompt for job in replay.load(path, maker).jobs)
    assert a[:1024] == b[:1024]
    assert a[1024:1040] != b[1024:1040]
    assert c[512:] == a[512:600] and c[:16] != a[:16]


def test_a_scale_shrinks_blocks_and_keeps_what_is_shared(tmp_path, maker):
    path = written(tmp_path, entry(0, 5120, 100, list(range(10))), entry(0, 5000, 100, [*range(9), 77]))
    a, b = replay.load(path, maker, scale=0.125).jobs
    assert (len(a.prompt), len(b.prompt), a.output_tokens) == (640, 625, 12)
    assert a.prompt[:576] == b.prompt[:576] and a.prompt[576:600] != b.prompt[576:600]


def test_the_seed_decides_the_tokens_but_not_the_sharing(tmp_path, maker):
    path = written(tmp_path, entry(0, 100, 1, [1]))
    one, again, other = (replay.load(path, maker, seed=seed).jobs[0].prompt for seed in (1, 1, 2))
    assert one == again != other


def test_a_block_is_the_same_wherever_its_id_comes_first(tmp_path, maker):
    alone = replay.load(written(tmp_path, entry(0, 512, 1, [7])), maker).jobs[0].prompt
    later = replay.load(written(tmp_path, entry(0, 512, 1, [3]), entry(1, 1024, 1, [4, 7])), maker).jobs[1].prompt
    assert later[512:] == alone != later[:512]


def test_what_is_too_long_is_left_out_and_counted(tmp_path, maker):
    path = written(tmp_path, entry(0, 3000, 10, list(range(6))), entry(5000, 100, 10, [1]))
    work = replay.load(path, maker, context=1024)
    assert [job.name for job in work.jobs] == ["trace-2"] and work.jobs[0].arrival == 0.0
    assert any("1 requests longer" in note for note in work.notes)
    with pytest.raises(ConfigError, match="no request of at most 50 tokens"):
        replay.load(path, maker, context=50)


def test_a_limit_takes_the_first(tmp_path, maker):
    path = written(tmp_path, *(entry(i, 100, 1, [i]) for i in range(5)))
    cut = replay.load(path, maker, limit=2)
    assert len(cut.jobs) == 2 and cut.notes[0] == "the first 2 of 5 requests of the file"
    assert describe(cut).notes[0] == cut.notes[0], "the report has it"
    assert not any("of the file" in note for limit in (5, None) for note in replay.load(path, maker, limit=limit).notes)


def test_of_a_trace_that_is_cut_those_left_out_count_among_the_first(tmp_path, maker):
    path = written(tmp_path, entry(0, 3000, 10, list(range(6))), "", *(entry(i, 100, 1, [i]) for i in range(4)))
    assert replay.load(path, maker, context=1024, limit=2).notes[0] == "the first 3 of 5 requests of the file"


def test_a_file_that_is_not_there_is_named(tmp_path, maker):
    with pytest.raises(ConfigError, match="gone.jsonl: No such file"):
        replay.load(tmp_path / "gone.jsonl", maker)
    with pytest.raises(ConfigError, match="Is a directory"):
        replay.load(tmp_path, maker)


def test_arrivals_are_from_the_earliest_on_whatever_the_order_of_the_lines(tmp_path, maker):
    work = replay.load(written(tmp_path, entry(5000, 100, 1, [1]), entry(1000, 90, 1, [2])), maker)
    assert [(job.name, job.arrival) for job in work.jobs] == [("trace-2", 0.0), ("trace-1", 4.0)]


@pytest.mark.parametrize("how", [{"scale": float("nan")}, {"scale": 0.0}, {"speed": -1.0}, {"speed": float("inf")}, {"block": 0}, {"limit": 0}])
def test_settings_that_make_no_sense_are_refused(tmp_path, maker, how):
    with pytest.raises(ConfigError, match=str(next(iter(how.values())))):
        replay.load(written(tmp_path, entry(0, 100, 1, [1])), maker, **how)


def test_a_file_that_is_no_text_or_empty_says_so(tmp_path, maker):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is no text"):
        replay.load(path, maker)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="has no request$"):
        replay.load(path, maker)


@pytest.mark.parametrize("line, told", [
    ("{", "line 2: no JSON"), ("[1]", "timestamp"), (json.dumps({"timestamp": 1, "input_length": "x", "output_length": 1, "hash_ids": []}), "input_length"),
    (json.dumps({"timestamp": 1, "input_length": 5, "output_length": 1}), "hash_ids is None"), (json.dumps(entry(0, 600, 1, [1])), "do not cover"),
    (json.dumps(entry(0, 0, 1, [1])), "counts"), (json.dumps(entry(0, 5, 1, ["a"])), "whole numbers"),
    (json.dumps(entry(0, 5, 1, [True])), "whole numbers"), (json.dumps(entry(float("nan"), 5, 1, [1])), "timestamp is nan"),
    (json.dumps(entry(float("-inf"), 5, 1, [1])), "timestamp is -inf"),
])
def test_a_bad_line_is_named(tmp_path, maker, line, told):
    with pytest.raises(ConfigError, match="line 2") as caught:
        replay.load(written(tmp_path, entry(0, 10, 1, [1]), line), maker)
    assert told in str(caught.value)
