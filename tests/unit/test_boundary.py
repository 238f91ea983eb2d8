"""Requests that wait for their misses leave the batch and come back; those whose tier is gone are ended with the reason."""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace

import numpy as np
import pytest
from node_rig import until
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sparse_rig import Batch, Node, Req

from decode_node.boundary import hold_back, without_blocked
from transport.errors import LeaseExpired

WAIT = {"oasis": {"on_miss": "wait"}}


class Coordinator:
    """Answers as told."""

    recovery = None

    def __init__(self):
        self.waits: set[str] = set()
        self.errors: dict[str, Exception] = {}
        self.turns = 0
        self.stepper = SimpleNamespace(totals={"waits": 0})

    def blocked(self, req) -> bool:
        return req in self.waits

    def failure(self, req) -> Exception | None:
        return self.errors.get(req)

    def tidy(self) -> None:
        self.turns += 1


def request(name: str) -> Req:
    return Req(name, np.arange(1), 1, None, None, 0)


@pytest.fixture
def told():
    """A scheduler with a batch of a, b, c, d and a queue of x, y."""
    a, b, c, d, x, y = (request(name) for name in "abcdxy")
    batch = Batch()
    batch.reqs = [a, b, c, d]
    scheduler = SimpleNamespace(hisparse_coordinator=Coordinator(), waiting_queue=[x, y], enable_overlap=False)
    return scheduler, batch, {r.rid: r for r in (a, b, c, d, x, y)}


def names(reqs) -> str:
    return "".join(r.rid for r in reqs)


# -- leaving the batch ------------------------------------------------------------------------------------------------


def test_those_that_wait_leave_the_batch_for_the_front_of_the_queue_in_their_order(told):
    scheduler, batch, by = told
    queue = scheduler.waiting_queue
    scheduler.hisparse_coordinator.waits = {by["d"], by["b"]}
    hold_back(scheduler, batch)
    assert (names(batch.reqs), names(scheduler.waiting_queue)) == ("ac", "bdxy") and batch.batch_is_full is False
    assert scheduler.waiting_queue is queue and scheduler.hisparse_coordinator.stepper.totals["waits"] == 2


def test_a_batch_in_which_nobody_waits_is_left_alone(told):
    scheduler, batch, _ = told
    before = batch.reqs
    hold_back(scheduler, batch)
    assert batch.reqs is before and names(scheduler.waiting_queue) == "xy" and batch.batch_is_full is True


def test_the_whole_batch_may_wait(told):
    scheduler, batch, by = told
    scheduler.hisparse_coordinator.waits = set(by.values())
    hold_back(scheduler, batch)
    assert (names(batch.reqs), names(scheduler.waiting_queue)) == ("", "abcdxy")


def test_a_request_that_ends_anyway_does_not_wait(told):
    scheduler, batch, by = told
    scheduler.hisparse_coordinator.waits = set(by.values())
    by["a"].finished_reason, by["b"].to_finish = "length", FINISH_ABORT("left")
    hold_back(scheduler, batch)
    assert names(scheduler.waiting_queue) == "cdxy" and by["b"] in batch.reqs and by["b"].to_finish.message == "left"


def test_nobody_leaves_the_batch_while_its_last_result_is_to_come(told):
    """With overlap a result is processed after the next batch was made; it may end a request, which must not be queued then."""
    scheduler, batch, by = told
    scheduler.enable_overlap = True
    scheduler.hisparse_coordinator.waits = {by["b"]}
    scheduler.hisparse_coordinator.errors = {by["c"]: LeaseExpired("gone", room=3)}
    hold_back(scheduler, batch)
    assert (names(batch.reqs), names(scheduler.waiting_queue)) == ("abcd", "xy") and by["c"].to_finish


def test_a_lost_tier_ends_the_request_with_its_reason(told):
    scheduler, batch, by = told
    error = LeaseExpired("the tier ended the lease", room=7, peer="tier")
    scheduler.hisparse_coordinator.errors = {by["a"]: error, by["c"]: error}
    scheduler.hisparse_coordinator.waits = {by["a"], by["b"]}
    by["c"].to_finish = FINISH_ABORT("left before")
    hold_back(scheduler, batch)
    reason = by["a"].to_finish
    assert isinstance(reason, FINISH_ABORT) and reason.message == f"{error.code}: {error}" and reason.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert "room=7" in reason.message and by["c"].to_finish.message == "left before", "the first reason stands"
    assert (names(batch.reqs), names(scheduler.waiting_queue)) == ("acd", "bxy")


