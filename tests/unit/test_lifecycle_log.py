"""One line for each request, at its end, on both nodes: what it took, and not a word of what it said."""

from __future__ import annotations

import json
import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest
from node_rig import until

from decode_node.lifecycle import Lifecycle
from decode_node.pull import Pull
from oasis_sglang import config, hooks
from prefill_node import publisher as publishing
from transport import request_log
from transport.errors import PeerLost


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "oasis.requests")

    def read() -> list[dict]:
        found = [r.getMessage() for r in caplog.records if r.name == "oasis.requests"]
        assert all(text.startswith("request {") and "\n" not in text for text in found)
        return [json.loads(text.removeprefix("request ")) for text in found]

    return read


class Finish:
    def __init__(self, kind: str):
        self.kind = kind

    def to_json(self) -> dict:
        return {"type": self.kind}


def request(rid: str = "r", tokens=(101, 102, 103), outputs=(104,), finish: str | None = "stop"):
    req = SimpleNamespace(rid=rid, bootstrap_room=7, origin_input_ids=list(tokens), output_ids=list(outputs), finished_reason=finish and Finish(finish))
    req.finished = lambda: req.finished_reason is not None
    req.oasis = Lifecycle(rid, len(tokens))
    return req


def pull(room: int, at: float, *marks: float, manifest: int = 0, on_demand: int = 0) -> Pull:
    made = Pull(room, "prefill/0", 0.0, began=at)
    for name, mark in zip(("ready_at", "fetched_at", "admitted_at"), marks):
        setattr(made, name, at + mark)
    made.bytes_by_phase.update(manifest=manifest)
    if len(marks) == 3:
        made.admitted_by_phase = dict(made.bytes_by_phase)
    made.bytes_by_phase.update(on_demand=on_demand)
    return made


def entry(*, selecting: bool = True, exact: bool = False, steps: int = 0, waits: int = 0, stalled: float = 0.0):
    return SimpleNamespace(budget=SimpleNamespace(exact=exact), need=SimpleNamespace(selecting=selecting), steps=steps, waits=waits, stalled=stalled)


def test_a_finished_request(lines):
    req, now = request(outputs=range(20)), time.monotonic()
    req.oasis.pulls, req.oasis.entries = [pull(7, now - 10, 1, 3, 6, manifest=100, on_demand=50)], [entry(steps=19, waits=2, stalled=0.25)]
    req.oasis.began = now - 10
    req.oasis.end(req)
    [line] = lines()
    assert {k: line[k] for k in ("role", "rid", "room", "mode", "prompt_tokens", "output_tokens", "outcome", "admitted_bytes", "lifetime_bytes", "steps", "waits",
                                 "stalled_ms", "recomputed")} == {
        "role": "decode", "rid": "r", "room": 7, "mode": "selecting", "prompt_tokens": 3, "output_tokens": 20, "outcome": "stop", "admitted_bytes": 100,
        "lifetime_bytes": 150, "steps": 19, "waits": 2, "stalled_ms": 250.0, "recomputed": 0}
    assert [round(line[f"{name}_ms"], -2) for name in ("committing", "granting", "pulling", "running", "total")] == [1000, 2000, 3000, 4000, 10000]
    assert not {"failure", "rooms", "not_recomputed"} & set(line)


def test_one_that_was_computed_again_counts_both_lives(lines):
    req, now = request(finish="length"), time.monotonic()
    req.bootstrap_room = 9
    req.oasis.pulls = [pull(7, now - 10, 1, 2, 3, manifest=10, on_demand=5), pull(9, now - 5, 2, 2, 3, manifest=20)]
    req.oasis.entries, req.oasis.attempts, req.oasis.recomputed = [entry(steps=3), entry(steps=4)], 1, 1
    req.oasis.end(req)
    [line] = lines()
    assert line["rooms"] == [7, 9] and line["room"] == 9 and line["steps"] == 7 and (line["attempts"], line["recomputed"]) == (1, 1)
    assert (line["admitted_bytes"], line["lifetime_bytes"]) == (30, 35)
    assert [round(line[f"{name}_ms"], -2) for name in ("committing", "granting", "pulling", "running")] == [3000, 1000, 2000, 4000]


