"""Local tiers in front of memory nodes, over real sockets: what is moved, where it is found, what is left when things go wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
from memory_rig import LAYOUT, RECORD_BYTES, SHORT, Fleet, NodeTier, in_pool, lives, prompt, stop, warm
from node_rig import FINGERPRINT, SEED, Prefill, row_of, until

from prefill_node.publisher import COMMITTED, FAILED, OPEN, OPENING
from transport import messages as m
from transport import upstream
from transport.errors import CapacityError, DeadlineExceeded, DuplicateRoom, IntegrityError, LayoutMismatch, PeerLost, ProtocolError, RoomFailed
from transport.hashing import page_hashes
from transport.worker_client import WorkerClient

KILLABLE = """
import sys
from transport.server import TierOptions, serve
from transport.tier import TierLimits
serve(TierOptions(local=sys.argv[1], listen=sys.argv[2], arena_bytes=1 << 20, planes=("zmq",), memory_nodes=sys.argv[3],
                  limits=TierLimits(1.5, 0.2, 1.5)))
"""


@pytest.fixture
def fleets(tmp_path):
    """``fleets(local=1, memory=1)`` makes a ``Fleet``; all are closed at the end."""
    made = []
    yield lambda **sizes: made.append(Fleet(tmp_path, **sizes)) or made[-1]
    for fleet in made:
        fleet.close()


@pytest.fixture
def undo():
    """``undo(x)`` is ``x``, closed at the end."""
    made = []
    yield lambda one: made.append(one) or one
    for one in reversed(made):
        one.close()


# -- what is moved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 4, 22, 200])
def test_a_reader_is_sent_to_the_memory_node_and_finds_there_what_was_written(fleets, tokens):
    fleet = fleets()
    warm(fleet, fleet.memory[0])  # a reader that waits longer than its lease for the mover's start is taken for dead
    before = fleet.memory[0].totals["bytes_filled"], fleet.local[0].totals["bytes_moved"]
    ids, pages = prompt(tokens)
    waiting = fleet.reader(fleet.local[0].control)
    assert waiting.welcome.memory_nodes == (fleet.memory[0].control,)
    waiting.send(m.Await, room=1, rank=0, seconds=10.0)
    pub = fleet.prefill[0].publish(1, ids, pages, chunk_pages=3)
    assert pub.state == COMMITTED, pub.error
    assert waiting.receive() == m.Moved(seq=2, control=fleet.memory[0].control), "the one that waited"
    assert waiting.wait(1) == m.Moved(seq=3, control=fleet.memory[0].control), "one that comes later"
    reader = fleet.reader(fleet.memory[0].control)
    manifest = reader.wait(1)
    assert (manifest.epoch, manifest.room, manifest.prompt_tokens, manifest.metadata) == (fleet.memory[0].server.epoch, 1, tokens, row_of(1))
    assert manifest.seed == SEED and manifest.hashes == page_hashes(SEED, ids, 4)
    assert np.array_equal(reader.read(manifest), in_pool(fleet.prefill[0], pages, tokens))
    moved = len(pages) * RECORD_BYTES
    assert (fleet.memory[0].totals["bytes_filled"] - before[0], fleet.local[0].totals["bytes_moved"] - before[1]) == (moved, moved)
    reader.release(manifest)
    fleet.settle()
    assert fleet.memory[0].inventory()["cached"] == fleet.local[0].inventory()["cached"] == tokens // 4 + 1, "and the first prompt's page"


def test_the_index_that_was_moved_is_sound_under_the_memory_nodes_generations(fleets):
    from transport.integrity import verify_index

    fleet = fleets(memory_records=8)
    for room in (1, 2, 3):  # so that generations differ between the two arenas
        ids, pages = prompt(22, salt=room)
        assert fleet.prefill[0].publish(room, ids, pages).state == COMMITTED
        reader = fleet.reader(fleet.memory[0].control)
        manifest = reader.wait(room)
        if room < 3:
            reader.release(manifest)
    memory, pub_index = fleet.memory[0], fleet.local[0].server.arena.bytes
    records, generations, roots = m.unpack(manifest.records, "u4"), m.unpack(manifest.generations, "u8"), m.unpack(manifest.roots, "u8")
    assert (generations > 1).any()
    geometry = memory.tier.geometry
    rows = np.stack([memory.server.arena.bytes[int(at) : int(at) + LAYOUT.index_bytes] for at in geometry.index_offsets(records)])
    digests, summaries = verify_index(rows, generations, roots, records, LAYOUT, peer="", room=3)
    with pytest.raises(IntegrityError):
        verify_index(rows, generations + np.uint64(1), roots, records, LAYOUT, peer="", room=3)
    assert summaries.any() and pub_index.any()


def test_conversations_spread_and_their_turns_stay_together(fleets):
    fleet = fleets(local=2, memory=2, local_records=256, memory_records=1024)
    homes = {}
    for talk in range(8):
        for turn, tokens in enumerate((262, 270)):
            which, room = (talk + turn) % 2, 10 * talk + turn + 1
            ids, pages = prompt(tokens, salt=talk + 1)
            pages = pages[::-1]  # a page of a prompt lies where it lay in the turn before
            before = {tier.control: tier.totals["bytes_filled"] for tier in fleet.memory}
            pub = fleet.prefill[which].publish(room, ids, pages)
            assert pub.state == COMMITTED, pub.error
            moved = fleet.reader(fleet.local[which].control).wait(room)
            reader = fleet.reader(moved.control)
            manifest = reader.wait(room)
            assert np.array_equal(reader.read(manifest), in_pool(fleet.prefill[which], pages, tokens))
            reader.release(manifest)
            homes.setdefault(talk, set()).add(moved.control)
            grown = {c: t.totals["bytes_filled"] - before[c] for t in fleet.memory for c in [t.control]}
            pages_moved = 66 if turn == 0 else 3
            assert grown == {c: pages_moved * RECORD_BYTES * (c == moved.control) for c in grown}
    assert all(len(home) == 1 for home in homes.values()), "both turns, from either prefill node"
    assert len(set.union(*homes.values())) == 2, "both memory nodes are used"
    assert sum(tier.totals["rooms_filled"] for tier in fleet.memory) == 16
    fleet.settle()


def test_what_the_memory_node_has_is_neither_written_nor_moved_again(fleets):
    fleet = fleets(local=2)
    ids, pages = prompt(22)
    first = fleet.prefill[0].publish(1, ids, pages)
    filled = fleet.memory[0].totals["bytes_filled"]
    second = fleet.prefill[1].publish(2, ids, pages + 30)  # another node, and other pages of its pool
    assert first.state == second.state == COMMITTED
    assert second.copied_bytes == RECORD_BYTES and second.fresh.tolist() == [False] * 5 + [True], "the partial page only"
    assert (second.records[:5] == m.NOWHERE).all() and second.roots[:5].tolist() == first.roots[:5].tolist()
    assert fleet.memory[0].totals["bytes_filled"] - filled == RECORD_BYTES
    assert fleet.local[1].totals["pages_there"] == 5 and fleet.local[1].inventory()["cached"] == 0
    reader = fleet.reader(fleet.memory[0].control)
    one, two = reader.wait(1), reader.wait(2)
    assert m.unpack(one.records, "u4")[:5].tolist() == m.unpack(two.records, "u4")[:5].tolist()
    assert np.array_equal(reader.read(two)[:5], in_pool(fleet.prefill[0], pages, 22)[:5])
    for manifest in (one, two):
        reader.release(manifest)
    fleet.settle()


def test_what_only_the_local_cache_has_is_moved_but_not_written(fleets):
    fleet = fleets(memory_records=6)
    ids, pages = prompt(20)
    assert fleet.prefill[0].publish(1, ids, pages).state == COMMITTED
    other, _ = prompt(24, salt=5)
    reader = fleet.reader(fleet.memory[0].control)
    reader.release(reader.wait(1))
    assert fleet.prefill[0].publish(2, other, np.arange(6)).state == COMMITTED  # pushes the first out of the memory node
    reader.release(reader.wait(2))
    again = fleet.prefill[0].publish(3, ids, pages)
    assert again.state == COMMITTED and not again.fresh.any() and again.copied_bytes == 0
    manifest = reader.wait(3)
    assert np.array_equal(reader.read(manifest), in_pool(fleet.prefill[0], pages, 20))
    assert fleet.memory[0].totals["bytes_filled"] == (5 + 6 + 5) * RECORD_BYTES
    reader.release(manifest)
    fleet.settle()


def test_a_small_local_arena_serves_many_prompts_and_one_too_large_is_refused_by_name(fleets):
    fleet = fleets(local_records=8)
    for room in range(1, 9):
        ids, pages = prompt(22, salt=room)
        assert fleet.prefill[0].publish(room, ids, pages).state == COMMITTED
    pub = fleet.prefill[0].open(99, np.arange(36) + 10**8)
    until(lambda: pub.state == FAILED)
    assert isinstance(pub.error, CapacityError) and not pub.error.retryable and pub.error.limit == "9 of 8 records"
    fleet.settle()


def test_over_nixl(fleets):
    fleet = fleets(planes=("nixl", "zmq"))
    ids, pages = prompt(61)
    pub = fleet.prefill[0].publish(1, ids, pages)
    assert pub.state == COMMITTED, pub.error
    reader = fleet.reader(fleet.memory[0].control)
    manifest = reader.wait(1)
    assert reader.welcome.endpoints[0].kind == "nixl"
    assert np.array_equal(reader.read(manifest), in_pool(fleet.prefill[0], pages, 61))
    reader.release(manifest)
    fleet.settle()
    mover = open(f"/proc/{fleet.memory[0].mover_pid}/maps").read()
    assert "nixl" in mover.lower()


# -- back-pressure ------------------------------------------------------------------------------------------------


def test_a_full_memory_node_holds_prompts_back_before_they_are_computed(fleets):
    fleet = fleets(memory_records=8)
    ids, pages = prompt(24)
    assert fleet.prefill[0].publish(1, ids, pages, seed=None).state == COMMITTED
    reader = fleet.reader(fleet.memory[0].control)
    held = reader.wait(1)
    second = fleet.prefill[0].open(2, ids, seed=None)
    until(lambda: fleet.prefill[0].publisher.totals["reserve_retries"] > 2, "asked again")
    assert second.state == OPENING and fleet.local[0].inventory()["writing"] == 0
    reader.release(held)
    until(lambda: second.state == OPEN, "room was made")
    fleet.prefill[0].publisher.cancel(second, "enough")
    fleet.settle()


def test_a_full_local_arena_holds_prompts_back_and_reserves_nothing_for_them(fleets):
    fleet = fleets(local_records=8)
    first = fleet.prefill[0].open(1, np.arange(24), seed=None)
    until(lambda: first.state == OPEN)
    second = fleet.prefill[0].open(2, np.arange(24) + 1000, seed=None)
    until(lambda: fleet.prefill[0].publisher.totals["reserve_retries"] > 2, "asked again")
    third = fleet.prefill[0].open(3, np.arange(8) + 2000, seed=None)
    until(lambda: third.state == OPEN, "smaller ones pass")
    fleet.prefill[0].publisher.cancel(first, "done here")
    until(lambda: second.state == OPEN)
    for pub in (second, third):
        fleet.prefill[0].publisher.cancel(pub, "done here")
    fleet.settle()


# -- the local tier is lost ---------------------------------------------------------------------------------------


def test_the_loss_of_the_prefill_host_after_the_commit_is_harmless(fleets, undo, tmp_path):
    fleet = fleets(local=0, limits=SHORT)
    path = str(tmp_path / "killed.sock")
    process = subprocess.Popen([sys.executable, "-c", KILLABLE, path, "127.0.0.1:0", fleet.memory[0].control], stderr=subprocess.DEVNULL)
    try:
        client = undo(WorkerClient(path))
        until(lambda: attached(client), "it serves", 30)
        prefill = undo(Prefill(path, pages=128))
        ids, pages = prompt(61)
        assert prefill.publish(1, ids, pages).state == COMMITTED
        half = prefill.open(2, ids + 5000)
        until(lambda: half.state == OPEN)
    finally:
        process.kill()
        process.wait()
    reader = fleet.reader(fleet.memory[0].control)
    manifest = reader.wait(1)
    assert np.array_equal(reader.read(manifest), in_pool(prefill, pages, 61))
    reader.release(manifest)
    with pytest.raises(PeerLost, match="died before the commit"):
        reader.wait(2)
    fleet.settle()


def attached(client: WorkerClient):
    try:
        return client.attach(node="test", rank=9, layout=LAYOUT, fingerprint=FINGERPRINT)
    except PeerLost:
        time.sleep(0.05)


def test_a_local_tier_lost_while_its_room_is_moved_leaves_nothing(fleets):
    fleet = fleets(limits=SHORT)
    memory = fleet.memory[0]
    pid = warm(fleet, memory)
    stop(pid)
    ids, pages = prompt(24)
    pub = fleet.prefill[0].open(1, ids)
    fleet.prefill[0].send(pub, pages)
    fleet.prefill[0].publisher.commit(pub, row_of(1))
    until(lambda: memory.inventory()["moves"] == 1, "the move runs")
    fleet.local[0].stop()
    until(lambda: memory.inventory()["rooms"] == 0, "its silence was noticed")
    assert memory.inventory()["writing"] == 6, "not while the mover may still write"
    os.kill(pid, signal.SIGCONT)
    until(memory.at_baseline, "memory node at baseline")
    until(lambda: pub.state == FAILED)
    assert memory.inventory()["tiers"] == 0 and memory.totals["rooms_filled"] == 1


def test_a_restarted_local_tier_does_not_wait_for_its_predecessors_lease(fleets):
    fleet = fleets()
    pub = fleet.prefill[0].open(1, np.arange(24))
    until(lambda: pub.state == OPEN)
    address = fleet.local[0].control[6:]
    fleet.local[0].server.links.ask = lambda *asked: None  # it says no good-bye
    fleet.local[0].stop()
    assert fleet.memory[0].inventory()["writing"] == 6
    fleet.local[0] = NodeTier(fleet.local[0].path, memory_nodes=fleet.memory[0].control, listen=address)
    until(lambda: fleet.prefill[0].publisher.totals["reattached"])
    lives(fleet)
    assert fleet.memory[0].inventory()["tiers"] == 1 and fleet.memory[0].inventory()["writing"] == 0
    fleet.settle()


# -- a memory node is lost ----------------------------------------------------------------------------------------


def test_prompts_go_to_the_next_memory_node_when_theirs_cannot_be_reached(fleets):
    fleet = fleets(memory=2)
    gone, left = fleet.memory
    gone.stop()
    for room in range(1, 7):
        ids, pages = prompt(9, salt=room)
        pub = fleet.prefill[0].publish(room, ids, pages)
        assert pub.state == COMMITTED, pub.error
        moved = fleet.reader(fleet.local[0].control).wait(room)
        assert moved.control == left.control
    assert left.totals["rooms_filled"] == 6
    fleet.settle(gone)


def test_without_any_memory_node_the_request_ends_with_their_names(fleets):
    fleet = fleets()
    fleet.memory[0].stop()
    fleet.prefill[0].publisher.reserve_seconds = 0.2
    pub = fleet.prefill[0].open(1, np.arange(24))
    until(lambda: pub.state == FAILED, seconds=30)
    assert isinstance(pub.error, CapacityError) and fleet.memory[0].control in pub.error.limit and "no memory node" in pub.error.message
    fleet.settle(fleet.memory[0])
    address = fleet.memory[0].control[6:]
    fleet.memory[0] = NodeTier(fleet.path(), listen=address)
    fleet.prefill[0].publisher.reserve_seconds = 10.0
    lives(fleet)


@pytest.mark.parametrize("how", ["stops answering", "restarts"])
def test_a_commit_in_flight_fails_with_its_memory_node_and_the_worker_goes_on(fleets, how, monkeypatch):
    monkeypatch.setattr(upstream, "SILENCE_SECONDS", 0.4)
    fleet = fleets(memory=2)
    prefill, pub = fleet.prefill[0], None
    for salt in range(50):  # until one goes to the first
        pub = prefill.open(100 + salt, np.arange(24) + 7000 * salt)
        until(lambda: pub.state == OPEN)
        if fleet.memory[0].inventory()["rooms"]:
            break
        prefill.publisher.cancel(pub, "elsewhere")
    memory, reader = fleet.memory[0], fleet.reader(fleet.local[0].control)
    reader.send(m.Await, room=pub.room, rank=0, seconds=30.0)
    prefill.send(pub, prompt(24)[1])
    resume = memory.pause()
    prefill.publisher.commit(pub, row_of(1))
    until(lambda: fleet.local[0].inventory()["moves"] == 1, "asked")
    if how == "restarts":
        address = memory.control[6:]
        resume.set()
        memory.loop.call_soon_threadsafe(memory.server.stopping.set)
        memory.stop()
        fleet.memory[0] = NodeTier(fleet.path(), listen=address)
    until(lambda: pub.state in (FAILED, COMMITTED), "ended")
    if how == "stops answering":
        assert pub.state == FAILED and isinstance(pub.error, DeadlineExceeded), pub.error
        with pytest.raises(RoomFailed, match="memory node"):
            reader.receive()
        lives(fleet)
        resume.set()
    else:
        lives(fleet)
    assert prefill.publisher._thread.is_alive() and prefill.publisher.totals["reattached"] == 0
    fleet.settle()


def test_a_memory_node_that_serves_another_model_is_named(fleets, tmp_path):
    fleet = fleets(local=0)
    other = Prefill(fleet.memory[0].path, fingerprint="e" * 64)
    local = NodeTier(str(tmp_path / "local.sock"), memory_nodes=fleet.memory[0].control)
    prefill = Prefill(local.path)
    try:
        pub = prefill.open(1, np.arange(8))
        until(lambda: pub.state == FAILED)
        assert isinstance(pub.error, LayoutMismatch) and "fingerprint" in str(pub.error)
    finally:
        other.close()
        prefill.close()
        local.stop()


# -- the mover ----------------------------------------------------------------------------------------------------


def test_a_mover_killed_in_the_middle_is_replaced_and_the_move_done_again(fleets):
    fleet = fleets()
    memory = fleet.memory[0]
    pid = warm(fleet, memory)
    stop(pid)
    ids, pages = prompt(61)
    pub = fleet.prefill[0].open(1, ids)
    fleet.prefill[0].send(pub, pages)
    fleet.prefill[0].publisher.commit(pub, row_of(1))
    until(lambda: memory.inventory()["moves"] == 1, "the move runs")
    os.kill(pid, signal.SIGKILL)
    until(lambda: pub.state in (COMMITTED, FAILED))
    assert pub.state == COMMITTED, pub.error
    assert fleet.local[0].totals["moves_retried"] == 1 and memory.totals["fills_failed"] == 1 and memory.mover_pid != pid
    reader = fleet.reader(memory.control)
    manifest = reader.wait(1)
    assert np.array_equal(reader.read(manifest), in_pool(fleet.prefill[0], pages, 61))
    reader.release(manifest)
    fleet.settle()


def test_the_mover_sees_the_arena_and_nothing_of_the_environment(fleets, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    fleet = fleets()
    pid = warm(fleet, fleet.memory[0])
    assert b"secret" not in open(f"/proc/{pid}/environ", "rb").read()
    inode = os.fstat(fleet.memory[0].server.arena.fd).st_ino
    assert f" {inode} " in open(f"/proc/{pid}/maps").read()
    fleet.memory[0].stop()
    until(lambda: not os.path.exists(f"/proc/{pid}"), "it goes with its tier")


def test_bytes_that_were_damaged_in_the_local_arena_are_never_sealed(fleets):
    fleet = fleets()
    ids, pages = prompt(24)
    pub = fleet.prefill[0].open(1, ids)
    fleet.prefill[0].send(pub, pages)
    until(lambda: pub.copied_bytes == 6 * RECORD_BYTES)
    at = int(fleet.local[0].tier.geometry.payload_offsets(pub.records[3:4])[0])
    fleet.local[0].server.arena.bytes[at + 17] ^= 1
    fleet.prefill[0].publisher.commit(pub, row_of(1))
    until(lambda: pub.state in (FAILED, COMMITTED))
    assert pub.state == FAILED and isinstance(pub.error, IntegrityError), pub.error
    memory = fleet.memory[0]
    fleet.settle()
    assert memory.inventory()["cached"] == 0 and memory.totals["fills_failed"] == 2 and fleet.local[0].totals["moves_failed"] == 1
    lives(fleet)


def test_a_worker_that_dies_while_its_commit_is_moved_is_not_missed(fleets):
    fleet = fleets()
    memory = fleet.memory[0]
    pid = warm(fleet, memory)
    stop(pid)
    ids, pages = prompt(24)
    pub = fleet.prefill[0].open(1, ids)
    fleet.prefill[0].send(pub, pages)
    fleet.prefill[0].publisher.commit(pub, row_of(1))
    until(lambda: memory.inventory()["moves"] == 1)
    fleet.prefill[0].close()
    until(lambda: fleet.local[0].inventory()["workers"] == 0)
    os.kill(pid, signal.SIGCONT)
    reader = fleet.reader(memory.control)
    manifest = reader.wait(1)
    assert np.array_equal(reader.read(manifest), in_pool(fleet.prefill[0], pages, 24))
    reader.release(manifest)
    for tier in (fleet.local[0], memory):
        until(tier.at_baseline)


def test_a_commit_that_takes_long_holds_up_no_other_prompt(fleets):
    fleet = fleets(memory=2)
    prefill = fleet.prefill[0]
    while not all(tier.mover_pid for tier in fleet.memory):
        lives(fleet)
    stuck, pubs, moving = fleet.memory[0], [], 0
    pid, (ids, pages) = stuck.mover_pid, prompt(24)
    stop(pid)
    while not moving or len(pubs) < moving + 3:
        room = 200 + len(pubs)
        pub = prefill.open(room, ids + 7000 * len(pubs))
        prefill.send(pub, pages)
        prefill.publisher.commit(pub, row_of(room))
        pubs.append(pub)
        until(lambda: pub.state == COMMITTED or stuck.inventory()["moves"] > moving, "it is moved to the other one, or waits")
        moving = stuck.inventory()["moves"]
        assert len(pubs) < 60, "both are used"
    assert sum(pub.state == COMMITTED for pub in pubs) == len(pubs) - moving
    os.kill(pid, signal.SIGCONT)
    until(lambda: all(pub.state == COMMITTED for pub in pubs))
    fleet.settle()


def test_a_tier_with_many_descriptors_has_a_mover_like_any_other(many_descriptors, fleets):
    fleet = fleets()
    lives(fleet)
    assert fleet.memory[0].server.mover.restarts == 0 and fleet.memory[0].totals["rooms_filled"] == 1


# -- aborts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["worker", "reader"])
def test_whoever_gives_up_in_whatever_state_nothing_is_left_on_either_side(fleets, who):
    fleet = fleets()
    memory, local, prefill = fleet.memory[0], fleet.local[0], fleet.prefill[0]
    pid = warm(fleet, memory)
    reader, reached, room = fleet.reader(local.control), dict.fromkeys(("opening", "open", "half copied", "moving", "moved"), 0), 100
    for turn in range(5):
        for state in reached:
            room += 1
            ids, pages = prompt(24, salt=room)
            resume = memory.pause() if state == "opening" else None
            if state == "moving":
                stop(pid)
            pub = prefill.open(room, ids, seed=SEED if turn % 2 else None)
            if state == "opening":
                until(lambda: local.inventory()["rooms"] == 1, state)
            else:
                until(lambda: pub.state == OPEN, state)
            if state == "half copied":
                prefill.publisher.send(pub, pages[:3], 0, 12, None)
                until(lambda: pub.copied_bytes, state)
            if state in ("moving", "moved"):
                prefill.send(pub, pages)
                prefill.publisher.commit(pub, row_of(room))
                until(lambda: pub.state == COMMITTED if state == "moved" else memory.inventory()["moves"] == 1, state)
            reached[state] += 1
            if who == "worker":
                prefill.publisher.cancel(pub, "the client left")
            else:
                reader.ask(m.Cancel, room=room, rank=0)
            if resume:
                resume.set()
            if state == "moving":
                until(lambda: pub.state in (FAILED, COMMITTED), state)
                os.kill(pid, signal.SIGCONT)
            if who == "reader" and state in ("opening", "open", "half copied"):
                until(lambda: pub.state == OPEN)
                prefill.send(pub, pages)
                prefill.publisher.commit(pub, row_of(room))
                until(lambda: pub.state == COMMITTED, "a prompt that nobody wants is no error of the worker")
            if who == "worker":
                until(lambda: pub.state in (FAILED, COMMITTED), state)
                assert pub.state == (COMMITTED if state == "moved" else FAILED)
    assert min(reached.values()) == 5
    fleet.settle()
    assert memory.inventory()["cached"] <= memory.records and memory.mover_pid == pid, "the mover lived through it"
    lives(fleet)


def test_a_room_number_is_refused_until_its_reader_was_sent_on(fleets):
    fleet = fleets(local=2)
    ids, pages = prompt(9)
    assert fleet.prefill[0].publish(1, ids, pages).state == COMMITTED
    again = fleet.prefill[0].publish(1, ids + 1, pages)
    assert again.state == FAILED and isinstance(again.error, DuplicateRoom)
    elsewhere = fleet.prefill[1].publish(1, ids + 1, pages)
    assert elsewhere.state == FAILED and isinstance(elsewhere.error, DuplicateRoom), "the memory node knows it too"
    assert fleet.reader(fleet.local[0].control).wait(1).control == fleet.memory[0].control
    reader = fleet.reader(fleet.memory[0].control)
    manifest = reader.wait(1)
    assert np.array_equal(reader.read(manifest), in_pool(fleet.prefill[0], pages, 9)), "the first is untouched"
    reader.release(manifest)
    assert fleet.prefill[0].publish(1, ids + 1, pages).state == COMMITTED
    fleet.settle()


# -- who may do what ----------------------------------------------------------------------------------------------


def test_a_reader_may_neither_open_nor_fill_at_a_memory_node(fleets):
    fleet = fleets()
    lives(fleet)
    reader = fleet.reader(fleet.memory[0].control)
    local = fleet.local[0]
    fill = dict(room=1, rank=0, prompt_tokens=4, roots=bytes(8), ranking=b"", metadata=row_of(1), sources=bytes(4), generations=bytes(8),
                geometry=local.tier.geometry, endpoints=local.tier.endpoints)
    for make, fields in ((m.Open, dict(room=1, rank=0, seed=b"", hashes=b"", private=1)), (m.Fill, fill), (m.Abort, dict(room=1, rank=0, reason=""))):
        with pytest.raises(ProtocolError, match="only a local worker"):
            reader.ask(make, **fields)
    with pytest.raises(ProtocolError, match="message too large"):
        reader.ask(m.Lookup, hashes=bytes(32) * (1 << 16), hold=False)
    assert fleet.memory[0].inventory()["rooms"] == 0


def test_what_a_tier_says_may_be_longer_than_what_a_reader_may_say(fleets):
    fleet = fleets()
    pages = m.MAX_READER_MESSAGE // 32 + 100
    pub = fleet.prefill[0].open(1, np.arange(4 * pages))
    until(lambda: pub.state == FAILED)
    assert isinstance(pub.error, CapacityError) and pub.error.limit == f"{pages} of 256 records", "it was read, and found too large for the arena"
    lives(fleet)


def test_a_tier_with_memory_nodes_takes_no_tiers(fleets):
    fleet = fleets()
    other = NodeTier(fleet.path(), memory_nodes=fleet.local[0].control)
    prefill = Prefill(other.path, reserve_seconds=0.1)
    try:
        pub = prefill.open(1, np.arange(8))
        until(lambda: pub.state == FAILED)
        assert isinstance(pub.error, ProtocolError) and "no role here: 'tier'" in str(pub.error)
    finally:
        prefill.close()
        other.stop()


def test_state_and_metrics_count_the_hops_apart(fleets):
    fleet = fleets(local=2)
    ids, pages = prompt(22)
    for which in (0, 1):
        assert fleet.prefill[which].publish(which + 1, ids, pages).state == COMMITTED

    def get(tier, path):
        return urllib.request.urlopen(f"http://127.0.0.1:{tier.server.http_port}{path}", timeout=10).read().decode()

    state, far = (json.loads(get(tier, "/state")) for tier in (fleet.local[1], fleet.memory[0]))
    control = fleet.memory[0].control
    assert state["memory_nodes"] == [{"address": control, "control": control, "connected": True, "down": False}] and far["memory_nodes"] == []
    assert state["inventory"]["redirects"] == 1 and state["inventory"]["moves"] == 0 and far["inventory"]["tiers"] == 2
    lines = dict(line.rsplit(" ", 1) for line in get(fleet.local[1], "/metrics").splitlines() if line.startswith("oasis_tier_"))
    assert [float(lines[f"oasis_tier_{name}_total"]) for name in ("rooms_moved", "bytes_moved", "pages_there", "moves_failed", "evicted")] == [1, RECORD_BYTES, 5, 0, 0]
    lines = dict(line.rsplit(" ", 1) for line in get(fleet.memory[0], "/metrics").splitlines() if line.startswith("oasis_tier_"))
    assert float(lines["oasis_tier_bytes_filled_total"]) == 7 * RECORD_BYTES and float(lines["oasis_tier_rooms_filled_total"]) == 2
