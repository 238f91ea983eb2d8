"""Which failures are computed again, with what payload, and by which worker."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from node_rig import until
from recovery_rig import DEAD, PrefillWorker

from decode_node import recompute
from decode_node.policy import CURABLE, Verdict, decide, obstacle, on_failure
from decode_node.recompute import Order, Recomputer, Worker, require_listener
from decode_node.recovery import payload, put_aside, put_back
from oasis_sglang.config import OasisConfig
from transport import errors as e

LOST = e.PeerLost("gone")
WAYS = dict(wanted="recompute", obstacle="", attempts=0, limit=2, now=10.0, deadline=20.0)


@pytest.mark.parametrize("changes, reason", [
    ({}, ""),
    ({"wanted": "fail"}, "policy"),
    ({"obstacle": "it has a LoRA adapter"}, "obstacle"),
    ({"attempts": 1}, ""),
    ({"attempts": 2}, "attempts"),
    ({"attempts": 3}, "attempts"),
    ({"limit": 1, "attempts": 1}, "attempts"),
    ({"now": 20.0}, "deadline"),
    ({"now": 19.9}, ""),
    ({"deadline": float("inf")}, ""),
    ({"wanted": "fail", "attempts": 2, "now": 30.0}, "policy"),
    ({"attempts": 2, "now": 30.0}, "attempts"),
])
def test_what_decides(changes, reason):
    assert decide(LOST, **(WAYS | changes)) == Verdict(not reason, reason)


KINDS = {
    e.PeerLost: True, e.DeadlineExceeded: True, e.StaleEpoch: True, e.LeaseExpired: True, e.IntegrityError: True,
    e.ConfigError: False, e.CapacityError: False, e.DuplicateRoom: False, e.LayoutMismatch: False, e.BoundsError: False, e.ProtocolError: False,
    e.Draining: False, e.AccessDenied: False, e.OasisError: False, e.TransportError: False}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attempts", [0, 1])
def test_which_errors_another_place_may_cure(kind, attempts):
    assert decide(kind("x"), **(WAYS | {"attempts": attempts})).recompute is KINDS[kind]


def test_every_error_has_been_thought_of():
    def below(cls):
        return {cls, *itertools.chain.from_iterable(below(c) for c in cls.__subclasses__() if c.__module__ == e.__name__)}

    assert below(e.OasisError) == {*KINDS, e.RoomFailed} and set(CURABLE) == {kind for kind, cured in KINDS.items() if cured}


def test_a_room_that_was_given_up_is_made_anew_only_if_it_was_ours():
    given_up = e.RoomFailed("the client left")
    assert decide(given_up, **WAYS) == Verdict(False, "error")
    assert decide(given_up, **(WAYS | {"attempts": 1})) == Verdict(True)


@pytest.mark.parametrize("params, default, wanted", [
    (None, "recompute", "recompute"), ({}, "fail", "fail"), ({"oasis": {}}, "recompute", "recompute"), ({"oasis": {"on_failure": "fail"}}, "recompute", "fail"),
    ({"oasis": {"on_failure": "recompute"}}, "fail", "recompute"), ({"other": 1}, "fail", "fail"), ("nonsense", "fail", "fail"),
    ({"oasis": {"on_failure": "hope"}}, "recompute", None), ({"oasis": {"on_failure": None}}, "recompute", None),
    ({"oasis": {"on_failure": ["fail"]}}, "recompute", None)])
def test_a_request_may_choose(params, default, wanted):
    if wanted is None:
        with pytest.raises(e.ConfigError, match="on_failure"):
            on_failure(params, default)
    else:
        assert on_failure(params, default) == wanted


def plain(**changes):
    fields = dict(multimodal_inputs=None, input_embeds=None, lora_id=None, beam_group=None, session=None, output_ids=[1],
                  sampling_params=SimpleNamespace(watermark=None))
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize("changes, ranks, word", [
    ({}, 1, ""), ({}, 2, "ranks"), ({"lora_id": "a"}, 1, "LoRA"), ({"multimodal_inputs": object()}, 1, "images"), ({"input_embeds": [[0.0]]}, 1, "embeddings"),
    ({"beam_group": object()}, 1, "beams"), ({"session": object()}, 1, "session"),
    ({"sampling_params": SimpleNamespace(watermark=object())}, 1, ""),
    ({"sampling_params": SimpleNamespace(watermark=object()), "output_ids": []}, 1, "watermark")])
def test_what_token_ids_do_not_bring_back(changes, ranks, word):
    found = obstacle(plain(**changes), ranks)
    assert (word in found) if word else found == ""


# -- the payload, of SGLang's own request -----------------------------------------------------------------------------


def sglang_request(outputs=(), **params):
    from array import array

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=50, **params)
    req = Req("r", "", array("q", [5, 6, 7]), sampling, bootstrap_host="127.0.0.1", bootstrap_port=1, bootstrap_room=9, extra_key="tenant", vocab_size=100)
    req.output_ids = array("q", outputs)
    return req


def test_a_running_request_has_its_answer_but_for_the_newest_token_computed():
    req = sglang_request([8, 9, 10], temperature=0.7, json_schema="{}", custom_params={"oasis": {"mode": "exact"}})
    put_aside(req)
    put_aside(req)
    body = payload(req, 2)
    assert body["input_ids"] == [5, 6, 7, 8, 9] and body["rid"] == "r-again-2" and body["extra_key"] == "tenant" and not body["stream"]
    assert body["sampling_params"]["max_new_tokens"] == 1 and "json_schema" not in body["sampling_params"], "what it samples is replaced"
    put_back(req)
    assert list(req.output_ids) == [8, 9, 10] and req.pd_rebootstrap_forced_output_id is None
    put_back(req)
    assert list(req.output_ids) == [8, 9, 10]


def test_one_token_of_answer_is_replayed_too():
    req = sglang_request([8], regex="a+")
    put_aside(req)
    assert payload(req, 1)["input_ids"] == [5, 6, 7] and "regex" not in payload(req, 1)["sampling_params"] and req.pd_rebootstrap_forced_output_id == 8


def test_a_first_token_is_shaped_as_the_client_asked():
    req = sglang_request(json_schema="{}", stop_token_ids=[3, 4], min_new_tokens=7, logit_bias={"1": 2.0}, sampling_seed=42, temperature=0.0,
                         custom_params={"oasis": {"on_failure": "fail"}, "__req__": object()})
    body = payload(req, 1)
    params = body["sampling_params"]
    assert body["input_ids"] == [5, 6, 7] and params["json_schema"] == "{}" and sorted(params["stop_token_ids"]) == [3, 4] and params["min_new_tokens"] == 1
    assert params["logit_bias"] == {"1": 2.0} and params["sampling_seed"] == 42 and params["top_k"] == 1 and params["max_new_tokens"] == 1
    assert params["custom_params"] == {"oasis": {"on_failure": "fail"}}
    json.dumps(body)


# -- where a worker is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address, dp_size, room, url, source, rank", [
    ("10.0.0.1:8998", 1, 7, "http://10.0.0.1:30000", "10.0.0.1:8998/0", None), ("[::1]:8998", 1, 7, "http://[::1]:30000", "[::1]:8998/0", None),
    ("prefill:8998", 4, 7, "http://prefill:30000", "prefill:8998/3", 3), ("prefill:8998", 4, 8, "http://prefill:30000", "prefill:8998/0", 0)])
def test_a_worker_takes_requests_where_it_has_registered(monkeypatch, address, dp_size, room, url, source, rank):
    from decode_node.manager import OasisDecodeManager

    manager = OasisDecodeManager.__new__(OasisDecodeManager)
    manager.prefill_info_table = {address: SimpleNamespace(prefill_http_port=30000, dp_size=dp_size)}
    monkeypatch.setattr(manager, "try_ensure_parallel_info", lambda asked: asked == address, raising=False)
    monkeypatch.setattr(manager, "_ask", lambda asked: {"control": f"tcp://tier-of-{asked}"}, raising=False)
    assert manager.look(address, room) == Worker(url, source, rank, f"tcp://tier-of-{source}")
    manager.prefill_info_table[address].prefill_http_port = None
    with pytest.raises(e.PeerLost, match="where it takes requests"):
        manager.look(address, room)
    with pytest.raises(e.PeerLost, match="does not answer"):
        manager.look("other:1", room)


@pytest.mark.parametrize("given, listed", [("", []), ("a:1", ["a:1"]), (" a:1, [::1]:2 ,", ["a:1", "[::1]:2"])])
def test_prefill_addresses(given, listed):
    assert OasisConfig(prefill_addresses=given).validate("decode").other_prefills() == listed


@pytest.mark.parametrize("changes", [{"prefill_addresses": "a"}, {"prefill_addresses": "a:x"}, {"prefill_addresses": "a:0"}, {"prefill_addresses": ":1"},
                                     {"prefill_addresses": "a:70000"}, {"on_failure": "hope"}, {"recompute_attempts": 0}, {"recompute_seconds": 0}])
def test_options_that_are_refused_by_name(changes):
    with pytest.raises(e.ConfigError, match=next(iter(changes))):
        OasisConfig(**changes).validate("decode")


# -- asking workers ---------------------------------------------------------------------------------------------------


ASKERS: list[Recomputer] = []


@pytest.fixture(autouse=True)
def closed():
    """Those that a test has made are closed at its end."""
    yield
    while ASKERS:
        ASKERS.pop().close()


@pytest.fixture
def worker():
    one = PrefillWorker()
    yield one
    one.close()


@pytest.fixture
def tier():
    """Something that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


