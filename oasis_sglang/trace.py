"""What the taps saw, for tests: one ``.npz`` file per forward and layer. Off unless the option ``trace_dir`` is set.

Both nodes may write to one folder: decode its steps (``Coordinator``), prefill K and V of its prompts (``trace_prompts``).
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import torch

_numbers = itertools.count()
"""Of this process, so that whoever traces here never takes another's name."""


class Trace:
    """Writes arrays into ``folder`` as NODE-PID-NUMBER-NAME.npz, numbered in order. bf16 and fp16 become float32."""

    def __init__(self, folder: str, node: str = "decode"):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.node = node

    def write(self, name: str, **arrays: object) -> None:
        final = self.folder / f"{self.node}-{os.getpid()}-{next(_numbers):07d}-{name}.npz"
        partial = final.with_name(f".partial-{final.name}")  # not another process' either
        np.savez(partial, **{key: _plain(value) for key, value in arrays.items()})
        partial.rename(final)


def trace_prompts(backend, trace: Trace) -> None:
    """From now on each prompt forward of an SGLang attention backend writes, per layer, K and V as given (after RoPE,
    [tokens, kv_heads * head_dim]), the requests' ids, and how many tokens each had before and has in this forward."""
    forward_extend = backend.forward_extend

    def extend(q, k, v, layer, forward_batch, *args, **kwargs):
        if forward_batch.rids and forward_batch.extend_seq_lens_cpu is not None:  # not a warm-up batch
            trace.write(f"layer{layer.layer_id}", k=k, v=v, rids=list(forward_batch.rids),
                        extend_prefix_lens=forward_batch.extend_prefix_lens_cpu, extend_seq_lens=forward_batch.extend_seq_lens_cpu)
        return forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)

    backend.forward_extend = extend


def _plain(value: object) -> np.ndarray:
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()
