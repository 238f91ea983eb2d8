"""Hostile bytes into everything that takes bytes of a peer: a typed error or a sound message, never another exception, never memory
that the input does not account for. ``OASIS_FUZZ=10`` runs ten times as many seeds; each failure names its own.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import random
import socket
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zmq
from hostile_rig import bytes_of, damaged, of_message, seeds
from node_rig import FINGERPRINT, ROW, SEED, small_layout
from relay_rig import Bench as MemoryBench
from relay_rig import Local, hashes
from test_messages import REPLIES, REQUESTS
from test_moving import Bench as MoveBench

from decode_node.pull import Pull
from transport import messages as m
from transport.dataplane import MAX_DESCRIPTORS, Endpoint, ReadBatch, check_batch
from transport.donation import Donations
from transport.errors import BoundsError, IntegrityError, LayoutMismatch, OasisError, ProtocolError
from transport.fill import MemoryTier
from transport.integrity import index_rows, piece_digests, roots, verify_index
from transport.layout import ArenaGeometry, KVLayout
from transport.mover_child import frames
from transport.moving import Order
from transport.peer_row import MAX_RANK, MAX_ROW_BYTES, PeerRow, decode_peer_row
from transport.planes import zmq as zmq_plane
from transport.planes.zmq import VERSION, ReadReply, ReadRequest, ZmqServer
from transport.records import MAX_HASHES, split_hashes
from transport.worker_client import WorkerClient

MORE = int(os.environ.get("OASIS_FUZZ", "1"))
LAYOUT = small_layout()
CUT = ArenaGeometry.fit(LAYOUT, 1 << 16)


def fuzz(count: int, start: int, work) -> None:
    """``work(rng)`` for each seed. Whatever is no ``OasisError`` is a failure that names its seed."""
    for seed, rng in seeds(count * MORE, start):
        try:
            work(rng)
        except OasisError:
            pass
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


# -- messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode, sound", [(m.decode_request, REQUESTS), (m.decode_reply, REPLIES)], ids=["requests", "replies"])
def test_messages_are_understood_or_refused(decode, sound):
    understood = 0

    def work(rng):
        nonlocal understood
        raw = of_message(rng.choice(sound), rng)
        try:
            decode(raw, peer="them")
        except ProtocolError as error:
            assert error.peer == "them"
            return
        understood += 1

    fuzz(6000, 1, work)
    assert 500 < understood < 5500 * MORE, "hostile, but not only noise"


def test_what_a_message_costs_is_in_proportion_to_its_bytes():
    rng = random.Random(3)
    tracemalloc.start()
    for _ in range(300):
        raw = of_message(rng.choice(REQUESTS + REPLIES), rng)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for decode in (m.decode_request, m.decode_reply):
            try:
                decode(raw)
            except ProtocolError:
                pass
        assert tracemalloc.get_traced_memory()[1] - before < 16 * len(raw) + (1 << 18), len(raw)
    tracemalloc.stop()


# -- what the tier does with them ---------------------------------------------------------------------------------


class Court:
    """A memory node with a bit of everything in it, which hears a worker, a reader and a tier."""

    def __init__(self):
        self.bench = bench = MemoryBench(MemoryTier)
        bench.tier.serve(m.Donate, Donations(bench.tier, np.zeros(bench.tier.arena_size, np.uint8)).take)
        self.hello = dict(protocol=m.PROTOCOL, node="n", rank=0, layout=LAYOUT, fingerprint=FINGERPRINT)
        for session, role in (("W", "worker"), ("R", "reader"), ("T", "tier")):
            bench.ask(session, m.Hello, role=role, control=session, **self.hello)
        bench.ask("W", m.Open, room=1, rank=0, seed=SEED, hashes=hashes(2), private=1)
        bench.ask("T", m.Open, room=2, rank=0, seed=SEED, hashes=hashes(2, 1), private=1)
        bench.ask("R", m.Await, room=1, rank=0, seconds=5.0)
        self.lease = bench.ask("R", m.Await, room=3, rank=0, seconds=5.0)
        payload, summary = LAYOUT.payload_bytes, LAYOUT.summary_total
        self.sound = {
            "W": [m.Open(room=9, rank=0, seed=SEED, hashes=hashes(2, 3), private=1, wish=m.Wish(0, 2, 1, 0.1)), m.Abort(room=1, rank=0, reason="r"),
                  m.Commit(room=1, rank=0, prompt_tokens=10, roots=bytes(24), ranking=bytes(4 * LAYOUT.pieces), metadata=tuple(bytes(n) for n in ROW)),
                  m.Lookup(epoch="E", hashes=hashes(3), hold=True), m.Hello(role="worker", **self.hello)],
            "R": [m.Await(epoch="E", room=1, rank=0, seconds=1.0), m.Renew(epoch="E", leases=bytes(16)), m.Release(epoch="E", leases=bytes(8)),
                  m.Cancel(epoch="E", room=1, rank=0), m.Lookup(epoch="E", hashes=hashes(3), hold=True), m.Hello(role="reader", **self.hello),
                  m.Donate(epoch="E", depth=0, hashes=hashes(1, 7), payloads=bytes(payload), summaries=bytes(summary), checks=bytes(8))],
            "T": [m.Fill(room=2, rank=0, prompt_tokens=10, roots=bytes(24), ranking=b"", metadata=tuple(bytes(n) for n in ROW), sources=bytes(12),
                         generations=bytes(24), geometry=bench.tier.geometry, endpoints=(Endpoint.make("zmq", "s", "tcp://h:1", bench.tier.arena_size),)),
                  m.Open(room=8, rank=0, seed=SEED, hashes=hashes(2, 4), private=1), m.Abort(room=2, rank=0, reason="r"),
                  m.Hello(role="tier", control="T", **self.hello)],
        }

    def hear(self, rng: random.Random) -> None:
        tier, session = self.bench.tier, rng.choice("WRT")
        request = m.decode_request(of_message(rng.choice(self.sound[session]), rng))
        reply = tier.handle(session, request)
        assert not tier.totals["internal_errors"], request
        if reply is not None:
            m.decode_reply(m.encode(reply))
        if rng.random() < 0.1:
            self.bench.now += rng.choice([0.1, 40.0])
        tier.tick()
        now = tier.inventory()
        assert now["holders"] == now["held"] and now["free"] + now["cached"] + now["writing"] + now["leased"] == now["records"], request


def test_a_tier_answers_whatever_is_understood_and_keeps_its_accounts():
    heard = 0
    for block in range(60 * MORE):
        court = Court()

        def work(rng, court=court):
            nonlocal heard
            court.hear(rng)
            heard += 1

        fuzz(40 // MORE or 1, 10_000 + 40 * block, work)
    assert heard > 400


def test_a_staging_tier_survives_what_a_memory_node_may_answer():
    def work(rng):
        local = Local()
        local.open(room=rng.choice([1, -1, 2**63, 2**64 - 1]), pages=3, private=1, wish=m.Wish(0, 3, 1, 1.0))
        sound = [local.reserved((1, 0, 1, 1)), m.Ok(), REPLIES[4], REPLIES[6], REPLIES[7]]
        for _ in range(4):
            if not local.upstream.asked:
                break
            try:
                local.upstream.answer(m.decode_reply(of_message(rng.choice(sound), rng)))
            except ProtocolError:
                local.upstream.answer(ProtocolError("not understood"))
            for reply in local.told("W"):
                if isinstance(reply, m.Opened):
                    local.commit(pages=4)
        local.tier.tick()
        now = local.tier.inventory()
        assert now["holders"] == now["held"] and not local.tier.totals["internal_errors"]

    fuzz(600, 20_000, work)


# -- what decode makes of a manifest ------------------------------------------------------------------------------


def manifest(**changes) -> m.Manifest:
    fields = dict(epoch="E", room=7, rank=0, lease=3, lease_seconds=30.0, layout=LAYOUT, fingerprint=FINGERPRINT, prompt_tokens=10, seed=SEED, hashes=hashes(2),
                  records=m.pack([3, 1, 4], "u4"), generations=m.pack([1, 2, 3], "u8"), roots=m.pack([5, 6, 7], "u8"),
                  ranking=m.pack([[1, 0]] * LAYOUT.pieces, "u4"), metadata=tuple(bytes(n) for n in ROW))
    return m.Manifest(**fields | changes)


def unpacked(sent: m.Manifest) -> Pull:
    pull = Pull(7, "prefill/0", 0.0)
    pull.link = SimpleNamespace(peer="tier", epoch="E", welcome=SimpleNamespace(geometry=CUT))
    pull.manifest = sent
    pull.unpack(LAYOUT, FINGERPRINT, 0)
    return pull


def test_a_manifest_is_sound_or_refused():
    assert unpacked(manifest()).ranking.shape == (LAYOUT.pieces, 2)
    accepted = 0

    def work(rng):
        nonlocal accepted
        sent = m.decode_reply(of_message(manifest(), rng))
        if not isinstance(sent, m.Manifest):
            return
        pull = unpacked(sent)
        accepted += 1
        whole, pages = sent.prompt_tokens // LAYOUT.block_tokens, -(-sent.prompt_tokens // LAYOUT.block_tokens)
        assert len(pull.records) == len(pull.generations) == len(pull.roots) == pages and (pull.records < CUT.num_records).all()
        assert len(pull.hashes) in (0, whole) and len(set(pull.hashes)) == len(pull.hashes)
        assert (pull.ranking < max(1, whole)).all() and (pull.ranking >= 0).all()
        CUT.piece_offsets(pull.records, np.zeros(pages, np.int64), LAYOUT)

    fuzz(4000, 30_000, work)
    assert accepted > 100


@pytest.mark.parametrize("tokens", [-1, -(2**63), 2**63 - 1, 2**62, 13, 0])
def test_a_length_that_is_not_that_of_the_arrays(tokens):
    with pytest.raises(ProtocolError):
        unpacked(manifest(prompt_tokens=tokens))


@pytest.mark.parametrize("record", [CUT.num_records, 2**31, 2**32 - 1])
def test_a_record_outside_the_arena(record):
    with pytest.raises(BoundsError):
        unpacked(manifest(records=m.pack([0, record, 1], "u4")))


@pytest.mark.parametrize("ranking", [[0, 0], [0, 2], [0, 2**32 - 1], [2**31, 0]])
def test_a_ranking_with_a_block_that_is_not_there_or_there_twice(ranking):
    with pytest.raises(ProtocolError, match="ranking"):
        unpacked(manifest(ranking=m.pack([ranking] * LAYOUT.pieces, "u4")))


# -- what arrives on the data plane -------------------------------------------------------------------------------


def test_an_index_is_that_which_was_published_or_refused():
    rng = np.random.default_rng(1)
    payloads, summaries = (rng.integers(0, 256, (3, size), np.uint8) for size in (LAYOUT.payload_bytes, LAYOUT.summary_total))
    generations, digests = np.array([1, 2, 2**63], np.uint64), piece_digests(payloads, LAYOUT.pieces)
    rows = index_rows(digests, summaries, generations, LAYOUT)
    good = rows.copy()

    def work(rng):
        raw = bytes_of(rows.tobytes(), rng)[: rows.nbytes].ljust(rows.nbytes, b"\0")
        hostile = np.frombuffer(raw, np.uint8).reshape(rows.shape)
        if np.array_equal(hostile, good):
            return
        try:
            verify_index(hostile, generations, roots(digests), np.arange(3), LAYOUT, peer="p", room=1)
        except IntegrityError:
            return
        raise AssertionError("a changed index was taken")

    fuzz(3000, 40_000, work)


ARENA = np.arange(1 << 16, dtype=np.uint32).view(np.uint8)[: 1 << 16]


@pytest.fixture(scope="module")
def owner():
    server = ZmqServer("owner:fuzz", ARENA)
    yield server
    server.close()


def u64(*values: int) -> bytes:
    return np.array(values, "<u8").tobytes()


def test_the_owner_of_an_arena_answers_with_its_bytes_or_an_error(owner):
    sound = [ReadRequest(VERSION, "owner:fuzz", 1, u64(8, 4096), u64(64, 100)), ReadRequest(VERSION, "owner:fuzz", 2, u64(0), u64(1))]
    answered = 0

    def work(rng):
        nonlocal answered
        raw = of_message(rng.choice(sound), rng)
        try:
            head, *parts = owner._answer(zmq.Frame(b"reader"), [raw] * rng.choice([1, 1, 1, 1, 0, 2]))
        except msgspec.DecodeError:
            return  # counted as malformed
        reply = msgspec.msgpack.decode(head, type=ReadReply)
        assert not (reply.error and parts) and sum(len(p) for p in parts) <= 2 * ARENA.nbytes
        answered += not reply.error

    fuzz(3000, 50_000, work)
    assert answered > 50


def test_a_reader_writes_only_where_it_asked_for_what_it_asked():
    class Peer(zmq_plane._Peer):
        def __init__(self):
            self.endpoint = Endpoint.make("zmq", "owner", "tcp://h:1", 1 << 16)
            self.asked, self.turns, self.error, self.ended = {}, [], None, False

        def close(self, error):
            self.error = error

    def frame(raw: bytes):
        return SimpleNamespace(buffer=memoryview(raw))

    class Frame(bytes):
        @property
        def buffer(self):
            return memoryview(self)

    def work(rng):
        region, peer = np.zeros(256, np.uint8), Peer()
        part = ReadBatch(*(np.array(values, np.uint64) for values in ([0, 500], [16, 64], [8, 20])))
        ends = []
        transfer = SimpleNamespace(ended=False, fail=lambda error: ends.append(error), landed=lambda n: ends.append(n))
        peer.asked[1] = (transfer, part)
        head = ReadReply(VERSION, 1)
        raw = msgspec.msgpack.encode(head) if rng.random() < 0.5 else bytes_of(msgspec.msgpack.encode(head), rng)
        body = [Frame(rng.randbytes(rng.choice([0, 1, 8, 20, 28, 29, 4000]))) for _ in range(rng.randint(0, 3))]
        peer._take(frame(raw), body, memoryview(region))
        untouched = np.ones(256, bool)
        untouched[16:24] = untouched[64:84] = False
        assert not region[untouched].any() and len(ends) <= 1
        if ends and ends[0] == 28:
            assert sum(map(len, body)) == 28
        else:
            assert not region.any(), "written, and not landed"

    fuzz(3000, 60_000, work)


@pytest.mark.parametrize("size", [1 << 16, 2**62 - 1])
def test_ranges_near_the_end_of_every_integer(size):
    """Against Python's integers, which do not wrap."""
    edges = [0, 1, 7, size - 1, size, size + 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - size, 2**64 - 2, 2**64 - 1]
    for remote, local, length in itertools.product(edges, edges, edges):
        batch = ReadBatch(*(np.array([value % 2**64], np.uint64) for value in (remote, local, length)))
        fits = all(0 < length and offset + length <= size for offset in (remote % 2**64, local % 2**64)) and length < 2**64
        try:
            assert check_batch(batch, size, size) == length and fits
        except BoundsError:
            assert not fits, (remote, local, length)
    many = np.zeros(MAX_DESCRIPTORS + 1, np.uint64)
    with pytest.raises(BoundsError):
        check_batch(ReadBatch(many, many, many), size, size)


