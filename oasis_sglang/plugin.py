"""Entry point ``sglang.srt.plugins``: runs once in every SGLang process, before arguments are parsed.

Wires hooks and registrations and checks the seams. Nothing heavy is imported here; our node packages load when a
server that chose the ``oasis`` back end builds its queues.
"""

from __future__ import annotations

import os
import secrets

from oasis_sglang import config, seams
from oasis_sglang.models_supported import check_model_path
from transport.errors import ConfigError
from transport.peer_row import TOKEN_ENV

BACKEND = "oasis"
_problems: list[str] = []


def load() -> None:
    """Raises ``SystemExit`` in a process of an Oasis server whose seams have drifted; elsewhere the problem is kept and
    raised when a server asks for the back end, so that other servers go on."""
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from oasis_sglang import attention, radix, speculation
    from oasis_sglang.hooks import HOOKS

    attention.install()
    speculation.register()
    radix.register()
    add_disagg_transfer_backend_choices([BACKEND])
    register_resolution_hook("handle_pd_disaggregation")(resolve_arguments)
    register_resolution_hook("handle_hicache")(resolve_linker)
    hooks = [(hook.seam.target, hook.function, hook.kind) for hook in HOOKS]
    surface = [*seams.SURFACE, *(hook.seam for hook in HOOKS)]
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from oasis_sglang.cpu.hooks import CPU_HOOKS

        hooks += [tuple(hook) for hook in CPU_HOOKS]
        surface += seams.CPU_SURFACE
    _problems[:] = [*seams.drift(surface), *seams.missing_fields(seams.FIELDS)]
    for target, function, kind in hooks:
        HookRegistry.register(target, function, HookType(kind))
    HookRegistry.apply_hooks()  # SGLang does it after us and swallows failures; now is when we can look
    _problems.extend(seams.unhooked(target for target, _, _ in hooks))
    if _problems and config.active():
        raise SystemExit(refusal())


def refusal() -> str:
    return "Oasis refuses to serve, SGLang's seams have drifted:\n  " + "\n  ".join(_problems)


def resolve_arguments(server_args, previous) -> None:
    """Resolution step: ``--disaggregation-transfer-backend oasis`` becomes SGLang's ``nixl`` with our classes behind it,
    because several of SGLang's checks compare that name. Raises ``ConfigError``."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    # The pristine value: resolution can run again, and the view then shows what we declared.
    if server_args.disaggregation_transfer_backend != BACKEND:
        os.environ.pop(config.ACTIVE_ENV, None)
        if view.radix_cache_backend == BACKEND:
            raise ConfigError("--radix-cache-backend oasis needs --disaggregation-transfer-backend oasis")
        previous(server_args)
        return
    if _problems:
        raise ConfigError(refusal())
    if view.disaggregation_mode not in ("prefill", "decode"):
        raise ConfigError("--disaggregation-transfer-backend oasis needs --disaggregation-mode prefill or decode")
    _refuse_unsupported(view)
    if server_args.enable_hisparse:  # the pristine value again
        raise ConfigError("Oasis does not support enable_hisparse as set (True)")
    options = config.load(view.hisparse_config).validate(view.disaggregation_mode)
    check_model_path(view.model_path)
    os.environ[config.ACTIVE_ENV] = "1"
    os.environ.setdefault(TOKEN_ENV, secrets.token_hex(16))  # before this server starts its ranks
    declared = {"disaggregation_transfer_backend": "nixl"}
    if view.radix_cache_backend == "":
        declared["radix_cache_backend"] = None  # how a command line takes our launcher's default back
    if view.disaggregation_mode == "decode":
        if view.disaggregation_decode_retraction_backup in (None, "host_pool"):
            # The default would build SGLang's host cache beside ours: twice the host memory.
            declared["disaggregation_decode_retraction_backup"] = "cpu_tensor"
        if options.mode == "sparse":
            declared |= _sparse_decode(view, options)
        elif view.radix_cache_backend == BACKEND and not server_args.disable_radix_cache and not view.speculative_algorithm:
            # SGLang has no radix tree on a decode node that speculates, but for drafts of kinds that are refused here.
            declared["disaggregation_decode_enable_radix_cache"] = True
    elif options.summary != "none":
        declared["disable_prefill_cuda_graph"] = True  # the query tap is Python around each layer
    declare_resolution(server_args, BACKEND, **declared)
    previous(server_args)


def resolve_linker(server_args, previous) -> None:
    """Resolution step: on a prefill server with ``--radix-cache-backend oasis`` the tier stands behind SGLang's radix tree. Declared
    after SGLang's own check, which knows external stores behind a tree without a name only."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    others = (view.disable_radix_cache, view.enable_hierarchical_cache, view.enable_lmcache, view.enable_flexkv,
              server_args.enable_unified_cache_external_linker)
    if not config.active() or view.disaggregation_mode != "prefill" or view.radix_cache_backend != BACKEND or any(others):
        previous(server_args)
        return
    from oasis_sglang.radix import LINKER

    declare_resolution(server_args, BACKEND, enable_unified_cache_external_linker=False)  # resolution can run again
    previous(server_args)
    declare_resolution(server_args, BACKEND, enable_unified_cache_external_linker=True, unified_cache_external_linker_backend="dynamic",
                       unified_cache_external_linker_config=dict(LINKER))


