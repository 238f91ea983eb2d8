"""Publishing into a real tier: what lies in the arena afterwards, and what is left when things go wrong."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
import xxhash
from node_rig import WAIT, LocalTier, Prefill, World, row_of, small_layout, until

from oasis_sglang.selection import votes
from prefill_node import publisher as publishing
from prefill_node.publisher import COMMITTED, FAILED, OPEN, OPENING
from transport import messages as m
from transport.errors import (
    CapacityError,
    DuplicateRoom,
    LayoutMismatch,
    PeerLost,
    RoomFailed,
    TransportError,
)
from transport.hashing import page_hashes
from transport.integrity import piece_digests, verify_index
from transport.tier import TierLimits


def in_arena(world: World, pub) -> np.ndarray:
    """float32 [pages, layers, heads, 2, tokens, dim] as the tier would serve it."""
    lay, geometry = world.prefill.layout, world.tier.tier.geometry
    arena = world.tier.server.arena.bytes
    shape = (lay.num_layers, lay.kv_heads, 2, lay.block_tokens, lay.head_dim)
    raw = [arena[int(r) * geometry.payload_stride :][: lay.payload_bytes] for r in pub.records]
    return np.stack([np.frombuffer(x.tobytes(), np.float32).reshape(shape) for x in raw])


def expected(world: World, pages: np.ndarray, tokens: int) -> np.ndarray:
    """The same, token by token out of prefill's pool; zeros past the prompt."""
    lay = world.prefill.layout
    out = np.zeros((len(pages), lay.num_layers, lay.kv_heads, 2, lay.block_tokens, lay.head_dim), np.float32)
    for n in range(tokens):
        page, offset = divmod(n, lay.block_tokens)
        slot = int(pages[page]) * lay.block_tokens + offset
        for layer in range(lay.num_layers):
            out[page, layer, :, 0, offset] = world.prefill.pool.k[layer][slot]
            out[page, layer, :, 1, offset] = world.prefill.pool.v[layer][slot]
    return out


def gate(publisher) -> threading.Event:
    """Holds the publisher's thread until the event is set."""
    open_it = threading.Event()
    publisher._inbox.put((open_it.wait, ))
    return open_it


def thread_lives(world: World) -> None:
    """A further request goes through: the thread that serves all of them is still there."""
    tokens, pages = world.prompt(5, salt=99)
    assert world.prefill.publish(999_983, tokens, pages).state == COMMITTED
    assert world.prefill.publisher._thread.is_alive()


@pytest.mark.parametrize("tokens, chunk_pages", [(1, 1), (4, 1), (23, 2), (23, 100), (24, 4), (61, 5)])
def test_the_arena_holds_the_pool_page_by_page(worlds, tokens, chunk_pages):
    world = worlds()
    ids, pages = world.prompt(tokens)
    pub = world.prefill.publish(1, ids, pages, chunk_pages=chunk_pages)
    assert pub.state == COMMITTED
    held = in_arena(world, pub)
    assert np.array_equal(held, expected(world, pages, tokens))
    totals, lay = world.prefill.publisher.totals, world.prefill.layout
    digests = piece_digests(held.reshape(len(pages), -1).view(np.uint8), lay.pieces)
    assert pub.roots.tolist() == [xxhash.xxh3_64_intdigest(digests[n].tobytes()) for n in range(len(pages))]
    assert totals["pages_published"] == len(pages) and pub.copied_bytes == len(pages) * (lay.payload_bytes + lay.index_bytes)
    assert totals["bytes_published"] == pub.copied_bytes and pub.pool_pages.tolist() == pages.tolist()


