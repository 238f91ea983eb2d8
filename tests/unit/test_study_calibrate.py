"""Calibration: the head that matters is found, and its damage is what a walk with all others dense shows."""

import numpy as np
import pytest
import torch
from study_rig import WORDS, load, tokens

from oasis_sglang.selection.profile import Profile
from oasis_sglang.study.calibrate import arbitrary_heads, damage, make_profile, mask, no_heads, verify
from oasis_sglang.study.engine import dense, walk
from oasis_sglang.study.policies import Setting
from oasis_sglang.study.texts import Case, Cutter, digest, read_texts, standard_texts

SETTING = Setting(budget=160, floor=2)
CASES = [Case("first", tokens(400), tokens(10, seed=2)), Case("again", tokens(400), tokens(14, seed=3), 4), Case("other", tokens(420, seed=4), tokens(8, seed=5))]
HELD_OUT = [Case("held out", tokens(450, seed=6), tokens(12, seed=7), 2)]


def silent(what, share):
    assert 0 <= share <= 1


def plant(model, layer=1, head=2):
    """Of all heads' outputs a hundredth is left, but not of this one's: query heads 4 and 5."""
    with torch.no_grad():
        for i, block in enumerate(model.model.layers):
            for kv in range(3):
                if (i, kv) != (layer, head):
                    block.self_attn.o_proj.weight[:, kv * 32 : (kv + 1) * 32] *= 0.01


def test_a_planted_head_is_found_and_worth_its_bytes(tmp_path):
    model = load(tmp_path / "planted", change=plant)
    seen = []
    profile = make_profile(model, CASES, SETTING, fingerprint="f", settings={"budget": 160}, progress=lambda what, share: seen.append(share))
    assert profile.heads == ((1, 2),) and profile.layers == 3 and profile.kv_heads == 3
    assert profile.kl[1][2] > 100 * sorted(sum(profile.kl, ()))[-2]
    assert seen == sorted(seen) and seen[-1] == 1
    verdict = verify(model, HELD_OUT, SETTING, profile, progress=silent)
    assert verdict.profile < verdict.none / 20 and verdict.arbitrary > verdict.none / 2 and verdict.chosen != profile.heads


def test_damage_is_that_of_a_head_that_selects_alone(tmp_path):
    model = load(tmp_path / "random")
    kl = damage(model, CASES, SETTING, silent)
    assert (kl > 1e-6).all()
    sums = np.zeros((3, 3))
    for case in CASES:
        prompt = model.prefill(case.prompt)
        reference = dense(model, prompt, case.answer).log_probabilities
        for layer, head in np.ndindex(3, 3):
            others = np.ones((3, 3), bool)
            others[layer, head] = False
            result, = walk(model, prompt, case.answer, [SETTING._replace(heads="profile")], {"profile": others.reshape(-1)}, reference)
            sums[layer, head] += result.kl[case.counted :].sum()
    np.testing.assert_allclose(kl, sums / 28, rtol=1e-2, atol=1e-6)


def test_heads_by_name_are_masks():
    profile = Profile(1, "f", 2, 3, ((1, 0), (0, 2)), ((0.0,) * 3,) * 2, {})
    assert mask(profile, profile.heads).tolist() == [False, False, True, True, False, False]
    arbitrary = arbitrary_heads(profile, 3)
    assert len(arbitrary) == 2 and not set(arbitrary) & set(profile.heads) and arbitrary == arbitrary_heads(profile, 3)
    assert len({arbitrary_heads(profile, seed) for seed in range(20)}) > 2
    assert not no_heads(type("M", (), {"layers": 2, "kv_heads": 3})).any()


def cutter() -> Cutter:
    made = Cutter.__new__(Cutter)
    made.encode = lambda text: [ord(c) % WORDS for c in text]
    return made


def test_a_text_is_continued_and_recalled():
    text = "".join(chr(33 + i % 90) for i in range(700))
    ids = cutter().encode(text)
    goes_on, recalled = cutter().cases("text", text, 500, 40)
    assert goes_on.prompt == recalled.prompt == ids[:500] and goes_on.answer == ids[500:540] and goes_on.counted == 0
    assert recalled.answer == ids[234:290] and recalled.counted == 16 and len(recalled.answer) - recalled.counted == 40
    shorter, _ = cutter().cases("text", text[:300], 500, 40)
    assert shorter.prompt == ids[:260] and shorter.answer == ids[260:300]
    with pytest.raises(ValueError, match="text small has 100 tokens, 224 are needed"):
        cutter().cases("small", text[:100], 500, 40)


def test_texts_come_from_files_or_from_python(tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("1")
    two.write_text("2")
    assert read_texts([two, one]) == {"two.txt": "2", "one.txt": "1"}
    assert read_texts([]) == standard_texts() and len(standard_texts()) > 2 and all(len(text) > 30_000 for text in standard_texts().values())
    with pytest.raises(ValueError, match="same file name"):
        read_texts([one, one])
    assert digest(CASES) != digest(CASES[:2]) and digest(CASES) == digest([Case(*case) for case in CASES])
