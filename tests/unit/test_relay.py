"""The two tiers' decisions without a socket: a local tier whose memory nodes are the test, and a memory node whose mover is."""

from __future__ import annotations

import pytest
from node_rig import row_of
from relay_rig import HELLO, LAYOUT, LIMITS, NODES, RECORDS, SEED, STRIDE, Bench, Local, endpoint, hashes

from transport import messages as m
from transport import relay
from transport.dataplane import Endpoint
from transport.errors import DeadlineExceeded, IntegrityError, LayoutMismatch, OasisError, PeerLost, StaleEpoch
from transport.fill import MemoryTier
from transport.layout import ArenaGeometry
from transport.memory_nodes import PROBE_SECONDS
from transport.moving import Drop, Ended, Move


def order(bench: Local) -> list[str]:
    return [room.nodes for room in bench.tier.rooms.values()][0]


# -- the local tier: opening --------------------------------------------------------------------------------------


def test_records_are_taken_only_for_what_the_memory_node_lacks():
    bench = Local()
    reply = bench.opened([0, 1, 0, 1, 1])
    records = m.unpack(reply.records, "u4").tolist()
    assert records[0] == records[2] == m.NOWHERE and sorted(records[k] for k in (1, 3, 4)) == [0, 1, 2]
    assert list(reply.fresh) == [0, 1, 0, 1, 1] and m.unpack(reply.roots, "u8").tolist() == [1000, 0, 1002, 0, 0]
    assert m.unpack(reply.generations, "u8").tolist() == [0, 1, 0, 1, 1]
    assert bench.tier.inventory()["writing"] == 3 and bench.tier.totals["pages_there"] == 2
    assert bench.committed() == m.Ok(seq=bench.seq)
    assert bench.baseline() and bench.tier.inventory()["cached"] == 2


def test_what_is_cached_here_but_not_there_is_not_written_again():
    bench = Local()
    bench.opened()
    bench.committed()
    reply = bench.opened([0, 1, 1, 0, 1], room=2)
    assert list(reply.fresh) == [0, 0, 0, 0, 1]
    assert m.unpack(reply.roots, "u8").tolist() == [1000, 2, 3, 1003, 0], "each from where it is"
    bench.commit(room=2)
    _, make, fields = bench.upstream.answer(m.Ok())
    assert make is m.Fill and m.unpack(fields["sources"], "u4").tolist() == [m.unpack(reply.records, "u4")[k] for k in (1, 2, 4)]
    assert bench.baseline()


def test_a_conversations_node_is_asked_first_and_the_next_ones_in_its_order():
    bench = Local()
    bench.open()
    first, second, third = order(bench)
    assert [first, second, third] == bench.tier.nodes.order(hashes(4)[-32:])
    assert bench.upstream.answer(PeerLost("gone"))[0] == first
    assert bench.tier.nodes.is_down(first)
    assert bench.upstream.answer(StaleEpoch("restarted"))[0] == second
    assert not bench.tier.nodes.is_down(second), "it lives"
    assert bench.upstream.answer(DeadlineExceeded("silent"))[0] == third
    (reply,) = bench.told("W")
    assert reply.code == "CapacityError" and reply.retryable and all(node in reply.limit for node in NODES)
    assert bench.baseline() and not bench.upstream.asked
    bench.open()
    assert order(bench) == [second], "the others are passed over"


def test_nodes_that_are_down_are_asked_again_and_come_back():
    bench = Local(NODES[:1])
    bench.open()
    bench.upstream.answer(PeerLost("gone"))
    bench.told("W")
    bench.open(room=2)
    assert bench.told("W")[0].code == "CapacityError" and not bench.upstream.asked
    bench.tier.tick()
    assert not bench.upstream.asked
    for answer in (PeerLost("still"), LayoutMismatch("but it is up")):
        bench.now += PROBE_SECONDS
        bench.tier.tick()
        assert bench.upstream.answer(answer)[1] is m.Renew
    bench.open(room=3)
    assert bench.upstream.asked[0][1] is m.Open


def test_a_refusal_is_the_workers_and_the_next_node_is_not_asked():
    bench = Local()
    bench.open()
    bench.upstream.answer(LayoutMismatch("other model", field="fingerprint"))
    assert bench.told("W")[0].code == "LayoutMismatch" and not bench.upstream.asked and bench.baseline()


@pytest.mark.parametrize("reply", [
    m.Ok(), m.Opened(records=b"", generations=b"", roots=bytes(40), fresh=bytes(4)), m.Opened(records=b"", generations=b"", roots=bytes(32), fresh=bytes(5)),
    m.Opened(records=b"", generations=b"", roots=bytes(40), fresh=bytes([1, 1, 1, 1, 0]))])