def test_indexes_hold_digests_and_summaries_of_their_records(worlds):
    world = worlds()
    ids, pages = world.prompt(12)
    pub = world.prefill.publish(1, ids, pages)
    geometry, lay = world.tier.tier.geometry, world.prefill.layout
    for n, page in enumerate(pages):
        at = geometry.index_base + int(pub.records[n]) * geometry.index_stride
        raw = world.tier.server.arena.bytes[at : at + lay.index_bytes][None]
        digests, raw = verify_index(raw, pub.generations[n : n + 1], pub.roots[n : n + 1], pub.records[n : n + 1], lay, peer="", room=1)
        payload = np.ascontiguousarray(in_arena(world, pub)[n : n + 1]).view(np.uint8).reshape(1, -1)
        assert digests.tolist() == piece_digests(payload, lay.pieces).tolist()
        raw = raw.reshape(lay.num_layers, lay.kv_heads, lay.summary_bytes)
        keys = world.prefill.pool.page(page)[0]  # [layers, tokens, heads, dim]
        mean = keys.mean(1)
        scale = np.frombuffer(raw[..., 4:6].tobytes(), np.float16).astype(float).reshape(lay.num_layers, lay.kv_heads, 1)
        assert np.allclose(raw[..., :4].view(np.int8) * scale, mean, atol=np.abs(mean).max() / 100)


def test_a_prompt_published_twice_is_copied_once(worlds):
    world = worlds()
    ids, pages = world.prompt(22)
    first = world.prefill.publish(1, ids, pages)
    second = world.prefill.publish(2, ids, pages + 20)  # other pool pages: what is in the arena counts
    assert second.state == COMMITTED
    lay = world.prefill.layout
    assert second.copied_bytes == lay.payload_bytes + lay.index_bytes, "the partial page only"
    assert world.prefill.publisher.totals["pages_reused"] == 5
    assert np.array_equal(in_arena(world, second)[:5], in_arena(world, first)[:5])
    assert first.records[5] != second.records[5]
    assert second.roots[:5].tolist() == first.roots[:5].tolist()
    other = world.prefill.publish(3, ids, pages, seed=b"other tenant".ljust(32))
    private = world.prefill.publish(4, ids, pages, seed=None)
    assert other.fresh.all() and private.fresh.all()


