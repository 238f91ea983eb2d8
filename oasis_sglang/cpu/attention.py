"""Extend, verify and decode on SGLang's ``torch_native`` attention backend.

SGLang 0.5.23 leaves gaps there. Its extend computes attention for the whole sequence even when
only a suffix is new: one token after a 6,000-token prefix hit costs as much as the whole prompt
(625 ms per layer of SmolLM2-135M on one core, 4 ms here), and a prompt of that length in chunks of
2,048 costs a third more than it must. And a speculative batch (TARGET_VERIFY) has no ``extend_*``
lengths and needs an ancestor mask, which the backend does not know at all. Its decode hands torch one query row
and asks it to share keys among heads, for which torch copies them for every query head: with the heads of a group as rows
instead, a token after 6,000 takes half the time (10 to 13 ms per layer and request, 5 to 6 here). Both sides of every comparison
run on this.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

QUERY_BLOCK = 256
"""Query rows per attention call when a prefix is cached. The mask of one call is then at most
``QUERY_BLOCK x kv_len`` (2 MiB at 8,192), and keys above the diagonal are skipped block by block.
128 to 1,024 rows differ by about 10 % on one core."""


class Segment(NamedTuple):
    """One request of an extend or verify batch: its rows ``[start, stop)`` of q, its KV slots by
    position (``[kv_len]``, the new tokens last), and, for a draft tree, bool ``[rows, rows]``
    "row may attend to draft token"; None means causal."""

    start: int
    stop: int
    slots: torch.Tensor
    tree: torch.Tensor | None


def attend(q, k, v, scaling: float, tree=None):
    """Attention of the last ``n`` of ``m`` tokens over all ``m``.

    q ``[n, q_heads, d]``, k ``[m, kv_heads, d]``, v ``[m, kv_heads, dv]`` of one dtype; tree: see
    ``Segment``. Tokens before the ``n`` are visible to every row. Returns ``[n, q_heads, dv]``.
    """
    n, m = q.shape[0], k.shape[0]
    if n == m and tree is None:
        return _sdpa(q, k, v, scaling, causal=True)
    prefix = m - n
    if tree is not None:
        mask = torch.ones(n, m, dtype=torch.bool)
        mask[:, prefix:] = tree
        return _sdpa(q, k, v, scaling, mask=mask)
    out = q.new_empty(n, q.shape[1], v.shape[2])
    for start in range(0, n, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, n)
        mask = torch.ones(stop - start, prefix + stop, dtype=torch.bool).tril_(prefix + start)
        out[start:stop] = _sdpa(q[start:stop], k[: prefix + stop], v[: prefix + stop], scaling, mask=mask)
    return out


def _sdpa(q, k, v, scaling, mask=None, causal=False):
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(
        *heads_first,
        attn_mask=mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def draft_trees(spec_info, batch_size: int) -> list[torch.Tensor | None]:
    """Ancestor mask of each request's draft tokens, None where they form a chain.

    On a CPU SGLang builds masks over the draft tokens only (TreeMaskMode.QLEN_ONLY), flat
    ``[batch * n * n]``. A mask of another size would be silently misread, hence the check.
    """
    n = spec_info.draft_token_num
    if spec_info.tree_topk == 1 or spec_info.custom_mask is None:
        return [None] * batch_size
    if spec_info.custom_mask.numel() != batch_size * n * n:
        raise ValueError(
            f"draft tree mask has {spec_info.custom_mask.numel()} entries, expected "
            f"{batch_size} requests x {n} x {n} draft tokens"
        )
    return list(spec_info.custom_mask.view(batch_size, n, n).bool())


def segments(table, batch) -> Iterator[Segment]:
    """The requests of an extend or verify batch, in order. table: ``req_to_token``."""
    requests = batch.req_pool_indices.tolist()
    kv_lens = batch.seq_lens.tolist()
    if batch.forward_mode.is_target_verify():
        n = batch.spec_info.draft_token_num
        trees = draft_trees(batch.spec_info, len(requests))
        q_lens = [n] * len(requests)
        kv_lens = [committed + n for committed in kv_lens]
    else:
        trees = [None] * len(requests)
        q_lens = batch.extend_seq_lens.tolist()
    start = 0
    for request, q_len, kv_len, tree in zip(requests, q_lens, kv_lens, trees):
        yield Segment(start, start + q_len, table[request, :kv_len], tree)
        start += q_len


def forward_extend(original, self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
    """Around ``TorchNativeAttnBackend.forward_extend``: new rows only, and draft trees.

    Decoder self-attention without a sliding window; anything else goes to SGLang's own version.
    """
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    windowed = layer.sliding_window_size is not None and layer.sliding_window_size > -1
    if (
        windowed
        or layer.is_cross_attention
        or layer.attn_type != AttentionType.DECODER
        or forward_batch.encoder_lens is not None
    ):
        return original(self, q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    pool = self.token_to_kv_pool
    if save_kv_cache and k is not None and v is not None:
        where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
        pool.set_kv_buffer(layer, where, k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
    for start, stop, slots, tree in segments(self.req_to_token_pool.req_to_token, forward_batch):
        k_all, v_all = keys[slots].to(q.dtype), values[slots].to(q.dtype)
        out[start:stop] = attend(q[start:stop], k_all, v_all, layer.scaling, tree)
    return out.view(q.shape[0], -1)


def sdpa_decode(original, self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens=None, scaling=None,
                enable_gqa=False, causal=False, is_cross_attn=False, sliding_window_size=None):
    """Around ``TorchNativeAttnBackend._run_sdpa_forward_decode``: keys and values are read once per KV head.

    query ``[requests, q_heads, d]``, output of its shape with the values' size. Cross attention, encoders and sliding windows go to
    SGLang's own version.
    """
    if is_cross_attn or encoder_lens is not None or sliding_window_size is not None:
        return original(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens=encoder_lens, scaling=scaling,
                        enable_gqa=enable_gqa, causal=causal, is_cross_attn=is_cross_attn, sliding_window_size=sliding_window_size)
    kv_heads = k_cache.shape[1]
    grouped = query.view(len(query), 1, kv_heads, -1, query.shape[2])
    for i, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        slots = req_to_token[request, :length]
        keys, values = (cache.index_select(0, slots).to(query.dtype).transpose(0, 1)[None] for cache in (k_cache, v_cache))
        output[i] = scaled_dot_product_attention(grouped[i], keys, values, scale=scaling).view(output.shape[1:])
    return output