def test_a_memory_node_that_makes_no_sense_is_not_believed(reply):
    bench = Local()
    bench.open()
    bench.upstream.answer(reply)
    assert bench.told("W")[0].code == "ProtocolError" and bench.baseline()


def test_when_there_is_no_room_here_nothing_stays_reserved_there():
    bench = Local()
    bench.opened([1] * 12)
    bench.open(room=2, salt=1, pages=7)
    node = order(bench)
    bench.upstream.answer(bench.reserved([1] * 8))
    (reply,) = bench.told("W")
    assert reply.code == "CapacityError" and reply.retryable and reply.room == 2
    (told,) = bench.upstream.asked
    assert told[1] is m.Abort and told[2]["room"] == 2 and node
    assert bench.tier.inventory()["rooms"] == 1


def test_a_reader_that_cancelled_is_remembered_over_a_refusal():
    bench = Local()
    bench.ask("R", m.Cancel, room=1, rank=0)
    bench.open()
    bench.upstream.answer(LayoutMismatch("no"))
    assert bench.told("W")[0].code == "LayoutMismatch"
    assert bench.ask("R", m.Await, room=1, rank=0, seconds=1.0).code == "RoomFailed"
    bench.opened()
    assert isinstance(bench.commit(), m.Ok) and bench.upstream.asked[0][1] is m.Abort and bench.baseline()


# -- the local tier: moving ---------------------------------------------------------------------------------------


def test_readers_are_sent_on_once_the_memory_node_has_it_all():
    bench = Local()
    bench.ask("R", m.Await, room=1, rank=0, seconds=100.0)
    bench.opened()
    node = order(bench)[0]
    assert bench.commit() is None and not bench.told("R") and not bench.told("W"), "not before"
    address, make, fields = bench.upstream.answer(m.Ok())
    assert (address, make) == (node, m.Fill) and fields["geometry"] == bench.tier.geometry and fields["endpoints"] == bench.tier.endpoints
    assert fields["metadata"] == row_of(1) and m.unpack(fields["roots"], "u8").tolist() == [1, 2, 3, 4, 5]
    assert bench.told("R") == [m.Moved(seq=3, control=bench.upstream.control(node))] and isinstance(bench.told("W")[0], m.Ok)
    assert bench.ask("R", m.Await, room=1, rank=0, seconds=1.0).control == bench.upstream.control(node)
    assert bench.tier.inventory()["redirects"] == 1
    bench.now += LIMITS.room_seconds
    bench.tier.tick()
    assert bench.tier.inventory()["redirects"] == 0 and bench.baseline()


def test_a_move_that_failed_is_tried_once_more_with_the_data_planes_of_then():
    bench = Local()
    bench.opened()
    bench.commit()
    bench.upstream.answer(PeerLost("the data plane ended"))
    assert not bench.told("W") and not bench.upstream.asked
    bench.tier.endpoints = ()
    bench.now += relay.RETRY_SECONDS
    bench.tier.tick()
    assert not bench.upstream.asked, "there is nothing to read from yet"
    bench.tier.endpoints = (endpoint("nixl"),)
    bench.tier.tick()
    assert bench.upstream.asked[0][2]["endpoints"] == (endpoint("nixl"),)
    bench.upstream.answer(m.Ok())
    assert isinstance(bench.told("W")[0], m.Ok) and bench.tier.totals["moves_retried"] == 1 and bench.tier.totals["moves_failed"] == 0 and bench.baseline()


def test_the_second_failure_is_the_commits():
    bench = Local()
    bench.ask("R", m.Await, room=1, rank=0, seconds=100.0)
    bench.opened()
    bench.commit()
    bench.upstream.answer(IntegrityError("damaged"))
    bench.now += relay.RETRY_SECONDS
    bench.tier.tick()
    bench.upstream.answer(IntegrityError("damaged"))
    assert bench.told("W")[0].code == "IntegrityError" and bench.told("R")[0].code == "RoomFailed"
    assert bench.upstream.answer(m.Ok())[1] is m.Abort, "the memory node gives its part up"
    assert bench.baseline() and bench.tier.totals["moves_failed"] == 1
    assert bench.tier.inventory()["cached"] == 0, "the next prompt that begins so finds no damaged page"


