"""The prefill worker's bootstrap server: who may say where its tier is."""

from __future__ import annotations

import os
from types import SimpleNamespace

import msgspec
import pytest
import requests
from node_rig import FINGERPRINT, small_layout, until

from oasis_sglang.probes import free_port
from prefill_node import manager
from transport.peer_row import TOKEN_ENV, TOKEN_HEADER

ROW = {"dp_rank": 0, "tp_rank": 0, "control": "tcp://127.0.0.1:7400#" + "ab" * 32, "epoch": "e" * 32, "fingerprint": FINGERPRINT,
       "layout": msgspec.to_builtins(small_layout())}


@pytest.fixture
def serve(monkeypatch):
    """``serve(nnodes)`` is the address of a bootstrap server of a worker on so many hosts; all are closed at the end."""
    made = []

    def start(nnodes=1):
        monkeypatch.setattr(manager, "get_server_args", lambda: SimpleNamespace(nnodes=nnodes))
        port = free_port()
        made.append(manager.OasisBootstrapServer("127.0.0.1", port))
        until(lambda: _answers(port), "the bootstrap server listens")
        return f"http://127.0.0.1:{port}/oasis/peer"

    yield start
    for server in made:
        server.close()


def _answers(port) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok
    except requests.ConnectionError:
        return False


def registered(url):
    answer = requests.get(url, params={"dp_rank": 0, "tp_rank": 0}, timeout=5)
    return answer.json()["control"] if answer.status_code == 200 else answer.status_code


def register(url, token=None, **body):
    """As a rank of the same worker does, unless it shows another ``token``. The status."""
    token = os.environ[TOKEN_ENV] if token is None else token
    return requests.put(url, headers={TOKEN_HEADER: token}, timeout=5, **body).status_code


def test_a_rank_of_this_worker_registers(serve):
    url = serve()
    assert register(url, json=ROW) == 200
    assert registered(url) == ROW["control"]


@pytest.mark.parametrize("token", ["", "0" * 32, "é", "{}x"])
def test_others_on_this_host_do_not(serve, token):
    """Whoever has an account here could else send decode nodes to another tier, or away."""
    url = serve()
    assert register(url, json=ROW) == 200
    lie = {**ROW, "control": "tcp://127.0.0.1:1"}
    assert register(url, token.format(os.environ[TOKEN_ENV]).encode(), json=lie) == 403
    assert requests.put(url, json=lie, timeout=5).status_code == 403
    assert registered(url) == ROW["control"]


def test_a_worker_has_one_secret_and_never_none(serve, monkeypatch):
    """What its launch has made is kept; without any, nobody registers."""
    monkeypatch.setenv(TOKEN_ENV, "made at launch")
    assert register(serve(), "made at launch", json=ROW) == 200
    monkeypatch.delenv(TOKEN_ENV)
    url = serve()
    assert register(url, "", json=ROW) == 403 and register(url, json=ROW) == 200


@pytest.mark.parametrize("nnodes, status, kept", [(1, 403, ROW["control"]), (2, 200, "tcp://elsewhere:1")])
def test_another_host_registers_only_where_a_worker_spans_several(serve, monkeypatch, nnodes, status, kept):
    url = serve(nnodes)
    register(url, json=ROW)
    monkeypatch.setattr(manager, "_is_this_host", lambda address: False)
    assert register(url, json={**ROW, "control": "tcp://elsewhere:1"}) == status
    assert registered(url) == kept


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[]", b"{}", b'{"dp_rank": "x", "tp_rank": 0}'])
def test_a_row_that_makes_no_sense_is_refused(serve, body):
    url = serve()
    assert register(url, data=body) == 400
    assert registered(url) == 404


def test_which_addresses_are_this_hosts():
    assert manager._is_this_host("127.0.0.1") and manager._is_this_host("127.0.0.2") and manager._is_this_host("::1")
    assert not manager._is_this_host("192.0.2.1") and not manager._is_this_host("2001:db8::1")