@pytest.mark.parametrize("tokens", [3, 12, 14])
@pytest.mark.parametrize("seed", [b"s" * 32, None])
def test_readers_are_told_the_chain_of_the_whole_pages(worlds, tokens, seed):
    world = worlds()
    ids, pages = world.prompt(tokens)
    assert world.prefill.publish(1, ids, pages, seed=seed).state == COMMITTED
    manifest = world.tier.call(lambda: world.tier.tier.rooms[1, 0].manifest)
    assert manifest.seed == (seed or b"")
    assert manifest.hashes == (b"" if seed is None else page_hashes(seed, ids, 4)) and len(manifest.hashes) == (seed is not None) * 32 * (tokens // 4)


def test_the_same_prompt_under_another_tenant_has_other_hashes_and_equal_roots(worlds):
    world = worlds()
    ids, pages = world.prompt(14)
    ours, theirs = (world.prefill.publish(room, ids, pages, seed=bytes([room]) * 32) for room in (1, 2))
    assert theirs.fresh.all() and not set(ours.records.tolist()) & set(theirs.records.tolist())
    assert theirs.roots.tolist() == ours.roots.tolist()


def test_a_prefix_is_shared_up_to_where_it_differs(worlds):
    world = worlds()
    ids, pages = world.prompt(24)
    world.prefill.publish(1, ids, pages)
    changed = ids.copy()
    changed[13] += 1  # in the fourth page: the last two differ by their history alone
    pub = world.prefill.publish(2, changed, pages)
    assert pub.fresh.tolist() == [False] * 3 + [True] * 3


def test_a_chunk_of_which_some_pages_are_already_there(worlds):
    world = worlds()
    ids, pages = world.prompt(16)
    world.prefill.publish(1, ids, pages)
    more = np.concatenate([ids, np.arange(7) + 5000])
    all_pages = np.concatenate([pages, [30, 29]])
    pub = world.prefill.publish(2, more, all_pages, chunk_pages=3)
    assert pub.fresh.tolist() == [False] * 4 + [True] * 2
    assert np.array_equal(in_arena(world, pub), expected(world, all_pages, 23))


# -- the ranking --------------------------------------------------------------------------------------------------


def queries_of(world: World, n: int, group: int = 2, seed: int = 0) -> torch.Tensor:
    lay = world.prefill.layout
    return torch.randn(n, lay.num_layers, lay.kv_heads * group, lay.head_dim, generator=torch.Generator().manual_seed(seed)) * 3


def ranked(world: World, pages: np.ndarray, tokens: int, queries: torch.Tensor, scale: float, k: int = 256) -> list[list[int]]:
    """[pieces][k], one query and one token after the other."""
    lay, n = world.prefill.layout, len(queries)
    keys, asked = world.prefill.pool.tokens(pages, tokens)[0], queries.double().numpy()
    whole, group = tokens // lay.block_tokens, queries.shape[2] // lay.kv_heads
    out = []
    for layer in range(lay.num_layers):
        for head in range(lay.kv_heads):
            mass = np.zeros(len(pages))
            for i in range(n):
                seen = keys[layer, : tokens - n + i + 1, head]
                for q in asked[i, layer, head * group : (head + 1) * group]:
                    weights = np.exp(seen @ q * scale)
                    for token, weight in enumerate(weights / weights.sum()):
                        mass[token // lay.block_tokens] += weight
            out.append(np.argsort(-mass[:whole], kind="stable")[:k].tolist())
    return out


def ranking_in_manifest(world: World, room: int) -> list[list[int]]:
    lay = world.prefill.layout
    raw = world.tier.call(lambda: world.tier.tier.rooms[room, 0].manifest.ranking)
    return m.unpack(raw, "u4").reshape(lay.pieces, -1).tolist()


@pytest.mark.parametrize("tokens, n, chunk_pages", [(4, 1, 1), (5, 5, 1), (23, 1, 2), (23, 7, 100), (24, 24, 3), (61, 9, 5)])
def test_the_manifest_ranks_the_blocks_by_what_the_last_queries_attend_to(worlds, tokens, n, chunk_pages):
    world = worlds()
    ids, pages = world.prompt(tokens)
    queries = queries_of(world, n)
    pub = world.prefill.publish(1, ids, pages, chunk_pages=chunk_pages, queries=queries, scale=0.7)
    assert pub.state == COMMITTED, pub.error
    found = ranking_in_manifest(world, 1)
    assert found == ranked(world, pages, tokens, queries, 0.7)
    assert all(sorted(row) == list(range(tokens // 4)) for row in found), "each whole block once, the partial page never"
    totals = world.prefill.publisher.totals
    assert totals["rooms_ranked"] == 1 and totals["votes_seconds"] > 0


def test_what_the_partial_page_holds_counts_and_what_lies_behind_it_does_not(worlds):
    """Mass that the last, partial page takes is missing elsewhere; the rest of its slots are another request's."""
    world = worlds()
    ids, pages = world.prompt(22)
    for pool in world.prefill.pool.k:
        pool[int(pages[-1]) * 4 + 2 : int(pages[-1]) * 4 + 4] = 1e4
    queries = queries_of(world, 6)
    world.prefill.publish(1, ids, pages, queries=queries, scale=0.5)
    assert ranking_in_manifest(world, 1) == ranked(world, pages, 22, queries, 0.5)


def test_pages_that_the_tier_already_had_are_ranked_from_the_pool_like_the_others(worlds):
    world = worlds()
    ids, pages = world.prompt(22)
    queries = queries_of(world, 5)
    world.prefill.publish(1, ids, pages, queries=queries)
    more = np.concatenate([ids, np.arange(13) + 5000])
    moved = np.concatenate([pages[:5] + 20, [40, 3, 41, 39]])  # five pages are reused, from other places of the pool
    second = world.prefill.publish(2, more, moved, chunk_pages=2, queries=queries)
    assert second.fresh.tolist() == [False] * 5 + [True] * 4
    assert ranking_in_manifest(world, 2) == ranked(world, moved, 35, queries, 1.0)
    assert ranking_in_manifest(world, 1) == ranked(world, pages, 22, queries, 1.0)
    assert world.prefill.publisher.totals["rooms_ranked"] == 2


def test_no_more_blocks_are_ranked_than_the_limit(worlds, monkeypatch):
    monkeypatch.setattr(publishing, "RANKED_BLOCKS", 3)
    world = worlds()
    ids, pages = world.prompt(61)
    queries = queries_of(world, 8)
    world.prefill.publish(1, ids, pages, queries=queries)
    found = ranking_in_manifest(world, 1)
    assert {len(row) for row in found} == {3} and found == ranked(world, pages, 61, queries, 1.0, k=3)


@pytest.mark.parametrize("tokens, asked", [(23, False), (3, True)])
def test_without_queries_or_whole_blocks_there_is_no_ranking(worlds, tokens, asked):
    world = worlds()
    ids, pages = world.prompt(tokens)
    pub = world.prefill.publish(1, ids, pages, queries=queries_of(world, 2) if asked else None)
    assert pub.state == COMMITTED and ranking_in_manifest(world, 1) == [[]] * world.prefill.layout.pieces
    assert "rooms_ranked" not in world.prefill.publisher.totals and "votes_seconds" not in world.prefill.publisher.totals


def test_cancel_returns_only_when_the_ranking_no_longer_reads_the_pool_and_nothing_is_committed(worlds, monkeypatch):
    world = worlds()
    ids, pages = world.prompt(24)
    voting, go_on, returned, voted_after = threading.Event(), threading.Event(), threading.Event(), []
    vote = votes.vote

    def slow(*args):
        voting.set()
        assert go_on.wait(WAIT)
        voted_after.append(returned.is_set())
        return vote(*args)

    monkeypatch.setattr(votes, "vote", slow)
    pub = world.prefill.open(1, ids)
    until(lambda: pub.state == OPEN)
    world.prefill.send(pub, pages)
    world.prefill.publisher.commit(pub, row_of(1), queries_of(world, 4), 1.0)
    assert voting.wait(WAIT)
    canceller = threading.Thread(target=lambda: (world.prefill.publisher.cancel(pub, "gone"), returned.set()))
    canceller.start()
    assert not returned.wait(0.1), "cancel came back while the pool was being read"
    go_on.set()
    canceller.join(WAIT)
    until(lambda: pub.state == FAILED)
    assert voted_after == [False] and "gone" in str(pub.error) and not world.prefill.publisher.totals["rooms_committed"]
    world.settle()
    thread_lives(world)


def test_a_prompt_cancelled_before_its_ranking_is_not_read(worlds, monkeypatch):
    world = worlds()
    ids, pages = world.prompt(24)
    pub = world.prefill.open(1, ids)
    until(lambda: pub.state == OPEN)
    world.prefill.send(pub, pages)
    until(lambda: pub.copied_bytes == 6 * (world.prefill.layout.payload_bytes + world.prefill.layout.index_bytes))
    voted, publisher = [], world.prefill.publisher
    monkeypatch.setattr(votes, "vote", lambda *_: voted.append(1))
    with pub.lock:
        publisher.commit(pub, row_of(1), queries_of(world, 4), 1.0)
        until(publisher._inbox.empty)
        time.sleep(0.05)  # the publisher's thread waits for the lock
        pub.cancelled = True  # as ``cancel`` does before it takes the lock
    publisher._inbox.put((publisher._abandon, pub, RoomFailed("gone", room=1)))
    until(lambda: pub.state != OPEN)
    assert not voted and pub.state == FAILED and "gone" in str(pub.error)
    world.settle()


def test_queries_that_do_not_fit_end_that_request_alone(worlds):
    world = worlds()
    ids, pages = world.prompt(8)
    wrong = world.prefill.publish(1, ids, pages, queries=torch.zeros(2, 9, 6, 4))
    assert wrong.state == FAILED and isinstance(wrong.error, RoomFailed) and "internal error" in str(wrong.error)
    thread_lives(world)


# -- room in the arena --------------------------------------------------------------------------------------------


def test_a_full_arena_holds_back_until_there_is_room(worlds):
    world = worlds(tier=dict(records=8))
    ids, pages = world.prompt(24)
    first = world.prefill.publish(1, ids, pages, seed=None)
    second = world.prefill.open(2, ids, seed=None)
    until(lambda: world.prefill.publisher.totals["reserve_retries"] > 2, "asked again")
    assert second.state == OPENING
    pull = world.pull_into(1, pages)
    assert pull.state == "done" and first.state == COMMITTED
    until(lambda: second.state == OPEN, "room was made")
    world.prefill.publisher.cancel(second, "enough")
    world.settle()


def test_what_is_wished_for_goes_with_every_question_and_not_without_names_for_it(worlds):
    world, asked = worlds(tier=dict(records=8)), []
    publisher, post = world.prefill.publisher, world.prefill.publisher.client.post
    publisher.client.post = lambda make, done, **fields: (asked.append(fields.get("wish")), post(make, done, **fields))
    wish = m.Wish(1, 5, 2, 0.5)
    first = world.prefill.open(1, np.arange(30), seed=None)
    until(lambda: first.state == OPEN)
    second = publisher.publish(2, np.arange(30), b"s" * 32, wish)
    until(lambda: publisher.totals["reserve_retries"] > 1, "it is asked for again")
    publisher.cancel(first, "")
    until(lambda: second.state == OPEN, "a tier that has nothing behind it takes no notice")
    assert asked[0] is None and len(asked) > 2 and set(map(type, asked[1:])) == {m.Wish} and asked[1] == asked[-1] == wish
    asked.clear()
    unnamed = publisher.publish(3, np.arange(2), None, wish)
    until(lambda: asked)
    assert asked == [None]
    for pub in (second, unnamed):
        publisher.cancel(pub, "")
    world.settle()


def test_back_pressure_ends_with_an_error_that_names_the_limit(worlds):
    world = worlds(tier=dict(records=8), prefill=dict(reserve_seconds=0.1))
    ids, pages = world.prompt(24)
    world.prefill.publish(1, ids, pages, seed=None)
    waiting = world.decode.pull(2)
    pub = world.prefill.open(2, ids, seed=None)
    until(lambda: pub.state == FAILED, "gave up")
    assert isinstance(pub.error, CapacityError) and pub.error.room == 2 and "waited 0.1 s" in str(pub.error)
    until(lambda: waiting.state == "failed", "the reader hears of it")
    assert isinstance(waiting.error, RoomFailed) and "full" in str(waiting.error)
    assert world.pull_into(1, pages).state == "done"
    world.settle()


def test_a_prompt_larger_than_the_arena_is_refused_at_once(worlds):
    world = worlds(tier=dict(records=8))
    pub = world.prefill.open(1, np.arange(33))
    until(lambda: pub.state == FAILED, "refused")
    assert isinstance(pub.error, CapacityError) and not pub.error.retryable and "9 of 8 records" in str(pub.error)
    assert world.prefill.publisher.totals["reserve_retries"] == 0
    world.settle()


# -- duplicate rooms ----------------------------------------------------------------------------------------------


def test_a_second_publication_of_a_room_is_refused_and_the_first_completes(worlds):
    world = worlds()
    ids, pages = world.prompt(22)
    first = world.prefill.open(1, ids)
    second = world.prefill.open(1, ids + 7)
    until(lambda: second.state == FAILED, "refused")
    assert isinstance(second.error, DuplicateRoom) and second.error.room == 1
    world.prefill.publisher.cancel(second, "cleared")
    world.prefill.send(first, pages, 2)
    world.prefill.publisher.commit(first, row_of(1))
    until(lambda: first.state == COMMITTED, "the first")
    target = np.arange(10, 16)
    assert world.pull_into(1, target).state == "done" and world.arrived(pages, target, 22)
    assert world.prefill.publisher.totals["rooms_failed"] == 1
    world.settle()


def test_cancelling_a_duplicate_before_it_was_looked_at_leaves_the_first_alone(worlds):
    world = worlds()
    ids, pages = world.prompt(6)
    first = world.prefill.open(1, ids)
    until(lambda: first.state == OPEN)
    hold = gate(world.prefill.publisher)
    second = world.prefill.open(1, ids + 7)
    world.prefill.publisher.cancel(second, "the client left")
    hold.set()
    until(lambda: second.state == FAILED)
    world.prefill.send(first, pages)
    world.prefill.publisher.commit(first, row_of(1))
    until(lambda: first.state in (COMMITTED, FAILED))
    assert first.state == COMMITTED, first.error
    assert world.pull_into(1, np.arange(2)).state == "done"
    world.settle()


def test_a_smaller_duplicate_does_not_overtake_one_that_waits_for_room(worlds):
    world = worlds(tier=dict(records=8))
    ids, pages = world.prompt(20)
    world.prefill.publish(9, ids, pages, seed=None)
    first = world.prefill.open(1, ids, seed=None)
    until(lambda: world.prefill.publisher.totals["reserve_retries"], "the first waits")
    second = world.prefill.open(1, ids[:4] + 1, seed=None)
    until(lambda: second.state != OPENING, "the second is answered")
    assert second.state == FAILED and isinstance(second.error, DuplicateRoom)
    assert world.pull_into(9, np.arange(5)).state == "done"
    until(lambda: first.state == OPEN, "the first opens")
    world.prefill.publisher.cancel(first, "done here")
    world.settle()


# -- aborts -------------------------------------------------------------------------------------------------------


def test_aborts_in_every_state_leave_nothing(worlds):
    """Each state at least five times; a reader that waits hears of it, except of what was committed."""
    world = worlds(tier=dict(records=16, limits=TierLimits(lease_seconds=1.5, grace_seconds=0.1, room_seconds=0.4)))
    ids, pages = world.prompt(24)
    publisher, reached = world.prefill.publisher, dict.fromkeys(("unseen", "waiting for room", "open", "half copied", "committed"), 0)
    room = 100
    for turn in range(6):
        for state in reached:
            room += 1
            blocker = hold = None
            if state == "waiting for room":
                blocker = world.prefill.open(5000 + room, np.arange(60), seed=None)
                until(lambda: blocker.state == OPEN)
            if state == "unseen":
                hold = gate(publisher)
            if turn % 2:
                waiting = world.decode.pull(room)
            pub = world.prefill.open(room, ids, seed=None if turn % 3 else b"seed" * 8)
            if state == "waiting for room":
                until(lambda: publisher._waiting == [pub], state)
            if state in ("open", "half copied", "committed"):
                until(lambda: pub.state == OPEN, state)
            if state == "half copied":
                publisher.send(pub, pages[:3], 0, 12, None)
                until(lambda: not pub.fresh[:3].any() or pub.copied_bytes, state)
            if state == "committed":
                world.prefill.send(pub, pages)
                publisher.commit(pub, row_of(room))
                until(lambda: pub.state == COMMITTED, state)
            reached[state] += 1
            for _ in range(2):
                publisher.cancel(pub, "the client left")
            if hold:
                hold.set()
            until(lambda: pub.state in (FAILED, COMMITTED), state)
            assert (pub.state == COMMITTED) == (state == "committed")
            if blocker:
                publisher.cancel(blocker, "")
            if turn % 2 and state == "committed":
                until(lambda: waiting.state == "ready", state)
                world.decode.puller.cancel(waiting, "")
            elif turn % 2:
                until(lambda: waiting.state == "failed", state)
                assert isinstance(waiting.error, RoomFailed) and "the client left" in str(waiting.error)
    assert min(reached.values()) >= 5
    world.settle()
    assert publisher.totals["rooms_failed"] == 6 * 4 + 6 and publisher.totals["rooms_committed"] == 6


def test_cancel_returns_only_when_the_pool_is_no_longer_read(worlds):
    world = worlds()
    ids, pages = world.prompt(24)
    pub = world.prefill.open(1, ids)
    until(lambda: pub.state == OPEN)
    reading, go_on, gather, read_after = threading.Event(), threading.Event(), world.prefill.source.gather, []
    returned = threading.Event()

    def slow(pages, tokens):
        reading.set()
        assert go_on.wait(WAIT)
        read_after.append(returned.is_set())
        return gather(pages, tokens)

    world.prefill.source.gather = slow
    for first in range(6):  # one copy is under way, five are queued
        world.prefill.publisher.send(pub, pages[first : first + 1], first, 4, None)
    assert reading.wait(WAIT)
    canceller = threading.Thread(target=lambda: (world.prefill.publisher.cancel(pub, "gone"), returned.set()))
    canceller.start()
    assert not returned.wait(0.1), "cancel came back while the pool was being read"
    go_on.set()
    canceller.join(WAIT)
    until(lambda: pub.state == FAILED)
    assert read_after == [False]
    world.prefill.source.gather = gather
    thread_lives(world)


def test_a_publication_that_never_ended_is_dropped_with_its_worker(worlds):
    world = worlds()
    pub = world.prefill.open(1, np.arange(24))
    waiting = world.decode.pull(1)
    until(lambda: pub.state == OPEN and waiting.state == "awaiting")
    world.prefill.close()
    until(lambda: waiting.state == "failed")
    assert isinstance(waiting.error, PeerLost) and "died before the commit" in str(waiting.error)
    until(world.tier_at_baseline)


def test_a_fault_while_copying_ends_that_request_alone(worlds):
    world = worlds()
    ids, pages = world.prompt(8)
    bad, good = world.prefill.open(1, ids), world.prefill.open(2, ids + 1)
    world.prefill.publisher.send(bad, np.array([0, 10_000]), 0, 8, None)
    world.prefill.send(good, pages)
    world.prefill.publisher.commit(good, row_of(2))
    until(lambda: bad.state == FAILED and good.state == COMMITTED)
    assert isinstance(bad.error, RoomFailed) and "internal error" in str(bad.error)
    assert world.prefill.publisher.totals["rooms_failed"] == 1
    world.decode.puller.cancel(world.decode.pull(2), "")
    thread_lives(world)


# -- the tier comes and goes --------------------------------------------------------------------------------------


def restarted(world: World, **changes) -> None:
    world.tier.stop()
    world.tier = LocalTier(world.path, **changes)
    world.decode.controls["prefill/0"] = world.tier.control


def test_a_restarted_tier_fails_what_was_not_committed_and_serves_what_comes(worlds):
    attached = []
    world = worlds(prefill=dict(on_attach=attached.append))
    ids, pages = world.prompt(20)
    opened = world.prefill.open(1, ids)
    until(lambda: opened.state == OPEN)
    committed = world.prefill.publish(2, ids, pages)
    before = world.tier.server.epoch
    restarted(world)
    until(lambda: opened.state == FAILED, "the open room fails")
    assert isinstance(opened.error, (PeerLost,)) and committed.state == COMMITTED
    until(lambda: attached, "attached again")
    assert attached[0].epoch == world.tier.server.epoch != before
    third = world.prefill.publish(3, ids, pages)
    assert third.state == COMMITTED and third.fresh.all(), "nothing of the old arena is believed"
    assert np.array_equal(in_arena(world, third), expected(world, pages, 20))
    assert world.prefill.publisher.totals["rooms_failed"] == 1 and world.prefill.publisher.totals["reattached"] == 1
    until(lambda: world.decode.pull(1).state or True)
    told = world.decode.pull(1)
    until(lambda: told.state == "failed", "readers of the lost room hear it from the new tier")
    assert isinstance(told.error, RoomFailed)


def test_a_tier_that_is_back_takes_the_next_prompt_at_once(worlds, monkeypatch):
    """What a reader lost with it is asked for again as soon as it listens, which is sooner than anybody here would look."""
    monkeypatch.setattr("prefill_node.publisher.REATTACH_SECONDS", 600.0)
    world = worlds()
    ids, pages = world.prompt(20)
    world.tier.stop()
    until(lambda: world.prefill.publisher.totals["attach_failures"], "it was looked for")
    restarted(world)
    pub = world.prefill.publish(1, ids, pages)
    assert pub.state == COMMITTED, pub.error
    assert world.prefill.publisher.totals["reattached"] == 1 and world.prefill.publisher.totals["rooms_failed"] == 0


def test_the_prompt_that_finds_the_new_tier_does_not_bring_the_lost_ones_along(worlds):
    world = worlds()
    lost = [world.prefill.open(room, np.arange(8)) for room in (1, 2)]
    until(lambda: all(pub.state == OPEN for pub in lost))
    hold = gate(world.prefill.publisher)
    restarted(world)
    found = world.prefill.open(3, np.arange(8))
    hold.set()
    until(lambda: found.state != OPENING)
    assert found.state == OPEN and found.fresh.all(), found.error
    assert all(pub.state == FAILED and isinstance(pub.error, PeerLost) for pub in lost)
    assert set(world.prefill.publisher.live) == {found}
    world.prefill.publisher.cancel(found, "")
    thread_lives(world)


def test_requests_that_keep_coming_do_not_keep_it_from_attaching_again(worlds):
    world = worlds()
    world.tier.stop()
    refused = []

    def try_one():
        pub = world.prefill.open(1000 + len(refused), np.arange(8))
        until(lambda: pub.state != OPENING)
        refused.append(pub)
        return pub.state == OPEN

    for _ in range(3):
        assert not try_one() and isinstance(refused[-1].error, PeerLost)
    world.tier = LocalTier(world.path)
    until(try_one, "attached while requests came every few milliseconds", 5)
    thread_lives(world)


def test_a_tier_that_dies_while_a_failure_is_reported(worlds):
    """Whatever fails first, then the tier is gone when the room is to be given up: the thread must go on."""
    world = worlds()
    pub = world.prefill.open(1, np.arange(8))
    until(lambda: pub.state == OPEN)
    hold = gate(world.prefill.publisher)
    world.prefill.publisher.send(pub, np.array([10_000]), 0, 4, None)
    world.tier.stop()
    hold.set()
    until(lambda: pub.state == FAILED)
    world.tier = LocalTier(world.path)
    until(lambda: world.prefill.publisher.totals["reattached"], "attached again")
    assert world.prefill.publisher.totals["rooms_failed"] == 1
    thread_lives(world)


def test_a_tier_that_now_serves_another_layout_is_refused_until_it_is_free_again(worlds):
    world = worlds()
    world.tier.stop()
    world.tier = LocalTier(world.path)
    other = Prefill(world.path, layout=small_layout(head_dim=8, summary_bytes=12))
    try:
        until(lambda: world.prefill.publisher.totals["attach_failures"], "refused")
        pub = world.prefill.open(1, np.arange(8))
        until(lambda: pub.state == FAILED)
        assert isinstance(pub.error, (LayoutMismatch, TransportError))
    finally:
        other.close()
    until(lambda: world.prefill.publisher.totals["reattached"], "the other worker left")
    thread_lives(world)


def test_a_stopped_tier_is_given_up_after_the_deadline(worlds):
    world = worlds(prefill=dict(timeout=0.3))
    pub = world.prefill.open(1, np.arange(8))
    until(lambda: pub.state == OPEN)
    resume = world.tier.pause()
    late = world.prefill.open(2, np.arange(8))
    until(lambda: late.state == FAILED and pub.state == FAILED)
    assert late.error.code == "DeadlineExceeded" and late.error.limit == "0.3 s"
    resume.set()
    until(lambda: world.prefill.publisher.totals["reattached"], "attached again")
    until(world.tier_at_baseline, "what the old connection left is gone")
    thread_lives(world)


def test_bf16_bytes_are_kept(worlds):
    layout = small_layout(dtype="bfloat16", itemsize=2)
    world = worlds(tier=dict(layout=layout), prefill=dict(layout=layout), decode=dict(layout=layout))
    source, sink = world.prefill.pool, world.decode.pool
    for pool, node in ((source, world.prefill.source), (sink, world.decode.sink)):
        pool.k, pool.v = ([b.bfloat16() for b in side] for side in (pool.k, pool.v))
        node.__init__(pool.k, pool.v, layout)
    ids, pages = world.prompt(18)
    assert world.prefill.publish(1, ids, pages).state == COMMITTED
    target = np.array([9, 3, 40, 7, 8])
    assert world.pull_into(1, target).state == "done"
    for a, b in zip((*source.k, *source.v), (*sink.k, *sink.v)):
        assert torch.equal(a.view(-1, 4, 3, 4)[pages[:4]], b.view(-1, 4, 3, 4)[target[:4]])
        assert torch.equal(a.view(-1, 4, 3, 4)[pages[4], :2], b.view(-1, 4, 3, 4)[target[4], :2])
        assert not b.view(-1, 4, 3, 4)[target[4], 2:].any(), "zeroed past the prompt"
