"""The prefill worker's bootstrap server: who may say where its tier is."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import requests
from node_rig import FINGERPRINT, small_layout, until

from oasis_sglang.probes import free_port
from prefill_node import manager

ROW = {"dp_rank": 0, "tp_rank": 0, "control": "tcp://127.0.0.1:7400#" + "ab" * 32, "epoch": "e" * 32, "fingerprint": FINGERPRINT,
       "layout": msgspec.to_builtins(small_layout())}


@pytest.fixture
def serve(monkeypatch):
    """``serve(nnodes)`` is the address of a bootstrap server of a worker on so many hosts."""

    def start(nnodes=1):
        monkeypatch.setattr(manager, "get_server_args", lambda: SimpleNamespace(nnodes=nnodes))
        port = free_port()
        manager.OasisBootstrapServer("127.0.0.1", port)
        until(lambda: _answers(port), "the bootstrap server listens")
        return f"http://127.0.0.1:{port}/oasis/peer"

    return start


def _answers(port) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok
    except requests.ConnectionError:
        return False


def registered(url):
    answer = requests.get(url, params={"dp_rank": 0, "tp_rank": 0}, timeout=5)
    return answer.json()["control"] if answer.status_code == 200 else answer.status_code


def test_a_rank_of_this_host_registers(serve):
    url = serve()
    assert requests.put(url, json=ROW, timeout=5).status_code == 200
    assert registered(url) == ROW["control"]


@pytest.mark.parametrize("nnodes, status, kept", [(1, 403, ROW["control"]), (2, 200, "tcp://elsewhere:1")])
def test_another_host_registers_only_where_a_worker_spans_several(serve, monkeypatch, nnodes, status, kept):
    url = serve(nnodes)
    requests.put(url, json=ROW, timeout=5)
    monkeypatch.setattr(manager, "_is_this_host", lambda address: False)
    assert requests.put(url, json={**ROW, "control": "tcp://elsewhere:1"}, timeout=5).status_code == status
    assert registered(url) == kept


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[]", b"{}", b'{"dp_rank": "x", "tp_rank": 0}'])
def test_a_row_that_makes_no_sense_is_refused(serve, body):
    url = serve()
    assert requests.put(url, data=body, timeout=5).status_code == 400
    assert registered(url) == 404


def test_which_addresses_are_this_hosts():
    assert manager._is_this_host("127.0.0.1") and manager._is_this_host("127.0.0.2") and manager._is_this_host("::1")
    assert not manager._is_this_host("192.0.2.1") and not manager._is_this_host("2001:db8::1")
