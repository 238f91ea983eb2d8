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
from oasis_sglang.lane_attention import LaneAttention

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


def chain_mask(lengths: torch.Tensor, draft: int, *, whole: bool) -> torch.Tensor:
    """bool, flat: which keys each of ``draft`` chained tokens of each request attends to. ``lengths`` int [b]: keys before them.

    A request's part is [draft, length + draft] where back ends want the ``whole`` mask, [draft, draft] where they only want the
    drafts. A mask made for other lengths than the back end reads with would be misread without notice, so it is always
    made from the lengths that the back end gets.
    """
    chain = torch.ones(draft, draft, dtype=torch.bool).tril()
    if not whole:
        return chain.repeat(len(lengths), 1).flatten()
    return torch.cat([torch.cat([torch.ones(draft, n, dtype=torch.bool), chain], 1).flatten() for n in lengths.tolist()])


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
        self.lane = LaneAttention(runner, coordinator.lane) if coordinator.lane is not None else None

    def init_forward_metadata(self, forward_batch):
        self.view = self._compact(forward_batch)
        self.inner.init_forward_metadata(self.view)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        self.view = self._compact(forward_batch)
        self.inner.init_forward_metadata_out_graph(self.view, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch):
        self.inner.init_forward_metadata_in_graph(self.view)

    def _compact(self, batch):
        """The batch as the inner back end sees it. Lengths are compact, positions true."""
        mode = batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            raise NotImplementedError(f"an Oasis decode node with mode=sparse runs decode steps only, not {mode}")
        view = copy.copy(batch)
        if batch.batch_size and not mode.is_idle():
            draft = batch.spec_info.draft_token_num if mode.is_target_verify() else 0
            rows = batch.req_pool_indices.cpu().numpy()
            lengths = torch.from_numpy(self.coordinator.begin_step(rows, batch.seq_lens_cpu.numpy(), draft=draft, out_cache_loc=batch.out_cache_loc))
            if self.lane is not None:
                self.lane.begin(batch, self.coordinator.sets_of(rows))
            view.seq_lens_cpu = lengths.to(batch.seq_lens_cpu.dtype)
            view.seq_lens = lengths.to(batch.seq_lens)
            view.seq_lens_sum = int(lengths.sum())
            if draft:
                view.spec_info = copy.copy(batch.spec_info)
                view.spec_info.custom_mask = chain_mask(view.seq_lens_cpu, draft, whole=batch.seq_lens.is_cuda).to(batch.seq_lens.device)
        return view

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        out = self.inner.forward_decode(q, k, v, layer, self.view, save_kv_cache=save_kv_cache, **kwargs)
        if self.lane is not None:
            out = self.lane.forward(layer, q, k, v, out)
        self.coordinator.tap(layer.layer_id, q, k, v, out)
        if layer.layer_id == self.last_layer:
            self.coordinator.end_step()
        return out

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """Drafts are verified. What was accepted the speculative worker says, after sampling."""
        out = self.inner.forward_extend(q, k, v, layer, self.view, save_kv_cache=save_kv_cache, **kwargs)
        if self.lane is not None:
            out = self.lane.forward(layer, q, k, v, out)
        self.coordinator.tap(layer.layer_id, q, k, v, out)
        return out

    def support_triton(self):
        return self.inner.support_triton()

    def get_cuda_graph_seq_len_fill_value(self):
        return self.inner.get_cuda_graph_seq_len_fill_value()

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.inner.init_cuda_graph_state(max_bs, max_num_tokens)
