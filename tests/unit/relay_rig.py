"""A tier without a socket: a worker, a reader, memory nodes that the test plays, and time as a number."""

from __future__ import annotations

from node_rig import FINGERPRINT, row_of, small_layout

from transport import messages as m
from transport.dataplane import Endpoint
from transport.memory_nodes import MemoryNodes
from transport.relay import RelayTier
from transport.rooms import TierLimits

LAYOUT = small_layout()
STRIDE = -(-LAYOUT.payload_bytes // 64) * 64 + -(-LAYOUT.index_bytes // 64) * 64
RECORDS = 16
NODES = ("tcp://a:1", "tcp://b:1", "tcp://c:1")
LIMITS = TierLimits(lease_seconds=10.0, grace_seconds=2.0, room_seconds=30.0)
SEED = b"s" * 32
HELLO = dict(protocol=m.PROTOCOL, node="n", rank=0, layout=LAYOUT, fingerprint=FINGERPRINT)


def hashes(n: int, salt: int = 0) -> bytes:
    return b"".join(bytes([salt, k]) + bytes(30) for k in range(n))


def endpoint(kind: str = "zmq", size: int = RECORDS * STRIDE) -> Endpoint:
    return Endpoint.make(kind, "source", "tcp://source:9", size)


class Bench:
    """A tier, a worker W, a reader R, and a clock."""

    def __init__(self, make, **more):
        self.now = 0.0
        self.tier = make(epoch="E", arena_size=RECORDS * STRIDE, control="tcp://me:1", endpoints=(endpoint(),), planes=("zmq",), limits=LIMITS,
                         clock=lambda: self.now, **more)
        self.seq = 0

    def ask(self, session, make, **fields):
        self.seq += 1
        if "epoch" in make.__struct_fields__:
            fields["epoch"] = "E"
        return self.tier.handle(session, make(seq=self.seq, **fields))

    def told(self, session):
        """What the outbox has for this session, and takes it."""
        mine = [reply for who, reply in self.tier.outbox if who == session]
        self.tier.outbox = [(who, reply) for who, reply in self.tier.outbox if who != session]
        return mine

    def baseline(self) -> bool:
        now = self.tier.inventory()
        return now["free"] + now["cached"] == RECORDS and not any(now.get(k) for k in ("writing", "holders", "held", "rooms", "leases", "moves", "fetches"))


class Upstream:
    """Keeps what is asked; ``answer`` answers the oldest. ``welcomes``: by address, what nodes said."""

    def __init__(self):
        self.asked, self.resets, self.welcomes, self.refreshed = [], 0, {}, []

    def ask(self, address, make, fields, done, seconds):
        assert seconds > 0
        self.asked.append((address, make, fields, done))

    def control(self, address):
        return address.replace("tcp://", "tcp://public-")

    def welcome(self, address):
        return self.welcomes.get(address)

    def refresh(self, address):
        self.refreshed.append(address)

    def reset(self):
        self.resets += 1

    def answer(self, reply):
        address, make, fields, done = self.asked.pop(0)
        done(reply)
        return address, make, fields


class Local(Bench):
    def __init__(self, nodes=NODES):
        self.upstream = Upstream()
        super().__init__(lambda **about: RelayTier(nodes=MemoryNodes(",".join(nodes), clock=lambda: self.now), upstream=self.upstream, **about))
        assert isinstance(self.ask("W", m.Hello, role="worker", **HELLO), m.Welcome)
        self.ask("R", m.Hello, role="reader", **HELLO)

    def open(self, room=1, pages=4, private=1, salt=0, wish=None):
        return self.ask("W", m.Open, room=room, rank=0, seed=SEED, hashes=hashes(pages, salt), private=private, wish=wish)

    def reserved(self, fresh) -> m.Opened:
        """A memory node's answer; its roots are 1000 + page."""
        n = len(fresh)
        return m.Opened(records=m.pack(range(50, 50 + n), "u4"), generations=m.pack([9] * n, "u8"),
                        roots=m.pack([0 if f else 1000 + k for k, f in enumerate(fresh)], "u8"), fresh=bytes(fresh))

    def opened(self, fresh=(1, 1, 1, 1, 1), **more) -> m.Opened:
        assert self.open(pages=len(fresh) - 1, **more) is None
        self.upstream.answer(self.reserved(fresh))
        (reply,) = self.told("W")
        assert isinstance(reply, m.Opened), reply
        return reply

    def commit(self, room=1, pages=5, session="W"):
        return self.ask(session, m.Commit, room=room, rank=0, prompt_tokens=4 * pages - 2, roots=m.pack(range(1, pages + 1), "u8"), ranking=b"", metadata=row_of(room))

    def committed(self, **more):
        assert self.commit(**more) is None
        self.upstream.answer(m.Ok())
        (reply,) = self.told("W")
        return reply