def asking(found: dict, started: list | None = None, cancelled: list | None = None, looks: list | None = None):
    """A ``Recomputer`` that knows ``found``: bootstrap address -> ``Worker`` or why there is none."""
    def look(address, room):
        if looks is not None:
            looks.append(address)
        if isinstance(found[address], Exception):
            raise found[address]
        return found[address]

    def start(order, source):
        pull = SimpleNamespace(room=order.room, source=source)
        if started is not None:
            started.append(pull)
        return pull

    ASKERS.append(Recomputer(addresses=list(found), look=look, start=start, headers={"Authorization": "Bearer key"},
                             cancel=lambda pull, reason: cancelled.append((pull, reason)) if cancelled is not None else None))
    return ASKERS[-1]


def order(seconds: float = 10.0, **more) -> Order:
    return Order(77, "r", "a:1", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}, time.monotonic() + seconds, **more)


def test_a_worker_is_asked_as_a_router_would(worker, tier):
    started = []
    one = order(seen={"a:1"})
    asking({"10.0.0.1:99": Worker(worker.url, "10.0.0.1:99/1", 1, tier), "a:1": DEAD}, started).submit(one)
    until(lambda: worker.bodies)
    [body] = worker.bodies
    assert (body["bootstrap_host"], body["bootstrap_port"], body["bootstrap_room"], body["disagg_prefill_dp_rank"]) == ("10.0.0.1", 99, 77, 1)
    assert body["input_ids"] == [1, 2] and worker.headers[0]["Authorization"] == "Bearer key"
    assert one.pull is started[0] and started[0].source == "10.0.0.1:99/1" and one.error is None


