"""One request as its client sees it: sent, answered token by token, left, or ended with an error that says its type."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Mapping

import msgspec

from transport import errors

ANSWERED, LEFT, REFUSED, FAILED, STUCK = "answered", "left", "refused", "failed", "stuck"
"""Complete; its client went away; an error before the first token; an error after it; neither within its time."""

_TYPES = sorted((name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.OasisError)), key=len, reverse=True)
_TYPE = re.compile(r"\b(" + "|".join(_TYPES) + r")\b")


class Outcome(msgspec.Struct, kw_only=True):
    """A line of the timeline. ``sent`` and ``ended``: seconds since the soak began; ``wanted`` and ``tokens``: output tokens asked for
    and got; ``code``: HTTP status, 0 without an answer; ``error``: its type; ``told``: its text; ``retry_after``: what the header
    said; ``equal``: to the reference, None when there is none or the answer is not complete."""

    id: str
    prompt: str
    prompt_tokens: int
    wanted: int
    stream: bool
    sent: float
    ended: float = 0.0
    status: str = STUCK
    code: int = 0
    tokens: int = 0
    error: str = ""
    told: str = ""
    retry_after: str = ""
    equal: bool | None = None


def error_type(text: str, code: int) -> str:
    """The innermost of our error types that ``text`` names, else the HTTP status."""
    found = _TYPE.findall(text)
    return found[-1] if found else f"HTTP {code}" if code else "connection"


def merged(ids: list[int], chunk: Mapping) -> list[int]:
    """Output ids after one more chunk of a stream, which brings all of them so far, or the new ones only."""
    new, total = chunk.get("output_ids") or [], chunk.get("meta_info", {}).get("completion_tokens", 0)
    return list(new) if len(new) == total or not ids else ids + list(new)


class Asking:
    """A request under way: ``run`` on a thread of its own, ``drop`` from any other. ``clock``: seconds since the soak began."""

    def __init__(self, url: str, body: dict, outcome: Outcome, clock, *, timeout: float):
        address = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout)
        self._body, self.outcome, self._clock = body, outcome, clock
        self._socket: socket.socket | None = None
        self._dropped = ""
        self.ids: list[int] = []
        self.done = threading.Event()

    def run(self) -> None:
        """Fills in the outcome. Raises nothing: whatever happens is one."""
        outcome = self.outcome
        try:
            self._ask()
        except Exception as error:  # noqa: BLE001  what a broken connection raises is of many kinds
            self._end(FAILED if self.ids else REFUSED, told=f"{type(error).__name__}: {error}", error="connection")
        finally:
            if self._dropped and outcome.status != ANSWERED:
                outcome.status, outcome.error, outcome.told = self._dropped, "", ""
            outcome.tokens, outcome.ended = len(self.ids), round(self._clock(), 3)
            self._connection.close()
            self.done.set()

    def drop(self, status: str) -> None:
        """The client goes away in the middle (``LEFT``), or has waited too long (``STUCK``). No effect on a complete answer."""
        self._dropped = self._dropped or status
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _ask(self) -> None:
        self._connection.connect()
        self._socket = self._connection.sock  # which http.client forgets once an answer begins that ends with its connection
        if self._dropped:  # before there was a connection to close
            raise ConnectionAbortedError(self._dropped)
        self._connection.request("POST", "/generate", json.dumps(self._body), {"Content-Type": "application/json"})
        reply = self._connection.getresponse()
        self.outcome.code, self.outcome.retry_after = reply.status, reply.getheader("Retry-After", "")
        if reply.status != 200:
            self._end(REFUSED, told=reply.read(4000).decode(errors="replace"))
        elif self._body["stream"]:
            self._stream(reply)
        else:
            self._take(json.loads(reply.read()))

    def _stream(self, reply: http.client.HTTPResponse) -> None:
        for line in reply:
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: ") and not self._take(json.loads(line[len(b"data: ") :])):
                return
        if self.outcome.status != ANSWERED:
            self._end(FAILED if self.ids else REFUSED, told="the stream ended before its answer", error="connection")

    def _take(self, chunk: dict) -> bool:
        """One chunk. Whether the request goes on well."""
        reason = (chunk.get("meta_info") or {}).get("finish_reason") or {}
        if "error" in chunk or reason.get("type") == "abort":
            told = json.dumps(chunk["error"]) if "error" in chunk else str(reason.get("message"))
            code = reason.get("status_code") or self.outcome.code
            self._end(FAILED if self.ids else REFUSED, told=told, code=int(code))
            return False
        self.ids = merged(self.ids, chunk)
        if reason:
            self._end(ANSWERED if len(self.ids) == self.outcome.wanted else FAILED, told="" if len(self.ids) == self.outcome.wanted else "too few tokens")
        return True

    def _end(self, status: str, *, told: str = "", error: str = "", code: int | None = None) -> None:
        outcome = self.outcome
        outcome.status, outcome.told, outcome.code = status, told[:500], outcome.code if code is None else code
        outcome.error = "" if status == ANSWERED else error or error_type(told, outcome.code)


def since(start: float):
    """A clock that says seconds since ``start`` (monotonic)."""
    return lambda: time.monotonic() - start
