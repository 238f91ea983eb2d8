"""Pulling from a real tier over the loopback plane: right bytes or a typed error, and nothing left behind."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from node_rig import SOURCE, WAIT, Decode, LocalTier, Pool, Prefill, World, descriptors, row_of, small_layout, until

from decode_node.pull import PHASES, PullLimits
from prefill_node.publisher import COMMITTED, OPEN
from transport.errors import (
    CapacityError,
    DeadlineExceeded,
    IntegrityError,
    LayoutMismatch,
    LeaseExpired,
    OasisError,
    PeerLost,
    ProtocolError,
    RoomFailed,
    StaleEpoch,
    TransportError,
)
from transport.hashing import page_hashes
from transport.tier import TierLimits

QUICK = PullLimits(await_seconds=0.4, read_seconds=0.3, silence_seconds=0.3)


def committed(world: World, room: int, tokens: int, at: int = 0, **more) -> np.ndarray:
    ids, pages = world.prompt(tokens, at=at, salt=room)
    pub = world.prefill.publish(room, ids, pages, **more)
    assert pub.state == COMMITTED, pub.error
    return pages


def ready(world: World, room: int, source: str = SOURCE):
    pull = world.decode.pull(room, source)
    until(lambda: pull.state in ("ready", "failed"), "manifest")
    assert pull.state == "ready", pull.error
    return pull


def still_serves(world: World) -> None:
    """A further request goes through, byte for byte."""
    pages = committed(world, 999_983, 9, at=50)
    target = np.array([60, 61, 62])
    pull = world.pull_into(999_983, target)
    assert pull.state == "done", pull.error
    assert world.arrived(pages, target, 9)
    world.decode.wipe(target)


# -- what arrives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 4, 23, 61])
@pytest.mark.parametrize("window_records", [1, 2, 100])
def test_what_was_published_arrives_in_shuffled_pages(worlds, tokens, window_records):
    world = worlds(decode=dict(window_records=window_records))
    pages = committed(world, 7, tokens, chunk_pages=3)
    target = np.random.default_rng(tokens).permutation(64)[: len(pages)]
    others = np.setdiff1d(np.arange(64), target)
    pull = world.pull_into(7, target)
    assert pull.state == "done" and world.arrived(pages, target, tokens)
    assert world.decode.untouched(others)
    rest = len(pages) * 4 - tokens
    assert not rest or not world.decode.pool.page(target[-1])[:, :, 4 - rest :].any(), "zeroed past the prompt"
    assert world.decode.rows == {7: row_of(7)}
    world.settle()


def test_bytes_are_counted_exactly_by_phase(worlds):
    """Three requests; what the plane read is what the reports say, and both are what the sizes say."""
    world = worlds()
    sizes = {1: 9, 2: 24, 3: 31}
    manifests = {}
    for room, tokens in sizes.items():
        pages = committed(world, room, tokens)
        pull = world.pull_into(room, pages)
        until(lambda: str(room) in world.decode.puller.reports)
        manifests[room] = len(msgspec.msgpack.encode(pull.manifest))
    record = 2 * 3 * 2 * 4 * 4 * 4
    for room, tokens in sizes.items():
        report = world.decode.puller.reports[str(room)]
        assert report["admitted_bytes_by_phase"] == report["lifetime_bytes_by_phase"] == dict.fromkeys(PHASES, 0) | {
            "records": tokens // 4 * record, "partial_page": (tokens % 4 > 0) * record, "manifest": manifests[room]}
        assert report["full_transfer_bytes"] == 2 * 2 * 3 * 4 * 4 * tokens and report["prompt_tokens"] == tokens
        assert report["admitted_bytes"] == report["lifetime_bytes"] == sum(report["admitted_bytes_by_phase"].values())
    payload = sum(-(-t // 4) * record for t in sizes.values())
    assert sum(world.decode.plane.landed.values()) == sum(world.decode.plane.requested.values()) == payload
    totals = world.decode.puller.totals
    assert totals["bytes_records"] + totals["bytes_partial_page"] == payload and totals["bytes_manifest"] == sum(manifests.values())
    assert totals["admitted"] == totals["requests"] == 3


def test_many_at_once(worlds):
    world = worlds()
    prompts = {room: committed(world, room, 5 + room % 7, at=room * 3) for room in range(1, 20)}
    pulls = {room: world.decode.pull(room) for room in prompts}
    for room, pull in pulls.items():
        until(lambda: pull.state == "ready")
        world.decode.fetch(pull, np.arange(room * 3, room * 3 + len(prompts[room])))
    for room, pull in pulls.items():
        until(lambda: pull.state == "done", pull.error)
        assert world.arrived(prompts[room], np.arange(room * 3, room * 3 + len(prompts[room])), 5 + room % 7)
    world.settle()


def test_a_pull_waits_for_its_commit_and_holds_nothing_before(worlds):
    world = worlds()
    ids, pages = world.prompt(24)
    pull = world.decode.pull(1)
    pub = world.prefill.open(1, ids)
    until(lambda: pub.state == OPEN and pull.state == "awaiting")
    world.prefill.send(pub, pages[:3])  # 60 % published, then given up
    world.prefill.publisher.cancel(pub, "the client left")
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, RoomFailed) and not world.decode.plane.reads
    world.settle()


def test_another_number_of_pages_than_was_committed(worlds):
    world = worlds()
    committed(world, 1, 24)
    pull = ready(world, 1)
    world.decode.fetch(pull, np.arange(5))
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, RoomFailed) and pull.error.limit == "5 pages here, 6 committed"
    assert world.decode.untouched(np.arange(64)) and not world.decode.rows
    world.settle()


# -- the chain of hashes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [3, 23, 24])
@pytest.mark.parametrize("seed", [b"s" * 32, None])
def test_a_pull_knows_the_hashes_of_its_whole_pages(worlds, tokens, seed):
    world = worlds()
    ids, pages = world.prompt(tokens)
    world.prefill.publish(1, ids, pages, seed=seed)
    pull = ready(world, 1)
    whole = page_hashes(seed, ids, 4) if seed else b""
    assert pull.hashes == [whole[n : n + 32] for n in range(0, len(whole), 32)] and pull.manifest.seed == (seed or b"")
    assert len(pull.hashes) == (tokens // 4 if seed else 0) and len(pull.records) == -(-tokens // 4)
    world.decode.puller.cancel(pull, "")
    world.settle()


BROKEN_CHAINS = {
    "one too few": lambda held: dict(hashes=held.hashes[:-32]), "one too many": lambda held: dict(hashes=held.hashes + bytes(32)),
    "not whole": lambda held: dict(hashes=held.hashes[:-1]), "no seed": lambda held: dict(seed=b""), "a short seed": lambda held: dict(seed=held.seed[:-1]),
    "a long seed": lambda held: dict(seed=held.seed + b"x"),
}


@pytest.mark.parametrize("wrong", BROKEN_CHAINS)
def test_hashes_that_are_not_those_of_the_prompt_are_refused(worlds, wrong):
    world = worlds()
    ids, pages = world.prompt(23)
    world.prefill.publish(1, ids, pages, seed=b"s" * 32)

    def tamper():
        held = world.tier.tier.rooms[1, 0]
        held.manifest = msgspec.structs.replace(held.manifest, **BROKEN_CHAINS[wrong](held.manifest))

    world.tier.call(tamper)
    pull = world.decode.pull(1)
    until(lambda: pull.state in ("ready", "failed"))
    assert pull.state == "failed" and isinstance(pull.error, ProtocolError) and "hashes" in str(pull.error)
    assert pull.error.room == 1 and pull.error.peer
    still_serves(world)
    world.settle()


# -- damage -------------------------------------------------------------------------------------------------------


def test_a_damaged_read_is_read_again_once(worlds):
    world = worlds()
    pages = committed(world, 1, 24)
    world.tier.faults.corrupt = 1
    target = np.arange(20, 26)
    pull = world.pull_into(1, target)
    assert pull.state == "done" and world.arrived(pages, target, 24)
    assert world.decode.puller.totals["read_failures"] == 1
    assert sum(world.decode.plane.landed.values()) == 8 * 768, "one window of two records twice"
    world.settle()


def test_a_record_that_stays_damaged_is_never_attended_to(worlds):
    world = worlds()
    committed(world, 1, 8)
    world.tier.faults.corrupt = 10
    pull = world.pull_into(1, np.arange(2))
    assert pull.state == "failed" and isinstance(pull.error, IntegrityError) and pull.error.room == 1
    assert world.decode.untouched(np.arange(64)) and not world.decode.rows
    world.tier.faults.corrupt = 0
    still_serves(world)
    world.settle()


def test_damage_in_the_arena_itself_is_found(worlds):
    world = worlds()
    committed(world, 1, 24)
    world.tier.server.arena.bytes[1000] ^= 1
    pull = world.pull_into(1, np.arange(6))
    assert isinstance(pull.error, IntegrityError) and "first record 1" in str(pull.error)
    assert world.decode.untouched(np.arange(2)), "the window with the damage was not used"
    assert not world.decode.rows
    world.settle()


def test_a_record_freed_and_reused_while_it_is_read_is_noticed(worlds):
    world = worlds(tier=dict(records=6))
    committed(world, 1, 24, seed=None)
    pull = ready(world, 1)
    world.tier.faults.hold = True
    world.decode.fetch(pull, np.arange(6))
    until(lambda: world.tier.faults.in_flight == 3)
    world.tier.call(world.tier.tier._end_lease, pull.manifest.lease)  # as if it had expired
    committed(world, 2, 24, at=10, seed=None)
    world.tier.faults.hold = False
    world.tier.faults.finish()
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, (IntegrityError, LeaseExpired)) and world.decode.untouched(np.arange(64))
    assert world.pull_into(2, np.arange(10, 16)).state == "done"
    world.settle()


def test_the_same_bytes_written_again_are_as_good(worlds):
    """Another generation of the record with every byte equal: nothing wrong could be attended to, so nothing is refused."""
    world = worlds(tier=dict(records=6))
    ids, pages = world.prompt(24)
    world.prefill.publish(1, ids, pages, seed=None)
    pull = ready(world, 1)
    world.tier.call(world.tier.tier._end_lease, pull.manifest.lease)
    again = world.prefill.publish(2, ids, pages, seed=None)
    assert again.records.tolist() == pull.records.tolist() and again.generations.tolist() == (pull.generations + np.uint64(1)).tolist()
    assert again.roots.tolist() == pull.roots.tolist()
    world.decode.puller.cancel(pull, "")
    assert world.pull_into(2, np.arange(6)).state == "done" and world.arrived(pages, np.arange(6), 24)
    world.settle()


def test_a_refused_post_fails_that_request_within_a_tick(worlds):
    """The third of five: four finish, one fails, nothing leaks."""
    world = worlds()
    for room in range(5):
        committed(world, room, 8, at=2 * room)
    outcome = []
    for room in range(5):
        world.tier.faults.refuse = int(room == 2)
        began = time.monotonic()
        pull = world.pull_into(room, np.arange(2 * room, 2 * room + 2))
        outcome.append(pull.state)
        if pull.state == "failed":
            assert isinstance(pull.error, TransportError) and time.monotonic() - began < 2
    assert outcome == ["done", "done", "failed", "done", "done"]
    assert world.decode.puller.totals["admitted"] == 4 and world.decode.puller.totals["failed"] == 1
    assert world.decode.untouched(np.array([4, 5]))
    world.settle()


def test_a_pool_page_that_does_not_exist_ends_that_request_alone(worlds):
    world = worlds()
    committed(world, 1, 8)
    pull = ready(world, 1)
    world.decode.fetch(pull, np.array([1, 10_000]))
    until(lambda: pull.state == "failed", "the faulty request ends", 5)
    assert isinstance(pull.error, RoomFailed) and "internal error" in str(pull.error)
    assert world.decode.puller.totals["internal_errors"] == 1
    still_serves(world)
    world.settle()


def test_a_row_that_cannot_be_written_ends_that_request_alone(worlds):
    world = worlds()
    committed(world, 1, 8)
    pull = ready(world, 1)

    def refuse(row):
        raise LayoutMismatch("the hand-over row differs in its fields", field="metadata_lens")

    world.decode.fetch(pull, np.arange(2), refuse)
    until(lambda: pull.state == "failed", "the faulty request ends", 5)
    assert isinstance(pull.error, LayoutMismatch)
    still_serves(world)
    world.settle()


# -- cancellation and late writes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["late", "failed", "corrupt", "again", "twice"])
def test_nothing_is_written_after_cancel_returned(worlds, ending):
    world = worlds()
    for turn in range(5):
        room = turn + 1
        committed(world, room, 24)
        pull = ready(world, room)
        world.tier.faults.hold, world.tier.faults.corrupt = True, int(ending == "corrupt")
        world.decode.fetch(pull, np.arange(6))
        until(lambda: world.tier.faults.in_flight == 3)
        world.decode.puller.cancel(pull, "the client left")
        for _ in range(2 if ending == "twice" else 1):
            world.decode.puller.cancel(pull, "the client left")
        if ending == "failed":
            world.tier.faults.fail(TransportError("told to"))
        if ending == "again":
            until(lambda: pull.state == "failed")
        world.tier.faults.finish()
        world.tier.faults.finish()
        world.tier.faults.hold = False
        until(world.decode.at_baseline)
        assert pull.state == "failed" and isinstance(pull.error, RoomFailed)
        assert world.decode.untouched(np.arange(64)) and not world.decode.rows
    still_serves(world)
    world.settle()


def test_an_abort_in_mid_read_does_not_hurt_others_of_the_same_tier(worlds):
    world = worlds()
    committed(world, 1, 60, at=0)
    other = committed(world, 2, 8, at=20)
    first, second = ready(world, 1), ready(world, 2)
    world.tier.faults.hold = True
    world.decode.fetch(first, np.arange(15))
    until(lambda: world.tier.faults.in_flight == 4)  # every window
    world.decode.fetch(second, np.arange(20, 22))
    world.decode.puller.cancel(first, "the client left")
    until(lambda: first.state == "failed")
    world.tier.faults.hold = False
    world.tier.faults.finish()
    until(lambda: second.state in ("done", "failed"))
    assert second.state == "done", second.error
    assert world.arrived(other, np.arange(20, 22), 8) and world.decode.untouched(np.arange(15))
    assert world.decode.puller.totals["links_lost"] == 0
    world.settle()


def test_a_read_that_misses_its_deadline_is_quarantined_and_its_late_bytes_go_nowhere(worlds):
    world = worlds(decode=dict(limits=PullLimits(await_seconds=10, read_seconds=0.1, silence_seconds=5)))
    pages = committed(world, 1, 8)
    pull = ready(world, 1)
    world.tier.faults.hold = True
    world.decode.fetch(pull, np.arange(2))
    until(lambda: world.tier.faults.in_flight == 1, "the first try is under way, and held")
    world.tier.faults.hold = False  # the second try lands
    until(lambda: world.decode.staging.quarantined == 1, "the first try missed its deadline")
    until(lambda: pull.state in ("done", "failed"))
    assert pull.state == "done" and world.arrived(pages, np.arange(2), 8)
    assert world.decode.staging.quarantined == 1 and world.tier.faults.in_flight == 1
    world.decode.wipe(np.arange(2))
    world.tier.faults.finish()
    until(world.decode.at_baseline)
    assert world.decode.untouched(np.arange(64)) and world.decode.puller.totals["quarantined"] == 1
    world.settle()


def test_a_peer_that_fills_the_quarantine_is_dropped_and_comes_back(worlds):
    world = worlds(decode=dict(limits=PullLimits(await_seconds=10, read_seconds=0.1, silence_seconds=5)))
    committed(world, 1, 60)
    pull = ready(world, 1)
    world.tier.faults.hold = True
    world.decode.fetch(pull, np.arange(15))
    until(lambda: pull.state == "failed", "all four reads missed their deadline")
    until(lambda: world.decode.puller.totals["links_lost"] == 1)
    assert isinstance(pull.error, OasisError) and world.decode.untouched(np.arange(64))
    world.tier.faults.hold = False
    world.tier.faults.finish()
    until(world.decode.at_baseline)
    still_serves(world)
    world.settle()


def test_a_request_that_finds_every_window_in_quarantine_fails_by_name(worlds):
    world = worlds(decode=dict(limits=PullLimits(await_seconds=10, read_seconds=0.1, silence_seconds=5)))
    committed(world, 1, 60)
    pull = ready(world, 1)
    world.tier.faults.hold = True
    world.decode.fetch(pull, np.arange(15))
    until(lambda: world.decode.staging.quarantined == world.decode.windows)
    until(lambda: world.decode.puller.totals["links_lost"] == 1)
    committed(world, 2, 8, at=20)
    late = ready(world, 2)
    world.decode.fetch(late, np.arange(20, 22))
    until(lambda: late.state == "failed", "nothing can be read")
    assert isinstance(late.error, CapacityError) and "window" in str(late.error)
    world.tier.faults.hold = False
    world.tier.faults.finish()
    until(world.decode.at_baseline)
    still_serves(world)
    world.settle()


def test_pages_are_written_only_once_they_are_vacant(worlds):
    """What SGLang freed may still be written by a forward that runs."""
    world = worlds()
    pages = committed(world, 1, 30)
    pull = ready(world, 1)
    forward = threading.Event()
    vacant = SimpleNamespace(synchronize=lambda: forward.wait(WAIT))
    world.decode.fetch(pull, np.arange(8), vacant=vacant)
    until(lambda: world.decode.plane.landed, "a window landed")
    time.sleep(0.05)
    assert pull.state == "pulling" and world.decode.untouched(np.arange(64))
    forward.set()
    until(lambda: pull.state == "done")
    assert world.arrived(pages, np.arange(8), 30)
    world.settle()


def test_a_link_that_failed_outside_its_own_turn_takes_its_pulls_along(worlds):
    """The link fails while reads are looked at, and the next request already asks for a new one."""
    world = worlds()
    committed(world, 1, 8)
    pull = ready(world, 1)

    def fail_and_ask():
        pull.link.fail(PeerLost("dropped"))
        world.decode.puller._link(world.tier.control)

    world.decode.puller._post(fail_and_ask)
    until(lambda: pull.state == "failed", "the pull of the failed link", 5)
    assert isinstance(pull.error, PeerLost), pull.error
    assert world.decode.puller.totals["links_lost"] == 1
    still_serves(world)
    world.settle()


# -- duplicate rooms ----------------------------------------------------------------------------------------------


def test_a_second_pull_of_a_room_is_refused_and_the_first_completes(worlds):
    world = worlds()
    pages = committed(world, 1, 22)
    first = ready(world, 1)
    second = world.decode.pull(1)
    until(lambda: second.state == "failed")
    assert isinstance(second.error, OasisError) and "duplicate" in str(second.error) and second.error.room == 1
    world.decode.puller.cancel(second, "cleared")
    world.decode.fetch(first, np.arange(6))
    until(lambda: first.state in ("done", "failed"))
    assert first.state == "done" and world.arrived(pages, np.arange(6), 22)
    world.settle()


@pytest.mark.parametrize("when", ["awaiting", "ready"])
def test_a_second_decode_node_asking_for_a_room_is_refused_and_the_first_completes(worlds, when):
    world = worlds()
    other = Decode(world.decode.controls)
    try:
        ids, pages = world.prompt(22)
        first = world.decode.pull(1)
        until(lambda: first.state == "awaiting")
        until(lambda: world.tier.inventory()["waiters"] == 1)
        if when == "ready":
            world.prefill.publish(1, ids, pages)
            until(lambda: first.state == "ready")
        second = other.pull(1)
        until(lambda: second.state == "failed")
        assert second.error.code == "DuplicateRoom"
        if when == "awaiting":
            assert world.prefill.publish(1, ids, pages).state == COMMITTED
        until(lambda: first.state == "ready", "the first gets its manifest", 5)
        world.decode.fetch(first, np.arange(6))
        until(lambda: first.state in ("done", "failed"))
        assert first.state == "done" and world.arrived(pages, np.arange(6), 22)
        until(other.at_baseline)
        world.settle()
    finally:
        other.close()


# -- deadlines, dead and slow tiers -------------------------------------------------------------------------------


def test_waiting_for_a_commit_ends_at_its_deadline(worlds):
    world = worlds(decode=dict(limits=PullLimits(await_seconds=0.3, read_seconds=5, silence_seconds=5)))
    began = time.monotonic()
    pull = world.decode.pull(1)
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, DeadlineExceeded) and pull.error.room == 1 and 0.25 < time.monotonic() - began < 5
    still_serves(world)
    world.settle()


@pytest.mark.parametrize("end", ["cancel", "source lost", "deadline"])
def test_one_request_given_up_early_does_not_end_the_link_later(worlds, end):
    """The tier answers a wait that was cancelled; silence about it would look like a dead tier."""
    world = worlds(decode=dict(limits=PullLimits(await_seconds=0.6, read_seconds=5, silence_seconds=0.3)))
    pull = world.decode.pull(1)
    until(lambda: pull.state == "awaiting" and world.tier.inventory()["waiters"] == 1)
    if end == "cancel":
        world.decode.puller.cancel(pull, "the client left")
    if end == "source lost":
        world.decode.puller.source_lost(SOURCE)
    until(lambda: pull.state == "failed")
    link = next(iter(world.decode.puller.links.values()))
    time.sleep(1.2)
    assert link.error is None and world.decode.puller.totals["links_lost"] == 0
    world.settle()


def test_an_unreachable_tier(worlds):
    world = worlds(decode=dict(limits=QUICK))
    world.decode.controls["dead/0"] = "tcp://127.0.0.1:1"
    pull = world.decode.pull(1, "dead/0")
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, DeadlineExceeded)
    still_serves(world)
    world.settle()


@pytest.mark.parametrize("control", ["not an address", "tcp://[::bad", "", "ipc://"])
def test_an_address_that_is_none(worlds, control):
    world = worlds()
    committed(world, 5, 9)
    world.decode.controls["odd/0"] = control
    bad = [world.decode.pull(room, "odd/0") for room in (1, 2, 3)]
    good = world.decode.pull(5)
    for pull in bad:
        until(lambda: pull.state == "failed", "a clear error", 8)
        assert isinstance(pull.error, OasisError)
    until(lambda: good.state == "ready", "others go on")
    world.decode.puller.cancel(good, "")
    world.settle()


def test_a_prefill_node_that_cannot_be_asked(worlds):
    def resolve(source):
        if source == "oasis error/0":
            raise PeerLost("cannot reach the prefill node")
        raise RuntimeError("anything")

    world = worlds(decode=dict(resolve=resolve))
    for source in ("oasis error/0", "other error/0"):
        pull = world.decode.pull(1, source)
        until(lambda: pull.state == "failed")
        assert isinstance(pull.error, PeerLost)
    world.settle()


def test_a_stopped_tier_fails_its_own_requests_and_no_others(worlds, tmp_path):
    world = worlds(decode=dict(limits=PullLimits(await_seconds=10, read_seconds=5, silence_seconds=0.5)))
    stopped = LocalTier(str(tmp_path / "second.sock"))
    prefill = Prefill(stopped.path, seed=3)
    try:
        world.decode.controls["second/0"] = stopped.control
        ids, pages = world.prompt(8)
        prefill.publish(1, ids, pages)
        pull = ready(world, 1, "second/0")
        resume = stopped.pause()
        waiting = world.decode.pull(2, "second/0")
        still_serves(world)
        until(lambda: pull.state == waiting.state == "failed", "silence ends them")
        assert isinstance(pull.error, DeadlineExceeded) and isinstance(waiting.error, DeadlineExceeded)
        assert stopped.control in str(pull.error)
        still_serves_again = committed(world, 50, 9)
        assert world.pull_into(50, np.arange(3)).state == "done" and len(still_serves_again) == 3
        assert world.decode.forgotten == [stopped.control]
        resume.set()
        again = world.decode.pull(3, "second/0")
        assert prefill.publish(3, ids, pages).state == COMMITTED
        until(lambda: again.state == "ready", "a new link once it answers")
        world.decode.puller.cancel(again, "")
        world.settle()
    finally:
        prefill.close()
        stopped.stop()


def test_a_restarted_tier_under_a_reader(worlds):
    """On the same port: the old link learns it is stale, what it held fails, what comes next works."""
    world = worlds()
    port = world.tier.server.control.rpartition(":")[2]
    committed(world, 1, 24)
    held, waiting = ready(world, 1), world.decode.pull(2)
    until(lambda: waiting.state == "awaiting")
    old = world.tier.server.epoch
    world.tier.stop()
    world.tier = LocalTier(world.path, listen=f"127.0.0.1:{port}")
    until(lambda: held.state == waiting.state == "failed", "they hear of it at the next renewal")
    for pull in (held, waiting):
        assert isinstance(pull.error, (StaleEpoch, PeerLost, DeadlineExceeded)), pull.error
    until(lambda: world.prefill.publisher.totals["reattached"] == 1)
    pages = committed(world, 3, 24)
    pull = world.pull_into(3, np.arange(6))
    assert pull.state == "done" and world.arrived(pages, np.arange(6), 24)
    assert pull.manifest.epoch == world.tier.server.epoch != old
    world.settle()


def test_a_tier_that_restarts_while_records_are_read(worlds):
    world = worlds()
    committed(world, 1, 24)
    pull = ready(world, 1)
    world.tier.faults.hold = True
    world.decode.fetch(pull, np.arange(6))
    until(lambda: world.tier.faults.in_flight == 3)
    world.tier.stop()  # its loopback server drops its peers
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, TransportError) and world.decode.untouched(np.arange(64))
    world.tier = LocalTier(world.path)
    world.decode.controls[SOURCE] = world.tier.control
    until(lambda: world.prefill.publisher.totals["reattached"] == 1)
    still_serves(world)
    world.settle()


def test_leases_are_renewed_while_a_request_waits_for_pages(worlds):
    world = worlds(tier=dict(limits=TierLimits(lease_seconds=0.6, grace_seconds=0.1, room_seconds=5)))
    pages = committed(world, 1, 8)
    pull = ready(world, 1)
    time.sleep(1.5)
    world.decode.fetch(pull, np.arange(2))
    until(lambda: pull.state in ("done", "failed"))
    assert pull.state == "done", pull.error
    assert world.arrived(pages, np.arange(2), 8)
    world.settle()


def test_leases_of_two_tiers_are_each_renewed_in_time(worlds, tmp_path):
    world = worlds(tier=dict(limits=TierLimits(lease_seconds=20, grace_seconds=1, room_seconds=40)))
    hasty = LocalTier(str(tmp_path / "second.sock"), limits=TierLimits(lease_seconds=0.6, grace_seconds=0.1, room_seconds=5))
    prefill = Prefill(hasty.path)
    try:
        world.decode.controls["second/0"] = hasty.control
        committed(world, 1, 8)
        ids, pages = world.prompt(8)
        prefill.publish(2, ids, pages)
        slow, quick = ready(world, 1), ready(world, 2, "second/0")
        time.sleep(1.5)
        for pull in (slow, quick):
            world.decode.fetch(pull, np.arange(2))
            until(lambda: pull.state in ("done", "failed"))
            assert pull.state == "done", pull.error
        until(lambda: not any(hasty.inventory()[k] for k in ("leases", "holders")))
    finally:
        prefill.close()
        hasty.stop()


def test_a_lease_the_tier_ended_is_not_used(worlds):
    world = worlds(tier=dict(limits=TierLimits(lease_seconds=0.6, grace_seconds=0.1, room_seconds=5)))
    committed(world, 1, 8)
    pull = ready(world, 1)
    world.tier.call(world.tier.tier._end_lease, pull.manifest.lease)
    until(lambda: pull.state == "failed")
    assert isinstance(pull.error, LeaseExpired) and pull.error.room == 1
    world.settle()


def test_no_worker_at_the_tier_yet(worlds):
    """Decode may come first: it says Hello again until a worker attached."""
    world = worlds()
    late = LocalTier(world.path + ".late")
    try:
        world.decode.controls["late/0"] = late.control
        pull = world.decode.pull(1, "late/0")
        until(lambda: pull.state == "awaiting")
        prefill = Prefill(late.path)
        ids, pages = world.prompt(8)
        prefill.publish(1, ids, pages)
        until(lambda: pull.state == "ready")
        world.decode.puller.cancel(pull, "")
        until(lambda: not late.inventory()["holders"])
        prefill.close()
    finally:
        late.stop()


# -- peers that do not fit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("field, changes", [("layout", dict(layout=small_layout(tp_size=2))), ("fingerprint", dict(fingerprint="0" * 64))])
def test_a_tier_of_another_layout_or_model_is_refused_by_name(worlds, field, changes):
    world = worlds()
    other = Decode(world.decode.controls, **changes)
    try:
        pull = other.pull(1)
        until(lambda: pull.state == "failed")
        assert isinstance(pull.error, LayoutMismatch)
        assert ("tp_size" if field == "layout" else "fingerprint") in str(pull.error)
        until(other.at_baseline)
    finally:
        other.close()


def test_the_model_may_change_under_a_link_and_is_still_refused(worlds):
    """Same layout, other weights: the worker was replaced while the reader's link stayed up."""
    world = worlds()
    committed(world, 1, 8)
    world.pull_into(1, np.arange(2))
    world.decode.wipe(np.arange(2))
    until(world.tier_at_baseline)
    world.prefill.close()
    until(lambda: world.tier.inventory()["workers"] == 0)
    world.prefill = Prefill(world.path, fingerprint="0" * 64)
    committed(world, 2, 8)
    pull = world.decode.pull(2)
    until(lambda: pull.state in ("ready", "failed"))
    assert pull.state == "failed" and isinstance(pull.error, LayoutMismatch) and "fingerprint" in str(pull.error)
    world.settle()


