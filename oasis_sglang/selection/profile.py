"""Profiles: which (layer, KV head)s of a model lose most when they attend to selected blocks only.

Nearly all of the quality that a working set costs sits in about one head of twenty (selection study, section 4); a decode node
serves those from all blocks. ``oasis calibrate`` measures which they are and writes a profile, a small JSON file that travels
with the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VERSION = 1
COVERED = 0.8
MOST = 0.06
"""By default as few heads as cover this share of all damage, and never more than that share of all heads (but one)."""


class Profile(NamedTuple):
    """``fingerprint``: of the model (``oasis_sglang.fingerprint.profile_fingerprint``). ``heads``: (layer, KV head) of those to serve
    from all blocks, worst first; KV heads count over all ranks. ``kl``: of every head, [layers][kv_heads], mean nats per token when
    that head alone selects. ``settings``: how it was measured."""

    version: int
    fingerprint: str
    layers: int
    kv_heads: int
    heads: tuple[tuple[int, int], ...]
    kl: tuple[tuple[float, ...], ...]
    settings: Mapping[str, Any]

    def pieces(self, first_head: int, heads: int) -> np.ndarray:
        """int64, ascending: the pieces (layer * ``heads`` + KV head) of a rank that has KV heads ``first_head`` to ``first_head + heads``.

        Raises ``ValueError`` for KV heads that the model has not.
        """
        if first_head < 0 or heads < 1 or first_head + heads > self.kv_heads:
            raise ValueError(f"KV heads {first_head} to {first_head + heads - 1} are not within the profile's kv_heads = {self.kv_heads}")
        mine = [layer * heads + head - first_head for layer, head in self.heads if first_head <= head < first_head + heads]
        return np.array(sorted(mine), np.int64)

    def require(self, fingerprint: str, layers: int, kv_heads: int) -> None:
        """Raises ``ValueError`` naming the field in which the model is another one than was calibrated."""
        for field, value in (("layers", layers), ("kv_heads", kv_heads), ("fingerprint", fingerprint)):
            if getattr(self, field) != value:
                raise ValueError(f"the profile is for another model: its {field} is {getattr(self, field)}, the model's {value}")

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(self._asdict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Raises ``ValueError`` naming the file and the field that is missing or wrong, ``OSError`` when there is nothing to read."""
        try:
            return cls._checked(json.loads(Path(path).read_text()))
        except ValueError as error:
            raise ValueError(f"{path} is not a profile of this version: {error}") from None

    @classmethod
    def _checked(cls, raw: object) -> Profile:
        if not isinstance(raw, dict) or set(raw) != set(cls._fields):
            raise ValueError(f"the fields are not {', '.join(cls._fields)}")
        if raw["version"] != VERSION:
            raise ValueError(f"field version is {raw['version']}, not {VERSION}")
        if not isinstance(raw["fingerprint"], str) or not raw["fingerprint"]:
            raise ValueError("field fingerprint is not a text")
        for field in ("layers", "kv_heads"):
            if not _whole(raw[field]) or raw[field] < 1:
                raise ValueError(f"field {field} is not a positive number")
        layers, kv_heads = raw["layers"], raw["kv_heads"]
        heads, kl = raw["heads"], raw["kl"]
        if not isinstance(heads, list) or not all(isinstance(h, list) and len(h) == 2 and all(map(_whole, h)) for h in heads):
            raise ValueError("field heads is not a list of pairs")
        for layer, head in heads:
            if not (0 <= layer < layers and 0 <= head < kv_heads):
                raise ValueError(f"field heads names layer {layer}, KV head {head} of {layers} layers x {kv_heads} KV heads")
        if len({tuple(h) for h in heads}) < len(heads):
            raise ValueError("field heads names a head twice")
        if not isinstance(kl, list) or len(kl) != layers or not all(isinstance(row, list) and len(row) == kv_heads for row in kl):
            raise ValueError(f"field kl does not have {layers} x {kv_heads} numbers")
        if not all(isinstance(value, int | float) and np.isfinite(value) for row in kl for value in row):
            raise ValueError("field kl holds something else than numbers")
        if not isinstance(raw["settings"], dict):
            raise ValueError("field settings is not an object")
        return cls(VERSION, raw["fingerprint"], layers, kv_heads, tuple(map(tuple, heads)), tuple(map(tuple, kl)), raw["settings"])


def worst_heads(kl: Sequence[Sequence[float]], count: int | None = None) -> tuple[tuple[int, int], ...]:
    """(layer, KV head) of the largest ``kl`` [layers][kv_heads], worst first, the earlier of equal ones first.

    ``count`` None: the fewest that cover ``COVERED`` of the sum, but at most ``MOST`` of all heads, and at least one.
    """
    damage = np.maximum(np.asarray(kl, np.float64), 0)
    flat = damage.reshape(-1)
    order = np.argsort(-flat, kind="stable")
    if count is None:
        covering = int(np.searchsorted(np.cumsum(flat[order]), COVERED * flat.sum())) + 1
        count = max(1, min(covering, int(MOST * flat.size)))
    return tuple((int(i) // damage.shape[1], int(i) % damage.shape[1]) for i in order[:count])


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
