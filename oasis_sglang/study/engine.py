"""Forced answers: the tokens that follow a prompt are given, and each setting's working set computes what comes after each of them.

All settings of a study walk through the same answer side by side, one batch row each: the weights and the prompt are read once for all.
Every step is what a decode node does, in its order: attend over what is resident, score, plan, have at the next step what was pulled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from oasis_sglang.speculation.draft import DraftSource, PromptLookup, Request
from oasis_sglang.study.model import Model, Prompt
from oasis_sglang.study.policies import Setting
from oasis_sglang.study.residency import Residency


class Dense(NamedTuple):
    """An answer of T tokens under dense attention. ``log_probabilities`` float32 [T, vocabulary], of what follows each token;
    ``inputs``: of each layer, [1, T, H]; ``queries`` [T, S, G, D]."""

    log_probabilities: torch.Tensor
    inputs: list[torch.Tensor]
    queries: torch.Tensor


class Result(NamedTuple):
    """What a setting did on one answer. By token, [T]: ``kl`` (dense || sparse) in nats, ``top1``, ``recall`` (share of the dense
    softmax on what is seen, averaged over the heads that select), ``bytes`` pulled from the first to this token, admission
    included. By (layer, KV head), [S]: ``missed_mass`` (share of the newest rows' expected mass that was not resident), ``lost``
    (1 - recall), ``selects``: whether it does. ``misses`` / ``wanted``: of the newest rows' top sets. ``steps``: forwards;
    ``admitted``: bytes before the first; ``full``: bytes of all of the prompt's KV."""

    kl: np.ndarray
    top1: np.ndarray
    recall: np.ndarray
    bytes: np.ndarray
    missed_mass: np.ndarray
    lost: np.ndarray
    selects: np.ndarray
    misses: int
    wanted: int
    steps: int
    admitted: int
    full: int


def dense(model: Model, prompt: Prompt, answer: Sequence[int]) -> Dense:
    tokens = torch.tensor([answer], device=model.device)
    n = tokens.shape[1]
    inputs, queries = [], []
    own = torch.ones((1, n, n), dtype=torch.bool, device=model.device).tril()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        queries.append(q[0].transpose(0, 1).unflatten(1, (model.kv_heads, model.group)))
        return model.attention(prompt, layer, q, k, v, own)[0]

    positions = len(prompt.ids) + torch.arange(n, device=model.device)[None]
    with torch.inference_mode():
        hidden = model.embed(tokens)
        for layer in range(model.layers):
            inputs.append(hidden)
            hidden = model.forward(hidden, positions, attend, layer, layer + 1)
        return Dense(model.log_probabilities(hidden)[0], inputs, torch.cat(queries, 1))


class _Walk:
    """One setting on its way through the answer: at token ``at``, with the drafts of this step."""

    def __init__(self, name: str, residency: Residency, answer: Sequence[int], heads: int):
        self.name = name
        self.residency, self.answer, self.at, self.drafts, self.steps = residency, list(answer), 0, [], 0
        n = len(self.answer)
        self.kl, self.top1, self.recall, self.bytes = np.zeros(n), np.zeros(n, bool), np.zeros(n), np.zeros(n)
        self.lost = np.zeros(heads)
        self.sum = residency.admitted_bytes

    @property
    def rows(self) -> int:
        """The most that a step computes."""
        policy, setting = self.residency.policy, self.residency.setting
        return 1 + (setting.drafts if policy.kept else setting.ahead if policy.drafted else 0)

    def propose(self, prompt: list[int], source: DraftSource) -> list[int]:
        """The tokens of this step: the next of the answer, and what is drafted after it."""
        policy, left = self.residency.policy, self.answer[self.at + 1 :]
        most = min(self.rows - 1, len(left))
        if most == 0:
            self.drafts = []
        elif policy.oracle:
            self.drafts = left[:most]
        else:
            guess = source.propose([Request(self.name, prompt, self.answer[: self.at + 1])], most)
            self.drafts = guess.tokens[0, : guess.counts[0]].tolist()
        return [self.answer[self.at], *self.drafts]

    def accepted(self, queries: torch.Tensor) -> int:
        """Drafts of this step that are right, believed and kept. ``queries`` [R, S, G, D] of its rows."""
        if not self.residency.policy.kept or not self.drafts:
            return 0
        pairs = zip(self.drafts, self.answer[self.at + 1 :])
        right = next((i for i, (draft, true) in enumerate(pairs) if draft != true), len(self.drafts))
        return min(right, self.residency.trusted(queries))

    def done(self, log_probabilities: torch.Tensor, share: torch.Tensor, queries: torch.Tensor, reference: torch.Tensor) -> None:
        """Of this step's rows: [R, vocabulary], [R, S], [R, S, G, D]; ``reference`` [T, vocabulary]."""
        queries = queries[: len(self.drafts) + 1]
        accepted = self.accepted(queries)
        rows = slice(self.at, self.at + accepted + 1)
        mine, true = log_probabilities[: accepted + 1], reference[rows]
        self.kl[rows] = (true.exp() * (true - mine)).sum(-1).cpu().numpy()
        self.top1[rows] = (true.argmax(-1) == mine.argmax(-1)).cpu().numpy()
        share = share[: accepted + 1].double().cpu().numpy()
        selects = ~self.residency.sets.dense.cpu().numpy()
        self.recall[rows] = share[:, selects].mean(1) if selects.any() else 1
        self.lost += (1 - share).sum(0)
        self.residency.follow(queries, accepted)
        self.sum += self.residency.fetched[-1] * self.residency.layout.piece_bytes
        self.bytes[rows] = self.sum
        self.at += accepted + 1
        self.steps += 1

    def result(self, prompt: Prompt) -> Result:
        r, layout = self.residency, self.residency.layout
        full = layout.pieces * layout.piece_bytes * len(prompt.ids) // layout.block_tokens
        return Result(self.kl, self.top1, self.recall, self.bytes, r.missed / self.steps, self.lost / len(self.answer), ~r.sets.dense.cpu().numpy(),
                      int(r.misses.sum()), int(r.wanted.sum()), self.steps, r.admitted_bytes, full)


def walk(model: Model, prompt: Prompt, answer: Sequence[int], settings: Sequence[Setting], heads: dict[str, np.ndarray], reference: torch.Tensor, *,
         source: DraftSource | None = None, seed: int = 0, progress: Callable[[int], None] = lambda tokens: None) -> list[Result]:
    """``settings`` side by side over ``answer``. ``heads``: by name, bool [S], which (layer, KV head)s are dense; ``reference``:
    ``Dense.log_probabilities``; ``source`` drafts where a policy wants drafts, by default by prompt lookup; ``seed``: of the
    random control.

    ``progress`` is told how many tokens all settings have walked. Raises ``ValueError`` for a setting that cannot be.
    """
    torch.manual_seed(seed)
    if len({s.block for s in settings}) != 1:
        raise ValueError("settings that walk together have one block size")
    ranking = model.ranking(prompt, settings[0].block)
    source = source or PromptLookup()
    walks = [_Walk(str(i), Residency(model, prompt, s, ranking, heads[s.heads]), answer, model.layers * model.kv_heads) for i, s in enumerate(settings)]
    shape = (model.layers, len(walks), model.kv_heads, len(answer) + max(w.rows for w in walks), model.head_dim)
    keys = torch.zeros(shape, dtype=prompt.keys[0].dtype, device=model.device)
    values = torch.zeros_like(keys)
    for rows in sorted({w.rows for w in walks}):  # those that draft would make rows for all
        while active := [i for i, w in enumerate(walks) if w.rows == rows and w.at < len(answer)]:
            _step(model, prompt, [walks[i] for i in active], torch.tensor(active, device=model.device), keys, values, reference, source)
            progress(sum(w.at for w in walks))
    return [w.result(prompt) for w in walks]


@torch.inference_mode()
def _step(model: Model, prompt: Prompt, walks: Sequence[_Walk], index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, reference: torch.Tensor,
          source: DraftSource) -> None:
    """One step of each of ``walks``, whose own keys and values are at ``index`` int64 [B] of [L, settings, Hkv, ..., D]."""
    proposed = [w.propose(prompt.ids, source) for w in walks]
    width = max(map(len, proposed))
    tokens = torch.tensor([p + [0] * (width - len(p)) for p in proposed], device=model.device)
    place = torch.tensor([w.at for w in walks], device=model.device)[:, None] + torch.arange(width, device=model.device)
    own = torch.arange(keys.shape[3], device=model.device) <= place[:, :, None]
    queries = torch.empty((len(walks), width, model.layers * model.kv_heads, model.group, model.head_dim), device=model.device)
    shares = torch.empty(queries.shape[:3], device=model.device)
    resident = [w.residency.seen for w in walks]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        part = slice(layer * model.kv_heads, (layer + 1) * model.kv_heads)
        for all_rows, rows in ((keys, k), (values, v)):
            all_rows[layer][index[:, None], :, place] = rows.transpose(1, 2)
        queries[:, :, part] = asked = q.transpose(1, 2).unflatten(2, (model.kv_heads, model.group))
        seen = [w.residency.at_once(layer, asked[i, 0]) if w.residency.policy.now else resident[i][part] for i, w in enumerate(walks)]
        seen = torch.stack(seen)[:, None]
        out, shares[:, :, part] = model.attention(prompt, layer, q, keys[layer][index], values[layer][index], own, seen, walks[0].residency.setting.block)
        return out

    hidden = model.forward(model.embed(tokens), len(prompt.ids) + place, attend)
    log_probabilities = model.log_probabilities(hidden)
    for i, w in enumerate(walks):
        w.done(log_probabilities[i], shares[i], queries[i], reference)
