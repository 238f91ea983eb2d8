"""Profiles: what is saved is what is loaded, what is wrong is named, and which heads are chosen."""

import json
import shutil

import pytest

from oasis_sglang.fingerprint import profile_fingerprint
from oasis_sglang.selection.profile import VERSION, Profile, worst_heads

PROFILE = Profile(VERSION, "abc", 2, 4, ((1, 3), (0, 0), (1, 2)), ((0.2, 0.0, 0.01, 0.0), (0.0, 0.0, 0.1, 0.9)), {"budget": 512})


def test_a_profile_is_loaded_as_it_was_saved(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE


@pytest.mark.parametrize(("field", "value"), [
    ("version", 2), ("fingerprint", ""), ("fingerprint", 7), ("layers", 0), ("layers", True), ("kv_heads", "4"), ("heads", [[2, 0]]), ("heads", [[0, -1]]),
    ("heads", [[0, 1], [0, 1]]), ("heads", [[0]]), ("heads", [["0", 1]]), ("kl", [[0, 0, 0, 0]]), ("kl", [[0, 0, 0], [0, 0, 0]]),
    ("kl", [[0, 0, 0, float("nan")]] * 2), ("kl", [[0, 0, 0, "x"]] * 2), ("settings", [])])
def test_a_wrong_field_is_named(tmp_path, field, value):
    (tmp_path / "p.json").write_text(json.dumps({**PROFILE._asdict(), field: value}))
    with pytest.raises(ValueError, match=rf"p\.json.*field {field}"):
        Profile.load(tmp_path / "p.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({**PROFILE._asdict(), "more": 1})])
def test_what_is_no_profile_is_refused(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match="p.json is not a profile"):
        Profile.load(tmp_path / "p.json")


def test_pieces_are_those_of_a_rank():
    assert PROFILE.pieces(0, 4).tolist() == [0, 6, 7]
    assert PROFILE.pieces(0, 2).tolist() == [0]
    assert PROFILE.pieces(2, 2).tolist() == [2, 3], "layer 1, KV heads 2 and 3, are the rank's third and fourth piece"
    assert PROFILE.pieces(1, 1).tolist() == []
    for first, heads in ((-1, 2), (3, 2), (0, 0)):
        with pytest.raises(ValueError, match="kv_heads = 4"):
            PROFILE.pieces(first, heads)


@pytest.mark.parametrize(("field", "model"), [("layers", ("abc", 3, 4)), ("kv_heads", ("abc", 2, 8)), ("fingerprint", ("abd", 2, 4))])
def test_another_model_is_refused_by_field(field, model):
    PROFILE.require("abc", 2, 4)
    with pytest.raises(ValueError, match=f"its {field} is"):
        PROFILE.require(*model)


def test_few_heads_with_most_damage_are_chosen():
    kl = [[0.001] * 5 for _ in range(20)]
    kl[3][2], kl[7][0], kl[19][4] = 1.0, 2.0, 0.5
    assert worst_heads(kl) == ((7, 0), (3, 2)), "3.0 of 3.597 is more than 80 %"
    assert worst_heads(kl, 3) == ((7, 0), (3, 2), (19, 4))


def test_never_more_than_six_percent_but_one():
    assert worst_heads([[1.0] * 5 for _ in range(20)]) == tuple((0, head) for head in range(5)) + ((1, 0),)
    assert worst_heads([[1.0, 2.0]]) == ((0, 1),)
    assert worst_heads([[0.0, -1e-9]]) == ((0, 0),)


def stored(folder, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "dtype": "bfloat16", **config}))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return folder


def test_the_fingerprint_is_of_weights_and_configuration(tmp_path):
    one = stored(tmp_path / "one")
    base = profile_fingerprint(str(one))
    assert profile_fingerprint(str(shutil.copytree(one, tmp_path / "copy"))) == base, "where it lies does not matter"
    assert profile_fingerprint(str(stored(tmp_path / "dtype", dtype="float32"))) == base, "nor the dtype to serve it in"
    others = {profile_fingerprint(str(stored(tmp_path / "size", hidden_size=128)))}
    (one / "model.safetensors").write_bytes(bytes(range(255, -1, -1)) * 64)
    others.add(profile_fingerprint(str(one)))
    assert len(others | {base}) == 3
