"""The offline engine: what it computes is what transformers computes, and what a working set sees is what loops say."""

import math

import numpy as np
import pytest
import torch
from study_rig import load, store, tokens
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

from oasis_sglang.speculation.draft import Drafts
from oasis_sglang.study.engine import dense, walk
from oasis_sglang.study.policies import POLICIES, Setting, label
from oasis_sglang.study.residency import Residency, summary_named
from transport.errors import ConfigError

BLOCK, SINK, RECENT = 16, 1, 4
PROMPT, ANSWER = tokens(500), tokens(12, seed=2)
EXACT = Setting(budget=160, summary="control_keys", cap=0, sticky=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def prompt(model):
    return model.prefill(PROMPT)


@pytest.fixture(scope="module")
def reference(model, prompt):
    return dense(model, prompt, ANSWER).log_probabilities


NONE = {"none": np.zeros(9, bool)}


def run(model, prompt, reference, *settings, heads=NONE, source=None, seed=0):
    return walk(model, prompt, ANSWER, settings, heads, reference, source=source, seed=seed)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_dense_answers_are_those_of_transformers(tmp_path, kind):
    mine = load(tmp_path / kind, kind=kind)
    found = dense(mine, mine.prefill(PROMPT), ANSWER).log_probabilities
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        wanted = theirs(torch.tensor([PROMPT + ANSWER])).logits[0, len(PROMPT) :].log_softmax(-1)
    assert (found - wanted).abs().max() < 1e-4
    assert found.argmax(-1).unique().numel() > 4, "the model says the same whatever it reads"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_for_all_blocks_is_dense(model, prompt, reference, policy):
    class Wrong:
        def propose(self, requests, n):
            return Drafts(np.full((len(requests), n), 5), np.full(len(requests), n))

    result, = run(model, prompt, reference, Setting(budget=512, policy=policy), source=Wrong())
    assert result.kl.max() < 1e-6 and result.top1.all() and result.recall.min() > 0.99999
    assert (result.bytes == result.admitted).all() and result.misses == 0


def test_all_heads_dense_is_dense(model, prompt, reference):
    result, = run(model, prompt, reference, Setting(budget=128, heads="profile"), heads={"profile": np.ones(9, bool)})
    assert result.kl.max() < 1e-6 and result.wanted == 0 and (result.bytes == result.admitted).all()


class Slow:
    """Token by token through transformers' own forward and cache; one set of blocks per (layer, KV head), loops, no code of ours."""

    def __init__(self, folder, working):
        AttentionInterface.register("slow_reference", self.attend)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="slow_reference")
        self.cache, self.working, self.whole, self.votes, self.sets = DynamicCache(), working, len(PROMPT) // BLOCK, {}, {}
        self.log_probabilities = []
        with torch.inference_mode():
            self.model(torch.tensor([PROMPT]), past_key_values=self.cache)
            self.sets = {place: self.best(mass) for place, mass in self.votes.items()}
            for token in ANSWER:
                self.log_probabilities.append(self.model(torch.tensor([[token]]), past_key_values=self.cache).logits[0, -1].log_softmax(-1))
                self.sets = {place: self.best(mass) for place, mass in self.votes.items()}

    def best(self, mass):
        pinned = [*range(SINK), *range(self.whole - RECENT, self.whole)]
        others = sorted((b for b in range(self.whole) if b not in pinned), key=lambda b: -mass[b])
        return sorted(pinned + others[: self.working - len(pinned)])

    def attend(self, module, query, key, value, mask, scaling, **kwargs):
        _, heads, n, _ = query.shape
        past, group = key.shape[2] - n, heads // key.shape[1]
        out = torch.zeros_like(query)
        for kv in range(key.shape[1]):
            votes = [0.0] * self.whole
            for head in range(kv * group, (kv + 1) * group):
                for row in range(n):
                    logits = query[0, head, row] @ key[0, kv, : past + row + 1].T * scaling
                    chosen = self.sets.get((module.layer_idx, kv))
                    tokens = torch.arange(past + row + 1)
                    if chosen is not None:
                        tokens = torch.tensor([t for t in range(past + row + 1) if t // BLOCK in chosen or t >= self.whole * BLOCK])
                    out[0, head, row] = logits[tokens].softmax(0) @ value[0, kv, tokens]
                    if row >= n - 64 and chosen is None:  # prefill counts all that it sees, decode the whole blocks
                        p = logits.softmax(0)
                    elif row >= n - 64:
                        p = logits[: self.whole * BLOCK].softmax(0)
                    else:
                        continue
                    for block in range(self.whole):
                        votes[block] += float(p[block * BLOCK : (block + 1) * BLOCK].sum())
            self.votes[module.layer_idx, kv] = votes
        return out.transpose(1, 2), None


def test_a_sparse_answer_is_what_loops_say(model, prompt, reference, tmp_path):
    slow = torch.stack(Slow(store(tmp_path / "same"), EXACT.budget // BLOCK).log_probabilities)
    wanted = (reference.exp() * (reference - slow)).sum(-1).numpy()
    result, = run(model, prompt, reference, EXACT)
    assert wanted.min() > 1e-3, "selecting changes nothing here"
    np.testing.assert_allclose(result.kl, wanted, rtol=1e-3, atol=1e-5)


def test_settings_side_by_side_are_what_each_is_alone(model, prompt, reference):
    settings = [Setting(budget=160, policy=policy, summary=summary) for policy in POLICIES for summary in ("mean_var_int8", "minmax_int4")]
    for setting, together in zip(settings, run(model, prompt, reference, *settings)):
        alone, = run(model, prompt, reference, setting)
        np.testing.assert_allclose(together.kl, alone.kl, rtol=1e-3, atol=1e-6)
        assert together.misses == alone.misses and (together.bytes == alone.bytes).all()


def test_knowing_is_better_than_chance(model, prompt, reference):
    exact, chance, again = run(model, prompt, reference, EXACT, EXACT._replace(summary="control_random"), EXACT._replace(policy="on-demand"))
    assert exact.kl.mean() < chance.kl.mean() and exact.recall.mean() > chance.recall.mean()
    assert again.recall.mean() > exact.recall.mean() and again.misses == 0 < exact.misses


def test_the_true_next_token_misses_less_than_the_last(model, prompt, reference):
    previous, oracle = run(model, prompt, reference, EXACT, EXACT._replace(policy="oracle"))
    assert oracle.missed_mass.mean() < previous.missed_mass.mean()


def test_right_drafts_are_kept_and_cover_several_tokens(model, prompt, reference):
    class Right:
        def propose(self, requests, n):
            return Drafts(np.array([ANSWER[len(r.output) : len(r.output) + n] for r in requests]), np.full(len(requests), n))

    settings = [EXACT._replace(policy=policy, drafts=3, trust=trust) for policy, trust in (("accept", 1), ("union", 1), ("accept", 0), ("accept", 0.25))]
    kept, guiding, doubted, weighed = run(model, prompt, reference, *settings, source=Right())
    assert (kept.steps, guiding.steps, doubted.steps) == (3, 12, 12) and 3 <= weighed.steps <= 12
    oracle, = run(model, prompt, reference, EXACT._replace(policy="oracle"))
    np.testing.assert_allclose(guiding.kl, oracle.kl, rtol=1e-4, atol=1e-6)


def test_without_drafts_the_actual_row_chooses(model, prompt, reference):
    class Silent:
        def propose(self, requests, n):
            return Drafts(np.zeros((len(requests), n), np.int64), np.zeros(len(requests), np.int64))

    previous, *others = run(model, prompt, reference, *(EXACT._replace(policy=policy) for policy in ("previous", "draft", "union", "accept")), source=Silent())
    for other in others:
        np.testing.assert_allclose(other.kl, previous.kl, rtol=1e-4, atol=1e-6)
        assert other.misses == previous.misses and (other.bytes == previous.bytes).all()


def test_bytes_are_those_of_blocks_and_summaries(model, prompt, reference):
    heads = {"none": np.zeros(9, bool), "profile": np.arange(9) == 4}
    capped, free, one = run(model, prompt, reference, EXACT._replace(cap=1, floor=1, summary="mean_var_int8"), EXACT._replace(summary="mean_var_int8"),
                            Setting(budget=160, cap=1, heads="profile"), heads=heads)
    piece, blocks = 2 * BLOCK * 16 * 2, len(PROMPT) // BLOCK
    assert capped.admitted == 9 * (10 + 1) * piece + 9 * blocks * 20
    assert one.admitted == capped.admitted + (blocks - 10) * piece
    assert capped.full == 2 * 9 * 16 * 2 * len(PROMPT)
    steps = np.diff(capped.bytes, prepend=capped.admitted)
    assert 0 < steps.max() <= 9 * piece and (steps % piece == 0).all()
    assert free.bytes[-1] > capped.bytes[-1] and free.bytes[-1] <= capped.admitted + 9 * (blocks - 10) * piece


def test_the_first_steps_may_pull_more(model, prompt, reference):
    cold, warm = run(model, prompt, reference, EXACT._replace(cap=1), EXACT._replace(cap=1, warmup=4))
    assert warm.bytes[0] - warm.admitted > cold.bytes[0] - cold.admitted


def test_a_dense_head_is_not_the_worst_and_misses_nothing(model, prompt, reference):
    result, = run(model, prompt, reference, EXACT._replace(heads="profile"), heads={"profile": np.arange(9) == 4})
    assert result.missed_mass[4] == 0 and result.lost[4] == pytest.approx(0, abs=1e-6) and not result.selects[4]
    assert (np.delete(result.missed_mass, 4) > 0).any()


@pytest.mark.parametrize("setting", [Setting(budget=64), Setting(summary="mean")])
def test_settings_that_cannot_be_are_refused(model, prompt, setting):
    with pytest.raises(ValueError, match="working set of 4|no summary mean"):
        Residency(model, prompt, setting, model.ranking(prompt, BLOCK), NONE["none"])


def test_block_sizes_do_not_mix(model, prompt, reference):
    with pytest.raises(ValueError, match="one block size"):
        run(model, prompt, reference, Setting(), Setting(block=32))


def test_models_that_are_not_served_are_not_studied(tmp_path):
    folder = store(tmp_path / "other")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("LlamaForCausalLM", "GptOssForCausalLM"))
    from oasis_sglang.study.model import Model

    with pytest.raises(ConfigError, match="GptOssForCausalLM"):
        Model(folder)


def test_names_of_settings_tell_them_apart():
    settings = [Setting(), Setting(heads="profile"), Setting(budget=1024, cap=4)]
    assert len({label(s, settings) for s in settings}) == 3
    assert label(settings[2], settings) == "1024, no profile, cap 4"
    assert summary_named("control_keys").name == "control_keys" and math.isclose(Setting().decay, 0.7)
