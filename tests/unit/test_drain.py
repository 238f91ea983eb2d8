"""The end of a tier and of both nodes: nothing new, what is held ends in order or in time, and nothing is left to expire."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from types import SimpleNamespace as Some

import msgspec
import pytest
from node_rig import SOURCE, LocalTier, row_of, until
from test_server import HELLO, ROW, Reader, get

from oasis_sglang import draining
from prefill_node import publisher as publishing
from transport import messages as m
from transport.drain import Drain
from transport.errors import CapacityError, ConfigError, Draining, RoomFailed, from_wire
from transport.rooms import TierLimits
from transport.server import TierOptions, TierServer
from transport.worker_client import WorkerClient

COMMIT = dict(rank=0, prompt_tokens=4, roots=bytes(8), ranking=b"", metadata=tuple(bytes(n) for n in ROW))
ONE = dict(rank=0, seed=b"", hashes=b"", private=1)

TIER = """
import logging, sys
from transport.server import TierOptions, serve
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
serve(TierOptions(local=sys.argv[1], arena_bytes=1 << 20, planes=("zmq",), drain_seconds=float(sys.argv[2])))
"""


@pytest.fixture
def tier(tmp_path):
    tier = LocalTier(str(tmp_path / "tier.sock"), limits=TierLimits(lease_seconds=30.0, grace_seconds=5.0, room_seconds=30.0))
    yield tier
    tier.stop()


@pytest.fixture
def client(tier):
    client = WorkerClient(tier.path, timeout=10)
    client.attach(**HELLO)
    yield client
    client.close()


@pytest.fixture
def reader(tier):
    reader = Reader(tier.control)
    yield reader
    reader.close()


def committed(client, room: int) -> None:
    client.call(m.Open, room=room, **ONE)
    client.call(m.Commit, room=room, **COMMIT)


def test_a_tier_that_drains_takes_nothing_new_and_ends_with_its_last_lease(tier, client, reader):
    committed(client, 1)
    client.call(m.Open, room=2, **ONE)
    epoch = reader.hello().epoch
    lease = reader.ask(m.Await, epoch=epoch, room=1, rank=0, seconds=5.0).lease
    tier.call(tier.server.stop)

    assert get(tier, "/readyz") == (503, "draining") and get(tier, "/healthz") == (200, "ok")
    assert msgspec.json.decode(get(tier, "/state")[1])["draining"] is True
    with pytest.raises(Draining) as error:
        client.call(m.Open, room=3, **ONE)
    assert error.value.retryable and error.value.room == 3 and "gone in" in error.value.limit
    # What was begun may be finished, claimed, renewed and released.
    client.call(m.Commit, room=2, **COMMIT)
    second = reader.ask(m.Await, epoch=epoch, room=2, rank=0, seconds=5.0).lease
    assert reader.ask(m.Renew, epoch=epoch, leases=m.pack([lease, second], "u8")).gone == b""
    reader.ask(m.Release, epoch=epoch, leases=m.pack([lease], "u8"))
    assert tier.alive and tier.call(tier.server.drain.left) == {"leases": 1, "rooms": 0, "moves": 0}
    reader.ask(m.Release, epoch=epoch, leases=m.pack([second], "u8"))
    until(lambda: not tier.thread.is_alive(), "it ends")
    assert tier.error is None


def test_who_waits_for_a_room_is_told_and_the_second_signal_ends_at_once(tier, client, reader):
    committed(client, 1)
    epoch = reader.hello().epoch
    reader.ask(m.Await, epoch=epoch, room=1, rank=0, seconds=5.0)
    reader.send(m.Await, epoch=epoch, room=9, rank=0, seconds=60.0)
    until(lambda: tier.inventory()["waiters"] == 1)
    tier.call(tier.server.stop)
    assert tier.call(tier.server.drain.left)["leases"] == 1 and tier.alive
    tier.loop.call_soon_threadsafe(tier.server.stop)
    reply = m.decode_reply(reader.socket.recv())
    assert (reply.code, reply.room, reply.retryable) == ("Draining", 9, True)
    until(lambda: not tier.thread.is_alive(), "it ends although a lease is held")


class Table:
    """As much of a tier as a drain looks at."""

    def __init__(self, leases: int):
        self.leases, self.waiters, self.outbox, self.epoch, self.served = leases, {}, [], "e" * 32, []

    def serve(self, kind, handler):
        self.served.append(kind)

    def inventory(self):
        return {"leases": self.leases, "rooms": 0}


def test_the_time_of_a_drain_is_bounded():
    import asyncio

    now = [100.0]
    drain = Drain(Table(leases=3), 2.0, clock=lambda: now.__setitem__(0, now[0] + 0.5) or now[0])
    asyncio.run(asyncio.wait_for(drain.run(), 5))
    assert drain.left()["leases"] == 3 and 102.0 <= now[0] <= 104.0
    assert drain.tier.served == [m.Open, m.Donate]


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_drain_seconds_are_checked(seconds):
    with pytest.raises(ConfigError, match="--drain-seconds"):
        TierServer(TierOptions(local="unused", drain_seconds=seconds))


@pytest.mark.parametrize("signals, seconds", [(1, "0"), (1, "0.2"), (2, "60")])
def test_a_process_ends_with_zero_and_says_what_was_left(tmp_path, signals, seconds):
    path = str(tmp_path / "tier.sock")
    process = subprocess.Popen([sys.executable, "-c", TIER, path, seconds], stderr=subprocess.PIPE, text=True)
    client = WorkerClient(path)
    try:
        until(lambda: process.poll() is not None or _attached(client), "it serves", 30)
        committed(client, 1)
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3 if signals > 1 else 0)
        assert process.wait(15) == 0
        said = process.stderr.read()
        assert "drains for at most" in said and "with 0 leases, 1 rooms, 0 moves left" in said
    finally:
        client.close()
        process.kill()
        process.wait()
        process.stderr.close()


def _attached(client) -> bool:
    from transport.errors import PeerLost

    try:
        client.attach(**HELLO)
    except PeerLost:
        time.sleep(0.05)
        return False
    return True


# -- workers ------------------------------------------------------------------------------------------------------


def test_a_refused_room_is_told_to_its_reader_as_one_that_may_be_tried_again(tier, client, reader):
    epoch = reader.hello().epoch
    for room, passes in ((5, True), (6, False)):
        client.call(m.Abort, room=room, rank=0, reason="the arena is full", retryable=passes)
        with pytest.raises(RoomFailed) as error:
            reader.ask(m.Await, epoch=epoch, room=room, rank=0, seconds=1.0)
        assert error.value.retryable is passes and error.value.room == room
    reader.send(m.Await, epoch=epoch, room=7, rank=0, seconds=60.0)
    until(lambda: tier.inventory()["waiters"] == 1)
    client.call(m.Abort, room=7, rank=0, reason="the arena is full", retryable=True)
    assert m.decode_reply(reader.socket.recv()).retryable


def test_errors_keep_on_the_wire_whether_they_pass():
    for error in (CapacityError("full", retryable=True), CapacityError("never"), Draining("soon"), RoomFailed("it was full", retryable=True)):
        reply = m.failure(error, 1)
        assert from_wire(reply.code, reply.message, retryable=reply.retryable).retryable is error.retryable


def begin(world, room: int):
    """A publication whose records are reserved, or that was refused."""
    pub = world.prefill.open(room, world.prompt(9, salt=room)[0])
    until(lambda: pub.state != publishing.OPENING)
    return pub


def test_a_prefill_node_that_drains_finishes_what_it_began(worlds):
    world = worlds()
    publisher, begun = world.prefill.publisher, begin(world, 1)
    publisher.refuse_new()
    late = begin(world, 2)
    assert late.state == publishing.FAILED and isinstance(late.error, Draining) and late.error.retryable and late.error.room == 2
    world.prefill.send(begun, world.prompt(9)[1])
    publisher.commit(begun, row_of(1))
    assert publisher.drain(10) == 0 and begun.state == publishing.COMMITTED
    assert publisher.client.alive(), "a refusal of this node's own says nothing about its tier"


def test_a_prefill_node_waits_no_longer_than_it_may(worlds):
    world = worlds()
    assert begin(world, 1).state == publishing.OPEN
    assert world.prefill.publisher.drain(0.05) == 1, "nobody commits it"


def test_more_than_a_prefill_node_takes_are_refused(worlds, monkeypatch):
    world = worlds()
    monkeypatch.setattr(publishing, "MAX_LIVE", 1)
    assert begin(world, 1).state == publishing.OPEN
    second = begin(world, 2)
    assert second.state == publishing.FAILED and isinstance(second.error, CapacityError) and second.error.retryable and second.error.limit == "1 at a time"


def test_a_decode_node_that_ends_hands_everything_back(worlds):
    """One request waits for its commit, one is ready: afterwards the tier holds nothing for either, long before a lease could expire."""
    world = worlds(tier=dict(limits=TierLimits(lease_seconds=60.0, grace_seconds=5.0, room_seconds=60.0)))
    puller = world.decode.puller
    world.prefill.publish(1, *world.prompt(9))
    ready = puller.pull(1, SOURCE)
    until(lambda: ready.state == "ready")
    waits = puller.pull(2, SOURCE)
    until(lambda: world.tier.inventory()["waiters"] == 1)
    assert world.tier.inventory()["leases"] == 1
    assert puller.drain(10) == 0
    until(lambda: world.tier.inventory()["leases"] == 0 and world.tier.inventory()["waiters"] == 0, "all of it is handed back")
    assert (ready.state, waits.state) == ("failed", "failed")
    late = puller.pull(3, SOURCE)
    until(lambda: late.state == "failed")
    assert isinstance(late.error, Draining)


def test_who_is_refused_on_decode_leaves_no_records_waiting(worlds, monkeypatch):
    from decode_node import puller as pulling

    world = worlds()
    monkeypatch.setattr(pulling, "MAX_LIVE", 0)
    world.prefill.publish(1, *world.prompt(9))
    refused = world.decode.puller.pull(1, SOURCE)
    until(lambda: refused.state == "failed")
    assert isinstance(refused.error, CapacityError) and refused.error.retryable
    until(lambda: world.tier.inventory()["rooms"] == 0 and world.tier.inventory()["leases"] == 0, "the tier was told")


# -- SGLang's side ------------------------------------------------------------------------------------------------


class Manager:
    """SGLang's tokenizer manager, as far as a drain goes."""

    def __init__(self):
        self.sent, self.later, self.rid_to_state, self.event_loop = [], [], {"a": 1}, self

    def _dispatch_to_scheduler(self, message):
        self.sent.append(message)

    def call_later(self, seconds, work):
        self.later.append((seconds, work))


