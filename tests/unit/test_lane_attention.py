"""The critical heads' attention over the dense lane, on SGLang's own back end, against a softmax written out over true K and V."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from decode_node.lane import DenseLane
from oasis_sglang.cpu import attention as cpu_attention
from oasis_sglang.lane_attention import LaneAttention

LAYERS, KV_HEADS, GROUP, DIM, PAGE = 4, 3, 2, 8, 16
PIECES = np.array([1, 6, 8])  # layer 0: head 1; layer 2: heads 0 and 2
LANE_HEADS = {0: [1], 2: [0, 2]}
SCALING = 0.4


@pytest.fixture(autouse=True)
def cpu_runtime(monkeypatch):
    """The CPU runtime's extend and verify around SGLang's, as its hook installs them."""
    original = TorchNativeAttnBackend.forward_extend
    monkeypatch.setattr(TorchNativeAttnBackend, "forward_extend", lambda *args, **kwargs: cpu_attention.forward_extend(original, *args, **kwargs))


class Rig:
    """Requests with a lane, and what K and V of every (layer, KV head) truly are: ``truth`` by set, [layers, 2, heads, tokens, dim]."""

    def __init__(self, seed=0, pieces=PIECES, sets=4):
        torch.manual_seed(seed)
        self.lane = DenseLane(pieces, layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, page=PAGE, sets=sets, context=200, tokens=640,
                              dtype=torch.float32, device="cpu")
        runner = SimpleNamespace(device="cpu", req_to_token_pool=SimpleNamespace(size=8), token_to_kv_pool_allocator=None)
        self.attention = LaneAttention(runner, self.lane)
        self.layers = [RadixAttention(KV_HEADS * GROUP, DIM, SCALING, KV_HEADS, layer_id=i) for i in range(LAYERS)]
        self.truth, self.length = {}, {}

    def admit(self, chosen, prompt, room=64):
        """Whole blocks arrive piece by piece in any order, the partial page as a record."""
        assert self.lane.take(chosen, prompt + room)
        kv = self.truth[chosen] = torch.zeros(LAYERS, 2, KV_HEADS, 200, DIM)
        kv[:, :, :, :prompt] = torch.randn(LAYERS, 2, KV_HEADS, prompt, DIM)
        self.length[chosen] = prompt
        whole = prompt // PAGE
        records = kv[:, :, :, : (whole + 1) * PAGE].reshape(LAYERS, 2, KV_HEADS, whole + 1, PAGE, DIM).permute(3, 0, 2, 1, 4, 5)
        data = records.contiguous().view(torch.uint8).reshape(whole + 1, LAYERS * KV_HEADS, -1).numpy()
        order = torch.randperm(whole * LAYERS * KV_HEADS).numpy()
        blocks, pieces = np.divmod(order, LAYERS * KV_HEADS)
        self.lane.write(chosen, pieces, blocks, data[blocks, pieces])
        if prompt % PAGE:
            self.lane.write_record(chosen, whole, data[whole].reshape(-1))

    def forward(self, sets, new=1, verify=False):
        """One forward of ``new`` tokens for each of ``sets`` (-1: a request without a lane, 50 tokens long). Yields per layer
        (layer id, q, what the other heads' attention had put out, out)."""
        sets = np.array(sets)
        committed = torch.tensor([self.length.get(s, 50) for s in sets.tolist()])
        lengths = committed if verify else committed + 1
        batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY if verify else ForwardMode.DECODE, batch_size=len(sets), req_pool_indices=torch.arange(1, len(sets) + 1),
            seq_lens=lengths.int(), seq_lens_cpu=lengths, seq_lens_sum=int(lengths.sum()), encoder_lens=None, extend_seq_lens=None,
            out_cache_loc=torch.full((len(sets) * new,), 10**6),
            spec_info=SimpleNamespace(draft_token_num=new, tree_topk=-1, custom_mask=torch.ones(1, dtype=torch.bool)) if verify else None)
        self.attention.begin(batch, sets)
        assert batch.req_pool_indices.tolist() == list(range(1, len(sets) + 1)) and batch.seq_lens_sum == int(lengths.sum()), "the batch itself was changed"
        for layer in self.layers:
            q = torch.randn(len(sets) * new, KV_HEADS * GROUP * DIM)
            k, v = torch.randn(2, len(sets) * new, KV_HEADS, DIM)
            for i, chosen in enumerate(sets.tolist()):
                if chosen >= 0:
                    at = slice(self.length[chosen], self.length[chosen] + new)
                    for which, tensor in enumerate((k, v)):
                        self.truth[chosen][layer.layer_id, which, :, at] = tensor[i * new : (i + 1) * new].transpose(0, 1)
            out = torch.randn_like(q)
            before = out.clone()
            assert self.attention.forward(layer, q, k, v, out) is out
            yield layer.layer_id, q, before, out

    def dense(self, chosen, layer, q_head, q, visible):
        """Attention of one row over the first ``visible`` tokens, in float64."""
        k, v = self.truth[chosen][layer, :, q_head // GROUP, :visible].double()
        weights = torch.softmax(k @ q.double() * SCALING, 0)
        return (weights @ v).float()

    def check(self, sets, new=1, verify=False, accepted=None):
        """Every head of every row of a forward; afterwards ``accepted`` of the new tokens are the request's."""
        for layer, q, before, out in self.forward(sets, new, verify):
            q, before, out = (t.view(len(sets), new, KV_HEADS * GROUP, DIM) for t in (q, before, out))
            for i, chosen in enumerate(sets):
                for row in range(new):
                    for head in range(KV_HEADS * GROUP):
                        if chosen >= 0 and head // GROUP in LANE_HEADS.get(layer, []):
                            expected = self.dense(chosen, layer, head, q[i, row, head], self.length[chosen] + row + 1)
                            torch.testing.assert_close(out[i, row, head], expected, atol=1e-5, rtol=1e-5)
                        else:
                            assert torch.equal(out[i, row, head], before[i, row, head]), (layer, i, row, head)
        for i, chosen in enumerate(sets):
            if chosen >= 0:
                self.length[chosen] += new if accepted is None else accepted[i]


@pytest.mark.parametrize("sets", [[2], [0, 3], [3, -1, 0], [-1, 1]])
def test_decode_steps_read_prompt_and_what_earlier_steps_wrote(sets):
    rig = Rig()
    for chosen in sets:
        if chosen >= 0:
            rig.admit(chosen, [37, 48, 5, 95][chosen])
    for _ in range(18):  # across a page boundary
        rig.check(sets)


@pytest.mark.parametrize("sets", [[1], [0, 2], [-1, 2, -1, 0]])
def test_verified_chains_are_causal_and_rejected_tokens_are_written_over(sets):
    rig = Rig(seed=1)
    for chosen in sets:
        if chosen >= 0:
            rig.admit(chosen, 30 + 18 * chosen)
    rng = np.random.default_rng(0)
    for _ in range(5):
        rig.check(sets, new=4, verify=True, accepted=rng.integers(1, 5, len(sets)))
    rig.check(sets)


def test_a_batch_without_lanes_is_left_alone():
    rig = Rig()
    rig.admit(0, 20)
    before = rig.lane.kv.clone()
    rig.check([-1, -1])
    assert rig.attention.view is None and torch.equal(rig.lane.kv, before)
    rig.check([0, -1])
    rig.check([-1])
    assert rig.attention.view is None


def test_a_set_that_was_another_requests():
    rig = Rig(seed=2)
    rig.admit(1, 90)
    rig.check([1])
    rig.lane.give(1)
    rig.admit(0, 40)
    rig.admit(1, 25)
    for _ in range(8):
        rig.check([1, 0])


def test_growing_between_steps():
    rig = Rig(seed=3)
    rig.admit(0, 31, room=1)
    rig.check([0])
    with pytest.raises(AssertionError, match="outgrew"):
        rig.check([0])
    assert rig.lane.take(2, 100) and rig.lane.grow(0, 34)
    rig.check([0])
    rig.check([0])


@pytest.mark.parametrize("damage", ["swapped heads", "wrong value", "one token fewer"])
@pytest.mark.parametrize("verify", [False, True])
def test_the_reference_sees_damage(damage, verify):
    """What these tests compare with notices a swapped head, one wrong value and a length that is off by one."""
    rig = Rig(seed=4)
    rig.admit(0, 45)
    if damage == "swapped heads":
        rig.lane.kv[:, :, [1, 2]] = rig.lane.kv[:, :, [2, 1]]
    elif damage == "wrong value":
        rig.lane.values(2)[rig.lane.slots(np.array([0]), np.array([3]))] += 1.0
    else:
        begin = rig.attention.begin

        def shorter(batch, sets):
            view = SimpleNamespace(**{**vars(batch), "seq_lens_cpu": batch.seq_lens_cpu - 1})
            begin(view, sets)

        rig.attention.begin = shorter
    with pytest.raises(AssertionError, match="not close"):
        rig.check([0], new=3 if verify else 1, verify=verify)


def test_the_layer_itself_keeps_its_heads():
    rig = Rig(seed=5)
    rig.admit(0, 17)
    rig.check([0])
    assert [(x.tp_q_head_num, x.tp_k_head_num) for x in rig.layers] == [(KV_HEADS * GROUP, KV_HEADS)] * LAYERS
