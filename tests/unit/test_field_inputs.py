"""Inputs from the field that other tests do not have whole: a publication that is given up half-way, layouts byte by byte, bytes by phase."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from node_rig import until

from prefill_node import publisher as publishing
from transport.errors import PeerLost, RoomFailed
from transport.integrity import index_rows, piece_digests
from transport.layout import ArenaGeometry, KVLayout
from transport.tier import TierLimits


@pytest.mark.parametrize("asked", ["before", "after"])
@pytest.mark.parametrize("end", ["abort", "death"])
def test_a_prompt_of_which_six_pages_of_ten_were_published_is_never_admitted(worlds, asked, end):
    world = worlds(tier=dict(records=16, limits=TierLimits(lease_seconds=2.0, grace_seconds=0.2, room_seconds=60.0)))  # so long it knows why
    publisher, noticed = world.prefill.publisher, threading.Event()
    ids, pages = world.prompt(40)
    pull = world.decode.pull(1) if asked == "before" else None
    pub = world.prefill.open(1, ids)
    until(lambda: pub.state == publishing.OPEN)
    publisher.send(pub, pages[:6], 0, 24, None)
    until(lambda: publisher.totals["pages_published"] == 6)
    assert world.tier.inventory()["writing"] == 10
    if pull is not None:
        until(lambda: pull.state == "awaiting")
    if end == "abort":
        publisher.cancel(pub, "the client left")
    else:
        publisher._inbox.put((noticed.wait,))  # a dead worker does not come back and give its room up
        publisher.client._socket.shutdown(2)
    until(lambda: world.tier.inventory()["rooms"] == 0, "the tier knows")
    pull = pull or world.decode.pull(1)
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, RoomFailed if end == "abort" else PeerLost) and pull.error.room == 1
    assert pull.manifest is None and not world.decode.rows and world.decode.plane.reads == 0
    noticed.set()
    until(lambda: publisher.totals["reattached"] == (end == "death"), "attached again")
    world.settle()
    now = world.tier.inventory()
    assert now["free"] == 16 and now["cached"] == 0, "what was written of it is nobody's cache"
    again = world.prefill.publish(2, ids, pages)
    assert again.state == publishing.COMMITTED and again.fresh.all()
    assert world.pull_into(2, np.arange(10)).state == "done" and world.arrived(pages, np.arange(10), 40)
    world.settle()


SHAPES = [dict(), dict(kv_heads=1), dict(kv_heads=7, head_dim=5), dict(num_layers=1, head_dim=3, itemsize=2), dict(block_tokens=16), dict(block_tokens=64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padding", [(0, 0, 0), (40, 8, 0), (0, 200, 4096)], ids=["packed", "unequal strides", "a gap between"])
def test_pieces_of_any_sound_geometry_lie_where_a_reference_says(shape, padding):
    """Odd head counts, pages of 16 and 64, strides that are no multiple of anything: byte for byte, computed with Python's integers."""
    fields = dict(num_layers=2, kv_heads=3, head_dim=4, block_tokens=4, dtype="x", itemsize=4, tp_size=1, summary="s", summary_bytes=6, metadata_lens=(8,))
    layout, records = KVLayout(**fields | shape), 5
    payload, index = layout.payload_bytes + padding[0], layout.index_bytes + padding[1]
    base = records * payload + padding[2]
    geometry = ArenaGeometry(base + records * index, records, payload, index, base)
    geometry.require_sound(layout, geometry.size, peer="p")
    rng = np.random.default_rng(2)
    kv = rng.integers(0, 256, (records, layout.num_layers, layout.kv_heads, layout.piece_bytes), np.uint8)
    summaries = rng.integers(0, 256, (records, layout.summary_total), np.uint8)
    arena = np.full(geometry.size, 255, np.uint8)
    payloads, indexes = geometry.rows(arena)
    payloads[:, : layout.payload_bytes] = kv.reshape(records, -1)
    rows = index_rows(piece_digests(kv.reshape(records, -1), layout.pieces), summaries, np.arange(1, 6, dtype=np.uint64), layout)
    indexes[:, : layout.index_bytes] = rows
    raw = arena.tobytes()
    for record in range(records):
        at = base + record * index
        assert raw[at : at + layout.index_bytes] == rows[record].tobytes() and geometry.index_offsets(np.array([record])).tolist() == [at]
        for layer in range(layout.num_layers):
            for head in range(layout.kv_heads):
                at = record * payload + (layer * layout.kv_heads + head) * layout.piece_bytes
                piece = np.array([layer * layout.kv_heads + head])
                assert geometry.piece_offsets(np.array([record]), piece, layout).tolist() == [at]
                assert raw[at : at + layout.piece_bytes] == kv[record, layer, head].tobytes()


def test_bytes_of_working_sets_are_counted_exactly_by_phase_and_request(nodes):
    """Three requests, what they pull while they decode too: the reports, the totals and the meter around the data plane agree."""
    node = nodes(pages=60, keep=False)
    lay, sizes = node.layout, (400, 90, 250)
    reqs = [node.arrive(size, 12) for size in sizes]
    node.admit(*reqs)
    node.run(*reqs)
    until(lambda: len(node.puller.reports) == 3 and not node.puller.live)
    reports = [node.puller.reports[req.rid] for req in reqs]
    phases = ("summaries", "pieces", "partial_page", "on_demand", "records")
    for size, report in zip(sizes, reports):
        spent, whole = report["lifetime_bytes_by_phase"], size // node.page
        if report["admitted_bytes_by_phase"]["summaries"]:
            assert spent["summaries"] == whole * lay.index_bytes and spent["records"] == 0
            assert spent["pieces"] == min(whole, 6) * lay.payload_bytes and spent["on_demand"] % lay.piece_bytes == 0
        else:
            assert spent["records"] == whole * lay.payload_bytes and spent["on_demand"] == 0
        assert spent["partial_page"] == (size % node.page > 0) * lay.payload_bytes
        assert report["admitted_bytes"] == sum(report["admitted_bytes_by_phase"].values())
    by_phase = {phase: sum(r["lifetime_bytes_by_phase"][phase] for r in reports) for phase in phases}
    assert by_phase == {phase: node.puller.totals[f"bytes_{phase}"] for phase in phases} and by_phase["on_demand"] > 0
    assert sum(by_phase.values()) == sum(node.world.decode.plane.landed.values()) == sum(node.world.decode.plane.requested.values())
    node.at_baseline()
