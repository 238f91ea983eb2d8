"""Every hook into SGLang, in one table.

| target                                   | when                | why                                                     |
|------------------------------------------|---------------------|---------------------------------------------------------|
| get_kv_class                             | oasis server        | our manager, sender, receiver and bootstrap server      |
| PrefillBootstrapQueue._init_kv_manager   | oasis prefill       | hand the KV pool to our manager                         |
| PrefillBootstrapQueue.create_sender      | oasis prefill       | the sender needs the prompt's tokens for content hashes |
| DecodePreallocQueue._init_kv_manager     | oasis decode        | hand the KV pool to our manager                         |
| DecodePreallocQueue._create_receiver_... | oasis decode        | reports carry the request id                            |
| get_internal_state                       | oasis server        | counters in /server_info                                |
| flush_cache_after_weight_update          | oasis prefill       | KV of the old weights must not be found in the tier     |
| the CPU runtime's hooks                  | no GPU              | see ``oasis_sglang/cpu/hooks.py``                       |

Public registrations beside them: the back end's name and the ``handle_pd_disaggregation`` resolution step
(``plugin.py``). Hooks are inert in servers that did not choose the ``oasis`` back end.
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
        from decode_node.manager import OasisReceiver

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
        decode_req.kv_receiver.rid = req.rid
    return decode_req


def internal_state(result, controller, recv_req):
    if config.active():
        from oasis_sglang.binding import report

        result.internal_state["oasis"] = report(controller.scheduler)
    return result


def weights_changed(result, updater, recv_req, success, message):
    queue = getattr(updater.scheduler, "disagg_prefill_bootstrap_queue", None)
    if config.active() and queue is not None:
        queue.kv_manager.forget_prefixes()
    return result


_PD = "sglang.srt.disaggregation"

HOOKS: tuple[Hook, ...] = (
    Hook(Seam(f"{_PD}.utils.get_kv_class", ("transfer_backend", "class_type")), kv_class, "around"),
    Hook(Seam(f"{_PD}.prefill.PrefillBootstrapQueue._init_kv_manager", ("self",)), prefill_manager, "around"),
    Hook(Seam(f"{_PD}.prefill.PrefillBootstrapQueue.create_sender", ("self", "req", "num_kv_heads")), sender, "around"),
    Hook(Seam(f"{_PD}.decode.DecodePreallocQueue._init_kv_manager", ("self",)), decode_manager, "around"),
    Hook(Seam(f"{_PD}.decode.DecodePreallocQueue._create_receiver_and_enqueue", ("self", "req", "is_rebootstrap")), receiver, "around"),
    Hook(Seam("sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
              ("self", "recv_req")), internal_state, "after"),
    Hook(Seam("sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.flush_cache_after_weight_update",
              ("self", "recv_req", "success", "message")), weights_changed, "after"),
)
