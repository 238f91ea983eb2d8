"""The CPU runtime's hooks into SGLang 0.5.23, as data. Whoever loads the plugin registers them, and
only when ``SGLANG_USE_CPU_ENGINE=1``."""

from collections.abc import Callable
from typing import NamedTuple

from . import attention, idle, nixl


class Hook(NamedTuple):
    target: str
    """Dotted path of the SGLang function."""
    function: Callable
    """``function(original, *args, **kwargs)`` for kind "around"."""
    kind: str
    """Lower-case name of a member of SGLang's ``HookType``."""


CPU_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
        attention.forward_extend,
        "around",
    ),
    Hook(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode",
        attention.sdpa_decode,
        "around",
    ),
    Hook("sglang.srt.managers.scheduler.Scheduler.on_idle", idle.on_idle, "around"),
    Hook("sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__", nixl.manager_init, "around"),
)
