"""OASIS_NGRAM in SGLang's registry, the state that handed-over requests start with, and the worker in whole decode loops on
SGLang's own verification, relay and result protocol; only the target model is a stand-in."""

from __future__ import annotations

import dataclasses
import re
from array import array
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_utils, ngram_worker, spec_utils
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.ngram_worker import NGRAMWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from oasis_sglang import speculation
from oasis_sglang.cpu.attention import draft_trees
from oasis_sglang.speculation import worker as worker_module
from oasis_sglang.speculation.algorithm import NAME, OasisNgram, _worker_class, seed
from oasis_sglang.speculation.draft import Drafts, PromptLookup
from oasis_sglang.speculation.worker import ChainVerifyInput, OasisNgramWorker

N, ROWS, VOCABULARY = 4, 16, 50


@pytest.fixture
def algorithm() -> OasisNgram:
    speculation.register()
    return SpeculativeAlgorithm.from_string(NAME)


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """SGLang's settings of a process, as far as they are read here."""
    spec = SimpleNamespace(speculative_num_draft_tokens=N, speculative_eagle_topk=1, speculative_num_steps=N, speculative_use_rejection_sampling=False,
                           speculative_algorithm=NAME, enable_multi_layer_eagle=False)
    schedule = SimpleNamespace(disable_overlap_schedule=True, page_size=1)
    from sglang.srt import runtime_context

    for module in (worker_module, ngram_worker, eagle_utils, runtime_context):
        monkeypatch.setattr(module, "get_spec", lambda: spec)
    for module in (worker_module, ngram_worker):
        monkeypatch.setattr(module, "get_schedule", lambda: schedule)
        monkeypatch.setattr(module, "get_device", lambda: SimpleNamespace(device="cpu"))
    monkeypatch.setattr(ngram_worker, "NgramCorpus", None)  # a machine without a compiler cannot have one
    monkeypatch.setattr(spec_utils, "mambaish_config", lambda model: None)
    monkeypatch.setattr(spec_utils, "get_exec", lambda: SimpleNamespace(mamba=SimpleNamespace(enable_mamba_extra_buffer=False)))
    return schedule


# -- the registry -------------------------------------------------------------------------------------------------


def test_registered_once_and_found_by_name(algorithm):
    speculation.register()
    assert SpeculativeAlgorithm.from_string("oasis_ngram") is algorithm
    assert type(algorithm) is OasisNgram and algorithm.supports_overlap
    assert algorithm.is_ngram() and algorithm.is_some() and not algorithm.has_draft_kv()
    assert not algorithm.is_eagle() and not algorithm.need_topk() and not algorithm.carries_draft_hidden_states()
    assert algorithm.get_platform_worker_cls() is None


def test_has_every_method_that_sglang_calls(algorithm):
    public = {name for name in vars(SpeculativeAlgorithm) if not name.startswith("_") and callable(getattr(SpeculativeAlgorithm, name))}
    members = {member.name for member in SpeculativeAlgorithm}
    assert not [name for name in public - members - {"from_string", "register"} if not callable(getattr(algorithm, name, None))]
    root = Path(ngram_worker.__file__).parents[1]
    called = set()
    for path in root.rglob("*.py"):
        called |= set(re.findall(r"\bspec_algo(?:rithm)?\.([a-z]\w+)\(", path.read_text()))
    assert {"create_future_map", "build_disagg_draft_input", "carries_draft_hidden_states", "need_topk"} <= called
    assert not [name for name in called if not callable(getattr(algorithm, name, None))]


def arguments(**changes) -> SimpleNamespace:
    fields = dict(speculative_num_draft_tokens=None, speculative_ngram_max_bfs_breadth=10, speculative_eagle_topk=None, speculative_num_steps=None,
                  enable_mixed_chunk=True, device="cuda", disable_overlap_schedule=False, enable_dp_attention=False, pp_size=1,
                  speculative_ngram_external_corpus_path=None)
    return SimpleNamespace(**(fields | changes))


