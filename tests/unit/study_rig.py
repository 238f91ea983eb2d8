"""Tiny models and prompts for tests of the offline engine."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from oasis_sglang.study.model import Model

WORDS = 97
CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def store(folder: Path, kind: str = "llama", seed: int = 0, change=None) -> Path:
    """A checkpoint of random weights whose attention looks at some tokens much more than at others, and matters."""
    config_class, model_class = CLASSES[kind]
    config = config_class(vocab_size=WORDS, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3,
                          head_dim=16, max_position_embeddings=2048, tie_word_embeddings=False, architectures=[model_class.__name__])
    torch.manual_seed(seed)
    model = model_class(config).float()
    gains = {"q_proj.weight": 2.5, "k_proj.weight": 2.5, "o_proj.weight": 2.0, "lm_head.weight": 3.0, "embed_tokens.weight": 7.0}
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() == 2:
                gain = next((g for end, g in gains.items() if name.endswith(end)), 1.0)
                value.copy_(torch.randn(value.shape) * gain * value.shape[1] ** -0.5)
        if change is not None:
            change(model)
    model.save_pretrained(folder)
    return folder


@functools.cache
def _tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def tokens(count: int, seed: int = 1) -> list[int]:
    return list(_tokens(count, seed))


def load(folder: Path, **how) -> Model:
    torch.set_num_threads(1)
    return Model(store(folder, **how))
