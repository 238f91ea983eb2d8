"""Hostile input, made from sound messages: every kind of damage that a decoder may meet. Seeded, so that a failure can be run again."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import msgspec

EDGES = (-(2**63), -(2**31) - 1, -1, 0, 1, 2, 2**16, 2**20, 2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (float("nan"), float("inf"), -float("inf"), -0.0, -1.0, 1e308, 5e-324)
TEXTS = ("", "\0", "x" * 5000, "tcp://", "tcp://[::]:0#" + "0" * 64, "../../etc", "𝕊" * 9, "nixl", "{}", "%s%n")


def bytes_of(raw: bytes, rng: random.Random) -> bytes:
    """``raw`` damaged without an idea of what it is."""
    kind = rng.randrange(8)
    out = bytearray(raw)
    if kind == 0:
        return rng.randbytes(rng.choice([0, 1, 2, 7, 64, 1000]))
    if kind == 1:
        return raw[: rng.randrange(len(raw) + 1)]
    if kind == 2:
        return raw + rng.randbytes(rng.randint(1, 40))
    if kind == 3:
        return rng.choice([b"\x91", b"\x81\xa1a", b"[", b'{"a":', b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]) * rng.choice([1, 900, 60_000]) + raw
    if kind == 4 and raw:  # a length or a number in the middle becomes another
        at = rng.randrange(len(raw))
        size = rng.choice([1, 4, 8])
        out[at : at + size] = rng.choice([b"\xff", b"\x7f", b"\x80", b"\x00"]) * size
        return bytes(out)
    if kind == 5 and raw:
        at, other = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
        return raw[:at] + raw[other:] + raw[at:other]
    for _ in range(rng.randint(1, 6) if raw else 0):
        at = rng.randrange(len(raw))
        out[at] = out[at] ^ 1 << rng.randrange(8) if kind == 6 else rng.randrange(256)
    return bytes(out)


def value_of(value: object, rng: random.Random) -> object:
    """Another value in its place, mostly of its type."""
    if rng.random() < 0.05:
        return rng.choice([None, True, [], {}, "text", b"bytes", 1.5, [[[[[]]]]]])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([*EDGES, min(value + 1, EDGES[-1]), max(value - 1, EDGES[0])])
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, str):
        return rng.choice([*TEXTS, value + "x"])
    if isinstance(value, bytes):
        edge = rng.choice(EDGES) % 2**64
        return rng.choice([b"", value[:-1], value + b"\0", value * 2, b"\xff" * len(value), bytes(len(value)), rng.randbytes(len(value)),
                           (edge.to_bytes(8, "little") * (len(value) // 8 + 1))[: len(value)], bytes(1 << 16)])
    if isinstance(value, dict) and value:
        return damaged(value, rng)
    if isinstance(value, list):
        return rng.choice([[], value * 2, value * 300, value[:-1], [value_of(v, rng) for v in value]])
    return value


def damaged(fields: dict, rng: random.Random) -> dict:
    """``fields`` with a few of them changed."""
    out = dict(fields)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        name = rng.choice([*out])
        if name != "type":
            out[name] = value_of(out[name], rng)
    return out


def of_message(message: msgspec.Struct, rng: random.Random) -> bytes:
    """MessagePack of ``message`` with changed fields, or damaged as bytes."""
    if rng.random() < 0.3:
        return bytes_of(msgspec.msgpack.encode(message), rng)
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    if isinstance(fields, list):  # a struct that travels as an array
        return msgspec.msgpack.encode(list(damaged(dict(enumerate(fields)), rng).values()))
    return msgspec.msgpack.encode(damaged(fields, rng))


def frames_of(message: bytes, limit: int, rng: random.Random) -> list[bytes]:
    """What a socket may get in place of ``message`` behind its length of 4 bytes, which is ``limit`` at most: each ends a connection."""
    def framed(length: int, rest: bytes = b"") -> bytes:
        return struct.pack("<I", length) + rest

    n = len(message)
    return [b"", b"\0", framed(0), framed(2**32 - 1), framed(limit + 1, bytes(100)), framed(100, bytes(5)), framed(64, rng.randbytes(64)), rng.randbytes(1000),
            framed(n, message[: n // 2]), framed(n, message[:-1] + b"\xc1"), framed(n, message) + rng.randbytes(7)]


def seeds(count: int, start: int) -> Iterator[tuple[int, random.Random]]:
    for seed in range(start, start + count):
        yield seed, random.Random(seed)
