"""``OASIS_NGRAM``: SGLang's n-gram speculation, made to work where prompts are computed elsewhere.

SGLang's own ``NGRAM`` ends a decode node's scheduler with the first request that is handed over, because it has nothing to say
about a request that it did not compute; ours says it (``seed``). Its drafts come from ``draft.py`` and need no compiler. The
algorithm serves a plain server too.
"""

from __future__ import annotations

import torch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

NAME = "OASIS_NGRAM"
DRAFT_TOKENS = 4
"""Rows of a request in a verify forward unless ``--speculative-num-draft-tokens`` says otherwise: its last token, three drafts."""


class OasisNgram(CustomSpecAlgo):
    """Speaks for SGLang's n-gram branches. What plug-in algorithms lack and SGLang calls all the same is the enum's own."""

    create_future_map = SpeculativeAlgorithm.create_future_map
    carries_draft_hidden_states = SpeculativeAlgorithm.carries_draft_hidden_states
    need_topk = SpeculativeAlgorithm.need_topk

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> None:
        """No platform replaces our worker."""

    def handle_server_args(self, server_args) -> None:
        """Chains only. Raises ``ValueError`` naming what it does not go with."""
        width = server_args.speculative_num_draft_tokens
        if width is None:
            width = server_args.speculative_num_draft_tokens = DRAFT_TOKENS
        if width < 2:
            raise ValueError(f"{NAME} needs --speculative-num-draft-tokens of at least 2 (the last token and a draft), not {width}")
        for field, wrong in {"enable_dp_attention": server_args.enable_dp_attention, "pp_size": server_args.pp_size > 1,
                             "speculative_ngram_external_corpus_path": server_args.speculative_ngram_external_corpus_path}.items():
            if wrong:
                raise ValueError(f"{NAME} does not support {field}={getattr(server_args, field)!r}")
        server_args.speculative_ngram_max_bfs_breadth = server_args.speculative_eagle_topk = 1
        server_args.speculative_num_steps = width  # as for NGRAM: tokens reserved per step
        server_args.enable_mixed_chunk = False
        if server_args.device == "cpu":
            server_args.disable_overlap_schedule = True  # SGLang does not overlap speculation on CPUs

    def build_disagg_draft_input(self, batch, last_tokens_tensor, future_map):
        return seed(batch, future_map)


def seed(batch, future_map):
    """What the first step of requests whose prompts came from elsewhere carries over: nothing, in the shape that SGLang's
    batches merge and filter. The handed-over token already is in ``req.output_ids``.

    ``batch``: a prebuilt ``ScheduleBatch`` of b requests. Where steps overlap, the relay gets their lengths [b] and an empty
    list of accepted tokens (int32 [b, n], accept lengths int32 [b] of 0), keyed by row.
    """
    from sglang.srt.managers.overlap_utils import RelayPayload
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    b, n = len(batch.reqs), get_spec().speculative_num_draft_tokens
    state = NgramVerifyInput(
        draft_token_num=n, new_seq_lens=batch.seq_lens, accept_tokens=torch.zeros(b * n, dtype=torch.int32, device=batch.device),
        accept_lens=torch.zeros(b, dtype=torch.int32, device=batch.device))
    if batch.enable_overlap:
        state.future_indices = batch.req_pool_indices
        future_map.publish(state.future_indices, batch.seq_lens)
        future_map.stash(state.future_indices, RelayPayload.from_ngram(state))
    return state


def register_algorithm() -> None:
    """In every process: SGLang asks for the algorithm by name where arguments are parsed and in each scheduler."""
    try:
        SpeculativeAlgorithm.from_string(NAME)
    except ValueError:
        SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=OasisNgram)(_worker_class)


def _worker_class(server_args) -> type:
    from oasis_sglang.speculation.worker import OasisNgramWorker

    return OasisNgramWorker
