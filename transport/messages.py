"""The whole protocol on one page: frozen msgspec structs, msgpack on the wire, never pickle.

Three conversations, one vocabulary. A *worker* (prefill rank) talks to its node's tier over a unix socket whose closing
tells the tier that the writer is dead; a *reader* (decode rank) talks over ZeroMQ, and so does a *tier* with the memory
nodes to which it moves what is committed: it opens rooms there as a worker does, and fills them. Each request carries ``seq`` and is
answered by exactly one reply with the same ``seq``: its result or a ``Failure``. Unknown fields and tags are refused;
``PROTOCOL`` is compared in ``Hello``.

Integer arrays travel as little-endian bytes: ``u32``/``u64`` below pack and unpack them.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
import numpy as np

from transport.dataplane import Endpoint
from transport.errors import OasisError, ProtocolError, from_wire
from transport.layout import ArenaGeometry, KVLayout

PROTOCOL = 5
MAX_MESSAGE = 64 << 20
"""Bytes of one message at most: a manifest of a million tokens is about 1.5 MB."""
MAX_READER_MESSAGE = 1 << 20
"""Bytes of what a reader may send: a renewal of all its leases, or the hashes of a prompt of half a million tokens."""
MAX_RECORDS = 1 << 20
"""Records of one prompt at most."""
LENGTH = struct.Struct("<I")
"""Frame header on the unix socket: bytes of the message that follows."""


LeaseNumber = Annotated[int, msgspec.Meta(ge=0)]
"""Lists of them are arrays of u64 (more, MessagePack has not): a negative one could not be renewed, nor could any beside it."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    seq: int = 0


# -- from both sides --------------------------------------------------------------------------------------------


class Hello(Message):
    """First message. ``role``: "worker", "reader" or "tier". The tier refuses another protocol, layout or model by name.
    ``control`` of a tier: its own, by which its next connection is known to replace this one."""

    protocol: int
    role: str
    node: str
    rank: int
    layout: KVLayout
    fingerprint: str
    control: str = ""


class Welcome(Message):
    """``epoch`` is this incarnation of the tier: records, leases and endpoints of another epoch mean nothing.

    ``control`` is the ZeroMQ address readers use; ``planes`` the kinds of data plane the tier serves and ``endpoints``
    those of them that are up: a plane that died comes back under another endpoint, which a reader learns by saying
    ``Hello`` again. ``memory_nodes`` are the ZeroMQ addresses of the tiers to which this one moves what is committed: a
    reader that loses this tier asks there. Over the unix socket the arena's file descriptor follows in the same packet.
    """

    epoch: str
    control: str
    geometry: ArenaGeometry
    endpoints: tuple[Endpoint, ...]
    planes: tuple[str, ...]
    lease_seconds: float
    memory_nodes: tuple[str, ...] = ()


class Failure(Message):
    code: str
    message: str
    room: int | None = None
    peer: str | None = None
    limit: str | None = None
    retryable: bool = False


class Ok(Message):
    pass


class Ping(Message):
    pass


# -- worker -> tier ---------------------------------------------------------------------------------------------


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pages ``first`` to ``stop`` (not included) of a prompt: the worker lacks them, and would restore them if its tier had them.
    Fewer than ``least`` from ``first`` on are of no use to it; each saves it ``page_seconds``."""

    first: int
    stop: int
    least: int
    page_seconds: float


class Open(Message):
    """Reserves a room and all records of its prompt, or nothing.

    ``hashes``: 32 bytes per whole page, in order; a page already sealed in the tier is leased again. ``seed``: 32 bytes,
    start of their chain (empty: the prompt has none); readers get both, to know their own copies again.
    ``private``: pages without a hash behind them (the partial page, or all pages of an unhashable prompt). ``wish``: what a tier
    with memory nodes may fetch back from there before it answers.
    Errors: ``DuplicateRoom``; ``CapacityError`` (``retryable`` unless the prompt can never fit).
    """

    room: int
    rank: int
    seed: bytes
    hashes: bytes
    private: int
    wish: Wish | None = None


class Opened(Message):
    """``records`` u32, ``generations`` u64 and ``roots`` u64 per page; ``fresh`` one byte per page: 1 = to be written.
    ``roots`` are the checksums of the pages that need no writing. ``NOWHERE`` in place of a record: a memory node has it."""

    records: bytes
    generations: bytes
    roots: bytes
    fresh: bytes


class Commit(Message):
    """Seals the room's records and publishes its manifest. ``roots`` u64 per page; ``ranking`` u32 [piece][k]: for each
    (layer, KV head) the prompt's whole blocks that its last tokens attend to most, best first (empty: not known);
    ``metadata`` the hand-over row."""

    room: int
    rank: int
    prompt_tokens: int
    roots: bytes
    ranking: bytes
    metadata: tuple[bytes, ...]


class Abort(Message):
    """Gives the room up; no copy of it is in flight any more. Readers waiting for it get ``RoomFailed``, ``retryable`` if this is:
    there was no room for it now, and there may be later. ``lost``: nobody wanted that, its tier died; they get ``PeerLost``."""

    room: int
    rank: int
    reason: str
    retryable: bool = False
    lost: bool = False


class Fill(Message):
    """A tier's commit at a memory node, which first pulls the room's fresh pages from that tier's arena and checks them.

    ``sources`` u32 and ``generations`` u64 per fresh page, in order: their records there; ``geometry`` and ``endpoints``: of
    that arena. The rest as in ``Commit``. Replies ``Ok``. After an error the room is still open, to be filled again or aborted.
    """

    room: int
    rank: int
    prompt_tokens: int
    roots: bytes
    ranking: bytes
    metadata: tuple[bytes, ...]
    sources: bytes
    generations: bytes
    geometry: ArenaGeometry
    endpoints: tuple[Endpoint, ...]


# -- reader -> tier ---------------------------------------------------------------------------------------------


class Await(Message):
    """Asks for the room's manifest and waits for it at the tier, at most ``seconds``, and at most ``begin`` seconds until a worker has
    asked for the room (``PeerLost``: its prompt never arrived). Replies ``Manifest``, or ``Moved``;
    errors ``RoomFailed``, ``PeerLost`` (its prefill worker died), ``DeadlineExceeded``, ``DuplicateRoom`` (claimed by another reader), ``StaleEpoch``."""

    epoch: str
    room: int
    rank: int
    seconds: float
    begin: float = float("inf")


class Manifest(Message):
    """What a decode node needs to admit a request: where the records are, what they hold, how long they stay. ``seed`` and
    ``hashes`` as in ``Open``."""

    epoch: str
    room: int
    rank: int
    lease: LeaseNumber
    lease_seconds: float
    layout: KVLayout
    fingerprint: str
    prompt_tokens: int
    seed: bytes
    hashes: bytes
    records: bytes
    generations: bytes
    roots: bytes
    ranking: bytes
    metadata: tuple[bytes, ...]


class Moved(Message):
    """The room was committed and is at another tier, the memory node at ``control``: await it there."""

    control: str


class Renew(Message):
    """Keeps leases alive. Replies ``Renewed`` with those that are gone; ``ProtocolError`` when one is another session's."""

    epoch: str
    leases: bytes


