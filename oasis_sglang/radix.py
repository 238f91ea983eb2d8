"""``--radix-cache-backend oasis``: SGLang's own radix tree, with the tier behind it.

On a prefill node the tree asks the tier for what it does not hold itself, through SGLang's interface for external stores
(``mem_cache/unified_cache/unified_cache_linker.py``). On a decode node with ``mode=exact`` it is the tree as it is, over
SGLang's own pages. With ``mode=sparse`` the tree stays empty, blocks are kept by content instead, and only ``flush_cache``
comes through here.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache, register_radix_cache_backend, registered_radix_cache_backends
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker, UnifiedCacheLinkerWrapper
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_memory

from transport.hashing import page_hashes
from transport.records import HASH_BYTES

NAME = "oasis"
LINKER = {"linker": "TierLinker", "linker_module_path": __name__}
"""How SGLang finds our linker when it builds the tree of a prefill server."""


def register() -> None:
    """Makes the name known to SGLang in this process. Idempotent."""
    if NAME not in registered_radix_cache_backends():
        register_radix_cache_backend(NAME, build)


def build(context):
    """The radix cache of this server, as its arguments were resolved."""
    if get_memory().enable_hisparse:
        cache = create_unified_radix_cache(context, cache_class=EmptyTree)
        cache.coordinator = context.tp_worker.model_runner.hisparse_coordinator
        return cache
    return create_unified_radix_cache(context, cache_class=RestoringTree if get_memory().enable_unified_cache_external_linker else None)


class EmptyTree(UnifiedRadixCache):
    """Of a decode server with working sets. Resetting it is how SGLang flushes caches."""

    coordinator = None

    def reset(self) -> None:
        super().reset()
        if self.coordinator is not None and self.coordinator.stepper is not None:
            self.coordinator.forget()


class RestoringTree(UnifiedRadixCache):
    """Of a prefill server. Finds nothing in the tier until ``bind``: the tree is built before there is a connection."""

    def init_cache_linker(self, cache_linker: TierLinker) -> None:
        self.linker = TierLinks(self, cache_linker)
        cache_linker.agree = self._agree

    def bind(self, restorer, identify) -> None:
        """``restorer``: ``prefill_node.restore.Restorer``; ``identify(req)`` -> chain seed, or None for a prompt whose tokens do
        not determine its KV."""
        self.linker.identify, self.linker.cache_linker.restorer = identify, restorer

    def missing(self, req) -> tuple[int, int]:
        """Pages (first, stop) of the prompt that could come from elsewhere and that the tree does not hold now."""
        limit = req._compute_max_prefix_len(len(req.origin_input_ids))
        key = RadixKey(token_ids=req.origin_input_ids, extra_key=req.extra_key, limit=limit, cache_salt=req.cache_salt)
        held = self.match_prefix(MatchPrefixParams(key=key)).device_prefix_len  # without its request it asks neither sessions nor the tier
        return held // self.page_size, limit // self.page_size

    @property
    def restorer(self):
        return self.linker.cache_linker.restorer

    def _agree(self, restored: bool) -> bool:
        """Whether every rank of the server has it: they must all go on from the same token."""
        verdict = torch.tensor([int(restored)], dtype=torch.int)
        self._all_reduce_attn_groups(verdict, torch.distributed.ReduceOp.MIN)
        return bool(verdict.item())


class TierLinks(UnifiedCacheLinkerWrapper):
    """SGLang's use of a linker, with our page hashes in place of its own: those that the publisher names records by."""

    def __init__(self, cache: RestoringTree, cache_linker: TierLinker):
        super().__init__(cache, cache_linker)
        # Without it nodes get no hashes of SGLang's and nothing is offloaded: the publisher brings prompts to the tier.
        cache.tree_core.enable_external_cache_linker = False
        self.identify = None
        self._req = None
        self._hashes: WeakKeyDictionary = WeakKeyDictionary()

    def match(self, key, req, result):
        self.hit_markers.pop(req.rid, None)  # of an earlier round, which may have asked for more
        self._req = req
        return super().match(key, req, result)

    def _tail_hashes(self, key, result, device_hit_len: int) -> list[bytes]:
        """Of the whole pages of ``key`` that the tree does not hold. The same on every rank, or they would wait for each other."""
        if self.identify is None or key.is_bigram:
            return []
        page = self.cache.page_size
        raw = self._chain(key, self.identify(self._req), len(key) // page)
        return [raw[at : at + HASH_BYTES] for at in range(device_hit_len // page * HASH_BYTES, len(raw), HASH_BYTES)]

    def _chain(self, key, seed: bytes | None, pages: int) -> bytes:
        """Hashes of the first ``pages`` pages. Kept with the request, which is matched again with every batch that it waits for."""
        if seed is None:
            return b""
        kept_seed, raw = self._hashes.get(self._req, (None, b""))
        if kept_seed != seed or len(raw) < pages * HASH_BYTES:
            page = self.cache.page_size
            raw = page_hashes(seed, np.asarray(key.raw_token_ids()[: pages * page], dtype=np.int64), page)
            self._hashes[self._req] = (seed, raw)
        return raw[: pages * HASH_BYTES]


class Landed:
    """The counter that forwards wait on, layer by layer: what was loaded is complete before they start."""

    consumer_index = -1

    def set_consumer(self, index: int) -> None:
        pass

    def wait_until(self, layer: int) -> None:
        pass


class TierLinker(UnifiedCacheLinker):
    """The tier as SGLang's external store. A load is complete when ``load`` returns: all layers of a page lie side by side in its
    record, and a record that turns out to be damaged must be known before SGLang counts on it, since then the request is
    computed and not aborted."""

    def __init__(self, server_args, params, *, components, extra_config, forward_stream=None):
        self.pools = {PoolName.KV: params.token_to_kv_pool_allocator.get_kvcache()}
        self.page = params.page_size
        self.layer_done_counter = Landed()
        self.restorer = None
        self.agree = bool

    def lookup(self, rid, transfers) -> list[int]:
        """Any beginning of what the tier holds can be restored."""
        found = self.restorer.find(b"".join(transfers[0].keys)) if self.restorer is not None else 0
        return list(range(1, found + 1))

    def load(self, rid, transfers) -> bool:
        [transfer] = transfers
        pages = transfer.device_indices[:: self.page].cpu().numpy() // self.page
        return self.agree(self.restorer.restore(b"".join(transfer.keys), pages))

    def start_layer_wise_loading(self) -> int:
        """Called for every batch that was built, which is what the pace of computing is measured from."""
        if self.restorer is not None:
            self.restorer.built()
        return -1

    def finish_layer_wise_loading(self, counter_index) -> bool:
        return True

    def cancel_queued_load(self, rid) -> bool:
        return True  # nothing of it is on its way

    def offload(self, transfers, session_id=None) -> bool:
        return False  # the publisher brings prompts to the tier, with their summaries, whether or not a tree keeps them

    def num_completed_offloads(self) -> int:
        return 0

    def pop_completed_offload(self) -> bool:
        raise AssertionError("nothing is offloaded through the tree")

    def reset(self) -> None:
        if self.restorer is not None:
            self.restorer.forget()

    def close(self) -> None:
        if self.restorer is not None:
            self.restorer.close()
