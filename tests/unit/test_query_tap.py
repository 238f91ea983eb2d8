"""The queries of a prompt's last tokens, as they are collected from an attention backend forward by forward."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang import config, hooks
from prefill_node.query_tap import WINDOW, QueryTap

HEADS, DIM = 3, 2


def value(rid: str, token: int, layer: int) -> torch.Tensor:
    """float64 [heads, dim]: another one for each token of each request in each layer."""
    base = sum(map(ord, rid)) * 100_000 + token * 10 + layer
    return base + torch.arange(HEADS * DIM, dtype=torch.float64).reshape(HEADS, DIM) / 8


def last(rid: str, tokens: int, n: int, layers: int) -> torch.Tensor:
    """[n, layers, heads, dim]: what must be kept of the last n of ``tokens`` tokens."""
    return torch.stack([torch.stack([value(rid, t, layer) for layer in range(layers)]) for t in range(tokens - n, tokens)])


class Backend:
    """An attention backend that notes what reaches it."""

    def __init__(self):
        self.calls = []

    def init_forward_metadata(self, forward_batch):
        self.calls.append(("init", forward_batch))
        return "planned"

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        self.calls.append((q, k, v, layer, forward_batch, save_kv_cache, kwargs))
        q.fill_(-1)  # nobody promises to leave it alone
        return "attended"


class Model:
    """Runs batches of (rid, prefix, new tokens) through a tapped backend, as an eager forward does."""

    def __init__(self, layers: int = 2, padding: int = 0, **options):
        self.layers, self.padding = layers, padding
        self.tap, self.backend = QueryTap(**options), Backend()
        self.tap.install(self.backend)

    def batch(self, *requests, mode: str = "EXTEND"):
        return SimpleNamespace(forward_mode=SimpleNamespace(name=mode), rids=[r for r, _, _ in requests],
                               extend_prefix_lens_cpu=[p for _, p, _ in requests], extend_seq_lens_cpu=[n for _, _, n in requests])

    def attend(self, batch, layer: int, requests):
        rows = [value(rid, prefix + t, layer) for rid, prefix, new in requests for t in range(new)]
        rows += [torch.full((HEADS, DIM), 7e6, dtype=torch.float64)] * self.padding
        q = torch.stack(rows).reshape(len(rows), HEADS * DIM) if rows else torch.zeros(0, HEADS * DIM, dtype=torch.float64)
        self.backend.forward_extend(q, None, None, layer_of(layer), batch)
        return q

    def run(self, *requests, mode: str = "EXTEND"):
        batch = self.batch(*requests, mode=mode)
        self.backend.init_forward_metadata(batch)
        for layer in range(self.layers):
            self.attend(batch, layer, requests)


def layer_of(number: int):
    return SimpleNamespace(layer_id=number, tp_q_head_num=HEADS, qk_head_dim=DIM, scaling=0.25)


def test_the_last_tokens_of_a_prompt_in_one_forward():
    model = Model(window=4)
    model.run(("a", 0, 10))
    taken = model.tap.take("a")
    assert taken.shape == (4, 2, HEADS, DIM) and torch.equal(taken, last("a", 10, 4, 2))
    assert model.tap.take("a") is None and model.tap.scale == 0.25


def test_a_prompt_shorter_than_the_window():
    model = Model(window=64)
    model.run(("a", 0, 3))
    assert torch.equal(model.tap.take("a"), last("a", 3, 3, 2))


def test_each_request_of_a_batch_has_its_own_padding_belongs_to_none():
    model = Model(window=4, layers=3, padding=5)
    model.run(("a", 0, 2), ("b", 0, 9), ("empty", 0, 0), ("c", 0, 4))
    for rid, tokens, n in (("c", 4, 4), ("a", 2, 2), ("b", 9, 4)):
        assert torch.equal(model.tap.take(rid), last(rid, tokens, n, 3))
    assert model.tap.take("empty") is None
    model.run(("empty", 0, 0))
    assert model.tap.take("empty") is None


@pytest.mark.parametrize("chunks", [[5, 5], [4, 1], [1] * 9, [7, 2, 1], [2, 3, 64], [3, 1, 1]])
def test_chunks_that_are_shorter_than_the_window_are_joined(chunks):
    model, done = Model(window=4), 0
    for n, chunk in enumerate(chunks):
        model.run((f"other{n}", 0, 3), ("a", done, chunk), (f"more{n}", 50, 2))
        done += chunk
    assert torch.equal(model.tap.take("a"), last("a", done, min(4, done), 2))
    for n in range(len(chunks)):
        assert torch.equal(model.tap.take(f"other{n}"), last(f"other{n}", 3, 3, 2))
        assert torch.equal(model.tap.take(f"more{n}"), last(f"more{n}", 52, 2, 2))


def test_after_a_radix_hit_only_what_was_computed_is_there():
    model = Model(window=8)
    model.run(("a", 100, 5))
    assert torch.equal(model.tap.take("a"), last("a", 105, 5, 2))


@pytest.mark.parametrize("prefix", [0, 9, 11, 20])
def test_a_chunk_that_does_not_continue_what_is_held_starts_afresh(prefix):
    """A prompt that is computed again, or a new request with an old name."""
    model = Model(window=8)
    model.run(("a", 0, 10))
    model.run(("a", prefix, 2))
    assert torch.equal(model.tap.take("a"), last("a", prefix + 2, 2, 2))


def test_what_ends_before_the_prompt_does_is_not_given_out():
    """Some of its forwards went past the tap."""
    model = Model(window=4)
    model.run(("a", 0, 10), ("b", 0, 10))
    assert model.tap.take("a", 12) is None and model.tap.take("a", 10) is None, "it is forgotten all the same"
    assert torch.equal(model.tap.take("b", 10), last("b", 10, 4, 2))


def test_dropped_requests_are_gone_and_unknown_ones_are_no_error():
    model = Model(window=4)
    model.run(("a", 0, 10), ("b", 0, 10))
    model.tap.drop("a")
    model.tap.drop("never heard of")
    assert model.tap.take("a") is None and model.tap.take("b") is not None
    model.run(("a", 10, 2))
    assert torch.equal(model.tap.take("a"), last("a", 12, 2, 2))


@pytest.mark.parametrize("layers_run", [0, 1, 2])
def test_the_next_forward_may_have_begun_before_the_queries_of_the_last_one_are_taken(layers_run):
    model = Model(window=4)
    model.run(("a", 0, 6), ("b", 0, 2))
    following = [("b", 2, 1), ("c", 0, 5)]
    batch = model.batch(*following)
    model.backend.init_forward_metadata(batch)
    for layer in range(layers_run):
        model.attend(batch, layer, following)
    taken = model.tap.take("a", 6)
    assert torch.equal(taken, last("a", 6, 4, 2))
    for layer in range(layers_run, 2):
        model.attend(batch, layer, following)
    assert torch.equal(taken, last("a", 6, 4, 2)), "later forwards write elsewhere"
    assert torch.equal(model.tap.take("b"), last("b", 3, 3, 2)) and torch.equal(model.tap.take("c"), last("c", 5, 4, 2))


def test_a_request_dropped_during_its_forward_stays_away():
    model, requests = Model(window=4), [("a", 0, 3)]
    batch = model.batch(*requests)
    model.backend.init_forward_metadata(batch)
    model.attend(batch, 0, requests)
    model.tap.drop("a")
    model.attend(batch, 1, requests)
    assert model.tap.take("a") is None


def test_the_number_of_layers_is_learnt_from_the_first_forward():
    model = Model(window=4, layers=7)
    model.run(("a", 0, 6), ("b", 0, 2))
    model.run(("b", 2, 1))
    assert torch.equal(model.tap.take("a"), last("a", 6, 4, 7)) and torch.equal(model.tap.take("b"), last("b", 3, 3, 7))


@pytest.mark.parametrize("mode, rids", [("MIXED", ["a"]), ("TARGET_VERIFY", ["a"]), ("DECODE", ["a"]), ("EXTEND", None)])
def test_forwards_that_compute_no_prompt_leave_nothing(mode, rids):
    """Warm-up batches have no request ids; nothing of the forward before may get a new meaning either."""
    model = Model(window=4)
    model.run(("a", 0, 3))
    batch = model.batch(("a", 3, 2), mode=mode)
    batch.rids = rids
    model.backend.init_forward_metadata(batch)
    model.attend(batch, 0, [("x", 3, 2)])
    assert torch.equal(model.tap.take("a"), last("a", 3, 3, 2))


def test_a_batch_without_lengths_on_the_host_is_left_alone():
    model = Model(window=4)
    batch = model.batch(("a", 0, 2))
    batch.extend_seq_lens_cpu = batch.extend_prefix_lens_cpu = None
    model.backend.init_forward_metadata(batch)
    model.attend(batch, 0, [("a", 0, 2)])
    assert model.tap.take("a") is None


def test_a_prefill_graph_attends_with_another_batch_object():
    """It shares the list of lengths and has no request ids; a graph that is being captured shares nothing."""
    model, requests = Model(window=4, padding=3), [("a", 0, 6)]
    batch = model.batch(*requests)
    model.backend.init_forward_metadata(batch)
    model.attend(SimpleNamespace(extend_seq_lens_cpu=[6]), 0, [("x", 0, 6)])
    assert model.tap.take("a") is None
    replayed = SimpleNamespace(extend_seq_lens_cpu=batch.extend_seq_lens_cpu)
    for layer in range(2):
        model.attend(replayed, layer, requests)
    assert torch.equal(model.tap.take("a", 6), last("a", 6, 4, 2))


def test_a_forward_that_reaches_no_backend_leaves_nothing():
    """A graph of the whole prefill is replayed: metadata, then nothing."""
    model = Model(window=4)
    model.run(("a", 0, 6))
    model.backend.init_forward_metadata(model.batch(("a", 6, 2), ("b", 0, 2)))
    assert model.tap.take("b") is None and model.tap.take("a", 8) is None


def test_only_this_backend_is_tapped_and_calls_go_through_unchanged():
    tap, tapped, other = QueryTap(), Backend(), Backend()
    tap.install(tapped)
    assert "forward_extend" not in vars(other) and "init_forward_metadata" not in vars(other)
    batch = Model().batch(("a", 0, 2))
    assert tapped.init_forward_metadata(batch) == "planned"
    q, k, v, layer = torch.ones(2, HEADS * DIM), object(), object(), layer_of(0)
    assert tapped.forward_extend(q, k, v, layer, batch, False, k_rope=3) == "attended"
    assert tapped.forward_extend(q, k, v, layer, batch, save_kv_cache=False) == "attended"
    assert [c[1:] for c in tapped.calls[1:]] == [(k, v, layer, batch, False, {"k_rope": 3}), (k, v, layer, batch, False, {})]
    assert all(c[0] is q for c in tapped.calls[1:]) and tapped.calls[0] == ("init", batch)


def test_queries_of_any_view_and_dtype():
    """q is often a slice of one tensor with k and v, and may come with its heads apart."""
    tap, backend = QueryTap(window=2), Backend()
    tap.install(backend)
    batch = Model().batch(("a", 0, 3))
    backend.init_forward_metadata(batch)
    both = torch.arange(3 * 20, dtype=torch.bfloat16).reshape(3, 20)
    wanted = both[1:, 2:8].clone().reshape(2, HEADS, DIM)
    backend.forward_extend(both[:, 2:8], None, None, layer_of(0), batch)
    backend.forward_extend(wanted.repeat(2, 1, 1)[:3], None, None, layer_of(1), batch)
    taken = tap.take("a")
    assert taken.dtype == torch.bfloat16 and torch.equal(taken[:, 0], wanted) and torch.equal(taken[:, 1], wanted[[1, 0]])


def test_no_more_prompts_are_held_than_the_limit():
    model = Model(window=4, limit=3)
    for rid in "abcd":
        model.run((rid, 0, 5))
    assert model.tap.take("a") is None and len(model.tap._held) == 3
    model.run(("b", 5, 1))  # b is the newest again
    model.run(("e", 0, 5))
    assert model.tap.take("c") is None
    assert all(model.tap.take(rid) is not None for rid in "bde")
    model.run(*[(rid, 0, 1) for rid in "vwxyz"])
    assert list(model.tap._held) == list("xyz")


def test_nothing_is_kept_alive_but_what_may_be_taken():
    """Without the garbage collector's help: it seldom runs in a server, and this is memory of the accelerator."""
    model, seen = Model(window=4), []
    gc.disable()
    try:
        for chunk in range(6):
            requests = [("a", chunk, 1)]
            batch = model.batch(*requests)
            model.backend.init_forward_metadata(batch)
            q = [weakref.ref(model.attend(batch, layer, requests)) for layer in range(2)]
            model.backend.calls.clear()
            assert [ref() for ref in q] == [None, None], "a whole q lives on"
            seen.append((weakref.ref(model.tap._forward), weakref.ref(model.tap._forward.queries)))
        alive = [forward() is not None or queries() is not None for forward, queries in seen]
        assert alive == [False] * 4 + [True] * 2, "the last one, and the one before it until the next begins"
        model.backend.init_forward_metadata(model.batch(mode="IDLE"))
        assert seen[4][0]() is None and torch.equal(model.tap.take("a"), last("a", 6, 4, 2))
        assert seen[5][0]() is None and seen[5][1]() is None
    finally:
        gc.enable()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_schedule_of_chunks_hits_drops_and_takes(data):
    window, layers = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    model, truth = Model(window=window, layers=layers, padding=data.draw(st.integers(0, 2))), {}
    for _ in range(data.draw(st.integers(1, 12))):
        rids = data.draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4))
        requests = []
        for rid in rids:
            end, n = truth.get(rid, (0, 0))
            prefix = end if data.draw(st.booleans()) else data.draw(st.integers(0, 12))
            new = data.draw(st.integers(1, 8))
            requests.append((rid, prefix, new))
            truth[rid] = (prefix + new, min(window, new + (n if prefix == end else 0)))
        model.run(*requests)
        for rid in data.draw(st.sets(st.sampled_from("abcd"))):
            end, n = truth.pop(rid, (0, 0))
            if data.draw(st.booleans()):
                model.tap.drop(rid)
            elif n:
                assert torch.equal(model.tap.take(rid, end), last(rid, end, n, layers))
            else:
                assert model.tap.take(rid) is None
    for rid, (end, n) in truth.items():
        assert torch.equal(model.tap.take(rid), last(rid, end, n, layers))


@pytest.mark.parametrize("active, mode, prompt, limit, wanted", [
    ("1", "prefill", 200, 199, 200 - WINDOW), ("1", "prefill", 200, 30, 30), ("1", "prefill", WINDOW, WINDOW - 1, 0), ("1", "prefill", 10, 9, 0),
    ("1", "decode", 200, 199, 199), ("0", "prefill", 200, 199, 199)])
def test_a_radix_hit_leaves_the_last_tokens_to_be_computed(monkeypatch, active, mode, prompt, limit, wanted):
    monkeypatch.setenv(config.ACTIVE_ENV, active)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", SimpleNamespace(get_disagg=lambda: SimpleNamespace(disaggregation_mode=mode)))
    req = SimpleNamespace(origin_input_ids=[0] * prompt)
    asked = []
    assert hooks.prefix_limit(lambda *args: asked.append(args) or limit, req, 777) == wanted
    assert asked == [(req, 777)]