def test_a_tier_that_does_not_serve_our_plane(worlds, tmp_path):
    world = worlds()
    other = LocalTier(str(tmp_path / "zmq.sock"), planes=("zmq",))
    prefill = Prefill(other.path)
    try:
        world.decode.controls["zmq/0"] = other.control
        pull = world.decode.pull(1, "zmq/0")
        until(lambda: pull.state == "failed")
        assert isinstance(pull.error, PeerLost) and "zmq" in str(pull.error) and "loopback" in str(pull.error)
        still_serves(world)
        assert world.decode.puller.totals["internal_errors"] == 0
        world.settle()
    finally:
        prefill.close()
        other.stop()


def test_close_leaves_no_thread_and_no_socket(tmp_path):
    before = descriptors()
    world = World(tmp_path)
    committed(world, 1, 8)
    world.pull_into(1, np.arange(2))
    assert descriptors() - before
    puller = world.decode.puller
    world.close()
    assert puller._context.closed and not any(thread.is_alive() for thread in (puller._thread, world.prefill.publisher._thread, world.tier.thread))
    puller.pull(2, "too late/0")
    puller.close()
    del world, puller
    gc.collect()  # views of the arena hold a descriptor
    assert not descriptors() - before


def test_pools_are_compared_by_value():
    """The oracle of this file can tell a difference."""
    a, b = Pool(small_layout(), 4, seed=1), Pool(small_layout(), 4, seed=1)
    assert np.array_equal(a.tokens(np.array([2, 0]), 7), b.tokens(np.array([2, 0]), 7))
    assert not np.array_equal(a.tokens(np.array([2, 0]), 7), b.tokens(np.array([0, 2]), 7))
    b.v[1][3, 2, 1] += 1e-6
    assert not np.array_equal(a.tokens(np.array([0]), 4), b.tokens(np.array([0]), 4))
    assert WAIT > 1


def test_what_lands_after_the_request_failed_is_not_used(worlds):
    """Nobody cancelled it: it failed by another of its reads, and its pages may already be someone else's."""
    world = worlds()
    committed(world, 1, 24)
    pull = ready(world, 1)
    world.tier.faults.hold = True
    world.decode.fetch(pull, np.arange(6))
    until(lambda: world.tier.faults.in_flight == 3)
    world.tier.faults.fail(TransportError("told to"), 2)
    until(lambda: pull.state == "failed")
    assert not pull.cancelled and isinstance(pull.error, TransportError)
    world.tier.faults.hold = False
    world.tier.faults.finish()
    until(world.decode.at_baseline)
    assert world.decode.untouched(np.arange(64)) and not world.decode.rows
    world.settle()


def test_a_node_that_hangs_delays_nobody_else(worlds):
    world, hang = worlds(), threading.Event()

    def resolve(source):
        if source == "dead/0":
            hang.wait(5)
        return {"control": world.tier.control}

    world.decode.puller.resolve = resolve
    for room in range(100, 120):
        world.decode.pull(room, "dead/0")
    good = world.decode.pull(3)
    try:
        until(lambda: good.state == "awaiting", "resolved while another node hangs", 2)
    finally:
        hang.set()