def test_data_planes_that_do_not_come_back_end_the_wait():
    bench = Local()
    bench.opened()
    bench.commit()
    bench.upstream.answer(PeerLost("gone"))
    bench.tier.endpoints = ()
    bench.now += relay.RETRY_SECONDS + relay.ASK_SECONDS
    bench.tier.tick()
    assert bench.upstream.answer(PeerLost("no data plane in common"))[1] is m.Fill
    assert bench.told("W")[0].code == "PeerLost"


def test_a_connection_that_ends_takes_its_rooms_along_and_no_others():
    bench = Local()
    for room in range(1, 9):
        bench.opened([1, 1], room=room, salt=room)
    homes = {key[0]: room.nodes[0] for key, room in bench.tier.rooms.items()}
    assert len(set(homes.values())) > 1
    gone = homes[1]
    bench.tier.node_lost(gone, StaleEpoch("it restarted"))
    for room, home in homes.items():
        reply = bench.commit(room=room, pages=2)
        assert (reply.code if home == gone else reply) == ("StaleEpoch" if home == gone else None)
    assert all(address != gone for address, *_ in bench.upstream.asked), "it knows nothing of them"


def test_a_move_in_flight_fails_with_the_connection_and_is_not_tried_again():
    bench = Local()
    bench.opened()
    bench.commit()
    bench.tier.node_lost(order(bench)[0], DeadlineExceeded("silent"))
    bench.upstream.answer(DeadlineExceeded("silent"))
    assert bench.told("W")[0].code == "DeadlineExceeded" and bench.baseline() and not bench.upstream.asked


def test_a_move_that_waits_to_be_tried_again_does_not_outlive_the_connection():
    bench = Local()
    bench.opened()
    bench.commit()
    bench.upstream.answer(PeerLost("the source ended"))
    bench.tier.node_lost(order(bench)[0], StaleEpoch("it restarted"))
    bench.tier.tick()
    assert bench.told("W")[0].code == "StaleEpoch" and bench.baseline() and not bench.upstream.asked


# -- the local tier: giving up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["opening", "open", "filling", "waiting to be tried again"])
@pytest.mark.parametrize("who", ["worker aborts", "worker dies", "reader cancels"])
def test_giving_up_is_told_to_the_memory_node_and_answered_once(state, who):
    bench = Local()
    if state == "opening":
        bench.open()
    else:
        bench.opened()
    if state in ("filling", "waiting to be tried again"):
        bench.commit()
    if state == "waiting to be tried again":
        bench.upstream.answer(PeerLost("the source ended"))
    pending, waits = list(bench.upstream.asked), state != "open"
    if who == "worker aborts":
        bench.ask("W", m.Abort, room=1, rank=0, reason="the client left")
    elif who == "worker dies":
        bench.tier.disconnect("W")
    else:
        bench.ask("R", m.Cancel, room=1, rank=0)
    goes_on = (who == "worker dies" and state in ("filling", "waiting to be tried again")) or (who == "reader cancels" and state in ("opening", "open"))
    if goes_on:
        assert bench.upstream.asked == pending and bench.tier.inventory()["rooms"] == 1
        return
    assert [asked[1] for asked in bench.upstream.asked[len(pending):]] == [m.Abort], "after what it gives up"
    answers = bench.told("W")
    assert [getattr(a, "code", "Ok") for a in answers] == ((["Ok"] if who == "reader cancels" else ["RoomFailed"]) if waits else [])
    assert bench.baseline()
    for _ in pending:
        bench.upstream.answer(bench.reserved([1] * 5) if state == "opening" else PeerLost("aborted"))
    assert not bench.told("W") and bench.baseline()
    assert [asked[1] for asked in bench.upstream.asked] == [m.Abort]


def test_a_room_that_was_committed_there_while_it_was_given_up_here_is_cancelled_there():
    bench = Local()
    bench.opened()
    bench.commit()
    bench.ask("W", m.Abort, room=1, rank=0, reason="the client left")
    bench.upstream.answer(m.Ok())
    assert [asked[1] for asked in bench.upstream.asked] == [m.Abort, m.Cancel]


def test_a_reader_that_cancels_a_room_which_has_moved_cancels_it_there():
    bench = Local()
    bench.opened()
    bench.committed()
    bench.ask("R", m.Cancel, room=1, rank=0)
    assert [asked[1:3] for asked in bench.upstream.asked] == [(m.Cancel, dict(room=1, rank=0))]
    assert bench.tier.inventory()["redirects"] == 0


def test_a_room_number_is_free_again_once_its_reader_was_sent_on():
    bench = Local()
    bench.opened()
    bench.committed()
    assert bench.open().code == "DuplicateRoom"
    bench.ask("R", m.Await, room=1, rank=0, seconds=1.0)
    assert bench.open() is None
    assert bench.ask("R", m.Await, room=1, rank=0, seconds=1.0) is None, "the old one is not named any more"


