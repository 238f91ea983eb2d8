"""Pages that only a memory node has come back into a prefill host's arena: which, when it pays, and what is left when it fails."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from memory_rig import LAYOUT, RECORD_BYTES, Fleet, in_pool, lives, prompt, stop
from node_rig import FINGERPRINT, SEED, WAIT, Pool, row_of, until
from relay_rig import HELLO, NODES, RECORDS, STRIDE, Local, endpoint, hashes

from prefill_node.pages import PageSource
from prefill_node.publisher import COMMITTED, FAILED, OPEN, OPENING
from prefill_node.restore import Restorer
from transport import fetch, upstream
from transport import messages as m
from transport.errors import IntegrityError, PeerLost, StaleEpoch
from transport.hashing import page_hashes
from transport.layout import ArenaGeometry
from transport.moving import Drop, Ended, Move
from transport.records import HASH_BYTES
from transport.worker_client import WorkerClient

ALWAYS = float("inf")
WELCOME = m.Welcome(epoch="M", control="tcp://m:1", geometry=ArenaGeometry.fit(LAYOUT, 128 * STRIDE), endpoints=(endpoint(size=128 * STRIDE),),
                    planes=("zmq",), lease_seconds=9.0)


def wish(first=0, stop=99, least=1, page_seconds=ALWAYS) -> m.Wish:
    return m.Wish(first, stop, least, page_seconds)


# -- decisions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("here, there, coming, room, expected", [
    ("", "", "", 9, 0), ("0000", "1111", "0000", 9, 4), ("0000", "1101", "0000", 9, 2), ("0010", "1101", "0000", 9, 4), ("0000", "1001", "0110", 9, 4),
    ("0000", "1111", "0000", 3, 3), ("0000", "1111", "0100", 3, 4), ("1100", "0011", "0000", 0, 2), ("0000", "0111", "0000", 9, 0)])
def test_a_run_ends_with_the_first_page_that_cannot_be_had(here, there, coming, room, expected):
    here, there, coming = (np.array([int(c) for c in word], np.int64) for word in (here, there, coming))
    assert fetch.obtainable(here - 1, there == 1, coming == 1, room) == expected


class Home(Local):
    """A local tier with one memory node, whose mover is the test."""

    def __init__(self, nodes=NODES[:1]):
        super().__init__(nodes)
        self.upstream.welcomes = dict.fromkeys(nodes, WELCOME)

    @property
    def moves(self) -> list[Move]:
        return [order for order in self.tier.orders if isinstance(order, Move) and order.targets]

    @property
    def drops(self) -> list[int]:
        return [order.number for order in self.tier.orders if isinstance(order, Drop)]

    def begin(self, fresh=(0, 0, 0, 0, 1), **more) -> m.Opened | None:
        """What the worker was answered by the time that the memory node has answered."""
        assert self.open(**{"pages": len(fresh) - 1, "wish": wish(), **more}) is None
        self.upstream.answer(self.reserved(fresh))
        replies = self.told("W")
        return replies[0] if replies else None

    def ended(self, move: Move | None = None, *, error=None, nbytes=None, seconds=0.1) -> list[m.Reply]:
        """The mover has stopped; what the worker was told."""
        move = move or self.moves[0]
        self.tier.orders = [order for order in self.tier.orders if order.number != move.number]
        size = len(move.targets) // 4 * RECORD_BYTES if nbytes is None else nbytes
        self.tier.moved(Ended(move.number, size, None if error is None else m.failure(error, 0), seconds))
        return self.told("W")

    def here(self, pages: int, salt: int = 0) -> list[int]:
        """Roots that a look-up finds, 0 = none."""
        return m.unpack(self.ask("W", m.Lookup, hashes=hashes(pages, salt), hold=False).roots, "u8").tolist()

    def end(self, room=1, pages=5) -> int:
        """Commits the room; how many pages were moved."""
        before = self.tier.totals["pages_moved"]
        assert self.commit(room=room, pages=pages) is None
        _, _, fields = self.upstream.answer(m.Ok())
        assert isinstance(self.told("W")[0], m.Ok)
        moved = self.tier.totals["pages_moved"] - before
        assert len(fields["sources"]) == 4 * moved
        return moved


def test_what_the_memory_node_has_is_here_when_the_worker_is_answered():
    bench = Home()
    assert bench.begin((0, 0, 0, 0, 1)) is None, "it waits"
    [move] = bench.moves
    assert move.endpoint == WELCOME.endpoints[0] and move.geometry == WELCOME.geometry and move.own_geometry == bench.tier.geometry
    assert m.unpack(move.sources, "u4").tolist() == [50, 51, 52, 53] and m.unpack(move.source_generations, "u8").tolist() == [9] * 4
    assert m.unpack(move.roots, "u8").tolist() == [1000, 1001, 1002, 1003] and m.unpack(move.target_generations, "u8").tolist() == [1] * 4
    now = bench.tier.inventory()
    assert (now["writing"], now["held"], now["holders"], now["fetches"]) == (5, 5, 5, 1) and bench.here(4) == [0] * 4
    [opened] = bench.ended(seconds=0.25)
    assert m.unpack(opened.records, "u4").tolist()[:4] == [m.NOWHERE] * 4 and list(opened.fresh) == [0, 0, 0, 0, 1]
    assert bench.here(4) == m.unpack(opened.roots, "u8").tolist()[:4] == [1000, 1001, 1002, 1003]
    now, totals = bench.tier.inventory(), bench.tier.totals
    assert (now["writing"], now["leased"], now["held"], now["holders"], now["fetches"]) == (1, 4, 5, 5, 0)
    assert (totals["pages_fetched_back"], totals["bytes_fetched_back"], totals["fetch_seconds"]) == (4, 4 * RECORD_BYTES, 0.25)
    assert bench.tier.table.depth[m.unpack(move.targets, "u4")].tolist() == [0, 1, 2, 3] and totals["fetches_failed"] == 0
    assert bench.end() == 1, "the partial page alone"
    assert bench.baseline() and bench.tier.inventory()["cached"] == 4


def test_only_what_is_wished_for_and_can_be_used():
    bench = Home()
    bench.begin((0, 0, 1, 0, 0, 1), wish=wish(first=1, stop=5))
    assert m.unpack(bench.moves[0].sources, "u4").tolist() == [51], "what follows the gap cannot be restored"
    bench.ended()
    assert bench.begin((0, 0, 1, 0, 1), room=2, salt=1, wish=wish(least=3)) is not None and not bench.moves
    assert bench.begin((0, 0, 0, 0, 1), room=3, salt=2, wish=wish(stop=3, least=3)) is None
    assert m.unpack(bench.moves[0].sources, "u4").tolist() == [50, 51, 52]


def test_the_mover_connects_before_there_is_anything_to_fetch():
    bench = Home()
    bench.begin((1, 1))
    [order] = bench.tier.orders
    assert isinstance(order, Move) and order.endpoint == WELCOME.endpoints[0] and (order.sources, order.targets) == (b"", b"")
    bench.tier.moved(Ended(order.number, 0))
    bench.tier.orders.clear()
    bench.begin((1, 1), room=2, salt=1)
    bench.begin((1, 1), room=3, salt=2, wish=None)
    assert bench.tier.orders == [] and bench.tier.inventory()["fetches"] == 0
    bench.upstream.welcomes[NODES[0]] = None
    assert isinstance(bench.begin((1, 1), room=4, salt=3), m.Opened) and bench.tier.totals["fetches_failed"] == 0, "nothing was to be fetched"


@pytest.mark.parametrize("unwanted", [
    None, wish(page_seconds=0.0), wish(page_seconds=-1.0), wish(page_seconds=float("nan")), wish(first=4), wish(first=3, stop=3), wish(first=9), wish(stop=-2), wish(least=9)])
def test_a_worker_that_wishes_for_nothing_is_answered_at_once(unwanted):
    bench = Home()
    assert isinstance(bench.begin(wish=unwanted), m.Opened) and not bench.moves
    assert bench.tier.inventory()["writing"] == 1 and not any(bench.tier.totals[k] for k in ("fetches_failed", "fetches_slower"))
    assert bench.end() == 1 and bench.baseline()


def test_what_is_here_is_kept_and_what_the_memory_node_lacks_is_the_rooms_own():
    bench = Home()
    bench.opened([1, 1, 1, 1])
    bench.end(pages=4)  # pages 0 to 2 are cached here
    assert bench.begin((0, 1, 0, 0, 0, 1), room=2) is None
    assert m.unpack(bench.moves[0].sources, "u4").tolist() == [53, 54]
    now = bench.tier.inventory()
    assert (now["writing"], now["leased"], now["holders"], now["held"]) == (3, 3, 6, 6)
    [opened] = bench.ended()
    assert m.unpack(opened.roots, "u8").tolist() == [1000, 2, 1002, 1003, 1004, 0] and bench.here(5) == [1, 2, 3, 1003, 1004]
    assert bench.end(room=2, pages=6) == 2 and bench.baseline() and bench.tier.inventory()["cached"] == 5


def test_the_slower_way_is_not_taken_but_tried_now_and_then():
    bench = Home()
    assert bench.begin(wish=wish(page_seconds=0.1)) is None, "nothing is known yet"
    bench.ended(seconds=0.8)  # 0.2 a page
    assert isinstance(bench.begin(room=2, salt=1, wish=wish(page_seconds=0.2)), m.Opened) and bench.tier.totals["fetches_slower"] == 1
    assert bench.begin(room=3, salt=2, wish=wish(page_seconds=0.21)) is None
    bench.ended(seconds=0.8)
    bench.tier.disconnect("W")
    bench.ask("W", m.Hello, role="worker", **HELLO)
    bench.upstream.asked.clear()
    bench.now += fetch.PROBE_SECONDS
    assert bench.begin(room=4, salt=3, wish=wish(page_seconds=0.2)) is None, "it is time to measure again"
    bench.ended(seconds=0.04)
    assert bench.tier.fetches.pace.each == pytest.approx((0.8 * 0.81 + 0.8 * 0.9 + 0.04) / (4 * 0.81 + 4 * 0.9 + 4))


@pytest.mark.parametrize("least, expected", [(1, [50, 51, 52]), (3, [50, 51, 52]), (4, None)])
def test_a_small_arena_takes_what_it_can_and_refuses_nobody(least, expected):
    bench = Home()
    bench.opened([1] * 12)
    opened = bench.begin((0, 0, 0, 0, 0, 1), room=2, salt=1, wish=wish(least=least))
    assert bench.tier.totals["evicted"] == 0
    if expected is None:
        assert isinstance(opened, m.Opened) and not bench.moves and bench.tier.inventory()["free"] == 3
        return
    assert m.unpack(bench.moves[0].sources, "u4").tolist() == expected and bench.tier.inventory()["free"] == 0
    assert isinstance(bench.ended()[0], m.Opened)
    assert bench.end(room=2, pages=6) == 1 and bench.end(pages=12) == 12 and bench.baseline()


def test_what_is_here_does_not_make_room_for_what_follows_it():
    bench = Home()
    bench.opened([1] * 8)
    bench.end(pages=8)  # seven are cached
    bench.opened([1] * 9, room=2, salt=1)
    assert bench.begin([0] * 10 + [1], room=3) is not None and not bench.moves, "9 of 16 are held, 7 are this prompt's: none is left"
    assert bench.here(10) == [*range(1, 7), 0, 0, 0, 0], "but one of the seven, for its last page"
    assert bench.tier.totals["fetches_failed"] == 0


def test_what_is_kept_to_be_restored_holds_no_other_prompt_back():
    bench = Home()
    bench.begin([0] * 8 + [1])
    bench.ended()
    reply = bench.opened([1] * 15, room=2, salt=1)
    assert list(reply.fresh) == [1] * 15 and bench.here(8) == [0] * 8
    assert bench.end(pages=9) == 1 and bench.end(room=2, pages=15) == 15 and bench.baseline()


def test_two_prompts_wait_for_one_fetch():
    bench = Home()
    assert bench.begin([0] * 4 + [1]) is None and bench.begin([0] * 6 + [1], room=2) is None
    first, second = bench.moves
    assert [m.unpack(move.sources, "u4").tolist() for move in (first, second)] == [[50, 51, 52, 53], [54, 55]]
    assert bench.ended(second) == [], "the second room wants both"
    assert [reply.seq for reply in bench.ended(first)] == [3, 4]
    assert bench.here(6) == [1000 + k for k in range(6)] and bench.tier.totals["pages_fetched_back"] == 6
    assert bench.end(pages=5) == 1 and bench.tier.inventory()["leased"] == 6, "the other one still keeps them"
    assert bench.end(room=2, pages=7) == 1 and bench.baseline()


def test_a_fetch_ends_with_the_last_room_that_waits_for_it():
    bench = Home()
    bench.begin()
    bench.begin(room=2)
    [move] = bench.moves
    bench.ask("W", m.Abort, room=1, rank=0, reason="left")
    assert not bench.drops
    bench.ask("W", m.Abort, room=2, rank=0, reason="left")
    assert bench.drops == [move.number] and bench.tier.inventory()["writing"] == 4
    bench.told("W")
    bench.upstream.asked.clear()
    assert bench.begin(room=3) is None and len(bench.moves) == 2, "what was dropped is nothing to wait for"
    assert bench.ended(move, nbytes=RECORD_BYTES) == [] and isinstance(bench.ended()[0], m.Opened)
    assert bench.end(room=3) == 1 and bench.baseline()


@pytest.mark.parametrize("page_seconds, seconds", [(0.2, 0.8), (ALWAYS, fetch.FETCH_SECONDS), (100.0, fetch.FETCH_SECONDS)])
@pytest.mark.parametrize("late", ["whole", "partly", "damaged"])
def test_a_prompt_is_not_held_back_longer_than_computing_takes(page_seconds, seconds, late):
    bench = Home()
    assert bench.begin(wish=wish(page_seconds=page_seconds)) is None
    bench.now += seconds - 0.01
    assert bench.tier.tick() <= 0.1 and not bench.told("W")
    bench.now += 0.02
    bench.tier.tick()
    [opened] = bench.told("W")
    assert isinstance(opened, m.Opened) and bench.drops == [bench.moves[0].number] and bench.tier.totals["fetches_failed"] == 1
    assert bench.end() == 1 and bench.tier.inventory()["writing"] == 4 and not bench.baseline(), "the mover may still write"
    assert isinstance(bench.begin(room=2, salt=1), m.Opened), "nothing is fetched for a while"
    bench.end(room=2)
    bench.ended(error=IntegrityError("damaged") if late == "damaged" else None, nbytes=RECORD_BYTES if late == "partly" else None)
    assert bench.baseline() and bench.here(4) == ([1000, 1001, 1002, 1003] if late == "whole" else [0] * 4)
    bench.now += fetch.REST_SECONDS
    slower = isinstance(bench.begin(room=3, salt=2, wish=wish(page_seconds=0.2)), m.Opened)
    assert slower == (late != "whole" or page_seconds != 0.2), "what it has learnt"


@pytest.mark.parametrize("error", [PeerLost("the mover ended"), IntegrityError("damaged")])
def test_a_fetch_that_fails_is_as_if_it_had_not_been_tried(error):
    bench = Home()
    bench.begin()
    bench.begin(room=2)
    before = bench.tier.inventory()["writing"]
    replies = bench.ended(error=error)
    assert [list(reply.fresh) for reply in replies] == [[0, 0, 0, 0, 1]] * 2 and before - bench.tier.inventory()["writing"] == 4
    assert bench.here(4) == [0] * 4 and bench.upstream.refreshed == [NODES[0]] and bench.tier.totals["fetches_failed"] == 2
    assert isinstance(bench.begin(room=3, salt=1), m.Opened), "it rests"
    bench.now += fetch.REST_SECONDS
    assert bench.begin(room=4, salt=2) is None
    bench.ended()
    assert [bench.end(room=room) for room in (1, 2, 3, 4)] == [1, 1, 1, 1] and bench.baseline()


@pytest.mark.parametrize("welcome", [
    None, dict(endpoints=()), dict(endpoints=(endpoint("nixl", 128 * STRIDE),)), dict(endpoints=(endpoint(size=100),)),
    dict(geometry=ArenaGeometry.fit(LAYOUT, 51 * STRIDE))])
def test_a_memory_node_whose_arena_cannot_be_read_costs_nothing(welcome):
    bench = Home()
    fields = {name: getattr(WELCOME, name) for name in WELCOME.__struct_fields__}
    bench.upstream.welcomes[NODES[0]] = None if welcome is None else m.Welcome(**fields | welcome)
    assert isinstance(bench.begin(), m.Opened) and not bench.moves
    assert bench.tier.totals["fetches_failed"] == 1 and bench.upstream.refreshed == [NODES[0]] and bench.end() == 1 and bench.baseline()


@pytest.mark.parametrize("who", ["worker aborts", "worker dies", "reader cancels"])
def test_giving_up_while_pages_come(who):
    bench = Home()
    bench.begin()
    [move] = bench.moves
    if who == "reader cancels":
        bench.ask("R", m.Cancel, room=1, rank=0)
        assert isinstance(bench.ended(move)[0], m.Opened), "the worker goes on, as before it is answered"
        assert isinstance(bench.commit(), m.Ok) and bench.upstream.asked[0][1] is m.Abort and bench.baseline()
        return
    if who == "worker aborts":
        bench.ask("W", m.Abort, room=1, rank=0, reason="the client left")
    else:
        bench.tier.disconnect("W")
    assert [reply.code for reply in bench.told("W")] == ["RoomFailed"] and [asked[1] for asked in bench.upstream.asked] == [m.Abort]
    assert bench.drops == [move.number] and bench.tier.inventory()["rooms"] == 0 and bench.tier.inventory()["writing"] == 4
    assert bench.ended(move, nbytes=0) == [] and bench.baseline() and bench.tier.inventory()["cached"] == 0


def test_another_model_waits_for_the_mover():
    bench = Home()
    bench.begin()
    bench.tier.disconnect("W")
    other = HELLO | dict(fingerprint="0" * 64)
    assert bench.ask("W2", m.Hello, role="worker", **other).code == "LayoutMismatch", "its records would lie where the mover still writes"
    bench.ended(nbytes=0)
    assert isinstance(bench.ask("W2", m.Hello, role="worker", **other), m.Welcome) and bench.tier.inventory()["free"] == RECORDS


@pytest.mark.parametrize("error", [PeerLost("gone"), StaleEpoch("it restarted")])
def test_a_memory_node_that_is_lost_meanwhile_is_replaced_by_the_next(error):
    bench = Home(NODES[:2])
    bench.begin()
    [room] = bench.tier.rooms.values()
    first, second = room.nodes
    bench.tier.node_lost(second, PeerLost("the other one"))
    assert not bench.drops and not bench.upstream.asked
    bench.tier.node_lost(first, error)
    assert bench.drops == [bench.moves[0].number] and bench.tier.inventory()["writing"] == 4 and bench.tier.nodes.is_down(first) == isinstance(error, PeerLost)
    assert bench.upstream.answer(bench.reserved((0, 1, 1, 1, 1)))[0] == second
    [opened] = bench.told("W")
    assert list(opened.fresh) == [0, 1, 1, 1, 1] and not bench.moves[1:], "one try for one question"
    bench.ended(nbytes=0)
    assert bench.end() == 4 and bench.baseline()


def test_without_a_next_memory_node_the_worker_asks_again():
    bench = Home()
    bench.begin()
    bench.tier.node_lost(NODES[0], PeerLost("gone"))
    [refused] = bench.told("W")
    assert refused.code == "CapacityError" and refused.retryable
    bench.ended(nbytes=0)
    assert bench.baseline()


# -- over real sockets --------------------------------------------------------------------------------------------


@pytest.fixture
def fleets(tmp_path, monkeypatch):
    """``fleets(...)`` makes a ``Fleet`` of two prefill nodes; all are closed at the end. Nobody is in a hurry: the machine may be busy."""
    monkeypatch.setattr(fetch, "FETCH_SECONDS", WAIT)
    made = []
    yield lambda **sizes: made.append(Fleet(tmp_path, **{"local": 2, **sizes})) or made[-1]
    for fleet in made:
        fleet.close()


@pytest.fixture
def restorers():
    """``restorers(fleet)`` makes a restorer of the second prefill node, over an empty pool; all are closed at the end."""
    made = []

    def make(fleet: Fleet) -> tuple[Restorer, Pool]:
        pool = Pool(LAYOUT, 64, fill=-1.0)
        hello = dict(node="prefill", rank=0, layout=LAYOUT, fingerprint=FINGERPRINT)
        made.append(Restorer(WorkerClient(fleet.local[1].path), hello, PageSource(pool.k, pool.v, LAYOUT), min_tokens=4))
        return made[-1], pool

    yield make
    for restorer in made:
        restorer.close()


def first_turn(fleet: Fleet, *, tokens: int = 62, salt: int = 0, room: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Through the first prefill node: (token ids, pages of its pool)."""
    ids, pages = prompt(tokens, salt=salt)
    pub = fleet.prefill[0].publish(room, ids, pages)
    assert pub.state == COMMITTED, pub.error
    return ids, pages


