"""Settings that contradict each other, and files that are not what they should be, are told before anything starts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oasis_sglang import models
from oasis_sglang.bench import workloads
from oasis_sglang.bench.about import shape_of
from oasis_sglang.bench.jobs import Wanted
from oasis_sglang.bench.settings import UNFORCED, Settings, merged
from oasis_sglang.cli import app
from oasis_sglang.plan import shapes
from oasis_sglang.prompts import PromptMaker
from transport.errors import ConfigError

SETTINGS = Settings(Path("/m"))
CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
          "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 4096, "torch_dtype": "float32"}


@pytest.fixture(scope="module")
def model() -> Path:
    return models.prepare(models.CUT_LAYERS)


# -- sweeps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, option", [({"workloads": ("needle", "agent")}, "--workloads agent"), ({"workloads": ("trace",)}, "--workloads trace"),
                                             ({"rate": 2.0}, "--rate")])
def test_a_sweep_of_concurrency_goes_with_nothing_that_sets_requests_or_times_otherwise(changes, option):
    swept = replace(SETTINGS, sweeps={"concurrency": (1, 4)})
    assert swept.points() == [{"concurrency": 1}, {"concurrency": 4}]
    with pytest.raises(ConfigError, match=f"--sweep concurrency and {option}"):
        replace(swept, **changes).points()
    assert replace(swept, sweeps={"context": (1000,)}, **changes).points() == [{"context": 1000}]


@pytest.mark.parametrize("changes, option", [({"systems": ("stock", "oasis:512", "full")}, "--systems oasis:512"),
                                             ({"systems": ("full:256-reuse", "oasis+on_miss=wait+budget_tokens=128")}, "--systems full:256-reuse,oasis"),
                                             ({"options": {"budget_tokens": "512"}}, "--set budget_tokens")])
def test_a_sweep_of_budgets_goes_with_no_budget_of_a_systems_own(changes, option):
    swept = replace(SETTINGS, sweeps={"budget": (256, 512)}, systems=("stock", "oasis+on_miss=wait"))
    assert swept.points() == [{"budget": 256}, {"budget": 512}]
    with pytest.raises(ConfigError, match=f"--sweep budget and {option}"):
        replace(swept, **changes).points()


def test_a_budget_that_covers_the_context_is_no_point_of_a_sweep():
    replace(SETTINGS, sweeps={"budget": (512, 4096)}).check(8192)
    with pytest.raises(ConfigError, match="budget=8192,9000.*context is 8192"):
        replace(SETTINGS, sweeps={"budget": (512, 8192, 9000)}).check(8192)


def test_a_budget_that_is_no_working_set_is_refused():
    with pytest.raises(ConfigError, match="budget_tokens=64 leaves nothing to select"):
        replace(SETTINGS, sweeps={"budget": (512, 64)}).check(8192)
    with pytest.raises(ConfigError, match="tail_tokens=16"):
        replace(SETTINGS, systems=("stock", "oasis+tail_tokens=16")).check(8192)


def test_the_longest_prompt_fits_the_context_where_prompts_are_as_long_as_wanted():
    swept = replace(SETTINGS, workloads=("needle", "agent"), sweeps={"context": (2000, 8148)}, output=64)
    swept.check(8192)
    with pytest.raises(ConfigError, match="--workloads needle: a prompt of 8149 tokens and its answer of 64"):
        replace(swept, sweeps={"context": (8149, 2000)}).check(8192)
    replace(swept, sweeps={"context": (8149,)}, workloads=("agent",)).check(8192)


def test_a_coordinate_or_a_value_is_swept_once():
    assert merged(["concurrency=1,8", "link=1gbit"]) == {"concurrency": (1, 8), "link": ("1gbit",)}
    with pytest.raises(ValueError, match="concurrency is given twice"):
        merged(["concurrency=1,8", "context=100", "concurrency=4"])
    with pytest.raises(ConfigError, match="context=2000 is given twice"):
        replace(SETTINGS, sweeps={"context": (2000, 1000, 2000)}).points()
    with pytest.raises(ConfigError, match="context=0, context=-5: at least 1"):
        replace(SETTINGS, sweeps={"context": (0, 8, -5)}).points()


@pytest.mark.parametrize("rate", ["200", "200mb", "fast", "-1gbit", "0gbit", "1 gbit", "", "200mbits"])
def test_rates_of_the_link_are_checked_before_anything_starts(rate):
    with pytest.raises(ConfigError, match="--sweep link: .*not a rate"):
        replace(SETTINGS, hosts=True, sweeps={"link": ("1gbit", rate)}).points()
    if rate:
        with pytest.raises(ConfigError, match="--link: .*not a rate"):
            replace(SETTINGS, hosts=True, link=rate).points()


def test_rates_that_tc_takes_need_hosts():
    swept = replace(SETTINGS, hosts=True, link="1.5gbit", sweeps={"link": ("200mbit", "64kbit")})
    assert swept.points() == [{"link": "200mbit"}, {"link": "64kbit"}]
    for changes in ({"link": ""}, {"sweeps": {}}):
        with pytest.raises(ConfigError, match="--hosts"):
            replace(swept, hosts=False, **changes).points()


# -- quality ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, told", [({"systems": ("stock", "exact")}, "--systems stock,exact: nothing to measure"), ({"systems": ("oasis:8192",)}, "nothing"),
                                           ({"systems": ()}, "nothing to measure"), ({"workloads": ("agent", "reasoning")}, "--workloads agent,reasoning: nothing")])
def test_quality_needs_something_that_selects_and_something_to_force(changes, told):
    measured = replace(SETTINGS, quality=8, workloads=("needle", "agent"))
    measured.check(8192)
    with pytest.raises(ConfigError, match=told):
        replace(measured, **changes).check(8192)
    replace(measured, quality=0, **changes).check(8192)


def test_texts_to_force_are_in_all_other_workloads(model):
    maker, wanted = PromptMaker(model), Wanted(tokens=1500, requests=1, output_tokens=8, long_output=16, turns=2)
    forced = {name for name in workloads.NAMES if any(job.continuation for job in workloads.make(name, maker, wanted).jobs)}
    assert forced == set(workloads.NAMES) - set(UNFORCED) and forced


def test_a_profile_is_looked_at_first(tmp_path):
    with pytest.raises(ConfigError, match="profile.*gone.json"):
        replace(SETTINGS, systems=("oasis+profile=gone.json",)).check(8192)
    (tmp_path / "p.json").write_text("[]")
    with pytest.raises(ConfigError, match="p.json is not a profile"):
        replace(SETTINGS, options={"profile": str(tmp_path / "p.json")}).check(8192)


# -- a model's folder -------------------------------------------------------------------------------------------------


def test_a_shape_is_what_the_planner_reads_and_the_bytes_of_a_token(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found, shape = shape_of(tmp_path, 2), shapes.read(tmp_path)
    assert found == {"name": tmp_path.name, "class": "LlamaForCausalLM", "layers": 2, "kv_heads": 2, "query_heads": 4, "head_dim": 16, "itemsize": 2,
                     "block_tokens": 16, "token_bytes": 2 * 2 * 2 * 16 * 2, "context": 4096}
    assert (shape.context, shape.dtype) == (4096, "float32") and shape_of(tmp_path)["itemsize"] == 4
    assert shapes.find("Llama-3.1-8B").context == 0, "not known of a name"


@pytest.mark.parametrize("config, told", [(None, "config.json is not readable"), ("{", "not readable"), ("[]", "no.* JSON object"),
                                          (json.dumps({**CONFIG, "max_position_embeddings": None}), "max_position_embeddings"),
                                          (json.dumps({**CONFIG, "num_hidden_layers": "two"}), "num_hidden_layers")])
def test_a_folder_without_a_shape_says_what_it_lacks(tmp_path, config, told):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=told):
        shape_of(tmp_path)


# -- the command ------------------------------------------------------------------------------------------------------


def bench(*arguments: str):
    """The command's one line of failure."""
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 1 and done.stderr.count("\n") == 1, (done.exception, done.stderr)
    return done.stderr


