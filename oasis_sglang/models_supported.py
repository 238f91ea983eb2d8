"""Which models Oasis serves. Torch-free, so that a server can refuse before it loads anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from transport.errors import ConfigError

MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Model classes whose attention is plain MHA/GQA over one uniform KV pool. MLA, SWA, mamba and MoE classes are not
among them: their KV has other shapes, or is written past the pool's interface."""


def check_model(config: Mapping) -> None:
    """``config``: a Hugging Face model configuration. Raises ``ConfigError`` naming the field that rules it out."""
    names = list(config.get("architectures") or [])
    if not any(name in MODELS for name in names):
        raise ConfigError(f"Oasis does not serve model class {', '.join(names) or 'unknown'} (field architectures); it serves {', '.join(MODELS)}")
    if config.get("use_sliding_window") and config.get("sliding_window"):
        raise ConfigError(f"Oasis does not serve sliding-window attention (field sliding_window = {config['sliding_window']})")


def check_model_path(model_path: str) -> None:
    """The same for a local model directory; any other path is checked once the model is loaded."""
    file = Path(model_path) / "config.json"
    if file.is_file():
        check_model(json.loads(file.read_text()))