def next_turn(fleet: Fleet, room: int, ids: np.ndarray, wanted: m.Wish | None = None):
    """Opens a prompt that begins like ``ids`` at the second prefill node."""
    longer = np.concatenate([ids, np.arange(21) + 10**9 + room])
    return fleet.prefill[1].publisher.publish(room, longer, SEED, wanted or wish())


def finish(fleet: Fleet, pub) -> np.ndarray:
    """Publishes the rest; its pages in the second node's pool."""
    until(lambda: pub.state != OPENING, "opened")
    assert pub.state == OPEN, pub.error
    pages = np.arange(40, 40 + pub.pages)
    fleet.prefill[1].send(pub, pages)
    fleet.prefill[1].publisher.commit(pub, row_of(pub.room))
    until(lambda: pub.state in (COMMITTED, FAILED), "committed")
    assert pub.state == COMMITTED, pub.error
    return pages


def warm_mover(fleet: Fleet, tokens: int = 9) -> int:
    """Has the second node fetch something, so that its mover runs; its pid."""
    ids, _ = first_turn(fleet, tokens=tokens, salt=77, room=999_983)
    finish(fleet, next_turn(fleet, 999_985, ids))
    assert fleet.local[1].totals["pages_fetched_back"] == tokens // 4
    return fleet.local[1].mover_pid