def _sparse_decode(view, options: config.OasisConfig) -> dict:
    """What a decode server with working sets has to be told. Raises ``ConfigError``."""
    from decode_node.budget import make_budget

    algorithm = (view.speculative_algorithm or "").upper()
    draft = (view.speculative_num_draft_tokens or 0) if algorithm == "OASIS_NGRAM" else 0
    make_budget(view.page_size or 1, options.budget_tokens, options.sink_tokens, options.recent_tokens, options.tail_tokens, options.on_miss == "wait",
                draft)
    if view.disaggregation_decode_enable_radix_cache:
        raise ConfigError("--disaggregation-decode-enable-radix-cache keeps whole pages, which mode=sparse does not have: use "
                          "--radix-cache-backend oasis, or mode=exact")
    refused = {"speculative_algorithm": algorithm not in ("", "NONE", "OASIS_NGRAM") and algorithm, "enable_mixed_chunk": view.enable_mixed_chunk,
               "enable_pdmux": view.enable_pdmux, "enable_two_batch_overlap": view.enable_two_batch_overlap}
    for option, value in refused.items():
        if value:
            raise ConfigError(f"Oasis option mode=sparse does not support {option}={value!r}; use mode=exact")
    if options.on_miss == "wait" and not view.disable_overlap_schedule:
        raise ConfigError("Oasis option on_miss=wait needs --disable-overlap-schedule: a request can only wait between steps")
    declared = {"enable_hisparse": True, "disable_decode_cuda_graph": True}  # the tap is Python around each layer
    if options.inner_backend:
        declared |= {"attention_backend": options.inner_backend, "decode_attention_backend": None, "prefill_attention_backend": None}
    return declared


def _refuse_unsupported(view) -> None:
    refused = {
        "pp_size": view.pp_size > 1,
        "dcp_size": view.dcp_size > 1,
        "attn_cp_size": view.attn_cp_size > 1,
        # Its digest covers whole pages, and what follows the prompt in the last one is not published.
        "disaggregation_enable_kv_checksum": view.disaggregation_enable_kv_checksum,
        "enable_pd_role_switch": view.enable_pd_role_switch,
        "disaggregation_decode_host_receive_threshold": view.disaggregation_decode_host_receive_threshold < 1,
        "disaggregation_decode_allocation_policy": view.disaggregation_decode_allocation_policy == "prefill_complete",
        "SGLANG_DISAGG_STAGING_BUFFER": os.environ.get("SGLANG_DISAGG_STAGING_BUFFER", "0").lower() in ("1", "true"),
        "SGLANG_RUST_SERVER": os.environ.get("SGLANG_RUST_SERVER", "0").lower() in ("1", "true"),
    }
    if view.disaggregation_mode == "decode" and (view.speculative_algorithm or "").upper() == "NGRAM":
        raise ConfigError("Oasis does not support speculative_algorithm='NGRAM' on a decode worker, which ends with the first request; use OASIS_NGRAM")
    for option, wrong in refused.items():
        if wrong:
            raise ConfigError(f"Oasis does not support {option} as set ({getattr(view, option, 'on')!r})")
