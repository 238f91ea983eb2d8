"""What one request went through on a decode rank, from its arrival to the line in the log at its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decode_node.policy import RECOMPUTE
from transport import request_log
from transport.errors import OasisError

if TYPE_CHECKING:
    from decode_node.entry import Entry
    from decode_node.pull import Pull


@dataclass(eq=False)
class Lifecycle:
    """SGLang's request has it as ``oasis``. Scheduler thread only.

    ``pulls`` and ``entries``: one per time that its KV was fetched, and that it was granted a place. ``attempts``: times that a prefill
    worker was asked to compute it again, ``recomputed``: times that it went on afterwards. ``deadline``: of the recovery under way,
    infinite when there is none. ``error``: why it failed last, ``refused``: why it was not computed again then.
    """

    rid: str
    prompt: int
    on_failure: str = RECOMPUTE
    began: float = field(default_factory=time.monotonic)
    pulls: list[Pull] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    attempts: int = 0
    recomputed: int = 0
    deadline: float = float("inf")
    error: OasisError | None = None
    refused: str = ""
    closed: bool = False

    def went_on(self) -> None:
        self.recomputed += 1
        self.deadline = float("inf")
        self.error = None

    def end(self, req) -> None:
        """Writes the line. Idempotent: with overlap SGLang may come by twice."""
        if self.closed:
            return
        self.closed = True
        now, reason, rooms = time.monotonic(), req.finished_reason, [pull.room for pull in self.pulls]
        outcome = reason.to_json()["type"] if reason is not None else "abort"
        request_log.end("decode", rid=self.rid, room=req.bootstrap_room, rooms=rooms if len(rooms) > 1 else "", mode=self._mode(), prompt_tokens=self.prompt,
                        output_tokens=len(req.output_ids), outcome=outcome, failure=self.error.code if self.error else "",
                        not_recomputed=self.refused, recomputed=self.recomputed, attempts=self.attempts,
                        admitted_bytes=sum(sum((p.bytes_by_phase if p.admitted_by_phase is None else p.admitted_by_phase).values()) for p in self.pulls),
                        lifetime_bytes=sum(sum(p.bytes_by_phase.values()) for p in self.pulls), steps=sum(e.steps for e in self.entries),
                        waits=sum(e.waits for e in self.entries), stalled=sum((e.stalled for e in self.entries), 0.0),
                        **self._durations(now), total=now - self.began)

    def _mode(self) -> str:
        last = self.entries[-1] if self.entries else None
        if last is None or last.budget.exact:
            return "exact" if self.pulls else ""
        return "selecting" if last.need.selecting else "within budget"

    def _durations(self, now: float) -> dict[str, float]:
        """Seconds in each state, over all pulls: until the commit was known, until there was a place, until the KV was there,
        and running. A state that was never left ends where the next pull begins, or now."""
        spent = dict.fromkeys(("committing", "granting", "pulling", "running"), 0.0)
        for pull, until in zip(self.pulls, [*(p.began for p in self.pulls[1:]), now]):
            marks = [pull.began, *(mark for mark in (pull.ready_at, pull.fetched_at, pull.admitted_at) if mark), until]
            for name, start, stop in zip(spent, marks, marks[1:]):
                spent[name] += max(0.0, stop - start)
        return spent
