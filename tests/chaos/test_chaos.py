"""Real servers, and what befalls them: who is hurt is told why, nobody else is, and everything comes back.

Each test is a row of the table of failures in docs/architecture.md. "Told or answered": a request that needs what was lost ends with the
reason, or is computed anew, as its failure policy says; it is never answered with something else.
"""

from __future__ import annotations

import signal
import struct
import time

import pytest
from chaos_rig import (
    BUDGET,
    GRACE,
    LEASE,
    RESERVE,
    SILENCE,
    Blow,
    answered,
    at_rest,
    ended,
    flip_bits,
    flush,
    inventory,
    next_room,
    pair,
    request,
    running,
    sets,
    started,
    status_of,
    totals,
    unseen,
    wait_for,
    wall_time,
)

from oasis_sglang.prompts import library_text
from oasis_sglang.soak import baseline, run, schedule
from oasis_sglang.soak.asking import ANSWERED, FAILED, REFUSED

LOST = ("PeerLost", "DeadlineExceeded", "StaleEpoch", "LeaseExpired", "RoomFailed")
LONG = 600
"""Tokens of an answer that is still being given when something happens."""
STEADY = 150
"""As many as a request that holds all its blocks may have."""


def kill(stack, name: str) -> None:
    stack.servers[name].signal(signal.SIGKILL, group=True)
    stack.servers[name].wait(30)


def told_or_answered(asking) -> None:
    outcome = ended(asking)
    assert outcome.status == ANSWERED or (outcome.status in (REFUSED, FAILED) and outcome.error in LOST), outcome


def serves(stack, prompts, expected) -> None:
    """New requests are as before."""
    answered(pair(stack, prompts.fits, 16)[1], expected["fits"])
    answered(pair(stack, prompts.selects, 4)[1])


def test_the_tier_is_killed_and_comes_back_on_the_same_ports(stack, prompts, expected):
    needs, fits = pair(stack, prompts.selects, LONG)[1], pair(stack, prompts.fits, STEADY)[1]
    running(stack, 2)
    uncommitted = pair(stack, unseen(prompts.slow), 4)
    wait_for(lambda: inventory(stack)["rooms"] > 0, "a prompt is being computed")
    pids = {name: stack.servers[name].pid for name in ("prefill", "decode")}
    lost, epoch = totals(stack, "decode").get("links_lost", 0), baseline.tier(stack)["epoch"]
    blow = Blow("tier killed", "SIGKILL to the tier and restart on the same ports")
    kill(stack, "tier")
    stack.restart("tier")
    wait_for(lambda: totals(stack, "decode").get("links_lost", 0) > lost, "decode noticed", SILENCE + 30)
    blow.noticed()
    told_or_answered(needs)
    told_or_answered(uncommitted[1])
    answered(fits)
    assert fits.ids[:64] == expected["fits"][:64], "it had all its blocks"
    wait_for(lambda: inventory(stack)["workers"] > 0, "prefill is attached to the new one")
    at_rest(stack)
    blow.restored(needs, fits, uncommitted[1])
    assert baseline.tier(stack)["epoch"] != epoch
    assert {name: stack.servers[name].pid for name in pids} == pids, "nobody else was restarted"
    serves(stack, prompts, expected)


def test_the_tier_stops_for_less_than_it_may_be_silent(stack, prompts, expected):
    needs, fits = pair(stack, prompts.selects, 100)[1], pair(stack, prompts.fits, 64)[1]
    running(stack)
    lost = totals(stack, "decode").get("links_lost", 0)
    blow = Blow("tier paused", f"SIGSTOP to the tier for {SILENCE / 3:g} s, SIGCONT")
    blow.row.must_notice = False
    stack.servers["tier"].signal(signal.SIGSTOP, group=True)
    time.sleep(SILENCE / 3)
    stack.servers["tier"].signal(signal.SIGCONT, group=True)
    answered(needs)
    answered(fits, expected["fits"])
    assert totals(stack, "decode").get("links_lost", 0) == lost
    at_rest(stack)
    assert blow.restored(needs, fits).told == 0


def test_the_tier_stops_for_longer(stack, prompts, expected):
    needs, fits = pair(stack, prompts.selects, LONG)[1], pair(stack, prompts.fits, STEADY)[1]
    running(stack, 2)
    lost = totals(stack, "decode").get("links_lost", 0)
    blow = Blow("tier stopped", "SIGSTOP to the tier for longer than silence_seconds, SIGCONT")
    stack.servers["tier"].signal(signal.SIGSTOP, group=True)
    wait_for(lambda: totals(stack, "decode").get("links_lost", 0) > lost, "decode noticed", LEASE + SILENCE + 30)
    blow.noticed()
    answered(fits)
    assert fits.ids[:64] == expected["fits"][:64], "it had all its blocks"
    stack.servers["tier"].signal(signal.SIGCONT, group=True)
    told_or_answered(needs)
    at_rest(stack)
    blow.restored(needs, fits)
    serves(stack, prompts, expected)


