"""Keeping the leases of requests: what a tier handed over stays there as long as we say so in time."""

from __future__ import annotations

import time
from collections.abc import Callable

from decode_node.pull import Pull
from decode_node.tier_link import TierLink
from transport import messages as m
from transport.errors import LeaseExpired, OasisError, ProtocolError


class LeaseKeeper:
    """Renews the leases of ``live`` requests over ``links``, which both are the puller's; lives on its thread.

    ``lost(pull, error)``: the tier ended the lease of this one. ``silence``: seconds that an answer may take.
    """

    def __init__(self, links: dict[str, TierLink], live: set[Pull], silence: float, lost: Callable[[Pull, OasisError], None]):
        self.links, self.live, self.silence, self.lost = links, live, silence, lost
        self._renew_at = 0.0

    def expect(self, lease_seconds: float) -> None:
        """Leases that run for so long exist from now on."""
        self._renew_at = min(self._renew_at, time.monotonic() + lease_seconds / 3)

    def process(self, now: float) -> None:
        """One message per tier keeps all its leases alive, and tells a dead tier from a slow one."""
        if now < self._renew_at:
            return
        for link in list(self.links.values()):
            if link.welcome is None or link.error is not None:
                continue
            held = [p for p in self.live if p.link is link and p.manifest is not None]
            link.request(m.Renew, dict(leases=m.pack([p.manifest.lease for p in held], "u8")),
                         lambda reply, held=held, link=link: self._renewed(held, link, now, reply), deadline=now + self.silence)
        pause = min((link.welcome.lease_seconds / 3 for link in self.links.values() if link.welcome), default=1.0)
        self._renew_at = now + max(0.1, pause)

    def release(self, link: TierLink, lease: int, *, doubted: bool = False) -> None:
        """Nothing of it is read any more. A link that ended needs no telling: there the lease runs out. ``doubted``: its bytes were wrong,
        twice: without its records a prompt that begins so is published anew, with them each such prompt would fail."""
        if link.error is None:
            link.request(m.Release, dict(leases=m.pack([lease], "u8"), doubted=doubted), lambda reply: None, deadline=time.monotonic() + self.silence)

    def _renewed(self, held: list[Pull], link: TierLink, sent: float, reply: m.Reply | OasisError) -> None:
        if isinstance(reply, OasisError):
            return  # the link fails and takes its pulls along
        try:
            if not isinstance(reply, m.Renewed):
                raise ProtocolError("the tier answered a renewal with something else", peer=link.peer)
            gone = set(m.unpack(reply.gone, "u8").tolist())
        except ProtocolError as error:
            link.fail(error)
            return
        for pull in held:
            if pull.manifest.lease in gone:
                self.lost(pull, LeaseExpired("the tier ended the lease", room=pull.room, peer=link.peer))
            else:
                pull.lease_expires = sent + link.welcome.lease_seconds
