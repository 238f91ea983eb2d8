"""The protocol: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import pickle
import random
import struct
import typing

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_rig import FINGERPRINT, small_layout

from transport import errors
from transport import messages as m
from transport.dataplane import Endpoint
from transport.errors import CapacityError, LayoutMismatch, OasisError, ProtocolError, RoomFailed
from transport.layout import ArenaGeometry

LAYOUT = small_layout()
CUT = ArenaGeometry.fit(LAYOUT, 1 << 20)
ENDPOINT = Endpoint.make("nixl", "node:1", "", 1 << 20, 1 << 40, b"blob" * 20)

REQUESTS = [
    m.Hello(seq=1, protocol=m.PROTOCOL, role="worker", node="n", rank=0, layout=LAYOUT, fingerprint=FINGERPRINT, control="tcp://h:2"),
    m.Ping(seq=2),
    m.Open(seq=3, room=2**63 - 1, rank=0, hashes=bytes(range(64)), private=1, seed=bytes(32), wish=m.Wish(1, 2, 1, 0.25)),
    m.Commit(seq=4, room=7, rank=1, prompt_tokens=4096, roots=bytes(80), ranking=bytes(24), metadata=(b"a" * 8, b"")),
    m.Abort(seq=5, room=7, rank=0, reason="why ü"),
    m.Await(seq=6, epoch="e", room=7, rank=0, seconds=1.5),
    m.Renew(seq=7, epoch="e", leases=bytes(16)),
    m.Release(seq=8, epoch="e", leases=bytes(8)),
    m.Cancel(seq=9, epoch="e", room=-1, rank=0),
    m.Lookup(seq=10, epoch="e", hashes=bytes(range(96)), hold=True),
    m.Fill(seq=11, room=7, rank=0, prompt_tokens=9, roots=bytes(24), ranking=b"", metadata=(b"x",), sources=bytes(12), generations=bytes(24),
           geometry=CUT, endpoints=(ENDPOINT,)),
    m.Donate(seq=12, epoch="e", depth=3, hashes=bytes(range(32)), payloads=bytes(64), summaries=bytes(8), checks=bytes(8)),
]
REPLIES = [
    m.Welcome(seq=1, epoch="e", control="tcp://h:1", geometry=CUT, endpoints=(ENDPOINT,), lease_seconds=30.0, planes=("nixl",),
              memory_nodes=("tcp://memory:1", "tcp://memory:2")),
    m.Ok(seq=2),
    m.Failure(seq=3, code="RoomFailed", message="m", room=7, peer="p", limit="l", retryable=True),
    m.Opened(seq=4, records=bytes(8), generations=bytes(16), roots=bytes(16), fresh=b"\1\0"),
    m.Manifest(seq=5, epoch="e", room=7, rank=0, lease=3, lease_seconds=30.0, layout=LAYOUT, fingerprint=FINGERPRINT, prompt_tokens=5,
               seed=bytes(32), hashes=bytes(range(32)), records=bytes(8), generations=bytes(16), roots=bytes(16), ranking=b"", metadata=(b"x",)),
    m.Renewed(seq=6, gone=bytes(8)),
    m.Moved(seq=7, control="tcp://memory:1"),
    m.Held(seq=8, records=bytes(12), generations=bytes(24), roots=bytes(24), lease=9, lease_seconds=30.0),
]
CASES = [(r, m.decode_request) for r in REQUESTS] + [(r, m.decode_reply) for r in REPLIES]
OPTIONAL = {m.Abort: ("lost",), m.Await: ("begin",), m.Release: ("doubted",), m.Hello: ("control",), m.Welcome: ("memory_nodes",), m.Open: ("wish",)}
"""Fields that may be left out, beside those of a failure."""
IDS = [type(r).__name__ for r, _ in CASES]


def refused(decode, raw: bytes) -> bool:
    """False: it was understood. Anything but ``ProtocolError`` is a failure of the test."""
    try:
        decode(raw, peer="them")
    except ProtocolError as error:
        assert error.peer == "them"
        return True
    return False


def test_every_message_is_here():
    known = set(typing.get_args(m.Request)) | set(typing.get_args(m.Reply))
    assert {type(r) for r, _ in CASES} == known


@pytest.mark.parametrize("message, decode", CASES, ids=IDS)
def test_round_trip(message, decode):
    assert decode(m.encode(message)) == message


@pytest.mark.parametrize("message, decode", CASES, ids=IDS)
def test_the_other_conversations_messages_are_refused(message, decode):
    assert refused(m.decode_reply if decode is m.decode_request else m.decode_request, m.encode(message))


@pytest.mark.parametrize("message, decode", CASES, ids=IDS)
def test_every_truncation_and_every_tail_is_refused(message, decode):
    raw = m.encode(message)
    assert all(refused(decode, raw[:n]) for n in range(len(raw)))
    assert refused(decode, raw + b"\0") and refused(decode, raw + raw)


@pytest.mark.parametrize("message, decode", CASES, ids=IDS)
def test_fields_too_many_too_few_or_of_another_type_are_refused(message, decode):
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    def encoded(**changes):
        return msgspec.msgpack.encode({**fields, **changes})
    assert not refused(decode, encoded()) and refused(decode, encoded(extra=1)) and refused(decode, encoded(type="Nothing"))
    assert refused(decode, msgspec.msgpack.encode({k: v for k, v in fields.items() if k != "type"}))
    assert refused(decode, encoded(seq="1")) and refused(decode, encoded(seq=1.5)) and refused(decode, encoded(seq=2**64 - 1) + b"\xff")
    for name in fields:
        if name not in ("type", "seq", "room", "peer", "limit", "retryable") + OPTIONAL.get(type(message), ()) or (name == "room" and not isinstance(message, m.Failure)):
            less = {k: v for k, v in fields.items() if k != name}
            assert refused(decode, msgspec.msgpack.encode(less)), name
            assert refused(decode, encoded(**{name: {"a": []}})), name
    assert refused(decode, msgspec.msgpack.encode(list(fields.values()))) and refused(decode, msgspec.msgpack.encode([fields]))


@pytest.mark.parametrize("message, decode", CASES, ids=IDS)
def test_flipped_bits_are_refused_or_understood_but_nothing_else(message, decode):
    raw, rng = m.encode(message), random.Random(7)
    for bit in range(len(raw) * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        if not refused(decode, bytes(damaged)):
            decoded = decode(bytes(damaged))
            assert decode(m.encode(decoded)) == decoded or decoded != decoded or "nan" in repr(decoded)
    for _ in range(300):
        damaged = bytearray(raw)
        for _ in range(rng.randint(2, 8)):
            damaged[rng.randrange(len(raw))] = rng.randrange(256)
        refused(decode, bytes(damaged))


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(raw):
    assert refused(m.decode_request, raw) and refused(m.decode_reply, raw)


@pytest.mark.parametrize("claim", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"], ids=["array", "map", "str", "bin", "ext"])
def test_a_length_that_is_claimed_but_not_there_costs_no_memory(claim):
    import tracemalloc

    raw = m.encode(REQUESTS[3]).replace(msgspec.msgpack.encode(list(REQUESTS[3].metadata)), claim + struct.pack(">I", 0xFFFFFFFF))
    assert claim in raw
    tracemalloc.start()
    assert refused(m.decode_request, raw) and refused(m.decode_request, claim + struct.pack(">I", 0xFFFFFFFF))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_deep_nesting_large_messages_bad_text_and_pickles():
    assert refused(m.decode_request, b"\x91" * 100_000 + b"\xc0") and refused(m.decode_reply, b"\x81\xa1a" * 50_000)
    assert refused(m.decode_request, bytes(m.MAX_MESSAGE + 1))
    assert refused(m.decode_request, m.encode(REQUESTS[4]).replace("ü".encode(), b"\xff\xfe"))
    assert refused(m.decode_request, pickle.dumps(REQUESTS[1])) and refused(m.decode_request, pickle.dumps({"type": "Ping"}))
    assert refused(m.decode_request, b"") and refused(m.decode_request, b"\xc1")


def test_structs_that_refuse_their_own_fields_do_so_as_protocol_errors():
    fields = msgspec.to_builtins(REQUESTS[0], builtin_types=(bytes,))
    for name, value in (("num_layers", 0), ("kv_heads", 1 << 30), ("summary_bytes", -1)):
        assert refused(m.decode_request, msgspec.msgpack.encode({**fields, "layout": {**fields["layout"], name: value}}))


def test_a_tier_without_memory_nodes_says_so():
    welcome = msgspec.structs.replace(REPLIES[0], memory_nodes=())
    assert m.decode_reply(m.encode(welcome)).memory_nodes == ()
    fields = {k: v for k, v in msgspec.to_builtins(welcome, builtin_types=(bytes,)).items() if k != "memory_nodes"}
    assert m.decode_reply(msgspec.msgpack.encode(fields)) == welcome
    assert refused(m.decode_reply, msgspec.msgpack.encode({**fields, "memory_nodes": "tcp://memory:1"}))
    assert refused(m.decode_reply, msgspec.msgpack.encode({**fields, "memory_nodes": [7]}))


def test_no_record_can_be_mistaken_for_none():
    assert m.NOWHERE > m.MAX_RECORDS and m.unpack(m.pack([m.NOWHERE], "u4"), "u4").tolist() == [m.NOWHERE]


def test_messages_cannot_be_changed():
    with pytest.raises(AttributeError):
        REQUESTS[1].seq = 5


# -- errors over the wire -----------------------------------------------------------------------------------------


def all_errors(cls=OasisError):
    return [cls, *(e for sub in cls.__subclasses__() for e in all_errors(sub))]


@pytest.mark.parametrize("cls", all_errors())
def test_every_error_crosses_the_wire_as_itself(cls):
    error = cls("what went wrong", room=3, peer="p", limit="5 s")
    reply = m.decode_reply(m.encode(m.failure(error, 9)))
    assert reply.seq == 9
    with pytest.raises(OasisError) as caught:
        m.raise_failure(reply, peer="the tier")
    back = caught.value
    assert type(back) is cls and (back.message, back.room, back.peer, back.limit) == ("what went wrong", 3, "p", "5 s")
    assert str(back) == "what went wrong [room=3, peer=p, limit=5 s]"


def test_who_may_try_again_crosses_the_wire_too():
    for retryable in (True, False):
        with pytest.raises(CapacityError) as caught:
            m.raise_failure(m.failure(CapacityError("full", retryable=retryable), 1), peer="tier")
        assert caught.value.retryable is retryable and caught.value.peer == "tier"
    assert not RoomFailed("x").retryable


@pytest.mark.parametrize("code", ["Unheard", "", "Exception", "OasisError2", "__init__"])
def test_an_unknown_code_is_a_protocol_error(code):
    assert type(errors.from_wire(code, "m")) is ProtocolError


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = [line.split("|--")[-1].split("`--")[-1].split()[0] for line in errors.__doc__.splitlines() if "--" in line]
    assert set(drawn) | {"OasisError"} == {cls.__name__ for cls in all_errors()}
    assert LayoutMismatch("x", field="dtype").field == "dtype"


# -- arrays -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50))
def test_u64_arrays_are_little_endian(values):
    raw = m.pack(np.array(values, np.uint64), "u8")
    assert raw == b"".join(struct.pack("<Q", v) for v in values)
    assert m.unpack(raw, "u8").tolist() == values == m.unpack(raw, "u8", count=len(values)).tolist()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_u32_arrays_are_little_endian(values):
    raw = m.pack(np.array(values, np.int64), "u4")
    assert raw == struct.pack(f"<{len(values)}I", *values) and m.unpack(raw, "u4").tolist() == values


@pytest.mark.parametrize("raw, dtype, more", [(bytes(7), "u8", {}), (bytes(6), "u4", {}), (bytes(16), "u8", dict(count=1)), (bytes(16), "u8", dict(count=3)),
                                              (bytes(16), "u8", dict(limit=1)), (b"", "u4", dict(count=1))])
def test_arrays_of_another_length_are_refused(raw, dtype, more):
    with pytest.raises(ProtocolError):
        m.unpack(raw, dtype, **more)
