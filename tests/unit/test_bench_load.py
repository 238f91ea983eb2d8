"""The client's side: its schedule against an endpoint that is a function, what it reads of a stream, and what a benchmark makes of failures."""

import http.server
import json
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from oasis_sglang import client
from oasis_sglang.bench import records, run
from oasis_sglang.bench.jobs import Job, Work, score
from oasis_sglang.bench.load import asker, conversations, drive
from oasis_sglang.bench.records import Meters, Node, Request, Run
from oasis_sglang.bench.settings import Settings
from oasis_sglang.client import GenerateError, Generation, generate
from oasis_sglang.stack import StackError
from transport.errors import ConfigError


class Server:
    """Answers with the last token and its successors; remembers prompts, and how many it answered at once."""

    def __init__(self, seconds=0.0, refuse=()):
        self.seconds, self.refuse, self.prompts, self.now, self.most, self.lock = seconds, refuse, {}, 0, 0, threading.Lock()

    def __call__(self, prompt, tokens, rid):
        with self.lock:
            self.prompts[rid] = list(prompt)
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        with self.lock:
            self.now -= 1
        if rid in self.refuse:
            raise GenerateError("no room")
        answer = [prompt[-1] + i + 1 for i in range(tokens)]
        return Generation(rid, len(prompt), answer, [0.5, 0.75], {}, [1, tokens - 1])


def test_requests_come_back_in_the_order_of_the_jobs():
    requests, _ = drive([Job(str(i), [i], 3) for i in range(5)], Server(0.01), concurrency=2, prefix="p-")
    assert [r.name for r in requests] == list("01234")
    assert [r.output_ids[0] for r in requests] == [1, 2, 3, 4, 5]


def test_tokens_of_one_chunk_have_one_time():
    [request], _ = drive([Job("a", [1], 4)], Server(), concurrency=1)
    assert request.token_times == [0.5, 0.75, 0.75, 0.75]


def test_no_more_are_under_way_than_allowed_and_as_many_as_allowed():
    server = Server(0.05)
    drive([Job(str(i), [i], 2) for i in range(9)], server, concurrency=3)
    assert server.most == 3


def test_a_turn_has_the_turn_before_and_its_answer():
    server = Server()
    jobs = [Job("a", [1, 2], 2), Job("x", [50], 2), Job("a2", [9], 2, after="a"), Job("a3", [20], 2, after="a2")]
    requests, _ = drive(jobs, server, concurrency=1)
    assert server.prompts["a2"] == [1, 2, 3, 4, 9]
    assert server.prompts["a3"] == [1, 2, 3, 4, 9, 10, 11, 20]
    assert [r.prompt_tokens for r in requests] == [2, 1, 5, 8]


def test_what_follows_a_refused_turn_fails_too_and_says_why():
    requests, _ = drive([Job("a", [1], 2), Job("a2", [9], 2, after="a"), Job("b", [4], 2)], Server(refuse={"a"}), concurrency=2)
    assert requests[0].error == "no room" and not requests[0].token_times
    assert "a, the turn before" in requests[1].error
    assert requests[2].error is None


def test_jobs_wait_for_their_arrival():
    requests, seconds = drive([Job("a", [1], 2, arrival=0.0), Job("b", [2], 2, arrival=0.2)], Server(), concurrency=2)
    assert requests[1].arrival == 0.2
    assert requests[1].sent >= 0.2
    assert seconds >= 0.2 + 0.75 - 0.05