def test_arguments_become_those_of_chains(algorithm):
    args = arguments()
    algorithm.handle_server_args(args)
    assert (args.speculative_num_draft_tokens, args.speculative_ngram_max_bfs_breadth, args.speculative_eagle_topk) == (4, 1, 1)
    assert args.speculative_num_steps == 4 and not args.enable_mixed_chunk and not args.disable_overlap_schedule
    args = arguments(speculative_num_draft_tokens=6, device="cpu")
    algorithm.handle_server_args(args)
    assert args.speculative_num_draft_tokens == args.speculative_num_steps == 6 and args.disable_overlap_schedule


@pytest.mark.parametrize("changes", [{"speculative_num_draft_tokens": 1}, {"enable_dp_attention": True}, {"pp_size": 2},
                                     {"speculative_ngram_external_corpus_path": "x"}])
def test_what_it_does_not_go_with_is_named(algorithm, changes):
    with pytest.raises(ValueError, match=f"{NAME}.*{next(iter(changes)).removeprefix('speculative_').replace('num_draft_tokens', 'num-draft-tokens')}"):
        algorithm.handle_server_args(arguments(**changes))


def test_sglang_is_given_our_worker(algorithm):
    assert algorithm.create_worker(SimpleNamespace(disable_overlap_schedule=False)) is OasisNgramWorker
    assert _worker_class(None) is OasisNgramWorker and issubclass(OasisNgramWorker, NGRAMWorker)


# -- the seed -----------------------------------------------------------------------------------------------------


def handed_over(rows: list[int], lengths: list[int], overlap: bool) -> SimpleNamespace:
    return SimpleNamespace(reqs=[None] * len(rows), device="cpu", enable_overlap=overlap, seq_lens=torch.tensor(lengths), req_pool_indices=torch.tensor(rows))


def test_the_seed_carries_lengths_and_no_tokens(algorithm):
    state = algorithm.build_disagg_draft_input(handed_over([3, 7], [10, 20], False), torch.tensor([1, 2]), None)
    assert isinstance(state, NgramVerifyInput) and state.future_indices is None
    assert state.accept_lens.tolist() == [0, 0] and state.accept_tokens.shape == (2 * N,) and state.new_seq_lens.tolist() == [10, 20]


def test_seeds_merge_with_running_requests_and_are_filtered(algorithm):
    running = NgramVerifyInput(draft_token_num=N, new_seq_lens=torch.tensor([5]), accept_tokens=torch.arange(N, dtype=torch.int32),
                               accept_lens=torch.tensor([2], dtype=torch.int32))
    running.merge_batch(seed(handed_over([3, 7], [10, 20], False), None))
    assert running.new_seq_lens.tolist() == [5, 10, 20] and running.accept_lens.tolist() == [2, 0, 0]
    running.filter_batch(torch.tensor([0, 2]))
    assert running.new_seq_lens.tolist() == [5, 20] and running.accept_tokens.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert running.accept_lens.dtype == running.accept_tokens.dtype == torch.int32


def relay(algorithm) -> FutureMap:
    return algorithm.create_future_map(torch.device("cpu"), SimpleNamespace(req_to_token=torch.zeros(ROWS, 4)))


def test_where_steps_overlap_the_relay_is_seeded(algorithm):
    future = relay(algorithm)
    running = NgramVerifyInput(draft_token_num=N, new_seq_lens=torch.tensor([5]), accept_tokens=torch.full((N,), 9, dtype=torch.int32),
                               accept_lens=torch.tensor([2], dtype=torch.int32))
    running.future_indices = torch.tensor([1])
    future.publish(running.future_indices, running.new_seq_lens)
    future.stash(running.future_indices, RelayPayload.from_ngram(running))
    future.accept_lens_buf[7] = 3  # of an earlier request in that row
    running.merge_batch(algorithm.build_disagg_draft_input(handed_over([3, 7], [10, 20], True), None, future))
    running.filter_batch(torch.tensor([0, 2]))
    batch = SimpleNamespace(spec_info=running, req_pool_indices=torch.tensor([1, 7]), seq_lens=None)
    future.resolve_seq_lens_cpu(batch)
    future._resolve_spec_extras(batch)
    assert batch.seq_lens.tolist() == [5, 20] and running.accept_lens.tolist() == [2, 0] and running.accept_tokens[:N].tolist() == [9] * N


