"""A causal language model whose attention is in our hands: transformers computes the layers, the caller says who sees what.

All classes that are served have one shape (embedding, rotary positions, a list of layers, a norm, a head), so the layers are called one
by one; each hands its post-RoPE queries and its new keys and values to the caller's ``Attend``, through transformers' own attention
interface. That lets a forward start at any layer, and rows of one batch see different blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from oasis_sglang.models_supported import check_model
from oasis_sglang.selection import votes

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries [B, Hq, n, D], keys, values [B, Hkv, n, D] of the forward's rows) -> output [B, n, Hq, D]."""

VOTING = 64
"""The prompt's last queries, which vote for the first working set as they do on a prefill node."""

RANKED = 1024

_INTERFACE = "oasis_study"


def _interface(module, query, key, value, mask, *, attend: Attend, **kwargs):
    return attend(module.layer_idx, query, key, value), None


AttentionInterface.register(_INTERFACE, _interface)


class Prompt(NamedTuple):
    """A prompt that was computed densely. ``keys``, ``values``: of each layer, [Hkv, T, D]; ``queries`` [VOTING, L, Hq, D]."""

    ids: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: torch.Tensor


class Model:
    """``layers``, ``kv_heads``, ``group`` (query heads per KV head), ``head_dim``: sizes; ``scale``: of the softmax.

    Raises ``ConfigError`` for a model class that Oasis does not serve.
    """

    def __init__(self, path: Path | str, device: str = "cpu"):
        config = AutoConfig.from_pretrained(path)
        check_model(config.to_dict())
        dtype = torch.float32 if device == "cpu" else config.dtype
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=_INTERFACE).to(device).eval()
        self.path, self.config, self.device = path, config, device
        self.layers, self.kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.group = config.num_attention_heads // self.kv_heads
        attention = self.model.model.layers[0].self_attn
        self.head_dim, self.scale = attention.head_dim, attention.scaling

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [B, n] -> [B, n, hidden]."""
        return self.model.model.embed_tokens(tokens)

    @torch.inference_mode()
    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend, first: int = 0, last: int | None = None) -> torch.Tensor:
        """``hidden`` [B, n, H], the input of layer ``first``, at ``positions`` int64 [B, n], through the layers up to ``last``."""
        rotary = self.model.model.rotary_emb(hidden, position_ids=positions)
        for layer in self.model.model.layers[first:last]:
            hidden = layer(hidden, position_embeddings=rotary, position_ids=positions, attention_mask=None, past_key_values=None, attend=attend)
        return hidden

    @torch.inference_mode()
    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the next token, float32 [..., vocabulary], from the last layer's output [..., H]."""
        return self.model.lm_head(self.model.model.norm(hidden)).float().log_softmax(-1)

    def prefill(self, ids: Sequence[int]) -> Prompt:
        """All of ``ids`` with dense causal attention. Raises ``ValueError`` when they are fewer than the votes."""
        if len(ids) < VOTING:
            raise ValueError(f"a prompt of {len(ids)} tokens is shorter than the {VOTING} queries that vote")
        prompt = Prompt(list(ids), [], [], torch.empty((VOTING, self.layers, self.kv_heads * self.group, self.head_dim), device=self.device))

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            prompt.keys.append(k[0].contiguous())
            prompt.values.append(v[0].contiguous())
            prompt.queries[:, layer] = q[0, :, -VOTING:].transpose(0, 1)
            k, v = (part.repeat_interleave(self.group, 1) for part in (k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale).transpose(1, 2)

        tokens = torch.tensor([ids], device=self.device)
        with torch.inference_mode():
            self.forward(self.embed(tokens), torch.arange(len(ids), device=self.device)[None], attend)
        return prompt

    def blocks(self, prompt: Prompt, block_tokens: int, layer: int) -> torch.Tensor:
        """A layer's keys by whole blocks, [Hkv, N, block_tokens, D]."""
        whole = len(prompt.ids) // block_tokens
        return prompt.keys[layer][:, : whole * block_tokens].view(self.kv_heads, whole, block_tokens, self.head_dim)

    def ranking(self, prompt: Prompt, block_tokens: int) -> np.ndarray:
        """What a prefill node commits with the prompt: int32 [S, k], each (layer, KV head)'s whole blocks by the votes."""
        pages = -(-len(prompt.ids) // block_tokens)
        spare = pages * block_tokens - len(prompt.ids)
        pools = [torch.nn.functional.pad(k, (0, 0, 0, spare)).view(self.kv_heads, pages, block_tokens, self.head_dim).permute(1, 2, 0, 3) for k in prompt.keys]
        mass = votes.vote(prompt.queries, pools, torch.arange(pages, device=self.device), len(prompt.ids), self.scale)
        return votes.ranking(mass, len(prompt.ids) // block_tokens, RANKED)

    def attention(self, prompt: Prompt, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: torch.Tensor,
                  seen: torch.Tensor | None = None, block: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact attention of rows over a prompt and over what follows it.

        ``q`` [B, Hq, n, D]; ``k``, ``v`` [B, Hkv, m, D], which follow the prompt, ``own`` bool [B, n, m]: who sees which of them;
        ``seen`` bool [B, n or 1, Hkv, N]: which whole blocks (of ``block`` tokens) of the prompt a row sees, None: all. What follows the last whole block is
        always seen. Returns the output [B, n, Hq, D], and float32 [B, n, Hkv]: the share of the dense softmax that lies on what is
        seen, averaged over the query heads of a KV head.
        """
        tokens, (batch, _, rows, dim) = len(prompt.ids), q.shape
        out, share = torch.empty_like(q), torch.ones((batch, rows, self.kv_heads), device=q.device)
        hidden_own = ~own[:, None]
        for head in range(self.kv_heads):  # one at a time: scores are long
            part = slice(head * self.group, (head + 1) * self.group)
            asked = q[:, part] * self.scale
            scores = (asked.reshape(-1, dim) @ prompt.keys[layer][head].T).view(batch, self.group, rows, tokens)
            after = (asked @ k[:, head, None].mT).masked_fill_(hidden_own, -torch.inf)
            p = torch.cat([scores, after], -1).float().softmax(-1)
            if seen is not None:
                p[..., : seen.shape[3] * block] *= seen[:, None, :, head].repeat_interleave(block, -1)
                kept = p.sum(-1, keepdim=True)
                share[:, :, head] = kept[..., 0].mean(1)
                p /= kept
            p = p.to(q.dtype)
            out[:, part] = (p[..., :tokens].reshape(-1, tokens) @ prompt.values[layer][head]).view(batch, self.group, rows, dim)
            out[:, part] += p[..., tokens:] @ v[:, head, None]
        return out.transpose(1, 2), share
