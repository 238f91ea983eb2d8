"""Where a request's KV goes: what has to be read before it may decode, and what happens to what was read."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from decode_node.pages import PageSink
from decode_node.pull import Pull
from decode_node.reader import Job
from transport.errors import RoomFailed
from transport.integrity import verify_records
from transport.layout import KVLayout


class Destination(Protocol):
    """Of one request. Called on the puller's thread under ``pull.lock``, and never after ``cancel`` or ``release`` of the
    pull returned; whatever it raises ends the pull.

    ``keeps_lease``: once admitted the request is SERVING, and more may be read for it, until it is released.
    """

    keeps_lease: bool

    def start(self, pull: Pull) -> list[Job]:
        """What to read first."""

    def more(self, pull: Pull) -> list[Job]:
        """What else to read, now that all jobs so far have finished. Nothing: the request is complete."""


class WholePages:
    """Records of the prompt, over pages int64 [pages of the prompt] of a KV pool; -1: not to be pulled, it is there already."""

    keeps_lease = False

    def __init__(self, sink: PageSink, layout: KVLayout, pages: np.ndarray):
        self.sink, self.layout, self.pages = sink, layout, pages

    def start(self, pull: Pull) -> list[Job]:
        """Raises ``RoomFailed`` when the prompt has another number of pages than were committed."""
        if len(self.pages) != len(pull.records):
            raise RoomFailed("prefill and decode disagree on the prompt", room=pull.room, peer=pull.source,
                             limit=f"{len(self.pages)} pages here, {len(pull.records)} committed")
        whole = pull.manifest.prompt_tokens // self.layout.block_tokens
        wanted = np.flatnonzero(self.pages >= 0)
        return [self._job(pull, "records", wanted[wanted < whole]), self._job(pull, "partial_page", wanted[wanted >= whole])]

    def more(self, pull: Pull) -> list[Job]:
        return []

    def _job(self, pull: Pull, phase: str, which: np.ndarray) -> Job:
        records, roots, pages = (a[which] for a in (pull.records, pull.roots, self.pages))

        def accept(payloads: np.ndarray, start: int, stop: int) -> None:
            verify_records(payloads, roots[start:stop], records[start:stop], self.layout, peer=pull.link.peer, room=pull.room)
            self.sink.scatter(payloads, pages[start:stop])

        return Job(pull, phase, pull.link.welcome.geometry.payload_offsets(records), self.layout.payload_bytes, accept)