# -- sockets of one host, and the bootstrap server ----------------------------------------------------------------


def framed(*messages: bytes) -> bytes:
    return b"".join(m.LENGTH.pack(len(raw)) + raw for raw in messages)


def test_frames_of_the_unix_socket():
    def work(rng):
        client = WorkerClient("nowhere")
        stream = framed(m.encode(m.Ok(seq=1)), m.encode(m.Ok(seq=2)))
        client._buffer += bytes_of(stream, rng)
        client._posted = {1: lambda reply: None, 2: lambda reply: None}
        client._sort_frames()
        assert len(client._arrived) <= 2 and len(client._buffer) <= 70_000 * 5

    fuzz(3000, 70_000, work)


@pytest.mark.parametrize("length", [0, m.MAX_MESSAGE + 1, 2**31, 2**32 - 1])
def test_a_frame_of_impossible_length_is_refused_before_any_of_it_is_kept(length):
    client = WorkerClient("nowhere")
    client._buffer += m.LENGTH.pack(length)
    with pytest.raises(ProtocolError, match="frame length"):
        client._frame()
    with pytest.raises(ValueError, match="frame of"):
        frames(bytearray(m.LENGTH.pack(length)))


def test_a_hostile_tier_costs_a_worker_its_connection_only(tmp_path):
    """Whatever comes in place of a welcome, with or without a descriptor."""
    path, rng = str(tmp_path / "s"), random.Random(5)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(4)
    welcome = msgspec.structs.replace(REPLIES[0], geometry=CUT)
    answers = [bytes_of(framed(m.encode(welcome)), rng) if n % 2 else framed(of_message(welcome, rng)) for n in range(80)]

    def serve():
        for answer in answers:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                fd = os.memfd_create("small")
                os.truncate(fd, rng.choice([0, 100, CUT.size]))
                try:
                    socket.send_fds(peer, [answer or b"\0"], [fd] * rng.choice([0, 1, 1, 3]))
                except OSError:
                    pass
                os.close(fd)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    before, attached = len(os.listdir("/proc/self/fd")), 0
    for number in range(len(answers)):
        client = WorkerClient(path, timeout=5.0)
        try:
            client.attach(node="n", rank=0, layout=LAYOUT, fingerprint=FINGERPRINT)
            attached += 1
        except OasisError:
            assert not client.alive()
        except BaseException as error:
            raise AssertionError(f"answer {number}: {error!r}") from error
        client.close()
    thread.join(5)
    listener.close()
    assert attached < len(answers) and len(os.listdir("/proc/self/fd")) <= before + 2, "descriptors that came along are closed"


