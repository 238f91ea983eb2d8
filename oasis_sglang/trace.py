"""What the taps saw, for tests: one ``.npz`` file per forward and layer. Off unless the option ``trace_dir`` is set."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch


class Trace:
    """Writes arrays into ``folder`` as NUMBER-NAME.npz, numbered in order. bf16 and fp16 become float32."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()

    def write(self, name: str, **arrays: object) -> None:
        partial = self.folder / ".partial.npz"
        np.savez(partial, **{key: _plain(value) for key, value in arrays.items()})
        partial.rename(self.folder / f"{next(self._numbers):07d}-{name}.npz")


def _plain(value: object) -> np.ndarray:
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()