def in_arena(fleet: Fleet, raw: bytes) -> np.ndarray:
    """uint8 [pages, payload_bytes] of these hashes in the second node's arena."""
    tier = fleet.local[1]
    records = tier.call(tier.tier.table.find, [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)])
    assert (records >= 0).all()
    return np.stack([tier.server.arena.bytes[int(at) : int(at) + LAYOUT.payload_bytes] for at in tier.tier.geometry.payload_offsets(records)])


def whole(ids: np.ndarray) -> bytes:
    return page_hashes(SEED, ids, 4)


def test_a_prompt_that_is_new_has_the_mover_started_and_no_more(fleets):
    fleet = fleets()
    ids, _ = prompt(22)
    finish(fleet, next_turn(fleet, 1, ids))
    until(lambda: fleet.local[1].mover_pid and not fleet.local[1].server.mover._running, "it has connected")
    assert fleet.local[1].totals["bytes_fetched_back"] == 0 and fleet.local[1].totals["fetches_failed"] == 0
    fleet.settle()


@pytest.mark.parametrize("planes", [("zmq",), ("nixl", "zmq")])
def test_a_conversation_goes_on_at_the_other_prefill_node(fleets, restorers, planes):
    fleet = fleets(planes=planes)
    ids, source = first_turn(fleet)
    filled = fleet.memory[0].totals["bytes_filled"]
    restorer, pool = restorers(fleet)
    assert restorer.find(whole(ids)) == 0
    restorer.forget()
    pub = next_turn(fleet, 2, ids)
    until(lambda: pub.state != OPENING)
    assert np.array_equal(in_arena(fleet, whole(ids)), in_pool(fleet.prefill[0], source, 62)[:15])
    assert restorer.find(whole(ids)) == 15 and restorer.restore(whole(ids), np.arange(15))
    assert np.array_equal(pool.tokens(np.arange(15), 60), fleet.prefill[0].pool.tokens(source, 60))
    pages = finish(fleet, pub)
    totals = fleet.local[1].totals
    assert fleet.memory[0].totals["bytes_filled"] - filled == (21 - 15) * RECORD_BYTES == totals["bytes_moved"], "nothing of them moves again"
    assert (totals["pages_fetched_back"], totals["bytes_fetched_back"], totals["pages_there"]) == (15, 15 * RECORD_BYTES, 15) and totals["fetch_seconds"] > 0
    reader = fleet.reader(fleet.memory[0].control)
    manifest = reader.wait(2)
    expected = np.concatenate([in_pool(fleet.prefill[0], source, 62)[:15], in_pool(fleet.prefill[1], pages, 83)[15:]])
    assert np.array_equal(reader.read(manifest), expected)
    reader.release(manifest)
    fleet.settle()
    assert fleet.local[1].inventory()["cached"] == 20, "five pages are new, and fifteen"
    assert fleet.local[0].mover_pid is None, "its worker has wished for nothing"