ROW_OF_PEER = PeerRow(dp_rank=0, tp_rank=1, control="tcp://h:1", epoch="e", layout=LAYOUT, fingerprint=FINGERPRINT)


def test_rows_of_the_bootstrap_server():
    raw = msgspec.json.encode(ROW_OF_PEER)
    assert decode_peer_row(raw, peer="p") == ROW_OF_PEER
    accepted = 0

    def work(rng):
        nonlocal accepted
        if rng.random() < 0.5:
            text = bytes_of(raw, rng)
        else:
            text = json.dumps(damaged(msgspec.to_builtins(ROW_OF_PEER), rng), default=str).encode()
        row = decode_peer_row(text, peer="p")
        accepted += 1
        assert 0 <= row.dp_rank < MAX_RANK and 0 <= row.tp_rank < MAX_RANK and isinstance(row.layout, KVLayout)

    fuzz(3000, 80_000, work)
    assert accepted > 30


@pytest.mark.parametrize("raw", [b"", b"[" * 100_000, b'{"a":' * 50_000, b" " * (MAX_ROW_BYTES + 1), b"\xff\xfe", b'{"dp_rank":1e400}',
                                 b'{"dp_rank":' + b"9" * 5000 + b"}", b'"\\ud800"', b"NaN", b"null"])
