"""One tier's arena as this rank reads it: which incarnation serves it now, and the way to the next.

    CONNECTED --a read lost the peer--> SEEKING --another endpoint, or the same one again--> CONNECTED
                                           `------- nothing within ``limit`` seconds ------> LOST

The tier serves NIXL from a process that may die and come back under a new endpoint while the tier, its leases and its
records live on. So a lost peer is no lost tier: we say Hello again on the same link until the tier names a live
endpoint, and reads wait for that here meanwhile. From LOST the next failed read seeks again.
"""

from __future__ import annotations

from collections.abc import Callable

from decode_node.tier_link import TierLink
from transport import messages as m
from transport.dataplane import DataPlane, Endpoint
from transport.errors import OasisError, PeerLost

STEADY_SECONDS = 1.0
"""An endpoint that the tier still names after so long is alive, and only our connection to it broke. The tier learns
that its process died a little later than the readers do."""

ASK_SECONDS = 0.1


class ArenaPeer:
    """Owner: the puller, on its thread. Owns the data plane's connection to the tier.

    ``connection`` grows with every connection made, so that all reads that one loss took along count as one.
    ``parked`` are the jobs that wait while ``seeking``, each once; ``on_end(parked, error)`` hands them back: error None, read on.
    """

    def __init__(self, link: TierLink, plane: DataPlane, *, limit: float, on_end: Callable[[list, OasisError | None], None]):
        self.link, self.plane, self.limit, self.on_end = link, plane, limit, on_end
        self.endpoint: Endpoint | None = None
        self.connection = 0
        self.seeking = False
        self.parked: list = []
        self._since = self._ask_at = 0.0

    @property
    def name(self) -> str:
        """Of the incarnation that reads go to. Raises ``PeerLost`` when there was none yet."""
        if self.endpoint is None:
            raise PeerLost(f"the data plane {self.plane.kind!r} of the tier is down", peer=self.link.peer)
        return self.endpoint.name

    def attach(self, now: float) -> None:
        """Connects once the tier welcomed us. Raises ``PeerLost`` if it does not serve our kind of plane at all."""
        served = self.link.welcome.planes
        if self.plane.kind not in served:
            raise PeerLost(f"the tier does not serve the data plane {self.plane.kind!r}, only {', '.join(served)}",
                           peer=self.link.peer)
        offered = self._offered()
        try:
            if offered is None:
                raise PeerLost("being restarted", peer=self.link.peer)
            self._connect(offered)
        except PeerLost:
            self._seek(now)

    def lost(self, connection: int, now: float) -> None:
        """A read over ``connection`` found the peer gone."""
        if connection == self.connection and not self.seeking:
            self._seek(now)

    def park(self, job) -> None:
        if job not in self.parked:  # it comes here once per read that failed
            self.parked.append(job)

    def process(self, now: float) -> None:
        """Asks again when it is time, and gives up when it is too late."""
        if not self.seeking:
            return
        if now - self._since >= self.limit:
            self._end(PeerLost(f"the data plane {self.plane.kind!r} of the tier did not come back", peer=self.link.peer,
                               limit=f"{self.limit} s"))
        elif now >= self._ask_at:
            self._ask_at = float("inf")
            self.link.refresh(lambda reply: self._answered(reply, now), now)

    def close(self) -> None:
        """With the link. Reads in flight fail or drain."""
        if self.endpoint is not None:
            self.plane.disconnect(self.endpoint.name)

    def _seek(self, now: float) -> None:
        self.seeking, self._since, self._ask_at = True, now, now

    def _answered(self, reply: m.Welcome | OasisError, asked: float) -> None:
        self._ask_at = asked + ASK_SECONDS
        if isinstance(reply, OasisError) or not self.seeking:
            return  # if it ended the link, the jobs end with it
        offered = self._offered()
        if offered is None:
            return
        same = self.endpoint is not None and offered.name == self.endpoint.name
        if same and asked - self._since < STEADY_SECONDS:
            return
        try:
            self._connect(offered)
        except OasisError as error:
            if same or not isinstance(error, PeerLost):
                self._end(error)
            return  # a new one that is gone already: there will be another
        self._end(None)

    def _offered(self) -> Endpoint | None:
        return next((e for e in self.link.welcome.endpoints if e.kind == self.plane.kind), None)

    def _connect(self, offered: Endpoint) -> None:
        if self.endpoint is not None and self.endpoint.name != offered.name:
            self.plane.disconnect(self.endpoint.name)
            self.endpoint = None
        self.plane.connect(offered)
        self.endpoint = offered
        self.connection += 1

    def _end(self, error: OasisError | None) -> None:
        self.seeking = False
        parked, self.parked = self.parked, []
        self.on_end(parked, error)
