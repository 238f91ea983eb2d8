"""Penalties of requests that come back into the batch: those that stood aside, were retracted or computed again.

SGLang builds the sums of a batch of transferred requests from nothing and adds one token per decode step, because such requests have not
answered yet. Ours may have. Sources: ``sglang/srt/sampling/penaltylib`` and ``ScheduleBatch.cumulate_penalty_output_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def resume(batch) -> None:
    """Adds to a new ``batch``'s penalties what its requests have answered, but for the newest token, which its first step adds."""
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if not orchestrator.is_required:
        return
    for row, req in enumerate(batch.reqs):
        if len(req.output_ids) > 1:
            for penalizer in orchestrator.penalizers.values():
                if penalizer.is_prepared():
                    _add(penalizer, row, req.output_ids[:-1])


def _add(penalizer, row: int, tokens: Sequence[int]) -> None:
    from sglang.srt.sampling import penaltylib

    if isinstance(penalizer, penaltylib.BatchedMinNewTokensPenalizer):
        penalizer.len_output_tokens[row] += len(tokens)
        return
    name, add = {penaltylib.BatchedFrequencyPenalizer: ("frequency", torch.Tensor.scatter_add_),
                 penaltylib.BatchedPresencePenalizer: ("presence", torch.Tensor.scatter_),
                 penaltylib.BatchedRepetitionPenalizer: ("repetition", torch.Tensor.scatter_)}[type(penalizer)]
    sums = getattr(penalizer, f"cumulated_{name}_penalties")[row]
    index = torch.tensor(tokens, dtype=torch.int64, device=sums.device)
    add(sums, 0, index, getattr(penalizer, f"{name}_penalties")[row].expand(len(index)))
