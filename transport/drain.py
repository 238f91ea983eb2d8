"""How a tier ends: it takes nothing new, those who hold something let go of it themselves, and nobody is waited for without end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from transport import messages as m
from transport.errors import Draining
from transport.tier import Tier

log = logging.getLogger("oasis.tier")

LOOK_SECONDS = 0.05


class Drain:
    """From its making on ``tier`` refuses new rooms and donations with ``Draining``. Rooms that are open may be committed and
    claimed, leases renewed and released, moves finished, for ``seconds``. On the tier's loop."""

    def __init__(self, tier: Tier, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.tier, self.seconds, self.clock = tier, seconds, clock
        self.began = clock()
        for kind in (m.Open, m.Donate):
            tier.serve(kind, self._refuse)
        log.info("tier %s drains for at most %g s: %s", tier.epoch[:8], seconds, self._show())

    def left(self) -> dict[str, int]:
        """What still has to end: leases, rooms (also those that have moved, until their readers are told where) and moves."""
        now = self.tier.inventory()
        return {"leases": now["leases"], "rooms": now["rooms"] + now.get("untold", 0), "moves": now.get("moves", 0)}

    async def run(self) -> None:
        """Returns when nothing is left, or the time is over."""
        while any(self.left().values()) and self.clock() < self.began + self.seconds:
            await asyncio.sleep(LOOK_SECONDS)

    def end(self) -> None:
        """Tells readers whose room will not be committed here any more: they would take the silence for a tier that hangs."""
        for key, waiter in self.tier.waiters.items():
            self.tier.outbox.append((waiter.session, m.failure(self._error(key[0]), waiter.seq)))
        self.tier.waiters.clear()
        log.info("tier %s ends %.1f s after it was asked to, with %s left", self.tier.epoch[:8], self.clock() - self.began, self._show())

    def _refuse(self, session: object, request: m.Open | m.Donate) -> m.Reply:
        raise self._error(getattr(request, "room", None))

    def _error(self, room: int | None) -> Draining:
        rest = max(0.0, self.began + self.seconds - self.clock())
        return Draining("the tier is going down and takes nothing new", room=room, peer=f"tier {self.tier.epoch[:8]}", limit=f"gone in {rest:.0f} s")

    def _show(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self.left().items())
