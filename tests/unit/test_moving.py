"""What the mover's process does with its orders, in this process: every fault of the data plane can be called for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from node_rig import small_layout

from transport import messages as m
from transport import moving
from transport.errors import CapacityError
from transport.integrity import index_rows, piece_digests, roots, verify_index, verify_records
from transport.layout import ArenaGeometry
from transport.moving import READ_SECONDS, Drop, Move, Moves, window_bytes
from transport.planes.loopback import LoopbackPlane, LoopbackServer
from transport.staging import Staging

LAYOUT = small_layout()
RECORD = LAYOUT.payload_bytes + LAYOUT.index_bytes
STRIDE = -(-LAYOUT.payload_bytes // 64) * 64 + -(-LAYOUT.index_bytes // 64) * 64
COUNT = itertools.count()


class Bench:
    """An arena with ``records`` sound records (generation 10 + record), another to move them to, and time as a number."""

    def __init__(self, records: int = 24, windows: int = 4, per_window: int = 3):
        rng, name = np.random.default_rng(5), f"source:{next(COUNT)}"
        self.geometry = ArenaGeometry.fit(LAYOUT, records * STRIDE)
        self.source, self.own = np.zeros(records * STRIDE, np.uint8), np.zeros(records * STRIDE, np.uint8)
        self.payloads = rng.integers(0, 256, (records, LAYOUT.payload_bytes), np.uint8)
        self.summaries = rng.integers(0, 256, (records, LAYOUT.summary_total), np.uint8)
        self.generations = np.arange(records, dtype=np.uint64) + np.uint64(10)
        digests = piece_digests(self.payloads, LAYOUT.pieces)
        self.roots = roots(digests)
        self.index = index_rows(digests, self.summaries, self.generations, LAYOUT)
        self.part(self.source, "payload")[:, : LAYOUT.payload_bytes] = self.payloads
        self.part(self.source, "index")[:, : LAYOUT.index_bytes] = self.index
        self.server = LoopbackServer(name, self.source)
        self.staging = Staging(per_window * RECORD, windows)
        self.ends = []
        self.moves = Moves(self.own, self.staging, lambda kind: LoopbackPlane(f"reader:{next(COUNT)}", self.staging.region), self.ends.append)
        self.now = 0.0

    @property
    def faults(self):
        return self.server.faults

    def part(self, arena: np.ndarray, section: str) -> np.ndarray:
        g = self.geometry
        if section == "payload":
            return arena[: g.num_records * g.payload_stride].reshape(g.num_records, g.payload_stride)
        return arena[g.index_base : g.index_base + g.num_records * g.index_stride].reshape(g.num_records, g.index_stride)

    def order(self, number: int, sources, targets, **changes) -> Move:
        sources, targets = np.array(sources), np.array(targets)
        fields = dict(number=number, room=number, endpoint=self.server.endpoint, layout=LAYOUT, geometry=self.geometry, sources=m.pack(sources, "u4"),
                      source_generations=m.pack(self.generations[sources], "u8"), own_geometry=self.geometry, targets=m.pack(targets, "u4"),
                      target_generations=m.pack(targets + 500, "u8"), roots=m.pack(self.roots[sources], "u8"))
        return Move(**(fields | changes))

    def take(self, *order, **more) -> None:
        self.moves.take(self.order(*order, **more), self.now)

    def step(self, seconds: float = 0.0, times: int = 1) -> None:
        self.now += seconds
        for _ in range(times):
            self.moves.step(self.now)

    def arrived(self, sources, targets) -> bool:
        """Bytes, digests and summaries, under the new generations."""
        sources, targets = np.array(sources), np.array(targets)
        payloads = self.part(self.own, "payload")[targets, : LAYOUT.payload_bytes]
        rows = np.ascontiguousarray(self.part(self.own, "index")[targets, : LAYOUT.index_bytes])
        _, summaries = verify_index(rows, (targets + 500).astype(np.uint64), self.roots[sources], targets, LAYOUT, peer="", room=0)
        verify_records(payloads, self.roots[sources], targets, LAYOUT, peer="", room=0)
        return np.array_equal(payloads, self.payloads[sources]) and np.array_equal(summaries.reshape(len(targets), -1), self.summaries[sources])

    def untouched(self, targets) -> bool:
        return not self.part(self.own, "payload")[targets].any() and not self.part(self.own, "index")[targets].any()

    def at_rest(self) -> bool:
        return not self.moves.busy and not self.moves._jobs and (self.staging.leased, self.staging.quarantined) == (0, 0)


@pytest.fixture
def bench():
    made = []

    def make(**sizes) -> Bench:
        made.append(Bench(**sizes))
        return made[-1]

    yield make
    for one in made:
        one.moves.close()
        one.server.close()


@pytest.mark.parametrize("sources, targets", [([0], [23]), (range(20), range(20)), ([5, 3, 19, 4, 7, 0, 11], [1, 2, 3, 9, 8, 7, 22])])
def test_records_arrive_whole_with_an_index_of_their_own(bench, sources, targets):
    world = bench()
    sources, targets = list(sources), list(targets)
    world.take(7, sources, targets)
    world.step(times=6)
    assert [(e.number, e.error, e.nbytes) for e in world.ends] == [(7, None, len(sources) * RECORD)]
    assert world.arrived(sources, targets) and world.at_rest()
    assert world.untouched([t for t in range(24) if t not in targets]), "and nothing else"


def test_windows_bound_what_is_in_flight_and_jobs_take_turns(bench):
    world = bench(windows=2, per_window=2)
    world.faults.hold = True
    world.take(1, range(0, 12), range(0, 12))
    world.take(2, range(12, 14), range(12, 14))
    world.step()
    assert world.faults.in_flight == 2 and world.staging.free == 0, "one each"
    world.faults.finish()
    world.step()
    assert [e.number for e in world.ends] == [2], "a short one does not wait for a long one"
    world.faults.hold = False
    world.faults.finish()
    world.step(times=12)
    assert [e.number for e in world.ends] == [2, 1] and world.arrived(range(14), range(14)) and world.at_rest()


@pytest.mark.parametrize("where", ["payload", "index", "wire", "generation", "root"])
def test_nothing_that_is_not_what_was_published_reaches_the_arena(bench, where):
    world, more = bench(per_window=8), {}
    if where == "wire":
        world.faults.corrupt = 1
    elif where == "generation":  # the record was freed and written again
        more = dict(source_generations=m.pack(world.generations[:6] + np.uint64(1), "u8"))
    elif where == "root":
        more = dict(roots=m.pack(world.roots[[0, 1, 2, 3, 4, 6]], "u8"))
    else:
        world.part(world.source, where)[4, LAYOUT.payload_bytes - 1 if where == "payload" else LAYOUT.index_bytes - 9] ^= 1
    world.take(1, range(6), range(6), **more)
    world.step(times=3)
    (ended,) = world.ends
    assert ended.error.code == "IntegrityError" and ended.error.room == 1 and ended.error.peer == world.server.endpoint.name
    assert world.untouched(range(24)) and world.at_rest()


def test_a_read_that_comes_after_its_deadline_touches_no_record(bench):
    world = bench(windows=4, per_window=8)
    world.faults.hold = True
    world.take(1, range(8), range(8))
    world.step()
    world.step(READ_SECONDS)
    assert [e.error.code for e in world.ends] == ["DeadlineExceeded"] and world.staging.quarantined == 1
    world.take(2, range(8, 16), range(8))  # the records are another's now
    world.faults.hold = False
    world.step(times=2)
    assert [e.error for e in world.ends[1:]] == [None] and world.arrived(range(8, 16), range(8))
    world.faults.finish()  # late
    world.step()
    assert world.arrived(range(8, 16), range(8)) and world.at_rest(), "and its window is back"


def test_a_move_that_was_dropped_ends_at_once_and_what_is_in_flight_is_forgotten(bench):
    world = bench(windows=4, per_window=2)
    world.faults.hold = True
    world.take(1, range(12), range(12))
    world.step()
    world.moves.take(Drop(1), world.now)
    world.moves.take(Drop(1), world.now)
    world.moves.take(Drop(99), world.now)
    assert [(e.number, e.error) for e in world.ends] == [(1, None)]
    world.faults.hold = False
    world.faults.finish()
    world.step(times=3)
    assert world.untouched(range(24)) and world.at_rest() and len(world.ends) == 1


def test_too_many_reads_that_do_not_end_end_the_process(bench):
    world = bench(windows=4, per_window=1)
    world.faults.hold = True
    for number in range(4):
        world.take(number, [number], [number])
    world.step()
    with pytest.raises(CapacityError, match="do not end"):
        world.step(READ_SECONDS)
    assert [e.error.code for e in world.ends] == ["DeadlineExceeded"] * len(world.ends) and world.staging.quarantined == 3


def test_a_lost_peer_ends_its_moves_and_no_other(bench):
    world, other = bench(windows=6), bench()
    world.faults.hold = other.faults.hold = True
    world.take(1, range(6), range(6))
    world.take(2, range(3), range(10, 13), endpoint=other.server.endpoint)
    world.step()
    world.faults.drop_peer()
    other.faults.hold = False
    other.faults.finish()
    world.step(times=3)
    assert [(e.number, e.error and e.error.code) for e in sorted(world.ends, key=lambda e: e.number)] == [(1, "PeerLost"), (2, None)]
    assert world.untouched(range(10)) and world.arrived(range(3), range(10, 13)) and world.at_rest()
    world.take(3, range(2), range(2))
    assert [e.error.code for e in world.ends if e.number == 3] == ["PeerLost"], "refused when it is ordered"


def test_connections_that_are_not_used_end(bench):
    world = bench()
    world.take(1, [1], [1])
    world.step(times=2)
    (plane,) = world.moves._planes.values()
    assert set(plane._peers) == {world.server.endpoint.name}
    world.step(moving.IDLE_SECONDS)
    assert not plane._peers
    world.take(2, [2], [2])
    world.step(times=2)
    assert world.arrived([1, 2], [1, 2])


def test_a_window_holds_a_record_of_whatever_size():
    assert window_bytes(LAYOUT) == moving.WINDOW_BYTES
    large = small_layout(num_layers=64, kv_heads=64, head_dim=128, block_tokens=16, summary="none", summary_bytes=0)
    assert window_bytes(large) == large.payload_bytes + large.index_bytes > moving.WINDOW_BYTES
