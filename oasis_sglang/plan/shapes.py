"""Shapes of models: all that capacity depends on. A few are known by name, others are read from a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from oasis_sglang.models import CUT_LAYERS, MODEL_NAME
from oasis_sglang.models_supported import check_model
from transport.errors import ConfigError

WEIGHT_ITEMSIZE = 2
"""Bytes per parameter unless weight files say otherwise: bfloat16."""


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped-query attention and a gated MLP, or ``experts`` of them of which each token takes ``experts_used``.

    ``intermediate``: width of the MLP, or of one expert; ``tied``: embedding and output head are one matrix; ``qk_norm``, ``qkv_bias``: which
    small extras its attention has. ``weight_bytes``: 0 = two bytes per parameter. ``context``, ``dtype``: as the folder says, 0 and "" where it does not.
    """

    name: str
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    experts_used: int = 0
    qk_norm: bool = False
    qkv_bias: bool = False
    weight_bytes: int = 0
    context: int = 0
    dtype: str = ""

    @property
    def _mlp(self) -> int:
        """Parameters of a layer's MLP, or of one expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def _beside_mlp(self) -> int:
        """Parameters of all layers without MLPs and experts, with routers and norms."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        extras = 2 * self.head_dim * self.qk_norm + (self.heads + 2 * self.kv_heads) * self.head_dim * self.qkv_bias
        return self.layers * (attention + extras + 2 * self.hidden + self.hidden * self.experts)

    @property
    def parameters(self) -> int:
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.hidden + self._beside_mlp + self.layers * self._mlp * max(1, self.experts)

    @property
    def active_parameters(self) -> int:
        """Of one token."""
        return self.parameters - self.layers * self._mlp * (self.experts - self.experts_used)

    @property
    def weights(self) -> int:
        """Bytes."""
        return self.weight_bytes or self.parameters * WEIGHT_ITEMSIZE

    def weights_read(self, batch: int) -> float:
        """Bytes of weights that a decode step of ``batch`` tokens reads: all but the rows of an input embedding of its own, and of
        experts those that at least one token takes, as if each took its own at random."""
        idle = 0.0 if self.tied else self.vocabulary * self.hidden
        if self.experts:
            idle += self.layers * self._mlp * self.experts * (1 - self.experts_used / self.experts) ** batch
        return self.weights * (1 - idle / self.parameters)

    def refusal(self) -> str:
        """Why decode nodes do not serve it with working sets; "" if they do."""
        try:
            check_model({"architectures": [self.architecture]})
        except ConfigError as error:
            return error.message
        return ""


_SMOL = dict(architecture="LlamaForCausalLM", heads=9, kv_heads=3, head_dim=64, hidden=576, intermediate=1536, vocabulary=49_152, tied=True)
_LLAMA = dict(architecture="LlamaForCausalLM", kv_heads=8, head_dim=128, vocabulary=128_256)
_QWEN = dict(architecture="Qwen3ForCausalLM", kv_heads=8, head_dim=128, vocabulary=151_936, qk_norm=True)

# From the configurations that are published with the weights.
SHAPES = {shape.name: shape for shape in (
    Shape("meta-llama/Llama-3.1-8B", layers=32, heads=32, hidden=4096, intermediate=14_336, **_LLAMA),
    Shape("meta-llama/Llama-3.1-70B", layers=80, heads=64, hidden=8192, intermediate=28_672, **_LLAMA),
    Shape("Qwen/Qwen3-8B", layers=36, heads=32, hidden=4096, intermediate=12_288, **_QWEN),
    Shape("Qwen/Qwen3-32B", layers=64, heads=64, hidden=5120, intermediate=25_600, **_QWEN),
    Shape("Qwen/Qwen3-235B-A22B", "Qwen3MoeForCausalLM", layers=94, heads=64, kv_heads=4, head_dim=128, hidden=4096, intermediate=1536,
          vocabulary=151_936, experts=128, experts_used=8, qk_norm=True),
    Shape(f"HuggingFaceTB/{MODEL_NAME}", layers=30, **_SMOL),
    Shape(f"{MODEL_NAME}-{len(CUT_LAYERS)}-layers", layers=len(CUT_LAYERS), **_SMOL),
)}


def find(name: str) -> Shape:
    """By name, with or without its owner, letter case ignored, or of a folder with a ``config.json``. Raises ``ConfigError`` naming what
    is known."""
    if (Path(name) / "config.json").is_file():
        return read(Path(name))
    wanted = name.lower()
    for known, shape in SHAPES.items():
        if wanted in (known.lower(), known.lower().rpartition("/")[2]):
            return shape
    raise ConfigError(f"no model {name!r}: give a folder with a config.json, or one of {', '.join(SHAPES)}")


def weighing(shape: Shape, size: int) -> Shape:
    """With weights of ``size`` bytes."""
    return replace(shape, weight_bytes=size)


def read(folder: Path) -> Shape:
    """Raises ``ConfigError`` naming a field that is missing or rules the model out."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/config.json is not readable: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"{folder}/config.json is not a JSON object")
    if config.get("kv_lora_rank"):
        raise ConfigError(f"{folder}: MLA models keep another kind of KV (field kv_lora_rank)")

    def number(*fields: str, default: int | None = None) -> int:
        value = next((config[field] for field in fields if config.get(field) is not None), default)
        if type(value) is not int or value < 0:
            raise ConfigError(f"{folder}/config.json has no number {' or '.join(fields)}")
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    experts = number("num_experts", "num_local_experts", default=0)
    architecture = next(iter(config.get("architectures") or ()), "unknown")
    return Shape(
        folder.name, architecture, layers=number("num_hidden_layers"), heads=heads, kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // max(1, heads)), hidden=hidden,
        intermediate=number("moe_intermediate_size", "intermediate_size") if experts else number("intermediate_size"),
        vocabulary=number("vocab_size"), tied=bool(config.get("tie_word_embeddings")), experts=experts,
        experts_used=number("num_experts_per_tok") if experts else 0, qk_norm=architecture.startswith("Qwen3"), qkv_bias=architecture == "Qwen2ForCausalLM",
        weight_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")), context=number("max_position_embeddings", default=0),
        dtype=str(config.get("torch_dtype") or config.get("dtype") or ""))
