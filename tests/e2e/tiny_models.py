"""Small checkpoints with seeded random weights, one for each model class that is served. Their text means nothing."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from oasis_sglang.models import FINGERPRINT_FILE

CONTEXT = 2048
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

SHAPES = {
    "LlamaForCausalLM": {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
                         "attention_bias": False, "mlp_bias": False},
    "Qwen2ForCausalLM": {"model_type": "qwen2", "hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "use_sliding_window": False},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "hidden_size": 128, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64,
                         "attention_bias": False, "use_sliding_window": False},
}
"""Llama and Qwen3 have another head_dim than hidden / heads, Qwen2 (bias on q, k and v) does not state it; numbers of heads and
head_dim are not all powers of two."""


def write(folder: Path, architecture: str, tokenizer: Path, *, layers: int = 3, seed: int = 0) -> Path:
    """A checkpoint in ``folder``, which is made; its tokenizer is that of the model directory ``tokenizer``."""
    base = json.loads((tokenizer / "config.json").read_text())
    tokens = {name: base[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    config = {"architectures": [architecture], "dtype": "float32", "num_hidden_layers": layers, "intermediate_size": 256, "hidden_act": "silu",
              "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
              "tie_word_embeddings": False, **tokens, **SHAPES[architecture]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in _TOKENIZER:
        shutil.copy(tokenizer / name, folder / name)
    weights = folder / "model.safetensors"
    save_file(dict(_weights(config, torch.Generator().manual_seed(seed))), weights, metadata={"format": "pt"})
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    (folder / FINGERPRINT_FILE).write_text(json.dumps({"model": f"random {architecture}", "config": config, "weights": digest}) + "\n")
    return folder


def _weights(config: dict, chance: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Scaled so that attention looks at some tokens much more than at others (scores spread by about 3), and that what it sees
    decides the next token."""
    hidden, inner, heads, kv_heads = (config[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"))
    dim = config.get("head_dim", hidden // heads)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=chance) * (gain * columns**-0.5)

    def near(value: float, size: int) -> torch.Tensor:
        return value + 0.2 * torch.randn(size, generator=chance)

    yield "model.embed_tokens.weight", matrix(config["vocab_size"], hidden, hidden**0.5)
    yield "model.norm.weight", near(1, hidden)
    yield "lm_head.weight", matrix(config["vocab_size"], hidden, 4.0)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", near(1, hidden)
        yield name + "post_attention_layernorm.weight", near(1, hidden)
        yield name + "self_attn.q_proj.weight", matrix(heads * dim, hidden, 1.7)
        yield name + "self_attn.k_proj.weight", matrix(kv_heads * dim, hidden, 1.7)
        yield name + "self_attn.v_proj.weight", matrix(kv_heads * dim, hidden)
        yield name + "self_attn.o_proj.weight", matrix(hidden, heads * dim, 2.0)
        yield name + "mlp.gate_proj.weight", matrix(inner, hidden)
        yield name + "mlp.up_proj.weight", matrix(inner, hidden)
        yield name + "mlp.down_proj.weight", matrix(hidden, inner)
        if config["model_type"] == "qwen2":
            for which, size in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                yield f"{name}self_attn.{which}_proj.bias", near(0, size * dim)
        if config["model_type"] == "qwen3":
            for which in "qk":
                yield f"{name}self_attn.{which}_norm.weight", near(1.7, dim)
