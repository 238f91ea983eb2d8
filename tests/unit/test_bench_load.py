"""The client's schedule, against an endpoint that is a function."""

import signal
import threading
import time

import pytest

from oasis_sglang.bench.jobs import Job, score
from oasis_sglang.bench.load import conversations, drive
from oasis_sglang.client import GenerateError, Generation


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