def test_another_model_ends_the_connections():
    bench = Local()
    bench.tier.disconnect("W")
    assert isinstance(bench.ask("W2", m.Hello, role="worker", **HELLO), m.Welcome) and bench.upstream.resets == 0
    bench.tier.disconnect("W2")
    assert isinstance(bench.ask("W3", m.Hello, role="worker", **HELLO | dict(fingerprint="0" * 64)), m.Welcome) and bench.upstream.resets == 1


# -- the memory node ----------------------------------------------------------------------------------------------


class Memory(Bench):
    def __init__(self):
        super().__init__(MemoryTier)
        assert isinstance(self.hello("T"), m.Welcome)
        self.ask("R", m.Hello, role="reader", **HELLO)
        self.geometry = ArenaGeometry.fit(LAYOUT, RECORDS * STRIDE)

    def hello(self, session, control="tcp://local:1"):
        return self.ask(session, m.Hello, role="tier", control=control, **HELLO)

    def open(self, room=1, pages=2, session="T"):
        reply = self.ask(session, m.Open, room=room, rank=0, seed=SEED, hashes=hashes(pages), private=1)
        assert isinstance(reply, m.Opened), reply
        return reply

    def fill(self, room=1, pages=3, fresh=3, session="T", **changes):
        fields = dict(room=room, rank=0, prompt_tokens=4 * pages - 2, roots=m.pack(range(1, pages + 1), "u8"), ranking=b"", metadata=row_of(room),
                      sources=m.pack(range(7, 7 + fresh), "u4"), generations=m.pack([5] * fresh, "u8"), geometry=self.geometry, endpoints=(endpoint(),))
        return self.ask(session, m.Fill, **(fields | changes))

    def ended(self, error: OasisError | None = None, nbytes: int = 100):
        """The mover's answer to its oldest move."""
        move = next(order for order in self.tier.orders if isinstance(order, Move))
        self.tier.orders.remove(move)
        self.tier.moved(Ended(move.number, nbytes, None if error is None else m.failure(error, 0)))
        return move


def test_a_room_is_filled_and_then_like_any_other():
    bench = Memory()
    opened = bench.open()
    bench.ask("R", m.Await, room=1, rank=0, seconds=100.0)
    assert bench.fill() is None and not bench.told("R")
    seq = bench.seq
    move = bench.ended()
    assert m.unpack(move.targets, "u4").tolist() == m.unpack(opened.records, "u4").tolist() and m.unpack(move.sources, "u4").tolist() == [7, 8, 9]
    assert move.roots == m.pack([1, 2, 3], "u8") and move.target_generations == opened.generations and move.source_generations == m.pack([5] * 3, "u8")
    assert bench.told("T") == [m.Ok(seq=seq)]
    (manifest,) = bench.told("R")
    assert (manifest.epoch, manifest.roots, manifest.records) == ("E", m.pack([1, 2, 3], "u8"), opened.records)
    bench.ask("R", m.Release, leases=m.pack([manifest.lease], "u8"))
    assert bench.baseline() and bench.tier.totals["bytes_filled"] == 100


def test_only_fresh_pages_are_moved_and_none_is_no_move():
    bench = Memory()
    bench.open()
    bench.fill()
    bench.ended()
    bench.open(room=2)
    assert bench.fill(room=2, fresh=3).code == "ProtocolError", "one source per fresh page"
    assert bench.fill(room=2, fresh=1) is None and m.unpack(bench.ended().targets, "u4").size == 1
    reply = bench.ask("T", m.Open, room=3, rank=0, seed=SEED, hashes=hashes(2), private=0)
    assert list(reply.fresh) == [0, 0]
    assert isinstance(bench.fill(room=3, pages=2, fresh=0, prompt_tokens=8), m.Ok) and not bench.tier.orders
    assert bench.tier.rooms[3, 0].manifest.roots == m.pack([1, 2], "u8")


@pytest.mark.parametrize("changes, code", [
    (dict(roots=bytes(16)), "ProtocolError"), (dict(prompt_tokens=50), "ProtocolError"), (dict(metadata=(b"",)), "ProtocolError"),
    (dict(sources=bytes(11)), "ProtocolError"), (dict(generations=bytes(16)), "ProtocolError"), (dict(sources=m.pack([1, 2, RECORDS], "u4")), "BoundsError"),
    (dict(geometry=ArenaGeometry(RECORDS * STRIDE, 1 << 30, 768, 320, 768 << 30)), "BoundsError"), (dict(geometry=ArenaGeometry(1 << 20, 4, 1, 1, 4)), "BoundsError"),
    (dict(endpoints=(endpoint(size=100),)), "BoundsError"), (dict(endpoints=()), "PeerLost"), (dict(endpoints=(endpoint("nixl"),)), "PeerLost"),
    (dict(endpoints=(Endpoint("zmq", "source", "", 4096, 0, b"x", b"y"),)), "IntegrityError")])
