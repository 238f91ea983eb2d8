"""Which heads must stay dense: the damage of each (layer, KV head) when it alone attends to selected blocks.

What a head sees is decided by its layer's queries, and those do not depend on that head. So one dense run gives every head's
working set on its way through the answer, and its damage needs only the layers from its own up; the heads of a layer are a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from oasis_sglang.selection.profile import VERSION, Profile, worst_heads
from oasis_sglang.study.engine import Dense, dense, walk
from oasis_sglang.study.model import Model, Prompt
from oasis_sglang.study.policies import Setting
from oasis_sglang.study.residency import Residency
from oasis_sglang.study.texts import Case

Progress = Callable[[str, float], None]
"""(what is done, share of it)."""


class Verdict(NamedTuple):
    """Mean KL on held-out answers: without a profile, with the profile's heads dense, and with as many arbitrary ones."""

    none: float
    profile: float
    arbitrary: float
    chosen: tuple[tuple[int, int], ...]
    """The arbitrary heads."""


def damage(model: Model, cases: Sequence[Case], setting: Setting, progress: Progress) -> np.ndarray:
    """Mean KL float64 [layers, kv_heads] over the counted tokens of ``cases``, of which successive ones may share a prompt."""
    kl = np.zeros((model.layers, model.kv_heads))
    total = sum(len(case.answer) - case.counted for case in cases)
    prompt = None
    for i, case in enumerate(cases):
        progress(f"{case.name}: prompt", i / len(cases))
        if prompt is None or prompt.ids != case.prompt:
            prompt = model.prefill(case.prompt)
        run = dense(model, prompt, case.answer)
        seen = _seen(model, prompt, setting, run)
        for layer in range(model.layers):
            progress(f"{case.name}: layer {layer}", (i + (layer + 1) / model.layers) / len(cases))
            kl[layer] += _layer_damage(model, prompt, run, layer, seen, setting.block)[:, case.counted :].sum(1)
    return kl / total


def _seen(model: Model, prompt: Prompt, setting: Setting, run: Dense) -> torch.Tensor:
    """bool [T, S, N]: what each head's working set holds at each token when nothing else is sparse."""
    residency = Residency(model, prompt, setting, model.ranking(prompt, setting.block), no_heads(model))
    seen = []
    with torch.inference_mode():
        for queries in run.queries:
            seen.append(residency.seen)
            residency.follow(queries[None], 0)
    return torch.stack(seen)


@torch.inference_mode()
def _layer_damage(model: Model, prompt: Prompt, run: Dense, layer: int, seen: torch.Tensor, block: int) -> np.ndarray:
    """KL float64 [Hkv, T] of each head of ``layer`` alone."""
    heads, n = model.kv_heads, len(run.log_probabilities)
    own = torch.ones((1, n, n), dtype=torch.bool, device=model.device).tril()
    mine = torch.ones((heads, n, heads, seen.shape[2]), dtype=torch.bool, device=model.device)
    for head in range(heads):
        mine[head, :, head] = seen[:, layer * heads + head]

    def attend(at: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return model.attention(prompt, at, q, k, v, own, mine if at == layer else None, block)[0]

    positions = len(prompt.ids) + torch.arange(n, device=model.device)
    hidden = model.forward(run.inputs[layer].expand(heads, -1, -1), positions.expand(heads, -1), attend, layer)
    kl = np.zeros((heads, n))
    true = run.log_probabilities
    for head in range(heads):
        kl[head] = (true.exp() * (true - model.log_probabilities(hidden[head]))).sum(-1).cpu().numpy()
    return kl


def make_profile(model: Model, cases: Sequence[Case], setting: Setting, *, fingerprint: str, settings: dict, count: int | None = None,
                 progress: Progress = lambda what, share: None) -> Profile:
    """``count``: dense heads, None: as many as ``worst_heads`` takes; ``settings``: what the profile says about its making."""
    kl = damage(model, cases, setting, progress)
    return Profile(VERSION, fingerprint, model.layers, model.kv_heads, worst_heads(kl, count), tuple(tuple(map(float, row)) for row in kl), settings)


def verify(model: Model, cases: Sequence[Case], setting: Setting, profile: Profile, *, seed: int = 0,
           progress: Progress = lambda what, share: None) -> Verdict:
    """On ``cases`` that the profile was not made from."""
    arbitrary = arbitrary_heads(profile, seed)
    heads = {"none": mask(profile, ()), "profile": mask(profile, profile.heads), "arbitrary": mask(profile, arbitrary)}
    sums, total, prompt = np.zeros(3), 0, None
    for i, case in enumerate(cases):
        progress(f"{case.name}: prompt", i / len(cases))
        if prompt is None or prompt.ids != case.prompt:
            prompt = model.prefill(case.prompt)
        reference = dense(model, prompt, case.answer).log_probabilities
        steps = 3 * len(case.answer)
        results = walk(model, prompt, case.answer, [setting._replace(heads=name) for name in heads], heads, reference, seed=seed,
                       progress=lambda done: progress(case.name, (i + done / steps) / len(cases)))
        sums += [r.kl[case.counted :].sum() for r in results]
        total += len(case.answer) - case.counted
    return Verdict(*(sums / total), arbitrary)


def no_heads(model: Model) -> np.ndarray:
    """bool [layers * kv_heads]."""
    return np.zeros(model.layers * model.kv_heads, bool)


def mask(profile: Profile, heads: Sequence[tuple[int, int]]) -> np.ndarray:
    """bool [layers * kv_heads]."""
    out = np.zeros((profile.layers, profile.kv_heads), bool)
    for layer, head in heads:
        out[layer, head] = True
    return out.reshape(-1)


def arbitrary_heads(profile: Profile, seed: int) -> tuple[tuple[int, int], ...]:
    """As many others as the profile has, by chance."""
    others = [(layer, head) for layer in range(profile.layers) for head in range(profile.kv_heads) if (layer, head) not in profile.heads]
    chosen = np.random.default_rng(seed).choice(len(others), min(len(profile.heads), len(others)), replace=False)
    return tuple(others[i] for i in sorted(chosen))