def test_rows_that_json_itself_has_trouble_with(raw):
    with pytest.raises(ProtocolError) as error:
        decode_peer_row(raw, peer="p")
    assert error.value.peer == "p"


# -- orders of a tier to its mover, which are made of what peers said ---------------------------------------------


def test_moves_out_of_bounds_end_by_name_and_touch_nothing():
    world = MoveBench(records=8, windows=2, per_window=4)
    orders = msgspec.msgpack.Decoder(Order)
    sound = world.order(1, range(4), range(4))

    def work(rng):
        fields = msgspec.to_builtins(sound, builtin_types=(bytes,))
        for name in ("sources", "source_generations", "roots", "geometry", "endpoint"):  # the rest is the tier's own
            if rng.random() < 0.4:
                fields[name] = damaged(fields[name], rng) if isinstance(fields[name], dict) else bytes_of(fields[name], rng)
        try:
            order = orders.decode(msgspec.msgpack.encode(fields))
        except (msgspec.DecodeError, OverflowError):
            return
        if len(order.sources) > 64:
            return
        world.ends.clear()
        world.moves.take(order, world.now)
        world.step(times=4)
        assert len(world.ends) == 1 and world.at_rest()
        if world.ends[0].error is None and order.sources:
            assert world.arrived(range(4), range(4))
            world.own[:] = 0
        assert world.untouched(range(8))

    fuzz(1500, 90_000, work)
    world.moves.close()
    world.server.close()


