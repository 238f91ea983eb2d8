"""The speculative worker: SGLang's n-gram worker with drafts from a ``DraftSource``, always in chains.

Between the verify forward and sampling it asks a decode node's coordinator how far the drafts may be believed
(``coordinator.trusted``); after sampling it says what came true (``coordinator.verified``).
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.runtime_context import get_device, get_schedule, get_spec
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.ngram_worker import NGRAMWorker

from oasis_sglang.speculation.draft import Drafts, DraftSource, PromptLookup, Request


class ChainVerifyInput(NgramVerifyInput):
    """A verify batch whose drafts form chains: causal attention is all the mask it needs.

    ``draft_counts``: int64 [b], how many of a request's ``draft_token_num - 1`` rows after the first are guesses.
    """

    tree_topk = 1

    def __init__(self, tree: NgramVerifyInput, draft_counts: np.ndarray):
        super().__init__(
            draft_token=tree.draft_token, custom_mask=tree.custom_mask, positions=tree.positions, retrieve_index=tree.retrieve_index,
            retrieve_next_token=tree.retrieve_next_token, retrieve_next_sibling=tree.retrieve_next_sibling,
            draft_token_num=tree.draft_token_num)
        self.draft_counts = draft_counts


class _Target:
    """The target's worker. After a verify forward, and before sampling: the requests' own logit processors are applied to its rows,
    which SGLang does in plain decoding only; and each chain ends where the decode node's working sets no longer suffice.
    """

    def __init__(self, worker, rows: int):
        self._worker, self._rows = worker, rows

    def __getattr__(self, name: str):
        return getattr(self._worker, name)

    def forward_batch_generation(self, batch, *args, is_verify: bool = False, **options):
        result = self._worker.forward_batch_generation(batch, *args, is_verify=is_verify, **options)
        if is_verify:
            if batch.sampling_info.has_custom_logit_processor:
                apply_custom_logit_processor(result.logits_output.next_token_logits, batch.sampling_info, self._rows)
            coordinator = self._worker.model_runner.hisparse_coordinator
            if coordinator is not None and (trusted := coordinator.trusted()) is not None:
                cut_chains(batch.spec_info.retrieve_next_token, trusted)
        return result


def cut_chains(next_token: torch.Tensor, rows: np.ndarray) -> None:
    """Takes the link to the row after the first ``rows`` int64 [b] drafted ones out of ``next_token`` int64 [b, n], in place."""
    rows = torch.from_numpy(rows).to(next_token.device)[:, None]
    next_token.masked_fill_(torch.arange(next_token.shape[1], device=next_token.device) >= rows, -1)


def _keep(rids) -> None:
    """Requests that left the batch."""


class OasisNgramWorker(NGRAMWorker):
    """``totals``: verify_steps, drafts_proposed, drafts_accepted (guesses that came true), tokens_accepted (all tokens that
    verify steps gave), draft_misses (steps without a guess), all by request; counted when SGLang processes the result of a step.
    """

    def __init__(self, server_args, gpu_id: int, nccl_port: int, target_worker, source: DraftSource | None = None):
        super(NGRAMWorker, self).__init__()  # NGRAMWorker's own compiles SGLang's n-gram corpus
        spec = get_spec()
        self.source = PromptLookup() if source is None else source  # an empty one is falsy
        self.totals: Counter[str] = Counter()
        self.draft_counts: np.ndarray | None = None
        """int64 [b] of the verify step that runs or ran last; None after other forwards."""
        self._unsettled: deque[np.ndarray] = deque()
        # What NGRAMWorker's methods and SGLang read.
        self.server_args = server_args
        self._target_worker, self.model_runner = _Target(target_worker, spec.speculative_num_draft_tokens), target_worker.model_runner
        self.enable_overlap, self.page_size = not get_schedule().disable_overlap_schedule, get_schedule().page_size
        self.draft_token_num = self.speculative_num_draft_tokens = spec.speculative_num_draft_tokens
        self.topk, self.speculative_num_steps = spec.speculative_eagle_topk, spec.speculative_num_steps
        self.device = get_device().device
        self.adaptive_controller = self.grammar_tree_host = None
        self._prev_decode_rids: set[str] = set()
        self.ngram_corpus = SimpleNamespace(erase_match_state=_keep)  # all that NGRAMWorker still asks of it
        self._chain = np.tri(self.draft_token_num, dtype=bool)

    # -- drafts -------------------------------------------------------------------------------------------------

    def _prepare_draft_tokens(self, batch) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int64 [b * n], each request's first being its last committed one, and the chain's mask bool [b * n * n]."""
        requests = self._requests(batch)
        last = np.array([request.output[-1] for request in requests], np.int64)
        drafts: Drafts = self.source.propose(requests, self.draft_token_num - 1)
        self.draft_counts = drafts.counts
        return np.column_stack((last, drafts.tokens)).ravel(), np.tile(self._chain.ravel(), len(requests))

    def _requests(self, batch) -> list[Request]:
        """Where steps overlap, what the previous one accepted is not in ``req.output_ids`` yet."""
        outputs: list[Sequence[int]] = [req.output_ids for req in batch.reqs]
        if self.enable_overlap and not batch.grammar_needs_sync():
            tokens = batch.spec_info.accept_tokens.cpu().numpy().reshape(len(outputs), self.draft_token_num)
            lengths = batch.spec_info.accept_lens.tolist()
            outputs = [output + array("q", row[:n].tolist()) for output, row, n in zip(outputs, tokens, lengths, strict=True)]
        return [Request(req.rid, req.origin_input_ids_unpadded, output) for req, output in zip(batch.reqs, outputs)]

    def _prepare_for_speculative_decoding(self, batch) -> None:
        super()._prepare_for_speculative_decoding(batch)
        if batch.forward_mode.is_target_verify():
            batch.spec_info = ChainVerifyInput(batch.spec_info, self.draft_counts)

    def _update_ngram_corpus(self, batch) -> None:
        """Sources see all tokens when they propose."""

    # -- results ------------------------------------------------------------------------------------------------

    def forward_batch_generation(self, batch, on_publish=None, pp_proxy_tensors=None):
        self.draft_counts = None
        result = super().forward_batch_generation(batch, on_publish=on_publish, pp_proxy_tensors=pp_proxy_tensors)
        if self.draft_counts is not None:
            self._unsettled.append(self.draft_counts)
            if (coordinator := self.model_runner.hisparse_coordinator) is not None:
                coordinator.verified(result.accept_lens, self.draft_counts)
        return result

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Called once for each verify step, in order, when its results are on the host: counting in the forward would make
        the host wait for the device."""
        counts, correct = self._unsettled.popleft(), np.array(num_correct_drafts_per_req, np.int64)
        # Padding can come true as well: those tokens are right, but nobody guessed them.
        self.totals.update(
            verify_steps=len(correct), drafts_proposed=int(counts.sum()), drafts_accepted=int(np.minimum(counts, correct).sum()),
            tokens_accepted=int(correct.sum()) + len(correct), draft_misses=int((counts == 0).sum()))

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """A request that only left the batch may come back, from standing aside or retraction: the source bounds what it keeps."""
        self.source.forget([rid])

    def clear_cache_pool(self) -> None:
        self.source.forget(self._prev_decode_rids)
        self._prev_decode_rids = set()
