"""Garbage for every socket of a stack, made from what the real ones say."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import get_args

import msgspec
import psutil
import requests
import zmq

from oasis_sglang.bench.meters import tree
from oasis_sglang.stack import Stack
from transport import messages as m
from transport.dataplane import Endpoint
from transport.errors import ProtocolError
from transport.peer_row import TOKEN_HEADER, PeerRow
from transport.planes.zmq import VERSION, ReadReply, ReadRequest

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))
from hostile_rig import bytes_of, damaged, frames_of, of_message, seeds  # noqa: E402


def dealer(undo: ExitStack, address: str, **options) -> zmq.Socket:
    socket = undo.enter_context(zmq.Context()).socket(zmq.DEALER)
    socket.linger, socket.rcvtimeo = 0, 10_000
    for name, value in options.items():
        setattr(socket, name, value)
    socket.connect(address)
    undo.callback(socket.close)
    return socket


def welcome_of(reader: zmq.Socket, row: PeerRow, role: str = "reader") -> m.Welcome:
    reader.send(m.encode(m.Hello(protocol=m.PROTOCOL, role=role, node="hostile", rank=0, layout=row.layout, fingerprint=row.fingerprint, control="hostile")))
    return m.raise_failure(m.decode_reply(reader.recv()), peer="tier")


def sound_requests(row: PeerRow, welcome: m.Welcome) -> list[m.Message]:
    """One of each kind, as the real ones are."""
    layout, at, pages = row.layout, dict(room=77, rank=0), dict(seed=bytes(32), hashes=bytes(range(64)), private=1)
    hello = dict(protocol=m.PROTOCOL, node="hostile", rank=0, layout=layout, fingerprint=row.fingerprint)
    commit = dict(at, prompt_tokens=40, roots=bytes(24), ranking=b"", metadata=tuple(map(bytes, layout.metadata_lens)))
    epoch = dict(epoch=welcome.epoch)
    found = [m.Hello(role="reader", **hello), m.Ping(), m.Open(**at, **pages, wish=m.Wish(0, 2, 1, 0.1)), m.Commit(**commit), m.Abort(**at, reason="r"),
             m.Fill(**commit, sources=bytes(12), generations=bytes(24), geometry=welcome.geometry, endpoints=welcome.endpoints),
             m.Await(**epoch, **at, seconds=0.5), m.Renew(**epoch, leases=bytes(16)), m.Release(**epoch, leases=bytes(8)), m.Cancel(**epoch, **at),
             m.Lookup(**epoch, hashes=bytes(range(96)), hold=True),
             m.Donate(**epoch, depth=0, hashes=bytes(32), payloads=bytes(layout.payload_bytes), summaries=bytes(layout.summary_total), checks=bytes(8))]
    assert {type(request) for request in found} == set(get_args(m.Request))
    return found


def no_request(raw: bytes) -> bool:
    try:
        m.decode_request(raw)
    except ProtocolError:
        return True
    return False


def talk_to_the_tier(undo: ExitStack, row: PeerRow) -> Counter:
    """Damaged requests of a stranger, of a reader and of another tier. What it answered, and how many of them were ``none`` at all."""
    found = Counter()
    for start, role in ((1000, ""), (2000, "reader"), (3000, "tier")):
        hostile = dealer(undo, row.control)
        welcome = welcome_of(hostile, row, role or "reader")
        if not role:
            hostile = dealer(undo, row.control)
        sound = sound_requests(row, welcome)
        for _, rng in seeds(400, start):
            raw = of_message(rng.choice(sound), rng)
            found["none"] += no_request(raw)
            hostile.send(raw)
            if rng.random() < 0.1:
                hostile.send_multipart([rng.randbytes(rng.choice([0, 5, 500])) for _ in range(rng.randint(2, 9))])
                found["none"] += 1
        hostile.send(bytes(m.MAX_READER_MESSAGE + 1))
        hostile.send(m.encode(m.Ping(seq=99)))
        while not (isinstance(reply := m.decode_reply(hostile.recv()), m.Ok) and reply.seq == 99):
            found[getattr(reply, "code", type(reply).__name__)] += 1
    deaf = dealer(undo, row.control, rcvhwm=1)
    for _ in range(3000):
        deaf.send(m.encode(m.Ping()))
    return found


def talk_to_its_socket(undo: ExitStack, path: str, sound: list[m.Message]) -> int:
    """How many connections it had to end because of what came; some others stay half open."""
    hello, ended = msgspec.structs.replace(sound[0], role="worker"), 0
    with_hello = m.LENGTH.pack(len(raw := m.encode(hello))) + raw
    garbage = [frame for _, rng in seeds(3, 4000) for frame in frames_of(raw, m.MAX_MESSAGE, rng)]
    for _, rng in seeds(100, 5000):
        ended += no_request(damage := of_message(rng.choice(sound), rng))
        garbage.append(with_hello * (rng.random() < 0.5) + m.LENGTH.pack(len(damage)) + damage)
    for raw in (b"", b"\1", m.LENGTH.pack(1000) + bytes(5), with_hello + b"\1"):
        (held := undo.enter_context(socket.socket(socket.AF_UNIX))).connect(path)
        held.sendall(raw)
    for raw in garbage:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            with suppress(OSError):
                sock.sendall(raw)
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(10)
                while sock.recv(1 << 16):
                    pass
    return ended


def talk_to_the_data_plane(undo: ExitStack, endpoint: Endpoint) -> None:
    reader = dealer(undo, endpoint.address)
    sound = [ReadRequest(VERSION, endpoint.name, 1, bytes(16), bytes([64, *bytes(7)]) * 2), ReadRequest(VERSION, endpoint.name, 2, bytes(8), bytes([1, *bytes(7)]))]
    last, errors = msgspec.structs.replace(sound[0], number=2**40), Counter()
    for seed, rng in seeds(300, 6000):
        raw = of_message(rng.choice(sound), rng)
        sender = reader if len(raw) < 1 << 16 else dealer(undo, endpoint.address)  # one that sends too much is cut off
        sender.send_multipart([raw] * rng.choice([1, 1, 1, 2]))
        if seed % 10:
            continue  # whoever asks for much more at once loses answers
        reader.send(msgspec.msgpack.encode(last))
        while (reply := msgspec.msgpack.decode((answer := reader.recv_multipart())[0], type=ReadReply)).number != last.number or reply.error:
            errors[reply.error] += 1
        assert sum(map(len, answer[1:])) == 128
    assert errors["BoundsError"] and errors["StaleEpoch"] and errors["ProtocolError"], errors


def talk_to_the_bootstrap_server(base: str, row: PeerRow) -> None:
    """Whatever comes without the worker's secret is refused, what other tier or layout it may name."""
    good = msgspec.json.encode(row)
    lies = [msgspec.structs.replace(row, epoch="0" * 32), msgspec.structs.replace(row, control="tcp://127.0.0.1:1"), msgspec.structs.replace(row, layout=msgspec.structs.replace(row.layout, kv_heads=7)),
            msgspec.structs.replace(row, dp_rank=3), msgspec.structs.replace(row, fingerprint="0" * 64)]
    rows = [msgspec.json.encode(lie) for lie in lies] + [good]
    for _, rng in seeds(40, 7000):
        rows.append(bytes_of(good, rng) if rng.random() < 0.5 else json.dumps(damaged(msgspec.to_builtins(row), rng), default=str).encode())
    topology = requests.get(route := f"{base}/route", params={f"{key}_rank": -1 for key in ("prefill_dp", "prefill_cp", "target_tp", "target_pp")}).json()
    for raw in rows:
        assert 400 <= requests.put(f"{base}/oasis/peer", data=raw, headers={TOKEN_HEADER: "0" * 32}).status_code < 500
        requests.put(route, data=raw)
        with suppress(requests.RequestException):
            requests.get(f"{base}/oasis/peer", params={"dp_rank": raw[:20], "tp_rank": "1e9"})
    assert topology == requests.get(route, params={f"{key}_rank": -1 for key in ("prefill_dp", "prefill_cp", "target_tp", "target_pp")}).json()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x04\x1a\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
