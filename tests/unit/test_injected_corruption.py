"""Damage on every way by which a peer's bytes reach attention: read again once, then an error by name, and never used.

The rigs know the true bytes. All that a pool, a host cache, a table of summaries or an arena is given is compared with them, also
when the request fails in the end.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from damage_rig import KINDS, DamagingPlane
from node_rig import until
from sparse_rig import SUMMARY, Node
from test_moving import LAYOUT as MOVED
from test_moving import Bench as MoveBench
from test_restore import Rig, answer, hashes_of

from decode_node.pages import PageSink
from transport import messages as m
from transport.donation import Donations
from transport.errors import IntegrityError
from transport.hashing import page_hashes
from transport.integrity import block_checks, piece_digests
from transport.records import HASH_BYTES, split_hashes

ALWAYS = 1 << 30


class Watch:
    """Reads of ``node`` go through ``plane``. What lands of them and is used must be in ``true``; ``used`` counts it."""

    def __init__(self, node: Node, monkeypatch):
        self.node, self.used, self.true, self.summaries = node, 0, set(), []
        reader, pool, sets = node.puller.reader, node.coordinator.pieces, node.sets
        self.plane = reader.plane = DamagingPlane(reader.plane, reader.staging.region)
        self._arrive = node.arrive
        for owner, name, index in ((node.cache, "insert", (0, 2)), (pool, "write", (0, 2))):
            monkeypatch.setattr(owner, name, self._guarded(getattr(owner, name), *index))
        scatter, summarise = PageSink.scatter, sets.summarise

        def scatters(sink, payloads, pages):
            self._check(np.tile(np.arange(node.layout.pieces), len(payloads)), payloads.reshape(-1, node.layout.piece_bytes))
            return scatter(sink, payloads, pages)

        def summarises(numbers, summaries):
            if threading.current_thread().name == "oasis-puller":
                self.used += len(summaries)
                assert all(any(np.array_equal(one, true) for true in self.summaries) for one in summaries), "a damaged index was used"
            return summarise(numbers, summaries)

        monkeypatch.setattr(PageSink, "scatter", scatters)
        monkeypatch.setattr(sets, "summarise", summarises)

    def _guarded(self, work, pieces_at: int, data_at: int):
        def guarded(*args, **more):
            if threading.current_thread().name == "oasis-puller":  # others write what this node has generated
                self._check(args[pieces_at], args[data_at])
            return work(*args, **more)

        return guarded

    def _check(self, pieces: np.ndarray, data: np.ndarray) -> None:
        self.used += len(pieces)
        assert all((int(piece), row.tobytes()) in self.true for piece, row in zip(pieces, data)), "a damaged piece was used"

    def arrive(self, prompt: int, new: int):
        node, page = self.node, self.node.page
        req = self._arrive(prompt, new)
        padded = torch.zeros((node.layout.pieces, 2, -(-prompt // page) * page, node.layout.head_dim))
        padded[:, :, :prompt] = req.truth[:, :, :prompt]
        blocks = padded.unflatten(2, (-1, page)).transpose(1, 2).contiguous()
        self.true |= {(s, row.tobytes()) for s, rows in enumerate(blocks) for row in rows.flatten(1).view(torch.uint8).numpy()}
        self.summaries += list(SUMMARY.build(blocks[:, :, 0]).transpose(0, 1).numpy())
        return req

    def order(self, damage: str, count: int, path: str) -> None:
        geometry = self.node.world.tier.tier.geometry
        index = path == "summaries"
        stride = geometry.index_stride if index else geometry.payload_stride
        self.plane.order(damage, count, lambda batch: (int(batch.remote.min()) >= geometry.index_base) == index, stride)


PATHS = {"summaries": (400, {}), "pieces": (400, {}), "partial_page": (11, {}), "records": (64, dict(keep=True)), "on_demand": (400, {})}
"""Prompt tokens, and what the node is told, so that reads of the payload section are of that phase alone."""


def admitted(node, watch, req, path, damage, count):
    if path == "on_demand":
        node.admit(req)
        watch.order(damage, count, path)
        return
    watch.order(damage, count, path)
    node.loop()


@pytest.mark.parametrize("damage", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_a_damaged_read_is_read_again_and_the_request_is_as_if_nothing_had_been(nodes, monkeypatch, path, damage):
    prompt, about = PATHS[path]
    node = nodes(**about)
    watch = Watch(node, monkeypatch)
    req = watch.arrive(prompt, 12)
    admitted(node, watch, req, path, damage, 1)
    node.run(req)
    totals = node.puller.totals
    assert (watch.plane.damaged, totals["reads_damaged"], totals["read_failures"]) == (1, 1, 1)
    assert req.finished_reason == "length" and req.pull.error is None and watch.used and req.pull.bytes_by_phase[path]
    node.at_baseline()


@pytest.mark.parametrize("damage", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_what_stays_damaged_is_never_used_and_the_request_ends_by_name(nodes, monkeypatch, path, damage):
    prompt, about = PATHS[path]
    node = nodes(**about)
    watch = Watch(node, monkeypatch)
    req = watch.arrive(prompt, 30)
    admitted(node, watch, req, path, damage, ALWAYS)
    until(lambda: node.loop() or req.pull.state == "failed", "given up")
    assert isinstance(req.pull.error, IntegrityError) and req.pull.error.room == req.pull.room and "tier" in req.pull.error.peer
    assert 2 <= node.puller.totals["reads_damaged"] <= watch.plane.damaged and not node.puller.totals["internal_errors"]
    assert path == "on_demand" or req.pull.bytes_by_phase[path] == 0, "none of it was accepted"
    watch.plane.count = 0
    node.run(req)
    node.at_baseline()


@pytest.mark.parametrize("damage", KINDS)
@pytest.mark.parametrize("section", ["payload", "index"])
def test_a_damaged_move_seals_nothing(section, damage):
    """To a memory node, and back from it: both are the mover's."""
    world = MoveBench(windows=4, per_window=8)
    made = []
    make = world.moves._make_plane

    def damaging(kind):
        made.append(DamagingPlane(make(kind), world.staging.region))
        # The read of a window is its payloads, then its indexes.
        made[0].order(damage, 1, stride=world.geometry.payload_stride, at=8 * MOVED.payload_bytes + 3 if section == "index" else 3)
        return made[0]

    world.moves._make_plane = damaging
    world.take(1, range(8), range(8))
    world.step(times=3)
    (ended,) = world.ends
    assert made[0].damaged == 1 and ended.error.code == "IntegrityError" and world.untouched(range(24)) and world.at_rest()
    world.take(2, range(8), range(8))
    world.step(times=3)
    assert world.ends[1].error is None and world.arrived(range(8), range(8)), "the second time"
    world.moves.close()
    world.server.close()