def test_prefill_is_killed_before_the_commit(stack, prompts, expected):
    fits = pair(stack, prompts.fits, STEADY)[1]
    running(stack)
    _, waits = pair(stack, unseen(prompts.slow), 4, oasis={"on_failure": "fail"})
    wait_for(lambda: inventory(stack)["rooms"] == 1 and inventory(stack)["waiters"] == 1, "the room is open and awaited")
    assert inventory(stack)["writing"] > 0
    blow = Blow("prefill killed before the commit", "SIGKILL to prefill while it computes, restart on the same ports")
    kill(stack, "prefill")
    wait_for(lambda: inventory(stack)["workers"] == 0, "the tier noticed")
    blow.noticed()
    assert inventory(stack)["writing"] == 0, "what was half written is reclaimed"
    outcome = ended(waits)
    assert (outcome.status, outcome.code, outcome.error, outcome.tokens) == (REFUSED, 503, "PeerLost", 0), outcome
    assert "died before the commit" in outcome.told
    answered(fits)
    assert fits.ids[:64] == expected["fits"][:64]
    stack.restart("prefill")
    wait_for(lambda: inventory(stack)["workers"] > 0, "prefill is attached")
    at_rest(stack)
    blow.restored(waits, fits)
    serves(stack, prompts, expected)


def test_prefill_is_killed_after_the_commit(stack, prompts, expected, hold):
    flush(stack)
    hold.touch()
    _, decode = pair(stack, prompts.fits, 64)
    wait_for(lambda: inventory(stack)["leases"] == 1, "the commit is claimed")
    blow = Blow("prefill killed after the commit", "SIGKILL to prefill before decode's first read, restart on the same ports")
    kill(stack, "prefill")
    wait_for(lambda: inventory(stack)["workers"] == 0, "the tier noticed")
    blow.noticed()
    time.sleep(12)  # longer than decode's heartbeats need to declare the prefill node dead
    hold.unlink()
    answered(decode, expected["fits"])
    stack.restart("prefill")
    wait_for(lambda: inventory(stack)["workers"] > 0, "prefill is attached")
    at_rest(stack)
    assert blow.restored(decode).recovered == 1
    serves(stack, prompts, expected)


def test_decode_is_killed_and_its_leases_expire(stack, prompts, expected):
    needs = pair(stack, prompts.selects, LONG)[1]
    running(stack)
    expired, leased = totals(stack, "tier").get("leases_expired", 0), inventory(stack)["leased"]
    assert inventory(stack)["leases"] == 1 and leased > 0
    blow = Blow("decode killed", "SIGKILL to decode, restart on the same port")
    kill(stack, "decode")
    assert inventory(stack)["leased"] == leased, "the tier cannot know yet"
    wait_for(lambda: inventory(stack)["leases"] == 0, "its lease ran out", LEASE + GRACE + 10)
    blow.noticed()
    assert totals(stack, "tier")["leases_expired"] == expired + 1 and inventory(stack)["leased"] == 0
    assert ended(needs).status in (REFUSED, FAILED)
    stack.restart("decode")
    at_rest(stack)
    blow.restored(needs)
    serves(stack, prompts, expected)


def test_a_full_arena_holds_back_and_then_refuses(stack, prompts, expected, hold):
    """Two requests lease four fifths of it; a third waits, is told 503 on both nodes and when to come again, and touches nothing of theirs."""
    flush(stack)
    hold.touch()
    fillers = [pair(stack, prompt, 8, exact=True)[1] for prompt in (prompts.half, prompts.third)]
    wait_for(lambda: inventory(stack)["leases"] == 2, "both are claimed")
    held, retries = inventory(stack)["leased"], totals(stack, "prefill").get("reserve_retries", 0)
    blow, start = Blow("arena full", "a prompt comes that leased records leave no room for"), time.monotonic()
    refused = pair(stack, prompts.more, 4)
    wait_for(lambda: totals(stack, "prefill").get("reserve_retries", 0) > retries, "it waits for room")
    blow.noticed()
    outcomes = [ended(asking) for asking in refused]
    assert [(o.status, o.code) for o in outcomes] == [(REFUSED, 503)] * 2, outcomes
    assert [o.retry_after for o in outcomes] == ["5"] * 2 and "the arena is full" in outcomes[0].told and "the arena is full" in outcomes[1].told
    assert time.monotonic() - start >= RESERVE, "not before it had waited"
    routed = ended(started(stack.url, request(prompts.more, 4), wanted=4))
    assert (routed.status, routed.code) == (REFUSED, 503) and "the arena is full" in routed.told, routed
    assert inventory(stack)["leased"] == held and inventory(stack)["writing"] == 0
    hold.unlink()
    for filler, name in zip(fillers, ("half", "third")):
        answered(filler, expected[name])
    at_rest(stack)
    assert blow.restored(*fillers, refused[1]).recovered == 2
    answered(pair(stack, prompts.more, 4)[1])