HTTP = b"GET /state HTTP/1.1\r\nHost: x\r\n"
RAW = [b"", b"\0", bytes(64), b"\xff" * 200, b"GET /st", HTTP, HTTP + b"Content-Length: 99999999999999999999\r\n\r\n", HTTP + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
       HTTP + b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n", b"POST /healthz HTTP/9.9\r\n\r\n", b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", GREETING[:10], GREETING,
       GREETING + READY + b"\x02" + b"\x7f" + b"\xff" * 7, GREETING + READY + b"\x03\x00" * 50, GREETING[:12] + b"CURVE" + bytes(47), b"\x16\x03\x01\x02\x00\x01\x00"]


def listening(stack: Stack, name: str) -> set[tuple[str, int]]:
    """Every address at which the server, or what it started, takes connections."""
    return {(c.laddr.ip, c.laddr.port) for pid in tree([stack.servers[name].pid]) for c in psutil.Process(pid).net_connections("tcp")
            if c.status == psutil.CONN_LISTEN}


def throw_at(address: tuple[str, int], undo: ExitStack, *, all_of_it: bool) -> None:
    """Keeps every connection open, half of them in the middle of something. Not ``all_of_it``: torch.distributed, which is among the rest, never
    closes one that does not speak its language, and a server is not meant to have many more open files afterwards."""
    garbage = [*RAW, *(rng.randbytes(rng.choice([9, 64, 5000])) for _, rng in seeds(6, 8000))]
    for raw in garbage if all_of_it else garbage[::6]:
        with suppress(OSError):
            sock = undo.enter_context(socket.create_connection(address, timeout=5))
            sock.sendall(raw)


def takes_messages(undo: ExitStack, addresses: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Where a ZeroMQ PULL lets anybody put what nobody reads."""
    context = undo.enter_context(zmq.Context())
    found = {address: context.socket(zmq.PUSH) for address in addresses}
    for (host, port), push in found.items():
        push.linger, push.immediate, push.ipv6 = 0, True, True
        push.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    time.sleep(0.5)
    return [address for address, push in found.items() if push.poll(0, zmq.POLLOUT)]