# -- lists, and what there must not be ----------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [bytes(31), bytes(33), bytes(32 * (MAX_HASHES + 1))], ids=["short", "long", "many"])
def test_lists_of_hashes_are_bounded(raw):
    with pytest.raises(ProtocolError):
        split_hashes(raw, room=1)


@pytest.mark.parametrize("theirs, field", [(dict(tp_size=2), "tp_size"), (dict(block_tokens=64), "block_tokens"), (dict(kv_heads=7), "kv_heads"),
                                           (dict(num_layers=3), "num_layers"), (dict(head_dim=5), "head_dim"), (dict(itemsize=2), "itemsize")])
def test_a_layout_that_differs_is_refused_by_the_field(theirs, field):
    """Tensor parallelism 1 and 2, page 16 and 64, odd head counts: as a manifest says, in both directions."""
    other = small_layout(**theirs)
    with pytest.raises(LayoutMismatch) as error:
        unpacked(manifest(layout=other))
    assert error.value.field == field and error.value.room == 7 and field in str(error.value)
    with pytest.raises(LayoutMismatch) as error:
        other.require_equal(LAYOUT, peer="p")
    assert error.value.field == field


FORBIDDEN = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


@pytest.mark.parametrize("package", ["transport", "decode_node", "prefill_node"])
def test_nothing_that_runs_what_it_reads_is_imported(package):
    root, seen = Path(__file__).parents[2] / package, 0
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not FORBIDDEN & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                assert name not in ("send_pyobj", "recv_pyobj", "get_serialized_descs", "deserialize_descs"), f"{path}: pickles"
        seen += 1
    assert seen > 5
