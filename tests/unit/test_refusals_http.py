"""Which failures clients are told to try again, and how."""

from __future__ import annotations

import asyncio
import gc
from http import HTTPStatus
from types import SimpleNamespace as Some

import pytest

from oasis_sglang import refusals
from transport.errors import CapacityError, Draining, DuplicateRoom, LayoutMismatch, RoomFailed

PASSES = (CapacityError("the arena is full", retryable=True), Draining("going down"), RoomFailed("it was full", retryable=True))
STAYS = (CapacityError("larger than the arena"), RoomFailed("died before the commit"), DuplicateRoom("in use"), LayoutMismatch("dtype", field="dtype"))


def on_prefill(error):
    return Some(disagg_kv_sender=Some(publication=Some(error=error)))


class Receiver:
    def __init__(self, error=None, pulled=None):
        self.error, self.pull = error, None if pulled is None else Some(error=pulled)


@pytest.mark.parametrize("error, status", [*((e, 503) for e in PASSES), *((e, 500) for e in STAYS), (None, 500)], ids=str)
def test_what_passes_is_503_on_both_nodes(error, status):
    assert refusals.status(on_prefill(error), HTTPStatus.INTERNAL_SERVER_ERROR) == status
    for receiver in (Receiver(error=error), Receiver(pulled=error), Receiver(error=error, pulled=LayoutMismatch("x", field="x"))):
        if error is None and receiver.pull is not None:
            continue
        req = Some()
        refusals.remember(req, receiver)
        assert refusals.status(req, HTTPStatus.INTERNAL_SERVER_ERROR) == status


@pytest.mark.parametrize("stock", [None, HTTPStatus.BAD_REQUEST, HTTPStatus.SERVICE_UNAVAILABLE])
def test_other_statuses_stay_sglangs(stock):
    assert refusals.status(on_prefill(PASSES[0]), stock) == stock


def test_requests_we_know_nothing_of():
    assert refusals.status(Some(), HTTPStatus.INTERNAL_SERVER_ERROR) == 500
    assert refusals.status(Some(disagg_kv_sender=None), HTTPStatus.INTERNAL_SERVER_ERROR) == 500


def test_a_request_does_not_keep_its_receiver():
    req, receiver = Some(), Receiver(error=PASSES[0])
    refusals.remember(req, receiver)
    del receiver
    gc.collect()
    assert refusals.reason(req) is None


def answered(status: int, kind: str = "http") -> list[dict]:
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"x"})

    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    asyncio.run(refusals.RetryAfter(app)({"type": kind}, None, send))
    return sent


def test_a_503_says_when_to_come_again_and_nothing_else_does():
    start, body = answered(503)
    assert dict(start["headers"])[b"retry-after"] == b"5" and dict(start["headers"])[b"content-type"] == b"text/plain" and body["body"] == b"x"
    assert b"retry-after" not in dict(answered(200)[0]["headers"])
    assert b"retry-after" not in dict(answered(503, kind="lifespan")[0]["headers"])
