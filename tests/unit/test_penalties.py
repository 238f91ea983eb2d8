"""Penalties over what a request has answered hold when it leaves the batch and comes back."""

from __future__ import annotations

from types import SimpleNamespace as Some

import pytest
import torch
from sglang.srt.sampling import penaltylib

from decode_node import penalties
from oasis_sglang import hooks

ALL = {penaltylib.BatchedFrequencyPenalizer, penaltylib.BatchedMinNewTokensPenalizer, penaltylib.BatchedPresencePenalizer,
       penaltylib.BatchedRepetitionPenalizer}
VOCABULARY, EOS = 16, 2
ANSWERED = [[5], [3, 3, 5, 3], [], [7, 8, 7, 9, 2, 2, 11]]
KINDS = {"none": {}, "frequency": dict(frequency_penalty=0.5), "presence": dict(presence_penalty=0.25), "repetition": dict(repetition_penalty=1.5),
         "length": dict(min_new_tokens=5)}


class Batch:
    """As much of SGLang's as penalties look at."""

    def __init__(self, reqs):
        self.reqs, self.device = reqs, "cpu"
        self.sampling_info = Some(penalizer_orchestrator=penaltylib.BatchedPenalizerOrchestrator(VOCABULARY, self, ALL))


def requests_of(kinds) -> list:
    stock = dict(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0, stop_token_ids=None)
    return [Some(output_ids=[], origin_input_ids=[1], sampling_params=Some(**{**stock, **KINDS[kind]}), eos_token_ids={EOS},
                 tokenizer=Some(additional_stop_token_ids=None, eos_token_id=EOS)) for kind in kinds]


def step(batch) -> torch.Tensor:
    """The logits of a step whose model is indifferent; ``ScheduleBatch.cumulate_penalty_output_tokens`` is what SGLang does before."""
    orchestrator = batch.sampling_info.penalizer_orchestrator
    orchestrator.cumulate_output_tokens(torch.tensor([(req.output_ids or req.origin_input_ids)[-1] for req in batch.reqs]))
    logits = torch.ones(len(batch.reqs), VOCABULARY)
    orchestrator.apply(logits)
    return logits


@pytest.mark.parametrize("kinds", [("frequency", "presence", "repetition", "length"), ("length", "none", "none", "frequency"), ("none",) * 4,
                                   ("repetition", "repetition", "frequency", "presence")], ids=" ".join)
def test_a_request_that_comes_back_is_penalised_as_if_it_had_never_left(kinds):
    undisturbed = []
    for [req], answer in zip(([r] for r in requests_of(kinds)), ANSWERED):
        batch = Batch([req])
        for token in answer[:-1]:
            req.output_ids.append(token)
            step(batch)
        req.output_ids += answer[-1:]
        undisturbed.append(step(batch)[0])
    reqs = requests_of(kinds)
    for req, answer in zip(reqs, ANSWERED):
        req.output_ids = list(answer)
    batch = Batch(reqs)
    penalties.resume(batch)
    back = step(batch)
    assert torch.equal(back, torch.stack(undisturbed))
    if kinds[1] == "presence":
        assert back[1, 3] < 1 and back[3, EOS] == 1, "there is something to lose"


def test_sglangs_new_batch_is_what_resumes(monkeypatch):
    reqs = requests_of(["frequency"])
    reqs[0].output_ids = [3, 3, 4]
    scheduler = Some(enable_hisparse=True, waiting_queue=[], hisparse_coordinator=Some(tidy=lambda: None, blocked=lambda req: False))
    monkeypatch.setattr(hooks.config, "active", lambda: True)
    made = Batch(reqs)
    assert hooks.prebuilt_batch(lambda scheduler, batch: made, scheduler, None) is made
    assert made.sampling_info.penalizer_orchestrator.penalizers[penaltylib.BatchedFrequencyPenalizer].cumulated_frequency_penalties[0, 3] == 1.0
    assert hooks.prebuilt_batch(lambda scheduler, batch: None, scheduler, None) is None
