"""Tables, charts and the two commands on a tiny model with a tokenizer of words."""

import csv
import json
import re

import matplotlib.image
import numpy as np
import pytest
from study_rig import WORDS, store
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from oasis_sglang.charts import Line
from oasis_sglang.cli import app
from oasis_sglang.fingerprint import profile_fingerprint
from oasis_sglang.selection.profile import Profile
from oasis_sglang.study.engine import Result
from oasis_sglang.study.policies import Setting
from oasis_sglang.study.report import by_budget, markdown
from oasis_sglang.study.table import Study, mean, row
from oasis_sglang.study.texts import Case

CASE = Case("case", [1, 2], [1, 2, 3, 4], 1)
RESULT = Result(kl=np.array([9.0, 0.1, 0.2, 0.6]), top1=np.array([False, True, True, False]), recall=np.array([0.1, 0.9, 0.8, 0.7]),
                bytes=np.array([30.0, 40, 40, 50]), missed_mass=np.array([0.1, 0.4, 0.0, 0.2]), lost=np.zeros(4), selects=np.array([True, True, False, True]),
                misses=3, wanted=12, steps=2, admitted=20, full=100)


def test_a_row_counts_what_counts():
    made = row(CASE, RESULT, kv_heads=2)
    assert made.kl == pytest.approx(0.3) and made.kl_worst == 0.6 and made.top1 == pytest.approx(2 / 3) and made.recall == pytest.approx(0.8)
    assert made.miss_rate == 0.25 and made.missed_mass == pytest.approx(0.7 / 3) and (made.worst_head, made.worst_missed_mass) == ("0.1", 0.4)
    assert (made.tokens_per_step, made.admitted, made.per_step, made.lifetime) == (2, 0.2, 0.15, 0.5)


def test_the_mean_keeps_the_worst_head():
    one = row(CASE, RESULT, 2)
    other = one._replace(kl=0.1, worst_missed_mass=0.9, worst_head="7.1", kl_worst=3.0)
    both = mean([one, other])
    assert both.kl == pytest.approx(0.2) and both.worst_head == "7.1" and both.worst_missed_mass == 0.9 and both.kl_worst == 3.0 and both.case == ""


def test_lines_join_settings_that_differ_in_their_budget_only():
    settings = [Setting(budget=1024), Setting(budget=512), Setting(budget=512, heads="profile")]
    rows = [[row(CASE, RESULT, 2)._replace(kl=kl)] for kl in (0.1, 0.2, 0.3)]
    study = Study(settings, rows, [mean(mine) for mine in rows], [np.array([0.2, 0.4])] * 3)
    assert by_budget(study, "kl") == {"no profile": Line([512, 1024], [0.2, 0.1]), "profile": Line([512], [0.3])}
    text = markdown(study)
    assert "| 512, profile | 0.3000 |" in text and "| 1024, no profile | 0.1000 / 0.667 |" in text


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = store(tmp_path_factory.mktemp("models") / "words")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def texts(folder, count):
    out = []
    for i in range(count):
        file = folder / f"text{i}.txt"
        file.write_text(" ".join(f"w{n}" for n in np.random.default_rng(i).integers(WORDS, size=700)))
        out += ["--text", str(file)]
    return out


def invoke(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def test_a_model_is_calibrated_and_studied(checkpoint, tmp_path):
    files = texts(tmp_path, 2)
    done = invoke("calibrate", checkpoint, *files, "--out", tmp_path / "p.json", "--tokens", 400, "--steps", 8, "--budget", 160, "--heads", 2)
    assert done.exit_code == 0, done.output
    profile = Profile.load(tmp_path / "p.json")
    assert profile.fingerprint == profile_fingerprint(str(checkpoint)) and len(profile.heads) == 2 and profile.settings["budget"] == 160
    found = re.search(r"no profile ([\d.]+), profile ([\d.]+), 2 arbitrary heads ([\d.]+)", done.output)
    assert found and all(float(kl) > 0 for kl in found.groups())

    done = invoke("study", checkpoint, *files, "--out", tmp_path / "out", "--tokens", 400, "--steps", 8, "--budgets", "160,1024", "--summaries",
                  "control_keys,control_random", "--policies", "previous,accept", "--stickies", "0.25", "--profile", tmp_path / "p.json")
    assert done.exit_code == 0, done.output
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"result.json", "rows.csv", "table.md", "lifetime.png"} | {f"{n}.png" for n in ("kl", "top1", "recall", "miss_rate", "missed_mass",
                                                                                                     "worst_missed_mass", "per_step")}
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["about"]["model"] == profile.fingerprint and result["about"]["seed"] == 0 and len(result["settings"]) == 16
    by_name = {s["name"]: s["mean"] for s in result["settings"]}
    assert all(mean["kl"] < 1e-5 for name, mean in by_name.items() if name.startswith("1024"))
    assert by_name["160, control_keys, previous, no profile"]["recall"] > by_name["160, control_random, previous, no profile"]["recall"]
    rows = list(csv.DictReader((tmp_path / "out" / "rows.csv").open()))
    assert len(rows) == 16 * 5 and {r["case"] for r in rows} >= {"text0.txt, continued", "text1.txt, recalled", "all"}
    assert all(matplotlib.image.imread(tmp_path / "out" / name).shape[2] == 4 for name in names if name.endswith(".png"))


@pytest.mark.parametrize(("words", "message"), [
    (["--policies", "next"], "next is not one of on-demand"), (["--heads", "profile"], "need --profile"), (["--budgets", "1k"], "1k is not a list of numbers"),
    (["--summaries", "mean"], "no summary mean"), (["--text", "/nowhere/text"], "No such file"), (["--budgets", "64"], "working set of 4")])
def test_a_study_that_cannot_be_is_refused_in_one_line(checkpoint, tmp_path, words, message):
    files = [] if "--text" in words else texts(tmp_path, 1)
    done = invoke("study", checkpoint, *files, *words, "--tokens", 400, "--steps", 8, "--out", tmp_path / "out")
    assert done.exit_code == 1 and message in done.output and not (tmp_path / "out").exists()


def test_a_profile_of_another_model_is_refused(checkpoint, tmp_path):
    Profile(1, "other", 3, 3, ((0, 0),), ((0.0,) * 3,) * 3, {}).save(tmp_path / "p.json")
    done = invoke("study", checkpoint, *texts(tmp_path, 1), "--profile", tmp_path / "p.json", "--tokens", 400, "--steps", 8, "--out", tmp_path / "out")
    assert done.exit_code == 1 and "its fingerprint is other" in done.output


def test_one_text_leaves_nothing_held_out(checkpoint, tmp_path):
    done = invoke("calibrate", checkpoint, *texts(tmp_path, 1), "--out", tmp_path / "p.json", "--tokens", 400, "--steps", 8, "--budget", 160)
    assert done.exit_code == 0 and "none to be held out" in done.output and "arbitrary" not in done.output
    assert len(Profile.load(tmp_path / "p.json").heads) == 1
