"""Attention over the dense lane: the critical heads' part of a forward, computed over the whole request.

A second stock back end, built on a stand-in for the model runner whose rows and buffers are the lane's. In the layers
concerned it gets the query groups and the new K and V of just those KV heads, and what it returns replaces their slice of
the output. It is chosen by device, not by what serves the other heads: the number of heads differs from layer to layer, and
FlashInfer plans for a fixed one.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from decode_node.lane import DenseLane


class LanePool:
    """The lane as a back end sees a KV pool."""

    def __init__(self, lane: DenseLane):
        self.lane = lane
        self.start_layer = lane.layers[0]
        """Which layer's buffers a back end may look at for their shape."""

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.lane.keys(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.lane.values(layer_id)

    def set_kv_buffer(self, layer, where, k: torch.Tensor, v: torch.Tensor, k_scale=None, v_scale=None) -> None:
        """The scales belong to KV caches stored as codes, which a node with working sets refuses."""
        keys, values = self.lane.keys(layer.layer_id), self.lane.values(layer.layer_id)
        keys[where.loc] = k.view(-1, *keys.shape[1:]).to(keys.dtype)
        values[where.loc] = v.view(-1, *values.shape[1:]).to(values.dtype)


class LaneRunner:
    """The model runner as the lane's back end sees it."""

    def __init__(self, runner, lane: DenseLane):
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

        self._runner = runner
        self.req_to_token_pool = SimpleNamespace(req_to_token=lane.table, size=runner.req_to_token_pool.size)
        self.token_to_kv_pool = LanePool(lane)
        self.page_size = lane.page
        self.kv_index_translator = KVIndexTranslator(
            req_to_token=lane.table, token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator, token_to_kv_pool=self.token_to_kv_pool,
            page_size=lane.page, device=runner.device)

    def __getattr__(self, name):
        return getattr(self._runner, name)


class Part(NamedTuple):
    """A layer's part in the lane: int64 [h] KV heads, int64 [h * group] query heads, and the layer with only those heads."""

    kv_heads: torch.Tensor
    q_heads: torch.Tensor
    layer: object


class LaneAttention:
    """Per forward ``begin``, then ``forward`` after each layer's own attention. Eager forwards only: no CUDA graphs."""

    def __init__(self, runner, lane: DenseLane):
        from sglang.srt.layers.attention import attention_registry

        create = attention_registry.create_torch_native_backend if lane.kv.device.type == "cpu" else attention_registry.create_triton_backend
        self.lane = lane
        self.inner = create(LaneRunner(runner, lane))
        self.view = None
        """The batch over the lane's rows; None while no request of the batch has a lane."""
        self._parts: dict[int, Part | None] = dict.fromkeys(lane.layers)
        self._attend = self._mine = None

    def begin(self, batch, sets: np.ndarray) -> None:
        """``sets`` int64 [b]: working sets of the requests of ``batch``, -1 without; those sets' pages cover the tokens that this
        forward writes. On the forward's stream, before its first layer. Decode, or verification of drafts that are chains."""
        has = sets >= 0
        if not has.any():
            self.view = None
            return
        verify = batch.forward_mode.is_target_verify()
        new = batch.spec_info.draft_token_num if verify else 1
        # A request without a lane reads and writes padding; in a decode step its length counts the new token.
        lengths = np.where(has, batch.seq_lens_cpu.numpy(), 0 if verify else 1)
        first = lengths if verify else lengths - 1
        slots = self.lane.slots(sets[:, None], first[:, None] + np.arange(new)).reshape(-1)
        self.lane.upload()
        view = copy.copy(batch)
        view.req_pool_indices = torch.from_numpy(sets + 1).to(batch.req_pool_indices)
        view.seq_lens_cpu = torch.from_numpy(lengths).to(batch.seq_lens_cpu.dtype)
        view.seq_lens = torch.from_numpy(lengths).to(batch.seq_lens)
        view.seq_lens_sum = int(lengths.sum())
        view.out_cache_loc = torch.from_numpy(slots).to(batch.out_cache_loc)
        if verify:
            # Without a mask the rows of a draft are causal, which is what a chain needs at any length.
            view.spec_info = copy.copy(batch.spec_info)
            view.spec_info.custom_mask = None
        self.inner.init_forward_metadata(view)
        self.view = view
        self._attend = self.inner.forward_extend if verify else self.inner.forward_decode
        self._mine = None if has.all() else torch.from_numpy(np.repeat(has, new)).to(view.seq_lens.device)[:, None, None]

    def forward(self, layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """``q``, ``out`` [tokens, q_heads * head_dim], ``k``, ``v`` [tokens, kv_heads * head_dim] of a layer, heads flat or not.
        Keeps the new K and V of its lane heads, and overwrites what those heads have in ``out``; returns ``out``."""
        if self.view is None or layer.layer_id not in self._parts:
            return out
        part = self._parts[layer.layer_id] or self._split(layer)
        tokens, narrow = len(q), part.layer
        queries = q.view(tokens, layer.tp_q_head_num, -1)[:, part.q_heads].reshape(tokens, -1)
        keys = k.view(tokens, layer.tp_k_head_num, -1)[:, part.kv_heads]
        values = v.view(tokens, layer.tp_v_head_num, -1)[:, part.kv_heads]
        exact = self._attend(queries, keys, values, narrow, self.view, save_kv_cache=True).view(tokens, narrow.tp_q_head_num, -1)
        heads = out.view(tokens, layer.tp_q_head_num, -1)
        heads[:, part.q_heads] = exact if self._mine is None else torch.where(self._mine, exact, heads[:, part.q_heads])
        return out

    def _split(self, layer) -> Part:
        kv_heads, group = self.lane.heads(layer.layer_id), layer.tp_q_head_num // layer.tp_k_head_num
        q_heads = (kv_heads[:, None] * group + torch.arange(group, device=kv_heads.device)).reshape(-1)
        # A copy has everything that any back end reads of a layer, scaling and caps included.
        narrow = copy.copy(layer)
        narrow.tp_q_head_num, narrow.tp_k_head_num, narrow.tp_v_head_num = len(q_heads), len(kv_heads), len(kv_heads)
        part = self._parts[layer.layer_id] = Part(kv_heads, q_heads, narrow)
        return part
