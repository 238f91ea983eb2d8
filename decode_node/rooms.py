"""Finding a committed room: at its prefill node's own tier, at the memory node which that tier names, or, when that tier is
lost, at whichever of its memory nodes has it.

    asked: own tier --Manifest--> found
             |------Moved------> asked: that memory node
             `--lost, or its prefill node is dead--> asked: all memory nodes it had named, for a short while; the first manifest wins
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from decode_node.leases import LeaseKeeper
from decode_node.pull import AWAITING, RESOLVING, Pull, PullLimits
from decode_node.tier_link import TierLink
from transport import messages as m
from transport.errors import DeadlineExceeded, OasisError, PeerLost, ProtocolError, StaleEpoch

MAX_MOVES = 2
"""How often one request is sent on. A local tier names the memory node that has the room, so one move is what is expected."""
LOST = (DeadlineExceeded, PeerLost, StaleEpoch)
"""What ends a link to a tier whose rooms may be elsewhere. A tier that refuses us, or makes no sense, is not lost."""


class RoomFinder:
    """Lives on the puller's thread. Each pull that is AWAITING has been asked for at the links in ``pull.asked``.

    ``connect(address)`` -> the link to a tier, raising ``PeerLost``; ``found(pull, link, manifest)``: a lease on it is ours;
    ``fail(pull, reason)``: nobody has it; ``later(work, pull, *args)``: runs work on this thread, but not within another
    link's turn.
    """

    def __init__(self, rank: int, limits: PullLimits, totals: Counter[str], leases: LeaseKeeper, *, connect: Callable[[str], TierLink],
                 found: Callable[[Pull, TierLink, m.Manifest], None], fail: Callable[[Pull, OasisError], None], later: Callable[..., None]):
        self.rank, self.limits, self.totals, self.leases = rank, limits, totals, leases
        self.connect, self.found, self.fail, self.later = connect, found, fail, later
        self.homes: dict[str, str] = {}
        """Address of the tier that each prefill node last had."""
        self.memory_nodes: dict[str, tuple[str, ...]] = {}
        """What the tier at an address last named, kept when the tier is lost: that is when it is needed."""

    # -- what the puller tells ----------------------------------------------------------------------------------

    def begin(self, pull: Pull, address: str) -> None:
        """``pull``'s prefill node has its tier at ``address``."""
        self.homes[pull.source] = address
        if pull.state == RESOLVING and not pull.cancelled:
            pull.state = AWAITING
            self._ask(pull, [address])

    def unresolved(self, pull: Pull, error: OasisError) -> None:
        """The prefill node does not say where its tier is. Raises ``error`` when nothing is known from before either."""
        if not isinstance(error, LOST) or not self._elsewhere(pull.source):
            raise error
        if pull.state == RESOLVING and not pull.cancelled:
            pull.state, pull.doubt = AWAITING, error
            self._search(pull)

    def welcomed(self, link: TierLink) -> None:
        self.memory_nodes[link.address] = link.welcome.memory_nodes

    def source_lost(self, pull: Pull) -> None:
        """Its prefill node is dead. Perhaps only the worker, perhaps the tier as well: all who may have the room are asked."""
        pull.deadline = min(pull.deadline, time.monotonic() + self.limits.silence_seconds)
        if pull.state == AWAITING and self._elsewhere(pull.source):
            self._search(pull)

    def withdraw(self, pull: Pull) -> None:
        """Nobody needs to look for it any more."""
        asked, pull.asked = pull.asked, set()
        for link in asked:
            self._cancel(pull, link)

    # -- asking -------------------------------------------------------------------------------------------------

    def _elsewhere(self, source: str) -> tuple[str, ...]:
        return self.memory_nodes.get(self.homes.get(source, ""), ())

    def _ask(self, pull: Pull, addresses: Iterable[str]) -> None:
        links: set[TierLink] = set()
        for address in addresses:
            try:
                links.add(self.connect(address))
            except OasisError as error:  # an address that cannot be used
                pull.doubt = pull.doubt or error
        fresh = links - pull.asked
        pull.asked |= fresh
        for link in fresh:
            link.request(m.Await, dict(room=pull.room, rank=self.rank, seconds=max(0.0, pull.deadline - time.monotonic()),
                                       begin=self.limits.begin_seconds),
                         lambda reply, link=link: self._answered(pull, link, reply), deadline=pull.deadline + self.limits.silence_seconds)
        if not links and not pull.asked:
            self.fail(pull, pull.doubt)

    def _search(self, pull: Pull) -> None:
        if pull.state != AWAITING or pull.cancelled:
            return
        self.totals["searches"] += 1
        pull.deadline = min(pull.deadline, time.monotonic() + self.limits.silence_seconds)
        self._ask(pull, self._elsewhere(pull.source))

    def _cancel(self, pull: Pull, link: TierLink) -> None:
        if link.error is None:
            link.request(m.Cancel, dict(room=pull.room, rank=self.rank), lambda reply: None, deadline=time.monotonic() + self.limits.silence_seconds)

    # -- answers ------------------------------------------------------------------------------------------------

    def _answered(self, pull: Pull, link: TierLink, reply: m.Reply | OasisError) -> None:
        wanted = pull.state == AWAITING and not pull.cancelled and link in pull.asked
        pull.asked.discard(link)
        if isinstance(reply, m.Manifest):
            if not wanted:
                self.leases.release(link, reply.lease)
                return
            self.withdraw(pull)
            self.found(pull, link, reply)
        elif not wanted:
            return
        elif not isinstance(reply, m.Moved):
            self._denied(pull, link, reply)
        elif pull.moves == MAX_MOVES:
            self._denied(pull, link, ProtocolError("the room is sent on and on", room=pull.room, peer=link.peer, limit=f"{MAX_MOVES} moves"))
        else:
            pull.moves += 1
            self.totals["moved"] += 1
            self._ask(pull, [reply.control])

    def _denied(self, pull: Pull, link: TierLink, error: m.Reply | OasisError) -> None:
        """One of those asked does not have it. The first reason stands: it is that of the room's own tier, if that was asked."""
        if not isinstance(error, OasisError):
            error = ProtocolError("the tier answered with something else than a manifest", room=pull.room, peer=link.peer)
        pull.doubt = pull.doubt or error
        self._cancel(pull, link)
        lost = (link.error is not None or isinstance(error, StaleEpoch)) and isinstance(error, LOST)
        if lost and self.memory_nodes.get(link.address) and link.address == self.homes.get(pull.source):
            self.later(self._search, pull)
        elif not pull.asked:
            self.fail(pull, pull.doubt)
