"""Requests that lose their KV, and go on once a prefill worker has computed them again: where they were, with nothing left behind."""

from __future__ import annotations

import time
from http import HTTPStatus
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from node_rig import SOURCE, row_of, until
from recovery_rig import ADDRESS, DEAD, PrefillWorker, Workers, complete, make_manager, make_receiver, make_recovery
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError

from decode_node import recovery as recovering
from decode_node.boundary import hold_back
from decode_node.destination import WholePages
from decode_node.policy import RecoveryLimits
from decode_node.pull import PullLimits
from prefill_node.publisher import COMMITTED
from transport.errors import CapacityError, DeadlineExceeded, IntegrityError, LeaseExpired, PeerLost

FAIL = {"oasis": {"on_failure": "fail"}}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(recovering, "PAUSE_SECONDS", 0.0)


class Rig:
    """A ``Node`` whose requests are SGLang's to recover: what its scheduler and its prefill worker do besides."""

    def __init__(self, node, monkeypatch, limits: RecoveryLimits | None = None):
        self.node, self.receivers, self.reqs = node, {}, {}
        self.worker = PrefillWorker(self.answer)
        self.workers = Workers(lambda: node.world.tier.control)
        self.workers.at[ADDRESS] = (self.worker.url, SOURCE)
        self.recovery = node.coordinator.recovery = make_recovery(node.puller, self.workers, limits)
        self.rows: list[int] = []
        self.manager = make_manager(node.puller, self.recovery, release=node.coordinator.request_finished, row_writer=lambda index, room: self.wrote,
                                    fetch=lambda req, pull, pages, write_row: node._fetch(req, pull, pages, write_row))
        node.scheduler.running_batch, node.scheduler.disagg_decode_prealloc_queue = node.batch, self
        for name in ("req_to_token_pool", "token_to_kv_pool_allocator", "tree_cache"):
            setattr(node.scheduler, name, None)
        monkeypatch.setattr("sglang.srt.managers.schedule_batch.release_req", self.release_req)
        self.refusals: list[int] = []
        """Statuses of the next ``/generate``s; then they succeed."""

    def wrote(self, row: tuple[bytes, ...]) -> None:
        self.rows.append(int.from_bytes(row[0], "little"))

    def release_req(self, *, req, **_) -> None:
        self.node.coordinator.retract_req(req)
        self.node._give_row(req)

    def _create_receiver_and_enqueue(self, req, is_rebootstrap) -> None:
        self.receivers[req] = make_receiver(self.manager, req, again=is_rebootstrap)

    def answer(self, body: dict) -> int:
        """As prefill: computes what it is sent, publishes it. It knows the true K and V of every token."""
        if self.refusals:
            return self.refusals.pop(0)
        req = self.reqs[body["rid"].partition("-again-")[0]]
        node, ids, lay = self.node, body["input_ids"], self.node.layout
        assert ids == [*req.origin_input_ids, *req.output_ids][: len(ids)] and len(ids) == req.length
        pages = np.arange(len(node.world.prefill.pool.k[0]) // node.page)[: -(-len(ids) // node.page)]
        for layer in range(lay.num_layers):
            part = req.truth[layer * lay.kv_heads : (layer + 1) * lay.kv_heads, :, : len(ids)].permute(1, 2, 0, 3)
            for side, pool in enumerate((node.world.prefill.pool.k, node.world.prefill.pool.v)):
                pool[layer][: len(ids)] = part[side]
        asked = torch.randn(8, lay.num_layers, node.query_heads, lay.head_dim)
        pub = node.world.prefill.publish(body["bootstrap_room"], np.array(ids), pages, queries=asked)
        return 200 if pub.state == COMMITTED else 500

    def arrive(self, prompt: int, new: int, custom=None):
        req = complete(self.node.arrive(prompt, new, custom))
        req.oasis, req.output_ids = None, []  # its first token comes with its commit
        self.reqs[req.rid] = req
        receiver = make_receiver(SimpleNamespace(**{**vars(self.manager), "puller": SimpleNamespace(pull=lambda *a, **k: req.pull)}), req)
        receiver.kv_mgr = self.manager
        self.receivers[req] = receiver
        return req

    def lose(self, *reqs, error=None) -> None:
        for req in reqs:
            self.node.puller._post(self.node.puller._give_up, req.oasis.pulls[-1], error or LeaseExpired("the tier ended the lease", room=req.pull.room))
        until(lambda: all(req.oasis.pulls[-1].state == "failed" for req in reqs))

    def poll(self, req) -> int:
        state = self.receivers[req].poll()
        if req.oasis.pulls:
            req.pull = req.oasis.pulls[-1]
        return state

    def until(self, req, state: int) -> None:
        until(lambda: self.poll(req) == state, f"poll {state}, not {self.poll(req)}")

    def allocate(self, req) -> None:
        """SGLang's ``pop_preallocated`` of it."""
        self.node._take_row(req)
        self.receivers[req].send_metadata(np.zeros(-(-req.length // self.node.page), np.int32), 0, decode_prefix_len=0)

    def commit(self, req) -> None:
        """SGLang's ``pop_transferred`` of it."""
        assert req.bootstrap_room in self.rows, "SGLang takes the row of another room for damage"
        replayed, req.pd_rebootstrap_forced_output_id = req.pd_rebootstrap_forced_output_id, None
        req.output_ids.append(next(self.node.ids) if replayed is None else replayed)
        self.receivers.pop(req).clear()
        req.pd_rebootstrap_in_progress = False
        self.node.coordinator.admit_request_direct(req)
        self.node.waiting_queue.append(req)

    def admit(self, *reqs) -> None:
        for req in reqs:
            self.node.prealloc.remove(req)
            self.until(req, KVPoll.WaitingForInput)
            self.allocate(req)
        for req in reqs:
            self.until(req, KVPoll.Success)
            self.commit(req)
        self.node.prebuild()

    def close(self) -> None:
        self.recovery.recomputer.close()
        self.worker.close()


@pytest.fixture
def rigs(nodes, monkeypatch):
    made = []

    def make(limits=None, **sizes):
        made.append(Rig(nodes(**sizes), monkeypatch, limits))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def running(rig: Rig, *sizes, custom=None, steps: int = 20):
    reqs = [rig.arrive(*size, custom) for size in sizes]
    rig.admit(*reqs)
    for _ in range(steps):
        rig.node.loop()
    return reqs


# -- a running request ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{}, {"keep": True}, {"critical": (1, 2)}], ids=str)
def test_a_running_request_goes_on_where_it_was(rigs, sizes):
    rig = rigs(**sizes)
    node = rig.node
    req, other = running(rig, (400, 60), (300, 40))
    answered, entry = list(req.output_ids), node.coordinator.entries[req.kv.req_pool_idx]
    assert entry.need.selecting and len(answered) == 21
    rig.lose(req)
    hold_back(node.scheduler, node.batch)
    assert node.batch.reqs == [other] and req.to_finish is None and entry.released and req.kv.req_pool_idx is None
    assert node.sets.size - node.sets.free == 1 and len(node.coordinator.entries) == 1 and not node.coordinator.parked
    assert list(req.output_ids) == answered, "SGLang looks at it once more in this turn"
    rig.until(req, KVPoll.WaitingForInput)
    assert list(req.output_ids) == answered[:-1] and req.pd_rebootstrap_forced_output_id == answered[-1]
    assert req.bootstrap_room == req.pull.room != entry.pull.room and rig.worker.bodies[0]["bootstrap_room"] == req.bootstrap_room
    node.step()
    rig.allocate(req)
    rig.until(req, KVPoll.Success)
    rig.commit(req)
    assert list(req.output_ids) == answered and node.coordinator.entries[req.kv.req_pool_idx].prompt == 420
    node.run(req, other)
    assert list(req.output_ids)[:21] == answered and len(req.output_ids) == 60 and len(other.output_ids) == 40
    assert len(rig.worker.bodies) == 1 and rig.recovery.totals == {"recomputes": 1, "recomputed": 1}
    assert (req.oasis.attempts, req.oasis.recomputed, req.oasis.error, req.oasis.deadline) == (1, 1, None, float("inf")) and other.oasis.attempts == 0
    node.at_baseline()


def test_one_that_has_stepped_aside_comes_back_to_be_computed_again(rigs):
    rig = rigs(wait=True, wait_seconds=60.0)
    [req] = running(rig, (400, 60), steps=0)
    rig.node.faults.hold = True
    while not rig.node.waiting_queue:
        rig.node.loop()
        rig.node.faults.finish()
    rig.lose(req)
    answered = list(req.output_ids)
    rig.node.land()
    rig.node.loop()
    assert not rig.node.waiting_queue and not rig.node.batch.reqs and req in rig.receivers
    rig.until(req, KVPoll.WaitingForInput)
    rig.allocate(req)
    rig.until(req, KVPoll.Success)
    rig.commit(req)
    rig.node.run(req)
    assert req.output_ids[: len(answered)] == answered and len(req.output_ids) == 60
    rig.node.at_baseline()


def test_those_who_hold_all_they_need_are_not_touched(rigs):
    rig = rigs()
    needs, fits = running(rig, (400, 60), (60, 60))
    for link in list(rig.node.puller.links.values()):
        rig.node.puller._post(link.fail, PeerLost("the tier is gone", peer=link.peer))
    until(lambda: needs.pull.state == "failed")
    hold_back(rig.node.scheduler, rig.node.batch)
    assert rig.node.batch.reqs == [fits] and fits.oasis.attempts == 0
    rig.until(needs, KVPoll.WaitingForInput)
    rig.allocate(needs)
    rig.until(needs, KVPoll.Success)
    rig.commit(needs)
    rig.node.run(needs, fits)
    assert isinstance(needs.oasis.pulls[0].error, PeerLost) and len(needs.output_ids) == len(fits.output_ids) == 60
    assert not any((held := rig.node.coordinator.held()).values()), held  # the tier's lease runs out by itself


def test_lost_twice_it_is_computed_twice_and_the_third_time_it_ends(rigs):
    rig = rigs()
    [req] = running(rig, (400, 200), steps=5)
    for attempt in (1, 2):
        rig.lose(req)
        hold_back(rig.node.scheduler, rig.node.batch)
        rig.until(req, KVPoll.WaitingForInput)
        rig.allocate(req)
        rig.until(req, KVPoll.Success)
        rig.commit(req)
        rig.node.prebuild()
        for _ in range(20):
            rig.node.step()
        assert (req.oasis.attempts, len(req.output_ids)) == (attempt, 6 + 20 * attempt)
    rig.lose(req)
    hold_back(rig.node.scheduler, rig.node.batch)
    assert req.to_finish.status_code == HTTPStatus.SERVICE_UNAVAILABLE and "not computed again: attempts" in req.to_finish.message
    hold_back(rig.node.scheduler, rig.node.batch)
    assert rig.recovery.totals == {"recomputes": 2, "recomputed": 2, "recompute_failed_attempts": 1}, "a failure is decided on once"
    rig.node._end_complete()
    assert req in rig.node.ended
    rig.node.at_baseline()


@pytest.mark.parametrize("custom, error, reason", [
    (FAIL, None, "policy"), (None, CapacityError("the host cache is full"), "error")])
def test_one_that_must_not_be_computed_again_ends_as_before(rigs, custom, error, reason):
    rig = rigs()
    [req] = running(rig, (400, 60), custom=custom, steps=3)
    rig.lose(req, error=error)
    hold_back(rig.node.scheduler, rig.node.batch)
    assert req.to_finish.message.endswith(f"(not computed again: {reason})") and req.oasis.refused == reason and req in rig.node.batch.reqs
    rig.node._end_complete()
    assert not rig.worker.bodies and rig.recovery.totals == {"recompute_failed_refused": 1}
    rig.node.at_baseline()


def test_the_server_may_fail_and_a_request_may_not(rigs):
    rig = rigs(RecoveryLimits("fail", 2, 20.0))
    stays, goes = running(rig, (400, 60), (400, 60), custom=None, steps=2)
    goes.oasis.on_failure = "recompute"
    rig.lose(stays, goes)
    hold_back(rig.node.scheduler, rig.node.batch)
    assert rig.node.batch.reqs == [stays] and stays.to_finish is not None and goes.to_finish is None
    rig.until(goes, KVPoll.WaitingForInput)
    rig.receivers[goes].abort()
    rig.node._end_complete()
    rig.node.at_baseline()


def test_a_worker_that_refuses_is_asked_again_and_then_the_request_ends_with_all_it_had_answered(rigs):
    rig = rigs()
    [req] = running(rig, (400, 60))
    answered = list(req.output_ids)
    rig.refusals = [500]
    rig.lose(req)
    hold_back(rig.node.scheduler, rig.node.batch)
    rig.until(req, KVPoll.WaitingForInput)
    assert req.oasis.attempts == 2 and len(rig.worker.bodies) == 2 and rig.worker.bodies[0]["bootstrap_room"] != rig.worker.bodies[1]["bootstrap_room"]
    assert rig.worker.bodies[0]["rid"] != rig.worker.bodies[1]["rid"] and rig.worker.bodies[1]["bootstrap_room"] == req.bootstrap_room
    rig.lose(req, error=PeerLost("gone again"))
    rig.until(req, KVPoll.Failed)
    with pytest.raises(KVTransferError, match="PeerLost: gone again.*not computed again: attempts"):
        rig.receivers[req].failure_exception()
    assert list(req.output_ids) == answered and rig.receivers[req].error.retryable
    rig.receivers[req].clear()
    rig.node.at_baseline()


def test_the_time_to_go_on_is_bounded_in_every_state(rigs):
    rig = rigs(RecoveryLimits(seconds=0.4))
    searching, ready, pulling = running(rig, (400, 60), (350, 60), (300, 60), steps=2)
    rig.workers.at[ADDRESS] = DEAD
    rig.lose(searching)
    hold_back(rig.node.scheduler, rig.node.batch)
    rig.until(searching, KVPoll.Failed)
    assert isinstance(searching.oasis.error, DeadlineExceeded) and searching.oasis.refused == "deadline"
    rig.workers.at[ADDRESS] = (rig.worker.url, SOURCE)
    for req in (ready, pulling):
        rig.lose(req)
        hold_back(rig.node.scheduler, rig.node.batch)
        rig.until(req, KVPoll.WaitingForInput)
        if req is pulling:
            rig.node.faults.hold = True
            rig.allocate(req)
            rig.until(req, KVPoll.Transferring)
        rig.until(req, KVPoll.Failed)
        assert "recompute_seconds=0.4" in str(req.oasis.error)
    assert rig.recovery.totals["recompute_failed_deadline"] == 3
    for req in (searching, ready, pulling):
        with pytest.raises(KVTransferError):
            rig.receivers[req].failure_exception()
        rig.receivers[req].clear()
    rig.node.end(pulling, "failed")
    rig.node.land()
    rig.node.at_baseline()


@pytest.mark.parametrize("state", ["searching", "ready", "pulling"])
def test_a_client_that_leaves_meanwhile(rigs, state):
    rig = rigs()
    req, other = running(rig, (400, 60), (300, 40), steps=4)
    if state == "searching":
        rig.workers.at[ADDRESS] = DEAD
    rig.lose(req)
    hold_back(rig.node.scheduler, rig.node.batch)
    if state == "searching":
        until(lambda: rig.poll(req) == KVPoll.Bootstrapping and rig.workers.looks)
        assert rig.poll(req) == KVPoll.Bootstrapping
    else:
        rig.until(req, KVPoll.WaitingForInput)
    if state == "pulling":
        rig.node.faults.hold = True
        rig.allocate(req)
        rig.until(req, KVPoll.Transferring)
    rig.receivers[req].abort()
    assert rig.poll(req) == KVPoll.Failed and req.oasis.attempts == 1
    with pytest.raises(KVTransferError, match="aborted on the decode node"):
        rig.receivers[req].failure_exception()
    rig.receivers[req].clear()
    if state == "pulling":
        rig.node.end(req, "aborted")
        rig.node.land()
    rig.workers.at[ADDRESS] = (rig.worker.url, SOURCE)
    looks = len(rig.workers.looks)
    rig.node.run(other)
    assert len(rig.workers.looks) == looks and len(rig.worker.bodies) == (state != "searching")
    rig.node.at_baseline()


def test_with_overlap_it_leaves_the_batch_at_once(rigs):
    """SGLang drops the result that is still to come, as that of any retracted request."""
    rig = rigs()
    [req] = running(rig, (400, 60), steps=2)
    rig.node.scheduler.enable_overlap = True
    rig.lose(req)
    hold_back(rig.node.scheduler, rig.node.batch)
    assert rig.node.batch.reqs == [] and not rig.node.coordinator.entries and rig.node.batch.batch_is_full is False
    assert len(req.output_ids) == 3 and not req.pd_rebootstrap_in_progress and req.oasis.attempts == 0
    rig.receivers[req].abort()
    assert rig.poll(req) == KVPoll.Failed and len(req.output_ids) == 3
    with pytest.raises(KVTransferError, match="aborted on the decode node"):
        rig.receivers[req].failure_exception()
    assert not rig.recovery.totals and not rig.worker.bodies
    rig.node.at_baseline()


def test_one_whose_token_sglang_has_put_aside_loses_no_other(rigs):
    """As after a weight update (``pause_generation``): then it is SGLang that makes the receiver."""
    rig = rigs()
    [req] = running(rig, (400, 60), steps=2)
    answered = list(req.output_ids)
    rig.node.batch.filter_batch(reqs_to_exclude=[req])
    rig.node.coordinator.request_finished(req)
    rig.release_req(req=req)
    req.pd_rebootstrap_forced_output_id, req.pd_rebootstrap_in_progress = req.output_ids.pop(), True
    rig._create_receiver_and_enqueue(req, is_rebootstrap=True)
    rig.until(req, KVPoll.WaitingForInput)
    assert list(req.output_ids) == answered[:-1] and req.pd_rebootstrap_forced_output_id == answered[-1]
    rig.allocate(req)
    rig.until(req, KVPoll.Success)
    rig.commit(req)
    assert list(req.output_ids) == answered and len(rig.worker.bodies) == 1
    rig.node.run(req)
    rig.node.at_baseline()


def test_one_that_is_aborted_after_it_failed_ends_with_why_it_failed(rigs):
    rig = rigs()
    [req] = running(rig, (400, 60), custom=None, steps=2)
    rig.recovery.limits = RecoveryLimits(attempts=1)
    rig.lose(req)
    hold_back(rig.node.scheduler, rig.node.batch)
    rig.until(req, KVPoll.WaitingForInput)
    answered = [*req.output_ids, req.pd_rebootstrap_forced_output_id]
    rig.lose(req, error=PeerLost("gone again"))
    rig.until(req, KVPoll.Failed)
    rig.receivers[req].abort()
    with pytest.raises(KVTransferError, match="PeerLost: gone again"):
        rig.receivers[req].failure_exception()
    assert list(req.output_ids) == answered and req.oasis.refused == "attempts"
    rig.receivers[req].clear()
    rig.node.at_baseline()


def test_one_that_has_just_ended_is_not_computed_again(rigs):
    rig = rigs()
    [req] = running(rig, (400, 60), steps=2)
    rig.lose(req)
    req.finished_reason = "length"
    hold_back(rig.node.scheduler, rig.node.batch)
    assert req.to_finish is None and not rig.recovery.totals and req in rig.node.batch.reqs
    req.finished_reason, req.to_finish = None, "length"
    hold_back(rig.node.scheduler, rig.node.batch)
    assert not rig.recovery.totals
    rig.node._end_complete()
    rig.node.at_baseline()


# -- before it runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["ready", "waiting for pages", "pulling"])
@pytest.mark.parametrize("tokens", [400, 60], ids=["selecting", "within its budget"])
def test_one_that_was_not_admitted_gets_another_room(rigs, state, tokens):
    rig = rigs(**({"pages": 8} if state == "waiting for pages" else {}))
    node = rig.node
    others = running(rig, (400, 30), steps=1) if state == "waiting for pages" else []
    req = rig.arrive(tokens, 50)
    rig.until(req, KVPoll.WaitingForInput)
    node.prealloc.remove(req)
    first = req.pull
    if state != "ready":
        node.faults.hold = True
        rig.allocate(req)
    if state == "pulling":
        until(lambda: first.state == "pulling")
    rig.lose(req)
    assert rig.poll(req) == KVPoll.Bootstrapping and req.bootstrap_room != first.room
    row = req.kv.req_pool_idx
    assert (row is None) == (state == "ready") and len(node.coordinator.entries) == node.sets.size - node.sets.free == len(others)
    assert not node.coordinator.waiting
    node.land()
    node.run(*others)
    if state == "ready":
        rig.until(req, KVPoll.WaitingForInput)
        rig.allocate(req)
    rig.until(req, KVPoll.Success)
    assert req.kv.req_pool_idx == (row or req.kv.req_pool_idx)
    rig.commit(req)
    node.run(req)
    assert len(req.output_ids) == 50 and rig.worker.bodies[0]["input_ids"] == req.origin_input_ids
    assert rig.recovery.totals == {"recomputes": 1, "recomputed": 1} and req.oasis.attempts == 1 and len(req.oasis.entries) == (1 if state == "ready" else 2)
    node.at_baseline()


def test_pages_that_sglang_gives_before_the_second_room_is_committed(rigs):
    """It has seen WaitingForInput of the first one, and allocates at its next turn."""
    rig = rigs()
    req = rig.arrive(400, 40)
    rig.until(req, KVPoll.WaitingForInput)
    rig.node.prealloc.remove(req)
    rig.lose(req)
    rig.workers.at[ADDRESS] = DEAD
    assert rig.poll(req) == KVPoll.Bootstrapping
    rig.allocate(req)
    assert rig.poll(req) == KVPoll.Bootstrapping and not rig.node.coordinator.entries
    rig.workers.at[ADDRESS] = (rig.worker.url, SOURCE)
    rig.until(req, KVPoll.Success)
    rig.commit(req)
    rig.node.run(req)
    rig.node.at_baseline()


def test_one_that_has_waited_for_its_commit_as_long_as_it_may_has_had_its_time(rigs):
    rig = rigs()
    req = rig.arrive(400, 40)
    rig.node.prealloc.remove(req)
    rig.receivers[req].began -= rig.node.puller.limits.await_seconds
    rig.lose(req, error=DeadlineExceeded("request stayed in state 'awaiting'"))
    assert rig.poll(req) == KVPoll.Failed and req.oasis.refused == "deadline" and rig.recovery.totals == {"recompute_failed_deadline": 1}
    rig.receivers[req].clear()
    rig.node.at_baseline()


def test_options_that_are_none_refuse_the_request(rigs):
    rig = rigs()
    req = rig.arrive(60, 5, {"oasis": {"on_failure": "hope"}})
    rig.node.prealloc.remove(req)
    assert rig.poll(req) == KVPoll.Failed
    with pytest.raises(KVTransferError, match="ConfigError.*on_failure"):
        rig.receivers[req].failure_exception()
    rig.node.puller.cancel(req.pull, "refused")
    rig.receivers[req].clear()
    rig.node.at_baseline()


def test_ranks_that_compute_together_do_not_go_their_own_ways(rigs):
    rig = rigs()
    rig.recovery.ranks = 2
    [req] = running(rig, (400, 60), steps=2)
    rig.lose(req)
    hold_back(rig.node.scheduler, rig.node.batch)
    assert "not computed again: obstacle" in req.to_finish.message
    rig.node._end_complete()
    rig.node.at_baseline()


# -- a node that holds whole prompts (mode=exact) ---------------------------------------------------------------------


def test_a_record_that_stays_damaged_is_computed_again_and_its_bytes_are_right(worlds, monkeypatch):
    world = worlds(decode=dict(limits=PullLimits(await_seconds=20, read_seconds=5, silence_seconds=5)))
    tokens, source = world.prompt(40)
    target = np.arange(10)[::-1].copy()

    def answer(body):
        world.tier.faults.corrupt = 0
        assert body["input_ids"] == tokens.tolist()
        return 200 if world.prefill.publish(body["bootstrap_room"], tokens, source, seed=None).state == COMMITTED else 500

    worker, workers = PrefillWorker(answer), Workers(lambda: world.tier.control)
    try:
        workers.at[ADDRESS] = (worker.url, SOURCE)
        rows = []
        recovery = make_recovery(world.decode.puller, workers)
        manager = make_manager(world.decode.puller, recovery, row_writer=lambda index, room: rows.append, fetch=lambda req, pull, pages, write_row: world.decode.give(
            pull, WholePages(world.decode.sink, world.decode.layout, pages), write_row))
        manager.kv_args.page_size = world.decode.layout.block_tokens
        req = complete(SimpleNamespace(rid="r", origin_input_ids=tokens.tolist(), output_ids=[], sampling_params=SimpleNamespace(custom_params=None), pull=None))
        world.prefill.publish(1, tokens, source)
        receiver = make_receiver(manager, req)
        until(lambda: receiver.poll() == KVPoll.WaitingForInput)
        world.tier.faults.corrupt = 10_000
        receiver.send_metadata(target.astype(np.int32), 0, decode_prefix_len=0)
        until(lambda: receiver.poll() == KVPoll.Success)
        assert world.arrived(source, target, 40) and rows == [row_of(req.bootstrap_room)]
        assert isinstance(req.oasis.pulls[0].error, IntegrityError) and len(req.oasis.pulls) == 2 and recovery.totals["recomputed"] == 1
        receiver.clear()
        recovery.recomputer.close()
        world.settle()
    finally:
        worker.close()


def test_nothing_is_recovered_where_it_is_not_set_up(worlds):
    world = worlds()
    manager = make_manager(world.decode.puller, None)
    req = complete(SimpleNamespace(rid="r", origin_input_ids=[1], output_ids=[], sampling_params=SimpleNamespace(custom_params=None), pull=None))
    receiver = make_receiver(manager, req)
    world.decode.puller.cancel(receiver.pull, "x")
    until(lambda: receiver.poll() == KVPoll.Failed)
    receiver.clear()
    start = time.monotonic()
    world.settle()
    assert time.monotonic() - start < 30 and receiver.order is None


# -- SGLang's own request ---------------------------------------------------------------------------------------------


class Tree:
    """As far as ``release_kv_cache`` needs a tree: one that keeps nothing."""

    def __init__(self, node):
        self.req_to_token_pool, self.token_to_kv_pool_allocator = node.rows, node.allocator

    def free_kv_row(self, kv, spans):
        for start, stop in spans:
            self.token_to_kv_pool_allocator.free(self.req_to_token_pool.req_to_token[kv.req_pool_idx, start:stop].long())

    def supports_mamba(self):
        return False

    supports_prefix_sharing = supports_mamba

    def claim_kv_row(self, req):
        return False

    def unlock(self, lock):
        pass

    def on_release(self, req, checkpointed):
        assert not checkpointed


def test_sglangs_request_gives_all_back_and_starts_over(nodes, monkeypatch):
    from array import array

    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache import common
    from sglang.srt.sampling.sampling_params import SamplingParams

    published = SimpleNamespace(disaggregation_mode="decode", strip_thinking_cache=False, speculative_algorithm=None, memory_saver=False)
    for module in (schedule_batch, common):
        for name in ("get_disagg", "get_serving", "get_spec"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda: published)
    node = nodes()
    ours = complete(node.arrive(400, 60))
    node.prealloc.remove(ours)
    req = schedule_batch.Req("r1", "", array("q", ours.origin_input_ids), SamplingParams(max_new_tokens=60), bootstrap_host="127.0.0.1", bootstrap_port=9,
                             bootstrap_room=1, vocab_size=1 << 40)
    workers, queued = Workers(lambda: node.world.tier.control), []
    workers.at[ADDRESS] = DEAD
    recovery = node.coordinator.recovery = make_recovery(node.puller, workers)
    manager = make_manager(node.puller, recovery)
    req.oasis = None
    receiver = make_receiver(SimpleNamespace(**{**vars(manager), "puller": SimpleNamespace(pull=lambda *a, **k: ours.pull)}), req)
    node.rows.alloc([req])
    one = torch.tensor([400])
    ids = node.allocator.alloc_logical_only(torch.tensor([0]), torch.tensor([0]), one, one, torch.tensor([-1]), 400)
    node.rows.write((req.kv.req_pool_idx, slice(0, 400)), ids)
    req.kv.kv_allocated_len = req.kv.kv_committed_len = 400
    node._fetch(req, ours.pull, None, lambda row: None)
    until(lambda: receiver.poll() == KVPoll.Success)
    req.output_ids = array("q", [11])
    node.coordinator.map_last_loc_to_buffer(one, ids[-1:], torch.tensor([req.kv.req_pool_idx]), one, torch.tensor([req.kv.req_pool_idx]))
    assert node.coordinator.held()["mapped"] == 1
    batch = SimpleNamespace(reqs=[req], batch_is_full=True)
    batch.filter_batch = lambda reqs_to_exclude: batch.reqs.remove(*reqs_to_exclude)
    queue = SimpleNamespace(_create_receiver_and_enqueue=lambda req, is_rebootstrap: queued.append(make_receiver(manager, req, again=is_rebootstrap)))
    scheduler = SimpleNamespace(hisparse_coordinator=node.coordinator, running_batch=batch, disagg_decode_prealloc_queue=queue, waiting_queue=[],
                                enable_overlap=True, req_to_token_pool=node.rows, token_to_kv_pool_allocator=node.allocator, tree_cache=Tree(node))
    node.puller._post(node.puller._give_up, ours.pull, PeerLost("gone"))
    until(lambda: ours.pull.state == "failed")
    hold_back(scheduler, batch)
    assert batch.reqs == [] and len(queued) == 1 and not req.kv.holds_kv and req.is_retracted and list(req.output_ids) == [11]
    assert queued[0].poll() == KVPoll.Bootstrapping and req.pd_rebootstrap_in_progress
    assert req.pd_rebootstrap_forced_output_id == 11 and len(req.output_ids) == 0 and req.bootstrap_room == queued[0].order.room != 1
    assert queued[0].order.payload["input_ids"] == ours.origin_input_ids
    queued[0].abort()
    with pytest.raises(KVTransferError):
        queued[0].failure_exception()
    assert list(req.output_ids) == [11]
    recovery.recomputer.close()
    node.at_baseline()
