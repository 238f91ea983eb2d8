"""Every hook into SGLang, in one table.

| target                                   | when                | why                                                     |
|------------------------------------------|---------------------|---------------------------------------------------------|
| get_kv_class                             | oasis server        | our manager, sender, receiver and bootstrap server      |
| PrefillBootstrapQueue._init_kv_manager   | oasis prefill       | hand the KV pool to our manager                         |
| PrefillBootstrapQueue.create_sender      | oasis prefill       | the sender needs the prompt's tokens for content hashes |
| DecodePreallocQueue._init_kv_manager     | oasis decode        | hand the KV pool to our manager                         |
| DecodePreallocQueue._create_receiver_... | oasis decode        | what it may hold is its own                              |
| Req._compute_max_prefix_len              | oasis prefill       | the prompt's last queries must be computed to rank KV   |
| process_batch_result_disagg_prefill      | oasis prefill       | restoring is compared with how fast prompts are computed |
| prepare_abort                            | oasis server        | what passes is told as 503, not as 500                  |
| SchedulerOutputStreamer.stream_output    | oasis decode        | the line in the log at a request's end                  |
| Scheduler.send_abort_output              | oasis decode        | the same, of requests that end while they are queued    |
| TokenizerManager.__init__                | oasis server        | SIGTERM takes nothing new; 503 says when to come again  |
| Scheduler.abort_request                  | oasis server        | how the schedulers are told of it                       |
| Scheduler.release_host_resources         | oasis server        | commits are finished and leases handed back at the end  |
| get_internal_state                       | oasis server        | counters in /server_info                                |
| flush_cache_after_weight_update          | oasis server        | KV of the old weights must not be found, here or in the tier |
| validate_hisparse                        | sparse decode       | SGLang admits only its own sparse models to this shape  |
| KVCacheConfigurator._resolve_kv_pool_... | sparse decode       | our KV pool                                             |
| KVCacheConfigurator._build_token_to_k... | sparse decode       | our allocator, as many logical ids as requests can need |
| KVCacheConfigurator.logical_token_cap... | sparse decode       | length limits count logical ids, not slots              |
| ModelRunner.maybe_init_hisparse_coord... | sparse decode       | our coordinator                                         |
| Scheduler.update_running_batch           | sparse decode       | a request waits for its misses; one whose tier is lost is computed again or ends |
| ...DecodeMixin._get_new_prebuilt_batch   | sparse decode       | a request that waits is not run; penalties go on where they were |
| the CPU runtime's hooks                  | no GPU              | see ``oasis_sglang/cpu/hooks.py``                       |

Public registrations beside them: the back end's name, the ``handle_pd_disaggregation`` and ``handle_hicache`` resolution steps
(``plugin.py``), the radix cache's name (``radix.py``) and the attention back ends' factories (``attention.py``). Hooks are inert
in servers that did not choose the ``oasis`` back end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from oasis_sglang import config
from oasis_sglang.seams import Seam


class Hook(NamedTuple):
    """``kind``: "around" (function gets the original first) or "after" (gets the result first)."""

    seam: Seam
    function: Callable
    kind: str


def kv_class(original, transfer_backend, class_type):
    if not config.active() or transfer_backend.value != "nixl":
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.utils import KVClassType
    from sglang.srt.runtime_context import get_disagg

    prefill = get_disagg().disaggregation_mode == "prefill"
    if class_type == KVClassType.MANAGER:
        if prefill:
            from prefill_node.manager import OasisPrefillManager as manager
        else:
            from decode_node.manager import OasisDecodeManager as manager
        return manager
    if class_type == KVClassType.SENDER:
        from prefill_node.manager import OasisSender

        return OasisSender
    if class_type == KVClassType.RECEIVER:
        from decode_node.receiver import OasisReceiver

        return OasisReceiver
    if class_type == KVClassType.BOOTSTRAP_SERVER:
        from prefill_node.manager import OasisBootstrapServer

        return OasisBootstrapServer
    return original(transfer_backend, class_type)


def prefill_manager(original, queue):
    manager = original(queue)
    if config.active():
        from oasis_sglang.binding import bind_prefill

        bind_prefill(manager, queue)
    return manager


def decode_manager(original, queue):
    manager = original(queue)
    if config.active():
        from oasis_sglang.binding import bind_decode

        bind_decode(manager, queue)
    return manager


def sender(original, queue, req, num_kv_heads):
    created = original(queue, req, num_kv_heads)
    if created and hasattr(req.disagg_kv_sender, "publication"):
        req.disagg_kv_sender.open(req)
    return created


def receiver(original, queue, req, is_rebootstrap=False):
    decode_req = original(queue, req, is_rebootstrap=is_rebootstrap)
    if hasattr(decode_req.kv_receiver, "pull"):
        from oasis_sglang import refusals

        decode_req.kv_receiver.belongs_to(req, is_rebootstrap)
        refusals.remember(req, decode_req.kv_receiver)
    return decode_req


def prefix_limit(original, req, input_len):
    """A radix hit ends before the tokens whose queries rank the prompt's blocks."""
    limit = original(req, input_len)
    if not config.active():
        return limit
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().disaggregation_mode != "prefill":
        return limit
    from prefill_node.query_tap import WINDOW

    return max(0, min(limit, len(req.origin_input_ids) - WINDOW))