class Renewed(Message):
    gone: bytes


class Release(Message):
    """Ends leases. Idempotent: an unknown lease is no error. One of another session is: ``ProtocolError``, and none has ended.
    ``doubted``: what was read under them was not what was published, so nobody else is to find these records."""

    epoch: str
    leases: bytes
    doubted: bool = False


class Cancel(Message):
    """The reader no longer wants a room it awaited: a later commit of it is dropped at once."""

    epoch: str
    room: int
    rank: int


class Lookup(Message):
    """Which of these pages does the tier hold? ``hashes`` as in ``Open``. ``hold``: lease those that it does, until
    ``Release`` or expiry, as a manifest's lease. Replies ``Held``."""

    epoch: str
    hashes: bytes
    hold: bool


class Held(Message):
    """``records`` u32, ``generations`` and ``roots`` u64, per hash; ``NOWHERE`` for those that are not here. ``lease``: 0
    when nothing is held."""

    records: bytes
    generations: bytes
    roots: bytes
    lease: LeaseNumber
    lease_seconds: float


class Donate(Message):
    """Whole blocks that the reader has computed: ``hashes`` as in ``Open``, of consecutive pages after the first ``depth`` of their
    chain; ``payloads`` and ``summaries`` as in records; ``checks`` u64 per block, of both (``integrity.block_checks``). Replies
    ``Ok``; errors ``CapacityError`` when there is no room, ``IntegrityError`` when they are not what was sent."""

    epoch: str
    depth: int
    hashes: bytes
    payloads: bytes
    summaries: bytes
    checks: bytes


NOWHERE = (1 << 32) - 1
"""In place of a record: there is none."""

Request = Hello | Ping | Open | Commit | Fill | Abort | Await | Renew | Release | Cancel | Lookup | Donate
Reply = Welcome | Ok | Failure | Opened | Manifest | Moved | Renewed | Held

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_request(raw: bytes, *, peer: str = "") -> Request:
    """Raises ``ProtocolError`` for anything that is not exactly one of ours."""
    return _decode(_requests, raw, peer)


def decode_reply(raw: bytes, *, peer: str = "") -> Reply:
    """Raises ``ProtocolError`` for anything that is not exactly one of ours."""
    return _decode(_replies, raw, peer)


def _decode(decoder, raw, peer):
    if len(raw) > MAX_MESSAGE:
        raise ProtocolError("message too large", peer=peer, limit=f"{MAX_MESSAGE} bytes")
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, OasisError, RecursionError) as error:
        raise ProtocolError(f"undecodable message: {error}", peer=peer) from error


def failure(error: OasisError, seq: int) -> Failure:
    return Failure(seq=seq, code=error.code, message=error.message, room=error.room, peer=error.peer,
                   limit=error.limit, retryable=bool(error.retryable))


def raise_failure(reply: Reply, *, peer: str):
    """``reply`` itself, or the error it carries (the reporting ``peer`` named unless it named one)."""
    if isinstance(reply, Failure):
        raise from_wire(reply.code, reply.message, retryable=reply.retryable, room=reply.room, peer=reply.peer or peer, limit=reply.limit)
    return reply


def pack(values, dtype: str) -> bytes:
    """``dtype``: "u4" or "u8", little-endian."""
    return np.ascontiguousarray(values, dtype="<" + dtype).tobytes()


def unpack(raw: bytes, dtype: str, *, count: int | None = None, limit: int = MAX_RECORDS) -> np.ndarray:
    """Raises ``ProtocolError`` when the bytes are not ``count`` (or at most ``limit``) values."""
    itemsize = np.dtype(dtype).itemsize
    n, rest = divmod(len(raw), itemsize)
    if rest or n > limit or (count is not None and n != count):
        raise ProtocolError(f"array of {len(raw)} bytes where {count if count is not None else 'some'} {dtype} were due", limit=f"{limit}")
    return np.frombuffer(raw, dtype="<" + dtype)