def test_the_one_that_failed_before_is_asked_last(worker, tier):
    looks = []
    known = {"a:1": Worker(worker.url, "a:1/0", None, tier), "b:2": Worker(worker.url, "b:2/0", None, tier)}
    one = order(seen={"a:1"})
    asking(known, looks=looks).submit(one)
    until(lambda: worker.bodies)
    assert looks == ["b:2"] and worker.bodies[0]["bootstrap_host"] == "b"
    again = order(seen={"a:1", "b:2"})
    asking(known, looks=looks).submit(again)
    until(lambda: len(worker.bodies) == 2)
    assert looks == ["b:2", "a:1"]


def test_workers_that_do_not_answer_or_whose_tier_is_gone_are_passed_over(worker, tier):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = f"tcp://127.0.0.1:{gone.getsockname()[1]}"
    looks = []
    known = {"a:1": DEAD, "b:2": Worker(worker.url, "b:2/0", None, nobody), "c:3": Worker(worker.url, "c:3/0", None, tier)}
    asking(known, looks=looks).submit(order())
    until(lambda: worker.bodies)
    assert looks == ["a:1", "b:2", "c:3"] and worker.bodies[0]["bootstrap_host"] == "c"


def test_it_is_looked_for_until_the_deadline(worker, tier, monkeypatch):
    monkeypatch.setattr(recompute, "SEARCH_SECONDS", 0.02)
    known = {"a:1": DEAD}
    late = order(0.3)
    asking(known).submit(late)
    until(lambda: late.error)
    assert isinstance(late.error, e.DeadlineExceeded) and "does not answer" in str(late.error) and late.pull is None
    back = order()
    asking(known).submit(back)
    time.sleep(0.1)
    known["a:1"] = Worker(worker.url, "a:1/0", None, tier)
    until(lambda: worker.bodies)


