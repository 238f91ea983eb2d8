"""What decode has generated goes to the tier, if both were told so, and the next prompt finds it there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from node_rig import until
from sparse_rig import SUMMARY, Node
from tier_bench import SEED

from decode_node import reuse as reusing
from transport import messages as m
from transport.donation import Donations, refuse
from transport.errors import ProtocolError
from transport.hashing import page_hashes
from transport.integrity import block_checks, piece_digests, verify_index, verify_records
from transport.records import split_hashes


@pytest.fixture
def giving(nodes):
    """A node whose tier takes what is generated; ``accept=False``: it does not."""

    def make(accept: bool = True, **sizes) -> Node:
        node = nodes(keep=True, donate=True, **sizes)
        tier = node.world.tier.tier
        node.world.tier.call(lambda: tier.serve(m.Donate, Donations(tier, node.world.tier.server.arena.bytes).take if accept else refuse))
        return node

    return make


def answered(node: Node, blocks: int = 3):
    totals = node.puller.totals
    until(lambda: totals["blocks_donated"] + totals["blocks_not_donated"] == blocks, "the tier has answered")


@pytest.mark.parametrize("prompt, new", [(400, 60), (100, 40), (5, 60)])
def test_an_answer_is_in_the_tier_as_it_was_in_the_pool(giving, prompt, new):
    node = giving(pages=80)
    req = node.arrive(prompt, new)
    node.admit(req)
    node.run(req)
    tokens = np.array([*req.origin_input_ids, *req.output_ids][:-1])
    hashes, first = split_hashes(page_hashes(SEED, tokens, 16)), prompt // 16
    answered(node, len(hashes) - first)
    assert node.puller.totals["blocks_donated"] == len(hashes) - first > 0
    tier, lay, n = node.world.tier.tier, node.layout, len(tokens) // 16
    records = tier.table.find(hashes)
    assert (records >= 0).all() and tier.table.depth[records].tolist() == list(range(n))
    until(lambda: tier.table.counts()["leased"] == 0, "nobody holds them")
    arena, geometry = node.world.tier.server.arena.bytes, tier.geometry
    offsets = zip(geometry.payload_offsets(records).tolist(), geometry.index_offsets(records).tolist())
    payloads, index = map(np.stack, zip(*[(arena[a : a + lay.payload_bytes], arena[b : b + lay.index_bytes]) for a, b in offsets]))
    about = dict(peer="", room=0)
    verify_records(payloads, tier.table.root[records], records, lay, **about)
    _, summaries = verify_index(index, tier.table.generation[records], tier.table.root[records], records, lay, **about)
    content = req.truth[:, :, : n * 16].reshape(lay.pieces, 2, n, 16, lay.head_dim).permute(2, 0, 1, 3, 4).contiguous()
    assert np.array_equal(payloads, content.view(torch.uint8).reshape(n, -1).numpy())
    assert np.array_equal(summaries, SUMMARY.build(content[:, :, 0]).numpy())
    node.at_baseline()


def test_prefill_publishes_nothing_of_the_answer_again(giving):
    node = giving(pages=80)
    first = node.arrive(400, 60)
    node.admit(first)
    node.run(first)
    answered(node)
    published = node.world.prefill.publisher.totals["pages_published"]
    second = node.arrive(500, 20, after=first)
    assert node.world.prefill.publisher.totals["pages_published"] - published == 32 - 28
    node.admit(second)
    node.run(second)
    node.at_baseline()


def test_a_tier_that_takes_nothing_is_offered_nothing_more(giving):
    node = giving(accept=False, pages=80)
    for round_ in (1, 2):
        req = node.arrive(400, 60)
        node.admit(req)
        node.run(req)
        answered(node, 3 * round_)
        assert node.puller.totals["blocks_not_donated"] == 3 * round_ and node.puller.totals["blocks_donated"] == 0
    assert node.world.tier.tier.totals["refused"] == 1
    node.at_baseline()


def test_what_too_many_wait_for_is_not_offered_and_counted(giving, monkeypatch):
    node = giving(pages=80)
    monkeypatch.setattr(reusing, "OUTSTANDING_BYTES", node.layout.payload_bytes)
    req = node.arrive(400, 60)
    node.admit(req)
    node.run(req)
    answered(node, 1)
    assert node.puller.totals["blocks_donated"] == 1 and node.coordinator.reuse.totals["blocks_not_offered"] == 2
    node.at_baseline()


def test_a_full_tier_keeps_what_is_leased(giving):
    """Every record is held by the prompts of others when the answer comes."""
    node = giving(pages=80, records=60)
    req = node.arrive(400, 60)
    node.admit(req)
    others = [node.arrive(270, 20), node.arrive(270, 20)]
    tier = node.world.tier.tier
    again, _ = node.world.tier.call(lambda: tier.table.reserve(req.pull.hashes, 0))  # its own prompt too
    while req not in node.ended:
        node.step()
    answered(node)
    assert (node.puller.totals["blocks_donated"], node.puller.totals["blocks_not_donated"]) == (0, 3)
    node.world.tier.call(lambda: tier.table.unhold(again))
    for other in others:
        node.admit(other)
    node.run(*others)
    node.at_baseline()


@pytest.mark.parametrize("wrong", [dict(hashes=b""), dict(hashes=bytes(31)), dict(hashes=bytes(64)), dict(depth=-1), dict(depth=2**63), dict(payloads=b""),
                                   dict(summaries=bytes(3)), dict(checks=b""), dict(checks=bytes(7)), dict(checks=bytes(16))])
def test_what_is_not_whole_blocks_is_refused(giving, wrong):
    node = giving()
    req = node.arrive(100, 5)  # a worker has come: the tier has a layout
    tier, lay = node.world.tier.tier, node.layout
    payloads, summaries = np.zeros((1, lay.payload_bytes), np.uint8), np.zeros((1, lay.summary_total), np.uint8)
    right = dict(seq=1, epoch=tier.epoch, depth=0, hashes=bytes(32), payloads=payloads.tobytes(), summaries=summaries.tobytes(),
                 checks=m.pack(block_checks(piece_digests(payloads, lay.pieces), summaries), "u8"))
    donor = next(iter(tier.sessions))
    before = node.world.tier.call(lambda: tier.table.counts())
    take = Donations(tier, node.world.tier.server.arena.bytes).take
    with pytest.raises(ProtocolError):
        node.world.tier.call(lambda: take(donor, m.Donate(**right | wrong)))
    assert node.world.tier.call(lambda: tier.table.counts()) == before
    assert isinstance(node.world.tier.call(lambda: take(donor, m.Donate(**right))), m.Ok)
    node.admit(req)
    node.run(req)
