"""Extend and verify attention against a softmax written out, on stand-ins of SGLang's objects."""

from types import SimpleNamespace

import pytest
import torch

from oasis_sglang.cpu import attention

Q_HEADS, KV_HEADS, DIM = 6, 2, 8
SCALING = 0.3


def reference(q, k, v, visible):
    """Softmax attention, row by row in float64. visible: bool ``[rows, keys]``."""
    out = torch.empty(q.shape[0], Q_HEADS, v.shape[2], dtype=torch.float64)
    for row in range(q.shape[0]):
        keys = [j for j in range(k.shape[0]) if visible[row, j]]
        for head in range(Q_HEADS):
            kv = head // (Q_HEADS // KV_HEADS)
            scores = (k[keys, kv].double() @ q[row, head].double()) * SCALING
            weights = scores.exp() / scores.exp().sum()
            out[row, head] = weights @ v[keys, kv].double()
    return out.float()


def suffix_visible(n, m, among_new=None):
    """The last n of m tokens see the first m - n, and each other causally or as ``among_new`` says."""
    rows = []
    for row in range(n):
        new = [other <= row if among_new is None else bool(among_new[row, other]) for other in range(n)]
        rows.append([True] * (m - n) + new)
    return torch.tensor(rows)


def random_qkv(n, m, v_dim=DIM):
    return torch.randn(n, Q_HEADS, DIM), torch.randn(m, KV_HEADS, DIM), torch.randn(m, KV_HEADS, v_dim)


@pytest.mark.parametrize("block", [4, 256])
@pytest.mark.parametrize("n,m", [(1, 1), (1, 20), (9, 9), (9, 21), (8, 40), (13, 14)])
def test_causal_suffix(monkeypatch, n, m, block):
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    torch.manual_seed(n * m)
    q, k, v = random_qkv(n, m)
    expected = reference(q, k, v, suffix_visible(n, m))
    torch.testing.assert_close(attention.attend(q, k, v, SCALING), expected, atol=1e-5, rtol=1e-5)


def test_tree_rows_see_prefix_and_ancestors_only():
    torch.manual_seed(0)
    n, m = 4, 11
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    q, k, v = random_qkv(n, m, v_dim=5)
    expected = reference(q, k, v, suffix_visible(n, m, tree))
    torch.testing.assert_close(attention.attend(q, k, v, SCALING, tree), expected, atol=1e-5, rtol=1e-5)


class Pool:
    def __init__(self, size):
        self.k, self.v = torch.randn(size, KV_HEADS, DIM), torch.randn(size, KV_HEADS, DIM)

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v

    def set_kv_buffer(self, layer, where, k, v):
        self.k[where.loc] = k.view(-1, KV_HEADS, DIM)
        self.v[where.loc] = v.view(-1, KV_HEADS, DIM)


@pytest.fixture
def sglang_names(monkeypatch):
    """The two names that the hook imports, without importing SGLang for them."""
    import sys
    from enum import Enum

    kind = Enum("AttentionType", "DECODER ENCODER_ONLY")

    def write_loc(loc, swa_loc):
        return SimpleNamespace(loc=loc, swa_loc=swa_loc)

    modules = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.layers": {},
        "sglang.srt.layers.radix_attention": {"AttentionType": kind},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": write_loc},
    }
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[], **content))
    return kind


def make_layer(kind, **changes):
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=Q_HEADS, tp_k_head_num=KV_HEADS, qk_head_dim=DIM, v_head_dim=DIM,
        scaling=SCALING, sliding_window_size=-1, is_cross_attention=False, attn_type=kind.DECODER,
    )  # fmt: skip
    vars(layer).update(changes)
    return layer


def make_batch(new, committed, *, verify=False, spec_info=None):
    """Two requests in rows 3 and 1 of a shuffled table. Returns backend, batch and slots by request."""
    torch.manual_seed(7)
    pool = Pool(64)
    table = torch.zeros(5, 32, dtype=torch.int32)
    slots = [s for s in torch.randperm(64).split(32)]
    rows = [3, 1]
    for row, own in zip(rows, slots):
        table[row] = own
    totals = [c + n for c, n in zip(committed, new)]
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: verify),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(committed if verify else totals),
        extend_seq_lens=None if verify else torch.tensor(new),
        out_cache_loc=torch.cat([s[c:t] for s, c, t in zip(slots, committed, totals)]),
        encoder_lens=None,
        spec_info=spec_info,
    )
    backend = SimpleNamespace(
        token_to_kv_pool=pool, swa_out_cache_loc=None, req_to_token_pool=SimpleNamespace(req_to_token=table)
    )
    return backend, batch, [s[:t] for s, t in zip(slots, totals)]


def run(backend, batch, layer, count, original=None):
    q = torch.randn(count, Q_HEADS * DIM)
    k, v = torch.randn(count, KV_HEADS * DIM), torch.randn(count, KV_HEADS * DIM)
    return q.view(-1, Q_HEADS, DIM), attention.forward_extend(original, backend, q, k, v, layer, batch)