def test_nothing_is_fetched_where_computing_is_faster_or_nothing_was_asked_for(fleets):
    fleet = fleets()
    warm_mover(fleet)
    ids, _ = first_turn(fleet)
    for room, wanted in ((2, wish(page_seconds=1e-9)), (3, wish(page_seconds=0.0)), (4, wish(first=15, stop=15))):
        finish(fleet, next_turn(fleet, room, ids, wanted))
    totals = fleet.local[1].totals
    assert (totals["pages_fetched_back"], totals["fetches_slower"], totals["fetches_failed"]) == (2, 1, 0)
    fleet.settle()


def test_two_prompts_at_once_fetch_their_common_pages_once(fleets):
    fleet = fleets()
    ids, source = first_turn(fleet)
    pubs = [next_turn(fleet, room, ids) for room in (2, 3)]
    until(lambda: all(pub.state == OPEN for pub in pubs))
    assert fleet.local[1].totals["pages_fetched_back"] == 15
    assert np.array_equal(in_arena(fleet, whole(ids)), in_pool(fleet.prefill[0], source, 62)[:15])
    for pub in pubs:
        finish(fleet, pub)
    fleet.settle()


def test_an_arena_with_no_room_for_them_serves_the_prompt_as_it_is(fleets):
    fleet = fleets(local_records=21)
    ids, _ = first_turn(fleet)
    pub = next_turn(fleet, 2, ids, wish(least=15))
    until(lambda: pub.state == OPEN)
    assert fleet.local[1].totals["pages_fetched_back"] == 15, "six for what is new, fifteen for what comes back"
    held = next_turn(fleet, 3, ids + 10**6, wish())  # wants all 21
    until(lambda: fleet.prefill[1].publisher.totals["reserve_retries"] > 2)
    assert held.state == OPENING
    finish(fleet, pub)
    finish(fleet, held)
    blocked = fleet.prefill[1].open(4, np.arange(40) + 10**7, seed=None)
    until(lambda: blocked.state == OPEN)
    finish(fleet, next_turn(fleet, 5, ids, wish(least=15)))
    assert fleet.local[1].totals["pages_fetched_back"] == 15 and fleet.local[1].totals["fetches_failed"] == 0
    fleet.prefill[1].publisher.cancel(blocked, "enough")
    fleet.settle()


