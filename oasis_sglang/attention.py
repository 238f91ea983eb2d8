"""Our attention: SGLang's own back ends, handed compact rows on a decode node and tapped for queries on both nodes.

Attention over a set of KV entries does not depend on their order, and RoPE is already inside K. So a stock back end that is
given a request's physical slots and their number attends exactly over what is resident, whichever blocks those are. It is
built on a stand-in for the model runner whose ``req_to_token`` is our table of physical slots; per step it gets a shallow
copy of the batch with the compact lengths. Positions stay the true ones.

The back ends keep their names: ``install`` wraps the factories in SGLang's registry, so every check that SGLang makes by
name applies to the one that runs inside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from oasis_sglang import config

INNER = ("torch_native", "triton", "flashinfer", "fa3")
"""Back ends that may run inside: those that take their KV slots from ``req_to_token`` alone."""


def install() -> None:
    """Wraps the factories of ``INNER``. Inert in servers that did not choose Oasis."""
    for name in INNER:
        factory = ATTENTION_BACKENDS[name]
        if not hasattr(factory, "oasis_inner"):
            register_attention_backend(name)(_wrapped(factory))


def _wrapped(factory: Callable) -> Callable:
    def build(runner):
        if not config.active() or runner.is_draft_worker:
            return factory(runner)
        coordinator = getattr(runner, "hisparse_coordinator", None)
        if coordinator is not None:
            return CompactBackend(runner, coordinator, factory)
        return _tapped(runner, factory(runner))

    build.oasis_inner = factory
    return build


def _tapped(runner, backend):
    """A prefill back end whose queries of the prompts' last tokens are kept; for tests their K and V are written down."""
    from sglang.srt.runtime_context import get_disagg, get_memory

    if get_disagg().disaggregation_mode == "prefill":
        from oasis_sglang.trace import Trace, trace_prompts
        from prefill_node.query_tap import QueryTap

        if getattr(runner, "oasis_tap", None) is None:
            runner.oasis_tap = QueryTap()
        runner.oasis_tap.install(backend)
        if folder := config.load(get_memory().hisparse_config).trace_dir:
            trace_prompts(backend, Trace(folder, "prefill"))
    return backend


class CompactRunner:
    """The model runner as the inner back end sees it: its rows are the compact ones."""

    def __init__(self, runner, table: torch.Tensor):
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

        self._runner = runner
        self.req_to_token_pool = SimpleNamespace(req_to_token=table, size=runner.req_to_token_pool.size)
        self.kv_index_translator = KVIndexTranslator(
            req_to_token=table, token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator, token_to_kv_pool=runner.token_to_kv_pool,
            page_size=runner.page_size, device=runner.device)

    def __getattr__(self, name):
        return getattr(self._runner, name)


class CompactBackend(AttentionBackend):
    """Wraps the back end that ``factory`` builds. ``coordinator``: ``begin_step``, ``tap`` and ``end_step`` around each forward."""

    needs_cpu_seq_lens = True

    def __init__(self, runner, coordinator, factory: Callable):
        super().__init__()
        self.coordinator = coordinator
        self.inner = factory(CompactRunner(runner, coordinator.table.table))
        self.kv_index_translator = runner.kv_index_translator
        self.last_layer = runner.token_to_kv_pool.layer_num - 1
        self.view = None

    def init_forward_metadata(self, forward_batch):
        self.view = self._compact(forward_batch)
        self.inner.init_forward_metadata(self.view)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        self.view = self._compact(forward_batch)
        self.inner.init_forward_metadata_out_graph(self.view, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch):
        self.inner.init_forward_metadata_in_graph(self.view)

    def _compact(self, batch):
        if not batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError(f"an Oasis decode node with mode=sparse runs decode steps only, not {batch.forward_mode}")
        view = copy.copy(batch)
        if batch.forward_mode.is_decode() and batch.batch_size:
            lengths = torch.from_numpy(self.coordinator.begin_step(batch.req_pool_indices.cpu().numpy(), batch.seq_lens_cpu.numpy()))
            view.seq_lens_cpu = lengths.to(batch.seq_lens_cpu.dtype)
            view.seq_lens = lengths.to(batch.seq_lens)
            view.seq_lens_sum = int(lengths.sum())
        return view

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        out = self.inner.forward_decode(q, k, v, layer, self.view, save_kv_cache=save_kv_cache, **kwargs)
        self.coordinator.tap(layer.layer_id, q, k, v, out)
        if layer.layer_id == self.last_layer:
            self.coordinator.end_step()
        return out

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError("an Oasis decode node with mode=sparse computes no prompts")

    def support_triton(self):
        return self.inner.support_triton()

    def get_cuda_graph_seq_len_fill_value(self):
        return self.inner.get_cuda_graph_seq_len_fill_value()

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.inner.init_cuda_graph_state(max_bs, max_num_tokens)
