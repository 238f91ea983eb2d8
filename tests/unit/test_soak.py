"""The plan of a soak from its seed, its client, its verdict, and a short one against stand-ins for the servers."""

from __future__ import annotations

import itertools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace as Some

import msgspec
import pytest

from oasis_sglang.soak import baseline, results, run, schedule
from oasis_sglang.soak.asking import ANSWERED, FAILED, LEFT, REFUSED, STUCK, Asking, Outcome, error_type, merged, since
from oasis_sglang.soak.faults import DEFAULT, FAULTS, Fault
from oasis_sglang.soak.results import Report, Row

# -- the plan -----------------------------------------------------------------------------------------------------


def first(seed, count=2000, prompts=10):
    return list(itertools.islice(schedule.asks(seed, prompts), count))


def test_requests_follow_the_seed():
    assert first(1) == first(1) != first(2)
    asks = first(3)
    assert [ask.number for ask in asks] == list(range(2000)) and len({ask.rid for ask in asks}) == 2000
    assert {ask.prompt for ask in asks} == set(range(10)) and {ask.output for ask in asks} == set(schedule.OUTPUTS)
    left = [ask.leaves for ask in asks if ask.leaves is not None]
    assert 0.10 < len(left) / 2000 < 0.20 and min(left) < 0.1 and max(left) > 3
    assert 0.6 < sum(ask.stream for ask in asks) / 2000 < 0.8


def test_phases_go_over_the_capacity_and_below_it_in_turns():
    phases = schedule.phases(100.0, 4)
    assert [(p.start, p.concurrency) for p in phases] == [(0.0, 3), (20.0, 16), (30.0, 3), (50.0, 16), (60.0, 3), (80.0, 16), (90.0, 3)]
    assert [schedule.concurrency(phases, at) for at in (-1.0, 0.0, 19.9, 20.0, 29.9, 95.0, 500.0)] == [0, 3, 3, 16, 16, 3, 3]


def test_faults_are_in_the_middle_in_their_order():
    assert [(s.at, s.name) for s in schedule.strikes(("a", "b", "c"), 100.0)] == [(20.0, "a"), (40.0, "b"), (60.0, "c")]
    assert schedule.strikes((), 100.0) == []
    assert set(DEFAULT) <= set(FAULTS) and all(name == fault.name for name, fault in FAULTS.items())


class Maker:
    def short(self):
        return [[1, 2], [3, 4, 5]]

    def cut(self, text, tokens, *, skip=0):
        return [skip, *range(tokens - 1)]


def test_the_menu_knows_which_answers_can_be_compared():
    menu = schedule.menu(Maker(), "text", seed=0, budget=512, context=4096)
    assert menu == schedule.menu(Maker(), "text", seed=0, budget=512, context=4096) != schedule.menu(Maker(), "text", seed=1, budget=512, context=4096)
    assert all(len(p.ids) + max(schedule.OUTPUTS) <= 512 for p in menu if p.compared) and {len(p.ids) for p in menu if not p.compared} == {1100, 1700}
    assert len({p.name for p in menu}) == len(menu) and sum(p.compared for p in menu) > len(menu) / 2


# -- the client ---------------------------------------------------------------------------------------------------


def test_chunks_bring_all_tokens_or_the_new_ones():
    def chunk(ids, total):
        return {"output_ids": ids, "meta_info": {"completion_tokens": total}}

    assert merged(merged([], chunk([1, 2], 2)), chunk([1, 2, 3], 3)) == [1, 2, 3]
    assert merged(merged([], chunk([1, 2], 2)), chunk([3], 3)) == [1, 2, 3]


@pytest.mark.parametrize("text, code, kind", [
    ("failed with exception KVTransferError(7): CapacityError: the arena is full [limit=3]", 503, "CapacityError"), ("no idea", 502, "HTTP 502"),
    ("nothing", 0, "connection"), ("RoomFailed: DuplicateRoom: in use", 500, "DuplicateRoom")])
