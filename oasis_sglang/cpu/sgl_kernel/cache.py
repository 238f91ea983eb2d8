"""Slot bookkeeping: gathers and scatters over the request-to-token table.

The table ``req_to_token`` is int32 ``[requests, pool_len]``; row ``r`` lists the KV slots of request
``r`` by position. Functions named ``assign_*`` and ``fill_*`` write their last tensor in place.
"""

import ctypes

import numpy as np
import torch


def _cells(rows, starts, ends):
    """Row and column of every cell of the half-open runs ``[starts, ends)``, run after run.

    rows, starts, ends: int ``[b]``. Returns two int64 tensors of length ``sum(ends - starts)``.
    """
    lengths = (ends - starts).to(torch.int64)
    before = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    within = torch.arange(before.numel()) - before
    row = rows.to(torch.int64).repeat_interleave(lengths)
    return row, starts.to(torch.int64).repeat_interleave(lengths) + within


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """Store consecutive pieces of ``out_cache_loc`` as positions [start, end) of each request."""
    row, column = _cells(req_pool_indices, start_offset, end_offset)
    req_to_token[row, column] = out_cache_loc[: row.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """The reverse: list the slots at positions [start, end) of each request, request by request."""
    row, column = _cells(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: row.numel()] = req_to_token[row, column].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """List the ``topk * num_steps`` slots that follow each sequence, request by request."""
    ends = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """A table row per draft branch: the shared prefix, then the branch's own ``num_steps`` slots.

    The slots of branch ``t`` are those at positions ``seq_len + t * num_steps`` onwards.
    Returns ``[b * topk, pool_len]`` of the table's dtype.
    """
    table = req_to_token[req_pool_indices.to(torch.int64)].repeat_interleave(topk, 0)
    length = seq_lens.to(torch.int64).repeat_interleave(topk)[:, None]
    branch = torch.arange(topk).repeat(seq_lens.numel())[:, None]
    step = torch.arange(num_steps)
    own = table.gather(1, length + branch * num_steps + step)
    return table.scatter(1, length + step, own)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Move the slots of accepted draft tokens to the front; index -1 means rejected."""
    accepted = accept_index[accept_index >= 0].to(torch.int64)
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """Last accepted token of every request; ``accept_lens`` counts it too."""
    first = torch.arange(accept_lens.numel()) * accept_stride
    last = first + accept_lens.to(torch.int64) - 1
    bonus_tokens[: last.numel()] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def rotate_input_ids_cpu(input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None):
    """Shift each request's ids left by one, in place, and write its new token.

    The new token goes to the request's last position, or to flat position ``select_index[i]``.
    """
    new_tokens = topk_index.reshape(-1).tolist()
    targets = None if select_index is None else select_index.tolist()
    for i, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist())):
        if length <= 0:
            continue
        end = start + length
        input_ids[start : end - 1] = input_ids[start + 1 : end].clone()
        input_ids[end - 1 if targets is None else targets[i]] = new_tokens[i]


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy KV rows ``src_loc`` to ``tgt_loc`` inside every buffer; all are read before any is written.

    data_ptrs: address of each buffer; strides: bytes per row of each buffer.
    """
    if src_loc.numel() == 0:
        return
    source, target = src_loc.numpy(), tgt_loc.numpy()
    rows = int(max(source.max(), target.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist()):
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * (rows * stride)).from_address(address))
        buffer = memory.reshape(rows, stride)
        buffer[target] = buffer[source]