def test_a_mover_that_is_killed_costs_only_the_time(fleets, monkeypatch):
    monkeypatch.setattr(fetch, "REST_SECONDS", 0.0)
    fleet = fleets()
    pid = warm_mover(fleet)
    ids, source = first_turn(fleet)
    stop(pid)
    pub = next_turn(fleet, 2, ids)
    until(lambda: fleet.local[1].inventory()["fetches"] == 1)
    assert pub.state == OPENING and fleet.local[1].inventory()["writing"] == 15 + 6
    os.kill(pid, signal.SIGKILL)
    finish(fleet, pub)
    assert fleet.local[1].totals["fetches_failed"] == 1
    fleet.settle()
    finish(fleet, next_turn(fleet, 3, ids))
    assert np.array_equal(in_arena(fleet, whole(ids)), in_pool(fleet.prefill[0], source, 62)[:15]) and fleet.local[1].mover_pid != pid
    fleet.settle()


def test_a_mover_that_hangs_keeps_its_records_and_nobody_waiting(fleets, monkeypatch):
    fleet = fleets()
    pid = warm_mover(fleet)
    monkeypatch.setattr(fetch, "FETCH_SECONDS", 0.2)
    ids, _ = first_turn(fleet)
    stop(pid)
    finish(fleet, next_turn(fleet, 2, ids))
    until(lambda: not fleet.local[1].inventory()["rooms"])
    now = fleet.local[1].inventory()
    assert (now["writing"], now["held"], now["fetches"]) == (15, 15, 1) and fleet.local[1].totals["fetches_failed"] == 1
    os.kill(pid, signal.SIGCONT)
    fleet.settle()
    lives(fleet, 1)


