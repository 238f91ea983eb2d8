"""What a client is told when there is no room: 503 and when to come again, where SGLang has 500.

A request that fails before it runs is ended by SGLang with 500, whatever the reason. Errors that say of themselves that they pass
(``retryable``) become 503; the others stay. A stream has sent its 200 by then: there the status is in its last chunk.
"""

from __future__ import annotations

import sys
import weakref
from http import HTTPStatus

from transport.errors import OasisError

RETRY_AFTER_SECONDS = 5
"""About what a full arena or pool takes to have room again, and the least after which a server that goes down has a successor."""


def remember(req, receiver) -> None:
    """On a decode node: where the reason will be found. Weak, since the receiver knows its request."""
    req.oasis_receiver = weakref.ref(receiver)


def reason(req) -> OasisError | None:
    """Why ``req`` failed on this node before it ran, as far as we know."""
    publication = getattr(getattr(req, "disagg_kv_sender", None), "publication", None)
    if publication is not None and publication.error is not None:
        return publication.error
    receiver = getattr(req, "oasis_receiver", lambda: None)()
    if receiver is None:
        return None
    return receiver.error or (receiver.pull.error if receiver.pull is not None else None)


def status(req, stock: int | None) -> int | None:
    """``stock``: the HTTP status that SGLang would end ``req`` with."""
    if stock != HTTPStatus.INTERNAL_SERVER_ERROR:
        return stock
    error = reason(req)
    return HTTPStatus.SERVICE_UNAVAILABLE if (error is not None and error.retryable) or _going_down(req) else stock


def _going_down(req) -> bool:
    """Whether the node that ``req`` is on takes nothing new: then whatever ends it here, a successor may do better."""
    for one in (getattr(req, "disagg_kv_sender", None), getattr(req, "oasis_receiver", lambda: None)()):
        manager = getattr(one, "kv_mgr", None)
        if getattr(getattr(manager, "publisher", None) or getattr(manager, "puller", None), "draining", False):
            return True
    return False


class RetryAfter:
    """ASGI middleware: every 503 says when to come again."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        async def sending(message) -> None:
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
                message = {**message, "headers": [*message.get("headers", ()), (b"retry-after", str(RETRY_AFTER_SECONDS).encode())]}
            await send(message)

        await self.app(scope, receive, sending if scope["type"] == "http" else send)


def install() -> None:
    """In the process that serves HTTP, before it does. The module is SGLang's own, imported there and only there."""
    if server := sys.modules.get("sglang.srt.entrypoints.http_server"):
        server.app.add_middleware(RetryAfter)