def batch_computed(result, scheduler, batch, batch_result):
    restorer = getattr(scheduler.tree_cache, "restorer", None) if config.active() else None
    if restorer is not None and batch.forward_mode.is_extend():
        restorer.computed(sum(batch.extend_lens))
    return result


def prepare_abort(original, req, error_message, status_code=None):
    if config.active():
        from oasis_sglang import refusals

        status_code = refusals.status(req, status_code)
    return original(req, error_message, status_code)


def http_process(result, manager, *_, **__):
    if config.active():
        from oasis_sglang import draining, refusals

        draining.install(manager)
        refusals.install()
    return result


def outputs(result, streamer, reqs, *_, **__):
    for req in reqs:
        if req.finished():
            ended(req)
    return result


def abort_output(result, scheduler, abort_req, req):
    ended(req)
    return result


def ended(req) -> None:
    if (life := getattr(req, "oasis", None)) is not None:
        life.end(req)


def abort_request(original, scheduler, recv_req):
    if config.active():
        from oasis_sglang import draining

        if draining.told(scheduler, recv_req.abort_message):
            return None
    return original(scheduler, recv_req)


def scheduler_ends(original, scheduler):
    if config.active():
        from oasis_sglang import draining

        draining.close(scheduler)
    return original(scheduler)


def internal_state(result, controller, recv_req):
    if config.active():
        from oasis_sglang.binding import report

        result.internal_state["oasis"] = report(controller.scheduler)
        if totals := getattr(controller.scheduler.draft_worker, "totals", None):
            result.internal_state["oasis"]["speculation"] = dict(totals)
    return result


def weights_changed(result, updater, recv_req, success, message):
    queue = getattr(updater.scheduler, "disagg_prefill_bootstrap_queue", None)
    if config.active() and queue is not None:
        queue.kv_manager.forget_prefixes()
    coordinator = getattr(updater.scheduler, "hisparse_coordinator", None)
    if config.active() and coordinator is not None:
        coordinator.forget()
    return result


# -- the sparse decode node ---------------------------------------------------------------------------------------


def sparse_decode() -> bool:
    """Whether this server holds working sets. The resolution step alone turns ``enable_hisparse`` on."""
    from sglang.srt.runtime_context import get_memory

    return config.active() and get_memory().enable_hisparse


def validate_hisparse(original, server_args):
    if not config.active():
        return original(server_args)
    from sglang.srt.arg_groups.hisparse_hook import validate_hisparse_feature_combos

    return validate_hisparse_feature_combos(server_args)


def kv_pool_class(original, configurator, *, kind, default):
    if kind != "mha" or configurator.is_draft_worker or not sparse_decode():
        return original(configurator, kind=kind, default=default)
    from decode_node.pool import CompactPool

    return CompactPool


def allocator(original, configurator, **kwargs):
    if configurator.is_draft_worker or not sparse_decode():
        return original(configurator, **kwargs)
    from sglang.srt.mem_cache import kv_cache_configurator as module

    from decode_node.pool import CompactAllocator, logical_ratio

    table = kwargs["req_to_token_pool"].req_to_token
    CompactAllocator.ratio = logical_ratio(*table.shape, kwargs["sizes"].max_total_num_tokens)
    stock = module.HiSparseTokenToKVPoolAllocator
    module.HiSparseTokenToKVPoolAllocator = lambda size, **rest: CompactAllocator(size, **{**rest, "host_to_device_ratio": CompactAllocator.ratio})
    try:
        return original(configurator, **kwargs)
    finally:
        module.HiSparseTokenToKVPoolAllocator = stock


