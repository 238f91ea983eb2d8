"""Which weights is this? A short digest that differs when two nodes serve different models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

SAMPLE = 1 << 16
_PLACE_KEYS = ("_name_or_path", "transformers_version", "architectures_path")


def model_fingerprint(model_path: str, hf_config: dict, *extra: str) -> str:
    """Hex SHA-256 over the configuration, and size, head and tail of every weight file (a local directory).

    Reading whole checkpoints would cost minutes; the samples contain each tensor's name and shape and some values. For
    a model that is not a local directory only the configuration and the name count.
    """
    h = hashlib.sha256()
    config = {k: v for k, v in hf_config.items() if k not in _PLACE_KEYS}
    h.update(json.dumps(config, sort_keys=True, default=str).encode())
    for part in extra:
        h.update(b"\0" + part.encode())
    folder = Path(model_path)
    files = sorted(f for pattern in ("*.safetensors", "*.bin", "*.gguf", "*.pt") for f in folder.glob(pattern)) if folder.is_dir() else []
    if not files:
        h.update(model_path.encode())
    for file in files:
        size = file.stat().st_size
        h.update(f"{file.name}:{size}".encode())
        with file.open("rb") as f:
            h.update(f.read(SAMPLE))
            # The middle too: fine-tunes often keep the embeddings that stand first and last.
            for at in (size // 2, max(0, size - SAMPLE)):
                f.seek(at)
                h.update(f.read(SAMPLE))
    return h.hexdigest()


def profile_fingerprint(model_path: str) -> str:
    """Of the model that a profile is for: weights and configuration as they are stored, whatever dtype they are served in.

    Both sides read the file: a configuration in memory has what its library and its server added.
    """
    file = Path(model_path) / "config.json"
    if file.is_file():
        config = json.loads(file.read_text())
    else:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model_path).to_dict()
    return model_fingerprint(str(model_path), {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")})