# -- the worker ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    """What the worker reads and changes of SGLang's ``ScheduleBatch``."""

    reqs: list
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    req_pool_indices: torch.Tensor
    req_to_token_pool: object
    spec_info: object = None
    forward_mode: ForwardMode = ForwardMode.DECODE
    input_ids: torch.Tensor | None = None
    out_cache_loc: torch.Tensor | None = None
    has_grammar: bool = False
    return_logprob: bool = False
    device: str = "cpu"
    sampling_info: object = dataclasses.field(default_factory=lambda: SimpleNamespace(
        acc_additive_penalties=None, acc_scaling_penalties=None, logit_bias=None, is_all_greedy=True, has_watermark_candidates=False,
        has_custom_logit_processor=False))

    def grammar_needs_sync(self) -> bool:
        return self.has_grammar


class Node:
    """A scheduler in a few lines, and a model whose next token is a function of the text so far."""

    def __init__(self, schedule, *, overlap: bool, next_token, source=None, coordinator=None):
        schedule.disable_overlap_schedule = not overlap
        self.overlap, self.next_token, self.coordinator = overlap, next_token, coordinator
        self.table = torch.arange(ROWS * 200).view(ROWS, 200)
        self.pool = SimpleNamespace(req_to_token=self.table)
        self.seen: list[NgramVerifyInput] = []
        self.moved: list[tuple] = []
        kv = SimpleNamespace(move_kv_cache=lambda *where: self.moved.append(where))
        self.runner = SimpleNamespace(hisparse_coordinator=coordinator, max_running_requests=ROWS, watermark_state=None, model_config=None)
        target = SimpleNamespace(model_runner=self.runner, forward_batch_generation=self.forward,
                                 get_memory_pool=lambda: (self.pool, SimpleNamespace(get_kvcache=lambda: kv)))
        self.worker = OasisNgramWorker(SimpleNamespace(), 0, 0, target, source)
        self.worker.alloc_memory_pool()
        self.reqs: list = []
        self.texts: dict[str, list[int]] = {}
        self.state = self.future = self.pending = None

    def forward(self, batch, pp_proxy_tensors=None, is_verify=False):
        assert is_verify and batch.spec_info.draft_counts is self.worker.draft_counts
        self.seen.append(batch.spec_info)
        rows = batch.input_ids.view(len(batch.reqs), N).tolist()
        logits = torch.zeros(len(batch.reqs), N, VOCABULARY)
        for i, (req, row) in enumerate(zip(batch.reqs, rows)):
            committed = self.texts[req.rid]
            assert row[0] == committed[-1], "the first row is the last committed token"
            assert batch.spec_info.positions.view(-1, N)[i].tolist() == list(range(len(committed) - 1, len(committed) - 1 + N))
            for j in range(N):
                logits[i, j, self.next_token(committed + row[1 : j + 1])] = 1
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits.view(-1, VOCABULARY)), can_run_cuda_graph=False)

    def hand_over(self, algorithm, rid: str, prompt: list[int]) -> None:
        first = self.next_token(prompt)
        req = SimpleNamespace(rid=rid, origin_input_ids_unpadded=array("q", prompt), output_ids=array("q", [first]), row=len(self.reqs) + 1)
        self.reqs.append(req)
        self.texts[rid] = [*prompt, first]
        self.future = self.future or relay(algorithm)
        new = algorithm.build_disagg_draft_input(handed_over([req.row], [len(prompt)], self.overlap), None, self.future)
        if self.state is None:
            self.state = new
        else:
            self.state.merge_batch(new)

    def step(self) -> SimpleNamespace:
        """One verify step; where steps overlap, SGLang hands out its tokens only after the next one has begun."""
        rows = torch.tensor([req.row for req in self.reqs])
        lengths = torch.tensor([len(self.texts[req.rid]) - 1 for req in self.reqs])
        batch = Batch(list(self.reqs), lengths, lengths.clone(), rows, self.pool, self.state)
        if self.overlap:
            self.future.resolve_seq_lens_cpu(batch)
            assert batch.seq_lens.tolist() == lengths.tolist()
            self.future._resolve_spec_extras(batch)
            result = self.worker.forward_batch_generation(batch, on_publish=lambda new: self.future.publish(rows, new))
            self.future.stash(rows, RelayPayload.from_ngram(result.next_draft_input))
            self.settle()
            self.pending = (batch.reqs, result)
        else:
            result = self.worker.forward_batch_generation(batch)
            self.pending = (batch.reqs, result)
            self.settle()
        self.state = result.next_draft_input
        self.state.future_indices = rows if self.overlap else None
        tokens = result.next_token_ids.view(-1, N).tolist()
        for req, row, n in zip(batch.reqs, tokens, result.accept_lens.tolist()):
            self.texts[req.rid] += row[:n]
        assert result.new_seq_lens.tolist() == [len(self.texts[req.rid]) - 1 for req in batch.reqs]
        return result

    def settle(self) -> None:
        if self.pending is None:
            return
        (reqs, result), self.pending = self.pending, None
        self.worker.on_verify_complete_cpu([n - 1 for n in result.accept_lens.tolist()], batch_size=len(reqs))
        for req, row, n in zip(reqs, result.next_token_ids.view(-1, N).tolist(), result.accept_lens.tolist()):
            req.output_ids.extend(row[:n])

    def leave(self, rid: str) -> None:
        keep = [i for i, req in enumerate(self.reqs) if req.rid != rid]
        self.reqs = [self.reqs[i] for i in keep]
        self.state.filter_batch(torch.tensor(keep, dtype=torch.int64))