def logical_token_capacity(original, configurator, *, max_total_num_tokens):
    capacity = original(configurator, max_total_num_tokens=max_total_num_tokens)
    if configurator.is_draft_worker or not sparse_decode():
        return capacity
    from decode_node.pool import CompactAllocator

    return capacity * CompactAllocator.ratio


def coordinator(original, runner):
    if not runner.enable_hisparse or not sparse_decode():
        return original(runner)
    from oasis_sglang.binding import make_coordinator

    runner.hisparse_coordinator = make_coordinator(runner)


def running_batch(original, scheduler, batch):
    if config.active() and scheduler.enable_hisparse:
        from decode_node.boundary import hold_back

        hold_back(scheduler, batch)
    return original(scheduler, batch)


def prebuilt_batch(original, scheduler, batch):
    if not (config.active() and scheduler.enable_hisparse):
        return original(scheduler, batch)
    from decode_node import penalties
    from decode_node.boundary import without_blocked

    with without_blocked(scheduler):
        new = original(scheduler, batch)
    if new is not None:
        penalties.resume(new)
    return new


_PD = "sglang.srt.disaggregation"
_KV = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"

HOOKS: tuple[Hook, ...] = (
    Hook(Seam(f"{_PD}.utils.get_kv_class", ("transfer_backend", "class_type")), kv_class, "around"),
    Hook(Seam(f"{_PD}.prefill.PrefillBootstrapQueue._init_kv_manager", ("self",)), prefill_manager, "around"),
    Hook(Seam(f"{_PD}.prefill.PrefillBootstrapQueue.create_sender", ("self", "req", "num_kv_heads")), sender, "around"),
    Hook(Seam(f"{_PD}.decode.DecodePreallocQueue._init_kv_manager", ("self",)), decode_manager, "around"),
    Hook(Seam(f"{_PD}.decode.DecodePreallocQueue._create_receiver_and_enqueue", ("self", "req", "is_rebootstrap")), receiver, "around"),
    Hook(Seam("sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len", ("self", "input_len")), prefix_limit, "around"),
    Hook(Seam(f"{_PD}.prefill.SchedulerDisaggregationPrefillMixin.process_batch_result_disagg_prefill", ("self", "batch", "result")),
         batch_computed, "after"),
    Hook(Seam(f"{_PD}.utils.prepare_abort", ("req", "error_message", "status_code")), prepare_abort, "around"),
    Hook(Seam("sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__", ("self", "server_args", "port_args", "start_pd_bootstrap_service")),
         http_process, "after"),
    Hook(Seam("sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
              ("self", "reqs", "return_logprob", "skip_req")), outputs, "after"),
    Hook(Seam("sglang.srt.managers.scheduler.Scheduler.send_abort_output", ("self", "abort_req", "req")), abort_output, "after"),
    Hook(Seam("sglang.srt.managers.scheduler.Scheduler.abort_request", ("self", "recv_req")), abort_request, "around"),
    Hook(Seam("sglang.srt.managers.scheduler.Scheduler.release_host_resources", ("self",)), scheduler_ends, "around"),
    Hook(Seam("sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
              ("self", "recv_req")), internal_state, "after"),
    Hook(Seam("sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.flush_cache_after_weight_update",
              ("self", "recv_req", "success", "message")), weights_changed, "after"),
    Hook(Seam("sglang.srt.arg_groups.hisparse_hook.validate_hisparse", ("server_args",)), validate_hisparse, "around"),
    Hook(Seam(f"{_KV}._resolve_kv_pool_class", ("self", "kind", "default")), kv_pool_class, "around"),
    Hook(Seam(f"{_KV}._build_token_to_kv_pool_allocator",
              ("self", "sizes", "token_to_kv_pool", "is_dsv4_model", "req_to_token_pool", "token_to_kv_pool_allocator")), allocator, "around"),
    Hook(Seam(f"{_KV}.logical_token_capacity", ("self", "max_total_num_tokens")), logical_token_capacity, "around"),
    Hook(Seam("sglang.srt.model_executor.model_runner.ModelRunner.maybe_init_hisparse_coordinator", ("self",)), coordinator, "around"),
    Hook(Seam("sglang.srt.managers.scheduler.Scheduler.update_running_batch", ("self", "batch")), running_batch, "around"),
    Hook(Seam(f"{_PD}.decode.SchedulerDisaggregationDecodeMixin._get_new_prebuilt_batch", ("self", "running_batch")), prebuilt_batch, "around"),
)
