"""Placement: which memory node a prompt goes to, and what a change of the list moves."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter

import pytest

from transport.errors import ConfigError
from transport.memory_nodes import PROBE_SECONDS, MemoryNodes, placement_key, resolve

KEYS = [hashlib.sha256(n.to_bytes(4, "little")).digest() for n in range(3000)]


def addresses(n: int) -> list[str]:
    return [f"tcp://10.0.0.{i}:7000" for i in range(1, n + 1)]


def nodes(n: int, **more) -> MemoryNodes:
    return MemoryNodes(",".join(addresses(n)), **more)


def test_keys_spread_evenly():
    four = nodes(4)
    counts = Counter(four.order(key)[0] for key in KEYS)
    assert set(counts) == set(addresses(4)) and min(counts.values()) > 650
    assert all(sorted(four.order(key)) == addresses(4) for key in KEYS[:50])


def test_the_order_is_that_of_the_documented_hash_whatever_the_order_of_the_list():
    forward, backward = nodes(3), MemoryNodes(",".join(reversed(addresses(3))))
    for key in KEYS[:200]:
        expected = sorted(addresses(3), key=lambda a: int.from_bytes(hashlib.sha256(key + a.encode()).digest(), "big"), reverse=True)
        assert forward.order(key) == backward.order(key) == expected


def test_a_node_that_comes_moves_keys_to_itself_alone_and_one_that_goes_only_its_own():
    three, four = nodes(3), nodes(4)
    for key in KEYS:
        before, after = three.order(key), four.order(key)
        assert after[0] in (before[0], addresses(4)[3])
        assert [a for a in after if a in before] == before
    moved = sum(three.order(key)[0] != four.order(key)[0] for key in KEYS)
    assert 600 < moved < 900, "a quarter"


def test_a_node_that_is_down_is_passed_over_until_it_answers():
    now = [100.0]
    two = nodes(2, clock=lambda: now[0])
    key = next(k for k in KEYS if two.order(k)[0] == addresses(2)[0])
    two.mark_down(addresses(2)[0])
    assert two.order(key) == addresses(2)[1:] and two.is_down(addresses(2)[0]) and two.due() == []
    now[0] += PROBE_SECONDS
    assert two.due() == [addresses(2)[0]] and two.due() == [], "asked once each time"
    assert two.order(key) == addresses(2)[1:], "time alone does not bring it back"
    two.mark_up(addresses(2)[0])
    now[0] += PROBE_SECONDS
    assert two.order(key) == addresses(2) and two.due() == []


@pytest.mark.parametrize("pages, block, at", [(1, 16, 0), (15, 16, 14), (16, 16, 15), (400, 16, 15), (400, 32, 7), (400, 64, 3), (3, 512, 0)])
def test_the_page_that_ends_at_256_tokens_decides(pages, block, at):
    hashes = [bytes([n % 256, n // 256]) * 16 for n in range(pages)]
    assert placement_key(hashes, 1, block) == hashes[at]


def test_prompts_without_hashes_spread_by_their_room():
    four = nodes(4)
    counts = Counter(four.order(placement_key([], room, 16))[0] for room in range(-400, 400))
    assert min(counts.values()) > 140
    assert placement_key([], (1 << 63) - 1, 16) != placement_key([], -(1 << 63), 16)


@pytest.mark.parametrize("spec", ["", "10.0.0.1:7000", "tcp://a", "tcp://a:0", "tcp://:7000", "tcp://a:7000,tcp://a:7000", "tcp://a:7000,dns://b:7000",
                                  "dns://a", "dns://a:x", "dns://a:70000", "dns://a:1,dns://b:1"])
def test_what_is_no_list_is_refused_by_the_options_name(spec):
    with pytest.raises(ConfigError, match="--memory-nodes"):
        MemoryNodes(spec)


def test_spaces_in_a_list_do_not_matter():
    assert MemoryNodes(" tcp://a:1 , tcp://b:2,").addresses == ("tcp://a:1", "tcp://b:2")


class Names:
    """A resolver whose answers are the test's."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    async def __call__(self, host: str, port: int):
        self.asked.append((host, port))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return tuple(answer)


def test_a_names_addresses_replace_each_other_and_only_their_keys_move():
    names = Names(addresses(3), addresses(4), OSError("no such name"), [], addresses(4)[1:])
    found = MemoryNodes("dns://kv.default.svc:7000", resolve=names)
    assert found.addresses == () and found.order(KEYS[0]) == []
    homes = []
    for count in (3, 4, 4, 4, 3):
        asyncio.run(found.refresh())
        assert len(found.addresses) == count
        homes.append([found.order(key)[0] for key in KEYS])
    assert names.asked == [("kv.default.svc", 7000)] * 5
    assert homes[1] == homes[2] == homes[3], "a failure, and an answer without addresses, keep the last list"
    first, fourth = addresses(4)[0], addresses(4)[3]
    assert all(after in (before, fourth) for before, after in zip(homes[0], homes[1], strict=True))
    assert all(after == before or before == first for before, after in zip(homes[3], homes[4], strict=True))
    assert homes[0] != homes[1] and homes[3] != homes[4]


def test_a_node_that_left_the_name_is_forgotten_also_as_down():
    names = Names(addresses(2), addresses(1), addresses(2))
    found = MemoryNodes("dns://kv:7000", resolve=names)
    asyncio.run(found.refresh())
    found.mark_down(addresses(2)[1])
    asyncio.run(found.refresh())
    assert not found.is_down(addresses(2)[1])
    asyncio.run(found.refresh())
    assert sorted(found.order(KEYS[0])) == addresses(2)


def test_resolving_this_host():
    found = asyncio.run(resolve("localhost", 7000))
    assert set(found) <= {"tcp://127.0.0.1:7000", "tcp://[::1]:7000"} and found
    with pytest.raises(OSError):
        asyncio.run(resolve("no-such-host.invalid", 7000))