@pytest.mark.parametrize("arguments, told", [
    (["--sweep", "concurrency=1,2", "--rate", "1"], "--sweep concurrency and --rate"), (["--sweep", "budget=64", "--sweep", "budget=128"], "given twice"),
    (["--link", "fast", "--hosts"], "--link: 'fast' is not a rate"), (["--serving", "--x 'open"], "--serving --x 'open: No closing quotation"),
    (["--quality", "4", "--systems", "stock"], "nothing to measure"), (["--trace", "gone.jsonl", "--workloads", "trace"], "trace gone.jsonl: No such file"),
    (["--sweep", "budget=8"], "budget_tokens=8 leaves nothing"), (["--tokens", "9000"], "a prompt of 9000 tokens"),
    (["--report", "gone.json"], "--report gone.json"), (["--set", "budget_tokens"], "OPTION=VALUE"), (["--set", "profile=gone.json"], "gone.json")])
def test_what_cannot_be_run_is_told_in_one_line_and_nothing_is_written(tmp_path, model, arguments, told):
    out = tmp_path / "out"
    assert told in bench("--model", str(model), "--out", str(out), *arguments) and not out.exists()


def test_a_folder_that_is_no_model_is_told_in_one_line(tmp_path, model):
    assert f"--model {tmp_path}: no tokenizer.json" in bench("--model", str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    assert "no tokenizer.json that can be read" in bench("--model", str(tmp_path))
    shutil.copy(model / "tokenizer.json", tmp_path)
    assert "config.json is not readable" in bench("--model", str(tmp_path))


@pytest.mark.parametrize("line, told", [("{", "line 1: no JSON"), ('{"timestamp": 0, "input_length": 4, "output_length": 1}', "line 1: hash_ids is None")])
def test_a_trace_that_is_none_is_told_in_one_line(tmp_path, model, line, told):
    (tmp_path / "trace.jsonl").write_text(line)
    assert told in bench("--model", str(model), "--workloads", "trace", "--trace", str(tmp_path / "trace.jsonl"), "--out", str(tmp_path / "out"))


def test_results_are_not_overwritten_unasked(tmp_path, model):
    (tmp_path / "results.json").write_text("{}")
    assert "--overwrite" in bench("--model", str(model), "--out", str(tmp_path), "--trace", "gone", "--workloads", "trace")
    assert "trace gone" in bench("--model", str(model), "--out", str(tmp_path), "--trace", "gone", "--workloads", "trace", "--overwrite")
    assert (tmp_path / "results.json").read_text() == "{}"


@pytest.mark.parametrize("arguments, given", [(["--systems", "", "--endpoint", "a=http://127.0.0.1:9"], False), (["--systems", "", "--endpoint", "a=http://x", "--model", "4"], True),
                                              (["--systems", "stock"], True)])
def test_a_model_is_known_when_it_is_named_or_started_here(tmp_path, model, monkeypatch, arguments, given):
    from oasis_sglang.bench import run

    seen = []

    def stop(settings, **_):
        seen.append(settings.model_given)
        raise ConfigError("enough")

    monkeypatch.setattr(run, "Bench", stop)
    monkeypatch.setattr(models, "prepare", lambda *_, **__: model)
    assert "enough" in bench("--out", str(tmp_path / "out"), *arguments) and seen == [given]
