"""Ways round what a node promises: ids that clients choose, addresses beside the one that is checked, another reader's room."""

from __future__ import annotations

import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace as Some

import pytest
import requests
from node_rig import until
from relay_rig import HELLO, Local
from tier_bench import Bench

from decode_node.recompute import Order, Recomputer, Worker
from oasis_sglang import draining, hooks, refusals
from oasis_sglang.probes import free_port
from prefill_node import manager
from prefill_node.publisher import Publisher
from transport import messages as m
from transport.errors import ConfigError, DuplicateRoom, PeerLost, RoomFailed
from transport.server import TierOptions, TierServer

# -- drain ----------------------------------------------------------------------------------------------------------


def test_a_client_cannot_end_a_server_with_the_id_of_its_request(monkeypatch):
    monkeypatch.setattr(hooks.config, "active", lambda: True)
    done = []
    scheduler = Some(disagg_decode_prealloc_queue=Some(kv_manager=Some(puller=Some(refuse_new=lambda: done.append("no more")))))

    def stock(scheduler, message) -> None:
        done.append("aborted")

    # What SGLang makes of a client that leaves: its id, and never a message.
    hooks.abort_request(stock, scheduler, Some(rid=draining.NO_MORE, abort_all=False, abort_message=None))
    assert done == ["aborted"]
    sent = []
    draining.Drain(Some(_dispatch_to_scheduler=sent.append, event_loop=Some(call_later=lambda *_: None), rid_to_state={}), 30.0, Some).signalled()
    hooks.abort_request(stock, scheduler, sent[0])
    assert done == ["aborted", "no more"]


@pytest.mark.parametrize("going, status", [(True, 503), (False, 500)])
def test_what_a_server_aborts_because_it_goes_down_may_come_again(going, status):
    aborted = RoomFailed("aborted on this node")
    receiver = Some(error=aborted, pull=None, kv_mgr=Some(puller=Some(draining=going)))
    receiver = type("Receiver", (), vars(receiver))()
    req = Some()
    refusals.remember(req, receiver)
    assert refusals.status(req, HTTPStatus.INTERNAL_SERVER_ERROR) == status
    # A publication that was cancelled just now has no error yet.
    sender = Some(publication=Some(error=None), kv_mgr=Some(publisher=Some(draining=going)))
    assert refusals.status(Some(disagg_kv_sender=sender), HTTPStatus.INTERNAL_SERVER_ERROR) == status


# -- who may connect ------------------------------------------------------------------------------------------------


def test_the_data_plane_serves_no_other_host_in_plaintext_either():
    """It listens at the address that readers are told."""
    with pytest.raises(ConfigError, match="--advertise 10.1.2.3 .*--allow-plaintext"):
        TierServer(TierOptions(local="unused", listen="127.0.0.1:0", advertise="10.1.2.3"))
    assert TierServer(TierOptions(local="unused", listen="127.0.0.1:0", advertise="10.1.2.3", allow_plaintext=True)).advertise == "10.1.2.3"
    assert TierServer(TierOptions(local="unused", listen="127.0.0.1:0", advertise="localhost")).advertise == "localhost"


RANK = dict(attn_tp_size=1, attn_tp_rank=0, attn_cp_size=1, attn_cp_rank=0, attn_dp_size=1, attn_dp_rank=0, pp_size=1, pp_rank=0, system_dp_size=1,
            system_dp_rank=0, rank_ip="127.0.0.1", rank_port=1, page_size=16, kv_cache_dtype="auto", prefill_http_port=6666)


@pytest.mark.parametrize("nnodes, here, status", [(1, True, 200), (1, False, 403), (2, False, 200)])
def test_sglangs_registrations_come_from_this_host_too(monkeypatch, nnodes, here, status):
    monkeypatch.setattr(manager, "get_server_args", lambda: Some(nnodes=nnodes))
    monkeypatch.setattr(manager, "_is_this_host", lambda address: here)
    url = f"http://127.0.0.1:{(port := free_port())}"
    server = manager.OasisBootstrapServer("127.0.0.1", port)

    def listens() -> bool:
        try:
            return requests.get(f"{url}/health", timeout=5).ok
        except requests.ConnectionError:
            return False

    try:
        until(listens, "the bootstrap server listens")
        assert requests.put(f"{url}/route", json=RANK, timeout=5).status_code == status
        assert requests.post(f"{url}/register_dp_rank", json=dict(bootstrap_room=5, dp_rank=0), timeout=5).status_code == status
        assert (server.prefill_http_port, len(server.room_to_dp_rank)) == ((6666, 1) if status == 200 else (None, 0))
        # Who asks may be anybody.
        assert requests.post(f"{url}/query_dp_ranks", json=dict(bootstrap_rooms=[5]), timeout=5).status_code == 200
    finally:
        server.close()