def test_a_worker_aborts_what_is_left_in_time_or_at_the_second_signal():
    for second in (False, True):
        manager = Manager()
        drain = draining.Drain(manager, 30.0, dict)
        drain.signalled()
        assert manager.sent == [{"rid": draining.NO_MORE, "abort_message": draining.NO_MORE}] and manager.later[0][0] == 30.0
        drain.signalled() if second else manager.later[0][1]()
        last = manager.sent[-1]
        assert last["abort_all"] and last["abort_message"] == last["finished_reason"]["message"] == "the server is going down"
        assert last["finished_reason"]["status_code"] == 503


class Node:
    def __init__(self, fails=False):
        self.calls, self.fails = [], fails

    def refuse_new(self):
        self.calls.append("refuse_new")

    def drain(self, seconds):
        self.calls.append("drain")
        if self.fails:
            raise RuntimeError("no")
        return 0

    def close(self):
        self.calls.append("close")


def scheduler(role: str, node):
    queue, owned = {"prefill": ("disagg_prefill_bootstrap_queue", "publisher"), "decode": ("disagg_decode_prealloc_queue", "puller")}[role]
    return Some(**{queue: Some(kv_manager=Some(**{owned: node}))})


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_scheduler_is_told_and_closes_its_node(role):
    node = Node()
    assert not draining.told(scheduler(role, node), "some request") and node.calls == []
    assert draining.told(scheduler(role, node), draining.NO_MORE) and node.calls == ["refuse_new"]
    draining.close(scheduler(role, node))
    assert node.calls == ["refuse_new", "drain", "close"]
    draining.close(scheduler(role, Node(fails=True)))  # SGLang's own resources come after this