def test_what_a_tier_says_is_checked_before_anything_is_read(changes, code):
    bench = Memory()
    bench.open()
    assert bench.fill(**changes).code == code and not bench.tier.orders
    assert bench.fill() is None, "the room is still open"


def test_a_room_is_filled_by_its_own_tier_once_at_a_time():
    bench = Memory()
    bench.hello("T2", "tcp://other:1")
    bench.open()
    assert bench.fill(session="T2").code == "ProtocolError" and bench.fill(room=9).code == "ProtocolError"
    assert bench.fill() is None and bench.fill().code == "ProtocolError"
    bench.ended()
    assert bench.fill().code == "ProtocolError", "it is committed"


def test_a_worker_does_not_fill():
    bench = Memory()
    bench.ask("W", m.Hello, role="worker", **HELLO)
    bench.open(session="W")
    assert bench.fill(session="W").code == "ProtocolError"


def test_after_a_failed_move_the_room_is_open_for_another():
    bench = Memory()
    bench.open()
    bench.fill()
    bench.ended(IntegrityError("damaged", peer="source"))
    (reply,) = bench.told("T")
    assert reply.code == "IntegrityError" and reply.peer == "source" and bench.tier.inventory()["writing"] == 3
    assert bench.fill() is None
    bench.ended()
    assert isinstance(bench.told("T")[0], m.Ok) and bench.tier.totals["fills_failed"] == 1


@pytest.mark.parametrize("end", ["abort", "silence", "another connection"])
def test_records_come_back_only_when_the_mover_has_let_go_of_them(end):
    bench = Memory()
    bench.ask("R", m.Await, room=1, rank=0, seconds=100.0)
    bench.open()
    bench.fill()
    seq = bench.seq
    if end == "abort":
        bench.ask("T", m.Abort, room=1, rank=0, reason="gone")
        assert [r for r in bench.told("T") if r.seq == seq][0].code == "RoomFailed"
    elif end == "silence":
        bench.now += LIMITS.lease_seconds
        bench.tier.tick()
        assert "T" not in bench.tier.sessions
    else:
        bench.hello("T again")
        assert "T" not in bench.tier.sessions
    assert bench.told("R")[0].code == ("RoomFailed" if end == "abort" else "PeerLost")
    assert isinstance(bench.tier.orders[-1], Drop) and bench.tier.inventory()["rooms"] == 0
    now = bench.tier.inventory()
    assert (now["writing"], now["held"], now["holders"], now["moves"]) == (3, 3, 3, 1)
    bench.ended()
    assert bench.baseline() and bench.tier.inventory()["cached"] == 0, "nothing of it was sealed"


def test_a_tier_that_pings_is_not_silent_and_another_tiers_hello_is_not_its():
    bench = Memory()
    bench.open()
    for _ in range(5):
        bench.now += LIMITS.lease_seconds * 0.9
        bench.ask("T", m.Renew, leases=b"")
        bench.tier.tick()
    bench.hello("T2", "tcp://other:1")
    assert bench.hello("T").epoch == "E", "said again on the same connection it changes nothing"
    assert bench.tier.inventory()["rooms"] == 1 and bench.tier.inventory()["tiers"] == 2


def test_what_was_committed_outlives_its_tier():
    bench = Memory()
    bench.open()
    bench.fill()
    bench.ended()
    bench.tier.disconnect("T")
    assert isinstance(bench.ask("R", m.Await, room=1, rank=0, seconds=1.0), m.Manifest)


def test_a_cancelled_room_is_dropped_when_it_has_been_filled():
    bench = Memory()
    bench.open()
    bench.fill()
    bench.ask("R", m.Cancel, room=1, rank=0)
    bench.ended()
    assert isinstance(bench.told("T")[0], m.Ok) and bench.baseline()


def test_another_model_is_refused_while_a_tier_is_connected():
    bench = Memory()
    assert bench.ask("T2", m.Hello, role="tier", **HELLO | dict(fingerprint="0" * 64)).code == "LayoutMismatch"
    bench.tier.disconnect("T")
    assert isinstance(bench.ask("T2", m.Hello, role="tier", **HELLO | dict(fingerprint="0" * 64)), m.Welcome)