def test_another_hosts_address_is_not_ours_where_any_may_be_bound(monkeypatch):
    """As with net.ipv4.ip_nonlocal_bind, which failover set-ups use."""
    monkeypatch.setattr(socket.socket, "bind", lambda self, address: None)
    assert not manager._is_this_host("198.51.100.7") and not manager._is_this_host("2001:db8::7") and not manager._is_this_host("127.0.0.1.example")
    assert manager._is_this_host("127.0.0.9") and manager._is_this_host("::ffff:127.0.0.1")


def test_a_prompt_that_is_computed_again_goes_nowhere_else():
    asked = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{server.server_port}/stolen")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        recomputer = Recomputer(addresses=(), look=None, start=None, cancel=None, headers={"Authorization": "Bearer key"})
        order = Order(7, "r", "prefill:1", {"input_ids": [1, 2]}, deadline=time.monotonic() + 5)
        with pytest.raises(PeerLost, match="refused"):
            recomputer._post(order, Worker(f"http://127.0.0.1:{server.server_port}", "prefill:1/0", None, ""))
    finally:
        server.shutdown()
        server.server_close()
    assert [path for path, _ in asked] == ["/generate"]


# -- rooms ----------------------------------------------------------------------------------------------------------


def test_a_reader_that_was_refused_does_not_take_a_moved_room_from_the_other_one():
    bench = Local()
    bench.ask("R2", m.Hello, role="reader", **HELLO)
    bench.ask("R", m.Await, room=1, rank=0, seconds=60.0)
    bench.opened()
    bench.commit()
    assert bench.ask("R2", m.Await, room=1, rank=0, seconds=60.0).code == DuplicateRoom.__name__
    bench.upstream.answer(m.Ok())
    assert isinstance(bench.told("R")[0], m.Moved)
    bench.ask("R2", m.Cancel, room=1, rank=0)  # as readers do with what they were refused
    assert not bench.upstream.asked and len(bench.tier.redirects) == 1
    bench.ask("R", m.Cancel, room=1, rank=0)
    assert [make for _, make, _, _ in bench.upstream.asked] == [m.Cancel] and not bench.tier.redirects


def test_the_room_of_a_new_request_with_an_old_number_can_be_cancelled():
    bench = Local()
    bench.ask("R2", m.Hello, role="reader", **HELLO)
    bench.ask("R", m.Await, room=1, rank=0, seconds=60.0)
    bench.opened()
    bench.committed()
    bench.opened(salt=1)
    bench.ask("R2", m.Await, room=1, rank=0, seconds=60.0)
    bench.ask("R2", m.Cancel, room=1, rank=0)
    assert bench.tier.rooms[1, 0].cancelled


def test_who_asks_late_for_the_room_of_a_dead_worker_hears_what_those_who_waited_heard():
    """It decides whether the request is computed again."""
    bench = Bench()
    bench.hello("W1")
    bench.hello("R1")
    bench.open("W1", 1, private=1)
    bench.tier.disconnect("W1")
    with pytest.raises(PeerLost, match="W1 died") as error:
        bench.await_("R1", 1)
    assert error.value.retryable and error.value.room == 1


def test_what_failed_while_a_tier_is_away_is_remembered_within_bounds(monkeypatch):
    monkeypatch.setattr("prefill_node.publisher.MAX_LIVE", 3)
    publisher = Some(client=Some(close=lambda: None), _orphans=[], live=set(), _waiting=[], _fail=lambda pub, error: publisher.live.discard(pub))
    for room in range(5):
        publisher.live = {type("Publication", (), {"room": room})()}
        Publisher._lost(publisher, PeerLost("gone"))
    assert publisher._orphans == [2, 3, 4] and not publisher.live