@pytest.mark.parametrize("damage", KINDS)
def test_a_damaged_record_is_not_restored(tmp_path, damage):
    rig = Rig(tmp_path)
    try:
        ids, _ = rig.publish(1, 40)
        raw = hashes_of(ids)
        records = m.unpack(rig.restorer._ask(raw, hold=False).records, "u4").astype(np.int64)
        rows, _ = rig.tier.tier.geometry.rows(rig.tier.server.arena.bytes)
        size = rig.layout.payload_bytes
        if damage == "flipped":
            rows[records[4], 33] ^= 4
        elif damage == "truncated":
            rows[records[4], size - size // 8 : size] = 0
        else:
            rows[records[4], :size] = rows[records[5], :size]
        assert rig.restorer.find(raw) == 10 and not rig.restorer.restore(raw, np.arange(10))
        assert rig.untouched(np.arange(10)), "one batch: all of it or nothing"
        assert (rig.totals["restore_failures"], rig.totals["restores"], rig.leases()) == (1, 0, 0) and answer(rig, raw) == 0
        assert len(raw) == 10 * HASH_BYTES
    finally:
        rig.close()


@pytest.mark.parametrize("field", ["payloads", "summaries", "checks"])
@pytest.mark.parametrize("damage", KINDS)
def test_a_damaged_donation_is_not_kept(nodes, field, damage):
    node = nodes(keep=True, donate=True, pages=80)
    tier, totals = node.world.tier.tier, node.puller.totals
    node.world.tier.call(lambda: tier.serve(m.Donate, Donations(tier, node.world.tier.server.arena.bytes).take))
    req = node.arrive(400, 60)
    link, spoilt = req.pull.link, []
    request = link.request

    def requests(make, fields, callback, *, deadline):
        if make is m.Donate:
            raw = bytearray(fields[field])
            if damage == "flipped":
                raw[len(raw) // 2] ^= 1
            elif damage == "truncated":
                raw[-7:] = bytes(7)
            else:
                size = len(raw) // (len(fields["hashes"]) // HASH_BYTES)
                raw[:size], raw[size : 2 * size] = raw[size : 2 * size], raw[:size]
            assert bytes(raw) != fields[field]
            spoilt.append(field)
            fields = {**fields, field: bytes(raw)}
        return request(make, fields, callback, deadline=deadline)

    link.request = requests
    node.admit(req)
    node.run(req)
    until(lambda: totals["blocks_donated"] + totals["blocks_not_donated"] == 3, "the tier has answered")
    assert spoilt == [field] and (totals["blocks_donated"], totals["blocks_not_donated"]) == (0, 3)
    hashes = split_hashes(page_hashes(req.pull.manifest.seed, np.array([*req.origin_input_ids, *req.output_ids][:-1]), node.page))
    assert (tier.table.find(hashes) >= 0).tolist() == [True] * 25 + [False] * (len(hashes) - 25)
    assert tier.totals["refused"] == 1 and tier.totals["pages_donated"] == tier.totals["internal_errors"] == 0
    node.at_baseline()


def test_a_blocks_checksum_covers_bytes_and_summaries_and_their_places():
    rng = np.random.default_rng(1)
    payloads, summaries = rng.integers(0, 256, (3, MOVED.payload_bytes), np.uint8), rng.integers(0, 256, (3, MOVED.summary_total), np.uint8)
    good = block_checks(piece_digests(payloads, MOVED.pieces), summaries)
    assert len(set(good.tolist())) == 3
    for array in (payloads, summaries):
        for row in range(3):
            for column in range(0, array.shape[1], 13):
                array[row, column] ^= 1
                assert (block_checks(piece_digests(payloads, MOVED.pieces), summaries) != good).tolist() == [k == row for k in range(3)]
                array[row, column] ^= 1
    assert (block_checks(piece_digests(payloads, MOVED.pieces), summaries[[1, 2, 0]]) != good).all()