@pytest.mark.parametrize("made, mode", [(entry(), "selecting"), (entry(selecting=False), "within budget"), (entry(exact=True), "exact"), (None, "exact")])
def test_modes(lines, made, mode):
    req = request()
    req.oasis.pulls, req.oasis.entries = [pull(7, 0.0)], [made] if made else []
    req.oasis.end(req)
    assert lines()[0]["mode"] == mode


def test_a_failed_one_names_the_kind_of_failure_only(lines):
    req = request(finish="abort")
    req.oasis.error, req.oasis.refused = PeerLost("gone", peer="10.0.0.1"), "policy"
    req.oasis.end(req)
    [line] = lines()
    assert (line["failure"], line["not_recomputed"], line["outcome"]) == ("PeerLost", "policy", "abort") and "10.0.0.1" not in str(line)


def test_a_name_that_a_client_chose_cannot_forge_a_line(lines):
    req = request(rid='x\nrequest {"role": "decode"}')
    req.oasis.end(req)
    assert [line["rid"] for line in lines()] == ['x\nrequest {"role": "decode"}']


def test_the_hooks_write_it_once_and_only_at_the_end(lines, monkeypatch):
    going, done, stock = request("a", finish=None), request("b"), SimpleNamespace(finished=lambda: True)
    for _ in range(2):
        assert hooks.outputs("result", None, [going, done, stock], False) == "result"
    assert [line["rid"] for line in lines()] == ["b"]
    hooks.abort_output(None, None, None, going)
    hooks.abort_output(None, None, None, stock)
    assert [(line["rid"], line["outcome"]) for line in lines()] == [("b", "stop"), ("a", "abort")]
    going.finished_reason = Finish("abort")
    hooks.outputs(None, None, [going], False)
    assert len(lines()) == 2


def test_the_hook_gives_our_receiver_its_request_and_leaves_others_alone(monkeypatch):
    monkeypatch.setattr(config, "active", lambda: True)
    told = []

    class Ours:
        pull = error = None

        def belongs_to(self, req, again):
            told.append((req, again))

    req, ours, fake = SimpleNamespace(), SimpleNamespace(kv_receiver=Ours()), SimpleNamespace(kv_receiver=object())
    assert hooks.receiver(lambda queue, req, is_rebootstrap: ours, None, req, is_rebootstrap=True) is ours
    assert hooks.receiver(lambda queue, req, is_rebootstrap: fake, None, req) is fake
    assert told == [(req, True)]


def test_prefill_writes_committed_and_failed_rooms_once(worlds, lines):
    world = worlds(prefill=dict(reserve_seconds=0.2))
    tokens, pages = world.prompt(10)
    world.prefill.publish(1, tokens, pages)
    pub = world.prefill.publisher.publish(2, tokens, None, None, "named")
    until(lambda: pub.state == publishing.OPEN)
    world.prefill.publisher.cancel(pub, "the client left")
    world.prefill.publisher.cancel(pub, "the client left")
    until(lambda: pub.state == publishing.FAILED)
    world.settle()
    until(lambda: len(lines()) == 2)
    first, second = lines()
    assert (first["role"], first["room"], first["outcome"], first["prompt_tokens"], first["pages"], first["pages_reused"]) == ("prefill", 1, "committed", 10, 3, 0)
    assert first["published_bytes"] == 3 * (world.prefill.layout.payload_bytes + world.prefill.layout.index_bytes) and "failure" not in first and "rid" not in first
    assert (second["rid"], second["room"], second["outcome"], second["failure"], second["published_bytes"]) == ("named", 2, "failed", "RoomFailed", 0)
    assert first["reserving_ms"] + first["computing_ms"] == pytest.approx(first["total_ms"], abs=0.2)


def test_no_token_of_a_prompt_is_written(worlds, lines):
    world = worlds()
    tokens = np.arange(10, dtype=np.int64) + 987_654_000
    world.prefill.publish(1, tokens, np.arange(3))
    req = request(tokens=tokens.tolist(), outputs=[987_654_321])
    req.oasis.end(req)
    until(lambda: len(lines()) == 2)
    assert not any("98765" in json.dumps(line) for line in lines())


def test_times_are_milliseconds_and_empty_fields_are_left_out(lines):
    request_log.end("decode", a=0.0015, b="", c=None, d=0, e=0.0)
    assert lines() == [{"role": "decode", "a_ms": 1.5, "d": 0, "e_ms": 0.0}]
