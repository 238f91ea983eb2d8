"""A tier without sockets, under a clock that only moves when told to."""

from __future__ import annotations

from node_rig import FINGERPRINT, ROW, small_layout

from transport import messages as m
from transport.errors import OasisError
from transport.tier import Tier, TierLimits

LAYOUT = small_layout()
LIMITS = TierLimits(lease_seconds=10.0, grace_seconds=2.0, room_seconds=50.0)
SEED = b"seed" * 8
"""Of the chains whose hashes tests make up."""
ROW_BYTES = tuple(bytes(n) for n in ROW)


class Bench:
    """A tier, a clock, and shorthands for what workers (W...) and readers (R...) say."""

    def __init__(self, records: int = 16, limits: TierLimits = LIMITS):
        self.now = 100.0
        self.tier = Tier(epoch="e" * 32, arena_size=records * (768 + 128), control="tcp://x:1", endpoints=(), limits=limits, clock=lambda: self.now)
        self.seq = 0

    def say(self, session, make, **fields):
        self.seq += 1
        if "epoch" in make.__struct_fields__:
            fields.setdefault("epoch", self.tier.epoch)
        return self.tier.handle(session, m.decode_request(m.encode(make(seq=self.seq, **fields))))

    def do(self, session, make, **fields):
        """As ``say``; an error reply is raised."""
        reply = self.say(session, make, **fields)
        return reply if reply is None else m.raise_failure(m.decode_reply(m.encode(reply)), peer="tier")

    def hello(self, session, **changes):
        role = "worker" if session.startswith("W") else "reader"
        return self.do(session, m.Hello, **(dict(protocol=m.PROTOCOL, role=role, node=session, rank=0, layout=LAYOUT, fingerprint=FINGERPRINT) | changes))

    def open(self, session, room, hashes=(), private=0, rank=0, seed=SEED):
        return self.do(session, m.Open, room=room, rank=rank, seed=seed, hashes=b"".join(hashes), private=private)

    def commit(self, session, room, pages, rank=0, roots=None, tokens=None, metadata=ROW_BYTES, ranking=b""):
        roots = range(pages) if roots is None else roots
        return self.do(session, m.Commit, room=room, rank=rank, prompt_tokens=tokens or pages * 4, roots=m.pack(list(roots), "u8"), ranking=ranking,
                       metadata=metadata)

    def publish(self, session, room, hashes, private=0, roots=None):
        """Opens and commits; the committed room is cancelled at once, so that its pages are cached, with nobody holding them."""
        self.open(session, room, hashes, private=private)
        self.commit(session, room, len(hashes) + private, roots=roots)
        self.do("R1", m.Cancel, room=room, rank=0)

    def lookup(self, session, hashes, hold=False):
        return self.do(session, m.Lookup, hashes=b"".join(hashes), hold=hold)

    def await_(self, session, room, seconds=20.0, rank=0):
        return self.do(session, m.Await, room=room, rank=rank, seconds=seconds)

    def mail(self):
        """What the tier owes: [(session, reply or the error it carries)]."""
        out, self.tier.outbox = self.tier.outbox, []
        return [(session, opened(reply)) for session, reply in out]

    def later(self, seconds):
        self.now += seconds
        self.tier.tick()

    def inventory(self, **wanted):
        now = self.tier.inventory()
        return {k: now[k] for k in wanted} == wanted or now

    def empty(self):
        now = self.tier.inventory()
        return now["free"] + now["cached"] == now["records"] and not any(now[k] for k in ("rooms", "leases", "waiters", "holders", "held", "writing", "leased")) or now


def opened(reply):
    try:
        return m.raise_failure(reply, peer="tier")
    except OasisError as error:
        return error


def digest(n: int) -> bytes:
    return n.to_bytes(32, "big")
