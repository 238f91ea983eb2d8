"""The seam check: is this the SGLang we were written against?

SGLang logs and swallows whatever goes wrong in a plugin, so a drifted hook would silently serve without us. Hence the
check runs in every process and ends it (``SystemExit`` is not swallowed), and once more when a server asks for the
``oasis`` back end.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from oasis_sglang import SGLANG_VERSION


class Seam(NamedTuple):
    """A callable of SGLang that we wrap, override or call, and its parameter names in 0.5.23."""

    target: str
    parameters: tuple[str, ...]


_PD = "sglang.srt.disaggregation"
_MEM = "sglang.srt.mem_cache"
_LINKER = f"{_MEM}.unified_cache.unified_cache_linker"

# What our classes override or call without hooking it.
SURFACE: tuple[Seam, ...] = (
    Seam(f"{_PD}.common.conn.CommonKVManager.__init__", ("self", "args", "disaggregation_mode", "server_args", "is_mla_backend")),
    Seam(f"{_PD}.common.conn.CommonKVManager.try_ensure_parallel_info", ("self", "bootstrap_addr")),
    Seam(f"{_PD}.common.conn.CommonKVManager.submit_prefill_recompute", ("self", "kv_receiver", "payload")),
    Seam(f"{_PD}.common.conn.CommonKVManager._handle_node_failure", ("self", "failed_bootstrap_addr")),
    Seam(f"{_PD}.common.conn.CommonKVManager._start_heartbeat_checker_thread", ("self",)),
    Seam(f"{_PD}.common.conn.CommonKVSender.__init__", ("self", "mgr", "bootstrap_addr", "bootstrap_room", "req_has_disagg_prefill_dp_rank")),
    Seam(f"{_PD}.common.conn.CommonKVSender.init", ("self", "num_kv_indices", "aux_index")),
    Seam(f"{_PD}.common.conn.CommonKVSender.send", ("self", "kv_indices", "state_indices", "num_kv_tokens", "indices_event")),
    Seam(f"{_PD}.common.conn.CommonKVSender.poll", ("self",)),
    Seam(f"{_PD}.common.conn.CommonKVSender.abort", ("self",)),
    Seam(f"{_PD}.common.conn.CommonKVSender.clear", ("self",)),
    Seam(f"{_PD}.common.conn.CommonKVSender.failure_exception", ("self",)),
    Seam(f"{_PD}.common.conn.CommonKVReceiver.__init__", ("self", "mgr", "bootstrap_addr", "bootstrap_room")),
    Seam(f"{_PD}.common.conn.CommonKVReceiver.init", ("self", "prefill_dp_rank")),
    Seam(f"{_PD}.common.conn.CommonKVReceiver.send_metadata",
         ("self", "kv_indices", "aux_index", "state_indices", "decode_prefix_len", "destination", "device_kv_indices")),
    Seam(f"{_PD}.common.conn.CommonKVReceiver.poll", ("self",)),
    Seam(f"{_PD}.common.conn.CommonKVReceiver.abort", ("self",)),
    Seam(f"{_PD}.common.conn.CommonKVReceiver.clear", ("self",)),
    Seam(f"{_PD}.common.conn.CommonKVReceiver.ensure_abort_notified", ("self", "force_arm")),
    Seam(f"{_PD}.common.conn.CommonKVReceiver.failure_exception", ("self",)),
    Seam(f"{_PD}.common.conn.CommonKVBootstrapServer.__init__", ("self", "host", "port")),
    Seam(f"{_PD}.common.conn.CommonKVBootstrapServer._setup_routes", ("self",)),
    Seam(f"{_PD}.utils.MetadataBuffers.get_buf_infos", ("self",)),
    # The sparse decode node: what our attention, pool, allocator and coordinator stand in for.
    Seam("sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward",
         ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs")),
    Seam("sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_out_graph", ("self", "forward_batch", "in_capture")),
    Seam("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal", ("self",)),
    Seam("sglang.srt.mem_cache.hisparse_memory_pool.HiSparseMHAMainPool.set_kv_buffer", ("self", "layer", "loc", "cache_k", "cache_v", "args", "kwargs")),
    Seam("sglang.srt.mem_cache.allocator.hisparse.HiSparseTokenToKVPoolAllocator.available_size", ("self",)),
    Seam("sglang.srt.managers.hisparse_coordinator.HiSparseCoordinator.map_last_loc_to_buffer",
         ("self", "seq_lens", "out_cache_loc", "req_pool_indices", "seq_lens_cpu", "req_pool_indices_cpu")),
    Seam("sglang.srt.managers.hisparse_coordinator.HiSparseCoordinator.admit_request_direct", ("self", "req")),
    Seam("sglang.srt.managers.hisparse_coordinator.HiSparseCoordinator.request_finished", ("self", "req")),
    Seam("sglang.srt.managers.hisparse_coordinator.HiSparseCoordinator.retract_req", ("self", "req")),
    Seam("sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch", ("self", "reqs_to_exclude", "keep_indices")),
    Seam("sglang.srt.managers.schedule_batch.Req.build_rebootstrap_payload", ("self",)),
    Seam("sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens", ("self",)),
    Seam("sglang.srt.sampling.penaltylib.orchestrator._BatchedPenalizer.is_prepared", ("self",)),
    Seam("sglang.srt.managers.schedule_batch.release_req",
         ("req", "remaing_req_count", "req_to_token_pool", "token_to_kv_pool_allocator", "tree_cache", "hisparse_coordinator", "offload_kv")),
    Seam("sglang.srt.managers.schedule_batch.Req.offload_kv_cache", ("self", "req_to_token_pool", "token_to_kv_pool_allocator")),
    # The radix cache: the tree and the linker that ours stand in for.
    Seam(f"{_MEM}.registry.create_unified_radix_cache", ("ctx", "cache_class")),
    Seam(f"{_MEM}.unified_radix_cache.UnifiedRadixCache.init_cache_linker", ("self", "cache_linker")),
    Seam(f"{_MEM}.unified_radix_cache.UnifiedRadixCache.reset", ("self",)),
    Seam(f"{_MEM}.unified_radix_cache.UnifiedRadixCache._all_reduce_attn_groups", ("self", "tensor", "op")),
    Seam(f"{_LINKER}.UnifiedCacheLinkerWrapper.__init__", ("self", "cache", "cache_linker")),
    Seam(f"{_LINKER}.UnifiedCacheLinkerWrapper.match", ("self", "key", "req", "result")),
    Seam(f"{_LINKER}.UnifiedCacheLinkerWrapper._tail_hashes", ("self", "key", "result", "device_hit_len")),
    Seam(f"{_LINKER}.UnifiedCacheLinker.lookup", ("self", "rid", "transfers")),
    Seam(f"{_LINKER}.UnifiedCacheLinker.load", ("self", "rid", "transfers")),
    Seam(f"{_LINKER}.UnifiedCacheLinker.start_layer_wise_loading", ("self",)),
    Seam(f"{_LINKER}.UnifiedCacheLinker.finish_layer_wise_loading", ("self", "counter_index")),
    Seam(f"{_LINKER}.UnifiedCacheLinker.cancel_queued_load", ("self", "rid")),
    Seam(f"{_LINKER}.UnifiedCacheLinker.offload", ("self", "transfers", "session_id")),
    # Speculation: what our algorithm and worker override, borrow or call.
    Seam("sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_future_map",
         ("self", "device", "req_to_token_pool", "needs_cpu_seq_lens", "needs_confidence_relay")),
    Seam("sglang.srt.speculative.spec_info.SpeculativeAlgorithm.build_disagg_draft_input", ("self", "batch", "last_tokens_tensor", "future_map")),
    Seam("sglang.srt.speculative.ngram_worker.NGRAMWorker.__init__", ("self", "server_args", "gpu_id", "nccl_port", "target_worker")),
    Seam("sglang.srt.speculative.ngram_worker.NGRAMWorker.forward_batch_generation", ("self", "batch", "on_publish", "pp_proxy_tensors")),
    Seam("sglang.srt.speculative.ngram_worker.NGRAMWorker._prepare_for_speculative_decoding", ("self", "batch")),
    Seam("sglang.srt.speculative.ngram_worker.NGRAMWorker._prepare_draft_tokens", ("self", "batch")),
    Seam("sglang.srt.speculative.ngram_worker.NGRAMWorker._update_ngram_corpus", ("self", "batch")),
    Seam("sglang.srt.speculative.ngram_worker.NGRAMWorker.on_verify_complete_cpu", ("self", "num_correct_drafts_per_req", "batch_size")),
    Seam("sglang.srt.speculative.ngram_worker.NGRAMWorker.clear_cache_pool", ("self",)),
    Seam("sglang.srt.speculative.base_spec_worker.BaseSpecWorker.note_request_finished", ("self", "rid", "natural_stop")),
    Seam("sglang.srt.managers.overlap_utils.FutureMap.publish", ("self", "future_indices", "new_seq_lens", "confidence")),
    Seam("sglang.srt.managers.overlap_utils.FutureMap.stash", ("self", "future_indices", "payload")),
    Seam("sglang.srt.managers.overlap_utils.RelayPayload.from_ngram", ("draft_input",)),
)

# Constructors of which we read or give only some fields; the rest may change.
FIELDS: tuple[Seam, ...] = (
    Seam(f"{_MEM}.radix_cache.RadixKey.__init__", ("token_ids", "extra_key", "is_bigram", "limit", "cache_salt")),
    Seam(f"{_MEM}.hicache_storage.PoolTransfer", ("name", "keys", "device_indices")),
    Seam("sglang.srt.managers.schedule_batch.Req.__init__",
         ("rid", "origin_input_ids", "sampling_params", "lora_id", "input_embeds", "bootstrap_room", "extra_key", "cache_salt")),
    Seam(f"{_PD}.common.conn.PrefillServerInfo",
         ("attn_tp_size", "attn_cp_size", "dp_size", "pp_size", "page_size", "kv_cache_dtype", "follow_bootstrap_room", "prefill_http_port")),
    Seam("sglang.srt.model_executor.forward_batch_info.ForwardBatch",
         ("forward_mode", "batch_size", "req_pool_indices", "seq_lens", "seq_lens_cpu", "seq_lens_sum", "rids", "extend_seq_lens_cpu",
          "extend_prefix_lens_cpu")),
    Seam("sglang.srt.mem_cache.allocator.hisparse.HiSparseTokenToKVPoolAllocator.__init__", ("size", "page_size", "kvcache", "host_to_device_ratio")),
    Seam("sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.__init__",
         ("req_to_token", "token_to_kv_pool_allocator", "token_to_kv_pool", "page_size", "device")),
    Seam("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.__init__", ("size", "page_size", "dtype", "head_num", "head_dim", "layer_num")),
)

# What the CPU runtime wraps (``oasis_sglang/cpu/hooks.py``).
CPU_SURFACE: tuple[Seam, ...] = (
    Seam("sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
         ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")),
    Seam("sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode",
         ("self", "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens", "encoder_lens", "scaling", "enable_gqa", "causal",
          "is_cross_attn", "sliding_window_size")),
    Seam("sglang.srt.managers.scheduler.Scheduler.on_idle", ("self",)),
    Seam(f"{_PD}.nixl.conn.NixlKVManager.__init__", ("self", "args", "disaggregation_mode", "server_args", "is_mla_backend")),
)


def drift(seams: Iterable[Seam]) -> list[str]:
    """What differs from the recorded SGLang, one line each; empty when nothing does."""
    import sglang

    found = []
    if sglang.__version__ != SGLANG_VERSION:
        found.append(f"SGLang is {sglang.__version__}, Oasis needs {SGLANG_VERSION}")
    for seam, parameters in _inspected(seams, found):
        if parameters != seam.parameters:
            found.append(f"{seam.target} takes {parameters}, Oasis knows {seam.parameters}")
    return found


def missing_fields(seams: Iterable[Seam]) -> list[str]:
    """Parameters that we rely on and that are gone, one line each."""
    found: list[str] = []
    for seam, parameters in _inspected(seams, found):
        found += [f"{seam.target} no longer takes {name}" for name in seam.parameters if name not in parameters]
    return found


def _inspected(seams: Iterable[Seam], found: list[str]) -> Iterator[tuple[Seam, tuple[str, ...]]]:
    """Each seam with the parameters it has now; those that are gone go to ``found``."""
    for seam in seams:
        try:
            yield seam, tuple(inspect.signature(pkgutil.resolve_name(seam.target)).parameters)
        except (AttributeError, ImportError) as error:
            found.append(f"{seam.target} is gone: {error}")


def unhooked(targets: Iterable[str]) -> list[str]:
    """Targets on which SGLang did not put our hook, one line each."""
    return [f"{target} is not hooked" for target in targets if not hasattr(pkgutil.resolve_name(target), "__wrapped__")]