def test_a_refusal_ends_the_pull_and_names_the_status_not_the_body(worker, tier):
    worker.answer = lambda body: 503
    cancelled, one = [], order()
    asking({"a:1": Worker(worker.url, "a:1/0", None, tier)}, cancelled=cancelled).submit(one)
    until(lambda: cancelled)
    assert isinstance(one.error, e.PeerLost) and "503" in str(one.error) and worker.url in str(one.error) and cancelled[0][0] is one.pull


def test_a_worker_that_hangs_up(tier):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    cancelled, one = [], order()
    asking({"a:1": Worker(url, "a:1/0", None, tier)}, cancelled=cancelled).submit(one)
    until(lambda: cancelled)
    assert isinstance(one.error, e.PeerLost)


def test_nothing_begins_once_its_receiver_has_gone(worker, tier):
    started = []
    asker = asking({"a:1": Worker(worker.url, "a:1/0", None, tier)}, started)
    waiting = order(not_before=time.monotonic() + 5)
    asker.submit(waiting)
    assert waiting.leave() is None
    last = order()
    asker.submit(last)
    until(lambda: worker.bodies)
    assert [pull.room for pull in started] == [77] and waiting.pull is None and last.pull is started[0] and last.leave() is last.pull
    assert not waiting.begin(lambda: 1 / 0)


def test_a_fault_of_ours_ends_that_order_only(worker, tier):
    known = {"a:1": RuntimeError("a bug")}
    broken = order()
    asker = asking(known)
    asker.submit(broken)
    until(lambda: broken.error)
    assert isinstance(broken.error, e.RoomFailed) and "a bug" in str(broken.error)
    known["a:1"] = Worker(worker.url, "a:1/0", None, tier)
    asker.submit(order())
    until(lambda: worker.bodies)


def test_orders_run_beside_each_other_up_to_a_bound(monkeypatch, tier):
    monkeypatch.setattr(recompute, "WORKERS", 2)
    gate, inside = threading.Event(), []
    slow = PrefillWorker(lambda body: (inside.append(1), gate.wait(10), 200)[2])
    try:
        asker = asking({"a:1": Worker(slow.url, "a:1/0", None, tier)})
        for _ in range(5):
            asker.submit(order())
        until(lambda: len(inside) == 2)
        time.sleep(0.1)
        assert len(inside) == 2 and asker._threads == 2
        gate.set()
        until(lambda: len(inside) == 5)
    finally:
        gate.set()
        slow.close()


def test_close_ends_the_threads_once_they_are_through(tier):
    gate, inside = threading.Event(), []
    slow = PrefillWorker(lambda body: (inside.append(1), gate.wait(10), 200)[2])
    try:
        asker = asking({"a:1": Worker(slow.url, "a:1/0", None, tier)})
        for _ in range(3):
            asker.submit(order())
        until(lambda: len(inside) == 3)
        threads = [thread for thread in threading.enumerate() if getattr(getattr(thread, "_target", None), "__self__", None) is asker]
        asker.close()
        gate.set()
        for thread in threads:
            thread.join(10)
        assert len(threads) == 3 and not any(thread.is_alive() for thread in threads)
    finally:
        gate.set()
        slow.close()


@pytest.mark.parametrize("control", ["", "tcp://127.0.0.1", "ipc://x", "tcp://127.0.0.1:99999", "tcp://[::1"])
def test_an_address_that_is_none(control):
    with pytest.raises(e.PeerLost):
        require_listener(control)