def test_damaged_pages_are_not_taken(fleets):
    fleet = fleets()
    ids, source = first_turn(fleet)
    memory = fleet.memory[0]
    raw = whole(ids)
    [record] = memory.call(memory.tier.table.find, [raw[7 * HASH_BYTES : 8 * HASH_BYTES]])
    memory.server.arena.bytes[int(memory.tier.geometry.payload_offsets(np.array([record]))[0]) + 17] ^= 1
    pub = next_turn(fleet, 2, ids)
    until(lambda: pub.state == OPEN)
    assert fleet.local[1].totals["fetches_failed"] == 1 and fleet.local[1].totals["pages_fetched_back"] == 0
    local = fleet.local[1]
    assert (local.call(local.tier.table.find, [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]) == -1).all()
    finish(fleet, pub)
    fleet.settle()


def test_a_memory_node_that_is_lost_meanwhile(fleets, monkeypatch):
    monkeypatch.setattr(upstream, "SILENCE_SECONDS", 0.4)
    fleet = fleets(memory=2)
    pid = warm_mover(fleet, 262)  # long enough to be placed by the same page as its next turn
    before = {tier.control: tier.totals["bytes_filled"] for tier in fleet.memory}
    ids, _ = first_turn(fleet, tokens=262)
    home = next(tier for tier in fleet.memory if tier.totals["bytes_filled"] > before[tier.control])
    other = next(tier for tier in fleet.memory if tier is not home)
    stop(pid)
    pub = next_turn(fleet, 2, ids)
    until(lambda: fleet.local[1].inventory()["fetches"] == 1)
    home.stop()
    until(lambda: pub.state == OPEN, "the next memory node has none of it")
    assert pub.fresh.all()
    os.kill(pid, signal.SIGCONT)
    finish(fleet, pub)
    assert other.totals["rooms_filled"] >= 1
    fleet.settle(home)