def test_an_error_has_a_type(text, code, kind):
    assert error_type(text, code) == kind


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class Serving:
    """An endpoint that answers each request as its ``rid`` asks, token n of prompt p being p[0] + n."""

    def __init__(self):
        serving = self
        self.slow = threading.Event()
        self.asked: list[dict] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                serving.asked.append(body)
                try:
                    serving.answer(self, body)
                except OSError:
                    pass  # the client has left

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.slow.set()
        self.server.shutdown()
        self.server.server_close()

    def tokens(self, body) -> list[int]:
        return [body["input_ids"][0] + n for n in range(body["sampling_params"]["max_new_tokens"])]

    def answer(self, to, body) -> None:
        ids, kind = self.tokens(body), body.get("rid", "reference")
        if kind.startswith("full"):
            raw = b'{"message": "CapacityError: the arena is full"}'
            to.send_response(503)
            to.send_header("Retry-After", "5")
            to.send_header("Content-Length", str(len(raw)))
            to.end_headers()
            to.wfile.write(raw)
            return
        to.send_response(200)
        to.end_headers()
        if kind.startswith("slow"):
            to.wfile.write(event(output_ids=ids[:1], meta_info={"completion_tokens": 1, "finish_reason": None}))
            self.slow.wait(20)
            return
        last = {"output_ids": ids, "meta_info": {"id": kind, "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(ids),
                                                 "finish_reason": {"type": "length"}}}
        if not body["stream"]:
            to.wfile.write(json.dumps(last).encode())
            return
        to.wfile.write(event(output_ids=ids[:1], meta_info={"completion_tokens": 1, "finish_reason": None}))
        if kind.startswith("broken"):
            return
        if kind.startswith("aborted"):
            to.wfile.write(event(output_ids=ids[:1], meta_info={"completion_tokens": 1, "finish_reason": {
                "type": "abort", "message": "PeerLost: the tier is gone", "status_code": 503}}))
            return
        to.wfile.write(event(**last) + b"data: [DONE]\n\n")


@pytest.fixture
def serving():
    serving = Serving()
    yield serving
    serving.close()


def asking(serving, rid, *, stream=True, output=4):
    body = {"input_ids": [10, 11], "rid": rid, "stream": stream, "sampling_params": {"max_new_tokens": output}}
    outcome = Outcome(id=rid, prompt="p", prompt_tokens=2, wanted=output, stream=stream, sent=0.0)
    return Asking(serving.url, body, outcome, since(time.monotonic()), timeout=20)


@pytest.mark.parametrize("rid, stream, status, code, error, tokens", [
    ("good", True, ANSWERED, 200, "", 4), ("good", False, ANSWERED, 200, "", 4), ("full", True, REFUSED, 503, "CapacityError", 0),
    ("aborted", True, FAILED, 503, "PeerLost", 1), ("broken", True, FAILED, 200, "connection", 1)])
def test_every_end_of_a_request_is_an_outcome(serving, rid, stream, status, code, error, tokens):
    one = asking(serving, rid, stream=stream)
    one.run()
    o = one.outcome
    assert (o.status, o.code, o.error, o.tokens) == (status, code, error, tokens) and one.done.is_set()
    assert o.retry_after == ("5" if rid == "full" else "")
    assert one.ids == [10, 11, 12, 13][:tokens]


def test_nobody_there_is_a_refusal(serving):
    serving.close()
    one = asking(serving, "good")
    one.run()
    assert (one.outcome.status, one.outcome.error, one.outcome.code) == (REFUSED, "connection", 0)


@pytest.mark.parametrize("status", [LEFT, STUCK])
def test_a_client_that_goes_away(serving, status):
    one = asking(serving, "slow")
    thread = threading.Thread(target=one.run)
    thread.start()
    while not one.ids:
        time.sleep(0.005)
    one.drop(status)
    thread.join(10)
    assert (one.outcome.status, one.outcome.error, one.outcome.tokens) == (status, "", 1)
    early = asking(serving, "good")
    early.drop(LEFT)  # before there is a connection
    early.run()
    assert early.outcome.status == LEFT


# -- the verdict --------------------------------------------------------------------------------------------------


def outcome(number, status, **fields):
    return Outcome(**({"id": f"soak-{number}", "prompt": "p", "prompt_tokens": 9, "wanted": 4, "stream": True, "sent": 10.0, "ended": 12.0,
                       "status": status, "code": 200} | fields))


