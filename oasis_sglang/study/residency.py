"""One request's working set on the way through an answer: the tables and plans that serve, without a pool, a cache or a network.

What a plan asks for is there at the next step, as on a network that takes no time: what remains is the loss of selecting itself.
What is generated is always seen, as in the tail of a request whose answer is no longer than ``tail_tokens``.
"""

from __future__ import annotations

import numpy as np
import torch

from decode_node.lookahead import Rows
from decode_node.working_set import WorkingSets
from oasis_sglang.selection import planner
from oasis_sglang.selection.caps import warm_cap
from oasis_sglang.selection.controls import CONTROLS
from oasis_sglang.selection.scorer import union
from oasis_sglang.selection.summaries import SUMMARIES, Summary
from oasis_sglang.selection.trust import missed_share, trusted_rows
from oasis_sglang.study.model import Model, Prompt
from oasis_sglang.study.policies import POLICIES, Setting
from transport.layout import KVLayout

ITEM_BYTES = 2
"""Bytes are counted as they are served: bfloat16."""


def summary_named(name: str) -> Summary:
    """Raises ``ValueError`` for a name that is no summary and no control."""
    known = {**SUMMARIES, **CONTROLS}
    if name not in known:
        raise ValueError(f"there is no summary {name}; known are {', '.join(known)}")
    return known[name]


class Residency:
    """Owner of one set. S = layers x KV heads, N = whole blocks of the prompt. ``seen`` bool [S, N]: what the next step attends to.

    ``fetched``: blocks pulled, by step; ``misses``, ``wanted`` int64 [S] and ``missed`` float64 [S] (shares of the actual rows'
    expected mass), summed over steps.
    """

    def __init__(self, model: Model, prompt: Prompt, setting: Setting, ranking: np.ndarray, dense: np.ndarray):
        """``ranking`` as ``Model.ranking`` has it; ``dense`` bool [S]. Raises ``ValueError`` for a budget that cannot hold what is pinned."""
        self.model, self.setting, self.policy = model, setting, POLICIES[setting.policy]
        self.whole = len(prompt.ids) // setting.block
        summary = summary_named(setting.summary)
        self.layout = KVLayout(model.layers, model.kv_heads, model.head_dim, setting.block, "bfloat16", ITEM_BYTES, 1, setting.summary,
                               summary.bytes(model.head_dim), ())
        sink, recent = (-(-tokens // setting.block) for tokens in (setting.sink, setting.recent))
        selection = planner.initial_selection(ranking, self.whole, setting.budget // setting.block, sink, recent)
        self.working = selection.shape[1]
        self.sets = WorkingSets(self.layout, summary, sets=1, blocks=self.whole, numbers=self.whole, working=self.working, sink=sink, recent=recent,
                                device=model.device, dense=dense.nonzero()[0], floor=setting.floor, sticky=setting.sticky, decay=setting.decay)
        self.sets.acquire()
        self.sets.bind(0, 0, np.arange(self.whole))
        for layer in range(model.layers):
            part = slice(layer * model.kv_heads, (layer + 1) * model.kv_heads)
            self.sets.raw[part] = summary.build(model.blocks(prompt, setting.block, layer))
        self.sets.place(0, selection, self.whole)
        self.held = (self.sets.slot_of >= 0) | self.sets.dense[:, None]
        self.index = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.w, self.blocks = self.index + self.working, self.index + self.whole
        self.everything = self.whole <= self.working
        pieces = model.layers * model.kv_heads
        self.fetched: list[int] = []
        self._pulled = 0
        self.misses, self.wanted, self.missed = np.zeros(pieces, np.int64), np.zeros(pieces, np.int64), np.zeros(pieces)

    @property
    def seen(self) -> torch.Tensor:
        return (self.sets.slot_of[0] >= 0) | self.sets.dense[:, None]

    @property
    def admitted_bytes(self) -> int:
        """The first working set, all blocks of dense heads, the summaries of all, and the partial page."""
        dense = int(self.sets.dense.sum())
        pieces = (self.layout.pieces - dense) * self.working + dense * self.whole + self.layout.pieces
        return pieces * self.layout.piece_bytes + self.whole * self.layout.summary_total

    def mass(self, queries: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        """Expected mass float32 [R, P, N] of all blocks for ``queries`` [R, P, G, D] of the (layer, KV head)s ``part``."""
        scaled = (queries.float() * self.model.scale).transpose(0, 1)[None]
        return self.sets.score(np.zeros(1, np.int64), part, scaled, self.whole)[0]

    def at_once(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """What the ``query`` [Hkv, G, D] of a layer chooses for itself, bool [Hkv, N]; it counts as pulled."""
        part = slice(layer * self.model.kv_heads, (layer + 1) * self.model.kv_heads)
        dense = self.sets.dense[part]
        if self.everything:
            return torch.ones((len(dense), self.whole), dtype=torch.bool, device=dense.device)
        mass = self.mass(query[None], part)
        none = torch.zeros_like(mass, dtype=torch.bool)
        plan = planner.plan(mass, mass, none.short() - 1, self.sets.pinned([0], self.whole), self.w, self.blocks, none, none, self.index, dense=dense)
        chosen = plan.top[0] | dense[:, None]
        self._pulled += int((chosen & ~self.held[0, part]).sum())
        self.held[0, part] |= chosen
        return chosen

    def trusted(self, queries: torch.Tensor) -> int:
        """How many of the drafts after the first of the rows ``queries`` [R, S, G, D] may be accepted."""
        if self.policy.now or self.everything or self.setting.trust >= 1:
            return len(queries) - 1
        missed = missed_share(self.mass(queries)[None], self.sets.slot_of >= 0)
        return int(trusted_rows(missed, (~self.sets.dense).nonzero()[:, 0], self.setting.trust)[0])

    def follow(self, queries: torch.Tensor, accepted: int) -> None:
        """After a step: ``queries`` [R, S, G, D] of its row and of the drafts after it, ``accepted`` of which were right and kept."""
        if self.policy.now or self.everything:
            self.fetched.append(self._pulled)
            self._pulled = 0
            return
        mass = self.mass(queries)
        choosing = Rows(np.array([accepted]), np.array([len(queries) - 1])).choosing(len(queries), self.setting.ahead)
        if not self.policy.actual and choosing.sum() > 1:
            choosing[0, accepted] = False
        self._plan(union(mass[None], torch.from_numpy(choosing).to(mass.device)), mass[None, accepted])

    def _plan(self, mass: torch.Tensor, actual: torch.Tensor) -> None:
        """What the lookahead and the stepper do with it."""
        sets, setting = self.sets, self.setting
        cap = torch.from_numpy(warm_cap(setting.cap, sets.working[:1], np.array([len(self.fetched)]), setting.warmup)).to(mass.device)
        plan = sets.plan(np.zeros(1, np.int64), mass, actual, self.held.cpu().numpy(), sets.flying, cap)
        self.held[plan.fetch_request, plan.fetch_head, plan.fetch_block] = True
        here = self.held[plan.swap_request, plan.swap_head, plan.swap_block]
        sets.replace(*(part[here] for part in plan[:4]))
        self.fetched.append(len(plan.fetch_block))
        self.misses += plan.misses[0].cpu().numpy()
        self.wanted += int(plan.wanted[0]) * ~sets.dense.cpu().numpy()
        self.missed += plan.missed_mass[0].cpu().numpy()