# -- coming back ------------------------------------------------------------------------------------------------------


def test_sglang_does_not_see_those_that_wait_and_they_are_back_in_front(told):
    scheduler, _, by = told
    coordinator = scheduler.hisparse_coordinator
    scheduler.waiting_queue = [by[n] for n in "axbyc"]
    coordinator.waits = {by["a"], by["b"]}
    with without_blocked(scheduler):
        assert names(scheduler.waiting_queue) == "xyc"
        scheduler.waiting_queue = [by["c"], by["d"]]  # x and y run, d is new
    assert names(scheduler.waiting_queue) == "abcd" and coordinator.turns == 1
    coordinator.waits.clear()
    with without_blocked(scheduler):
        assert names(scheduler.waiting_queue) == "abcd"


def test_those_that_wait_are_back_when_sglang_raises(told):
    scheduler, _, by = told
    scheduler.hisparse_coordinator.waits = {by["y"]}
    with pytest.raises(RuntimeError), without_blocked(scheduler):
        raise RuntimeError
    assert names(scheduler.waiting_queue) == "yx"


def test_what_was_let_go_of_is_released_at_every_turn_even_of_an_empty_queue(told):
    scheduler, _, _ = told
    scheduler.waiting_queue = []
    for _ in range(3):
        with without_blocked(scheduler):
            pass
    assert scheduler.hisparse_coordinator.turns == 3 and scheduler.waiting_queue == []


# -- with a real coordinator ------------------------------------------------------------------------------------------


def blocked(node: Node, *sizes: tuple[int, int]) -> list[Req]:
    """Running requests whose misses are held."""
    reqs = [node.arrive(*size, WAIT) for size in sizes]
    node.admit(*reqs)
    node.faults.hold = True
    for _ in range(10):
        node.step()
        if all(node.coordinator.blocked(r) for r in reqs):
            return reqs
        node.faults.finish()
    raise AssertionError("not all of them missed a block")


def test_a_waiting_request_can_be_aborted_and_the_others_go_on(nodes):
    node = nodes()
    free = node.arrive(400, 60)
    a, b, c = blocked(node, (400, 40), (300, 40), (350, 40))
    node.loop()
    assert node.batch.reqs == [] and node.waiting_queue == [a, b, c] and free in node.transfer
    assert node.abort(b) == "admitted" and b in node.ended and node.waiting_queue == [a, c]
    node.loop()
    assert node.waiting_queue == [a, c] and node.sets.size - node.sets.free == 3
    node.land()
    node.run(a, c, free)
    node.at_baseline()


def test_a_waiting_request_whose_tier_is_gone_comes_back_and_ends_with_the_reason(nodes):
    node = nodes(wait_seconds=60.0)
    a, b = blocked(node, (400, 40), (300, 40))
    node.loop()
    assert node.waiting_queue == [a, b]
    error = LeaseExpired("the tier ended the lease", room=a.pull.room)
    node.puller._post(node.puller._give_up, a.pull, error)
    until(lambda: a.pull.state == "failed")
    assert node.coordinator.failure(a) is error and node.coordinator.failure(b) is None and not node.coordinator.blocked(a)
    node.loop()
    assert a in node.ended and a.finished_reason.message == f"LeaseExpired: {error}" and node.waiting_queue == [b]
    node.land()
    node.run(b)
    node.at_baseline()


def test_a_request_waits_at_most_once_for_one_step(nodes):
    node = nodes(wait_seconds=0.02, windows=1)
    reqs = [node.arrive(400, 30, WAIT), node.arrive(333, 30, WAIT), node.arrive(400, 30)]
    node.run(*reqs)
    totals = node.stepper.totals
    assert 0 < totals["waits"] <= totals["steps"] and totals["waits_ended_by_bound"] <= totals["waits"]
    assert [len(r.output_ids) for r in reqs] == [30, 30, 30]
    node.at_baseline()


def test_a_waiting_request_that_was_retracted_waits_on_after_it_was_resumed(nodes):
    node = nodes(wait_seconds=60.0)
    [req] = blocked(node, (400, 40))
    node.retract(req)
    node.loop()
    assert node.waiting_queue == [req] and node.coordinator.blocked(req)
    node.land()
    node.run(req)
    assert not node.stepper.totals["waits_ended_by_bound"]
    node.at_baseline()