def test_records_that_are_damaged_in_the_arena(stack, prompts, expected, hold):
    """Whoever reads them notices, and has their prompt computed again: not from these records, or each prompt that begins so would fail."""
    flush(stack)
    hold.touch()
    fits, needs = pair(stack, prompts.fits, 64)[1], pair(stack, prompts.selects, 100)[1]
    wait_for(lambda: inventory(stack)["leases"] == 2, "both are claimed")
    before, doubted = totals(stack, "decode"), totals(stack, "tier").get("records_doubted", 0)
    blow = Blow("arena damaged", "a bit of every kilobyte of the tier's arena is flipped")
    flip_bits(stack)
    hold.unlink()
    wait_for(lambda: totals(stack, "decode").get("reads_damaged", 0) > before.get("reads_damaged", 0), "decode noticed")
    blow.noticed()
    answered(fits, expected["fits"])
    answered(needs)
    at_rest(stack)
    assert blow.restored(fits, needs).recovered == 2
    assert totals(stack, "decode")["recomputed"] >= before.get("recomputed", 0) + 2 and totals(stack, "tier")["records_doubted"] > doubted
    serves(stack, prompts, expected)


@pytest.mark.parametrize("seconds", [3 * 86400.0, -3 * 86400.0])
def test_the_wall_clock_jumps(stack, prompts, expected, wall_clock, seconds):
    """Deadlines, leases and heartbeats are of the monotonic clock."""
    needs, fits, begun = pair(stack, prompts.selects, 200)[1], pair(stack, prompts.fits, STEADY)[1], pair(stack, unseen(prompts.slow), 4)[1]
    running(stack)
    before = {name: totals(stack, name) for name in ("tier", "decode")}
    blow = Blow("clock jump", f"the wall clock of all servers jumps by {seconds / 86400:+g} days")
    blow.row.must_notice = False
    wall_clock.write_bytes(struct.pack("d", seconds))
    try:
        for name in ("tier", "prefill", "decode"):
            wait_for(lambda name=name: abs(wall_time(stack, name) - time.time() - seconds) < 3600, f"{name} shows another time")
        answered(fits)
        assert fits.ids[:64] == expected["fits"][:64]
        answered(needs)
        answered(begun)
        serves(stack, prompts, expected)
        time.sleep(LEASE)
        for name, of in (("tier", "leases_expired"), ("tier", "rooms_expired"), ("decode", "links_lost"), ("decode", "recomputes"), ("decode", "failed")):
            assert totals(stack, name).get(of, 0) == before[name].get(of, 0), of
        at_rest(stack)
        assert blow.restored(needs, fits, begun).recovered == 3
    finally:
        wall_clock.write_bytes(struct.pack("d", 0.0))
    serves(stack, prompts, expected)


def test_the_same_room_twice(stack, prompts, expected, hold):
    flush(stack)
    room = next_room()
    hold.touch()
    first = pair(stack, prompts.fits, 32, room=room)
    wait_for(lambda: inventory(stack)["leases"] == 1, "the first is claimed")
    blow = Blow("duplicate room", "a second request with the room of a running one")
    second = pair(stack, prompts.selects, 4, room=room)
    for asking in second:
        outcome = ended(asking)
        assert outcome.status == REFUSED and str(room) in outcome.told, outcome
    blow.noticed()
    hold.unlink()
    answered(first[1], expected["fits"])
    at_rest(stack)
    blow.restored(first[1], second[1])
    answered(pair(stack, prompts.fits, 8, room=room)[1], expected["fits"])


