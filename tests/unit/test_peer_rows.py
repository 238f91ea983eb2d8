"""Rows of the bootstrap server over real HTTP: what a prefill rank registers, what a decode rank makes of what it is answered."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import msgspec
import pytest
import requests
from aiohttp import web
from node_rig import FINGERPRINT, small_layout, until

from decode_node import manager as decoding
from prefill_node import manager as prefilling
from transport.errors import LayoutMismatch, PeerLost
from transport.peer_row import MAX_ROW_BYTES, PeerRow

LAYOUT = small_layout()
ROW = PeerRow(dp_rank=0, tp_rank=0, control="tcp://h:1", epoch="e", layout=LAYOUT, fingerprint=FINGERPRINT)


@pytest.fixture
def site():
    """``site(app)`` serves an application on a thread; its "host:port"."""
    ends = []

    def serve(app: web.Application) -> str:
        loop, box = asyncio.new_event_loop(), []

        async def start():
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            box.append(runner)

        def run():
            loop.run_until_complete(start())
            loop.run_forever()
            loop.run_until_complete(box[0].cleanup())
            loop.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        until(lambda: box, "the site listens")
        ends.append((loop, thread))
        return f"127.0.0.1:{box[0].addresses[0][1]}"

    yield serve
    for loop, thread in ends:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def bootstrap() -> web.Application:
    server = SimpleNamespace(peers={}, several_hosts=False, token=b"")
    app = web.Application()
    app.router.add_put("/oasis/peer", lambda request: prefilling.OasisBootstrapServer._put_peer(server, request))
    app.router.add_get("/oasis/peer", lambda request: prefilling.OasisBootstrapServer._get_peer(server, request))
    return app


def resolver(layout=LAYOUT) -> decoding.OasisDecodeManager:
    manager = decoding.OasisDecodeManager.__new__(decoding.OasisDecodeManager)
    manager._peers, manager._peers_lock, manager.layout, manager.fingerprint = {}, threading.Lock(), layout, FINGERPRINT
    manager.attn_tp_rank, manager.attn_tp_size = 0, 1
    return manager


def test_a_row_goes_from_prefill_to_decode(site):
    address = site(bootstrap())
    assert requests.put(f"http://{address}/oasis/peer", data=msgspec.json.encode(ROW)).status_code == 200
    assert resolver().resolve(f"{address}/0")["control"] == "tcp://h:1"
    with pytest.raises(LayoutMismatch) as error:
        resolver(small_layout(block_tokens=16)).resolve(f"{address}/0")
    assert error.value.field == "block_tokens"
    with pytest.raises(LayoutMismatch, match="registered tp ranks") as error:
        resolver().resolve(f"{address}/1")
    assert error.value.field == "tp_size"


@pytest.mark.parametrize("raw, status", [(b"", 400), (b"{}", 400), (b"[" * 100_000, 400), (b"\xff" * 10, 400), (b"x" * (2 << 20), 413),
                                         (b" " * (MAX_ROW_BYTES + 1), 400), (msgspec.json.encode(msgspec.structs.replace(ROW, tp_rank=-1)), 400)])
def test_what_is_no_row_is_not_registered(site, raw, status):
    address = site(bootstrap())
    assert requests.put(f"http://{address}/oasis/peer", data=raw).status_code == status
    assert requests.get(f"http://{address}/oasis/peer", params={"dp_rank": 0, "tp_rank": 0}).status_code == 404


@pytest.mark.parametrize("raw", [b"", b"{", b"[" * 60_000, b"\xff\xfe", b"x" * (8 << 20), b'{"control": 5}', msgspec.json.encode(ROW)[:-1]])
def test_an_answer_that_is_no_row_is_a_mismatch_by_name(site, raw):
    async def answer(request):
        return web.Response(body=raw)

    app = web.Application()
    app.router.add_get("/oasis/peer", answer)
    manager = resolver()
    with pytest.raises(LayoutMismatch, match="not understood") as error:
        manager.resolve(f"{site(app)}/0")
    assert error.value.field == "peer row" and not manager._peers


def test_an_answer_that_breaks_off_is_a_lost_peer(site):
    async def answer(request):
        response = web.StreamResponse(headers={"Content-Length": "5000"})
        await response.prepare(request)
        await response.write(b"{")
        request.transport.close()
        return response

    app = web.Application()
    app.router.add_get("/oasis/peer", answer)
    with pytest.raises((PeerLost, LayoutMismatch)):
        resolver().resolve(f"{site(app)}/0")