def test_an_interrupt_ends_a_schedule_and_sends_nothing_more():
    server = Server()

    def ask(prompt, tokens, rid):
        if rid == "b":
            signal.raise_signal(signal.SIGINT)  # as the terminal does: to the main thread, which waits
        return server(prompt, tokens, rid)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            drive([Job("a", [1], 2, arrival=0.0), Job("b", [1], 2, arrival=0.1), Job("c", [1], 2, arrival=30.0)], ask, concurrency=3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 10
    assert set(server.prompts) <= {"a", "b"}


def test_conversations_are_chains_in_the_order_of_their_first_jobs():
    jobs = [Job("a", [1], 1), Job("b", [1], 1), Job("a2", [1], 1, after="a"), Job("b2", [1], 1, after="b"), Job("a3", [1], 1, after="a2")]
    assert [[job.name for job in chain] for chain in conversations(jobs)] == [["a", "a2", "a3"], ["b", "b2"]]


def test_score_is_the_share_of_answers_found():
    assert score("The number is  12345,\nsaid Bob", ("12345", "said bob")) == 1.0
    assert score("nothing", ("12345", "not")) == 0.5


@pytest.fixture
def endpoint(monkeypatch):
    """An endpoint that streams ``chunks``: numbers of token ids so far. ``repeat``: each chunk has all of them. Yields (url, settings)."""
    told = {"repeat": True, "chunks": (1, 3, 3, 4), "text": "", "read": 0}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            ids = [7, 7, 8, 7] * (told["chunks"][-1] // 4 + 1)
            before = 0
            for n in told["chunks"]:
                ends = n == told["chunks"][-1]
                meta = {"id": "r", "finish_reason": {"type": "length"} if ends else None, "prompt_tokens": 2, "completion_tokens": n}
                self._say({"text": told["text"], "output_ids": ids[0 if told["repeat"] else before : n], "meta_info": meta})
                before = n
            self.wfile.write(b"data: [DONE]\n\n")

        def _say(self, chunk):
            self.wfile.write(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")

        def log_message(self, *args):
            pass

    def loads(text):
        told["read"] += 1
        return json.loads(text)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setattr(client, "json", SimpleNamespace(loads=loads, dumps=json.dumps))
        yield f"http://127.0.0.1:{running.server_port}", told
        running.shutdown()


@pytest.mark.parametrize("repeat", [True, False])
def test_streams_of_either_kind_are_the_same_answer(endpoint, repeat):
    url, told = endpoint
    told["repeat"] = repeat
    answer = generate(url, [1, 2], max_new_tokens=4)
    assert (answer.output_ids, answer.chunk_tokens, answer.prompt_tokens) == ([7, 7, 8, 7], [1, 2, 0, 1], 2)
    assert len(answer.chunk_times) == 4


def test_of_a_long_repeated_stream_only_the_ends_of_chunks_are_read(endpoint):
    url, told = endpoint
    told |= {"chunks": tuple(range(1, 41)), "text": 'so "finish_reason":null, "completion_tokens":99 ' * 200}
    answer = generate(url, [1, 2], max_new_tokens=40)
    assert answer.output_ids == [7, 7, 8, 7] * 10 and answer.chunk_tokens == [1] * 40
    assert told["read"] == 3, "two chunks to know its kind, and the last"


def test_what_is_no_chunk_of_an_answer_is_an_error():
    for chunk in (b"[]", b"{", b'{"meta_info": {}}', b'{"meta_info": null, "output_ids": []}', b'{"text": "x"}'):
        with pytest.raises(GenerateError, match="http://there"):
            client._Answer("http://there").add(chunk)
    with pytest.raises(GenerateError, match="without an answer"):
        client._Answer("http://there").end()


def test_a_short_answer_is_a_failed_request(endpoint):
    url, _ = endpoint
    whole, short = (drive([Job("a", [1], tokens)], asker(url, 10.0), concurrency=1)[0][0] for tokens in (4, 6))
    assert whole.error is None and len(whole.token_times) == 4
    assert short.error == "answered 4 of 6 tokens" and not short.token_times


class Benched(run.Bench):
    """A benchmark without servers. ``failing``: what is raised where a system would be served."""

    def __init__(self, settings, failing=None):
        self.settings, self.points, self.works, self.folder = settings, settings.points(), {}, Path()
        self.shape, self.said, self.failing, self.made, self.served = {"context": 8192}, [], failing or {}, [], []
        self.maker = SimpleNamespace(chat=lambda text: [0, 0])
        self.progress = self.said.append
        self.results = records.Results("t", "c", "now", 0, {}, {}, {}, dict(settings.slo), {}, settings.repeats, "stock", [], [])
        self.save = lambda results: None

    @contextmanager
    def _place(self):
        yield None, None, None

    def work(self, name, point, repeat):
        tokens = self.settings.at(point).tokens
        return Work(name, "", [Job("a", [repeat] * tokens, 3), Job("long", [repeat] * (tokens + 1), 3), Job("next", [1] * 9999, 3, after="a")])

    def _system(self, chosen, points, repeat, *rest):
        self.made.append((chosen.system.name, repeat))
        if error := self.failing.get(chosen.system.name):
            raise error


@pytest.mark.parametrize("error, said", [(StackError("decode ended\nmore"), "decode ended"), (ConnectionRefusedError(111, "refused"), "[Errno 111] refused"),
                                         (json.JSONDecodeError("no value", "", 0), "no value: line 1 column 1 (char 0)"), (GenerateError("HTTP 500"), "HTTP 500"),
                                         (TimeoutError(), "TimeoutError")])
def test_a_system_that_fails_is_noted_and_the_others_run(error, said):
    bench = Benched(Settings(Path("/m"), repeats=2), {"full": error})
    results = bench.run()
    assert bench.made == [("stock", 0), ("full", 0), ("oasis", 0), ("full", 1), ("oasis", 1), ("stock", 1)]
    assert results.notes == [f"full, repeat {repeat}, was not measured to its end: {said}" for repeat in (1, 2)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConfigError("wrong")])
def test_an_interrupt_and_a_wrong_setting_end_a_benchmark(error):
    bench = Benched(Settings(Path("/m")), {"full": error})
    with pytest.raises(type(error)):
        bench.run()
    assert bench.made == [("stock", 0), ("full", 0)] and not bench.results.notes


def test_quality_is_measured_at_the_first_point_of_each_budget_and_keeps_it():
    measured = []

    class Forced(Benched):
        def _quality(self, point, one, processes, places):
            measured.append((point, one.system.name, one.spec.config["budget_tokens"]))
            if one.spec.config["budget_tokens"] == 256:
                raise run.quality.QualityError("did not follow")

    bench = Forced(Settings(Path("/m"), repeats=1, quality=4, budget=1024, sweeps={"concurrency": (1, 2), "budget": (256, 512)}, systems=("stock", "oasis")))
    bench.run()
    assert measured == [({"concurrency": 1}, "oasis", 1024), ({"budget": 256}, "oasis", 256), ({"budget": 512}, "oasis", 512)]
    assert bench.results.notes == ["quality of oasis {'budget': 256} was not measured to its end: did not follow"]


def test_points_of_one_stack_take_turns_after_a_request_of_full_length(monkeypatch):
    asked = []
    monkeypatch.setattr(run, "generate", lambda url, prompt, *, max_new_tokens, **_: asked.append((prompt[0], len(prompt), max_new_tokens)))

    class Served(Benched):
        def _run(self, chosen, url, where, stack, memory, workload, point, repeat, hosts):
            self.served.append((repeat, point["context"]))
            return Run("oasis", workload, repeat, point, len(self.results.runs), 1.0, [], Node(), Meters())

    bench = Served(Settings(Path("/m"), sweeps={"context": (100, 300, 200)}))
    one = SimpleNamespace(system=SimpleNamespace(name="oasis"))
    stack = SimpleNamespace(spec=SimpleNamespace(decodes=2))
    for repeat in range(4):
        bench._served(one, "http://there", None, stack, None, bench.points, repeat, None)
    assert bench.served == [(0, 100), (0, 300), (0, 200), (1, 300), (1, 200), (1, 100), (2, 200), (2, 100), (2, 300), (3, 100), (3, 300), (3, 200)]
    assert asked == [(0, 2, 8), (0, 2, 8), (-1, 301, 3)] * 4
    assert [one.order for one in bench.results.runs] == list(range(12))
    assert bench.results.notes == ["oasis: counters are of the first decode node only"]


@pytest.mark.parametrize("counted, heard, passed", [(1000, 1030, True), (1000, 2000, False), (0, 1 << 20, False), (0, 4096, None), (None, 1 << 20, None)])
def test_a_counter_of_nothing_is_checked_and_no_counter_is_not(counted, heard, passed):
    bench = Benched(Settings(Path("/m")))
    made = Run("stock", "needle", 0, {}, 0, 1.0, [Request("a", 1, 0, 0, [], [])], Node(wire_bytes=counted), Meters())
    bench._check_wire(made, [heard, 7])
    assert [check.passed for check in bench.results.checks] == ([] if passed is None else [passed])
    assert (made.meters.wire_in_bytes, made.meters.wire_out_bytes) == (heard, 7)
