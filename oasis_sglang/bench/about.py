"""What a result was measured on: model, machine, versions."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("oasis-sglang", "sglang", "sglang-router", "nixl", "torch", "transformers", "numpy")
PAGE = 16


def shape_of(model: Path, itemsize: int | None = None) -> dict:
    """Of a model's folder: ``layers``, ``kv_heads``, ``head_dim``, ``itemsize`` of KV, ``block_tokens``, ``token_bytes`` (K and V in all layers),
    ``context``. Raises ``OSError``, ``KeyError``."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads, layers = config.get("num_key_value_heads", heads), config["num_hidden_layers"]
    itemsize = itemsize or _itemsize(config)
    return {"name": model.name, "class": config.get("architectures", [""])[0], "layers": layers, "kv_heads": kv_heads, "query_heads": heads,
            "head_dim": head_dim,
            "itemsize": itemsize, "block_tokens": PAGE, "token_bytes": 2 * layers * kv_heads * head_dim * itemsize,
            "context": config["max_position_embeddings"]}


def _itemsize(config: dict) -> int:
    """As our servers hold KV: float32 without a GPU, otherwise the model's own type."""
    from oasis_sglang.cpu.platform import wanted

    if wanted():
        return 4
    return {"float32": 4}.get(str(config.get("torch_dtype") or config.get("dtype")), 2)


def machine() -> dict:
    from oasis_sglang.demo import describe_machine

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"description": describe_machine(), "cores": len(os.sched_getaffinity(0)), "memory_bytes": pages,
            "gpus": len(list(Path("/dev").glob("nvidia[0-9]*"))),
            "load_average": os.getloadavg()[0]}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