@pytest.mark.parametrize("who", ["worker cancels", "reader cancels", "worker dies"])
def test_whoever_gives_up_while_pages_come_nothing_is_left_on_either_side(fleets, who):
    fleet = fleets()
    local, pid = fleet.local[1], warm_mover(fleet)
    for turn in range(1 if who == "worker dies" else 5):
        ids, _ = first_turn(fleet, salt=turn, room=2 * turn + 1)
        stop(pid)
        pub = next_turn(fleet, 2 * turn + 2, ids)
        until(lambda: local.inventory()["fetches"] == 1)
        if who == "worker cancels":
            fleet.prefill[1].publisher.cancel(pub, "the client left")
            until(lambda: pub.state == FAILED and not local.inventory()["rooms"])
            assert local.inventory()["writing"] == 15
        elif who == "worker dies":
            fleet.prefill[1].close()
            until(lambda: not local.inventory()["rooms"] and not local.inventory()["workers"])
            assert local.inventory()["writing"] == 15
        else:
            fleet.reader(local.control).ask(m.Cancel, room=pub.room, rank=0)
        os.kill(pid, signal.SIGCONT)
        if who == "reader cancels":
            finish(fleet, pub)
        until(local.at_baseline)
    assert local.mover_pid == pid
    fleet.memory[0].expire()
    until(fleet.memory[0].at_baseline)
    if who != "worker dies":
        lives(fleet, 1)


def test_a_data_plane_that_came_back_is_found_again(fleets, monkeypatch):
    monkeypatch.setattr(fetch, "REST_SECONDS", 0.0)
    fleet = fleets(planes=("nixl", "zmq"))
    warm_mover(fleet)
    memory = fleet.memory[0]
    ids, source = first_turn(fleet)
    nixl = memory.server.servers[0]
    before = nixl.endpoint
    os.kill(nixl.pid, signal.SIGKILL)
    until(lambda: nixl.endpoint and nixl.endpoint != before and memory.call(lambda: nixl.endpoint in memory.tier.endpoints), seconds=30)
    finish(fleet, next_turn(fleet, 2, ids))
    assert fleet.local[1].totals["fetches_failed"] == 1, "the endpoint of before"
    finish(fleet, next_turn(fleet, 3, ids))
    assert np.array_equal(in_arena(fleet, whole(ids)), in_pool(fleet.prefill[0], source, 62)[:15])
    fleet.settle()