def test_sigterm_is_heard_by_sglang_and_by_us(monkeypatch):
    class Abort:
        def __init__(self, rid="", abort_all=False, abort_message=None, finished_reason=None):
            self.rid, self.abort_all, self.abort_message = rid, abort_all, abort_message

    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", Some(AbortReq=Abort))  # importing SGLang's costs seconds
    monkeypatch.setattr(draining, "drain_seconds", lambda: 5.0)
    heard = []

    class Stock:
        def __init__(self, manager):
            self.manager = manager

        def sigterm_handler(self, signum=None, frame=None):
            heard.append(signum)

    manager = Manager()
    manager.signal_handler_class = Stock
    draining.install(manager)
    handler = manager.signal_handler_class(manager)
    handler.sigterm_handler(signal.SIGTERM)
    assert heard == [signal.SIGTERM] and isinstance(handler, Stock)
    assert [message.rid for message in manager.sent] == [draining.NO_MORE] and not manager.sent[0].abort_all and manager.later[0][0] == 5.0
    handler.sigterm_handler(signal.SIGTERM)
    assert manager.sent[-1].abort_all and "going down" in manager.sent[-1].abort_message


# -- with memory nodes --------------------------------------------------------------------------------------------


def test_a_memory_node_that_drains_is_passed_over_for_the_next_one():
    from relay_rig import Local

    bench = Local()
    assert bench.open() is None
    first = bench.upstream.answer(Draining("the tier is going down"))[0]
    (second, make, _, _), = bench.upstream.asked
    assert make is m.Open and second != first and bench.tier.nodes.is_down(first) and not bench.told("W"), "the worker hears nothing of it"
    bench.upstream.answer(bench.reserved([1] * 5))
    assert isinstance(bench.told("W")[0], m.Opened)


def test_a_staging_tier_that_drains_finishes_its_moves():
    from relay_rig import Local

    bench = Local()
    bench.opened(room=1)
    drain = Drain(bench.tier, 30.0)
    assert drain.left() == {"leases": 0, "rooms": 1, "moves": 0}
    refused = bench.open(room=2)
    assert (refused.code, refused.room, refused.retryable) == ("Draining", 2, True) and not bench.upstream.asked
    assert bench.commit(room=1) is None and drain.left()["moves"] == 1
    bench.upstream.answer(m.Ok())
    assert isinstance(bench.told("W")[0], m.Ok) and drain.left() == {"leases": 0, "rooms": 1, "moves": 0}, "nobody knows yet where it is"
    assert isinstance(bench.ask("R", m.Await, room=1, rank=0, seconds=5.0), m.Moved) and not any(drain.left().values())
