"""The seam check: is this the SGLang we were written against?

SGLang logs and swallows whatever goes wrong in a plugin, so a drifted hook would silently serve without us. Hence the
check runs in every process and ends it (``SystemExit`` is not swallowed), and once more when a server asks for the
``oasis`` back end.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from typing import NamedTuple

from oasis_sglang import SGLANG_VERSION


class Seam(NamedTuple):
    """A callable of SGLang that we wrap, override or call, and its parameter names in 0.5.23."""

    target: str
    parameters: tuple[str, ...]


_PD = "sglang.srt.disaggregation"

# What our classes override or call without hooking it.
SURFACE: tuple[Seam, ...] = (
    Seam(f"{_PD}.common.conn.CommonKVManager.__init__", ("self", "args", "disaggregation_mode", "server_args", "is_mla_backend")),
    Seam(f"{_PD}.common.conn.CommonKVManager.try_ensure_parallel_info", ("self", "bootstrap_addr")),
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
)


def drift(seams: Iterable[Seam]) -> list[str]:
    """What differs from the recorded SGLang, one line each; empty when nothing does."""
    import sglang

    found = []
    if sglang.__version__ != SGLANG_VERSION:
        found.append(f"SGLang is {sglang.__version__}, Oasis needs {SGLANG_VERSION}")
    for seam in seams:
        try:
            parameters = tuple(inspect.signature(pkgutil.resolve_name(seam.target)).parameters)
        except (AttributeError, ImportError) as error:
            found.append(f"{seam.target} is gone: {error}")
            continue
        if parameters != seam.parameters:
            found.append(f"{seam.target} takes {parameters}, Oasis knows {seam.parameters}")
    return found


def unhooked(targets: Iterable[str]) -> list[str]:
    """Targets on which SGLang did not put our hook, one line each."""
    return [f"{target} is not hooked" for target in targets if not hasattr(pkgutil.resolve_name(target), "__wrapped__")]
