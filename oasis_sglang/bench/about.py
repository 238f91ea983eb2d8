"""What a result was measured on: model, machine, versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from oasis_sglang.plan import shapes
from transport.errors import ConfigError

PACKAGES = ("oasis-sglang", "sglang", "sglang-router", "nixl", "torch", "transformers", "numpy")
PAGE = 16


def shape_of(model: Path, itemsize: int | None = None) -> dict:
    """Of a model's folder: ``layers``, ``kv_heads``, ``head_dim``, ``itemsize`` of KV, ``block_tokens``, ``token_bytes`` (K and V in all layers),
    ``context``. Raises ``ConfigError`` naming what its config.json lacks."""
    shape = shapes.read(model)
    if not shape.context:
        raise ConfigError(f"{model}/config.json has no number max_position_embeddings")
    itemsize = itemsize or _itemsize(shape.dtype)
    return {"name": shape.name, "class": shape.architecture, "layers": shape.layers, "kv_heads": shape.kv_heads, "query_heads": shape.heads,
            "head_dim": shape.head_dim, "itemsize": itemsize, "block_tokens": PAGE,
            "token_bytes": 2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize, "context": shape.context}


def _itemsize(dtype: str) -> int:
    """As our servers hold KV: float32 without a GPU, otherwise the model's own type."""
    from oasis_sglang.cpu.platform import wanted

    return 4 if wanted() or dtype == "float32" else 2


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
