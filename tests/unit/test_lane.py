"""Lane pages and their content, against a plain dict of which set holds what where."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decode_node.lane import DenseLane

PAGE, DIM, LAYERS, HEADS = 16, 4, 5, 4
PIECES = np.array([1, 3, 8, 9, 10, 19])  # heads 1 and 3 of layer 0, 0 to 2 of layer 2, 3 of layer 4


def make_lane(*, sets=3, context=90, tokens=200, pieces=PIECES, dtype=torch.float32):
    return DenseLane(pieces, layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page=PAGE, sets=sets, context=context, tokens=tokens, dtype=dtype, device="cpu")


def content(lane, chosen, piece, positions):
    """K and V [2, m, head_dim] that attention finds through the uploaded table."""
    lane.upload()
    slots = lane.table[chosen + 1, positions].long()
    layer, head = divmod(piece, HEADS)
    at = lane.heads(layer).tolist().index(head)
    return torch.stack([lane.keys(layer)[slots, at], lane.values(layer)[slots, at]])


def landed(rng, count, dtype=torch.float32):
    """``count`` pieces as tensors [count, 2, PAGE, DIM] and as the bytes that land."""
    tensor = torch.from_numpy(rng.standard_normal((count, 2, PAGE, DIM)).astype(np.float32)).to(dtype)
    return tensor, tensor.contiguous().view(torch.uint8).reshape(count, -1).numpy()


@st.composite
def actions(draw):
    return draw(st.lists(st.tuples(st.sampled_from(["take", "grow", "give", "upload", "write"]), st.integers(0, 2), st.integers(1, 110)), max_size=40))


@given(actions(), st.integers(0, 9))
def test_sets_never_share_a_slot_and_keep_what_was_written(steps, seed):
    lane, rng = make_lane(), np.random.default_rng(seed)
    held: dict[int, int] = {}
    truth: dict[tuple[int, int, int], torch.Tensor] = {}  # (set, piece, block) -> K and V
    peak = 0
    for action, chosen, tokens in steps:
        pages = min(-(-tokens // PAGE), 6)
        free = 12 - sum(held.values())
        if action == "take" and chosen not in held or action == "grow":
            had = held.get(chosen, 0)
            fits = max(0, pages - had) <= free
            assert (lane.take if action == "take" else lane.grow)(chosen, tokens) == fits
            if fits and max(had, pages):
                held[chosen] = max(had, pages)
        elif action == "give":
            lane.give(chosen)
            held.pop(chosen, None)
            truth = {key: value for key, value in truth.items() if key[0] != chosen}
        elif action == "write" and chosen in held:
            which = rng.choice(LAYERS * HEADS, 8, replace=False)
            blocks = rng.integers(0, held[chosen], 8)
            tensor, data = landed(rng, 8)
            lane.write(chosen, which, blocks, data)
            truth |= {(chosen, int(p), int(b)): t for p, b, t in zip(which, blocks, tensor) if p in PIECES}
        elif action == "upload":
            lane.upload()
        peak = max(peak, sum(held.values()))
        assert (lane.free_pages, lane.used_tokens, lane.peak_tokens) == (12 - sum(held.values()), sum(held.values()) * PAGE, peak * PAGE)
    lane.upload()
    owned = [slot for chosen, pages in held.items() for slot in lane.table[chosen + 1, : pages * PAGE].tolist()]
    assert len(set(owned)) == len(owned) and all(PAGE <= slot < len(lane.kv[0]) for slot in owned)
    for (chosen, piece, block), expected in truth.items():
        assert torch.equal(content(lane, chosen, piece, torch.arange(block * PAGE, (block + 1) * PAGE)), expected)
    for chosen, pages in held.items():
        positions = np.arange(pages * PAGE)
        assert lane.slots(np.array([chosen]), positions).tolist() == lane.table[chosen + 1, : pages * PAGE].tolist()
        assert lane.covered(np.array([chosen])).tolist() == [pages * PAGE]


def test_the_padding_row_and_its_places_are_page_zero():
    lane = make_lane()
    lane.take(0, 90)
    lane.upload()
    assert lane.table.shape == (4, 96) and lane.table.dtype == torch.int32
    assert lane.table[0].tolist() == list(range(PAGE)) * 6
    assert lane.slots(np.array([-1, 0]), np.array([1000, 17])).tolist() == [1000 % PAGE, int(lane.table[1, 17])]


def test_a_whole_record_lands_in_the_lanes_heads():
    lane, rng = make_lane(dtype=torch.bfloat16), np.random.default_rng(1)
    lane.take(1, 40)
    tensor, data = landed(rng, LAYERS * HEADS, torch.bfloat16)
    lane.write_record(1, 2, data.reshape(-1))
    lane.settle()
    for piece in PIECES.tolist():
        assert torch.equal(content(lane, 1, piece, torch.arange(32, 48)), tensor[piece])
        assert not content(lane, 1, piece, torch.arange(32)).any()


def test_pages_given_back_serve_another_set_and_giving_twice_frees_once():
    lane = make_lane(tokens=70)  # four pages
    assert lane.take(0, 60) and not lane.take(1, 1) and lane.grow(0, 64) and not lane.grow(0, 65)
    assert lane.free_pages == 0 and lane.used_tokens == lane.capacity == 64
    lane.upload()
    before = lane.table[1, :64].tolist()
    lane.give(0)
    lane.give(0)
    assert lane.free_pages == 4 and lane.take(1, 64)
    lane.upload()
    assert sorted(lane.table[2, :64].tolist()) == sorted(before)
    with pytest.raises(AssertionError, match="has lane pages already"):
        lane.take(1, 1)


def test_growth_is_uploaded_without_touching_what_is_there():
    lane, rng = make_lane(), np.random.default_rng(2)
    lane.take(2, 20)
    tensor, data = landed(rng, 1)
    lane.write(2, PIECES[3:4], np.array([1]), data)
    lane.upload()
    first = lane.table[3, :32].clone()
    lane.take(0, 50)
    assert lane.grow(2, 33)
    lane.upload()
    assert torch.equal(lane.table[3, :32], first) and len(set(lane.table[3, :48].tolist()) | set(lane.table[1, :64].tolist())) == 48 + 64
    assert torch.equal(content(lane, 2, int(PIECES[3]), torch.arange(16, 32)), tensor[0])


def test_places_outside_the_pages_of_a_set_are_refused():
    lane = make_lane()
    lane.take(0, 32)
    with pytest.raises(AssertionError, match="outgrew"):
        lane.slots(np.array([0]), np.array([32]))
    with pytest.raises(AssertionError, match="block 2 is outside the 2 lane pages of set 0"):
        lane.write(0, PIECES[:1], np.array([2]), landed(np.random.default_rng(0), 1)[1])


def test_sizes():
    lane = make_lane(sets=3, context=90, tokens=200)
    assert lane.token_bytes == 2 * 6 * DIM * 4 and lane.capacity == 192 and lane.layers == (0, 2, 4) and lane.heads(2).tolist() == [0, 1, 2]
    told = DenseLane.bytes(len(PIECES), head_dim=DIM, itemsize=4, page=PAGE, sets=3, context=90, tokens=200)
    assert told == lane.kv.nbytes + lane.table.nbytes


@pytest.mark.parametrize("pieces", [[], [3, 1], [1, 1], [-1, 2], [20]])
def test_pieces_that_are_none_are_refused(pieces):
    with pytest.raises(ValueError, match="lane pieces"):
        make_lane(pieces=np.array(pieces, np.int64))
