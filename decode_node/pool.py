"""SGLang's KV pool and allocator in the shape of the compact view: ids are logical, slots are physical, and no request's
slots depend on how long it is.

Subclasses of SGLang's HiSparse classes, because SGLang asks for those by type. Requests hold *logical* ids, one per token;
the mapping says in which physical slot a token's KV is written. Reads never go through it: the compact rows hold physical
slots (``page_table.py``).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.allocator.hisparse import HiSparseTokenToKVPoolAllocator
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseMHAMainPool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from transport.errors import ConfigError

MAX_LOGICAL_RATIO = 64
"""Logical ids per physical slot at most: each costs 8 bytes of mapping."""


def logical_ratio(rows: int, context: int, physical: int) -> int:
    """How many times the physical tokens the logical ids must cover so that all ``rows`` can be ``context`` long."""
    return max(1, min(MAX_LOGICAL_RATIO, -(-rows * context // max(1, physical))))


class CompactPool(HiSparseMHAMainPool):
    """One allocation for all layers, so that a commit is one scatter. ``kv``: [layers, 2, slots, kv_heads, head_dim]."""

    def __init__(self, *args, **kwargs):
        # The constructor in between takes fewer arguments than SGLang passes for this kind of pool.
        MHATokenToKVPool.__init__(self, *args, **kwargs)
        self.full_to_hisparse_device_index_mapping = None

    def _create_buffers_normal(self):
        if self.kv_cache_layout != "nhd" or self.head_dim != self.v_head_dim:
            raise ConfigError(f"Oasis option mode=sparse needs equal head dimensions and the NHD KV layout (field kv_cache_layout = {self.kv_cache_layout})")
        slots = -(-(self.size + self.page_size) // self.page_size) * self.page_size
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.kv = torch.zeros((self.layer_num, 2, slots, self.head_num, self.head_dim), dtype=self.store_dtype, device=self.device)
        self.k_buffer = [layer[0] for layer in self.kv]
        self.v_buffer = [layer[1] for layer in self.kv]

    def move_kv_cache(self, tgt_loc, src_loc):
        """After a verification. Only chains are verified here, and what is accepted of a chain already is in its place."""


class CompactAllocator(HiSparseTokenToKVPoolAllocator):
    """Steps allocate logical ids only: physical pages were reserved at admission."""

    coordinator = None
    ratio = 1
    """Logical tokens per physical token in this process; length limits count the former."""

    def available_size(self):
        # A physical pool with every page reserved is the normal state and must not look like "out of memory" to the
        # decode step, which would retract.
        return self.logical_attn_allocator.available_size()

    def get_cpu_copy(self, indices, mamba_indices=None, req_pool_index=None):
        return self.coordinator.park(req_pool_index)

    def load_cpu_copy(self, kv_cache_cpu, indices, mamba_indices=None, req_pool_index=None):
        self.coordinator.unpark(kv_cache_cpu, req_pool_index)


class VirtualHostPool:
    """What SGLang takes for the host pool that transfers land in. Ours pull by manifest, so its slots mean nothing."""

    def __init__(self, pool: MHATokenToKVPool):
        self.pool, self.layer_num, self.page_size, self.size = pool, pool.layer_num, pool.page_size, 0

    def get_contiguous_buf_infos(self):
        return self.pool.get_contiguous_buf_infos()

    def alloc_paged_token_slots(self, table, allocated, row, start, tokens):
        return torch.arange(start, start + tokens, dtype=torch.int64)

    def available_size(self) -> int:
        return 0

    def destroy(self) -> None:
        """Nothing is held."""


NO_SPECULATION = SimpleNamespace(enabled=False, scratch_capacity=0)