def test_four_times_more_than_there_is_room_for(stack, prompts, expected):
    """16 clients at once, 48 requests, through the router: each is answered or refused."""
    kinds = {"fits": (prompts.fits, 24), "selects": (prompts.selects, 8), "more": (prompts.more, 4)}
    left, under_way, done = [name for _ in range(16) for name in kinds], [], []
    blow = Blow("overload", "16 clients for 4 places, 48 requests")
    while left or under_way:
        for one in [one for one in under_way if one[1].done.is_set()]:
            under_way.remove(one)
            done.append(one)
        while left and len(under_way) < 4 * stack.spec.max_running_requests:
            prompt, output = kinds[name := left.pop()]
            under_way.append((name, started(stack.url, request(prompt, output, stream=len(left) % 2 == 0), wanted=output, name=name)))
        time.sleep(0.05)
    outcomes = [asking.outcome for _, asking in done]
    assert len(outcomes) == 48 and all(o.status == ANSWERED or (o.status == REFUSED and o.code == 503) for o in outcomes), [
        o for o in outcomes if o.status != ANSWERED]
    for name, asking in done:
        if name == "fits" and asking.outcome.status == ANSWERED:
            answered(asking, expected["fits"])
    assert sum(o.status == ANSWERED for o in outcomes) >= 24, "being full is not being down"
    blow.row.must_notice = False
    at_rest(stack)
    blow.restored(*[asking for _, asking in done])


# -- going down on purpose ----------------------------------------------------------------------------------------


def test_a_tier_that_is_told_to_go_lets_its_leases_end(stack, prompts, expected):
    needs = pair(stack, prompts.selects, 200)[1]
    running(stack)
    server = stack.servers["tier"]
    blow = Blow("tier drained", "SIGTERM to the tier, restart on the same ports")
    server.signal(signal.SIGTERM)
    wait_for(lambda: status_of(stack.urls["tier"] + "/readyz") == (503, "draining"), "it says so", 5)
    blow.noticed()
    assert status_of(stack.urls["tier"] + "/healthz") == (200, "ok")
    refused = pair(stack, prompts.half, 4)
    for outcome in [ended(asking) for asking in refused]:
        assert (outcome.status, outcome.code, outcome.retry_after) == (REFUSED, 503, "5") and "going down" in outcome.told, outcome
    answered(needs)
    assert server.wait(25) == 0 and "with 0 leases, 0 rooms, 0 moves left" in server.tail(5)
    stack.restart("tier")
    wait_for(lambda: inventory(stack)["workers"] > 0, "prefill is attached to the new one")
    at_rest(stack)
    blow.restored(needs, refused[1])
    serves(stack, prompts, expected)


def test_a_decode_node_that_is_told_to_go_hands_its_leases_back(stack, prompts, expected):
    """What still runs after drain_seconds is told so; its lease is released, not left to run out."""
    needs = pair(stack, prompts.selects, 6000)[1]
    running(stack)
    before = totals(stack, "tier")
    blow = Blow("decode drained", "SIGTERM to decode, restart on the same port")
    stack.servers["decode"].signal(signal.SIGTERM)
    outcome = ended(needs, 60)
    blow.noticed()
    assert outcome.status in (REFUSED, FAILED) and "going down" in outcome.told, outcome
    assert stack.servers["decode"].wait(40) == 0
    wait_for(lambda: inventory(stack)["leases"] == 0, "it is handed back", GRACE)
    after = totals(stack, "tier")
    assert after.get("leases_expired", 0) == before.get("leases_expired", 0) and after["leases_released"] > before.get("leases_released", 0)
    stack.restart("decode")
    at_rest(stack)
    blow.restored(needs)
    serves(stack, prompts, expected)


def test_a_prefill_node_that_is_told_to_go_finishes_what_it_began(stack, prompts, expected):
    _, begun = pair(stack, unseen(prompts.slow), 8)
    wait_for(lambda: inventory(stack)["rooms"] + inventory(stack)["leases"] > 0, "it is being computed")
    blow = Blow("prefill drained", "SIGTERM to prefill, restart on the same ports")
    stack.servers["prefill"].signal(signal.SIGTERM)
    time.sleep(0.5)
    late = pair(stack, prompts.half, 4)
    for outcome in [ended(asking) for asking in late]:
        assert (outcome.status, outcome.code) == (REFUSED, 503) and "going down" in outcome.told, outcome
    blow.noticed()
    answered(begun)
    assert stack.servers["prefill"].wait(40) == 0
    stack.restart("prefill")
    wait_for(lambda: inventory(stack)["workers"] > 0, "prefill is attached")
    at_rest(stack)
    blow.restored(begun, late[1])
    serves(stack, prompts, expected)


# -- all at once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [60.0])
def test_a_short_soak(stack, maker, seconds):
    prompts = schedule.menu(maker, library_text(), seed=1, budget=BUDGET, context=4096)
    soak = run.Soak(stack, prompts=prompts, asks=schedule.asks(1, len(prompts)), phases=schedule.phases(seconds, stack.spec.max_running_requests),
                    strikes=schedule.strikes(("tier-restart",), seconds), seconds=seconds, progress=print)
    report = soak.run(model="chaos", seed=1)
    assert report.problems == [], report.problems
    assert sum(o.status == ANSWERED for o in report.outcomes) > 20 and report.most_at_once > run.CAPACITY
    assert sets(stack)["leaks"] == 0