def cycle(text: list[int]) -> int:
    """1, 2, ..., 7 and again, with a 40 after each 23rd token of the text."""
    return 40 if len(text) % 23 == 0 else len(text) % 7 + 1


def plain(next_token, prompt: list[int], n: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + n:
        text.append(next_token(text))
    return text


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_answers_are_the_models_own_in_fewer_steps(settings, algorithm, overlap):
    node = Node(settings, overlap=overlap, next_token=cycle)
    node.hand_over(algorithm, "a", [9, 8, 7])
    for _ in range(4):
        node.step()
    node.hand_over(algorithm, "b", plain(cycle, [30], 40))
    for _ in range(12):
        node.step()
    for rid, prompt in (("a", [9, 8, 7]), ("b", plain(cycle, [30], 40))):
        text = node.texts[rid]
        assert text == plain(cycle, prompt, len(text) - len(prompt))
    assert len(node.texts["b"]) - 41 - 1 > 12 * 1.5
    if overlap:
        node.settle()
    totals, proposed = node.worker.totals, sum(int(s.draft_counts.sum()) for s in node.seen)
    assert totals["verify_steps"] == 16 + 12 and totals["drafts_proposed"] == proposed > 0
    assert totals["tokens_accepted"] == len(node.texts["a"]) - 4 + len(node.texts["b"]) - 42
    assert 0 < totals["drafts_accepted"] <= totals["tokens_accepted"] - 16 - 12
    assert totals["draft_misses"] == sum(int((s.draft_counts == 0).sum()) for s in node.seen)


class Oracle:
    """Drafts that come true as far as ``right`` says, and as many as ``counts`` says."""

    def __init__(self, right: list[int], counts: list[int], next_token):
        self.right, self.counts, self.next_token, self.forgotten = right, counts, next_token, []

    def propose(self, requests, n):
        tokens = np.zeros((len(requests), n), np.int64)
        for i, request in enumerate(requests):
            text = [*request.prompt, *request.output]
            tokens[i] = plain(self.next_token, text, n)[-n:]
            tokens[i, self.right[i] :] = VOCABULARY - 1
        return Drafts(tokens, np.array(self.counts, np.int64))

    def forget(self, rids):
        self.forgotten += sorted(rids)


class Coordinator:
    def __init__(self, believed=None):
        self.calls, self.believed = [], believed

    def trusted(self):
        return None if self.believed is None else np.array(self.believed)

    def verified(self, accept_lens, drafts):
        self.calls.append((accept_lens.tolist(), drafts.tolist()))


def test_the_coordinator_hears_what_came_true_and_padding_is_no_draft(settings, algorithm):
    coordinator, oracle = Coordinator(), Oracle([3, 1, 2], [3, 3, 0], cycle)
    node = Node(settings, overlap=False, next_token=cycle, source=oracle, coordinator=coordinator)
    for rid in "abc":
        node.hand_over(algorithm, rid, [9, 8, 7])
    node.step()
    assert coordinator.calls == [([4, 2, 3], [3, 3, 0])]
    assert dict(node.worker.totals) == {"verify_steps": 3, "drafts_proposed": 6, "drafts_accepted": 4, "tokens_accepted": 9, "draft_misses": 1}
    (targets, sources), rows = node.moved[0], node.table[torch.tensor([1, 2, 3]), 3:]
    assert targets.view(3, N)[0].tolist() == sources.view(3, N)[0].tolist() == rows[0, :N].tolist(), "accepted chains lie where they belong"


def test_drafts_that_are_not_believed_are_verified_again_and_answers_stay_the_same(settings, algorithm):
    coordinator = Coordinator(believed=[1, 0, 3])
    node = Node(settings, overlap=False, next_token=cycle, source=Oracle([3, 3, 3], [3, 3, 3], cycle), coordinator=coordinator)
    for rid in "abc":
        node.hand_over(algorithm, rid, [9, 8, 7])
    node.step()
    assert coordinator.calls == [([2, 1, 4], [3, 3, 3])]
    node.settle()
    assert all(text == plain(cycle, [9, 8, 7], len(text) - 3) for text in node.texts.values())


def test_the_verify_input_is_a_chain(settings, algorithm):
    node = Node(settings, overlap=False, next_token=cycle, source=Oracle([3, 0], [3, 3], cycle))
    node.hand_over(algorithm, "a", [9, 8, 7])
    node.hand_over(algorithm, "b", [9, 8, 7, 6])
    node.step()
    [verify] = node.seen
    assert isinstance(verify, ChainVerifyInput) and verify.tree_topk == 1 and verify.is_verify_input() and verify.max_tree_depth == N
    assert draft_trees(verify, 2) == [None, None]
    assert verify.custom_mask.view(2, N, N).tolist() == [np.tri(N, dtype=bool).tolist()] * 2
    assert verify.retrieve_next_token.tolist() == [[1, 2, 3, -1]] * 2 and verify.retrieve_next_sibling.tolist() == [[-1] * N] * 2
    assert verify.draft_counts.tolist() == [3, 3]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_requests_that_leave_are_forgotten_and_may_come_back(settings, algorithm, overlap):
    node = Node(settings, overlap=overlap, next_token=cycle)
    for rid in "abc":
        node.hand_over(algorithm, rid, [9, 8, 7])
    for _ in range(3):
        node.step()
    source: PromptLookup = node.worker.source
    assert len(source) == 3
    node.settle()
    retracted = node.reqs[1]
    node.leave("b")
    node.step()
    assert len(source) == 3, "it may come back"
    node.settle()
    node.texts["b"] = [9, 8, 7, *retracted.output_ids]
    node.reqs.append(retracted)
    node.state.merge_batch(seed(handed_over([retracted.row], [len(node.texts["b"]) - 1], overlap), node.future))
    for _ in range(3):
        node.step()
    assert len(source) == 3 and node.texts["b"] == plain(cycle, [9, 8, 7], len(node.texts["b"]) - 3)
    node.worker.note_request_finished(rid="a", natural_stop=True)
    assert len(source) == 2, "a finished request is forgotten at once"
    node.worker.clear_cache_pool()
    assert len(source) == 0


def test_other_forwards_are_left_alone(settings, algorithm):
    coordinator = Coordinator()
    node = Node(settings, overlap=False, next_token=cycle, coordinator=coordinator)
    predicted = torch.tensor([5])
    node.worker._target_worker.forward_batch_generation = lambda batch, pp_proxy_tensors=None: SimpleNamespace(
        logits_output=None, next_token_ids=predicted, can_run_cuda_graph=False)
    req = SimpleNamespace(rid="a", origin_input_ids_unpadded=array("q", [1]), output_ids=array("q"))
    lengths = torch.tensor([1])
    result = node.worker.forward_batch_generation(Batch([req], lengths, lengths, torch.tensor([1]), node.pool, forward_mode=ForwardMode.EXTEND))
    assert result.next_token_ids is predicted and node.worker.draft_counts is None and not coordinator.calls and len(node.worker.source) == 0