def test_extend_writes_new_kv_and_attends_through_the_table(sglang_names):
    new, committed = [5, 2], [4, 0]
    backend, batch, slots = make_batch(new, committed)
    q, out = run(backend, batch, make_layer(sglang_names), 7)
    assert out.shape == (7, Q_HEADS * DIM)
    start = 0
    for n, c, own in zip(new, committed, slots):
        k, v = backend.token_to_kv_pool.k[own], backend.token_to_kv_pool.v[own]
        expected = reference(q[start : start + n], k, v, suffix_visible(n, c + n))
        torch.testing.assert_close(
            out.view(7, Q_HEADS, DIM)[start : start + n], expected, atol=1e-5, rtol=1e-5
        )
        start += n


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_verify(sglang_names, shape):
    n, committed = 3, [6, 1]
    chain = torch.ones(n, n).tril().bool()
    fork = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    masks = [chain, chain] if shape == "chain" else [fork, chain]
    spec_info = SimpleNamespace(
        draft_token_num=n,
        tree_topk=1 if shape == "chain" else -1,
        custom_mask=None if shape == "chain" else torch.stack(masks).flatten(),
    )
    backend, batch, slots = make_batch([n, n], committed, verify=True, spec_info=spec_info)
    q, out = run(backend, batch, make_layer(sglang_names), 2 * n)
    for i, (c, own, mask) in enumerate(zip(committed, slots, masks)):
        k, v = backend.token_to_kv_pool.k[own], backend.token_to_kv_pool.v[own]
        expected = reference(q[i * n : (i + 1) * n], k, v, suffix_visible(n, c + n, mask))
        got = out.view(2 * n, Q_HEADS, DIM)[i * n : (i + 1) * n]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_mask_over_the_whole_sequence_is_refused():
    spec_info = SimpleNamespace(draft_token_num=2, tree_topk=4, custom_mask=torch.ones(2 * (5 + 2)))
    with pytest.raises(ValueError, match="14 entries, expected 1 requests x 2 x 2"):
        attention.draft_trees(spec_info, 1)


@pytest.mark.parametrize(
    "field,value", [("sliding_window_size", 128), ("is_cross_attention", True), ("attn_type", "ENCODER_ONLY")]
)
def test_other_attention_goes_to_sglang(sglang_names, field, value):
    if field == "attn_type":
        value = sglang_names[value]
    backend, batch, _ = make_batch([2, 1], [0, 0])
    layer = make_layer(sglang_names, **{field: value})
    _, out = run(backend, batch, layer, 3, original=lambda *args, **kwargs: (args[4], kwargs))
    assert out == (layer, {"save_kv_cache": True})


def decode_case(kv_dtype=torch.float32):
    torch.manual_seed(3)
    k_cache, v_cache = torch.randn(40, KV_HEADS, DIM, dtype=kv_dtype), torch.randn(40, KV_HEADS, 5, dtype=kv_dtype)
    table = torch.stack([torch.randperm(40)[:20] for _ in range(4)]).to(torch.int32)
    return torch.randn(3, Q_HEADS, DIM), torch.full((3, Q_HEADS, 5), torch.nan), k_cache, v_cache, table, torch.tensor([2, 0, 3]), torch.tensor([1, 20, 13])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_attends_over_each_requests_own_slots(kv_dtype):
    q, out, k_cache, v_cache, table, rows, lengths = decode_case(kv_dtype)
    assert attention.sdpa_decode(None, None, q, out, k_cache, v_cache, table, rows, lengths, scaling=SCALING, enable_gqa=True) is out
    for i, (row, length) in enumerate(zip(rows, lengths)):
        slots = table[row, :length].long()
        expected = reference(q[i : i + 1], k_cache[slots].float(), v_cache[slots].float(), torch.ones(1, int(length), dtype=torch.bool))
        torch.testing.assert_close(out[i : i + 1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("more", [{"is_cross_attn": True}, {"encoder_lens": torch.tensor([1, 1, 1])}, {"sliding_window_size": 4}])
def test_other_kinds_of_decode_attention_are_sglangs(more):
    asked = []
    attention.sdpa_decode(lambda *args, **kwargs: asked.append(kwargs), "backend", *decode_case(), scaling=SCALING, **more)
    assert len(asked) == 1 and {name: asked[0][name] for name in more} == more


def test_decode_as_sglang_calls_it():
    """SGLang's own method, with ours around its inner part, gives what it gives alone."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    q, out, k_cache, _, table, rows, lengths = decode_case()
    v_cache = torch.randn(40, KV_HEADS, DIM)
    theirs, ours = torch.empty(3, Q_HEADS, DIM), torch.empty(3, Q_HEADS, DIM)
    original = TorchNativeAttnBackend._run_sdpa_forward_decode
    backend = object.__new__(TorchNativeAttnBackend)
    original(backend, q, theirs, k_cache, v_cache, table, rows, lengths, None, scaling=SCALING, enable_gqa=True, causal=False)
    attention.sdpa_decode(original, backend, q, ours, k_cache, v_cache, table, rows, lengths, None, scaling=SCALING, enable_gqa=True, causal=False)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