def report(outcomes=(), faults=(), **fields) -> Report:
    good = outcome("good", ANSWERED, equal=True, tokens=4)
    return Report(**({"model": "m", "seed": 0, "seconds": 60.0, "capacity": 4, "most_at_once": 16, "outcomes": [good, *outcomes], "faults": list(faults),
                      "still_held": {}, "internal_errors": {"tier": 0}, "grown": []} | fields))


ROW = dict(fault="tier-restart", what="killed", began=20.0, ended=40.0, detected=0.5, restored=9.0)


@pytest.mark.parametrize("changes, named", [
    (dict(outcomes=[outcome(1, STUCK)]), "soak-1 was neither"), (dict(outcomes=[outcome(1, ANSWERED, equal=False)]), "answered wrongly"),
    (dict(outcomes=[outcome(1, REFUSED, error="RoomFailed", code=500)]), "without a fault: 500 RoomFailed"),
    (dict(outcomes=[outcome(1, FAILED, error="PeerLost", code=503)]), "without a fault"),
    (dict(faults=[Row(**ROW | {"restored": None, "still_held": {"tier leased": 3}})]), "tier leased 3"), (dict(faults=[Row(**ROW | {"detected": None})]), "nobody noticed"),
    (dict(still_held={"decode pulls": 1}), "at the end still held: decode pulls 1"), (dict(internal_errors={"decode": 2}), "2 internal errors of decode"),
    (dict(grown=["tier: 9 threads before, 99 after"]), "99 after"), (dict(outcomes=[], ), None)])
def test_each_thing_that_is_off_is_a_problem(changes, named):
    found = results.problems(report(**changes))
    assert found == [] if named is None else any(named in line for line in found), found


def test_what_is_no_problem():
    within = dict(sent=39.0, ended=41.0, code=500)
    fine = [outcome(1, LEFT), outcome(2, REFUSED, error="CapacityError", code=503), outcome(3, FAILED, error="PeerLost", **within),
            outcome(4, REFUSED, error="connection", **within), outcome(5, ANSWERED, equal=None)]
    assert results.problems(report(fine, [Row(**ROW), Row(**ROW | {"fault": "tier-pause", "detected": None, "must_notice": False})])) == []
    assert results.problems(report([outcome(3, FAILED, error="PeerLost", sent=42.0, ended=43.0, code=500)], [Row(**ROW)])), "after the fault was over"
    none_compared = msgspec.structs.replace(report(), outcomes=[outcome(1, ANSWERED)])
    assert results.problems(none_compared) == ["no answer was compared with its reference"]


def test_a_fault_is_judged_by_who_was_under_way():
    all_of = {o.id: o for o in (outcome(1, ANSWERED, equal=True), outcome(2, ANSWERED, equal=False), outcome(3, FAILED), outcome(4, REFUSED), outcome(5, LEFT),
                                outcome(6, STUCK), outcome(7, STUCK))}
    row = results.judged(Row(**ROW), [f"soak-{n}" for n in range(1, 7)], all_of)
    assert (row.in_flight, row.recovered, row.told, row.left, row.lost, row.wrong) == (6, 2, 2, 1, 1, 1)
    assert results.cells(row) == ("tier-restart", "killed", "6", "1", "2", "2", "1", "0.5 s", "9.0 s")
    never = Row(**ROW | {"detected": None, "restored": None, "must_notice": False})
    assert results.cells(never)[-2:] == ("not meant to be", "not reached")


def test_tables_and_files(tmp_path):
    rows = [Row(**ROW), Row(**ROW | {"fault": "prefill-kill", "began": 5.0})]
    lines = results.markdown(rows).splitlines()
    assert len(lines) == 4 and all(line.count("|") == len(results.COLUMNS) + 1 for line in lines)
    whole = report([outcome(1, REFUSED, error="CapacityError", code=503)], rows)
    (tmp_path / "results.json").write_bytes(msgspec.json.encode(whole))
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    assert results.load_rows(tmp_path / "results.json") == results.load_rows(tmp_path / "rows.jsonl") == rows
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match="broken.json"):
        results.load_rows(tmp_path / "broken.json")
    order = [json.loads(line) for line in results.timeline(whole).splitlines()]
    assert [next(iter(line)) for line in order] == ["fault", "request", "request", "fault"]
    assert dict(results.summary(whole))["refused"] == "1 (CapacityError 1)" and dict(results.summary(whole))["wrong output"] == "0 of 1 compared"


def test_growth_has_bounds():
    use = baseline.Uses(threads=50, files=100, memory=1 << 30)
    fine = baseline.Uses(threads=74, files=164, memory=(1 << 30) * 5 // 4 + (256 << 20))
    assert baseline.grown({"tier": use}, {"tier": fine}) == []
    lines = baseline.grown({"tier": use, "decode": use}, {"tier": baseline.Uses(75, 165, fine.memory + 1)})
    assert len(lines) == 4 and lines[0] == "decode is gone" and [word in line for word, line in zip(("threads", "files", "MiB"), lines[1:])] == [True] * 3


INVENTORY = dict.fromkeys(("writing", "leased", "holders", "held", "rooms", "leases", "waiters"), 0) | {"records": 9, "free": 5, "cached": 4, "workers": 1}
DECODE = {"pulls": 0, "leases": 0, "flights": 0, "kv_pool_tokens": 0, "staging": {"leased": 0, "quarantined": 0}, "totals": {},
          "working_sets": {"held": {"pages": 0}, "logical_tokens": 0, "leaks": 0, "host_cache": {"pinned_bytes": 0, "reserved_bytes": 0}}}


def test_what_is_held_is_seen():
    assert not any(baseline.summed(INVENTORY, {"publications": 0}, DECODE).values())
    for changed in (baseline.summed(INVENTORY | {"free": 4}, {"publications": 0}, DECODE), baseline.summed(INVENTORY, {"publications": 1}, DECODE),
                    baseline.summed(INVENTORY, {"publications": 0}, DECODE | {"staging": {"leased": 0, "quarantined": 2}})):
        assert [value for value in changed.values() if value] in ([1], [2])
    now, reads = [0.0], iter([{"a": 2}, {"a": 1, "b": 0}, {"a": 0}])
    assert baseline.settle(lambda: next(reads), 10.0, clock=lambda: now[0], pause=0) == {}

    def silent():
        now[0] += 6
        raise OSError("no answer")

    assert list(baseline.settle(silent, 10.0, clock=lambda: now[0], pause=0)) == ["silent (no answer)"]


# -- a whole one, against stand-ins -------------------------------------------------------------------------------


class FakeStack:
    """One endpoint; what the servers hold is ``state``'s to say."""

    def __init__(self, url):
        self.url, self.urls, self.servers, self.checked = url, {}, {"tier": Some(pid=1)}, 0

    def check(self):
        self.checked += 1


@pytest.fixture
def soaking(serving, monkeypatch):
    monkeypatch.setattr(baseline, "held", lambda stack: {"decode pulls": 0})
    monkeypatch.setattr(baseline, "uses", lambda stack: {"tier": baseline.Uses(5, 5, 5)})
    monkeypatch.setattr(baseline, "faults_of_ours", lambda stack: {"tier": 0})
    monkeypatch.setattr(run, "signs", lambda stack: {"links": 0})
    monkeypatch.setattr(run, "AFTERMATH_S", 0.1)
    monkeypatch.setattr(run, "LOOK_S", 0.02)
    done = []
    fault = Fault("blow", "it is struck", "tier", lambda stack: done.append("strike"), lambda stack: done.append("mend"),
                  lambda stack, before: before == {"links": 0}, away=0.1)
    monkeypatch.setattr(run, "FAULTS", {"blow": fault})

    def make(seconds=1.5, asks=None):
        prompts = [schedule.Prompt("a", (100, 1), True), schedule.Prompt("b", (200, 1), False)]
        return run.Soak(FakeStack(serving.url), prompts=prompts, asks=asks or schedule.asks(0, 2), phases=[schedule.Phase(0.0, 3)],
                        strikes=schedule.strikes(("blow",), seconds), seconds=seconds)

    make.done = done
    return make


def test_a_soak_of_servers_that_are_well(soaking):
    soak = soaking()
    found = soak.run(model="m", seed=0)
    assert found.problems == [] and soaking.done == ["strike", "mend"] and soak.stack.checked == 1
    assert len(found.outcomes) > 20 and found.most_at_once == 3
    assert {o.status for o in found.outcomes} <= {ANSWERED, LEFT} and all(o.ended >= o.sent for o in found.outcomes)
    assert {o.equal for o in found.outcomes if o.prompt == "a" and o.status == ANSWERED} == {True}
    assert {o.equal for o in found.outcomes if o.prompt == "b"} == {None}
    [row] = found.faults
    assert row.detected is not None and row.restored is not None and row.ended >= row.began and row.lost == 0


def test_a_soak_sees_wrong_answers_and_what_is_not_given_back(soaking, serving, monkeypatch):
    soak = soaking(seconds=0.8)
    learn = soak._learn

    def learn_and_change():
        learn()
        serving.tokens = lambda body: [7] * body["sampling_params"]["max_new_tokens"]
        monkeypatch.setattr(run, "BASELINE_S", 0.3)

    monkeypatch.setattr(soak, "_learn", learn_and_change)
    calls = itertools.count()
    monkeypatch.setattr(baseline, "held", lambda stack: {"decode pulls": min(1, next(calls))})
    found = soak.run(model="m", seed=0)
    assert any("answered wrongly" in line for line in found.problems) and any("still held: decode pulls 1" in line for line in found.problems)
    assert found.faults[0].restored is None


def test_a_strike_that_goes_wrong_is_a_row_and_not_the_end(soaking, monkeypatch):
    def no(stack):
        raise OSError("it does not come back")

    monkeypatch.setattr(run, "FAULTS", {"blow": Fault("blow", "it is struck", "tier", no, no, None)})
    found = soaking(seconds=0.8).run(model="m", seed=0)
    assert any("it does not come back" in line for line in found.problems) and not any("nobody noticed" in line for line in found.problems)


# -- the command --------------------------------------------------------------------------------------------------


def command(*arguments):
    from typer.testing import CliRunner

    from oasis_sglang.cli import app

    return CliRunner().invoke(app, ["soak", *arguments])


def test_the_command_names_its_faults_and_refuses_others():
    assert [line.partition(":")[0] for line in command("--list").stdout.splitlines()] == list(FAULTS)
    refused = command("--faults", "tier-restart,flood")
    assert refused.exit_code == 1 and "flood: known are" in refused.output and "tier-restart," in refused.output


def test_the_command_makes_tables_of_earlier_results(tmp_path):
    (tmp_path / "results.json").write_bytes(msgspec.json.encode(report([], [Row(**ROW)])))
    (tmp_path / "chaos.jsonl").write_bytes(msgspec.json.encode(Row(**ROW | {"fault": "arena full"})) + b"\n")
    shown = command("--markdown", "--from", str(tmp_path / "results.json"), "--from", str(tmp_path / "chaos.jsonl"))
    assert shown.exit_code == 0 and [line.split(" | ")[0] for line in shown.stdout.splitlines()[2:]] == ["| tier-restart", "| arena full"]
    assert command("--from", str(tmp_path / "none.json")).exit_code == 1


def test_a_run_leaves_its_timeline_and_says_what_was_off(tmp_path, monkeypatch):
    from contextlib import contextmanager

    from oasis_sglang.commands import soak as module

    @contextmanager
    def no_processes(folder):
        yield None, folder

    monkeypatch.setattr(module, "processes", no_processes)
    for problems, code in (([], 0), (["soak-1 was neither answered nor refused"], 1)):
        found = report([], [Row(**ROW)], problems=problems)
        monkeypatch.setattr(module, "_run", lambda *_, found=found, **__: found)
        done = command("--out", str(tmp_path / "out"), "--markdown")
        assert done.exit_code == code and ("neither answered" in done.output) == bool(code) and "| tier-restart |" in done.stdout
        assert results.load_rows(tmp_path / "out" / "results.json") == found.faults
        assert len((tmp_path / "out" / "timeline.jsonl").read_text().splitlines()) == 2 and "| tier-restart |" in (tmp_path / "out" / "table.md").read_text()
    assert "lost or stuck" in command("--out", str(tmp_path / "out")).stdout
